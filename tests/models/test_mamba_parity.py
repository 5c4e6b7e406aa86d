"""Mamba and Mamba-2 against transformers: tiny random checkpoints, saved and opened as folders (catalogue row C34).

transformers runs a prompt in the parallel form where there is one (Mamba-2's chunked scan, here in chunks of 16) and
single tokens in the recurrent form; ours is one form.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

from penstock.families.registry import open_model
from penstock.weights.load import load_weights
from tests.models.parity import VOCAB, check, save, vary
from tests.oracle import NaiveModel
from tests.paged import Paged

MAMBA: dict[str, dict[str, Any]] = {
    "plain": {},
    "biased": {"use_bias": True, "conv_kernel": 3, "time_step_rank": 5, "tie_word_embeddings": False},
    "no conv bias": {"use_conv_bias": False, "expand": 3, "state_size": 16, "conv_kernel": 2},
}
MAMBA2: dict[str, dict[str, Any]] = {
    "plain": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "groups": {"num_heads": 8, "head_dim": 8, "n_groups": 4, "use_bias": True},
    "no conv bias": {
        "num_heads": 4, "head_dim": 16, "n_groups": 2, "use_conv_bias": False, "conv_kernel": 2,
        "tie_word_embeddings": True,
    },
    "group per head": {"num_heads": 3, "head_dim": 32, "n_groups": 3, "expand": 3, "conv_kernel": 3},
    "time step limit": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "time_step_limit": (0.1, 0.6)},
}  # fmt: skip
CASES = [("mamba", case) for case in MAMBA] + [("mamba2", case) for case in MAMBA2]
Model = MambaForCausalLM | Mamba2ForCausalLM


def reference(family: str, case: str) -> Model:
    """A random model in which every kind of parameter matters; decays from slow to fast."""
    common: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 7, "bos_token_id": None,
        "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    if family == "mamba":
        model: Model = MambaForCausalLM(MambaConfig(**(common | MAMBA[case])))
    else:
        model = Mamba2ForCausalLM(Mamba2Config(chunk_size=16, **(common | MAMBA2[case])))
    return vary(model, 10 + CASES.index((family, case)), norms=0.2, gain=1.5)


@pytest.mark.parametrize(("family", "case"), CASES)
def test_C34_logits_and_greedy_text_equal_transformers(family: str, case: str, tmp_path: Path) -> None:
    """Longer than a chunk of the parallel form, and shorter than the convolution."""
    model = reference(family, case)
    found = check(save(model, tmp_path), model, length=90, max_model_len=300)
    weights = load_weights(open_model(tmp_path), found.spec, "float32")
    ids = np.random.default_rng(3).integers(0, VOCAB, 40).tolist()
    want = NaiveModel(found.spec, weights).logits(ids)
    np.testing.assert_array_equal(Paged(found.spec, weights).chunked("a", ids, (2, 1, 16)), want)
