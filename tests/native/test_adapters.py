"""Rows that have adapters, on the reference and natively: results of merged weights, the same bits in company."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.backends.backend import AdapterRoom, Backend
from penstock.backends.native.backend import NativeBackend
from penstock.backends.reference import ReferenceBackend
from penstock.base.bf16 import narrow
from penstock.core.model_spec import ModelSpec
from penstock.ops.adapters import LowRank
from tests import specs
from tests.adapting import made, merged, unshifted
from tests.native.running import ISAS, pool
from tests.paged import Paged

SCALED = "scaled"
"""Like llama_gqa, but what halves add to the residual is scaled: natively one rounding with the addition."""
NAMES = (
    SCALED,
    "llama_gqa",
    "llama_biased",
    "layernorm",
    "parallel",
    "sandwich",
    "scores",
    "latent",
    "mamba",
    "experts",
)
BACKENDS = ["ref", *(f"native-{isa}-{threads}" for isa in ISAS[-1:] for threads in (1, 3))]
ROOM = AdapterRoom(4, 9)


def backend_called(name: str) -> Backend:
    if name == "ref":
        return ReferenceBackend()
    _, isa, threads = name.split("-")
    return NativeBackend(pool(isa, int(threads)))


@cache
def text(name: str, seed: int, n: int = 17) -> list[int]:
    return np.random.default_rng(seed).integers(0, model(name)[0].vocab_size, n).tolist()


def model(name: str) -> tuple[ModelSpec, Any]:
    spec, weights = specs.make("llama_gqa" if name == SCALED else name)
    if name == SCALED:
        layers = tuple(msgspec.structs.replace(layer, residual_scale=0.7) for layer in spec.layers)
        spec = msgspec.structs.replace(spec, layers=layers)
    return spec, weights


def paged(name: str, backend: str, weights: Any = None, adapters: Any = None) -> Paged:
    spec, own = model(name)
    room = None if adapters is None else ROOM
    found = Paged(spec, own if weights is None else weights).on(backend_called(backend), adapters=room)
    for number, parts in (adapters or {}).items():
        found.program.put(number, found.program.prepare(parts))
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_J25_rows_of_many_adapters_are_those_of_merged_weights(name: str, backend: str) -> None:
    spec, weights = model(name)
    adapters = {n: unshifted(made(spec, n, rank=1 + 4 * n, share=0.7), weights) for n in (0, 1, 2)}
    run = paged(name, backend, adapters=adapters)
    run.adapters = {"a": 0, "b": 1, "c": 2, "d": 1}
    work = {s: text(name, i) for i, s in enumerate(("a", "plain", "b", "c", "d"))}
    found = run.run({s: (ids, range(len(ids))) for s, ids in work.items()})
    plain = paged(name, backend)
    changed = 0.0
    for s, ids in work.items():
        whole = weights if s == "plain" else merged(weights, adapters[run.adapters[s]])
        expected = paged(name, backend, whole).one_go(s, ids)
        np.testing.assert_allclose(found[s], expected, atol=1e-4 * float(np.abs(expected).max()), rtol=0)
        changed = max(changed, float(np.abs(expected - plain.one_go(s, ids)).max()))
    assert changed > 0.1, "adapters that change nothing prove nothing"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_J25_a_row_has_its_bits_in_every_batch(name: str, backend: str) -> None:
    spec, _ = model(name)
    adapters = {n: made(spec, n, rank=2 + 3 * n) for n in (0, 1, 2)}
    alone = {}
    for s, number in (("a", 0), ("b", 1), ("c", 2)):
        run = paged(name, backend, adapters={number: adapters[number]})
        run.adapters = {s: number}
        alone[s] = run.chunked(s, text(name, number), [5, 1, 3])
    alone["plain"] = paged(name, backend).one_go("plain", text(name, 9))
    together = paged(name, backend, adapters=adapters)
    together.adapters = {"a": 0, "b": 1, "c": 2}
    texts = {"a": text(name, 0), "plain": text(name, 9), "b": text(name, 1), "c": text(name, 2)}
    parts: dict[str, list[Any]] = {s: [] for s in texts}
    for lo, hi in ((0, 7), (7, 8), (8, 9), (9, 17)):
        found = together.run({s: (ids[lo:hi], range(hi - lo)) for s, ids in texts.items()})
        for s, rows in found.items():
            parts[s].append(rows.copy())
    for s in texts:
        np.testing.assert_array_equal(np.concatenate(parts[s]), alone[s], err_msg=s)


@pytest.mark.parametrize("backend", BACKENDS)
def test_J25_an_adapter_that_has_gone_changes_nothing(backend: str) -> None:
    spec, _ = specs.make("llama_gqa")
    run = paged("llama_gqa", backend, adapters={0: made(spec, 0), 3: made(spec, 1, share=0.3)})
    run.adapters = {"old": 0}
    ids = text("llama_gqa", 0)
    before = run.one_go("old", ids).copy()
    run.program.drop(0)
    run.program.put(0, run.program.prepare(made(spec, 2)))
    run.adapters = {"new": 0, "other": 3}
    assert np.abs(run.one_go("new", ids) - before).max() > 0.01
    run.program.drop(0)
    run.program.put(0, run.program.prepare(made(spec, 0)))
    run.adapters = {"again": 0}
    np.testing.assert_array_equal(run.one_go("again", ids), before)


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_J25_adapters_are_held_in_the_type_of_their_file(backend: str, dtype: str) -> None:
    """16 bits give the bits of the same numbers in 32."""
    spec, _ = specs.make("llama_gqa")
    wide = made(spec, 1, rank=6)
    to = narrow if dtype == "bfloat16" else np.float16

    def cast(part: LowRank, back: bool) -> LowRank:
        a, b = to(part.a), to(part.b)
        if back:
            a, b = ((m.astype(np.uint32) << 16).view(np.float32) if m.dtype == np.uint16 else m.astype(np.float32)
                    for m in (a, b))  # fmt: skip
        return part._replace(a=a, b=b)

    ids, found = text("llama_gqa", 0), []
    for back in (False, True):
        run = paged("llama_gqa", backend, adapters={0: {n: cast(p, back) for n, p in wide.items()}})
        run.adapters = {"a": 0}
        found.append(run.one_go("a", ids))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("backend", BACKENDS[1:2])
@pytest.mark.parametrize("scheme", ["int8-w8a8", "int4-wo:32"])
def test_J25_over_a_rounded_base_rows_keep_their_bits(backend: str, scheme: str) -> None:
    spec, _ = specs.make("llama_gqa")
    ids = text("llama_gqa", 3)

    def run(adapted: bool, **adapters: int) -> Any:
        found = Paged(*specs.make("llama_gqa"))
        found.on(backend_called(backend), quantization=scheme, adapters=ROOM if adapted else None)
        if adapted:
            found.program.put(1, found.program.prepare(made(spec, 1, rank=5)))
        found.adapters = adapters
        return found

    plain = run(False).one_go("plain", ids)
    both = run(True, a=1).run({s: (ids, range(len(ids))) for s in ("plain", "a")})
    np.testing.assert_array_equal(both["plain"], plain)
    np.testing.assert_array_equal(both["a"], run(True, a=1).chunked("a", ids, [4, 1, 2]))
    exact = paged("llama_gqa", "ref", adapters={1: made(spec, 1, rank=5)})
    exact.adapters = {"a": 1}
    wanted, base = exact.one_go("a", ids), paged("llama_gqa", "ref").one_go("plain", ids)
    off, change = float(np.abs(both["a"] - wanted).max()), float(np.abs(wanted - base).max())
    assert off < 2 * float(np.abs(plain - base).max()) + 0.01, "rounding of the base is all that differs"
    assert change > 2 * off or scheme != "int8-w8a8"


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("name", [SCALED, "llama_biased", "layernorm"])
def test_J27_a_merged_adapter_gives_the_same_within_rounding(name: str, backend: str) -> None:
    """Steps of it alone run on merged weights; those with anybody else keep their bits."""
    spec, _ = model(name)
    adapters = {n: made(spec, n, rank=2 + 3 * n, share=0.8) for n in (0, 1)}
    plain, merged = (paged(name, backend, adapters=adapters) for _ in range(2))
    assert merged.program.merges
    merged.program.merge(1, adapters[1])
    for run in (plain, merged):
        run.adapters = {"a": 1, "b": 1, "c": 0, "d": 1}
    work = {s: (text(name, i), range(17)) for i, s in enumerate(("a", "b"))}
    wanted, found = ({s: x.copy() for s, x in run.run(work).items()} for run in (plain, merged))
    for s, rows in wanted.items():
        assert 0 < np.abs(found[s] - rows).max() < 1e-4 * np.abs(rows).max(), "the sums are others"
    work = {s: (text(name, i), range(17)) for i, s in enumerate(("c", "d", "none"))}
    mixed = {s: x.copy() for s, x in plain.run(work).items()}
    for s, rows in merged.run(work).items():
        np.testing.assert_array_equal(rows, mixed[s])
    merged.program.drop(1)
    merged.program.put(1, merged.program.prepare(adapters[1]))
    assert merged.program._merged is None
    np.testing.assert_array_equal(merged.one_go("e", text(name, 1)), plain.one_go("e", text(name, 1)))


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_draft_heads_read_hidden_states_behind_a_step_that_only_adapters_have_run(backend: str) -> None:
    spec, _ = specs.make("llama_gqa")
    hidden = np.random.default_rng(1).normal(0, 1, (3, spec.hidden_size)).astype(np.float32)
    plain, run = paged("llama_gqa", backend), paged("llama_gqa", backend, adapters={0: made(spec, 0)})
    run.adapters = {"a": 0}
    found = []
    for one in (plain, run):
        one.one_go("a", text("llama_gqa", 0))
        found.append(one.program.run_head(hidden, one.planes).copy())
    np.testing.assert_array_equal(*found)
