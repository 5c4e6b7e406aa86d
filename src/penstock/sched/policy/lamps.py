"""Smallest memory over time first, for requests that call tools: what a request will hold, and for how long.

A request's rank is what it is expected to take until its end, in token-seconds: its cache grows token by token, and
during a call it is kept, computed again or copied, whichever wastes least. A short answer with a long call may so go
behind a long answer without one. With `rank=size` calls are not looked at: shortest job first.

A request is e times as large as another: it stands `guard_s` / 20 seconds of age behind it, and none more than
`guard_s`. So nobody who comes so much later overtakes, and nobody starves; keys never change.
Source: LAMPS, arXiv 2410.18248, sections 3.2 and 3.3 (its guard counts iterations; this one is an age).
"""

from __future__ import annotations

from math import log1p
from typing import TYPE_CHECKING, Any

from penstock.base.errors import ConfigError
from penstock.core.sequence import Sequence
from penstock.sched.pauses import PauseCase, wastes
from penstock.sched.policy.fcfs import Fcfs

if TYPE_CHECKING:
    from penstock.core.request import Request


class Lamps(Fcfs):
    """Args:
    rank: `memory` (tokens x seconds) or `size` (tokens).
    guard_s: the most that a request can be put back, in seconds of age, > 0.
    token_s, copy_s: seconds per generated token, and per token copied one way, by which requests are compared;
        `prompt_s`: per token of a prompt.
    """

    name = "lamps"

    def __init__(
        self, rank: str = "memory", guard_s: float = 600.0, token_s: float = 0.02, prompt_s: float = 0.001,
        copy_s: float = 0.0001,
    ) -> None:  # fmt: skip
        if rank not in ("memory", "size"):
            raise ConfigError(f"rank is {rank!r}; it must be memory or size", field="rank")
        if not min(guard_s, token_s, prompt_s, copy_s) > 0:
            raise ConfigError("guard_s, token_s, prompt_s and copy_s must be above 0", field="guard_s")
        self.rank = rank
        self.guard_s = guard_s
        self.token_s, self.prompt_s, self.copy_s = token_s, prompt_s, copy_s

    def key(self, seq: Sequence) -> tuple[int, ...]:
        """(virtual arrival in microseconds, arrival, sample)."""
        request = seq.request
        put_back_s = self.guard_s * min(1.0, log1p(self.size(request)) / 20)
        return (round(1e6 * (request.arrival_s + put_back_s)), seq.arrival, seq.index)

    def size(self, request: Request) -> float:
        """Tokens, or token-seconds, that a request is expected to take."""
        length = request.expected_tokens or request.max_tokens
        held = len(request.prompt_token_ids)
        if self.rank == "size":
            return held * self.prompt_s / self.token_s + length
        total, done = self.prompt_s * held * held / 2, 0
        for call in request.calls:
            total += self._generating(held, call.after - done)
            held += call.after - done
            total += self._calling(held, call.expected_s)
            total += self.prompt_s * len(call.result) * (held + len(call.result) / 2)
            held += len(call.result)
            done = call.after + len(call.result)
        return total + self._generating(held, max(0, length - done))

    def _generating(self, held: int, n: int) -> float:
        return self.token_s * n * (held + n / 2)

    def _calling(self, held: int, pause_s: float) -> float:
        case = PauseCase(held, 0, pause_s, self.prompt_s * held, self.copy_s * held)
        return min(wastes(case).values())

    def victim(self, running: Any, needy: Sequence) -> Sequence | None:
        """Somebody who waits for a tool's answer, the largest first; else the largest, if larger than `needy`."""
        for seq in reversed(running):
            if seq.held and seq is not needy and seq.num_inflight == 0 and seq.tables:
                return seq  # type: ignore[no-any-return]
        return super().victim(running, needy)
