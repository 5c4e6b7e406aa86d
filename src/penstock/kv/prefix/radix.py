"""A radix tree over full blocks. Source: SGLang's RadixAttention, arXiv 2312.07104, section 3."""

from __future__ import annotations

from array import array

from penstock.kv.prefix.node import PrefixNode, Slabs
from penstock.kv.prefix.tree import PrefixTree


class RadixCache(PrefixTree):
    """Edges are runs of full blocks; children are found by the tokens of their first block, so tokens are compared.

    A node is split where a holder, or another continuation, leaves its run; the upper half is the new one, so entries
    that others hold keep their end. A run grows in place while its only holder stands at its end.
    """

    name = "radix"

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
        done = 0
        while done < num_blocks:
            child = node.children.get(raw[done * size : (done + 1) * size])
            if child is None or not child.slabs:
                break
            common = self._common(child, raw, done)
            node = child
            done += common
            if not at_checkpoint or (common == len(child.slabs) and child.checkpoint is not None):
                best, found = child, done
            if common < len(child.slabs):
                break
        return best, found

    def _common(self, node: PrefixNode, raw: bytes, at: int) -> int:
        """Blocks that the run of `node` and `raw` from block `at` on have in common; the first is known to be equal."""
        size = self.block_bytes
        tokens = node.tokens
        high = min(node.end - node.start, len(raw) // size - at)
        base = at * size
        if tokens[: high * size] == raw[base : base + high * size]:
            return high
        low, high = 1, high - 1
        while low < high:
            middle = (low + high + 1) // 2
            if tokens[low * size : middle * size] == raw[base + low * size : base + middle * size]:
                low = middle
            else:
                high = middle - 1
        return low

    def _ending_at(self, entry: PrefixNode, num_blocks: int) -> PrefixNode:
        node = entry
        while node.start >= num_blocks:  # it was split since it was matched
            assert node.parent is not None
            node = node.parent
        assert node.end >= num_blocks, "the entry lost blocks since it was matched"
        return node if node.end == num_blocks else self._split(node, num_blocks - node.start)

    def _next(self, node: PrefixNode, raw: bytes) -> tuple[PrefixNode | None, int]:
        at, size = node.end, self.block_bytes
        child = node.children.get(raw[at * size : (at + 1) * size])
        return child, 0 if child is None else self._common(child, raw, at)

    def _split(self, node: PrefixNode, at: int) -> PrefixNode:
        parent = node.parent
        assert parent is not None
        assert 0 < at < node.end - node.start, f"a run of {node.end - node.start} blocks is split at {at}"
        cut = at * self.block_bytes
        upper = PrefixNode(parent, node.key, node.start, node.tokens[:cut], node.slabs[:at])
        upper.copies = node.copies[:at]
        upper.near = int(bool(node.slabs))
        upper.locks = node.locks
        upper.tick, upper.used_s = node.tick, node.used_s
        self.retained.copied(node, upper)
        parent.children[upper.key] = upper
        node.parent = upper
        node.start += at
        del node.tokens[:cut]
        del node.slabs[:at]
        del node.copies[:at]
        node.key = bytes(node.tokens[: self.block_bytes])
        upper.children[node.key] = node
        return upper

    def insert(self, entry: PrefixNode, tokens: bytes, slabs: list[Slabs]) -> tuple[PrefixNode, list[Slabs], int]:
        size = self.block_bytes
        node = entry
        existing: list[Slabs] = []
        done = 0
        while done < len(slabs):
            child = node.children.get(tokens[done * size : (done + 1) * size])
            if child is None:
                node = self._grow(node, tokens[done * size :], slabs[done:])
                break
            common = self._common(child, tokens, done)
            if common < child.end - child.start:
                child = self._split(child, common)
            existing += self._join(child, slabs[done : done + common])
            node = child
            done += common
        return node, existing, len(slabs) - len(existing)

    def _grow(self, node: PrefixNode, tokens: bytes, slabs: list[Slabs]) -> PrefixNode:
        """New blocks after `node`, on which the inserting holder stands."""
        alone = node.locks == 1 and not node.children and node.checkpoint is None
        if node.parent is not None and alone and not node.rank:
            node.tokens += tokens
            node.slabs += slabs
            return node
        key = tokens[: self.block_bytes]
        child = PrefixNode(node, key, node.end, tokens, slabs)
        child.locks = 1
        node.children[key] = child
        node.near += 1
        self._tick += 1
        self.policy.on_insert(child, self._tick)
        return child

    def _check_key(self, node: PrefixNode) -> None:
        assert node.key == node.tokens[: self.block_bytes], "a node is not named by the tokens of its first block"
