"""Is what the device computes right? Tiny models of every kind of layer, against the reference on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from benchmarks.gpu.bench import Bench
from tests import specs

from penstock.backends.backend import AdapterRoom
from penstock.base.bf16 import narrow
from penstock.base.clock import MonotonicClock
from penstock.config import from_kwargs
from penstock.core.model_spec import ModelSpec, cache_groups
from penstock.core.request import Request
from penstock.core.sampling import TokenRules
from penstock.launch.assemble import assemble
from penstock.launch.backend import backend_of
from penstock.model.adapted import adaptable
from penstock.ops.adapters import LowRank
from penstock.ops.plan import GroupPlan, StepPlan
from penstock.plan.resolve import Plan, tokens_in_flight
from penstock.runner.assemble import DecoderModel
from penstock.runner.storage import Storage

_TINY = ("llama_gqa", "experts", "scores")
_BLOCK, _BLOCKS, _LENGTH = 8, 8, 40
TOLERANCE = 2e-3
"""Of the largest logit: float32 in another order of sums, through a few layers."""
ROUNDED = 1e-2
"""The same of the median where a GPU rounds what it multiplies to bfloat16, and the reference does not: single tokens
differ more, above all where another expert is chosen."""


def run(bench: Bench) -> None:
    names = _TINY if bench.tiny else specs.ALL
    for name in names:
        bench.attempt(f"logits.{name}", lambda name=name: logits(bench, name))
    for name in ("llama_gqa", "experts"):
        bench.attempt(f"logits.{name}.bfloat16", lambda name=name: logits(bench, name, "bfloat16"))
    for name in ("llama_gqa", "experts"):
        bench.attempt(f"adapters.{name}", lambda name=name: adapters(bench, name))
    for name in names:
        bench.attempt(f"tokens.{name}", lambda name=name: tokens(bench, name))


def logits(bench: Bench, name: str, dtype: str = "float32") -> None:
    """A prompt of 40 tokens in two parts, all of their logits, against numpy's. `dtype`: of matrices, keys, values."""
    spec, weights = specs.make(name)
    if dtype == "bfloat16":
        weights = {key: narrow(w) if w.ndim == 2 else w for key, w in weights.items()}
    want = _logits(spec, weights, _config(bench, on_device=False), dtype)
    got = _logits(spec, weights, _config(bench, on_device=True), dtype)
    most = float(np.abs(want).max())
    apart = np.abs(got - want) / most
    off = float(apart.max() if dtype == "float32" else np.median(apart))
    may = TOLERANCE if dtype == "float32" else ROUNDED
    good = bool(np.isfinite(got).all()) and off <= may
    label = name if dtype == "float32" else f"{name}.{dtype}"
    kind = "largest" if dtype == "float32" else "median"
    bench.check(f"logits.{label}", good, f"{kind} difference {off:.1e} of the largest logit; {may:.0e} may be")


def adapters(bench: Bench, name: str) -> None:
    """Logits of a step in which three rows of four have an adapter each, of ranks that differ, against numpy's; a row
    without one among them has the bits that it has without anybody's."""
    spec, weights = specs.make(name)
    own = {n: _adapter(spec, n, rank) for n, rank in enumerate((3, 8, 20))}
    numbers, ids = [0, 2, -1, 1], np.random.default_rng(2).integers(2, spec.vocab_size, 4 * _BLOCK).astype(np.int32)
    want = _rows(spec, weights, _config(bench, on_device=False), ids, numbers, own)
    got = _rows(spec, weights, _config(bench, on_device=True), ids, numbers, own)
    none = _rows(spec, weights, _config(bench, on_device=True), ids, [-1] * 4, own)
    off = float(np.abs(got - want).max() / np.abs(want).max())
    changed = float(np.abs(want - none).max() / np.abs(want).max())
    good = bool(np.isfinite(got).all()) and off <= TOLERANCE and changed > 0.05
    same = "the same bits" if np.array_equal(got[2], none[2]) else "other bits"
    said = f"largest difference {off:.1e} of the largest logit; {TOLERANCE:.0e} may be; a row without one has {same}"
    bench.check(f"adapters.{name}", good and same == "the same bits", said)


def _adapter(spec: ModelSpec, seed: int, rank: int) -> dict[str, LowRank]:
    rng, found = np.random.default_rng(seed), {}
    for name, (rows, columns) in adaptable(spec).items():
        a, b = rng.normal(0, 0.1, (rank, columns)), rng.normal(0, 0.1, (rows, rank))
        gain = rng.uniform(0.9, 1.1, rows).astype(np.float32) if seed else None
        found[name] = LowRank(a.astype(np.float32), b.astype(np.float32), 0.5, gain)
    return found


def _rows(
    spec: ModelSpec, weights: Mapping[str, Any], config: Any, ids: Any, numbers: Sequence[int],
    adapters: Mapping[int, Mapping[str, LowRank]],
) -> Any:  # fmt: skip
    """Logits [B, V] behind B texts of a block each, in one step."""
    backend, groups, count = backend_of(config), cache_groups(spec, "float32"), len(numbers)
    model = DecoderModel(spec=spec, weights=weights, groups=groups, max_model_len=_BLOCK * _BLOCKS)
    forward: Any = model.on(backend, max_tokens=len(ids), adapters=AdapterRoom(len(adapters), 32))
    for number, parts in adapters.items():
        forward.put(number, forward.prepare(parts))
    storage = Storage(groups, [_BLOCKS] * len(groups), _BLOCK, new=backend.new_plane)
    starts = np.arange(count + 1, dtype=np.int32) * _BLOCK
    tables = tuple(np.array([[b]], np.int32) for b in range(count))
    plan = StepPlan(
        ids, np.tile(np.arange(_BLOCK, dtype=np.int32), count), starts, np.full(count, _BLOCK, np.int32),
        starts[1:] - 1, tuple(GroupPlan(g.pages_per_slab, _BLOCK, tables) for g in groups),
        adapters=np.array(numbers, np.int32) if max(numbers) >= 0 else None,
    )  # fmt: skip
    return np.array(forward.run(plan, storage.planes))


def tokens(bench: Bench, name: str) -> None:
    """Greedy and sampled tokens of the whole engine, requests in one batch, against numpy's."""
    spec, weights = specs.make(name)
    want = _tokens(spec, weights, _config(bench, on_device=False))
    got = _tokens(spec, weights, _config(bench, on_device=True))
    other = [request for request in want if got[request] != want[request]]
    total = sum(map(len, want.values()))
    said = f"{total} tokens of {len(want)} requests" + (f"; others in: {', '.join(other)}" if other else ", all equal")
    bench.check(f"tokens.{name}", not other, said)


def _config(bench: Bench, *, on_device: bool) -> Any:
    return from_kwargs(model="(test)", **({"device": bench.name} if on_device else {"ops": "ref"}))


def _logits(spec: ModelSpec, weights: Mapping[str, Any], config: Any, kv_dtype: str) -> Any:
    backend = backend_of(config)
    groups = cache_groups(spec, kv_dtype)
    model = DecoderModel(spec=spec, weights=weights, groups=groups, max_model_len=_BLOCK * _BLOCKS)
    forward: Any = model.on(backend, max_tokens=_LENGTH)
    storage = Storage(groups, [_BLOCKS] * len(groups), _BLOCK, new=backend.new_plane)
    blocks = np.random.default_rng(1).permutation(_BLOCKS).astype(np.int32)
    tables = [blocks[None] if g.spec.per_token else blocks[None, :1] for g in groups]
    ids = np.random.default_rng(0).integers(2, spec.vocab_size, _LENGTH).astype(np.int32)
    found = []
    for first, last in ((0, 27), (27, _LENGTH)):
        n = last - first
        plan = StepPlan(
            ids[first:last], np.arange(first, last, dtype=np.int32), np.array([0, n], np.int32),
            np.array([last], np.int32), np.arange(n, dtype=np.int32),
            tuple(GroupPlan(g.pages_per_slab, _BLOCK, (table,)) for g, table in zip(groups, tables, strict=True)),
        )  # fmt: skip
        found.append(np.array(forward.run(plan, storage.planes)))
    return np.concatenate(found)


def _tokens(spec: ModelSpec, weights: Mapping[str, Any], config: Any) -> dict[str, list[int]]:
    groups = cache_groups(spec, "float32")
    slabs = tuple(64 if g.spec.per_token else 8 for g in groups)
    plan = Plan(
        dtype="float32", kv_dtype="float32", max_model_len=256, block_size=_BLOCK, groups=groups, num_slabs=slabs,
        max_num_seqs=8, max_num_batched_tokens=16, long_prefill_token_threshold=0,
        step_tokens=tokens_in_flight(config, 256, 16), kv_capacity_tokens=64 * _BLOCK, weight_bytes=0,
        kv_bytes=sum(n * g.slab_bytes(_BLOCK) for n, g in zip(slabs, groups, strict=True)),
        num_host_slabs=(0,) * len(groups),
    )  # fmt: skip
    core = assemble(config, spec, dict(weights), plan, clock=MonotonicClock(), seconds_budget=False)
    rng = np.random.default_rng(3)
    rules = {
        "greedy": TokenRules(), "sampled": TokenRules(temperature=0.9, seed=5),
        "top": TokenRules(temperature=1.1, top_p=0.9, top_k=11, seed=6),
        "penalised": TokenRules(repetition_penalty=1.2, frequency_penalty=0.3),
        "masked": TokenRules(temperature=0.7, min_p=0.05, seed=7, allowed_ids=list(range(2, 40))),
    }  # fmt: skip
    for request, rule in rules.items():
        prompt = rng.integers(2, spec.vocab_size, int(rng.integers(3, 30))).tolist()
        core.add(Request(request_id=request, prompt_token_ids=prompt, rules=rule, max_tokens=12))
    found: dict[str, list[int]] = {request: [] for request in rules}
    while core.has_work:
        for out in core.step():
            if out.error:
                raise RuntimeError(f"{out.request_id}: {out.error}")
            found[out.request_id] += out.token_ids
    return found
