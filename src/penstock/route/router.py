"""What a router is asked, and what it may know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RoutedRequest:
    """A request on its way.

    Attributes:
        num_tokens: of its prompt.
        blocks: hashes of its prompt's whole blocks, each of all up to there; empty: it shares nothing with others.
        session: whose it is, where its client says so ("" if not).
        priority: as of `core.request.Request`: the lower, the sooner.
        expected: tokens that its answer will probably come to; 0: nobody knows.
    """

    num_tokens: int
    blocks: Sequence[int] = ()
    session: str = ""
    priority: int = 0
    expected: int = 0


@dataclass
class EngineLoad:
    """One engine, as its router sees it.

    Attributes:
        number: which engine it is, for as long as it is there.
        requests: given to it and not finished; `urgent`: of them, those that go before others (a priority below 0).
        tokens: of their prompts.
        waiting_tokens: of the prompts of those that have no token yet.
        kv_blocks, kv_used: of its KV memory, and those of them that running requests hold, as it said last.
        block_size: tokens of a block.
        prompts_only: its role is `prefill`: others go on with what it begins.
    """

    number: int
    requests: int = 0
    urgent: int = 0
    tokens: int = 0
    waiting_tokens: int = 0
    kv_blocks: int = 0
    kv_used: int = 0
    block_size: int = 16
    prompts_only: bool = False


class RoutePolicy:
    """Chooses one of the engines that can be given work. Deterministic: the same questions get the same answers.

    `reads_loads`, `reads_tokens`, `reads_blocks`: whether it looks at loads at all, at more of them than requests, and
    at `RoutedRequest.blocks`: what nobody looks at need not be counted.
    """

    reads_loads = reads_tokens = True
    reads_blocks = False

    def choose(self, asked: RoutedRequest, loads: Sequence[EngineLoad]) -> int:
        """Index into `loads`, of which there is one at least."""
        raise NotImplementedError

    def placed(self, asked: RoutedRequest, number: int) -> None:
        """The request went to engine `number`: as chosen, or because its engine had died."""

    def ended(self, asked: RoutedRequest, number: int) -> None:
        """A request that was placed there has ended, or has been taken from there."""

    def told(self, number: int, stored: Sequence[int], removed: Sequence[int], *, cleared: bool = False) -> None:
        """Engine `number` holds these blocks from now on, and no more those; `cleared`: it held nothing before. Only
        where the router reads blocks, and only by engines that can tell."""

    def gone(self, number: int) -> None:
        """Engine `number` has lost all that it had."""
