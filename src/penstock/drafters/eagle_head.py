"""The trained head of EAGLE: from the model's features and the tokens behind them to the features that come next.

A *feature* f_i is the hidden state behind the final norm that token x_{i+1} is chosen from. *Slot* i holds the pair
(f_i, x_{i+1}); the head turns it into what f_{i+1} will probably be, and the model's own output matrix turns that into
drafts of x_{i+2}. A draft and the predicted feature are the pair of the next slot, and so on.

    x = fc [norm(f), norm(embedding)]          x += o attention(norm(x))          x += down(silu(gate h) * up h)
    next feature = x

Attention reaches back `window` slots; positions are known by their distance alone, through a bias that is learnt per
attention head and distance. Where the model's feature is not known (of a prompt, of steps without drafts), a learnt
vector stands in for norm(f). A slot's key and value depend on its own pair only, so they are computed once.

Source: Li et al., EAGLE, arXiv 2401.15077, section 3.1 (features and shifted tokens; there the head has the shape of
the model's own layer, attends to all of the text and keeps a cache; here a window, and its own few norms).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.drafters.heads import heads_problem, numbers, open_heads
from penstock.formats.files import quoted

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
Known = npt.NDArray[np.bool_]
EPS = 1e-6
NAMES = ("fc", "absent", "norms", "qkv", "o", "distance", "gate_up", "down")
_LOWEST = np.float32(-80.0)


class Queries(NamedTuple):
    """Row r asks for branch `branch[r]` of tree `tree[r]`, at depth `level` (0: the root).

    Shapes: q [R, E], tree and branch [R], path [2, R, level, E]: keys and values of the drafts that lead to the row,
    itself the last.
    """

    q: F32
    tree: I64
    branch: I64
    path: F32

    @property
    def level(self) -> int:
        return int(self.path.shape[2])


class EagleHead(NamedTuple):
    """Matrices are stored as [out, in]. E: hidden size, H: attention heads, W: window, F: width of the feed-forward.

    Shapes: fc [E, 2E], absent [E], norms [2, E] (attention, feed-forward), qkv [3E, E], o [E, E],
    distance [H, W], gate_up [2F, E], down [E, F].
    """

    fc: F32
    absent: F32
    norms: F32
    qkv: F32
    o: F32
    distance: F32
    gate_up: F32
    down: F32

    @property
    def window(self) -> int:
        return int(self.distance.shape[1])

    @property
    def hidden_size(self) -> int:
        return len(self.absent)

    def pairs(self, features: F32, known: Known, embeddings: F32) -> F32:
        """What stands for pairs of a feature, if it is `known`, and the token behind it. Shapes: [P, E], [P], [P, E]
        -> [P, E]."""
        own = np.where(known[:, None], _normed(features), self.absent)
        x: F32 = np.concatenate([own, _normed(embeddings)], axis=1) @ self.fc.T
        return x

    def project(self, x: F32) -> tuple[F32, F32]:
        """Queries [P, E], keys and values [2, P, E] of pairs [P, E]."""
        q, k, v = np.split((_normed(x) * self.norms[0]) @ self.qkv.T, 3, axis=1)
        return q, np.stack([k, v])

    def attend(self, queries: Queries, ring: F32, ages: I64) -> F32:
        """What each query finds in its sequence's window and on its own path: [R, E].

        Shapes: ring [2, J, W, E] keys and values of verified slots; ages [J, W]: how many slots each lies behind the
        newest of its sequence, W where there is none.
        """
        num_heads, window = self.distance.shape
        level, (_, j, _, e), b = queries.level, ring.shape, 1 + int(queries.branch.max())
        at, dim = (queries.tree, queries.branch), e // num_heads
        q = np.zeros((j, b, num_heads, dim), np.float32)
        q[at] = (queries.q * np.float32(dim**-0.5)).reshape(-1, num_heads, dim)
        beyond = np.full((num_heads, 1), -np.inf, np.float32)
        bias = np.concatenate([self.distance, beyond], axis=1)[:, np.minimum(ages + level, window)]
        keys, values = ring.reshape(2, j, window, num_heads, dim)
        scores = (q.transpose(0, 2, 1, 3) @ keys.transpose(0, 2, 3, 1)).transpose(1, 0, 2, 3) + bias[:, :, None]
        seen = scores[:, *at].transpose(1, 0, 2)  # [R, H, W]
        own_keys, own_values = queries.path.reshape(2, len(queries.q), level, num_heads, dim)
        own = np.einsum("rhd,rlhd->rhl", q[at], own_keys) + self.distance[:, :level][:, ::-1]
        weights = _softmax(np.concatenate([seen, own], axis=2))
        spread = np.zeros((j, b, num_heads, window), np.float32)
        spread[at] = weights[:, :, :window]
        found = (spread.transpose(0, 2, 1, 3) @ values.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)[at]
        out: F32 = found + np.einsum("rhl,rlhd->rhd", weights[:, :, window:], own_values)
        return out.reshape(-1, e)

    def predict(self, x: F32, found: F32) -> F32:
        """The next features of pairs and of what their queries have found. Shapes: [P, E] each."""
        x = x + found @ self.o.T
        gate, up = np.split((_normed(x) * self.norms[1]) @ self.gate_up.T, 2, axis=1)
        # The bound keeps exp finite; beyond it the result is 0 in float32 anyhow.
        out: F32 = x + (gate / (1 + np.exp(-np.maximum(gate, _LOWEST))) * up) @ self.down.T
        return out


def _normed(x: F32) -> F32:
    out: F32 = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(EPS))
    return out


def _softmax(scores: F32) -> F32:
    """Along the last axis, of which one number at least is finite."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out: F32 = weights / weights.sum(axis=-1, keepdims=True)
    return out


def read_eagle(folder: Path, hidden_size: int, fingerprint: str) -> EagleHead:
    """What `tools/train/eagle.py` wrote. Raises: ConfigError."""
    tensors, _ = open_heads(folder, "eagle", hidden_size, fingerprint)
    head = EagleHead(*(numbers(tensors, folder, name) for name in NAMES))
    if not _is_sound(head, hidden_size):
        shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in zip(NAMES, head, strict=True))
        raise heads_problem(f"heads {quoted(folder)} are unsound: {shapes}")
    return head


def _is_sound(head: EagleHead, e: int) -> bool:
    if head.distance.ndim != 2 or head.down.ndim != 2:
        return False
    (num_heads, window), width = head.distance.shape, head.down.shape[1]
    if num_heads < 1 or e % num_heads or window < 2 or width < 1:
        return False
    want = [(e, 2 * e), (e,), (2, e), (3 * e, e), (e, e), (num_heads, window), (2 * width, e), (e, width)]
    return [t.shape for t in head] == want and all(bool(np.isfinite(t).all()) for t in head)
