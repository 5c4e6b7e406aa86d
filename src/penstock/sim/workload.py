"""What arrives when: requests without text. Prompts are made up on arrival, so that shared prefixes are really
shared.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from penstock.base.errors import InputError
from penstock.core.qoe import Expected
from penstock.core.request import ApiCall

MAX_TOKENS = 2**24
"""Longest prompt or output of a workload: far above any context, far below what would hurt."""
MAX_TIME_S = 1e9
MAX_BLOCK_ID = 2**48 - 1
_KEY_BITS = 50


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One request of a workload.

    Attributes:
        arrival_s: seconds since the workload began.
        num_prompt, num_output: tokens; the output has exactly so many, whatever they are.
        tenant, session: labels; "" if there is none.
        blocks: ids of the pieces the prompt begins with, `Workload.block_tokens` tokens each; the last may be cut off
            by the prompt's end. Equal ids are equal tokens. What follows them is like nothing else.
        priority, tenant, weight, slo_tpot_s, slo_ttft_s, calls, offline_s: as in `Request`; expected: its
            `expected_tokens`.
        reader: when it expects tokens; None: as people who chat do (`core.qoe.Expected`).
    """

    arrival_s: float
    num_prompt: int
    num_output: int
    tenant: str = ""
    session: str = ""
    blocks: tuple[int, ...] = ()
    priority: int = 0
    weight: float = 1.0
    slo_tpot_s: float | None = None
    slo_ttft_s: float | None = None
    expected: int = 0
    reader: Expected | None = None
    calls: tuple[ApiCall, ...] = ()
    offline_s: float | None = None


@dataclass
class Broken:
    """Lines of a trace that could not be used. With `skip` they are counted, otherwise the first one is an
    InputError.
    """

    skip: bool = False
    count: int = 0
    first: str = ""

    def add(self, where: str, problem: str) -> None:
        """Raises InputError, naming file and line, unless broken lines are to be skipped."""
        message = f"{where}: {problem}"
        if not self.skip:
            raise InputError(f"{message}; mend the line, or leave such lines out with --skip-broken")
        self.first = self.first or message
        self.count += 1


@dataclass(frozen=True)
class Workload:
    """A named source of requests in order of arrival. Every `iter` starts it anew and yields the same.

    `has_times` is False for mere lengths (every arrival is 0), which need an arrival process. `num_requests` is a hint
    for progress bars, None if nobody knows. `broken` counts what the latest iteration skipped.
    """

    name: str
    description: str
    source: Callable[[], Iterator[TimedRequest]]
    block_tokens: int = 512
    num_requests: int | None = None
    has_times: bool = True
    broken: Broken = field(default_factory=Broken)

    def __iter__(self) -> Iterator[TimedRequest]:
        self.broken.count, self.broken.first = 0, ""
        return self.source()

    def read_by(self, reader: Expected) -> Workload:
        """The same requests; those that do not say what they expect expect this."""
        return replace(self, source=lambda: (replace(r, reader=r.reader or reader) for r in self.source()))

    def limited(self, n: int) -> Workload:
        """The first `n` requests."""
        known = n if self.num_requests is None else min(n, self.num_requests)
        return replace(self, source=lambda: itertools.islice(self.source(), n), num_requests=known)

    def until(self, end_s: float) -> Workload:
        """What arrives before `end_s`."""
        return replace(
            self,
            source=lambda: itertools.takewhile(lambda r: r.arrival_s < end_s, self.source()),
            num_requests=None,
            description=f"{self.description}; the first {end_s:g} s",
        )

    def scaled(self, factor: float) -> Workload:
        """The same requests, arriving `factor` times as fast."""
        return replace(
            self,
            source=lambda: (replace(r, arrival_s=r.arrival_s / factor) for r in self.source()),
            description=f"{self.description}; arrival rate x {factor:g}",
        )

    def repeated(self, times: int) -> Workload:
        """The same again and again, each time behind the last arrival by what lies between two on average. What is
        shared is shared over all of them."""
        if times < 1:
            raise InputError(f"repeat must be at least 1, not {times}", param="repeat")

        def source() -> Iterator[TimedRequest]:
            offset_s = last_s = 0.0
            for _ in range(times):
                number = 0
                for r in self.source():
                    last_s = r.arrival_s + offset_s
                    number += 1
                    yield replace(r, arrival_s=last_s)
                offset_s = last_s + (last_s - offset_s) / max(1, number - 1)

        known = None if self.num_requests is None else self.num_requests * times
        return replace(
            self, source=source, num_requests=known, description=f"{self.description}; {times} times in a row"
        )

    def resized(self, factor: float) -> Workload:
        """The same requests with lengths times `factor`, at least 1 token; what they share shrinks or grows with
        them."""

        def source() -> Iterator[TimedRequest]:
            for r in self.source():
                lengths = (min(MAX_TOKENS, max(1, round(n * factor))) for n in (r.num_prompt, r.num_output))
                num_prompt, num_output = lengths
                yield replace(r, num_prompt=num_prompt, num_output=num_output)

        block = max(1, round(self.block_tokens * factor))
        return replace(self, source=source, block_tokens=block, description=f"{self.description}; lengths x {factor:g}")

    def timed(self, times: Callable[[], Iterator[float]], what: str) -> Workload:
        """The same requests in the same order, arriving at other times. `what` describes them."""

        def source() -> Iterator[TimedRequest]:
            for request, arrival_s in zip(self.source(), times(), strict=False):
                yield replace(request, arrival_s=arrival_s)

        return replace(self, source=source, description=f"{self.description}; arrivals {what}", has_times=True)


def from_list(
    name: str, requests: Iterable[TimedRequest], *, description: str = "", block_tokens: int = 512
) -> Workload:
    """A workload of given requests, which must be in order of arrival."""
    kept = tuple(requests)
    return Workload(name, description or name, lambda: iter(kept), block_tokens, len(kept))


def prompt_ids(request: TimedRequest, number: int, vocab_size: int, block_tokens: int) -> array[int]:
    """The prompt of the `number`-th request of a workload: `num_prompt` ids in [0, vocab_size), the same every time.

    Two pieces with different ids (or a piece and a tail, or the tails of two requests) differ within their first
    ceil(50 / log2(vocab_size)) tokens for certain: those spell the id. The rest is filled by a mixing function.
    """
    num_shared = min(len(request.blocks) * block_tokens, request.num_prompt)
    parts: list[npt.NDArray[np.uint64]] = []
    if num_shared:
        keys = np.array(request.blocks, np.uint64) << np.uint64(1)
        parts.append(_runs(keys, block_tokens, vocab_size).reshape(-1)[:num_shared])
    if num_shared < request.num_prompt:
        tail = np.array([2 * number + 1], np.uint64)
        parts.append(_runs(tail, request.num_prompt - num_shared, vocab_size)[0])
    out = array("I")
    out.frombytes(np.concatenate(parts).astype(np.uint32).tobytes())
    return out


def _runs(keys: npt.NDArray[np.uint64], length: int, vocab_size: int) -> npt.NDArray[np.uint64]:
    """[n] keys -> [n, length] tokens."""
    vocab = np.uint64(vocab_size)
    position = np.arange(length, dtype=np.uint64)
    # The finaliser of splitmix64 (Steele et al., OOPSLA 2014) over a counter per key.
    x = (keys * np.uint64(0x9E3779B97F4A7C15))[:, None] + position * np.uint64(0xD1B54A32D192ED03)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x %= vocab
    digits = -(-_KEY_BITS // max(1, (vocab_size - 1).bit_length() - 1))
    left = keys.copy()
    for j in range(min(digits, length)):
        x[:, j] = left % vocab
        left //= vocab
    return x
