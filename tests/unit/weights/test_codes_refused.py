"""Checkpoints of codes that are broken, hostile or of a kind that is not read: one sentence that names the culprit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.base.errors import UnsupportedError
from penstock.core.held_weights import HeldWeights
from penstock.families.registry import open_model, read_model
from penstock.weights.load import load_weights
from tests.codes import MODEL, Kind, coded, kept, write
from tests.unit.formats.test_formats import refusal


@pytest.mark.parametrize(("kind", "change", "says"), [
    (Kind(), {"bits": 5}, "bits 5"), (Kind(), {"bits": 16}, "bits 16"), (Kind(), {"bits": True}, "bits True"),
    (Kind(), {"bits": "4"}, "bits 4"), (Kind(), {"bits": None}, "bits None"),
    (Kind(), {"group_size": 0}, "group_size 0"),
    (Kind(), {"group_size": -2}, "group_size -2"), (Kind(), {"group_size": 10**30}, "group_size 1000"),
    (Kind(), {"group_size": [32]}, "group_size [32]"), (Kind(), {"checkpoint_format": "marlin"}, "marlin"),
    (Kind(), {"is_marlin_format": True}, "is_marlin_format"), (Kind(), {"checkpoint_format": "bitblas"}, "bitblas"),
    (Kind(), {"desc_act": "no"}, "desc_act"), (Kind(), {"sym": 1}, "sym 1"),
    (Kind(), {"rotation": "hadamard"}, "rotation"),
    (Kind(), {"adapter": {"path": "x"}}, "adapter"), (Kind(), {"pack_dtype": "int64"}, "int64"),
    (Kind(), {"dynamic": {"+:.*": {"bits": 8, "sym": False}}}, "sym"), (Kind(), {"dynamic": [1]}, "dynamic"),
    (Kind(), {"dynamic": {"+:(a+)+$": 3}}, "no object"), (Kind(), {"new\nfield": 1}, "not known"),
    (Kind("awq"), {"version": "gemv"}, "gemv"), (Kind("awq"), {"version": "marlin"}, "marlin"),
    (Kind("awq"), {"zero_point": False}, "zero_point"), (Kind("awq"), {"bits": 8}, "bits 8"),
    (Kind("awq"), {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
    (Kind("awq"), {"desc_act": True}, "desc_act"),
])  # fmt: skip
def test_settings_that_are_not_read_are_named(tmp_path: Path, kind: Kind, change: dict[str, Any], says: str) -> None:
    config = MODEL | {"quantization_config": kind.config | change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    refusal(lambda: open_model(tmp_path), repr(kind.method), says, kind=UnsupportedError)
    (tmp_path / "model.safetensors").unlink()
    refusal(lambda: read_model(tmp_path), repr(kind.method), says, kind=UnsupportedError)


def test_fields_by_which_nothing_changes_are_read_over(tmp_path: Path) -> None:
    for kind, change in (
        (Kind(), {"dynamic": {"-:.*lm_head": {}}, "meta": {"x": 1}, "static_groups": False, "desc_act": None}),
        (
            Kind("awq"),
            {
                "modules_to_not_convert": None,
                "w_bit": 4,
                "version": "GEMM",
                "do_fuse": False,
                "desc_act": False,
                "dynamic": {},
                "sym": True,
            },
        ),
    ):
        folder = write(tmp_path / kind.method, kind)
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] |= change
        (folder / "config.json").write_text(json.dumps(config))
        assert len(open_model(folder).stored) == 14


DOWN = "model.layers.1.mlp.down_proj."
"""64 outputs and 96 inputs: 3 groups of 32."""


def i32(*shape: int) -> np.ndarray[Any, Any]:
    return np.zeros(shape, np.int32)


@pytest.mark.parametrize(("kind", "part", "value", "says"), [
    (Kind(), "qweight", i32(11, 64), ("down_proj.qweight", "88", "no multiple")),
    (Kind(), "qweight", i32(8, 64), ("down_proj.qweight", "its scales", "(2, 64)")),
    (Kind(), "qweight", i32(12, 64, 1), ("down_proj.qweight", "int32 words")),
    (Kind(), "qweight", np.zeros((12, 64), np.float32), ("down_proj.qweight", "F32", "int32 words")),
    (Kind(), "qweight", i32(0, 64), ("down_proj.qweight", "int32 words")),
    (Kind(), "scales", np.ones((4, 64), np.float16), ("down_proj.qweight", "its scales", "(4, 64)")),
    (Kind(), "scales", np.ones((0, 64), np.float16), ("down_proj.qweight", "its scales")),
    (Kind(), "scales", np.ones((1 << 16, 64), np.float16), ("down_proj.qweight", "its scales", "65536")),
    (Kind(), "scales", np.ones((3, 64), np.int8), ("down_proj.qweight", "scales of type I8")),
    (Kind(), "scales", None, ("down_proj.qweight", "has no scales")),
    (Kind(), "qzeros", None, ("down_proj.qweight", "has no qzeros")),
    (Kind(), "qzeros", i32(3, 7), ("down_proj.qweight", "its qzeros", "(3, 8)")),
    (Kind(), "qzeros", np.zeros((3, 8), np.int64), ("down_proj.qweight", "its qzeros", "I64")),
    (Kind(), "g_idx", i32(95), ("down_proj.qweight", "its g_idx", "(96,)")),
    (Kind(ordered=True), "g_idx", None, ("down_proj.qweight", "no g_idx", "desc_act")),
    (Kind("awq"), "qweight", i32(96, 9), ("down_proj.qweight", "its scales")),
    (Kind("awq"), "qzeros", i32(2, 8), ("down_proj.qweight", "its qzeros")),
    (Kind("awq"), "g_idx", i32(90), ("down_proj.qweight", "its g_idx")),
])  # fmt: skip
def test_tensors_that_do_not_go_together_are_refused_before_they_are_read(
    tmp_path: Path, kind: Kind, part: str, value: Any, says: tuple[str, ...]
) -> None:
    folder = write(tmp_path / "m", kind, **{DOWN + part: value})
    refusal(lambda: open_model(folder), *says)


@pytest.mark.parametrize(("kind", "part", "at", "value", "says"), [
    (Kind(), "scales", (1, 5), np.nan, "NaN or infinity"), (Kind(), "scales", (2, 63), -np.inf, "NaN or infinity"),
    (Kind("awq"), "scales", (0, 0), np.inf, "NaN or infinity"),
    (Kind(ordered=True), "g_idx", 7, 3, "groups 0 to 3 (g_idx), but scales for 3"),
    (Kind(ordered=True), "g_idx", 7, -1, "groups -1 to 2"), (Kind(), "g_idx", 7, 2**31 - 1, "g_idx"),
    (Kind(), "g_idx", 7, 2, "set desc_act"), (Kind(), "qzeros", (1, 1), 0, "set sym false"),
    (Kind(group=-1, symmetric=False), "g_idx", 7, 1, "scales for 1 groups"),
])  # fmt: skip
@pytest.mark.parametrize("stays", [True, False])
def test_numbers_that_make_no_weights_are_refused_when_they_are_read(
    tmp_path: Path, kind: Kind, part: str, at: Any, value: float, says: str, stays: bool
) -> None:
    folder = write(tmp_path / "m", kind)
    tensors = load_file(folder / "model.safetensors")
    tensors[DOWN + part][at] = value
    save_file(tensors, folder / "model.safetensors")
    checkpoint = open_model(folder)
    held = HeldWeights("float32", checkpoint.stored if stays else {})
    refusal(lambda: load_weights(checkpoint, checkpoint.spec, held), "down_proj.qweight", says)


def test_scales_of_zero_are_weights_of_zero(tmp_path: Path) -> None:
    """Units that a model never uses have scales too small for a half: such files are sound."""
    folder = write(tmp_path / "m", Kind(), **{DOWN + "scales": np.zeros((3, 64), np.float16)})
    assert not kept(folder)["layers.1.down"].values().any()


def test_scales_whose_product_overflows_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", Kind(), **{DOWN + "scales": np.full((3, 64), 1e38, np.float32)})
    checkpoint = open_model(folder)
    assert checkpoint.stored["layers.1.down"].scales[0].dtype == "float32"
    refusal(lambda: load_weights(checkpoint, checkpoint.spec, "float32"), "down_proj.qweight", "infinity")


def test_inputs_that_fall_into_no_whole_groups_are_refused_by_name(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", Kind())
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["group_size"] = 128
    (folder / "config.json").write_text(json.dumps(config))
    refusal(lambda: open_model(folder), "down_proj.qweight", "96 inputs", "group_size 128")
    (folder / "model.safetensors").unlink()
    refusal(lambda: read_model(folder), "64 inputs", "group_size 128")


def test_a_matrix_of_another_shape_than_the_model_needs_is_refused(tmp_path: Path) -> None:
    parts, _ = coded(np.random.default_rng(0), 64, 64, Kind())
    changes = {DOWN + part: value for part, value in parts.items()}
    refusal(lambda: open_model(write(tmp_path / "m", Kind(), **changes)), "down_proj.qweight", "96")


def test_empty_biases_of_early_tools_are_read_over_and_others_are_not(tmp_path: Path) -> None:
    name = DOWN + "bias"
    assert open_model(write(tmp_path / "a", Kind(), **{name: np.zeros(64, np.float16)})).stored
    with_one = np.eye(1, 64, 3, dtype=np.float16)[0]
    refusal(lambda: open_model(write(tmp_path / "b", Kind(), **{name: with_one})), name, kind=UnsupportedError)


def test_a_bias_that_the_model_has_is_loaded(tmp_path: Path) -> None:
    config = MODEL | {"attention_bias": True}
    folder = write(tmp_path / "m", Kind(), config)
    checkpoint = open_model(folder)
    weights = load_weights(checkpoint, checkpoint.spec, "float32")
    assert weights["layers.0.q.bias"].any()


def test_other_bits_and_groups_of_some_matrices_are_told_by_their_tensors(tmp_path: Path) -> None:
    parts, values = coded(np.random.default_rng(0), 64, 96, Kind(bits=8, group=48))
    folder = write(tmp_path / "m", Kind(), **{DOWN + part: value for part, value in parts.items()})
    refusal(lambda: open_model(folder), "down_proj")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["dynamic"] = {"+:.*down_proj": {"bits": 8, "group_size": 48}, "-:.*x": {}}
    (folder / "config.json").write_text(json.dumps(config))
    found = kept(folder)["layers.1.down"]
    assert (found.format.bits, found.format.group) == (8, 48)
    np.testing.assert_array_equal(found.values(), values)
    assert open_model(folder).stored["layers.0.down"].bits == 4
