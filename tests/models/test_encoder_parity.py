"""Encoders against transformers in float64: hidden states of whole texts, and classifiers' logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from penstock.base.errors import InputError
from penstock.launch.llm import LLM
from tests.encoders import add_modules
from tests.models.parity import random_model

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 44,
    "max_position_embeddings": 100, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": {"type_vocab_size": 2}, "Roberta": {"type_vocab_size": 1}, "XLMRoberta": {"type_vocab_size": 1},
    "ModernBert": {"local_attention": 12, "cls_token_id": 3, "sep_token_id": 4}, "NomicBert": {"type_vocab_size": 2},
}  # fmt: skip
RNG = np.random.default_rng(3)
TEXTS = [RNG.integers(3, 61, n).tolist() for n in (1, 97, 40, 7, 64)]
"""Longer than what local layers see, and than a tile of queries."""


def made(kind: str, cls: str = "Model", **more: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(**SIZES, **FAMILIES[kind], **more)
    return random_model(getattr(transformers, kind + cls), config, seed=7).double()


def saved(model: Any, folder: Path) -> Path:
    model.float().save_pretrained(folder)
    model.double()
    return folder


def hidden(model: Any, ids: list[int], kinds: list[int] | None = None) -> np.ndarray:
    given = {} if kinds is None else {"token_type_ids": torch.tensor([kinds])}
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), **given).last_hidden_state[0].numpy()


def states(llm: LLM, texts: list[list[int]]) -> list[np.ndarray]:
    return [out.outputs.data for out in llm.encode([{"prompt_token_ids": ids} for ids in texts])]


@pytest.mark.parametrize("ops", ["ref", "native", "torch"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_hidden_states_are_those_of_transformers(kind: str, ops: str, tmp_path: Path) -> None:
    model = made(kind)
    llm = LLM(saved(model, tmp_path), ops=ops, skip_tokenizer_init=True)
    together = states(llm, TEXTS)
    for ids, got in zip(TEXTS, together, strict=True):
        want = hidden(model, ids)
        assert np.abs(want).max() > 1
        np.testing.assert_allclose(got, want, atol=1e-4)
    for ids, got in zip(TEXTS, together, strict=True):  # the same bits alone
        assert states(llm, [ids])[0].tobytes() == got.tobytes()


@pytest.mark.parametrize("ops", ["ref", "native"])
def test_tokens_of_the_second_kind(ops: str, tmp_path: Path) -> None:
    """A token of kind 1 has its id and the number of words."""
    model, ids, kinds = made("Bert"), TEXTS[3], [0, 0, 0, 1, 1, 1, 1]
    llm = LLM(saved(model, tmp_path), ops=ops, skip_tokenizer_init=True)
    (got,) = states(llm, [[i + 61 * kind for i, kind in zip(ids, kinds, strict=True)]])
    np.testing.assert_allclose(got, hidden(model, ids, kinds), atol=1e-4)
    assert np.abs(got - hidden(model, ids)).max() > 0.1


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "XLMRoberta", "ModernBert"])
def test_logits_of_classifiers(kind: str, tmp_path: Path) -> None:
    model = made(kind, "ForSequenceClassification", num_labels=3)
    llm = LLM(saved(model, tmp_path), ops="native", skip_tokenizer_init=True)
    prompts = [{"prompt_token_ids": ids} for ids in TEXTS]
    for ids, out in zip(TEXTS, llm.encode(prompts, pooling_task="classify"), strict=True):
        with torch.no_grad():
            want = model(input_ids=torch.tensor([ids])).logits[0].numpy()
        np.testing.assert_allclose(out.outputs.data, want, atol=1e-4)
    scores = llm.classify(prompts)[1].outputs
    np.testing.assert_allclose(sum(scores.probs), 1.0)


def test_names_of_published_nomic_files(tmp_path: Path) -> None:
    """`nomic-embed-text` names its fields after GPT-2's, and has q, k and v in one matrix."""
    model = made("NomicBert")
    tensors, out = model.float().state_dict(), {}
    for name, tensor in tensors.items():
        for own, theirs in {
            "embeddings.LayerNorm": "emb_ln", "layers.": "encoder.layers.", "self_attn.o_proj": "attn.out_proj",
            "post_attention_layernorm": "norm1", "post_mlp_layernorm": "norm2", "mlp.up_proj": "mlp.fc11",
            "mlp.gate_proj": "mlp.fc12", "mlp.down_proj": "mlp.fc2",
        }.items():  # fmt: skip
            name = name.replace(own, theirs)
        out[name] = tensor
    for i in range(4):
        parts = [out.pop(f"encoder.layers.{i}.self_attn.{n}_proj.weight") for n in "qkv"]
        out[f"encoder.layers.{i}.attn.Wqkv.weight"] = torch.cat(parts)
    config = {
        "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "vocab_size": 61, "n_embd": 32, "n_head": 4,
        "n_layer": 4, "n_inner": 44, "n_positions": 100, "type_vocab_size": 2, "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0, "layer_norm_epsilon": 1e-12, "activation_function": "swiglu", "prenorm": False,
        "qkv_proj_bias": False, "use_flash_attn": True, "causal": False, "attn_pdrop": 0.0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in out.items()}, tmp_path / "model.safetensors")
    llm = LLM(tmp_path, skip_tokenizer_init=True)
    np.testing.assert_allclose(states(llm, TEXTS[1:2])[0], hidden(model.double(), TEXTS[1]), atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_with_files_for_vectors(tied: bool, tmp_path: Path) -> None:
    """Qwen3-Embedding: the last token's hidden state, a prompt for queries; the output matrix may be missing."""
    config = transformers.Qwen3Config(
        **SIZES, num_key_value_heads=2, head_dim=8, tie_word_embeddings=tied, architectures=["Qwen3ForCausalLM"]
    )
    model = random_model(transformers.Qwen3Model, config, seed=9)
    model.save_pretrained(tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**told, "architectures": ["Qwen3ForCausalLM"]}))
    add_modules(tmp_path, "lasttoken")
    llm = LLM(tmp_path, ops="native", skip_tokenizer_init=True)
    model = model.double()
    for ids, out in zip(TEXTS, llm.embed([{"prompt_token_ids": ids} for ids in TEXTS]), strict=True):
        want = hidden(model, ids)[-1]
        np.testing.assert_allclose(out.outputs.embedding, want / np.linalg.norm(want), atol=1e-5)
    prompt = {"prompt_token_ids": TEXTS[3]}
    if tied:
        assert llm.generate(prompt)[0].outputs[0].token_ids
    else:
        with pytest.raises(InputError, match="writes none"):
            llm.generate(prompt)
