"""Formats for small devices: ternary models of esp32-llm against a forward of their own, int8 ones of llama2.c."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.special import erf, log_softmax

from penstock import SamplingParams
from penstock.base.errors import UnsupportedError
from penstock.families.registry import open_model
from penstock.formats.llama2c import read_llama2c_int8
from penstock.formats.tensor_ref import TensorRef
from penstock.formats.ternary import read_pair_tokenizer, read_ternary
from penstock.launch.llm import LLM
from penstock.launch.tokenizer import load_tokenizer
from penstock.weights.load import load_weights
from penstock.weights.stored.scaled import int8
from penstock.weights.stored.ternary import ternary
from tests.paged import Paged
from tests.shared import shared
from tests.unit.formats.test_formats import refusal, stored_bytes

F64 = npt.NDArray[np.float64]
MODELS = ("micro-lm-pro.bin", "micro-lm-ultra.bin")


def paged(path: Path) -> Paged:
    checkpoint = open_model(path)
    weights = load_weights(checkpoint, checkpoint.spec, "float32")
    return Paged(checkpoint.spec, weights, num_slabs=400, block_size=8)


# --- the oracle: one pass over the file, in float64, sharing no code with the package


class Cursor:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 32

    def floats(self, count: int) -> F64:
        out = np.frombuffer(self.data, "<f4", count, self.at).astype(np.float64)
        self.at += 4 * count
        return out

    def matrix(self, rows: int, columns: int) -> tuple[F64, F64]:
        scale = self.floats(1)[0]
        packed = self.data[self.at : self.at + rows * columns // 4]
        self.at += len(packed)
        units = [(byte >> shift & 3) - 1 for byte in packed for shift in (0, 2, 4, 6)]
        assert max(units) <= 1
        return scale * np.array(units, np.float64).reshape(rows, columns), self.floats(rows)


def turned(x: F64) -> F64:
    """Rotary positions of [T, heads, D]: component i pairs with i + D/2."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(half) / half)
    c, s = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)


def normed(x: F64, weight: F64, bias: F64) -> F64:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight + bias


def logits_of(data: bytes, ids: list[int]) -> F64:
    """Logits [T, V] of a whole file."""
    magic, version, layers, heads, kv_heads, dim, _, vocab = struct.unpack("<8I", data[:32])
    assert (magic, version, kv_heads) == (0x54504F45, 3, 1)
    d, file = dim // heads, Cursor(data)
    embed = file.floats(vocab * dim).reshape(vocab, dim)
    x = embed[ids]
    future = np.triu(np.full((len(ids), len(ids)), -np.inf), 1)
    for _ in range(layers):
        h = normed(x, file.floats(dim), file.floats(dim))
        (q, bq), (k, bk), (v, bv), (o, bo) = (file.matrix(n, dim) for n in (dim, d, d, dim))
        queries = turned((h @ q.T + bq).reshape(-1, heads, d))
        keys, values = turned((h @ k.T + bk)[:, None])[:, 0], h @ v.T + bv
        scores = np.einsum("thd,sd->hts", queries, keys) / math.sqrt(d) + future
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("hts,sd->thd", weights, values).reshape(-1, dim) @ o.T + bo
        h = normed(x, file.floats(dim), file.floats(dim))
        up, b_up = file.matrix(4 * dim, dim)
        inner = h @ up.T + b_up
        down, b_down = file.matrix(dim, 4 * dim)
        x = x + (inner * 0.5 * (1 + erf(inner / math.sqrt(2)))) @ down.T + b_down
    x = normed(x, file.floats(dim), file.floats(dim))
    assert file.at == len(data)
    return x @ embed.T


@pytest.mark.parametrize("name", MODELS)
def test_ternary_models_compute_what_an_independent_forward_does(name: str) -> None:
    path = shared("models", "micro-lm-ternary", name)
    ids = np.random.default_rng(0).integers(0, 256, 48).tolist()
    want = logits_of(path.read_bytes(), ids)
    got = paged(path).one_go("a", ids)
    assert want.std() > 0.5
    np.testing.assert_allclose(got, want, atol=1e-4)
    assert open_model(path).spec.num_params == {MODELS[0]: 2_830_336, MODELS[1]: 10_903_040}[name]


def test_weights_are_ternary_and_a_third_of_them_zero() -> None:
    path = shared("models", "micro-lm-ternary", MODELS[0])
    checkpoint = open_model(path)
    weights = load_weights(checkpoint, checkpoint.spec, "float32")
    for name in ("layers.0.q", "layers.3.down", "layers.2.k"):
        scale = np.frombuffer(stored_bytes(read_ternary(path)[1][name.removeprefix("layers.") + ".scale"]), "<f4")[0]
        assert set(np.unique(weights[name])) == {-scale, 0, scale}
        assert 0.2 < (weights[name] == 0).mean() < 0.45


def test_ternary_text_runs_and_the_tokenizer_goes_both_ways() -> None:
    folder = shared("models", "micro-lm-ternary")
    refusal(lambda: open_model(folder), "'micro-lm-pro.bin', 'micro-lm-ultra.bin'", "name the file")
    llm = LLM(folder / MODELS[0])
    sampled = llm.generate("once upon a time", SamplingParams(temperature=0.8, max_tokens=60, seed=2))[0].outputs[0]
    assert len(sampled.token_ids) == 60
    assert len(set(sampled.text.split())) > 8
    checkpoint = open_model(folder / MODELS[1])
    tokenizer = load_tokenizer(checkpoint.tokenizer, checkpoint.spec)
    assert tokenizer is not None
    tokens, pairs = read_pair_tokenizer(folder / "bpe_tokenizer.json")
    for text in ("you and the king", "Once upon a time, there's 1 'thing'...\n\nllll", "é∂ ok", "", "aaaaaaa ttt "):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == merged_one_by_one(text, tokens, pairs)
        kept = "".join(c for c in text.lower() if c in tokens)
        assert tokenizer.decode(ids) == kept
    assert len(tokenizer.encode("you and the king", add_special_tokens=False)) < 10


def merged_one_by_one(text: str, tokens: list[str], pairs: list[tuple[int, int]]) -> list[int]:
    """As the trainer does it: every merge in turn, over the whole text, from left to right."""
    ids = [tokens.index(c) for c in text.lower() if c in tokens]
    for number, pair in enumerate(pairs, len(tokens) - len(pairs)):
        at = 0
        while at + 1 < len(ids):
            if (ids[at], ids[at + 1]) == pair:
                ids[at : at + 2] = [number]
            at += 1
    return ids


def write_ternary(path: Path, sizes: tuple[int, ...] = (1, 2, 1, 8, 16, 4), version: int = 3) -> bytes:
    layers, heads, kv_heads, dim, _, vocab = sizes
    kv = dim // heads * kv_heads
    rng = np.random.default_rng(4)

    def floats(count: int) -> bytes:
        return rng.standard_normal(count, dtype=np.float32).tobytes()

    def matrix(rows: int, columns: int = dim) -> bytes:
        units = rng.integers(0, 3, (rows * columns // 4, 4)) << np.array([0, 2, 4, 6])
        return struct.pack("<f", 0.5) + units.sum(1).astype(np.uint8).tobytes() + floats(rows)

    data = struct.pack("<8I", 0x54504F45, version, *sizes) + floats(vocab * dim)
    for _ in range(layers):
        data += floats(2 * dim) + matrix(dim) + matrix(kv) + matrix(kv) + matrix(dim) + floats(2 * dim)
        data += matrix(4 * dim) + matrix(dim, 4 * dim)
    data += floats(2 * dim)
    path.write_bytes(data)
    return data


def test_broken_ternary_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    data = write_ternary(path)
    ids = [0, 3, 1, 2, 2]
    np.testing.assert_allclose(paged(path).one_go("a", ids), logits_of(data, ids), atol=1e-4)
    assert open_model(tmp_path).tokenizer.kind == "none"
    for change in (-1, 1, 4):
        path.write_bytes(data[:change] if change < 0 else data + bytes(change))
        refusal(lambda: open_model(path), "m.bin", str(len(data)), str(len(data) + change))
    wrong = (
        (2, 0, "layers 0"), (2, 5000, "layers 5000"), (3, 3, "3 heads"), (4, 2**31, "kv_heads"),
        (5, 12, "dim 12 with 2"), (7, 0, "vocab 0"), (6, 0, "context 0"),
    )  # fmt: skip
    for field, value, culprit in wrong:
        broken = bytearray(data)
        struct.pack_into("<I", broken, 4 * field, value)
        path.write_bytes(broken)
        refusal(lambda: open_model(path), "m.bin", culprit)
    write_ternary(path, version=4)
    refusal(lambda: open_model(path), "version 4", kind=UnsupportedError)
    broken = bytearray(data)
    refs = read_ternary(write_back(path, data))[1]
    broken[refs["0.o"].offset] |= 3  # a code that stands for nothing
    path.write_bytes(broken)
    checkpoint = open_model(path)
    refusal(lambda: load_weights(checkpoint, checkpoint.spec, "float32"), "'0.o'", "NaN")
    broken = bytearray(data)
    struct.pack_into("<f", broken, refs["0.q.scale"].offset, math.inf)
    path.write_bytes(broken)
    refusal(lambda: load_weights(checkpoint, checkpoint.spec, "float32"), "'0.q'", "infinity")


def write_back(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("content", [
    {}, {"vocab": ["a"], "merges": [[0, 0]]}, {"vocab": ["a", "b", "ab"], "merges": [[0, 2]]},
    {"vocab": ["a", "b", "ba"], "merges": [[0, 1]]}, {"vocab": ["a", "a"], "merges": []},
    {"vocab": ["ab"], "merges": []}, {"vocab": ["a", 3], "merges": []}, {"vocab": "ab", "merges": []},
    {"vocab": ["a", "b", "ab"], "merges": [[True, 1]]},
])  # fmt: skip
def test_broken_pair_tokenizers_are_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    path = tmp_path / "bpe_tokenizer.json"
    path.write_text(json.dumps(content))
    refusal(lambda: read_pair_tokenizer(path), "bpe_tokenizer.json", "not a tokenizer")


def test_ternary_bytes_made_by_hand() -> None:
    codes = np.array([0b10_01_00_10, 0b11_01_01_01], np.uint8)
    got = np.concatenate(list(ternary(codes, np.array(0.25, np.float32), 4)))
    np.testing.assert_array_equal(got, [0.25, -0.25, 0, 0.25, 0, 0, 0, np.nan])


# --- llama2.c, int8


def test_int8_groups_made_by_hand() -> None:
    codes = np.array([1, -2, 127, -128, 0, 3], np.int8).view(np.uint8)
    got = list(int8(codes, np.array([0.5, 2, -1], np.float32), 2))
    np.testing.assert_array_equal(np.concatenate(got), [0.5, -1, 254, -256, 0, -3])
    assert [len(part) for part in got] == [2, 2, 2]


def kl(p: F64, q: F64) -> float:
    """Mean divergence of the rows, in nats."""
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def test_the_int8_stories_model_is_close_to_the_float32_one() -> None:
    folder = shared("models", "stories260K")
    small, full = open_model(folder / "stories260K-q8.bin"), open_model(folder)
    assert small.spec == full.spec
    assert small.tokenizer == full.tokenizer
    exact = load_weights(full, full.spec, "float32")
    coded = load_weights(small, small.spec, "float32")
    header, arrays, scales = read_llama2c_int8(folder / "stories260K-q8.bin")
    assert header.tied
    for name, array in coded.items():
        if array.ndim == 1:
            np.testing.assert_array_equal(array, exact[name])
        else:
            stored = name.split(".")
            where = "embed" if name == "embed" else f"{PARTS[stored[2]]}.{stored[1]}"
            step = np.repeat(read(scales[where], "<f4"), array.size // scales[where].shape[0]).reshape(array.shape)
            assert (np.abs(array - exact[name]) <= 0.5001 * step).all(), "codes are the nearest ones"
            np.testing.assert_array_equal(array, read(arrays[where], np.int8).reshape(array.shape) * step)
    reference = paged(folder).greedy({0: [1]}, 200)[0]
    ids = [1, *reference]
    p, q = (log_softmax(paged(path).one_go("a", ids).astype(np.float64), axis=-1) for path in (
        folder, folder / "stories260K-q8.bin"))  # fmt: skip
    assert 0 < kl(p, q) < 2e-3
    assert paged(folder / "stories260K-q8.bin").greedy({0: [1]}, 40)[0] == reference[:40]


PARTS = {"q": "wq", "k": "wk", "v": "wv", "o": "wo", "gate": "w1", "down": "w2", "up": "w3"}


def read(ref: TensorRef, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.frombuffer(stored_bytes(ref), dtype)


def test_broken_int8_files_are_refused(tmp_path: Path) -> None:
    data = shared("models", "stories260K", "stories260K-q8.bin").read_bytes()
    path = tmp_path / "m.bin"
    for change in (-1, 1, -4):
        path.write_bytes(data[:change] if change < 0 else data + bytes(change))
        refusal(lambda: open_model(path), "m.bin", str(len(data)), str(len(data) + change))
    wrong = (
        (8, "i", 63, "dim 63"), (28, "i", -512, "group size"), (36, "B", 2, "shared 2"), (37, "i", 0, "group size 0"),
        (37, "i", 7, "groups of 7"), (16, "i", 2**30, "layers"), (37, "i", -8, "group size -8"),
    )  # fmt: skip
    for at, code, value, culprit in wrong:
        broken = bytearray(data)
        struct.pack_into("<" + code, broken, at, value)
        path.write_bytes(broken)
        refusal(lambda: open_model(path), "m.bin", culprit)
    path.write_bytes(data)
    assert open_model(tmp_path).path == path  # alone in its folder, it is the model
