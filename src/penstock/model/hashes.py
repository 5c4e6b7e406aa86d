"""Experts that nobody chooses: functions from a token's id (catalogue row C68).

A function is called with the size of the vocabulary, the number of experts, how many of them a token gets, and the
number of the layer; it gives their ids [V, K], or [1, K] if they are the same for all tokens, in any order, none twice.
It has to give the same on every machine: it is part of the model. Source: Roller et al., Hash Layers, arXiv 2106.04426,
section 3.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from penstock.base.errors import ModelError
from penstock.base.registry import Registry
from penstock.ops.plan import I32

HASHES: Registry[Callable[[int, int, int, int], I32], None] = Registry("expert hash")
HASHES.add("all", "penstock.model.hashes:every")
HASHES.add("modulo", "penstock.model.hashes:modulo")
HASHES.add("random", "penstock.model.hashes:random")
_ROWS = 4096  # of a vocabulary, looked at at a time


def hashed(name: str, vocab_size: int, num_experts: int, top_k: int, layer: int) -> I32:
    """What the function called `name` gives, ids ascending. Raises ConfigError for an unknown name, ModelError for what
    cannot be experts."""
    found = np.sort(np.asarray(HASHES.get(name)(vocab_size, num_experts, top_k, layer)), axis=-1)
    good = found.shape in ((vocab_size, top_k), (1, top_k)) and found.dtype.kind in "iu"
    good = good and bool((found >= 0).all() and (found < num_experts).all() and (found[:, 1:] > found[:, :-1]).all())
    if not good:
        raise ModelError(
            f"expert hash {name!r} does not give each of {vocab_size} tokens {top_k} different experts of {num_experts}"
        )
    return np.ascontiguousarray(found, np.int32)


def every(vocab_size: int, num_experts: int, top_k: int, layer: int) -> I32:
    """All of them, if a token gets as many."""
    return np.arange(num_experts, dtype=np.int32)[None]


def modulo(vocab_size: int, num_experts: int, top_k: int, layer: int) -> I32:
    """The id's remainder, and those that stand as far apart as they can from there on."""
    apart = np.arange(top_k) * (num_experts // top_k)
    out: I32 = ((np.arange(vocab_size)[:, None] + apart) % num_experts).astype(np.int32)
    return out


def random(vocab_size: int, num_experts: int, top_k: int, layer: int) -> I32:
    """The first of an order of the experts that is drawn for every token and layer."""
    out = np.empty((vocab_size, top_k), np.int32)
    experts = np.arange(num_experts, dtype=np.uint64)
    for first in range(0, vocab_size, _ROWS):
        tokens = np.arange(first, min(first + _ROWS, vocab_size), dtype=np.uint64)
        drawn = _mixed(_mixed(tokens + np.uint64(layer << 32))[:, None] ^ _mixed(experts + np.uint64(1)))
        out[first : first + len(tokens)] = np.argsort(drawn, axis=-1, kind="stable")[:, :top_k]
    return out


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele et al., OOPSLA 2014) behind one step of its counter."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    out: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return out
