"""Compiled programs on disk: reused, replaced when damaged, never needed."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.runtime.opencl import Built
from tests.engine.kernels import cpu
from tests.engine.process import ROOT, output, script

COMPUTE = """
    import numpy as np
    from engine import Tensor, program
    from engine.runtime.opencl import OpenCLDevice

    original = OpenCLDevice._compile
    compiled = []
    OpenCLDevice._compile = lambda self, s: (compiled.append(s), original(self, s))[1]
    x = Tensor(np.arange(64, dtype=np.float32), device="opencl")
    print((x * 2 + 1).sum().item())
    step = program(lambda x: ((x * 3).contiguous() + 1).sum())
    print(step(x).item())
    print(len(compiled))
"""
RIGHT = ["4096.0", "6112.0"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the programs of COMPUTE."""
    cpu()
    folder = tmp_path_factory.mktemp("cache")
    assert output(COMPUTE, {"ZOO_CACHE": str(folder)}) == [*RIGHT, "2"]
    assert len(binaries(folder)) == 2
    return folder


@pytest.fixture
def filled(made: Path, tmp_path: Path) -> Path:
    """A copy of it for one test."""
    return Path(shutil.copytree(made, tmp_path / "cache"))


def binaries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.bin"))


def test_a_second_process_compiles_nothing(filled: Path) -> None:
    before = {p: p.read_bytes() for p in binaries(filled)}
    assert output(COMPUTE, {"ZOO_CACHE": str(filled)}) == [*RIGHT, "0"]
    assert {p: p.read_bytes() for p in binaries(filled)} == before


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut short": lambda b: b[: len(b) // 2],
    "text": lambda b: b"not a program\n" * 50,
    "one bit": lambda b: b[: len(b) // 3] + bytes([b[len(b) // 3] ^ 1]) + b[len(b) // 3 + 1 :],
}


def test_a_damaged_program_is_compiled_again_and_replaced(filled: Path) -> None:
    """A driver may crash on what it can't read, so it must not get to see it."""
    whole = {p: p.read_bytes() for p in binaries(filled)}
    for name, damage in DAMAGE.items():
        for path, content in whole.items():
            path.write_bytes(damage(content))
        done = script(COMPUTE, {"ZOO_CACHE": str(filled)})
        assert done.returncode == 0, f"{name}: exit code {done.returncode} {done.stderr[-500:]}"
        assert done.stdout.split() == [*RIGHT, "2"], name
        assert all(p.read_bytes() != damage(whole[p]) for p in whole), name
    assert output(COMPUTE, {"ZOO_CACHE": str(filled)}) == [*RIGHT, "0"]


@pytest.mark.parametrize("kind", ["below a file", "missing parents"])
def test_a_cache_folder_that_cannot_be_used_only_costs_time(kind: str, tmp_path: Path) -> None:
    cpu()
    place = tmp_path / "cache"
    if kind == "below a file":
        place.write_text("in the way")
    place = place / "deep" / "er"
    assert output(COMPUTE, {"ZOO_CACHE": str(place)}) == [*RIGHT, "2"]
    assert bool(binaries(tmp_path)) is (kind == "missing parents")


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
def test_a_cache_folder_without_write_permission_only_costs_time(tmp_path: Path) -> None:
    cpu()
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    folder = tmp_path / "kernels"
    folder.mkdir()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert output(COMPUTE, {"ZOO_CACHE": str(tmp_path)}) == [*RIGHT, "2"]
    finally:
        folder.chmod(stat.S_IRWXU)


def test_two_processes_may_fill_one_cache_at_once(tmp_path: Path) -> None:
    cpu()
    env = dict(os.environ) | {"ZOO_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(COMPUTE)]
    both = [
        subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for p in both:
        lines = p.communicate(timeout=60)[0].split()
        assert p.returncode == 0
        assert lines[:2] == RIGHT
    assert output(COMPUTE, {"ZOO_CACHE": str(tmp_path)}) == [*RIGHT, "0"]


def test_a_program_that_cannot_be_written_leaves_nothing_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Program:
        binaries = (b"binary",)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    Built(Program(), tmp_path / "name.bin", ["kernel"]).ran(["kernel"])
    assert list(tmp_path.iterdir()) == []


def test_a_program_is_written_when_the_last_of_its_functions_has_run(tmp_path: Path) -> None:
    """Kernels are compiled as they are first launched; later ones would miss in the binary."""

    class Program:
        binaries = (b"binary",)

    built = Built(Program(), tmp_path / "name.bin", ["first", "second"])
    for names, written in ((["first"], False), (["second"], True)):
        built.ran(names)
        assert binaries(tmp_path) == [tmp_path / "name.bin"] * written


def test_nothing_of_packed_weights_is_compiled_by_the_second_process(tmp_path: Path) -> None:
    """Weights of several forms are packed by one program, one after another."""
    pack = """
        import numpy as np
        from engine import Tensor, get_device, program
        rng = np.random.default_rng(0)
        weights = []
        for n in (40, 50, 60):
            w = Tensor(rng.standard_normal((n, 64)).astype(np.float16), device="opencl")
            w.node.arg[0].constant = True
            weights.append(w)
        x = Tensor(np.ones((40, 64), np.float32), device="opencl")
        step = program(lambda x: tuple(x @ w.transpose() for w in weights), precision="auto")
        print(*(out.shape[1] for out in step(x)))
        print([sorted(built.left) for built in get_device("opencl").unsaved])
    """
    cpu()
    first, second = (output(pack, {"ZOO_CACHE": str(tmp_path)}) for _ in "ab")
    assert first == ["40 50 60", "[[], []]"]  # of two programs nothing is left
    assert second == ["40 50 60", "[]"]


def test_compiling_leaves_no_files_beside_the_programs(filled: Path) -> None:
    others = [p for p in filled.rglob("*") if p.is_file() and p.suffix not in (".bin", ".json")]
    assert others == []
