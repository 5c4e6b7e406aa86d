"""GGUF: headers are read to the last field or refused in one line; metadata becomes a spec, or is refused by name."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import Attention, Experts, Rope, weight_shapes
from penstock.families.registry import open_model, read_model, read_spec
from penstock.formats import gguf as gguf_format
from penstock.formats.gguf import read_gguf
from penstock.weights.load import load_weights
from tests.ggml import F32, entry, gguf_bytes, stored_values, tensor_entry, text, typed, write_gguf
from tests.unit.families.test_families import TINY
from tests.unit.formats.test_formats import refusal, stored_bytes

METADATA: dict[str, Any] = {
    "general.architecture": "llama", "general.name": "tiny ✓", "a.bool": True, "an.int": -5, "a.float": 0.5,
    "strings": ["a", "", "ß"], "numbers": [1, 2, 3], "floats": [0.5, -1.0], "none": [],
}  # fmt: skip
X = np.arange(6, dtype=np.float32).reshape(2, 3)
Y = np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 2, 32)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 256])
def test_round_trip(tmp_path: Path, version: int, alignment: int) -> None:
    metadata = METADATA | ({} if alignment == 32 else {"general.alignment": alignment})
    tensors = {"x": ("F32", X), "y": ("Q4_0", Y), "z": ("BF16", Y)}
    path = write_gguf(tmp_path / "m.gguf", metadata, tensors, version=version, alignment=alignment)
    gguf = read_gguf(path)
    assert (gguf.version, gguf.alignment, gguf.path) == (version, alignment, path)
    assert gguf.metadata == metadata
    assert [type(v) for v in gguf.metadata.values()] == [type(v) for v in metadata.values()]
    assert {name: (ref.dtype, ref.shape, ref.nbytes) for name, ref in gguf.tensors.items()} == {
        "x": ("F32", (2, 3), 24), "y": ("Q4_0", (2, 2, 32), 72), "z": ("BF16", (2, 2, 32), 256)
    }  # fmt: skip
    assert stored_bytes(gguf.tensors["x"]) == X.tobytes()
    assert all(ref.offset % alignment == 0 for ref in gguf.tensors.values())
    assert stored_bytes(gguf.tensors["y"].row(1)) == stored_bytes(gguf.tensors["y"])[36:]


def test_every_scalar_type(tmp_path: Path) -> None:
    codes = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    body = b""
    for kind, code in codes.items():
        body += text(f"k{kind}") + struct.pack(f"<I{code}", kind, 1)
        body += text(f"a{kind}") + struct.pack(f"<IIQ{code}{code}", 9, kind, 2, 1, 0)
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2 * len(codes)) + body)
    metadata = read_gguf(tmp_path / "m.gguf").metadata
    assert {key: value for key, value in metadata.items() if key[0] == "k"} == {f"k{kind}": 1 for kind in codes}
    assert {key: value for key, value in metadata.items() if key[0] == "a"} == {f"a{kind}": [1, 0] for kind in codes}
    assert (type(metadata["k7"]), type(metadata["k12"]), type(metadata["k4"])) == (bool, float, int)


def raw(entries: list[bytes], tensors: list[bytes] = [], data: bytes = b"", version: int = 3) -> bytes:  # noqa: B006
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries)) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def counts(tensors: int, entries: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, entries) + bytes(64)


def array(key: str, kind: int, count: int, data: bytes = b"") -> bytes:
    return text(key) + struct.pack("<IIQ", 9, kind, count) + data


def f32(name: str | bytes, shape: tuple[int, ...], offset: int = 0, kind: int = 0) -> bytes:
    return tensor_entry(name, shape, kind, offset)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a GGUF"),
    "another format": (b"GGML" + bytes(40), "not a GGUF"),
    "number of tensors": (counts(2**63, 0), "claims 9223372036854775808 tensors"),
    "more tensors than bytes": (counts(4, 0), "claims 4 tensors"),
    "number of entries": (counts(0, 2**64 - 1), "metadata entries"),
    "key of all memory": (raw([struct.pack("<Q", 2**62) + b"k"]), "a key of 4611686018427387904 bytes"),
    "key beyond the end": (raw([struct.pack("<Q", 60000) + bytes(64)]), "asks for 60000 bytes"),
    "key that is no text": (raw([text(b"\xff") + struct.pack("<IB", 7, 1)]), "not UTF-8"),
    "value that is no text": (raw([text("k") + struct.pack("<I", 8) + text(b"\xc0\x80")]), "'k'"),
    "value beyond the end": (raw([text("k") + struct.pack("<IQ", 8, 2**63)]), "'k'"),
    "same key": (raw([entry("k", 1), entry("k", 1)]), "'k' twice"),
    "unknown type": (raw([text("k") + struct.pack("<II", 13, 0)]), "unknown type 13"),
    "truth value": (raw([text("k") + struct.pack("<IB", 7, 2)]), "neither 0 nor 1"),
    "array of arrays": (raw([array("k", 9, 1, struct.pack("<IQ", 4, 0))]), "array of arrays"),
    "array of the unknown": (raw([array("k", 99, 1, b"\0")]), "unknown type 99"),
    "array of all memory": (raw([array("k", 4, 2**61)]), "elements of 'k'"),
    "array that wraps in 64 bits": (raw([array("k", 10, 2**61 + 1)]), "elements of 'k'"),
    "array of empty strings": (raw([array("k", 8, 2**33)]), "elements of 'k'"),
    "array beyond the end": (raw([array("k", 8, 20, bytes(64))]), "elements of 'k'"),
    "alignment zero": (raw([entry("general.alignment", 0)]), "alignment '0'"),
    "alignment odd": (raw([entry("general.alignment", 24)]), "alignment '24'"),
    "alignment huge": (raw([entry("general.alignment", 2**31)]), "alignment"),
    "alignment text": (raw([entry("general.alignment", "32")]), "alignment"),
    "alignment list": (raw([entry("general.alignment", [32])]), "alignment"),
    "same tensor": (raw([], [f32("x", (2,)), f32("x", (2,), 32)], bytes(64)), "two tensors called 'x'"),
    "name too long": (raw([], [f32("x" * 300, (2,))], bytes(8)), "300 bytes"),
    "name that is no text": (raw([], [f32(b"\x80", (2,))], bytes(8)), "not UTF-8"),
    "no dimensions": (raw([], [f32("x", ())], bytes(32)), "0 dimensions"),
    "five dimensions": (raw([], [f32("x", (1, 1, 1, 1, 2))], bytes(8)), "5 dimensions"),
    "size zero": (raw([], [f32("x", (0, 2))], bytes(8)), "(0, 2)"),
    "size that wraps to 2": (raw([], [f32("x", (2**62, 2, 2**61, 4))], bytes(8)), "no tensor can have"),
    "size that is negative": (raw([], [f32("x", (2**64 - 1,))], bytes(8)), "no tensor can have"),
    "rows that are no whole blocks": (raw([], [f32("x", (2, 48), 0, 2)], bytes(99)), "rows of 48"),
    "unaligned": (raw([], [f32("x", (2,), 4)], bytes(40)), "not a multiple of 32"),
    "overlap": (raw([], [f32("x", (16,)), f32("y", (2,), 32)], bytes(64)), "'y'"),
    "same bytes": (raw([], [f32("x", (2,)), f32("y", (2,))], bytes(64)), "overlaps"),
    "behind the end": (raw([], [f32("x", (2,), 32)], bytes(39)), "1 bytes after the file"),
    "far behind the end": (raw([], [f32("x", (2,), 2**63)], bytes(8)), "after the file"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(HOSTILE))
def test_hostile_files_are_refused(tmp_path: Path, case: str) -> None:
    data, culprit = HOSTILE[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    refusal(lambda: read_gguf(path), "m.gguf", culprit)
    with pytest.raises(ModelError):
        open_model(path)


def test_what_is_not_supported_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for version, culprit in ((1, "version 1"), (4, "version 4"), (0x03000000, "big-endian")):
        path.write_bytes(raw([], version=version))
        refusal(lambda: read_gguf(path), "m.gguf", culprit, kind=UnsupportedError)
    path.write_bytes(raw([], [f32("x", (2,), 0, 200)], bytes(8)))
    refusal(lambda: read_gguf(path), "'x'", "type 200", kind=UnsupportedError)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 20, 100])
def test_texts_are_the_same_wherever_a_buffer_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    texts = ["a" * (i % 23) + "\u00e4" * (i % 3) for i in range(99)]
    metadata = METADATA | {"x.texts": texts, "x.after": 7}
    write_gguf(tmp_path / "m.gguf", metadata, {"x": ("F32", X)})
    monkeypatch.setattr(gguf_format, "_BUFFER_BYTES", size)
    assert read_gguf(tmp_path / "m.gguf").metadata == metadata
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(data.replace("\u00e4".encode(), b"\xff\xff", 1))
    refusal(lambda: read_gguf(tmp_path / "m.gguf"), "x.texts", "not UTF-8")


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    whole = gguf_bytes(METADATA, {"x": ("F32", X), "y": ("Q4_0", Y)})
    path = tmp_path / "m.gguf"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError):
            read_gguf(path)
    path.write_bytes(whole + bytes(100))  # padding at the end is usual
    assert read_gguf(path).metadata == METADATA


# --- from metadata to a model

SHAPES = {"V": 16, "E": 32, "L": 2, "H": 4, "G": 2, "F": 64}


def model_metadata(arch: str = "llama", **changes: Any) -> dict[str, Any]:
    """`changes`: key without the architecture's prefix, dots as double underscores; None removes."""
    own = {
        "context_length": 64, "embedding_length": 32, "block_count": 2, "feed_forward_length": 64,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 2.0**-16,
        "rope.freq_base": 500000.0, "vocab_size": 16,
    }  # fmt: skip
    own |= {key.replace("__", "."): value for key, value in changes.items()}
    head = {"general.architecture": arch, "general.file_type": 0, "general.quantization_version": 2}
    return head | {f"{arch}.{key}": value for key, value in own.items() if value is not None}


def model_tensors(head_dim: int = 8, tied: bool = False, **extra: tuple[int, ...]) -> dict[str, F32]:
    """Random tensors of SHAPES; `extra`: names with double underscores for dots."""
    e, h, g, f, v = (SHAPES[c] for c in "EHGFV")
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (v, e), "output_norm.weight": (e,)}
    if not tied:
        shapes["output.weight"] = (v, e)
    for i in range(SHAPES["L"]):
        part = {
            "attn_norm": (e,), "ffn_norm": (e,), "attn_q": (h * head_dim, e), "attn_k": (g * head_dim, e),
            "attn_v": (g * head_dim, e), "attn_output": (e, h * head_dim), "ffn_gate": (f, e), "ffn_up": (f, e),
            "ffn_down": (e, f),
        }  # fmt: skip
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in part.items()}
    shapes |= {name.replace("__", "."): shape for name, shape in extra.items()}
    rng = np.random.default_rng(3)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write_model(
    path: Path, metadata: dict[str, Any] | None = None, tensors: dict[str, F32] | None = None, kind: str = "F32"
) -> Path:
    given = model_tensors() if tensors is None else tensors
    kinds = {name: ("F32" if array.ndim == 1 else kind, array) for name, array in given.items()}
    return write_gguf(path, model_metadata() if metadata is None else metadata, kinds)


def attention_of(path: Path) -> Attention:
    mixer = open_model(path).spec.layers[1].mixer
    assert isinstance(mixer, Attention)
    return mixer


def test_what_a_file_says_of_sampling_is_a_generation_config(tmp_path: Path) -> None:
    said = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "penalty_repeat": 1.05, "mirostat": 0}
    path = write_model(tmp_path / "m.gguf", model_metadata() | {f"general.sampling.{k}": v for k, v in said.items()})
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    assert open_model(path).generation_config == read_model(path).generation_config == expected
    assert open_model(write_model(tmp_path / "n.gguf")).generation_config == {}


def test_a_llama_file_becomes_a_spec(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf")
    checkpoint = open_model(path)
    assert open_model(tmp_path) == checkpoint
    spec = checkpoint.spec
    assert (spec.family, spec.vocab_size, spec.hidden_size, len(spec.layers)) == ("llama", 16, 32, 2)
    assert (spec.max_position, spec.dtype, spec.tie_embeddings) == (64, "float32", False)
    assert spec.final_norm is not None
    assert spec.final_norm.eps == spec.layers[0].norm.eps == 2.0**-16
    rope = Rope(dim=8, theta=500000.0, interleaved=True)
    assert attention_of(path) == Attention(num_heads=4, num_kv_heads=2, head_dim=8, rope=rope)
    assert (checkpoint.tokenizer.kind, checkpoint.tokenizer.path) == ("none", None)
    assert "no tokenizer" in checkpoint.tokenizer.reason
    loaded = load_weights(checkpoint, spec, "float32")
    tensors = model_tensors()
    assert set(loaded) == set(weight_shapes(spec))
    np.testing.assert_array_equal(loaded["layers.1.gate"], tensors["blk.1.ffn_gate.weight"])
    np.testing.assert_array_equal(loaded["layers.0.down"], tensors["blk.0.ffn_down.weight"])
    np.testing.assert_array_equal(loaded["lm_head"], tensors["output.weight"])
    assert sum(array.size for array in loaded.values()) == sum(array.size for array in tensors.values())


def test_ties_biases_and_heads_of_another_size(tmp_path: Path) -> None:
    biases = {f"blk__{i}__{name}__bias": (n,) for i in range(2) for name, n in (
        ("attn_q", 24), ("attn_k", 12), ("attn_v", 12), ("attn_output", 32), ("ffn_up", 64), ("ffn_gate", 64),
        ("ffn_down", 32))}  # fmt: skip
    metadata = model_metadata(
        attention__key_length=6, attention__value_length=6, rope__dimension_count=6, vocab_size=None,
        attention__head_count=[4, 4], rope__freq_base=None, expert_count=0, expert_used_count=0,
        rope__scaling__finetuned=True, tensor_data_layout="Meta AI original pth",
    )  # fmt: skip
    path = write_model(tmp_path / "m.gguf", metadata, model_tensors(6, True, **biases))
    spec = open_model(path).spec
    assert spec.tie_embeddings
    assert spec.layers[0].ffn.bias
    rope = Rope(dim=6, interleaved=True)
    want = Attention(num_heads=4, num_kv_heads=2, head_dim=6, rope=rope, qkv_bias=True, o_bias=True)
    assert attention_of(path) == want


def test_qwen_rotates_halves_and_norms_its_heads(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", model_metadata("qwen2"))
    assert attention_of(path).rope == Rope(dim=8, theta=500000.0)
    assert attention_of(path).qk_norm is None
    norms = {f"blk__{i}__attn_{c}_norm__weight": (8,) for i in range(2) for c in "qk"}
    write_model(path, model_metadata("qwen3"), model_tensors(**norms))
    norm = attention_of(path).qk_norm
    assert norm is not None
    assert (norm.over, norm.eps) == ("head", 2.0**-16)
    refusal(lambda: open_model(write_model(path, model_metadata("qwen3"))), "lacks 4 of", "'blk.0.attn_k_norm.weight'")


def test_rope_scaling_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"

    def rope(tensors: dict[str, F32] | None = None, **changes: Any) -> Rope | None:
        write_model(path, model_metadata(**changes), tensors)
        return attention_of(path).rope

    base = {"dim": 8, "theta": 500000.0, "interleaved": True}
    assert rope(rope__scaling__type="none", rope__scaling__factor=4.0) == Rope(**base)
    assert rope(rope__scaling__type="linear", rope__scaling__factor=4.0) == Rope(kind="linear", factor=4.0, **base)
    assert rope(rope__scaling__factor=4.0) == Rope(kind="linear", factor=4.0, **base)
    assert rope(rope__scale_linear=2.0) == Rope(kind="linear", factor=2.0, **base)
    yarn = rope(
        rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=32
    )  # fmt: skip
    assert yarn == Rope(kind="yarn", factor=4.0, original_max_position=32, attention_factor=1.138629436111989, **base)
    with_factors = model_tensors() | {"rope_freqs.weight": np.array([1, 2, 4, 8], np.float32)}
    factors = (1.0, 2.0, 4.0, 8.0)
    same = {"short_factor": factors, "long_factor": factors, "original_max_position": 64}
    assert rope(with_factors) == Rope(kind="longrope", **same, **base)
    lists = {
        f"rope_factors_{end}.weight": with_factors["rope_freqs.weight"] * n for end, n in (("short", 1), ("long", 2))
    }
    want = {"short_factor": factors, "long_factor": (2.0, 4.0, 8.0, 16.0), "attention_factor": 1.5}
    long = rope(model_tensors() | lists, rope__scaling__attn_factor=1.5, rope__scaling__original_context_length=16)
    assert long == Rope(kind="longrope", original_max_position=16, **want, **base)
    del lists["rope_factors_long.weight"]
    refusal(lambda: rope(model_tensors() | lists), "only one of", "rope_factors_long.weight")
    both = {"rope__scaling__type": "linear", "rope__scaling__factor": 2.0}
    refusal(lambda: rope(with_factors, **both), "rope_freqs.weight", "'linear'", kind=UnsupportedError)
    refusal(lambda: rope(rope__scaling__type="longrope"), "'longrope'", kind=UnsupportedError)
    for bad in (np.array([1, 2, 0, 8], np.float32), np.array([1, 2, np.nan, 8], np.float32), np.ones(3, np.float32)):
        refusal(lambda b=bad: rope(model_tensors() | {"rope_freqs.weight": b}), "rope_freqs.weight")


@pytest.mark.parametrize(("changes", "culprit", "kind"), [
    ({"attention__sliding_window": 4096}, "'attention.sliding_window'", UnsupportedError),
    ({"attn_logit_softcapping": 30.0}, "'attn_logit_softcapping'", UnsupportedError),
    ({"use_parallel_residual": True}, "'use_parallel_residual'", UnsupportedError),
    ({"rope__scaling__attn_factor": 1.5}, "'rope.scaling.attn_factor'", UnsupportedError),
    ({"attention__causal": False}, "causal", UnsupportedError),
    ({"attention__value_length": 4}, "components", UnsupportedError),
    ({"rope__dimension_count": 4}, "rope.dimension_count", UnsupportedError),
    ({"attention__head_count": [4, 2]}, "attention.head_count as a list", ModelError),
    ({"feed_forward_length": [64, 32]}, "feed_forward_length", ModelError),
    ({"attention__head_count_kv": 3}, "attention.head_count_kv 3 does not divide attention.head_count 4", ModelError),
    ({"attention__head_count_kv": 0}, "head_count_kv", ModelError),
    ({"attention__head_count": None}, "attention.head_count", ModelError),
    ({"attention__layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon", ModelError),
    ({"attention__layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon", ModelError),
    ({"block_count": 2**31}, "block_count", ModelError),
    ({"block_count": 3}, "lacks 9 of", ModelError),
    ({"block_count": 1}, "holds 9 tensors", UnsupportedError),
    ({"embedding_length": 64}, "embedding_length", ModelError),
    ({"vocab_size": 17}, "vocab_size", ModelError),
    ({"context_length": "long"}, "context_length", ModelError),
    ({"feed_forward_length": 32}, "'blk.0.ffn_gate.weight'", ModelError),
    ({"expert_count": 4}, "0 of 4 experts", ModelError),
    ({"expert_count": 4, "expert_used_count": 2}, "ffn_down_exps", ModelError),
])  # fmt: skip
def test_metadata_that_is_wrong_or_not_understood(
    tmp_path: Path, changes: dict[str, Any], culprit: str, kind: type[ModelError]
) -> None:
    path = write_model(tmp_path / "m.gguf", model_metadata(**changes))
    refusal(lambda: open_model(path), culprit, kind=kind)


def test_tensors_must_be_the_expected_ones(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tensors = model_tensors()
    more = tensors | {"blk.0.post_ffw_norm.weight": np.ones(32, np.float32)}
    refusal(lambda: open_model(write_model(path, None, more)), "'blk.0.post_ffw_norm.weight'", kind=UnsupportedError)
    less = {name: array for name, array in tensors.items() if name != "blk.1.attn_v.weight"}
    refusal(lambda: open_model(write_model(path, None, less)), "lacks 1 of", "'blk.1.attn_v.weight'")
    none = {name: array for name, array in tensors.items() if name != "token_embd.weight"}
    refusal(lambda: open_model(write_model(path, None, none)), "token_embd.weight")
    flat = tensors | {"token_embd.weight": np.ones(16, np.float32)}
    refusal(lambda: open_model(write_model(path, None, flat)), "token_embd.weight")
    ignored = tensors | {"blk.0.attn_rot_embd.weight": np.ones(4, np.float32)}
    assert open_model(write_model(path, None, ignored)).spec.vocab_size == 16
    write_gguf(path, model_metadata(), {n: ("I32" if "ffn_up" in n else "F32", a) for n, a in tensors.items()})
    refusal(lambda: open_model(path), "'blk.0.ffn_up.weight'", "I32", kind=UnsupportedError)


def test_other_architectures_and_types_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for arch, said in (
        ("plamo2", "state spaces"), ("eurobert", "encoder"), ("lama", "nearest names are llama"), ("", "none of"),
        (None, "none of"), (3, "none of"),
    ):  # fmt: skip
        metadata = {"general.architecture": arch} if arch is not None else {}
        refusal(lambda m=metadata: open_model(write_model(path, m)), "architecture", said, kind=UnsupportedError)
    data = bytearray(gguf_bytes(model_metadata(), {n: ("Q4_0" if a.ndim == 2 else "F32", a) for n, a in
                                                   model_tensors().items()}))  # fmt: skip
    name = b"blk.1.ffn_down.weight"  # the last one
    at = data.index(name) + len(name) + 4 + 16
    data[at : at + 4] = struct.pack("<I", 9)  # blocks of activations, which no file has
    path.write_bytes(data + bytes(4000))
    refusal(lambda: open_model(path), repr(name.decode()), "Q8_1", "Q8_0", kind=UnsupportedError)


def test_special_tokens_and_the_chat_template(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    vocabulary = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [f"t{i}" for i in range(16)]}

    def opened(**changes: Any) -> Any:
        own = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
        return open_model(write_model(path, model_metadata() | vocabulary | own))

    checkpoint = opened(bos_token_id=3, eos_token_id=4, eot_token_id=5, eom_token_id=4, add_bos_token=True)
    assert (checkpoint.spec.bos_token_id, checkpoint.spec.eos_token_ids) == (3, (4, 5))
    assert (checkpoint.tokenizer.kind, checkpoint.tokenizer.path) == ("gguf", path)
    assert checkpoint.tokenizer.chat_template is None
    assert (opened().spec.bos_token_id, opened().spec.eos_token_ids) == (None, ())
    assert (opened(model="llama").spec.bos_token_id, opened(model="llama").spec.eos_token_ids) == (1, (2,))
    refusal(lambda: opened(eos_token_id=16), "eos_token_id")
    refusal(lambda: opened(tokens=["x"] * 17), "more tokens than the 16 rows")
    vocabulary["tokenizer.chat_template"] = "{{ messages }}"
    assert opened().tokenizer.chat_template == "{{ messages }}"
    vocabulary["tokenizer.chat_template"] = 3
    refusal(opened, "tokenizer.chat_template")


# --- files, folders, parts


def split(folder: Path, count: int, edit: Callable[[int, dict[str, Any]], None] = lambda n, m: None) -> list[Path]:
    tensors = list(model_tensors().items())
    paths = []
    for n in range(count):
        metadata = model_metadata() if n == 0 else {}
        metadata |= {"split.no": n, "split.count": count, "split.tensors.count": len(tensors)}
        edit(n, metadata)
        paths.append(folder / f"m-{n + 1:05}-of-{count:05}.gguf")
        write_gguf(paths[-1], metadata, {name: ("F32", array) for name, array in tensors[n::count]})
    return paths


def test_split_files_are_joined(tmp_path: Path) -> None:
    parts = split(tmp_path, 3)
    checkpoint = open_model(tmp_path)
    assert {ref.tensor.path for ref in checkpoint.weights.values()} == set(parts)
    loaded = load_weights(checkpoint, checkpoint.spec, "float32")
    for path in parts:  # whichever is named
        other = open_model(path)
        assert (other.spec, other.weights) == (checkpoint.spec, checkpoint.weights)
    np.testing.assert_array_equal(loaded["layers.1.up"], model_tensors()["blk.1.ffn_up.weight"])
    parts[1].unlink()
    refusal(lambda: open_model(tmp_path), "1 of the 3 parts", repr(parts[1].name))
    parts[0].unlink()
    refusal(lambda: open_model(tmp_path), "the first part")


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    split(tmp_path, 2, lambda n, m: m.update({"split.no": 0}))
    refusal(lambda: open_model(tmp_path), "00002-of-00002", "part 2 of 2")
    split(tmp_path, 2, lambda n, m: m.update({"split.tensors.count": 5}))
    refusal(lambda: open_model(tmp_path), "21 tensors", "'5'")
    parts = split(tmp_path, 2)
    write_gguf(parts[1], {"split.no": 1, "split.count": 2}, {n: ("F32", a) for n, a in model_tensors().items()})
    refusal(lambda: open_model(tmp_path), "which an earlier part has too")
    parts[1].rename(tmp_path / "m-00003-of-00002.gguf")
    refusal(lambda: open_model(tmp_path / "m-00003-of-00002.gguf"), "part 3 of 2")
    lone = write_model(tmp_path / "lone.gguf", model_metadata() | {"split.count": 2})
    refusal(lambda: open_model(lone), "lone.gguf", "part 1 of 1")


def test_folders(tmp_path: Path) -> None:
    write_model(tmp_path / "a.gguf")
    (tmp_path / "config.json").write_text("{}")  # of the model that the file was made from
    assert open_model(tmp_path).path == tmp_path / "a.gguf"
    write_model(tmp_path / "b.gguf")
    refusal(lambda: open_model(tmp_path), "'a.gguf', 'b.gguf'", "name the file")
    (tmp_path / "model.safetensors").write_bytes(b"")
    refusal(lambda: open_model(tmp_path), "config.json names no architecture")


# --- experts, and reading no more than is needed


def mixture(arch: str, shared: bool) -> tuple[dict[str, Any], dict[str, F32]]:
    metadata = model_metadata(arch, expert_count=3, expert_used_count=2)
    width = 64
    if arch != "llama":
        width = 32
        metadata[f"{arch}.expert_feed_forward_length"] = width
    extra: dict[str, tuple[int, ...]] = {}
    for i in range(2):
        parts: dict[str, tuple[int, ...]] = {
            "gate_inp": (3, 32), "gate_exps": (3, width, 32), "up_exps": (3, width, 32), "down_exps": (3, 32, width),
        }  # fmt: skip
        if shared:
            parts |= {"gate_inp_shexp": (32,), "gate_shexp": (96, 32), "up_shexp": (96, 32), "down_shexp": (32, 96)}
        extra |= {f"blk__{i}__ffn_{name}__weight": shape for name, shape in parts.items()}
        if arch == "qwen3moe":
            extra |= {f"blk__{i}__attn_{c}_norm__weight": (8,) for c in "qk"}
    if shared:
        metadata[f"{arch}.expert_shared_feed_forward_length"] = 96
    tensors = model_tensors(**extra)
    dense = ("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")
    return metadata, {name: array for name, array in tensors.items() if not name.endswith(dense)}


@pytest.mark.parametrize(("arch", "renormalize"), [("llama", True), ("qwen2moe", False), ("qwen3moe", True)])
def test_experts_are_cut_from_their_stacks(tmp_path: Path, arch: str, renormalize: bool) -> None:
    metadata, tensors = mixture(arch, shared=arch == "qwen2moe")
    path = write_model(tmp_path / "m.gguf", metadata, tensors, "Q8_0")
    checkpoint = open_model(path)
    ffn = checkpoint.spec.layers[0].ffn
    assert isinstance(ffn, Experts)
    assert (ffn.num_experts, ffn.top_k, ffn.router.renormalize, ffn.shared_gate) == (
        3,
        2,
        renormalize,
        arch == "qwen2moe",
    )
    counted: list[tuple[int, int]] = []
    loaded = load_weights(checkpoint, checkpoint.spec, "float32", lambda done, total: counted.append((done, total)))
    values = {name: array if array.ndim == 1 else stored_values("Q8_0", array) for name, array in tensors.items()}
    for n in range(3):
        for part in ("gate", "up", "down"):
            np.testing.assert_array_equal(
                loaded[f"layers.1.experts.{n}.{part}"], values[f"blk.1.ffn_{part}_exps.weight"][n]
            )
    if arch == "qwen2moe":
        np.testing.assert_array_equal(loaded["layers.1.shared_gate"], values["blk.1.ffn_gate_inp_shexp.weight"][None])
        np.testing.assert_array_equal(loaded["layers.1.shared.down"], values["blk.1.ffn_down_shexp.weight"])
    stored = sum(ref.nbytes for ref in read_gguf(path).tensors.values())
    assert counted[-1] == (stored, stored), "each expert's own bytes were decoded, and nothing twice"
    assert typed(True)[0] == 7
    refusal(lambda: open_model(write_model(path, metadata | {f"{arch}.expert_gating_func": 2}, tensors)), "router",
            kind=UnsupportedError)  # fmt: skip
    refusal(lambda: open_model(write_model(path, metadata | {f"{arch}.expert_weights_scale": 2.5}, tensors)), "scale",
            kind=UnsupportedError)  # fmt: skip


def test_more_experts_than_there_can_be_are_refused_at_once(tmp_path: Path) -> None:
    """4096 layers of 4096 experts are 50 million weights: they must not even be named."""
    metadata = model_metadata(block_count=4096, expert_count=4096, expert_used_count=2)
    refusal(lambda: open_model(write_model(tmp_path / "m.gguf", metadata)), "16777216 experts")
    config = TINY | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4096}))
    refusal(lambda: read_spec(tmp_path / "config.json"), "16777216 experts")
