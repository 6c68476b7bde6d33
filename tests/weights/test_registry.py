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
        assert model.sources and model.licence and model.description and model.size > 0
        assert not any("/" in name for name in (model.name, *model.aliases))


def test_files_of_wheels_have_plain_names_and_hashes():
    wheels = [s for m in registry.MODELS for s in m.sources if isinstance(s, registry.Wheels)]
    assert wheels
    for source in wheels:
        assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", name) for name in source.requirements)
        for file in source.files:
            assert re.fullmatch("[0-9a-f]{64}", file.sha256) and file.size > 0 and file.members
            assert Path(file.name).name == file.name


def test_the_promised_models_are_there():
    promised = "smollm2-135m-instruct smollm2-360m-instruct smollm2-1.7b-instruct "
    promised += "tinyllama-1.1b-chat llama-3.2-1b-instruct llama-3.2-3b-instruct "
    promised += "mistral-7b-instruct emoji sd1.5 sd2.1 sd-turbo sdxl "
    sizes = "tiny tiny.en base base.en small small.en medium medium.en "
    sizes += "large-v1 large-v2 large-v3 large-v3-turbo"
    for name in promised.split() + sizes.split() + [f"whisper-{size}" for size in sizes.split()]:
        assert registry.find(name)
    assert registry.find("llama-3.2-1b").gated and not registry.find("smollm2").gated


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("org/repo", ()),
        ("Org-1/repo_2.5", ()),
        ("org/repo/a.Q4_0.gguf", ("a.Q4_0.gguf",)),
        ("org/repo/sub/a-00001-of-00002.gguf", ("sub/a-00001-of-00002.gguf",)),
    ],
)
def test_hub_names(name, files):
    model = registry.from_hub(name)
    assert model.sources == (registry.Hub("/".join(name.split("/")[:2]), files),)
    assert model.folder.parent == user_cache() / "hub"


@pytest.mark.parametrize(
    "name",
    ["smollm2", "/org/repo", "org/", "org//repo", "org/../repo", "a/b/c", "a/b/../c.gguf", "./a/b",
     "~/a", "org/repo/x.txt", "org/re po", "org\\repo", "a--b/c", "org/repo/", "https://x/y"],
)  # fmt: skip
def test_what_is_no_hub_name(name):
    assert registry.from_hub(name) is None


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


@pytest.mark.parametrize(
    "path",
    ["./smollm2", "/models/x", "models/x.gguf", "model.gguf", "a/b/c", "~/none", Path("smollm2")],
)
def test_what_is_spelled_like_a_path_is_never_fetched(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(WeightError, match="no such file or folder"):
        resolve(path)


def test_hub_name_is_a_path_where_its_first_part_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    with pytest.raises(WeightError, match="^models/x: no such file or folder$"):
        resolve("models/x")


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
