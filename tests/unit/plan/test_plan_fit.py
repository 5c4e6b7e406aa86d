"""What `penstock plan` says fits, `resolve` accepts; where it says "at most", one more is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from penstock.base.errors import CapacityError, ConfigError
from penstock.config import EngineConfig, from_kwargs
from penstock.core.machine import Machine
from penstock.core.model_spec import Mixer, ModelSpec
from penstock.plan.devices import device_from, device_preset
from penstock.plan.fit import Fit
from penstock.plan.memory import MIN_RESERVE_BYTES
from penstock.plan.report import Report, report
from penstock.plan.resolve import Plan, resolve
from tests.unit.plan import planning
from tests.unit.plan.planning import FULL, GIB, MIXERS, SLIDING, SLOT


def model(*mixers: Mixer, **changes: Any) -> ModelSpec:
    return planning.model(*mixers, **({"max_position": 4096} | changes))


def machine(available: int) -> Machine:
    return Machine(num_cores=2, memory_bytes=available, available_bytes=available)


def reported(spec: ModelSpec, available: int, device: str = "cpu-ref", **kwargs: Any) -> Report:
    return report(from_kwargs(model="m", **kwargs), spec, machine(available), device_preset(device))


# --- the law


@st.composite
def cases(draw: st.DrawFn) -> tuple[EngineConfig, ModelSpec, Machine]:
    spec = model(*draw(MIXERS), max_position=draw(st.integers(1, 3000)))
    kwargs: dict[str, Any] = {
        "dtype": draw(st.sampled_from(["float32", "bfloat16", "auto"])),
        "block_size": draw(st.sampled_from([1, 16, 32])),
        "enable_prefix_caching": draw(st.booleans()),
        "enable_chunked_prefill": draw(st.booleans()),
        "gpu_memory_utilization": draw(st.sampled_from([0.5, 0.9, 1.0])),
    }
    size = draw(st.sampled_from(["memory", "memory", "bytes", "blocks"]))
    if size == "bytes":
        kwargs["kv_cache_memory_bytes"] = draw(st.integers(1, 10**6))
    elif size == "blocks":
        kwargs["num_gpu_blocks_override"] = draw(st.integers(1, 500))
    if draw(st.booleans()):
        kwargs["max_num_batched_tokens"] = draw(st.integers(1, 600))
    available = 4 * spec.num_params + MIN_RESERVE_BYTES + draw(st.integers(0, 40 * 10**6))
    return from_kwargs(model="m", **kwargs), spec, machine(available)


def holds(config: EngineConfig, spec: ModelSpec, box: Machine, num_seqs: int, context: int) -> bool:
    """Whether `resolve` itself, told these sizes, hands out room for all sequences at full length."""
    kwargs = config.as_kwargs() | {"max_model_len": context, "max_num_seqs": num_seqs}
    try:
        plan: Plan = resolve(from_kwargs(**kwargs), spec, box)
    except ConfigError:
        return False
    need = num_seqs * -(-context // plan.block_size)
    kinds = [g.spec.kind for g in plan.groups]
    assert all(n >= num_seqs for kind, n in zip(kinds, plan.num_slabs, strict=True) if kind == "slot")
    for group, n in zip(plan.groups, plan.num_slabs, strict=True):
        if group.spec.kind == "window" and n < num_seqs * group.spec.most_blocks(
            context, plan.step_tokens, plan.block_size
        ):
            return False
    return all(n >= need for kind, n in zip(kinds, plan.num_slabs, strict=True) if kind == "paged")


@settings(max_examples=60)
@given(case=cases(), context=st.integers(1, 3000), num_seqs=st.integers(1, 50))
def test_what_fits_is_accepted_and_one_more_than_the_most_is_not(
    case: tuple[EngineConfig, ModelSpec, Machine], context: int, num_seqs: int
) -> None:
    config, spec, box = case
    try:
        fit = Fit(config, spec, box)
    except ConfigError:
        event("not even one token")
        assert not holds(config, spec, box, 1, 1)
        return
    longest = fit.longest_context(num_seqs)
    assert longest == 0 or holds(config, spec, box, num_seqs, longest)
    assert not holds(config, spec, box, num_seqs, longest + 1)
    context = min(context, spec.max_position)
    most = fit.most_seqs(context)
    assert most == 0 or holds(config, spec, box, most, context)
    assert not holds(config, spec, box, most + 1, context)
    event("nobody" if most == 0 else "one" if most == 1 else "some")
    event("bounded by memory" if 0 < longest < spec.max_position else "bounded by the model" if longest else "none")


@settings(max_examples=40)
@given(case=cases())
def test_the_report_says_what_the_fit_says(case: tuple[EngineConfig, ModelSpec, Machine]) -> None:
    config, spec, box = case
    try:
        r = report(config, spec, box, device_preset("cpu-ref"))
    except CapacityError:
        raise AssertionError("a lack of memory is reported, not raised") from None
    except ConfigError:
        event("contradiction")
        with pytest.raises(ConfigError):
            resolve(config, spec, box)
        return
    event("refused" if r.refusal else "accepted")
    assert (r.refusal is None) == (r.kv_bytes is not None)
    for line in r.contexts:
        for n, fits in zip(r.batches, line.fits, strict=True):
            assert fits == holds(config, spec, box, n, line.context)
    if r.longest_context and r.longest_context < r.max_model_len:
        assert not holds(config, spec, box, 1, r.longest_context + 1)


# --- the report


def test_sizes_by_hand() -> None:
    r = reported(model(FULL, SLOT, FULL), 8 * GIB, max_model_len=1000)
    assert r.weight_bytes["bfloat16"] == 2 * model(FULL, SLOT, FULL).num_params
    assert r.kv_bytes_per_token == 2 * (2 * 2 * 8 * 4)
    assert r.state_bytes_per_sequence == 4 * 8 * 8 * 4
    assert [(g.kind, g.num_layers, g.num_bytes, g.planes) for g in r.groups] == [
        ("paged", 2, 256, "k 2x8 + v 2x8, float32"),
        ("slot", 1, 1024, "state 4x64, float32"),
    ]
    assert (r.max_model_len, r.longest_context, r.refusal) == (1000, 4096, None)
    assert [line.context for line in r.contexts] == [250, 1000]
    assert r.contexts[1].sequence_bytes == 32 * 32 * 256 + 1024


def test_G26_windows_take_what_they_hold() -> None:
    spec = model(FULL, SLIDING, SLIDING)
    r = reported(spec, 8 * GIB, max_num_batched_tokens=64)
    assert [(g.kind, g.num_layers, g.num_bytes, g.window) for g in r.groups] == [
        ("paged", 1, 128, None), ("window", 2, 256, 100),
    ]  # fmt: skip
    assert r.kv_bytes_per_token == 3 * 128
    short, *_, long = r.contexts
    assert (short.context, long.context) == (64, 4096)
    assert short.sequence_bytes == 64 * 3 * 128
    assert long.sequence_bytes == 4096 * 128 + 7 * 32 * 256, "seven blocks hold 99 tokens and a step of 64"


def test_speeds_are_those_of_the_timer() -> None:
    r = reported(model(), 8 * GIB, max_num_batched_tokens=100)
    prefill, *decodes = r.speeds
    assert (prefill.what, prefill.context) == ("prefill", 2048)
    assert prefill.tokens_per_s == pytest.approx(2048 / prefill.seconds)
    assert prefill.shares["overhead"] == pytest.approx(21 * 3e-4 / prefill.seconds), "in chunks of 100: 21 steps"
    assert [(d.what, d.batch) for d in decodes] == [("decode", 1), ("decode", 8), ("decode", 64)]
    for speed in r.speeds:
        assert sum(speed.shares.values()) == pytest.approx(1.0)
        assert speed.fits
    assert decodes[0].limit == "overhead"


def test_weights_that_do_not_fit_leave_nothing_to_say_about_the_rest() -> None:
    spec = model(vocab_size=10**6)
    r = reported(spec, 10**6)
    assert r.refusal is not None
    assert "the weights take" in r.refusal
    assert (r.contexts, r.speeds, r.longest_context, r.kv_bytes) == ((), (), 0, None)
    assert r.weight_bytes["float32"] == 4 * spec.num_params


def test_a_refusal_comes_with_what_would_fit() -> None:
    r = reported(model(), 8 * GIB, kv_cache_memory_bytes=100 * 32 * 256)
    assert r.refusal is not None
    assert "max_model_len 3200" in r.refusal
    assert (r.max_model_len, r.longest_context) == (4096, 3200)
    assert next(d.value for d in r.decisions if d.name == "max_model_len") == 3200
    assert reported(model(), 8 * GIB, kv_cache_memory_bytes=100 * 32 * 256, max_model_len=3200).refusal is None


def test_a_device_that_need_not_widen_keeps_the_checkpoint_s_dtype() -> None:
    spec = model(dtype="bfloat16")
    assert reported(spec, 8 * GIB).dtype == "float32"
    gpu = reported(spec, 8 * GIB, device="h200")
    assert (gpu.dtype, gpu.kv_dtype) == ("bfloat16", "bfloat16")
    assert next(d.why for d in gpu.decisions if d.name == "dtype") == "the checkpoint's own type; h200 computes with it"
    assert reported(spec, 8 * GIB, device="h200", dtype="float32").dtype == "float32"
    odd = device_from(
        {"name": "odd", "flops_per_s": {"float32": 1e9}, "read_bytes_per_s": 1e9, "host_copy_bytes_per_s": 1e9,
         "step_overhead_s": 0}
    )  # fmt: skip
    r = report(from_kwargs(model="m"), spec, machine(8 * GIB), odd)
    assert (r.dtype, r.decisions[0].why) == ("float32", "odd does not compute with bfloat16")


def test_settings_that_contradict_each_other_are_raised() -> None:
    with pytest.raises(ConfigError, match="max_model_len: 5000"):
        reported(model(), 8 * GIB, max_model_len=5000)
    with pytest.raises(ConfigError, match="no figure for dtype float16"):
        report(
            from_kwargs(model="m", dtype="float16"),
            model(),
            machine(8 * GIB),
            device_from(
                {"name": "odd", "flops_per_s": {"float32": 1e9}, "read_bytes_per_s": 1e9, "host_copy_bytes_per_s": 1e9,
                 "step_overhead_s": 0}
            ),
        )  # fmt: skip
