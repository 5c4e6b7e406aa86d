"""xLSTM 7B: mLSTM layers alone, each with a gated feed-forward.

Source: Beck et al., xLSTM 7B, arXiv 2503.13427; absent fields as in transformers' xLSTMConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.base.errors import ModelError
from penstock.core.mixers.mlstm import Mlstm
from penstock.core.model_spec import FeedForward, Layer, ModelSpec, Norm
from penstock.families.fields import Fields
from penstock.families.llama_like import LlamaNames
from penstock.families.reading import MAX_SIZE, UNLIMITED_POSITION, WHERE, finish, read_sizes, require

_LAYER = {
    "attn_norm": "norm_mlstm", "ffn_norm": "norm_ffn", "q": "mlstm_layer.q", "k": "mlstm_layer.k",
    "v": "mlstm_layer.v", "z": "mlstm_layer.ogate_preact", "i": "mlstm_layer.igate_preact",
    "f": "mlstm_layer.fgate_preact", "head_norm": "mlstm_layer.multihead_norm", "o": "mlstm_layer.out_proj",
    "gate": "ffn.proj_up_gate", "up": "ffn.proj_up", "down": "ffn.proj_down",
}  # fmt: skip
# How kernels compute it; the beginning of a text is the tokenizer's matter.
_HARMLESS = (
    "chunkwise_kernel", "sequence_kernel", "step_kernel", "mode", "chunk_size", "return_last_states",
    "autocast_kernel_dtype", "inference_state_dtype", "max_inference_chunksize", "norm_reduction_force_float32",
    "force_bos_token_insert", "mlstm_round_up_to_multiple_of", "head_dim",
)  # fmt: skip


class XLstm(LlamaNames):
    """The `ModelFamily` of xLSTMForCausalLM."""

    name = "xlstm"
    architectures = ("xLSTMForCausalLM",)
    top: Mapping[str, str] = {
        "embed": "backbone.embeddings", "final_norm": "backbone.out_norm", "lm_head": "lm_head"
    }  # fmt: skip
    names = _LAYER
    prefix = "backbone.blocks"

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields = Fields(config, WHERE)
        hidden = "hidden_size" if "hidden_size" in fields or "embedding_dim" not in fields else "embedding_dim"
        layers = "num_hidden_layers" if "num_hidden_layers" in fields or "num_blocks" not in fields else "num_blocks"
        sizes = read_sizes(fields, hidden=hidden, layers=layers, default_positions=UNLIMITED_POSITION)
        require(fields, "embedding_dim", sizes.hidden_size)
        require(fields, "num_blocks", sizes.num_layers)
        require(fields, "use_bias", False)
        require(fields, "add_out_norm", True)
        require(fields, "weight_mode", "single")
        heads = fields.integer("num_heads", high=MAX_SIZE, default=8)
        widths = [int(sizes.hidden_size * fields.number(f"{n}_dim_factor", default=by)) for n, by in _FACTORS]
        for width in widths:
            if not width or width % heads:
                raise ModelError(f"{WHERE}: num_heads {heads} does not divide the {width} numbers of keys or values")
        norm = Norm(eps=fields.number("norm_eps", default=1e-6))
        mixer = Mlstm(
            num_heads=heads, key_dim=widths[0] // heads, value_dim=widths[1] // heads,
            soft_cap=fields.number("gate_soft_cap", default=15.0), eps=fields.number("eps", default=1e-6),
            norm_eps=norm.eps,
        )  # fmt: skip
        unit = fields.integer("ffn_round_up_to_multiple_of", high=MAX_SIZE, default=64)
        wanted = sizes.hidden_size * fields.number("ffn_proj_factor", default=2.667)
        ffn = FeedForward(width=int((wanted + unit - 1) // unit * unit))
        return finish(
            fields, self.name, sizes, [Layer(mixer=mixer, ffn=ffn, norm=norm)] * sizes.num_layers, bos=(0,), eos=(2,),
            final_norm=norm, logit_soft_cap=fields.number("output_logit_soft_cap", default=30.0), harmless=_HARMLESS,
        )  # fmt: skip


_FACTORS = (("qk", 0.5), ("v", 1.0))
