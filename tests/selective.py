"""The naive loop of a model whose cache is cut: no cache, no pages, everything recomputed for every token.

What a token sees of a line is written down as a list of positions. A selection is played as the settings say: at its
position the selector is asked about lines made of the naive model's own keys and queries, and what it leaves is what
later tokens see.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.base.bf16 import F32
from penstock.config.selection import SelectionConfig
from penstock.core.model_spec import Attention, ModelSpec
from penstock.core.selection import KVLine, KVSelector, Selecting
from penstock.ops.ref.product import linear
from penstock.select import KV_SELECTORS
from tests.oracle import NaiveModel

Lines = list[list[int]]
"""What each line holds: positions, ascending."""


class SelectiveModel(NaiveModel):
    """Plain GQA models. `prompt_len` has to be set before `logits`; `block_size`: of selectors that drop blocks."""

    def __init__(
        self, spec: ModelSpec, weights: dict[str, Any], selector: KVSelector, config: SelectionConfig, *,
        kv_dtype: str = "float32", block_size: int = 4,
    ) -> None:  # fmt: skip
        super().__init__(spec, weights, kv_dtype)
        self.selector, self.config, self.block_size = selector, config, block_size
        self.prompt_len = 0
        self._seen: list[Lines] = []  # [T] what each token sees before itself
        self._made: dict[int, tuple[F32, F32]] = {}  # layer -> q [T, H, D], k [T, G, D] of the last pass

    @property
    def heads(self) -> int:
        mixer = self.spec.layers[0].mixer
        assert isinstance(mixer, Attention)
        return mixer.num_kv_heads

    def logits(self, token_ids: Sequence[int], *, last_only: bool = False) -> F32:
        """As `NaiveModel.logits`, after every selection that those tokens bring about but one at their very end."""
        lanes = self.heads if self.selector.per_head else 1
        lines: Lines = [[] for _ in range(len(self.spec.layers) * lanes)]
        stats: list[dict[str, F32]] = [{} for _ in lines]
        self._seen, start = [], 0
        while start < len(token_ids):
            end = min(self.config.next_position(start, self.prompt_len), len(token_ids))
            for p in range(start, end):
                self._seen.append([list(line) for line in lines])
                for line in lines:
                    line.append(p)
            if end < len(token_ids):
                super().logits(token_ids[:end])
                self._cut(token_ids, lines, stats, start, end)
            start = end
        return super().logits(token_ids, last_only=last_only)

    def _cut(self, token_ids: Sequence[int], lines: Lines, stats: list[dict[str, F32]], start: int, end: int) -> None:
        budget = self.config.budget.of(end)
        if self.selector.drops == "blocks":
            self._cut_blocks(lines, budget)
            return
        # Where nothing is lost, all tokens may be chosen again.
        held = [list(range(end)) for _ in lines] if self.selector.aside else lines
        views = [self._view(i, line, stats[i], end) for i, line in enumerate(held)]
        if self.selector.watches == "all":
            for i, view in enumerate(views):
                before = len(view) - (end - start)
                for name, x in view.stats.items():
                    view.stats[name] = np.concatenate([x, np.zeros(len(view) - len(x), np.float32)])
                weights = self._weights(i, lines[i], start, end)
                assert weights.shape[2] == before + end - start
                self.selector.watch(view, weights, start)
        if max(map(len, lines)) <= budget and not KV_SELECTORS.traits(self.selector.name).always:
            return
        at = Selecting(end, self.prompt_len, budget, np.array(token_ids[:end], np.int32))
        for i, kept in enumerate(self.selector.select(at, views)):
            lines[i][:] = [held[i][slot] for slot in kept.tolist()]
            stats[i] = {name: x[kept] for name, x in views[i].stats.items()}

    def _cut_blocks(self, lines: Lines, budget: int) -> None:
        """Whole blocks behind the sinks' go until the rest fits; those that the newest tokens stand in stay."""
        size = self.block_size
        sinks = -(-self.config.options.sinks // size)
        for line in lines:
            while len(line) > budget and len(line) // size > sinks:
                del line[sinks * size : (sinks + 1) * size]

    def _view(self, i: int, line: list[int], stats: dict[str, F32], end: int) -> KVLine:
        lanes = self.heads if self.selector.per_head else 1
        layer, lane = divmod(i, lanes)
        for name, x in stats.items():
            stats[name] = np.concatenate([x, np.zeros(len(line) - len(x), np.float32)])
        _, k = self._made[layer]
        keys = k[line].reshape(len(line), -1) if lanes == 1 else k[line, lane]
        observe = self.config.options.observe
        return KVLine(
            layer, lane, np.array(line, np.int32), stats, keys=lambda: keys,
            recent=lambda: self._weights(i, line, max(0, end - observe), end),
        )  # fmt: skip

    def _weights(self, i: int, line: list[int], first: int, end: int) -> F32:
        """Attention [t, H/G, n] of tokens first ... end-1 over what the line holds."""
        lanes = self.heads if self.selector.per_head else 1
        layer, lane = divmod(i, lanes)
        q, k = self._made[layer]
        mixer = self.spec.layers[layer].mixer
        assert isinstance(mixer, Attention)
        assert lanes == self.heads, "nobody watches whole layers"
        per = q.shape[1] // lanes
        scale = np.float32(mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale)
        out = np.zeros((end - first, per, len(line)), np.float32)
        for t in range(first, end):
            n = sum(p <= t for p in line)
            s = (q[t, lane * per : (lane + 1) * per] @ k[line[:n], lane].T) * scale
            if mixer.soft_cap is not None:
                s = np.tanh(s / mixer.soft_cap) * mixer.soft_cap
            e = np.exp(s - s.max(axis=-1, keepdims=True))
            out[t - first, :, :n] = e / e.sum(axis=-1, keepdims=True)
        return out

    def _attention(self, h: F32, p: str, m: Attention) -> F32:
        t, layer = len(h), int(p.split(".")[1])
        q, k, v = (self._linear(h, p + name) for name in "qkv")
        q = q.reshape(t, m.num_heads, m.head_dim)
        k, v = (x.reshape(t, m.num_kv_heads, m.head_dim) for x in (k, v))
        assert m.qk_norm is None, "plain models only"
        if m.rope is not None and not self.selector.cache_positions:
            q, k = self._rope(q, m.rope), self._rope(k, m.rope)
        k, v = self._rounded(k), self._rounded(v)
        self._made[layer] = (q, k)
        scale = m.head_dim**-0.5 if m.scale is None else m.scale
        lanes = self.heads if self.selector.per_head else 1
        per = m.num_heads // lanes
        heads = m.num_kv_heads // lanes
        out = np.empty((t, m.num_heads, m.head_dim), np.float32)
        for i in range(t):
            for lane in range(lanes):
                seen = [*self._seen[i][layer * lanes + lane], i]
                keys, query = k[seen, lane * heads : (lane + 1) * heads], q[i, lane * per : (lane + 1) * per]
                if self.selector.cache_positions and m.rope is not None:
                    # Tokens stand where they stand in the cache.
                    keys = self._rope(keys, m.rope)
                    query = self._rope(np.repeat(query[None], len(seen), axis=0), m.rope)[-1]
                values = v[seen, lane * heads : (lane + 1) * heads]
                out[i, lane * per : (lane + 1) * per] = attend(query, keys, values, scale, m.soft_cap)
        return linear(out.reshape(t, -1), self.weights[p + "o"], None)


def attend(q: F32, k: F32, v: F32, scale: float, soft_cap: float | None) -> F32:
    """One token: q [H, D] over k and v [n, G, D] -> [H, D]. As `tests.oracle.softmax_attention`."""
    per = len(q) // k.shape[1]
    out = np.empty((len(q), v.shape[2]), np.float32)
    for g in range(k.shape[1]):
        own = slice(g * per, (g + 1) * per)
        s = (q[own] @ k[:, g].T) * scale
        if soft_cap is not None:
            s = soft_cap * np.tanh(s / soft_cap)
        e = np.exp(s - s.max(axis=-1, keepdims=True))
        out[own] = (e @ v[:, g]) / e.sum(axis=-1, keepdims=True)
    return out
