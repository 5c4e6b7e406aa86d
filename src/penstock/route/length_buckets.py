"""Long answers are spread over the engines that decode: two are drawn, and whoever has fewer of them gets the request.

A request goes by the bucket of its expected length, so a prediction has to be right to within a bucket alone. Only
engines whose memory will hold all that they are expected to come to are drawn from, if there are any. Where engines
compute prompts alone, whoever has fewest prompt tokens waiting gets a new request: its answer is another's work.

Source: Hu et al., TetriInfer, arXiv 2401.11181, sections 3.3.2 and 3.3.4 (length buckets of 200 tokens; power of two
among decode instances with room; the one where heavy decodes are fewest among all).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.route.plain import SEED
from penstock.route.router import EngineLoad, RoutedRequest, RoutePolicy

BUCKET_TOKENS = 200
UNKNOWN_TOKENS = 200
"""What an answer counts as whose length nobody expects."""


def bucket_of(num_tokens: int) -> int:
    """Of an expected length: 0 is the shortest."""
    return max(0, num_tokens or UNKNOWN_TOKENS) // BUCKET_TOKENS


@dataclass
class _Placed:
    """Of one engine: answers beyond the first bucket, and tokens that prompts and answers are expected to come to."""

    heavy: int = 0
    requests: int = 0
    tokens: int = 0


class LengthBuckets(RoutePolicy):
    def __init__(self) -> None:
        self._rng = random.Random(SEED)
        self._there: dict[int, _Placed] = {}
        self._theirs: dict[tuple[int, int], RoutedRequest] = {}
        """Requests (by identity) by engine."""
        self._coming: dict[int, tuple[RoutedRequest, int]] = {}
        """Chosen, and not placed yet: blocks are on their way, and others are asked about meanwhile."""

    def choose(self, asked: RoutedRequest, loads: Sequence[EngineLoad]) -> int:
        if any(load.prompts_only for load in loads):
            return min(range(len(loads)), key=lambda i: (loads[i].waiting_tokens, loads[i].requests))
        wanted = _tokens_of(asked)
        roomy = [i for i, load in enumerate(loads) if self._room(load) >= wanted] or list(range(len(loads)))
        drawn = roomy if len(roomy) < 2 else self._rng.sample(roomy, 2)
        self._arrived(asked)
        chosen = min(drawn, key=lambda i: self._weight(loads[i].number, heavy=bucket_of(asked.expected) > 0))
        self._coming[id(asked)] = asked, loads[chosen].number
        self._count(asked, loads[chosen].number, 1)
        return chosen

    def _weight(self, number: int, *, heavy: bool) -> tuple[int, int]:
        """Less is better. A long answer looks at long ones first, a short one at all that is there."""
        there = self._there.get(number, _Placed())
        return (there.heavy, there.tokens) if heavy else (there.tokens, there.requests)

    def _room(self, load: EngineLoad) -> int:
        memory = (load.kv_blocks or 1 << 16) * load.block_size
        return memory - self._there.get(load.number, _Placed()).tokens

    def placed(self, asked: RoutedRequest, number: int) -> None:
        self._arrived(asked)
        self._theirs[id(asked), number] = asked
        self._count(asked, number, 1)

    def ended(self, asked: RoutedRequest, number: int) -> None:
        self._arrived(asked)
        if self._theirs.pop((id(asked), number), None) is not None:
            self._count(asked, number, -1)

    def gone(self, number: int) -> None:
        self._there.pop(number, None)
        self._theirs = {key: asked for key, asked in self._theirs.items() if key[1] != number}
        self._coming = {key: found for key, found in self._coming.items() if found[1] != number}

    def _arrived(self, asked: RoutedRequest) -> None:
        """What was chosen for it last counts no more as on its way."""
        if (found := self._coming.pop(id(asked), None)) is not None:
            self._count(asked, found[1], -1)

    def _count(self, asked: RoutedRequest, number: int, sign: int) -> None:
        there = self._there.setdefault(number, _Placed())
        there.heavy += sign * (bucket_of(asked.expected) > 0)
        there.requests += sign
        there.tokens += sign * _tokens_of(asked)


def _tokens_of(asked: RoutedRequest) -> int:
    """Of prompt and answer, by the end of its bucket."""
    return asked.num_tokens + (bucket_of(asked.expected) + 1) * BUCKET_TOKENS
