"""What the tree-shaped prefix caches share: holders, eviction from the leaves, checkpoints, invariants.

With a `PrefixOffload` what is evicted from the device waits in a tier instead: on every path, blocks on the device
come first, then blocks in the tier. Sources: SGLang, arXiv 2312.07104, section 3 (reference counts along the path,
leaf-first eviction), and its hierarchical cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from penstock.core.protocols import EvictionPolicy
from penstock.kv.prefix.insight import Insight
from penstock.kv.prefix.node import DEMOTED, PLAIN, TOKEN_BYTES, Owner, PrefixNode, Slabs, SlotCheckpoint
from penstock.kv.prefix.queue import EvictionQueue
from penstock.kv.prefix.retained import Retained
from penstock.kv.prefix.shares import SharedQueue

if TYPE_CHECKING:
    from array import array

    from penstock.kv.offload import PrefixOffload


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
        self.offload: PrefixOffload | None = None
        """Where evicted blocks wait; None: they are forgotten."""
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self.now_s = 0.0
        self.insight = Insight(block_size, self.block_bytes)
        self._clear()

    def _clear(self) -> None:
        self._roots: dict[bytes, PrefixNode] = {}
        self.tenant = ""
        self.tenants: dict[bytes, str] = {}
        """Whose namespaces they are, those that begin now `tenant`'s."""
        self._leaves = SharedQueue(self.policy)
        self._checkpoints = EvictionQueue(self.policy)
        self._far = SharedQueue(self.policy, below=True)
        """Those in the tier without children: nobody ever stands on one."""
        self._num_evictable = 0
        self._tick = 0
        self.retained = Retained()
        self.owners = {"": Owner()}
        self.owner = self.owners[""]
        """Of namespaces that begin now."""

    @property
    def num_evictable(self) -> int:
        return self._num_evictable

    def tick(self) -> int:
        self._tick += 1
        return self._tick

    def first_key(self) -> tuple[int, Any] | None:
        return self._leaves.first_key()

    @property
    def num_checkpoints(self) -> int:
        return len(self._checkpoints)

    # -- standing on an entry ------------------------------------------------------------------------------------

    def num_idle(self, entry: PrefixNode | None, num_blocks: int) -> int:
        """Walks up to the first node that somebody holds."""
        idle = 0
        while entry is not None and entry.locks == 0:
            idle += max(0, min(num_blocks, entry.end) - entry.start)
            entry = entry.parent
        return idle

    def acquire(
        self, namespace: bytes, entry: PrefixNode | None, num_blocks: int, num_query_tokens: int
    ) -> tuple[PrefixNode, list[Slabs]]:
        self.num_query_tokens += num_query_tokens
        self.num_hit_tokens += num_blocks * self.block_size
        if num_blocks == 0 or entry is None:
            root = self._roots.get(namespace)
            if root is None:
                root = self._roots[namespace] = PrefixNode(None, namespace, 0, b"", [])
                root.owner = self.owner
                self.tenants[namespace] = self.tenant
                if len(self.tenants) > 64 + 2 * len(self._roots):
                    self.tenants = {name: self.tenants[name] for name in self._roots if name in self.tenants}
            root.locks += 1
            return root, []
        node = self._ending_at(entry, num_blocks)
        if not node.locks:
            self.insight.found.observe(self.now_s - node.used_s, len(node.slabs))
        self._tick += 1
        up: PrefixNode | None = node
        while up is not None:
            self.policy.on_hit(up, self._tick)
            if up.rank == DEMOTED:
                up.rank = PLAIN
            up = up.parent
        if node.checkpoint is not None:
            node.checkpoint.found = True
            self.policy.on_hit(node.checkpoint, self._tick)
            self._checkpoints.push(node.checkpoint)
        self.share(node)
        return node, self.path(node)

    def touch(self, namespace: bytes, entry: PrefixNode | None, tokens: array[int], limit: int) -> None:
        """A text that will be asked for counts as used now, up to block `limit`: the path of its match, and what goes
        on from there in the tier."""
        if (entry := entry or self._roots.get(namespace)) is None:
            return
        self.share(entry)
        self.release(entry)
        node, raw = entry, tokens[: limit * self.block_size].tobytes()
        while (found := self._next(node, raw)[0] if node.end < limit else None) is not None and found.copies:
            node = found
            self.policy.on_hit(node, self._tick)
            if not node.slabs and not node.children:
                self._far.push(node)

    def path(self, entry: PrefixNode) -> list[Slabs]:
        nodes = []
        node: PrefixNode | None = entry
        while node is not None:
            nodes.append(node)
            node = node.parent
        return [slabs for node in reversed(nodes) for slabs in node.slabs]

    def _ending_at(self, entry: PrefixNode, num_blocks: int) -> PrefixNode:
        """The node whose end is at `num_blocks` on the path of `entry`."""
        assert entry.end == num_blocks, "the entry is not the match's"
        return entry

    def share(self, entry: PrefixNode) -> None:
        node: PrefixNode | None = entry
        while node is not None:
            if node.locks == 0:
                self._count(node, -len(node.slabs))
                self._leaves.discard(node)
            node.locks += 1
            node = node.parent

    def release(self, entry: PrefixNode) -> None:
        self._tick += 1
        node: PrefixNode | None = entry
        while node is not None:
            node.locks -= 1
            assert node.locks >= 0, "an entry is released more often than it was held"
            if node.locks == 0:
                self._idle(node)
            node = node.parent

    def _idle(self, node: PrefixNode) -> None:
        """Nobody stands on `node` or below any more."""
        if node.parent is None:
            if not node.children:
                del self._roots[node.key]
            return
        self._count(node, len(node.slabs))
        node.used_s = self.now_s
        self.policy.on_hit(node, self._tick)  # it was in use until now
        if not node.near:
            self._leaves.push(node)

    def _count(self, node: PrefixNode, num_blocks: int) -> None:
        """So many more blocks of `node` are evictable."""
        self._num_evictable += num_blocks
        node.owner.num_idle += num_blocks

    def _bare(self, node: PrefixNode) -> None:
        """A child of `node` is gone, or is not on the device any more: `node` may be the next to go."""
        if node.locks:
            return
        if node.parent is None:
            if not node.children:
                del self._roots[node.key]
        elif node.slabs:
            if not node.near:
                self._leaves.push(node)
        elif not node.children:
            self._far.push(node)

    def withdraw(self, entry: PrefixNode) -> tuple[PrefixNode, list[Slabs]]:
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

    def evict(self, num_blocks: int, *, demoted: bool = False) -> tuple[list[Slabs], list[Slabs]]:
        """`demoted`: only what a hint has demoted."""
        blocks: list[Slabs] = []
        checkpoints: list[Slabs] = []
        while len(blocks) < num_blocks:
            node = self._leaves.pop_demoted() if demoted else self._leaves.pop()
            if node is None:
                break
            if node.checkpoint is not None:
                checkpoints.append(self._drop_checkpoint(node.checkpoint))
            n = min(num_blocks - len(blocks), len(node.slabs))
            if self.offload is not None:  # no more at once than the tier could hold: the ends go, the beginnings stay
                n = min(n, max(1, self.offload.num_free + self.offload.num_kept))
            gone = node.slabs[-n:]
            blocks.extend(reversed(gone))
            self._count(node, -n)
            self.insight.left.observe(self.now_s - node.used_s, n)
            copies = self._keep(gone)
            if copies is None:
                self.insight.leaves(node, n)
                self._forget_below(node)
            self._leaves.discard(node)  # it came back if something below it went
            if copies is not None:
                self._move_out(node, copies)
            else:
                self._cut(node, node.slabs, n, self._leaves)
        if blocks:
            self.version += 1
        return blocks, checkpoints

    def _cut(self, node: PrefixNode, ids: list[Slabs], n: int, queue: SharedQueue) -> None:
        """The last `n` blocks of a node without children are forgotten; `ids`: what it has of its blocks."""
        if n == len(ids):
            self._remove(node)
            return
        del ids[-n:]
        del node.tokens[-n * self.block_bytes :]
        queue.push(node)

    def _remove(self, node: PrefixNode) -> None:
        """Take a node without children out of the tree."""
        parent = node.parent
        assert parent is not None
        node.until_s = 0.0
        del parent.children[node.key]
        parent.near -= bool(node.slabs)
        self._bare(parent)

    # -- hints ---------------------------------------------------------------------------------------------------

    def at(self, entry: PrefixNode, num_blocks: int) -> PrefixNode:
        """The entry that ends at `num_blocks` on the path of a held `entry`, which has them."""
        node = entry
        while node.parent is not None and node.start >= num_blocks:
            node = node.parent
        return node if node.parent is None else self._ending_at(node, num_blocks)

    def reach(self, namespace: bytes, raw: bytes) -> PrefixNode | None:
        """The node on the device in which a text ends as far as it is there, given by its tokens' bytes (int32); maybe
        the root."""
        node, end = self._roots.get(namespace), len(raw) // self.block_bytes
        while node is not None and node.end < end:
            child, common = self._next(node, raw)
            if child is None or not child.slabs or common < min(child.end, end) - child.start:
                break
            node = child
        return node

    def demote_all(self, tenant: str | None, before_s: float) -> int:
        """What nobody stands on, and nobody has since `before_s`, is to go first, retained or not: how many blocks.

        `tenant`: of its namespaces alone. Linear.
        """
        num = 0
        stack = [root for name, root in self._roots.items() if tenant is None or self.tenants.get(name) == tenant]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None and not node.locks and node.used_s <= before_s:
                node.rank, node.until_s = DEMOTED, 0.0
                num += node.end - node.start
                self.ranked(node)
        return num

    def ranked(self, node: PrefixNode) -> None:
        """Its rank has changed."""
        if node.queued:
            (self._leaves if node.slabs else self._far).push(node)

    def expire(self, now_s: float) -> None:
        """What was retained until now is like any other."""
        for node in self.retained.expire(now_s):
            self.ranked(node)
            if node.checkpoint is not None and node.checkpoint.queued:
                self._checkpoints.push(node.checkpoint)

    # -- in a tier -----------------------------------------------------------------------------------------------

    def stored(self, entry: PrefixNode, tokens: array[int], limit: int) -> list[Slabs]:
        """Copies in the tier of the blocks that go on from a held `entry`, in order, up to block number `limit`."""
        node = entry
        found: list[Slabs] = []
        raw = tokens[: limit * self.block_size].tobytes()
        while node.end < limit:
            child, common = self._next(node, raw)
            if child is None or not child.copies:
                break
            found += child.copies[:common]
            if common < len(child.copies):
                break
            node = child
        return found

    def drop_copies(self, num_blocks: int, *, demoted: bool = False) -> None:
        """Forget up to `num_blocks` blocks in the tier, ends of paths first. `demoted`: only those that were."""
        while num_blocks > 0 and self.offload is not None:
            node = self._far.pop_demoted() if demoted else self._far.pop()
            if node is None:
                return
            n = min(num_blocks, len(node.copies))
            self.insight.leaves(node, n)
            self.offload.drop(node.copies[-n:])
            node.owner.num_kept -= n
            self._cut(node, node.copies, n, self._far)
            num_blocks -= n

    def copies(self) -> list[Slabs]:
        """Of all blocks in the tier. Linear; for checks."""
        return [ids for node in self._nodes() for ids in node.copies]

    def _keep(self, blocks: list[Slabs]) -> list[Slabs] | None:
        """Plan to copy blocks to the tier, at the cost of others there; None if they have to be forgotten."""
        if self.offload is None:
            return None
        self.drop_copies(len(blocks) - self.offload.num_free)
        return self.offload.keep(blocks)

    def _move_out(self, node: PrefixNode, copies: list[Slabs]) -> None:
        """The last blocks of an evicted node leave the device for the tier; what follows them is there already."""
        if len(copies) < len(node.slabs):
            upper = self._split(node, len(node.slabs) - len(copies))
            upper.near = 0
            self._bare(upper)
        else:
            assert node.parent is not None
            node.parent.near -= 1
            self._bare(node.parent)
        node.slabs, node.copies = [], copies
        node.owner.num_kept += len(copies)
        self._bare(node)

    def _join(self, node: PrefixNode, mine: list[Slabs]) -> list[Slabs]:
        """A holder that stands on the node's parent has computed its blocks, too, and goes on to stand on it.

        Returns the slabs that it shall have for `mine`; none if the blocks had left the device: then `mine` take the
        place of the copies.
        """
        existing = node.slabs
        if node.copies:
            assert self.offload is not None
            assert node.parent is not None
            self._far.discard(node)
            self.offload.drop(node.copies)
            node.owner.num_kept -= len(node.copies)
            node.slabs, node.copies = mine, []
            node.parent.near += 1
        elif node.locks == 0:
            self._count(node, -len(existing))
            self._leaves.discard(node)
        node.locks += 1
        return existing

    def _forget_below(self, node: PrefixNode) -> None:
        """What goes on from `node` in the tier cannot be found without it."""
        below = list(node.children.values())
        for child in below:
            below += child.children.values()
        for child in reversed(below):
            assert self.offload is not None
            self._far.discard(child)
            self.offload.drop(child.copies)
            child.owner.num_kept -= len(child.copies)
            self._remove(child)

    def _next(self, node: PrefixNode, raw: bytes) -> tuple[PrefixNode | None, int]:
        """The child of `node` that goes on as `raw` does, and how many blocks of its run are the same; or (None, 0)."""
        raise NotImplementedError

    def _split(self, node: PrefixNode, at: int) -> PrefixNode:
        """Cut `node` after its first `at` blocks; returns the new upper node. Holders of `node` keep standing on it."""
        raise NotImplementedError

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def checkpoint(self, entry: PrefixNode) -> Slabs | None:
        return None if entry.checkpoint is None else entry.checkpoint.slabs

    def add_checkpoint(self, entry: PrefixNode, slabs: Slabs) -> None:
        assert entry.checkpoint is None, "there is a checkpoint already"
        assert entry.parent is not None, "a checkpoint of nothing"
        entry.checkpoint = SlotCheckpoint(entry, slabs)
        self._tick += 1
        self.policy.on_insert(entry.checkpoint, self._tick)
        self._checkpoints.push(entry.checkpoint)

    def take_checkpoint(self, entry: PrefixNode, slabs: Slabs) -> bool:
        checkpoint = entry.checkpoint
        if checkpoint is None or checkpoint.slabs != slabs or checkpoint.found:
            return False
        self.version += 1
        self._drop_checkpoint(checkpoint)
        return True

    def evict_checkpoint(self, keep: PrefixNode | None) -> Slabs | None:
        victim: SlotCheckpoint | None = self._checkpoints.pop()
        if victim is not None and victim.node is keep:
            kept, victim = victim, self._checkpoints.pop()
            self._checkpoints.push(kept)
        if victim is None:
            return None
        self.version += 1
        return self._drop_checkpoint(victim)

    def _drop_checkpoint(self, checkpoint: SlotCheckpoint) -> Slabs:
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
                found.append((depth - 1, node.end - node.start, node.locks))
            children = sorted(islice(node.children.values(), 256), key=lambda n: n.end - n.start)
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
        if self.offload is not None:
            self.offload.drop(self.copies())
        self._clear()
        self.version += 1
        return everything

    # -- laws ----------------------------------------------------------------------------------------------------

    def _nodes(self) -> Iterator[PrefixNode]:
        """All nodes, parents before children."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_invariants(self, held: Iterable[PrefixNode]) -> None:
        standing: dict[int, int] = {}
        for entry in held:
            up: PrefixNode | None = entry
            while up is not None:
                standing[id(up)] = standing.get(id(up), 0) + 1
                up = up.parent
        nodes = list(self._nodes())
        leaves = {id(node) for node in self._leaves.entries()}
        far = {id(node) for node in self._far.entries()}
        marked = {id(checkpoint) for checkpoint in self._checkpoints.entries()}
        for key, root in self._roots.items():
            assert root.key == key, "a root is kept under another namespace's name"
            assert root.parent is None, "a root has a parent"
            assert not root.slabs, "a root has blocks"
            assert root.locks or root.children, "an empty namespace was not removed"
        for node in nodes:
            assert node.locks == standing.pop(id(node), 0), f"node has {node.locks} locks, not one per holder below"
            assert (id(node) in leaves) == bool(node.parent and node.slabs and not node.locks and not node.near), (
                "the eviction queue is not exactly the unheld leaves"
            )
            assert (id(node) in far) == bool(node.copies and not node.children), "the tier's leaves are miscounted"
            assert node.near == sum(bool(child.slabs) for child in node.children.values()), "children are miscounted"
            leaves.discard(id(node))
            far.discard(id(node))
            if node.parent is not None:
                assert bool(node.slabs) != bool(node.copies), "a node has no block, or is in two places"
                assert not node.copies or not (node.locks or node.near), "somebody stands on what is not on the device"
                assert node.start == node.parent.end, "a node does not begin where its parent ends"
                assert len(node.tokens) == (node.end - node.start) * self.block_bytes, "tokens and blocks do not match"
            if node.checkpoint is not None:
                assert node.checkpoint.node is node, "a checkpoint belongs to another node"
                assert id(node.checkpoint) in marked, "a checkpoint is not in its queue"
                marked.discard(id(node.checkpoint))
            for key, child in node.children.items():
                assert child.parent is node, "a child has another parent"
                assert child.key == key, "a child is kept under another's name"
                self._check_key(child)
        assert not standing, "an entry that is held is not in the tree"
        assert not leaves | far, "an eviction queue holds nodes that are gone"
        assert not marked, "the queue of checkpoints holds some that are gone"
        for owner in {node.owner for node in nodes} | set(self.owners.values()):
            own = [node for node in nodes if node.owner is owner]
            assert owner.num_idle == sum(len(n.slabs) for n in own if not n.locks), "a tenant's blocks are miscounted"
            assert owner.num_kept == sum(len(n.copies) for n in own), "a tenant's blocks in the tier are miscounted"
        evictable = sum(len(node.slabs) for node in nodes if node.locks == 0)
        assert evictable == self._num_evictable, f"{self._num_evictable} blocks counted, {evictable} are evictable"

    def _check_key(self, node: PrefixNode) -> None:
        """Raises AssertionError unless `node.key` follows from its tokens."""
        raise NotImplementedError
