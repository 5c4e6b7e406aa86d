"""Formats: what is read is what was written; what is broken or hostile is one ModelError line, never anything else."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from penstock.base.errors import ModelError, UnsupportedError
from penstock.formats.files import read_text
from penstock.formats.json_file import parse_json_object, read_json_object
from penstock.formats.llama2c import looks_like_tokenizer, read_llama2c, read_tokenizer
from penstock.formats.safetensors import read_index, read_safetensors
from penstock.formats.tensor_ref import TensorRef
from tests.shared import shared

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b.weight": np.arange(5, dtype=np.float16),
    "scalar": np.array(3.5, np.float64),
    "empty": np.zeros((0, 4), np.int8),
    "ids": np.arange(3, dtype=np.int64),
}


def refusal(call: Callable[[], object], *culprits: str, kind: type[ModelError] = ModelError) -> str:
    """The message of the error of exactly `kind` that `call` raises: one line that names every culprit."""
    with pytest.raises(ModelError) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) is kind, message
    assert len(message.splitlines()) == 1, message
    assert message.isprintable(), message
    for culprit in culprits:
        assert culprit in message
    return message


def stored_bytes(ref: TensorRef) -> bytes:
    return ref.path.read_bytes()[ref.offset : ref.offset + ref.nbytes]


def write_raw(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


# --- safetensors


def test_safetensors_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, metadata={"format": "np"})
    refs = read_safetensors(path)
    assert set(refs) == set(TENSORS)
    codes = {"float32": "F32", "float16": "F16", "float64": "F64", "int8": "I8", "int64": "I64"}
    for name, ref in refs.items():
        array = TENSORS[name]
        assert (ref.name, ref.path, ref.shape) == (name, path, array.shape)
        assert ref.dtype == codes[array.dtype.name]
        assert stored_bytes(ref) == array.tobytes()


def test_rows_of_a_reference_are_the_rows_of_the_array(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    array = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    save_file({"x": array}, path)
    ref = read_safetensors(path)["x"]
    assert ref.rows(1, 3).shape == (2, 3, 2)
    assert stored_bytes(ref.rows(1, 3)) == array[1:3].tobytes()
    assert ref.rows(4, 4).nbytes == 0
    assert ref.row(2).shape == (3, 2)
    assert stored_bytes(ref.row(2)) == array[2].tobytes()
    for start, stop in ((-1, 2), (3, 2), (0, 5)):
        with pytest.raises(ValueError, match="has no rows"):
            ref.rows(start, stop)
    with pytest.raises(ValueError, match="has no rows"):
        TensorRef(path, "scalar", "F32", (), 0, 4).rows(0, 1)
    with pytest.raises(ValueError, match="whole number of bytes"):
        TensorRef(path, "nibbles", "F4", (2, 3), 0, 3).rows(0, 1)


def test_safetensors_accepts_padding_and_an_empty_file(tmp_path: Path) -> None:
    padded = write_raw(tmp_path / "padded", json.dumps({"x": entry()}).encode() + b"   ", bytes(8))
    assert read_safetensors(padded)["x"].nbytes == 8
    assert read_safetensors(write_raw(tmp_path / "none", {})) == {}


HOSTILE: dict[str, tuple[object, bytes, str]] = {
    "overlap": ({"x": entry(), "y": entry(offsets=(4, 12))}, bytes(12), "'y'"),
    "twice the same bytes": ({"x": entry(), "y": entry()}, bytes(8), "overlaps"),
    "gap": ({"x": entry(), "y": entry(offsets=(12, 20))}, bytes(20), "gap of 4 bytes"),
    "gap at the front": ({"x": entry(offsets=(4, 12))}, bytes(12), "gap of 4 bytes"),
    "trailing bytes": ({"x": entry()}, bytes(9), "1 bytes after its last tensor"),
    "data but no tensor": ({}, bytes(9), "9 bytes after its last tensor"),
    "truncated data": ({"x": entry()}, bytes(7), "1 bytes after the file"),
    "offset far outside": ({"x": entry(offsets=(2**62, 2**62 + 8))}, bytes(8), "'x'"),
    "wrong size": ({"x": entry(shape=(3,))}, bytes(8), "needs 12"),
    "negative shape": ({"x": entry(shape=(-1, -2))}, bytes(8), "[-1, -2]"),
    "shape that wraps to 2 in 64 bits": ({"x": entry(shape=(2**62, 2, 2, 2**62, 2))}, bytes(8), "more elements"),
    "shape product of a million factors": ({"x": entry(shape=(2**60,) * 9999)}, bytes(8), "more elements"),
    "boolean shape": ({"x": entry(shape=(True, 2))}, bytes(8), "'x'"),
    "float shape": ({"x": entry(shape=(2.0,))}, bytes(8), "[2.0]"),
    "shape that is no list": ({"x": entry(shape="2")}, bytes(8), "'x'"),
    "backwards offsets": ({"x": entry(offsets=(8, 0))}, bytes(8), "data_offsets"),
    "three offsets": ({"x": entry(offsets=(0, 4, 8))}, bytes(8), "data_offsets"),
    "negative offset": ({"x": entry(offsets=(-8, 0))}, bytes(8), "data_offsets"),
    "unknown dtype": ({"x": entry(dtype="F31")}, bytes(8), "'F31'"),
    "dtype that is no string": ({"x": entry(dtype=["F32"])}, bytes(8), "unknown dtype"),
    "half a byte": ({"x": entry(dtype="F4", shape=(3,), offsets=(0, 1))}, bytes(1), "needs 2"),
    "extra field": ({"x": entry() | {"stride": 1}}, bytes(8), "exactly the fields"),
    "lacking field": ({"x": {"dtype": "F32", "shape": [2]}}, bytes(8), "exactly the fields"),
    "entry that is no object": ({"x": 3}, bytes(8), "'x'"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
    "metadata that is no object": ({"__metadata__": "a"}, b"", "__metadata__"),
    "name with a newline": ({"x\ny\u2028\ud800": 3}, b"", "x\\ny\\u2028"),
    "duplicate name": (b'{"x": 1, "x": 2}', b"", "'x' twice"),
    "duplicate field": (b'{"x": {"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}}', bytes(8), "'dtype'"),
    "not JSON": (b"{nonsense}", b"", "not JSON"),
    "not UTF-8": (b'{"\xff": 1}', b"", "not UTF-8"),
    "not an object": (b"[1, 2]", b"", "does not begin with"),
    "leading space": (b" {}", b"", "does not begin with"),
    "two objects": (b"{} {}", b"", "not JSON"),
    "deep nesting": (b'{"x":' + b"[" * 200_000, b"", "nested too deeply"),
    "endless number": (b'{"x":' + b"1" * 10_000 + b"}", b"", "a number is too long"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_safetensors_are_refused(tmp_path: Path, case: str) -> None:
    header, data, culprit = HOSTILE[case]
    path = write_raw(tmp_path / "evil.safetensors", header, data)
    refusal(lambda: read_safetensors(path), "evil.safetensors", culprit)


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**32, 50_000_000, 3])
def test_a_huge_header_length_is_refused_before_anything_is_allocated(tmp_path: Path, length: int) -> None:
    path = write_raw(tmp_path / "evil.safetensors", {}, length=length)
    refusal(lambda: read_safetensors(path), "evil.safetensors", f"claims a header of {length} bytes")


def test_the_header_is_bounded_even_in_a_file_that_is_large_enough(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "evil.safetensors", {}, length=100_000_001)
    os.truncate(path, 200_000_000)  # sparse: takes no room
    refusal(lambda: read_safetensors(path), "evil.safetensors", "at most 100000000")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = save(TENSORS)
    path = tmp_path / "cut.safetensors"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        refusal(lambda: read_safetensors(path), "cut.safetensors")


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")  # opening it would wait for a writer for ever
    refusal(lambda: read_safetensors(tmp_path / "pipe.safetensors"), "not a regular file")
    refusal(lambda: read_safetensors(tmp_path), "not a regular file")
    refusal(lambda: read_safetensors(tmp_path / "no\nsuch"), "cannot read", "no\\nsuch")
    refusal(lambda: read_safetensors(tmp_path / "a\0b"), "cannot read")


# --- the shard index


def write_shards(folder: Path) -> Path:
    shards = {"one.safetensors": ["a", "b.weight"], "two.safetensors": ["scalar", "empty", "ids"]}
    for shard, names in shards.items():
        save_file({name: TENSORS[name] for name in names}, folder / shard)
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    return write_index(folder, weight_map)


def write_index(folder: Path, weight_map: object) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return path


def test_index_finds_every_tensor_in_its_shard(tmp_path: Path) -> None:
    refs = read_index(write_shards(tmp_path))
    assert {name: stored_bytes(ref) for name, ref in refs.items()} == {k: v.tobytes() for k, v in TENSORS.items()}
    assert refs["a"].path == tmp_path / "one.safetensors"
    assert refs["ids"].path == tmp_path / "two.safetensors"


def test_shards_may_be_links_as_download_caches_make_them(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    folder.mkdir()
    save_file({"a": TENSORS["a"]}, blobs / "1234")
    (folder / "one.safetensors").symlink_to("../blobs/1234")
    refs = read_index(write_index(folder, {"a": "one.safetensors"}))
    assert stored_bytes(refs["a"]) == TENSORS["a"].tobytes()


@pytest.mark.parametrize(
    "shard",
    ["../one.safetensors", "/etc/one.safetensors", "sub/one.safetensors", "..\\one.safetensors", "c:one.safetensors",
     "..", "", "one.bin", "a\nb.safetensors", "a\0.safetensors", "\ud800.safetensors", 7, None, ["one.safetensors"]],
)  # fmt: skip
def test_a_shard_must_be_a_plain_name(tmp_path: Path, shard: object) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": TENSORS["a"]}, tmp_path / "one.safetensors")
    path = write_index(folder, {"a": shard})
    refusal(lambda: read_index(path), "model.safetensors.index.json", "plain *.safetensors name")


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    path = write_shards(tmp_path)
    weight_map = json.loads(path.read_text())["weight_map"]
    for broken, culprits in (
        (weight_map | {"ghost": "one.safetensors"}, ("'ghost'", "'one.safetensors'")),
        (weight_map | {"a": "two.safetensors"}, ("'a'", "'one.safetensors'")),
        ({k: v for k, v in weight_map.items() if k != "ids"}, ("'ids'", "'two.safetensors'")),
        (weight_map | {"c": "four.safetensors", "d": "3.safetensors"}, ("2 of 4", "'3.safetensors'")),
        ({}, ("no weight_map",)),
        (["a"], ("no weight_map",)),
    ):
        write_index(tmp_path, broken)
        refusal(lambda: read_index(path), *culprits)
    path.write_text("[]")
    refusal(lambda: read_index(path), "a JSON object, not a list")


def test_a_name_too_long_for_the_system_is_a_missing_shard(tmp_path: Path) -> None:
    path = write_index(tmp_path, {"a": "x" * 5000 + ".safetensors"})
    assert len(refusal(lambda: read_index(path), "1 of 1 shards")) < 1000


# --- JSON files


def test_json_is_bounded_and_must_be_an_object(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": [1, null, true], "b": Infinity}')
    assert read_json_object(path)["a"] == [1, None, True]
    refusal(lambda: read_json_object(path, limit_bytes=10), "config.json", "at most 10")
    for text, culprit in (("[]", "a list"), ("null", "null"), ("true", "a boolean"), ("3", "a number"), ('"x"', "str"),
                          ("", "line 1"), ('{\n"a" 1}', "line 2"), ('{"a":1,"a":1}', "'a' twice")):  # fmt: skip
        path.write_text(text)
        refusal(lambda: read_json_object(path), "config.json", culprit)
    path.write_bytes(b"\xff\xfe")
    refusal(lambda: read_json_object(path), "not UTF-8")
    refusal(lambda: read_text(path, 100), "not UTF-8")
    refusal(lambda: parse_json_object(b"[" * 200_000, "here"), "here", "too deeply")


# --- llama2.c


def write_llama2c(path: Path, *, tied: bool = True, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """A random model file with 2 layers; the arrays in it by the names of `read_llama2c`."""
    e, f, n, h, g, v, s = 8, 12, 2, 4, 2, 16, 10
    kv = g * e // h
    shapes = {"embed": (v, e), "att_norm": (n, e), "wq": (n, e, e), "wk": (n, kv, e), "wv": (n, kv, e), "wo": (n, e, e),
              "ffn_norm": (n, e), "w1": (n, f, e), "w2": (n, e, f), "w3": (n, f, e), "final_norm": (e,),
              "rope": (2, s, e // h // 2)} | ({} if tied else {"wcls": (v, e)})  # fmt: skip
    rng = np.random.default_rng(seed)
    arrays = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    header = struct.pack("<7i", e, f, n, h, g, v if tied else -v, s)
    path.write_bytes(header + b"".join(array.tobytes() for array in arrays.values()))
    del arrays["rope"]
    return arrays


def write_tokenizer(path: Path, tokens: list[tuple[bytes, float]], longest: int | None = None) -> None:
    longest = max(len(text) for text, _ in tokens) if longest is None else longest
    body = b"".join(struct.pack("<fi", score, len(text)) + text for text, score in tokens)
    path.write_bytes(struct.pack("<i", longest) + body)


@pytest.mark.parametrize("tied", [True, False])
def test_llama2c_round_trip(tmp_path: Path, tied: bool) -> None:
    path = tmp_path / "m.bin"
    arrays = write_llama2c(path, tied=tied)
    header, refs = read_llama2c(path)
    assert (header.dim, header.num_layers, header.num_kv_heads, header.head_dim) == (8, 2, 2, 2)
    assert (header.vocab_size, header.tied) == (16, tied)
    assert {name: stored_bytes(ref) for name, ref in refs.items()} == {k: v.tobytes() for k, v in arrays.items()}
    assert {name: ref.shape for name, ref in refs.items()} == {name: a.shape for name, a in arrays.items()}


@pytest.mark.parametrize("change", [-1, 1, 4, -4])
def test_llama2c_size_must_match_to_the_byte(tmp_path: Path, change: int) -> None:
    path = tmp_path / "m.bin"
    write_llama2c(path)
    data = path.read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + bytes(change))
    refusal(lambda: read_llama2c(path), "m.bin", str(len(data)), str(len(data) + change))


@pytest.mark.parametrize(("field", "value", "culprit"), [
    (0, 0, "dim 0"), (0, 2**30, "dim"), (0, 10, "dim 10 with 4 heads"), (0, 4, "dim 4 with 4 heads"),
    (1, -1, "hidden_dim -1"), (2, 0, "layers 0"), (2, 5000, "layers 5000"), (3, -4, "heads -4"), (3, 3, "3 heads"),
    (4, 3, "3 kv heads"), (4, 0, "kv_heads 0"), (5, 0, "vocab 0"), (5, -(2**31), "vocab"), (6, -1, "seq -1"),
])  # fmt: skip
def test_llama2c_header_is_checked(tmp_path: Path, field: int, value: int, culprit: str) -> None:
    path = tmp_path / "m.bin"
    write_llama2c(path)
    data = bytearray(path.read_bytes())
    struct.pack_into("<i", data, 4 * field, value)
    path.write_bytes(data)
    refusal(lambda: read_llama2c(path), "m.bin", culprit)


def test_later_llama2c_versions_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(struct.pack("<2i", 0x616B3432, 1) + bytes(300))
    refusal(lambda: read_llama2c(path), "version 1", "only version 0", kind=UnsupportedError)
    path.write_bytes(bytes(27))
    refusal(lambda: read_llama2c(path), "too few")


TOKENS = [(b"<unk>", 0.0), (b"\n<s>\n", 0.0), (b"", -1.5), (b"\xff\x00", -2.0)]


def test_tokenizer_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "tok.bin"
    write_tokenizer(path, TOKENS)
    assert read_tokenizer(path, 4) == TOKENS
    assert looks_like_tokenizer(path, 4)
    assert not looks_like_tokenizer(path, 3)
    assert not looks_like_tokenizer(path, 5)
    assert not looks_like_tokenizer(tmp_path / "absent", 4)


def test_broken_tokenizers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tok.bin"
    write_tokenizer(path, TOKENS)
    whole = path.read_bytes()
    refusal(lambda: read_tokenizer(path, 3), "tok.bin", "10 bytes follow")
    refusal(lambda: read_tokenizer(path, 2**31), "tok.bin", "only")
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        refusal(lambda: read_tokenizer(path, 4), "tok.bin")
    write_tokenizer(path, TOKENS, longest=4)
    refusal(lambda: read_tokenizer(path, 4), "token 0 has the length 5")
    write_tokenizer(path, [(b"a", float("nan"))])
    refusal(lambda: read_tokenizer(path, 1), "score of token 0")
    path.write_bytes(struct.pack("<ifi", 5, 0.0, -1) + bytes(8))
    refusal(lambda: read_tokenizer(path, 1), "token 0 has the length -1")


def test_the_real_llama2c_files() -> None:
    header, refs = read_llama2c(shared("models", "stories260K", "stories260K.bin"))
    assert (header.dim, header.hidden_dim, header.num_layers, header.num_heads) == (64, 172, 5, 8)
    assert (header.num_kv_heads, header.vocab_size, header.seq_len, header.tied) == (4, 512, 512, True)
    norm = np.frombuffer(stored_bytes(refs["final_norm"]), np.float32)
    assert np.abs(norm).max() < 100  # a shifted layout would show noise here
    assert norm.min() > 0
    tokens = read_tokenizer(shared("models", "stories260K", "tok512.bin"), 512)
    assert [text for text, _ in tokens[:4]] == [b"<unk>", b"\n<s>\n", b"\n</s>\n", b"<0x00>"]
    assert b" the" in [text for text, _ in tokens]


@pytest.mark.parametrize(("parts", "culprit"), [
    (("stories260K", "stories260K-q8.bin"), "version 2"),
    (("stories260K", "tok512.bin"), "hidden_dim 0"),
    (("micro-lm-ternary", "micro-lm-pro.bin"), "header says dim"),
    (("rwkv4-tiny-660K", "expected-logits-4v0-660K.bin"), "header says dim"),
])  # fmt: skip
def test_real_files_of_other_formats_are_refused(parts: tuple[str, str], culprit: str) -> None:
    path = shared("models", *parts)
    kind = UnsupportedError if "version" in culprit else ModelError
    refusal(lambda: read_llama2c(path), path.name, culprit, kind=kind)
    refusal(lambda: read_safetensors(path), path.name)


# --- fuzz: whatever the bytes, only ModelError comes out


def mutated(data: bytes, edits: list[tuple[int, int]], cut: int) -> bytes:
    out = bytearray(data)
    for at, value in edits:
        out[at % len(out)] = value
    return bytes(out[: len(out) - cut])


EDITS = st.lists(st.tuples(st.integers(0, 399), st.integers(0, 255)), max_size=4)
FUZZ = settings(max_examples=200, derandomize=True, deadline=None)


def outcome(call: Callable[[], object]) -> str:
    message = ""
    try:
        call()
    except ModelError as error:
        message = str(error)
    assert message.isprintable(), message
    return "refused" if message else "read"


@pytest.fixture(scope="module")
def fuzz_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@FUZZ
@given(edits=EDITS, cut=st.sampled_from([0, 0, 0, 1, 9]))
def test_fuzz_safetensors(fuzz_folder: Path, edits: list[tuple[int, int]], cut: int) -> None:
    path = fuzz_folder / "fuzz.safetensors"
    whole = save(TENSORS)
    path.write_bytes(mutated(whole, edits, cut))
    result = outcome(lambda: read_safetensors(path))
    if cut:
        assert result == "refused"
    if path.read_bytes() == whole:
        assert result == "read"


@FUZZ
@given(edits=st.lists(st.tuples(st.integers(0, 31), st.integers(0, 255)), max_size=4), cut=st.sampled_from([0, 0, 1]))
def test_fuzz_llama2c(fuzz_folder: Path, edits: list[tuple[int, int]], cut: int) -> None:
    path = fuzz_folder / "fuzz.bin"
    write_llama2c(path)
    whole = path.read_bytes()
    path.write_bytes(mutated(whole, edits, cut))
    result = outcome(lambda: read_llama2c(path))
    if path.read_bytes()[:28] == whole[:28]:
        assert result == ("refused" if cut else "read")


@FUZZ
@given(edits=EDITS, cut=st.sampled_from([0, 0, 1]))
def test_fuzz_tokenizer(fuzz_folder: Path, edits: list[tuple[int, int]], cut: int) -> None:
    path = fuzz_folder / "tok.bin"
    write_tokenizer(path, TOKENS)
    whole = path.read_bytes()
    path.write_bytes(mutated(whole, edits, cut))
    result = outcome(lambda: read_tokenizer(path, len(TOKENS)))
    if path.read_bytes() == whole:
        assert result == "read"
