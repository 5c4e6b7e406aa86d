"""Fields of a config.json that follow from more than one entry of a GGUF file's metadata.

Each takes the header and gives what the family's config.json would say; None is a null. What a file does
not say is taken as llama.cpp takes it. Source: `src/models` and convert_hf_to_gguf.py of
github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from penstock.base.errors import ModelError, UnsupportedError
from penstock.families.gguf.header import Header
from penstock.families.gguf.rope import head_dim, rope
from penstock.families.llama_like import FULL, SLIDING
from penstock.families.reading import MAX_EXPERTS, MAX_LAYERS, MAX_POSITION, MAX_SIZE
from penstock.formats.files import quoted

Read = Callable[[Header], Any]
SOFTMAX, SIGMOID = 1, 2
_PATTERN = "attention.sliding_window_pattern"


def just(value: object) -> Read:
    """What the architecture's name alone says."""
    return lambda h: value


def unused(name: str) -> Read:
    """A null: the file may say `name`, of which no layer has use."""

    def read(h: Header) -> None:
        h.fields.raw(name)

    return read


def holds(name: str) -> Read:
    """Whether the first block has a tensor."""
    return lambda h: h.has(f"blk.0.{name}")


def vocab_size(h: Header) -> int:
    return h.vocab_size


def hidden_size(h: Header) -> int:
    return h.hidden_size


def num_layers(h: Header) -> int:
    return h.num_layers


def kv_heads(h: Header) -> Any:
    found = h.fields.raw("attention.head_count_kv")
    return h.fields.raw("attention.head_count") if found is None else found


def equal_heads(h: Header) -> int:
    """Heads of a family that has as many keys as queries."""
    heads = h.fields.integer("attention.head_count", high=MAX_SIZE)
    if h.fields.integer("attention.head_count_kv", high=MAX_SIZE, default=heads) != heads:
        raise ModelError(f"{quoted(h.path)} has fewer kv heads than its {heads} heads, which its architecture has not")
    return heads


def times_four(h: Header) -> int:
    """Width over hidden size, where the family knows one only."""
    width = h.fields.integer("feed_forward_length", high=MAX_SIZE)
    if width != 4 * h.hidden_size:
        raise UnsupportedError(f"{quoted(h.path)} has a feed_forward_length of {width}, not 4 times {h.hidden_size}")
    return 4


# --- windows


def window(h: Header) -> int | None:
    return h.fields.integer("attention.sliding_window", low=0, high=MAX_POSITION, default=0) or None


def layer_types(period: int | None) -> Read:
    """The kind of every layer: a flag each, or all slide but every n-th; `period` is n where the file does not say.

    Without a window, or without a period (None), all layers are full.
    """

    def read(h: Header) -> list[str]:
        found, n = h.fields.raw(_PATTERN), h.num_layers
        if isinstance(found, bool):
            slides = [found] * n
        elif isinstance(found, list) and found:
            slides = [bool(flag) for flag in h.per_layer(_PATTERN)] if type(found[0]) is int else found[:n]
            if len(slides) < n or not all(type(flag) is bool for flag in slides):
                raise ModelError(f"{quoted(h.path)} gives {_PATTERN} as no list of {n} truth values")
        else:
            every = h.fields.integer(_PATTERN, low=0, high=MAX_LAYERS, default=1 if period is None else period)
            slides = [not every or i % every < every - 1 for i in range(n)]
        windowed = window(h) is not None
        return [SLIDING if windowed and flag else FULL for flag in slides]

    return read


def exaone4_types(h: Header) -> list[str]:
    """Files of the model with 64 layers may leave the pattern out; the small ones have no window."""
    kinds: list[str] = layer_types(4 if h.num_layers == 64 else None)(h)
    return kinds


def two_ropes(local: float | None) -> Read:
    """Ropes of full and of sliding layers; only the former are scaled. `local`: the latter's theta if the file does not
    say, None: that of the former."""

    def read(h: Header) -> dict[str, Any]:
        full = rope(h)
        theta = h.fields.number("rope.freq_base_swa", default=full["rope_theta"] if local is None else local)
        return {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": theta}}

    return read


# --- scales


def score_divisor(largest: int) -> Read:
    """`query_pre_attn_scalar` of Gemma 2 and 3, which files leave out: the head's size, but in the model with `largest`
    layers the hidden size over the number of heads."""

    def read(h: Header) -> int:
        if h.num_layers != largest:
            return head_dim(h)
        return h.hidden_size // h.fields.integer("attention.head_count", high=h.hidden_size)

    return read


def attention_scale(h: Header) -> float:
    return h.fields.number("attention.scale", default=head_dim(h) ** -0.5)


def rope_for_granite(h: Header) -> dict[str, Any]:
    if not h.fields.flag("rope.scaling.finetuned", default=True):
        raise UnsupportedError(f"{quoted(h.path)} is a Granite without positions, which Penstock does not have")
    return rope(h)


def depth_scale(h: Header) -> float:
    """MiniCPM's scale_depth; files keep it over the root of the number of layers. Old ones leave it out."""
    root = math.sqrt(h.num_layers)
    return h.fields.number("residual_scale", default=1.4 / root) * root


def base_width(h: Header) -> int:
    """MiniCPM's dim_model_base; files keep the hidden size over it."""
    scale = h.fields.number("logit_scale", above=1e-3, default=max(h.hidden_size / 256, 1.0))
    return max(1, round(h.hidden_size / scale))


# --- experts


def experts(score: int, *, normed: bool | None = None) -> Read:
    """`num_experts_per_tok` of a family whose scores are `score` and have no scale of their own; `normed`: whether it
    divides them by their sum, if that is no choice."""

    def read(h: Header) -> int:
        gated_as(score)(h)
        if h.fields.number("expert_weights_scale", above=-1.0, default=1.0) not in (0.0, 1.0):
            raise UnsupportedError(
                f"{quoted(h.path)} scales what its router says (expert_weights_scale), which its architecture does not"
            )
        if normed is not None and h.fields.flag("expert_weights_norm", default=normed) != normed:
            raise UnsupportedError(f"{quoted(h.path)} sets expert_weights_norm unlike its architecture")
        total = h.fields.integer("expert_count", high=MAX_EXPERTS)
        used = h.fields.integer("expert_used_count", low=0, high=MAX_EXPERTS, default=0)
        if not 0 < used <= total:
            raise ModelError(f"{quoted(h.path)} uses {used} of {total} experts, which makes no sense")
        return used

    return read


def gated_as(score: int) -> Read:
    """`num_experts_per_tok`; refuses another score."""

    def read(h: Header) -> Any:
        if h.fields.integer("expert_gating_func", low=0, high=16, default=score) not in (0, score):
            raise UnsupportedError(f"{quoted(h.path)} has another router (expert_gating_func) than its architecture")
        return h.fields.raw("expert_used_count")

    return read
