"""Events of KV blocks: whoever applies them knows exactly which blocks are kept, and they follow from a run's log."""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import pytest

from penstock.core.kv_events import DEVICE, DISK, HOST, AllBlocksCleared, BlockRemoved, BlockStored
from penstock.core.page_ops import STATE
from penstock.core.request import Control, Request
from penstock.engine.core import EngineCore
from penstock.engine.record import Recorder, load, replay
from penstock.kv.block_names import BlockNames
from penstock.kv.block_texts import ON_THE_WAY, BlockTexts, TextRun
from penstock.kv.events import EventRecorder
from penstock.kv.store_index import FoundBlock, StoreIndex, hash_of, names_after
from penstock.launch.assemble import engine_core
from tests.engine.events import SECRET, Follower, checked
from tests.engine.harness import Knobs, config_for, disturbed, fake_engine, plan_for, real_engine, request, run, tiny
from tests.engine.test_kv_store import ended, written
from tests.engine.test_laws_models import CONTROLS, check, draw_knobs, workload

FULL = ["llama_gqa", "latent"]
"""Only blocks of whole contexts go to the host."""
TIERS = ["none", "host", "disk", "both"]


def turmoil(name: str, tiers: str, folder: Path, rng: random.Random, follower: Follower) -> tuple[EngineCore, Knobs]:
    """An engine under everything that moves blocks; after each of its steps the follower is right."""
    spec, weights = tiny(name)
    k = draw_knobs(rng)
    k.block_size, k.prefix_cache = rng.choice([2, 4]), rng.choice(["radix", "hash"])
    k.num_blocks = rng.choice([48, 64])
    if tiers in ("host", "both"):
        k.offload, k.host_blocks = True, rng.choice([8, 64])
    if tiers in ("disk", "both"):
        k.block_size, k.kv_offload = 4, f"disk:{folder},1GiB"
    core = real_engine(spec, weights, k, events=follower)
    core.recorder = Recorder()
    requests = [*workload(spec.vocab_size), *strangers(spec.vocab_size, rng)]
    counts = checked(core, follower, requests)
    controls = [*CONTROLS, "taint"]
    collector = disturbed(core, requests, rng, controls, note=k)
    check(name, collector)
    assert max(counts) > 3
    if core.kv.stored is not None:
        ended(core)
    return core, k


def strangers(vocab: int, rng: random.Random) -> list[Request]:
    """Texts of their own, in namespaces of their own: enough to push others out."""
    return [
        request(
            [rng.randrange(3, vocab) for _ in range(rng.randrange(20, 60))],
            max_tokens=rng.randrange(1, 12),
            namespace=rng.choice([b"", b"a", b"b"]),
            taint=rng.choice(["", "", "x"]),
        )
        for _ in range(12)
    ]


CASES = [(name, tiers) for name in FULL for tiers in TIERS]
CASES += [(name, tiers) for name in ("windowed", "slots") for tiers in ("none", "disk")]


@pytest.mark.parametrize(("name", "tiers"), CASES)
@pytest.mark.sampled
def test_who_applies_the_events_has_what_the_engine_keeps(name: str, tiers: str, tmp_path: Path) -> None:
    rng = random.Random(f"events-{name}-{tiers}")
    kinds: set[tuple[type, Any]] = set()
    for tells in (False, True):
        follower = Follower(include_token_ids=tells)
        core, _ = turmoil(name, tiers, tmp_path, rng, follower)
        assert core.kv.events is not None
        texts = core.kv.events._texts
        if texts is not None:  # as long as there is a place, and not much longer
            held = set.union(*follower.held.values())
            assert texts._texts.keys() >= held - follower.nameless
            assert len(texts) <= len(held) + (ON_THE_WAY if tiers in ("disk", "both") else 0)
        assert follower.heard[0] == AllBlocksCleared()
        kinds |= {(type(event), getattr(event, "medium", None)) for event in follower.heard}
    expected: set[tuple[type, Any]] = {(BlockStored, DEVICE), (BlockRemoved, DEVICE), (AllBlocksCleared, None)}
    if tiers in ("host", "both"):
        expected |= {(BlockStored, HOST), (BlockRemoved, HOST)}
    if tiers in ("disk", "both"):
        expected |= {(BlockStored, DISK)}
    assert kinds >= expected, "the turmoil shows everything"


@pytest.mark.parametrize("tiers", ["none", "both"])
def test_the_events_of_a_run_follow_from_its_log(tiers: str, tmp_path: Path) -> None:
    follower = Follower(include_token_ids=True)
    spec, _ = tiny("llama_gqa")
    rng = random.Random(f"log-{tiers}")
    core, k = turmoil("llama_gqa", tiers, tmp_path / "blocks", rng, follower)
    assert core.recorder is not None
    core.recorder.save(tmp_path / "log")
    again = Follower(include_token_ids=True)
    store = None if core.kv.stored is None else core.kv.stored._settings

    def twin(executor: Any, clock: Any) -> EngineCore:
        made = engine_core(
            config_for(k), plan_for(spec, k), executor, clock, store=store, events=again.settings, check_invariants=True
        )
        again.follow(made)
        return made

    replay(load(tmp_path / "log"), twin, depth=k.depth)
    assert again.heard == follower.heard
    assert any(isinstance(event, BlockRemoved) for event in again.heard)


def test_names_chain_and_tokens_are_told_only_if_asked_for() -> None:
    text = [3 + i * 7 % 23 for i in range(11)]
    for tells in (False, True):
        follower = Follower(include_token_ids=tells)
        core, _ = fake_engine(Knobs(block_size=4), events=follower)
        run(core, [request(text[:9], max_tokens=1), request(text, max_tokens=1)])
        run(core, [request(text[:8] + [5] * 5, max_tokens=1)])
        names = [hash_of(name) for name in chain(text[:8] + [5] * 4)]
        stored = [event for event in follower.heard if isinstance(event, BlockStored)]
        assert [event.block_hashes for event in stored] == [names[:2], names[2:]]
        assert [event.parent_block_hash for event in stored] == [None, names[1]]
        assert [event.token_ids for event in stored] == ([text[:8], [5] * 4] if tells else [[], []])
        assert {(event.block_size, event.lora_id, event.lora_name) for event in stored} == {(4, None, None)}


def test_a_routers_texts_follow_their_blocks_to_the_disk_and_back(tmp_path: Path) -> None:
    """A router finds a block by its tokens, in whatever medium it is: so those of the disk's are told as soon as an
    engine knows them, also of blocks that an earlier one has written."""
    text = [3 + i * 7 % 23 for i in range(40)]
    knobs = Knobs(block_size=4, kv_offload=f"disk:{tmp_path},1GiB")
    first = Follower(include_token_ids=True)
    core, _ = fake_engine(knobs, events=first)
    run(core, [request(text, max_tokens=2)])
    written(core)
    on_disk = [event for event in first.heard if isinstance(event, BlockStored) and event.medium == DISK]
    assert sorted(token for event in on_disk for token in event.token_ids) == sorted(text)
    assert on_disk[0].parent_block_hash is None
    ended(core)
    again = Follower(include_token_ids=True)
    core, _ = fake_engine(knobs, events=again)
    run(core, [request([7], max_tokens=1)])
    assert again.nameless == first.held[DISK], "found in the folder: nobody knows what they hold"
    run(core, [request(text, max_tokens=2)])
    assert not again.nameless
    assert {name: again.texts[name] for name in again.held[DISK]} == first.texts
    ended(core)


def test_texts_of_blocks_that_are_nowhere_are_forgotten_in_order() -> None:
    texts = BlockTexts()
    texts.learn(TextRun([1, 2, 3], None, [5, 6, 7, 8, 9, 10]))
    texts.placed([3, 9])
    texts.removed([1, 2, 3])
    assert [*texts.runs([3, 1, 2])] == [TextRun([1, 2, 3], None, [5, 6, 7, 8, 9, 10])]
    assert [*texts.runs([3, 9])] == [TextRun([3], 2, [9, 10])]
    for name in range(10, 10 + ON_THE_WAY):
        texts.learn(TextRun([name], None, [1]))
        texts.removed([name])
    assert [texts.knows(name) for name in (1, 2, 3, 10, 9 + ON_THE_WAY)] == [False, False, True, True, True]
    texts.forget()
    assert len(texts) == 1


def chain(tokens: list[int]) -> list[bytes]:
    """Names of the blocks of a text, without an engine."""
    names = BlockNames(SECRET, "", 4)
    return names_after(SECRET, names.root(b"", ""), array("i", tokens).tobytes(), 16)


def test_a_reset_clears_all_but_what_a_store_holds(tmp_path: Path) -> None:
    text = [3 + i * 7 % 23 for i in range(40)]
    for store in ("none", f"disk:{tmp_path},1GiB"):
        follower = Follower()
        core, _ = fake_engine(Knobs(block_size=4, kv_offload=store), events=follower)
        r = request(text, max_tokens=2)
        counts = checked(core, follower, [r, request([7])])
        run(core, [r])
        core.add(Control(kind="reset_prefix_cache", request_id=""))
        core.step()
        assert not follower.held[DEVICE]
        assert follower.heard.count(AllBlocksCleared()) == (2 if store == "none" else 1)
        assert max(counts) >= 10
        if store != "none":
            written(core)
            assert len(follower.held[DISK]) == 10
            ended(core)
    again = Follower()  # an engine that finds a full folder tells what is there
    core, _ = fake_engine(Knobs(block_size=4, kv_offload=store), events=again)
    run(core, [request([7], max_tokens=1)])
    assert again.held[DISK] == follower.held[DISK]
    ended(core)


def test_strange_files_of_a_store_are_no_events(tmp_path: Path) -> None:
    index = StoreIndex(1 << 20)
    recorder = EventRecorder(BlockNames(SECRET, "model", 4), include_token_ids=False, stores={DISK: index})
    name = bytes(range(16))
    path = f"model/a/{name.hex()}-0"
    strange = ["model/a/notes.txt", f"other/a/{name.hex()}-0", f"{path}{STATE}", f"{path}\n", "model/a/-1", "x"]
    index.found([FoundBlock(path, 10, 0), *(FoundBlock(path, 10, 0) for path in strange)])
    assert recorder.take()[1:] == [BlockStored([hash_of(name)], None, [], 4, None, DISK, None)]
    index.found([FoundBlock(f"model/b/{name.hex()}-0", 10, 0)], gone=strange)
    assert recorder.take() == [], "another tenant has the same one"
    index.found([], gone=[path])
    assert recorder.take() == []
    index.found([FoundBlock(path, 10, 0)], gone=[f"model/b/{name.hex()}-0"])
    assert recorder.take() == [
        BlockRemoved([hash_of(name)], DISK), BlockStored([hash_of(name)], None, [], 4, None, DISK, None)
    ]  # fmt: skip
    assert recorder.take() == []


def test_off_nothing_is_recorded(tmp_path: Path) -> None:
    core, _ = fake_engine(Knobs(block_size=4, kv_offload=f"disk:{tmp_path},1GiB"))
    run(core, [request([3 + i % 23 for i in range(40)], max_tokens=2)])
    assert core.kv.events is None
    assert core.kv.stored is not None
    written(core)
    assert len(core.kv.stored.tiers[0].index) == 10
    assert core.kv.stored.tiers[0].index.take_changes() == []
    assert core.stats.num_kv_events == 0
    ended(core)
