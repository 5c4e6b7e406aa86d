"""Runs a tutorial: its files are written, its commands run in shells, and what they print is what the page says.

- ```` ```python title="name.py" ````, any language but console: a file.
- ```` ```console ````: lines after `$ ` are commands of one shell, run one after the other; each must succeed, and
  print what stands below it. `...` is any text, a line of its own any number of lines.
- ```` ```console title="NAME" ````: another terminal, whose last command stays: the page waits until it has printed
  what stands below it.

Port 8000 becomes a free one. Shells and what they started end with the tutorial.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
_DONE = re.compile(r"\n=== done (\d+)\n")


class Differs(AssertionError):
    """The page says one thing, and something else is printed."""


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    text: str

    def commands(self) -> list[tuple[str, str]]:
        """(command, what it should print) in order; what is not said is not compared."""
        parts = re.split(r"^\$ (.*)\n", self.text, flags=re.MULTILINE)
        if parts[0].strip():
            raise ValueError(f"a console block begins with output: {parts[0]!r}")
        return list(zip(parts[1::2], parts[2::2], strict=True))


def blocks(page: str) -> list[Block]:
    return [Block(m[1], m[2] or "", m[3]) for m in _FENCE.finditer(page)]


def pattern(expected: str) -> re.Pattern[str]:
    """What a command should print, as a regular expression of the whole of it.

    One blank or more within a line is as good as any other number: columns are as wide as what else stands in them.
    """
    lines = []
    for line in expected.rstrip("\n").split("\n"):
        if line == "...":
            lines.append(r"(?:.*\n)*")
        else:
            parts = (re.sub(r"(?:\\ )+", " +", re.escape(part.rstrip())) for part in re.split(r"\.{3}", line))
            lines.append("[^\n]*".join(parts) + r"[ \t]*\n")
    return re.compile("".join(lines))


class Shell:
    """A bash that is told commands, in a session of its own, so that all it started can be ended."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            ["bash", "--norc"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder,
            env=env, start_new_session=True,
        )  # fmt: skip
        self._text = ""

    def run(self, command: str, expected: str, timeout_s: float) -> None:
        """Raises Differs unless it ends well and prints that."""
        self._tell(f"{command}\nprintf '\\n=== done %s\\n' $?\n")
        said, status = self._until(_DONE, command, timeout_s)
        if status != "0":
            raise Differs(f"$ {command}\n{said}\nended with status {status}")
        if expected.strip() and not pattern(expected).fullmatch(said if said.endswith("\n") else said + "\n"):
            raise Differs(f"$ {command}\n{said}\nis not\n{expected}")

    def stay(self, command: str, expected: str, timeout_s: float) -> None:
        """Start it; returns when it has printed that. Raises Differs if it does not, or ends."""
        self._tell(f"{command}; echo === ended\n")
        self._until(re.compile(f"(?s:.*?){pattern(expected).pattern}()"), command, timeout_s)

    def _tell(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode())
        self._process.stdin.flush()

    def _until(self, wanted: re.Pattern[str], command: str, timeout_s: float) -> tuple[str, str]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while (found := wanted.search(self._text)) is None:
            if "=== ended" in self._text:
                raise Differs(f"$ {command}\nended:\n{self._text}")
            if not select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise Differs(f"$ {command}\nafter {timeout_s:g} s there is only:\n{self._text}")
            more = os.read(self._process.stdout.fileno(), 1 << 16)
            if not more:
                raise Differs(f"$ {command}\nended the shell:\n{self._text}")
            self._text += more.decode(errors="replace").replace("\r\n", "\n")
        said = self._text[: found.start()]
        self._text = self._text[found.end() :]
        return said, found[1]

    def close(self) -> None:
        for number, patience_s in ((signal.SIGINT, 10.0), (signal.SIGKILL, 10.0)):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                break
            if self._process.stdin is not None and not self._process.stdin.closed:
                self._process.stdin.close()  # a bash without orders ends, once what it runs has
            try:
                self._process.wait(patience_s)
                break
            except subprocess.TimeoutExpired:
                continue
        assert self._process.stdout is not None
        self._process.stdout.close()


class Tutorial:
    """`with Tutorial(page, folder) as tutorial: tutorial.run()`."""

    def __init__(self, page: str, folder: Path, timeout_s: float = 120.0) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        self._blocks = blocks(page.replace("8000", port))
        self._folder, self._timeout_s = folder, timeout_s
        self._shells: dict[str, Shell] = {}

    def __enter__(self) -> Tutorial:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for shell in self._shells.values():
            shell.close()

    def run(self) -> int:
        """Returns how many commands were run. Raises Differs."""
        count = 0
        for block in self._blocks:
            if block.language != "console":
                if block.title:
                    path = self._folder / block.title
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(block.text, encoding="utf-8")
                continue
            if block.title not in self._shells:
                self._shells[block.title] = Shell(self._folder, environment())
            shell = self._shells[block.title]
            commands = block.commands()
            for number, (command, expected) in enumerate(commands, 1):
                stays = block.title and number == len(commands)
                (shell.stay if stays else shell.run)(command, expected, self._timeout_s)
                count += 1
        return count


def environment() -> dict[str, str]:
    """`penstock` and `python` are those that run the tests; lines are as wide as the pages say; nothing is fetched."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    quiet = {k: v for k, v in os.environ.items() if not k.startswith(("PENSTOCK_", "COV_"))}
    return quiet | {"PATH": path, "COLUMNS": "120", "HF_HUB_OFFLINE": "1", "TERM": "dumb", "NO_COLOR": "1"}


def missing() -> str | None:
    """Why tutorials cannot be run here."""
    lacking = [name for name in ("bash", "curl", "grep") if shutil.which(name) is None]
    return f"{', '.join(lacking)} not found" if lacking else None
