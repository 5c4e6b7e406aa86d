"""rwkv.cpp files: what is read is what was written; what is broken, hostile or of another kind is one line."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import ModelSpec, Rwkv4, Rwkv7
from penstock.families.registry import open_model
from penstock.formats.rwkv_cpp import MAGIC, is_rwkv_cpp, read_rwkv_cpp
from penstock.launch.tokenizer import load_tokenizer
from penstock.weights.load import load_weights
from tests.unit.formats.test_formats import refusal

Tensors = dict[str, np.ndarray]
V, E = 256, 16
RNG = np.random.default_rng(0)


def noise(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def common(vocab: int, layers: int) -> Tensors:
    out = {"emb.weight": noise(vocab, E), "head.weight": noise(vocab, E)}
    norms = ["ln_out", "blocks.0.ln0", *(f"blocks.{i}.ln{n}" for i in range(layers) for n in (1, 2))]
    return out | {f"{name}.{part}": noise(E) for name in norms for part in ("weight", "bias")}


def version_4(vocab: int = V, layers: int = 2, width: int = 24) -> Tensors:
    out = common(vocab, layers)
    for i in range(layers):
        vectors = ("att.time_decay", "att.time_first", *(f"att.time_mix_{n}" for n in "kvr"))
        out |= {f"blocks.{i}.{n}": noise(E) for n in (*vectors, "ffn.time_mix_k", "ffn.time_mix_r")}
        square = (*(f"att.{n}.weight" for n in ("key", "value", "receptance", "output")), "ffn.receptance.weight")
        out |= {f"blocks.{i}.{n}": noise(E, E) for n in square}
        out |= {f"blocks.{i}.ffn.key.weight": noise(width, E), f"blocks.{i}.ffn.value.weight": noise(E, width)}
    return out


def version_7(layers: int = 3, heads: int = 2) -> Tensors:
    """With ranks of their own for every part and, some of them, for every layer."""
    out = common(V, layers)
    for i in range(layers):
        own: Tensors = {"x_rwkvag": noise(6, 1, E), "r_k": noise(heads, E // heads)}
        own |= {name: noise(1, 1, E) for name in ("w0", "a0", "k_k", "k_a")}
        ranks = {"w": 3 + i, "a": 4, "g": 6} | ({"v": 5} if i else {})
        for name, rank in ranks.items():
            own |= {name + "1": noise(rank, E), name + "2": noise(E, rank)}
        if i:
            own["v0"] = noise(1, 1, E)
        own |= {f"{n}.weight": noise(E, E) for n in ("key", "value", "receptance", "output")}
        own |= {"ln_x.weight": noise(E), "ln_x.bias": noise(E)}
        out |= {f"blocks.{i}.att.{name}": value for name, value in own.items()}
        out |= {f"blocks.{i}.ffn.x_k": noise(1, 1, E), f"blocks.{i}.ffn.key.weight": noise(20, E)}
        out[f"blocks.{i}.ffn.value.weight"] = noise(E, 20)
    return out


def entry(name: str, value: np.ndarray, kind: int | None = None) -> bytes:
    if kind is None:
        kind = {"float32": 0, "float16": 1}[value.dtype.name]
    head = struct.pack(f"<{3 + value.ndim}i", value.ndim, len(name.encode()), kind, *value.shape[::-1])
    return head + name.encode() + value.tobytes()


def head(vocab: int = V, layers: int = 2, *, magic: int = MAGIC, version: int = 101, kind: int = 0) -> bytes:
    return struct.pack("<6i", magic, version, vocab, E, layers, kind)


def write(path: Path, tensors: Mapping[str, np.ndarray], layers: int = 2, vocab: int = V) -> Path:
    path.write_bytes(head(vocab, layers) + b"".join(entry(name, value) for name, value in tensors.items()))
    return path


def test_tensors_are_where_they_were_written(tmp_path: Path) -> None:
    tensors = {"a": noise(3), "b.c": noise(2, 5, 4), "half": noise(4, 3).astype(np.float16)}
    path = write(tmp_path / "x.bin", tensors)
    header, refs = read_rwkv_cpp(path)
    assert is_rwkv_cpp(path)
    assert (header.version, header.vocab_size, header.hidden_size, header.num_layers, header.dtype) == (
        101, V, E, 2, "F32",
    )  # fmt: skip
    assert list(refs) == list(tensors)
    for name, ref in refs.items():
        assert ref.shape == tensors[name].shape
        assert path.read_bytes()[ref.offset : ref.offset + ref.nbytes] == tensors[name].tobytes()


def test_blocks_are_counted_as_ggml_lays_them_out(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    for kind, name, nbytes in ((2, "Q4_0", 18), (3, "Q4_1", 20), (7, "Q5_0", 22), (8, "Q5_1", 24), (9, "Q8_0", 34)):
        shape = struct.pack("<5i", 2, 1, kind, 64, 3)
        path.write_bytes(head(kind=kind) + shape + b"w" + bytes(6 * nbytes))
        header, refs = read_rwkv_cpp(path)
        assert (header.dtype, refs["w"].dtype, refs["w"].shape, refs["w"].nbytes) == (name, name, (3, 64), 6 * nbytes)
        path.write_bytes(path.read_bytes()[:-1])
        refusal(lambda: read_rwkv_cpp(path), "'w'", "ends at byte")
    path.write_bytes(head(kind=8) + struct.pack("<5i", 2, 1, 8, 48, 2) + b"w" + bytes(72))
    refusal(lambda: read_rwkv_cpp(path), "'w'", "rows of 48", "Q5_1")


def test_blocks_of_version_100_are_of_another_layout(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(head(version=100, kind=8))
    refusal(lambda: read_rwkv_cpp(path), "Q5_1", "version 100", kind=UnsupportedError)
    path.write_bytes(head(version=100) + struct.pack("<5i", 2, 1, 8, 32, 1) + b"w" + bytes(24))
    refusal(lambda: read_rwkv_cpp(path), "'w'", "Q5_1", "version 100", kind=UnsupportedError)
    path.write_bytes(head(version=100) + entry("w", noise(3)))
    assert read_rwkv_cpp(path)[1]["w"].dtype == "F32"


BROKEN: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "empty": (b"", ("0 bytes",)),
    "short header": (head()[:-1], ("23 bytes",)),
    "magic": (head(magic=0x67676D6C), ("0x67676d6c",)),
    "vocab": (head(vocab=0), ("vocab 0",)),
    "vocab below zero": (head(vocab=-5), ("vocab -5",)),
    "layers": (head(layers=2**30), (f"layers {2**30}",)),
    "entry cut": (head() + b"\1\0\0", ("byte 24", "cut off")),
    "no dimensions": (head() + struct.pack("<3i", 0, 1, 0) + b"w", ("0 dimensions",)),
    "many dimensions": (head() + struct.pack("<3i", 2**31 - 1, 1, 0) + b"w", ("2147483647 dimensions",)),
    "no name": (head() + struct.pack("<4i", 1, 0, 0, 1), ("name of 0 bytes",)),
    "long name": (head() + struct.pack("<4i", 1, 2**31 - 1, 0, 1), ("name of 2147483647 bytes",)),
    "name cut": (head() + struct.pack("<4i", 1, 9, 0, 1) + b"w", ("cut off",)),
    "name no text": (head() + struct.pack("<4i", 1, 1, 0, 1) + b"\xff" + bytes(4), ("UTF-8",)),
    "shape below zero": (head() + struct.pack("<5i", 2, 1, 0, -1, -1) + b"w", ("'w'", "impossible shape")),
    "shape of zero": (head() + struct.pack("<4i", 1, 1, 0, 0) + b"w", ("'w'", "impossible shape")),
    "huge": (head() + struct.pack("<7i", 4, 1, 0, *[2**24] * 4) + b"w", ("'w'", f"byte {4 * 2**96 + 53}")),
    "data cut": (head() + entry("w", noise(3))[:-1], ("'w'", "ends at byte")),
    "twice": (head() + entry("w", noise(3)) * 2, ("'w'", "twice")),
}


@pytest.mark.parametrize("case", list(BROKEN))
def test_broken_files_are_one_line(tmp_path: Path, case: str) -> None:
    data, culprits = BROKEN[case]
    path = tmp_path / "x.bin"
    path.write_bytes(data)
    refusal(lambda: read_rwkv_cpp(path), "x.bin", *culprits)


@pytest.mark.parametrize(("data", "culprit"), [
    (head(version=102), "102"), (head(kind=4), "type 4"), (head() + struct.pack("<4i", 1, 1, 17, 1) + b"w", "type 17"),
])  # fmt: skip
def test_other_versions_and_types_are_named(tmp_path: Path, data: bytes, culprit: str) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(data)
    refusal(lambda: read_rwkv_cpp(path), culprit, kind=UnsupportedError)


SMALL = head() + b"".join(entry(name, value) for name, value in list(version_4(8, 1, 4).items())[:6])


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, len(SMALL) - 1), byte=st.integers(0, 255), cut=st.integers(0, len(SMALL)))
def test_a_changed_byte_and_a_lost_end_never_raise_anything_else(tmp_path: Path, at: int, byte: int, cut: int) -> None:
    data = bytearray(SMALL)
    data[at] = byte
    for variant in (bytes(data), SMALL[:cut]):
        path = tmp_path / "x.bin"
        path.write_bytes(variant)
        for call in (read_rwkv_cpp, open_model):
            message = ""
            try:
                call(path)
            except ModelError as error:
                message = str(error)
            assert len(message.splitlines()) <= 1


def loaded(path: Path) -> tuple[ModelSpec, dict[str, Any]]:
    checkpoint = open_model(path)
    return checkpoint.spec, load_weights(checkpoint, checkpoint.spec, "float32")


def test_version_4_is_found_by_its_tensors(tmp_path: Path) -> None:
    tensors = version_4()
    spec, weights = loaded(write(tmp_path / "x.bin", tensors))
    assert [layer.mixer for layer in spec.layers] == [Rwkv4(width=E, decay_is_log=False)] * 2
    assert (spec.family, spec.max_position, spec.eos_token_ids, spec.dtype) == ("rwkv", 2**20, (), "float32")
    assert spec.num_params == sum(value.size for value in tensors.values())
    np.testing.assert_array_equal(weights["layers.1.time_decay"], tensors["blocks.1.att.time_decay"])
    np.testing.assert_array_equal(weights["layers.1.ffn_r"], tensors["blocks.1.ffn.receptance.weight"])


def test_version_7_is_found_by_its_tensors(tmp_path: Path) -> None:
    tensors = version_7()
    half = {n: v.astype(np.float16) if v.ndim == 2 and "r_k" not in n else v for n, v in tensors.items()}
    spec, weights = loaded(write(tmp_path / "x.bin", half, 3))
    first, second, third = (layer.mixer for layer in spec.layers)
    ranks = {"rate_rank": 4, "gate_rank": 6, "num_heads": 2, "head_dim": 8}
    assert first == Rwkv7(decay_rank=3, first=True, **ranks)  # type: ignore[arg-type]
    assert second == Rwkv7(decay_rank=4, value_rank=5, **ranks)  # type: ignore[arg-type]
    assert third == Rwkv7(decay_rank=5, value_rank=5, **ranks)  # type: ignore[arg-type]
    assert spec.num_params == sum(value.size for value in tensors.values())
    for row, name in enumerate("rwkvag"):
        np.testing.assert_array_equal(weights[f"layers.2.mix_{name}"], tensors["blocks.2.att.x_rwkvag"][row, 0])
    np.testing.assert_array_equal(weights["layers.1.r_k"], tensors["blocks.1.att.r_k"].reshape(-1))
    np.testing.assert_array_equal(weights["layers.1.v0"], tensors["blocks.1.att.v0"].reshape(-1))
    np.testing.assert_array_equal(weights["layers.1.w2"], half["blocks.1.att.w2"].astype(np.float32))


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: v for n, v in tensors.items() if n != name}


def having(name: str, *shape: int) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: noise(*shape)}


@pytest.mark.parametrize(("version", "change", "culprit", "kind"), [
    (4, without("blocks.1.att.key.weight"), "blocks.1.att.key.weight", ModelError),
    (4, without("blocks.0.ffn.key.weight"), "blocks.0.ffn.key.weight", ModelError),
    (4, having("blocks.1.att.key.weight", E, E + 1), "blocks.1.att.key.weight", ModelError),
    (4, having("emb.weight", V - 1, E), "emb.weight", ModelError),
    (4, having("blocks.0.att.extra", 3), "blocks.0.att.extra", UnsupportedError),
    (4, having("blocks.0.att.ln_x.weight", E), "neither version 4 nor version 7", UnsupportedError),
    (4, without("blocks.0.att.time_first"), "neither version 4 nor version 7", UnsupportedError),
    (7, without("blocks.0.att.r_k"), "r_k", ModelError),
    (7, having("blocks.0.att.r_k", 3, 5), "r_k", ModelError),
    (7, without("blocks.1.att.v1"), "blocks.1.att.v1", ModelError),
    (7, without("blocks.1.att.v0"), "blocks.1.att.v0", ModelError),
    (7, having("blocks.0.att.v0", 1, 1, E), "blocks.0.att.v0", UnsupportedError),
    (7, having("blocks.1.att.x_rwkvag", 5, 1, E), "x_rwkvag", ModelError),
])  # fmt: skip
def test_models_that_do_not_fit_are_named(
    tmp_path: Path, version: int, change: Callable[[Tensors], Tensors], culprit: str, kind: type[ModelError]
) -> None:
    tensors, layers = (version_4(), 2) if version == 4 else (version_7(), 3)
    path = write(tmp_path / "x.bin", change(tensors), layers)
    refusal(lambda: open_model(path), culprit, kind=kind)


def test_a_header_of_other_sizes_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.bin", version_4(), layers=3)
    refusal(lambda: open_model(path), "blocks.2")
    path = write(tmp_path / "x.bin", version_4(), layers=1)
    refusal(lambda: open_model(path), "blocks.1", kind=UnsupportedError)


def test_a_folder_with_one_such_file_is_its_model(tmp_path: Path) -> None:
    write(tmp_path / "x.bin", version_4())
    (tmp_path / "logits.bin").write_bytes(bytes(1024))
    assert open_model(tmp_path).path == tmp_path / "x.bin"
    write(tmp_path / "y.bin", version_7(), 3)
    refusal(lambda: open_model(tmp_path), "several models", "x.bin", "y.bin")


def test_256_tokens_are_bytes_and_others_need_a_file(tmp_path: Path) -> None:
    checkpoint = open_model(write(tmp_path / "x.bin", version_4()))
    tokenizer = load_tokenizer(checkpoint.tokenizer, checkpoint.spec)
    assert tokenizer is not None
    assert tokenizer.encode("aé\0") == [97, 0xC3, 0xA9, 0]
    assert tokenizer.decode(list(range(256))) == bytes(range(256)).decode("utf-8", "replace")
    assert (tokenizer.vocab_size, tokenizer.eos_ids, tokenizer.bos_id) == (256, (), None)

    unknown = open_model(write(tmp_path / "x.bin", version_4(300), vocab=300)).tokenizer
    assert unknown.kind == "none"
    assert "300 tokens" in unknown.reason

    world = write(tmp_path / "x.bin", version_4(65536), vocab=65536)
    lacking = open_model(world)
    assert lacking.spec.eos_token_ids == (0,)
    assert lacking.tokenizer.kind == "none"
    assert "rwkv_vocab_v20230424.txt" in lacking.tokenizer.reason
    lines = [f"{i + 1} {bytes([i])!r} 1" for i in range(256)]
    (tmp_path / "rwkv_vocab_v20230424.txt").write_text("\n".join(lines))
    found = open_model(world)
    tokenizer = load_tokenizer(found.tokenizer, found.spec)
    assert tokenizer is not None
    assert tokenizer.encode("b") == [99]
    assert tokenizer.eos_ids == (0,)
