"""Llama 1, 2, 3.x and everything published in their shape: `LlamaForCausalLM`.

Source: Touvron et al., arXiv 2302.13971 and 2307.09288; Grattafiori et al., arXiv 2407.21783; defaults of absent fields
as in transformers' LlamaConfig.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import (
    Activation,
    Attention,
    FeedForward,
    Layer,
    ModelSpec,
    Norm,
    Rope,
    weight_shapes,
)
from penstock.families.fields import Fields
from penstock.formats.files import quoted

_WHERE = "config.json"
_MAX_SIZE = 2**24
_MAX_LAYERS = 4096
_MAX_POSITION = 2**31 - 1  # positions are int32

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}  # fmt: skip

# Labels, training settings and defaults of `generate`: none of them enters a forward pass. `pretraining_tp` tells how
# the training run split its products; the sums are the same, and transformers 5 does not read it either. `auto_map`
# offers code to download; for an architecture known here there is no need of it.
_HARMLESS = frozenset({
    "architectures", "model_type", "auto_map", "transformers_version", "_name_or_path", "name_or_path", "_commit_hash",
    "_from_model_config", "torchscript", "use_bfloat16", "tf_legacy_loss", "attn_implementation",
    "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal", "is_llama_config",
    "unsloth_version", "unsloth_fixed", "transformers.js_config", "model_max_length", "max_sequence_length",
    "attention_dropout", "initializer_range", "use_cache", "pretraining_tp", "gradient_checkpointing",
    "chunk_size_feed_forward", "output_attentions", "output_hidden_states", "output_scores", "return_dict",
    "return_dict_in_generate", "use_return_dict", "id2label", "label2id", "num_labels", "problem_type",
    "finetuning_task", "task_specific_params", "tokenizer_class", "prefix", "pad_token_id", "sep_token_id",
    "unk_token_id", "cls_token_id", "mask_token_id", "decoder_start_token_id", "max_length", "min_length",
    "max_new_tokens", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "remove_invalid_values",
    "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty", "suppress_tokens",
    "begin_suppress_tokens",
})  # fmt: skip

_LAYER_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
_TOP_NAMES = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "lm_head": "lm_head.weight"}
_INV_FREQ = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


class Llama:
    """The `ModelFamily` of LlamaForCausalLM."""

    name = "llama"
    architectures = ("LlamaForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields = Fields(config, _WHERE)
        hidden_size = fields.integer("hidden_size", high=_MAX_SIZE)
        vocab_size = fields.integer("vocab_size", high=_MAX_SIZE)
        max_position = fields.integer("max_position_embeddings", high=_MAX_POSITION, default=2048)
        layer = Layer(
            mixer=_attention(fields, hidden_size),
            ffn=FeedForward(
                width=fields.integer("intermediate_size", high=_MAX_SIZE),
                activation=_activation(fields),
                bias=fields.flag("mlp_bias"),
            ),
            norm=Norm(eps=fields.number("rms_norm_eps", default=1e-6)),
        )
        bos = fields.token_ids("bos_token_id", vocab_size, default=(1,) if vocab_size > 1 else ())
        if len(bos) > 1:
            raise ModelError(f"{_WHERE} gives several ids as bos_token_id; one is needed")
        spec = ModelSpec(
            family=self.name,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            layers=(layer,) * fields.integer("num_hidden_layers", high=_MAX_LAYERS),
            final_norm=layer.norm,
            tie_embeddings=fields.flag("tie_word_embeddings"),
            max_position=max_position,
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=fields.token_ids("eos_token_id", vocab_size, default=(2,) if vocab_size > 2 else ()),
            dtype=_dtype(fields),
        )
        fields.refuse_unread(_HARMLESS)
        return spec

    def weight_names(self, spec: ModelSpec) -> dict[str, str]:
        return {name: _checkpoint_name(name) for name in weight_shapes(spec)}

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        # Old checkpoints carry the rope frequencies that follow from the config. A tied model's copy of the embedding
        # is not looked at by transformers either.
        return bool(_INV_FREQ.fullmatch(name)) or (spec.tie_embeddings and name == _TOP_NAMES["lm_head"])


def _attention(fields: Fields, hidden_size: int) -> Attention:
    heads = fields.integer("num_attention_heads", high=_MAX_SIZE)
    kv_heads = fields.integer("num_key_value_heads", high=heads, default=heads)
    if heads % kv_heads:
        raise ModelError(f"{_WHERE}: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
    if "head_dim" not in fields and hidden_size % heads:
        raise ModelError(f"{_WHERE}: num_attention_heads {heads} does not divide hidden_size {hidden_size}")
    head_dim = fields.integer("head_dim", high=_MAX_SIZE, default=hidden_size // heads)
    if head_dim % 2:
        raise ModelError(f"{_WHERE}: the head dimension {head_dim} is odd, rotary positions need pairs")
    bias = fields.flag("attention_bias")
    return Attention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=read_rope(fields, head_dim),
        qkv_bias=bias,
        o_bias=bias,
    )


def read_rope(fields: Fields, dim: int) -> Rope:
    """Rotary positions of a config in either layout: `rope_theta` beside `rope_scaling` (transformers before 5), or all
    of it in `rope_parameters`.

    Raises ModelError if fields are missing or contradict each other, UnsupportedError for other kinds of scaling.
    """
    old, new = fields.section("rope_scaling"), fields.section("rope_parameters")
    if old is not None and new is not None:
        raise ModelError(f"{_WHERE} gives both rope_scaling and rope_parameters; leave one out")
    outer_theta = fields.number("rope_theta") if "rope_theta" in fields else None
    scaling = new or old
    _refuse_partial(fields)
    if scaling is None:
        return Rope(dim=dim, theta=10000.0 if outer_theta is None else outer_theta)
    theta = scaling.number("rope_theta", default=10000.0 if outer_theta is None else outer_theta)
    if outer_theta is not None and theta != outer_theta:
        raise ModelError(f"{_WHERE} gives rope_theta twice, as {outer_theta:g} and as {theta:g}")
    kind = scaling.string("rope_type", default=scaling.string("type", default="default"))
    if scaling.string("type", default=kind) != kind:
        raise ModelError(f"{_WHERE} gives two kinds of rope scaling, {quoted(kind)} and another under type")
    rope = _scaled(scaling, kind, theta, dim)
    _refuse_partial(scaling)
    scaling.refuse_unread()
    return rope


def _refuse_partial(fields: Fields) -> None:
    if fields.number("partial_rotary_factor", default=1.0) != 1.0:
        raise UnsupportedError(f"{_WHERE} sets partial_rotary_factor, but Llama rotates whole heads")


def _scaled(scaling: Fields, kind: str, theta: float, dim: int) -> Rope:
    if kind == "default":
        return Rope(dim=dim, theta=theta)
    if kind == "linear":
        return Rope(kind="linear", dim=dim, theta=theta, factor=scaling.number("factor"))
    if kind != "llama3":
        raise UnsupportedError(
            f"{_WHERE} asks for rope scaling of the kind {quoted(kind)}; known kinds: default, linear, llama3"
        )
    low = scaling.number("low_freq_factor")
    return Rope(
        kind="llama3",
        dim=dim,
        theta=theta,
        factor=scaling.number("factor"),
        low_freq_factor=low,
        high_freq_factor=scaling.number("high_freq_factor", above=low),
        original_max_position=scaling.integer("original_max_position_embeddings", high=_MAX_POSITION),
    )


def _activation(fields: Fields) -> Activation:
    name = fields.string("hidden_act", default="silu")
    if name not in _ACTIVATIONS:
        raise UnsupportedError(
            f"{_WHERE} asks for the activation {quoted(name)}; known ones: {', '.join(sorted(_ACTIVATIONS))}"
        )
    return _ACTIVATIONS[name]


def _dtype(fields: Fields) -> str:
    old = fields.string("torch_dtype", default="").removeprefix("torch.")
    name = fields.string("dtype", default=old).removeprefix("torch.") or "float32"
    if old and name != old:
        raise ModelError(f"{_WHERE} gives both dtype {quoted(name)} and torch_dtype {quoted(old)}")
    if name not in ("float32", "float16", "bfloat16"):
        raise UnsupportedError(f"{_WHERE} gives the dtype {quoted(name)}; known ones: float32, float16, bfloat16")
    return name


def _checkpoint_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, index, part = name.split(".", 2)
    base, _, bias = part.partition(".")
    return f"model.layers.{index}.{_LAYER_NAMES[base]}.{bias or 'weight'}"
