"""Configs of Llama's relatives: read to the last field, or refused in words that name it. Sizes of real ones."""

from __future__ import annotations

import json

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import Attention, ModelSpec, weight_shapes
from penstock.families.llama_like import LlamaNames
from penstock.families.registry import FAMILIES, find_family
from tests.models.llama_like_cases import CASES, HERE, KINDS, LINEAR, MISTRAL3, YARN, Config, config_of
from tests.models.test_parity_delta import CASES as DELTA_CASES
from tests.models.test_parity_mixed import CASES as MIXED_CASES
from tests.models.test_parity_recurrent import CASES as RECURRENT_CASES
from tests.models.test_parity_sparse import CASES as SPARSE_CASES
from tests.models.test_parity_sparse_more import CASES as MORE_CASES
from tests.shared import shared


def spec_of(config: Config) -> ModelSpec:
    return find_family(config).spec(config)


@pytest.mark.parametrize("name", CASES)
def test_all_weights_have_places_and_whatever_is_unknown_is_refused(name: str) -> None:
    config = config_of(name)
    family, spec = find_family(config), spec_of(config)
    assert set(family.weight_map(spec)) == set(weight_shapes(spec))
    with pytest.raises(UnsupportedError, match="'shrink_factor' to '2'"):
        spec_of(config | {"shrink_factor": 2})
    assert spec_of(config | {"shrink_factor": None}) == spec


# Without classes of their own in transformers; Ministral 3 does not go without its rope_parameters.
NO_DEFAULTS = {"chatglm", "exaone", "internlm2", "mimo", "minicpm", "ministral3"}


@pytest.mark.parametrize("family", sorted(set(HERE) - NO_DEFAULTS))
def test_absent_fields_mean_what_transformers_takes_for_them(family: str) -> None:
    """A config.json of bare sizes gives the same spec as transformers' config of these sizes, written out in full."""
    sizes = {
        "vocab_size": 300_000, "hidden_size": 20480, "intermediate_size": 56, "num_hidden_layers": 7,
        "num_attention_heads": 160,
    } | ({"num_key_value_heads": 160} if family in ("minicpm3", "youtu") else {})  # fmt: skip
    known = transformers.AutoConfig.for_model(family, **sizes)
    full = json.loads(known.to_json_string(use_diff=False))
    bare = {**sizes, "model_type": family}
    assert spec_of({k: v for k, v in full.items() if k != "architectures"}) == spec_of(bare)


def test_every_architecture_that_shares_the_readers_is_tried() -> None:
    modules = {name: type(FAMILIES.get(name)()) for name in FAMILIES.names()}
    users = {name for name, family in modules.items() if issubclass(family, LlamaNames)}
    others = {case.split("-")[0] for case in (*SPARSE_CASES, *MORE_CASES, *MIXED_CASES, *DELTA_CASES, *RECURRENT_CASES)}
    others |= {
        "gemma3n_text",
        "gemma4_text",
        "step3p7",
        "retnet",
        "bailing_moe",
        "bailing_moe_v2",
        "minimax_m3",
    }  # elsewhere
    assert users <= set(HERE) | others <= set(modules) | {"llama4"}


REFUSED: list[tuple[str, Config, str, type[ModelError]]] = [
    ("apertus-plain", {"post_norm": True}, "post_norm", UnsupportedError),
    ("nanochat-plain", {"head_dim": 7}, "head dimension 7 is odd", ModelError),
    ("mistral-window", {"layer_types": KINDS}, "'layer_types'", UnsupportedError),
    ("mistral-window", {"sliding_window": 0}, "sliding_window as '0'", ModelError),
    ("mistral-window", {"attention_bias": True}, "'attention_bias'", UnsupportedError),
    ("mistral-window", {"partial_rotary_factor": 0.5}, "rotates whole heads", UnsupportedError),
    ("ministral-mixed", {"layer_types": ["full_attention"]}, "1 layers, but the model has 2", ModelError),
    ("ministral-mixed", {"layer_types": ["chunked_attention"] * 2}, "chunked_attention", UnsupportedError),
    ("ministral-mixed", {"sliding_window": None}, "no sliding_window", ModelError),
    ("ministral3-yarn", {"rope_parameters": None}, "llama_4_scaling_beta", ModelError),
    ("ministral3-yarn", {"rope_parameters": YARN}, "lacks llama_4_scaling_beta", ModelError),
    ("ministral3-yarn", {"rope_parameters": MISTRAL3 | {"llama_4_floor": 2}}, "llama_4_floor", UnsupportedError),
    ("qwen2-full", {"layer_types": KINDS}, "use_sliding_window is off", ModelError),
    ("qwen2-full", {"use_mrope": True}, "'use_mrope'", UnsupportedError),
    ("qwen2-full", {"attention_bias": True}, "'attention_bias'", UnsupportedError),
    ("qwen2-kinds", {"use_sliding_window": False}, "use_sliding_window is off", ModelError),
    ("qwen2-kinds", {"sliding_window": None}, "no sliding_window", ModelError),
    ("qwen2-window", {"max_window_layers": -1}, "max_window_layers", ModelError),
    ("qwen3-full", {"use_sliding_window": 1}, "use_sliding_window", ModelError),
    ("qwen3-full", {"head_dim": 7}, "head dimension 7 is odd", ModelError),
    ("mimo-as_qwen2", {"attention_bias": False}, "attention_bias", UnsupportedError),
    ("gemma-plain", {"use_bidirectional_attention": True}, "use_bidirectional_attention", UnsupportedError),
    ("gemma-plain", {"hidden_activation": "relu"}, "hidden_activation", UnsupportedError),
    ("gemma-plain", {"hidden_act": ["gelu"]}, "hidden_act as a list", ModelError),
    ("gemma2-alternating", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar", ModelError),
    ("gemma2-alternating", {"sliding_window_size": 9}, "sliding_window_size", UnsupportedError),
    ("gemma2-alternating", {"final_logit_softcapping": -1.0}, "final_logit_softcapping", ModelError),
    ("gemma2-alternating", {"hidden_activation": "gegelu"}, "'gegelu'", UnsupportedError),
    ("gemma3_text-new", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping", UnsupportedError),
    ("gemma3_text-new", {"use_bidirectional_attention": True}, "use_bidirectional_attention", UnsupportedError),
    ("gemma3_text-new", {"rope_parameters": {"rope_type": "linear", "factor": 8.0}}, "'rope_type'", UnsupportedError),
    ("gemma3_text-new", {"rope_local_base_freq": 7.0}, "two thetas for sliding_attention", ModelError),
    ("gemma3_text-new", {"rope_scaling": LINEAR}, "both rope_scaling and rope_parameters", ModelError),
    ("gemma3_text-old", {"sliding_window_pattern": 0}, "sliding_window_pattern", ModelError),
    ("gemma3_text-old", {"rope_scaling": LINEAR | {"attention_factor": 2.0}}, "attention_factor", UnsupportedError),
    ("phi3-plain", {"rope_scaling": LINEAR}, "longrope only", UnsupportedError),
    ("phi3-longrope_old", {"original_max_position_embeddings": None}, "lacks original_max", ModelError),
    ("phi3-longrope_long", {"original_max_position_embeddings": 99}, "99 beside .* and 20 inside", ModelError),
    ("phi3-longrope_long", {"partial_rotary_factor": 0.5}, "partial_rotary_factor twice", ModelError),
    ("phi3-plain", {"partial_rotary_factor": 0.4}, "no whole pairs", ModelError),
    ("phi3-plain", {"attention_bias": True}, "attention_bias", UnsupportedError),
    ("granite-multipliers", {"logits_scaling": 0}, "logits_scaling", ModelError),
    ("granite-multipliers", {"residual_multiplier": "1"}, "residual_multiplier", ModelError),
    ("hyperclovax-both", {"use_post_norm": 1}, "use_post_norm", ModelError),
    ("olmo2-plain", {"clip_qkv": 8.0}, "'clip_qkv'", UnsupportedError),
    ("olmo2-plain", {"mlp_bias": True}, "'mlp_bias'", UnsupportedError),
    ("olmo3-old", {"rope_theta": 1e4}, "per kind of layer", UnsupportedError),
    ("olmo3-pattern", {"layer_types": ["sliding"] * 4}, "'sliding'", UnsupportedError),
    ("smollm3-interval", {"no_rope_layers": [1]}, "1 layers, but the model has 4", ModelError),
    ("smollm3-interval", {"no_rope_layers": [2, 1, 1, 1]}, "no_rope_layers", ModelError),
    ("smollm3-window", {"use_sliding_window": False}, "use_sliding_window is off", ModelError),
    ("cohere-plain", {"logit_scale": -2.0}, "logit_scale", ModelError),
    ("cohere2-pattern", {"use_parallel_block": False}, "use_parallel_block", UnsupportedError),
    ("cohere2-pattern", {"position_embedding_type": "alibi"}, "position_embedding_type", UnsupportedError),
    ("cohere2-pattern", {"use_qk_norm": True}, "use_qk_norm", UnsupportedError),
    ("glm-plain", {"partial_rotary_factor": 2.0}, "partial_rotary_factor", ModelError),
    ("glm4-plain", {"attention_out_bias": True}, "attention_out_bias", UnsupportedError),
    ("internlm3-as_llama", {"bias": False}, "differently", UnsupportedError),
    ("exaone4-pattern", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern", ModelError),
    ("exaone4-full", {"layer_types": KINDS}, "no sliding_window", ModelError),
    ("seed_oss-plain", {"attention_out_bias": "yes"}, "attention_out_bias", ModelError),
    ("hunyuan_v1_dense-alpha", {"head_dim": 2}, "at least two pairs", ModelError),
    ("hunyuan_v1_dense-alpha", {"rope_scaling": {"type": "dynamic", "alpha": 1e300}}, "1e9 at most", ModelError),
    ("hunyuan_v1_dense-plain", {"use_qk_norm": False}, "use_qk_norm", UnsupportedError),
    ("ernie4_5-plain", {"use_bias": 1}, "use_bias", ModelError),
    ("exaone-as_llama", {"hidden_act": "relu"}, "hidden_act", UnsupportedError),
    ("internlm2-as_llama", {"rope_scaling": {"type": "dynamic"}}, "lacks factor", ModelError),
    ("minicpm-as_granite", {"scale_depth": -1}, "scale_depth", ModelError),
    ("minicpm-as_granite", {"num_experts": 8}, "num_experts", UnsupportedError),
    ("minicpm-as_granite", {"mup_denominator": 32}, "mup_denominator", UnsupportedError),
    ("arcee-plain", {"hidden_act": "xielu"}, "'xielu'", UnsupportedError),
    ("nemotron-plain", {"norm_eps": 0}, "norm_eps", ModelError),
    ("helium-plain", {"head_dim": 10}, "do not fill 32", ModelError),
    ("bitnet-plain", {"rms_norm_eps": 0}, "rms_norm_eps", ModelError),
    ("chatglm-as_glm", {"position_encoding_2d": True}, "prefix language model", UnsupportedError),
    ("chatglm-as_glm", {"quantization_bit": 4}, "quantization_bit", UnsupportedError),
    ("chatglm-as_glm", {"kv_channels": 12}, "must fill the hidden size", ModelError),
    ("cwm-window", {"sliding_window": None}, "no sliding_window", ModelError),
    ("doge-plain", {"is_moe": True}, "is_moe", UnsupportedError),
    ("granite_swa-thetas", {"layer_rope_theta": [1e4]}, "layer_rope_theta as 4 numbers", ModelError),
    ("granite_swa-thetas", {"layer_rope_theta": [1e4, -1, 0, 0]}, "layer_rope_theta as 4 numbers", ModelError),
    ("jais2-plain", {"hidden_act": "xielu"}, "'xielu'", UnsupportedError),
    ("minicpm3-plain", {"scale_emb": 0}, "scale_emb", ModelError),
    ("minicpm3-plain", {"rope_interleave": True}, "rope_interleave", UnsupportedError),
    ("olmo-plain", {"clip_qkv": -1.0}, "clip_qkv", ModelError),
    ("vaultgemma-plain", {"hidden_activation": "gegelu"}, "'gegelu'", UnsupportedError),
    ("youtu-plain", {"num_key_value_heads": 2}, "as many key-value heads", ModelError),
]  # fmt: skip


def test_only_mimo_has_layers_beyond_its_last() -> None:
    extra = "model.mtp_layers.0.input_proj.weight"
    for name, there in (("mimo-as_qwen2", True), ("qwen2-full", False)):
        config = config_of(name)
        assert find_family(config).ignores(extra, spec_of(config)) == there


@pytest.mark.parametrize(("name", "changes", "words", "kind"), REFUSED)
def test_what_a_family_does_not_compute_is_refused(
    name: str, changes: Config, words: str, kind: type[ModelError]
) -> None:
    config = config_of(name)
    spec_of(config)
    with pytest.raises(ModelError, match=words) as error:
        spec_of(config | changes)
    assert type(error.value) is kind
    assert str(error.value).isprintable()


def test_C86_the_first_chatglm_is_refused_as_a_prefix_model() -> None:
    """As in the config.json of the first ChatGLM-6B, which names the architecture of its successors."""
    config = {
        "architectures": ["ChatGLMModel"], "model_type": "chatglm", "hidden_size": 4096, "inner_hidden_size": 16384,
        "layernorm_epsilon": 1e-5, "max_sequence_length": 2048, "num_attention_heads": 32, "num_layers": 28,
        "position_encoding_2d": True, "vocab_size": 130528,
    }  # fmt: skip
    with pytest.raises(UnsupportedError, match="prefix language model: tokens of a prompt see those after them"):
        spec_of(config)


def test_every_family_refuses_something() -> None:
    # Llama's are in test_families.py.
    assert {name.split("-")[0] for name, *_ in REFUSED} == set(HERE) - {"llama"}


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 40), st.floats(), st.text(max_size=3),
    st.lists(st.integers(0, 2), max_size=3),
    st.sampled_from([KINDS, YARN, LINEAR, MISTRAL3, {}, {"full_attention": LINEAR}, 10**400, 1e300, "gelu", "dynamic"]),
)  # fmt: skip


@settings(max_examples=400, derandomize=True, deadline=None)
@given(name=st.sampled_from(list(CASES)), data=st.data())
def test_fuzz_config(name: str, data: st.DataObject) -> None:
    """Any value in any field: a spec whose weights all have places, or a ModelError of one printable line."""
    config = config_of(name)
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    field = data.draw(st.sampled_from([*config, "rope_scaling", "rope_theta", "partial_rotary_factor", "dtype"]))
    value = data.draw(VALUES)
    if rope and field in ("rope_scaling", "rope_parameters") and data.draw(st.booleans()):
        value = {**rope, data.draw(st.sampled_from([*rope, "alpha", "factor"])): value}
    message = ""
    try:
        spec = spec_of(config | {field: value})
        assert set(find_family(config).weight_map(spec)) == set(weight_shapes(spec))
    except ModelError as error:
        message = str(error)
    assert message.isprintable(), message


# --- real configurations


@pytest.mark.parametrize(("name", "num_params"), [
    ("Qwen--Qwen2.5-3B", 3_085_938_688), ("Qwen--Qwen2.5-7B", 7_615_616_512), ("Qwen--Qwen2.5-14B", 14_770_033_664),
    ("Qwen--Qwen2.5-32B", 32_763_876_352), ("Qwen--Qwen3-0.6B", 596_049_920), ("Qwen--Qwen3-1.7B", 1_720_574_976),
    ("Qwen--Qwen3-4B", 4_022_468_096), ("Qwen--Qwen3-8B", 8_190_735_360), ("Qwen--Qwen3-14B", 14_768_307_200),
    ("Qwen--Qwen3-32B", 32_762_123_264), ("XiaomiMiMo--MiMo-7B-Base", 7_622_619_136),
])  # fmt: skip
def test_real_configs_give_the_published_sizes(name: str, num_params: int) -> None:
    """As transformers counts them (test_real_configs.py asks it); MiMo as Qwen2, without its extra layer."""
    config = json.loads(shared("data", "configs", "model", f"{name}.config.json").read_text())
    spec = spec_of(config)
    assert spec.num_params == num_params
    assert all(isinstance(layer.mixer, Attention) and layer.mixer.window is None for layer in spec.layers)
