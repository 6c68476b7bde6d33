"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from weights.checkpoint import WeightError

DISK_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}


@contextmanager
def whole_file(path: Path, force: bool = False) -> Iterator[Path]:
    """The path of an empty file beside `path`, which takes its place when the block is done.

    However the block ends, short of a killed process, nothing else stays behind. WeightError when
    `path` exists and `force` doesn't allow to replace it, or can't be written.
    """
    # A letter takes up to 4 bytes, of the 255 that a name may have.
    partial = path.parent / f".{path.name[:50]}.{secrets.token_hex(4)}.partial"
    try:
        check_target(path, force)
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        yield partial
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        check_target(path, force)  # somebody else may have been quicker
        _put(partial, path, force)
    except OSError as error:
        if error.errno in DISK_FULL:
            raise WeightError("the disk is full; nothing was written", file=path) from None
        raise WeightError(f"can't be written: {error.strerror or error}", file=path) from None
    finally:
        with suppress(OSError, ValueError):
            partial.unlink()


def _put(partial: Path, path: Path, force: bool) -> None:
    """Give a file its name; only with `force` does it take that of another, however new."""
    if not force:
        try:
            os.link(partial, path)
            return
        except FileExistsError:
            raise WeightError(
                "it exists already", file=path, remedy="--force replaces it"
            ) from None
        except OSError:
            pass  # a file system without links
    os.replace(partial, path)


def check_target(path: Path, force: bool) -> None:
    """WeightError where `whole_file` would refuse the name of the file."""
    if "\0" in str(path):
        raise WeightError("its name has a zero byte", file=path)
    if path.is_dir():
        raise WeightError("it is a folder", file=path, expected="the name of a file to write")
    if not path.parent.is_dir():
        remedy = f"mkdir -p {shlex.quote(str(path.parent))}"
        raise WeightError("its folder does not exist", file=path, remedy=remedy)
    if path.exists() and not force:
        raise WeightError("it exists already", file=path, remedy="--force replaces it")
