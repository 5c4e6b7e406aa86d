"""plan.resolve: sizes add up, nothing exceeds the machine, and every advice in a refusal works when it is followed."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.backends import BACKENDS
from penstock.base.errors import CapacityError, ConfigError
from penstock.config import from_kwargs
from penstock.core.model_spec import Attention, ModelSpec
from penstock.plan import resolve
from penstock.plan.memory import MIN_RESERVE_BYTES, gib
from tests.unit.plan.planning import (
    FULL,
    GIB,
    LATENT,
    MIB,
    SLIDING,
    SLOT,
    WIDER,
    decided,
    machine,
    model,
    plan,
    why,
)

# --- defaults


def test_defaults_on_a_roomy_machine() -> None:
    p = plan()
    assert (p.dtype, p.kv_dtype, p.max_model_len, p.block_size) == ("float32", "float32", 256, 32)
    assert (p.max_num_seqs, p.max_num_batched_tokens, p.long_prefill_token_threshold) == (64, 512, 0)
    assert p.num_slabs == (64 * 256 // 32,), "no more than all sequences can use, however much memory there is"
    assert p.kv_capacity_tokens == 64 * 256
    assert p.weight_bytes == 4 * model().num_params
    assert p.kv_bytes == 512 * 32 * 2 * (2 * 2 * 8 * 4)
    assert decided(p) == {
        "dtype": "float32", "kv_cache_dtype": "float32", "max_model_len": 256, "max_num_batched_tokens": 512,
        "num_gpu_blocks": 512, "max_num_seqs": 64, "kv_cache_memory_bytes": p.kv_bytes,
    }  # fmt: skip
    assert all(d.why for d in p.decisions)


def test_what_is_given_is_not_decided() -> None:
    p = plan(dtype="float16", kv_cache_dtype="float32", max_model_len=100, max_num_seqs=3, max_num_batched_tokens=7,
             num_gpu_blocks_override=9, long_prefill_token_threshold=5)  # fmt: skip
    assert p.decisions == ()
    assert (p.dtype, p.kv_dtype, p.max_model_len, p.max_num_seqs, p.max_num_batched_tokens) == (
        "float16", "float32", 100, 3, 7,
    )  # fmt: skip
    assert (p.num_slabs, p.long_prefill_token_threshold) == ((9,), 5)


@pytest.mark.parametrize(
    ("spec", "head_bytes"),
    [(model(), 2 * 2 * (8 + 4)), (model(SLIDING, SLIDING), 2 * 2 * (8 + 4)), (model(LATENT, LATENT), 16 + 4 + 2 * 4)],
)
def test_int8_kv_is_8_bits_and_a_scale(spec: ModelSpec, head_bytes: int) -> None:
    p = plan(spec, kv_cache_dtype="int8")
    (group,) = p.groups
    assert group.spec.num_bytes == head_bytes
    assert p.kv_bytes == p.num_slabs[0] * p.block_size * 2 * head_bytes
    assert {q.dtype for q in group.spec.planes} == {"int8", "float32"}
    wide = model(Attention(num_heads=4, num_kv_heads=2, head_dim=128))
    ratio = [plan(wide, kv_cache_dtype=t).groups[0].spec.num_bytes for t in ("int8", "bfloat16")]
    assert ratio[0] / ratio[1] == (128 + 4) / 256


def test_int8_kv_leaves_recurrent_states_alone_and_needs_keys() -> None:
    p = plan(model(FULL, SLOT), kv_cache_dtype="int8")
    assert [{q.dtype for q in g.spec.planes} for g in p.groups] == [{"int8", "float32"}, {"float32"}]
    with pytest.raises(ConfigError, match=r"kv_cache_dtype: int8 .* model keeps none .* use auto") as refused:
        plan(model(SLOT), kv_cache_dtype="int8")
    assert refused.value.field == "kv_cache_dtype"


def test_more_fits_in_int8() -> None:
    few = plan(kv_cache_memory_bytes=1 << 18, kv_cache_dtype="bfloat16")
    many = plan(kv_cache_memory_bytes=1 << 18, kv_cache_dtype="int8")
    assert many.num_slabs[0] * (2 * (8 + 4)) == pytest.approx(few.num_slabs[0] * (2 * 16), rel=0.02)


def test_a_plan_is_a_pure_function() -> None:
    assert plan() == plan()


# --- types


@pytest.mark.parametrize("own", ["bfloat16", "float16"])
def test_half_precision_is_widened_while_it_costs_at_most_half(own: str) -> None:
    spec = model(dtype=own, vocab_size=1_000_000)  # 64 M parameters: 256 MB as float32
    widened = 4 * spec.num_params
    roomy = plan(spec, machine(2 * widened + 4 * GIB))
    assert (roomy.dtype, roomy.kv_dtype) == ("float32", "float32")
    assert str(widened) in why(roomy, "dtype")
    assert "widen" in why(roomy, "dtype")
    exact = resolve(from_kwargs(model="m", num_gpu_blocks_override=8), spec, machine(2 * widened))
    assert exact.dtype == "float32"
    tight = resolve(from_kwargs(model="m", num_gpu_blocks_override=8), spec, machine(2 * widened - 1))
    assert (tight.dtype, tight.kv_dtype) == (own, own)
    assert str(widened) in why(tight, "dtype")
    assert str(2 * widened - 1) in why(tight, "dtype")
    assert tight.weight_bytes == 2 * spec.num_params


# --- lengths and limits


def test_packed_weights_are_copied_unless_memory_is_short() -> None:
    spec = model(vocab_size=400_000, hidden_size=1024)  # 3.05 GiB of float32: two tables
    traits = BACKENDS.traits("native")

    def packed(available: int, given: str = "auto") -> tuple[str, str]:
        config = from_kwargs(model="m", packed_weights=given, dtype="float32", max_num_seqs=1)
        p = resolve(config, spec, machine(available), traits=traits)
        assert decided(p)["packed_weights"] == p.packed_weights
        return p.packed_weights, why(p, "packed_weights")

    roomy, short = 8 * GIB, 4 * GIB
    assert packed(roomy)[0] == "copied"
    assert packed(short) == ("mapped", packed(short)[1])
    assert "75 %" in packed(short)[1]
    assert (packed(short, "copied")[0], packed(roomy, "mapped")[0]) == ("copied", "mapped")
    assert "packed_weights" not in decided(plan(spec)), "the reference operations pack nothing"


def test_longer_than_the_model_was_made_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len: 257 is more than the 256 positions"):
        plan(max_model_len=257)


def test_a_small_token_budget_lowers_the_default_number_of_sequences() -> None:
    p = plan(max_num_batched_tokens=20)
    assert (p.max_num_seqs, p.max_num_batched_tokens) == (20, 20)
    assert "max_num_batched_tokens 20" in why(p, "max_num_seqs")


def test_many_sequences_raise_the_default_token_budget() -> None:
    p = plan(max_num_seqs=1000)
    assert p.max_num_batched_tokens == 1000
    assert "1000" in why(p, "max_num_batched_tokens")


def test_contradicting_limits_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens: 10 is less than max_num_seqs 20"):
        plan(max_num_batched_tokens=10, max_num_seqs=20)


def test_without_chunked_prefill_a_step_holds_the_longest_sequence() -> None:
    spec = model(max_position=4096)
    p = plan(spec, enable_chunked_prefill=False)
    assert p.max_num_batched_tokens == 4096
    assert "chunked prefill is off" in why(p, "max_num_batched_tokens")
    assert plan(spec, enable_chunked_prefill=False, max_model_len=100).max_num_batched_tokens == 512
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens: 4095 cannot hold .* 4096"):
        plan(spec, enable_chunked_prefill=False, max_num_batched_tokens=4095)


# --- memory


def test_groups_follow_the_cache_of_each_layer() -> None:
    p = plan(model(FULL, LATENT, FULL, SLOT))
    assert [(g.spec.kind, g.layers) for g in p.groups] == [("paged", (0, 2)), ("paged", (1,)), ("slot", (3,))]
    assert p.num_slabs == (512, 512, 64 + 64)
    assert "64 checkpoints" in why(p, "num_slots")


def test_few_sequences_still_get_some_checkpoints() -> None:
    assert plan(model(SLOT), max_num_seqs=2).num_slabs == (2 + 16,)
    p = plan(model(SLOT), max_num_seqs=2, enable_prefix_caching=False)
    assert p.num_slabs == (2,)
    assert "prefix caching is off" in why(p, "num_slots")
    assert p.kv_capacity_tokens == 2 * 256, "states do not grow: memory sets no limit in tokens"


def test_checkpoints_yield_before_anything_else_does() -> None:
    spec = model(FULL, SLOT)
    state = plan(spec).groups[1].slab_bytes(32)
    sequence = 8 * plan(spec).groups[0].slab_bytes(32)
    p = plan(spec, max_num_seqs=4, kv_cache_memory_bytes=sequence + 4 * state)
    assert p.num_slabs == (8, 4)
    p = plan(spec, max_num_seqs=4, kv_cache_memory_bytes=sequence + 4 * state + 6 * state)
    assert p.num_slabs[1] == 4 + 3
    assert "half" in why(p, "num_slots")


def test_states_lower_the_default_number_of_sequences() -> None:
    spec = model(FULL, SLOT)
    state = plan(spec).groups[1].slab_bytes(32)
    sequence = 8 * plan(spec).groups[0].slab_bytes(32)
    p = plan(spec, kv_cache_memory_bytes=sequence + 9 * state)
    assert p.max_num_seqs == 1 + 4
    assert str(sequence + 9 * state) in why(p, "max_num_seqs")


def test_memory_that_is_given_is_used_in_full() -> None:
    slab = plan().groups[0].slab_bytes(32)
    p = plan(kv_cache_memory_bytes=5000 * slab + slab - 1)
    assert p.num_slabs == (5000,)
    assert "kv_cache_memory_bytes" in why(p, "num_gpu_blocks")


def test_utilization_is_a_fraction_of_what_is_left() -> None:
    spec, box = model(max_position=10**6), machine(4 * GIB)
    left = 4 * GIB - 4 * spec.num_params - MIN_RESERVE_BYTES
    for share, numerator in ((1.0, 10), (0.9, 9), (0.5, 5)):
        p = plan(spec, box, gpu_memory_utilization=share)
        slab = p.groups[0].slab_bytes(32)
        assert p.num_slabs == (left * numerator // 10 // slab,)
        assert str(4 * GIB) in why(p, "num_gpu_blocks")
        assert str(MIN_RESERVE_BYTES) in why(p, "num_gpu_blocks")


def test_the_reserve_grows_with_the_machine() -> None:
    p = plan(model(max_position=10**8), machine(100 * GIB), max_model_len=10**8, gpu_memory_utilization=1.0)
    assert p.kv_bytes <= 95 * GIB
    assert p.kv_bytes > 94 * GIB


def test_an_overridden_number_of_blocks_is_exact() -> None:
    p = plan(model(FULL, LATENT, SLOT), num_gpu_blocks_override=8)
    assert p.num_slabs == (8, 8, 128)
    with pytest.raises(CapacityError, match=r"7 blocks hold 224 tokens.* 256 needs 8 blocks.*at least 8 blocks or"):
        plan(num_gpu_blocks_override=7)
    assert plan(num_gpu_blocks_override=7, max_model_len=224).num_slabs == (7,)
    with pytest.raises(ConfigError, match="no KV blocks"):
        plan(model(SLOT), num_gpu_blocks_override=7)
    slab = plan().groups[0].slab_bytes(32)
    most = (8 * GIB - plan().weight_bytes) // slab
    with pytest.raises(CapacityError, match=f"use at most {most} blocks"):
        plan(num_gpu_blocks_override=most + 1)
    assert plan(num_gpu_blocks_override=most).num_slabs == (most,)


def test_page_ids_stay_within_int32() -> None:
    tiny = model(Attention(num_heads=1, num_kv_heads=1, head_dim=1))
    with pytest.raises(ConfigError, match=f"use at most {2**31 - 1}"):
        plan(tiny, machine(10**15), num_gpu_blocks_override=2**31, block_size=1)
    assert plan(tiny, machine(10**15), kv_cache_memory_bytes=10**14, block_size=1).num_slabs == (2**31 - 1,)


# --- the default leaves memory to others

PER_TOKEN = 2 * (2 * 2 * 8 * 4)


def test_by_default_there_is_memory_for_sequences_of_a_modest_context() -> None:
    p = plan(model(max_position=8192))
    assert p.kv_capacity_tokens == 64 * 2048
    assert "64 sequences of 2048 tokens" in why(p, "kv_cache_memory_bytes")
    assert plan(model(max_position=8192), max_num_seqs=500).kv_capacity_tokens == 500 * 2048
    assert plan(model(max_position=1000)).kv_capacity_tokens == 64 * 1024, "nobody needs more"
    assert plan(model(max_position=8192), kv_allocator="contiguous").kv_capacity_tokens == 64 * 8192


def test_by_default_kv_takes_a_quarter_of_what_is_free_at_most() -> None:
    spec, box = model(max_position=8192), machine(GIB)
    p = plan(spec, box, max_num_seqs=10_000)
    assert p.kv_bytes == pytest.approx((GIB - p.weight_bytes) / 4, abs=32 * PER_TOKEN)
    assert "a quarter of the" in why(p, "kv_cache_memory_bytes")


@pytest.mark.parametrize("share", [0.26, 0.3, 0.42])
def test_the_default_never_shortens_the_context(share: float) -> None:
    """One sequence of the whole length is more than a quarter of what is free, but it fits."""
    length = int(share * GIB) // PER_TOKEN // 32 * 32
    spec, box = model(max_position=length), machine(GIB)
    p = plan(spec, box)
    assert p.max_model_len == p.kv_capacity_tokens == length
    assert f"one sequence of max_model_len {length}" in why(p, "kv_cache_memory_bytes")


@pytest.mark.parametrize("spec", [model(SLOT), model(FULL, SLOT), model(SLIDING), model(FULL, SLIDING, SLOT)])
@pytest.mark.parametrize("seqs", [1, 8, 100])
def test_the_default_has_states_and_windows_for_everybody(spec: ModelSpec, seqs: int) -> None:
    p, everything = (plan(spec, max_num_seqs=seqs, **more) for more in ({}, {"gpu_memory_utilization": 0.9}))
    assert p.num_slabs == everything.num_slabs, "of 256 tokens all sequences can have all that they need"


def test_whoever_asks_for_all_gets_all() -> None:
    spec, box = model(max_position=10**6), machine(4 * GIB)
    assert plan(spec, box, gpu_memory_utilization=0.9).kv_bytes > 3 * GIB
    assert plan(spec, box, kv_cache_memory_bytes=3 * GIB).kv_bytes == pytest.approx(3 * GIB, rel=1e-4)
    blocks = plan(spec, box, num_gpu_blocks_override=40_000)
    assert blocks.num_slabs == (40_000,)
    assert "kv_cache_memory_bytes" not in decided(blocks)


# --- refusals


def test_weights_that_do_not_fit() -> None:
    spec = model(vocab_size=1_000_000)
    with pytest.raises(CapacityError) as caught:
        plan(spec, machine(100))
    assert str(4 * spec.num_params) in str(caught.value)
    assert f"({4 * spec.num_params - 100} bytes)" in str(caught.value)
    half = model(vocab_size=1_000_000, dtype="bfloat16")
    with pytest.raises(CapacityError, match="use dtype bfloat16"):
        plan(half, machine(3 * half.num_params), dtype="float32")
    plan(half, machine(3 * half.num_params), dtype="bfloat16", num_gpu_blocks_override=8)


def test_memory_that_is_given_and_not_there() -> None:
    with pytest.raises(CapacityError, match=f"use at most {8 * GIB - plan().weight_bytes}"):
        plan(kv_cache_memory_bytes=9 * GIB)


def test_a_refusal_gives_both_sizes_and_the_largest_length() -> None:
    spec, box = model(max_position=10**7), machine(GIB)
    with pytest.raises(CapacityError) as caught:
        plan(spec, box)
    text = str(caught.value)
    slab = plan().groups[0].slab_bytes(32)
    left = (GIB - 4 * spec.num_params - MIN_RESERVE_BYTES) * 9 // 10
    longest = left // slab * 32
    assert gib(10**7 // 32 * slab) in text
    assert gib(left) in text
    assert f"max_model_len {longest} (or less)" in text
    assert plan(spec, box, max_model_len=longest).num_slabs == (longest // 32,)
    with pytest.raises(CapacityError):
        plan(spec, box, max_model_len=longest + 1)


def test_bytes_for_people() -> None:
    assert [gib(n) for n in (5, 2048, 3 * MIB, 3 * GIB // 2)] == [
        "5 bytes", "2.00 KiB (2048 bytes)", "3.00 MiB (3145728 bytes)", "1.50 GiB (1610612736 bytes)",
    ]  # fmt: skip


# --- windows


def held(window: int, step_tokens: int, block_size: int = 32) -> int:
    """Blocks of a window and of the tokens that steps in flight add to it, wherever the first one begins."""
    return -(-(window - 1 + step_tokens) // block_size) + 1


def test_G26_a_window_group_gets_what_its_sequences_can_hold() -> None:
    spec = model(FULL, SLIDING, FULL, WIDER, max_position=8192)
    p = plan(spec, max_num_batched_tokens=64, max_num_seqs=4, gpu_memory_utilization=0.9)
    assert [(g.spec.kind, g.spec.window, g.layers) for g in p.groups] == [
        ("paged", None, (0, 2)), ("window", 100, (1,)), ("window", 1000, (3,)),
    ]  # fmt: skip
    assert p.step_tokens == 64
    assert p.num_slabs == (4 * 8192 // 32, 4 * held(100, 64), 4 * held(1000, 64))
    assert p.kv_capacity_tokens == 4 * 8192
    assert "hold the window of 100 tokens and the 64 tokens" in why(p, "num_window_blocks[0]")
    assert decided(p)["num_window_blocks[1]"] == p.num_slabs[2]


@pytest.mark.parametrize(
    ("settings", "step_tokens"),
    [
        ({}, 512),
        ({"depth": 2}, 1024),
        ({"long_prefill_token_threshold": 16, "depth": 2}, 32),
        ({"enable_chunked_prefill": False, "long_prefill_token_threshold": 16}, 8192),
    ],
)
def test_steps_in_flight_add_to_what_a_window_holds(settings: dict[str, Any], step_tokens: int) -> None:
    p = plan(model(SLIDING, max_position=8192), max_num_seqs=1, **settings)
    assert p.step_tokens == step_tokens
    assert p.num_slabs == (min(held(100, step_tokens), 8192 // 32),)


def test_C84_a_model_of_windows_is_bounded_by_its_sequences() -> None:
    """However much memory is asked for; each of them may be as long as the model allows."""
    spec = model(SLIDING, SLIDING, max_position=100_000)
    p = plan(spec, max_num_seqs=3, max_num_batched_tokens=64, kv_cache_memory_bytes=GIB)
    assert p.num_slabs == (3 * held(100, 64),)
    assert p.kv_capacity_tokens == 3 * 100_000
    assert "there are max_num_seqs 3 sequences" in why(p, "num_window_blocks")
    slab = p.groups[0].slab_bytes(32)
    tight = plan(spec, max_num_seqs=3, max_num_batched_tokens=64, kv_cache_memory_bytes=2 * held(100, 64) * slab)
    assert tight.num_slabs == (2 * held(100, 64),)
    assert tight.kv_capacity_tokens == 2 * 100_000
    assert "memory is left for 2 of max_num_seqs 3" in why(tight, "num_window_blocks")
    with pytest.raises(CapacityError, match="max_model_len 256 "):  # eight blocks: all that a short one has
        plan(spec, max_num_seqs=3, max_num_batched_tokens=512, kv_cache_memory_bytes=8 * slab)


def test_two_windows_are_made_for_equally_many_sequences() -> None:
    spec = model(SLIDING, WIDER, max_position=100_000)
    narrow, wide = held(100, 64), held(1000, 64)
    each = sum(n * g.slab_bytes(32) for n, g in zip((narrow, wide), plan(spec).groups, strict=True))
    for size, served in ((each, 1), (3 * each - 1, 2), (3 * each, 3), (99 * each, 5)):
        p = plan(spec, max_num_seqs=5, max_num_batched_tokens=64, kv_cache_memory_bytes=size)
        assert p.num_slabs == (served * narrow, served * wide)
        assert p.kv_capacity_tokens == served * 100_000
    with pytest.raises(CapacityError, match="one sequence of max_model_len 100000 would take"):
        plan(spec, max_num_seqs=5, max_num_batched_tokens=64, kv_cache_memory_bytes=each - 1)


def test_the_budget_is_divided_exactly_between_full_and_window_groups() -> None:
    spec = model(FULL, SLIDING, max_position=8192)
    options: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    full, window = (g.slab_bytes(32) for g in plan(spec).groups)
    windows = 8 * held(100, 64)
    for extra in (0, full - 1, full, 10 * full + 5):
        p = plan(spec, **options, kv_cache_memory_bytes=256 * full + windows * window + extra)
        assert p.num_slabs == (256 + extra // full, windows)
    p = plan(spec, **options, kv_cache_memory_bytes=256 * full + (windows - 1) * window)
    assert p.num_slabs == (256, 7 * held(100, 64)), "one full-length sequence first, then windows for all"
    with pytest.raises(CapacityError, match="max_model_len 8160"):
        plan(spec, **options, kv_cache_memory_bytes=256 * full + held(100, 64) * window - 1)


def test_short_sequences_never_need_more_than_the_full_groups_have() -> None:
    p = plan(model(FULL, WIDER), max_num_seqs=4, kv_cache_memory_bytes=MIB)
    full, window = (g.slab_bytes(32) for g in p.groups)
    assert p.num_slabs[1] == 4 * 8, "windows are longer than any sequence"
    assert p.num_slabs[0] == (MIB - 32 * window) // full
    p = plan(model(FULL, WIDER), max_num_seqs=4, num_gpu_blocks_override=9)
    assert p.num_slabs == (9, 9)
    assert "no more than num_gpu_blocks" in why(p, "num_window_blocks")


def test_other_allocators_keep_windows_whole() -> None:
    p = plan(model(FULL, SLIDING, max_position=8192), max_num_seqs=2, kv_allocator="contiguous")
    assert p.num_slabs == (2 * 256, 2 * 256)
    assert "num_window_blocks" not in decided(p)


def test_the_host_keeps_what_windows_show() -> None:
    spec = model(FULL, SLIDING, max_position=8192)
    full, window = (g.slab_bytes(32) for g in plan(spec).groups)
    p = plan(spec, max_num_seqs=2, swap_space=0.001)
    waiting = -(-99 // 32) + 1  # blocks that the last 99 tokens may lie in
    assert p.num_host_slabs == ((int(0.001 * GIB) - 2 * waiting * window) // full, 2 * waiting)


@pytest.mark.parametrize(
    ("layers", "settings", "change"),
    [
        ([FULL], {"swap_space": 0.0}, "give swap_space"),
        ([FULL], {"prefix_cache": "none"}, "radix or hash"),
        ([FULL], {"enable_prefix_caching": False}, "enable_prefix_caching"),
        ([FULL], {"kv_allocator": "contiguous"}, "use paged"),
        ([FULL], {"kv_selector": "streaming"}, "use one of them"),
        ([FULL, SLIDING], {}, "leave it off"),
        ([FULL, SLOT], {}, "leave it off"),
    ],
)
def test_a_hierarchical_cache_is_refused_where_it_cannot_be(layers: Any, settings: Any, change: str) -> None:
    asked = {"enable_hierarchical_cache": True, "swap_space": 0.001} | settings
    with pytest.raises(ConfigError, match=f"enable_hierarchical_cache: .*{change}"):
        plan(model(*layers), **asked)


@pytest.mark.parametrize(
    ("layers", "settings", "change"),
    [
        ([FULL], {"prefix_cache": "none"}, "enable_prefix_caching"),
        ([FULL], {"enable_prefix_caching": False}, "enable_prefix_caching"),
        ([FULL], {"kv_allocator": "virtual"}, "kv_allocator paged"),
        ([SLOT], {}, "leave it off"),
    ],
)
def test_events_of_blocks_are_refused_where_there_are_none(layers: Any, settings: Any, change: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_events_config: .*{change}"):
        plan(model(*layers), kv_events_config={"enable_kv_cache_events": True}, **settings)
    assert plan(model(*layers), kv_events_config={"enable_kv_cache_events": False}, **settings)
    assert plan(model(FULL, SLIDING, SLOT), kv_events_config={"enable_kv_cache_events": True})


def test_a_hierarchical_cache_has_the_memory_of_swap_space() -> None:
    spec = model(FULL, LATENT)
    alone = plan(spec, swap_space=0.001)
    assert plan(spec, swap_space=0.001, enable_hierarchical_cache=True).num_host_slabs == alone.num_host_slabs
