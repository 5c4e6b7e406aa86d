"""Nemotron-H against transformers: hybrids of Mamba-2, attention without positions, MLPs and experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import NemotronHConfig, NemotronHForCausalLM

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import Attention, Experts, FeedForward, Mamba2
from penstock.families.nemotron_h import NemotronH
from penstock.families.registry import open_model, read_spec
from penstock.weights.load import load_weights
from tests.models.parity import check, save, vary
from tests.oracle import NaiveModel
from tests.paged import Paged
from tests.shared import shared
from tests.unit.formats.test_formats import refusal

V = 97
CASES: dict[str, dict[str, Any]] = {
    "dense": {"hybrid_override_pattern": "M-MM*-*M-", "mlp_bias": True, "n_groups": 2},
    "begins with an MLP": {"hybrid_override_pattern": "-M--*M-*", "use_bias": True, "n_groups": 4},
    "experts": {
        "hybrid_override_pattern": "ME*EM-", "n_groups": 1, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
        "routed_scaling_factor": 2.5, "use_conv_bias": False,
    },
    "experts of a latent width": {
        "hybrid_override_pattern": "ME*EMEME", "n_groups": 2, "n_routed_experts": 6, "num_experts_per_tok": 3,
        "n_group": 1, "topk_group": 1, "moe_latent_size": 12,
    },
}  # fmt: skip


def reference(case: str, time_step_min: float = 1e-30) -> NemotronHForCausalLM:
    """A random model. transformers raises the time step of prompts to `time_step_min`, a setting of training, and not
    that of single tokens; by default it is too small to matter here."""
    config = NemotronHConfig(
        vocab_size=V, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=40,
        ssm_state_size=7, mamba_num_heads=8, mamba_head_dim=6, chunk_size=16, moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=20, time_step_min=time_step_min, bos_token_id=None,
        eos_token_id=None, pad_token_id=None, **CASES[case],
    )  # fmt: skip
    return vary(NemotronHForCausalLM(config), len(case), norms=0.2, biases=0.3, gain=1.5, buffers=True)


@pytest.mark.parametrize("case", list(CASES))
def test_logits_and_greedy_text_equal_transformers(case: str, tmp_path: Path) -> None:
    model = reference(case)
    model.set_experts_implementation("eager")  # the grouped product that is the default has no float64
    found = check(save(model, tmp_path), model, length=90, max_model_len=300, count_params=False)
    weights = load_weights(open_model(tmp_path), found.spec, "float32")
    ids = np.random.default_rng(len(case)).integers(0, V, 40).tolist()
    want = NaiveModel(found.spec, weights).logits(ids)
    np.testing.assert_array_equal(Paged(found.spec, weights, block_size=8).chunked("a", ids, (7, 30, 1)), want)


@pytest.mark.parametrize("case", list(CASES))
def test_the_floor_of_the_time_step_is_all_that_differs_from_transformers(case: str, tmp_path: Path) -> None:
    """With time steps as small as published weights have, transformers' logits of a prompt are off by more than 1e-2:
    from ours, and from its own, token by token, whose floor it forgets. `time_step_limit` puts the same floor under
    every token here, and nothing is left of it."""
    floor = 0.001
    model = reference(case, time_step_min=floor)  # the default, as in published configs
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("dt_bias"):
                p.sub_(4.0)
    model.save_pretrained(tmp_path)
    ids = np.random.default_rng(len(case)).integers(0, V, 120).tolist()
    with torch.no_grad():
        prompt = model(torch.tensor([ids])).logits[0].numpy()
        first, past = 8, None  # the first run has no cache, so it goes the way of prompts
        alone = []
        for chunk in [ids[:first], *([i] for i in ids[first:])]:
            out = model(torch.tensor([chunk]), past_key_values=past, use_cache=True)
            past = out.past_key_values
            alone.append(out.logits[0].numpy())
    assert np.abs(np.concatenate(alone) - prompt).max() > 1e-2

    def ours() -> np.ndarray:
        checkpoint = open_model(tmp_path)
        weights = load_weights(checkpoint, checkpoint.spec, "float32")
        return Paged(checkpoint.spec, weights, max_model_len=128, block_size=8).one_go("a", ids)

    assert np.abs(ours() - prompt).max() > 1e-2
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"time_step_limit": [floor, {"__float__": "Infinity"}]}
    path.write_text(json.dumps(config))
    np.testing.assert_allclose(ours(), prompt, atol=1e-4)


def test_blocks_pair_up_to_layers(tmp_path: Path) -> None:
    """A mixer takes the feed-forward behind it; whatever is left alone is half a layer."""
    halves = []
    for case in CASES.values():
        NemotronHConfig(architectures=["NemotronHForCausalLM"], **case).save_pretrained(tmp_path)
        spec = read_spec(tmp_path)
        halves.append([(type(layer.mixer), type(layer.ffn)) for layer in spec.layers])
    m, a, f, e, none = Mamba2, Attention, FeedForward, Experts, type(None)
    assert halves[0] == [(m, f), (m, none), (m, none), (a, f), (a, none), (m, f)]
    assert halves[1] == [(none, f), (m, f), (none, f), (a, none), (m, f), (a, none)]
    assert halves[2] == [(m, e), (a, e), (m, f)]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("nvidia--Nemotron-H-56B-Base-8K", 56_324_350_464),
        ("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 31_577_940_288),
        ("nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8", 120_668_707_840),
    ],
)
def test_parameters_of_published_configs(name: str, count: int) -> None:
    """As many as transformers has, the router's correction (a buffer there) included."""
    path = shared("data", "configs", "model", f"{name}.config.json")
    assert read_spec(path).num_params == count
    config = json.loads(path.read_text())
    config["head_dim"] = config.get("attention_head_dim", config.get("head_dim"))
    with torch.device("meta"):
        model = NemotronHForCausalLM(NemotronHConfig(**config))
    corrections = sum(b.numel() for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))
    assert model.num_parameters() + corrections == count


@pytest.mark.parametrize(
    ("changes", "message", "kind"),
    [
        ({"hybrid_override_pattern": "M-X"}, "'X'", UnsupportedError),
        ({"hybrid_override_pattern": ""}, "num_hidden_layers", ModelError),
        ({"num_hidden_layers": 5}, "num_hidden_layers as 5", ModelError),
        ({"layers_block_type": ["mamba", "mlp", "moe"]}, "hybrid_override_pattern differs", ModelError),
        ({"hybrid_override_pattern": None, "layers_block_type": ["conv"]}, "'conv'", UnsupportedError),
        ({"moe_latent_size": 16, "hybrid_override_pattern": "ME", "n_routed_experts": 4, "mlp_bias": True},
         "mlp_bias", UnsupportedError),
        ({"attention_bias": True}, "attention_bias", UnsupportedError),
        ({"mamba_proj_bias": True}, "mamba_proj_bias", UnsupportedError),
        ({"sliding_window": 128}, "sliding_window", UnsupportedError),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps", UnsupportedError),
    ],
)  # fmt: skip
def test_refused_by_name(changes: dict[str, Any], message: str, kind: type[ModelError]) -> None:
    config = {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 32, "vocab_size": V,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "mamba_num_heads": 8, "mamba_head_dim": 6,
        "n_groups": 2, "hybrid_override_pattern": "M-*",
    }  # fmt: skip
    assert NemotronH().spec(config).num_params > 0
    assert message in refusal(lambda: NemotronH().spec(config | changes), kind=kind)
