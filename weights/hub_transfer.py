"""Receive a file from the hub, resumed and never waiting for a silent server; and its errors."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weights.cache import FetchError
from weights.checkpoint import printable
from weights.registry import Hub

_FIRST_ANSWER = 5  # seconds; the client's own 10 would keep the next source waiting
_SLOWEST = 1024  # bytes per second; a server that sends less counts as silent
_LEAST = 1 << 16  # bytes that a try has to bring, so that another one is worth it
_PAUSE = 1.0  # seconds before that one
_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}


def first_answer() -> float:
    """Seconds to wait for an answer: HF_HUB_ETAG_TIMEOUT where the user has set that."""
    from huggingface_hub import constants

    chosen = "HF_HUB_ETAG_TIMEOUT" in os.environ
    return constants.HF_HUB_ETAG_TIMEOUT if chosen else _FIRST_ANSWER


@contextmanager
def asking(source: Hub, name: str = "") -> Iterator[None]:
    """Turns what the client, its HTTP library or the system raise inside into a FetchError.

    A full disk stays an OSError.
    """
    try:
        yield
    except FetchError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _FULL:
            raise
        raise _explained(error, source, name) from None


def receive(url: str, part: Path, size: int, source: Hub, bar) -> None:
    """Fill `part` up to `size` bytes, going on from what it has.

    A connection that breaks off is taken up again as long as each try brings something.
    FetchError when one doesn't; OSError when the disk is full.
    """
    part.touch()
    if part.stat().st_size > size:  # not a part of this file
        os.truncate(part, 0)
    bar.update(part.stat().st_size)
    while (had := part.stat().st_size) < size:
        problem = FetchError("the connection breaks off")
        try:
            with asking(source):
                _stream(url, part, size, bar)
        except FetchError as error:
            problem = error
        have = part.stat().st_size
        if have < size:
            if have - had < _LEAST:
                raise problem
            time.sleep(_PAUSE)


def _stream(url: str, part: Path, size: int, bar) -> None:
    """One request for what is missing; the part keeps what came, whatever happens."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

    patience = constants.HF_HUB_DOWNLOAD_TIMEOUT
    have = part.stat().st_size
    headers = build_hf_headers() | {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    request = http_stream_backoff(
        "GET",
        url,
        headers=headers,
        timeout=patience,
        retry_on_exceptions=(),
        retry_on_status_codes=(),
    )
    with request as response, open(part, "r+b") as out:
        if response.status_code == 416:  # the file has become shorter
            out.truncate(0)
        hf_raise_for_status(response)
        if response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            out.seek(have)
        else:  # the server doesn't resume: from the beginning
            out.truncate(0)
            bar.update(-have)
            have = 0
        since, then = time.monotonic(), have
        for chunk in response.iter_bytes():
            have += len(chunk)
            if have > size:
                out.truncate(0)
                raise FetchError(f"it sends more than the {size} bytes that it stated")
            out.write(chunk)
            bar.update(len(chunk))
            if time.monotonic() - since > patience:
                if have - then < _SLOWEST * patience:
                    raise TimeoutError
                since, then = time.monotonic(), have
        out.flush()
        os.fsync(out.fileno())  # the name must not survive a power cut that the data doesn't


def _explained(error: Exception, source: Hub, name: str = "") -> FetchError:
    """What went wrong, for people."""
    from huggingface_hub import constants, errors

    kinds = {kind.__name__ for kind in type(error).__mro__}  # httpx, or what takes its place
    page = f"{constants.ENDPOINT}/{source.repo}"
    if isinstance(error, errors.GatedRepoError):
        return _gated(page)
    if isinstance(error, errors.RevisionNotFoundError):
        return FetchError(f"the repository has no revision {source.revision} (404)")
    if isinstance(error, errors.EntryNotFoundError):
        return FetchError(f"the repository has no file {printable(name)} (404)")
    status = _status(error)
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403, 404):
        return _refused(status, page)
    if "OfflineModeIsEnabled" in kinds:
        return FetchError("HF_HUB_OFFLINE is set, and the hub's cache hasn't all files")
    if status:
        return FetchError(f"the hub answers with error {status}")
    if kinds & {"TimeoutException", "Timeout", "TimeoutError"}:
        return FetchError("the hub doesn't answer, or sends nothing for too long")
    if kinds & {"ConnectError", "ProxyError", "ConnectionError"}:
        return FetchError(f"no connection to the hub ({constants.ENDPOINT})")
    if kinds & {"RemoteProtocolError", "ReadError", "ChunkedEncodingError"}:
        return FetchError("the connection breaks off")
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return FetchError(f"unexpected answer ({type(error).__name__}: {printable(first, 200)})")


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _gated(page: str) -> FetchError:
    remedy = f"accept its licence at {page}, then `hf auth login` or set HF_TOKEN, and try again"
    return FetchError("it is gated, and access was refused", remedy=remedy)


def _refused(status: int | None, page: str) -> FetchError:
    if status == 404:
        return FetchError("the hub has no such repository (404)")
    # Without a valid token the hub says the same of what is absent, private or gated.
    remedy = f"see {page}: it may ask to accept a licence; then `hf auth login` or set HF_TOKEN"
    problem = f"access was refused ({status}): it is private or gated, or doesn't exist"
    return FetchError(problem, remedy=remedy)
