"""What the tree-shaped prefix caches share: holders, eviction from the leaves, checkpoints, invariants.

Source: SGLang, arXiv 2312.07104, section 3 (reference counts along the path, leaf-first eviction).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from penstock.core.protocols import EvictionPolicy
from penstock.kv.prefix.queue import EvictionQueue

TOKEN_BYTES = 4
Slabs = tuple[int, ...]


class Checkpoint:
    """State of the slot groups at the end of `node`: one slab per slot group."""

    __slots__ = ("node", "queued", "slabs", "tick")

    def __init__(self, node: Node, slabs: Slabs) -> None:
        self.node = node
        self.slabs = slabs
        self.tick = 0
        self.queued = 0


class Node:
    """A run of blocks that follow one another; a root stands for a namespace and has no blocks.

    Attributes:
        key: its name among its parent's children (a root: the namespace).
        tokens: ids of its blocks, 4 bytes each.
        slabs: per block, one slab per paged group.
        start: blocks before it.
        locks: holders that stand on this node or below it. A node is evictable when it is 0, and then so is all
            below.
    """

    __slots__ = (
        "checkpoint", "children", "key", "locks", "parent", "queued", "slabs", "start", "tick", "tokens",
    )  # fmt: skip

    def __init__(
        self, parent: Node | None, key: bytes, start: int, tokens: bytes | bytearray, slabs: list[Slabs]
    ) -> None:
        self.parent = parent
        self.key = key
        self.start = start
        self.tokens = bytearray(tokens)
        self.slabs = slabs
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.tick = 0
        self.queued = 0
        self.checkpoint: Checkpoint | None = None

    @property
    def end(self) -> int:
        """Blocks up to its end."""
        return self.start + len(self.slabs)


class PrefixTree:
    """Base of the caches that keep their blocks in a tree; they add `match` and `insert`.

    Holding is counted on every node of a path, so that "evictable" is `locks == 0`, and the number of
    evictable blocks is kept up to date instead of being counted.
    """

    name = ""

    def __init__(self, block_size: int, policy: EvictionPolicy) -> None:
        self.block_size = block_size
        self.block_bytes = block_size * TOKEN_BYTES
        self.policy = policy
        self.version = 0
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self._clear()

    def _clear(self) -> None:
        self._roots: dict[bytes, Node] = {}
        self._leaves = EvictionQueue(self.policy)
        self._checkpoints = EvictionQueue(self.policy)
        self._num_evictable = 0
        self._tick = 0

    @property
    def num_evictable(self) -> int:
        return self._num_evictable

    @property
    def num_checkpoints(self) -> int:
        return len(self._checkpoints)

    # -- standing on an entry ------------------------------------------------------------------------------------

    def num_idle(self, entry: Node | None, num_blocks: int) -> int:
        """Walks up to the first node that somebody holds."""
        idle = 0
        while entry is not None and entry.locks == 0:
            idle += max(0, min(num_blocks, entry.end) - entry.start)
            entry = entry.parent
        return idle

    def acquire(
        self, namespace: bytes, entry: Node | None, num_blocks: int, num_query_tokens: int
    ) -> tuple[Node, list[Slabs]]:
        self.num_query_tokens += num_query_tokens
        self.num_hit_tokens += num_blocks * self.block_size
        if num_blocks == 0 or entry is None:
            root = self._roots.get(namespace)
            if root is None:
                root = self._roots[namespace] = Node(None, namespace, 0, b"", [])
            root.locks += 1
            return root, []
        node = self._ending_at(entry, num_blocks)
        self._tick += 1
        up: Node | None = node
        while up is not None:
            self.policy.on_hit(up, self._tick)
            up = up.parent
        if node.checkpoint is not None:
            self.policy.on_hit(node.checkpoint, self._tick)
            self._checkpoints.push(node.checkpoint)
        self.share(node)
        return node, self.path(node)

    def path(self, entry: Node) -> list[Slabs]:
        nodes = []
        node: Node | None = entry
        while node is not None:
            nodes.append(node)
            node = node.parent
        return [slabs for node in reversed(nodes) for slabs in node.slabs]

    def _ending_at(self, entry: Node, num_blocks: int) -> Node:
        """The node whose end is at `num_blocks` on the path of `entry`."""
        assert entry.end == num_blocks, "the entry is not the match's"
        return entry

    def share(self, entry: Node) -> None:
        node: Node | None = entry
        while node is not None:
            if node.locks == 0:
                self._num_evictable -= len(node.slabs)
                self._leaves.discard(node)
            node.locks += 1
            node = node.parent

    def release(self, entry: Node) -> None:
        self._tick += 1
        node: Node | None = entry
        while node is not None:
            node.locks -= 1
            assert node.locks >= 0, "an entry is released more often than it was held"
            if node.locks == 0:
                self._idle(node)
            node = node.parent

    def _idle(self, node: Node) -> None:
        """Nobody stands on `node` or below any more."""
        if node.parent is None:
            if not node.children:
                del self._roots[node.key]
            return
        self._num_evictable += len(node.slabs)
        self.policy.on_hit(node, self._tick)  # it was in use until now
        if not node.children:
            self._leaves.push(node)

    def withdraw(self, entry: Node) -> tuple[Node, list[Slabs]]:
        node = entry
        blocks: list[Slabs] = []
        while node.parent is not None and node.locks == 1 and not node.children and node.checkpoint is None:
            blocks += reversed(node.slabs)
            self._remove(node)
            node = node.parent
        if blocks:
            self.version += 1
        return node, blocks

    # -- giving up -----------------------------------------------------------------------------------------------

    def evict(self, num_blocks: int) -> tuple[list[Slabs], list[Slabs]]:
        blocks: list[Slabs] = []
        checkpoints: list[Slabs] = []
        while len(blocks) < num_blocks:
            node: Node | None = self._leaves.pop()
            if node is None:
                break
            if node.checkpoint is not None:
                checkpoints.append(self._drop_checkpoint(node.checkpoint))
            n = min(num_blocks - len(blocks), len(node.slabs))
            blocks.extend(reversed(node.slabs[-n:]))
            self._num_evictable -= n
            if n < len(node.slabs):
                del node.slabs[-n:]
                del node.tokens[-n * self.block_bytes :]
                self._leaves.push(node)
            else:
                self._remove(node)
        if blocks:
            self.version += 1
        return blocks, checkpoints

    def _remove(self, node: Node) -> None:
        """Take an evicted leaf out of the tree."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        if parent.children or parent.locks:
            return
        if parent.parent is None:
            del self._roots[parent.key]
        else:
            self._leaves.push(parent)

    def checkpoint(self, entry: Node) -> Slabs | None:
        return None if entry.checkpoint is None else entry.checkpoint.slabs

    def add_checkpoint(self, entry: Node, slabs: Slabs) -> None:
        assert entry.checkpoint is None, "there is a checkpoint already"
        assert entry.parent is not None, "a checkpoint of nothing"
        entry.checkpoint = Checkpoint(entry, slabs)
        self._tick += 1
        self.policy.on_insert(entry.checkpoint, self._tick)
        self._checkpoints.push(entry.checkpoint)

    def evict_checkpoint(self, keep: Node | None) -> Slabs | None:
        victim: Checkpoint | None = self._checkpoints.pop()
        if victim is not None and victim.node is keep:
            kept, victim = victim, self._checkpoints.pop()
            self._checkpoints.push(kept)
        if victim is None:
            return None
        self.version += 1
        return self._drop_checkpoint(victim)

    def _drop_checkpoint(self, checkpoint: Checkpoint) -> Slabs:
        self._checkpoints.discard(checkpoint)
        checkpoint.node.checkpoint = None
        return checkpoint.slabs

    def sketch(self, num_nodes: int) -> list[tuple[int, int, int]]:
        """(depth, blocks, holders) of at most `num_nodes` nodes, parents before children, long runs first.

        A node with more than 256 children shows the longest of its 256 oldest: the walk is bounded, however wide the
        tree is.
        """
        found: list[tuple[int, int, int]] = []
        stack = [(0, root) for root in islice(self._roots.values(), num_nodes)]
        while stack and len(found) < num_nodes:
            depth, node = stack.pop()
            if node.parent is not None:
                found.append((depth - 1, len(node.slabs), node.locks))
            children = sorted(islice(node.children.values(), 256), key=lambda n: len(n.slabs))
            stack += [(depth + 1, child) for child in children[-num_nodes:]]
        return found

    def contents(self) -> tuple[list[Slabs], list[Slabs]]:
        blocks: list[Slabs] = []
        checkpoints: list[Slabs] = []
        for node in self._nodes():
            blocks.extend(node.slabs)
            if node.checkpoint is not None:
                checkpoints.append(node.checkpoint.slabs)
        return blocks, checkpoints

    def reset(self) -> tuple[list[Slabs], list[Slabs]]:
        everything = self.contents()
        self._clear()
        self.version += 1
        return everything

    # -- laws ----------------------------------------------------------------------------------------------------

    def _nodes(self) -> Iterator[Node]:
        """All nodes, parents before children."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_invariants(self, held: Iterable[Node]) -> None:
        standing: dict[int, int] = {}
        for entry in held:
            up: Node | None = entry
            while up is not None:
                standing[id(up)] = standing.get(id(up), 0) + 1
                up = up.parent
        nodes = list(self._nodes())
        leaves = {id(node) for node in self._leaves.entries()}
        marked = {id(checkpoint) for checkpoint in self._checkpoints.entries()}
        for key, root in self._roots.items():
            assert root.key == key, "a root is kept under another namespace's name"
            assert root.parent is None, "a root has a parent"
            assert not root.slabs, "a root has blocks"
            assert root.locks or root.children, "an empty namespace was not removed"
        for node in nodes:
            assert node.locks == standing.pop(id(node), 0), f"node has {node.locks} locks, not one per holder below"
            assert (id(node) in leaves) == bool(node.parent and not node.locks and not node.children), (
                "the eviction queue is not exactly the unheld leaves"
            )
            leaves.discard(id(node))
            if node.parent is not None:
                assert node.slabs, "a node has no block"
                assert node.start == node.parent.end, "a node does not begin where its parent ends"
                assert len(node.tokens) == len(node.slabs) * self.block_bytes, "tokens and blocks do not match"
            if node.checkpoint is not None:
                assert node.checkpoint.node is node, "a checkpoint belongs to another node"
                assert id(node.checkpoint) in marked, "a checkpoint is not in its queue"
                marked.discard(id(node.checkpoint))
            for key, child in node.children.items():
                assert child.parent is node, "a child has another parent"
                assert child.key == key, "a child is kept under another's name"
                self._check_key(child)
        assert not standing, "an entry that is held is not in the tree"
        assert not leaves, "the eviction queue holds nodes that are gone"
        assert not marked, "the queue of checkpoints holds some that are gone"
        evictable = sum(len(node.slabs) for node in nodes if node.locks == 0)
        assert evictable == self._num_evictable, f"{self._num_evictable} blocks counted, {evictable} are evictable"

    def _check_key(self, node: Node) -> None:
        """Raises AssertionError unless `node.key` follows from its tokens."""
        raise NotImplementedError
