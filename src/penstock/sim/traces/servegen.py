"""ServeGen: what clients of a production service look like, as distributions per window. One client is one tenant.

A trace line gives a window's start, mean rate and the law of its gaps; the data set gives the lengths. The law's shape
is taken, its scale is set so that the mean rate is the window's: the published fits of bursty windows are off by up to
a factor of five in the mean. Source: Xiang et al., ServeGen, arXiv 2505.09999; github.com/alibaba/ServeGen.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.base.errors import InputError
from penstock.sim.traces import TraceOptions
from penstock.sim.traces.reading import columns, lines, seconds, tokens
from penstock.sim.workload import Broken, TimedRequest, Workload

_TRACE, _DATASET = "-trace.csv", "-dataset.json"
_MAX_RATE = 1e6
_MAX_DATASET_BYTES = 2**28
_CHUNK = 256


@dataclass(frozen=True)
class Window:
    """`rate` in requests per second; `law` is "Gamma" or "Weibull" with this `shape`, or "" for a silent window."""

    start_s: float
    rate: float
    law: str
    shape: float


@dataclass(frozen=True)
class Table:
    """Lengths and their cumulative probabilities."""

    lengths: npt.NDArray[np.int64]
    cumulative: npt.NDArray[np.float64]

    def draw(self, rng: np.random.Generator, n: int) -> list[int]:
        picked = np.searchsorted(self.cumulative, rng.random(n) * self.cumulative[-1], side="right")
        out: list[int] = self.lengths[np.minimum(picked, len(self.lengths) - 1)].tolist()
        return out


class ServeGen:
    name = "servegen"
    about = "a folder of *-trace.csv with *-dataset.json, or one *-trace.csv: one tenant per client"

    def recognises(self, path: Path, head: bytes) -> bool:
        return path.name.endswith(_TRACE) if head else path.is_dir() and any(path.glob("*" + _TRACE))

    def open(self, path: Path, options: TraceOptions) -> Workload:
        traces = sorted(path.glob("*" + _TRACE)) if path.is_dir() else [path]
        if not traces:
            raise InputError(f"{path}: holds no *{_TRACE}", param="trace")
        broken = Broken(options.skip_broken)

        def source() -> Iterator[TimedRequest]:
            streams = [_client(trace, [options.seed, number], broken) for number, trace in enumerate(traces)]
            return heapq.merge(*streams, key=attrgetter("arrival_s"))

        what = f"{len(traces)} clients" if len(traces) > 1 else "1 client"
        return Workload(path.stem, f"ServeGen, {what} of {path.name}; seed {options.seed}", source, broken=broken)


def _client(trace: Path, seed: list[int], broken: Broken) -> Iterator[TimedRequest]:
    """One client's endless-looking stream: gaps of each window, lengths of the data set's window."""
    tenant = trace.name.removesuffix(_TRACE)
    windows = read_windows(trace, broken)
    starts, tables = read_lengths(trace.with_name(tenant + _DATASET))
    rng = np.random.default_rng(seed)
    for window, end_s in zip(windows, [w.start_s for w in windows[1:]] + [math.inf], strict=True):
        if not window.law:
            continue
        if math.isinf(end_s):  # the last window is as long as the one before it
            end_s = window.start_s + (window.start_s - windows[-2].start_s if len(windows) > 1 else 600.0)
        prompts, outputs = tables[max(0, bisect_right(starts, window.start_s) - 1)]
        now_s = window.start_s
        while now_s < end_s:
            gaps_s = _gaps(rng, window)
            for gap_s, num_prompt, num_output in zip(
                gaps_s, prompts.draw(rng, _CHUNK), outputs.draw(rng, _CHUNK), strict=True
            ):
                now_s += gap_s
                if now_s >= end_s:
                    break
                yield TimedRequest(now_s, num_prompt, num_output, tenant=tenant)


def _gaps(rng: np.random.Generator, window: Window) -> list[float]:
    if window.law == "Gamma":
        gaps = rng.gamma(window.shape, 1.0 / window.shape, _CHUNK)
    else:
        gaps = rng.weibull(window.shape, _CHUNK) / math.gamma(1.0 + 1.0 / window.shape)
    out: list[float] = (gaps / window.rate).tolist()
    return out


def read_windows(path: Path, broken: Broken) -> list[Window]:
    """The windows of a *-trace.csv, in order. Raises InputError."""
    out: list[Window] = []
    for number, text in lines(path):
        try:
            window = _window(text)
            if out and window.start_s <= out[-1].start_s:
                raise ValueError("starts no later than the window above it")
        except ValueError as error:
            broken.add(f"{path}:{number}", str(error))
            continue
        out.append(window)
    return out


def _window(text: str) -> Window:
    start, rate, _, law, shape = columns(text, 6)[:5]
    start_s, per_s = seconds(start, "the window's start"), seconds(rate, "the rate", _MAX_RATE)
    if per_s == 0:
        return Window(start_s, 0.0, "", 0.0)
    if law not in ("Gamma", "Weibull"):
        raise ValueError(f"the distribution is {law[:20]!r}, not Gamma or Weibull")
    exponent = seconds(shape, "the shape", 1e6)
    if exponent < 0.01:
        raise ValueError(f"the shape is {exponent:g}, less than 0.01")
    return Window(start_s, per_s, law, exponent)


def read_lengths(path: Path) -> tuple[list[float], list[tuple[Table, Table]]]:
    """(starts of windows, (prompt lengths, output lengths) of each) of a *-dataset.json; empty windows are left out.

    Raises InputError.
    """
    try:
        if path.stat().st_size > _MAX_DATASET_BYTES:
            raise InputError(f"{path}: is larger than {_MAX_DATASET_BYTES} bytes", param="trace")
        raw: Any = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}", param="trace") from None
    except msgspec.DecodeError as error:
        raise InputError(f"{path}: is not JSON: {error}", param="trace") from None
    found: list[tuple[float, tuple[Table, Table]]] = []
    try:
        for start, window in raw.items():
            prompts, outputs = _table(window["input_tokens"]), _table(window["output_tokens"])
            if prompts is not None and outputs is not None:
                found.append((seconds(start, "the window's start"), (prompts, outputs)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: is not a ServeGen data set: {type(error).__name__}: {error}", param="trace"
        ) from None
    if not found:
        raise InputError(f"{path}: has no window with lengths", param="trace")
    found.sort(key=lambda item: item[0])
    return [start for start, _ in found], [tables for _, tables in found]


def _table(text: str) -> Table | None:
    """`{34: 0.001, 35: 0.041}` as data; None if nothing is in it. Raises ValueError."""
    inner = text.strip().removeprefix("{").removesuffix("}").strip()
    lengths: list[int] = []
    weights: list[float] = []
    for pair in inner.split(",") if inner else ():
        length, colon, weight = pair.partition(":")
        if not colon:
            raise ValueError(f"{pair[:40]!r} is not a length and its probability")
        share = seconds(weight, "a probability", 1.0 + 1e-6)
        if share > 0:
            lengths.append(max(1, tokens(max(1.0, float(length)), "a length")))
            weights.append(share)
    if not weights:
        return None
    return Table(np.array(lengths, np.int64), np.cumsum(weights))
