"""What GGUF files leave unsaid is what llama.cpp takes it for, and single entries that contradict are refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import ModelError, UnsupportedError
from penstock.families.fields import Fields
from penstock.families.gguf import readers, single, uneven
from penstock.families.gguf.header import Header
from penstock.families.gguf.rope import rope

S, F = "sliding_attention", "full_attention"


def header(num_layers: int = 8, hidden_size: int = 64, **entries: Any) -> Header:
    """`entries`: metadata with double underscores for dots."""
    values = {"block_count": num_layers, "attention.head_count": 4, "context_length": 128}
    values |= {key.replace("__", "."): value for key, value in entries.items()}
    return Header(Path("m.gguf"), Fields(values, "the metadata"), {}, 32, hidden_size)


@pytest.mark.parametrize(("period", "entries", "kinds"), [
    (6, {"attention__sliding_window": 4}, [S, S, S, S, S, F, S, S]),
    (6, {"attention__sliding_window": 4, "attention__sliding_window_pattern": 3}, [S, S, F, S, S, F, S, S]),
    (6, {"attention__sliding_window": 4, "attention__sliding_window_pattern": 1}, [F] * 8),
    (6, {"attention__sliding_window": 4, "attention__sliding_window_pattern": 0}, [S] * 8),
    (6, {"attention__sliding_window": 4, "attention__sliding_window_pattern": [True, False] * 4}, [S, F] * 4),
    (6, {"attention__sliding_window": 4, "attention__sliding_window_pattern": True}, [S] * 8),
    (6, {"attention__sliding_window": 4, "attention__sliding_window_pattern": [0, 1] * 4}, [F, S] * 4),
    (6, {}, [F] * 8),
    (6, {"attention__sliding_window": 0}, [F] * 8),
    (None, {"attention__sliding_window": 4}, [F] * 8),
])  # fmt: skip
def test_which_layers_slide(period: int | None, entries: dict[str, Any], kinds: list[str]) -> None:
    assert readers.layer_types(period)(header(**entries)) == kinds


def test_patterns_that_are_none() -> None:
    for bad in ([True, False], ["a"] * 8, [True, 1] * 4):
        with pytest.raises(ModelError, match="sliding_window_pattern"):
            readers.layer_types(2)(header(attention__sliding_window=4, attention__sliding_window_pattern=bad))
    entries = {"attention__sliding_window": 4}
    assert readers.exaone4_types(header(64, **entries)) == [S, S, S, F] * 16
    assert readers.exaone4_types(header(30, **entries)) == [F] * 30


def test_layers_that_predict_further_tokens_are_not_run() -> None:
    assert header(47, nextn_predict_layers=1).num_layers == 46
    with pytest.raises(ModelError, match="of which 2 predict"):
        _ = header(2, nextn_predict_layers=2).num_layers
    assert header(3, nextn_predict_layers=1, feed_forward_length=[1, 2, 3]).per_layer("feed_forward_length") == [1, 2]
    with pytest.raises(ModelError, match="for 1 of 3 layers"):
        header(3, feed_forward_length=[1]).per_layer("feed_forward_length")


def test_scales_that_files_leave_out() -> None:
    gemma = readers.score_divisor(46)
    assert (gemma(header(46)), gemma(header(26)), gemma(header(26, attention__key_length=24))) == (16, 16, 24)
    assert gemma(header(46, attention__key_length=24)) == 16
    assert readers.attention_scale(header()) == 0.25
    assert readers.attention_scale(header(attention__scale=0.5)) == 0.5
    old = header(40, 2304)
    assert (readers.base_width(old), readers.depth_scale(old)) == (256, pytest.approx(1.4))
    new = header(40, 2304, logit_scale=18.0, residual_scale=1.0 / math.sqrt(40))
    assert (readers.base_width(new), readers.depth_scale(new)) == (128, pytest.approx(1.0))


def test_versions_of_deepseek() -> None:
    assert single.deepseek(header()) == "deepseek_v2"
    assert single.deepseek(header(expert_gating_func=2)) == "deepseek_v3"
    corrected = Header(Path("m"), header().fields, {"blk.3.exp_probs_b.bias": None}, 32, 64)  # type: ignore[dict-item]
    assert single.deepseek(corrected) == "deepseek_v3"
    with pytest.raises(UnsupportedError, match="expert_gating_func 4"):
        single.deepseek(header(expert_gating_func=4))
    old = header(attention__key_length=10, attention__value_length=6, rope__dimension_count=4)
    assert (single.unrotated(old), single.latent_values(old)) == (6, 6)


@pytest.mark.parametrize(("read", "entries", "culprit"), [
    (readers.experts(readers.SOFTMAX), {"expert_gating_func": 2}, "expert_gating_func"),
    (readers.experts(readers.SOFTMAX), {"expert_weights_scale": 2.0}, "expert_weights_scale"),
    (readers.experts(readers.SOFTMAX, normed=True), {"expert_weights_norm": False}, "expert_weights_norm"),
    (readers.experts(readers.SOFTMAX), {"expert_count": 2, "expert_used_count": 3}, "3 of 2 experts"),
    (readers.rope_for_granite, {"rope__scaling__finetuned": False}, "without positions"),
    (readers.times_four, {"feed_forward_length": 200}, "200, not 4 times 64"),
    (readers.equal_heads, {"attention__head_count_kv": 2}, "fewer kv heads"),
    (single.expansion, {"ssm__inner_size": 100}, "no multiple of 64"),
    (single.state_heads, {"ssm__inner_size": 100, "ssm__time_step_rank": 3}, "do not divide"),
    (single.blocks_of_deci, {"attention__head_count_kv": 0, "feed_forward_length": 8}, "one product"),
    (single.blocks_of_deci, {"attention__head_count_kv": 3, "feed_forward_length": 8}, "do not divide"),
    (single.ministral_rope, {
        "attention__temperature_scale": 0.1, "attention__temperature_length": 5,
        "rope__scaling__original_context_length": 64,
    }, "temperature_length"),
    (uneven.every(0, uneven.attends, "attention"), {"attention__head_count_kv": [0, 2, 0, 0, 2, 0, 2, 0]}, "equally"),
    (uneven.of_kind("attention.head_count_kv", S), {
        "attention__head_count_kv": [1, 2, 1, 4] * 2, "attention__sliding_window": 9,
        "attention__sliding_window_pattern": [False, True] * 4,
    }, "as 2 and 4"),
    (uneven.indexer_types, {"attention__indexer__types": [True] * 3}, "8 truth values"),
    (uneven.limits("swiglu_clamp_exp"), {"swiglu_clamp_exp": [0.5, -1.0] * 4}, "swiglu_clamp_exp"),
    (uneven.score, {"expert_gating_func": 4}, "expert_gating_func"),
    (uneven.cohere_experts, {"expert_weights_scale": 2.0}, "expert_weights_scale"),
    (uneven.cohere_experts, {"expert_gating_func": 1}, "expert_weights_norm"),
    (uneven.rwkv_head("wkv.head_size"), {"token_shift_count": 1}, "token_shift_count"),
    (uneven.turned_heads, {"wkv__head_size": 16}, "token_shift_count"),
    (uneven.turned_heads, {"wkv__head_size": 16, "token_shift_count": 1, "rescale_every_n_layers": 2}, "residual"),
])  # fmt: skip
def test_what_does_not_go_together(read: readers.Read, entries: dict[str, Any], culprit: str) -> None:
    with pytest.raises(ModelError, match=culprit):
        read(header(**entries))


def test_layers_that_differ() -> None:
    found = {"attention__head_count_kv": [0, 2, 0, 0, 2, 0, 0, 2]}
    assert [uneven.every(part, uneven.attends, "")(header(**found)) for part in (0, 1)] == [3, 1]
    once = {"attention__head_count_kv": [0, 0, 0, 2, 0, 0, 0, 0]}
    assert [uneven.every(part, uneven.attends, "")(header(**once)) for part in (0, 1)] == [9, 3]
    assert uneven.indexer_types(header()) == ["full"] * 8
    long = uneven.indexer_types(header(context_length=2**20))
    assert [kind == "full" for kind in long] == [True, True, True, False, False, False, True, False]
    assert uneven.indexer_types(header(2, attention__indexer__types=[1, 0])) == ["full", "shared"]
    assert uneven.limits("x")(header()) is None
    assert uneven.limits("x")(header(x=0.5)) == [0.5] * 8
    assert uneven.cohere_kinds(header(attention__sliding_window=4)) == [F, S, S, S] * 2
    assert (uneven.score(header()), uneven.score(header(expert_gating_func=1))) == ("sigmoid", "softmax")
    assert uneven.value_scale(header()) == 1.0
    assert (single.mamba(header()), single.mamba(header(ssm__dt_b_c_rms=True))) == ("mamba", "falcon_mamba")


def test_small_choices() -> None:
    assert single.alibi(header()) == {"alibi": False}
    assert single.alibi(header(attention__max_alibi_bias=8.0, attention__clamp_kqv=0.5)) == {
        "alibi": True, "alibi_bias_max": 8.0, "clip_qkv": 0.5
    }  # fmt: skip
    assert single.chunked(header())
    assert single.llama4_rotates(header(2, attention__sliding_window=0)) == [1, 1]
    assert single.llama4_types(header(2, attention__sliding_window=0)) == [F, F]
    assert single.llama4_rotates(header()) is single.llama4_types(header(attention__sliding_window=9)) is None
    assert single.falcon_grouped(header(attention__head_count_kv=2))
    assert not single.falcon_grouped(header(attention__head_count_kv=1))
    assert single.one_kv_head(header(attention__head_count_kv=1))
    assert single.topk_method(header(expert_group_count=8)) == "group_limited_greedy"
    assert rope(header(rope__dimension_count=4))["partial_rotary_factor"] == pytest.approx(0.28125)
