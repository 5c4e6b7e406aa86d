"""SuffixDecoding: what followed the longest repeated ends of this text, in itself and in outputs of ended requests.

The longer the end that has occurred before, the more is drafted; of several ends the one whose drafts promise most
accepted tokens is taken, their chance being how often each of them followed.

Source: Oliaro et al., SuffixDecoding, arXiv 2411.04975, section 3 (the tree's score, adaptive length, two trees). The
two suffix trees are indices of places (`output_store`) that count the same occurrences, the newest 32.

All requests of an engine share one store. What one says can never be read out of another's answer, since drafts change
no token; but an answer that comes faster tells that something like it was said before. Where that is too much, do not
use this drafter, or set `suffix_decoding_max_cached_requests` to 0: then only the request's own text is looked at.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from penstock.core.batch import SchedulerOutput
from penstock.core.draft import NO_DRAFT, DraftJob, DraftTree, Outcome
from penstock.drafters.bench import DraftBench
from penstock.drafters.output_store import Match, OutputStore, PairIndex, common
from penstock.drafters.trie import likeliest
from penstock.runner.rows import RowStore

PLACES = 32
"""Occurrences that are counted, newest first."""
LENGTHS = 4
"""Ends of different length that compete, longest first."""
DRAFTS_PER_TOKEN = 1.0
"""An end of n tokens is followed by at most so many times n drafts (vLLM's `suffix_decoding_max_spec_factor`)."""
_OWN = -1


@dataclass
class _Seen:
    """A row that has drafted.

    Attributes:
        tokens: what was known when it drafted last.
        newest: what was verified behind them then: known to the row from the next step on.
        index: the places of `tokens` up to `num_indexed`; gone with the row (about 150 bytes per token, not counted as
            the store's).
    """

    tokens: array[int] = field(default_factory=lambda: array("i"))
    newest: list[int] = field(default_factory=list)
    index: PairIndex = field(default_factory=PairIndex)
    num_indexed: int = 2

    def catch_up(self, tokens: npt.NDArray[np.int32]) -> None:
        """`tokens`: all that the row knows now; it has only grown since."""
        self.tokens.frombytes(tokens[len(self.tokens) :].tobytes())
        self.newest = []

    def matches(self, tail: Sequence[int], limit: int) -> list[Match]:
        """Where the last two tokens or more of the row, which end in `tail`, stand in it before, newest first."""
        tokens, count = self.tokens, len(self.tokens)
        if count < 3:
            return []
        for end in range(self.num_indexed, count):
            self.index.add(tokens[end - 2], tokens[end - 1], end)
        self.num_indexed = count
        ends = self.index.newest(tail[-2], tail[-1], limit)
        return [Match(common(tokens, end, tail), tokens, end, _OWN) for end in ends]


class SuffixDrafter:
    """`rows`: the rank's; `most`: tokens of the longest end that is looked up; `least`: how often a draft token must
    have followed. Between two drafts of a row nothing is done for it: the next one catches up."""

    name = "suffix"
    wants_hidden = False

    def __init__(self, store: OutputStore, rows: RowStore, *, most: int = 24, least: float = 0.1) -> None:
        self.store = store
        self.rows = rows
        self._most, self._least = most, least
        self._seen: dict[int, _Seen] = {}
        self._beams: set[int] = set()

    # -- what rows say -------------------------------------------------------------------------------------------

    def track(self, output: SchedulerOutput) -> None:
        """Keep what a row has said when it is removed."""
        self._beams.update([fork.child_id for fork in output.forked if fork.parent_id in self._beams])
        for seq_id in output.removed:
            seen = self._seen.pop(seq_id, None)
            if seq_id in self._beams:
                self._beams.discard(seq_id)
            elif seq_id in self.rows:
                row = self.rows[seq_id]
                begin = max(0, row.prompt_len - self._most)
                newest = seen.newest if seen is not None and len(seen.tokens) == row.num_tokens else []
                self.store.add(seq_id, row.tokens[begin:].tolist() + newest, row.prompt_len - begin)
        for added in output.added:
            self.store.discard(added.seq_id)  # it had only been preempted
        for appended in output.appended:
            if appended.rollback:
                self._seen.pop(appended.seq_id, None)
        for planned in output.scheduled:
            if planned.num_candidates:  # most of what a beam tries is dropped
                self._beams.add(planned.seq_id)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            seen = self._seen.get(outcome.seq_id)
            if seen is not None:
                said = [outcome.choices[0], *(outcome.choices[i + 1] for i in outcome.path)]
                seen.newest = [token for token in said if token >= 0]

    # -- drafts -------------------------------------------------------------------------------------------------

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        return [self._draft(job) for job in jobs]

    def _draft(self, job: DraftJob) -> DraftTree:
        seen = self._seen.get(job.seq_id)
        if seen is None:
            seen = _Seen()
            if job.seq_id in self.rows:  # else nobody will tell when it is gone
                self._seen[job.seq_id] = seen
        seen.catch_up(job.tokens)
        tail = seen.tokens[-self._most :].tolist()
        count = min(job.num_nodes, job.max_depth)
        best, best_score = NO_DRAFT, 0.0
        useful: list[Match] = []
        for matches in (seen.matches(tail, PLACES), self.store.find(tail, PLACES)):
            for length in sorted({match.length for match in matches}, reverse=True)[:LENGTHS]:
                room = int(DRAFTS_PER_TOKEN * length)
                if min(room, job.num_nodes) <= best_score:  # no draft is surer than sure
                    break
                chosen = [match for match in matches if match.length >= length]
                reach = min(count, room)
                follows = [match.tokens[match.end : match.end + reach] for match in chosen]
                tree = likeliest(follows, min(job.num_nodes, room), reach, least=self._least, chain_only=job.chain_only)
                score = sum(tree.probs)
                if score > best_score:
                    best, best_score, useful = tree, score, chosen
        for key in {match.key for match in useful}:
            self.store.touch(key)
        return best


def make(bench: DraftBench) -> SuffixDrafter:
    config = bench.config
    store = OutputStore(config.suffix_decoding_max_cached_requests, config.store_bytes)
    return SuffixDrafter(
        store, bench.rows, most=config.suffix_decoding_max_tree_depth, least=config.suffix_decoding_min_token_prob
    )
