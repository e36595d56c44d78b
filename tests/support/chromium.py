"""Chromium without a window, driven over a pipe with the DevTools protocol.

with browser() as chromium:
    page = chromium.open("http://127.0.0.1:8000/", width=390)
    page.wait("document.title !== ''")
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from .serving import GUARD

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")


class Browser:
    """A running browser: `send` and `receive` are the ends of its pipe."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._number, self._rest = 0, b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of a command. What arrives meanwhile without a number is added to `events`."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result
            if "method" in answer:
                self.events.append(answer)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._receive, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        data, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(data)
        return message

    def open(self, url: str, width: int = 1400, height: int = 1800) -> "Page":
        """A new tab that has begun to load an address."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 800}
        self.call("Emulation.setDeviceMetricsOverride", session, **size)
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable", session)
        self.call("Page.navigate", session, url=url)
        return page


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def run(self, script: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        options = {"expression": script, "awaitPromise": True, "returnByValue": True}
        answer = self._browser.call("Runtime.evaluate", self._session, **options)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        limit = time.monotonic() + GUARD
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < limit, f"{condition}: {self.text()}"
            time.sleep(0.05)

    def text(self) -> str:
        """What a reader sees."""
        return str(self.run("document.body.innerText"))

    def problems(self) -> list[str]:
        """Exceptions of the page's scripts, and what its content policy blocked."""
        self.run("0")
        found = []
        for event in self._browser.events:
            if event.get("sessionId") == self._session:
                if event["method"] == "Runtime.exceptionThrown":
                    found.append(str(event["params"]["exceptionDetails"]))
                elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["source"] == "security":
                    found.append(event["params"]["entry"]["text"])
        return found

    def screenshot(self, path: Path) -> None:
        """Write a picture of the whole page."""
        options = {"format": "png", "captureBeyondViewport": True}
        path.write_bytes(
            base64.b64decode(self._browser.call("Page.captureScreenshot", self._session, **options)["data"])
        )


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with a profile of its own; names of the form *.example are this machine."""
    assert PROGRAM is not None
    to_child, send = os.pipe()
    receive, from_child = os.pipe()

    def connect() -> None:  # the browser reads descriptor 3 and writes descriptor 4
        first, second = os.dup(to_child), os.dup(from_child)
        os.dup2(first, 3)
        os.dup2(second, 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"]
        rules = "--host-resolver-rules=MAP *.example 127.0.0.1"
        process = subprocess.Popen(
            [PROGRAM, *options, rules, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=connect,
            close_fds=False,
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(to_child)
        os.close(from_child)
        try:
            yield Browser(send, receive)
        finally:
            os.close(send)
            os.close(receive)
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
