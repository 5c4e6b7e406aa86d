"""`structured_outputs`: only tokens that a grammar allows.

With a large vocabulary the mask of a row's next token is started when the row changes, before the model runs, and
awaited after it: llguidance works without the GIL, in a thread of its own. Whoever comes first does the work, so the
thread changes no token.

The end: end-of-sequence ids are allowed where the grammar may end, and nothing else where it must. A row that has no
such id (the model has none, or the client ignores it, or another rule forbids it) ends there all the same:
`exhausted` says so. A grammar's end beats `min_tokens`.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from penstock.base.errors import InputError
from penstock.core.sampling import GRAMMAR_STUCK, Thought, TokenRules
from penstock.runner.logits.base import F32, Ids, RowProcessor, vocab_ids
from penstock.runner.logits.grammar_cache import GrammarCache
from penstock.text.grammar.compile import told

if TYPE_CHECKING:
    from llguidance import LLMatcher

_FEW = 8
"""Masks that allow less than one in so many tokens are applied by copying what they allow."""

_WORTH_A_THREAD = 16_384
"""Tokens from which a mask costs more than waking a thread for it, which also takes the GIL in turns. Measured with
4,096 tokens and 64 rows: masks take 1 ms of a step of 19 ms without the thread, and 2 to 5 ms with it."""


class _State:
    """One row's place in its grammar. `lock` guards everything but `changes`, which only grow outside of it."""

    __slots__ = (
        "allowed", "cache", "changes", "end_ids", "forbidden", "grammar", "lock", "matcher", "may_end", "problem",
        "settled_at", "size", "stale", "surplus", "thought", "tokens",
    )  # fmt: skip

    def __init__(
        self, grammar: str, cache: GrammarCache, end_ids: list[int], size: int, thought: Thought | None = None
    ) -> None:
        self.grammar = grammar
        self.thought = thought
        self.settled_at: int | None = None
        """How many tokens show that there is no thought that must be ended (any more)."""
        self.cache = cache
        self.end_ids = end_ids
        self.size = size
        self.lock = threading.Lock()
        self.changes: deque[tuple[int, Sequence[int]]] = deque()
        """(tokens taken back, tokens added), not yet applied"""
        self.matcher: LLMatcher | None = None
        self.tokens: list[int] = []
        """What the matcher has taken."""
        self.surplus: list[int] = []
        """Tokens after the grammar's end, or after one that it does not allow: only a rollback makes sense of them."""
        self.stale = True
        self.may_end = False
        self.problem: str | None = None
        self.allowed: Ids | None = None
        self.forbidden: npt.NDArray[np.bool_] | None = None

    def settle(self) -> None:
        """Apply what has changed and have the mask ready. Raises nothing: problems are the row's own."""
        with self.lock:
            while self.changes:
                self._change(*self.changes.popleft())
            if self.stale:
                self._mask()

    def copy(self) -> _State:
        self.settle()
        twin = _State(self.grammar, self.cache, self.end_ids, self.size, self.thought)
        twin.settled_at = self.settled_at
        twin.matcher = None if self.matcher is None else self.matcher.deep_copy()
        twin.tokens, twin.surplus = self.tokens.copy(), self.surplus.copy()
        twin.stale, twin.may_end, twin.problem = False, self.may_end, self.problem
        twin.allowed, twin.forbidden = self.allowed, self.forbidden
        return twin

    def _change(self, taken_back: int, added: Sequence[int]) -> None:
        assert taken_back <= len(self.tokens) + len(self.surplus), "rollback reaches into the prompt"
        self.stale = True
        beyond = min(taken_back, len(self.surplus))
        del self.surplus[len(self.surplus) - beyond :]
        if taken_back > beyond:
            n = taken_back - beyond
            del self.tokens[len(self.tokens) - n :]
            if self.matcher is not None and not self.matcher.rollback(n):
                self.matcher = None  # begin again
        added = list(added)
        if self.surplus or not added:
            self.surplus += added
            return
        matcher = self._started()
        taken = 0 if matcher is None else matcher.try_consume_tokens(added)
        if matcher is not None and matcher.is_error():
            self.problem = f"{GRAMMAR_STUCK}: {told(matcher.get_error())}"
        self.tokens += added[:taken]
        self.surplus += added[taken:]

    def _started(self) -> LLMatcher | None:
        if self.matcher is not None and not self.matcher.is_error():
            return self.matcher
        try:
            matcher = self.cache.matcher(self.grammar)
        except InputError as error:
            self.problem = str(error)
            return None
        if matcher.try_consume_tokens(self.tokens) < len(self.tokens):
            self.problem = f"the grammar could not follow its own output: {told(matcher.get_error())}"
            return None
        self.matcher = matcher
        return matcher

    def _mask(self) -> None:
        """Mutates: the mask. Nothing is allowed once a token was not."""
        self.stale = False
        self.may_end = False
        matcher = self._started()
        if matcher is None or self.surplus:
            self.may_end = matcher is not None and matcher.is_accepting() and self._only_ended()
            self.allowed, self.forbidden = np.empty(0, np.int64), None
            return
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            self.problem = f"{GRAMMAR_STUCK}: {told(matcher.get_error())}"
        mask = np.unpackbits(bits, count=self.size + 1, bitorder="little").view(np.bool_)
        # Where nothing goes on, the library allows the end even if the grammar does not.
        self.may_end = bool(mask[self.size]) and matcher.is_accepting()
        mask = mask[: self.size]
        for end_id in self.end_ids:
            mask[end_id] = self.may_end
        ending = self._ending()
        if ending is not None and mask[ending]:  # in the middle of a character it is not, but behind it
            mask = np.arange(self.size) == ending
        few = np.count_nonzero(mask) * _FEW < self.size
        self.allowed, self.forbidden = (np.flatnonzero(mask), None) if few else (None, ~mask)

    def _ending(self) -> int | None:
        """The token that ends a thought which has taken all the tokens that it may take."""
        thought = self.thought
        if thought is None or len(self.tokens) < thought.most:
            return None
        if self.settled_at is not None and self.settled_at <= len(self.tokens):
            return None
        pieces = self.cache.compiler().vocabulary.tokens
        said = b"".join([pieces[i] for i in self.tokens])
        if not said.startswith(thought.opening.encode()) or thought.close.encode() in said:
            self.settled_at = len(self.tokens)
            return None
        done = range(len(thought.closing) - 1, 0, -1)
        return thought.closing[next((n for n in done if self.tokens[-n:] == thought.closing[:n]), 0)]

    def _only_ended(self) -> bool:
        return set(self.surplus) <= set(self.end_ids)


class Grammar(RowProcessor[_State]):
    """Masks (-inf) what the row's grammar does not allow next."""

    name = "grammar"

    def __init__(self, vocab_size: int, cache: GrammarCache | None = None, *, threaded: bool | None = None) -> None:
        """Without a `cache` there is no vocabulary, and no row may have a grammar. `threaded`: work ahead; by default
        where the vocabulary is large enough for that to pay."""
        super().__init__(vocab_size)
        self.cache = cache
        self._threaded = vocab_size >= _WORTH_A_THREAD if threaded is None else threaded
        self._jobs: queue.SimpleQueue[_State | None] | None = None

    def begin(self, rules: TokenRules, prompt: Sequence[int], output: Sequence[int]) -> _State | None:
        if rules.grammar is None:
            return None
        assert self.cache is not None, "a grammar came to a rank without a vocabulary"
        ends = vocab_ids(self.cache.end_ids & set(rules.stop_ids), self.vocab_size).tolist()
        state = _State(rules.grammar, self.cache, ends, self.vocab_size, rules.thought)
        if output:
            state.changes.append((0, list(output)))
        self._ahead(state)
        return state

    def change(self, row: F32, state: _State) -> None:
        state.settle()
        if state.forbidden is not None:
            np.copyto(row, -np.inf, where=state.forbidden)
            return
        assert state.allowed is not None
        kept = row[state.allowed]
        row.fill(-np.inf)
        row[state.allowed] = kept

    def exhausted(self, seq_id: int) -> str | None:
        state = self._states.get(seq_id)
        if state is None:
            return None
        state.settle()
        if state.may_end:
            return ""
        if state.problem is not None:
            return state.problem
        if state.allowed is not None and not state.allowed.size:
            return "no token of the vocabulary continues the output so far as structured_outputs asks"
        return "every token that structured_outputs allows here is excluded: relax the request's other rules"

    def extend(self, state: _State, token_ids: Sequence[int]) -> None:
        if token_ids:
            state.changes.append((0, list(token_ids)))
            self._ahead(state)

    def drop(self, state: _State, n: int) -> None:
        with state.lock:
            waiting = sum(len(added) - back for back, added in state.changes)
            assert n <= len(state.tokens) + len(state.surplus) + waiting, "rollback reaches into the prompt"
        state.changes.append((n, ()))
        self._ahead(state)

    def copy(self, state: _State) -> _State:
        return state.copy()

    def _ahead(self, state: _State) -> None:
        """Let the thread begin."""
        if not self._threaded:
            return
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            threading.Thread(target=_work, args=(self._jobs,), name="penstock-grammar", daemon=True).start()
            weakref.finalize(self, self._jobs.put, None)
        self._jobs.put(state)


def _work(jobs: queue.SimpleQueue[_State | None]) -> None:
    while (state := jobs.get()) is not None:
        state.settle()
        del state  # or the last row would live until the next
