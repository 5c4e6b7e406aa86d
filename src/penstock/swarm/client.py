"""A client of a swarm: embeds, sends rows through a chain of servers, chooses tokens, and survives its servers.

It keeps what it has sent to each server. When one is gone, another one that has its layers (or several, that have them
between them) is given the same rows from the beginning and so has the same keys and values; the sequence goes on where
it was, with the same tokens. Source: Borzunov et al., Petals, arXiv 2312.08361, section 3.1 (caches on both sides).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from penstock.base.bf16 import F32
from penstock.base.errors import EngineError, InputError, ModelError
from penstock.route.chains import Hop, Span, least_chain, missing_layers
from penstock.runner.block_wire import Channel, PeerError
from penstock.swarm.model import Ends, SwarmModel
from penstock.swarm.wire import (
    CLOSE,
    DIRECTORY,
    FACTS,
    LAYERS,
    LIST,
    MOST_ROWS,
    OPEN,
    Facts,
    Opening,
    Refused,
    SwarmOffer,
    asked,
    connect,
    hung_up,
    said,
    stepped,
)
from penstock.text.detokenize import IncrementalDetokenizer

WITHIN_S = 30.0
"""The longest that an answer may take before a server counts as gone."""
PATIENCE_S = 60.0
"""The longest that a sequence waits for servers of layers that nobody has."""
_AGAIN_S = 0.2
_AVOID_S = 5.0
"""A server that has refused is not asked again for so long."""
_PINGS = 3
_log = logging.getLogger("penstock.swarm")
LOST = (PeerError, Refused)
"""What a server may do to a sequence: be gone, or not go on."""


class _Kept:
    """Rows [n, E] that were given to a server, in memory that grows."""

    def __init__(self, width: int) -> None:
        self._rows: F32 = np.empty((64, width), np.float32)
        self.num = 0

    def add(self, rows: F32) -> None:
        end = self.num + len(rows)
        if end > len(self._rows):
            grown = np.empty((max(end, 2 * len(self._rows)), self._rows.shape[1]), np.float32)
            grown[: self.num] = self._rows[: self.num]
            self._rows = grown
        self._rows[self.num : end] = rows
        self.num = end

    @property
    def all(self) -> F32:
        return self._rows[: self.num]


@dataclass
class _Link:
    """A hop of a sequence's chain, open on its server. `kept`: what it has been given."""

    hop: Hop
    channel: Channel
    session: int
    kept: _Kept

    def run(self, rows: F32) -> F32:
        """The next rows through it. Raises one of `LOST`: it was given nothing then."""
        found = stepped(self.channel, self.session, self.kept.num, rows)
        self.kept.add(rows)
        return found


@dataclass
class ClientCounts:
    """Since the client began. `replaced`: links of chains; `replayed`: rows that were sent once more for them."""

    replaced: int = 0
    replayed: int = 0
    waited_s: float = 0.0
    chains: list[list[Hop]] = field(default_factory=list)


class SwarmClient:
    """Not for several threads at once. `patience_s`: see `PATIENCE_S`; `within_s`: see `WITHIN_S`."""

    def __init__(
        self, model: SwarmModel, directory: str, secret: bytes, *, within_s: float = WITHIN_S,
        patience_s: float = PATIENCE_S,
    ) -> None:  # fmt: skip
        self.model, self.counts = model, ClientCounts()
        self._ends = Ends(model)
        self._where, self._secret = directory, secret
        self._within_s, self._patience_s = within_s, patience_s
        self._directory: Channel | None = None
        self._channels: dict[str, tuple[Channel, float]] = {}
        """Server -> the connection, and its way there and back in seconds."""
        self._lost: set[str] = set()
        """Servers that are gone: each start of one has another name."""
        self._avoided: dict[str, float] = {}
        """Those that have refused something, and until when they are not asked."""
        self._sessions = count(1)

    def close(self) -> None:
        for channel, _ in self._channels.values():
            hung_up(channel)
        self._channels = {}
        if self._directory is not None:
            hung_up(self._directory)
            self._directory = None

    # -- text ------------------------------------------------------------------------------------------------------

    def generate(self, prompt: Sequence[int], max_tokens: int, *, eos: Sequence[int] = ()) -> Iterator[int]:
        """Greedy tokens, one by one, up to `max_tokens` or one of `eos`, which comes last.

        Raises: InputError for a prompt that is empty or too long, EngineError if servers of some layers are missing for
        longer than the client's patience.
        """
        room = self.model.max_model_len - len(prompt)
        if not len(prompt) or room < 1 or max_tokens < 1:
            raise InputError(
                f"a prompt of {len(prompt)} tokens and {max_tokens} more: give at least one of each, and "
                f"{self.model.max_model_len} at most in all"
            )
        budget = min(room, max_tokens)
        chain: list[_Link] = []
        try:
            chain += self._opened(0, self.model.num_layers, len(prompt) + budget)
            ids: list[int] = list(prompt)
            at = 0
            for n in range(budget):
                row = self._advance(chain, ids, at, len(prompt) + budget)
                at = len(ids)
                token = int(np.argmax(self._ends.logits(row, at - 1)))
                yield token
                if token in eos or n + 1 == budget:
                    return
                ids.append(token)
        finally:
            self._end(chain)

    def _advance(self, chain: list[_Link], ids: Sequence[int], at: int, num_tokens: int) -> F32:
        """Tokens `at` ... through all layers; the last one's row [1, E]."""
        row: F32 | None = None
        for first in range(at, len(ids), MOST_ROWS):
            some = np.array(ids[first : first + MOST_ROWS], np.int32)
            row = self._through(chain, self._ends.rows(some, first), num_tokens)[-1:]
        assert row is not None, "there is a token"
        return row

    def _through(self, chain: list[_Link], rows: F32, num_tokens: int) -> F32:
        """Rows through the whole chain, links of which are replaced when they are lost. Mutates: `chain`."""
        i = 0
        while i < len(chain):
            link = chain[i]
            try:
                rows = link.run(rows)
                i += 1
            except LOST as error:
                self._give_up(link.hop.server, error)
                links, rows = self._replacement(link, rows, num_tokens)
                chain[i : i + 1] = links
                i += len(links)
        return rows

    # -- links -----------------------------------------------------------------------------------------------------

    def _replacement(self, link: _Link, rows: F32, num_tokens: int) -> tuple[list[_Link], F32]:
        """Links over the layers of one that is lost, which have been given what it was, and then `rows`; what came of
        these."""
        before, hop = link.kept.all, link.hop
        while True:
            links = self._opened(hop.first, hop.last, num_tokens)
            found = np.concatenate([before, rows])
            try:
                for each in links:
                    self.counts.replayed += len(before)
                    pieces = [each.run(found[n : n + MOST_ROWS]) for n in range(0, len(found), MOST_ROWS)]
                    found = np.concatenate(pieces)
            except LOST as error:
                self._give_up(each.hop.server, error)
                self._end(links)
                continue
            self.counts.replaced += 1
            return links, found[len(before) :]

    def _opened(self, first: int, last: int, num_tokens: int) -> list[_Link]:
        """The best chain over some layers, open on all of its servers. Waits for servers. Raises EngineError."""
        began_s = time.monotonic()
        while True:
            chain, why = self._chain(first, last, num_tokens)
            links: list[_Link] = []
            try:
                for hop in chain:
                    links += [self._open(hop, num_tokens)]
                if links:
                    self.counts.chains.append(chain)
                    return links
            except LOST as error:
                self._give_up(chain[len(links)].server, error)
                self._end(links)
                why = str(error)
            waited_s = time.monotonic() - began_s
            if waited_s > self._patience_s:
                raise EngineError(
                    f"the swarm has no chain through layers {first} to {last - 1} for {num_tokens} tokens: {why}; "
                    f"start penstock swarm serve for them (waited {waited_s:.0f} s)"
                )
            if not chain:
                self.counts.waited_s += _AGAIN_S
                time.sleep(_AGAIN_S)

    def _open(self, hop: Hop, num_tokens: int) -> _Link:
        channel, _ = self._channels[hop.server]
        session = next(self._sessions)
        asked(channel, OPEN, Opening(session, self.model.identity, hop.first, hop.last, num_tokens))
        return _Link(hop, channel, session, _Kept(self.model.width))

    def _end(self, links: Sequence[_Link]) -> None:
        for link in links:
            known = self._channels.get(link.hop.server)
            if known is None or known[0] is not link.channel:
                continue
            try:
                asked(link.channel, CLOSE, link.session)
            except LOST as error:
                self._give_up(link.hop.server, error)

    def _give_up(self, server: str, error: Exception) -> None:
        """A server is gone, and nothing of it is used any more; or it has refused, and has some time to itself."""
        _log.warning("server %s is given up: %s", server[:8], error)
        if isinstance(error, Refused):
            self._avoided[server] = time.monotonic() + _AVOID_S
            return
        self._lost.add(server)
        known = self._channels.pop(server, None)
        if known is not None:
            hung_up(known[0])

    # -- the way ---------------------------------------------------------------------------------------------------

    def _chain(self, first: int, last: int, num_tokens: int) -> tuple[list[Hop], str]:
        """The chain with the least measured time; none, and why."""
        try:
            offers = self._offers()
        except PeerError as error:
            return [], f"the directory at {self._where}: {error}"
        spans = []
        for offer in offers:
            facts = offer.facts
            if facts.server in self._lost or facts.identity != self.model.identity:
                continue
            if time.monotonic() < self._avoided.get(facts.server, 0.0):
                continue
            way_s = self._way(offer)
            if way_s is not None and facts.free_tokens >= num_tokens:
                spans.append(Span(facts.server, facts.first, facts.last, way_s, facts.row_s))
        chain = least_chain(spans, first, last)
        if chain is not None:
            return chain, ""
        others = sum(offer.facts.identity != self.model.identity for offer in offers)
        missing = missing_layers(spans, first, last)
        why = f"nobody has room in layers {', '.join(map(str, missing)) or 'that follow each other'}"
        return [], why + (f"; {others} servers have another model, settings or build" if others else "")

    def _offers(self) -> list[SwarmOffer]:
        """Raises PeerError."""
        for fresh in (self._directory is None, True):
            if self._directory is None:
                self._directory = connect(self._where, self._secret, DIRECTORY, self._within_s)
            try:
                offers: list[SwarmOffer] = said(self._directory, LIST, list[SwarmOffer])
                return offers
            except PeerError:
                hung_up(self._directory)
                self._directory = None
                if fresh:
                    raise
        raise AssertionError("a fresh connection either answers or is lost")

    def _way(self, offer: SwarmOffer) -> float | None:
        """Seconds there and back, as measured when it was met; None: it cannot be reached, and is given up."""
        name = offer.facts.server
        if name not in self._channels:
            try:
                channel = connect(offer.address, self._secret, LAYERS, self._within_s)
                self._channels[name] = channel, 0.0
                taken = []
                for _ in range(_PINGS):
                    began_s = time.perf_counter()
                    facts: Facts = said(channel, FACTS, Facts)
                    taken.append(time.perf_counter() - began_s)
                if facts.server != name:
                    raise PeerError("lost", "another server has its address")
                self._channels[name] = channel, min(taken)
            except LOST as error:
                self._give_up(name, error)
                return None
        return self._channels[name][1]


def text_of(
    client: SwarmClient, prompt: str, max_tokens: int, *, ignore_eos: bool = False, write: Callable[[str], None]
) -> list[int]:
    """Text behind a text, written as it comes. Returns its tokens. Raises as `generate`, and ModelError for a model
    without a tokenizer."""
    checkpoint, tokenizer = client.model.files.checkpoint, client.model.files.read()
    if tokenizer is None:
        raise ModelError("this model has no tokenizer; name one with --tokenizer")
    given = checkpoint.generation_config.get("eos_token_id")
    ends = [given] if isinstance(given, int) else [end for end in given or () if isinstance(end, int)]
    eos = [] if ignore_eos else [*checkpoint.spec.eos_token_ids, *ends, *tokenizer.eos_ids]
    ids = tokenizer.encode(prompt)
    text = IncrementalDetokenizer(tokenizer, prompt_ids=ids)
    tokens = []
    for token in client.generate(ids, max_tokens, eos=eos):
        tokens.append(token)
        if token not in eos:
            write(text.add_one(token))
    write(text.flush())
    return tokens
