"""A compiled model: what the runner calls once per step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from itertools import pairwise
from operator import is_
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backends.native.emit import Emitted, emit, matrix_runs
from penstock.backends.native.parts import StepPart, parts_of
from penstock.backends.native.schemes import alike_under, packing
from penstock.backends.native.stacks import StackRun, stack_runs
from penstock.base.bf16 import F32
from penstock.core.cache_spec import CacheGroup
from penstock.core.matrix_format import NONE, Scheme, is_kept
from penstock.model.fuse import PASSES, Same, check_order, fuse
from penstock.model.graph import Graph
from penstock.ops.native.abi import PANEL, Kind
from penstock.ops.native.adapters import NativeTable
from penstock.ops.native.matrix import Packed, matrices_at, pack
from penstock.ops.native.packers import has_even_groups
from penstock.ops.native.program import NativeOp, NativeProgram, Pool, StepMemory
from penstock.ops.native.stack import pack_stack
from penstock.ops.plan import I32, Planes, StepPlan
from penstock.ops.stored import StoredMatrix, same_order
from penstock.weights.load import release_pages

if TYPE_CHECKING:
    from penstock.backends.native.experts.left import LeftExperts
    from penstock.backends.native.experts.stops import ExpertStops
    from penstock.ops.native.filed import SpillFile
    from penstock.ops.native.resident import Course

_RELEASE_BYTES = 128 << 20


class NativeForward:
    """A graph as one native program. See `model.forward.PoolingForward`.

    The arena has room for `max_tokens` tokens in a step and grows if one brings more; what the planes are is learnt
    from the first step. Results live in the arena: they are read before the next call.

    Raises (when made): NotNativeError, if the model has a part that no native operation does.
    """

    def __init__(
        self, graph: Graph, groups: Sequence[CacheGroup], pool: Pool, scheme: Scheme, *, max_tokens: int,
        matrices: dict[str, Packed] | None = None, passes: Collection[str] = PASSES, row_bits: int = 8,
        like: NativeForward | None = None, cascade: bool = True, leave: LeftExperts | None = None,
        adapters: NativeTable | None = None,
    ) -> None:  # fmt: skip
        """`matrices`: packed before, by `matrix_name`; else they are packed here. `passes`: see `fuse`. `row_bits`: of
        rows before products with stored codes, where no scheme rounds; see `packing`. `like`: a program whose matrices
        are used, whole or in part. `cascade`: see `NativeProgram.share_prefixes`. `leave`: how experts stay in a file;
        as those of `like` do. `adapters`: of a graph with places for them."""
        self.scheme = scheme
        self.vocab_size, self.max_model_len = graph.vocab_size, graph.max_model_len
        routers = [] if leave is None else leave.routers(graph)
        graph, runs, same = fused_runs(graph, scheme, passes)
        self._rows = {name: [(p.name, p.weight.shape[0]) for p in run.matrices[0]] for name, run in runs.items()}
        if like is not None:
            matrices = like.matrices | {
                name: like.part(self._rows[name]) or _packed(pool, scheme, run, row_bits)
                for name, run in runs.items() if name not in like.matrices
            }  # fmt: skip
        if matrices is None:
            stacks = stack_runs(graph, same)
            spill = leave.spill() if leave is not None and stacks else None
            matrices = dict(packed_runs(runs | stacks, pool, scheme, row_bits, spill))
        self.matrices: dict[str, Packed] = matrices
        self._code: Emitted = emit(graph, groups, matrices, max_tokens=self.max_model_len, same=same, adapters=adapters)
        self.stops: ExpertStops | None
        """Where experts are not all in memory."""
        if like is not None:
            self.stops = None if like.stops is None else like.stops.of(self._code)
        else:
            self.stops = None if leave is None else leave.stops(self._code, matrices, routers, self._rows, pool.library)
        self._pool, self._cascade = pool, cascade
        self._max_tokens = max_tokens
        self._planes: tuple[Planes, ...] | None = None
        self._native: NativeProgram | None = None
        self._keys = (0, 0)  # of programs before this one, see `keys_read`
        self._end = len(self._code.ops)
        self.num_layers = len(self._code.bounds) - 1
        self._pause: Callable[[int], None] | None = None
        read = stretches(self._code)
        home = next((m.home for stretch in read for m in stretch if m.home is not None), None)
        self._course: Course | None = None if home is None else home.owner.course(read)
        self._resident = None if self._course is None else self._course.resident
        self._best, self._finite = memoryview(b""), bytearray()
        """Of each row of `run_greedy`: the first largest logit, and 1 if all are finite."""
        self._ranks = [1 if group.spec.whole else group.spec.ranks for group in groups]
        self._memory, self._num_groups = StepMemory(len(groups), ranks=self._ranks), len(groups)
        self._part_memories: list[StepMemory] = []
        self._adapters = adapters

    @property
    def pool(self) -> Pool:
        """The threads it runs on."""
        return self._pool

    @property
    def tokens_read(self) -> tuple[int, int]:
        """See `model.forward.ChoosingForward`."""
        read, seen = self._code.tokens_read.tolist()
        return read, seen

    @property
    def weights_read(self) -> tuple[int, float] | None:
        """See `model.forward.StreamingForward`."""
        return None if self._resident is None else (self._resident.num_read, self._resident.stalled_s)

    @property
    def keys_read(self) -> tuple[int, int] | None:
        """See `model.forward.SharingForward`."""
        if not self._cascade:
            return None
        read, shared = self._keys
        return (read, shared) if self._native is None else (
            read + self._native.keys_read(), shared + self._native.keys_shared()
        )  # fmt: skip

    @property
    def expert_counts(self) -> tuple[float, ...]:
        """See `model.forward.ExpertForward`."""
        return () if self.stops is None else astuple(self.stops.cache.counts)

    def expect_rows(self, rows: Sequence[int], gone: Collection[int]) -> None:
        """See `model.forward.ExpertForward`."""
        if self.stops is not None and self.stops.predictor is not None:
            self.stops.predictor.begin(rows, gone)

    def describe(self) -> list[str]:
        """The program for people, a line per operation."""
        return list(self._code.labels)

    def run(self, plan: StepPlan, planes: Sequence[Planes]) -> F32:
        """Logits [R, V] of `plan.logits_indices`, as float32. Mutates: the planes, at this step's tokens."""
        num_tokens, num_logits = len(plan.token_ids), len(plan.logits_indices)
        native = self._ready(num_tokens, planes)
        self._run(native, plan, plan.logits_indices, self._end)
        return native.values(self._code.logits, num_logits)

    def pause(self, call: Callable[[int], None] | None) -> None:
        """See `model.forward.LayeredForward`. The threads wait as they do between steps."""
        self._pause = call

    def _run(self, native: NativeProgram, plan: StepPlan, rows: I32, end: int | None = None) -> None:
        """From the first operation on, with these rows."""
        split = self._code.split
        if split is not None and (parts := parts_of(plan, rows, split.most, split.least)):
            self._run_parts(native, plan, rows, parts, end)
            return
        args = self._memory.args(plan, rows)
        if self.stops is not None:
            self.stops.run(native, args, plan, native.num_ops if end is None else end, self._pause)
            return
        first = 0
        if self._pause is not None or self._course is not None:
            self._enter(0)
            for n, bound in enumerate(self._code.bounds):
                native.run(args, first, bound)
                self._enter(n + 1)
                if self._pause is not None:
                    self._pause(n)
                first = bound
        native.run(args, first, end)

    def _run_parts(
        self, native: NativeProgram, plan: StepPlan, rows: I32, parts: Sequence[StepPart], end: int | None
    ) -> None:  # fmt: skip
        """The stage's layers for one part after the other, and the head once, for all rows."""
        split = self._code.split
        assert split is not None
        own = None if split.own < 0 else np.empty((len(rows), native.values(split.own, 0).shape[1]), np.float32)
        while len(self._part_memories) < len(parts):
            self._part_memories.append(StepMemory(self._num_groups, ranks=self._ranks))
        for part, memory in zip(parts, self._part_memories, strict=False):
            if self._adapters is not None:
                self._adapters.begin(part.plan)
            native.run(memory.args(part.plan, part.rows), 0, split.end)
            if own is not None:
                own[part.places] = native.values(split.own, len(part.rows))
        if own is not None:
            native.values(split.own, len(rows))[:] = own
        if self._adapters is not None:
            self._adapters.begin(plan)
        native.run(self._memory.args(plan, rows), split.end, end)

    def _enter(self, k: int) -> None:
        """The weights of a stretch must be in memory from now on, those of the one before need not."""
        if self._course is not None and not self._course.enter(k):
            self._course = None

    def run_greedy(self, plan: StepPlan, planes: Sequence[Planes]) -> list[int] | F32:
        """See `model.forward.GreedyForward`."""
        num_logits = len(plan.logits_indices)
        native = self._ready(len(plan.token_ids), planes)
        self._run(native, plan, plan.logits_indices)
        if self._finite.find(0, 0, num_logits) < 0:
            return self._best[:num_logits].tolist()
        return native.values(self._code.logits, num_logits)

    def run_pooling(self, plan: StepPlan, planes: Sequence[Planes]) -> tuple[F32, F32]:
        """`run`, and the hidden states [P, E] of `plan.hidden_indices`."""
        num_logits, num_hidden = len(plan.logits_indices), len(plan.hidden_indices)
        if not num_hidden:
            logits = self.run(plan, planes)
            return logits, np.zeros((0, 0), np.float32)
        # A row may be wanted twice, so there can be more rows than tokens.
        rows = np.concatenate([plan.logits_indices, plan.hidden_indices])
        native = self._ready(max(len(plan.token_ids), len(rows)), planes)
        self._run(native, plan, rows, self._code.head)
        hidden = native.values(self._code.hidden, len(rows))[num_logits:].copy()
        if num_logits:
            native.run(self._memory.args(plan, plan.logits_indices), self._code.head, self._end)
        return native.values(self._code.logits, num_logits), hidden

    def run_span(self, plan: StepPlan, planes: Sequence[Planes], given: F32 | None) -> F32:
        """Of a part of a model (`parallel.spans`): what it makes of rows `given` [T, .] (None: it begins with token
        ids), of the tokens that `plan.logits_indices` names if it ends with logits, else of all. A copy. Mutates: the
        planes, at this step's tokens."""
        native = self._ready(len(plan.token_ids), planes)
        if given is not None:
            native.values(self._code.given, len(given))[:] = given
        self._run(native, plan, plan.logits_indices, self._end)
        return native.values(self._code.logits, len(plan.logits_indices)).copy()

    def part(self, wanted: Sequence[tuple[str, int]]) -> Packed | None:
        """Parts (name, rows) that lie next to each other in one of the matrices, in its memory; None if there are none,
        or they do not begin with a panel."""
        for name, rows in self._rows.items():
            for at in range(len(rows) - len(wanted) + 1):
                first = sum(n for _, n in rows[:at])
                if rows[at : at + len(wanted)] == list(wanted) and first % PANEL == 0:
                    return self.matrices[name].part(first, sum(n for _, n in wanted))
        return None

    def watch(self, progress: int) -> None:
        """See `model.forward.WatchedForward`. What else runs on the same threads is counted too."""
        self._pool.watch(progress)

    def queries(self, num_tokens: int) -> list[F32]:
        """See `model.forward.ObservedForward`: views, until the next run."""
        assert self._native is not None, "nothing has run"
        found = [(self._native.values(register, num_tokens), heads) for register, heads in self._code.queries]
        return [q.reshape(num_tokens, heads, -1) for q, heads in found]

    def run_head(self, hidden: F32, planes: Sequence[Planes]) -> F32:
        """Logits [R, V] of hidden states [R, E] that `run_pooling` might have given; nothing is cached."""
        count = len(hidden)
        native, rows = self._ready(count, planes), np.arange(count, dtype=np.int32)
        native.values(self._code.hidden, count)[:] = hidden
        # The head looks at nothing of a step but the number of its rows.
        plan = StepPlan(rows, rows, np.array([0, count], np.int32), np.array([count], np.int32), rows, ())
        self._enter(len(self._code.bounds))
        native.run(self._memory.args(plan, rows), self._code.head, self._end)
        return native.values(self._code.logits, count)

    def profile(self) -> list[tuple[str, int]]:
        """(operation, nanoseconds so far) since the first call of this."""
        assert self._native is not None, "nothing has run"
        return list(zip([*self._code.labels, "argmax"], self._native.profile().tolist(), strict=True))

    def _ready(self, num_tokens: int, planes: Sequence[Planes]) -> NativeProgram:
        same = self._planes is not None and all(map(is_, self._planes, planes))
        if self._native is None or not same or num_tokens > self._max_tokens:
            rows = max(self._max_tokens, num_tokens)
            best, finite = np.zeros(rows, np.int32), bytearray(rows)
            # The last operation, which only `run_greedy` runs.
            found = (best, np.zeros(rows, np.float32), np.frombuffer(finite, np.uint8))
            argmax = NativeOp(Kind.ARGMAX, (self._code.logits,), pointers=found)
            made = NativeProgram(
                self._pool, [*self._code.ops, argmax], self._code.layout, planes, max_tokens=rows, max_rows=rows
            )
            made.share_prefixes(self._cascade)
            if self.stops is not None:
                self.stops.forget()
            # Only now: what could not be made leaves what was there as it was.
            self._keys = self.keys_read or self._keys
            self._native, self._max_tokens, self._planes = made, rows, tuple(planes)
            self._best, self._finite = best.data, finite
        return self._native


def stretches(code: Emitted) -> list[list[Packed]]:
    """The matrices that are read before the first layer, in each layer, and behind the last."""
    ends = [0, *code.bounds, len(code.ops)]
    return [
        [m for op in code.ops[first:last] for p in op.pointers for m in matrices_at(p)]
        for first, last in pairwise(ends)
    ]  # fmt: skip


def fused_runs(
    graph: Graph, scheme: Scheme, passes: Collection[str] = PASSES
) -> tuple[Graph, dict[str, StackRun], Same]:
    """A fused copy of the graph, the matrices of its products, and which weights may share one."""
    graph = graph.copy()
    # Rows are prepared once for all matrices side by side, whatever their formats.
    same = partial(alike_under, scheme)
    fuse(graph, passes, same=same, together=same_order)
    check_order(graph)
    found = matrix_runs(graph, same)
    runs = {name: StackRun([tuple(run.parts)], run.pair, run.heads, stacked=False) for name, run in found.items()}
    return graph, runs, same


def packed_one_by_one(
    graph: Graph, pool: Pool, scheme: Scheme, row_bits: int
) -> tuple[list[str], Iterator[tuple[str, Packed]]]:
    """The names of all matrices and stacks of a model, and each of them, packed when it is asked for."""
    graph, runs, same = fused_runs(graph, scheme)
    runs |= stack_runs(graph, same)
    return list(runs), packed_runs(runs, pool, scheme, row_bits)


def packed_runs(
    runs: Mapping[str, StackRun], pool: Pool, scheme: Scheme, row_bits: int, spill: SpillFile | None = None
) -> Iterator[tuple[str, Packed]]:
    """One matrix or stack after the other. `spill`: where stacks stay, instead of in memory."""
    num_bytes = 0
    for name, run in runs.items():
        found = _packed(pool, scheme, run, row_bits, spill)
        num_bytes += found.num_bytes
        yield name, found
        if num_bytes > _RELEASE_BYTES:
            # What is packed would be in memory twice otherwise, as long as files are mapped.
            release_pages({part.name: part.weight for part in run.parts})
            num_bytes = 0


def packed_alone(graph: Graph, name: str, pool: Pool, scheme: Scheme, row_bits: int) -> Packed:
    """The weight of a product in a matrix of its own."""
    _, runs, _ = fused_runs(graph, scheme)
    part = next(part for run in runs.values() for part in run.parts if part.name == name)
    return _packed(pool, scheme, StackRun([(part,)], False, stacked=False), row_bits)


def _packed(pool: Pool, scheme: Scheme, run: StackRun, row_bits: int, spill: SpillFile | None = None) -> Packed:
    weights = [[part.weight for part in parts] for parts in run.matrices]
    biases = [[part.bias for part in parts] for parts in run.matrices]
    # All matrices of a stack are packed as one that has to become values, if one has.
    uneven = (w[0] for w in weights if isinstance(w[0], StoredMatrix) and not has_even_groups(w[0]))
    model = next(uneven, weights[0][0])
    kept = any(is_kept(part.name) for part in run.parts)
    isa = pool.library.pst_isa_name().decode()
    how = packing(NONE if run.heads else scheme, model, isa, row_bits, kept=kept)
    more: dict[str, Any] = {"pair": run.pair, "panels": how.panels, "as_stored": how.as_stored}
    more["num_threads"] = pool.num_threads
    if run.stacked:
        return pack_stack(pool.library, weights, how.format, how.act, biases=biases, spill=spill, **more)
    if run.heads:
        more["heads"], weights[0] = run.heads, [w.reshape(-1, w.shape[-1]) for w in weights[0]]
    return pack(pool.library, weights[0], how.format, how.act, biases=biases[0], **more)
