"""No prefix cache: the baseline."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from penstock.core.protocols import EvictionPolicy

Slabs = tuple[int, ...]


class NoCache:
    """Finds nothing and keeps nothing."""

    name = "none"
    version = 0
    num_evictable = 0
    num_checkpoints = 0

    def __init__(self, block_size: int, policy: EvictionPolicy) -> None:
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self._tick = 0

    def tick(self) -> int:
        self._tick += 1
        return self._tick

    def first_key(self) -> None:
        return None

    def match(
        self, namespace: bytes, tokens: array[int], num_blocks: int, keys: list[bytes], at_checkpoint: bool
    ) -> tuple[None, int]:
        return None, 0

    def num_idle(self, entry: None, num_blocks: int) -> int:
        return 0

    def acquire(
        self, namespace: bytes, entry: None, num_blocks: int, num_query_tokens: int
    ) -> tuple[None, list[Slabs]]:
        self.num_query_tokens += num_query_tokens
        return None, []

    def path(self, entry: None) -> list[Slabs]:
        return []

    def share(self, entry: None) -> None:
        pass

    def release(self, entry: None) -> None:
        pass

    def withdraw(self, entry: None) -> tuple[None, list[Slabs]]:
        return None, []

    def insert(self, entry: None, tokens: bytes, slabs: list[Slabs]) -> tuple[None, list[Slabs], int]:
        return None, [], 0

    def evict(self, num_blocks: int) -> tuple[list[Slabs], list[Slabs]]:
        return [], []

    def sketch(self, num_nodes: int) -> list[tuple[int, int, int]]:
        return []

    def checkpoint(self, entry: None) -> None:
        return None

    def add_checkpoint(self, entry: None, slabs: Slabs) -> None:
        raise AssertionError("there is nothing to attach a checkpoint to")

    def take_checkpoint(self, entry: None, slabs: Slabs) -> bool:
        return False

    def evict_checkpoint(self, keep: None) -> None:
        return None

    def contents(self) -> tuple[list[Slabs], list[Slabs]]:
        return [], []

    def reset(self) -> tuple[list[Slabs], list[Slabs]]:
        return [], []

    def check_invariants(self, held: Iterable[None]) -> None:
        pass
