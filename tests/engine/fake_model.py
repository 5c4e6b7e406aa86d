"""A stand-in for a model, for laws that need thousands of steps. It is a mock, and a suspicious one.

It writes each token into the pages it is told to, reads its whole history back through the page tables, and makes
logits from what it read. A wrong page, a missed copy, a stale or leaked block changes the history and so the tokens;
every layer must tell the same history, and a recurrent state must agree with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.core.cache_spec import CacheGroup
from penstock.core.model_spec import Attention, FeedForward, Layer, ModelSpec, Recurrent
from penstock.ops.adapter_units import UnitMemory
from penstock.ops.plan import Planes, StepPlan
from penstock.ops.tree import path

MOD = 65521
VOCAB = 29


def attention(window: int | None = None, width: int = 1) -> Layer:
    return Layer(mixer=Attention(num_heads=1, num_kv_heads=1, head_dim=width, window=window), ffn=FeedForward(width=1))


def spec(*, slots: bool, layers: int = 2, windows: Sequence[int | None] = (), width: int = 1) -> ModelSpec:
    """One-element planes: just enough to hold a token id (attention) or a running hash (recurrent, windows).

    `windows`: one attention layer each in place of the usual ones; at least one of them wider than a token. `width`: of
    planes whose blocks shall have room for adapters.
    """
    recurrent = Layer(mixer=Recurrent(num_heads=1, key_dim=1, value_dim=1), ffn=FeedForward(width=1))
    attentions = [attention(window, width) for window in windows or [None] * layers]
    mixers = [layer for a in attentions for layer in ((a, recurrent) if slots else (a,))]
    return ModelSpec(
        family="fake", vocab_size=VOCAB, hidden_size=1, layers=tuple(mixers), max_position=512, eos_token_ids=(2,)
    )


def hash_step(h: int, token: int) -> int:
    return (h * 31 + token + 7) % MOD


def logits_of(h: int) -> np.ndarray:
    """Pseudo-random logits [V] for a history hash; distinct with overwhelming probability."""
    v = np.arange(VOCAB, dtype=np.uint64)
    start = np.uint64(((h + 1) * 0x9E3779B97F4A7C15) % 2**64)
    mixed = start ^ (v * np.uint64(0xBF58476D1CE4E5B9))
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(32)
    return ((mixed >> np.uint64(40)).astype(np.float64) / 2**24 * 8 - 4).astype(np.float32)


def history_hash(tokens: Sequence[int]) -> int:
    h = 0
    for t in tokens:
        h = hash_step(h, int(t))
    return h


def adapted_hash(h: int, mark: int) -> int:
    """What logits come of for a request with this adapter, 1 or more; 0: without one."""
    return (h + 7919 * mark) % MOD


class FakeParts(dict[str, Any]):
    """An adapter as it is read, of no matrices: a mark, and how many units are full of it."""

    def __init__(self, mark: int, num_units: int) -> None:
        self.mark, self.num_units = mark, num_units


class FakeForward:
    """Satisfies the runner's `Forward`. Counts the tokens it ran."""

    def __init__(self, groups: tuple[CacheGroup, ...]) -> None:
        self.groups = groups
        self.num_tokens = 0
        self.num_steps = 0
        self.max_batch = 0
        self.num_layers = sum(group.pages_per_slab for group in groups)
        self._pause: Callable[[int], None] | None = None
        self._adapters: dict[int, tuple[int, list[np.ndarray]]] = {}

    # An adapter is a mark, and units that are full of it; a step looks at all of those that it has.

    def prepare(self, parts: FakeParts) -> tuple[int, list[np.ndarray]]:
        return parts.mark, [np.full((parts.num_units, 1024), parts.mark, np.uint8)]

    def lay(self, prepared: tuple[int, list[np.ndarray]], memory: UnitMemory) -> tuple[int, list[np.ndarray]]:
        mark, (units,) = prepared
        return mark, memory.put(units)

    def put(self, number: int, prepared: tuple[int, list[np.ndarray]]) -> None:
        assert number not in self._adapters, "two adapters have one number"
        self._adapters[number] = prepared

    def drop(self, number: int) -> None:
        del self._adapters[number]

    def pause(self, call: Callable[[int], None] | None) -> None:
        self._pause = call

    def run(self, plan: StepPlan, planes: Sequence[Planes]) -> np.ndarray:
        self.num_steps += 1
        self.num_tokens += len(plan.token_ids)
        self.max_batch = max(self.max_batch, len(plan.seq_lens))
        hashes = np.zeros(len(plan.token_ids), dtype=np.int64)
        if self._pause is not None:
            self._in_turns(plan, planes, hashes)
            return self._logits(plan, hashes)
        for b in range(len(plan.seq_lens)):
            lo, hi = int(plan.query_start_loc[b]), int(plan.query_start_loc[b + 1])
            total = int(plan.seq_lens[b])
            tokens = plan.token_ids[lo:hi]
            start = total - (hi - lo)
            assert plan.positions[lo] == start
            if plan.mask is not None and plan.mask[lo:hi].any():
                hashes[lo:hi] = self._tree(plan, planes, b, lo, hi)
                continue
            history = None
            states: list[list[int]] = []
            tails: list[list[int]] = []
            for g, group in enumerate(self.groups):
                for i in range(group.pages_per_slab):
                    pages = plan.groups[g].pages(b, i)
                    if group.spec.window is not None:
                        tails.append(
                            self._window(planes[g], pages, plan.groups[g].block_size, start, tokens, group.spec.window)
                        )
                    elif group.spec.kind == "paged":
                        seen = self._paged(planes[g], pages, plan.groups[g].block_size, start, tokens)
                        if history is None:
                            history = seen
                        assert np.array_equal(history, seen), "layers disagree about the history"
                    else:
                        states.append(self._slot(planes[g], int(pages[0]), tokens))
            if history is None:  # nobody remembers everything; the hash that every window carries on stands for it
                hashes[lo:hi] = tails[0]
            else:
                h = 0
                for p, t in enumerate(history.tolist()):
                    h = hash_step(h, int(t))
                    if p >= start:
                        hashes[lo + p - start] = h
            for state in states:
                assert state == hashes[lo:hi].tolist(), "a recurrent state does not belong to this history"
            for tail in tails:
                assert tail == hashes[lo:hi].tolist(), "a window does not belong to this history"
        return self._logits(plan, hashes)

    def _logits(self, plan: StepPlan, hashes: np.ndarray) -> np.ndarray:
        return (
            np.stack([logits_of(adapted_hash(int(hashes[r]), self._mark(plan, r))) for r in plan.logits_indices])
            if len(plan.logits_indices)
            else (np.zeros((0, VOCAB), dtype=np.float32))
        )

    def _mark(self, plan: StepPlan, token: int) -> int:
        if plan.adapters is None:
            return 0
        number = int(plan.adapters[np.searchsorted(plan.query_start_loc, token, side="right") - 1])
        if number < 0:
            return 0
        mark, pieces = self._adapters[number]
        assert all((piece == mark).all() for piece in pieces), "somebody wrote over an adapter"
        return mark

    def _in_turns(self, plan: StepPlan, planes: Sequence[Planes], hashes: np.ndarray) -> None:
        """Layer by layer, all rows of each: models of one full group alone."""
        assert self._pause is not None
        assert len(self.groups) == 1, "one full group"
        told: list[np.ndarray | None] = [None] * len(plan.seq_lens)
        for i in range(self.num_layers):
            self._pause(i)
            for b, before in enumerate(told):
                lo, hi = int(plan.query_start_loc[b]), int(plan.query_start_loc[b + 1])
                start, pages = int(plan.positions[lo]), plan.groups[0].pages(b, i)
                told[b] = self._paged(planes[0], pages, plan.groups[0].block_size, start, plan.token_ids[lo:hi])
                assert before is None or np.array_equal(before, told[b]), "layers disagree about the history"
        self._pause(self.num_layers)
        for b, history in enumerate(told):
            assert history is not None
            lo, h = int(plan.query_start_loc[b]), 0
            for p, t in enumerate(history.tolist()):
                h = hash_step(h, int(t))
                if p >= plan.positions[lo]:
                    hashes[lo + p - int(plan.positions[lo])] = h

    def _tree(self, plan: StepPlan, planes: Sequence[Planes], b: int, lo: int, hi: int) -> list[int]:
        """Drafts that branch: the i-th token of the step lies in slot start + i and sees its own path only."""
        assert plan.mask is not None
        start = int(plan.positions[lo])
        tokens = plan.token_ids[lo:hi].tolist()
        paths = [path(bits, own) for own, bits in enumerate(plan.mask[lo:hi].tolist())]
        out: list[int] | None = None
        for g, group in enumerate(self.groups):
            for i in range(group.pages_per_slab):
                pages, block = plan.groups[g].pages(b, i), plan.groups[g].block_size
                assert group.spec.per_token, "a recurrent state was given a tree"
                if group.spec.window is not None:
                    hashes = self._window_tree(planes[g], pages, block, start, tokens, paths, group.spec.window)
                else:
                    before = self._paged_cells(planes[g], pages, block, start, tokens)
                    hashes = [history_hash([*before, *(tokens[j] for j in nodes)]) for nodes in paths]
                assert out is None or out == hashes, "layers disagree about the history"
                out = hashes
        assert out is not None
        return out

    def _paged_cells(
        self, planes: Planes, pages: np.ndarray, block: int, start: int, tokens: Sequence[int]
    ) -> list[int]:  # fmt: skip
        """Write the tokens to their slots; what was there before `start`."""
        seen = self._paged(planes, pages, block, start, np.array(tokens))
        return [int(t) for t in seen[:start]]

    @staticmethod
    def _window_tree(
        planes: Planes, pages: np.ndarray, block: int, start: int, tokens: list[int], paths: list[list[int]],
        window: int,
    ) -> list[int]:  # fmt: skip
        first = max(0, start - 1)
        cells = pages[np.arange(first, start) // block]
        assert (cells >= 0).all(), "a token is to look at a block that is gone"
        h0 = int(planes["v"][cells[-1], first % block, 0, 0]) - 1 if start else 0
        hashes: list[int] = []
        for i, nodes in enumerate(paths):
            h = hash_step(h0 if len(nodes) == 1 else hashes[nodes[-2]], tokens[i])
            slot = start + i
            for name, value in (("k", tokens[i]), ("v", h)):
                cell = planes[name][pages[slot // block], slot % block]
                assert cell[0, 0] in (0, value + 1), "wrote over somebody's token"
                cell[0, 0] = value + 1
            hashes.append(h)
        return hashes

    @staticmethod
    def _paged(planes: Planes, pages: np.ndarray, block: int, start: int, tokens: np.ndarray) -> np.ndarray:
        """Write `tokens` (+1, so that zero means empty) and return the whole history."""
        total = start + len(tokens)
        for name in ("k", "v"):
            for j, t in enumerate(tokens.tolist()):
                p = start + j
                cell = planes[name][pages[p // block], p % block]
                assert cell[0, 0] == 0 or cell[0, 0] == t + 1, "wrote over somebody's token"
                cell[0, 0] = t + 1
        positions = np.arange(total)
        read = [planes[n][pages[positions // block], positions % block, 0, 0] for n in ("k", "v")]
        assert np.array_equal(read[0], read[1])
        # A page must be clean beyond what its sequence wrote: leftovers are a leak.
        tail = planes["k"][pages[(total - 1) // block], (total - 1) % block + 1 :, 0, 0]
        assert not tail.any(), "stale content in a page that was handed out"
        return read[0].astype(np.int64) - 1

    @staticmethod
    def _window(
        planes: Planes, pages: np.ndarray, block: int, start: int, tokens: np.ndarray, window: int
    ) -> list[int]:  # fmt: skip
        """Write tokens (k) and hashes of all history (v), each from its predecessor's; look at all that can be seen."""
        out: list[int] = []
        for p, t in enumerate(tokens.tolist(), start):
            seen = np.arange(max(0, p + 1 - window), p)
            cells = pages[seen // block]
            assert (cells >= 0).all(), "a token is to look at a block that is gone"
            ids, hashes = (planes[name][cells, seen % block, 0, 0].astype(np.int64) - 1 for name in ("k", "v"))
            for i in range(1, len(seen)):
                assert hashes[i] == hash_step(int(hashes[i - 1]), int(ids[i])), "a window holds another history"
            h = hash_step(int(hashes[-1]) if p else 0, t)
            for name, value in (("k", t), ("v", h)):
                cell = planes[name][pages[p // block], p % block]
                assert cell[0, 0] in (0, value + 1), "wrote over somebody's token"
                cell[0, 0] = value + 1
            out.append(h)
        total = start + len(tokens)
        tail = planes["k"][pages[(total - 1) // block], (total - 1) % block + 1 :, 0, 0]
        assert not tail.any(), "stale content in a page that was handed out"
        return out

    @staticmethod
    def _slot(planes: Planes, page: int, tokens: np.ndarray) -> list[int]:
        cell = planes["state"][page]
        out = []
        h = int(cell[0, 0])
        for t in tokens.tolist():
            h = hash_step(h, t)
            out.append(h)
        cell[0, 0] = h
        return out
