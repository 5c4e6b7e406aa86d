"""Firefox and WebKitGTK, driven in the words of `chromium.Chromium`: over Marionette's socket, and by WebKitWebDriver.

No library besides httpx. WebKitGTK's small browser needs a screen: Xvfb gives it one.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from penstock.server.routes.page import files
from tests.api.chromium import TIMEOUT_S, WAIT

_KEYS = {
    "Enter": "\ue007", "Escape": "\ue00c", "Tab": "\ue004", "ArrowLeft": "\ue012", "ArrowUp": "\ue013",
    "ArrowRight": "\ue014",
}  # fmt: skip
_ASYNC = "const done = arguments[arguments.length - 1]; (async () => { %s })().then((v) => done([v ?? null]), " \
         "(e) => done(String(e)));"  # fmt: skip
# The page's errors, the violations of its policy among them, and who was asked for anything.
_FIREFOX_WATCH = """if (!window.penstockAsked) {
  window.penstockAsked = [];
  Services.obs.addObserver((channel) => {
    const { URI, loadInfo } = channel.QueryInterface(Ci.nsIChannel);
    if (loadInfo.loadingPrincipal && !loadInfo.loadingPrincipal.isSystemPrincipal) penstockAsked.push(URI.spec);
  }, "http-on-modify-request");
}"""
_FIREFOX_COMPLAINTS = """return Services.console.getMessageArray().filter((m) => m instanceof Ci.nsIScriptError
  && /^(http|file)/.test(m.sourceName)
  && (!(m.flags & m.warningFlag) || /CSP|Content-Security/.test(m.category + m.errorMessage)))
  .map((m) => m.errorMessage + " " + m.sourceName)"""
_GTK = (
    "* { min-width: 0; min-height: 0; padding: 0; margin: 0; font-size: 1px } image { -gtk-icon-transform: scale(0.1) }"
)


_WATCH = b"""function complain(text) {
  const found = JSON.parse(sessionStorage.getItem("complaints") || "[]");
  sessionStorage.setItem("complaints", JSON.stringify([...found, text]));
}
addEventListener("error", (e) => complain(e.message || "not loaded: " + (e.target.src || e.target.href)), true);
addEventListener("unhandledrejection", (e) => complain(String(e.reason)));
addEventListener("securitypolicyviolation", (e) => complain(e.violatedDirective + " forbids " + e.blockedURI));
console.error = (...said) => complain(said.join(" "));
"""


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """The servers of this process serve pages that keep what is wrong with them."""
    served = files()
    before = dict(served)
    served["watch.js"] = (_WATCH, "text/javascript", '"watch"')
    for name in ("index.html", "docs.html"):
        content, kind, _ = before[name]
        served[name] = (content.replace(b"<link", b"<script src='page/watch.js'></script><link", 1), kind, '"watched"')
    try:
        yield
    finally:
        served.clear()
        served.update(before)


def _first(*patterns: str) -> str | None:
    found = [str(path) for pattern in patterns for path in Path("/usr").glob(pattern)]
    return found[0] if found else None


class Driver:
    """What both have in common. One page, its own profile, thrown away afterwards. `scheme`: light or dark."""

    missing = ""
    """What is not on this machine, as a reason to skip; empty: all is there."""

    def __init__(self, scheme: str = "light") -> None:
        self._scheme = scheme
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-browser-", ignore_cleanup_errors=True)
        self._home = Path(self._folder.name)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._forgiven: list[str] = []

    def __enter__(self) -> Driver:
        try:
            self._begin()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self._processes):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        self._folder.cleanup()

    def _start(self, *command: str, **environment: str) -> None:
        env = os.environ | {"HOME": str(self._home), "XDG_CONFIG_HOME": str(self._home)} | environment
        quiet = subprocess.DEVNULL
        self._processes.append(subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, env=env))

    def _begin(self) -> None:
        raise NotImplementedError

    def _script(self, script: str) -> Any:
        raise NotImplementedError

    def _actions(self, actions: list[dict[str, Any]]) -> None:
        raise NotImplementedError

    def run(self, script: str) -> Any:
        """The value of an expression in the page, or None after statements; promises are awaited."""
        plain = re.sub(r"\{.*\}|'.*?'", "", script, flags=re.DOTALL)
        statements = re.match(r"\{|for |const ", script) or re.search(r";\s*\S", plain)
        found = self._script(_ASYNC % (script if statements else f"return (\n{script}\n);"))
        assert isinstance(found, list), f"{found}: {script}"
        return found[0]

    def until(self, condition: str, timeout_s: float = 30.0) -> Any:
        return self.run(WAIT % (timeout_s * 1000, condition))

    def fresh(self, url: str) -> None:
        """Open `url` as a user who has never been there. What was complained of so far is forgotten."""
        self.open(url)
        self.run("{ localStorage.clear(); sessionStorage.clear(); }")
        self.open(url)
        self._forgiven = []
        self._forget()

    def open(self, url: str) -> None:
        raise NotImplementedError

    def _forget(self) -> None:
        raise NotImplementedError

    def reload(self) -> None:
        self.open(self.run("location.href"))

    def leave(self) -> None:
        self.open("about:blank")

    def type(self, selector: str, text: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self._actions([{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")])

    def press(self, key: str, code: int = 0) -> None:
        self._actions([{"type": kind, "value": _KEYS.get(key, key)} for kind in ("keyDown", "keyUp")])

    def forgive(self, text: str) -> None:
        self._forgiven.append(text)

    @property
    def complaints(self) -> list[str]:
        """What the browser says of errors in the page, violations of its policy included."""
        return [text for text in self._complaints() if not any(part in text for part in self._forgiven)]

    def _complaints(self) -> list[str]:
        raise NotImplementedError


class Firefox(Driver):
    _browser = shutil.which("firefox-esr") or shutil.which("firefox")
    missing = "" if _browser else "no Firefox here (apt-get install firefox-esr)"

    def _begin(self) -> None:
        (self._home / "user.js").write_text('user_pref("marionette.port", 0);\n')
        self._start(
            str(self._browser), "--headless", "--marionette", "--remote-allow-system-access", "--no-remote",
            "--profile", str(self._home),
        )  # fmt: skip
        port = self._home / "MarionetteActivePort"
        until = time.monotonic() + TIMEOUT_S
        while not (port.exists() and port.read_text().strip()):
            assert time.monotonic() < until, "Firefox does not start"
            time.sleep(0.05)
        self._socket = socket.create_connection(("127.0.0.1", int(port.read_text())), timeout=TIMEOUT_S)
        self._file = self._socket.makefile("rb")
        self._number = 0
        self._read()
        timeouts = {"script": int(TIMEOUT_S * 1000)}
        self._command("WebDriver:NewSession", capabilities={"alwaysMatch": {"timeouts": timeouts}})
        self._chrome(_FIREFOX_WATCH)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if hasattr(self, "_socket"):
            self._file.close()
            self._socket.close()
        super().__exit__(kind, error, trace)

    def _read(self) -> Any:
        length = b""
        while (byte := self._file.read(1)) != b":":
            assert byte, "Firefox has gone"
            length += byte
        return json.loads(self._file.read(int(length)))

    def _command(self, name: str, **params: Any) -> Any:
        self._number += 1
        message = json.dumps([0, self._number, name, params]).encode()
        self._socket.sendall(b"%d:%s" % (len(message), message))
        _, _, error, result = self._read()
        assert error is None, f"{name}: {error}"
        return result

    def _chrome(self, script: str, *arguments: Any) -> Any:
        """In the browser's own window."""
        self._command("Marionette:SetContext", value="chrome")
        found = self._command("WebDriver:ExecuteScript", script=script, args=arguments, sandbox="system")["value"]
        self._command("Marionette:SetContext", value="content")
        return found

    def _script(self, script: str) -> Any:
        return self._command("WebDriver:ExecuteAsyncScript", script=script, args=[], sandbox=None)["value"]

    def _actions(self, actions: list[dict[str, Any]]) -> None:
        self._command("WebDriver:PerformActions", actions=[{"type": "key", "id": "keys", "actions": actions}])

    def open(self, url: str) -> None:
        self._command("WebDriver:Navigate", url=url)

    def look(self, width: int, height: int, scheme: str = "light", *, mobile: bool = False) -> None:
        self._chrome(
            """const [width, height, scheme] = arguments, browser = gBrowser.selectedBrowser;
            for (const name of ["width", "min-width", "max-width"]) browser.style.setProperty(name, width + "px");
            for (const name of ["height", "min-height", "max-height"]) browser.style.setProperty(name, height + "px");
            const dark = "layout.css.prefers-color-scheme.content-override";
            Services.prefs.setIntPref(dark, scheme === "dark" ? 0 : 1);""", width, height, scheme,
        )  # fmt: skip
        self.until(f"innerWidth === {width} && matchMedia('(prefers-color-scheme: {scheme})').matches")

    def screenshot(self, *, whole: bool = False) -> bytes:
        return base64.b64decode(self._command("WebDriver:TakeScreenshot", full=whole, hash=False)["value"])

    def _forget(self) -> None:
        self._chrome("Services.console.reset(); penstockAsked.length = 0;")

    def _complaints(self) -> list[str]:
        found: list[str] = self._chrome(_FIREFOX_COMPLAINTS)
        return found

    @property
    def requested(self) -> list[str]:
        found: list[str] = self._chrome("return penstockAsked")
        return found


class WebKit(Driver):
    """Its driver does not tell what the console says: a page that is served `watched` keeps it."""

    _browser = _first("lib/*/webkit2gtk-4.*/MiniBrowser", "libexec/webkit2gtk-4.*/MiniBrowser")
    missing = "" if shutil.which("WebKitWebDriver") and shutil.which("Xvfb") and _browser else (
        "no WebKit here (apt-get install webkit2gtk-driver xvfb)"
    )  # fmt: skip

    def _begin(self) -> None:
        (self._home / "gtk-3.0").mkdir()
        (self._home / "gtk-3.0" / "gtk.css").write_text(_GTK)  # its window is else never narrower than 447 pixels
        screen = self._screen()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._start("WebKitWebDriver", f"--port={port}", DISPLAY=screen, LIBGL_ALWAYS_SOFTWARE="1", NO_AT_BRIDGE="1")
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S)
        self._wait(lambda: self._http.get("/status").status_code == 200)
        dark = ["--dark-mode"] if self._scheme == "dark" else []
        options = {"binary": self._browser, "args": ["--automation", *dark]}
        made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": {"webkitgtk:browserOptions": options}}})
        self._session = "/session/" + made["sessionId"]

    def _screen(self) -> str:
        read, write = os.pipe()
        self._processes.append(subprocess.Popen(
            ["Xvfb", "-displayfd", str(write), "-screen", "0", "1400x3000x24", "-nolisten", "tcp"],
            pass_fds=(write,), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        ))  # fmt: skip
        os.close(write)
        with os.fdopen(read) as pipe:
            return ":" + pipe.readline().strip()

    def _wait(self, there: Callable[[], bool]) -> None:
        until = time.monotonic() + TIMEOUT_S
        while time.monotonic() < until:
            with contextlib.suppress(httpx.TransportError):
                if there():
                    return
            time.sleep(0.05)
        raise AssertionError("WebKitWebDriver does not start")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if hasattr(self, "_session"):
            with contextlib.suppress(httpx.HTTPError):
                self._http.delete(self._session)
        if hasattr(self, "_http"):
            self._http.close()
        super().__exit__(kind, error, trace)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        answer = self._http.request(method, path, json=body)
        value = answer.json()["value"]
        assert answer.status_code == 200, value
        return value

    def _script(self, script: str) -> Any:
        return self._ask("POST", self._session + "/execute/async", {"script": script, "args": []})

    def _actions(self, actions: list[dict[str, Any]]) -> None:
        self._ask("POST", self._session + "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def open(self, url: str) -> None:
        self._ask("POST", self._session + "/url", {"url": url})

    def look(self, width: int, height: int, scheme: str = "light", *, mobile: bool = False) -> None:
        assert scheme == self._scheme, "a WebKit is light or dark from its start on"
        self._ask("POST", self._session + "/window/rect", {"width": width, "height": height})
        self.until(f"innerWidth === {width} && matchMedia('(prefers-color-scheme: {scheme})').matches")

    def screenshot(self, *, whole: bool = False) -> bytes:
        return base64.b64decode(self._ask("GET", self._session + "/screenshot"))

    def _forget(self) -> None:
        self.run("sessionStorage.removeItem('complaints')")

    def _complaints(self) -> list[str]:
        found: list[str] = self.run("JSON.parse(sessionStorage.getItem('complaints') || '[]')")
        return found

    @property
    def requested(self) -> list[str]:
        found: list[str] = self.run("performance.getEntriesByType('resource').map((entry) => entry.name)")
        return found
