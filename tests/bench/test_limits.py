"""Limits are measured on a CPU only, and a case is held to the one that bounds it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bench import limits
from bench.kernels_cases import CASES
from engine import DeviceError
from engine.runtime import limits as runtime

BY_NAME = {case.name: case for case in CASES}
RATES = {
    "float32 GFLOP/s": 100,
    "bfloat16 GFLOP/s": 1000,
    "L2 GB/s": 100,
    "64 MB GB/s": 10,
    "1 GB GB/s": 1,
}


@pytest.fixture(autouse=True)
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "l2_bytes", lambda: 2 << 20)
    monkeypatch.setattr(limits, "usable_cores", lambda: 1)


def test_product_is_bound_by_operations_of_its_type() -> None:
    for name, rate, what in (("f32", 100, "float32"), ("bf16", 1000, "bfloat16")):
        us, which = limits.roofline(RATES, BY_NAME[f"gemm/{name}-2048"])
        assert which == what
        assert us == pytest.approx(2 * 2048**3 / (rate * 1e9) * 1e6)


def test_halves_without_instructions_of_their_own_are_held_to_float32() -> None:
    rates = {k: v for k, v in RATES.items() if k != "bfloat16 GFLOP/s"}
    assert limits.roofline(rates, BY_NAME["gemm/bf16-2048"])[1] == "float32"


@pytest.mark.parametrize(
    ("name", "place"),
    [("gemv/q4_1-576x576", "L2"), ("gemv/q8_0-576x49152", "64 MB")],
)
def test_gemv_is_bound_by_the_memory_that_it_fits_into(name: str, place: str) -> None:
    case = BY_NAME[name]
    us, which = limits.roofline(RATES, case)
    assert which == f"reading from {place}"
    assert us == pytest.approx(case.nbytes / (RATES[f"{place} GB/s"] * 1e9) * 1e6)


def test_unknown_limits_bound_nothing() -> None:
    assert limits.roofline({}, CASES[0]) is None


def test_gpu_has_no_limits_here() -> None:
    side = runtime.Limits()
    side.device = SimpleNamespace(target=SimpleNamespace(is_cpu=False))
    assert side.measure() == {}
    side.load(1, device="reference")
    assert side.measure() == {}


def test_probes_run_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "SECONDS", 1e-4)
    monkeypatch.setattr(runtime, "SIZES", {"64 MB": 1 << 20, "1 GB": 2 << 20})
    side = runtime.Limits()
    try:
        side.load(1)
    except DeviceError as error:
        pytest.skip(str(error))
    found = side.measure()
    if not side.device.target.is_cpu:
        pytest.skip("no CPU device")
    assert {"float32 GFLOP/s", "L2 GB/s", "64 MB GB/s", "1 GB GB/s"} <= found.keys()
    assert ("bfloat16 GFLOP/s" in found) == ("amx_bf16" in side.device.target.features)
    assert all(value > 0 for value in found.values())
