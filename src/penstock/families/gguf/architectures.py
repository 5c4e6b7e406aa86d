"""Every architecture that GGUF files are read of: its family here, and where the family's settings stand in the file.

A GGUF file becomes the config.json that its family reads, so that what a family computes is said once. To add an
architecture, add an entry: the name that llama.cpp gives it (`LLM_ARCH_NAMES`), the family's `model_type`, the fields
of its config.json, and names of tensors if they are not those of `places.NAMES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.families.gguf import encoders as e
from penstock.families.gguf import gemma as g
from penstock.families.gguf import mixed as m
from penstock.families.gguf import readers as r
from penstock.families.gguf import single as s
from penstock.families.gguf import uneven as u
from penstock.families.gguf.header import Header
from penstock.families.gguf.rope import head_dim, part, rope, rotated, scaled
from penstock.families.llama_like import FULL, SLIDING

Source = str | r.Read
"""Key of the metadata without the architecture's name ("?" at its end: it may be absent), or what reads the header."""


@dataclass(frozen=True)
class Architecture:
    """`families`: all names of FAMILIES that `family` can give. `fields`: field of config.json -> where it stands.

    `neighbours`: rotary pairs are rows that lie side by side (llama.cpp's LLAMA_ROPE_TYPE_NORM), because the family has
    them so or because the converter has put them so. `names`: logical name -> tensor, for those unlike
    `places.NAMES`; "a|b" is the first of them that there is. `halves_apart`: every half of a layer is a block of its
    own. `per_block`: layers that a block holds together. `value_heads_in_turn`: value heads of the delta rule lie in an
    order in which each next one has the next key head. `drafts`: the first block behind the layers, if it predicts
    further tokens, reads what the model's final norm gives, and can draft. `choose`: which of several families it is.
    `encoder`: tokens see those behind them.
    """

    families: tuple[str, ...]
    fields: Mapping[str, Source]
    neighbours: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    halves_apart: bool = False
    per_block: int = 1
    drafts: bool = False
    value_heads_in_turn: bool = False
    choose: r.Read | None = None
    encoder: bool = False

    def family(self, h: Header) -> str:
        """`model_type` of the model in a file."""
        return self.families[0] if self.choose is None else str(self.choose(h))


_SIZES: dict[str, Source] = {
    "vocab_size": r.vocab_size, "hidden_size": r.hidden_size, "num_hidden_layers": r.num_layers,
    "max_position_embeddings": "context_length",
}  # fmt: skip
_HEADS: dict[str, Source] = {
    "num_attention_heads": "attention.head_count", "num_key_value_heads": r.kv_heads, "head_dim": head_dim,
}  # fmt: skip
_WIDTH: dict[str, Source] = {"intermediate_size": "feed_forward_length"}
_RMS: dict[str, Source] = {"rms_norm_eps": "attention.layer_norm_rms_epsilon"}
_LLAMA = {**_SIZES, **_HEADS, **_WIDTH, **_RMS, "rope_parameters": rope}
_LAYER_NORM = "attention.layer_norm_epsilon"
_WITH_LAYER_NORM = {**_SIZES, **_HEADS, **_WIDTH, "rope_parameters": rope, "layer_norm_eps": _LAYER_NORM}
_RMS_OR_LAYER: dict[str, Source] = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon?", "layer_norm_eps": f"{_LAYER_NORM}?",
}  # fmt: skip
_ENCODER: dict[str, Source] = {
    **_SIZES, **_WIDTH, "num_attention_heads": r.equal_heads, "layer_norm_eps": _LAYER_NORM, "id2label": e.labels,
}  # fmt: skip
_GPT2: dict[str, Source] = {
    **_SIZES, "num_attention_heads": r.equal_heads, "n_inner": "feed_forward_length", "layer_norm_epsilon": _LAYER_NORM,
}  # fmt: skip
_ROUTED: dict[str, Source] = {
    "moe_intermediate_size": "expert_feed_forward_length", "n_shared_experts": "expert_shared_count",
    "n_routed_experts": "expert_count", "norm_topk_prob": "expert_weights_norm?",
    "routed_scaling_factor": "expert_weights_scale?", "n_group": "expert_group_count?",
    "topk_group": "expert_group_used_count?", "first_k_dense_replace": "leading_dense_block_count?",
}  # fmt: skip
_MIXTRAL: dict[str, Source] = {
    **_LLAMA, "num_local_experts": "expert_count", "num_experts_per_tok": r.experts(r.SOFTMAX, normed=True),
}  # fmt: skip
_QWEN_MOE: dict[str, Source] = {
    **_LLAMA, "intermediate_size": "feed_forward_length?", "moe_intermediate_size": "expert_feed_forward_length",
    "num_experts": "expert_count", "num_experts_per_tok": r.experts(r.SOFTMAX),
}  # fmt: skip
_DELTA: dict[str, Source] = {
    **_LLAMA, "rope_parameters": s.partial_rope, "layer_types": s.delta_types,
    "linear_num_key_heads": "ssm.group_count", "linear_num_value_heads": "ssm.time_step_rank",
    "linear_key_head_dim": "ssm.state_size", "linear_value_head_dim": s.state_heads,
    "linear_conv_kernel_dim": "ssm.conv_kernel",
}  # fmt: skip
_DELTA_MOE: dict[str, Source] = {
    **_DELTA, "intermediate_size": r.unused("feed_forward_length"),
    "moe_intermediate_size": "expert_feed_forward_length", "num_experts": "expert_count",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "num_experts_per_tok": r.experts(r.SOFTMAX, normed=True),
}  # fmt: skip
_LATENT: dict[str, Source] = {
    **_SIZES, **_WIDTH, **_RMS, **_ROUTED, "num_attention_heads": s.all_heads,
    "kv_lora_rank": "attention.kv_lora_rank", "q_lora_rank": s.query_rank,
    "qk_rope_head_dim": "rope.dimension_count", "qk_nope_head_dim": s.unrotated, "v_head_dim": s.latent_values,
    "rope_parameters": s.latent_rope, "num_experts_per_tok": "expert_used_count?",
    "norm_topk_prob": u.norm_experts(),
}  # fmt: skip
_INDEXED: dict[str, Source] = {
    **_LATENT, "num_experts_per_tok": r.gated_as(r.SIGMOID), "n_group": u.groups("expert_group_count"),
    "topk_group": u.groups("expert_group_used_count"), "first_k_dense_replace": u.num_dense,
    "index_n_heads": "attention.indexer.head_count", "index_head_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k",
}  # fmt: skip
_KINDS: dict[str, Source] = {
    **_SIZES, **_WIDTH, **_RMS, "num_attention_heads": u.of_kind("attention.head_count", FULL), "head_dim": u.key_dim,
    "num_key_value_heads": u.of_kind("attention.head_count_kv", FULL), "sliding_window": "attention.sliding_window",
    "layer_types": r.layer_types(None), "mlp_layer_types": u.sparse_each,
    "num_experts_per_tok": r.gated_as(r.SIGMOID), "moe_intermediate_size": "expert_feed_forward_length",
}  # fmt: skip
_STATE: dict[str, Source] = {
    **_SIZES, "state_size": "ssm.state_size", "conv_kernel": "ssm.conv_kernel", "expand": s.expansion,
    "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
}  # fmt: skip
_NEMOTRON_H: dict[str, Source] = {
    "vocab_size": r.vocab_size, "hidden_size": r.hidden_size, "max_position_embeddings": "context_length",
    "hybrid_override_pattern": s.pattern_of_nemotron, "num_attention_heads": s.most("attention.head_count"),
    "num_key_value_heads": s.most("attention.head_count_kv"), "head_dim": head_dim,
    "intermediate_size": s.most("feed_forward_length"), "layer_norm_epsilon": s.either_epsilon,
    "mamba_num_heads": "ssm.time_step_rank", "mamba_head_dim": s.state_heads, "ssm_state_size": "ssm.state_size",
    "n_groups": "ssm.group_count", "conv_kernel": "ssm.conv_kernel",
}  # fmt: skip
_BAILING: dict[str, Source] = {
    **_LLAMA, "moe_intermediate_size": "expert_feed_forward_length", "num_experts": "expert_count",
    "num_shared_experts": m.num_shared, "norm_topk_prob": u.norm_experts(), "first_k_dense_replace": u.num_dense,
}  # fmt: skip
_GRANITE: dict[str, Source] = {
    **_LLAMA, "attention_multiplier": r.attention_scale, "embedding_multiplier": "embedding_scale?",
    "residual_multiplier": "residual_scale?", "logits_scaling": "logit_scale?",
}  # fmt: skip
_LFM2: dict[str, Source] = {
    **_LLAMA, "num_attention_heads": s.most("attention.head_count"),
    "num_key_value_heads": s.most("attention.head_count_kv"), "head_dim": r.just(None), "rms_norm_eps": r.just(None),
    "norm_eps": "attention.layer_norm_rms_epsilon", "conv_L_cache": "shortconv.l_cache",
    "layer_types": m.kinds("full_attention", "conv"),
}  # fmt: skip
_LFM2_NAMES = {"final_norm": "token_embd_norm", "in": "shortconv.in_proj", "conv": "shortconv.conv"}
_KIMI_NAMES = {
    "dt_down": "ssm_f_a", "dt": "ssm_f_b", "dt.bias": "ssm_dt.bias!", "z_down": "ssm_g_a", "z": "ssm_g_b",
    "beta": "ssm_beta", "head_norm": "ssm_norm", **{f"{part}.conv": f"ssm_conv1d_{part}" for part in "qkv"},
}  # fmt: skip
_RWKV7_NAMES = {
    "ffn_norm": "attn_norm_2", "r": "time_mix_receptance", "k": "time_mix_key", "v": "time_mix_value",
    "o": "time_mix_output", "head_norm": "time_mix_ln", "ffn_mix_k": "channel_mix_lerp_k", "up": "channel_mix_key",
    "down": "channel_mix_value", **{f"{part}_k": f"time_mix_{part}_k" for part in "kr"}, "k_a": "time_mix_k_a",
    **{f"{part}{n}": f"time_mix_{part}{n}" for part in "wavg" for n in "012"},
}  # fmt: skip
_LOW_RANKS: dict[str, Source] = {
    "decay_low_rank_dim": "attention.decay_lora_rank", "a_low_rank_dim": "attention.iclr_lora_rank",
    "v_low_rank_dim": "attention.value_residual_mix_lora_rank",
}  # fmt: skip
_RWKV6_NAMES = {
    "ffn_norm": "attn_norm_2", "r": "time_mix_receptance", "k": "time_mix_key", "v": "time_mix_value",
    "g": "time_mix_gate", "o": "time_mix_output", "head_norm": "time_mix_ln", "time_first": "time_mix_first",
    "time_decay": "time_mix_decay", "w1": "time_mix_decay_w1", "w2": "time_mix_decay_w2", "mix_x": "time_mix_lerp_x",
    "mix_down": "time_mix_w1", "ffn_mix_k": "channel_mix_lerp_k", "ffn_mix_r": "channel_mix_lerp_r",
    "ffn_r": "channel_mix_receptance", "up": "channel_mix_key", "down": "channel_mix_value",
}  # fmt: skip
_TURNED_6 = {k: v for k, v in _RWKV6_NAMES.items() if k not in ("ffn_norm", "up", "down")}
_TURNED_7 = {k: v for k, v in _RWKV7_NAMES.items() if k not in ("ffn_norm", "up", "down")}
"""Of models whose feed-forwards are those of transformers."""
_POST_NORM = {"ffn_norm": "post_attention_norm"}
"""Norms before each half, of which the second is called after what it follows."""


def _sparse_llama(h: Header) -> str:
    return "mixtral" if h.fields.raw("expert_count") else "llama"


def _llama_fields(name: str) -> r.Read:
    """What a field of Mixtral's is for a model without experts: not there."""
    source = _MIXTRAL[name]

    def read(h: Header) -> object:
        if _sparse_llama(h) == "llama":
            h.fields.raw("expert_used_count")
            return None
        return source(h) if callable(source) else h.fields.raw(source)

    return read


def _olmo(h: Header) -> str:
    return "olmo2" if r.window(h) is None else "olmo3"


def _olmo_only3(read: r.Read) -> r.Read:
    return lambda h: read(h) if _olmo(h) == "olmo3" else None


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        ("llama", "mixtral"), {**_LLAMA, **{n: _llama_fields(n) for n in ("num_local_experts", "num_experts_per_tok")}},
        neighbours=True, choose=_sparse_llama,
    ),
    "afmoe": Architecture(("afmoe",), {
        **_LLAMA, "rope_parameters": u.local_rope, "sliding_window": r.window, "layer_types": r.layer_types(4),
        "moe_intermediate_size": "expert_feed_forward_length", "num_experts": "expert_count",
        "num_shared_experts": m.num_shared, "num_experts_per_tok": r.gated_as(r.SIGMOID),
        "route_norm": u.norm_experts(), "route_scale": "expert_weights_scale?",
        "num_dense_layers": u.num_dense, "mup_enabled": r.just(True),
    }, names={"o_gate": "attn_gate"}),
    "arcee": Architecture(("arcee",), _LLAMA, neighbours=True),
    "bailingmoe": Architecture(("bailing_moe",), {
        **_BAILING, "num_experts_per_tok": r.experts(r.SOFTMAX),
    }, neighbours=True),
    "bailingmoe2": Architecture(("bailing_moe_v2",), {
        **_BAILING, "rope_parameters": lambda h: scaled(h, rotated(h)), "partial_rotary_factor": part,
        "num_experts_per_tok": r.gated_as(r.SIGMOID), "routed_scaling_factor": "expert_weights_scale?",
        "n_group": u.groups("expert_group_count"), "topk_group": u.groups("expert_group_used_count"),
    }),
    "bitnet": Architecture(
        ("bitnet",), {**_LLAMA, "hidden_act": u.bitnet_act},
        names={"o_norm": "attn_sub_norm", "down_norm": "ffn_sub_norm"},
    ),
    "bloom": Architecture(("bloom",), {
        **_GPT2, "max_position_embeddings": r.just(None), "seq_length": "context_length",
    }),
    "chatglm": Architecture(("glm",), _LLAMA, neighbours=True),
    "cohere2": Architecture(("cohere2",), {
        **_WITH_LAYER_NORM, "logit_scale": "logit_scale", "sliding_window": "attention.sliding_window",
        "layer_types": r.layer_types(4),
    }, neighbours=True),
    "cohere2moe": Architecture(("cohere2_moe",), {
        **_SIZES, **_HEADS, **_RMS_OR_LAYER, "rope_parameters": rope, "logit_scale": "logit_scale",
        "sliding_window": "attention.sliding_window", "layer_types": u.cohere_kinds,
        "first_k_dense_replace": u.num_dense, "intermediate_size": "expert_feed_forward_length",
        "prefix_dense_intermediate_size": "feed_forward_length", "num_experts": "expert_count",
        "num_experts_per_tok": u.cohere_experts, "expert_selection_fn": u.score, "norm_topk_prob": u.norm_experts(),
        "num_shared_experts": m.num_shared,
    }, neighbours=True),
    "command-r": Architecture(("cohere",), {
        **_WITH_LAYER_NORM, "logit_scale": lambda h: h.fields.number("logit_scale", default=1.0),
        "use_qk_norm": r.holds("attn_q_norm.weight"),
    }, neighbours=True),
    "deci": Architecture(("nemotron-nas",), {
        **_SIZES, **_RMS, "num_attention_heads": s.most("attention.head_count"), "block_configs": s.blocks_of_deci,
        "rope_parameters": rope,
    }, neighbours=True),
    "deepseek2": Architecture(
        ("deepseek_v2", "deepseek_v3"), {**_LATENT, "topk_method": s.topk_method}, neighbours=True, drafts=True,
        choose=s.deepseek,
    ),
    "deepseek32": Architecture(("deepseek_v32",), _INDEXED, neighbours=True),
    "dots1": Architecture(("dots1",), {
        **_LLAMA, **_ROUTED, "n_shared_experts": m.num_shared, "num_experts_per_tok": r.gated_as(r.SIGMOID),
        "sliding_window": r.just(None),
    }),
    "ernie4_5-moe": Architecture(("ernie4_5_moe",), {
        **_LLAMA, "moe_intermediate_size": "expert_feed_forward_length", "moe_num_experts": "expert_count",
        "moe_k": r.experts(r.SOFTMAX, normed=True), "moe_num_shared_experts": m.num_shared,
        "moe_layer_interval": "interleave_moe_layer_step?", "moe_layer_start_index": "leading_dense_block_count?",
    }, neighbours=True),
    "ernie4_5": Architecture(("ernie4_5",), _LLAMA, neighbours=True),
    "exaone": Architecture(("exaone",), {
        **_LLAMA, "num_hidden_layers": r.just(None), "num_layers": r.num_layers, "rms_norm_eps": r.just(None),
        "layer_norm_epsilon": s.either_epsilon,
    }),
    "exaone-moe": Architecture(("exaone_moe",), {
        **_LLAMA, "sliding_window": "attention.sliding_window", "layer_types": r.layer_types(4),
        "moe_intermediate_size": "expert_feed_forward_length", "num_experts": "expert_count",
        "num_shared_experts": m.num_shared, "num_experts_per_tok": r.gated_as(r.SIGMOID),
        "norm_topk_prob": u.norm_experts(), "routed_scaling_factor": "expert_weights_scale?",
        "first_k_dense_replace": u.num_dense, "n_group": u.groups("expert_group_count"),
        "topk_group": u.groups("expert_group_used_count"),
    }),
    "exaone4": Architecture(("exaone4",), {
        **_LLAMA, "sliding_window": r.window, "layer_types": r.exaone4_types
    }),
    "falcon": Architecture(("falcon",), {
        **_SIZES, "num_attention_heads": "attention.head_count", "num_kv_heads": r.kv_heads,
        "multi_query": s.one_kv_head, "new_decoder_architecture": s.falcon_grouped,
        "num_ln_in_parallel_attn": lambda h: 2 if h.has("blk.0.attn_norm_2.weight") else 1,
        "ffn_hidden_size": "feed_forward_length", "layer_norm_epsilon": _LAYER_NORM, "rope_parameters": rope,
    }, names={"attn_norm": "attn_norm_2|attn_norm", "ffn_norm": "attn_norm"}),
    "falcon-h1": Architecture(("falcon_h1",), {
        **_LLAMA, "mamba_d_ssm": "ssm.inner_size", "mamba_n_heads": "ssm.time_step_rank",
        "mamba_d_head": s.state_heads, "mamba_d_state": "ssm.state_size", "mamba_n_groups": "ssm.group_count",
        "mamba_d_conv": "ssm.conv_kernel", "mamba_rms_norm": r.holds("ssm_norm.weight"),
        "mamba_norm_before_gate": r.just(False),
    }, names={"ffn_norm": "ffn_norm!|ffn_norm"}, per_block=3),
    "gemma": Architecture(("gemma",), _LLAMA),
    "gemma2": Architecture(("gemma2",), {
        **_LLAMA, "attn_logit_softcapping": lambda h: h.fields.number("attn_logit_softcapping", default=50.0),
        "final_logit_softcapping": lambda h: h.fields.number("final_logit_softcapping", default=30.0),
        "sliding_window": lambda h: r.window(h) or 4096, "layer_types": r.layer_types(2),
        "query_pre_attn_scalar": r.score_divisor(46),
    }),
    "gemma3": Architecture(("gemma3_text",), {
        **_LLAMA, "final_logit_softcapping": "final_logit_softcapping?", "sliding_window": r.window,
        "layer_types": r.layer_types(6), "query_pre_attn_scalar": r.score_divisor(62),
        "rope_parameters": r.two_ropes(10000.0),
    }),
    "gemma3n": Architecture(("gemma3n_text",), {**_LLAMA, **g.GEMMA3N}),
    "gemma4": Architecture(("gemma4_text",), {**_LLAMA, **g.GEMMA4}, names=g.GEMMA4_NAMES),
    "glm-dsa": Architecture(("glm_moe_dsa",), {
        **_INDEXED, "indexer_types": u.indexer_types,
    }, neighbours=True),
    "glm4": Architecture(("glm4",), _LLAMA, neighbours=True),
    "glm4moe": Architecture(("glm4_moe",), {
        **_LLAMA, **_ROUTED, "num_experts_per_tok": r.gated_as(r.SIGMOID),
        "norm_topk_prob": lambda h: h.fields.flag("expert_weights_norm"),
        "first_k_dense_replace": lambda h: h.fields.integer("leading_dense_block_count", low=0, high=4096, default=0),
        "use_qk_norm": r.holds("attn_q_norm.weight"),
    }, names=_POST_NORM, drafts=True),
    "gpt2": Architecture(("gpt2",), _GPT2),
    "bert": Architecture(("bert",), {
        **_ENCODER, "max_position_embeddings": e.positions, "type_vocab_size": e.token_types,
        "architectures": e.kind("BertModel", "BertForSequenceClassification"),
    }, names=e.AROUND, encoder=True),
    "nomic-bert": Architecture(("nomic_bert",), {
        **_ENCODER, "type_vocab_size": e.token_types, "rope_parameters": e.plain_rope, "hidden_act": r.just("silu"),
        "architectures": e.kind("NomicBertModel", "NomicBertForSequenceClassification"),
    }, names=e.AROUND, encoder=True),
    "modern-bert": Architecture(("modernbert",), {
        **{k: v for k, v in _ENCODER.items() if k != "layer_norm_eps"}, "norm_eps": _LAYER_NORM,
        "local_attention": "attention.sliding_window?", "layer_types": e.reaches, "rope_parameters": e.two_thetas,
        "architectures": e.kind("ModernBertModel", "ModernBertForSequenceClassification"),
    }, names=e.NAMES, encoder=True),
    "gpt-oss": Architecture(("gpt_oss",), {
        **_LLAMA, "intermediate_size": "expert_feed_forward_length", "sliding_window": "attention.sliding_window",
        "layer_types": r.layer_types(2), "num_local_experts": "expert_count", "rope_parameters": s.yarn_exactly,
        "num_experts_per_tok": "expert_used_count",
    }, names=_POST_NORM),
    "gptneox": Architecture(("gpt_neox",), {
        **_SIZES, **_WIDTH, "num_attention_heads": r.equal_heads, "rope_parameters": rope,
        "layer_norm_eps": _LAYER_NORM, "use_parallel_residual": "use_parallel_residual",
    }),
    "granite": Architecture(("granite",), {
        **_LLAMA, "attention_multiplier": r.attention_scale, "embedding_multiplier": "embedding_scale?",
        "residual_multiplier": "residual_scale?", "logits_scaling": "logit_scale",
        "rope_parameters": r.rope_for_granite,
    }, neighbours=True),
    "granitehybrid": Architecture(("granitemoehybrid",), {
        **_GRANITE, "num_attention_heads": s.most("attention.head_count"), "rope_parameters": m.hybrid_rope,
        "num_key_value_heads": s.most("attention.head_count_kv"), "intermediate_size": s.most("feed_forward_length"),
        "layer_types": m.kinds("attention", "mamba"), "position_embedding_type": m.positions,
        "num_local_experts": m.experts_or_none, "num_experts_per_tok": "expert_used_count?",
        "shared_intermediate_size": m.hybrid_width, "mamba_n_heads": "ssm.time_step_rank",
        "mamba_d_head": s.state_heads, "mamba_d_state": "ssm.state_size", "mamba_n_groups": "ssm.group_count",
        "mamba_d_conv": "ssm.conv_kernel", "mamba_expand": s.expansion,
    }, neighbours=True),
    "granitemoe": Architecture(("granitemoeshared",), {
        **_GRANITE, "rope_parameters": r.rope_for_granite, "num_local_experts": "expert_count",
        "num_experts_per_tok": r.experts(r.SOFTMAX, normed=True), "shared_intermediate_size": m.shared_width,
    }, neighbours=True),
    "hunyuan-moe": Architecture(("hunyuan_v1_moe",), {
        **_LLAMA, "num_experts": "expert_count", "moe_topk": r.experts(r.SOFTMAX, normed=True),
        "moe_intermediate_size": "expert_feed_forward_length", "intermediate_size": m.shared_width,
    }),
    "hunyuan-dense": Architecture(("hunyuan_v1_dense",), _LLAMA),
    "internlm2": Architecture(("internlm2",), _LLAMA, neighbours=True),
    "jamba": Architecture(("jamba",), {
        **_SIZES, **_WIDTH, **_RMS, "num_attention_heads": s.most("attention.head_count"), "head_dim": head_dim,
        "num_key_value_heads": u.most_kv_heads, "attn_layer_period": u.every(0, u.attends, "attention"),
        "attn_layer_offset": u.every(1, u.attends, "attention"),
        "expert_layer_period": u.every(0, u.routes, "experts"), "expert_layer_offset": u.every(1, u.routes, "experts"),
        "num_experts": u.jamba_experts, "num_experts_per_tok": "expert_used_count?", "mamba_expand": s.expansion,
        "mamba_d_state": "ssm.state_size", "mamba_d_conv": "ssm.conv_kernel", "mamba_dt_rank": "ssm.time_step_rank",
    }),
    "kimi-linear": Architecture(("kimi_linear",), {
        **_SIZES, **_WIDTH, **_RMS, "num_attention_heads": u.query_heads, "linear_attn_config": u.kimi_layers,
        "kv_lora_rank": "attention.kv_lora_rank", "q_lora_rank": s.query_rank,
        "qk_rope_head_dim": "rope.dimension_count", "qk_nope_head_dim": s.unrotated, "v_head_dim": s.latent_values,
        "moe_intermediate_size": "expert_feed_forward_length", "num_experts": "expert_count",
        "num_experts_per_token": r.gated_as(r.SIGMOID), "num_shared_experts": m.num_shared,
        "moe_renormalize": u.norm_experts(default=True), "routed_scaling_factor": u.kimi_scale,
        "first_k_dense_replace": u.num_dense, "num_expert_group": u.groups("expert_group_count"),
        "topk_group": u.groups("expert_group_used_count"),
    }, names=_KIMI_NAMES),
    "lfm2": Architecture(
        ("lfm2",), {**_LFM2, "block_auto_adjust_ff_dim": r.just(False)}, names=_LFM2_NAMES
    ),
    "lfm2moe": Architecture(("lfm2_moe",), {
        **_LFM2, "moe_intermediate_size": "expert_feed_forward_length", "num_experts": "expert_count",
        "num_experts_per_tok": r.gated_as(r.SIGMOID), "num_dense_layers": "leading_dense_block_count",
    }, names=_LFM2_NAMES),
    "llama4": Architecture(("llama4_text",), {
        **_LLAMA, "intermediate_size": "expert_feed_forward_length", "intermediate_size_mlp": "feed_forward_length",
        "num_local_experts": "expert_count", "num_experts_per_tok": r.gated_as(r.SIGMOID),
        "interleave_moe_layer_step": "interleave_moe_layer_step", "layer_types": s.llama4_types,
        "no_rope_layers": s.llama4_rotates, "attn_temperature_tuning": s.chunked,
        "use_qk_norm": lambda h: h.fields.raw("expert_count") != 128,
    }, neighbours=True),
    "mamba": Architecture(("mamba", "falcon_mamba"), {
        **_STATE, "time_step_rank": "ssm.time_step_rank", "mixer_rms_eps": s.inner_eps,
    }, choose=s.mamba),
    "mamba2": Architecture(("mamba2",), {
        **_STATE, "num_heads": "ssm.time_step_rank", "head_dim": s.state_heads, "n_groups": "ssm.group_count",
    }),
    "mimo2": Architecture(("mimo_v2_flash",), {
        **_KINDS, "v_head_dim": u.value_dim, "swa_v_head_dim": u.value_dim, "swa_head_dim": u.key_dim,
        "swa_num_attention_heads": u.of_kind("attention.head_count", SLIDING),
        "swa_num_key_value_heads": u.of_kind("attention.head_count_kv", SLIDING),
        "rope_parameters": u.ropes_of_kinds(), "attention_value_scale": u.value_scale,
        "add_full_attention_sink_bias": u.sinks(FULL), "add_swa_attention_sink_bias": u.sinks(SLIDING),
        "n_routed_experts": "expert_count", "routed_scaling_factor": "expert_weights_scale?",
        "norm_topk_prob": u.norm_experts(default=True), "n_group": u.groups("expert_group_count"),
        "topk_group": u.groups("expert_group_used_count"),
    }),
    "minicpm": Architecture(("minicpm",), {
        **_LLAMA, "scale_emb": lambda h: h.fields.number("embedding_scale", default=12.0),
        "scale_depth": r.depth_scale, "dim_model_base": r.base_width,
    }, neighbours=True),
    "minimax-m2": Architecture(("minimax_m2",), {
        **_LLAMA, "intermediate_size": "expert_feed_forward_length", "num_local_experts": "expert_count",
        "num_experts_per_tok": r.experts(r.SIGMOID, normed=True), "rotary_dim": rotated,
        "rope_parameters": s.half_rotated,
    }),
    "mistral3": Architecture(("ministral3", "mistral"), {
        **_LLAMA, "rope_parameters": s.ministral_rope, "sliding_window": r.window,
    }, neighbours=True, choose=s.ministral),
    "mistral4": Architecture(("mistral4",), {
        **_LATENT, "num_experts_per_tok": r.gated_as(r.SOFTMAX), "rope_parameters": s.growing_latent_rope,
        "n_group": u.groups("expert_group_count"), "topk_group": u.groups("expert_group_used_count"),
    }, neighbours=True),
    "mpt": Architecture(("mpt",), {
        "vocab_size": r.vocab_size, "hidden_size": r.hidden_size, "num_hidden_layers": r.num_layers,
        "max_seq_len": "context_length", "num_attention_heads": r.equal_heads, "expansion_ratio": r.times_four,
        "layer_norm_epsilon": _LAYER_NORM, "attn_config": s.alibi,
    }),
    "nemotron": Architecture(("nemotron",), {
        **_SIZES, **_HEADS, **_WIDTH, "rope_parameters": rope, "norm_eps": _LAYER_NORM
    }),
    "nemotron_h": Architecture(("nemotron_h",), _NEMOTRON_H, names={"ffn_norm": "attn_norm"}, halves_apart=True),
    "nemotron_h_moe": Architecture(("nemotron_h",), {
        **_NEMOTRON_H, **_ROUTED, "num_experts_per_tok": r.gated_as(r.SIGMOID),
        "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "moe_latent_size": "moe_latent_size?",
    }, names={"ffn_norm": "attn_norm"}, halves_apart=True),
    "olmo2": Architecture(("olmo2", "olmo3"), {
        **_LLAMA, "sliding_window": _olmo_only3(r.window), "layer_types": _olmo_only3(r.layer_types(4)),
        "rope_parameters": lambda h: r.two_ropes(None)(h) if _olmo(h) == "olmo3" else rope(h),
    }, choose=_olmo),
    "olmoe": Architecture(("olmoe",), {
        **_LLAMA, "num_experts": "expert_count", "num_experts_per_tok": r.experts(r.SOFTMAX),
        "norm_topk_prob": "expert_weights_norm?", "clip_qkv": "attention.clamp_kqv?",
    }),
    "phi2": Architecture(("phi",), {**_WITH_LAYER_NORM, "qk_layernorm": r.holds("attn_q_norm.weight")}),
    "phi3": Architecture(("phi3",), {
        **_LLAMA, "original_max_position_embeddings": s.original_context, "sliding_window": r.window,
    }),
    "phimoe": Architecture(("phimoe",), {
        **_LLAMA, "sliding_window": r.window, "num_local_experts": "expert_count",
        "num_experts_per_tok": r.experts(r.SOFTMAX),
    }),
    "qwen2": Architecture(("qwen2",), _LLAMA),
    "qwen2moe": Architecture(("qwen2_moe",), {
        **_QWEN_MOE, "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "norm_topk_prob": lambda h: h.fields.flag("expert_weights_norm"),
    }),
    "qwen2vl": Architecture(("qwen2_vl",), _LLAMA | {"rope_parameters": s.one_axis}),
    "qwen3": Architecture(("qwen3",), _LLAMA),
    "qwen3moe": Architecture(("qwen3_moe",), {
        **_QWEN_MOE, "norm_topk_prob": lambda h: h.fields.flag("expert_weights_norm", default=True),
    }),
    "qwen3next": Architecture(("qwen3_next",), _DELTA_MOE, names=_POST_NORM, drafts=True),
    "qwen35": Architecture(("qwen3_5",), _DELTA, names=_POST_NORM, value_heads_in_turn=True, drafts=True),
    "qwen35moe": Architecture(("qwen3_5_moe",), _DELTA_MOE, names=_POST_NORM, value_heads_in_turn=True, drafts=True),
    "qwen3vl": Architecture(("qwen3_vl",), _LLAMA | {"rope_parameters": s.one_axis}),
    "qwen3vlmoe": Architecture(("qwen3_vl_moe",), {
        **_QWEN_MOE, "norm_topk_prob": lambda h: h.fields.flag("expert_weights_norm", default=True),
        "rope_parameters": s.one_axis,
    }),
    "rwkv6": Architecture(("rwkv6",), {
        **_SIZES, "intermediate_size": "feed_forward_length", "layer_norm_epsilon": _LAYER_NORM,
        "head_size": u.rwkv_head("wkv.head_size"), "time_mix_extra_dim": "time_mix_extra_dim",
        "time_decay_extra_dim": "time_decay_extra_dim", "rescale_every": "rescale_every_n_layers?",
    }, names=_RWKV6_NAMES),
    "rwkv7": Architecture(("rwkv7",), {
        "vocab_size": r.vocab_size, "hidden_size": r.hidden_size, "num_hidden_layers": r.num_layers,
        "max_position_embeddings": "context_length", "intermediate_size": "feed_forward_length",
        "norm_eps": _LAYER_NORM, "head_dim": "wkv.head_size", **_LOW_RANKS,
        "gate_low_rank_dim": u.rwkv_head("attention.gate_lora_rank"),
    }, names=_RWKV7_NAMES),
    "rwkv6qwen2": Architecture(("rwkv6qwen2",), {
        **_SIZES, **_WIDTH, **_RMS, "num_attention_heads": u.turned_heads, "num_key_value_heads": u.turned_groups,
        "lora_rank_tokenshift": "time_mix_extra_dim", "lora_rank_decay": "time_decay_extra_dim",
    }, names=_TURNED_6),
    "arwkv7": Architecture(("arwkv7",), {
        **_SIZES, **_WIDTH, **_RMS, **_LOW_RANKS, "head_size": u.rwkv_head("wkv.head_size", 1),
        "gate_low_rank_dim": u.turned_gate, "wkv_has_gate": lambda h: u.turned_gate(h) is not None,
        "wkv_has_group_norm": lambda h: h.has("blk.0.time_mix_ln.weight"),
    }, names=_TURNED_7),
    "seed_oss": Architecture(("seed_oss",), _LLAMA, names=_POST_NORM),
    "smollm3": Architecture(("smollm3",), _LLAMA, neighbours=True),
    "stablelm": Architecture(("stablelm",), {
        **_WITH_LAYER_NORM, "use_parallel_residual": s.parallel_halves,
        "qk_layernorm": r.holds("attn_q_norm.weight"),
    }),
    "starcoder": Architecture(("gpt_bigcode",), {
        **_GPT2, "num_attention_heads": "attention.head_count", "multi_query": s.one_kv_head,
    }),
    "starcoder2": Architecture(("starcoder2",), {
        **_SIZES, **_HEADS, **_WIDTH, "rope_parameters": rope, "norm_epsilon": _LAYER_NORM, "sliding_window": r.window,
    }),
    "step35": Architecture(("step3p7",), {
        **_KINDS, "head_dim": head_dim, "num_sliding_attention_heads": u.of_kind("attention.head_count", SLIDING),
        "rope_parameters": u.ropes_of_kinds(0.5), "share_expert_dim": m.shared_width, "num_experts": "expert_count",
        "moe_router_scaling_factor": "expert_weights_scale?", "norm_topk_prob": u.norm_experts(),
        "swiglu_limits": u.limits("swiglu_clamp_exp"), "swiglu_limits_shared": u.limits("swiglu_clamp_shexp"),
    }, names={"o_gate": "attn_gate"}),
}  # fmt: skip
"""`general.architecture` -> how its files are read."""
