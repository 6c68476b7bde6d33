"""Names, aliases, paths and the cache folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.runtime.host import user_cache
from weights import WeightError, registry, resolve


def test_entries_are_complete_and_names_unique():
    names = [name for m in registry.MODELS for name in (m.name, *m.aliases)]
    assert len(names) == len(set(names)) and all(name == name.lower() for name in names)
    for model in registry.MODELS:
        assert re.fullmatch("[0-9a-f]{64}", model.sha256) and model.size > 0
        assert model.sources and model.licence and model.description
        assert Path(model.file).name == model.file


def test_alias_and_case_find_the_same_entry():
    model = registry.find("SmolLM2")
    assert model is registry.find("smollm2-135m-instruct")
    assert (model.size, model.licence) == (98_362_432, "Apache-2.0")


def test_unknown_name_lists_close_ones():
    with pytest.raises(WeightError) as caught:
        resolve("smolm2")
    line = str(caught.value)
    assert "no model is called 'smolm2'" in line and "did you mean smollm2" in line
    assert "\n" not in line and "python -m weights list" in line


def test_existing_path_bypasses_the_registry(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("smollm2").mkdir()
    assert resolve("smollm2") == Path("smollm2")
    assert resolve(tmp_path / "smollm2") == tmp_path / "smollm2"


@pytest.mark.parametrize("path", ["./smollm2", "models/x", "model.gguf", "~/none", Path("smollm2")])
def test_what_is_spelled_like_a_path_is_never_fetched(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(WeightError, match="no such file or folder"):
        resolve(path)


def test_cache_folder_follows_zoo_cache_then_the_system(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ZOO_CACHE", "~/models")
    assert user_cache() == tmp_path / "models"
    monkeypatch.delenv("ZOO_CACHE")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert user_cache() == tmp_path / "x" / "menagerie"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache() == tmp_path / ".cache" / "menagerie"
    monkeypatch.setattr("sys.platform", "darwin")
    assert user_cache() == tmp_path / "Library" / "Caches" / "menagerie"
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "Local"))
    assert user_cache() == tmp_path / "Local" / "menagerie"
