"""ChatGLM2, ChatGLM3 and GLM-4-9B as first released (`ChatGLMModel`): two key-value heads or so for all queries.

What transformers calls Glm, by the makers' names. The first ChatGLM-6B and GLM-130B are prefix language models: tokens
of the prompt see those after them, and positions have two axes; they are refused. Source: Zeng et al., GLM-130B, arXiv
2210.02414; GLM Team, arXiv 2406.12793; the published configuration_chatglm.py and modeling_chatglm.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import FeedForward, ModelSpec
from penstock.core.weight_map import WeightMap
from penstock.families.fields import Fields
from penstock.families.gpt_like import qkv_rows
from penstock.families.llama_like import LlamaNames, attention, read_norm, stack
from penstock.families.naming import fused_rows
from penstock.families.positions import read_rope
from penstock.families.reading import MAX_SIZE, WHERE, Heads, finish, read_sizes, require

_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "o": "self_attention.dense",
    "down": "mlp.dense_4h_to_h",
}  # fmt: skip
_ONLY = {
    "add_bias_linear": False, "rmsnorm": True, "post_layer_norm": True, "original_rope": True, "pre_seq_len": None,
    "apply_residual_connection_post_layernorm": False, "fp32_residual_connection": False, "prefix_projection": False,
    "quantization_bit": 0, "interleaved_qkv": False,
}  # fmt: skip
# The factor of a layer's number is divided out again; what else tells of types, fusing and training.
_HARMLESS = ("apply_query_key_layer_scaling", "attention_softmax_in_fp32", "bias_dropout_fusion")


class ChatGlm(LlamaNames):
    """The `ModelFamily` of ChatGLMModel and ChatGLMForConditionalGeneration."""

    name = "chatglm"
    architectures = ("ChatGLMModel", "ChatGLMForConditionalGeneration")
    top: Mapping[str, str] = {
        "embed": "transformer.embedding.word_embeddings", "final_norm": "transformer.encoder.final_layernorm",
        "lm_head": "transformer.output_layer",
    }  # fmt: skip
    names = _NAMES
    prefix = "transformer.encoder.layers"

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        if "inner_hidden_size" in config or config.get("position_encoding_2d") is not None:
            raise UnsupportedError(
                f"{WHERE} is of the first ChatGLM, a prefix language model: tokens of a prompt see those after them, "
                "which Penstock does not compute; ChatGLM2, ChatGLM3 and GLM-4 run"
            )
        padded = config.get("padded_vocab_size", config.get("vocab_size"))
        fields = Fields({"seq_length": 2048, **config, "vocab_size": padded}, WHERE)
        require(fields, "padded_vocab_size", padded)
        sizes = read_sizes(fields, layers="num_layers", positions="seq_length")
        for name, value in _ONLY.items():
            require(fields, name, value)
        heads, norm = _heads(fields, sizes.hidden_size), read_norm(fields, "layernorm_epsilon", 1e-5)
        theta = 10000.0 * fields.number("rope_ratio", default=1.0)
        rope = read_rope(fields, heads.head_dim, sizes.max_position, theta=theta, partial=0.5, interleaved=True)
        mixer = attention(heads, rope=rope, qkv_bias=fields.flag("add_qkv_bias"))
        ffn = FeedForward(width=fields.integer("ffn_hidden_size", high=MAX_SIZE))
        layers = stack((mixer,) * sizes.num_layers, ffn, norm)
        return finish(fields, self.name, sizes, layers, eos=(2,), final_norm=norm, harmless=_HARMLESS)

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        out = dict(super().weight_map(spec))
        for i, layer in enumerate(spec.layers):
            stored = f"{self.prefix}.{i}"
            out |= fused_rows(spec, i, f"{stored}.self_attention.query_key_value", qkv_rows(spec), spec.hidden_size)
            assert isinstance(layer.ffn, FeedForward)
            parts = {"gate": layer.ffn.width, "up": layer.ffn.width}
            out |= fused_rows(spec, i, f"{stored}.mlp.dense_h_to_4h", parts, spec.hidden_size)
        return out

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        return super().ignores(name, spec) or name == "transformer.rotary_pos_emb.inv_freq"


def _heads(fields: Fields, hidden_size: int) -> Heads:
    h = fields.integer("num_attention_heads", high=MAX_SIZE)
    d = fields.integer("kv_channels", high=MAX_SIZE, default=128)
    g = h if not fields.flag("multi_query_attention") else fields.integer("multi_query_group_num", high=h, default=1)
    fields.raw("multi_query_group_num")
    if h % g or d % 4 or h * d != hidden_size:
        raise ModelError(
            f"{WHERE}: {h} heads of kv_channels {d}, a multiple of 4, must fill the hidden size {hidden_size}, and "
            f"multi_query_group_num {g} divide them"
        )
    return Heads(h, g, d)
