"""What crosses the line between the scheduler and a rank. Frozen, wire-able, ids only, no feature booleans.

The rank applies a SchedulerOutput strictly in this order: `forked`, `removed`, `added`, `appended`, `tables`,
`page_ops` (in list order), then it runs `scheduled` and samples. Forks come first because a parent may have ended in
the very step that forked it.

`gc=False`: these structs hold no reference cycles, and there are thousands of them per second; tracking them made
Python's collector stop the loop for longer and more often (`benchmarks/micro/belt.py`).
"""

from __future__ import annotations

import msgspec

from penstock.core.page_ops import AnyPageOp
from penstock.core.sampling import TokenRules


class AddedRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence (re)enters the rank with everything known of it. Its tables follow in `tables`."""

    seq_id: int
    sample_index: int
    token_ids: list[int]
    prompt_len: int
    rules: TokenRules


class Fork(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`child_id` starts as a copy of `parent_id`'s row (tokens, processors' state); its tables follow in `tables`.

    The copy is made before this step's `appended`, so parent and child may be given different tokens in it.
    """

    parent_id: int
    child_id: int
    sample_index: int


class Appended(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens that commit made known; the newest `rollback` tokens of the row are dropped first."""

    seq_id: int
    token_ids: list[int]
    rollback: int = 0


GONE = -1
"""Stands in a block table for a block that no token to come can see: its memory is somebody else's by now."""


class TableUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Blocks `start, start+1, ...` of a sequence's table in `group` are now `ids` (GONE: left the window).

    Shared table (`layer` < 0): ids are slabs; layer i of the group reads page id * pages_per_slab + i.
    Ragged table (`layer` >= 0): ids are the pages of that layer (of that line, where the group has lanes).
    A row that was shared and gets ragged updates gets them for every layer at once.
    `dropped` >= 0: the table, or the line, begins anew with these ids; before them it has forgotten so many tokens.
    """

    seq_id: int
    group: int
    start: int
    ids: list[int]
    layer: int = -1
    dropped: int = -1


class ScheduledRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Run tokens [start, start+num_tokens) of a row.

    `start` may be the number of known tokens: then the row runs the token that the step before, still in flight when
    this one was planned, chooses for it (a *promised* token). If none comes, because the row ended or failed, the row
    does not run and yields nothing.
    `num_samples`: 0 if more known tokens follow; 1 to sample the next token; n > 1 to draw the first token of samples
    0..n-1 from the same logits; `num_candidates` > 0 asks for that many best (token, logprob) pairs instead (beams).
    `prompt_logprobs_from` >= 0 asks for logprobs of the prompt tokens after positions from there on.
    `pooling` (`core.pooler`) folds the hidden states of these tokens into one; see `runner.pooling`.
    `num_drafts` > 0: the rank may draft so many tokens that follow, at most `draft_depth` of them on one path, and
    verify them in this step: there is memory for them behind the last token. The row then yields a Verified.
    `keeps` > 0: choose what the sequence keeps once these tokens have run, so many tokens per line; the row then yields
    a Selected.
    """

    seq_id: int
    start: int
    num_tokens: int
    num_samples: int = 0
    num_candidates: int = 0
    prompt_logprobs_from: int = -1
    pooling: str = ""
    num_drafts: int = 0
    draft_depth: int = 0
    keeps: int = 0


class SchedulerOutput(msgspec.Struct, frozen=True, array_like=True):
    """One step's work."""

    step: int
    forked: list[Fork] = []
    removed: list[int] = []
    added: list[AddedRow] = []
    appended: list[Appended] = []
    tables: list[TableUpdate] = []
    page_ops: list[AnyPageOp] = []
    scheduled: list[ScheduledRow] = []

    @property
    def num_tokens(self) -> int:
        """Tokens that run; room for drafts counts as if it were used."""
        return sum(r.num_tokens + r.num_drafts for r in self.scheduled)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one position, raw (before any processor). `rank` of the chosen token: 1 is the likeliest."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int] = []
    top_logprobs: list[float] = []


class Sampled(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Result of one row that sampled: `token_ids[j]` for sample index base + j; logprobs in parallel or empty."""

    seq_id: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = []
    candidates: list[tuple[int, float]] = []


class Verified(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Result of a row with room for drafts: `token_ids` are the accepted ones and the one the model adds to them.

    `num_drafted`: drafts that were verified (0: the drafter had none). `num_kept`: tokens from the row's `start` on
    whose cache entries stay; 0 if a recurrent state had to be put back, and they are to be computed again.
    `whole`: false if no token was added behind the accepted ones (the row ended or failed there).
    """

    seq_id: int
    token_ids: list[int]
    num_drafted: int
    num_kept: int
    logprobs: list[TokenLogprobs] = []
    whole: bool = True

    @property
    def num_accepted(self) -> int:
        return len(self.token_ids) - self.whole


class Selected(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Result of a row with `keeps`: how many tokens each line of `group` shall have from now on.

    The rank knows which; they move when a PackOp says so, and the choice is void if the next step that
    runs the row brings none.
    """

    seq_id: int
    group: int
    counts: list[int]


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`entries[j]` belongs to prompt position `start + j`."""

    seq_id: int
    start: int
    entries: list[TokenLogprobs]


class Pooled(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A prompt's pooled hidden state: `vector` is float32, little-endian, [E]."""

    seq_id: int
    vector: bytes


class RowError(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """This row alone failed (for example: its logits hold a NaN). Its request ends with an error."""

    seq_id: int
    message: str


class StepOutput(msgspec.Struct, frozen=True, array_like=True):
    """What a step yielded. `duration_s`, of which drafts took `draft_s`, is recorded so that a simulator can replay."""

    step: int
    sampled: list[Sampled] = []
    prompt_logprobs: list[PromptLogprobs] = []
    errors: list[RowError] = []
    duration_s: float = 0.0
    pooled: list[Pooled] = []
    ended: list[int] = []  # rows that are complete by their own rules: no token follows, and none is missing
    grammars: tuple[int, int, int] | None = None  # compile cache of a rank that has used it: hits, misses and bytes
    verified: list[Verified] = []
    draft_s: float = 0.0
    selected: list[Selected] = []
    moves: dict[int, bool] = {}  # loads that have ended, by the `move` of their LoadOps, once each; False: void
    num_late: int = 0  # kernels that were compiled in this step, after the rank was ready
    chosen: tuple[int, int] = (0, 0)  # tokens of kv heads that were read by choice, and that were there
    misses: dict[str, int] = {}  # blocks of tiers outside that could not be read, by tier and reason ("remote:slow")
    read: dict[int, tuple[int, float, float]] = {}  # by tier; see `BlockFiles.took`
    weights: tuple[int, float] = (0, 0.0)  # bytes of weights that were read meanwhile, and seconds of waiting for them
    experts: tuple[float, ...] = ()  # of `core.events.EXPERT_COUNTS`, where experts are not all in memory
    adapters: tuple[int, int, int, float] | None = None  # see `RankAdapters.counts`
    keys: tuple[int, int] = (0, 0)  # tokens of kv heads that attention read, and as many more had none been shared
    ranks: tuple[int, int, int, float] = (0, 0, 0, 0.0)  # exchanges of several, bytes given, between hosts, s waited
