"""Blocks under the hash of (parent, tokens). Source: vLLM's automatic prefix caching (design notes, v1)."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import lru_cache

from penstock.base.hashing import digest
from penstock.core.protocols import EvictionPolicy
from penstock.kv.prefix.node import PrefixNode, Slabs
from penstock.kv.prefix.tree import PrefixTree


class HashChain(PrefixTree):
    """One entry per block in one dictionary.

    A hit needs the same parent *entry* and the same tokens, not only the same hash. So a collision is a miss, never
    wrong: of two blocks with one hash only the first is kept. Parents outlive their children (leaf-first eviction),
    otherwise a re-inserted parent with a colliding hash could adopt children that followed other tokens.
    """

    name = "hash"

    def __init__(
        self, block_size: int, policy: EvictionPolicy, hash_block: Callable[[bytes, bytes], bytes] = digest
    ) -> None:
        """`hash_block(parent's key, tokens)` names a block; a namespace is the parent of its first blocks."""
        self._index: dict[bytes, PrefixNode] = {}
        self._hash = hash_block
        self._hash_again = lru_cache(maxsize=4096)(hash_block)  # for checks, which ask for the same ones at every step
        super().__init__(block_size, policy)

    def _clear(self) -> None:
        super()._clear()
        self._index.clear()

    def match(
        self, namespace: bytes, tokens: array[int], num_blocks: int, keys: list[bytes], at_checkpoint: bool
    ) -> tuple[PrefixNode | None, int]:
        node = self._roots.get(namespace)
        if node is None or num_blocks <= 0 or not node.children:
            return None, 0
        size = self.block_bytes
        raw = tokens[: num_blocks * self.block_size].tobytes()
        best: PrefixNode | None = None
        found = 0
        for i in range(num_blocks):
            block = raw[i * size : (i + 1) * size]
            if i == len(keys):
                keys.append(self._hash(node.key, block))
            child = self._index.get(keys[i])
            if child is None or child.parent is not node or child.tokens != block or not child.slabs:
                break
            node = child
            if not at_checkpoint or child.checkpoint is not None:
                best, found = child, i + 1
        return best, found

    def insert(self, entry: PrefixNode, tokens: bytes, slabs: list[Slabs]) -> tuple[PrefixNode, list[Slabs], int]:
        size = self.block_bytes
        node = entry
        existing: list[Slabs] = []
        num_new = 0
        for i, mine in enumerate(slabs):
            block = tokens[i * size : (i + 1) * size]
            key = self._hash(node.key, block)
            child = self._index.get(key)
            if child is None:
                child = PrefixNode(node, key, node.end, block, [mine])
                child.locks = 1
                self._index[key] = child
                node.children[key] = child
                node.near += 1
                self._tick += 1
                self.policy.on_insert(child, self._tick)
                num_new += 1
            elif child.parent is not node or child.tokens != block:
                break
            else:
                theirs = self._join(child, [mine])
                existing += theirs
                num_new += not theirs
            node = child
        return node, existing, num_new

    def _next(self, node: PrefixNode, raw: bytes) -> tuple[PrefixNode | None, int]:
        block = raw[node.end * self.block_bytes : (node.end + 1) * self.block_bytes]
        child = self._index.get(self._hash(node.key, block))
        found = child is not None and child.parent is node and child.tokens == block
        return (child, 1) if found else (None, 0)

    def _remove(self, node: PrefixNode) -> None:
        del self._index[node.key]
        super()._remove(node)

    def _check_key(self, node: PrefixNode) -> None:
        assert node.parent is not None
        assert node.key == self._hash_again(node.parent.key, bytes(node.tokens)), "an entry is not named by its hash"
        assert self._index.get(node.key) is node, "an entry is not in the index"
        assert node.end - node.start == 1, "an entry has more than one block"
