"""Baseline: ranges of addresses as `kv.virtual`, backed by chunks of memory that go from one sequence to the next.

Whoever ends gives chunks back, not addresses: they are mapped where somebody else grows, without a copy and without a
new page fault. Source: vTensor, arXiv 2407.15309, section 4 (physical chunks apart from virtual spans).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from math import gcd, lcm

from penstock.core.cache_spec import CacheGroup
from penstock.core.page_ops import GIVEN_UP, PageOp
from penstock.core.sequence import Sequence
from penstock.kv.virtual import OS_PAGE_BYTES, VirtualManager

CHUNK_BYTES = 256 << 10
"""Least bytes of a chunk in the smallest plane, if it is not one sequence's all: mappings are counted by the system."""


def chunk_blocks(groups: Seq[CacheGroup], block_size: int, max_model_len: int) -> int:
    """Blocks of a chunk: whole pages of memory in every plane."""
    step, least = 1, 0
    for group in groups:
        for plane in group.spec.planes if group.spec.per_token else ():
            slab_bytes = group.pages_per_slab * block_size * plane.num_bytes
            step = lcm(step, OS_PAGE_BYTES // gcd(OS_PAGE_BYTES, slab_bytes))
            least = min(least or slab_bytes, slab_bytes)
    wanted = min(-(-CHUNK_BYTES // max(1, least)), -(-max_model_len // block_size))
    return -(-wanted // step) * step


class VTensorManager(VirtualManager):
    """As `VirtualManager`, but memory is counted in chunks, which a release gives back by name."""

    def __init__(
        self, groups: Seq[CacheGroup], num_slabs: Seq[int], block_size: int, *, max_model_len: int, max_num_seqs: int,
        slot_checkpoint_tokens: int = 512, host_slabs: Seq[int] | None = None, tier: str = "host",
    ) -> None:  # fmt: skip
        self.chunk_blocks = chunk_blocks(groups, block_size, max_model_len)
        super().__init__(
            groups, num_slabs, block_size, max_num_seqs=max_num_seqs, host_slabs=host_slabs, tier=tier,
            max_model_len=vtensor_model_len(groups, block_size, max_model_len),
            slot_checkpoint_tokens=slot_checkpoint_tokens,
        )  # fmt: skip
        self.budget_blocks = self._chunks(self.budget_blocks) * self.chunk_blocks
        self._num_chunks = 0

    def _chunks(self, num_blocks: int) -> int:
        return -(-num_blocks // self.chunk_blocks)

    @property
    def chunks_held(self) -> int:
        return self._num_chunks

    @property
    def fragmentation(self) -> float:
        """Share of the memory in chunks that sequences have and do not use, in blocks."""
        held = self._num_chunks * self.chunk_blocks
        return 1 - self._num_opened / held if held else 0.0

    def _affords(self, num_blocks: int) -> bool:
        """At most: what begins in a chunk that is there already needs less."""
        if not self._paged:
            return True
        return self._num_chunks + self._chunks(num_blocks) <= self._chunks(self.budget_blocks)

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        opened = self._opened[seq.seq_id]
        more = self._chunks(self._blocks(num_tokens)) - self._chunks(opened)
        return (more <= 0 or self._affords(more * self.chunk_blocks)) and super(VirtualManager, self).grow(
            seq, num_tokens
        )

    def _open(self, seq: Sequence, end: int) -> None:
        self._num_chunks += self._chunks(end) - self._chunks(self._opened[seq.seq_id])
        super()._open(seq, end)

    def release(self, seq: Sequence) -> None:
        if opened := self._opened.get(seq.seq_id, 0):
            self._num_chunks -= self._chunks(opened)
            for g in self._paged:
                width, num = self.pools[g].pages_per_slab, self._chunks(opened) * self.chunk_blocks
                self.outbox.add(PageOp(g, GIVEN_UP, seq.tables[g].ids[0] * width, num * width))
        super(VirtualManager, self).release(seq)


def vtensor_model_len(groups: Seq[CacheGroup], block_size: int, max_model_len: int) -> int:
    """Tokens of address space of a sequence: whole chunks."""
    chunk = chunk_blocks(groups, block_size, max_model_len) * block_size
    return -(-max_model_len // chunk) * chunk
