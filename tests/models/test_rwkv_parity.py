"""RWKV-4 against transformers: tiny random checkpoints, saved and opened as folders (catalogue row C30).

Folders of RWKV-7 are compared in test_gguf_architectures.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import RwkvConfig, RwkvForCausalLM

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import Rwkv7
from penstock.families.registry import open_model
from penstock.families.rwkv import RwkvFamily
from penstock.families.rwkv7 import Rwkv7Family
from tests.models.parity import VOCAB, check, random_model, save

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True, "intermediate_size": 40, "layer_norm_epsilon": 1e-3},
    "deep": {"num_hidden_layers": 5, "rescale_every": 0},
}


def reference(case: str, **more: Any) -> RwkvForCausalLM:
    config = RwkvConfig(
        **{"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 8} | CASES[case] | more
    )
    return random_model(RwkvForCausalLM, config, seed=list(CASES).index(case))


@pytest.mark.parametrize("case", list(CASES))
def test_C30_logits_and_greedy_text_equal_transformers(tmp_path: Path, case: str) -> None:
    """60 tokens, though the config says a context length of 8: that is how it was trained, not what it can read."""
    model = reference(case)
    assert check(save(model, tmp_path), model).spec.max_position == 2**20


def test_halving_the_residual_changes_nothing_but_the_reach_of_eps(tmp_path: Path) -> None:
    """`rescale_every` makes transformers divide by 2 again and again; a norm divides the same out, but for its eps."""
    ids = torch.tensor([np.random.default_rng(0).integers(0, VOCAB, 40).tolist()])
    specs, logits = [], []
    for every in (0, 1):
        model = reference("deep", rescale_every=every)
        specs.append(open_model(save(model, tmp_path / str(every))).spec)
        with torch.no_grad():
            logits.append(model.double()(ids, use_cache=False).logits[0].numpy())
    assert specs[0] == specs[1]
    # Halved five times, the residual meets an eps that is 1024 times as large for it.
    assert 0 < np.abs(logits[1] - logits[0]).max() < 5e-3


@pytest.mark.parametrize(
    ("change", "culprit"),
    [
        ({"attention_hidden_size": 64}, "attention_hidden_size"),
        ({"use_flash_rwkv": True}, "use_flash_rwkv"),
        ({"architectures": ["RWKV6ForCausalLM"], "model_type": "rwkv6", "auto_map": {"AutoModel": "x.Y"}}, "RWKV6"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path: Path, change: dict[str, Any], culprit: str) -> None:
    folder = save(reference("plain"), tmp_path, lambda config: config.update(change))
    with pytest.raises(UnsupportedError, match=culprit):
        open_model(folder)


RWKV7: dict[str, Any] = {
    "architectures": ["RWKV7ForCausalLM"], "model_type": "rwkv7", "vocab_size": 65536, "hidden_size": 2048,
    "num_hidden_layers": 24, "head_dim": 64,
}  # fmt: skip


@pytest.mark.parametrize(("change", "culprit"), [
    ({"head_dim": 48}, "head_dim 48"), ({"hidden_act": "relu"}, "hidden_act"), ({"attn": {"layers": [3]}}, "attn"),
    ({"norm_first": False}, "norm_first"), ({"decay_low_rank_dim": 0}, "decay_low_rank_dim"), ({"new": 1}, "new"),
])  # fmt: skip
def test_rwkv_7_of_another_kind_is_refused_by_name(change: dict[str, Any], culprit: str) -> None:
    with pytest.raises(ModelError, match=culprit):
        Rwkv7Family().spec(RWKV7 | change)


def test_ranks_that_rwkv_7_leaves_open_are_the_published_ones() -> None:
    """Those of the model of this shape with 1.5 billion parameters, 2024: 96, 96, 64 and 256."""
    first, second, *_ = Rwkv7Family().spec(RWKV7).layers
    assert isinstance(first.mixer, Rwkv7)
    assert isinstance(second.mixer, Rwkv7)
    m = second.mixer
    assert (m.decay_rank, m.rate_rank, m.value_rank, m.gate_rank) == (96, 96, 64, 256)
    assert (first.mixer.value_rank, first.mixer.first, m.num_heads) == (0, True, 32)


def test_absent_fields_mean_what_transformers_means() -> None:
    spec, config = RwkvFamily().spec({"model_type": "rwkv"}), RwkvConfig()
    assert (spec.vocab_size, spec.hidden_size, len(spec.layers)) == (50277, 4096, config.num_hidden_layers)
    assert spec.layers[0].ffn is not None
    assert spec.layers[0].ffn.width == config.intermediate_size  # type: ignore[union-attr]
    assert spec.final_norm is not None
    assert spec.final_norm.eps == config.layer_norm_epsilon
    assert spec.eos_token_ids == (config.eos_token_id,)
