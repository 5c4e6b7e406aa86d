"""Engines over one folder of blocks whose disk is drawn: no threads, no clock, one seed for all that may vary.

What threads would do at some moment - write a file, read one, report it - is done on the engine's own thread at moments
that a seed draws, so that a run that fails can be run again. Files get lost, change, come late, cannot be written;
others bring and take them away. Every token must be the naive loop's, and whatever is written under a name must be the
same bytes every time (float32 on reference operations: nothing but the text decides them).

Where a draft model or a model's own heads draft, or do not, the same names have the same bytes. That nobody takes
entries of theirs for what they are not shows in a draft model that is the model itself: it must always be right.

`python -m tests.engine.store_draws --spec windowed --seconds 60` runs seeds until one fails.
"""

from __future__ import annotations

import argparse
import errno
import logging
import math
import os
import random
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from penstock.core.events import StoreNews
from penstock.core.kv_hints import KVHint
from penstock.core.model_spec import cache_groups
from penstock.core.page_ops import STATE, DropOp, FetchOp, GetOp, KeepOp, PutOp
from penstock.core.request import Abort, Control, Request
from penstock.core.sequence import Sequence, Status
from penstock.core.step_shape import StepShape
from penstock.engine.core import EngineCore
from penstock.kv import load_rates
from penstock.kv.load_rates import LoadRates
from penstock.runner.block_files import OVERHEAD, BlockFiles
from penstock.runner.block_peer import BlockPeer
from penstock.runner.block_wire import Ask, BlockListing, PeerError
from penstock.runner.shared_secret import read_secrets
from penstock.sched.drafts.fixed import FixedDrafts
from tests import heads
from tests.engine.harness import Collector, Knobs, assert_idle, real_engine, request, tiny
from tests.engine.test_laws_models import CONTROLS, assert_beams, check, draw_knobs, workload

SPECS = ["llama_gqa", "latent", "indexed", "windowed", "all_windowed", "slots", "mamba2", "delta", "scores"]
LINE = "0123456789abcdef" * 2
DRAFTED = {
    "llama_gqa": "llama_mha", "latent": "layernorm", "windowed": "latent", "slots": "llama_gqa",
    "llama_mha": "llama_mha", "mimo": "mtp", "mimo x4": "mtp", "deepseek_v3": "mtp", "qwen3_next": "mtp",
}  # fmt: skip
"""Models and what drafts for them: a draft model, or heads of their own."""
FATES = ["gone", "flip", "cut"]
REASONS = ["lost", "slow", "unreachable", "frame"]


class Disk:
    """A drawn disk, and drawn servers of blocks. `truth`: bytes by path, of all engines so far; `served`: what each
    server has."""

    def __init__(self, rng: random.Random, truth: dict[str, bytes], served: dict[str, dict[str, bytes]]) -> None:
        self.rng, self.truth, self.served = rng, truth, served
        self.read_fails = rng.choice([0.0, 0.1, 0.3, 0.6])
        self.write_fails = rng.choice([0.0, 0.2])
        self.pace = rng.choice([0.03, 0.1, 0.4, 0.8, 1.0])
        """How likely it goes on, each time it could."""
        self.gives_up = rng.choice([0.0, 0.0, 0.02])
        self.refuses = rng.choice([0.0, 0.1])
        self.rates = rng.choice([0.1, 1.0, 10.0])
        self.forced = rng.choice([None, None, 0.0, 0.4, 0.9])
        self.away = rng.choice([0.0, 0.05, 0.4])
        """How often a server does not say what it has, so that all of it is forgotten."""

    # -- in place of methods of BlockFiles ---------------------------------------------------------------------------

    def put(self, files: BlockFiles, op: PutOp) -> None:
        self.go_on(files)
        files._paused_s = math.inf if self.rng.random() < self.refuses else -math.inf
        _put(files, op)

    def get(self, files: BlockFiles, op: GetOp) -> None:
        _get(files, op)
        self.go_on(files)

    def begin(self, files: BlockFiles) -> None:
        _begin(files)
        self.go_on(files)

    def ended(self, files: BlockFiles, wait_s: float = 0.0) -> dict[int, bool]:
        self.go_on(files)
        if wait_s and files._loads and not files._ended:
            self.read(files)
        for load in files._loads.values():
            if self.rng.random() < self.gives_up:
                load.until_s = -math.inf
        return _ended(files)

    def go_on(self, files: BlockFiles) -> None:
        while self.rng.random() < self.pace:
            moves = [self.read] * (not files._reads.empty() or bool(self.reading(files)))
            moves += [self.write] * (not files._writes.empty())
            if not moves:
                break
            self.rng.choice(moves)(files)

    def reading(self, files: BlockFiles) -> deque[Any]:
        found: deque[Any] = files.__dict__.setdefault("drawn_reading", deque())
        return found

    def read(self, files: BlockFiles) -> None:
        """Two readers: of two orders the later may be done first."""
        reading = self.reading(files)
        while len(reading) < 2 and not files._reads.empty():
            reading.append(files._reads.get()[2])
        if reading:
            reading.rotate(-self.rng.randrange(len(reading)))
            order = reading.popleft()
            op = order if isinstance(order, FetchOp) else order[0]
            files._read_one(order, bytearray(files._bytes[op.path.endswith(STATE)] + OVERHEAD))

    def write(self, files: BlockFiles) -> None:
        files._write_one(files._writes.get())

    def close(self, files: BlockFiles, wait_s: float = 0.0) -> None:
        while not files._writes.empty():
            self.write(files)

    def read_file(self, files: BlockFiles, path: str, into: bytearray) -> bool:
        place = files._folder / path
        if self.rng.random() < self.read_fails and place.exists():
            fate = self.rng.choice(FATES)
            data = bytearray(place.read_bytes())
            data[-40:-39] = bytes([data[-40] ^ 1]) if len(data) > 40 else b""
            place.unlink()
            if fate != "gone":
                place.write_bytes(data if fate == "flip" else data[:-9])
        return _read(files, path, into)

    def write_file(self, files: BlockFiles, path: str, copy: bytearray) -> bool:
        if self.rng.random() < self.write_fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        return _write(files, path, copy)

    def start(self, files: BlockFiles) -> None:
        """No threads."""

    # -- in place of methods of BlockPeer ----------------------------------------------------------------------------

    def fails(self, share: float) -> None:
        if self.rng.random() < share:
            raise PeerError(self.rng.choice(REASONS), "drawn")

    def of(self, peer: BlockPeer) -> dict[str, bytes]:
        return self.served.setdefault(str(peer.address), {})

    def peer_get(self, peer: BlockPeer, path: str, most: int) -> bytearray | None:
        self.fails(self.read_fails / 2)
        served = self.of(peer)
        if path in served and self.rng.random() < self.read_fails / 2:
            fate, data = self.rng.choice(FATES), bytearray(served[path])
            data[-40:-39] = bytes([data[-40] ^ 1])
            served.pop(path)
            if fate != "gone":
                served[path] = bytes(data if fate == "flip" else data[:-9])
        block = served.get(path)
        return None if block is None else bytearray(block)

    def peer_put(self, peer: BlockPeer, path: str, data: bytearray) -> bool:
        self.fails(self.write_fails)
        if self.rng.random() < self.refuses:
            return False
        self.of(peer)[path] = bytes(data)
        return True

    def peer_drop(self, peer: BlockPeer, path: str) -> None:
        self.fails(self.write_fails)
        self.of(peer).pop(path, None)

    def peer_list(self, peer: BlockPeer, ask: Ask) -> BlockListing:
        self.fails(self.away)
        served = self.of(peer)
        for path in self.rng.sample(sorted(served), len(served) // 20):
            served.pop(path)  # others needed the room
        found = [(path, len(data)) for path, data in sorted(served.items()) if path.startswith(ask.prefix)]
        return BlockListing("life", 0, True, False, found, [])

    def took(self, files: BlockFiles) -> tuple[int, float, float] | None:
        """What is measured is drawn, too."""
        if self.rng.random() < 0.7:
            return None
        return files._bytes[False], self.rates * self.rng.uniform(0.1, 2), self.rng.choice([0.0, 0.5])

    def stepped(self, rates: LoadRates, shape: StepShape, seconds: float) -> None:
        rates.forced = self.forced
        _stepped(rates, shape, self.rng.uniform(0.1, 0.5) * max(1, shape.num_tokens))

    # -- what must hold ----------------------------------------------------------------------------------------------

    def copied(self, files: BlockFiles, order: Any) -> None:
        if not isinstance(order, DropOp | KeepOp):
            op, copy = order
            data = bytes(copy[16:-32])
            assert self.truth.setdefault(op.path, data) == data, f"{op} is not what was written under this name"
        _queue(files, order)

    def filled(self, files: BlockFiles, op: GetOp, block: bytearray) -> None:
        assert self.truth.get(op.path) == bytes(block[16:-32]), f"{op} is not what was written under this name"
        _fill(files, op, block)


_put, _get, _begin, _ended, _queue = (
    BlockFiles.put, BlockFiles.get, BlockFiles.begin, BlockFiles.ended, BlockFiles._queue,
)  # fmt: skip
_read, _write, _fill = BlockFiles._read, BlockFiles._write, BlockFiles._fill
_stepped = LoadRates.stepped


@contextmanager
def drawn(disk: Disk) -> Iterator[None]:
    """Every BlockFiles is on this disk."""
    methods = {
        "put": disk.put, "get": disk.get, "begin": disk.begin, "ended": disk.ended, "close": disk.close,
        "_start": disk.start, "_queue": disk.copied, "_read": disk.read_file, "_write": disk.write_file,
        "_fill": disk.filled, "took": disk.took,
    }  # fmt: skip

    def bound(method: Any) -> Any:
        return lambda files, *args: method(files, *args)

    asked = {"get": disk.peer_get, "put": disk.peer_put, "drop": disk.peer_drop, "list": disk.peer_list}
    with (
        mock.patch.multiple(BlockFiles, **{name: bound(method) for name, method in methods.items()}),
        mock.patch.multiple(BlockPeer, **{name: bound(method) for name, method in asked.items()}),
        mock.patch.object(LoadRates, "stepped", bound(disk.stepped)),
        mock.patch.object(load_rates, "LEAST_TOKENS", 4),
    ):
        yield


def knobs_of(rng: random.Random, folder: Path, *, full: bool) -> Knobs:
    """`full`: whether all groups keep their whole context; blocks of others do not go to the host."""
    k = draw_knobs(rng)
    remotes = [f"remote:127.0.0.1:{n}" for n in (1, 2)][: rng.choice([1, 1, 2])]
    tiers = rng.choice([[f"disk:{folder}"], remotes, [f"disk:{folder}", *remotes]])
    k.block_size, k.kv_offload, k.kv_offload_secret_file = 4, " ".join(tiers), str(folder.parent / "shared")
    k.num_blocks = rng.choice([24, 32, 48, 128])
    k.window_blocks = min(k.window_blocks, k.num_blocks)
    k.prefix_cache = rng.choice(["radix", "hash"])
    k.kv_load_policy = rng.choice(["wait", "cake", "split", "auto"])
    if full and k.kv_load_policy != "wait":
        k.kv_offload_eviction = rng.choice(["lru", "recompute"])
    k.kv_fetch_ahead = rng.choice([0.0, 1e-6, 1e-5, 0.25])
    k.offload = k.host_blocks > 0 and rng.random() < 0.5 and full
    if k.offload and rng.random() < 0.5:
        k.host_blocks = rng.choice([3, 5, 8])  # of a text the rest is in files alone
    return k


def news_of(core: EngineCore, rng: random.Random) -> Any:
    """Others take files away and bring them back, and the engine hears of it sooner or later. Returns the locks that it
    has."""
    assert core.store_news is not None
    looks: Any = core.store_news.__self__.looks  # type: ignore[attr-defined]
    often = rng.choice([0.05, 0.3])
    first = [_sorted(news) for look in looks for news in look._news]
    for look in looks:
        look._news.clear()

    def news(now_s: float) -> list[StoreNews]:
        told = first[:]
        first.clear()
        for look in looks:
            if rng.random() < often:
                found = look.look()
                told += [_sorted(n) for n in (look._news if found is None else [found])]
                look._news.clear()
        return told

    core.store_news = news
    return [look._lock for look in looks if getattr(look, "_lock", None) is not None]


def _sorted(news: StoreNews) -> StoreNews:
    """As if all had been used in the same minute: directories have no order."""
    found = sorted((path, num_bytes, 0) for path, num_bytes, _ in news.found)
    return StoreNews(found=found, gone=news.gone, tier=news.tier)


def is_read(seq: Sequence) -> bool:
    """Whether blocks of `seq` are on their way."""
    return seq.status is Status.LOADING or (seq.node is not None and seq.node.front is not None)


def drawn_hints(rng: random.Random) -> list[KVHint]:
    tokens, ttl_s = rng.choice([0, 3, 9, 20]), rng.choice([0.001, 0.05, 60.0])
    return [KVHint(rng.choice(["retain", "pin", "demote"]), ttl_s, tokens) for _ in range(rng.randrange(3))]


def in_company(core: EngineCore, requests: list[Request], rng: random.Random, *, note: str) -> Collector:
    """As `harness.disturbed`, beside others with the same beginnings who leave before they are done."""
    stem = max((r.prompt_token_ids for r in requests), key=len)
    guests = [
        request([*stem[: rng.randrange(5, len(stem))], 7 + n], request_id=f"guest{n}", max_tokens=30, n=1 + n % 2)
        for n in range(4)
    ]
    collector, todo, times, often = Collector(), [*requests, *guests], 30, rng.choice([0.1, 0.3, 0.6])
    if rng.random() < 0.5:
        todo = [msgspec.structs.replace(r, hints=drawn_hints(rng)) for r in todo]
        core.kv.hints._pin_share = rng.choice([0.2, 0.9])
    rng.shuffle(todo)
    leaving = {r.request_id for r in guests}
    steps = 0
    while todo or core.has_work:
        while todo and rng.random() < 0.4:
            core.add(todo.pop())
        live = sorted(core.groups)
        if live and times and rng.random() < often:
            times -= 1
            read = [name for name in live if any(map(is_read, core.groups[name].live.values()))]
            core.add(Control(kind=rng.choice(CONTROLS), request_id=rng.choice(read or live)))
        for name in [name for name in live if name in leaving and rng.random() < 0.1]:
            leaving.discard(name)
            core.add(Abort(request_id=name))
        collector.take(core.step(), steps)
        steps += 1
        assert steps < 5000, f"somebody starves {note}"
    assert_idle(core)
    return collector


def drafts_of(name: str, rng: random.Random, k: Knobs) -> dict[str, Any]:
    """What `real_engine` is told of who drafts; drawn. Mutates: `k`."""
    k.num_blocks, k.window_blocks = max(k.num_blocks, 41), 0
    k.num_slots, k.depth, k.budget = 24, 1, max(k.budget, 16)
    num_drafts, draft = rng.choice([1, 3, 7]), DRAFTED[name]
    if draft == "mtp":
        models, asked = heads.loaded(name)[1 : 1 + num_drafts], {"method": "mtp", "num_speculative_tokens": num_drafts}
    else:
        tree = "chain" if draft == name else rng.choice(["chain", "k-ary"])
        models, asked = (tiny(draft),), {"method": "draft-model", "tree": tree}
        asked["model"] = "draft0"
    return {"drafts": FixedDrafts(num_drafts, 63), "draft_models": models, "speculation": asked}


def run_seed(
    name: str, seed: int, truth: dict[str, bytes], *, engines: int = 3, folder: Path | None = None,
    drafted: bool = False, form: str = "plain",
) -> int:  # fmt: skip
    """Engines one after the other over one folder. Returns how many blocks they have read. Raises AssertionError with
    what was drawn if a law is broken. `drafted`: somebody drafts (`DRAFTED`). `form`: of the files
    (`kv_offload_format`), one that loses nothing."""
    spec, weights = tiny(name)
    rng = random.Random(f"{name}-{seed}")
    place = Path(tempfile.mkdtemp(prefix="penstock-draws-")) if folder is None else folder
    full = all(group.spec.kind == "paged" for group in cache_groups(spec, "float32"))
    num_loaded, num_drafted = 0, []
    try:
        kv = place / "kv"
        kv.mkdir(mode=0o700)
        (place / "shared").write_text(LINE)
        (place / "shared").chmod(0o600)
        (kv / "secret").write_bytes(read_secrets(place / "shared").blocks)
        served: dict[str, dict[str, bytes]] = {}
        for number in range(engines):
            disk, k = Disk(rng, truth, served), knobs_of(rng, kv, full=full)
            k.kv_offload_format = form
            drafts = drafted and rng.random() < 0.8
            more = drafts_of(name, rng, k) if drafts else {}
            note = f"{name}, seed {seed}, engine {number}: {k}"
            with drawn(disk):
                core = real_engine(spec, weights, k, **more)
                stored = core.kv.stored
                assert stored is not None
                for tier in stored.tiers:
                    if rng.random() < 0.3:
                        tier.index.limit_bytes = rng.choice([8, 20]) * stored._settings.block_bytes
                    tier.index.evicts = rng.random() < 0.8  # or another has the lock
                locks = news_of(core, rng)
                try:
                    collector = in_company(core, workload(spec.vocab_size), rng, note=str(k))
                    check(name, collector)
                    assert_beams(name, collector)
                    for tier in stored.tiers:
                        tier.index.check_invariants()
                    stored.ahead.check_invariants()
                    if drafts:
                        num_drafted.append(assert_drafted(core, always_right=DRAFTED[name] == name))
                except Exception as error:
                    raise AssertionError(note) from error
                num_loaded += sum(tier.num_loaded for tier in stored.tiers)
                core.executor._runner.storage.outside.close()  # type: ignore[attr-defined]
                for lock in locks:
                    os.close(lock)  # as at the end of a process
    finally:
        shutil.rmtree(place, ignore_errors=True)
    assert not num_drafted or any(num_drafted), "nobody drafted"
    return num_loaded


def assert_drafted(core: EngineCore, *, always_right: bool) -> int:
    """The drafter has not failed, and a draft model that is the model itself was never wrong. Returns its drafts."""
    assert core.executor.runner.drafter is not None, "the drafter has failed"  # type: ignore[attr-defined]
    drafted, accepted = core.stats.num_draft_tokens, core.stats.num_accepted_tokens
    assert not always_right or accepted == drafted, f"{drafted - accepted} of {drafted} drafts were wrong"
    return int(drafted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", choices=sorted({*SPECS, *DRAFTED}), action="append", help="all by default")
    parser.add_argument("--drafted", action="store_true", help="with draft models and heads that draft")
    parser.add_argument("--form", default="plain", help="plain or hidden, which is for llama_mha")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--keep-going", action="store_true", help="tell what failed, and go on")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    until, seed, num_failed, num_loaded = time.monotonic() + args.seconds, args.seed, 0, 0
    truths: dict[str, dict[str, bytes]] = {}
    while time.monotonic() < until:
        for name in args.spec or (DRAFTED if args.drafted else SPECS):
            try:
                num_loaded += run_seed(name, seed, truths.setdefault(name, {}), drafted=args.drafted, form=args.form)
            except AssertionError as error:
                num_failed += 1
                print(f"{error}\n    {type(error.__cause__).__name__}: {str(error.__cause__)[:300]}", flush=True)
                if not args.keep_going:
                    raise
        seed += 1
    print(f"seeds {args.seed} to {seed - 1}: {num_failed} failed, {num_loaded} loads")
    sys.exit(num_failed > 0)


if __name__ == "__main__":
    main()
