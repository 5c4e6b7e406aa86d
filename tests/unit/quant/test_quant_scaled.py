"""FP8 and MXFP4: values are those of torch and transformers, and folders that hold them open, load and compute."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from penstock.base.errors import UnsupportedError
from penstock.families.quantized import is_readable
from penstock.families.registry import open_model
from penstock.weights import load as weights_module
from penstock.weights.load import load_weights
from penstock.weights.stored.scaled import E2M1, E4M3, fp8, mxfp4
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


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (130, 257), (300, 64), (5, 1000)])
@pytest.mark.parametrize("chunk", [100, 1 << 20])
def test_fp8_blocks_equal_torch(shape: tuple[int, int], chunk: int) -> None:
    torch.manual_seed(1)
    stored = (torch.randn(shape) * 30).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128)) + 0.01
    wide = scales.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    want = (stored.float() * wide).numpy()
    parts = list(fp8(stored.view(torch.uint8).numpy().reshape(-1), shape, scales.numpy(), chunk))
    assert len(parts) > 1 or chunk > 100 or shape[0] == 1
    np.testing.assert_array_equal(bits(np.concatenate(parts).reshape(shape)), bits(want))


def scalar_mxfp4(code: int, exponent: int) -> float:
    """One element from its four bits, sign, two of exponent, one of mantissa, as the specification writes it."""
    sign, e, m = code >> 3, code >> 1 & 3, code & 1
    value = Fraction(m, 2) if e == 0 else Fraction(2 + m, 2) * 2 ** (e - 1)
    return float((-1) ** sign * value * Fraction(2) ** (exponent - 127))


@pytest.mark.parametrize("chunk", [40, 1 << 20])
def test_mxfp4_equals_the_specification_and_transformers(chunk: int) -> None:
    rng = np.random.default_rng(2)
    blocks = rng.integers(0, 256, (2, 6, 3, 16), dtype=np.uint8)
    scales = rng.integers(100, 150, (2, 6, 3), dtype=np.uint8)
    got = np.concatenate(list(mxfp4(blocks.reshape(-1), scales, chunk)))
    want = [
        scalar_mxfp4(int(byte) >> shift & 15, int(scale))
        for block, scale in zip(blocks.reshape(-1, 16), scales.reshape(-1), strict=True)
        for byte in block for shift in (0, 4)
    ]  # fmt: skip
    np.testing.assert_array_equal(got, want)
    theirs = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
    np.testing.assert_array_equal(got.reshape(2, 6, 96).swapaxes(1, 2), theirs.numpy())
    with np.errstate(over="ignore"):
        ends = np.concatenate(list(mxfp4(np.full(32, 7, np.uint8), np.array([0, 255], np.uint8), chunk)))
    assert ends[0] == 6 * 2.0**-127
    assert np.isnan(ends[32:]).all()


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
    assert seen[-1][0] == seen[-1][1] == sum(ref.tensor.nbytes for ref in checkpoint.weights.values())
    assert {ref.tensor.dtype for ref in checkpoint.weights.values()} == {"BF16", "F8_E4M3"}


def test_broken_fp8_folders_are_refused(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    folder = tmp_path / "m"
    write_fp8(folder, **{name + "_scale_inv": torch.ones(1, 1)})
    refusal(lambda: open_model(folder), name, "do not go with it")
    write_fp8(folder, **{name + "_scale_inv": torch.ones(2, 2, dtype=torch.int8)})
    refusal(lambda: open_model(folder), name, "do not go with it")
    write_fp8(folder, **{name + "_scale_inv": None})
    refusal(lambda: open_model(folder), name, "F8_E4M3", kind=UnsupportedError)
    write_fp8(folder, **{"model.norm.weight_scale_inv": torch.ones(2, 2)})
    refusal(lambda: open_model(folder), "model.norm.weight_scale_inv", kind=UnsupportedError)
    for value in (float("nan"), float("inf"), 3e38):
        write_fp8(folder, **{name + "_scale_inv": torch.full((2, 2), value)})
        checkpoint = open_model(folder)
        refusal(lambda c=checkpoint: load_weights(c, c.spec, "float32"), name, "NaN or infinity")
    broken = torch.zeros(160, 200).to(torch.float8_e4m3fn)
    broken.view(torch.uint8)[3, 4] = 0x7F
    write_fp8(folder, **{name: broken})
    checkpoint = open_model(folder)
    refusal(lambda: load_weights(checkpoint, checkpoint.spec, "bfloat16"), name, "NaN or infinity")


@pytest.mark.parametrize("change", [
    {"weight_block_size": [64, 64]}, {"weight_block_size": None}, {"activation_scheme": "static"}, {"fmt": "e5m2"},
    {"quant_method": "fbgemm_fp8"}, {"quant_method": None}, {"kv_cache_scheme": "fp8"}, {"quantized_layers": {}},
])  # fmt: skip
def test_other_kinds_of_fp8_are_refused_by_name(tmp_path: Path, change: dict[str, Any]) -> None:
    assert is_readable(FP8)
    assert not is_readable(FP8 | change)
    write_fp8(tmp_path / "m", FP8 | change)
    method = (FP8 | change)["quant_method"] or "unnamed"
    refusal(lambda: open_model(tmp_path / "m"), method, kind=UnsupportedError)


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
    ids = rng.integers(0, 40, 30).tolist()
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0].numpy()
    assert want.std() > 0.5
    got = Paged(checkpoint.spec, weights, num_slabs=100, block_size=8).one_go("a", ids)
    np.testing.assert_allclose(got, want, atol=2e-4)
    shaped = stored | {"model.layers.0.mlp.experts.down_proj_scales": torch.zeros(3, 32, 1, dtype=torch.uint8)}
    save_file(shaped, tmp_path / "model.safetensors")
    refusal(lambda: open_model(tmp_path), "model.layers.0.mlp.experts.down_proj_scales", "do not go with it")
    name = "model.embed_tokens.weight"
    odd = {k: v for k, v in stored.items() if k != name}
    odd |= {name + "_blocks": torch.zeros(1, 40, 1, 16, dtype=torch.uint8),
            name + "_scales": torch.zeros(1, 40, 1, dtype=torch.uint8)}  # fmt: skip
    save_file(odd, tmp_path / "model.safetensors")
    refusal(lambda: open_model(tmp_path), name, "MXFP4", kind=UnsupportedError)
