"""RetNet: retention in place of attention, in the layout of the checkpoints trained with flash-linear-attention.

Source: Sun et al., arXiv 2307.08621; names and absent fields as in that library's RetNetConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.base.errors import ModelError
from penstock.core.mixers.lightning import Lightning
from penstock.core.model_spec import FeedForward, Layer, ModelSpec, Norm, Rope
from penstock.families.fields import Fields
from penstock.families.llama_like import LlamaNames
from penstock.families.naming import LLAMA_TOP
from penstock.families.reading import MAX_SIZE, WHERE, finish, read_activation, read_sizes, require

_UNIT = 256
"""Widths of feed-forwards are rounded up to a multiple of it."""
_HARMLESS = (
    "attn_mode", "conv_size", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy",
    "fuse_linear_cross_entropy", "use_l2warp",
)  # fmt: skip


class RetNet(LlamaNames):
    """The `ModelFamily` of RetNetForCausalLM."""

    name = "retnet"
    architectures = ("RetNetForCausalLM",)
    top = LLAMA_TOP | {"embed": "model.embeddings"}
    names: Mapping[str, str] = {
        "attn_norm": "attn_norm", "ffn_norm": "mlp_norm", "q": "attn.q_proj", "k": "attn.k_proj", "v": "attn.v_proj",
        "z": "attn.g_proj", "o": "attn.o_proj", "state_norm": "attn.g_norm_swish_gate",
    }  # fmt: skip

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields = Fields(config, WHERE)
        sizes = read_sizes(fields, default_positions=2048)
        heads = fields.integer("num_heads", high=MAX_SIZE, default=8)
        for name, value in (
            ("num_kv_heads", heads), ("feature_map", None), ("use_short_conv", False), ("use_output_gate", True),
            ("elementwise_affine", True), ("attn", None), ("hidden_act", "swish"),
        ):  # fmt: skip
            require(fields, name, value)
        widths = [sizes.hidden_size * fields.number(f"expand_{n}", default=by) for n, by in (("k", 1.0), ("v", 2.0))]
        if any(width % heads for width in widths) or widths[0] // heads % 2:
            raise ModelError(
                f"{WHERE}: expand_k, expand_v and num_heads {heads} leave no whole heads, of keys with pairs to turn"
            )
        key, value = (int(width) // heads for width in widths)
        norm = Norm(eps=fields.number("norm_eps", default=1e-6))
        mixer = Lightning(
            num_heads=heads, head_dim=key, v_dim=value, decay=retention_decay(heads), activation=None, eps=norm.eps,
            rope=Rope(dim=key), scale=key**-0.5, norm="head", gate="silu",
        )  # fmt: skip
        width = int(sizes.hidden_size * fields.number("hidden_ratio", default=2.0) * 2 / 3)
        width = fields.integer("intermediate_size", high=MAX_SIZE, default=-(-width // _UNIT) * _UNIT)
        ffn = FeedForward(width=width, activation=read_activation(fields, default="swish"))
        return finish(
            fields, self.name, sizes, [Layer(mixer=mixer, ffn=ffn, norm=norm)] * sizes.num_layers, bos=(1,), eos=(2,),
            final_norm=norm, harmless=_HARMLESS,
        )  # fmt: skip


def retention_decay(num_heads: int) -> tuple[float, ...]:
    """What the state of each head is multiplied by: 1 - 2^-5, 1 - 2^-6, ... Source: section 2.2 of the paper."""
    return tuple(1.0 - 2.0 ** (-5 - head) for head in range(num_heads))
