"""Fields that one family alone has, from the metadata of a GGUF file; see `readers`."""

from __future__ import annotations

from typing import Any

from penstock.base.errors import ModelError, UnsupportedError
from penstock.families.gguf.header import Header
from penstock.families.gguf.readers import SIGMOID, SOFTMAX, Read, kv_heads, window
from penstock.families.gguf.rope import head_dim, rope, rotated, scaled
from penstock.families.llama_like import FULL
from penstock.families.reading import MAX_EXPERTS, MAX_LAYERS, MAX_POSITION, MAX_SIZE
from penstock.formats.files import quoted


def deepseek(h: Header) -> str:
    """Version 2 scores by softmax, version 3 by sigmoid, and corrects its scores."""
    corrected = any(name.endswith(".exp_probs_b.bias") for name in h.tensors)
    gate = h.fields.integer("expert_gating_func", low=0, high=16, default=SIGMOID if corrected else SOFTMAX)
    if gate not in (0, SOFTMAX, SIGMOID):
        raise UnsupportedError(
            f"{quoted(h.path)} has a router (expert_gating_func {gate}) that DeepSeek 2 and 3 have not"
        )
    return "deepseek_v3" if gate == SIGMOID else "deepseek_v2"


def unrotated(h: Header) -> int:
    """`qk_nope_head_dim`: what a key has besides its rotated part, in old files and in those whose keys are latent."""
    name = "attention.key_length_mla" if "attention.key_length_mla" in h.fields else "attention.key_length"
    h.fields.raw("attention.key_length")
    return h.fields.integer(name, high=MAX_SIZE) - h.fields.integer("rope.dimension_count", high=MAX_SIZE)


def latent_values(h: Header) -> int:
    name = "attention.value_length_mla" if "attention.value_length_mla" in h.fields else "attention.value_length"
    h.fields.raw("attention.value_length")
    return h.fields.integer(name, high=MAX_SIZE)


def query_rank(h: Header) -> int | None:
    """Zero says, as leaving it out does, that queries are not factored."""
    return h.fields.integer("attention.q_lora_rank", low=0, high=MAX_SIZE, default=0) or None


def all_heads(h: Header) -> Any:
    """Latent attention has as many keys as queries; files may say one, for the latent."""
    h.fields.raw("attention.head_count_kv")
    return h.fields.raw("attention.head_count")


def latent_rope(h: Header) -> dict[str, Any]:
    """DeepSeek's YaRN leaves vectors as they are and enlarges the scores; a tenth of how much is stored."""
    out = scaled(h, h.fields.integer("rope.dimension_count", high=MAX_SIZE))
    if out["rope_type"] == "yarn" and "rope.scaling.yarn_log_multiplier" in h.fields:
        by = h.fields.number("rope.scaling.yarn_log_multiplier", above=-1.0) / 0.1
        out |= {"mscale": by, "mscale_all_dim": by}
    return out


def topk_method(h: Header) -> str:
    if deepseek(h) == "deepseek_v3":
        return "noaux_tc"
    groups = h.fields.integer("expert_group_count", high=MAX_EXPERTS, default=1)
    return "greedy" if groups == 1 else "group_limited_greedy"


def growing_latent_rope(h: Header) -> dict[str, Any]:
    """Mistral 4's, whose queries grow if the file says so: what the converter makes of a folder does not."""
    return latent_rope(h) | _growth(h)


def ministral(h: Header) -> str:
    return "ministral3" if "attention.temperature_scale" in h.fields else "mistral"


def ministral_rope(h: Header) -> dict[str, Any]:
    out = rope(h)
    if out["rope_type"] == "yarn" and "rope.scaling.yarn_log_multiplier" in h.fields:
        by = h.fields.number("rope.scaling.yarn_log_multiplier", above=-1.0)
        out |= {"mscale": 1.0, "mscale_all_dim": by}
    return out | _growth(h)


def _growth(h: Header) -> dict[str, Any]:
    """How queries grow with their position, if they do."""
    if "attention.temperature_scale" not in h.fields:
        return {}
    floor = h.fields.integer("rope.scaling.original_context_length", high=MAX_POSITION)
    if h.fields.integer("attention.temperature_length", high=MAX_POSITION, default=floor) != floor:
        raise UnsupportedError(f"{quoted(h.path)} gives attention.temperature_length apart from the original context")
    return {"llama_4_scaling_beta": h.fields.number("attention.temperature_scale")}


def blocks_of_deci(h: Header) -> list[dict[str, Any]]:
    """`block_configs`: a layer without kv heads or without width goes without that half."""
    heads = h.per_layer("attention.head_count")
    groups, widths = h.per_layer("attention.head_count_kv"), h.per_layer("feed_forward_length")
    blocks = []
    for total, own, width in zip(heads, groups, widths, strict=True):
        if total and not own:
            raise UnsupportedError(f"{quoted(h.path)} replaces the attention of a layer by one product")
        if own and total % own:
            raise ModelError(f"{quoted(h.path)}: {own} kv heads do not divide {total} heads")
        blocks.append({
            "attention": {"n_heads_in_group": total // own} if own else {"no_op": True},
            # The family rounds up to whole steps; a little less than the width comes to it.
            "ffn": {"ffn_mult": 1.5 * (width - 0.5) / h.hidden_size} if width else {"no_op": True},
        })  # fmt: skip
    return blocks


def most(name: str) -> Read:
    """The largest of a list with an entry per layer; layers without that half have 0."""
    return lambda h: max(h.per_layer(name))


def either_epsilon(h: Header) -> float:
    """Of a family whose norms are RMS norms, under whichever name."""
    rms = "attention.layer_norm_rms_epsilon"
    return h.fields.number(rms if rms in h.fields else "attention.layer_norm_epsilon")


def pattern_of_nemotron(h: Header) -> str:
    """A letter per block: M Mamba-2, * attention, - MLP, E experts."""
    groups, widths = h.per_layer("attention.head_count_kv"), h.per_layer("feed_forward_length")
    wide = "E" if "expert_count" in h.fields else "-"
    return "".join("*" if g else wide if w else "M" for g, w in zip(groups, widths, strict=True))


def state_heads(h: Header) -> int:
    """`head_dim` of Mamba-2."""
    inner = h.fields.integer("ssm.inner_size", high=MAX_SIZE)
    heads = h.fields.integer("ssm.time_step_rank", high=MAX_SIZE)
    if inner % heads:
        raise ModelError(f"{quoted(h.path)}: {heads} heads do not divide ssm.inner_size {inner}")
    return inner // heads


def mamba(h: Header) -> str:
    """Falcon Mamba norms B, C and the time step."""
    return "falcon_mamba" if h.fields.flag("ssm.dt_b_c_rms") else "mamba"


def inner_eps(h: Header) -> float | None:
    """Of those norms; files give one epsilon for all."""
    return h.fields.number("attention.layer_norm_rms_epsilon") if mamba(h) == "falcon_mamba" else None


def expansion(h: Header) -> int:
    """`expand` of Mamba; reads what no Mamba has."""
    for name in ("attention.head_count", "feed_forward_length"):
        h.fields.raw(name)
    inner = h.fields.integer("ssm.inner_size", high=MAX_SIZE)
    if inner % h.hidden_size:
        raise UnsupportedError(f"{quoted(h.path)}: ssm.inner_size {inner} is no multiple of {h.hidden_size}")
    return inner // h.hidden_size


def one_axis(h: Header) -> dict[str, Any]:
    """Qwen-VL: a text stands at the same position on all axes (`rope.dimension_sections`); what its vision tower adds
    to the first layers (`n_deepstack_layers`), it has not."""
    for name in ("rope.dimension_sections", "n_deepstack_layers"):
        h.fields.raw(name)
    return rope(h)


def delta_types(h: Header) -> list[str]:
    """The kind of every layer: a flag each, or all are recurrent but every n-th; n is 4 where the file does not say."""
    name, n = "attention.recurrent_layers", h.num_layers
    every = h.fields.integer("full_attention_interval", high=MAX_LAYERS, default=4)
    found = h.fields.raw(name)
    if found is None:
        flags = [(i + 1) % every != 0 for i in range(n)]
    elif isinstance(found, bool):
        flags = [found] * n
    elif isinstance(found, list) and len(found) >= n and all(type(flag) is bool for flag in found):
        flags = found[:n]
    else:
        raise ModelError(f"{quoted(h.path)} gives {name} as no list of {n} truth values")
    return ["linear_attention" if flag else FULL for flag in flags]


def partial_rope(h: Header) -> dict[str, Any]:
    """Positions of a family that rotates a quarter of a head where its config.json does not say."""
    size = head_dim(h)
    return one_axis(h) | {"partial_rotary_factor": min(1.0, (rotated(h) + 0.5) / size)}


def parallel_halves(h: Header) -> bool:
    """StableLM: as the tensors have it, whatever the file says."""
    h.fields.raw("use_parallel_residual")
    return not h.has("blk.0.ffn_norm.weight")


def falcon_grouped(h: Header) -> bool:
    """Whether a Falcon is of the new design: two norms, or some kv heads but not one."""
    heads, groups = (h.fields.integer(f"attention.head_count{end}", high=MAX_SIZE, default=1) for end in ("", "_kv"))
    return h.has("blk.0.attn_norm_2.weight") or groups not in (1, heads)


def one_kv_head(h: Header) -> bool:
    return bool(kv_heads(h) == 1)


def alibi(h: Header) -> dict[str, Any]:
    """`attn_config` of MPT."""
    out: dict[str, Any] = {"alibi": False}
    most_bias = h.fields.number("attention.max_alibi_bias", above=-1.0, default=0.0)
    if most_bias > 0:
        out = {"alibi": True, "alibi_bias_max": most_bias}
    if h.fields.number("attention.clamp_kqv", above=-1.0, default=0.0) > 0:
        out["clip_qkv"] = h.fields.number("attention.clamp_kqv")
    return out


def original_context(h: Header) -> int:
    length = h.fields.integer("context_length", high=MAX_POSITION)
    return h.fields.integer("rope.scaling.original_context_length", high=MAX_POSITION, default=length)


def half_rotated(h: Header) -> dict[str, Any]:
    """`rope_parameters` of a family that says elsewhere how many components are rotated."""
    return scaled(h, rotated(h))


def yarn_exactly(h: Header) -> dict[str, Any]:
    """gpt-oss does not round the ends of YaRN's ramp."""
    out = rope(h)
    return out | {"truncate": False} if out["rope_type"] == "yarn" else out


def chunked(h: Header) -> bool:
    """Llama 4 attends within chunks and tunes by position, unless a file says that its window is 0."""
    return "attention.sliding_window" not in h.fields or window(h) is not None


def llama4_types(h: Header) -> list[str] | None:
    h.fields.raw("attention.sliding_window")
    return None if chunked(h) else ["full_attention"] * h.num_layers


def llama4_rotates(h: Header) -> list[int] | None:
    return None if chunked(h) else [1] * h.num_layers
