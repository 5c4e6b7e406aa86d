"""Who hears an engine's events of KV blocks, for tests: a follower that applies them, and what they should say."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.base.hashing import digest
from penstock.core.kv_events import DEVICE, DISK, HOST, REMOTE, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from penstock.core.page_ops import STATE
from penstock.core.request import Request
from penstock.engine.core import EngineCore
from penstock.kv.events import EventSettings
from penstock.kv.store_index import hash_of, names_after

SECRET = b"s" * 32
Held = dict[str, set[int]]


class Follower:
    """Stands where `launch.kv_events.KVEvents` stands; or is fed by hand.

    It applies what it hears, and asserts that nothing comes twice, goes twice, or follows what is not there.
    """

    def __init__(self, *, include_token_ids: bool = False) -> None:
        self.settings = EventSettings(SECRET, include_token_ids)
        self.held: Held = {DEVICE: set(), HOST: set(), DISK: set(), REMOTE: set()}
        self.texts: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        """What each block follows and holds, as the device's events said."""
        self.nameless: set[int] = set()
        """Told of without tokens, because nobody knew them."""
        self.heard: list[KVEvent] = []

    def follow(self, core: EngineCore) -> None:
        core.tell_events = self.hear
        core.publish()

    def hear(self, events: list[KVEvent]) -> bool:
        assert events, "nothing is told"
        self.heard += events
        for event in events:
            if isinstance(event, AllBlocksCleared):
                for held in self.held.values():
                    held.clear()
                continue
            hashes = set(event.block_hashes)
            assert hashes
            assert len(hashes) == len(event.block_hashes), "a block is told of twice"
            assert event.medium is not None
            held = self.held[event.medium]
            if isinstance(event, BlockStored):
                known = hashes & held if event.medium != DISK or not event.token_ids else hashes & held - self.nameless
                assert not known, "a block is stored twice"
                self.read(event)
                if event.medium == DEVICE:
                    assert event.parent_block_hash is None or event.parent_block_hash in held, "it follows nothing"
                held |= hashes
            else:
                assert isinstance(event, BlockRemoved)
                assert hashes <= held, "what is not there is removed"
                held -= hashes
                if event.medium == DISK:
                    self.nameless -= hashes
        return True

    def read(self, event: BlockStored) -> None:
        """Tokens are the same in every medium, and follow what is kept; only a store has blocks that nobody read."""
        if not self.settings.include_token_ids:
            assert not event.token_ids
            return
        if not event.token_ids:
            assert event.medium == DISK, "tokens are missing"
            self.nameless |= set(event.block_hashes)
            return
        size = len(event.token_ids) // len(event.block_hashes)
        parent = event.parent_block_hash
        assert parent is None or any(parent in held for held in self.held.values()), "it follows nothing"
        for number, name in enumerate(event.block_hashes):
            text = parent, tuple(event.token_ids[number * size : (number + 1) * size])
            if event.medium == DEVICE:
                self.texts[name] = text
            else:
                self.nameless.discard(name)
            assert self.texts[name] == text
            parent = name


def kept(core: EngineCore, requests: Iterable[Request]) -> Held:
    """What an engine keeps, by a walk over its prefix tree whose names are made anew. `requests`: whose it can be."""
    recorder, cache = core.kv.events, core.kv.cache
    assert recorder is not None
    names = recorder._names
    held: Held = {DEVICE: set(), HOST: set(), DISK: set(), REMOTE: set()}
    whose = {(r.namespace, r.taint) for r in requests}
    roots = {digest(namespace, taint.encode()): names.root(namespace, taint) for namespace, taint in whose}
    for key, root in cache._roots.items():  # type: ignore[attr-defined]
        stack = [(child, roots[key]) for child in root.children.values()]
        while stack:
            node, before = stack.pop()
            chain = names_after(names.secret, before, bytes(node.tokens), cache.block_bytes)  # type: ignore[attr-defined]
            assert len(chain) == len(node.slabs) + len(node.copies)
            hashes = {hash_of(name) for name in chain}
            assert not hashes & (held[DEVICE] | held[HOST])
            held[DEVICE if node.slabs else HOST] |= hashes
            stack += [(child, chain[-1]) for child in node.children.values()]
    for tier in core.kv.stored.tiers if core.kv.stored is not None else ():
        paths = (path.rpartition("/")[2] for path in tier.index._entries if not path.endswith(STATE))
        medium = {"disk": DISK, "remote": REMOTE}[tier.name]
        held[medium] = {hash_of(bytes.fromhex(name.partition("-")[0])) for name in paths}
    return held


def checked(core: EngineCore, follower: Follower, requests: list[Request]) -> list[int]:
    """After each step from now on, the follower has exactly what is kept. Returns a list that grows with every check,
    of how many blocks that were."""
    step, counts = core.step, []

    def stepped():  # type: ignore[no-untyped-def]
        emitted = step()
        expected = kept(core, requests)
        assert follower.held == expected
        counts.append(sum(map(len, expected.values())))
        return emitted

    core.step = stepped  # type: ignore[method-assign]
    return counts
