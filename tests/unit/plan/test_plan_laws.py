"""plan.resolve on any model and machine: every plan adds up, and every advice in a refusal helps."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from penstock.base.errors import CapacityError, ConfigError
from penstock.core.cache_spec import DTYPE_BYTES
from penstock.core.machine import Machine
from penstock.core.model_spec import ModelSpec
from penstock.plan import Plan
from penstock.plan.memory import MIN_RESERVE_BYTES
from tests.unit.plan.planning import (
    GIB,
    MIB,
    MIXERS,
    decided,
    machine,
    model,
    plan,
)

SPECS = st.builds(
    lambda mixers, own, length, vocab: model(*mixers, dtype=own, max_position=length, vocab_size=vocab),
    MIXERS,
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.integers(1, 200_000),
    st.integers(1, 2_000_000),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelSpec, Machine]:
    """Any machine, or (more telling) one that is just about large enough for the weights."""
    spec = draw(SPECS)
    weights = spec.num_params * draw(st.sampled_from([2, 4]))
    tight = st.integers(0, 64 * MIB).map(lambda extra: weights + MIN_RESERVE_BYTES + extra)
    return spec, machine(draw(st.integers(0, 4 * GIB) | tight | tight))


SETTINGS_GIVEN = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["auto", "float32", "bfloat16"]),
        "kv_cache_dtype": st.sampled_from(["auto", "float32", "float16", "int8"]),
        "max_model_len": st.integers(1, 200_000),
        "block_size": st.integers(1, 300),
        "kv_cache_memory_bytes": st.integers(1, 2 * GIB),
        "gpu_memory_utilization": st.floats(0.01, 1.0),
        "enable_prefix_caching": st.booleans(),
        "enable_chunked_prefill": st.booleans(),
        "max_num_seqs": st.integers(1, 3000),
        "max_num_batched_tokens": st.integers(1, 3000),
        "depth": st.integers(1, 2),
        "kv_allocator": st.sampled_from(["paged", "paged", "contiguous"]),
        "long_prefill_token_threshold": st.integers(0, 200),
    },
)
OVERRIDE = st.none() | st.integers(1, 100_000)


def check(p: Plan, spec: ModelSpec, box: Machine, kwargs: dict[str, Any]) -> None:
    by_kind: dict[str, set[int]] = {"paged": set(), "slot": set(), "window": set()}
    for group, slabs in zip(p.groups, p.num_slabs, strict=True):
        by_kind[group.spec.kind].add(slabs)
        assert slabs >= 1
    assert sorted(n for g in p.groups for n in g.layers) == list(range(len(spec.layers)))
    assert p.kv_bytes == sum(n * g.slab_bytes(p.block_size) for n, g in zip(p.num_slabs, p.groups, strict=True))
    assert p.weight_bytes == spec.num_params * DTYPE_BYTES[p.dtype]
    assert p.weight_bytes + p.kv_bytes <= box.available_bytes
    if "kv_cache_memory_bytes" in kwargs:
        assert p.kv_bytes <= kwargs["kv_cache_memory_bytes"]
    elif "num_gpu_blocks_override" not in kwargs:
        reserve = max(MIN_RESERVE_BYTES, box.available_bytes // 20)
        assert p.weight_bytes + p.kv_bytes + reserve <= box.available_bytes
        assert all(n * p.block_size < p.max_num_seqs * (p.max_model_len + p.block_size) for n in by_kind["paged"])
    if by_kind["paged"]:
        (blocks,) = by_kind["paged"]
        assert p.kv_capacity_tokens == blocks * p.block_size >= p.max_model_len
        assert blocks == kwargs.get("num_gpu_blocks_override", blocks)
    for group, slabs in zip(p.groups, p.num_slabs, strict=True):
        if group.spec.kind == "window" and kwargs.get("kv_allocator") == "contiguous":
            assert slabs * p.block_size >= p.max_model_len, "a run is never shortened"
        elif group.spec.kind == "window":
            most = group.spec.most_blocks(p.max_model_len, p.step_tokens, p.block_size)
            assert most <= slabs, "a sequence cannot always get on"
            assert slabs <= min([*by_kind["paged"], p.max_num_batched_tokens * most])
            if not by_kind["paged"]:
                assert p.kv_capacity_tokens <= slabs // most * p.max_model_len
    assert p.kv_capacity_tokens >= p.max_model_len
    assert all(n >= p.max_num_seqs for n in by_kind["slot"])
    assert 1 <= p.max_num_seqs <= p.max_num_batched_tokens
    assert p.max_model_len <= spec.max_position
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "dtype", "kv_cache_dtype"):
        given = kwargs.get(name, "auto")
        final = getattr(p, "kv_dtype" if name == "kv_cache_dtype" else name)
        assert final == (decided(p)[name] if given == "auto" else given)


def advice(text: str) -> list[dict[str, int]]:
    """The single changes that a refusal offers, as keyword arguments."""
    offers = re.findall(r"(max_model_len|max_num_seqs|kv_cache_memory_bytes) (\d+) \(or", text)
    return [{name: int(value)} for name, value in offers]


@settings(deadline=None, max_examples=400)
@given(cases(), SETTINGS_GIVEN, OVERRIDE)
def test_every_plan_adds_up_and_every_refusal_helps(
    case: tuple[ModelSpec, Machine], kwargs: dict[str, Any], override: int | None
) -> None:
    spec, box = case
    if override is not None:
        kwargs = {k: v for k, v in kwargs.items() if k != "kv_cache_memory_bytes"} | {
            "num_gpu_blocks_override": override
        }
    problem: ConfigError | None = None
    try:
        p = plan(spec, box, **kwargs)
    except CapacityError as error:
        text = str(error)
        assert len(re.findall(r"\d+ bytes|\d+ blocks", text)) >= 2, text
        for change in advice(text):
            check(plan(spec, box, **(kwargs | change)), spec, box, kwargs | change)
    except ConfigError as refusal:
        problem = refusal
    else:
        check(p, spec, box, kwargs)
    # The rest is not about memory: a length beyond the model's, limits that contradict each other.
    assert problem is None or problem.field in kwargs


@settings(deadline=None, max_examples=200)
@given(cases(), SETTINGS_GIVEN)
def test_offered_lengths_and_bytes_are_the_extremes(case: tuple[ModelSpec, Machine], kwargs: dict[str, Any]) -> None:
    spec, box = case
    try:
        plan(spec, box, **kwargs)
    except CapacityError as error:
        offers = advice(str(error))
    except ConfigError:
        offers = []
    else:
        offers = []
    for name, value in (item for change in offers for item in change.items()):
        event(name)
        worse = value + (-1 if name == "kv_cache_memory_bytes" else 1)
        with pytest.raises(CapacityError):
            plan(spec, box, **(kwargs | {name: worse}))


@settings(deadline=None)
@given(cases(), SETTINGS_GIVEN)
def test_more_memory_never_hurts(case: tuple[ModelSpec, Machine], kwargs: dict[str, Any]) -> None:
    spec, box = case
    if kwargs.get("dtype", "auto") == "auto":
        kwargs = kwargs | {"dtype": "float32"}  # "auto" may spend more memory on wider weights
    try:
        small = plan(spec, box, **kwargs)
    except ConfigError:
        return
    large = plan(spec, machine(2 * box.available_bytes), **kwargs)
    assert all(a <= b for a, b in zip(small.num_slabs, large.num_slabs, strict=True))
    assert small.max_num_seqs <= large.max_num_seqs
