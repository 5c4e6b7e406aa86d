"""Fields of Gemma 3n and Gemma 4 from the metadata of a GGUF file; see `readers`."""

from __future__ import annotations

import re
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import ModelSpec
from penstock.core.weight_map import Cut
from penstock.families.gguf import readers as r
from penstock.families.gguf.header import Header
from penstock.families.llama_like import FULL, SLIDING
from penstock.families.reading import MAX_SIZE
from penstock.formats.files import quoted

_UNUSED = re.compile(r"blk\.(\d+)\.attn_(k|v|k_norm)\.weight")
_STREAMS = re.compile(r"altup_(in|out)_(\d+)")
_FREQUENCIES = "rope_freqs.weight"

_DOWN, _UP = "altup_proj.weight", "altup_unembd_proj.weight"


def is_unused(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor makes keys or values of a layer that reads another's: converters carry them along."""
    found = _UNUSED.fullmatch(name)
    if found is None or len(found[1]) > 9 or int(found[1]) >= len(spec.layers):
        return False
    return spec.layers[int(found[1])].kv_from is not None


def stream_place(name: str, spec: ModelSpec) -> Cut | None:
    """Where a matrix to or from a further stream is: all of them lie in one tensor."""
    found = _STREAMS.fullmatch(name)
    if found is None:
        return None
    assert spec.altup is not None
    e = spec.hidden_size
    return Cut(_DOWN if found[1] == "in" else _UP, (spec.altup.streams - 1, e, e), (int(found[2]) - 1,))


def rows_of_table(h: Header) -> int:
    """Ids that have embeddings for every layer."""
    found = h.tensors.get("per_layer_token_embd.weight")
    return found.shape[0] if found is not None else h.vocab_size


def shared_layers(default: int) -> r.Read:
    """How many last layers share keys and values; without a word on it, all but the first `default` (0: none)."""

    def read(h: Header) -> int:
        usual = max(0, h.num_layers - default) if default else 0
        return h.fields.integer("attention.shared_kv_layers", low=0, high=h.num_layers, default=usual)

    return read


def laurel_rank(h: Header) -> int:
    found = h.tensors.get("blk.0.laurel_l.weight")
    if found is None:
        raise ModelError(f"{quoted(h.path)} lacks the tensor 'blk.0.laurel_l.weight'")
    return found.shape[0]


def sparsities(h: Header) -> list[float]:
    """Shares of idle gates; files keep standard deviations, minus infinity for a share of 0."""
    given = h.fields.raw("activation_sparsity_scale")
    scales = given if isinstance(given, list) else [given] * h.num_layers
    if len(scales) != h.num_layers or any(
        isinstance(x, bool) or not isinstance(x, int | float) or x != x for x in scales
    ):
        raise ModelError(f"{quoted(h.path)} gives activation_sparsity_scale as no list of {h.num_layers} numbers")
    # The nearest share of a few digits: float32 has kept no more of it.
    return [min(round(NormalDist().cdf(max(x, -40.0)), 6), 0.999999) for x in scales]


def _kinds(h: Header) -> list[str]:
    found: list[str] = r.layer_types(6)(h)
    return found


def kv_heads(kind: str) -> r.Read:
    """Of layers of one kind; None if there is no such layer."""

    def read(h: Header) -> Any:
        found = {n for n, own in zip(h.per_layer("attention.head_count_kv"), _kinds(h), strict=True) if own == kind}
        if len(found) > 1:
            raise UnsupportedError(f"{quoted(h.path)} has {kind} layers with different numbers of kv heads")
        return next(iter(found), None)

    return read


def one_size(keys: str, values: str) -> r.Read:
    """Components of a head, keys and values alike."""

    def read(h: Header) -> int:
        size = h.fields.integer(keys, high=MAX_SIZE)
        if h.fields.integer(values, high=MAX_SIZE, default=size) != size:
            raise UnsupportedError(f"{quoted(h.path)} has heads whose values are of another size than their keys")
        return size

    return read


global_size = one_size("attention.key_length", "attention.value_length")
local_size = one_size("attention.key_length_swa", "attention.value_length_swa")


def keys_are_values(h: Header) -> bool:
    """Global layers that keep something have no values of their own."""
    return any(
        kind == FULL and h.has(f"blk.{n}.attn_k.weight") and not h.has(f"blk.{n}.attn_v.weight")
        for n, kind in enumerate(_kinds(h))
    )


def width(h: Header) -> int:
    """Of the first layer; see `is_doubled`."""
    return int(h.per_layer("feed_forward_length")[0])


def is_doubled(h: Header) -> bool:
    return len(set(h.per_layer("feed_forward_length"))) > 1


def ropes(h: Header) -> dict[str, Any]:
    """Global layers turn some of their pairs; the others have a divisor that is as good as infinite."""
    size, local = global_size(h), local_size(h)
    for name, whole in (("rope.dimension_count", size), ("rope.dimension_count_swa", local)):
        if h.fields.integer(name, high=MAX_SIZE, default=whole) != whole:
            raise UnsupportedError(f"{quoted(h.path)} gives {name} unlike the size of its heads, {whole}")
    full: dict[str, Any] = {"rope_type": "default", "rope_theta": h.fields.number("rope.freq_base", default=1e6)}
    if h.has(_FREQUENCIES):
        divisors = h.numbers(_FREQUENCIES, size // 2)
        turned = sum(value == 1.0 for value in divisors)
        if any(value != 1.0 for value in divisors[:turned]) or any(value < 1e20 for value in divisors[turned:]):
            raise UnsupportedError(f"{quoted(h.path)} has divisors of positions ({_FREQUENCIES}) unlike Gemma 4's")
        full |= {"rope_type": "proportional", "partial_rotary_factor": turned / len(divisors)}
    theta = h.fields.number("rope.freq_base_swa", default=1e4)
    return {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": theta}}


def with_experts(name: str) -> r.Read:
    """A field of sparse models; a null in others."""
    return lambda h: h.fields.raw(name) if h.fields.raw("expert_count") else None


def is_sparse(h: Header) -> bool:
    return bool(h.fields.raw("expert_count"))


Fields = dict[str, str | Callable[[Header], Any]]
PER_LAYER: Fields = {
    "hidden_size_per_layer_input": "embedding_length_per_layer_input", "vocab_size_per_layer_input": rows_of_table,
}  # fmt: skip
GEMMA3N: Fields = {
    **PER_LAYER, "final_logit_softcapping": lambda h: h.fields.number("final_logit_softcapping", default=30.0),
    "sliding_window": r.window, "layer_types": r.layer_types(5), "rope_parameters": r.two_ropes(10000.0),
    "num_kv_shared_layers": shared_layers(20), "altup_active_idx": "altup.active_idx",
    "altup_num_inputs": "altup.num_inputs", "laurel_rank": laurel_rank, "activation_sparsity_pattern": sparsities,
}  # fmt: skip
GEMMA4: Fields = {
    **PER_LAYER, "final_logit_softcapping": "final_logit_softcapping?", "sliding_window": r.window,
    "layer_types": _kinds, "rope_parameters": ropes, "num_kv_shared_layers": shared_layers(0), "head_dim": local_size,
    "global_head_dim": global_size, "num_key_value_heads": kv_heads(SLIDING),
    "num_global_key_value_heads": kv_heads(FULL), "attention_k_eq_v": keys_are_values, "intermediate_size": width,
    "use_double_wide_mlp": is_doubled, "enable_moe_block": is_sparse, "num_experts": with_experts("expert_count"),
    "top_k_experts": with_experts("expert_used_count"),
    "moe_intermediate_size": with_experts("expert_feed_forward_length"),
}  # fmt: skip
GEMMA4_NAMES = {
    "router_norm": "ffn_gate_inp.scale!", "router_scale": "ffn_down_exps.scale!", "experts_norm": "pre_ffw_norm_2",
    "experts_post_norm": "post_ffw_norm_2", "shared_post_norm": "post_ffw_norm_1", "shared.gate": "ffn_gate",
    "shared.up": "ffn_up", "shared.down": "ffn_down",
}  # fmt: skip
