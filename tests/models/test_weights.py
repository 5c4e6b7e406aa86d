"""Weights: the arrays are those that were stored, in any dtype; broken ones are refused by name."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.base.bf16 import widen
from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import Attention, weight_shapes
from penstock.families.checkpoint import WeightRef
from penstock.families.llama import Llama
from penstock.families.registry import open_model
from penstock.formats.llama2c import read_tokenizer
from penstock.formats.safetensors import read_safetensors
from penstock.weights import load as weights_module
from penstock.weights.load import load_weights, release_pages
from tests.shared import shared
from tests.unit.families.test_families import TINY, tiny_tensors, write_folder
from tests.unit.formats.test_formats import refusal

TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor as `load_weights` gives it: bfloat16 as uint16."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def write_torch_folder(folder: Path, dtype: str) -> dict[str, torch.Tensor]:
    """A tiny model folder stored in `dtype`; its tensors by logical name."""
    tensors = {k: torch.from_numpy(v).to(TORCH[dtype]) for k, v in tiny_tensors(TINY).items()}
    write_folder(folder, TINY)
    save_torch(tensors, folder / "model.safetensors")
    return {k: tensors[name] for k, name in Llama().weight_map(Llama().spec(TINY)).items()}


@pytest.mark.parametrize("wanted", list(TORCH))
@pytest.mark.parametrize("stored", list(TORCH))
def test_every_conversion_is_torchs(tmp_path: Path, stored: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "_CHUNK", 5)  # so that arrays take several chunks, the last one short
    tensors = write_torch_folder(tmp_path / "m", stored)
    checkpoint = open_model(tmp_path / "m")
    loaded = load_weights(checkpoint, checkpoint.spec, wanted)
    assert list(loaded) == list(weight_shapes(checkpoint.spec))
    for name, array in loaded.items():
        expected = bits(tensors[name].to(TORCH[wanted]))
        assert array.dtype == expected.dtype
        assert array.shape == expected.shape
        assert array.tobytes() == expected.tobytes(), name
        assert not array.flags.writeable


def test_a_stored_dtype_is_a_view_of_the_file(tmp_path: Path) -> None:
    write_torch_folder(tmp_path / "m", "bfloat16")
    checkpoint = open_model(tmp_path / "m")
    ref = checkpoint.weights["layers.0.q"].tensor
    same = load_weights(checkpoint.weights, checkpoint.spec, "bfloat16")["layers.0.q"]
    other = load_weights(checkpoint.weights, checkpoint.spec, "float32")["layers.0.q"]
    with ref.path.open("r+b") as file:  # a view sees the file change, a copy does not
        file.seek(ref.offset)
        file.write(b"\0\0")
    assert same[0, 0] == 0
    assert other[0, 0] != 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads what is resident from /proc")
def test_pages_that_were_only_looked_at_are_given_back(tmp_path: Path) -> None:
    spec = write_large_table(tmp_path / "m")
    checkpoint = open_model(tmp_path / "m")
    loaded = load_weights(checkpoint.weights, checkpoint.spec, "float32")
    table, before = loaded["embed"], resident_bytes(tmp_path / "m" / "model.safetensors")
    assert before >= spec.nbytes, "all of it was checked"
    release_pages(loaded)
    assert resident_bytes(tmp_path / "m" / "model.safetensors") < before / 10
    np.testing.assert_array_equal(table[[0, -1]], spec[[0, -1]])


def write_large_table(folder: Path) -> np.ndarray[Any, Any]:
    """A tiny model whose table of embeddings takes 16 MB; the table."""
    config = TINY | {"vocab_size": (4 << 20) // TINY["hidden_size"]}
    tensors = tiny_tensors(config)
    write_folder(folder, config)
    save_file(tensors, folder / "model.safetensors")
    return tensors["model.embed_tokens.weight"]


def resident_bytes(path: Path) -> int:
    """Of this process, in mappings of a file."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def test_unaligned_tensors_are_copied(tmp_path: Path) -> None:
    write_folder(tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    data = path.read_bytes()
    length = struct.unpack_from("<Q", data)[0]
    path.write_bytes(struct.pack("<Q", length + 1) + data[8 : 8 + length] + b" " + data[8 + length :])
    checkpoint = open_model(tmp_path / "m")
    assert checkpoint.weights["embed"].tensor.offset % 4 == 1
    loaded = load_weights(checkpoint, checkpoint.spec, "float32")
    tensors = tiny_tensors(TINY)
    for logical, name in Llama().weight_map(checkpoint.spec).items():
        np.testing.assert_array_equal(loaded[logical], tensors[name])
        assert loaded[logical].flags.aligned


@pytest.mark.parametrize("stored", list(TORCH))
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_refused(tmp_path: Path, stored: str, wanted: str, value: float) -> None:
    write_torch_folder(tmp_path / "m", stored)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = {k: torch.from_numpy(v).to(TORCH[stored]) for k, v in tiny_tensors(TINY).items()}
    tensors[name][-1, -1] = value
    save_torch(tensors, tmp_path / "m" / "model.safetensors")
    checkpoint = open_model(tmp_path / "m")  # no weight is looked at here
    refusal(lambda: load_weights(checkpoint, checkpoint.spec, wanted), name, "NaN or infinity")


def test_the_largest_finite_values_pass_and_overflow_is_refused(tmp_path: Path) -> None:
    tensors = tiny_tensors(TINY)
    largest = np.finfo(np.float32).max
    tensors["model.norm.weight"][0] = -largest
    write_folder(tmp_path / "m", TINY, tensors)
    checkpoint = open_model(tmp_path / "m")
    assert load_weights(checkpoint, checkpoint.spec, "float32")["final_norm"][0] == -largest
    for dtype in ("float16", "bfloat16"):  # the nearest bfloat16 is infinity too
        refusal(lambda d=dtype: load_weights(checkpoint, checkpoint.spec, d), "model.norm.weight", dtype, "too large")
    tensors["model.norm.weight"][0] = 65504.0
    write_folder(tmp_path / "m", TINY, tensors)
    assert load_weights(open_model(tmp_path / "m"), checkpoint.spec, "float16")["final_norm"][0] == 65504.0


def test_progress_counts_every_byte_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "_CHUNK", 7)
    write_torch_folder(tmp_path / "m", "float16")
    checkpoint = open_model(tmp_path / "m")
    seen: list[tuple[int, int]] = []
    load_weights(checkpoint, checkpoint.spec, "float32", lambda done, total: seen.append((done, total)))
    total = 2 * checkpoint.spec.num_params
    assert seen[-1] == (total, total)
    assert {t for _, t in seen} == {total}
    steps = np.diff([0] + [done for done, _ in seen])
    assert steps.min() > 0
    assert steps.max() <= 14


def test_everything_is_checked_before_a_byte_is_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    checkpoint = open_model(folder)
    spec, refs = checkpoint.spec, checkpoint.weights
    seen: list[tuple[int, int]] = []

    def load(**changes: Any) -> object:
        given = {k: v for k, v in (refs | changes).items() if v is not None}
        return load_weights(given, spec, "float32", lambda done, total: seen.append((done, total)))

    refusal(lambda: load(final_norm=None, lm_head=None), "2 of", "'final_norm'")
    refusal(lambda: load(lm_head=WeightRef(refs["lm_head"].tensor.rows(0, 3))), "lm_head.weight", "(3, 8)")
    save_file({"x": np.ones((16, 8), np.int32)}, tmp_path / "ints.safetensors")
    ints = read_safetensors(tmp_path / "ints.safetensors")["x"]
    refusal(lambda: load(lm_head=WeightRef(ints)), "'x'", "I32", kind=UnsupportedError)
    assert seen == []
    with pytest.raises(ValueError, match="not as 'int8'"):
        load_weights(checkpoint, spec, "int8")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    refusal(load, "model.safetensors", "shorter", kind=ModelError)
    (folder / "model.safetensors").write_bytes(b"")
    refusal(load, "model.safetensors", "empty")
    (folder / "model.safetensors").unlink()
    refusal(load, "model.safetensors", "cannot read")


@pytest.mark.parametrize("shard_size", ["1GB", "2KB"])
def test_folders_that_transformers_saved(tmp_path: Path, shard_size: str) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32}  # fmt: skip
    config = LlamaConfig(
        vocab_size=24, hidden_size=16, intermediate_size=20, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=1, head_dim=6, max_position_embeddings=64, rms_norm_eps=1e-4, attention_bias=True,
        mlp_bias=True, rope_parameters=rope, dtype=torch.bfloat16,
    )  # fmt: skip
    torch.manual_seed(3)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    for parameter in model.parameters():  # biases and norms start as constants, which would hide a swap
        torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors").exists() == (shard_size == "1GB")
    checkpoint = open_model(tmp_path)
    spec = checkpoint.spec
    assert spec.num_params == sum(p.numel() for p in model.parameters())
    assert (spec.dtype, spec.max_position, spec.final_norm.eps) == ("bfloat16", 64, 1e-4)
    attention = spec.layers[0].mixer
    assert isinstance(attention, Attention)
    assert (attention.head_dim, attention.num_kv_heads) == (6, 1)
    assert attention.rope is not None
    assert (attention.rope.kind, attention.rope.theta, attention.rope.original_max_position) == ("llama3", 5e5, 32)
    loaded = load_weights(checkpoint, spec, "bfloat16")
    state = model.state_dict()
    names = Llama().weight_map(spec)
    assert set(names.values()) == set(state)
    for logical, name in names.items():
        assert loaded[logical].tobytes() == bits(state[name]).tobytes(), name


def test_stories_weights_tell_the_documented_story() -> None:
    """The mapping of nameless arrays is right if transformers, given them, writes the text documented for them."""
    checkpoint = open_model(shared("models", "stories260K"))
    spec = checkpoint.spec
    loaded = load_weights(checkpoint, spec, "float32")
    attention = spec.layers[0].mixer
    assert isinstance(attention, Attention)
    state = {}
    for logical, name in Llama().weight_map(spec).items():
        array = loaded[logical]
        if logical.endswith((".q", ".k")):  # neighbouring pairs -> halves, as transformers rotates them
            pairs = array.reshape(-1, attention.head_dim // 2, 2, spec.hidden_size)
            array = pairs.swapaxes(1, 2).reshape(array.shape)
        state[name] = torch.from_numpy(array.copy())
    config = LlamaConfig(
        vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, intermediate_size=spec.layers[0].ffn.width,
        num_hidden_layers=len(spec.layers), num_attention_heads=attention.num_heads,
        num_key_value_heads=attention.num_kv_heads, max_position_embeddings=spec.max_position,
        rms_norm_eps=spec.final_norm.eps, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    missing = model.load_state_dict(state, strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) in ((["lm_head.weight"], []), ([], []))
    model.tie_weights()
    start = torch.tensor([[spec.bos_token_id]])
    out = model.generate(
        start, max_new_tokens=350, do_sample=False, eos_token_id=list(spec.eos_token_ids), pad_token_id=0
    )
    ids = out[0].tolist()
    assert checkpoint.tokenizer.path is not None
    tokens = read_tokenizer(checkpoint.tokenizer.path, spec.vocab_size)
    text = b"".join(tokens[i][0] for i in ids[1:257]).replace(b"<0x0A>", b"\n").decode()
    reference = shared("models", "stories260K", "reference_greedy.txt").read_text()
    assert len(reference) > 500
    assert text.strip() == reference.strip()
    assert ids[-1] in spec.eos_token_ids  # the model ends its story itself, with token 1
    assert len(ids) == 347


def test_a_real_model_in_half_the_bytes_keeps_its_values() -> None:
    checkpoint = open_model(shared("models", "stories260K"))
    full = load_weights(checkpoint, checkpoint.spec, "float32")
    half = load_weights(checkpoint, checkpoint.spec, "bfloat16")
    for name, array in half.items():
        np.testing.assert_allclose(widen(array), full[name], rtol=2**-8, atol=0)
