"""How much of its attention a KV selector leaves a model, played over the full model's own attention maps.

The maps of a text are taken once. Then the text is gone through as if it were served: the selector is told what it
wants to watch, and asked at the positions at which it would be; what it drops is gone. Every token behind the prompt
counts: *retained* is the share of its full attention that falls on tokens which are still there. What the model would
compute from the rest, and would then attend to, is not looked at: this is a selector's judgement, not a model's
quality.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.base.bf16 import F32
from penstock.config.selection import SelectionConfig
from penstock.core.selection import KVLine, KVSelector, Selecting
from penstock.eval.maps import LayerMap
from penstock.ops.plan import I32


class Cut(NamedTuple):
    """One selection: how many tokens there were, the budget, and the positions that each line kept."""

    num_tokens: int
    budget: int
    kept: tuple[I32, ...]


class Played(NamedTuple):
    """`retained` [lines, tokens behind the prompt]; `lines`: (layer, kv head) of each; `cuts` in order."""

    retained: F32
    lines: tuple[tuple[int, int], ...]
    cuts: tuple[Cut, ...]

    @property
    def kept_share(self) -> float:
        """Tokens kept at the selections, of those that there were."""
        kept = sum(len(line) for cut in self.cuts for line in cut.kept)
        return kept / sum(cut.num_tokens * len(cut.kept) for cut in self.cuts)


def play(
    selector: KVSelector, config: SelectionConfig, maps: Sequence[LayerMap], token_ids: Sequence[int], prompt_len: int,
    step: int = 1 << 30,
) -> Played:  # fmt: skip
    """`maps` are of the whole text. The prompt is read in steps of at most `step` tokens, as is what follows."""
    tokens = np.asarray(token_ids, np.int32)
    tapes = [tape for layer in maps for tape in _tapes(layer, selector.per_head)]
    lines = [KVLine(layer, head, np.zeros(0, np.int32)) for layer, head, _ in tapes]
    retained = np.zeros((len(lines), len(tokens) - prompt_len), np.float32)
    cuts: list[Cut] = []
    done = 0
    while done < len(tokens):
        stop = config.next_position(done, prompt_len)
        end = min(stop, done + step, len(tokens))
        for i, (line, (_, _, full)) in enumerate(zip(lines, tapes, strict=True)):
            _grow(line, done, end)
            rows = full[done:end][:, :, line.positions]
            left = rows.sum(axis=-1)
            behind = max(done, prompt_len)
            retained[i, behind - prompt_len : max(0, end - prompt_len)] = left[behind - done :].mean(axis=1)
            if selector.watches == "all":
                selector.watch(line, _again(rows), done)
        done = end
        if done == stop:
            cuts.append(_select(selector, config, lines, [full for _, _, full in tapes], tokens[:done], prompt_len))
    return Played(retained, tuple((line.layer, line.head) for line in lines), tuple(cuts))


def _tapes(layer: LayerMap, per_head: bool) -> list[tuple[int, int, F32]]:
    """(layer, head, weights [T, H/G, T]) of each line."""
    weights = layer.weights
    if per_head:
        return [(layer.layer, g, weights[:, g]) for g in range(weights.shape[1])]
    return [(layer.layer, 0, weights.reshape(len(weights), -1, weights.shape[-1]))]


def _grow(line: KVLine, start: int, end: int) -> None:
    line.positions = np.concatenate([line.positions, np.arange(start, end, dtype=np.int32)])
    new = np.zeros(end - start, np.float32)
    line.stats.update({name: np.concatenate([old, new]) for name, old in line.stats.items()})


def _again(rows: F32) -> F32:
    """As softmax would have it: what is left sums to 1. A token always sees itself, but its weight may round to 0."""
    total = rows.sum(axis=-1, keepdims=True)
    return np.divide(rows, np.where(total > 0, total, 1), dtype=np.float32)


def _select(
    selector: KVSelector, config: SelectionConfig, lines: list[KVLine], full: list[F32], tokens: I32, prompt_len: int
) -> Cut:
    n, observe = len(tokens), config.options.observe
    at = Selecting(n, prompt_len, config.budget.of(n), tokens)
    for line, weights in zip(lines, full, strict=True):
        last, positions = weights[max(0, n - observe) : n], line.positions

        def recent(last: F32 = last, positions: I32 = positions) -> F32:
            return _again(last[:, :, positions])

        line.recent = recent
    for line, stay in zip(lines, selector.select(at, lines), strict=True):
        line.positions = line.positions[stay]
        line.stats.update({name: old[stay] for name, old in line.stats.items()})
    return Cut(n, at.budget, tuple(line.positions for line in lines))
