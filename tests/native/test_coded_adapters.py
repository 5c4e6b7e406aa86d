"""Rows whose adapter is codes: a base of codes with other scales, bit for bit, and a coded difference that is added."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.backends.backend import AdapterRoom
from penstock.base.bf16 import narrow
from penstock.core.matrix_format import MatrixFormat, Shared, parse_scheme
from penstock.model.adapted import adaptable
from penstock.ops.adapters import LowRank, Rescaled
from penstock.weights.coded_adapters import DeltaMatrix, RescaledMatrix
from tests import specs
from tests.adapting import made
from tests.native.running import ISAS
from tests.native.test_adapters import backend_called
from tests.paged import Paged
from tests.stored import InMemory

BACKENDS = ["ref", *(f"native-{isa}-{threads}" for isa in ISAS[-1:] for threads in (1, 3))]
ROOM = AdapterRoom(4, 9)
_F16 = "float16"
BASES = {
    "int4": MatrixFormat("uint", 4, (Shared(_F16, 1, 16),), offset=8),
    "int3 zeros": MatrixFormat("uint", 3, (Shared("bfloat16", 1, 32),), (Shared("uint8", 1, 32),)),
    "int8 rows": MatrixFormat("int", 8, (Shared("float32", 1, 0),)),
}


def scales_of(rng: np.random.Generator, n: int, k: int, format: MatrixFormat) -> Any:
    level = format.scales[0]
    wide = rng.uniform(0.4, 1.2, (n, -(-k // level.columns) if level.columns else 1)).astype(np.float32)
    wide *= np.float32(0.5 / (1 << format.bits - 1))
    return narrow(wide) if level.dtype == "bfloat16" else wide.astype(level.dtype)


def coded_model(name: str, format: MatrixFormat) -> tuple[Any, dict[str, Any]]:
    """A model whose products of layers are codes."""
    spec, weights = specs.make(name)
    rng = np.random.default_rng(1)
    for own, (n, k) in adaptable(spec).items():
        low = -128 if format.code == "int" else 0
        codes = rng.integers(low, low + (1 << format.bits), (n, k)).astype(np.int8 if low else np.uint8)
        groups = -(-k // format.group) if format.group else 1
        zeros = (rng.integers(0, 1 << format.bits, (n, groups)).astype(np.int32),) if format.zeros else ()
        weights[own] = InMemory(format, codes, (scales_of(rng, n, k, format),), zeros)
    return spec, weights


def rescaled(spec: Any, weights: Any, seed: int, share: float = 1.0) -> tuple[dict[str, LowRank], dict[str, Any]]:
    """A scale set, and the weights that it makes."""
    rng, parts, whole = np.random.default_rng(seed), {}, dict(weights)
    for name, (n, k) in adaptable(spec).items():
        if rng.random() >= share:
            continue
        base = weights[name]
        scales = scales_of(rng, n, k, base.format)
        matrix = RescaledMatrix(base, scales, base.format)
        nothing = np.zeros((0, k), np.float32), np.zeros((n, 0), np.float32)
        parts[name] = LowRank(*nothing, 1.0, codes=Rescaled(scales, matrix, weights.get(name + ".bias")))
        whole[name] = InMemory(base.format, base.codes(0, n), (scales,), base.zeros(0, n) if base.format.zeros else ())
    return parts, whole


def on(spec: Any, weights: Any, backend: str, adapters: Any = None, quantization: str = "none") -> Paged:
    how = {} if adapters is None else {"adapters": ROOM}
    found = Paged(spec, weights).on(backend_called(backend), quantization=quantization, **how)
    for number, parts in (adapters or {}).items():
        found.program.put(number, found.program.prepare(parts))
    return found


def ids_of(spec: Any, seed: int, n: int = 17) -> list[int]:
    return np.random.default_rng(seed).integers(0, spec.vocab_size, n).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "format"), [("llama_gqa", f) for f in BASES] + [("llama_biased", "int4")])
def test_E19_a_scale_set_is_the_base_with_its_scales_replaced_bit_for_bit(name: str, format: str, backend: str) -> None:
    spec, weights = coded_model(name, BASES[format])
    sets = {n: rescaled(spec, weights, n, 0.7 if n == 1 else 1.0) for n in (0, 1)}
    low = made(spec, 1, rank=5)
    run = on(spec, weights, backend, {0: sets[0][0], 1: sets[1][0], 2: low})
    run.adapters = {"a": 0, "b": 1, "c": 2, "d": 0}
    texts = {s: ids_of(spec, i, 60 if s == "d" else 17) for i, s in enumerate(("a", "plain", "b", "c", "d"))}
    found = run.run({s: (ids, range(len(ids))) for s, ids in texts.items()})
    found = {s: rows.copy() for s, rows in found.items()}
    plain = on(spec, weights, backend).one_go("a", texts["a"]).copy()
    for s, ids in texts.items():
        if s == "c":
            continue
        whole = weights if s == "plain" else sets[run.adapters[s]][1]
        np.testing.assert_array_equal(found[s], on(spec, whole, backend).chunked(s, ids, [5, 1, 3]), err_msg=s)
    assert np.abs(found["a"] - plain).max() > 0.1, "scales that change nothing prove nothing"


@pytest.mark.skipif(not ISAS, reason="no native library")
@pytest.mark.parametrize("scheme", ["int4-wo:32", "int8-w8a8"])
def test_E19_scales_of_a_base_that_is_rounded_here(scheme: str) -> None:
    """Their codes exist only in panels: twice the scales are twice the products, to the bit."""
    spec, weights = specs.make("llama_gqa")
    backend, format = f"native-{ISAS[-1]}-2", parse_scheme(scheme).format
    rng, sets = np.random.default_rng(2), []
    for times in (1, 2):
        parts = {}
        for name, (n, k) in adaptable(spec).items():
            scales = rng.uniform(0.001, 0.1, (n, -(-k // format.group) if format.group else 1))
            scales = (scales.astype(format.scales[0].dtype) * times).astype(format.scales[0].dtype)
            nothing = np.zeros((0, k), np.float32), np.zeros((n, 0), np.float32)
            gain = np.full(n, 2 / times, np.float32)
            parts[name] = LowRank(*nothing, 1.0, gain, codes=Rescaled(scales, None, None))
        sets.append(parts)
        rng = np.random.default_rng(2)
    run = on(spec, weights, backend, dict(enumerate(sets)), scheme)
    run.adapters = {"a": 0, "b": 1}
    ids = ids_of(spec, 1)
    found = run.run({s: (ids, range(len(ids))) for s in ("a", "b", "plain")})
    np.testing.assert_array_equal(found["a"], found["b"])
    assert np.abs(found["a"] - found["plain"]).max() > 0.1


def deltas(spec: Any, seed: int, bits: int, group: int) -> tuple[dict[str, LowRank], dict[str, Any]]:
    rng, parts, wide = np.random.default_rng(seed), {}, {}
    for name, (n, k) in adaptable(spec).items():
        own = group if group and k % group == 0 else 0
        codes = rng.integers(0, 256, (n, -(-k * bits // 8))).astype(np.uint8)
        size = 0.15 / (1 << max(0, bits - 2))
        scales = rng.uniform(0.2 * size, size, (n, k // own if own else 1)).astype(np.float16)
        matrix = DeltaMatrix(codes, scales, k, bits, own)
        nothing = np.zeros((0, k), np.float32), np.zeros((n, 0), np.float32)
        parts[name] = LowRank(*nothing, 1.0, codes=matrix)
        wide[name] = matrix.values()
    return parts, wide


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("bits", "group"), [(1, 0), (2, 32), (4, 32), (8, 0)])
@pytest.mark.parametrize("name", ["llama_gqa", "layernorm"])
def test_E16_a_delta_is_the_base_with_the_difference_added(name: str, bits: int, group: int, backend: str) -> None:
    spec, weights = specs.make(name)
    adapters = {n: deltas(spec, n, bits, group) for n in (0, 3)}
    run = on(spec, weights, backend, {n: parts for n, (parts, _) in adapters.items()})
    run.adapters = {"a": 0, "b": 3, "d": 0}
    texts = {s: ids_of(spec, i, 60 if s == "d" else 17) for i, s in enumerate(("a", "plain", "b", "d"))}
    found = run.run({s: (ids, range(len(ids))) for s, ids in texts.items()})
    found = {s: rows.copy() for s, rows in found.items()}
    np.testing.assert_array_equal(found["plain"], on(spec, weights, backend).one_go("p", texts["plain"]))
    for s in run.adapters:
        wide = adapters[run.adapters[s]][1]
        whole = weights | {n: (weights[n] + wide[n]).astype(np.float32) for n in wide}
        expected = on(spec, whole, backend).one_go(s, texts[s])
        np.testing.assert_allclose(found[s], expected, atol=1e-4 * float(np.abs(expected).max()), rtol=0)
    alone = on(spec, weights, backend, {2: adapters[0][0]})
    alone.adapters = {"a": 2}
    np.testing.assert_array_equal(found["a"], alone.chunked("a", texts["a"], [4, 1, 7]))
    alone.program.drop(2)
    alone.program.put(2, alone.program.prepare(made(spec, 2)))
    alone.adapters = {"low": 2}
    only = on(spec, weights, backend, {2: made(spec, 2)})
    only.adapters = {"low": 2}
    np.testing.assert_array_equal(alone.one_go("low", texts["b"]), only.one_go("low", texts["b"]))


def test_one_bit_is_minus_or_plus_the_scale() -> None:
    matrix = DeltaMatrix(np.array([[0b00000101]], np.uint8), np.array([[0.5]], np.float16), 8, 1, 0)
    np.testing.assert_array_equal(matrix.values()[0], [0.5, -0.5, 0.5, -0.5, -0.5, -0.5, -0.5, -0.5])
    four = DeltaMatrix(np.array([[0xF0, 0x8A]], np.uint8), np.array([[2.0]], np.float16), 4, 4, 0)
    np.testing.assert_array_equal(four.values()[0], [-16, 14, 4, 0])
    assert msgspec.json.encode(four.format)
