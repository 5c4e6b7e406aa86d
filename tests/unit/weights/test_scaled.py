"""FP8 and MXFP4: values are those of torch and transformers, and folders that hold them open, load and compute."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from penstock.base.errors import UnsupportedError
from penstock.base.small_floats import E2M1, E4M3
from penstock.core.matrix_format import MatrixFormat, Shared
from penstock.families.checkpoint import Codes
from penstock.families.quantization.scaled import MXFP4
from penstock.families.registry import open_model, read_model
from penstock.ops.stored import StoredMatrix
from penstock.weights import load as weights_module
from penstock.weights.load import load_weights
from penstock.weights.stored.eight import ByteMatrix
from penstock.weights.stored.fp4 import Fp4Matrix
from tests.codes import kept
from tests.paged import Paged
from tests.unit.families.test_families import TINY, tiny_tensors
from tests.unit.formats.test_formats import refusal

FP8: dict[str, Any] = {
    "quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head"],
}  # fmt: skip


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, np.float32).view(np.uint32)


def test_every_code_has_the_value_that_torch_gives_it() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    want = codes.view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(E4M3, want)  # NaN equals NaN here
    np.testing.assert_array_equal(np.signbit(E4M3[[0, 128]]), [False, True])
    assert np.isnan(E4M3).sum() == 2
    assert sorted(set(E2M1)) == [-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]


@pytest.mark.parametrize("block", [(128, 128), (64, 32), (1, 0), (0, 0)])
@pytest.mark.parametrize("shape", [(128, 128), (130, 257), (300, 64), (5, 1000)])
def test_fp8_of_blocks_equals_torch(shape: tuple[int, int], block: tuple[int, int]) -> None:
    torch.manual_seed(1)
    stored = (torch.randn(shape) * 30).to(torch.float8_e4m3fn)
    rows, columns = block[0] or shape[0], block[1] or shape[1]
    scales = torch.rand(-(-shape[0] // rows), -(-shape[1] // columns)) + 0.01
    wide = scales.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]
    codes = Codes("bytes", MatrixFormat("e4m3", 8, (Shared("float32", *block),)))
    arrays = {"codes": stored.view(torch.uint8).numpy().reshape(-1), "scales": scales.numpy()}
    made = ByteMatrix(codes, arrays, shape, np.dtype(np.float32), None)
    want = (stored.float() * wide).numpy()
    np.testing.assert_array_equal(bits(made.values()), bits(want))
    np.testing.assert_array_equal(bits(made.values(2, 4)), bits(want[2:4]))
    assert made.fault() is None
    some = ByteMatrix(codes, arrays, (2, shape[1]), np.dtype(np.float32), np.array([4, 1]))
    np.testing.assert_array_equal(bits(some.values()), bits(want[[4, 1]]))


def scalar_mxfp4(code: int, exponent: int) -> float:
    """One element from its four bits, sign, two of exponent, one of mantissa, as the specification writes it."""
    sign, e, m = code >> 3, code >> 1 & 3, code & 1
    value = Fraction(m, 2) if e == 0 else Fraction(2 + m, 2) * 2 ** (e - 1)
    return float((-1) ** sign * value * Fraction(2) ** (exponent - 127))


def test_mxfp4_equals_the_specification_and_transformers() -> None:
    rng = np.random.default_rng(2)
    blocks = rng.integers(0, 256, (2, 6, 3, 16), dtype=np.uint8)
    scales = rng.integers(100, 150, (2, 6, 3), dtype=np.uint8)
    got = stack(blocks, scales).values().reshape(2, 6, 96)
    want = [
        scalar_mxfp4(int(byte) >> shift & 15, int(scale))
        for block, scale in zip(blocks.reshape(-1, 16), scales.reshape(-1), strict=True)
        for byte in block for shift in (0, 4)
    ]  # fmt: skip
    np.testing.assert_array_equal(got.reshape(-1), want)
    theirs = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
    np.testing.assert_array_equal(got.swapaxes(1, 2), theirs.numpy())
    np.testing.assert_array_equal(stack(blocks, scales, rows=np.array([7, 2])).values(), got.reshape(12, 96)[[7, 2]])
    least = stack(np.full((1, 1, 1, 16), 0x77, np.uint8), np.zeros((1, 1, 1), np.uint8))
    assert least.values()[0, 0] == 6 * 2.0**-127
    assert least.fault() is None
    for exponent in (253, 255):
        broken = stack(blocks, np.full((2, 6, 3), exponent, np.uint8))
        assert "NaN or infinity" in str(broken.fault())


def stack(blocks: np.ndarray, scales: np.ndarray, rows: np.ndarray | None = None) -> Fp4Matrix:
    """All experts, one below the other, or `rows` of that."""
    codes = Codes("fp4", MXFP4, numbers={"divides": 0.0})
    arrays = {"codes": blocks.reshape(-1), "scales": scales}
    shape = (scales[..., 0].size if rows is None else len(rows), scales.shape[-1] * 32)
    return Fp4Matrix(codes, arrays, shape, np.dtype(np.float32), rows)


# --- folders

WIDE: dict[str, Any] = TINY | {"hidden_size": 160, "intermediate_size": 200, "torch_dtype": "bfloat16"}


def write_fp8(folder: Path, quantization: dict[str, Any] = FP8, **changes: Any) -> dict[str, torch.Tensor]:
    """A Llama folder whose linear layers are FP8; the values they stand for, float32, by name."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(WIDE | {"quantization_config": quantization}))
    torch.manual_seed(0)
    stored: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for name, array in tiny_tensors(WIDE).items():
        tensor = torch.from_numpy(array)
        if "proj" not in name:
            stored[name] = tensor.bfloat16()
            values[name] = stored[name].float()
            continue
        rows, columns = tensor.shape
        scale = torch.rand(-(-rows // 128), -(-columns // 128)) + 0.1
        wide = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        stored[name] = (tensor / wide).to(torch.float8_e4m3fn)
        stored[name + "_scale_inv"] = scale
        values[name] = stored[name].float() * wide
    stored |= changes
    save_file({k: v for k, v in stored.items() if v is not None}, folder / "model.safetensors")
    return values


@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_an_fp8_folder_loads_what_torch_decodes(tmp_path: Path, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "_CHUNK", 1000)
    values = write_fp8(tmp_path / "m")
    checkpoint = open_model(tmp_path / "m")
    seen: list[tuple[int, int]] = []
    loaded = load_weights(checkpoint, checkpoint.spec, wanted, lambda done, total: seen.append((done, total)))
    for logical, ref in checkpoint.weights.items():
        tensor = values[ref.tensor.name]
        if wanted == "float32":
            np.testing.assert_array_equal(bits(loaded[logical]), bits(tensor.numpy()))
        else:
            np.testing.assert_array_equal(loaded[logical], tensor.bfloat16().view(torch.uint16).numpy())
    (tmp_path / "config.json").write_bytes((tmp_path / "m" / "config.json").read_bytes())
    assert dict(read_model(tmp_path).stored) == checkpoint.stored
    assert seen[-1][0] == seen[-1][1] == sum(ref.tensor.nbytes for ref in checkpoint.weights.values())
    assert {ref.tensor.dtype for ref in checkpoint.weights.values()} == {"BF16", "F8_E4M3"}


def test_broken_fp8_folders_are_refused(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    folder = tmp_path / "m"
    write_fp8(folder, **{name + "_scale_inv": torch.ones(1, 2)})
    refusal(lambda: open_model(folder), name, "(1, 2)", "128 x 128 of a matrix of 160 x 200")
    write_fp8(folder, **{name + "_scale_inv": torch.ones(2, 2, dtype=torch.int8)})
    refusal(lambda: open_model(folder), name, "weight_scale_inv of type I8")
    write_fp8(folder, **{name + "_scale_inv": None})
    refusal(lambda: open_model(folder), name, "F8_E4M3", kind=UnsupportedError)
    write_fp8(folder, **{"model.norm.weight_scale_inv": torch.ones(2, 2)})
    refusal(lambda: open_model(folder), "model.norm.weight", "is the checkpoint compressed")
    write_fp8(folder, **{name + "_scale": torch.ones(1)})
    refusal(lambda: open_model(folder), name, "weight_scale_inv and weight_scale", "leave one out")
    write_fp8(folder, **{name: torch.zeros(160, 200, dtype=torch.bfloat16)})
    refusal(lambda: open_model(folder), name, "BF16", "is the checkpoint compressed")
    for value in (float("nan"), float("inf"), 3e38):
        write_fp8(folder, **{name + "_scale_inv": torch.full((2, 2), value)})
        checkpoint = open_model(folder)
        refusal(lambda c=checkpoint: load_weights(c, c.spec, "float32"), name, "NaN or infinity")
    broken = torch.zeros(160, 200).to(torch.float8_e4m3fn)
    broken.view(torch.uint8)[3, 4] = 0x7F
    write_fp8(folder, **{name: broken})
    checkpoint = open_model(folder)
    refusal(lambda: load_weights(checkpoint, checkpoint.spec, "bfloat16"), name, "NaN or infinity")


@pytest.mark.parametrize(
    "form", ["the matrix", "the outputs", "the outputs as a vector", "static", "fbgemm", "ue8m0", "ModelOpt"]
)
def test_fp8_of_the_matrix_and_of_outputs_is_read(tmp_path: Path, form: str) -> None:
    """Scales of inputs, which others round as they go, are read over."""
    name = "model.layers.1.mlp.down_proj.weight"
    scale = {"the outputs": torch.rand(160, 1) + 1, "the outputs as a vector": torch.rand(160) + 1}.get(
        form, torch.tensor(0.5)
    )
    config = {"quant_method": "fp8", "activation_scheme": "static" if form == "static" else "dynamic"}
    more: dict[str, Any] = {name + "_scale_inv": None, name + "_scale": scale}
    wide = scale.reshape(-1, 1)
    if form == "fbgemm":
        config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": None}
        more[name + "_scale"] = wide = torch.rand(160, 1) + 1
    elif form == "static":
        more[name.replace("weight", "input_scale")] = torch.tensor(2.0)
    elif form == "ModelOpt":
        config = {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}
        more[name + "_scale"] = torch.rand(2, 1, 2, 1) + 1
        wide = more[name + "_scale"].reshape(2, 2).repeat_interleave(128, 0)[:160]
        wide = wide.repeat_interleave(128, 1)[:, :200]
    elif form == "ue8m0":
        config |= {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
        exponents = torch.tensor([[126, 127], [128, 120]], dtype=torch.uint8)
        more = {name + "_scale_inv": exponents.view(torch.float8_e8m0fnu)}
        wide = exponents.view(torch.float8_e8m0fnu).float().repeat_interleave(128, 0)[:160]
        wide = wide.repeat_interleave(128, 1)[:, :200]
    write_fp8(tmp_path / "m", **more)
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    if form != "ue8m0":
        tensors = {k: v for k, v in tensors.items() if not k.endswith("_scale_inv")}
        tensors = {k: v.bfloat16() if "proj" in k and "down" not in k else v for k, v in tensors.items()}
        tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(160, 200, dtype=torch.bfloat16)
        save_file(tensors, tmp_path / "m" / "model.safetensors")
    (tmp_path / "m" / "config.json").write_text(json.dumps(WIDE | {"quantization_config": config}))
    found = kept(tmp_path / "m")["layers.1.down"]
    assert isinstance(found, StoredMatrix)
    np.testing.assert_array_equal(bits(found.values()), bits((tensors[name].float() * wide).numpy()))


@pytest.mark.parametrize(("change", "says"), [
    ({"weight_block_size": [0, 64]}, "weight_block_size"), ({"weight_block_size": "128"}, "weight_block_size"),
    ({"activation_scheme": "hybrid"}, "activation_scheme"), ({"fmt": "e5m2"}, "fmt e5m2"),
    ({"quant_method": "quark"}, "'quark'"), ({"quant_method": None}, "unnamed"), ({"expert_dtype": "fp6"}, "fp6"),
    ({"kv_cache_scheme": "fp8"}, "kv_cache_scheme"),
])  # fmt: skip
def test_other_kinds_of_fp8_are_refused_by_name(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    write_fp8(tmp_path / "m", FP8 | change)
    refusal(lambda: open_model(tmp_path / "m"), says, kind=UnsupportedError)


def test_a_gpt_oss_folder_in_mxfp4_computes_what_transformers_does_with_decoded_weights(tmp_path: Path) -> None:
    config = GptOssConfig(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=3, num_experts_per_tok=2, sliding_window=8,
        max_position_embeddings=128, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0}, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(3)
    model = GptOssForCausalLM(config).eval().float()
    rng = np.random.default_rng(3)
    stored: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1 if "norm" in name else 0))
            if not name.endswith(("gate_up_proj", "down_proj")):
                stored[name] = parameter.detach().clone()
                continue
            experts, inner, outer = parameter.shape
            blocks = torch.from_numpy(rng.integers(0, 256, (experts, outer, inner // 32, 16), dtype=np.uint8))
            scales = torch.from_numpy(rng.integers(122, 126, (experts, outer, inner // 32), dtype=np.uint8))
            parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            stored[name + "_blocks"], stored[name + "_scales"] = blocks, scales
    plain = config.to_dict() | {"architectures": ["GptOssForCausalLM"], "dtype": "float32"}
    plain["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    save_file(stored, tmp_path / "model.safetensors")
    checkpoint = open_model(tmp_path)
    weights = load_weights(checkpoint, checkpoint.spec, "float32")
    state = model.state_dict()
    for i in range(3):
        theirs = state["model.layers.1.mlp.experts.gate_up_proj"][i].numpy()
        np.testing.assert_array_equal(weights[f"layers.1.experts.{i}.gate"], theirs[:, 0::2].T)
        np.testing.assert_array_equal(weights[f"layers.1.experts.{i}.up"], theirs[:, 1::2].T)
        down = state["model.layers.1.mlp.experts.down_proj"][i].numpy()
        np.testing.assert_array_equal(weights[f"layers.1.experts.{i}.down"], down.T)
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "config.json").write_bytes((tmp_path / "config.json").read_bytes())
    assert dict(read_model(tmp_path / "plan").stored) == checkpoint.stored
    assert set(checkpoint.stored.values()) == {MXFP4}
    for logical, matrix in kept(tmp_path).items():
        if ".experts." in logical and not logical.endswith("bias"):
            assert isinstance(matrix, StoredMatrix)
            np.testing.assert_array_equal(matrix.values(), weights[logical])
    ids = rng.integers(0, 40, 30).tolist()
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0].numpy()
    assert want.std() > 0.5
    got = Paged(checkpoint.spec, weights, num_slabs=100, block_size=8).one_go("a", ids)
    np.testing.assert_allclose(got, want, atol=2e-4)
    shaped = stored | {"model.layers.0.mlp.experts.down_proj_scales": torch.zeros(3, 32, 1, dtype=torch.uint8)}
    save_file(shaped, tmp_path / "model.safetensors")
    refusal(lambda: open_model(tmp_path), "model.layers.0.mlp.experts.down_proj_blocks", "scales of type U8")
    name = "model.embed_tokens.weight"
    odd = {k: v for k, v in stored.items() if k != name}
    odd |= {name + "_blocks": torch.zeros(1, 40, 1, 16, dtype=torch.uint8),
            name + "_scales": torch.zeros(1, 40, 1, dtype=torch.uint8)}  # fmt: skip
    save_file(odd, tmp_path / "model.safetensors")
    refusal(lambda: open_model(tmp_path), name, "of a stack that a weight has whole", kind=UnsupportedError)
