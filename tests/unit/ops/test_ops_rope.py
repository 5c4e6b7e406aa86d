"""Rotary positions against transformers, and the law they exist for (catalogue row G01)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from penstock.core.model_spec import Rope
from penstock.ops.ref.rotary import rope, rope_angles, rope_frequencies, rope_table

ROPES = {
    "default": Rope(dim=16),
    "linear": Rope(dim=16, kind="linear", theta=500.0, factor=4.0),
    "llama3": Rope(
        dim=16, kind="llama3", theta=1000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position=64,
    ),
    # Contexts of 512: `dynamic` and `longrope` are fixed at start by that length.
    "dynamic": Rope(dim=16, kind="dynamic", factor=4.0, original_max_position=128),
    "yarn": Rope(
        dim=16, kind="yarn", theta=1000.0, factor=8.0, original_max_position=64, beta_fast=8.0, beta_slow=2.0,
        attention_factor=0.1 * math.log(8.0) + 1.0,
    ),
    "longrope": Rope(
        dim=16, kind="longrope", original_max_position=128, short_factor=tuple(1.0 + i / 8 for i in range(8)),
        long_factor=tuple(1.0 + i for i in range(8)), attention_factor=math.sqrt(1 + math.log(4.0) / math.log(128)),
    ),
}  # fmt: skip


CONTEXT = 512


def rotate(x: np.ndarray, how: Rope, positions: np.ndarray, first: int = 0) -> np.ndarray:
    table = rope_table(how, CONTEXT)
    return rope(x, rope_angles(positions.astype(np.int32), table), how.interleaved, first)


@pytest.mark.parametrize("kind", sorted(ROPES))
def test_G01_rope_equals_transformers(kind: str) -> None:
    how = ROPES[kind]
    parameters = {"rope_type": kind, "rope_theta": how.theta}
    extra = {
        "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "dynamic": ("factor",),
        "yarn": ("factor", "beta_fast", "beta_slow"), "longrope": (),
    }  # fmt: skip
    parameters |= {name: getattr(how, name) for name in extra.get(kind, ())}
    if kind in ("llama3", "yarn", "longrope"):
        parameters["original_max_position_embeddings"] = how.original_max_position
    if kind == "longrope":
        parameters |= {"short_factor": list(how.short_factor), "long_factor": list(how.long_factor)}
    trained = how.original_max_position if kind == "dynamic" else CONTEXT
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=16, max_position_embeddings=trained, rope_parameters=parameters
    )
    embedding = LlamaRotaryEmbedding(config)
    embedding(torch.zeros(1), torch.arange(CONTEXT)[None])  # lets it see the longest context once
    np.testing.assert_allclose(rope_frequencies(how, CONTEXT), embedding.inv_freq.double(), rtol=1e-6)
    positions = np.arange(300)
    x = np.random.default_rng(0).standard_normal((300, 4, 16)).astype(np.float32)
    tx = torch.tensor(x).transpose(0, 1)[None]
    cos, sin = (x[:, :300] for x in embedding(tx, torch.arange(CONTEXT)[None]))
    want, _ = apply_rotary_pos_emb(tx, tx, cos, sin)
    np.testing.assert_allclose(rotate(x, how, positions), want[0].transpose(0, 1), atol=1e-4)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", sorted(ROPES))
def test_G01_scores_depend_on_distance_alone(kind: str, interleaved: bool) -> None:
    base = ROPES[kind]
    how = Rope(**{f: getattr(base, f) for f in base.__struct_fields__ if f != "interleaved"}, interleaved=interleaved)
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 1, 1, 16)).astype(np.float32)
    for distance in (0, 1, 5, 63, 200):
        scores = [
            float(np.sum(rotate(q, how, np.array([p + distance])) * rotate(k, how, np.array([p])), dtype=np.float64))
            for p in (0, 1, 17, 100, 300)
        ]
        np.testing.assert_allclose(scores, scores[0], atol=1e-5)
    far = float(np.sum(rotate(q, how, np.array([9])) * rotate(k, how, np.array([0])), dtype=np.float64))
    near = float(np.sum(rotate(q, how, np.array([0])) * rotate(k, how, np.array([0])), dtype=np.float64))
    assert abs(far - near) > 1e-3, "positions must matter at all"


def test_G01_interleaved_pairs_neighbours() -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((5, 3, 8)).astype(np.float32)
    positions = np.array([0, 1, 2, 50, 99])
    halves = np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
    by_halves = rotate(halves, Rope(dim=8), positions)
    got = rotate(x, Rope(dim=8, interleaved=True), positions)
    np.testing.assert_array_equal(got[..., 0::2], by_halves[..., :4])
    np.testing.assert_array_equal(got[..., 1::2], by_halves[..., 4:])
    angle = 50 * 10000.0 ** (-2 / 8)
    pair = (x[3, 1, 2] + 1j * x[3, 1, 3]) * np.exp(1j * angle)
    np.testing.assert_allclose(got[3, 1, 2:4], [pair.real, pair.imag], rtol=1e-5)


@pytest.mark.parametrize("first", [0, 6, 10])
def test_partial_rope_leaves_the_rest_alone(first: int) -> None:
    x = np.random.default_rng(3).standard_normal((4, 2, 16)).astype(np.float32)
    positions = np.array([3, 4, 5, 90])
    before = x.copy()
    got = rotate(x, Rope(dim=6), positions, first)
    inside = slice(first, first + 6)
    np.testing.assert_array_equal(got[..., inside], rotate(x[..., inside].copy(), Rope(dim=6), positions))
    np.testing.assert_array_equal(np.delete(got, np.r_[inside], axis=-1), np.delete(x, np.r_[inside], axis=-1))
    np.testing.assert_array_equal(x, before)


def test_the_table_is_taken_in_float64() -> None:
    """At position 100000 a float32 angle is off by about 0.004; the table is not."""
    table = rope_table(Rope(dim=8), 100_001)
    angle = 100_000 * 10000.0 ** (-np.arange(0, 8, 2) / 8)
    assert table.shape == (2, 100_001, 4)
    assert table.dtype == np.float32
    np.testing.assert_allclose(table[:, -1], [np.cos(angle), np.sin(angle)], atol=1e-7)
