"""`bench kernels` times only sides whose results are right, and says why others are left out."""

from __future__ import annotations

import argparse
import json

import pytest

from bench import kernels
from bench.__main__ import main
from bench.kernels_cases import BF16, CASES, F32, NUMPY

CASE = "norm/rmsnorm-f32"  # small enough for NumPy, with torch f32 and numpy as peers


@pytest.fixture(autouse=True)
def fake_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.measure.SETTLE_S", 0)
    monkeypatch.setattr(kernels, "LIMITS", "tests.bench.fake_kernels:Rates")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    for name, us in ((kernels.OURS, 2.0), (F32, 6.0), (BF16, 6.0), (NUMPY, 8.0)):
        replace(monkeypatch, name, "Quick", us=us)


def replace(monkeypatch: pytest.MonkeyPatch, name: str, side: str, **options: float) -> None:
    monkeypatch.setitem(kernels.SIDES, name, (f"tests.bench.fake_kernels:{side}", options))


def measured(*more: str, only: str = CASE) -> dict:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", action="store_true")
    kernels.add_arguments(parser)
    return kernels.run(parser.parse_args(["--only", only, "--rounds", "2", *more]))


def test_report_has_times_ratios_limits_and_means() -> None:
    report = measured("--peers")
    (record,) = report["cases"]
    assert list(record["sides"]) == [kernels.OURS, F32, NUMPY]
    assert record["ratios"][F32]["median"] == 3  # the peer's time over ours
    assert report["geometric_means"] == {"norm": {F32: 3, NUMPY: 4}}
    assert record["rounds"] == 2 and record["skipped"] == {} and report["wrong"] == []
    # 1024 x 1024 floats in, as many out, and 1024 weights, at 1e15 bytes/s
    assert record["limit_us"] == pytest.approx((2 * 2**20 + 2**10) * 4 / 1e15 * 1e6, rel=1e-3)
    assert record["of_limit"] == pytest.approx(record["limit_us"] / 2, abs=1e-3)
    assert "\n" not in kernels.to_json(report)
    assert json.loads(kernels.to_json(report)) == report


def test_text_shows_each_side_and_ends_with_the_means() -> None:
    lines = kernels.text(measured("--peers")).splitlines()
    (header,) = (line for line in lines if line.startswith("norm "))
    assert header.split("  ")[0] == "norm" and F32 in header and NUMPY in header
    (row,) = (line for line in lines if "rmsnorm-f32" in line)
    assert "2 us" in row and "6 us" in row and "3.00 (3.00 … 3.00)" in row
    assert any("agreement within 2e-05: float32" in line for line in lines)
    assert lines[-1] == "geometric means of the ratios: norm torch f32 3.00, numpy 4.00"


def test_without_peers_only_ours_is_timed() -> None:
    report = measured()
    (record,) = report["cases"]
    assert list(record["sides"]) == [kernels.OURS]
    assert record["ratios"] == {} and report["geometric_means"] == {}


@pytest.mark.parametrize("side", ["Wrong", "NotANumber"])
def test_result_of_ours_that_differs_is_not_timed_and_is_told(
    monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    replace(monkeypatch, kernels.OURS, side)
    report = measured("--peers")
    (record,) = report["cases"]
    assert record["sides"] == {} and report["wrong"] == [CASE]
    assert "WRONG, off by" in kernels.text(report)


def test_peer_that_differs_is_left_out_and_the_others_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replace(monkeypatch, F32, "Wrong")
    report = measured("--peers")
    (record,) = report["cases"]
    assert list(record["sides"]) == [kernels.OURS, NUMPY]
    assert record["skipped"] == {F32: "off by 0.5, more than 2e-05"}
    assert report["wrong"] == []  # ours is right


def test_case_that_ours_cannot_do_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    replace(monkeypatch, kernels.OURS, "Incapable")
    report = measured("--peers")
    assert report["wrong"] == [] and report["cases"][0]["sides"] == {}
    expected = "not supported yet: AttributeError: no such function"
    assert f"rmsnorm-f32, {kernels.OURS}: skipped, {expected}" in kernels.text(report)


def test_side_that_takes_too_long_is_ended_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    replace(monkeypatch, F32, "Slow")
    (record,) = measured("--peers", "--seconds", "5")["cases"]
    assert record["skipped"] == {F32: "prepare takes more than 5 s"}
    assert list(record["sides"]) == [kernels.OURS, NUMPY]


def test_side_that_fails_in_a_round_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    replace(monkeypatch, F32, "Crashing")
    report = measured("--peers", only="norm/rmsnorm-*")
    failed, other = report["cases"]
    assert failed["sides"] == {} and failed["skipped"] == {F32: "MemoryError: gone"}
    assert list(other["sides"]) == [kernels.OURS, BF16]


def test_missing_torch_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    report = measured("--peers")
    assert report["skipped"][F32] == "not installed: torch"
    assert list(report["cases"][0]["sides"]) == [kernels.OURS, NUMPY]


def test_cases_are_chosen_by_a_part_of_their_name_or_by_a_pattern() -> None:
    assert {c.family for c in kernels.matching("gemm")} == {"gemm"}
    assert all("-b2" in c.name for c in kernels.matching("*-b2"))
    assert kernels.matching("*") == CASES
    with pytest.raises(argparse.ArgumentTypeError, match="no case is like 'gamv'; there are gemm"):
        kernels.matching("gamv")


def test_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["kernels", "--only", CASE, "--rounds", "1", "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["subject"] == "kernels"
    replace(monkeypatch, kernels.OURS, "Wrong")
    assert main(command) == 1
    with pytest.raises(SystemExit) as ended:
        main(["kernels", "--only", "gamv"])
    assert ended.value.code == 2
