"""Why prompts were not found, and how old blocks are when they are found or leave. Nothing is decided by it.

A block that has left is remembered by its namespace, its place in its text and a hash of its tokens, a bounded number
of them, oldest forgotten first. So nobody can tell by these counters what another tenant has asked.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from penstock.base.hashing import digest
from penstock.core.messages import AGES_S, MISS_REASONS

if TYPE_CHECKING:
    from penstock.core.sequence import Sequence as Seq
    from penstock.kv.prefix.node import PrefixNode

REMEMBERED = 1 << 16


class Ages:
    """Blocks by seconds since they were last of use: a histogram."""

    def __init__(self) -> None:
        self.counts = [0] * (len(AGES_S) + 1)
        self.sum_s = 0.0

    def observe(self, age_s: float, num_blocks: int) -> None:
        self.counts[bisect_left(AGES_S, age_s)] += num_blocks
        self.sum_s += age_s * num_blocks


class Insight:
    """A part of a prefix tree. `misses`: tokens of prompts by reason, of first admissions."""

    def __init__(self, block_size: int, block_bytes: int) -> None:
        self.misses: Counter[str] = Counter(dict.fromkeys(MISS_REASONS, 0))
        self.found, self.left = Ages(), Ages()
        self._size, self._bytes = block_size, block_bytes
        self._gone: OrderedDict[tuple[bytes, int, int], None] = OrderedDict()

    def leaves(self, node: PrefixNode, num_blocks: int) -> None:
        """The last `num_blocks` blocks of a run are about to be forgotten."""
        size, space, gone = self._bytes, node.space, self._gone
        end = len(node.tokens) // size
        tokens = bytes(node.tokens[(end - num_blocks) * size :])
        for n in range(num_blocks):
            gone[space, node.start + end - num_blocks + n, hash(tokens[n * size : (n + 1) * size])] = None
        while len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)

    def admitted(self, seq: Seq) -> None:
        """`seq` begins with what was found of its prompt (`seq.num_cached`)."""
        found, end = seq.num_cached, seq.prompt_len
        if not seq.request.reads_cache:
            self.misses["not_read"] += end
            return
        clean = end if seq.taint_start is None else min(end, seq.taint_start)
        self.misses["lossy"] += end - clean
        whole = min(clean, end - 1) // self._size * self._size
        self.misses["tail"] += clean - max(found, whole)
        at, space = found // self._size, digest(seq.request.namespace, seq.request.taint.encode())
        while at * self._size < whole and (space, at, self._block(seq, at)) in self._gone:
            at += 1
        if whole > found:
            self.misses["evicted"] += at * self._size - found
            self.misses["new"] += whole - at * self._size

    def _block(self, seq: Seq, n: int) -> int:
        return hash(seq.token_ids[n * self._size : (n + 1) * self._size].tobytes())
