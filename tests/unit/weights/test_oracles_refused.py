"""Quantised folders that are broken, contradict themselves or are of a kind that is not read: one sentence each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.base.errors import UnsupportedError
from penstock.core.held_weights import HeldWeights
from penstock.families.quantization.settings import is_spared
from penstock.families.registry import open_model
from penstock.weights.load import load_weights
from tests.quantised import LOGICAL, MODULE, Stored, write
from tests.speed import cpu_within
from tests.unit.formats.test_formats import refusal
from tests.unit.weights.test_oracles import CASES

NAN, INF = float("nan"), float("inf")
U8, I32 = torch.uint8, torch.int32


def zeros(*shape: int, dtype: torch.dtype = I32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


CT, NV, FP8, MX = (f"compressed-tensors: {name}" for name in ("4 bits", "nvfp4", "fp8 of outputs", "mxfp4"))
ASYMMETRIC, NF4, NESTED = "compressed-tensors: 4 bits asymmetric", "bitsandbytes: nf4", "bitsandbytes: nf4 nested"


@pytest.mark.parametrize(("case", "changes", "says"), [
    (CT, {"weight_packed": zeros(32, 7)}, ("weight_packed", "7 words", "64 inputs", "4 bits")),
    (CT, {"weight_packed": zeros(32, 0)}, ("weight_packed", "int32 words")),
    (CT, {"weight_packed": zeros(32, 8, dtype=torch.int64)}, ("weight_packed", "I64")),
    (CT, {"weight_shape": torch.tensor([32, 1 << 40])}, ("weight_packed", "weight_shape", "1099511627776")),
    (CT, {"weight_shape": torch.tensor([31, 64])}, ("weight_packed", "31 x 64")),
    (CT, {"weight_shape": torch.tensor([32, 64, 1])}, ("weight_packed", "weight_shape", "two integers")),
    (CT, {"weight_scale": None}, ("weight_packed", "no weight_scale")),
    (CT, {"weight_scale": torch.ones(32, 3)}, ("weight_packed", "weight_scale", "(32, 3)", "group of 32")),
    (CT, {"weight_scale": torch.ones(32, 2, dtype=torch.int32)}, ("weight_packed", "weight_scale of type I32")),
    (CT, {"weight_g_idx": zeros(63)}, ("weight_packed", "weight_g_idx", "(64,)")),
    (CT, {"weight": torch.ones(32, 64)}, ("weight_packed and weight", "leave one out")),
    (ASYMMETRIC, {"weight_zero_point": zeros(3, 2)}, ("weight_packed", "weight_zero_point", "(4, 2)")),
    (ASYMMETRIC, {"weight_zero_point": torch.zeros(4, 2)}, ("weight_packed", "weight_zero_point", "F32")),
    (FP8, {"weight": torch.ones(32, 64, dtype=torch.bfloat16)}, ("BF16", "weight_scale", "compressed")),
    (FP8, {"weight_scale": torch.ones(31, 1)}, ("down_proj.weight", "weight_scale", "(31, 1)")),
    (FP8, {"weight_scale": torch.ones(2, 2)}, ("down_proj.weight", "weight_scale", "(2, 2)")),
    (FP8, {"weight": None}, ("down_proj.weight_scale", "no weight")),
    (NV, {"weight_global_scale": None}, ("weight_packed", "no weight_global_scale")),
    (NV, {"weight_global_scale": torch.ones(2)}, ("weight_packed", "one float32")),
    (NV, {"weight_scale": torch.ones(32, 3).to(torch.float8_e4m3fn)}, ("weight_packed", "(32, 4)")),
    (NV, {"weight_packed": zeros(32, 31, dtype=U8)}, ("weight_packed", "weight_scale", "E4M3")),
    (MX, {"weight_scale": torch.ones(32, 2)}, ("weight_packed", "E8M0 in bytes")),
    (NF4, {"weight": zeros(511, 1, dtype=U8)}, ("down_proj.weight", "511 bytes", "16 x 64")),
    (NF4, {"weight.absmax": torch.ones(15)}, ("down_proj.weight", "absmax", "16 blocks of 64")),
    (NF4, {"weight.absmax": zeros(16, dtype=U8)}, ("down_proj.weight", "absmax", "float32")),
    (NF4, {"weight.quant_map": torch.ones(15)}, ("down_proj.weight", "quant_map", "16 float32")),
    (NF4, {"weight.quant_map": torch.full((16,), NAN)}, ("down_proj.weight", "quant_map", "NaN")),
    (NF4, {"weight.quant_state.bitsandbytes__nf4": None}, ("down_proj.weight", "0 quant_state")),
    (NF4, {"weight.quant_state.bitsandbytes__nf4": zeros(5000, dtype=U8)}, ("quant_state", "4096 bytes")),
    (NF4, {"weight.quant_state.bitsandbytes__nf4": zeros(9, dtype=U8)}, ("quant_state",)),
    (NESTED, {"weight.nested_absmax": torch.ones(2)}, ("down_proj.weight", "nested_absmax", "each 256 of 16")),
    (NESTED, {"weight.nested_quant_map": torch.ones(255)}, ("down_proj.weight", "nested_quant_map")),
    ("bitsandbytes: int8", {"SCB": torch.ones(15)}, ("down_proj.weight", "SCB", "(16,)")),
    ("bitsandbytes: int8", {"weight_format": torch.tensor(1, dtype=U8)}, ("down_proj.weight", "other than row")),
    ("bitsandbytes: int8", {"weight": torch.ones(16, 64)}, ("down_proj.weight", "int8")),
    ("hqq: 4 bits", {"W_q": zeros(15, 32, dtype=U8)}, ("W_q", "480 bytes", "512 are needed")),
    ("hqq: 4 bits", {"scale": torch.ones(31, 1, dtype=torch.float16)}, ("W_q", "scale", "32 groups")),
    ("hqq: 4 bits", {"zero": torch.ones(32, 1)}, ("W_q", "zero", "32 groups")),
    ("hqq: 4 bits", {"nbits": None}, ("W_q", "no nbits")),
    ("hqq: 4 bits", {"shape": torch.tensor([1 << 40, 1])}, ("W_q", "shape 1099511627776 x 1")),
    ("hqq: 4 bits", {"group_size": torch.tensor(7)}, ("W_q", "whole groups of 7")),
    ("modelopt: nvfp4", {"weight_scale_2": None}, ("down_proj.weight", "no weight_scale_2")),
    ("modelopt: nvfp4", {"weight": zeros(16, 31, dtype=U8)}, ("down_proj.weight", "weight_scale")),
    ("modelopt: fp8", {"weight_scale": torch.ones(3)}, ("down_proj.weight", "weight_scale", "(3,)")),
    ("gptq: 3 bits symmetric", {"qweight": zeros(5, 32)}, ("qweight", "53", "no multiple")),
    ("gptq: 3 bits symmetric", {"qzeros": zeros(2, 4)}, ("qweight", "its qzeros", "(2, 3)")),
    ("gptq: 4 bits symmetric", {"weight": torch.ones(32, 64)}, ("qweight", "leave one of the two out")),
    ("gptq: 4 bits symmetric", {"qweight": zeros(64, 4), "g_idx": None}, ("they would fit the quant_method awq",)),
    ("awq: groups of 32", {"qweight": zeros(8, 32)}, ("they would fit the quant_method gptq",)),
])  # fmt: skip
def test_tensors_that_do_not_go_together_are_refused_before_they_are_read(
    tmp_path: Path, case: str, changes: dict[str, Any], says: tuple[str, ...]
) -> None:
    folder = write(tmp_path / "m", CASES[case], **changes)
    message = refusal(lambda: open_model(folder), MODULE, *says)
    assert len(message) < 600


@pytest.mark.parametrize(("case", "part", "value", "says"), [
    (CT, "weight_scale", NAN, "NaN or infinity"), (CT, "weight_scale", INF, "NaN or infinity"),
    (FP8, "weight_scale", NAN, "NaN or infinity"), (FP8, "weight_scale", 3e38, "NaN or infinity"),
    (FP8, "weight", NAN, "NaN or infinity"), (NV, "weight_scale", NAN, "NaN or infinity"),
    (NV, "weight_global_scale", 0.0, "NaN or infinity"), (NV, "weight_global_scale", INF, "NaN or infinity"),
    (MX, "weight_scale", 255, "NaN or infinity"), (MX, "weight_scale", 254, "NaN or infinity"),
    ("compressed-tensors: mxfp8", "weight_scale", 255, "NaN or infinity"),
    (NF4, "weight.absmax", NAN, "NaN or infinity"), (NESTED, "weight.nested_absmax", INF, "NaN or infinity"),
    (NESTED, "weight.nested_quant_map", NAN, "NaN or infinity"),
    ("bitsandbytes: nf4 across rows", "weight.absmax", NAN, "NaN or infinity"),
    ("bitsandbytes: int8", "SCB", INF, "NaN or infinity"), ("bitsandbytes: int8", "SCB", 1e37, "NaN or infinity"),
    ("hqq: 4 bits", "scale", NAN, "NaN or infinity"),
    ("hqq: 4 bits axis 0", "zero", INF, "NaN or infinity"), ("modelopt: nvfp4", "weight_scale_2", NAN, "NaN"),
    ("gptq: 3 bits act-order", "g_idx", 2, "scales for 2 groups"), ("gptq: 2 bits symmetric", "g_idx", -1, "g_idx"),
    ("gptq: 8 bits symmetric", "scales", NAN, "NaN or infinity"),
    ("gptq: 2 bits symmetric", "qzeros", 0, "set sym false"),
])  # fmt: skip
@pytest.mark.parametrize("stays", [True, False])
def test_numbers_that_make_no_weights_are_refused_when_they_are_read(
    tmp_path: Path, case: str, part: str, value: float, says: str, stays: bool
) -> None:
    whole = CASES[case].parts["." + part].clone()
    if whole.dtype == torch.float8_e4m3fn:
        whole = whole.float()
        whole.view(-1)[3] = value
        whole = whole.to(torch.float8_e4m3fn)
    else:
        at = slice(None) if "quant_map" in part else min(3, whole.numel() - 1)  # not all of a table is used
        whole.view(-1)[at] = value
    checkpoint = open_model(write(tmp_path / "m", CASES[case], **{part: whole}))
    held = HeldWeights("float32", checkpoint.stored if stays else {})
    refusal(lambda: load_weights(checkpoint, checkpoint.spec, held), MODULE, says)


@pytest.mark.parametrize("case", ["compressed-tensors: 4 bits", "modelopt: fp8", "bitsandbytes: int8", NF4, NESTED])
def test_scales_of_zero_are_weights_of_zero(tmp_path: Path, case: str) -> None:
    part = {"compressed-tensors: 4 bits": "weight_scale", "modelopt: fp8": "weight_scale",
            "bitsandbytes: int8": "SCB", NF4: "weight.absmax", NESTED: "weight.nested_absmax"}[case]  # fmt: skip
    checkpoint = open_model(write(tmp_path / "m", CASES[case], **{part: CASES[case].parts["." + part] * 0}))
    found = load_weights(checkpoint, checkpoint.spec, "float32")[LOGICAL]
    assert case == NESTED or not found.any()


def config_of(case: str, **changes: Any) -> Stored:
    stored = CASES[case]
    return Stored(stored.config | changes, stored.parts, stored.values)


def weights_of(case: str, **changes: Any) -> Stored:
    config = json.loads(json.dumps(CASES[case].config))
    config["config_groups"]["group_0"]["weights"] |= changes
    return config_of(case, **config)


@pytest.mark.parametrize(("stored", "says"), [
    (config_of(CT, format="marlin-24"), "format marlin-24"), (config_of(CT, new=1), "new, a field"),
    (config_of(CT, sparsity_config={"format": "sparse-bitmask"}), "sparsity_config"),
    (config_of(CT, transform_config={"config_groups": {"R1": {}}}), "transform_config"),
    (config_of(CT, config_groups=[1]), "config_groups"), (config_of(CT, ignore="lm_head"), "ignore"),
    (weights_of(CT, num_bits=9), "num_bits 9"), (weights_of(CT, num_bits=True), "num_bits True"),
    (weights_of(CT, type="uint"), "type uint"), (weights_of(CT, strategy="attn_head"), "strategy attn_head"),
    (weights_of(CT, symmetric="no"), "symmetric"), (weights_of(CT, magic=2), "magic, a field"),
    (weights_of(CT, group_size=0), "group_size 0"), (weights_of(NV, group_size=64), "group_size 64"),
    (weights_of("compressed-tensors: fp8 of blocks", block_structure="ax1"), "block_structure"),
    (config_of("auto_round: auto_awq 4 bits", packing_format="auto_round:marlin"), "packing_format"),
    (config_of("auto_round: auto_awq 4 bits", bits=8), "other than 4 bits"),
    (config_of("auto_round: auto_awq 4 bits", data_type="mx_fp"), "data_type"),
    (config_of("auto_round: auto_awq 4 bits", extra_config={"x": {"rank": 4}}), "rank, a field"),
    (config_of("auto_round: auto_gptq 4 bits asymmetric", super_bits=6), "super_bits"),
    (config_of(NF4, bnb_4bit_quant_type="nf3"), "bnb_4bit_quant_type"), (config_of(NF4, four=1), "four, a field"),
    (config_of("hqq: 4 bits", quant_config={"scale_quant_params": {"nbits": 8}}), "scale_quant_params"),
    (config_of("hqq: 4 bits", quant_config={"weight_quant_params": {"nbits": [4], "axis": 1}}), "nbits [4]"),
    (config_of("hqq: 4 bits", quant_config={"weight_quant_params": [1]}), "weight_quant_params"),
    (config_of("hqq: 4 bits", quant_config={"weight_quant_params": {"nbits": 4, "axis": 2}}), "axis 2"),
    (config_of("modelopt: nvfp4", quant_algo="NVFP4_AWQ"), "quant_algo NVFP4_AWQ"),
    (config_of("modelopt: nvfp4", group_size=32), "group_size 32"),
    (config_of("modelopt: nvfp4", pre_quant_scale=True), "pre_quant_scale"),
    (config_of("gptq: 4 bits symmetric", checkpoint_format="gptq_p"), "gptq_p"),
    (config_of("gptq: 4 bits symmetric", dynamic={"+:.*": {"bits": 5}}), "bits 5"),
])  # fmt: skip
def test_settings_that_are_not_read_are_named(tmp_path: Path, stored: Stored, says: str) -> None:
    refusal(lambda: open_model(write(tmp_path / "m", stored)), "quantised with the method", says, kind=UnsupportedError)


@pytest.mark.parametrize(("case", "config", "says"), [
    (CT, {"quant_method": "gptq", "bits": 4, "group_size": 32}, ("compressed-tensors", "says gptq")),
    ("gptq: 4 bits symmetric", {}, ("gptq, awq or auto-round", "no quantization_config")),
    ("gptq: 4 bits symmetric", CASES[CT].config, ("gptq, awq or auto-round", "says compressed-tensors")),
    (NF4, CASES["hqq: 4 bits"].config, ("bitsandbytes", "says hqq")),
    ("hqq: 4 bits", {}, ("hqq", "no quantization_config")),
    (FP8, {}, ("weight_scale", "no quantization_config")),
])  # fmt: skip
def test_a_config_that_says_another_method_than_the_tensors_are_is_refused(
    tmp_path: Path, case: str, config: dict[str, Any], says: tuple[str, ...]
) -> None:
    stored = CASES[case]
    refusal(lambda: open_model(write(tmp_path / "m", Stored(config, stored.parts, stored.values))), MODULE, *says)


def test_two_formats_at_once_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", CASES["gptq: 4 bits symmetric"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"compression_config": CASES[CT].config}))
    refusal(lambda: open_model(folder), "quantization_config", "compression_config", "leave out")
    (folder / "config.json").write_text(json.dumps(config | {"compression_config": config["quantization_config"]}))
    assert LOGICAL in open_model(folder).stored, "the same twice is one"


def test_scales_of_activations_beforehand_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", CASES["modelopt: nvfp4"], pre_quant_scale=torch.ones(64))
    refusal(lambda: open_model(folder), "pre_quant_scale", "AWQ", kind=UnsupportedError)


def test_scales_of_caches_and_activations_are_read_over(tmp_path: Path) -> None:
    more = {"input_scale": torch.tensor(1.0), "k_scale": torch.tensor(0.5), "input_global_scale": torch.ones(1)}
    folder = write(tmp_path / "m", CASES[NV], **more)
    assert LOGICAL in open_model(folder).stored


def test_several_formats_lie_in_one_checkpoint(tmp_path: Path) -> None:
    """One matrix of each of two groups; patterns are never run, tensors say what is what."""
    words, fp8 = CASES[CT], CASES[FP8]
    groups = {"a": words.config["config_groups"]["group_0"], "b": fp8.config["config_groups"]["group_0"]}
    config = words.config | {"format": "mixed-precision", "config_groups": groups}
    for stored, code in ((words, "uint"), (fp8, "e4m3")):
        folder = write(tmp_path / code, Stored(config, stored.parts, stored.values))
        assert open_model(folder).stored[LOGICAL].code == code


def test_an_act_order_of_compressed_tensors_goes_by_its_g_idx(tmp_path: Path) -> None:
    stored = weights_of(CT, actorder="group")
    order = torch.arange(64, dtype=I32).flip(0) // 32
    checkpoint = open_model(write(tmp_path / "a", stored, weight_g_idx=order))
    assert checkpoint.stored[LOGICAL].ordered
    plain = load_weights(open_model(write(tmp_path / "b", stored)), checkpoint.spec, "float32")[LOGICAL]
    turned = load_weights(checkpoint, checkpoint.spec, "float32")[LOGICAL]
    scale = stored.parts[".weight_scale"].float().numpy()
    assert (turned[:, :32] == plain[:, :32] / scale[:, :1] * scale[:, 1:]).all()
    assert not (turned == plain).all()
    unsaid = open_model(write(tmp_path / "c", CASES[CT], weight_g_idx=order))
    refusal(lambda: load_weights(unsaid, unsaid.spec, "float32"), MODULE, "order of their own", "actorder")


def test_zero_points_of_early_files_are_signed_bytes(tmp_path: Path) -> None:
    stored = CASES["compressed-tensors: 4 bits asymmetric"]
    words = stored.parts[".weight_zero_point"]
    nibbles = torch.stack([words >> 4 * i & 15 for i in range(8)], 1).reshape(32, 2).to(torch.int8) - 8
    checkpoint = open_model(write(tmp_path / "m", stored, weight_zero_point=nibbles))
    found = load_weights(checkpoint, checkpoint.spec, "float32")[LOGICAL]
    assert torch.equal(torch.tensor(found).half(), stored.values)
    nibbles[5, 1] = -9
    beyond = open_model(write(tmp_path / "beyond", stored, weight_zero_point=nibbles))
    refusal(lambda: load_weights(beyond, beyond.spec, "float32"), MODULE, "from -9", "codes from -8")


@pytest.mark.parametrize(("name", "pattern", "spared"), [
    ("lm_head", "lm_head", True), ("model.layers.0.mlp.gate", "mlp.gate", True),
    ("model.layers.3.self_attn.q_proj", "model.layers.*.self_attn*", True),
    ("model.layers.3.mlp.up_proj", "model.layers.*.self_attn*", False),
    ("model.layers.3.mlp.up_proj", "re:.*mlp.*", True), ("model.layers.3.mlp.up_proj", r"re:.*\.up_proj$", True),
    ("model.layers.3.mlp.up_proj", "re:(a+)+$", False), ("x" * 10**5, "*a" * 10**4, False),
    ("model.layers.3.mlp.up_proj", "*up", False), ("model.layers.3.mlp.up_proj", "*up*", True),
])  # fmt: skip
def test_patterns_are_taken_for_what_they_say_and_never_run(name: str, pattern: str, spared: bool) -> None:
    assert is_spared(name, [pattern]) is spared


def test_hundreds_of_spared_names_beside_a_hundred_thousand_matrices_are_soon_looked_through() -> None:
    """As GLM-5 has them; each beside each took a minute. Found is what a look at each pattern finds."""
    patterns = [f"model.layers.{i}.self_attn.{part}" for i in range(80) for part in ("q", "k", "v", "o", "norm")]
    patterns += ["lm_head", "layers.7.mlp.gate", "a..b", "layers.9.m", "mlp.experts.3", "..", ".norm.weight"]
    names = [f"model.layers.{i}.{part}" for i in range(80) for part in ("self_attn.q_a", "mlp.gate", "mlp.up", "norm")]
    names += ["lm_head", "x.lm_head.y", "a..b", "xa..bx", "model.mlp.experts.33.up", "a.norm.weight", "", ".", "...."]
    for name in names:
        assert is_spared(name, patterns) is any(pattern in name for pattern in patterns), name
    with cpu_within(5):  # each beside each: 8 million comparisons
        many = (f"model.layers.{100 + i // 1000}.mlp.shared.{i}.up_proj" for i in range(20_000))
        assert not any(is_spared(name, patterns) for name in many)
