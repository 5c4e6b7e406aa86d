"""From the scheduled rows to a StepPlan: token-major, unpadded, no copy of any table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import NamedTuple

import numpy as np

from penstock.config.selection import Keeping
from penstock.core.batch import ScheduledRow
from penstock.core.draft import DraftTree
from penstock.core.sampling import TokenRules
from penstock.ops.plan import I32, GroupPlan, StepPlan
from penstock.runner.drafted import DraftedRow, TreeMask, drafts_of
from penstock.runner.placed import held_of
from penstock.runner.rows import Row, RowStore


class Pick(NamedTuple):
    """What the sampler owes one scheduled row.

    Attributes:
        position: index of the token to choose, and so Philox's position.
        row: row of the logits [R, V] to choose from; -1 if no token is wanted.
        prompt_row: row of the logits that gives the first of `prompt_ids`; the others follow.
        prompt_start: prompt position of the first of `prompt_ids`.
        prompt_ids: [P] prompt tokens whose logprobs are wanted (often none).
    """

    seq_id: int
    rules: TokenRules
    sample_index: int
    position: int
    num_samples: int
    num_candidates: int
    row: int
    prompt_row: int
    prompt_start: int
    prompt_ids: I32


_NO_IDS: I32 = np.zeros(0, np.int32)
_NO_MASK = TreeMask(0)
"""Of steps without trees: nothing is put into it."""


class InputBatch:
    """Buffers of one step, reused by the next: a plan is valid until the following `build`."""

    def __init__(
        self, rows: RowStore, keeping: Keeping | None = None, num_groups: int | None = None, moves: bool = False
    ) -> None:  # fmt: skip
        """`num_groups`: leading cache groups of plans; None: all. Kernels see rows without what these have dropped
        (`keeping` with cache positions), or have before what they see (`moves`)."""
        self._rows = rows
        self._num_groups = len(rows.groups) if num_groups is None else num_groups
        self._cache_positions = moves or (keeping is not None and keeping.cache_positions)
        self._dropping = keeping is not None and not keeping.cache_positions
        self._choosing = keeping is not None and keeping.drops == "nothing"
        self._from: I32 | None = None
        self.greedy = False
        """Whether of all logits of the last `build` only each row's largest is wanted, but for processors."""
        self._shape = (-1, -1, -1)
        self._last: StepPlan | None = None
        self._reserve(64, 64)

    def build(
        self, scheduled: Sequence[ScheduledRow], trees: Mapping[int, DraftTree] | None = None
    ) -> tuple[StepPlan, list[Pick], list[DraftedRow]]:
        """The plan of a step and, for each row that wants logits, what to do with them (in scheduled order).

        `trees`: the drafts of rows with room for them, by sequence; these rows are in the third result only.

        Logits are wanted of the last token of rows that sample or ask for candidates, and of position p for the
        logprob of prompt token p + 1. A table has exactly the blocks that hold the row's tokens once the step is done.
        Mutates: the buffers behind the previous plan. A plan of the same shape has the same arrays, and is the same
        plan if its tables are, too.
        """
        num_tokens = 0
        for job in scheduled:
            num_tokens += job.num_tokens + job.num_drafts
        if num_tokens > len(self._tokens) or len(scheduled) > len(self._lens):
            self._reserve(num_tokens, len(scheduled))
        tokens, positions, logits, starts, lens = self._words
        picks: list[Pick] = []
        drafted_rows: list[DraftedRow] = []
        drafted = TreeMask(num_tokens) if trees else _NO_MASK
        chosen: list[Row] = []
        rows = self._rows
        greedy = True
        t = r = starts[0] = 0
        for b, job in enumerate(scheduled):
            row = rows[job.seq_id]
            start, n = job.start, job.num_tokens
            end = start + n
            assert 0 <= start < end <= row.num_tokens, f"{job}: only {row.num_tokens} tokens are known"
            shift = row.shift if self._cache_positions else 0
            if n == 1:
                tokens[t], positions[t] = row.known[start], start - shift
            else:
                self._tokens[t : t + n] = row.tokens[start:end]
                self._positions[t : t + n] = np.arange(start - shift, end - shift, dtype=np.int32)
            if job.num_drafts:
                row_drafts, n = drafts_of(job, row, trees, r, drafted, (self._tokens, self._positions), t)
                drafted_rows.append(row_drafts)
                greedy = False
                self._logits[r : r + n] = np.arange(t, t + n, dtype=np.int32)
                r += n
                end += n - 1
            elif job.num_samples == 1 and job.prompt_logprobs_from < 0 and not job.num_candidates:  # nearly always
                assert end == row.num_tokens, f"{job}: samples before its {row.num_tokens} known tokens have run"
                logits[r] = t + n - 1
                greedy = greedy and row.greedy
                picks.append(Pick(job.seq_id, row.rules, row.sample_index, end, 1, 0, r, r, 0, _NO_IDS))
                r += 1
            else:
                pick, r = self._pick(job, row, t, r)
                if pick is not None:
                    picks.append(pick)
                    greedy = greedy and row.greedy and pick.num_samples > 0 and not pick.prompt_ids.size
            t += n
            starts[b + 1] = t
            lens[b] = end - shift
            chosen.append(row)
        if self._choosing:
            self._prompts[: len(chosen)] = [row.prompt_len for row in chosen]
        assert len(set(chosen)) == len(chosen), "a sequence is scheduled twice in one step"
        if self._shape != (t, len(chosen), r):
            self._shape, self._last = (t, len(chosen), r), None
            self._views = (
                self._tokens[:t], self._positions[:t], self._starts[: len(chosen) + 1], self._lens[: len(chosen)],
                self._logits[:r],
            )  # fmt: skip
            self._from = self._prompts[: len(chosen)] if self._choosing else None
        self.greedy = greedy and r > 0
        groups = tuple([self._group_plan(g, chosen) for g in range(self._num_groups)])
        mask, last = drafted.upto(t), self._last
        # Between two blocks of its rows a decode step differs from the one before in what its arrays hold, no more.
        if last is None or last.mask is not None or mask is not None or not all(map(is_, last.groups, groups)):
            last = self._last = StepPlan(*self._views, groups, mask=mask, choose_from=self._from)
        return last, picks, drafted_rows

    def _pick(self, job: ScheduledRow, row: Row, t: int, r: int) -> tuple[Pick | None, int]:
        """`t`: the row's first token in the batch; `r`: logits rows so far. Returns the new `r` too."""
        end = job.start + job.num_tokens
        prompt_row, prompt_start, prompt_ids = r, 0, _NO_IDS
        if job.prompt_logprobs_from >= 0:
            first, last = job.prompt_logprobs_from, min(end, row.prompt_len - 1)
            assert first >= job.start, f"{job}: position {first} does not run in this step"
            if first < last:
                self._logits[r : r + last - first] = np.arange(first - job.start + t, last - job.start + t)
                r += last - first
                prompt_start = first + 1
                # A copy: the view would show another token if the row were rolled back before the result is read.
                prompt_ids = row.tokens[first + 1 : last + 1].copy()
        logits_row = -1
        if job.num_samples > 0 or job.num_candidates > 0:
            assert job.num_samples == 0 or job.num_candidates == 0, f"{job}: samples and candidates exclude each other"
            # Processors know every token of the row, so only the logits after the newest one match their state.
            assert end == row.num_tokens, f"{job}: samples before its {row.num_tokens} known tokens have run"
            logits_row = r
            self._logits[r] = t + job.num_tokens - 1
            r += 1
        if logits_row < 0 and not prompt_ids.size:
            return None, r
        pick = Pick(
            job.seq_id, row.rules, row.sample_index, end, job.num_samples, job.num_candidates,
            logits_row, prompt_row, prompt_start, prompt_ids,
        )  # fmt: skip
        return pick, r

    def _group_plan(self, g: int, chosen: Sequence[Row]) -> GroupPlan:  # its tables are as long as `_lens` says
        group, size = self._rows.groups[g], self._rows.block_size
        if group.spec.per_token:
            lens = self._words[4]
            if self._dropping and any(row.tables[g].dropped is not None for row in chosen):
                return self._dropped_plan(g, chosen)
            tables = tuple([row.tables[g].view(-(-lens[b] // size)) for b, row in enumerate(chosen)])
        else:
            tables = tuple([row.tables[g].view(1) for row in chosen])
        last = None if self._last is None else self._last.groups[g]
        if (
            last is not None and last.dropped is None
            and len(last.tables) == len(tables) and all(map(is_, last.tables, tables))
        ):  # fmt: skip
            return last
        return GroupPlan(group.pages_per_slab, size, tables, group.spec.lanes, held=held_of(chosen, g))

    def _dropped_plan(self, g: int, chosen: Sequence[Row]) -> GroupPlan:
        group, size = self._rows.groups[g], self._rows.block_size
        own = [row.tables[g] for row in chosen]
        tables = tuple([t.view(-(-t.slots(self._words[4][b]) // size)) for b, t in enumerate(own)])
        gone, low = tuple([t.dropped for t in own]), tuple([t.low for t in own])
        return GroupPlan(group.pages_per_slab, size, tables, group.spec.lanes, gone, low)

    def _reserve(self, num_tokens: int, num_rows: int) -> None:
        self._tokens, self._positions, self._logits = (np.empty(2 * num_tokens, np.int32) for _ in range(3))
        self._lens, self._starts = np.empty(2 * num_rows, np.int32), np.empty(2 * num_rows + 1, np.int32)
        self._prompts = np.empty(2 * num_rows, np.int32)
        arrays = (self._tokens, self._positions, self._logits, self._starts, self._lens)
        self._words = tuple(array.data for array in arrays)  # single numbers: faster here than in numpy
        self._shape = (-1, -1, -1)
