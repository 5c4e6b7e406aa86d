"""Calls of attention: the reference, matrix products over a gathered context, native; page tables; threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from benchmarks.common import clock_of, figures, ms, ratios, take_turns

from penstock.base.bf16 import F32, narrow
from penstock.core.kv_codec import scales_name
from penstock.ops.native.abi import Kind
from penstock.ops.native.program import Layout, NativeOp, NativeProgram, Pool, StepMemory
from penstock.ops.plan import GroupPlan, Planes, StepPlan
from penstock.ops.ref.attention.full import FULL
from penstock.ops.ref.codecs.int8 import quantise
from penstock.ops.ref.storage import read_kv
from penstock.ops.step import Step

Shape = tuple[int, int, int]
"""Query heads, kv heads, dimension of a head."""
QWEN: Shape = (14, 2, 64)
ONE_HEAD: Shape = (8, 1, 64)
"""One kv head: threads have nothing to share but the keys."""
LAYERS = 2
ORDERS = ("contiguous", "in order", "random")
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int8": np.int8}
ERRORS = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 2e-2, "int8": 2e-2}


class Call:
    """Sequences of `lengths` tokens, of which a step runs the last `tokens` of each, over one layer of two.

    `order` of pages: one block per sequence (contiguous), blocks in order, or anywhere. The numbers are the same. The
    first `common[b]` tokens of sequence b, whole blocks, are those of the one before it: in the same pages, or (not
    `once`) in copies.
    """

    def __init__(
        self, pool: Pool, shape: Shape, lengths: Sequence[int], tokens: int, *, dtype: str = "float32",
        order: str = "random", block: int = 32, common: Sequence[int] = (), once: bool = True,
    ) -> None:  # fmt: skip
        self.heads, self.kv_heads, self.dim = shape
        self.lengths, self.tokens, self.dtype = list(lengths), tokens, dtype
        block = max(lengths) if order == "contiguous" else block
        counts = [-(-n // block) for n in lengths]
        ids = np.arange(sum(counts), dtype=np.int32)
        if order == "random":
            np.random.default_rng(2).shuffle(ids)
        ends = np.cumsum(counts)
        tables = tuple(ids[e - c : e][None] for e, c in zip(ends, counts, strict=True))
        self.common = list(common) or [0] * len(lengths)
        for b, shared in enumerate(self.common if once else ()):
            tables[b][0, : shared // block] = tables[b - 1][0, : shared // block]
        self._fill(tables, block, dtype)
        total = tokens * len(lengths)
        positions = np.concatenate([np.arange(n - tokens, n) for n in lengths]).astype(np.int32)
        zeros, none = np.zeros(total, np.int32), np.zeros(0, np.int32)
        bounds = np.arange(len(lengths) + 1, dtype=np.int32) * np.int32(tokens)
        self.plan = StepPlan(
            zeros, positions, bounds, np.array(lengths, np.int32), none, (GroupPlan(LAYERS, block, tables),)
        )
        layout = Layout()
        source, self._out = (layout.register(self.heads * self.dim) for _ in range(2))
        names = list(self.planes)
        n = (0, 1, self.heads, self.kv_heads, self.dim, self.dim, names.index("k"), names.index("v"))
        op = NativeOp(Kind.ATTEND, (source,), self._out, n, (self.dim**-0.5, 0.0), (None, None))
        self.program = NativeProgram(pool, [op], layout, [self.planes], max_tokens=total, max_rows=1)
        self.q = self.program.values(source, total)
        self.q[:] = np.random.default_rng(3).standard_normal(self.q.shape, dtype=np.float32)
        self._memory = StepMemory(1)
        self._args = self._memory.args(self.plan, none)
        self._keep = none

    def _fill(self, tables: Sequence[npt.NDArray[np.int32]], block: int, dtype: str) -> None:
        """Sequence b's numbers do not depend on where its pages are."""
        pages = sum(t.size for t in tables) * LAYERS
        self.planes: Planes = {}
        for name in ("k", "v"):
            x = np.zeros((pages, block, self.kv_heads, self.dim), np.float32)
            before = x[:0]
            for b, (table, length) in enumerate(zip(tables, self.lengths, strict=True)):
                own = np.zeros((table.size * block, self.kv_heads, self.dim), np.float32)
                own[:length] = np.random.default_rng([b, length, len(self.planes)]).standard_normal(own[:length].shape)
                if shared := self.common[b]:
                    own[:shared] = before[:shared]
                before = own
                x[table[0] * LAYERS + 1] = own.reshape(-1, *x.shape[1:])
            if dtype == "int8":
                self.planes[name], self.planes[scales_name(name, "int8")] = quantise(x)
            else:
                self.planes[name] = narrow(x) if dtype == "bfloat16" else x.astype(DTYPES[dtype])

    def __call__(self) -> None:
        self.program.run(self._args)

    def result(self) -> F32:
        """[T, H * D]"""
        return self.program.values(self._out, len(self.q))

    @property
    def read_bytes(self) -> int:
        """Keys and values of all contexts, once, with what scales they have."""
        return sum(self.lengths) * sum(plane[0, 0].nbytes for plane in self.planes.values())

    @property
    def flops(self) -> int:
        """Of the products of queries and keys, and of weights and values."""
        return 4 * self.dim * self.heads * sum(sum(range(n - self.tokens + 1, n + 1)) for n in self.lengths)

    def reference(self) -> F32:
        """Token by token, as the textbook writes it."""
        q = np.ascontiguousarray(self.q).reshape(len(self.q), self.heads, self.dim)
        step = Step(self.plan, [self.planes])
        return FULL.attend(q, step, 0, 1, keys=("k",), value="v", scale=self.dim**-0.5).reshape(len(q), -1)

    def matmuls(self) -> F32:
        """Gathered keys and values, and two BLAS products per head with a mask between them."""
        per, out = self.heads // self.kv_heads, []
        for b, length in enumerate(self.lengths):
            pages = self.plan.groups[0].pages(b, 1)
            k, v = (read_kv(self.planes, name, pages, 0, length).transpose(1, 0, 2) for name in ("k", "v"))
            own = self.q[b * self.tokens : (b + 1) * self.tokens].reshape(self.tokens, self.heads, self.dim)
            q = own.transpose(1, 0, 2).reshape(self.kv_heads, per * self.tokens, self.dim)
            s = np.matmul(q, k.transpose(0, 2, 1)) * np.float32(self.dim**-0.5)
            s = s.reshape(self.heads, self.tokens, length)
            at = np.arange(length - self.tokens, length)[:, None]
            s = np.where(np.arange(length) <= at, s, np.float32(-np.inf))
            s = np.exp(s - s.max(axis=-1, keepdims=True))
            s /= s.sum(axis=-1, keepdims=True)
            y = np.matmul(s.reshape(self.kv_heads, per * self.tokens, length), v)
            out.append(y.reshape(self.heads, self.tokens, self.dim).transpose(1, 0, 2).reshape(self.tokens, -1))
        return np.concatenate(out)

    def error_of(self, actual: F32) -> float:
        """Of some tokens and heads, over the largest value, against float64."""
        per, worst = self.heads // self.kv_heads, 0.0
        for b in {0, len(self.lengths) - 1}:
            pages = self.plan.groups[0].pages(b, 1)
            k, v = (read_kv(self.planes, n, pages, 0, self.lengths[b]).astype(np.float64) for n in ("k", "v"))
            for t in {0, self.tokens // 2, self.tokens - 1}:
                end, row = self.lengths[b] - self.tokens + t + 1, b * self.tokens + t
                for h in {0, self.heads - 1}:
                    own = slice(h * self.dim, (h + 1) * self.dim)
                    s = k[:end, h // per] @ self.q[row, own].astype(np.float64) * self.dim**-0.5
                    w = np.exp(s - s.max())
                    expected = w @ v[:end, h // per] / w.sum()
                    worst = max(worst, float(np.abs(actual[row, own] - expected).max() / np.abs(v).max()))
        return worst

    def check(self, actual: F32, what: str, limit: float | None = None) -> float:
        error = self.error_of(actual)
        assert error <= (ERRORS[self.dtype] if limit is None else limit), f"{what} is wrong by {error}"
        return error


def compare_paths(
    pool: Pool, calls: Sequence[tuple[str, Sequence[int], int]], dtypes: Sequence[str], paths: Sequence[str],
    repeats: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Each call (name, lengths, tokens) by every path, in turns."""
    out = []
    for title, lengths, tokens in calls:
        for dtype in dtypes:
            call = Call(pool, QWEN, lengths, tokens, dtype=dtype)
            works: dict[str, Callable[[], Any]] = {"ref": call.reference, "blas": call.matmuls, "native": call}
            works = {name: work for name, work in works.items() if name in paths}
            errors = {}
            for name, work in works.items():
                made = work()
                # numpy computes in float32 whatever the planes hold, the native kernel in bfloat16 pairs for these.
                limit = ERRORS[dtype] if name == "native" else 1e-5
                errors[name] = call.check(call.result() if name == "native" else made, f"{title}, {name}", limit)
            samples = take_turns(works, repeats, clock_of(pool.num_threads))
            slow = min(samples.get("ref", next(iter(samples.values()))))
            for name, of in samples.items():
                out.append(
                    {"op": "attention", "call": title, "dtype": dtype, "path": name, "seconds": figures(of),
                     "speed_up": slow / min(of), "error": errors[name]}
                )  # fmt: skip
    return out


def compare_orders(
    pool: Pool, contexts: Sequence[int], batches: Sequence[int], blocks: Sequence[int], dtype: str, repeats: int
) -> list[dict[str, Any]]:
    """C49: pages anywhere and pages in order against one block per sequence. Bits must be equal."""
    out = []
    for context in contexts:
        for batch in batches:
            lengths = [context] * batch
            calls = {"contiguous": Call(pool, QWEN, lengths, 1, dtype=dtype, order="contiguous")}
            for block in blocks:
                for order in ORDERS[1:]:
                    calls[f"{order}, blocks of {block}"] = Call(
                        pool, QWEN, lengths, 1, dtype=dtype, order=order, block=block
                    )
            for name, call in calls.items():
                call()
                call.check(call.result(), name)
                assert np.array_equal(call.result(), calls["contiguous"].result()), f"{name}: other bits"
            samples = take_turns(calls, repeats, clock_of(pool.num_threads), least_s=2e-3)
            for name, of in samples.items():
                out.append(
                    {"context": context, "batch": batch, "order": name, "seconds": figures(of),
                     "gb_per_s": calls[name].read_bytes / min(of) / 1e9,
                     "of_contiguous": ratios(of, samples["contiguous"])}
                )  # fmt: skip
    return out


def compare_threads(pools: dict[int, Pool], contexts: Sequence[int], dtype: str, repeats: int) -> list[dict[str, Any]]:
    """C45: one query's keys on several threads, batch 1. Bits must be equal; errors of float32 below 1e-5."""
    out = []
    for shape in (QWEN, ONE_HEAD):
        for context in contexts:
            calls = {n: Call(pool, shape, [context], 1, dtype=dtype) for n, pool in pools.items()}
            exact = {n: Call(pool, shape, [context], 1) for n, pool in pools.items()}
            worst = 0.0
            for n in pools:
                for of in (calls, exact):
                    of[n]()
                    assert np.array_equal(of[n].result(), of[min(of)].result()), f"{n} threads: other bits"
                worst = max(worst, exact[n].check(exact[n].result(), f"{n} threads, float32"))
            samples = take_turns({str(n): call for n, call in calls.items()}, repeats, least_s=2e-3)
            first = samples[str(min(pools))]
            out += [
                {"heads": f"{shape[0]}/{shape[1]}", "context": context, "threads": n, "error_f32": worst,
                 "seconds": figures(samples[str(n)]), "speed_up": min(first) / min(samples[str(n)])}
                for n in pools
            ]  # fmt: skip
    return out


def worst_of_lengths(pools: dict[int, Pool], lengths: Sequence[int]) -> float:
    """C45: contexts that are cut into any number of chunks and spans, the last one of a single key or full."""
    worst = 0.0
    for length in lengths:
        results = []
        for n, pool in pools.items():
            call = Call(pool, QWEN, [length], 1)
            call()
            worst = max(worst, call.check(call.result(), f"{length} keys, {n} threads"))
            results.append(call.result())
        assert all(np.array_equal(r, results[0]) for r in results), f"{length} keys: other bits"
    return worst


def path_rows(found: list[dict[str, Any]]) -> list[list[str]]:
    return [
        [f"{r['call']}, KV {r['dtype']}", r["path"], ms(r["seconds"]["low"]), ms(r["seconds"]["median"]),
         f"{r['speed_up']:.1f}", f"{r['error']:.0e}"]
        for r in found
    ]  # fmt: skip
