"""Requests that killed engines, by what they ask for: the same again is refused, not tried.

A request is known by its prompt and by what is done with it, not by who sends it. Three keys say how alike two are:
everything that chooses tokens with the seed, the same without the seed, and the prompt with the kind of work alone. A
conviction covers the narrowest that explains it: the seed counts only where sampled tokens stand before the death. If a
second conviction differs from the first only in what a wider key leaves out, that evidently does not matter, and the
wider key is convicted too. A request that ends before the token at which others died is not covered.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from penstock.base.hashing import digest
from penstock.core.request import Request

if TYPE_CHECKING:
    from penstock.base.clock import Clock

KEEP_S = 3600.0
"""How long a conviction lasts; it also ends with the server."""
MAX_KEYS = 1024
"""The oldest are forgotten beyond this."""
_encode = msgspec.msgpack.Encoder().encode


@dataclass
class _Entry:
    """`narrower`: the key of its first conviction, b"" if that was this key. `num_tokens`: generated before a death."""

    narrower: bytes
    convicted: bool
    num_tokens: int
    until_s: float


class Convictions:
    """`num_convicted` and `num_refused` count since the server's start."""

    def __init__(self, clock: Clock, *, keep_s: float = KEEP_S, max_keys: int = MAX_KEYS) -> None:
        self.num_convicted = 0
        self.num_refused = 0
        self._clock = clock
        self._keep_s = keep_s
        self._max_keys = max_keys
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()

    def __len__(self) -> int:
        """Keys that are refused now."""
        now_s = self._clock.now()
        return sum(entry.convicted and entry.until_s > now_s for entry in self._entries.values())

    def convict(self, request: Request, num_tokens: int) -> None:
        """An engine died of it when it had generated so many tokens, in the longest of its samples."""
        self.num_convicted += 1
        sampled = num_tokens > 0 and not request.whole and not request.rules.greedy
        narrower = b""
        for key in _keys(request)[0 if sampled else 1 :]:
            entry = self._find(key) or _Entry(narrower, False, num_tokens, 0.0)
            entry.convicted |= not narrower or entry.narrower != narrower
            entry.num_tokens = min(entry.num_tokens, num_tokens)
            entry.until_s = self._clock.now() + self._keep_s
            self._entries[key] = entry
            self._entries.move_to_end(key)
            narrower = key
        while len(self._entries) > self._max_keys:
            self._entries.popitem(last=False)

    def cover(self, request: Request, num_tokens: int = 0) -> bool:
        """Whether this request, which has generated so many tokens, would go where others have died."""
        if not self._entries:
            return False
        found = [entry for key in _keys(request) if (entry := self._find(key)) is not None and entry.convicted]
        return any(request.whole or num_tokens <= entry.num_tokens < request.max_tokens for entry in found)

    def refuses(self, request: Request) -> bool:
        """`cover` for a request that has just come; counts."""
        covered = self.cover(request)
        self.num_refused += covered
        return covered

    def _find(self, key: bytes) -> _Entry | None:
        entry = self._entries.get(key)
        if entry is not None and entry.until_s <= self._clock.now():
            del self._entries[key]
            return None
        return entry


def _keys(request: Request) -> list[bytes]:
    """From the narrowest to the widest. None has a trace of who asks, or of when."""
    rules, beam = request.rules, request.beam
    prompt = array("q", request.prompt_token_ids).tobytes()
    kind = _encode((request.pooling, beam is not None, rules.num_prompt_logprobs >= 0, rules.grammar is not None))
    # What ends an output chooses no token before that, unless it is kept from coming too early.
    stops = sorted(rules.stop_ids) if rules.min_tokens else []
    seedless = msgspec.structs.replace(rules, seed=0, reference=[], logit_bias={}, stop_ids=stops)
    asked = _encode((request.n, beam, seedless, sorted(rules.logit_bias.items())))
    wide = digest(b"prompt", kind, prompt)
    middle = digest(b"asked", wide, asked)
    return [digest(b"seed", middle, _encode(rules.seed)), middle, wide]
