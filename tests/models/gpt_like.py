"""Tiny random models, and configs, of the families around GPT-2."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from penstock.core.model_spec import Attention, ModelSpec
from tests.models.parity import VOCAB, random_model

IDS: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
BASE: dict[str, dict[str, Any]] = {
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 192},
    "OpenAIGPT": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 192},
    "GPTNeo": {"hidden_size": 32, "num_heads": 4, "num_layers": 2, "max_position_embeddings": 192, "window_size": 7,
               "attention_types": [[["global", "local"], 1]]},
    "GPTJ": {"n_embd": 40, "n_layer": 2, "n_head": 4, "n_positions": 192, "rotary_dim": 4},
    "CodeGen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 192, "rotary_dim": 6},
    "GPTBigCode": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 192},
    "GPTNeoX": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 43,
                "max_position_embeddings": 192},
    "GPTNeoXJapanese": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                        "max_position_embeddings": 192},
    "Persimmon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 43,
                  "max_position_embeddings": 192},
    "OPT": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 43,
            "max_position_embeddings": 192, "pad_token_id": 1},
    "BioGpt": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 43,
               "max_position_embeddings": 192, "pad_token_id": 1},
    "Bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "Mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 192},
    "Falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 192},
    "Phi": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 43,
            "max_position_embeddings": 192},
    "Starcoder2": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                   "intermediate_size": 43, "max_position_embeddings": 192},
    "StableLm": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                 "intermediate_size": 43, "max_position_embeddings": 192},
}  # fmt: skip
HEADS = {"GPT2": "GPT2LMHeadModel", "OpenAIGPT": "OpenAIGPTLMHeadModel"}


def make(kind: str, seed: int = 0, **changes: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(**{**IDS, **BASE[kind], **changes})
    model = random_model(getattr(transformers, HEADS.get(kind, f"{kind}ForCausalLM")), config, seed)
    if getattr(config, "tie_word_embeddings", False):
        # A tied model of random weights says its last token again and again if the layers add little to it.
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(0.05 if kind == "BioGpt" else 0.25)
    return model


def attention_of(spec: ModelSpec, layer: int = 0) -> Attention:
    mixer = spec.layers[layer].mixer
    assert isinstance(mixer, Attention)
    return mixer


def config_of(kind: str, **changes: Any) -> dict[str, Any]:
    config = getattr(transformers, f"{kind}Config")(**{**IDS, **BASE[kind]}).to_dict()
    config["architectures"] = [HEADS.get(kind, f"{kind}ForCausalLM")]
    return {k: v for k, v in {**config, **changes}.items() if v is not ...}
