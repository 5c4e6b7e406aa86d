"""A store of blocks outside the process changes no token: not at a restart, not where reading and writing fail.

The laws with `kv_offload`: engines follow one another over one folder, knobs drawn, their reads and writes
disturbed, and every token is the naive loop's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
import time
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import ConfigError
from penstock.core.model_spec import cache_groups
from penstock.core.page_ops import DISK
from penstock.core.request import Abort, Control
from penstock.core.sampling import SamplingParams
from penstock.engine.core import EngineCore
from penstock.engine.record import Recorder, load, replay
from penstock.kv.store_index import depth_of
from penstock.kv.tier_facts import counters_of
from penstock.launch.kv_store import files_of
from penstock.runner import block_files
from penstock.runner.block_files import BlockFiles
from penstock.sched.drafts.fixed import FixedDrafts
from tests.engine.harness import (
    Collector,
    Knobs,
    assert_idle,
    disturbed,
    drain,
    fake_engine,
    plain_core,
    real_engine,
    request,
    run,
    tiny,
)
from tests.engine.naive import fake_logits, generate
from tests.engine.processes import nano, running, within
from tests.engine.test_laws_models import CONTROLS, KIVI, SINKS, assert_beams, check, draw_knobs, workload

SPECS = ["llama_gqa", "latent", "indexed", "windowed", "slots", "mamba2"]


def files(core: EngineCore) -> BlockFiles:
    found = core.executor._runner.storage.outside.tiers[DISK]  # type: ignore[attr-defined]
    assert isinstance(found, BlockFiles)
    return found


def ended(core: EngineCore) -> None:
    """As at the end of a process: what waits is written."""
    files(core).close()


def written(core: EngineCore) -> None:
    """What waits has been written, and the engine has heard of it."""
    while files(core)._waiting_bytes:
        time.sleep(0.001)
    run(core, [request([5], max_tokens=1)])


def kept(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("*/*/*") if not p.name.startswith("."))


def knobs(folder: Path, **more: Any) -> Knobs:
    return Knobs(**({"block_size": 4, "budget": 64, "kv_offload": f"disk:{folder},1GiB"} | more))


def test_B33_a_second_engine_reads_what_the_first_computed(tmp_path: Path) -> None:
    text = [3 + i * 7 % 23 for i in range(50)]
    told = []
    for _ in range(2):
        core, forward = fake_engine(knobs(tmp_path))
        r = request(text, max_tokens=6)
        got = run(core, [r])[r.request_id]
        assert got.tokens[0] == generate(fake_logits, r)[0]
        told.append((forward.num_tokens, got.cached, core.kv.stored.tiers[0].num_loaded))  # type: ignore[union-attr]
        ended(core)
    assert told[0] == (50 + 5, 0, 0)
    assert told[1] == (2 + 5, 48, 12), "all whole blocks but the last token's were read"
    assert len(kept(tmp_path)) == 13, "the answer's whole block, too"
    counters = core.kv.stats().counters()
    size = kept(tmp_path)[0].stat().st_size
    assert counters_of(core.kv)["tier_read_bytes:disk"] == 12 * size
    assert counters["num_store_hit_tokens"] == counters["num_store_query_tokens"] == 48


@pytest.mark.parametrize("lost", [False, True])
def test_two_who_ask_for_one_text_at_once_read_it_once(tmp_path: Path, lost: bool) -> None:
    """Also if one of them leaves, and if it cannot be read; the second goes on differently."""
    text = [3 + i * 7 % 23 for i in range(50)]
    core, _ = fake_engine(knobs(tmp_path))
    run(core, [request(text, max_tokens=1)])
    ended(core)
    if lost:
        kept(tmp_path)[5].write_bytes(b"")
    core, _ = fake_engine(knobs(tmp_path))
    first, second, third = request(text, max_tokens=6), request([*text, 9, 9], max_tokens=6), request(text[:30])
    collector = Collector()
    for r in (first, second, third):
        core.add(r)
    collector.take(core.step())
    core.add(Abort(request_id=first.request_id))
    drain(core, collector)
    for r in (second, third):
        assert collector.requests[r.request_id].tokens[0] == generate(fake_logits, r)[0]
    stored = core.kv.stored
    assert stored is not None
    assert stored.choices["share"] >= 2
    if not lost:
        assert (stored.tiers[0].num_loaded, collector.requests[second.request_id].cached) == (12, 48)
        assert collector.requests[third.request_id].cached == 28
    assert [*stored._reading, *stored._read_by, *stored._sharers] == []
    stored.tiers[0].index.check_invariants()
    assert_idle(core)


def test_with_and_without_a_draft_model_a_folder_is_the_same(tmp_path: Path) -> None:
    """Its entries are not stored: whoever begins with another draft model, or none, finds the blocks."""
    spec, weights = tiny("llama_gqa")
    text = [3 + i * 7 % 23 for i in range(50)]
    said = {"method": "draft-model", "model": "draft0"}
    drafting = {"drafts": FixedDrafts(3, 63), "draft_models": (tiny("llama_mha"),), "speculation": said}
    told = []
    for more in (drafting, {}, drafting):
        core = real_engine(spec, weights, knobs(tmp_path), **more)
        got = run(core, [r := request(text, max_tokens=6)])[r.request_id]
        told.append((got.tokens[0], got.cached))
        if more:
            assert core.executor._runner.drafter is not None  # type: ignore[attr-defined]
            assert core.stats.num_draft_tokens > 0
        ended(core)
    assert [cached for _, cached in told] == [0, 48, 48]
    assert told[0][0] == told[1][0] == told[2][0]
    page = cache_groups(spec, "float32")[0].slab_bytes(4)
    assert {p.stat().st_size for p in kept(tmp_path)} == {page + block_files.OVERHEAD}, "the model's own entries alone"


def test_files_that_go_while_a_folder_is_looked_at_take_no_others_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full store removes files all the time: a look that ended at the first of them would call the rest gone."""
    place = tmp_path / "model" / "tenant"
    place.mkdir(parents=True)
    for n in range(20):
        (place / f"{n:032x}-0").touch()
    scandir = os.scandir

    def racing(path: Any) -> Any:
        entries = scandir(path)
        if Path(path) == place:  # all have been listed when every other one is removed
            entries = contextlib.nullcontext(list(entries))
            for n in range(0, 20, 2):
                (place / f"{n:032x}-0").unlink()
        return entries

    monkeypatch.setattr(os, "scandir", racing)
    assert sorted(name for name, _ in files_of(tmp_path)) == [f"model/tenant/{n:032x}-0" for n in range(1, 20, 2)]


def test_another_tenant_or_taint_finds_nothing(tmp_path: Path) -> None:
    text = [3 + i * 7 % 23 for i in range(24)]
    for number, (namespace, taint) in enumerate([(b"a", ""), (b"b", ""), (b"a", "x"), (b"a", "")]):
        core, _ = fake_engine(knobs(tmp_path))
        r = request(text, max_tokens=2, namespace=namespace, tenant=namespace.decode(), taint=taint)
        assert run(core, [r])[r.request_id].cached == (20 if number == 3 else 0)
        ended(core)
    assert len({p.parent for p in kept(tmp_path)}) == 2, "one folder for each tenant"


@pytest.mark.parametrize("name", SPECS)
def test_engines_over_one_folder_obey_the_laws(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Knobs drawn, requests disturbed; a fifth of reads and of writes fails, in every way there is. However slow the
    machine is, nothing is given up for that."""
    spec, weights = tiny(name)
    rng = random.Random(f"store-{name}")
    fates, fails = cycle(["", "flip", "", "gone", "slow", "cut", "", ""]), cycle([True, *[False] * 4])
    lock = threading.Lock()
    read, write = BlockFiles._read, BlockFiles._write

    def bad_read(self: BlockFiles, path: str, into: bytearray) -> bool:
        with lock:
            fate = next(fates)
        place = self._folder / path
        if fate == "slow":
            time.sleep(0.005)
        if fate in ("flip", "cut") and place.exists():
            with contextlib.suppress(FileNotFoundError):  # another thread's fault
                data = bytearray(place.read_bytes())
                data[-40:-39] = b"x"
                place.write_bytes(data if fate == "flip" else data[:-9])
        if fate == "gone":
            place.unlink(missing_ok=True)
        return read(self, path, into)

    def bad_write(self: BlockFiles, path: str, copy: bytearray) -> bool:
        with lock:
            bad = next(fails)
        if bad:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, path, copy)

    monkeypatch.setattr(block_files, "PATIENCE_S", 100.0)
    core = real_engine(spec, weights, Knobs(block_size=4, budget=64, kv_offload=f"disk:{tmp_path}"))
    run(core, workload(spec.vocab_size))
    ended(core)
    assert kept(tmp_path), "there is something to read from the start"
    monkeypatch.setattr(BlockFiles, "_read", bad_read)
    monkeypatch.setattr(BlockFiles, "_write", bad_write)
    monkeypatch.setattr(block_files, "RETRY_S", 0.01)
    loaded = lost = refused = 0
    for draw in range(6):
        k = draw_knobs(rng)
        k.block_size, k.kv_offload, k.prefix_cache = 4, f"disk:{tmp_path}", rng.choice(["radix", "hash"])
        k.kv_load_policy = rng.choice(["wait", "cake", "split", "auto"])
        k.offload = k.host_blocks > 0 and rng.random() < 0.5 and name in SPECS[:3]
        core = real_engine(spec, weights, k)
        collector = disturbed(core, workload(spec.vocab_size), rng, CONTROLS, note=k)
        try:
            check(name, collector)
        except AssertionError as error:
            raise AssertionError(f"draw {draw}: {k}") from error
        assert_beams(name, collector, f"draw {draw}: {k}")
        assert core.kv.stored is not None
        (tier,) = core.kv.stored.tiers
        tier.index.check_invariants()
        loaded, lost, refused = loaded + tier.num_loaded, lost + tier.num_lost, refused + tier.num_refused
        ended(core)
    assert loaded
    assert lost
    assert refused
    assert not list(tmp_path.glob("*/*/.*")), "what could not be written leaves nothing"


@pytest.mark.parametrize(
    "harm", ["flip", "head", "cut", "empty", "longer", "swapped", "gone", "folder", "link", "unreadable"]
)
def test_B33_what_is_wrong_with_a_file_is_a_miss(tmp_path: Path, harm: str) -> None:
    text = [3 + i * 7 % 23 for i in range(50)]
    core, _ = fake_engine(knobs(tmp_path))
    r = request(text, max_tokens=6)
    run(core, [r])
    ended(core)
    places = [p for p in kept(tmp_path) if p.name.endswith(("-3", "-4"))]
    place, other = places
    data = bytearray(place.read_bytes())
    if harm in ("flip", "head"):
        data[len(data) // 2 if harm == "flip" else 9] ^= 4
    elif harm == "cut":
        data = data[:-1]
    elif harm == "empty":
        data = bytearray()
    elif harm == "longer":
        data += b"x"
    elif harm == "swapped":
        data = bytearray(other.read_bytes())
    place.unlink()
    if harm == "folder":
        place.mkdir()
    elif harm == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        place.symlink_to(tmp_path / "elsewhere")
    elif harm != "gone":
        place.write_bytes(data)
    if harm == "unreadable":
        os.remove(place)
        os.mkfifo(place)
    core, forward = fake_engine(knobs(tmp_path))
    if harm == "gone":  # after the look
        core.kv.stored.tiers[0].index.found([])  # type: ignore[union-attr]
    r = request(text, max_tokens=6)
    got = run(core, [r])[r.request_id]
    assert got.tokens[0] == generate(fake_logits, r)[0]
    assert forward.num_tokens > 2 + 5, "it was computed, at least from there on"
    ended(core)


def test_a_disk_that_does_not_answer_stalls_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = [3 + i * 7 % 23 for i in range(50)]
    core, _ = fake_engine(knobs(tmp_path))
    run(core, [request(text, max_tokens=2)])
    ended(core)
    release = threading.Event()
    read = BlockFiles._read

    def hangs(self: BlockFiles, path: str, into: bytearray) -> bool:
        release.wait(20)
        return read(self, path, into)

    monkeypatch.setattr(BlockFiles, "_read", hangs)
    monkeypatch.setattr(block_files, "PATIENCE_S", 0.3)
    core, forward = fake_engine(knobs(tmp_path))
    slow, quick = request(text, max_tokens=6), request([9, 8, 7], max_tokens=4)
    collector = Collector()
    core.add(slow)
    core.add(quick)
    began = time.monotonic()
    while not collector.requests.get(quick.request_id, None) or not collector.requests[quick.request_id].reasons:
        collector.take(core.step())
    assert time.monotonic() - began < 0.3, "nobody else waits for the disk"
    drain(core, collector)
    assert collector.requests[slow.request_id].tokens[0] == generate(fake_logits, slow)[0]
    assert forward.num_tokens >= 50 + 5
    before = [array.copy() for planes in files(core)._planes for array in planes.values()]
    release.set()  # now the bytes come, and nobody's pages may change
    time.sleep(0.2)
    after = [array for planes in files(core)._planes for array in planes.values()]
    assert all((a.view("u1") == b.view("u1")).all() for a, b in zip(before, after, strict=True))
    assert_idle(core)


def test_who_leaves_while_blocks_are_read_leaks_nothing(tmp_path: Path) -> None:
    text = [3 + i * 7 % 23 for i in range(50)]
    core, _ = fake_engine(knobs(tmp_path))
    run(core, [request(text, max_tokens=2)])
    ended(core)
    for kind in ("abort", "preempt", "reset_prefix_cache"):
        core, _ = fake_engine(knobs(tmp_path))
        r = request(text, max_tokens=6)
        collector = Collector()
        core.add(r)
        collector.take(core.step())
        core.add(Abort(request_id=r.request_id) if kind == "abort" else Control(kind=kind, request_id=r.request_id))
        drain(core, collector)
        if kind != "abort":
            assert collector.requests[r.request_id].tokens[0] == generate(fake_logits, r)[0]
        assert_idle(core)
        ended(core)


def test_who_becomes_ragged_while_it_is_read_computes_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read goes to the slabs that it had."""
    text = [3 + i * 7 % 23 for i in range(50)]
    core, _ = fake_engine(knobs(tmp_path))
    run(core, [request(text, max_tokens=2)])
    ended(core)
    read, come = BlockFiles._read, threading.Event()

    def late(self: BlockFiles, path: str, into: bytearray) -> bool:
        come.wait(20)
        return read(self, path, into)

    monkeypatch.setattr(BlockFiles, "_read", late)
    core, forward = fake_engine(knobs(tmp_path, kv_load_policy="cake"))
    r, collector = request(text, max_tokens=6), Collector()
    core.add(r)
    collector.take(core.step())
    core.add(Control(kind="ragged", request_id=r.request_id))
    core._take(core._intake.popleft())
    come.set()
    while files(core)._loads:
        time.sleep(0.001)
    drain(core, collector)
    assert collector.requests[r.request_id].tokens[0] == generate(fake_logits, r)[0]
    assert forward.num_tokens == 50 + 5
    assert_idle(core)


def test_a_full_folder_gives_up_ends_of_texts_first(tmp_path: Path) -> None:
    """Room for 40 blocks: the text that nobody asked for again goes, from its end."""
    core, _ = fake_engine(knobs(tmp_path, num_blocks=128))
    stored = core.kv.stored
    assert stored is not None
    stored.tiers[0].index.limit_bytes = 40 * stored._settings.block_bytes
    texts = [[3 + (i * 7 + n * i * i) % 23 for i in range(65)] for n in (1, 2, 3)]
    for n in (0, 1, 0, 2):
        r = request(texts[n], max_tokens=1)
        assert run(core, [r])[r.request_id].tokens[0] == generate(fake_logits, r)[0]
        core.add(Control(kind="reset_prefix_cache", request_id=""))
        written(core)
    ended(core)
    assert stored.tiers[0].index.num_bytes <= stored.tiers[0].index.limit_bytes
    assert len(kept(tmp_path)) <= 40
    depths = [max(int(p.name.rpartition("-")[2], 16) for p in kept(tmp_path)) for _ in (0,)]
    assert depths == [15]
    core, _ = fake_engine(knobs(tmp_path, num_blocks=128))
    cached = []
    for n in (0, 1, 2):
        r = request(texts[n], max_tokens=1)
        cached.append(run(core, [r])[r.request_id].cached)
    assert cached[0] == cached[2] == 64
    assert cached[1] == 4 * 8, "the beginning of the one used longest ago is there"


def test_what_is_about_to_be_read_does_not_make_room(tmp_path: Path) -> None:
    """The folder is full, and lacks a block that the device has: it is offered while what follows is claimed."""
    text = [3 + i * 7 % 23 for i in range(42)]
    core, _ = fake_engine(knobs(tmp_path))
    run(core, [request(text, max_tokens=1)])
    ended(core)
    core, _ = fake_engine(knobs(tmp_path))
    stored = core.kv.stored
    assert stored is not None
    run(core, [request(text[:17], max_tokens=1)])  # now the device has four blocks
    written(core)
    (lost,) = [str(p.relative_to(tmp_path)) for p in kept(tmp_path) if p.name.endswith("-1")]
    stored.tiers[0].index.found([], [lost])
    stored.tiers[0].index.evicts = True  # the first engine still has the lock
    stored.tiers[0].index.limit_bytes = stored.tiers[0].index.num_bytes
    r = request(text, max_tokens=2)
    got = run(core, [r])[r.request_id]
    assert got.tokens[0] == generate(fake_logits, r)[0]
    assert got.cached == 40, "four blocks were on the device, six were read"
    depths = {depth_of(path) for path in stored.tiers[0].index._entries}
    assert {4, 5, 6, 7, 8, 9} <= depths, "what was being read stayed"


def test_two_engines_share_a_folder_and_one_makes_room(tmp_path: Path) -> None:
    first, _ = fake_engine(knobs(tmp_path))
    second, _ = fake_engine(knobs(tmp_path))
    text = [3 + i * 7 % 23 for i in range(50)]
    run(first, [request(text, max_tokens=2)])
    run(second, [request([7], max_tokens=1)])
    assert first.kv.stored.tiers[0].index.evicts  # type: ignore[union-attr]
    assert not second.kv.stored.tiers[0].index.evicts  # type: ignore[union-attr]
    ended(first)
    news = second.store_news.__self__.looks[0]  # type: ignore[union-attr]
    news._look()  # what a thread does every ten seconds
    r = request(text, max_tokens=6)
    got = run(second, [r])[r.request_id]
    assert got.cached == 48
    assert got.tokens[0] == generate(fake_logits, r)[0]


@pytest.mark.parametrize("depth", [1, 2])
def test_B27_a_prompt_is_read_from_its_end_while_it_is_computed_from_its_front(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """Cake: whatever the disk's speed, what was read and what was computed are together the prompt, and no more than a
    chunk of it was done twice; the tokens are the same."""
    text = [3 + i * 7 % 23 for i in range(201)]
    core, _ = fake_engine(knobs(tmp_path, num_blocks=128))
    run(core, [request(text, max_tokens=2)])
    ended(core)
    read = BlockFiles._read
    found = []
    for delay_s in (0.0, 0.01, 0.05, 10.0):
        leave = threading.Event()

        def slow(
            self: BlockFiles, path: str, into: bytearray, delay_s: float = delay_s, leave: threading.Event = leave
        ) -> bool:
            leave.wait(delay_s)
            return read(self, path, into)

        monkeypatch.setattr(BlockFiles, "_read", slow)
        core, forward = fake_engine(knobs(tmp_path, num_blocks=128, kv_load_policy="cake", depth=depth))
        r = request(text, max_tokens=3)
        collector = Collector()
        core.add(r)
        while r.request_id not in collector.requests or not collector.requests[r.request_id].reasons:
            collector.take(core.step())
            time.sleep(0.05)
        leave.set()
        assert collector.requests[r.request_id].tokens[0] == generate(fake_logits, r)[0]
        drain(core, collector)
        assert_idle(core)
        cached = core.kv.stored.num_hit_tokens  # type: ignore[union-attr]
        found.append(cached)
        assert cached + forward.num_tokens <= len(text) + 2 + 64
        assert cached + forward.num_tokens >= len(text) + 2
        ended(core)
    assert found[0] > found[2] > 0, found
    assert found[3] == 0, "a disk that brings nothing costs nothing"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_run_replays_without_the_disk(tmp_path: Path, depth: int) -> None:
    """What was found, read, lost and written is in the log: the schedule follows from it."""
    spec, weights = tiny("llama_gqa")
    k = Knobs(num_blocks=40, budget=16, depth=depth, kv_offload=f"disk:{tmp_path / 'kv'}")
    for round_ in range(2):
        core = real_engine(spec, weights, k)
        core.recorder = Recorder()
        rng, collector = random.Random(3), Collector()
        todo = workload(spec.vocab_size)
        emitted = []
        while todo or core.has_work:
            if todo and rng.random() < 0.4:
                core.add(todo.pop())
            if core.groups and rng.random() < 0.1:
                core.add(Control(kind="preempt", request_id=rng.choice(sorted(core.groups))))
            if round_ and rng.random() < 0.1:
                for place in kept(tmp_path / "kv")[:2]:
                    place.unlink(missing_ok=True)
            emitted += core.step()
        collector.take(emitted)
        check("llama_gqa", collector)
        assert core.kv.stored is not None
        settings, loaded = core.kv.stored._settings, core.kv.stored.tiers[0].num_loaded
        core.recorder.save(tmp_path / "run.log")
        ended(core)
        make = partial(plain_core, spec, k, store=settings)
        again = replay(load(tmp_path / "run.log"), make, depth=depth)
        assert again == emitted
    assert loaded > 0


@within(120)
async def test_an_engine_that_is_killed_reads_what_it_had_written(tmp_path: Path) -> None:
    """In a process of its own, killed -9 in the middle of an answer: the same tokens, and the prompt is not computed
    again."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    text = [3 + i * 7 % 200 for i in range(150)]
    async with running(nano()) as plain:
        expected = (await plain.complete("a", text, params)).outputs[0].token_ids
    config = nano(kv_offload=f"disk:{tmp_path / 'kv'}")
    async with running(config, stall_s=30) as own:
        stream = own.submit("a", text, params)
        await own.until(lambda: len(kept(tmp_path / "kv")) >= 4, 60)
        own.signal()
        got = await stream.result()
        assert got.outputs[0].token_ids == expected
        again = await own.complete("b", text, params)
        assert again.outputs[0].token_ids == expected
        snapshot = own.client.snapshot
        assert snapshot.counters["tier_read_blocks:disk"] >= 4


@within(120)
async def test_a_server_that_starts_again_reads_what_the_last_one_wrote(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    text = [3 + i * 7 % 200 for i in range(150)]
    config = nano(kv_offload=f"disk:{tmp_path / 'kv'}")
    found = []
    for _ in range(2):
        async with running(config, stall_s=30) as own:
            got = await own.complete("a", text, params)
            found.append((got.outputs[0].token_ids, got.num_cached_tokens))
    assert found[0][0] == found[1][0]
    assert [cached for _, cached in found] == [0, 128]


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    for name, mode, file, said in (
        ("open", 0o755, "", "chmod 700"), ("full", 0o700, "letter.txt", "holds other things"),
        ("damaged", 0o700, "secret", "is damaged"),
    ):  # fmt: skip
        folder = tmp_path / name
        folder.mkdir(mode=mode)
        folder.chmod(mode)
        if file:
            (folder / file).write_text("x")
        with pytest.raises(ConfigError, match=said):
            fake_engine(knobs(folder))
    with pytest.raises(ConfigError, match="none, disk:FOLDER, disk:FOLDER,20GiB"):
        fake_engine(knobs(tmp_path, kv_offload="disk:"))
    with pytest.raises(ConfigError, match="less than 1MiB"):
        fake_engine(knobs(tmp_path, kv_offload=f"disk:{tmp_path / 'x'},4K"))


@pytest.mark.parametrize(
    ("name", "kv_dtype", "block_size"),
    [("llama_gqa", KIVI, 4), ("llama_gqa", SINKS, 4), ("slots", KIVI, 8), ("windowed", "int4", 4)],
)
def test_formats_that_encode_whole_blocks_are_kept_as_they_are(
    name: str, kv_dtype: str, block_size: int, tmp_path: Path
) -> None:
    spec, weights = tiny(name)
    loaded, rng = 0, random.Random(1)
    for _ in range(3):
        k = draw_knobs(rng, kv_dtype)
        k.block_size, k.num_blocks, k.window_blocks = block_size, 64, 0
        k.prefix_cache, k.kv_offload = "radix", f"disk:{tmp_path}"
        core = real_engine(spec, weights, k)
        check(name, disturbed(core, workload(spec.vocab_size), rng, CONTROLS, note=k), kv_dtype, block_size)
        loaded += core.kv.stored.tiers[0].num_loaded  # type: ignore[union-attr]
        ended(core)
    assert loaded > 3


@pytest.mark.parametrize("ops", ["native", "torch"])
def test_other_backends_keep_the_same_law(ops: str, tmp_path: Path) -> None:
    if ops == "torch":
        pytest.importorskip("torch")
    spec, weights = tiny("llama_gqa")
    text = [3 + i * 7 % 40 for i in range(50)]
    k = Knobs(block_size=16, budget=64, ops=ops, kv_offload=f"disk:{tmp_path}")
    plain = real_engine(spec, weights, replace(k, kv_offload="none"))
    r = request(text, max_tokens=8)
    expected = run(plain, [r])[r.request_id].tokens[0]
    cached = []
    for _ in range(2):
        core = real_engine(spec, weights, k)
        r = request(text, max_tokens=8)
        got = run(core, [r])[r.request_id]
        assert got.tokens[0] == expected
        cached.append(got.cached)
        ended(core)
    assert cached == [0, 48]
