"""A few inputs of the fuzzer for each parser; `python -m tests.weights.fuzz` runs more."""

from __future__ import annotations

import pytest

from tests.weights.fuzz import PARSERS, fuzz


@pytest.mark.parametrize("name", PARSERS)
def test_damaged_file_opens_or_is_refused(name, tmp_path):
    counts = fuzz(name, 300, 0, tmp_path)
    assert set(counts) <= {"opened", "refused"}
    assert counts["refused"] > 100  # so the inputs do reach what they are meant for


@pytest.mark.parametrize("name", PARSERS)
def test_seed_opens(name, tmp_path):
    for raw in PARSERS[name].seeds():
        PARSERS[name].open(raw, tmp_path / "input")


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_many_damaged_files(name, tmp_path):
    assert set(fuzz(name, 50_000, 1, tmp_path)) <= {"opened", "refused"}
