"""A headless chromium, driven through chromedriver's HTTP protocol (W3C WebDriver): just what the page's tests need."""

import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
DRIVER = shutil.which("chromedriver")
SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
KEYS = {
    "ArrowRight": "\ue014",
    "ArrowLeft": "\ue012",
    "ArrowDown": "\ue015",
    "ArrowUp": "\ue013",
    "End": "\ue010",
    "Home": "\ue011",
    "Enter": "\ue007",
    "Tab": "\ue004",
    "Escape": "\ue00c",
}


class Browser:
    """One browser window. Scripts are function bodies: `return document.title`."""

    def __init__(self, address: str, profile: Path, switches: tuple[str, ...] = ()) -> None:
        self._address = address
        chrome = {"binary": CHROMIUM, "args": [*SWITCHES, f"--user-data-dir={profile}", *switches]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}
        self._session = self._post("/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def _post(self, path: str, body: dict[str, Any], method: str = "POST") -> Any:
        request = urllib.request.Request(
            self._address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"]) from error

    def _command(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._post(f"/session/{self._session}{path}", body or {})

    def open(self, page: Path | str) -> None:
        """Load a file or an address, and wait until it has loaded."""
        self._command("/url", {"url": page if isinstance(page, str) else page.as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """What the script returns."""
        return self._command("/execute/sync", {"script": script, "args": list(arguments)})

    def click(self, selector: str) -> None:
        """A real click into the middle of the first element that matches."""
        found = self._command("/element", {"using": "css selector", "value": selector})
        self._command(f"/element/{next(iter(found.values()))}/click")

    def press(self, *keys: str) -> None:
        """Keys by name, or characters, to whatever has the focus."""
        actions = [{"type": kind, "value": KEYS.get(key, key)} for key in keys for kind in ("keyDown", "keyUp")]
        self._command("/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def size(self, width: int, height: int, phone: bool = False) -> None:
        """The window's inner size; `phone` also says that it is one."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )

    def prefer(self, scheme: str) -> None:
        """What prefers-color-scheme says: light or dark; and no transitions, so that a colour is at once what it is."""
        wanted = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in wanted.items()]
        self.devtools("Emulation.setEmulatedMedia", features=features)

    def devtools(self, method: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        return self._command("/goog/cdp/execute", {"cmd": method, "params": parameters})

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """The window (or the whole page) as PNG."""
        path.write_bytes(
            base64.b64decode(self.devtools("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"])
        )

    def errors(self) -> list[str]:
        """What the console has shown since the last call, warnings and worse."""
        return [
            entry["message"]
            for entry in self._command("/se/log", {"type": "browser"})
            if entry["level"] in ("WARNING", "SEVERE")
        ]

    def close(self) -> None:
        """End the browser."""
        self._post(f"/session/{self._session}", {}, method="DELETE")


@contextmanager
def browser(directory: Path, *switches: str) -> Iterator[Browser]:
    """A browser with a fresh profile in `directory`, ended afterwards."""
    assert DRIVER is not None
    process = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        port = next(
            int(line.rstrip(".\n ").rpartition(" ")[2])
            for line in process.stdout
            if "started successfully on port" in line
        )
        window = _patiently(lambda: Browser(f"http://127.0.0.1:{port}", directory / "profile", switches))
        try:
            yield window
        finally:
            window.close()
    finally:
        process.terminate()
        process.wait(20)


def _patiently(make: Any, seconds: float = 60.0) -> Browser:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return make()
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
