"""A trained module as a model folder that Penstock (and, where it knows the shape, transformers) opens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from penstock.core.model_spec import Attention, FeedForward, ModelSpec
from penstock.families.registry import open_model
from penstock.weights.load import load_weights
from train.interpreter import SpecModule


def llama_config(spec: ModelSpec) -> dict[str, Any]:
    """config.json of a spec that the llama family can say. Raises ValueError for others."""
    layer = spec.layers[0]
    m, f = layer.mixer, layer.ffn
    plain = isinstance(m, Attention) and m.rope is not None and isinstance(f, FeedForward) and f.gated
    if not plain or any(other != layer for other in spec.layers):
        raise ValueError("only layers of one kind, with rotary attention and a gated feed-forward, have a llama config")
    assert isinstance(m, Attention)
    assert m.rope is not None
    assert isinstance(f, FeedForward)
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size, "intermediate_size": f.width, "num_hidden_layers": len(spec.layers),
        "num_attention_heads": m.num_heads, "num_key_value_heads": m.num_kv_heads, "head_dim": m.head_dim,
        "hidden_act": f.activation, "rms_norm_eps": layer.norm.eps, "rope_theta": m.rope.theta,
        "max_position_embeddings": spec.max_position, "tie_word_embeddings": spec.tie_embeddings,
        "bos_token_id": spec.bos_token_id, "eos_token_id": list(spec.eos_token_ids), "torch_dtype": spec.dtype,
    }  # fmt: skip


def export(model: SpecModule, tokenizer: Path, out: Path) -> None:
    """Write config.json, model.safetensors (bfloat16) and the tokenizer's files to `out`, the weights last."""
    from penstock.families.llama import Llama

    out.mkdir(parents=True, exist_ok=True)
    try:
        config = llama_config(model.spec)
        places = Llama().weight_map(model.spec)
    except ValueError:
        # No published family has this shape: logical names, and the spec itself beside them.
        config = {"architectures": ["PenstockRecipe"], "recipe": True}
        places = {name: name for name in model.named_weights()}
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (tokenizer / name).resolve() != (out / name).resolve():
            shutil.copy(tokenizer / name, out / name)
    tensors = {
        str(places[name]): p.detach().to("cpu", torch.bfloat16).contiguous()
        for name, p in model.named_weights().items()
    }
    part = out / "model.safetensors.part"
    save_file(tensors, part, metadata={"format": "pt"})
    part.replace(out / "model.safetensors")


def read_weights(folder: Path, spec: ModelSpec) -> dict[str, npt.NDArray[np.float32]]:
    """The weights of a folder that `export` wrote, by logical name."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    if config.get("recipe"):
        from safetensors.torch import load_file

        return {name: t.float().numpy() for name, t in load_file(folder / "model.safetensors").items()}
    checkpoint = open_model(folder)
    if checkpoint.spec.layers != spec.layers:
        raise ValueError(f"{folder} holds another shape than the recipe")
    return load_weights(checkpoint, checkpoint.spec, "float32")
