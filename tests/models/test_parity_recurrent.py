"""RecurrentGemma, OLMo Hybrid, xLSTM and Zamba 2 against transformers."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.backends.native.obstacle import native_obstacle
from penstock.base.errors import ModelError
from penstock.core.model_spec import Attention, GatedDelta, GatedLru, Mamba2, Mlstm, ModelSpec, SharedBlock
from penstock.families.registry import find_family
from tests.models.parity import VOCAB, check, save, vary

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 46, "num_hidden_layers": 5, "num_attention_heads": 4,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
ZAMBA = {
    "num_attention_heads": 4, "n_mamba_heads": 8, "mamba_d_state": 6, "adapter_rank": 5, "max_position_embeddings": 192,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"],
}  # fmt: skip
XLSTM = {"num_heads": 4, "norm_reduction_force_float32": False, "autocast_kernel_dtype": "float32", "chunk_size": 16}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5}
UNTURNED = {"rope_type": "default", "rope_theta": None}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "recurrent_gemma": ("RecurrentGemma", {"num_key_value_heads": 1, "attention_window_size": 17}),
    "recurrent_gemma-wide": ("RecurrentGemma", {
        "lru_width": 40, "conv1d_width": 3, "block_types": ["attention", "recurrent"], "attention_bias": True,
        "num_key_value_heads": 2, "logits_soft_cap": 5.0, "attention_window_size": 23, "rope_theta": 100.0,
    }),
    "olmo_hybrid": ("OlmoHybrid", DELTA | {"max_position_embeddings": 192, "rope_parameters": UNTURNED}),
    "olmo_hybrid-turned": ("OlmoHybrid", {
        "max_position_embeddings": 192, "linear_allow_neg_eigval": False, "num_key_value_heads": 2,
        "linear_conv_kernel_dim": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
        "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention", "linear_attention"],
    }),
    "xlstm": ("xLSTM", XLSTM),
    "xlstm-wide": ("xLSTM", XLSTM | {
        "num_heads": 2, "qk_dim_factor": 1.0, "v_dim_factor": 1.5, "gate_soft_cap": 3.0, "output_logit_soft_cap": 4.0,
        "ffn_proj_factor": 1.3, "ffn_round_up_to_multiple_of": 8,
    }),
    "zamba2": ("Zamba2", ZAMBA),
    "zamba2-turned": ("Zamba2", ZAMBA | {
        "num_mem_blocks": 2, "use_shared_attention_adapter": True, "use_mem_rope": True, "mamba_ngroups": 2,
        "hidden_act": "silu", "time_step_min": 0.2,
    }),
}  # fmt: skip
KINDS: dict[str, set[type]] = {
    "recurrent_gemma": {GatedLru, Attention}, "olmo_hybrid": {GatedDelta, Attention}, "xlstm": {Mlstm},
    "zamba2": {Mamba2, SharedBlock},
}  # fmt: skip
GAINS = {"recurrent_gemma": 3.0}
"""Its embeddings are large, and tied to the output: layers that outweigh them little repeat the newest token."""
SEEDS: dict[str, int] = {"recurrent_gemma": 2, "recurrent_gemma-wide": 1}
MODULES = ("recurrent_gemma", "olmo_hybrid", "qwen3_next", "xlstm", "zamba2")


class _Wide:
    """The module torch, but what is called float32 there is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def wide(patch: pytest.MonkeyPatch) -> None:
    """transformers keeps states, gates and norms in float32 whatever type a model has; as oracle in float64."""
    for name in MODULES:
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        patch.setattr(module, "torch", _Wide())
    scan = importlib.import_module("transformers.models.recurrent_gemma.modeling_recurrent_gemma").RecurrentGemmaRglru
    patch.setattr(scan._rnn_scan, "__defaults__", (torch.float64,))
    patch.setattr(torch.Tensor, "float", torch.Tensor.double)


def config_of(case: str) -> Any:
    name, changes = CASES[case]
    fields = {**BASE, **changes}
    if name == "xLSTM":
        fields = {
            key: value for key, value in fields.items() if key not in ("intermediate_size", "num_attention_heads")
        }
    return getattr(transformers, f"{name}Config")(**fields)


def make(case: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        wide(patch)
        model = getattr(transformers, CASES[case][0] + "ForCausalLM")(config_of(case)).float()
    model = vary(model.to(torch.float32), seed=SEEDS.get(case, 0), gain=GAINS.get(case.split("-")[0], 1.0))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("recurrent_param"):
                p.copy_(-6.0 + 6.0 * torch.rand_like(p))  # from states that last to states that are gone at once
            elif "norm" in name and case.startswith("recurrent_gemma"):
                p.sub_(1.0)  # these norms keep their weights minus one
    plain = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            wide(patch)
            return plain(*args, **kwargs)

    model.forward = forward
    return model


def restore(path: Path) -> None:
    """What transformers 5.23 writes otherwise than published files have it: a norm of attention layers is called as
    that of recurrent ones, and convolutions of queries, keys and values are cut into three equal parts."""
    tensors = load_file(path)
    for name in [name for name in tensors if ".q_conv1d." in name]:
        names = [name.replace(".q_conv1d.", f".{part}_conv1d.") for part in "qkv"]
        rows = [len(tensors[n.replace("conv1d", "proj")]) for n in names]
        parts = torch.cat([tensors[n] for n in names]).split(rows)
        tensors |= {n: part.contiguous() for n, part in zip(names, parts, strict=True)}
    attends = {match[1] for name in tensors if (match := re.search(r"layers\.(\d+)\.self_attn", name))}
    moved = re.compile(r"layers\.(\d+)\.feedforward_layer_norm")

    def stored(name: str) -> str:
        match = moved.search(name)
        return (
            name.replace("feedforward_", "post_attention_").replace("layer_norm", "layernorm")
            if (match and match[1] in attends)
            else name
        )

    save_file({stored(name): tensor for name, tensor in tensors.items()}, path)


def _sent(spec: ModelSpec) -> ModelSpec:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=ModelSpec)


@pytest.mark.parametrize("case", CASES)
def test_recurrent_layers_equal_transformers(case: str, tmp_path: Path) -> None:
    model = make(case)
    save(model, tmp_path)
    if case.startswith("olmo"):
        restore(tmp_path / "model.safetensors")
    found = check(tmp_path, model)
    assert found.spec.family == case.split("-")[0]
    assert native_obstacle(found.spec) is None, "or the native column is left out"
    assert _sent(found.spec) == found.spec, "as ranks are sent it"
    assert {type(layer.mixer) for layer in found.spec.layers} == KINDS[found.spec.family]


def fields_of(case: str, **changes: Any) -> dict[str, Any]:
    """Its config.json; `changes`: None takes a field out."""
    fields = config_of(case).to_dict() | {"architectures": [f"{CASES[case][0]}ForCausalLM"]} | changes
    return {key: value for key, value in fields.items() if value is not None}


@pytest.mark.parametrize("name", ["RecurrentGemma", "OlmoHybrid", "xLSTM", "Zamba2"])
def test_absent_fields_mean_what_transformers_takes_for_them(name: str) -> None:
    """A config.json of bare sizes gives the same spec as transformers' config of these sizes, written out in full."""
    sizes: dict[str, Any] = {"vocab_size": 260_000, "hidden_size": 512, "num_hidden_layers": 9}
    sizes |= {} if name == "xLSTM" else {"num_attention_heads": 32, "intermediate_size": 128}
    sizes |= {"layers_block_type": ["mamba", "hybrid", "mamba"] * 3} if name == "Zamba2" else {}
    full = getattr(transformers, f"{name}Config")(**sizes).to_dict()
    bare = sizes | {"architectures": [f"{name}ForCausalLM"]}
    family = find_family(bare)
    assert family.spec(full).layers == family.spec(bare).layers


PUBLISHED: dict[str, dict[str, Any]] = {
    "RecurrentGemma": {"num_key_value_heads": 1, "intermediate_size": 15360},
    "OlmoHybrid": {"rope_parameters": UNTURNED},
    "xLSTM": {},
    "Zamba2": {"use_shared_attention_adapter": True, "num_mem_blocks": 2, "n_mamba_heads": 80},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_of_real_size_have_as_many_parameters_as_transformers_counts(name: str) -> None:
    config = getattr(transformers, f"{name}Config")(**PUBLISHED[name])
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    count = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    fields = config.to_dict() | {"architectures": [f"{name}ForCausalLM"]}
    spec = find_family(fields).spec({key: value for key, value in fields.items() if value is not None})
    assert spec.num_params == count > 10**9


@pytest.mark.parametrize(("case", "changes", "words"), [
    ("recurrent_gemma", {"block_types": ["recurrent", "linear"]}, "layers of the kind 'linear'"),
    ("recurrent_gemma", {"lru_width": 33}, "num_attention_heads 4 does not divide lru_width 33"),
    ("recurrent_gemma", {"intermediate_size": 45}, "must be even"),
    ("recurrent_gemma", {"hidden_activation": "relu2"}, "gated by relu2"),
    ("recurrent_gemma", {"lru_heads": 3}, "'lru_heads'"),
    ("olmo_hybrid", {"linear_num_value_heads": 3}, "linear_num_key_heads 2 does not divide linear_num_value_heads 3"),
    ("olmo_hybrid", {"hidden_act": "gelu"}, "hidden_act to 'gelu'"),
    ("xlstm", {"use_bias": True}, "use_bias to 'True'"),
    ("xlstm", {"weight_mode": "fused"}, "weight_mode to 'fused'"),
    ("xlstm", {"num_heads": 5}, "num_heads 5 does not divide"),
    ("zamba2", {"layers_block_type": ["hybrid"]}, "kinds of 1 layers, but the model has 5"),
    ("zamba2", {"layers_block_type": ["attention"] * 5}, "layers of the kind 'attention'"),
    ("zamba2", {"add_bias_linear": True}, "add_bias_linear to 'True'"),
    ("zamba2", {"n_mamba_heads": 7}, "n_mamba_heads 7"),
    ("zamba2-turned", {"num_key_value_heads": 2}, "as many key-value heads"),
])  # fmt: skip
def test_what_they_do_not_compute_is_refused(case: str, changes: dict[str, Any], words: str) -> None:
    config = fields_of(case)
    find_family(config).spec(config)
    with pytest.raises(ModelError, match=words):
        find_family(config).spec(config | changes)
