"""`bench sd` compares only sides whose pictures agree; its random model has the real sizes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

import numpy as np
import pytest

from bench import sd, sd_weights
from bench.measure import SideError, Worker
from weights import load

PAINTING = "tests.bench.fake_side:Painting"


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    started = [
        Worker(sd.OURS, PAINTING, 1),
        Worker("torch bf16", PAINTING, 1, colour=1.05),
        Worker("torch f32", PAINTING, 1, colour=1.01),
    ]
    yield started
    for worker in started:
        worker.close()


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    monkeypatch.setattr("bench.measure.SETTLE_S", 0)
    parser = argparse.ArgumentParser()
    sd.add_arguments(parser)
    return parser.parse_args(["--rounds", "2"])


def test_report_has_figures_speedups_and_reasons(
    workers: list[Worker], arguments: argparse.Namespace
) -> None:
    report = sd._measure(workers, {"other": "not installed: x"}, arguments, "a/model")
    assert set(report["speedup"]) == {"torch bf16", "torch f32"}
    assert report["sides"]["torch bf16"]["apart"]["unet"] == pytest.approx(0.05, abs=1e-3)
    assert report["sides"][sd.OURS]["apart"] == {"unet": 0.0, "vae": 0.0}
    assert not report["wrong"]
    assert json.loads(sd.to_json(report))["skipped"] == {"other": "not installed: x"}
    assert "other: skipped, not installed: x" in sd.text(report)
    assert "so many times as fast as torch bf16" in sd.text(report)


def test_too_much_memory_is_wrong(workers: list[Worker], arguments: argparse.Namespace) -> None:
    greedy = Worker(sd.OURS, PAINTING, 1, colour=6.0)
    report = sd._measure([greedy], {}, arguments, "a/model")
    greedy.close()
    assert report["wrong"] and report["wrong"][0] in sd.text(report)


def test_sides_that_disagree_stop_the_comparison(workers: list[Worker]) -> None:
    for wrong in (1.2, float("nan")):
        other = Worker("torch bf16", PAINTING, 1, colour=wrong)
        with pytest.raises(SideError, match="results differ from ours"):
            sd._check([workers[0], other], {})
        other.close()


def test_random_models_have_the_sizes_of_the_published_ones(tmp_path, monkeypatch) -> None:
    """Parameters in millions: UNet, autoencoder and text encoders together."""
    counts = {
        version: sum(int(np.prod(shape)) for shape in sd_weights.shapes(version).values())
        for version in sd_weights.UNETS
    }
    assert {k: round(v / 1e6) for k, v in counts.items()} == {"1": 1066, "2": 1304, "xl": 3469}
    shapes = {"a.weight": (3, 5), "norm.weight": (4000,), "b.bias": (4000,)}
    monkeypatch.setattr(sd_weights, "shapes", lambda version: shapes)
    made = load(sd_weights.random_file("1", tmp_path), "reference")
    arrays = {name: made[name].numpy() for name in shapes}
    assert arrays["a.weight"].shape == (3, 5) and arrays["a.weight"].dtype == np.float16
    assert arrays["norm.weight"].mean() == pytest.approx(1, abs=0.01)
    assert arrays["b.bias"].std() == pytest.approx(0.05, abs=0.005)
