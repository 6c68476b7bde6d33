"""A headless Chromium, driven over its DevTools protocol; no more of it than the tests need."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "ArrowRight": (39, "")}  # code, text


class Page:
    """A page; `problems` are its errors, refusals by its policy among them."""

    def __init__(self, socket: Any, session: str) -> None:
        self._socket, self._session, self._count = socket, session, 0
        self.problems: list[str] = []
        for domain in ("Page", "Runtime", "Log", "DOM"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a DevTools command."""
        self._count += 1
        command = {"id": self._count, "method": method, "params": params}
        self._socket.send(json.dumps(command | {"sessionId": self._session}))
        while True:
            message = json.loads(self._socket.recv(timeout=30))
            if message.get("id") == self._count:
                assert "error" not in message, message["error"]
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        if message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])

    def run(self, script: str) -> Any:
        """The value of an expression of JavaScript."""
        options = {"returnByValue": True, "awaitPromise": True, "userGesture": True}
        result = self.call("Runtime.evaluate", expression=script, **options)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, script: str, seconds: float = 20) -> Any:
        """Wait until an expression is true; its value."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            shown = self.run("document.body.innerText")
            assert time.monotonic() < end, f"never true: {script}\n{shown}\n{self.problems}"
            time.sleep(0.01)
        return value

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, shift: bool = False) -> None:
        code, text = KEYS[key]
        about = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def choose_file(self, selector: str, path: Path) -> None:
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def scheme(self, name: str) -> None:
        """Have the system prefer light or dark."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path, width: int = 900, height: int = 700) -> None:
        """Save what is to be seen."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def page(folder: Path) -> Iterator[Page]:
    """A new page of a new browser, whose files lie in `folder`; skips where there is none."""
    connect = pytest.importorskip("websockets.sync.client").connect
    program = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("needs Chromium: apt install chromium-headless-shell, or set CHROMIUM")
    flags = ["--headless", "--remote-debugging-port=0", f"--user-data-dir={folder / 'profile'}",
             "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage",
             "--disable-background-networking", "about:blank"]  # fmt: skip
    if os.name == "posix" and os.getuid() == 0:
        flags.insert(0, "--no-sandbox")  # it refuses root otherwise
    log = folder / "chromium.log"
    with open(log, "wb") as out:
        browser = subprocess.Popen([program, *flags], stdout=out, stderr=out)
    try:
        address = _address(browser, log)
        with connect(address, max_size=None) as socket:
            yield Page(socket, _session(socket))
    finally:
        browser.terminate()
        browser.wait(20)


def _address(browser: subprocess.Popen, log: Path) -> str:
    """Where the browser listens, which it says as it starts."""
    end = time.monotonic() + 30
    while True:
        found = re.search(r"DevTools listening on (ws://\S+)", log.read_text("utf-8", "replace"))
        if found:
            return found[1]
        assert browser.poll() is None and time.monotonic() < end, log.read_text("utf-8", "replace")
        time.sleep(0.02)


def _session(socket: Any) -> str:
    """A session with a new page."""

    def call(count: int, method: str, **params: Any) -> dict[str, Any]:
        socket.send(json.dumps({"id": count, "method": method, "params": params}))
        while True:
            message = json.loads(socket.recv(timeout=30))
            if message.get("id") == count:
                return message["result"]

    target = call(1, "Target.createTarget", url="about:blank")["targetId"]
    return call(2, "Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
