"""A sequence: one growing list of tokens and how far the caches have followed it."""

from __future__ import annotations

import sys
from array import array
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.core.request import Request


NEVER = sys.maxsize
"""A number of tokens that no sequence reaches."""
NO_LOAD, LOST_LOAD = -1, -2
"""In place of the number of a load: there was none; the last one failed."""


class Status(IntEnum):
    WAITING = 0
    RUNNING = 1
    FINISHED = 2
    LOADING = 3
    """It owns memory like those that run, and waits for blocks that are on their way into it from a tier."""


class Sequence:
    """Mutable state of one sample of a request. Owned by the scheduler; only `commit` and admission change it.

    The one idea of the loop: `num_computed` catches up with `num_known`. A new prompt, a prefix hit, a decode step,
    a resume after preemption are all "num_computed lags behind".

    Attributes:
        seq_id: unique in the engine's life.
        index: which sample of the request (0-based); Philox's sample index.
        arrival: order of arrival of the request: the FCFS key together with `index`.
        token_ids: prompt followed by generated ids (unsigned 32-bit array).
        num_computed: tokens whose cache entries exist (committed).
        num_inflight: tokens in steps that were submitted and not yet committed.
        num_cached: tokens the last admission found in the prefix cache; `first_cached`: those of the first admission
            (what usage reports; a resume that finds its own blocks again is no saving to the client).
        tables: one BlockTable per cache group; empty while the sequence owns no memory. Belongs to `kv`.
        swapped: where its cache waits in a tier after a preemption by swap, or None. Belongs to `kv`.
        load: number of the last load that began for it (`core.batch.LoadOp`), or NO_LOAD, or LOST_LOAD.
        writable: positions below this, from the next token on, may be written without asking `kv` (0: always ask).
        taint_start: first token position whose cache is lossy, or None. From there on nothing enters a clean namespace.
        prompt_logprobs_done: prompt positions whose logits have been reported; a resume does not report them again.
        scheduled_s: clock reading of the step that first computed a part of it, or None.
        held: beam member that waits for its siblings, or sample for a tool; or it was only to bring its blocks.
        num_calls: calls of tools that have ended.
        next_selection: tokens computed at which what it keeps is chosen next. Belongs to `kv`.
        offline: it is offline work (`sched.offline`), and its time as such is not over.
        names, claim: names of its blocks in a store, as far as they are known, and what it could go on with from there.
            Memos of `kv`.
    """

    __slots__ = (
        "arrival", "block_keys", "claim", "cumulative_logprob", "first_cached", "held", "index", "load", "names",
        "next_selection", "node", "num_cached", "num_calls", "num_computed", "num_inflight", "num_preemptions",
        "offline", "prompt_len", "prompt_logprobs_done", "request", "scheduled_s", "seq_id", "status", "swapped",
        "tables", "taint_start", "token_ids", "writable",
    )  # fmt: skip

    def __init__(self, seq_id: int, request: Request, arrival: int, index: int = 0) -> None:
        self.seq_id = seq_id
        self.request = request
        self.arrival = arrival
        self.index = index
        self.token_ids: array[int] = array("I", request.prompt_token_ids)
        self.prompt_len = len(self.token_ids)
        self.num_computed = 0
        self.num_inflight = 0
        self.num_cached = 0
        self.first_cached = 0
        self.num_preemptions = 0
        self.status = Status.WAITING
        self.tables: list[Any] = []
        self.writable = 0
        self.block_keys: list[bytes] = []
        self.names: list[bytes] = []
        self.claim: Any = None
        self.node: Any = None
        self.taint_start: int | None = None
        self.held = False
        self.offline = request.offline_s is not None
        self.num_calls = 0
        self.next_selection = NEVER
        self.scheduled_s: float | None = None
        self.swapped: Any = None
        self.load = NO_LOAD
        self.prompt_logprobs_done = 0
        self.cumulative_logprob = 0.0

    @property
    def num_known(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def lag(self) -> int:
        """Known tokens that no step has been given yet."""
        return len(self.token_ids) - self.num_computed - self.num_inflight

    @property
    def is_decoding(self) -> bool:
        """Only the newest token lags: the next step yields another one."""
        return self.num_computed > 0 and len(self.token_ids) - self.num_computed == 1

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.request.request_id}[{self.index}], {self.status.name}, "
            f"computed={self.num_computed}+{self.num_inflight}/{self.num_known})"
        )
