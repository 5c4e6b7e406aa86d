"""Fields of families whose layers differ among themselves, in what they are, have and keep, from the metadata and the
tensors of a GGUF file; see `readers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.base.errors import ModelError, UnsupportedError
from penstock.families.gguf import readers as r
from penstock.families.gguf.header import Header
from penstock.families.gguf.mixed import experts_or_none
from penstock.families.gguf.rope import rope, scaled
from penstock.families.llama_like import FULL, SLIDING
from penstock.families.reading import MAX_EXPERTS, MAX_LAYERS, MAX_POSITION, MAX_SIZE
from penstock.formats.files import quoted

_KV = "attention.head_count_kv"


def has_each(h: Header, name: str) -> list[bool]:
    """Of every layer, whether its block has a tensor."""
    return [h.has(f"blk.{i}.{name}") for i in range(h.num_layers)]


def sparse_each(h: Header) -> list[str]:
    """`mlp_layer_types`: layers with a router are sparse, whatever the file says of which they are."""
    for name in ("leading_dense_block_count", "moe_every_n_layers"):
        h.fields.raw(name)
    return ["sparse" if flag else "dense" for flag in has_each(h, "ffn_gate_inp.weight")]


def groups(name: str) -> r.Read:
    """A number of groups of experts; files without groups leave it out, or say 0."""
    return lambda h: h.fields.integer(name, low=0, high=MAX_EXPERTS, default=1) or 1


def norm_experts(*, default: bool = False) -> r.Read:
    return lambda h: h.fields.flag("expert_weights_norm", default=default)


def num_dense(h: Header) -> int:
    """Layers without experts in front of those with them; not said, none."""
    return h.fields.integer("leading_dense_block_count", low=0, high=MAX_LAYERS, default=0)


def score(h: Header) -> str:
    """What a router makes of its products, of a family that has both; not said, sigmoids."""
    gate = h.fields.integer("expert_gating_func", low=0, high=16, default=r.SIGMOID) or r.SIGMOID
    if gate not in (r.SOFTMAX, r.SIGMOID):
        raise UnsupportedError(f"{quoted(h.path)} has another router (expert_gating_func) than its architecture")
    return "softmax" if gate == r.SOFTMAX else "sigmoid"


def cohere_experts(h: Header) -> Any:
    """`num_experts_per_tok` of a family that scales no weights, and whose softmax runs over the chosen alone."""
    if h.fields.number("expert_weights_scale", above=-1.0, default=1.0) not in (0.0, 1.0):
        raise UnsupportedError(f"{quoted(h.path)} sets expert_weights_scale, which its architecture does not have")
    if score(h) == "softmax" and not h.fields.flag("expert_weights_norm"):
        raise UnsupportedError(f"{quoted(h.path)} does not divide a softmax by what was chosen (expert_weights_norm)")
    return h.fields.raw("expert_used_count")


def cohere_kinds(h: Header) -> list[str]:
    """All slide but every fourth, the first being full, if the file does not say."""
    if "attention.sliding_window_pattern" in h.fields:
        kinds: list[str] = r.layer_types(None)(h)
        return kinds
    return [SLIDING if i % 4 else FULL for i in range(h.num_layers)]


def bitnet_act(h: Header) -> str:
    """`hidden_act`, which no file says: llama.cpp takes silu, as the models of 1bitLLM have it, with as many keys
    as queries. BitNet b1.58 2B4T has grouped heads and relu2, and comes out wrong there."""
    if r.kv_heads(h) != h.fields.raw("attention.head_count"):
        raise UnsupportedError(
            f"{quoted(h.path)} has grouped heads, as BitNet b1.58 2B4T, but a file of this architecture cannot say "
            "that its activation is relu2; use the model's own folder"
        )
    return "silu"


def rwkv_head(name: str, shifts: int = 2) -> r.Read:
    """A size `name`; reads what is said of how many inputs are shifted, and of heads, which llama.cpp needs.

    Raises UnsupportedError if it is not `shifts` inputs.
    """

    def read(h: Header) -> int:
        if h.fields.integer("token_shift_count", low=0, high=16, default=2) != shifts:
            raise UnsupportedError(
                f"{quoted(h.path)} mixes other than {shifts} inputs with those before (token_shift_count)"
            )
        h.fields.raw("attention.head_count")
        return h.fields.integer(name, high=MAX_SIZE)

    return read


def turned_heads(h: Header) -> int:
    """Of a transformer that was turned into RWKV-6. Raises UnsupportedError for what only RWKV-6 itself has."""
    if h.fields.integer("rescale_every_n_layers", low=0, high=MAX_SIZE, default=0) or h.has(
        "blk.0.time_mix_first.weight"
    ):
        raise UnsupportedError(f"{quoted(h.path)} has a bonus, or halves its residual, as its architecture does not")
    size: int = rwkv_head("wkv.head_size", 1)(h)
    return max(1, h.hidden_size // size)


def turned_groups(h: Header) -> int:
    """0 stands for as many heads of keys as of others."""
    return h.fields.integer("attention.head_count_kv", low=0, high=MAX_SIZE, default=0) or turned_heads(h)


def turned_gate(h: Header) -> int | None:
    """Rank of the gate; None where there is none."""
    return h.fields.integer("attention.gate_lora_rank", low=0, high=MAX_SIZE, default=0) or None


# --- Jamba


def every(part: int, which: Callable[[Header], list[bool]], what: str) -> r.Read:
    """Period (`part` 0) or offset (1) of the layers for which `which` holds. Raises UnsupportedError if they have none.

    `what` they have, in words.
    """

    def read(h: Header) -> int:
        flags = which(h)
        found = [i for i, flag in enumerate(flags) if flag]
        offset = found[0] if found else len(flags)
        period = found[1] - offset if len(found) > 1 else len(flags) + 1
        if flags != [i % period == offset for i in range(len(flags))]:
            raise UnsupportedError(f"{quoted(h.path)} has {what} in layers that do not lie equally far apart")
        return (period, offset)[part]

    return read


def attends(h: Header) -> list[bool]:
    return [count > 0 for count in h.per_layer(_KV)]


def routes(h: Header) -> list[bool]:
    return has_each(h, "ffn_gate_inp.weight")


def jamba_experts(h: Header) -> int:
    """1 of a model without experts."""
    return max(1, experts_or_none(h)) if any(routes(h)) else 1


def most_kv_heads(h: Header) -> int:
    return max(h.per_layer(_KV))


# --- indexers


def indexer_types(h: Header) -> list[str]:
    """Which layers have an indexer of their own; a file of before GLM-5.2 says nothing: all have one."""
    name, n = "attention.indexer.types", h.num_layers
    found = h.fields.raw(name)
    if found is None:
        long = h.fields.integer("context_length", high=MAX_POSITION) >= 2**20
        found = [not long or i < 2 or (i - 2) % 4 == 0 for i in range(n)]
    if isinstance(found, bool | int):
        found = [found] * n
    if not isinstance(found, list) or len(found) < n or not all(flag in (0, 1) for flag in found[:n]):
        raise ModelError(f"{quoted(h.path)} gives {name} as no list of {n} truth values")
    return ["full" if flag else "shared" for flag in found[:n]]


# --- windows beside full attention


def key_dim(h: Header) -> int:
    return h.fields.integer("attention.key_length", high=MAX_SIZE)


def value_dim(h: Header) -> int:
    return h.fields.integer("attention.value_length", high=MAX_SIZE, default=key_dim(h))


def of_kind(name: str, kind: str) -> r.Read:
    """What a list with an entry per layer says of all layers of this kind; of another kind if there are none.

    Raises UnsupportedError if they differ.
    """

    def read(h: Header) -> int:
        values, kinds = h.per_layer(name), r.layer_types(None)(h)
        own = [value for value, found in zip(values, kinds, strict=True) if found == kind] or values
        if len(set(own)) > 1:
            raise UnsupportedError(f"{quoted(h.path)} gives {name} of layers of one kind as {min(own)} and {max(own)}")
        return own[0]

    return read


def sinks(kind: str) -> r.Read:
    """Whether layers of this kind have sinks. Raises ModelError if only some have."""

    def read(h: Header) -> bool:
        kinds = r.layer_types(None)(h)
        own = {flag for flag, found in zip(has_each(h, "attn_sinks.weight"), kinds, strict=True) if found == kind}
        if len(own) > 1:
            raise ModelError(f"{quoted(h.path)} has attn_sinks in some layers of a kind, but not in all")
        return own == {True}

    return read


def value_scale(h: Header) -> float:
    return h.fields.number("attention.value_scale", default=1.0)


def ropes_of_kinds(part: float = 1.0) -> r.Read:
    """Ropes of full and of sliding layers, of which the former alone are scaled; they turn `part` of what the file
    says."""

    def read(h: Header) -> dict[str, Any]:
        size = key_dim(h)
        total = h.fields.integer("rope.dimension_count", high=MAX_SIZE, default=size)
        own = h.fields.integer("rope.dimension_count_swa", high=MAX_SIZE, default=total)
        dim = int(total * part)
        full = scaled(h, dim, partial_rotary_factor=(dim + 0.5) / size if dim < size else 1.0)
        theta = h.fields.number("rope.freq_base_swa", default=full["rope_theta"])
        sliding = {"rope_type": "default", "rope_theta": theta,
                   "partial_rotary_factor": (own + 0.5) / size if own < size else 1.0}  # fmt: skip
        return {FULL: full, SLIDING: sliding}

    return read


def local_rope(h: Header) -> dict[str, Any]:
    """Of a family that turns heads of sliding layers only, with a theta of their own if the file gives one."""
    found = rope(h)
    return found | {"rope_theta": h.fields.number("rope.freq_base_swa", default=found["rope_theta"])}


def limits(name: str) -> r.Read:
    """A number per layer, 0 for no limit."""

    def read(h: Header) -> list[float] | None:
        value, n = h.fields.raw(name), h.num_layers
        if value is None:
            return None
        values = value if isinstance(value, list) else [value] * n
        if len(values) < n or not all(type(v) in (int, float) and 0 <= v < float("inf") for v in values[:n]):
            raise ModelError(f"{quoted(h.path)} gives {name} as no list of {n} numbers from 0 on")
        return [float(v) for v in values[:n]]

    return read


# --- Kimi Linear


def kimi_layers(h: Header) -> dict[str, Any]:
    """`linear_attn_config`: layers count from 1; those without kv heads keep a state, in as many heads as the others
    have."""
    flags = attends(h)
    return {
        "full_attn_layers": [i + 1 for i, flag in enumerate(flags) if flag],
        "kda_layers": [i + 1 for i, flag in enumerate(flags) if not flag],
        "num_heads": h.fields.integer("attention.head_count", high=MAX_SIZE),
        "head_dim": h.fields.integer("kda.head_dim", high=MAX_SIZE),
        "short_conv_kernel_size": h.fields.integer("ssm.conv_kernel", high=MAX_SIZE),
    }


def query_heads(h: Header) -> Any:
    return h.fields.raw("attention.head_count")


def kimi_scale(h: Header) -> float:
    """llama.cpp leaves weights alone where the file does not say."""
    return h.fields.number("expert_weights_scale", default=1.0)
