"""Llama and the families around it against transformers: tiny random checkpoints, logits and greedy text.

How the comparison is made stands in parity.py, what is compared in llama_like_cases.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from penstock.backends.native.obstacle import native_obstacle
from penstock.families.registry import open_model
from penstock.weights.load import load_weights
from tests.models.llama_like_cases import CASES, MAX_MODEL_LEN, make, restored
from tests.models.parity import VOCAB, check, oracle, save
from tests.paged import Paged


@pytest.mark.parametrize("name", CASES)
def test_families_equal_transformers(name: str, tmp_path: Path) -> None:
    """Texts under longrope are either longer or shorter than the original context throughout, as max_model_len is:
    which factors hold is fixed by it here, and by the length of the text in transformers."""
    case = CASES[name]
    model = make(name)
    family = name.split("-")[0]
    folder = save(model, tmp_path, case.edit)
    if (tensors := restored(model, family)) is not None:
        save_file(tensors, folder / "model.safetensors")
    result = check(folder, model, max_model_len=MAX_MODEL_LEN)
    assert result.spec.family == family
    assert native_obstacle(result.spec) is None, "all of it runs natively, so the check did that, too"


# --- weights and caches in bfloat16, shards


def rounded(model: Any) -> Any:
    """The same with every parameter rounded to bfloat16. Buffers stay: transformers keeps rope tables in float32."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())
    return model


def save_bfloat16(model: Any, folder: Path) -> None:
    model.save_pretrained(folder, state_dict={k: v.bfloat16() for k, v in model.state_dict().items()})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "bfloat16"}))


@pytest.mark.parametrize(
    "name", ["llama-default", "qwen2-full", "gemma2-alternating", "phi3-partial", "olmo2-plain", "cohere-qk_norm"]
)
def test_bfloat16_checkpoints_equal_the_rounded_model(name: str, tmp_path: Path) -> None:
    model = rounded(make(name))
    save_bfloat16(model, tmp_path)
    result = check(tmp_path, model, max_model_len=MAX_MODEL_LEN)
    assert result.spec.dtype == "bfloat16"
    assert {ref.tensor.dtype for ref in open_model(tmp_path).weights.values()} == {"BF16"}


@pytest.mark.parametrize("name", ["llama-llama3", "gemma2-alternating"])
def test_a_bfloat16_cache_changes_logits_by_little(name: str, tmp_path: Path) -> None:
    """Keys and values are rounded by up to 2^-9 of their size, which reaches the logits through softmax and two layers.

    Bound: an error of 1/20 of the logits' spread in the mean square; it is well above that of the float32 cache."""
    model = make(name)
    checkpoint = open_model(save(model, tmp_path, CASES[name].edit))
    weights = load_weights(checkpoint, checkpoint.spec, "float32")
    ids = np.random.default_rng(3).integers(3, VOCAB, 60).tolist()
    want = oracle(model.double(), ids)
    got = Paged(checkpoint.spec, weights, max_model_len=MAX_MODEL_LEN, kv_dtype="bfloat16").one_go("a", ids)
    assert 1e-3 < float(np.sqrt(np.mean((got - want) ** 2)) / np.std(want)) < 0.05


@pytest.mark.parametrize("name", ["llama-tied", "phi3-partial"])
def test_shards_are_put_together(name: str, tmp_path: Path) -> None:
    model = make(name)
    model.save_pretrained(tmp_path, max_shard_size="12KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check(tmp_path, model, max_model_len=MAX_MODEL_LEN)


@pytest.mark.parametrize("name", ["ministral-mixed", "hyperclovax-both", "cohere2-kinds"])
def test_the_other_attention_backend_equals_transformers(name: str, tmp_path: Path) -> None:
    model = make(name)
    check(save(model, tmp_path, CASES[name].edit), model, max_model_len=MAX_MODEL_LEN, attention="ref-online")
