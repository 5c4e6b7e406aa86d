"""What is read of quantised files is what the libraries that wrote them decode.

compressed-tensors decodes here; the others' files and values lie in `tests/data/oracles`, made by `tools/oracles`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme

from penstock.core.held_weights import HeldWeights
from penstock.core.matrix_format import MatrixFormat, Shared
from penstock.families.quantization import METHODS, read_method
from penstock.families.quantization.bitsandbytes import TABLES
from penstock.families.registry import open_model, read_model
from penstock.ops.ref.product import linear
from penstock.ops.stored import StoredMatrix
from penstock.weights.load import load_weights
from penstock.weights.stored import STORED_FORMATS
from tests.codes import kept
from tests.quantised import LOGICAL, ORACLES, Stored, as_type, golden, write

GOLDEN = {
    f"{file.stem}: {case}": stored for file in sorted(ORACLES.glob("*")) for case, stored in golden(file.stem).items()
}
ACROSS = {"bitsandbytes: nf4 across rows", "hqq: 4 bits axis 0", "hqq: 3 bits axis 0", "hqq: 4 bits across rows"}
"""Groups go across rows: only values have a description."""


def group(bits: int, kind: str = "int", **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": "group", "group_size": 32} | more


HALF = torch.float16
FORMS: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    **{f"{bits} bits": ("pack-quantized", group(bits), torch.bfloat16) for bits in (2, 3, 4, 5, 6, 7, 8)},
    **{f"{bits} bits asymmetric": ("pack-quantized", group(bits, symmetric=False), HALF) for bits in (3, 4, 8)},
    "4 bits float16": ("pack-quantized", group(4), HALF),
    "4 bits float32": ("pack-quantized", group(4), torch.float32),
    "4 bits of outputs": ("pack-quantized", group(4, strategy="channel", group_size=None), torch.bfloat16),
    "4 bits of outputs asymmetric": (
        "pack-quantized", group(4, strategy="channel", group_size=None, symmetric=False), torch.bfloat16
    ),
    "4 bits of the matrix": ("pack-quantized", group(4, strategy="tensor", group_size=None), torch.bfloat16),
    "int8 of outputs": ("int-quantized", group(8, strategy="channel", group_size=None), torch.bfloat16),
    "int8 of the matrix": ("int-quantized", group(8, strategy="tensor", group_size=None), torch.bfloat16),
    "int8 asymmetric": ("int-quantized", group(8, strategy="channel", group_size=None, symmetric=False), torch.float16),
    "fp8 of outputs": ("float-quantized", group(8, "float", strategy="channel", group_size=None), torch.bfloat16),
    "fp8 of the matrix": ("float-quantized", group(8, "float", strategy="tensor", group_size=None), torch.bfloat16),
    "fp8 of blocks": (
        "float-quantized",
        group(8, "float", strategy="block", group_size=None, block_structure=[16, 24]), torch.bfloat16,
    ),
    "fp8 of blocks of 32": (
        "float-quantized",
        group(8, "float", strategy="block", group_size=None, block_structure=[16, 32]), torch.bfloat16,
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        group(4, "float", strategy="tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn"), torch.float32,
    ),
    "mxfp4": ("mxfp4-pack-quantized", group(4, "float", scale_dtype="torch.uint8"), torch.float32),
    "mxfp8": ("mxfp8-quantized", group(8, "float", scale_dtype="torch.uint8"), torch.float32),
}  # fmt: skip


def compressed(form: str, n: int = 32, k: int = 64) -> Stored:
    """A matrix that compressed-tensors has packed, and what it unpacks that to."""
    name, weights, dtype = FORMS[form]
    torch.manual_seed(5)
    w = (torch.randn(n, k) * 0.05).to(dtype)
    told = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    dynamic = {"num_bits": 8, "type": weights["type"], "symmetric": True, "strategy": "token", "dynamic": True}
    if name in ("int-quantized", "float-quantized"):
        told["input_activations"] = dynamic
    scheme = QuantizationScheme.model_validate(told | {"format": name})
    args = scheme.weights
    assert args is not None
    size = {"group": args.group_size, "tensor_group": args.group_size}.get(str(args.strategy), k)
    if args.strategy == "block":
        rows, columns = weights["block_structure"]
        shape = (-(-n // rows), -(-k // columns))
    elif args.strategy == "tensor":
        shape = (1,)
    else:
        shape = (n, k // size)
    most = 2.0 ** (args.num_bits - 1) if args.type == "int" else {4: 6.0, 8: 448.0}[args.num_bits]
    scale = (w.float().abs().max() / most * (0.6 + 0.4 * torch.rand(shape))).to(dtype)
    if "mx" in name:
        scale = torch.exp2(torch.floor(torch.log2(scale.float())))
    state: dict[str, torch.Tensor] = {"weight": w, "weight_scale": scale}
    if "nv" in name:
        whole = torch.tensor([448.0 * 6.0]) / w.abs().max()
        state |= {"weight_global_scale": whole, "weight_scale": (scale * whole).to(torch.float8_e4m3fn).float()}
    if not args.symmetric:
        state["weight_zero_point"] = torch.randint(int(-most) + 1, int(most) - 1, shape, dtype=torch.int8)
    library = BaseCompressor.get_value_from_registry(name)
    parts = library.compress(state, scheme)
    values = library.decompress(dict(parts), scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors", "format": name, "quantization_status": "compressed",
        "config_groups": {"group_0": told | {"format": name}}, "ignore": ["lm_head", "re:.*(a+)+$"],
        "kv_cache_scheme": None, "global_compression_ratio": None, "version": "0.20.0",
    }  # fmt: skip
    return Stored(config, {f".{key}": x for key, x in parts.items()}, values)


def old_packing(form: str) -> Stored:
    """The same with 32 // b codes to a word, as versions before packed 3, 5, 6 and 7 bits; by the definition."""
    new = compressed(form, 32, 64)
    bits = FORMS[form][1]["num_bits"]
    per = 32 // bits

    def repacked(words: torch.Tensor, count: int) -> torch.Tensor:
        rows = []
        for row in words.tolist():
            run = sum((word & 0xFFFFFFFF) << 32 * i for i, word in enumerate(row))
            codes = [run >> bits * i & (1 << bits) - 1 for i in range(count)]
            packed = [sum(c << bits * j for j, c in enumerate(codes[i : i + per])) for i in range(0, count, per)]
            rows.append([word - (1 << 32) if word >> 31 else word for word in packed])
        return torch.tensor(rows, dtype=torch.int32)

    n, k = new.values.shape
    parts = new.parts | {".weight_packed": repacked(new.parts[".weight_packed"], k)}
    if ".weight_zero_point" in parts:
        parts[".weight_zero_point"] = repacked(parts[".weight_zero_point"].T, n).T.contiguous()
    return Stored(new.config, parts, new.values)


CASES = (
    GOLDEN
    | {f"compressed-tensors: {form}": compressed(form) for form in FORMS}
    | {f"old packing: {form}": old_packing(form) for form in ("3 bits", "5 bits", "6 bits", "3 bits asymmetric")}
)


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Stored, Path]:
    stored = CASES[request.param]
    return request.param, stored, write(tmp_path_factory.mktemp("oracle") / "m", stored)


def test_values_are_those_of_the_library(case: tuple[str, Stored, Path]) -> None:
    name, stored, folder = case
    checkpoint = open_model(folder)
    decoded = load_weights(checkpoint, checkpoint.spec, "float32")[LOGICAL]
    assert torch.equal(as_type(np.asarray(decoded), stored.values.dtype), stored.values)
    assert stored.values.float().std() > 0.01
    held = kept(folder)[LOGICAL]
    assert isinstance(held, StoredMatrix) == (name not in ACROSS)
    if isinstance(held, StoredMatrix):
        np.testing.assert_array_equal(held.values(), decoded)
        np.testing.assert_array_equal(held.values(3, 9), decoded[3:9])
        np.testing.assert_array_equal(held.take(np.array([7, 0, 7])), decoded[[7, 0, 7]])


def test_a_run_of_rows_is_a_matrix_of_its_own(case: tuple[str, Stored, Path]) -> None:
    """What a rank has of a matrix: the same codes, scales and zeros, also of a run of a run."""
    held = kept(case[2])[LOGICAL]
    if not isinstance(held, StoredMatrix):
        return
    low, high = 1, held.shape[0] - 1
    inner = held.rows(low, high)
    for first, last, part in ((low, high, inner), (low + 2, low + 6, inner.rows(2, 6))):
        assert part.shape == (last - first, held.shape[1])
        assert part.size == (last - first) * held.shape[1]
        np.testing.assert_array_equal(part.values(), held.values(first, last))
        np.testing.assert_array_equal(part.values(1, 3), held.values(first + 1, first + 3))
        np.testing.assert_array_equal(part.take(np.array([2, 0])), held.take(np.array([first + 2, first])))
        np.testing.assert_array_equal(part.codes(0, 2), held.codes(first, first + 2))
        for a, b in zip(part.scales(1, 4), held.scales(first + 1, first + 4), strict=True):
            np.testing.assert_array_equal(a, b)
        if held.format.zeros:
            for a, b in zip(part.zeros(1, 4), held.zeros(first + 1, first + 4), strict=True):
                np.testing.assert_array_equal(a, b)
        assert part.fault() is None


def test_what_a_description_says_makes_the_same_values(case: tuple[str, Stored, Path]) -> None:
    """Codes, scales and zeros as those who pack them are given them, and nothing else."""
    name, _, folder = case
    held = kept(folder)[LOGICAL]
    if isinstance(held, StoredMatrix):
        plain = StoredMatrix._values(held, held._span(0, held.shape[0]))
        # What libraries divide by is multiplied with here: a step of rounding apart.
        exact = "nvfp4" not in name and "int8" not in name
        np.testing.assert_allclose(plain, held.values(), rtol=0 if exact else 3e-7, atol=0)
        assert [len(part) for part in held.scales(2, 5)] == [3] * len(held.format.scales)
        assert held.codes(2, 5).shape == (3, held.shape[1])


def test_bytes_of_the_file_are_what_is_counted(case: tuple[str, Stored, Path]) -> None:
    name, stored, folder = case
    held = kept(folder)[LOGICAL]
    if not isinstance(held, StoredMatrix):
        return
    assert all(not array.flags.writeable for array in held.arrays), "views of the file"
    own = {".weight_shape", ".weight_format", ".input_scale", ".weight.quant_map", ".weight.nested_quant_map"}
    file = sum(x.nbytes for part, x in stored.parts.items() if part not in own and "quant_state" not in part)
    if "old packing" in name or "hqq" in name or "nested" in name:
        return  # padded words; codes of 5 and 6 bits in bytes; scales that are codes themselves
    unused = sum(x.nbytes for part, x in stored.parts.items() if part == ".g_idx" and not held.format.ordered)
    unused += sum(x.nbytes for part, x in stored.parts.items() if part == ".qzeros" and not held.format.zeros)
    assert held.nbytes == file - unused


def test_a_config_alone_plans_what_a_file_shows(case: tuple[str, Stored, Path], tmp_path: Path) -> None:
    """Of a type of scale that a configuration does not tell, the planner takes the usual one of 16 bits."""
    name, _, folder = case
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    planned, found = read_model(tmp_path).stored, open_model(folder).stored.get(LOGICAL)
    if name in ACROSS or found is None:
        return
    expected = planned.get(LOGICAL)
    assert expected is not None
    assert (expected.code, expected.bits) == (found.code, found.bits)
    assert expected.group == found.group or "blocks of 128" in name, "which nothing says but the file"
    assert (expected.offset, len(expected.zeros), expected.ordered) == (found.offset, len(found.zeros), found.ordered)
    assert "lm_head" not in planned


def test_every_stored_format_is_tested_here() -> None:
    found = set()
    for stored in CASES.values():
        method = read_method(stored.config, "here")
        assert method is not None
        assert any(part in method.marks for part in stored.parts)
        found.add(method.method)
    others = {"fp8", "fbgemm_fp8", "mxfp4", "bitnet"}  # the last in tests/models/test_bitnet_weights.py
    assert found == set(METHODS) - others, "these are tested with other oracles"
    for name in STORED_FORMATS:
        assert issubclass(STORED_FORMATS.get(name), StoredMatrix)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_planned_tables_are_those_of_the_library(kind: str) -> None:
    table = GOLDEN[f"bitsandbytes: {kind}"].parts[".weight.quant_map"]
    np.testing.assert_array_equal(np.array(TABLES[kind], np.float32), table.numpy())


def test_absmax_that_is_quantised_has_blocks_of_its_own(tmp_path: Path) -> None:
    """bitsandbytes' smallest file with two of them would be large: this one is written by the definition."""
    n, k, block = 48, 64, 32
    rng = np.random.default_rng(1)
    codes, absmax = rng.integers(0, 16, n * k, np.uint8), rng.integers(0, 256, n, np.uint8)
    table, nested_table = np.array(TABLES["nf4"], np.float32), np.linspace(-1, 1, 256, dtype=np.float32)
    nested, offset = np.array([0.5, 2.0], np.float32), np.float32(2.25)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [n, k], "nested_blocksize": block,
             "nested_dtype": "float32", "nested_offset": float(offset)}  # fmt: skip
    arrays = {
        "": (codes[0::2] << 4 | codes[1::2])[:, None], ".absmax": absmax, ".quant_map": table,
        ".nested_absmax": nested, ".nested_quant_map": nested_table,
        ".quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8).copy(),
    }  # fmt: skip
    scales = nested_table[absmax] * nested[np.arange(n) // block] + offset
    values = table[codes].reshape(n, k) * scales[:, None]
    parts = {f".weight{part}": torch.from_numpy(array) for part, array in arrays.items()}
    stored = Stored({"quant_method": "bitsandbytes", "load_in_4bit": True}, parts, torch.from_numpy(values))
    np.testing.assert_array_equal(kept(write(tmp_path / "m", stored))[LOGICAL].values(), values)


def test_formats_are_what_they_are_called(tmp_path: Path) -> None:
    """A few descriptions, spelt out."""
    at = tmp_path / "m"

    def of(name: str, folder: Path) -> MatrixFormat:
        return open_model(write(folder, CASES[name])).stored[LOGICAL]

    assert of("modelopt: nvfp4", at) == MatrixFormat("e2m1", 4, (Shared("e4m3", 1, 16), Shared("float32", 0, 0)))
    assert of("compressed-tensors: nvfp4", at) == of("modelopt: nvfp4", at)
    assert of("compressed-tensors: mxfp4", at) == MatrixFormat("e2m1", 4, (Shared("e8m0", 1, 32),))
    assert of("compressed-tensors: fp8 of blocks", at) == MatrixFormat("e4m3", 8, (Shared("bfloat16", 16, 24),))
    assert of("compressed-tensors: 4 bits", at) == MatrixFormat("uint", 4, (Shared("bfloat16", 1, 32),), offset=8)
    assert of("gptq: 3 bits symmetric", at) == MatrixFormat("uint", 3, (Shared("float16", 1, 32),), offset=4)
    assert of("bitsandbytes: int8", at) == MatrixFormat("int", 8, (Shared("float32", 1, 0),))
    assert of("bitsandbytes: nf4", at).table == TABLES["nf4"]


def test_held_matrices_multiply_as_their_values(case: tuple[str, Stored, Path]) -> None:
    _, _, folder = case
    checkpoint = open_model(folder)
    held = load_weights(checkpoint, checkpoint.spec, HeldWeights("float32", checkpoint.stored))[LOGICAL]
    x = np.random.default_rng(0).standard_normal((3, held.shape[1]), dtype=np.float32)
    want = x @ np.asarray(load_weights(checkpoint, checkpoint.spec, "float32")[LOGICAL]).T
    np.testing.assert_allclose(linear(x, held), want, rtol=1e-4, atol=1e-5)
