"""`python -m zoo devices`."""

from __future__ import annotations

import json

import pytest

from engine import DeviceError, get_device, runtime
from engine.ir import Target
from engine.recipes import switched_on
from engine.runtime import Found
from zoo import devices
from zoo.__main__ import main


@pytest.fixture
def only(monkeypatch) -> dict:
    """Backends of this test's own: their lists, or why there is none."""
    there = {
        "cuda": DeviceError("no CUDA device:\ninstall a driver"),
        "reference": [Found("reference", "NumPy", "NumPy 2", 0)],
    }

    def listed(backend: str) -> list[Found]:
        if isinstance(there[backend], DeviceError):
            raise there[backend]
        return there[backend]

    monkeypatch.setattr(devices, "list_devices", listed)
    monkeypatch.setattr(devices, "BACKENDS", there)
    return there


def test_what_is_there_and_why_the_rest_is_not(only, capsys):
    assert main(["devices"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "reference  NumPy"
    assert "cuda  none: no CUDA device: install a driver" in lines
    assert lines[-1].startswith("default: ")


def test_a_device_that_does_not_open_is_told(only, capsys, monkeypatch):
    only["cuda"] = [Found("cuda:0", "Old card", "CUDA 9.0", 3 << 30)]

    def refuse(which: str):
        raise DeviceError("Old card can't be used")

    monkeypatch.setitem(runtime.BACKENDS, "cuda", refuse)
    assert main(["devices", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["absent"] == {}
    card = found["devices"][0]
    assert (card["title"], card["memory"]) == ("Old card", 3 << 30)
    assert card["absent"] == "Old card can't be used"


def test_every_device_opens_under_the_name_that_it_is_listed_by(device):
    for found in runtime.list_devices(device):
        assert get_device(found.name).name == found.name


def test_self_test_tells_answers_and_rates(only, capsys, monkeypatch):
    monkeypatch.setattr(devices, "SECONDS", 0.01)
    assert main(["devices", "--test", "reference", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["devices"]
    test = found["test"]
    assert [test[name]["right"] for name in ("product", "softmax", "sum")] == [True] * 3
    for name, unit in (
        ("copy", "GB/s"),
        ("product in float32", "TFLOP/s"),
        ("product by bf16 weights", "TFLOP/s"),
    ):
        assert test[name]["unit"] == unit and test[name]["rate"] > 0


def test_a_wrong_answer_is_told_and_fails(only, capsys, monkeypatch):
    monkeypatch.setattr(devices, "SECONDS", 0.01)
    monkeypatch.setattr(devices.F, "softmax", lambda x: x)
    assert main(["devices", "--test", "reference"]) == 1
    assert "softmax                 WRONG (off by " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [("tpu", 2, "no device 'tpu'; there are "), ("cuda", 1, "no CUDA device: install a driver")],
)
def test_a_device_that_is_not_there_ends_the_command(only, capsys, name, code, says):
    assert main(["devices", "--test", name]) == code
    said = capsys.readouterr()
    assert says in said.err and said.err.count("\n") == 1 and not said.out


def test_rates_are_told_as_parts_of_the_peak():
    assert devices._shown({"rate": 0.5, "unit": "TFLOP/s", "peak": 2.0}) == "0.5 TFLOP/s, 25% of 2"
    assert devices._shown({"rate": 123.456, "unit": "GB/s"}) == "123.5 GB/s"


def test_recipes_follow_from_what_a_target_has():
    plain = Target("opencl-gpu", False, 1, 8)
    assert switched_on(plain) == ()
    gpu = Target("cuda", False, 1, 8, frozenset({"sm_80"}), 128)
    assert switched_on(gpu) == ("teams", "staged products", "tensor cores")
    cpu = Target("opencl-cpu", True, 16, 8, frozenset({"avx512f", "f16c", "avx512_vnni"}))
    assert {"packed panels", "vnni"} <= set(switched_on(cpu)) and "amx" not in switched_on(cpu)
