"""Lookahead decoding: the model drafts for itself. Trajectories of Jacobi iterations yield n-grams; those that begin
with the newest token are verified in the same pass that makes the next ones.

One tree is both branches. Below the newest token hang the n-grams of the pool, and the lookahead window: its oldest
trajectory is a chain, and from each place of it the newer ones branch off, so that every draft sees what the paper's
mask lets it see. What the model says behind the last draft of a column is the next trajectory and completes an n-gram.

Source: Fu et al., arXiv 2402.02057, sections 3.1 to 3.3 (W = `window`, N = `ngram_size`, G = W). Where only chains can
be verified there is no window: the pool then learns from the text itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock.core.draft import ROOT, UNKNOWN, DraftJob, DraftTree, Outcome
from penstock.drafters.bench import DraftBench
from penstock.drafters.per_row import PerRow
from penstock.drafters.trie import Trie

POOL_TOKENS = 2048
"""First tokens that a row's pool knows; the one used longest ago is forgotten."""


class NgramPool:
    """N-grams by their first token, `most` of each, the newest first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()

    def add(self, first: int, rest: tuple[int, ...]) -> None:
        there = self._known.setdefault(first, OrderedDict())
        self._known.move_to_end(first)
        there[rest] = None
        there.move_to_end(rest)
        if len(there) > self._most:
            there.popitem(last=False)
        if len(self._known) > POOL_TOKENS:
            self._known.popitem(last=False)

    def after(self, first: int) -> Iterable[tuple[int, ...]]:
        return reversed(self._known.get(first, OrderedDict()))


@dataclass
class _Window:
    """`levels[l][c]`: trajectory l, oldest first, at column c; `tips[c]`: the last draft of column c in the tree."""

    pool: NgramPool
    levels: list[list[int]]
    tips: list[int | None] = field(default_factory=list)
    learnt: int = 0
    """Tokens of the text that the pool has seen (chains only)."""


class LookaheadDrafter(PerRow[_Window]):
    """`window` columns, n-grams of `size` tokens.

    Attributes:
        num_window_drafts, num_pool_drafts: drafts of the two branches so far; those they share count as the pool's.
    """

    name = "lookahead"

    def __init__(self, window: int, size: int) -> None:
        super().__init__()
        self._window, self._size = window, size
        self.num_window_drafts = self.num_pool_drafts = 0

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        return [self._draft(job) for job in jobs]

    def _draft(self, job: DraftJob) -> DraftTree:
        state = self.states.get(job.seq_id)
        if state is None:
            state = self.states[job.seq_id] = _Window(NgramPool(self._window), [self._beginning(job)])
        trie = Trie(job.num_nodes, job.max_depth)
        state.tips = []
        if job.chain_only:
            self._learn(state, job)
            for rest in list(state.pool.after(int(job.tokens[-1])))[:1]:
                trie.add(rest)
            return trie.tree()
        columns = self._columns(state, job)
        room = job.num_nodes - columns * len(state.levels)
        for rest in state.pool.after(int(job.tokens[-1])):
            if len(trie.token_ids) + len(rest) <= room:
                trie.add(rest)
        self.num_pool_drafts += len(trie.token_ids)
        self.num_window_drafts -= len(trie.token_ids)
        here: int | None = ROOT
        for column in range(columns):
            assert here is not None, "there is room for the columns"
            here = trie.add([state.levels[0][column]], here)
            assert here is not None, "there is room for the columns"
            state.tips.append(trie.add([level[column] for level in state.levels[1:]], here))
        self.num_window_drafts += len(trie.token_ids)
        return trie.tree()

    def _columns(self, state: _Window, job: DraftJob) -> int:
        """Columns of the window that fit; the pool gets a third of the drafts at least, if there are many."""
        num_levels = len(state.levels)
        by_nodes = max(job.num_nodes * 2 // 3, min(job.num_nodes, num_levels)) // num_levels
        return max(0, min(len(state.levels[0]), by_nodes, job.max_depth - num_levels + 1))

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            state = self.states.get(outcome.seq_id)
            if state is not None and state.tips:
                self._go_on(state, outcome.choices)

    def _go_on(self, state: _Window, choices: Sequence[int]) -> None:
        """The next trajectory, and the n-grams that it completes."""
        levels, full = state.levels, len(state.levels) == self._size - 1
        newest = list(levels[-1])
        for column, tip in enumerate(state.tips):
            token = choices[tip + 1] if tip is not None and tip + 1 < len(choices) else UNKNOWN
            if token >= 0:
                newest[column] = token
                if full:
                    rest = (*(level[column] for level in levels[1:]), token)
                    state.pool.add(levels[0][column], rest)
        levels.append(newest)
        # Until there are enough of them, the text walks past the first column.
        state.levels = levels[1:] if full else [level[1:] for level in levels]

    def _beginning(self, job: DraftJob) -> list[int]:
        """The first trajectory: the end of the text, as if it came again."""
        count = self._window + self._size - 2
        last: list[int] = job.tokens[-count:].tolist()
        return (last * -(-count // len(last)))[:count]

    def _learn(self, state: _Window, job: DraftJob) -> None:
        """Put the n-grams of the text that are new into the pool."""
        begin = max(0, state.learnt - self._size + 1)
        fresh = job.tokens[begin:].tolist()
        for i in range(len(fresh) - self._size + 1):
            state.pool.add(fresh[i], tuple(fresh[i + 1 : i + self._size]))
        state.learnt = len(job.tokens)


def make(bench: DraftBench) -> LookaheadDrafter:
    return LookaheadDrafter(bench.config.window, bench.config.ngram_size)
