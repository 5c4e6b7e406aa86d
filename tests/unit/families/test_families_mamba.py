"""Families of state spaces: configs as they are published, understood to the last field or refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

from penstock.base.errors import ModelError, UnsupportedError
from penstock.config import from_kwargs
from penstock.core.machine import Machine
from penstock.core.model_spec import Mamba, Mamba2, ModelSpec, Norm
from penstock.families.registry import find_family, read_spec
from penstock.plan.resolve import resolve
from tests.unit.formats.test_formats import refusal

# The fields that conversions of the authors' checkpoints carry, sizes of mamba-130m.
MAMBA: dict[str, Any] = {
    "architectures": ["MambaForCausalLM"], "model_type": "mamba", "bos_token_id": 0, "conv_kernel": 4, "d_inner": 1536,
    "d_model": 768, "eos_token_id": 0, "expand": 2, "fused_add_norm": True, "hidden_act": "silu", "hidden_size": 768,
    "initializer_range": 0.1, "intermediate_size": 1536, "layer_norm_epsilon": 1e-05, "n_layer": 24,
    "num_hidden_layers": 24, "pad_token_id": 0, "pad_vocab_size_multiple": 8, "rescale_prenorm_residual": False,
    "residual_in_fp32": True, "rms_norm": True, "ssm_cfg": {}, "state_size": 16, "time_step_floor": 0.0001,
    "time_step_init_scheme": "random", "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 48,
    "time_step_scale": 1.0, "torch_dtype": "float32", "use_bias": False, "use_cache": True, "use_conv_bias": True,
    "vocab_size": 50280,
}  # fmt: skip
# Sizes of Codestral Mamba.
MAMBA2: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "bos_token_id": 0, "chunk_size": 256,
    "conv_kernel": 4, "eos_token_id": 2, "expand": 2, "head_dim": 64, "hidden_act": "silu", "hidden_size": 4096,
    "layer_norm_epsilon": 1e-05, "n_groups": 8, "norm_before_gate": True, "num_heads": 128, "num_hidden_layers": 64,
    "pad_token_id": 0, "residual_in_fp32": True, "rms_norm": True, "state_size": 128, "tie_word_embeddings": False,
    "time_step_limit": [0.0, math.inf], "time_step_rank": 256, "torch_dtype": "bfloat16", "use_bias": False,
    "use_conv_bias": True, "vocab_size": 32768,
}  # fmt: skip


def spec_of(base: dict[str, Any], **changes: Any) -> ModelSpec:
    config = {k: v for k, v in (base | changes).items() if v is not ...}
    return find_family(config).spec(config)


def test_published_configs() -> None:
    spec = spec_of(MAMBA)
    mixer = Mamba(inner=1536, state=16, conv=4, dt_rank=48)
    assert (spec.family, len(spec.layers), spec.final_norm) == ("mamba", 24, Norm(eps=1e-5))
    assert {layer.mixer for layer in spec.layers} == {mixer}
    assert {layer.ffn for layer in spec.layers} == {None}
    assert (spec.tie_embeddings, spec.bos_token_id, spec.eos_token_ids) == (True, 0, (0,))
    other = spec_of(MAMBA2)
    assert other.layers[9].mixer == Mamba2(num_heads=128, head_dim=64, state=128, groups=8, conv=4, eps=1e-5)
    assert (other.tie_embeddings, other.eos_token_ids, other.dtype) == (False, (2,), "bfloat16")


def test_parameters_are_as_many_as_transformers_has() -> None:
    with torch.device("meta"):
        first = MambaForCausalLM(MambaConfig(hidden_size=768, num_hidden_layers=24)).num_parameters()
        second = Mamba2ForCausalLM(Mamba2Config()).num_parameters()
    assert spec_of(MAMBA).num_params == first == 129_135_360
    assert spec_of(MAMBA2).num_params == second == 7_285_403_648


def test_absent_fields_are_transformers_defaults() -> None:
    few = ("architectures", "model_type", "hidden_size", "num_hidden_layers", "vocab_size", "torch_dtype")
    for base in (MAMBA, MAMBA2):
        assert spec_of({k: base[k] for k in few}) == spec_of(base)
    assert spec_of(MAMBA, time_step_rank="auto") == spec_of(MAMBA)


@pytest.mark.parametrize(
    ("limit", "wanted"),
    [
        ([0.0, math.inf], (0.0, math.inf)),
        ([0.0, {"__float__": "Infinity"}], (0.0, math.inf)),
        ([0.001, 1], (0.001, 1.0)),
        (None, (0.0, math.inf)),
    ],
)
def test_time_step_limits_in_all_spellings(tmp_path: Path, limit: object, wanted: tuple[float, float]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MAMBA2 | {"time_step_limit": limit}))
    mixer = read_spec(tmp_path).layers[0].mixer
    assert isinstance(mixer, Mamba2)
    assert (mixer.dt_min, mixer.dt_max) == wanted


@pytest.mark.parametrize(
    "limit", [[1], [0.5, 0.1], [-1, 2], [0, math.nan], [True, 2], ["0", 1], [0, 10**400], "none", 5]
)
def test_time_step_limits_that_are_none(limit: object) -> None:
    assert "time_step_limit" in refusal(lambda: spec_of(MAMBA2, time_step_limit=limit))


@pytest.mark.parametrize(
    ("base", "changes", "message", "kind"),
    [
        (MAMBA, {"hidden_act": "gelu"}, "hidden_act", UnsupportedError),
        (MAMBA, {"rms_norm": False}, "rms_norm", UnsupportedError),
        (MAMBA, {"ssm_cfg": {"layer": "Mamba2"}}, "ssm_cfg", UnsupportedError),
        (MAMBA, {"d_inner": 1000}, "d_inner", UnsupportedError),
        (MAMBA, {"n_layer": 23}, "n_layer", UnsupportedError),
        (MAMBA, {"time_step_limit": [0, 1]}, "time_step_limit", UnsupportedError),
        (MAMBA, {"attn_layer_idx": [3]}, "attn_layer_idx", UnsupportedError),
        (MAMBA, {"conv_kernel": 1}, "conv_kernel", ModelError),
        (MAMBA, {"time_step_rank": "much"}, "time_step_rank", ModelError),
        (MAMBA2, {"num_heads": 64}, "num_heads 64 x head_dim 64", ModelError),
        (MAMBA2, {"n_groups": 3}, "n_groups 3", ModelError),
        (MAMBA2, {"d_mlp": 4}, "d_mlp", UnsupportedError),
    ],
)  # fmt: skip
def test_refused_by_name(base: dict[str, Any], changes: dict[str, Any], message: str, kind: type[ModelError]) -> None:
    assert message in refusal(lambda: spec_of(base, **changes), kind=kind)


def test_planned_memory_does_not_grow_with_the_context() -> None:
    """Without a limit of positions in the config a million tokens may be asked for; a state costs what it costs."""
    spec = spec_of(MAMBA)
    assert spec.max_position == 2**20
    assert spec_of(MAMBA, max_position_embeddings=4096).max_position == 4096
    machine = Machine(num_cores=2, memory_bytes=16 * 2**30, available_bytes=8 * 2**30)
    config = from_kwargs(model="m", max_num_seqs=8)
    plan = resolve(config, spec, machine)
    state = 24 * 4 * (1536 * 3 + 1536 * 16)
    assert plan.max_model_len == 2**20
    assert plan.num_slabs == (8 + 16,)
    assert plan.kv_bytes == 24 * state
    short = resolve(from_kwargs(model="m", max_num_seqs=8, max_model_len=100), spec, machine)
    assert short.kv_bytes == plan.kv_bytes
