"""Blocks in another process: a server of blocks over real sockets changes no token, whatever becomes of it.

Killed, stopped, restarted, lying, with another secret or another version: a miss that is counted by reason and said
once, and nobody else waits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import ConfigError
from penstock.cli.main import main
from penstock.core import kv_events
from penstock.core.page_ops import DISK, REMOTE, DropOp, GetOp, PutOp
from penstock.core.request import Control
from penstock.engine.core import EngineCore
from penstock.engine.record import Recorder, load, replay
from penstock.kv.store_index import depth_of
from penstock.kv.tier_facts import counters_of
from penstock.launch import remote_store
from penstock.launch.block_server import BlockServer, FolderShelf, MemoryShelf, listen
from penstock.launch.kv_store import files_of, open_served
from penstock.launch.remote_store import RemoteStore
from penstock.runner import block_files, block_peer, block_wire
from penstock.runner.block_peer import Address, BlockPeer
from penstock.runner.block_wire import DONE, GET, HELLO, LIST, Ask, Channel, PeerError, admit, join
from penstock.runner.outside import Outside
from penstock.runner.shared_secret import make_secret, read_secrets
from tests.engine.events import Follower, checked
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
from tests.engine.test_laws_models import CONTROLS, assert_beams, check, draw_knobs, workload

TEXT = [3 + i * 7 % 23 for i in range(50)]
PATH = "fake/0123456789abcdef/" + "0" * 32 + "-0"


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    path = tmp_path / "shared"
    assert make_secret(path)
    return path


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_store, "LOOK_S", 1e9)  # tests look when they want to
    monkeypatch.setattr(block_peer, "CONNECT_S", 60.0)  # nothing fails because the machine is slow
    monkeypatch.setattr(block_peer, "ANSWER_S", 60.0)
    monkeypatch.setattr(block_files, "PATIENCE_S", 60.0)
    monkeypatch.setattr(block_peer, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(block_peer, "LONGEST_PAUSE_S", 0.1)


@contextlib.contextmanager
def serving(shared: Path, *, folder: Path | None = None, limit: int = 1 << 30, port: int = 0) -> Iterator[BlockServer]:
    if folder is not None:
        open_served(folder)
    shelf = MemoryShelf() if folder is None else FolderShelf(folder, files_of)
    sock = listen(f"127.0.0.1:{port}", anywhere=False)
    server = BlockServer(sock, read_secrets(shared).connection, shelf, limit)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(5)


def port_of(server: BlockServer) -> int:
    return int(server.sock.getsockname()[1])


def knobs(shared: Path, port: int, *, disk: Path | None = None, **more: Any) -> Knobs:
    tiers = ([] if disk is None else [f"disk:{disk},1GiB"]) + [f"remote:127.0.0.1:{port}"]
    settings = {"block_size": 4, "budget": 64, "kv_offload": " ".join(tiers), "kv_offload_secret_file": str(shared)}
    return Knobs(**(settings | more))


def outside(core: EngineCore) -> Outside:
    found = core.executor._runner.storage.outside  # type: ignore[attr-defined]
    assert isinstance(found, Outside)
    return found


def answered(core: EngineCore, text: list[int] = TEXT) -> int:
    """The naive loop's tokens come; returns how many of the prompt were not computed."""
    r = request(text, max_tokens=6)
    forward = core.executor._runner._forward  # type: ignore[attr-defined]
    before = forward.num_tokens
    got = run(core, [r])[r.request_id]
    assert got.tokens[0] == generate(fake_logits, r)[0]
    assert_idle(core)
    return len(text) + 5 - int(forward.num_tokens - before)


def misses(core: EngineCore) -> dict[str, int]:
    assert core.kv.stored is not None
    return dict(core.kv.stored.misses)


def filled(shared: Path, port: int, **more: Any) -> None:
    """An engine has computed TEXT, and the server has its blocks."""
    core, _ = fake_engine(knobs(shared, port, **more))
    assert answered(core) == 0
    outside(core).close()


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_a_second_engine_reads_what_the_first_computed(shared: Path, tmp_path: Path, where: str) -> None:
    folder = tmp_path / "served" if where == "folder" else None
    with serving(shared, folder=folder) as server:
        filled(shared, port_of(server))
        assert server.num_blocks == server.counts.put == 13
        core, forward = fake_engine(knobs(shared, port_of(server)))
        assert answered(core) == 48
        assert forward.num_tokens == 2 + 5
        assert server.counts.got == 12
        assert counters_of(core.kv)["tier_read_blocks:remote"] == 12
        assert not misses(core)
        outside(core).close()
    if folder is not None:
        assert len(list(folder.glob("*/*/*"))) == 13
        assert all(path.stat().st_mode & 0o077 == 0 for path in folder.rglob("*"))
        with serving(shared, folder=folder) as server:  # started anew
            assert server.num_blocks == 13
            core, _ = fake_engine(knobs(shared, port_of(server)))
            assert answered(core) == 48
            outside(core).close()


def test_two_engines_share_one_server(shared: Path) -> None:
    """What one has written the other reads, without a restart; both write the same block once."""
    with serving(shared) as server:
        first, _ = fake_engine(knobs(shared, port_of(server)))
        second, _ = fake_engine(knobs(shared, port_of(server)))
        assert answered(first) == 0
        outside(first).close()
        look = second.store_news.__self__.looks[0]  # type: ignore[union-attr]
        look.look()  # what a thread does every two seconds
        assert answered(second) == 48
        other = [5 + i * 3 % 19 for i in range(30)]
        assert answered(second, other) == 0
        outside(second).close()
        first.store_news.__self__.looks[0].look()  # type: ignore[union-attr]
        assert answered(first, other) == 28
        outside(first).close()
        assert server.counts.put == 13 + 8


def test_the_nearest_tier_is_read_and_every_tier_is_written(shared: Path, tmp_path: Path) -> None:
    disk = tmp_path / "kv"
    with serving(shared) as server:
        filled(shared, port_of(server), disk=disk)
        files = sorted(disk.glob("*/*/*"))
        assert len(files) == server.num_blocks == 13
        core, _ = fake_engine(knobs(shared, port_of(server), disk=disk))
        assert answered(core) == 48
        assert server.counts.got == 0, "the disk has all"
        outside(core).close()
        for path in files:
            if int(path.name.rpartition("-")[2], 16) in (2, 3, 7):
                path.unlink()
        core, forward = fake_engine(knobs(shared, port_of(server), disk=disk))
        assert answered(core) == 48, "one load from both"
        assert forward.num_tokens == 2 + 5
        assert server.counts.got == 3
        outside(core).close()
        assert len(sorted(disk.glob("*/*/*"))) == 13, "what came from afar is near now"
    core, _ = fake_engine(knobs(shared, 1, disk=disk))
    assert answered(core) == 48, "without the server the disk is enough"
    outside(core).close()


@pytest.mark.parametrize("spec_name", ["llama_gqa", "windowed", "slots"])
def test_engines_over_one_server_obey_the_laws(
    spec_name: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Knobs drawn, requests disturbed; a third of what is read fails, in every way there is, and a fifth of what is
    written; with a disk before it or without. However slow the machine is, nothing is given up for that."""
    spec, weights = tiny(spec_name)
    rng, lock = random.Random(f"remote-{spec_name}"), threading.Lock()
    fates, fails = cycle(["", "flip", "", "lost", "", "gone", "slow", "cut", ""]), cycle([True, *[False] * 4])
    get, put = BlockPeer.get, BlockPeer.put

    def bad_get(self: BlockPeer, path: str, most: int) -> bytearray | None:
        with lock:
            fate = next(fates)
        if fate == "lost":
            raise self._down(PeerError("lost", "drawn"))
        if fate == "slow":
            time.sleep(0.005)
        block = get(self, path, most)
        if block is not None and fate in ("flip", "cut"):
            block[-40] ^= 1
            block = block if fate == "flip" else block[:-9]
        return None if fate == "gone" else block

    def bad_put(self: BlockPeer, path: str, data: bytearray) -> bool:
        with lock:
            bad = next(fails)
        return not bad and put(self, path, data)

    monkeypatch.setattr(block_peer, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(block_peer, "LONGEST_PAUSE_S", 0.002)
    loaded = lost = 0
    reasons: set[str] = set()
    with serving(shared) as server:
        core = real_engine(spec, weights, knobs(shared, port_of(server)))
        run(core, workload(spec.vocab_size))
        outside(core).close(100.0)
        assert server.num_blocks, "there is something to read from the start"
        monkeypatch.setattr(BlockPeer, "get", bad_get)
        monkeypatch.setattr(BlockPeer, "put", bad_put)
        for draw in range(6):
            k = draw_knobs(rng)
            disk = tmp_path / "kv" if rng.random() < 0.4 else None
            near = knobs(shared, port_of(server), disk=disk)
            k.block_size, k.kv_offload, k.kv_offload_secret_file = 4, near.kv_offload, near.kv_offload_secret_file
            k.prefix_cache, k.kv_load_policy = rng.choice(["radix", "hash"]), rng.choice(["wait", "cake"])
            core = real_engine(spec, weights, k)
            collector = disturbed(core, workload(spec.vocab_size), rng, CONTROLS, note=k)
            try:
                check(spec_name, collector)
            except AssertionError as error:
                raise AssertionError(f"draw {draw}: {k}") from error
            assert_beams(spec_name, collector, f"draw {draw}: {k}")
            assert core.kv.stored is not None
            tier = core.kv.stored.tiers[-1]
            tier.index.check_invariants()
            loaded, lost = loaded + tier.num_loaded, lost + tier.num_lost
            reasons |= misses(core).keys()
            outside(core).close()
    assert loaded
    assert lost
    assert reasons <= {f"remote:{why}" for why in ("changed", "short", "gone", "lost")}


def several(shared: Path, *servers: BlockServer | int, **more: Any) -> Knobs:
    ports = [port if isinstance(port, int) else port_of(port) for port in servers]
    k = knobs(shared, 1, **more)
    k.kv_offload = " ".join(f"remote:127.0.0.1:{port}" for port in ports)
    return k


def test_blocks_are_shared_out_over_servers_by_their_names(shared: Path) -> None:
    """Each block is on one of three, is read from there, and who goes takes its share alone along."""
    text = [3 + (i * 7 + i * i) % 23 for i in range(162)]
    with serving(shared) as first, serving(shared) as second:
        with serving(shared) as third:
            three = first, second, third
            core, _ = fake_engine(several(shared, *three, num_blocks=128))
            assert answered(core, text) == 0
            outside(core).close()
            shares = [set(s._index.oldest_first()) for s in three]
            assert sum(map(len, shares)) == len(set().union(*shares)) == 41
            assert all(shares), "41 blocks are not all on two"
            core, _ = fake_engine(several(shared, *reversed(three), num_blocks=128))
            assert answered(core, text) == 160, "their order says nothing"
            assert sum(s.counts.got for s in three) == 40
            assert sum(s.counts.missed for s in three) == 0, "nobody is asked for what others have"
            outside(core).close()
            core, _ = fake_engine(several(shared, *three, num_blocks=128))
            gone_port = port_of(third)
        with_gone = several(shared, first, second, gone_port, num_blocks=128)
        (look,) = core.store_news.__self__.looks  # type: ignore[union-attr]
        look.look()
        run(core, [request([5], max_tokens=1)])  # hears of it
        index = core.kv.stored.tiers[0].index  # type: ignore[union-attr]
        assert set(index.oldest_first()) == shares[0] | shares[1], "its share alone is forgotten"
        lost = min(depth_of(path) for path in shares[2])
        assert answered(core, text) == 4 * lost
        assert not misses(core), "nobody asks it in vain"
        outside(core).close()
        assert shares[0] <= set(first._index.oldest_first()), "the others keep theirs"
        assert set(first._index.oldest_first()) | set(second._index.oldest_first()) == set().union(*shares)
        core, _ = fake_engine(with_gone)
        assert answered(core, text) == 160, "what it had was computed, and lies with the next ones"
        outside(core).close()
        with serving(shared, port=gone_port) as third:  # back, with nothing: others still have its share
            time.sleep(2 * block_peer.LONGEST_PAUSE_S)  # this process asks again
            core, _ = fake_engine(with_gone)
            assert answered(core, text) == 160
            assert third.counts.missed > 0, "it is asked first for what is its own"
            outside(core).close()
            (look,) = core.store_news.__self__.looks  # type: ignore[union-attr]
            told = [path for news in look._news for path in news.gone]
            assert not told
    assert len({*shares[0], *shares[1], *shares[2]}) == 41


def test_events_tell_of_what_servers_keep_beside_the_folder(shared: Path, tmp_path: Path) -> None:
    """Who applies them has exactly what each medium has, also when one of two servers goes."""
    follower, texts = Follower(), [request([3 + (i * 7 + n) % 23 for i in range(80)], max_tokens=2) for n in range(3)]
    with serving(shared) as first:
        with serving(shared) as second:
            k = several(shared, first, second, num_blocks=128)
            k.kv_offload += f" disk:{tmp_path / 'kv'},1GiB"
            core, _ = fake_engine(k, events=follower)
            counts = checked(core, follower, [*texts, request([5])])
            run(core, texts)
            outside(core).close()
            run(core, [request([5], max_tokens=1)])  # hears what was written
            assert follower.held[kv_events.REMOTE] == follower.held[kv_events.DISK]
            assert len(follower.held[kv_events.REMOTE]) == first.num_blocks + second.num_blocks == 60
            again = Follower()
            other, _ = fake_engine(several(shared, first, second), events=again)
            checked(other, again, [request([5])])
            run(other, [request([5], max_tokens=1)])
            assert again.held[kv_events.REMOTE] == follower.held[kv_events.REMOTE], "what is there at the start"
            assert {event.medium for event in again.heard[1:]} == {kv_events.REMOTE}  # type: ignore[union-attr]
        other.store_news.__self__.looks[0].look()  # type: ignore[union-attr]
        run(other, [request([5], max_tokens=1)])
        assert len(again.held[kv_events.REMOTE]) == first.num_blocks
    assert max(counts) >= 120


def test_servers_that_go_one_after_the_other_cost_no_token(shared: Path, tmp_path: Path) -> None:
    """Each at a drawn moment while engines read from and write to all of them; then it is back, over its folder."""
    rng = random.Random(7)
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(serving(shared, folder=tmp_path / f"served{n}")) for n in range(2)]
        ports = list(map(port_of, made))
        for round_ in range(4):
            core, _ = fake_engine(several(shared, *ports, num_blocks=256))
            victim = round_ % 2
            killer = threading.Timer(rng.uniform(0.0, 0.1), made[victim].close)
            killer.start()
            for n in range(6):
                answered(core, [3 + (i * 7 + n * i * i + round_ // 2) % 23 for i in range(120)])
            killer.join()
            outside(core).close(100.0)
            while made[victim]._open:
                time.sleep(0.001)  # what it had begun to write
            made[victim] = stack.enter_context(serving(shared, folder=tmp_path / f"served{victim}", port=ports[victim]))
        time.sleep(2 * block_peer.LONGEST_PAUSE_S)  # this process asks again
        core, _ = fake_engine(several(shared, *ports, num_blocks=256))
        assert answered(core, [3 + i * 7 % 23 for i in range(120)]) == 116
        assert core.kv.stored.tiers[0].num_loaded == 29, "what was written is on one of them"  # type: ignore[union-attr]
        outside(core).close()


def test_a_server_that_starts_again_between_two_requests_is_no_miss(shared: Path, tmp_path: Path) -> None:
    """Its old connections are dead, and are made anew without a pause."""
    with serving(shared, folder=tmp_path / "served") as server:
        port = port_of(server)
        filled(shared, port)
        core, _ = fake_engine(knobs(shared, port))
        assert answered(core) == 48
    core.add(Control(kind="reset_prefix_cache", request_id=""))
    with serving(shared, folder=tmp_path / "served", port=port):
        assert answered(core) == 48
        assert not misses(core)
        outside(core).close()


@pytest.mark.parametrize("harm", ["flip", "head", "cut", "empty", "longer", "swapped", "gone"])
def test_a_server_that_lies_is_found_out(shared: Path, harm: str) -> None:
    """It need not be trusted: a block is used only if it is what an engine wrote under its name."""
    with serving(shared) as server:
        filled(shared, port_of(server))
        blocks: dict[str, bytes] = server._shelf._blocks  # type: ignore[attr-defined]
        place, other = (path for path in sorted(blocks, key=lambda p: p[-2:]) if path.endswith(("-3", "-4")))
        data = bytearray(blocks[place])
        if harm in ("flip", "head"):
            data[len(data) // 2 if harm == "flip" else 9] ^= 4
        changed = {"cut": data[:-1], "empty": b"", "longer": data + b"x", "swapped": blocks[other]}
        blocks[place] = bytes(changed.get(harm, data))
        if harm == "gone":
            del blocks[place]
        core, forward = fake_engine(knobs(shared, port_of(server)))
        if harm == "longer":  # its length alone breaks the connection off
            assert answered(core) <= 12
        else:
            assert answered(core) == 12, "three blocks stood before it"
            assert forward.num_tokens == 50 - 12 + 5
        reason = {"cut": "short", "empty": "short", "longer": "frame", "gone": "gone"}.get(harm, "changed")
        assert misses(core)[f"remote:{reason}"] >= 1
        outside(core).close()
        core, _ = fake_engine(knobs(shared, port_of(server)))
        assert harm == "longer" or answered(core) == 48, "what was computed took its place"
        outside(core).close()


def test_a_killed_server_is_a_miss_and_one_that_starts_again_is_found(
    shared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A process of its own, killed -9 between an engine's look and its load, and started again over its folder."""
    with own_process(shared, tmp_path / "served") as (server, port):
        filled(shared, port)
        core, forward = fake_engine(knobs(shared, port))
        look = core.store_news.__self__.looks[0]  # type: ignore[union-attr]
        server.kill()
        server.wait(10)
        with caplog.at_level(logging.WARNING):
            assert answered(core) == 0
        assert forward.num_tokens == 50 + 5
        assert {*misses(core)} <= {"remote:lost", "remote:unreachable"}
        assert sum(misses(core).values()) == 12
        said = [r.message for r in caplog.records if "cannot be used" in r.message]
        assert len(said) == 1, "once, not for every block"
        assert f"127.0.0.1:{port}" in said[0]
        look.look()  # it hears that nothing is there any more: nobody asks in vain
        core.add(Control(kind="reset_prefix_cache", request_id=""))
        before = sum(misses(core).values())
        assert answered(core) == 0
        assert sum(misses(core).values()) == before
    with own_process(shared, tmp_path / "served", port) as (server, port):
        core.add(Control(kind="reset_prefix_cache", request_id=""))
        until = time.monotonic() + 20
        while not len(core.kv.stored.tiers[0].index) and time.monotonic() < until:  # type: ignore[union-attr]
            time.sleep(0.02)
            look.look()
            run(core, [request([5], max_tokens=1)])
        assert answered(core) == 48
        outside(core).close()


@contextlib.contextmanager
def own_process(shared: Path, folder: Path, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-m", "penstock", "cache", "serve", str(folder), "--secret-file", str(shared),
               "--listen", f"127.0.0.1:{port}"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = next(line for line in server.stdout if line.startswith("listening"))
            yield server, int(line.rpartition(":")[2])
        finally:
            server.kill()


def test_a_server_that_is_killed_while_it_is_read_from_leaves_no_half_block(shared: Path, tmp_path: Path) -> None:
    """Killed at drawn moments while engines write and read: the tokens are right, and what is left is whole."""
    rng = random.Random(5)
    for round_ in range(4):
        with own_process(shared, tmp_path / "served") as (server, port):
            core, _ = fake_engine(knobs(shared, port, num_blocks=256))
            killer = threading.Timer(rng.uniform(0.0, 0.15), partial(os.kill, server.pid, signal.SIGKILL))
            killer.start()
            for n in range(8):
                answered(core, [3 + (i * 7 + n * i * i + round_ % 2) % 23 for i in range(120)])
            killer.join()
            outside(core).close()
    key = read_secrets(shared).blocks
    left = [path for path, _ in files_of(tmp_path / "served") if block_wire.PATH.fullmatch(path)]
    assert all(block_files.is_whole(tmp_path / "served", path, key) for path in left)


@pytest.mark.parametrize(
    ("host", "behave", "said", "reason"),
    [
        ("nowhere.invalid", None, "nobody knows the name nowhere.invalid", "unreachable"),
        ("127.0.0.1", None, "nothing listens there; start penstock cache serve", "unreachable"),
        (
            "127.0.0.1",
            lambda s: s.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
            "an HTTP server listens there",
            "version",
        ),
        (
            "127.0.0.1",
            lambda s: s.makefile().readline() and s.sendall(b"HTTP/1.0 400 No\r\n"),
            "an HTTP server",
            "version",
        ),
        ("127.0.0.1", lambda s: s.sendall(b"220 mail.example ESMTP\r\n"), "something else listens there", "version"),
        ("127.0.0.1", lambda s: s.shutdown(socket.SHUT_RDWR), "it hangs up instead of telling", "lost"),
        ("127.0.0.1", lambda s: None, "it says nothing for 0.2 s", "slow"),
    ],
)
def test_a_wrong_address_is_told_in_a_sentence(
    host: str, behave: Callable[[socket.socket], object] | None, said: str, reason: str,
    shared: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(block_peer, "ANSWER_S", 0.2)
    with contextlib.ExitStack() as stack:
        port = 1 if behave is None else stack.enter_context(fake_server(behave))
        with pytest.raises(PeerError, match=said) as caught:
            BlockPeer(Address(host, port, read_secrets(shared).connection)).list(Ask(""))
        assert caught.value.reason == reason


def test_a_server_is_reached_over_ipv6(shared: Path) -> None:
    try:
        sock = listen("[::1]:0", anywhere=False)
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    server = BlockServer(sock, read_secrets(shared).connection, MemoryShelf(), 1 << 30)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    k = knobs(shared, 1, block_size=4)
    k.kv_offload = f"remote:[::1]:{port_of(server)}"
    for cached in (0, 48):
        core, _ = fake_engine(k)
        assert answered(core) == cached
        outside(core).close()
    server.close()
    thread.join(5)


def test_a_server_that_does_not_answer_stalls_nobody(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped (as by SIGSTOP): whoever waits for blocks computes in the end, and others do not wait at all."""
    monkeypatch.setattr(block_peer, "ANSWER_S", 1.0)
    with serving(shared) as server:
        filled(shared, port_of(server))
        core, _ = fake_engine(knobs(shared, port_of(server)))
        release = threading.Event()
        monkeypatch.setattr(BlockServer, "_answer", lambda *_: release.wait(20))
        slow, quick = request(TEXT, max_tokens=6), request([9, 8, 7], max_tokens=4)
        collector = Collector()
        core.add(slow)
        core.add(quick)
        while quick.request_id not in collector.requests or not collector.requests[quick.request_id].reasons:
            collector.take(core.step())
        assert slow.request_id not in collector.requests, "nobody else waits"
        drain(core, collector)
        release.set()
        assert collector.requests[slow.request_id].tokens[0] == generate(fake_logits, slow)[0]
        assert misses(core)["remote:slow"] == 12
        assert_idle(core)
        outside(core).close()


def test_another_secret_is_refused_by_both_sides(
    shared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other"
    make_secret(other)
    with serving(shared) as server, caplog.at_level(logging.WARNING):
        core, _ = fake_engine(knobs(other, port_of(server)))
        assert answered(core) == 0
        outside(core).close()
        assert server.num_blocks == server.counts.put == 0
        assert server.counts.refused >= 1
        with pytest.raises(PeerError, match="another secret") as caught:
            ask(port_of(server), other)
        assert caught.value.reason == "secret"
    assert any("has another secret; blocks are computed" in r.message for r in caplog.records)
    ours, theirs = socket.socketpair()
    with ours, theirs:  # a server that lets anybody in, and does not know the secret
        thread = threading.Thread(target=impostor, args=(theirs,))
        thread.start()
        with pytest.raises(PeerError) as caught:
            join(ours, read_secrets(shared).connection, 1.0)
        assert caught.value.reason == "secret"
        thread.join()


def impostor(sock: socket.socket) -> None:
    sock.sendall(HELLO + bytes(32))
    block_wire.receive_exactly(sock, len(HELLO) + 64, 2.0)
    sock.sendall(b"\1" + bytes(32))


def ask(port: int, secret_file: Path) -> block_wire.BlockListing:
    return BlockPeer(Address("127.0.0.1", port, read_secrets(secret_file).connection)).list(Ask(""))


@contextlib.contextmanager
def connected(server: BlockServer, shared: Path) -> Iterator[Channel]:
    with socket.create_connection(("127.0.0.1", port_of(server))) as sock:
        yield join(sock, read_secrets(shared).connection, 2.0)


def test_another_version_is_refused_by_both_sides(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(shared) as server:
        with socket.create_connection(("127.0.0.1", port_of(server))) as sock:
            sock.sendall(HELLO[:-1] + b"\7")
            assert block_wire.receive_exactly(sock, len(HELLO) + 32, 2.0)[: len(HELLO)] == HELLO
            with pytest.raises(PeerError):
                block_wire.receive_exactly(sock, 1, 2.0)
        with socket.create_connection(("127.0.0.1", port_of(server))) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with pytest.raises(PeerError):
                block_wire.receive_exactly(sock, 1, 2.0)
    with fake_server(lambda sock: sock.sendall(HELLO[:-1] + b"\2" + bytes(32))) as port:
        with pytest.raises(PeerError, match="version 2 of the protocol, and this side version 1") as caught:
            ask(port, shared)
        assert caught.value.reason == "version"
        core, _ = fake_engine(knobs(shared, port))
        assert answered(core) == 0
        outside(core).close()


@contextlib.contextmanager
def fake_server(behave: Callable[[socket.socket], object]) -> Iterator[int]:
    """A server that does `behave` with every connection."""
    with socket.create_server(("127.0.0.1", 0)) as sock:

        def accept() -> None:
            with contextlib.suppress(OSError, PeerError):
                while True:
                    peer, _ = sock.accept()
                    with peer, contextlib.suppress(OSError, PeerError):
                        behave(peer)
                        peer.settimeout(0.3)
                        while peer.recv(4096):
                            pass

        threading.Thread(target=accept, daemon=True).start()
        yield sock.getsockname()[1]
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def test_frames_that_are_too_large_are_refused_before_they_are_read(
    shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = read_secrets(shared).connection
    with serving(shared) as server, caplog.at_level(logging.WARNING):
        with connected(server, shared) as channel:
            channel.sock.sendall(block_wire._HEAD.pack(block_wire.MOST_BYTES + 1, GET))
            with pytest.raises(PeerError, match="closed"):
                channel.receive()
        assert any("64" in r.message or "most" in r.message for r in caplog.records)
        assert ask(port_of(server), shared).found == [], "others are served"

    def boasts(sock: socket.socket) -> None:
        channel = admit(sock, secret, 2.0)
        channel.receive()
        sock.sendall(block_wire._HEAD.pack(1 << 31, DONE))

    with fake_server(boasts) as port, pytest.raises(PeerError, match="2147483648 bytes") as caught:
        BlockPeer(Address("127.0.0.1", port, secret)).get(PATH, 100)
    assert caught.value.reason == "frame"


@pytest.mark.parametrize("harm", ["changed", "again", "kind", "dropped"])
def test_a_frame_that_somebody_touched_is_refused(shared: Path, harm: str) -> None:
    """By the one who sits between the two: changed, repeated, of another kind, or one left out."""
    with serving(shared) as server, connected(server, shared) as channel:
        frames: list[bytes] = []
        real = channel.sock

        class Tap:
            def settimeout(self, s: float) -> None:
                real.settimeout(s)

            def sendall(self, data: bytes) -> None:
                frames.append(data)

        channel.sock = Tap()  # type: ignore[assignment]
        channel.send(GET, PATH.encode())
        channel.send(GET, PATH.encode())
        channel.sock = real
        first = bytearray(frames[0])
        if harm == "changed":
            first[10] ^= 1
        elif harm == "kind":
            first[4] = LIST
        real.sendall(frames[1] if harm == "dropped" else first)
        if harm == "again":
            assert channel.receive()[0] == block_wire.NONE
            real.sendall(first)
        with pytest.raises(PeerError, match="closed"):
            channel.receive()
        assert server.counts.refused == 1


@pytest.mark.parametrize(
    "path",
    ["../secret", "fake/../../x-0", "/etc/passwd", "fake/00/" + "0" * 32 + "-0/x", "fake/00/.hidden-0", "", "x" * 500],
)
def test_nothing_but_names_of_blocks_is_a_path(shared: Path, tmp_path: Path, path: str) -> None:
    with serving(shared, folder=tmp_path / "served") as server:
        for kind in (GET, block_wire.PUT, block_wire.DROP):
            with connected(server, shared) as channel:
                channel.send(kind, path.encode() + (b"\0data" if kind == block_wire.PUT else b""))
                with pytest.raises(PeerError, match="closed"):
                    channel.receive()
        assert (tmp_path / "served" / "secret").is_file()
        assert server.num_blocks == 0
        for payload in (b"", b"\xff", b"\x93\x01"):
            with connected(server, shared) as channel:
                channel.send(LIST, payload)
                with pytest.raises(PeerError, match="closed"):
                    channel.receive()


def test_a_full_server_gives_up_what_was_used_longest_ago(shared: Path) -> None:
    with serving(shared, limit=1000) as server:
        peer = BlockPeer(Address("127.0.0.1", port_of(server), read_secrets(shared).connection))
        paths = [f"fake/00/{n:032x}-0" for n in range(6)]
        told = [peer.put(path, bytearray(300)) for path in paths[:3]]
        assert told == [True] * 3
        assert peer.get(paths[0], 300) is not None
        before = peer.list(Ask("fake/"))
        assert [path for path, _ in before.found] == [paths[1], paths[2], paths[0]], "used longest ago first"
        assert peer.put(paths[3], bytearray(300))
        assert [peer.get(path, 300) is not None for path in paths[:4]] == [True, False, True, True]
        assert server.num_bytes == 900
        assert not peer.put(paths[4], bytearray(1001)), "more than all that it may have"
        assert not peer.put(paths[4], bytearray(1001))
        after = peer.list(Ask("fake/", before.epoch, before.until))
        assert (after.anew, after.found, after.gone) == (False, [(paths[3], 300)], [paths[1]])
        assert peer.list(Ask("other/")).found == []
        again = peer.list(Ask("fake/", "another life", after.until))
        assert again.anew
        assert len(again.found) == 3


def test_news_follow_a_server_through_its_lives(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was missed, added, removed, or lost with the server: what was told adds up to what is there."""
    monkeypatch.setattr("penstock.launch.block_server.MOST_CHANGES", 5)
    monkeypatch.setattr("penstock.launch.block_server.MOST_LISTED", 4)
    rng = random.Random(2)
    port = 0
    look: RemoteStore | None = None
    for _ in range(3):
        with serving(shared, port=port) as server:
            port = port_of(server)
            address = Address("127.0.0.1", port, read_secrets(shared).connection)
            peer = BlockPeer(address)
            look = look or RemoteStore([address], "fake")
            known: set[str] = set()
            for _ in range(30):
                for _ in range(rng.randrange(4)):
                    path = f"fake/00/{rng.randrange(6):032x}-0"
                    peer.put(path, bytearray(10)) if rng.random() < 0.6 else peer.drop(path)
                time.sleep(0.03 if not look.sides[0].seen else 0.0)
                look.look()
                known = set(look.sides[0].seen)
            there = {path for path, _ in BlockPeer(address).list(Ask("fake/")).found}
            assert there <= known, "the list of all is bounded, too"
            assert known <= set(server._index.oldest_first())
    told: set[str] = set()
    assert look is not None
    for news in look._news:
        assert news.tier == REMOTE
        told = (told | {path for path, _, _ in news.found}) - set(news.gone)
    assert told == look.sides[0].seen


def test_a_run_replays_without_the_server(shared: Path, tmp_path: Path) -> None:
    spec, weights = tiny("llama_gqa")
    with serving(shared) as server:
        k = knobs(shared, port_of(server), num_blocks=40, budget=16, disk=tmp_path / "kv")
        for round_ in range(2):
            core = real_engine(spec, weights, k)
            core.recorder = Recorder()
            rng, collector, emitted = random.Random(3), Collector(), []
            todo = workload(spec.vocab_size)
            while todo or core.has_work:
                if todo and rng.random() < 0.4:
                    core.add(todo.pop())
                if round_ and rng.random() < 0.1:
                    blocks = server._shelf._blocks  # type: ignore[attr-defined]
                    for path in sorted(blocks)[:2]:
                        blocks.pop(path, None)
                    for file in sorted((tmp_path / "kv").glob("*/*/*"))[:4]:
                        file.unlink(missing_ok=True)
                emitted += core.step()
            collector.take(emitted)
            check("llama_gqa", collector)
            assert core.kv.stored is not None
            settings, loaded = core.kv.stored._settings, [tier.num_loaded for tier in core.kv.stored.tiers]
            core.recorder.save(tmp_path / "run.log")
            outside(core).close()
            assert replay(load(tmp_path / "run.log"), partial(plain_core, spec, k, store=settings), depth=1) == emitted
    assert sum(loaded) > 0


class FakeTier:
    def __init__(self) -> None:
        self.given: list[Any] = []
        self.told: dict[int, bool] = {}

    def put(self, op: Any) -> None:
        self.given.append(op)

    get = change = put

    def ended(self, wait_s: float = 0.0) -> dict[int, bool]:
        told, self.told = self.told, {}
        return told


def test_a_load_from_two_tiers_ends_when_both_have() -> None:
    disk, remote = FakeTier(), FakeTier()
    both = Outside({DISK: disk, REMOTE: remote})  # type: ignore[dict-item]
    both.order(GetOp("a", (0,), 7, 8, DISK))
    both.order(GetOp("b", (1,), 7, 9, REMOTE))
    both.order(PutOp("c", (2,), 3, REMOTE))
    both.order(DropOp(("d",), DISK))
    assert [len(tier.given) for tier in (disk, remote)] == [2, 2]
    disk.told = {8: False, 7: False}
    assert both.ended() == {8: False}
    remote.told = {9: True, 7: True, 3: True}
    assert both.ended() == {9: True, 7: False, 3: True}, "one of two has failed"
    both.order(GetOp("a", (0,), 7, 8, DISK))
    disk.told = {8: True, 7: True}
    assert both.ended() == {8: True, 7: True}, "and nothing of it is left"


def test_what_cannot_be_meant_is_refused(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="can be reached from other machines"):
        listen("0.0.0.0:0", anywhere=False)
    listen("0.0.0.0:0", anywhere=True).close()
    for text in ("nowhere", "127.0.0.1", "127.0.0.1:99999", ":80"):
        with pytest.raises(ConfigError, match="--listen"):
            listen(text, anywhere=False)
    with pytest.raises(ConfigError, match="needs the secret that its server has"):
        fake_engine(Knobs(block_size=4, budget=64, kv_offload="remote:127.0.0.1:1"))
    for text, said in (
        ("remote:x", "it has no port; give remote:x:PORT"), ("remote:", "it has no port; give remote:HOST:PORT"),
        ("remote:[::1]", "it has no port"), ("remote:127.0.0.1:0", "0 is no port; give one from 1 to 65535"),
        ("remote:127.0.0.1:70000", "70000 is no port"), ("remote:::1:7900", "an IPv6 address stands in brackets"),
        ("remote:http://a:1", "it takes no URL"), ("remote:[nobody]:1", "none of remote:HOST:PORT, remote:\\[IPv6"),
        ("far:127.0.0.1:1", "none of the forms"), ("remote:a:1 remote:b:1 remote:a:1", "names the server a:1 twice"),
        ("remote:[::1]:5 remote:[::1]:5", "names the server \\[::1\\]:5 twice"),
        ("disk:/a disk:/b", "names two folders"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            fake_engine(Knobs(block_size=4, budget=64, kv_offload=text))
    for said, content, mode in (("chmod 600", "x" * 40, 0o644), ("one line, or two", "short", 0o600),
                                ("one line, or two", "", 0o600), ("cannot be read", None, 0o600)):  # fmt: skip
        path = tmp_path / "bad"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_text(content)
            path.chmod(mode)
        with pytest.raises(ConfigError, match=said):
            fake_engine(knobs(path, 1))
    core, _ = fake_engine(Knobs(block_size=4, budget=64, kv_offload=f"disk:{tmp_path / 'kv'}"))
    outside(core).close()
    with pytest.raises(ConfigError, match="another secret"):
        fake_engine(knobs(shared, 1, disk=tmp_path / "kv"))
    with pytest.raises(ConfigError, match="an engine's own"):
        open_served(tmp_path / "kv")
    open_served(tmp_path / "served")
    assert main(["cache", "verify", str(tmp_path / "served")]) == 2
    assert "engines have the key" in capsys.readouterr().err
    assert main(["cache", "ls", str(tmp_path / "served")]) == 0


def test_a_server_with_the_first_line_alone_cannot_make_blocks(tmp_path: Path) -> None:
    engines, server = tmp_path / "engines", tmp_path / "server"
    for path, text in ((engines, "a" * 32 + "\n" + "b" * 32 + "\n"), (server, "a" * 32 + "\n")):
        path.write_text(text)
        path.chmod(0o600)
    assert read_secrets(engines).connection == read_secrets(server).connection
    assert read_secrets(engines).blocks != read_secrets(server).blocks
    with serving(server) as served:
        filled(engines, port_of(served))
        core, _ = fake_engine(knobs(engines, port_of(served)))
        assert answered(core) == 48
        outside(core).close()
        core, _ = fake_engine(knobs(server, port_of(served)))
        assert answered(core) == 0, "its names are others"
        outside(core).close()


def test_what_did_not_come_stays_with_the_server_for_others(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that loses its connection forgets the block; it does not delete it."""
    with serving(shared) as server:
        filled(shared, port_of(server))
        get, failed = BlockPeer.get, []

        def loses(self: BlockPeer, path: str, most: int) -> bytearray | None:
            if path.endswith("-3") and not failed:
                failed.append(path)
                raise PeerError("lost", "the connection was closed")
            return get(self, path, most)

        monkeypatch.setattr(BlockPeer, "get", loses)
        monkeypatch.setattr(BlockPeer, "put", lambda *_: False)  # what is computed does not come back
        core, _ = fake_engine(knobs(shared, port_of(server)))
        assert answered(core) == 12
        outside(core).close()
        assert server.num_blocks == 13
        monkeypatch.undo()
        core, _ = fake_engine(knobs(shared, port_of(server)))
        assert answered(core) == 48
        outside(core).close()
