"""A lock between processes that the system frees when its holder ends, however that happens."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    import msvcrt

    fcntl = None

_BUSY = {errno.EAGAIN, errno.EACCES, errno.EDEADLK}
_POLL = 0.2  # seconds


@contextmanager
def hold(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `path` while the block runs; calls `on_wait` once if another holds it.

    The file is removed again at the end. OSError when it can't be made.
    """
    fd, told = None, False
    while fd is None:
        fd = _take(path)
        if fd is None:
            if not told:
                on_wait()
                told = True
            time.sleep(_POLL)
    try:
        yield
    finally:
        with suppress(OSError):  # Windows keeps a file that others have open
            path.unlink()
        os.close(fd)


def _take(path: Path) -> int | None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        if fcntl:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        # Whoever held it may have removed it meanwhile: then this lock guards nothing.
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return fd
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in _BUSY:
            os.close(fd)
            raise
    os.close(fd)
    return None
