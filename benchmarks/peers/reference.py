"""The logits of Llama and Qwen2 checkpoints in float32, in plain numpy: what all engines' tokens are held against.

Shares no code with Penstock's own forward pass, which is among what is checked. Whole sequences at once, one layer's
weights in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
_HEAD_ROWS = 16384


class Scores(NamedTuple):
    """Of each generated token: how far its logit lies below the largest, in standard deviations of the row; and whether
    it is the largest. Tokens from the first on that an engine did not name (-1) are left out."""

    gap: F32
    is_best: npt.NDArray[np.bool_]


class Reference:
    """Raises ValueError for a model that is neither."""

    def __init__(self, folder: Path) -> None:
        c: dict[str, Any] = json.loads((folder / "config.json").read_text())
        if c.get("model_type") not in ("llama", "qwen2") or c.get("use_sliding_window"):
            raise ValueError(f"there is no reference for model_type {c.get('model_type')!r} with its settings")
        self.config = c
        self.heads, self.kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.head_dim = c.get("head_dim") or c["hidden_size"] // self.heads
        self._data = np.memmap(folder / "model.safetensors", np.uint8, "r")
        size = int(self._data[:8].view(np.uint64)[0])
        self.header = json.loads(self._data[8 : 8 + size].tobytes())
        self._start = 8 + size

    def raw(self, name: str) -> npt.NDArray[Any]:
        """A tensor as it is stored, bfloat16 as its bits. Raises KeyError."""
        entry = self.header[name]
        begin, end = (self._start + at for at in entry["data_offsets"])
        kind = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I32": np.int32}[entry["dtype"]]
        data = self._data[begin:end].tobytes()  # a copy: the file's own offsets need not be aligned
        return np.frombuffer(data, kind).reshape(entry["shape"])

    def weight(self, name: str) -> F32:
        """A tensor, widened. Raises KeyError."""
        values = self.raw(name)
        if values.dtype == np.uint16:
            return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return values.astype(np.float32)

    def scores(self, requests: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Scores]:
        """For each (prompt, generated tokens): every generated token, given all tokens before it as they were."""
        requests = [(list(p), _until_unknown(g)) for p, g in requests]
        hidden = self.hidden([[*p, *g[:-1]] for p, g in requests])
        rows = [h[len(p) - 1 : len(p) - 1 + len(g)] for h, (p, g) in zip(hidden, requests, strict=True)]
        chosen = np.array([t for _, g in requests for t in g], np.int64)
        gap, best = self._judge(np.concatenate(rows), chosen)
        cuts = np.cumsum([len(g) for _, g in requests])[:-1]
        parts = zip(np.split(gap, cuts), np.split(best, cuts), strict=True)
        return [Scores(a, b) for a, b in parts]

    def hidden(self, sequences: Sequence[Sequence[int]]) -> list[F32]:
        """The states before the head, [tokens, hidden] of each sequence. Raises ValueError for scaled positions."""
        if self.config.get("rope_scaling"):
            raise ValueError("there is no reference for rope_scaling")
        lengths = [len(s) for s in sequences]
        table = self.weight("model.embed_tokens.weight")
        x = table[np.concatenate([np.asarray(s, np.int64) for s in sequences])]
        del table
        positions = np.concatenate([np.arange(n) for n in lengths])
        frequency = self.config["rope_theta"] ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        angles = positions[:, None] * frequency[None]
        turn = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        for i in range(self.config["num_hidden_layers"]):
            x = self._layer(f"model.layers.{i}.", x, turn, lengths)
        x = self._norm(x, "model.norm.weight")
        return np.split(x, np.cumsum(lengths)[:-1])

    def logits(self, hidden: F32) -> F32:
        out: F32 = hidden @ self._head().T
        return out

    def _head(self) -> F32:
        tied = self.config.get("tie_word_embeddings", False)
        return self.weight("model.embed_tokens.weight" if tied else "lm_head.weight")

    def _judge(self, hidden: F32, chosen: npt.NDArray[np.int64]) -> tuple[F32, npt.NDArray[np.bool_]]:
        head, rows = self._head(), len(hidden)
        top = np.full(rows, -np.inf, np.float32)
        total, squares = np.zeros(rows), np.zeros(rows)
        mine = np.einsum("re,re->r", hidden, head[chosen])
        for start in range(0, len(head), _HEAD_ROWS):
            part = hidden @ head[start : start + _HEAD_ROWS].T
            top = np.maximum(top, part.max(1))
            total += part.sum(1, dtype=np.float64)
            squares += np.square(part, dtype=np.float64).sum(1)
        mean = total / len(head)
        deviation = np.sqrt(np.maximum(squares / len(head) - mean**2, 1e-30))
        gap = np.maximum(top - mine, 0.0) / deviation
        return gap.astype(np.float32), gap < 1e-5

    def _norm(self, x: F32, name: str) -> F32:
        mean = np.mean(np.square(x), axis=1, keepdims=True, dtype=np.float32)
        scale = np.float32(1.0) / np.sqrt(mean + np.float32(self.config["rms_norm_eps"]))
        return np.asarray(x * scale * self.weight(name), np.float32)

    def _linear(self, x: F32, name: str) -> F32:
        y = x @ self.weight(name + ".weight").T
        return y + self.weight(name + ".bias") if name + ".bias" in self.header else y

    def _layer(self, p: str, x: F32, turn: tuple[F32, F32], lengths: Sequence[int]) -> F32:
        normed = self._norm(x, p + "input_layernorm.weight")
        q, k, v = (self._linear(normed, f"{p}self_attn.{n}_proj") for n in "qkv")
        q, k = _rotate(q, self.heads, turn), _rotate(k, self.kv_heads, turn)
        v = v.reshape(len(v), self.kv_heads, -1)
        mixed, at = np.empty((len(x), self.heads * self.head_dim), np.float32), 0
        for n in lengths:
            part = slice(at, at + n)
            mixed[part] = self._attend(q[part], k[part], v[part])
            at += n
        x = x + self._linear(mixed, p + "self_attn.o_proj")
        normed = self._norm(x, p + "post_attention_layernorm.weight")
        gate = self._linear(normed, p + "mlp.gate_proj")
        up = self._linear(normed, p + "mlp.up_proj")
        return x + self._linear(gate / (1.0 + np.exp(-gate)) * up, p + "mlp.down_proj")

    def _attend(self, q: F32, k: F32, v: F32) -> F32:
        """q [T, heads, d], k and v [T, kv heads, d] of one sequence -> [T, heads * d]."""
        group = self.heads // self.kv_heads
        hidden = np.triu(np.full((len(q), len(q)), -np.inf, np.float32), 1)
        out = np.empty_like(q)
        for h in range(self.heads):
            scores = q[:, h] @ k[:, h // group].T / np.float32(np.sqrt(self.head_dim)) + hidden
            weights = np.exp(scores - scores.max(1, keepdims=True))
            out[:, h] = weights @ v[:, h // group] / weights.sum(1, keepdims=True)
        return out.reshape(len(q), -1)


def _rotate(x: F32, heads: int, turn: tuple[F32, F32]) -> F32:
    """[T, heads * d] -> [T, heads, d]; component i turns with component i + d / 2."""
    x = x.reshape(len(x), heads, -1)
    half = x.shape[2] // 2
    cos, sin = (t[:, None, :] for t in turn)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=2)


def _until_unknown(tokens: Sequence[int]) -> list[int]:
    """Tokens up to the first that the engine did not name: what comes after it cannot be judged."""
    known = list(tokens)
    return known[: known.index(-1)] if -1 in known else known
