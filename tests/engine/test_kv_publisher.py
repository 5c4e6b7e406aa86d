"""Events of KV blocks on real sockets: frames, replay, what is dropped, and an engine that is killed."""

from __future__ import annotations

import gc
import json
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.base.errors import ConfigError
from penstock.config.kv_events import KVEventsConfig
from penstock.core.kv_events import DEVICE, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from penstock.core.sampling import SamplingParams
from penstock.engine.publisher import END, EventPublisher
from penstock.launch.kv_events import open_events
from tests.engine.events import Follower
from tests.engine.harness import Knobs, fake_engine, request, run
from tests.engine.processes import nano, running, within

zmq = pytest.importorskip("zmq")
WAIT_MS = 20_000


def stored(number: int) -> list[KVEvent]:
    return [BlockStored([number], number - 1 if number else None, [], 4, None, DEVICE, None)]


def settings(folder: Path, **more: Any) -> KVEventsConfig:
    return KVEventsConfig(
        enable_kv_cache_events=True, endpoint=f"ipc://{folder}/events", replay_endpoint=f"ipc://{folder}/replay", **more
    )


@contextmanager
def publisher(folder: Path, **more: Any) -> Iterator[EventPublisher]:
    made = EventPublisher(settings(folder, **more))
    try:
        yield made
    finally:
        made.close()


class Subscriber:
    """As routers do it: takes numbered batches in order; what is missing is asked for and comes again."""

    def __init__(self, folder: Path, topic: str = "") -> None:
        self.context = zmq.Context()
        self.live = self.context.socket(zmq.SUB)
        self.live.connect(f"ipc://{folder}/events")
        self.live.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.missed = self.context.socket(zmq.DEALER)
        self.missed.connect(f"ipc://{folder}/replay")
        self.follower = Follower()
        self.next = 0

    def take(self) -> None:
        """One batch, and what is missing before it; one that a replay brought already is passed over."""
        assert self.live.poll(WAIT_MS), "nothing comes"
        _, number, batch = self.live.recv_multipart()
        seen = int.from_bytes(number, "big")
        if seen > self.next:
            self.replay()
        if seen >= self.next:
            self.apply(seen, batch)

    def replay(self) -> list[int]:
        """What is asked for is applied. Returns the numbers that came."""
        got = []
        self.missed.send_multipart([b"", self.next.to_bytes(8, "big")])
        while True:
            assert self.missed.poll(WAIT_MS), "no end comes"
            _, topic, number, batch = self.missed.recv_multipart()
            assert not topic
            if number == END:
                assert batch == b""
                return got
            got.append(int.from_bytes(number, "big"))
            self.apply(got[-1], batch)

    def apply(self, number: int, batch: bytes) -> None:
        self.next = number + 1
        time_s, told, rank = msgspec.msgpack.decode(batch, type=tuple[float, list[dict[str, Any]], int])
        events = msgspec.convert([[*event.values()] for event in told], type=list[KVEvent])
        assert abs(time_s - time.time()) < 60
        assert rank == 0
        self.follower.hear(events)

    def close(self) -> None:
        self.context.destroy(linger=0)


@contextmanager
def subscriber(folder: Path, topic: str = "") -> Iterator[Subscriber]:
    made = Subscriber(folder, topic)
    try:
        yield made
    finally:
        made.close()


def until_heard(made: EventPublisher, who: Subscriber) -> None:
    """Subscribing takes a moment: publish until something comes."""
    while not who.live.poll(20):
        made.publish([AllBlocksCleared()])


def test_a_batch_is_what_subscribers_of_vllm_read(tmp_path: Path) -> None:
    """Its own example's structs, of several versions; newer ones know more fields."""

    class Old(msgspec.Struct, array_like=True, tag="BlockStored"):
        block_hashes: list[int]
        parent_block_hash: int | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None

    class New(Old, array_like=True, tag="BlockStored", kw_only=False):
        medium: str | None
        lora_name: str | None
        extra_keys: list[Any] | None = None
        group_idx: int | None = None

    class Removed(msgspec.Struct, array_like=True, tag="BlockRemoved"):
        block_hashes: list[int]
        medium: str | None
        group_idx: int | None = None

    class Cleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
        pass

    class NewMap(msgspec.Struct, tag="BlockStored", omit_defaults=True):
        block_hashes: list[int]
        parent_block_hash: int | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None
        medium: str | None
        lora_name: str | None
        extra_keys: list[Any] | None = None

    class RemovedMap(msgspec.Struct, tag="BlockRemoved"):
        block_hashes: list[int]
        medium: str | None

    class ClearedMap(msgspec.Struct, tag="AllBlocksCleared"):
        pass

    class Batch(msgspec.Struct, array_like=True):
        ts: float
        events: list[Any]
        data_parallel_rank: int | None = None

    big = 2**64 - 1
    events: list[KVEvent] = [
        AllBlocksCleared(), BlockStored([big, 5], None, [1, 2], 1, None, DEVICE, None), BlockRemoved([big], DEVICE)
    ]  # fmt: skip
    versions = (
        ("array", (Old, Removed, Cleared)),
        ("array", (New, Removed, Cleared)),
        ("map", (NewMap, RemovedMap, ClearedMap)),
    )
    for encoding, kinds in versions:
        with publisher(tmp_path, encoding=encoding, topic="kv@x") as made, subscriber(tmp_path, "kv@") as who:
            until_heard(made, who)
            made.publish(events)
            last = made.num_batches - 1
            while True:
                topic, number, data = who.live.recv_multipart()
                assert topic == b"kv@x"
                if number == last.to_bytes(8, "big"):
                    break
            batch = msgspec.msgpack.decode(data, type=Batch)
            assert batch.data_parallel_rank == 0
            told = msgspec.convert(batch.events, type=list[kinds[0] | kinds[1] | kinds[2]])  # type: ignore[name-defined]
            assert [type(event) for event in told] == [kinds[2], kinds[0], kinds[1]]
            assert told[1].block_hashes == [big, 5]
            assert told[1].token_ids == [1, 2]
            assert told[1].block_size == 1
            assert getattr(told[1], "medium", DEVICE) == told[2].medium == DEVICE


def test_a_replay_is_written_as_the_batches_are(tmp_path: Path) -> None:
    """vLLM says the topic there since its events are maps."""
    for encoding, topic in (("array", []), ("map", [b"kv@x"])):
        with publisher(tmp_path, encoding=encoding, topic="kv@x") as made, subscriber(tmp_path) as who:
            until_heard(made, who)
            who.missed.send_multipart([b"", (0).to_bytes(8, "big")])
            assert who.missed.recv_multipart()[:-1] == [b"", *topic, (0).to_bytes(8, "big")]
            while (frames := who.missed.recv_multipart())[-1]:
                pass
            assert frames == [b"", *(b"" for _ in topic), END, b""]


def test_a_late_subscriber_catches_up(tmp_path: Path) -> None:
    with publisher(tmp_path) as made:
        made.publish([AllBlocksCleared()])
        for number in range(100):
            assert made.publish(stored(number))
        with subscriber(tmp_path) as who:
            until_heard(made, who)
            for number in range(100, 130):
                made.publish([AllBlocksCleared(), *stored(0)] if number == 100 else stored(number - 100))
            while who.next < made.num_batches:
                who.take()
            assert who.follower.held[DEVICE] == set(range(30))
            assert sum(isinstance(event, BlockStored) for event in who.follower.heard) == 130


def test_what_is_kept_for_replay_is_bounded(tmp_path: Path) -> None:
    with publisher(tmp_path, buffer_steps=10) as made, subscriber(tmp_path) as who:
        for number in range(50):
            made.publish([AllBlocksCleared(), *stored(0), BlockStored([number + 9], 0, [], 4, None, DEVICE, None)])
        while made._queue:
            time.sleep(0.001)
        assert who.replay() == list(range(40, 50))
        assert who.replay() == []


def test_who_asks_wrongly_harms_nobody(tmp_path: Path) -> None:
    with publisher(tmp_path) as made, subscriber(tmp_path) as who:
        made.publish(stored(0))
        for frames in ([b""], [b"", b"12"], [b"x", b"\0" * 8], [b"", b"\0" * 8, b"more"], [b"", b""], [b"\xff" * 9999]):
            who.missed.send_multipart(frames)
        assert who.replay() == [0]


def test_a_slow_reader_of_a_replay_holds_nobody_up(tmp_path: Path) -> None:
    with publisher(tmp_path, buffer_steps=20) as made, subscriber(tmp_path) as who:
        for _ in range(20):
            made.publish([BlockRemoved(list(range(30_000)), DEVICE)])
        while len(made._kept) < 20:
            time.sleep(0.001)
        with subscriber(tmp_path) as slow:
            slow.missed.setsockopt(zmq.RCVHWM, 1)
            for _ in range(200):
                slow.missed.send_multipart([b"", b"\0" * 8])
            until_heard(made, who)
            made.publish([AllBlocksCleared()])
            before = time.monotonic()
            while True:
                assert who.live.poll(WAIT_MS)
                number = int.from_bytes(who.live.recv_multipart()[1], "big")
                if number == made.num_batches - 1:
                    break
            assert time.monotonic() - before < 5
            came: list[int] = []
            num_ends = 0
            while slow.missed.poll(500):
                number = int.from_bytes(slow.missed.recv_multipart()[2], "big", signed=True)
                if number >= 0:
                    came = [*came, number] if came and number == came[-1] + 1 else [number]
                else:
                    num_ends += 1
                    assert len(came) == 20, "an end is told only to who has got all"
            assert 0 < num_ends < 200, "some had to ask again"


def test_a_full_queue_drops_counts_and_shows_the_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    really = EventPublisher._run

    def waits(self: EventPublisher) -> None:
        go.wait(20)
        really(self)

    monkeypatch.setattr(EventPublisher, "_run", waits)
    config = settings(tmp_path, max_queue_size=3)
    events = open_events(_config(config))
    assert events is not None
    core, _ = fake_engine(Knobs(block_size=4), events=events)
    for n in range(6):  # an engine whose publisher stands still does its work
        run(core, [request([3 + n, *range(4, 12)], max_tokens=1)])
    assert core.stats.num_kv_events == 7
    assert core.stats.num_dropped_kv_events == 4
    with subscriber(tmp_path) as who:
        time.sleep(0.1)
        go.set()
        deadline = time.monotonic() + 20
        while who.next < 3 and time.monotonic() < deadline:
            who.replay()
        assert who.next == 3
        seen: list[int] = []
        while not seen or seen[-1] < 7:
            core.add(_reset())
            core.step()
            while who.live.poll(20):
                seen.append(int.from_bytes(who.live.recv_multipart()[1], "big"))
        assert not set(seen) & {3, 4, 5, 6}, "they were dropped"
        assert who.replay()[0] == 7, "and are not there to be replayed"
    events.close()


def _config(config: KVEventsConfig) -> Any:
    from penstock.config import from_kwargs

    return from_kwargs(model="(test)", kv_events_config=json.dumps(vars(config)))


def _reset() -> Any:
    from penstock.core.request import Control

    return Control(kind="reset_prefix_cache", request_id="")


def test_addresses_are_for_this_user_free_at_the_end_and_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(tmp_path)
    events = open_events(_config(config))
    core, _ = fake_engine(Knobs(), events=events)
    for name in ("events", "replay"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    taken = KVEventsConfig(enable_kv_cache_events=True, endpoint=f"tcp://127.0.0.1:{port}")
    first = EventPublisher(taken)
    with pytest.raises(ConfigError, match=f"{port}' cannot be bound: address already in use"):
        EventPublisher(taken)
    first.close()
    EventPublisher(taken).close()
    threads = [t for t in threading.enumerate() if t.name == "penstock-kv-events"]
    assert len(threads) == 1
    del core, events
    gc.collect()
    assert not threads[0].is_alive(), "the publisher ends with its engine"
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"needs pyzmq; pip install 'penstock\[events\]'"):
        open_events(_config(config))


def test_what_waits_is_sent_at_the_end(tmp_path: Path) -> None:
    made = EventPublisher(settings(tmp_path))
    with subscriber(tmp_path) as who:
        until_heard(made, who)
        for number in range(500):
            made.publish(stored(number))
        made.close()
        made.close()
        assert not made._thread.is_alive()
        while who.next < made.num_batches:
            who.take()
        assert who.follower.held[DEVICE] == set(range(500))


@within(120)
async def test_after_a_kill_the_first_news_is_that_nothing_is_kept(tmp_path: Path) -> None:
    config = nano(kv_events_config=msgspec.json.encode(vars(settings(tmp_path))).decode())
    with subscriber(tmp_path) as who:
        async with running(config) as server:
            await server.complete("a", list(range(3, 90)), SamplingParams(max_tokens=2, temperature=0))
            who.replay()
            assert len(who.follower.held[DEVICE]) == 2
            assert not who.follower.held["DISK"]
            server.signal()
            await server.complete("b", list(range(9, 90)), SamplingParams(max_tokens=2, temperature=0))
            follower, who.follower, who.next = who.follower, Follower(), 0
            deadline = time.monotonic() + 30
            while not who.follower.held[DEVICE] and time.monotonic() < deadline:
                who.replay()
            assert who.follower.heard[0] == AllBlocksCleared()
            assert len(who.follower.held[DEVICE]) == 2
            assert not who.follower.held[DEVICE] & follower.held[DEVICE], "names of another secret"
