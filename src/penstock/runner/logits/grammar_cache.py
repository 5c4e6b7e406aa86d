"""Compiled grammars of a rank, the least recently used ones given up first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from penstock.text.grammar.compile import Compiler, compiled_bytes

if TYPE_CHECKING:
    from llguidance import LLMatcher

DEFAULT_BYTES = 64 << 20


class GrammarCache:
    """Grammar text -> a matcher at its beginning, to be copied. Safe to share between threads.

    `make` builds the compiler when the first grammar comes: a table of the whole vocabulary, which most engines never
    need. A grammar larger than the bound is compiled for its row alone.

    Args:
        end_ids: gives the tokens that may end an output, if the request lets them: special ones.

    Attributes:
        num_hits, num_misses: rows begun with a grammar that was held, and compilations.
        num_bytes: what is held, as estimated by `compiled_bytes`.
    """

    def __init__(
        self,
        make: Callable[[], Compiler],
        max_bytes: int = DEFAULT_BYTES,
        *,
        end_ids: Callable[[], frozenset[int]] = frozenset,
    ) -> None:
        self.max_bytes = max_bytes
        self.num_hits = 0
        self.num_misses = 0
        self.num_bytes = 0
        self._make = make
        self._read_end_ids = end_ids
        self._compiler: Compiler | None = None
        self._making = threading.Lock()
        self._lock = threading.Lock()
        self._held: OrderedDict[str, LLMatcher] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    @cached_property
    def end_ids(self) -> frozenset[int]:
        return self._read_end_ids()

    def compiler(self) -> Compiler:
        with self._making:  # takes half a second; whoever only asks what is held does not wait for it
            if self._compiler is None:
                self._compiler = self._make()
            return self._compiler

    def counts(self) -> tuple[int, int, int] | None:
        """Hits, misses and bytes; None if nothing was ever asked."""
        return (self.num_hits, self.num_misses, self.num_bytes) if self.num_hits or self.num_misses else None

    def holds(self, grammar: str) -> bool:
        """Whether a matcher can be had without compiling."""
        with self._lock:
            return grammar in self._held

    def check(self, grammar: str, param: str = "structured_outputs") -> None:
        """Compile ahead of a request, which calls it `param`. Raises: InputError if that cannot be done."""
        with self._lock:
            if grammar in self._held:
                return
            self.num_misses += 1
        self._hold(grammar, self.compiler().compile(grammar, param))

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher of one's own at the beginning of `grammar`. Raises: InputError if it cannot be compiled."""
        with self._lock:
            found = self._held.get(grammar)
            if found is not None:
                self.num_hits += 1
                self._held.move_to_end(grammar)
                return found.deep_copy()
            self.num_misses += 1
        made = self.compiler().compile(grammar)
        self._hold(grammar, made.deep_copy())
        return made

    def _hold(self, grammar: str, made: LLMatcher) -> None:
        size = compiled_bytes(grammar)
        with self._lock:
            if size <= self.max_bytes and grammar not in self._held:
                self._held[grammar] = made
                self.num_bytes += size
                while self.num_bytes > self.max_bytes:
                    gone, _ = self._held.popitem(last=False)
                    self.num_bytes -= compiled_bytes(gone)
