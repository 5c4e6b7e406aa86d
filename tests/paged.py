"""Drives a Program through hand-made plans, without a scheduler or a runner: scattered pages, any mix of chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.backends.backend import Backend
from penstock.backends.reference import ReferenceBackend
from penstock.base.bf16 import F32
from penstock.core.cache_spec import CacheGroup
from penstock.core.model_spec import ModelSpec, cache_groups
from penstock.model.builder import build
from penstock.model.emitter import PLAIN, Reading
from penstock.ops.plan import GroupPlan, Planes, StepPlan
from penstock.ops.ref import REF
from penstock.ops.table import OpTable

_EMPTY = {
    "float32": (np.float32, np.nan), "float16": (np.float16, np.nan), "bfloat16": (np.uint16, 0x7FC0),
    "int8": (np.int8, -128), "uint8": (np.uint8, 255),
}  # fmt: skip
_GONE = -(10**6)


class Paged:
    """A program, its storage and the tables of its sequences.

    Storage starts as NaN, so that reading what nobody wrote spoils the result. Slabs are dealt from a shuffled pool.
    Blocks that left a window are spoilt, too, and stand in the tables as ids that no array has: looking one up fails.
    """

    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, npt.NDArray[Any]], *, kv_dtype: str = "float32",
        block_size: int = 4, attention: Any = "ref", num_slabs: int = 400, max_model_len: int = 300, seed: int = 0,
        ops: OpTable = REF, rotation: str = "none", reading: Reading = PLAIN, lanes: int = 1,
    ) -> None:  # fmt: skip
        self.spec, self.block_size = spec, block_size
        part = 0.0 if reading.tokens is None else reading.tokens.rank
        self.groups = cache_groups(spec, kv_dtype, lanes, bounds=reading.pages is not None, part=part)
        self.graph = build(
            spec, dict(weights), self.groups, max_model_len=max_model_len, rotation=rotation, reading=reading
        )
        self.program: Any = ReferenceBackend(attention, ops).compile(self.graph, self.groups, max_tokens=1)
        self.planes = [_planes(g, num_slabs, block_size) for g in self.groups]
        self._rng = np.random.default_rng(seed)
        self._free = [self._rng.permutation(num_slabs).tolist() for _ in self.groups]
        self._tables: dict[Any, list[npt.NDArray[np.int32]]] = {}
        self._ragged: set[Any] = set()
        self.lens: dict[Any, int] = {}
        self.choose_from: dict[Any, int] = {}
        """Sequence -> the first position that chooses its pages; as soon as one is known, others never do."""
        self.adapters: dict[Any, int] = {}
        """Sequence -> the number of its adapter."""

    def on(self, backend: Backend, **how: Any) -> Paged:
        """From now on, and before the first step: what the backend makes of the graph, and planes of its device.

        `how`: see `Backend.compile`.
        """
        assert not self.lens, "it has run"
        self.program = backend.compile(self.graph, self.groups, max_tokens=64, **how)
        if backend.new_plane is not None:
            for planes in self.planes:
                for name, array in planes.items():
                    planes[name] = backend.new_plane(array.shape, array.dtype.type, 0)
                    planes[name][:] = array
        return self

    def make_ragged(self, seq: Any) -> None:
        """From now on this (new) sequence has a table line per layer, each naming pages of unrelated slabs."""
        self._ragged.add(seq)

    def run(self, work: Mapping[Any, tuple[Sequence[int], Sequence[int]]]) -> dict[Any, F32]:
        """One step: for each sequence the tokens to append and which of them (indices) give logits."""
        tokens: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        starts = [0]
        for seq, (ids, rows) in work.items():
            at = self.lens.get(seq, 0)
            wanted += [len(tokens) + r for r in rows]
            tokens += list(ids)
            positions += range(at, at + len(ids))
            starts.append(len(tokens))
            self.lens[seq] = at + len(ids)
            self._grow(seq)
        groups = tuple(
            GroupPlan(
                g.pages_per_slab, self.block_size, tuple(self._tables[seq][g.index] for seq in work), g.spec.lanes
            )
            for g in self.groups
        )
        ints = [np.array(x, np.int32) for x in (tokens, positions, starts, [self.lens[s] for s in work], wanted)]
        choose = (
            np.array([self.choose_from.get(seq, 2**31 - 1) for seq in work], np.int32) if self.choose_from else None
        )
        numbers = [self.adapters.get(seq, -1) for seq in work]
        adapters = np.array(numbers, np.int32) if max(numbers, default=-1) >= 0 else None
        plan = replace(StepPlan(*ints, groups), choose_from=choose, adapters=adapters)
        logits = self.program.run(plan, self.planes)
        assert logits.shape == (len(wanted), self.spec.vocab_size)
        assert logits.dtype == np.float32
        out, r = {}, 0
        for seq, (_, rows) in work.items():
            self._give_up(seq)
            out[seq] = logits[r : r + len(rows)]
            r += len(rows)
        return out

    def one_go(self, seq: Any, ids: Sequence[int]) -> F32:
        """All tokens of a new sequence in one step: logits [T, V]."""
        return self.run({seq: (ids, range(len(ids)))})[seq]

    def chunked(self, seq: Any, ids: Sequence[int], sizes: Sequence[int]) -> F32:
        """The tokens in chunks of `sizes`, the last size repeated: logits [T, V]."""
        parts, at, n = [], 0, 0
        while at < len(ids):
            chunk = ids[at : at + sizes[min(n, len(sizes) - 1)]]
            parts.append(np.array(self.one_go(seq, chunk)))  # before the next step overwrites it
            at, n = at + len(chunk), n + 1
        return np.concatenate(parts)

    def greedy(self, prompts: Mapping[Any, Sequence[int]], n: int) -> dict[Any, list[int]]:
        """`n` greedy tokens after every prompt, all sequences in one batch."""
        work = {seq: (list(ids), [len(ids) - 1]) for seq, ids in prompts.items()}
        out: dict[Any, list[int]] = {seq: [] for seq in prompts}
        for _ in range(n):
            rows = self.run(work)
            for seq, row in rows.items():
                out[seq].append(int(np.argmax(row[0])))
            work = {seq: ([ids[-1]], [0]) for seq, ids in out.items()}
        return out

    def _give_up(self, seq: Any) -> None:
        for g in self.groups:
            table = self._tables[seq][g.index]
            first = g.spec.first_block(self.lens[seq], self.block_size)
            for line in range(table.shape[0]):
                for block in range(first):
                    slab = int(table[line, block])
                    if slab >= 0:
                        n = 1 if len(table) > 1 else g.pages_per_slab
                        for plane in self.planes[g.index].values():
                            plane[slab * n : (slab + 1) * n] = nan_of(plane)
                        table[line, block] = _GONE

    def alone(self, ids: Sequence[int], seq: Any = "a") -> F32:
        """Logits [V] behind a text that is computed from nothing, and of which nothing stays."""
        row = np.array(self.run({seq: (ids, [len(ids) - 1])})[seq][0])
        self.forget(seq)
        return row

    def forget(self, seq: Any) -> None:
        """Take back all that a sequence has, spoilt as memory that nobody wrote: another may follow as if it were the
        first. None that is ragged."""
        assert seq not in self._ragged
        for g, table in zip(self.groups, self._tables.pop(seq), strict=True):
            slabs = [slab for slab in table[0].tolist() if slab != _GONE]
            for plane in self.planes[g.index].values():
                by_slab = plane.reshape(-1, g.pages_per_slab, *plane.shape[1:])
                by_slab[slabs] = nan_of(plane)
            self._free[g.index] += slabs
        del self.lens[seq]

    def _grow(self, seq: Any) -> None:
        tables = self._tables.setdefault(
            seq,
            [np.zeros((g.pages_per_slab if seq in self._ragged else 1, 0), np.int32) for g in self.groups],
        )
        for g in self.groups:
            table, n = tables[g.index], g.pages_per_slab
            need = 1 if g.spec.kind == "slot" else -(-self.lens[seq] // self.block_size)
            while table.shape[1] < need:
                ids = [[self._free[g.index].pop()] for _ in range(table.shape[0])]
                # A ragged line may name any page of its own slab, also one that would be another layer's.
                pages = [[i[0] * n + int(self._rng.integers(n))] for i in ids] if seq in self._ragged else ids
                table = np.concatenate([table, np.array(pages, np.int32)], axis=1)
            tables[g.index] = table


def nan_of(plane: npt.NDArray[Any]) -> Any:
    """What spoils a plane; int8 and packed ones are spoilt by their scales."""
    whole = {np.dtype(np.uint16): 0x7FC0, np.dtype(np.int8): -128, np.dtype(np.uint8): 255}
    return whole.get(plane.dtype, np.nan)


def _planes(group: CacheGroup, num_slabs: int, block_size: int) -> Planes:
    pages, spec = num_slabs * group.pages_per_slab, group.spec
    tokens = (block_size // spec.ranks,) if spec.per_token else ()
    out: Planes = {}
    for besides, plane in [(False, p) for p in spec.planes] + [(True, p) for p in spec.page_planes]:
        dtype, nan = _EMPTY[plane.dtype]
        rows = (plane.page_rows(block_size),) if besides else tokens
        shape = (pages, *rows, plane.heads // spec.lanes, plane.dim)
        out[plane.name] = np.full(shape, nan, dtype)
    return out
