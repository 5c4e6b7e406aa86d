"""Matrix products: the reference, one BLAS product, native kernels; the chosen kernel against fixed ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from benchmarks.common import clock_of, figures, ms, take_turns

from penstock.base.bf16 import F32, narrow, widen
from penstock.core.panels import Panels
from penstock.ops.blas import linear as blas_linear
from penstock.ops.native.abi import Act, Format, Kind, StepArgs
from penstock.ops.native.matrix import Packed, pack
from penstock.ops.native.program import Layout, NativeOp, NativeProgram, Pool, StepMemory
from penstock.ops.plan import StepPlan
from penstock.ops.ref import REF

SHAPES = {"qkv": (896, 1152), "out": (896, 896), "gate+up": (896, 9728), "down": (4864, 896), "lm head": (896, 151936)}
"""[K, N] of Qwen2.5-0.5B."""
EIGHT = Panels("U8", 0, "F32", "NONE", 128)
FORMATS: dict[str, tuple[Format, Act, Panels | None]] = {
    "f32": (Format.F32, Act.F32, None), "bf16": (Format.BF16, Act.BF16, None), "i8": (Format.BLOCK, Act.I8, EIGHT),
    "i4": (Format.BLOCK, Act.I8, Panels("U4", 128, "F16", "NONE", 8)), "i8-wo": (Format.BLOCK, Act.BF16, EIGHT),
    "i4-wo": (Format.BLOCK, Act.BF16, Panels("U4", 64, "F16", "NONE", 8)),
}  # fmt: skip
ERRORS = {"f32": 1e-5, "bf16": 2e-2, "i8": 3e-2, "i4": 0.5, "i8-wo": 2e-2, "i4-wo": 0.5}
"""Largest error of an output over the largest output. The tests are tighter, and know each format's rounding."""
GRID_ROWS = (1, 2, 4, 6, 8, 12, 16, 32, 64)
TILES = (1, 2, 4, 6, 8, 12, 16, 24, 32)
SLICE_BYTES = 384 << 10
"""Weights that all pieces of a fixed path meet before the next ones: they stay in the second-level cache, as a panel
does in the kernels' own loop."""
Weights = npt.NDArray[np.uint16]


def matrix(k: int, n: int) -> Weights:
    """[n, k] bfloat16 bits around 1 / sqrt(k); rows repeat after 1,021, since random numbers take long."""
    block = narrow(np.random.default_rng(k).standard_normal((1021, k), np.float32) / np.float32(k**0.5))
    return np.ascontiguousarray(np.tile(block, (-(-n // 1021), 1))[:n])


def packed(pool: Pool, fmt: str, w: Weights) -> Packed:
    """`w` in a format. Without products of bfloat16 rows stay float32, as in a model."""
    kind, act, panels = FORMATS[fmt]
    if act is Act.BF16 and pool.library.pst_isa_name() != b"avx512bf16":
        act = Act.F32
    return pack(pool.library, [widen(w) if kind is Format.F32 else w], kind, act, panels=panels)


def step_of(num_rows: int) -> tuple[StepArgs, Any]:
    """A step of `num_rows` tokens of one sequence, and what has to outlive it."""
    zeros, none = np.zeros(num_rows, np.int32), np.zeros(0, np.int32)
    plan = StepPlan(zeros, zeros, np.array([0, num_rows], np.int32), np.array([num_rows], np.int32), zeros, ())
    memory = StepMemory(0)
    return memory.args(plan, none), (plan, memory, none)


class Product:
    """x [M, K] times one packed matrix, as the model does it: one operation, which chooses its kernel by M."""

    def __init__(self, pool: Pool, m: Packed, x: F32) -> None:
        layout = Layout()
        source, self._out = layout.register(m.num_cols), layout.register(m.num_rows)
        op = NativeOp(Kind.LINEAR, (source,), self._out, n=(0, 0, 0), f=(0.0, 1.0), pointers=(m,))
        self._rows = len(x)
        self._program = NativeProgram(pool, [op], layout, [], max_tokens=len(x), max_rows=1)
        self._program.values(source, len(x))[:] = x
        self._args, self._keep = step_of(len(x))

    def __call__(self) -> None:
        self._program.run(self._args)

    def result(self) -> F32:
        return self._program.values(self._out, self._rows)


class Tiled:
    """The same product by calls of exactly `tile` rows: what it costs if every call takes a kernel of so many.

    Weights are cut into slices that stay in the cache while all pieces of the rows meet them. Rows are filled up to a
    multiple of the tile; piece p of x lies beside the others, in columns p * K ... of a register.
    """

    def __init__(self, pool: Pool, m: Packed, x: F32, tile: int) -> None:
        k, n, pieces = m.num_cols, m.num_rows, -(-len(x) // tile)
        layout = Layout()
        source, target = layout.buffer(pieces * k), layout.buffer(pieces * n)
        self._parts = _slices(pool, m)

        def op(p: int, first: int, part: Packed) -> NativeOp:
            registers = layout.view(source, p * k, k), layout.view(target, p * n + first, part.num_rows)
            return NativeOp(Kind.LINEAR, registers[:1], registers[1], n=(0, 0, 0), f=(0.0, 1.0), pointers=(part,))

        ops = [op(p, first, part) for first, part in self._parts for p in range(pieces)]
        whole = layout.view(target)
        self._program = NativeProgram(pool, ops, layout, [], max_tokens=tile, max_rows=1)
        self._rows, self._tile, self._n, self._whole = len(x), tile, n, whole
        rows = self._program.values(layout.view(source), tile)
        for p in range(pieces):
            some = x[p * tile : (p + 1) * tile]
            rows[: len(some), p * k : (p + 1) * k] = some
        self._args, self._keep = step_of(tile)

    def __call__(self) -> None:
        self._program.run(self._args)

    def result(self) -> F32:
        wide = self._program.values(self._whole, self._tile)
        return np.concatenate(np.split(wide, wide.shape[1] // self._n, axis=1))[: self._rows]


def _slices(pool: Pool, m: Packed) -> list[tuple[int, Packed]]:
    """(first output, matrix) of stretches of at most SLICE_BYTES, which look into the memory of `m`."""
    size = pool.library.pst_panel_bytes(m.struct)
    panels = m.data.nbytes // size
    per, out = max(1, SLICE_BYTES // size), []
    for first in range(0, panels, per):
        count = min(per, panels - first)
        s = m.struct
        data = m.data[first * size : (first + count) * size]
        outputs = min(64 * count, m.num_rows - 64 * first)
        part = Packed(Format(s.format), Act(s.act), outputs, m.num_cols, False, data, panels=m.panels)
        out.append((64 * first, part))
    return out


def error_of(actual: F32, x: F32, w: Weights) -> float:
    """Of a few rows, over the largest output, against float64."""
    rows = sorted({0, len(x) // 2, len(x) - 1})
    expected = x[rows].astype(np.float64) @ widen(w).astype(np.float64).T
    return float(np.abs(actual[rows] - expected).max() / np.abs(expected).max())


def rows_of(count: int, k: int) -> F32:
    return np.random.default_rng(1).standard_normal((count, k), np.float32)


def compare_paths(
    pool: Pool, shapes: list[str], sizes: list[int], formats: list[str], paths: list[str], repeats: int
) -> list[dict[str, Any]]:
    """Each call by every path, in turns; every output against float64."""
    out = []
    for shape in shapes:
        k, n = SHAPES[shape]
        w = matrix(k, n)
        wide = widen(w)
        for rows in sizes:
            if shape == "lm head" and rows > 64:
                continue  # logits of so many rows are never wanted, and would be 300 MB
            x = rows_of(rows, k)
            works: dict[str, Callable[[], Any]] = {}
            if "ref" in paths:
                works["ref"] = lambda x=x, wide=wide: REF["linear"](x, wide)
            if "blas" in paths:
                works["blas"] = lambda x=x, wide=wide: blas_linear(x, wide)
            native = {f"native {fmt}": Product(pool, packed(pool, fmt, w), x) for fmt in formats}
            works |= native if "native" in paths else {}
            errors = {}
            for name, work in works.items():
                made = work()
                errors[name] = error_of(native[name].result() if name in native else made, x, w)
                limit = ERRORS[name.removeprefix("native ")] if name in native else 1e-5
                assert errors[name] <= limit, f"{name} is wrong by {errors[name]} for {shape}, {rows} rows"
            samples = take_turns(works, repeats, clock_of(pool.num_threads))
            slow = min(samples.get("ref", next(iter(samples.values()))))
            for name, of in samples.items():
                out.append(
                    {"op": "product", "shape": shape, "rows": rows, "path": name, "seconds": figures(of),
                     "speed_up": slow / min(of), "error": errors[name]}
                )  # fmt: skip
    return out


def compare_tiles(
    pool: Pool, shapes: list[str], sizes: list[int], formats: list[str], repeats: int
) -> list[dict[str, Any]]:
    """C54: the operation that chooses for itself against every fixed number of rows. Bits must be equal."""
    out = []
    for fmt in formats:
        for shape in shapes:
            k, n = SHAPES[shape]
            m = packed(pool, fmt, matrix(k, n))
            for rows in sizes:
                x = rows_of(rows, k)
                chosen = Product(pool, m, x)
                works: dict[str, Any] = {"chosen": chosen}
                # A tile larger than the rows by half and more does nothing but idle work.
                fixed = {t: Tiled(pool, m, x, t) for t in TILES if t < 2 * rows or t == 1}
                works |= {str(t): work for t, work in fixed.items()}
                for work in works.values():
                    work()
                for t, work in fixed.items():
                    assert np.array_equal(work.result(), chosen.result()), f"{fmt} {shape} {rows}: tile {t} differs"
                samples = take_turns(works, repeats, clock_of(pool.num_threads), least_s=5e-4)
                low = {name: min(of) for name, of in samples.items()}
                took = low.pop("chosen")
                best = min(low, key=lambda name: low[name])
                out.append(
                    {"format": fmt, "shape": shape, "rows": rows, "chosen_s": took, "best_tile": int(best),
                     "best_s": low[best], "ratio": took / low[best], "tiles_s": low}
                )  # fmt: skip
    return out


def path_rows(found: list[dict[str, Any]]) -> list[list[str]]:
    return [
        [f"{r['shape']}, {r['rows']} rows", r["path"], ms(r["seconds"]["low"]), ms(r["seconds"]["median"]),
         f"{r['speed_up']:.1f}", f"{r['error']:.0e}"]
        for r in found
    ]  # fmt: skip
