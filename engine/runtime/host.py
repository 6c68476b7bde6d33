"""What pocl and code generation need to know of, or do to, the machine that this process is on."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from engine.runtime import DeviceError


def user_cache() -> Path:
    """The folder of all we keep: `ZOO_CACHE`, or `menagerie` in the user's cache folder."""
    if chosen := os.environ.get("ZOO_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "menagerie"


def cache_folder() -> Path:
    """Where compiled programs are kept."""
    return user_cache() / "kernels"


def provide_linker() -> None:
    """pocl links kernels with `ld` and aborts the process where there is none on PATH.

    The package ziglang brings one, as `zig ld.lld`; a wrapper of that name is put on PATH.
    """
    if shutil.which("ld"):
        return
    found = importlib.util.find_spec("ziglang")
    if found is None or not found.submodule_search_locations:
        raise DeviceError(
            "pocl needs the linker `ld` on PATH: install binutils, or pip install "
            "ziglang, or use --device reference"
        )
    zig = Path(found.submodule_search_locations[0]) / "zig"
    folder = Path(tempfile.mkdtemp(prefix="menagerie-ld-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    wrapper = folder / "ld"
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.quote(str(zig))} ld.lld "$@"\n')
    wrapper.chmod(0o755)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"


def scratch_folder() -> Path:
    """Where pocl may write while it compiles (it aborts the process when it can't), till we end."""
    folder = Path(tempfile.mkdtemp(prefix="menagerie-pocl-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def save(path: Path, data: bytes) -> None:
    """Write a file of the cache: whole or not at all, and with its checksum in front.

    Silent where the cache can't be written, which only costs the next start time.
    """
    name = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(data).digest() + data)
        os.replace(name, path)
    except OSError:
        if name is not None:
            Path(name).unlink(missing_ok=True)


def saved(path: Path) -> bytes | None:
    """What `save` wrote there; None where there is nothing, or something damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, data = content[:32], content[32:]
    return data if hashlib.sha256(data).digest() == digest else None


def cpu_flags() -> frozenset[str]:
    """The processor's feature flags as the system names them; empty where it doesn't tell."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def usable_cores() -> int:
    """Cores this process may use: affinity and the control group's quota, at least 1."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return max(1, min(cores, int(quota) // int(period))) if quota != "max" else cores


def allow_tiles() -> bool:
    """Ask Linux for the AMX tile registers, which a process must do before it first uses them."""
    if platform.machine() != "x86_64" or not sys.platform.startswith("linux"):
        return False
    arch_prctl, request, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request, tile_data) == 0
