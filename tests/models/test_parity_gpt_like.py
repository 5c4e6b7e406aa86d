"""The families around GPT-2 against transformers: learned positions, ALiBi, fused and transposed weights, layer norms
(catalogue rows C81, C83, G02).

The oracle of ALiBi in Falcon and of MPT's `alibi_bias_max` is transformers with one function replaced; see there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt import modeling_mpt

from penstock import LLM, SamplingParams
from penstock.base.errors import ConfigError, InputError, ModelError, UnsupportedError
from penstock.core.model_spec import Alibi, Norm
from penstock.families.registry import find_family, open_model
from penstock.weights.load import load_weights
from tests.models.gpt_like import attention_of, make
from tests.models.parity import VOCAB, check, oracle, save
from tests.oracle import NaiveModel
from tests.paged import Paged
from tests.shared import shared

RW = {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}
LINEAR = {"rope_type": "linear", "rope_theta": 300.0, "factor": 3.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-plain": ("GPT2", {}),
    "gpt2-scaled_by_layer": ("GPT2", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 43, "n_layer": 3}),
    "gpt2-unscaled_untied": ("GPT2", {"scale_attn_weights": False, "tie_word_embeddings": False,
                                      "activation_function": "relu", "layer_norm_epsilon": 1e-3}),
    "openai_gpt": ("OpenAIGPT", {}),
    "openai_gpt-relu": ("OpenAIGPT", {"afn": "relu", "layer_norm_epsilon": 1e-3}),
    "gpt_neo-window": ("GPTNeo", {}),
    "gpt_neo-mixed": ("GPTNeo", {"attention_types": [[["global"], 1], [["local"], 2]], "num_layers": 3,
                                 "intermediate_size": 43, "window_size": 11}),
    "gptj-partial": ("GPTJ", {}),
    "gptj-whole_tied": ("GPTJ", {"rotary_dim": 10, "tie_word_embeddings": True, "n_inner": 43}),
    "codegen": ("CodeGen", {}),
    "codegen-8_heads": ("CodeGen", {"n_head": 8, "rotary_dim": 4}),
    "gpt_bigcode-mqa": ("GPTBigCode", {}),
    "gpt_bigcode-mha": ("GPTBigCode", {"multi_query": False, "n_inner": 43}),
    "gpt_bigcode-unscaled": ("GPTBigCode", {"scale_attn_weights": False, "tie_word_embeddings": False}),
    "gpt_neox-parallel": ("GPTNeoX", {}),
    "gpt_neox-sequential": ("GPTNeoX", {"use_parallel_residual": False, "rope_parameters": {
        "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}}),
    "gpt_neox-unbiased": ("GPTNeoX", {"attention_bias": False, "tie_word_embeddings": True, "hidden_act": "gelu_fast",
                                      "rope_parameters": LINEAR | {"partial_rotary_factor": 0.5}}),
    "gpt_neox_japanese": ("GPTNeoXJapanese", {}),
    "gpt_neox_japanese-partial": ("GPTNeoXJapanese", {"intermediate_multiple_size": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}),
    "persimmon": ("Persimmon", {}),
    "persimmon-unnormed": ("Persimmon", {"qk_layernorm": False, "tie_word_embeddings": True}),
    "opt-C83-pre": ("OPT", {}),
    "opt-C83-350m": ("OPT", {"do_layer_norm_before": False, "word_embed_proj_dim": 20}),
    "opt-C83-no_final_norm": ("OPT", {"_remove_final_layer_norm": True, "enable_bias": False,
                                      "activation_function": "gelu"}),
    "opt-C83-galactica": ("OPT", {"enable_bias": False, "layer_norm_elementwise_affine": False,
                                  "activation_function": "gelu", "word_embed_proj_dim": 32}),
    "biogpt": ("BioGpt", {}),
    "biogpt-unscaled": ("BioGpt", {"scale_embedding": False, "tie_word_embeddings": False}),
    "bloom-C83-4_heads": ("Bloom", {}),
    "bloom-C83-6_heads": ("Bloom", {"n_head": 6, "hidden_size": 48}),
    "bloom-C83-7_heads": ("Bloom", {"n_head": 7, "hidden_size": 35, "layer_norm_epsilon": 1e-3}),
    "mpt-8_heads": ("Mpt", {"n_heads": 8}),
    "mpt-6_heads": ("Mpt", {"n_heads": 6, "d_model": 48}),
    "mpt-clip": ("Mpt", {"n_heads": 3, "d_model": 36, "attn_config": {"clip_qkv": 0.7, "softmax_scale": 0.3}}),
    "falcon-7b": ("Falcon", {}),
    "falcon-7b-untied": ("Falcon", {"tie_word_embeddings": False, "bias": True, "activation": "relu",
                                    "ffn_hidden_size": 43, "rope_parameters": LINEAR}),
    "falcon-mha": ("Falcon", {"multi_query": False, "bias": True}),
    "falcon-sequential": ("Falcon", {"parallel_attn": False}),
    "falcon-40b": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-11b": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    "falcon-180b": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 3, "num_attention_heads": 6,
                               "hidden_size": 48, "bias": True, "layer_norm_epsilon": 1e-3}),
    "falcon-rw-4_heads": ("Falcon", RW),
    "falcon-rw-6_heads": ("Falcon", {**RW, "num_attention_heads": 6, "hidden_size": 48}),
    "phi-2": ("Phi", {}),
    "phi-normed_grouped": ("Phi", {"qk_layernorm": True, "num_key_value_heads": 2, "hidden_act": "gelu",
                                   "rope_parameters": LINEAR | {"partial_rotary_factor": 0.75}}),
    "starcoder2-window": ("Starcoder2", {"sliding_window": 9}),
    "starcoder2-plain": ("Starcoder2", {"use_bias": False, "num_key_value_heads": 1, "tie_word_embeddings": False,
                                        "norm_epsilon": 1e-3}),
    "stablelm-3b": ("StableLm", {}),
    "stablelm-2": ("StableLm", {"use_qkv_bias": True, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "stablelm-12b": ("StableLm", {"qk_layernorm": True, "use_parallel_residual": True}),
    "stablelm-normed": ("StableLm", {"qk_layernorm": True, "layer_norm_eps": 1e-3, "rope_parameters": {
        "rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 1.0}}),
}  # fmt: skip
OFFSET = {"OPT", "BioGpt"}
"""Families whose position table has two rows that no position reads: our models leave them out."""


NEXT_SEED = {
    "gpt2-plain", "gptj-whole_tied", "bloom-C83-4_heads", "bloom-C83-6_heads", "starcoder2-window", "stablelm-12b",
}  # fmt: skip
"""Cases whose first seed gives a constant text, which would hide mistakes."""


@pytest.mark.parametrize("case", list(CASES))
def test_C81_C83_logits_and_greedy_text_equal_transformers(case: str, tmp_path: Path) -> None:
    kind, changes = CASES[case]
    model = make(kind, len(case) + (case in NEXT_SEED), **changes)
    result = check(save(model, tmp_path), model, count_params=kind not in OFFSET)
    if kind in OFFSET:
        parameters = {id(p): p.numel() for p in model.parameters()}
        assert result.spec.num_params + 2 * result.spec.hidden_size == sum(parameters.values())


@pytest.mark.parametrize("case", ["gpt2-plain", "falcon-40b"])
def test_weights_saved_as_bfloat16_are_read_exactly(case: str, tmp_path: Path) -> None:
    kind, changes = CASES[case]
    model = make(kind, 1, **changes).to(torch.bfloat16)
    save(model, tmp_path)
    assert open_model(tmp_path).spec.dtype == "bfloat16"
    # Read back as float32: `model.float()` would keep frequencies that became bfloat16.
    check(tmp_path, type(model).from_pretrained(tmp_path, dtype=torch.float32).eval())


def test_C81_order_and_precision_of_scores_are_no_other_model(tmp_path: Path) -> None:
    """`reorder_and_upcast_attn` runs in float32 alone, so it is compared with transformers in float32."""
    model = make("GPT2", 3, reorder_and_upcast_attn=True, attn_implementation="eager")
    checkpoint = open_model(save(model, tmp_path))
    weights = load_weights(checkpoint, checkpoint.spec, "float32")
    ids = np.random.default_rng(0).integers(3, VOCAB, 80).tolist()
    np.testing.assert_allclose(Paged(checkpoint.spec, weights).one_go("a", ids), oracle(model, ids), atol=1e-4)


@pytest.mark.parametrize("case", ["opt-C83-350m", "bloom-C83-6_heads", "falcon-40b", "stablelm-normed", "mpt-clip"])
def test_the_naive_loop_equals_the_program_bit_for_bit(case: str, tmp_path: Path) -> None:
    """It is the oracle of the whole engine suite, so it must say the same about every part these families add."""
    kind, changes = CASES[case]
    checkpoint = open_model(save(make(kind, 9, **changes), tmp_path))
    weights = load_weights(checkpoint, checkpoint.spec, "float32")
    ids = np.random.default_rng(3).integers(3, VOCAB, 40).tolist()
    want = NaiveModel(checkpoint.spec, weights).logits(ids)
    np.testing.assert_array_equal(Paged(checkpoint.spec, weights).chunked("a", ids, (7, 1, 16)), want)


# --- names in checkpoints


def stored(folder: Path, edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    """`folder` with other tensors in its model.safetensors."""
    path = folder / "model.safetensors"
    save_file({k: v.contiguous() for k, v in edit(load_file(path)).items()}, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("kind", "outer", "buffers"), [
    ("GPT2", "transformer.", ("h.0.attn.bias", "h.1.attn.masked_bias")),
    ("GPTJ", "transformer.", ("h.0.attn.bias", "h.0.attn.masked_bias")),
    ("CodeGen", "transformer.", ("h.0.attn.causal_mask",)),
    ("GPTNeo", "transformer.", ("h.1.attn.attention.bias", "h.1.attn.attention.masked_bias")),
    ("GPTBigCode", "transformer.", ("bias", "h.0.attn.bias")),
    ("GPTNeoX", "gpt_neox.", ("layers.0.attention.bias", "layers.0.attention.masked_bias",
                              "layers.1.attention.rotary_emb.inv_freq")),
    ("Bloom", "transformer.", ()), ("OPT", "model.", ()), ("BioGpt", "biogpt.", ()), ("Mpt", "transformer.", ()),
    ("Falcon", "transformer.", ("h.0.self_attention.rotary_emb.inv_freq",)),
    ("OpenAIGPT", "transformer.", ("h.0.attn.bias", "position_ids")),
    ("Phi", "model.", ("layers.0.self_attn.rotary_emb.inv_freq",)),
    ("StableLm", "model.", ("layers.0.self_attn.rotary_emb.inv_freq",)),
    ("Persimmon", "model.", ("layers.0.self_attn.rotary_emb.inv_freq",)),
    ("Starcoder2", "model.", ()),
])  # fmt: skip
def test_C81_C83_old_names_and_buffers_give_the_same_model(
    kind: str, outer: str, buffers: tuple[str, ...], tmp_path: Path
) -> None:
    """The published gpt2 and bloom have no outer name; checkpoints of those years carry masks and frequencies."""
    model = make(kind, 2)
    save(model, tmp_path)
    first = open_model(tmp_path)
    want = load_weights(first, first.spec, "float32")
    head = "output_projection.weight" if kind == "BioGpt" else "lm_head.weight"

    def aged(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        extra = {outer + name: torch.ones(1, 1, 4, 4) for name in buffers}
        if first.spec.tie_embeddings:
            extra[head] = torch.zeros(1)  # a copy of the embedding that nobody looks at
        out = {name.removeprefix(outer): tensor for name, tensor in {**tensors, **extra}.items()}
        assert any(name not in tensors for name in out)
        return out

    checkpoint = open_model(stored(tmp_path, aged))
    for name, weight in load_weights(checkpoint, checkpoint.spec, "float32").items():
        np.testing.assert_array_equal(weight, want[name])
    stored(tmp_path, lambda tensors: {**tensors, "h.0.attn.q_norm.weight": torch.ones(2)})
    with pytest.raises(UnsupportedError, match="does not use with this"):
        open_model(tmp_path)


def test_a_matrix_stored_the_other_way_round_is_refused_by_its_shape(tmp_path: Path) -> None:
    save(make("GPT2", 2, n_inner=43), tmp_path)
    stored(tmp_path, lambda tensors: {k: v.T if k.endswith("c_fc.weight") else v for k, v in tensors.items()})
    with pytest.raises(ModelError, match=r"c_fc\.weight.*needs '\(32, 43\)'"):
        open_model(tmp_path)


# --- ALiBi


def falcon_alibi(mask: torch.Tensor, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """transformers' function without its rounding to bfloat16. Slopes: Press et al., arXiv 2108.12409, section 3."""
    low = 2 ** int(np.log2(num_heads))
    slopes = [2 ** (-8 * i / low) for i in range(1, low + 1)]
    slopes += [2 ** (-4 * i / low) for i in range(1, 2 * low, 2)]
    distance = torch.arange(mask.shape[1], dtype=torch.float64)
    return (torch.tensor(slopes[:num_heads], dtype=torch.float64)[:, None, None] * distance).to(dtype)


@pytest.mark.parametrize("heads", [12, 16])
def test_G02_falcon_alibi_is_exact_where_transformers_rounds_it(
    heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With up to 8 heads both agree to 256 positions (cases falcon-rw-*). Beyond, transformers rounds slope and slope
    times position to bfloat16; with that one function exact, all is equal again."""
    model = make("Falcon", 6, **RW, num_attention_heads=heads, hidden_size=4 * heads)
    checkpoint = open_model(save(model, tmp_path))
    ids = np.random.default_rng(0).integers(3, VOCAB, 90).tolist()
    ours = Paged(checkpoint.spec, load_weights(checkpoint, checkpoint.spec, "float32")).one_go("a", ids)
    assert np.abs(ours - oracle(model, ids)).max() > 1e-3, "nothing is rounded: the comment in the family is wrong"
    monkeypatch.setattr(modeling_falcon, "build_alibi_tensor", falcon_alibi)
    check(tmp_path, model)


@pytest.mark.parametrize("heads", [4, 6])
def test_G02_mpt_reads_alibi_bias_max(heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes 8 whatever the config says; its function given the config's number is the oracle."""
    changes = {"n_heads": heads, "d_model": 8 * heads, "attn_config": {"alibi_bias_max": 4}}
    model = make("Mpt", 6, **changes)
    save(model, tmp_path)
    assert attention_of(open_model(tmp_path).spec).alibi == Alibi(max_bias=4.0)
    plain = modeling_mpt.build_mpt_alibi_tensor
    monkeypatch.setattr(modeling_mpt, "build_mpt_alibi_tensor", lambda n, t, most, device: plain(n, t, 4, device))
    check(tmp_path, model)


@pytest.mark.parametrize("attention", ["ref", "ref-online"])
@pytest.mark.parametrize("case", ["bloom-C83-4_heads", "bloom-C83-6_heads", "mpt-6_heads", "falcon-rw-6_heads"])
def test_G02_both_attention_backends_honour_alibi(case: str, attention: str, tmp_path: Path) -> None:
    """300 tokens: beyond the chunk of 256 after which "ref-online" starts anew."""
    kind, changes = CASES[case]
    longer = {"Mpt": {"max_seq_len": 320}, "Falcon": {"max_position_embeddings": 320}}.get(kind, {})
    model = make(kind, 7, **{**changes, **longer})
    checkpoint = open_model(save(model, tmp_path))
    ids = np.random.default_rng(1).integers(3, VOCAB, 250 if kind == "Falcon" else 300).tolist()
    want = oracle(model.double(), ids)
    paged = Paged(
        checkpoint.spec, load_weights(checkpoint, checkpoint.spec, "float32"), attention=attention, max_model_len=320
    )
    np.testing.assert_allclose(paged.chunked("a", ids, (130, 1, 1, 140)), want, atol=1e-4)


@pytest.mark.parametrize("heads", [4, 6])
def test_G02_alibi_goes_together_with_windows(heads: int, tmp_path: Path) -> None:
    """No published model has both; the oracle is the naive loop. One layer sees a window, one a chunk."""
    model = make("Bloom", 8, n_head=heads, hidden_size=8 * heads)
    checkpoint = open_model(save(model, tmp_path))
    weights = load_weights(checkpoint, checkpoint.spec, "float32")
    halves = [{"window": 9}, {"chunk": 16}]
    layers = tuple(
        msgspec.structs.replace(layer, mixer=msgspec.structs.replace(attention_of(checkpoint.spec), **half))
        for layer, half in zip(checkpoint.spec.layers, halves, strict=True)
    )
    spec = msgspec.structs.replace(checkpoint.spec, layers=layers)
    ids = np.random.default_rng(2).integers(3, VOCAB, 70).tolist()
    want = NaiveModel(spec, weights).logits(ids)
    assert np.abs(want - NaiveModel(checkpoint.spec, weights).logits(ids)).max() > 0.1
    np.testing.assert_array_equal(Paged(spec, weights).chunked("a", ids, (11, 1, 30)), want)
    online = Paged(spec, weights, attention="ref-online").chunked("a", ids, (11, 1, 30))
    np.testing.assert_allclose(online, want, atol=1e-4)


# --- whole models


@pytest.mark.parametrize("kind", ["GPT2", "OpenAIGPT", "GPTNeo", "GPTBigCode", "OPT", "BioGpt"])
def test_learned_positions_end(kind: str, tmp_path: Path) -> None:
    save(make(kind), tmp_path)
    with pytest.raises(ConfigError, match="max_model_len: 193 is more than the 192 positions"):
        LLM(tmp_path, skip_tokenizer_init=True, max_model_len=193)
    llm = LLM(tmp_path, skip_tokenizer_init=True)
    prompt = {"prompt_token_ids": list(range(3, 90)) * 2}
    (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=18, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 192 - 2 * 87
    with pytest.raises(InputError, match="maximum context length is 192 tokens"):
        llm.generate(prompt, SamplingParams(temperature=0, max_tokens=19, ignore_eos=True))


def test_C81_a_random_gpt2_with_the_real_tokenizer_through_LLM(tmp_path: Path) -> None:
    """No weights of GPT-2 lie here: the model is random, its vocabulary and its tokenizer files are the real ones."""
    names = ("vocab.json", "merges.txt")
    files = [shared("data", "tokenizers", "gpt2", name) for name in names]
    model = make("GPT2", 4, vocab_size=50257, bos_token_id=50256, eos_token_id=50256)
    save(model, tmp_path)
    for path in files:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    theirs = transformers.GPT2Tokenizer(str(files[0]), str(files[1]))
    prompts = ["Hello, world!", "def f(x):\n    return x\n", "The café costs 3€ — naïve? 日本", " a  b   c"]
    llm = LLM(tmp_path)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = theirs(prompt)["input_ids"]
        assert output.prompt_token_ids == ids
        with torch.no_grad():
            want = model.generate(
                torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False,
                max_new_tokens=24, eos_token_id=None, pad_token_id=0,
            )[0, len(ids) :].tolist()  # fmt: skip
        assert output.outputs[0].token_ids == want
        assert output.outputs[0].text == theirs.decode(want)
        assert len(set(want)) > 3


def test_C81_the_real_config_of_gpt2_large() -> None:
    config = json.loads(shared("data", "configs", "model", "openai--gpt2-large.config.json").read_text())
    spec = find_family(config).spec(config)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**config))
    assert spec.num_params == sum(p.numel() for p in {id(p): p for p in model.parameters()}.values()) == 774_030_080
    assert (spec.max_position, attention_of(spec).head_dim, spec.bos_token_id) == (1024, 64, 50256)
    assert spec.final_norm == Norm(kind="layer", eps=1e-5)


def test_a_real_classifier_is_refused_by_its_architecture() -> None:
    config = json.loads(
        shared("data", "configs", "model", "EleutherAI--pythia-410m-classifier.config.json").read_text()
    )
    with pytest.raises(UnsupportedError, match="'GPTNeoXForSequenceClassification'"):
        find_family(config)
    config["architectures"] = ["GPTNeoXForCausalLM"]  # its decoder, were there a head for text
    spec = find_family(config).spec(config)
    with torch.device("meta"):
        model = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**config))
    assert spec.num_params == sum(p.numel() for p in model.parameters())
