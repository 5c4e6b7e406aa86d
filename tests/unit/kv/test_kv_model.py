"""A model of an engine around the KV manager, which carries out its orders on a fake storage.

A fake rank keeps page contents and row tables, moved only by what `drain` yields, and runs steps late, as a rank two
steps behind does. What it writes at a position is a digest of all before it (read through the tables), the token, the
namespace, the weights and the lossy label: reading the right values back proves copy-on-write, deduplication, eviction,
forks, raggedness, namespaces and epochs at once. Of a window group it reads all that a token may see, and no more is
there to be read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.core.batch import GONE
from penstock.core.cache_spec import CacheGroup, CacheSpec, PlaneSpec, group_layers
from penstock.core.page_ops import LoadOp, StoreOp
from penstock.core.request import Request
from penstock.core.sampling import TokenRules
from penstock.core.sequence import Sequence
from penstock.kv.block_table import BlockTable
from penstock.kv.manager import KVManager
from penstock.kv.placed import PlacedManager

PAGED = CacheSpec("paged", (PlaneSpec("k", 1, 2, "float32"), PlaneSpec("v", 1, 2, "float32")))
LATENT = CacheSpec("paged", (PlaneSpec("latent", 1, 3, "float32"),))
SLOT = CacheSpec("slot", (PlaneSpec("state", 1, 4, "float32"),))


def make_groups(
    paged: int = 2, latent: int = 0, slots: int = 0, windows: tuple[int, ...] = ()
) -> tuple[CacheGroup, ...]:
    """Cache groups of a model with so many layers of each kind, and one more layer per window."""
    sliding = [CacheSpec("window", PAGED.planes, window) for window in windows]
    return group_layers([*[PAGED] * paged, *[LATENT] * latent, *[SLOT] * slots, *sliding])


def make_seq(seq_id: int, prompt: list[int], **request: Any) -> Sequence:
    rules = request.pop("rules", TokenRules())
    return Sequence(
        seq_id, Request(request_id=f"r{seq_id}", prompt_token_ids=prompt, rules=rules, **request), arrival=seq_id
    )


def start(kv: KVManager, seq: Sequence, num_tokens: int | None = None) -> bool:
    """Admit a sequence with memory for all it knows (or `num_tokens`); False, and nothing taken, if there is none."""
    match = kv.match(seq)
    wanted = max(seq.num_known if num_tokens is None else num_tokens, match.num_tokens)
    if not kv.can_admit(seq, match, wanted):
        return False
    kv.admit(seq, match)
    assert kv.grow(seq, wanted), "can_admit promised what grow did not find"
    return True


def run(kv: KVManager, seq: Sequence, num_computed: int | None = None) -> None:
    """Pretend that all that is known (or `num_computed` tokens) has been computed, chunk by chunk."""
    target = seq.num_known if num_computed is None else num_computed
    while seq.num_computed < target:
        seq.num_computed += kv.cut(seq, seq.num_computed, target - seq.num_computed)
        kv.commit(seq)


def started(kv: KVManager, seq_id: int, prompt: list[int], num_tokens: int | None = None, **request: Any) -> Sequence:
    seq = make_seq(seq_id, prompt, **request)
    assert start(kv, seq, num_tokens)
    return seq


def computed(kv: KVManager, seq_id: int, prompt: list[int], num_computed: int | None = None) -> Sequence:
    seq = started(kv, seq_id, prompt)
    run(kv, seq, num_computed)
    return seq


STALE = "stale"
"""What fresh memory holds. Reading it is a leak."""


class Rank:
    """Storage and row tables, moved by table updates and page operations alone."""

    def __init__(self, groups: tuple[CacheGroup, ...], num_slabs: list[int], block_size: int) -> None:
        self.groups = groups
        self.size = [block_size if g.spec.per_token else 1 for g in groups]
        self.pages: list[list[list[Any]]] = [
            [[STALE] * size for _ in range(n * g.pages_per_slab)]
            for g, n, size in zip(groups, num_slabs, self.size, strict=True)
        ]
        self.stored: list[dict[int, list[Any]]] = [{} for _ in groups]
        """What is in the tier, by page."""
        self.tables: dict[int, list[list[list[int]]]] = {}

    def apply(self, removed: list[int], tables: list[Any], ops: list[Any]) -> None:
        for seq_id in removed:
            self.tables.pop(seq_id, None)
        for update in tables:
            width = self.groups[update.group].pages_per_slab
            row = self.tables.setdefault(update.seq_id, [[[] for _ in range(g.pages_per_slab)] for g in self.groups])
            for i in range(width) if update.layer < 0 else [update.layer]:
                ids = [page_of(s, width, i) for s in update.ids] if update.layer < 0 else update.ids
                line = row[update.group][i]
                assert update.start <= len(line), "a table update leaves a hole"
                line[update.start : update.start + len(ids)] = ids
        for op in ops:
            pages = self.pages[op.group]
            for i in range(op.count):
                if isinstance(op, StoreOp):
                    self.stored[op.group][op.dst + i] = list(pages[op.src + i])
                    continue
                if isinstance(op, LoadOp):
                    pages[op.dst + i] = list(self.stored[op.group][op.src + i])
                    continue
                pages[op.dst + i] = [None] * self.size[op.group] if op.src < 0 else list(pages[op.src + i])


def page_of(slab: int, width: int, layer: int) -> int:
    return GONE if slab == GONE else slab * width + layer


def pages_of(groups: tuple[CacheGroup, ...], tables: list[BlockTable]) -> list[list[list[int]]]:
    """[group][layer][block] -> page or GONE, from the manager's own tables."""
    result = []
    for group, table in zip(groups, tables, strict=True):
        width = group.pages_per_slab
        layers = table.layers or [[page_of(s, width, i) for s in table.ids] for i in range(width)]
        result.append([list(pages) for pages in layers])
    return result


@dataclass
class Row:
    seq: Sequence
    start: int
    num_tokens: int
    life: int
    lossy_from: int | None


@dataclass
class Step:
    number: int
    rows: list[Row]
    removed: list[int]
    tables: list[Any]
    ops: list[Any]
    weights: int
    seen: list[set[int]]
    """Pages per group that rows of this step have in their tables."""
    readable: list[tuple[Sequence, int, list[list[list[int]]], int]]
    """Every sequence with memory, its life, its tables, and how far they are written when this step begins."""


@dataclass
class Config:
    prefix: str | Callable[[int], Any]
    eviction: str = "lru"
    block_size: int = 2
    depth: int = 1
    groups: tuple[CacheGroup, ...] = field(default_factory=make_groups)
    num_slabs: list[int] = field(default_factory=lambda: [10])
    checkpoint_tokens: int = 4
    checkpoint_rule: str = "distance"
    chunk: int | None = None
    """Most tokens of a sequence in a step, if there is a limit."""
    host: int = 0
    """Blocks of each group that fit into host memory; the prefix cache offloads to it, preemption swaps to it."""


class World:
    """Drives a KVManager as an engine would, and checks all it does."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.block_size = config.block_size
        self.groups = config.groups
        prefix = config.prefix if isinstance(config.prefix, str) else config.prefix(config.block_size)
        make = PlacedManager if any(g.spec.whole for g in config.groups) else KVManager
        self.kv = make(
            config.groups, config.num_slabs, config.block_size, prefix_cache=prefix, eviction=config.eviction,
            slot_checkpoint_tokens=config.checkpoint_tokens, slot_checkpoint_rule=config.checkpoint_rule,
            step_tokens=None if config.chunk is None else config.chunk * config.depth,
            host_slabs=[config.host] * len(config.groups), offload=config.host > 0,
        )  # fmt: skip
        self.rank = Rank(config.groups, config.num_slabs, config.block_size)
        self.seqs: list[Sequence] = []
        self.history: dict[int, list[int]] = {}
        self.inflight: deque[Step] = deque()
        self.removed: list[int] = []
        self.weights = 0
        self.next_id = 0
        self.next_step = 0
        self.slots = [g.index for g in config.groups if g.spec.kind == "slot"]
        self.paged = [g.index for g in config.groups if g.spec.per_token]
        self.hits = 0
        self.swapped: dict[int, list[int]] = {}
        """Histories of those that wait in the tier."""

    # -- the fake model

    def value(self, seq: Sequence, before: int | None, token: int, weights: int, lossy: bool) -> int:
        root = hash((seq.request.namespace, seq.request.taint)) if before is None else before
        return hash((root, token, weights, f"lossy {seq.seq_id}" if lossy else ""))

    # -- what an engine does

    def add(self, prompt: list[int], **request: Any) -> Sequence:
        seq = make_seq(self.next_id, prompt, **request)
        self.next_id += 1
        self.seqs.append(seq)
        return seq

    @property
    def running(self) -> list[Sequence]:
        return [s for s in self.seqs if s.tables]

    def admit(self, seq: Sequence, margin: int) -> None:
        kv = self.kv
        before = kv.cache.version
        match = kv.match(seq)
        assert kv.cache.version == before, "match changed the cache"
        assert match.num_tokens % self.block_size == 0
        assert match.num_tokens < seq.num_known, "no token is left to be computed"
        if seq.request.rules.num_prompt_logprobs >= 0 or self.config.prefix == "none":
            assert match.num_tokens == 0
        can = kv.can_admit(seq, match, seq.num_known + margin)
        if not can and self.slots:
            return
        kv.admit(seq, match)
        if can:
            assert kv.restore(seq)
        # The promise is kept, and it is not made too rarely: with one group it is exact.
        wanted = seq.num_known + margin
        grown = kv.grow(seq, min(wanted, seq.num_computed + (self.config.chunk or wanted)))
        assert grown or not can, "can_admit promised what grow did not find"
        if len(self.groups) == 1 and self.config.chunk is None:
            assert grown == can, "can_admit refused what was possible"
        if not grown:
            self.drop(seq)
            return
        assert seq.num_computed >= seq.num_cached >= match.num_tokens
        assert self.config.host or seq.num_computed == match.num_tokens
        self.hits += match.num_tokens
        history: list[int] = []
        for token in seq.token_ids[: seq.num_computed]:
            history.append(self.value(seq, history[-1] if history else None, token, self.weights, False))
        swapped = self.swapped.pop(seq.seq_id, [])
        if len(swapped) == seq.num_computed:
            history[seq.num_cached :] = swapped[seq.num_cached :]
        self.history[seq.seq_id] = history

    def drop(self, seq: Sequence) -> None:
        if self.config.host and seq.seq_id in self.history and seq.num_inflight == 0 and self.kv.swap_out(seq):
            self.swapped[seq.seq_id] = self.history[seq.seq_id]
        else:
            self.kv.release(seq)
        assert seq.tables == []
        assert seq.node is None
        assert seq.num_computed == seq.num_inflight == seq.num_cached == 0
        seq.num_preemptions += 1
        self.removed.append(seq.seq_id)
        self.history.pop(seq.seq_id, None)

    def schedule(self, sizes: Iterable[int]) -> None:
        """Plan and submit a step: up to sizes[i] tokens of the i-th running sequence."""
        rows = []
        for seq, size in zip(self.running, sizes, strict=False):
            n = min(size, seq.lag, self.config.chunk or size)
            if n <= 0:
                continue
            begin = seq.num_computed + seq.num_inflight
            cut = self.kv.cut(seq, begin, n)
            assert 0 < cut <= n
            before = pages_of(self.groups, seq.tables)
            if self.kv.grow(seq, begin + cut):
                rows.append(Row(seq, begin, cut, seq.num_preemptions, seq.taint_start))
            else:
                assert pages_of(self.groups, seq.tables) == before, "a failed grow left something behind"
        if not rows:
            return
        self._unshared(rows)
        readable = [
            (s, s.num_preemptions, pages_of(self.groups, s.tables), s.num_computed + s.num_inflight)
            for s in self.running
        ]
        tables, ops = self.kv.drain()
        alive = {s.seq_id for s in self.running}
        assert {t.seq_id for t in tables} <= alive, "a table update for a sequence that owns nothing"
        for step in self.inflight:
            for op in ops:
                if isinstance(op, StoreOp):
                    continue
                seen = step.seen[op.group].intersection(range(op.dst, op.dst + op.count))
                assert not seen, f"pages {seen} are overwritten while a step in flight has them in a table"
        for row in rows:
            row.seq.num_inflight += row.num_tokens
        shown: list[set[int]] = [set() for _ in self.groups]
        for row in rows:
            for g, layers in enumerate(pages_of(self.groups, row.seq.tables)):
                shown[g].update(page for pages in layers for page in pages if page != GONE)
        self.inflight.append(Step(self.next_step, rows, self.removed, tables, ops, self.weights, shown, readable))
        self.removed = []
        self.kv.submitted(self.next_step)
        self.next_step += 1

    def _unshared(self, rows: list[Row]) -> None:
        """No row writes a page that another sequence's table, or the prefix cache, shows."""
        for row in rows:
            blocks = range(row.start // self.block_size, -(-(row.start + row.num_tokens) // self.block_size))
            for g, layers in enumerate(pages_of(self.groups, row.seq.tables)):
                if g in self.slots:
                    mine = {p for pages in layers for p in pages}
                else:
                    mine = {pages[b] for pages in layers for b in blocks}
                for other in self.running:
                    if other is not row.seq:
                        theirs = {p for pages in pages_of(self.groups, other.tables)[g] for p in pages}
                        assert GONE not in mine, f"{row.seq} writes what is gone"
                        assert not mine & theirs, f"{row.seq} writes pages that {other} shows"

    def collect(self) -> list[Sequence]:
        """Run the oldest step, retire it, commit it. Returns sequences that want a next token."""
        step = self.inflight.popleft()
        self.rank.apply(step.removed, step.tables, step.ops)
        for seq, life, pages, written in step.readable:
            if life == seq.num_preemptions:  # else it was released meanwhile
                self._read_back(seq, pages, written)
        for row in step.rows:
            if row.life == row.seq.num_preemptions:
                self._execute(row, step.weights)
            else:
                self._execute_orphan(row)
        self.kv.retired(step.number)
        done = []
        for row in step.rows:
            seq = row.seq
            if row.life == seq.num_preemptions:
                seq.num_inflight -= row.num_tokens
                seq.num_computed += row.num_tokens
                self.kv.commit(seq)
                if seq.lag == 0 and seq.num_inflight == 0:
                    done.append(seq)
        return done

    def _execute_orphan(self, row: Row) -> None:
        """A row that was released while its step was in flight: the rank does not know, and writes."""
        for g, layers in enumerate(self.rank.tables[row.seq.seq_id]):
            for pages in layers:
                if g in self.slots:
                    self.rank.pages[g][pages[0]][0] = STALE
                    continue
                for position in range(row.start, row.start + row.num_tokens):
                    self.rank.pages[g][pages[position // self.block_size]][position % self.block_size] = STALE

    def _execute(self, row: Row, weights: int) -> None:
        seq = row.seq
        table = self.rank.tables[seq.seq_id]
        history = self.history[seq.seq_id]
        assert len(history) == row.start
        size = self.block_size
        for position in range(row.start, row.start + row.num_tokens):
            before = history[-1] if history else None
            lossy = row.lossy_from is not None and position >= row.lossy_from
            value = self.value(seq, before, seq.token_ids[position], weights, lossy)
            for g, layers in enumerate(table):
                for pages in layers:
                    storage = self.rank.pages[g]
                    if g in self.slots:
                        assert storage[pages[0]][0] == before, f"{seq}: wrong state of slots at {position}"
                        storage[pages[0]][0] = value
                        continue
                    window = self.groups[g].spec.window
                    for past in range(max(0, position - (window or 2) + 1), position):
                        assert pages[past // size] != GONE, f"{seq}: {past} cannot be seen from {position}"
                        assert storage[pages[past // size]][past % size] == history[past], f"{seq}: wrong at {past}"
                    storage[pages[position // size]][position % size] = value
            history.append(value)

    def _read_back(self, seq: Sequence, pages: list[list[list[int]]], written: int) -> None:
        history = self.history[seq.seq_id]
        assert len(history) == written, f"{seq}: {len(history)} of {written} tokens were run"
        on_rank = self.rank.tables.get(seq.seq_id)
        for g in self.paged:
            for layer, line in enumerate(pages[g]):
                gone = line.count(GONE)
                values = [value for page in line[gone:] for value in self.rank.pages[g][page]]
                end = max(0, written - gone * self.block_size)
                told = history[gone * self.block_size :]
                assert values[:end] == told, f"{seq}: group {g}, layer {layer} lost its history"
                assert set(values[end:]) <= {None}, f"{seq}: group {g}, layer {layer} shows what is not its own"
                if on_rank is not None:
                    assert on_rank[g][layer][: len(line)] == line, f"{seq}: the rank was told another table"
        for g in self.slots:
            for line in pages[g]:
                (value,) = self.rank.pages[g][line[0]]
                assert value == (history[-1] if history else None), f"{seq}: slots of group {g} hold another state"

    def fork(self, parent: Sequence, token: int) -> Sequence | None:
        child = make_seq(self.next_id, list(parent.request.prompt_token_ids), rules=parent.request.rules,
                         namespace=parent.request.namespace, taint=parent.request.taint)  # fmt: skip
        child.token_ids = parent.token_ids[: parent.num_computed]
        child.token_ids.append(token)
        before = pages_of(self.groups, parent.tables)
        if not self.kv.fork(parent, child):
            assert self.slots, "a fork without slots needs no memory"
            assert child.tables == []
            assert pages_of(self.groups, parent.tables) == before
            return None
        self.next_id += 1
        assert child.num_computed == parent.num_computed
        self.history[child.seq_id] = list(self.history[parent.seq_id])
        self.seqs.append(child)
        return child

    def finish(self, seq: Sequence) -> None:
        if seq.tables:
            self.drop(seq)
        self.kv.swaps.drop(seq)
        self.seqs.remove(seq)

    def reset(self) -> None:
        """New weights: nothing computed with the old ones may be found again. Who runs or is swapped keeps its own."""
        self.kv.reset_prefix_cache()
        self.weights += 1

    def check(self) -> None:
        self.kv.check_invariants(self.seqs)
        for stats, pool in zip(self.kv.stats().groups, self.kv.pools, strict=True):
            assert stats.total == pool.num_slabs == stats.free + stats.used + stats.evictable + stats.quarantined
            assert min(stats.free, stats.used, stats.evictable, stats.quarantined) >= 0

    def close(self) -> None:
        """End everything; then all memory is free or evictable, and after a reset all of it is free."""
        while self.inflight:
            self.collect()
        for seq in list(self.seqs):
            self.finish(seq)
        self.check()
        assert all(group.used == group.quarantined == 0 for group in self.kv.stats().groups)
        self.kv.reset_prefix_cache()
        assert all(group.free == group.total for group in self.kv.stats().groups), "memory leaked"


def simple_life(world: World) -> None:
    """Two requests with a common beginning, a fork, and steps until everybody has eight tokens more."""
    for prompt in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6]):
        world.admit(world.add(prompt), 0)
        world.schedule([99] * 9)
        for seq in world.collect():
            if len(world.seqs) == 1:
                world.fork(seq, 7)
            seq.token_ids.append(8)
    for _ in range(8):
        world.schedule([99] * 9)
        for seq in world.collect():
            seq.token_ids.append(9)
        world.check()


def test_the_model_accepts_a_sound_manager() -> None:
    world = World(Config("radix", num_slabs=[24]))
    simple_life(world)
    assert world.hits == 4
    assert world.kv.stats().num_cow_copies == 1
    world.close()


@pytest.mark.parametrize("lost", ["copies", "zeroing", "table updates"])
def test_the_model_notices_what_is_lost(lost: str) -> None:
    world = World(Config("radix", num_slabs=[24]))
    drain = world.kv.drain

    def lossy() -> tuple[list[Any], list[Any]]:
        tables, ops = drain()
        if lost == "table updates":
            return [t for t in tables if t.start == 0], ops
        return tables, [op for op in ops if (op.src < 0) != (lost == "zeroing")]

    world.kv.drain = lossy  # type: ignore[method-assign]
    with pytest.raises((AssertionError, IndexError)):
        simple_life(world)
