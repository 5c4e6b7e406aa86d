"""What a stage is given: the device, clocks, and where figures go.

Every figure is a line of a file the moment it is known, so that nothing is lost with a stage that does not end.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_HEAD_START = 2_000_000
"""Cycles of the device, about a millisecond, in which the host starts what is measured."""


class Stop(Exception):
    """A measurement that cannot be made, with the reason. The stage goes on."""


class Bench:
    """One run of stages in one process.

    Attributes:
        device: where tensors are.
        tiny: shapes that a test can afford.
        known: figures so far, those of earlier processes included: name -> value.
    """

    def __init__(
        self, device: str, tiny: bool, lines: Path, until_s: float = float("inf"), *, depth: int = 1
    ) -> None:  # fmt: skip
        """`device`, `depth`: as the settings of these names: cuda, cuda:N or cpu-torch; steps in flight."""
        self.depth = depth
        self.name = device
        self.device = torch.device("cpu" if device == "cpu-torch" else device)
        self.tiny = tiny
        self.until_s = until_s
        self._lines = lines
        self.stage = ""
        self.known: dict[str, Any] = {}
        if lines.exists():
            for line in lines.read_text("utf-8").splitlines():
                entry = json.loads(line)
                if entry["kind"] == "figure":
                    self.known[entry["name"]] = entry["value"]

    # -- what is found ---------------------------------------------------------------------------------------------

    def figure(self, name: str, value: float, unit: str, **more: Any) -> None:
        """A number with its unit, and how it came about."""
        self.known[name] = value
        self.write("figure", name=name, value=value, unit=unit, **more)

    def check(self, name: str, good: bool, said: str = "") -> None:
        """A result that must hold."""
        self.write("check", name=name, good=bool(good), said=said)

    def note(self, name: str, said: str) -> None:
        """What was not measured, and why; or what should be known beside a figure."""
        self.write("note", name=name, said=said)

    def attempt(self, name: str, work: Callable[[], object]) -> bool:
        """`work`; what goes wrong becomes a line, and the stage goes on."""
        import traceback

        try:
            work()
        except Stop as reason:
            self.note(name, str(reason))
            return False
        except Exception as error:
            self.write("failed", name=name, said=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
            return False
        return True

    def write(self, kind: str, **entry: Any) -> None:
        with self._lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"stage": self.stage, "kind": kind, **entry}) + "\n")

    # -- time ------------------------------------------------------------------------------------------------------

    def left_s(self) -> float:
        """Seconds that the stage may still take."""
        return self.until_s - time.monotonic()

    def need(self, seconds: float, what: str) -> None:
        """Raises: Stop if that is more than what is left."""
        if self.left_s() < seconds and not self.tiny:
            raise Stop(f"{what} needs about {seconds:.0f} s, and {self.left_s():.0f} s of the stage are left")

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object], repeats: int = 20, warm: int = 3) -> dict[str, Any]:
        """Of one call, from its start until the device is done: median, low and high of at most `repeats`.

        On a GPU the device's own clock (events) around each call, after `warm` calls that compile, and the device is
        kept waiting until the host has started all of it: what is measured is the device's part. Fewer repeats where
        one takes long.
        """
        for _ in range(warm):
            began = time.perf_counter()
            work()
            self.sync()
            if time.perf_counter() - began > 0.2 * max(1.0, self.left_s()):
                break
        samples: list[float] = []
        began = time.monotonic()
        while len(samples) < (3 if self.tiny else repeats):
            samples.append(self._once(work))
            if time.monotonic() - began > 0.3 * max(0.0, self.left_s()):
                break
        return {"median": statistics.median(samples), "low": min(samples), "high": max(samples), "n": len(samples)}

    def _once(self, work: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            began = time.perf_counter()
            work()
            return time.perf_counter() - began
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        torch.cuda._sleep(_HEAD_START)  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def share(self, name: str, of: str, value: float) -> float:
        """`value` in units of a ceiling that was measured in this run. Raises: Stop if it was not."""
        if of not in self.known:
            raise Stop(f"{name}: the ceiling {of} was not measured in this run")
        return value / float(self.known[of])
