"""A local web server for fetch tests: a package index and a model hub, with breakable downloads."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Site:
    """Pages by path, and what happened: `requests` lists (method, path, Range header).

    A path in `status` answers with that number instead, and a 302 with the Location in `headers`.
    """

    url: str = ""
    pages: dict[str, bytes] = field(default_factory=dict)
    headers: dict[str, dict[str, str]] = field(default_factory=dict)
    status: dict[str, int] = field(default_factory=dict)
    break_after: dict[str, int] = field(default_factory=dict)  # bytes, on the first GET only
    stall: set[str] = field(default_factory=set)  # GETs that send half, or nothing more, and wait
    no_range: set[str] = field(default_factory=set)  # always sent from the beginning
    stalled: threading.Event = field(default_factory=threading.Event)
    closing: threading.Event = field(default_factory=threading.Event)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    tokens: list[tuple[str, str]] = field(default_factory=list)  # (path, Authorization)

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
        wanted = self.headers.get("Range") if path not in self.site.no_range else None
        site.requests.append((self.command, path, self.headers.get("Range")))
        if token := self.headers.get("Authorization"):
            site.tokens.append((path, token))
        code = site.status.get(path, 404 if path not in site.pages else 206 if wanted else 200)
        body, headers = b"", {}
        if code < 300:
            body = site.pages[path]
            headers["ETag"] = f'"{hashlib.sha256(body).hexdigest()}"'
            headers["Accept-Ranges"] = "bytes"
            headers["Content-Type"] = "text/html" if path.endswith("/") else "binary/octet"
            start = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted else 0
            if wanted:
                headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            body = body[start:]
        self.send_response(code)
        for name, value in (headers | site.headers.get(path, {})).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if send:
            self.send_body(path, body)

    def send_body(self, path: str, body: bytes) -> None:
        if path in self.site.stall:
            self.wfile.write(b"" if self.headers.get("Range") else body[: len(body) // 2])
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
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield site
    finally:
        site.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


COMMIT = "c0ffee" * 6 + "c0ff"


def publish(
    hub: Site, repo: str, files: dict[str, bytes], cdn: Site | None = None, revision: str = "main"
) -> None:
    """Make `hub` a model hub that has `repo`; with `cdn`, its large files are redirected there."""
    facts = {"id": repo, "sha": COMMIT, "tags": ["license:mit"]}
    facts["siblings"] = [{"rfilename": name} for name in files]
    hub.pages[f"/api/models/{repo}/revision/{revision}"] = json.dumps(facts).encode()
    for name, body in files.items():
        path = f"/{repo}/resolve/{COMMIT}/{name}"
        hub.pages[path] = body
        hub.headers[path] = {"X-Repo-Commit": COMMIT}
        digest = hashlib.sha256(body).hexdigest()
        if cdn and name.endswith((".safetensors", ".gguf", ".bin")):
            cdn.pages[f"/{digest}"] = body
            hub.status[path] = 302
            hub.headers[path] |= {"Location": f"{cdn.url}/{digest}", "X-Linked-ETag": f'"{digest}"'}
            hub.headers[path] |= {"X-Linked-Size": str(len(body))}
        elif cdn:
            blob = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
            hub.headers[path]["ETag"] = f'"{blob}"'
