"""Requests for several engines: what a router wants to know of them, kept up to date as requests come and go."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from secrets import token_bytes
from typing import TYPE_CHECKING

from penstock.core.replica_roles import PREFILL
from penstock.kv.block_names import BlockNames
from penstock.kv.store_index import hash_of, names_after
from penstock.route.router import EngineLoad, RoutedRequest, RoutePolicy

if TYPE_CHECKING:
    from penstock.core.messages import BlocksTold, EngineInfo
    from penstock.core.request import Request
    from penstock.engine.replica import Replica
    from penstock.engine.stream import Stream

MOST_BLOCKS = 1024
"""Of a prompt that a router is told of: who shares so many shares enough."""


MOST_ROOTS = 4096
"""Namespaces whose first name is remembered."""


class EnginePlacement:
    """See `replica.Placing`. `block_size`: of the engines' prefix cache; 0: there is none (or none is known yet), and
    prompts share nothing. `block_secret`: engines tell the router which blocks they hold, named with this; empty: it
    does not want to know."""

    def __init__(self, router: RoutePolicy) -> None:
        self.router = router
        self.block_size = 0
        self.block_secret = token_bytes(32) if router.reads_blocks else b""
        self._named_with = b"", ""
        self._roots: dict[tuple[bytes, str], bytes] = {}
        self._loads: dict[int, EngineLoad] = {}
        self._given: dict[str, RoutedRequest] = {}
        self._waiting: dict[str, int] = {}
        """Tokens of the prompts of those that have no token yet."""

    def follow(self, info: EngineInfo) -> None:
        """Engines are as this one says."""
        self.block_size = info.block_size if info.caches_prefixes else 0
        self._named_with = info.block_secret, info.block_fingerprint
        self._roots.clear()

    def told(self, replica: Replica, blocks: BlocksTold) -> None:
        """What an engine holds has changed."""
        self.router.told(replica.number, blocks.stored, blocks.removed, cleared=blocks.cleared)

    def choose(self, stream: Stream, replicas: Sequence[Replica]) -> Replica:
        loads = [self._load(replica) for replica in replicas]
        return replicas[self.router.choose(self._of(stream), loads)]

    def placed(self, stream: Stream, replica: Replica) -> None:
        """Also one that was placed elsewhere before, whose engine has ended."""
        load, asked = self._load(replica), self._of(stream)
        load.requests += 1
        load.urgent += asked.priority < 0
        load.tokens += asked.num_tokens
        load.waiting_tokens += asked.num_tokens
        self._waiting[stream.request_id] = asked.num_tokens
        self.router.placed(asked, replica.number)

    def progressed(self, request_ids: Iterable[str], replica: Replica) -> None:
        """Of these, tokens have come."""
        load = self._load(replica)
        for request_id in request_ids:
            if (num_tokens := self._waiting.pop(request_id, 0)) and request_id in replica.streams:
                load.waiting_tokens -= num_tokens

    def ended(self, request_id: str, replica: Replica) -> None:
        """The request is no longer that engine's."""
        asked = self._given.pop(request_id, None)
        if asked is None:
            return
        self.router.ended(asked, replica.number)
        load = self._loads.get(replica.number)
        if load is None:  # it has been removed meanwhile
            self._waiting.pop(request_id, None)
            return
        load.requests -= 1
        load.urgent -= asked.priority < 0
        load.tokens -= asked.num_tokens
        load.waiting_tokens -= self._waiting.pop(request_id, 0)

    def left(self, replica: Replica) -> None:
        """The engine has been removed."""
        self._loads.pop(replica.number, None)
        self.router.gone(replica.number)

    def _load(self, replica: Replica) -> EngineLoad:
        load = self._loads.get(replica.number)
        if load is None:
            load = self._loads[replica.number] = EngineLoad(replica.number)
        said = replica.snapshot
        load.kv_blocks, load.kv_used = said.kv_total, said.kv_used
        load.block_size = self.block_size or 1
        load.prompts_only = replica.role == PREFILL
        return load

    def _of(self, stream: Stream) -> RoutedRequest:
        """Made once: whoever is chosen for it is told of it, too."""
        request = stream.request
        asked = self._given.get(request.request_id)
        if asked is None:
            asked = self._given[request.request_id] = RoutedRequest(
                len(request.prompt_token_ids), self._blocks(request), stream.session, request.priority,
                min(request.expected_tokens or request.max_tokens, request.max_tokens),
            )  # fmt: skip
        return asked

    def _blocks(self, request: Request) -> list[int]:
        if not (self.block_size and self.router.reads_blocks):
            return []
        (secret, fingerprint), whose = self._named_with, (request.namespace, request.taint)
        if whose not in self._roots:
            if len(self._roots) >= MOST_ROOTS:
                self._roots.clear()
            self._roots[whose] = BlockNames(secret, fingerprint, self.block_size).root(*whose)
        ids = array("i", request.prompt_token_ids[: MOST_BLOCKS * self.block_size]).tobytes()
        return [hash_of(name) for name in names_after(secret, self._roots[whose], ids, 4 * self.block_size)]
