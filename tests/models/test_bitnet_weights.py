"""BitNet's ternary weights: packed as transformers packs them, and as they were trained, rounded when they are read.

The oracle is transformers' BitNetForCausalLM with the matrices that its own functions make of the stored ones.
Activations, which its layers round to 8 bits besides, stay what they are in both (docs/concepts/stored-weights.md).
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.base.errors import ModelError
from penstock.core.matrix_format import MatrixFormat
from penstock.families.registry import open_model, read_model
from penstock.ops.stored import StoredMatrix
from penstock.weights.load import load_weights
from tests.codes import kept
from tests.models.llama_like_cases import make
from tests.models.parity import check

with pytest.MonkeyPatch.context() as _patch:  # its functions are handed to a compiler, which nothing here needs
    _patch.setattr(torch, "compile", lambda function: function)
    bitnet: Any = importlib.import_module("transformers.integrations.bitnet")

PACKED = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
DIVIDED = {"quant_method": "bitnet", "modules_to_not_convert": None}
TRAINED = PACKED | {"quantization_mode": "online"}
NAME = "model.layers.1.mlp.down_proj"


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """What transformers' layers make of a matrix of training."""
    found: torch.Tensor = bitnet.WeightQuant.forward(None, weight)
    return found


def write(folder: Path, how: dict[str, Any], **more: Any) -> Any:
    """A folder of BitNet, and the model whose matrices are what it says."""
    model = make("bitnet-plain")
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not name.endswith("_proj.weight"):
                continue
            values = rounded(p)
            size = values.abs().max()
            if how is TRAINED:
                p.copy_(values)
                continue
            codes = torch.round(values / size)
            scale = size.reshape(1).to(more.get("scale", torch.float32))
            p.copy_(codes * (1 / scale.float()).reciprocal() if how is DIVIDED else codes * scale.float())
            tensors[name] = bitnet.pack_weights(codes.clone())
            tensors[name.removesuffix("weight") + "weight_scale"] = 1 / scale if how is DIVIDED else scale
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": how}
    (folder / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("how", [PACKED, DIVIDED, TRAINED], ids=["packed", "divided", "trained"])
def test_ternary_matrices_equal_transformers(tmp_path: Path, how: dict[str, Any]) -> None:
    model = write(tmp_path, how)
    found = check(tmp_path, model)
    assert found.spec.family == "bitnet"
    stored = open_model(tmp_path).stored
    assert len(stored) == 14
    assert {form.code for form in stored.values()} == {"uint"}
    assert {form.bits for form in stored.values()} == {2}
    (tmp_path / "model.safetensors").unlink()
    assert read_model(tmp_path / "config.json").stored.keys() == stored.keys(), "a plan knows as much"


@pytest.mark.parametrize("how", [PACKED, TRAINED], ids=["packed", "trained"])
def test_codes_stay_codes_and_are_bit_for_bit_the_values(tmp_path: Path, how: dict[str, Any]) -> None:
    model = write(tmp_path, how)
    weights = kept(tmp_path)
    for n in range(2):
        for name, stored in (("q", "self_attn.q_proj"), ("down", "mlp.down_proj"), ("gate", "mlp.gate_proj")):
            codes = weights[f"layers.{n}.{name}"]
            assert isinstance(codes, StoredMatrix)
            want = model.get_parameter(f"model.layers.{n}.{stored}.weight").detach().numpy()
            np.testing.assert_allclose(codes.values(), want, rtol=1e-6)
            np.testing.assert_array_equal(codes.codes(3, 9), (np.sign(want) + 1)[3:9])


def test_a_mean_is_rounded_to_the_type_of_the_file(tmp_path: Path) -> None:
    """Trained in bfloat16, a matrix is rounded to numbers of bfloat16, of the mean of all of it."""
    write(tmp_path, TRAINED)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_model(tmp_path)
    weights = load_weights(checkpoint, checkpoint.spec, "float32")
    want = rounded(tensors[f"{NAME}.weight"]).float().numpy()
    np.testing.assert_array_equal(weights["layers.1.down"], want)


def loaded(folder: Path) -> None:
    checkpoint = open_model(folder)
    load_weights(checkpoint, checkpoint.spec, "float32")


@pytest.mark.parametrize(("part", "value", "words"), [
    ("weight", torch.zeros(8, 56), "F32 of shape"), ("weight", torch.full((8, 56), 3, dtype=torch.uint8), "codes of 3"),
    ("weight_scale", torch.ones(2), "one number"), ("weight_scale", torch.full((1,), torch.nan), "NaN or infinity"),
    ("weight_scale", torch.ones(1, dtype=torch.int32), "I32"),
])  # fmt: skip
def test_matrices_that_are_none_are_refused(tmp_path: Path, part: str, value: torch.Tensor, words: str) -> None:
    write(tmp_path, PACKED)
    save_file(load_file(tmp_path / "model.safetensors") | {f"{NAME}.{part}": value}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=words):
        loaded(tmp_path)


@pytest.mark.parametrize(("change", "words"), [
    ({"use_rms_norm": True}, "use_rms_norm"), ({"linear_class": "bitblas"}, "linear_class"),
    ({"quantization_mode": "lazy"}, "quantization_mode"), ({"group_size": 64}, "group_size"),
])  # fmt: skip
def test_other_kinds_are_refused_by_name(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    write(tmp_path, PACKED)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=words):
        open_model(tmp_path)


def test_a_matrix_that_is_spared_stays_what_it_was(tmp_path: Path) -> None:
    write(tmp_path, TRAINED)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["down_proj"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_model(tmp_path)
    assert "layers.1.down" not in checkpoint.stored
    want = load_file(tmp_path / "model.safetensors")[f"{NAME}.weight"].numpy()
    np.testing.assert_array_equal(load_weights(checkpoint, checkpoint.spec, "float32")["layers.1.down"], want)
    assert isinstance(checkpoint.stored["layers.1.up"], MatrixFormat)
