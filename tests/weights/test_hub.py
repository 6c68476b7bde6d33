"""Fetching from a hub: each command runs as a user's does, against a local server."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.weights.serving import COMMIT, Site, publish, serve
from tests.weights.test_download import CONTENT, model, wheel
from weights.registry import Hub, Model

ROOT = Path(__file__).parents[2]
REPO = "org/repo"
LONG = bytes(range(256)) * (4 << 12)  # 4 MiB
FILES = {
    "README.md": b"a toy",
    "config.json": b'{"model_type": "toy"}',
    "tokenizer.json": b"{}",
    "model.safetensors": LONG,
}


@dataclass
class User:
    """A user with an own cache, whose hub is `site` and whose large files come from `cdn`."""

    site: Site
    cdn: Site
    cache: Path
    env: dict[str, str]

    def start(self, name: str, entry: Model | None = None) -> subprocess.Popen:
        known = f"r.MODELS = ({entry!r},)\n" if entry else ""
        code = (
            "import sys, weights.registry as r; from weights.registry import *\n"
            f"{known}from weights.__main__ import main; sys.exit(main(['fetch', {name!r}]))"
        )
        pipe, command = subprocess.PIPE, [sys.executable, "-c", code]
        return subprocess.Popen(
            command, cwd=ROOT, env=self.env, stdout=pipe, stderr=pipe, text=True
        )

    def fetch(self, name: str = REPO, entry: Model | None = None) -> Path:
        process = self.start(name, entry)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        return Path(out.removesuffix("\n"))

    def fails(self, name: str = REPO, entry: Model | None = None) -> str:
        """The one line of a fetch that fails."""
        process = self.start(name, entry)
        out, err = process.communicate(timeout=60)
        line = err.replace("\r", "\n").splitlines()[-1]
        assert process.returncode == 1 and out == "" and "Traceback" not in err, err
        assert line.startswith(f"python -m weights fetch: {name} can't be fetched: "), err
        assert not any(self.cache.rglob(".fetched.json"))
        return line

    @property
    def part(self) -> Path | None:
        return next(self.cache.rglob("*.part"), None)


def page(name: str) -> str:
    return f"/{REPO}/resolve/{COMMIT}/{name}"


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


LARGE = f"/{sha(LONG)}"  # where the CDN has it


@pytest.fixture
def user(tmp_path):
    hidden = ("PIP_", "HF_", "HUGGING", "TRANSFORMERS_")
    env = {n: v for n, v in os.environ.items() if not n.upper().startswith(hidden)}
    with serve() as site, serve() as cdn:
        publish(site, REPO, FILES, cdn)
        env |= {"HF_ENDPOINT": site.url, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": "hf_secret"}
        env |= {"ZOO_CACHE": str(tmp_path / "cache"), "NO_PROXY": "127.0.0.1"}
        env |= {"HF_HUB_DOWNLOAD_TIMEOUT": "1", "HF_HUB_ETAG_TIMEOUT": "1"}  # seconds
        env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels")}
        yield User(site, cdn, tmp_path / "cache", env)


def test_repository_becomes_a_folder_of_what_the_model_needs(user):
    path = user.fetch()
    assert path == user.cache / "hub" / "org--repo"
    found = {p.name: p.read_bytes() for p in path.iterdir() if p.name != ".fetched.json"}
    assert found == {name: body for name, body in FILES.items() if name != "README.md"}
    assert list((user.cache / "partial").iterdir()) == []
    user.site.requests.clear()
    assert user.fetch() == path and user.site.requests == []  # needs no network any more


def test_token_goes_to_the_hub_and_not_to_where_it_redirects(user):
    user.fetch()
    assert {token for _, token in user.site.tokens} == {"Bearer hf_secret"}
    assert user.cdn.gets(LARGE) == [None] and user.cdn.tokens == []


def test_size_and_licence_are_told_before_the_download(user):
    process = user.start(REPO)
    _, err = process.communicate(timeout=60)
    assert "fetching org/repo (4.2 MB in 3 files, licence mit) from the hub repository" in err


def test_one_file_of_a_repository(user):
    publish(user.site, REPO, {"a.gguf": b"GGUF a", "sub/b.gguf": b"GGUF b"}, user.cdn)
    line = user.fails()
    assert "2 GGUF files: a.gguf, sub/b.gguf; name the one you want" in line
    path = user.fetch(f"{REPO}/sub/b.gguf")
    assert path == user.cache / "hub" / "org--repo--sub--b.gguf" / "sub" / "b.gguf"
    assert path.read_bytes() == b"GGUF b"


def test_registry_entry_takes_its_own_files_and_revision(user):
    publish(user.site, REPO, FILES, user.cdn, revision="v2")
    entry = model(Hub(REPO, ("config.json", "*.safetensors"), "v2"))
    path = user.fetch("toy", entry)
    assert path == user.cache / "toy"
    assert {p.name for p in path.iterdir()} == {".fetched.json", "config.json", "model.safetensors"}
    note = json.loads((path / ".fetched.json").read_text())
    assert note["revision"] == COMMIT and note["files"]["model.safetensors"]["sha256"] == sha(LONG)


def test_download_that_breaks_off_goes_on_where_it_was(user):
    user.cdn.break_after[LARGE] = 1 << 20
    assert (user.fetch() / "model.safetensors").read_bytes() == LONG
    first, second = user.cdn.gets(LARGE)
    assert first is None and second == f"bytes={1 << 20}-"


def test_server_that_cannot_resume_sends_it_all_again(user):
    user.cdn.break_after[LARGE] = 1 << 20
    user.cdn.no_range.add(LARGE)
    assert (user.fetch() / "model.safetensors").read_bytes() == LONG
    assert len(user.cdn.gets(LARGE)) == 2


def test_download_of_a_killed_process_goes_on_in_the_next(user):
    user.cdn.stall.add(LARGE)
    user.env["HF_HUB_DOWNLOAD_TIMEOUT"] = "60"
    process = user.start(REPO)
    assert user.cdn.stalled.wait(30)
    end = time.monotonic() + 30
    while not (user.part and user.part.stat().st_size) and time.monotonic() < end:
        time.sleep(0.02)
    process.kill()
    process.communicate()
    have = user.part.stat().st_size
    assert 0 < have < len(LONG) and not (user.cache / "hub").exists()
    user.cdn.stall.clear()
    user.site.requests.clear()
    assert (user.fetch() / "model.safetensors").read_bytes() == LONG
    assert user.cdn.gets(LARGE) == [None, f"bytes={have}-"]
    assert user.site.gets(page("config.json")) == []  # was whole already


def test_part_of_an_older_version_is_not_gone_on_from(user):
    user.cdn.stall.add(LARGE)
    assert "sends nothing for too long" in user.fails()
    assert 0 < user.part.stat().st_size < len(LONG)
    newer = LONG[::-1]
    publish(user.site, REPO, FILES | {"model.safetensors": newer}, user.cdn)
    assert (user.fetch() / "model.safetensors").read_bytes() == newer
    assert user.cdn.gets(f"/{sha(newer)}") == [None]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_wrong_hash_is_told_and_the_file_removed(name, user):
    where = user.cdn.pages if name == "model.safetensors" else user.site.pages
    path = LARGE if name == "model.safetensors" else page(name)
    where[path] = where[path][::-1]
    kind = "SHA-256" if name == "model.safetensors" else "git SHA-1"
    assert f"{name}: wrong {kind}: expected " in user.fails()
    assert user.part is None
    where[path] = where[path][::-1]
    assert (user.fetch() / name).read_bytes() == FILES[name]


def test_file_longer_than_stated_is_not_received(user):
    user.cdn.pages[LARGE] = LONG + b"!"
    assert f"more than the {len(LONG)} bytes that it stated" in user.fails()


def refuse(user: User, path: str, status: int, code: str = "") -> None:
    user.site.status[path] = status
    user.site.headers[path] = {"X-Error-Code": code} if code else {}


API = f"/api/models/{REPO}/revision/main"


@pytest.mark.parametrize(
    ("path", "status", "code", "told"),
    [
        (API, 404, "RepoNotFound", "the hub has no such repository (404); once that is put right"),
        (API, 404, "RevisionNotFound", "the repository has no revision main (404)"),
        (API, 404, "", "the hub has no such repository (404)"),
        (page("config.json"), 404, "EntryNotFound", "has no file config.json (404)"),
        (API, 401, "", "access was refused (401): it is private or gated, or doesn't exist; see "),
        (API, 401, "RepoNotFound", "access was refused (401)"),
        (API, 403, "", "access was refused (403)"),
        (page("config.json"), 401, "GatedRepo", "it is gated, and access was refused; accept its"),
        (page("config.json"), 403, "GatedRepo", "it is gated, and access was refused; accept its"),
        (API, 500, "", "the hub answers with error 500"),
        (page("config.json"), 503, "", "the hub answers with error 503"),
    ],
)
def test_refusal_is_one_line_that_says_what_to_do(path, status, code, told, user):
    refuse(user, path, status, code)
    line = user.fails()
    assert told in line
    if status in (401, 403):
        assert f"{user.site.url}/{REPO}" in line and "hf auth login" in line and "HF_TOKEN" in line


@pytest.mark.parametrize("answer", [b"<html>log in first</html>", b"[]", b'{"siblings": [7]}'])
def test_endpoint_that_is_no_hub_is_one_line(answer, user):
    user.site.pages[API] = answer
    assert "unexpected answer (" in user.fails()


def test_unreachable_hub_is_one_line(user):
    user.env["HF_ENDPOINT"] = "http://127.0.0.1:9"
    line = user.fails()
    assert "no connection to the hub (http://127.0.0.1:9)" in line
    assert not any(p.is_file() for p in user.cache.rglob("*"))


def test_offline_mode_is_respected(user):
    user.env["HF_HUB_OFFLINE"] = "1"
    assert "HF_HUB_OFFLINE is set, and the hub's cache hasn't all files" in user.fails()
    assert user.site.requests == []


def test_silent_server_costs_a_time_out_and_then_the_next_source(user, tmp_path):
    wheel(tmp_path / "wheels")
    user.cdn.stall.add(LARGE)
    entry = model(Hub(REPO, ("*.safetensors",)), *model().sources)
    process = user.start("toy", entry)
    out, err = process.communicate(timeout=60)
    assert Path(out.strip()).read_bytes() == CONTENT
    assert "sends nothing for too long" in err and "trying another source" in err
    assert user.cdn.gets(LARGE) == [None, f"bytes={len(LONG) // 2}-"]  # half came, so tried again


def test_wrong_hash_leads_to_the_next_source(user, tmp_path):
    wheel(tmp_path / "wheels")
    user.cdn.pages[LARGE] = LONG[::-1]
    path = user.fetch("toy", model(Hub(REPO, ("*.safetensors",)), *model().sources))
    assert path == user.cache / "toy" / "toy.bin" and path.read_bytes() == CONTENT
    assert list((user.cache / "partial").iterdir()) == []


def fill_hub_cache(user: User, files: dict[str, bytes]) -> Path:
    """The layout of the hub's own cache; returns the snapshot's folder."""
    repo = Path(user.env["HF_HOME"]) / "hub" / "models--org--repo"
    snapshot = repo / "snapshots" / COMMIT
    for folder in (repo / "blobs", repo / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (repo / "refs" / "main").write_text(COMMIT)
    for name, body in files.items():
        (repo / "blobs" / sha(body)).write_bytes(body)
        (snapshot / name).symlink_to(Path("..", "..", "blobs", sha(body)))
    return snapshot


@pytest.mark.skipif(sys.platform == "win32", reason="makes symbolic links")
def test_what_the_hub_cache_has_is_not_downloaded_again(user):
    fill_hub_cache(user, {"model.safetensors": LONG})
    path = user.fetch()
    assert (path / "model.safetensors").read_bytes() == LONG and user.cdn.requests == []
    shutil.rmtree(user.env["HF_HOME"])
    assert user.fetch() == path and (path / "model.safetensors").read_bytes() == LONG


@pytest.mark.skipif(sys.platform == "win32", reason="makes symbolic links")
@pytest.mark.parametrize(
    "offline", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}]
)
def test_hub_cache_alone_is_enough_when_it_has_everything(offline, user):
    user.env |= offline
    snapshot = fill_hub_cache(user, FILES)
    (snapshot / "tokenizer.json").unlink()
    entry = model(Hub(REPO, ("config.json", "tokenizer.json", "model.safetensors")))
    user.fails("toy", entry)
    fill_hub_cache(user, {"tokenizer.json": b"{}"})
    assert (user.fetch("toy", entry) / "tokenizer.json").read_bytes() == b"{}"
    assert user.site.requests == []


@pytest.mark.skipif(sys.platform == "win32", reason="makes symbolic links")
def test_damaged_file_of_the_hub_cache_is_downloaded(user):
    snapshot = fill_hub_cache(user, {"model.safetensors": LONG})
    blob = (snapshot / "model.safetensors").resolve()
    blob.write_bytes(LONG[::-1])
    assert (user.fetch() / "model.safetensors").read_bytes() == LONG
    assert blob.read_bytes() == LONG[::-1]  # the user's cache stays as it is
