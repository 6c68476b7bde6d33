"""`bench llama` compares only sides that agree, and names those it leaves out."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

import pytest

from bench import llama
from bench.__main__ import main
from bench.measure import SideError, Worker, start_peers

COUNTING = "tests.bench.fake_side:Counting"


@pytest.fixture
def workers() -> Iterator[dict[str, Worker]]:
    started = {
        llama.OURS: Worker(llama.OURS, COUNTING, 1, path="x"),
        "transformers f32": Worker("transformers f32", COUNTING, 1, path="x"),
        "transformers bf16": Worker("transformers bf16", COUNTING, 1, path="x", step_by=2),
    }
    yield started
    for worker in started.values():
        worker.close()


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    monkeypatch.setattr("bench.measure.SETTLE_S", 0)
    parser = argparse.ArgumentParser()
    llama.add_arguments(parser)
    return parser.parse_args(["--rounds", "2", "--prompt-tokens", "8", "--gen-tokens", "4"])


def test_report_has_figures_ratios_and_reasons(
    workers: dict[str, Worker], arguments: argparse.Namespace
) -> None:
    skipped = {"llama.cpp": "not installed: llama_cpp"}
    report = llama._measure(list(workers.values()), skipped, arguments)
    assert set(report["sides"]) == set(workers)
    assert set(report["ratios"]) == set(workers) - {llama.OURS}
    assert report["sides"]["transformers f32"]["tokens_that_agree"] == llama.AGREED
    assert report["sides"]["transformers bf16"]["tokens_that_agree"] == 0
    for side in report["sides"].values():
        assert side["decode_tokens_per_s"]["low"] <= side["decode_tokens_per_s"]["median"]
    assert "\n" not in llama.to_json(report)
    assert json.loads(llama.to_json(report))["skipped"] == skipped
    assert "llama.cpp: skipped, not installed: llama_cpp" in llama.text(report)


def test_float32_peer_that_disagrees_stops_the_comparison(workers: dict[str, Worker]) -> None:
    wrong = workers["transformers bf16"]
    wrong.name = "transformers f32"
    with pytest.raises(SideError, match="greedy tokens differ"):
        llama._check([workers[llama.OURS], wrong], {}, [1])


def test_peer_that_crashes_is_skipped_with_a_reason(workers: dict[str, Worker]) -> None:
    sides = [workers[llama.OURS], workers["transformers bf16"]]
    with pytest.raises(SideError):
        sides[1].call("crash")
    skipped: dict[str, str] = {}
    llama._check(sides, skipped, [1])
    assert [w.name for w in sides] == [llama.OURS]
    assert "ended with 7" in skipped["transformers bf16"]


def test_missing_peers_are_named_with_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    skipped = start_peers([], llama.PEERS, 1, path="x")
    assert set(skipped) == {peer.name for peer in llama.PEERS}
    assert skipped["transformers f32"] == "not installed: torch, transformers, gguf"


def test_common_prefix() -> None:
    assert llama.common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert llama.common_prefix([1, 2], [1, 2, 4]) == 2
    assert llama.common_prefix([], [1]) == 0


def test_unknown_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["llama", "--model", "no-such-model"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "no-such-model" in err and err.count("\n") == 1
