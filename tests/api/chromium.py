"""A headless Chromium, driven over the DevTools protocol through a pair of pipes. No library besides Python's own."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "headless_shell")
TIMEOUT_S = 60.0
# Chromium reads orders from descriptor 3 and answers on 4.
_LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
os.dup2(ends[0], 3); os.dup2(ends[1], 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
WAIT = """new Promise((good, bad) => {
  const until = performance.now() + %d;
  const look = () => {
    let found;
    try { found = %s; } catch (e) { return bad(e); }
    if (found) good(found);
    else if (performance.now() > until) bad(new Error("timeout; the page says: " + document.body.innerText));
    else setTimeout(look, 10);
  };
  look();
})"""


def find() -> str | None:
    """A browser of this machine, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """`with Chromium(path) as browser: browser.open(url)`. One page. Its own profile, thrown away afterwards."""

    def __init__(self, path: str) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="penstock-chromium-", ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        flags = [
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--hide-scrollbars", "--disable-background-networking", "--disable-component-update",
            "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(theirs_in), str(theirs_out), path, *flags, "about:blank"],
            pass_fds=(theirs_in, theirs_out), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Chromium:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(domain + ".enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._session = None
            self.call("Browser.close")
            self._process.wait(10)
        except (OSError, AssertionError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)
        self._profile.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One order and its result. Events that come in between are kept in `events`."""
        self._number += 1
        order: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            order["sessionId"] = self._session
        os.write(self._out, json.dumps(order).encode() + b"\0")
        while True:
            message = self._read()
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
            self.events.append(message)

    def _read(self) -> dict[str, Any]:
        until = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            piece = os.read(self._in, 1 << 16)
            assert piece, "the browser has gone"
            self._rest += piece
        message, self._rest = self._rest.split(b"\0", 1)
        decoded: dict[str, Any] = json.loads(message)
        return decoded

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def fresh(self, url: str) -> None:
        """Open `url` as a user who has never been there: nothing is kept. Events so far are forgotten."""
        self.events.clear()
        clear = "localStorage.clear(); sessionStorage.clear()"
        script = self.call("Page.addScriptToEvaluateOnNewDocument", source=clear)["identifier"]
        self.open(url)
        self.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script)

    def reload(self) -> None:
        self.call("Page.reload")

    def leave(self) -> None:
        self.call("Page.navigate", url="about:blank")

    def forgive(self, text: str) -> None:
        """What was complained of with this text in it was meant to be."""
        self.events[:] = [event for event in self.events if text not in str(event)]

    def run(self, script: str) -> Any:
        """The value of an expression in the page; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, condition: str, timeout_s: float = 30.0) -> Any:
        """Wait in the page until an expression is true; returns its value."""
        return self.run(WAIT % (timeout_s * 1000, condition))

    def type(self, selector: str, text: str) -> None:
        """As a user would: focus, and keys."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int = 0) -> None:
        extra = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **extra)

    def look(self, width: int, height: int, scheme: str = "light", *, mobile: bool = False) -> None:
        """The size of the window, and whether the user likes it dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, *, whole: bool = False) -> bytes:
        """PNG of the window, or of the whole page."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"])

    @property
    def complaints(self) -> list[str]:
        """What the page's console says of errors, violations of its policy included."""
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"] + " " + params["entry"].get("url", ""))
            elif event.get("method") == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
        return found

    @property
    def requested(self) -> list[str]:
        """All URLs that were asked for."""
        return [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
