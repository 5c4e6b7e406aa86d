"""Engines over one folder of KV blocks that are killed while they read and write, on a disk that fails.

    python -m benchmarks.serving.store_soak --kills 300 --faults 300 --out store-soak.json
    python -m benchmarks.serving.store_soak --remote --kills 100 --out store-soak-remote.json

Each engine answers the same texts, drawn in another order, until it is killed -9 at a moment that is drawn too; a share
of its reads find a file that was changed, cut or removed, a share of its writes fail as on a full disk. Every answer is
held against that of an engine without a store; at the end every file is verified, and an engine that is left alone
must find no half-written ones. Equal seeds draw equal moments and faults; how far an engine got by then is up to the
machine. `--remote`: `remote_soak`.
"""

from __future__ import annotations

import argparse
import errno
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import about, save

SHARE = 0.15
NUM_TEXTS = 8


def texts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    stem = [rng.randrange(3, 250) for _ in range(160)]
    return [stem[: 20 * n] + [rng.randrange(3, 250) for _ in range(rng.randrange(20, 200))] for n in range(NUM_TEXTS)]


def engine(folder: str = "", **more: Any) -> Any:
    from penstock import LLM

    more = {"kv_offload": f"disk:{folder},2MiB", "kv_load_policy": "wait"} if folder else more
    return LLM("nano", skip_tokenizer_init=True, num_gpu_blocks_override=48, max_model_len=512, block_size=16, **more)


def disturb(seed: int, told: Any) -> None:
    """A share of reads and writes goes wrong; `told` hears of each."""
    from penstock.runner import block_files
    from penstock.runner.block_files import BlockFiles

    rng, lock = random.Random(seed), threading.Lock()
    read, write = BlockFiles._read, BlockFiles._write

    def bad_read(self: BlockFiles, path: str, into: bytearray) -> bool:
        with lock:
            fate = rng.choice(["flip", "cut", "gone"]) if rng.random() < SHARE else ""
        place = self._folder / path
        if fate and place.exists():
            told(fate)
            data = bytearray(place.read_bytes())
            data[-50:-49] = b"x"
            place.unlink(missing_ok=True)
            if fate != "gone":
                place.write_bytes(data if fate == "flip" else data[:-7])
        return read(self, path, into)

    def bad_write(self: BlockFiles, path: str, copy: bytearray) -> bool:
        with lock:
            fails = rng.random() < SHARE
        if fails:
            told("full")
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, path, copy)

    BlockFiles._read, BlockFiles._write = bad_read, bad_write  # type: ignore[method-assign]
    block_files.RETRY_S = 0.05


def child(folder: str, seed: int) -> int:
    disturb(seed, lambda fate: say(fault=fate))
    return answer(engine(folder), random.Random(seed))


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def answer(llm: Any, rng: random.Random) -> int:
    """Again and again, and tells each time."""
    say(ready=True)
    prompts = texts(1)
    while True:
        chosen = rng.sample(range(NUM_TEXTS), rng.randrange(1, NUM_TEXTS + 1))
        started = time.monotonic()
        got = dict(zip(chosen, answers_of(llm, prompts, chosen), strict=True))
        stored = llm.engine.core.kv.stored
        read, lost = (sum(getattr(tier, name) for tier in stored.tiers) for name in ("num_loaded", "num_lost"))
        say(answers=got, s=time.monotonic() - started, read=read, lost=lost, misses=stored.misses)
        if rng.random() < 0.5:
            llm.reset_prefix_cache()


def answers_of(llm: Any, prompts: list[list[int]], chosen: Sequence[int]) -> list[list[int]]:
    from penstock import SamplingParams

    params = [SamplingParams(temperature=0.7 * (n % 2), seed=n, max_tokens=12, ignore_eos=True) for n in chosen]
    found = llm.generate([{"prompt_token_ids": prompts[n]} for n in chosen], params)
    return [output.outputs[0].token_ids for output in found]


def soak(kills: int, faults: int, seed: int, folder: Path, say: Any = lambda text: None) -> dict[str, Any]:
    """At least so many kills and faults."""
    from penstock.launch.kv_store import open_existing, places
    from penstock.runner.block_files import is_whole

    right = answers_of(engine(), texts(1), range(NUM_TEXTS))
    rng = random.Random(seed)
    told: dict[str, Any] = {
        "kills": 0, "faults": {}, "answers": 0, "wrong": 0, "stuck": 0, "blocks_read": 0, "blocks_lost": 0,
    }  # fmt: skip
    while told["kills"] < kills or sum(told["faults"].values()) < faults:
        command = [
            sys.executable,
            "-m",
            "benchmarks.serving.store_soak",
            "--child",
            str(folder),
            str(rng.getrandbits(32)),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            timer = None
            lines = {"read": 0, "lost": 0}
            for line in process.stdout:
                try:
                    news = json.loads(line)
                except ValueError:
                    continue  # cut by the kill
                if "ready" in news:
                    timer = threading.Timer(rng.uniform(0.05, 2.5), process.kill)
                    timer.start()
                if "fault" in news:
                    told["faults"][news["fault"]] = told["faults"].get(news["fault"], 0) + 1
                if "answers" in news:
                    told["answers"] += len(news["answers"])
                    told["wrong"] += sum(tokens != right[int(n)] for n, tokens in news["answers"].items())
                    told["stuck"] += news["s"] > 20
                    lines = news
            process.wait()
            told["blocks_read"] += lines["read"]
            told["blocks_lost"] += lines["lost"]
            if timer is None:
                raise RuntimeError("an engine did not start")
        told["kills"] += 1
        num = sum(told["faults"].values())
        say(f"{told['kills']} kills, {num} faults, {told['answers']} answers, {told['wrong']} wrong")
    secret = open_existing(folder)
    blocks = [block for place in places(folder) for block in place.blocks]
    told["blocks"], told["bytes"] = len(blocks), sum(b.num_bytes for b in blocks)
    told["damaged_and_not_read_yet"] = sum(not is_whole(folder, b.name, secret) for b in blocks)
    told["half_written"] = len(list(folder.glob("*/*/.*")))
    from penstock.launch import kv_store

    kv_store._PART_S = 0.0
    last = engine(str(folder))
    told["wrong"] += sum(a != b for a, b in zip(answers_of(last, texts(1), range(NUM_TEXTS)), right, strict=True))
    last.engine.core.executor._runner.storage.outside.close()
    told["left_half_written"] = len(list(folder.glob("*/*/.*")))
    last.engine.core.kv.check_invariants([])
    return told


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out")
    parser.add_argument("--remote", action="store_true", help="servers of blocks are killed, instead of engines")
    parser.add_argument("--child", nargs=2, metavar=("FOLDER", "SEED"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        return child(args.child[0], int(args.child[1]))
    from benchmarks.serving import remote_soak
    from rich.console import Console

    console = Console()
    with tempfile.TemporaryDirectory() as folder, console.status("") as status:
        began = time.monotonic()
        if args.remote:
            told = remote_soak.soak(args.kills, args.seed, Path(folder), status.update)
        else:
            told = soak(args.kills, args.faults, args.seed, Path(folder) / "kv", status.update)
        told["s"] = round(time.monotonic() - began, 1)
    console.print_json(json.dumps(told))
    save(
        args.out,
        about(asked={"kills": args.kills, "faults": args.faults, "seed": args.seed, "remote": args.remote}, told=told),
    )
    return 1 if told["wrong"] or told["stuck"] or told["left_half_written"] else 0


if __name__ == "__main__":
    sys.exit(main())
