"""A local web server for fetch tests: a package index and a model hub, with breakable downloads."""

from __future__ import annotations

import hashlib
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Site:
    """Pages by path, and what happened: `requests` lists (method, path, Range header)."""

    url: str = ""
    pages: dict[str, bytes] = field(default_factory=dict)
    headers: dict[str, dict[str, str]] = field(default_factory=dict)
    break_after: dict[str, int] = field(default_factory=dict)  # bytes, on the first GET only
    stall: set[str] = field(default_factory=set)  # GETs that send half and then wait
    stalled: threading.Event = field(default_factory=threading.Event)
    closing: threading.Event = field(default_factory=threading.Event)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)

    def gets(self, path: str) -> list[str | None]:
        """The Range header of each GET of `path`."""
        return [r for method, p, r in self.requests if (method, p) == ("GET", path)]


class _Handler(http.server.BaseHTTPRequestHandler):
    site: Site

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(send=False)

    def do_GET(self) -> None:
        self.answer(send=True)

    def answer(self, send: bool) -> None:
        site, path = self.site, self.path.split("?")[0]
        wanted = self.headers.get("Range")
        site.requests.append((self.command, path, wanted))
        if path not in site.pages:
            self.send_response(404)
            for name, value in site.headers.get(path, {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body = site.pages[path]
        start = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted else 0
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.send_header("Content-Type", "text/html" if path.endswith("/") else "binary/octet")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        for name, value in site.headers.get(path, {}).items():
            self.send_header(name, value)
        self.end_headers()
        if send:
            self.send_body(path, body[start:])

    def send_body(self, path: str, body: bytes) -> None:
        if path in self.site.stall:
            self.wfile.write(body[: len(body) // 2])
            self.site.stalled.set()
            self.site.closing.wait(30)
        elif path in self.site.break_after:
            self.wfile.write(body[: self.site.break_after.pop(path)])
        else:
            self.wfile.write(body)
        self.close_connection = True


@contextmanager
def serve() -> Iterator[Site]:
    """A Site on a free local port."""
    site = Site()
    handler = type("Handler", (_Handler,), {"site": site})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    site.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield site
    finally:
        site.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()
