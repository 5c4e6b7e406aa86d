"""What a folder of KV blocks saves and costs: first tokens after a restart, from memory and from the drive, and beside.

    python -m benchmarks.serving.kv_store MODEL --tokens 4096 --rounds 5 --out kv-store.json

Each round begins engines anew, in processes of their own. `computed`: without a folder. `warm`: the folder's files are
in the system's page cache. `cold`: they were dropped from it (posix_fadvise). `read`: the files alone, read by one
thread, which is what the drive takes. `off` and `on`: generated tokens/s of 16 requests with prompts that nobody asked
before, without and with a folder, in turns in one process. Tokens are compared in every round.

    python -m benchmarks.serving.kv_store MODEL --tokens 2048 --sweep 20,50,100,200,500,0 --rounds 3 --out sweep.json

Seconds to the first token behind a link of so many MB/s (0: as it is), with every policy of loading, and with given
parts of the text computed while the rest is read. Drawn order, by `--seed`; a process for each link and round.
`--remote`: the same with a server of blocks (`penstock cache serve`) on this machine, which keeps them in memory, in
place of the folder; no `cold`, no `read`; and what an engine takes whose server was killed after it had told what it
has. `--format`: how blocks are written (`--kv-offload-format`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import about, figures, save
from rich.console import Console

from penstock.core.page_ops import DISK

NEW = 16
PARTS = [0.0, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 1.0]
"""Of a text, computed while the rest is read."""


def prompt(length: int, number: int) -> list[int]:
    return [(7 * i * i + 13 * i + 101 * number * (i % 7 + 1)) % 7000 + 300 for i in range(length)]


def engine(model: str, folder: str, length: int, **more: Any) -> Any:
    from penstock import LLM

    if folder.startswith("remote:"):
        more["kv_offload"], _, more["kv_offload_secret_file"] = folder.partition(",")
    elif folder:
        more["kv_offload"] = f"disk:{folder},20GiB"
    if folder:
        more.setdefault("kv_load_policy", "wait")
    return LLM(model, max_model_len=length + 256, skip_tokenizer_init=True, **more)


def first_token(llm: Any, ids: list[int]) -> tuple[float, list[int], int]:
    """(seconds to the first token, tokens, tokens found)."""
    from penstock import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    stamps, outputs = [time.perf_counter()], []
    for output in llm.stream({"prompt_token_ids": ids}, params):
        stamps.append(time.perf_counter())
        outputs.append(output)
    last = outputs[-1]
    return stamps[1] - stamps[0], list(last.outputs[0].token_ids), last.num_cached_tokens


def once(model: str, folder: str, length: int, policy: str, kill: int = 0, form: str = "plain") -> dict[str, Any]:
    """In a process of its own: a short answer to warm up, then the document, then a step beside it. `kill`: the process
    that has the blocks, which is killed before the document."""
    more = {"kv_load_policy": policy, "kv_offload_format": form} if folder else {}
    llm = engine(model, folder, length, **more)
    first_token(llm, [5] * 40)
    if kill:
        os.kill(kill, signal.SIGKILL)
        time.sleep(0.2)
    first_s, tokens, cached = first_token(llm, prompt(length, 0))
    again_s, _, _ = first_token(llm, prompt(length, 0))  # from the device: a step and what is beside it
    if folder:
        llm.engine.core.executor._runner.storage.outside.close(60.0)
    return {"first_s": first_s, "tokens": tokens, "cached": cached, "again_s": again_s}


def read_s(folder: Path, *, cold: bool) -> float:
    """All files, one after the other."""
    names = sorted(folder.glob("*/*/*-*"))
    if cold:
        drop(folder)
    began = time.perf_counter()
    for name in names:
        name.read_bytes()
    return time.perf_counter() - began


def drop(folder: Path) -> None:
    for name in folder.glob("*/*/*-*"):
        fd = os.open(name, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def told(args: argparse.Namespace, *more: str) -> dict[str, Any]:
    """What this command says in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.serving.kv_store", args.model, "--tokens", str(args.tokens)]
    command += ["--format", args.format, "--parts", *map(str, args.parts)]
    run = subprocess.run([*command, *more], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def asked(args: argparse.Namespace, folder: str, policy: str = "wait", kill: int = 0) -> dict[str, Any]:
    return told(args, "--once", folder, policy, str(kill))


def beside(args: argparse.Namespace, folder: str) -> list[float]:
    """Ratios on / off of generated tokens/s, in turns."""
    from penstock import SamplingParams

    engines = [engine(args.model, "", 1024), engine(args.model, folder, 1024)]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    ratios = []
    for number in range(args.pairs + 1):
        speed = []
        for n in (0, 1) if number % 2 else (1, 0):
            prompts = [{"prompt_token_ids": prompt(64 + 16 * i, 1000 * number + i)} for i in range(16)]
            began = time.perf_counter()
            engines[n].generate(prompts, params)
            speed.append((n, 16 * 48 / (time.perf_counter() - began)))
        found = dict(speed)
        if number:
            ratios.append(found[1] / found[0])
    engines[1].engine.core.executor._runner.storage.outside.close(60.0)
    return ratios


class Link:
    """What all readers of a folder share: so many bytes a second."""

    def __init__(self, bytes_s: float) -> None:
        self._bytes_s, self._free_s, self._lock = bytes_s, 0.0, threading.Lock()

    def take(self, num_bytes: int) -> None:
        """Returns when they have passed."""
        with self._lock:
            self._free_s = until_s = max(self._free_s, time.perf_counter()) + num_bytes / self._bytes_s
        time.sleep(max(0.0, until_s - time.perf_counter()))


def throttle(mb_s: float) -> None:
    """From now on every file of blocks that this process reads comes over one link."""
    from penstock.launch import kv_store
    from penstock.runner.block_files import BlockFiles

    link, read, is_whole = Link(mb_s * 1e6), BlockFiles._read, kv_store.is_whole

    def slow(self: Any, path: str, into: bytearray) -> bool:
        link.take(len(into))
        return read(self, path, into)

    def slow_trial(folder: Path, path: str, secret: bytes) -> bool:
        link.take((folder / path).stat().st_size)
        return is_whole(folder, path, secret)

    BlockFiles._read, kv_store.is_whole = slow, slow_trial  # type: ignore[method-assign]


def swept(args: argparse.Namespace, folder: str, mb_s: float, number: int) -> dict[str, Any]:
    """In a process of its own: seconds by what was done, and what was measured and chosen."""
    if mb_s:
        throttle(mb_s)
    llm = engine(args.model, folder, args.tokens, kv_load_policy="auto", kv_offload_format=args.format)
    kv = llm.engine.core.kv
    stored, settings = kv.stored, kv.stored._settings
    ids = prompt(args.tokens, 0)
    first_token(llm, [5] * 40)
    seconds, tokens, chosen = {}, {}, {}

    def take(name: str, policy: str, forced: float | None) -> None:
        stored._settings, stored.rates.forced = settings._replace(load=policy), forced
        kv.reset_prefix_cache()
        before = dict(stored.choices)
        seconds[name], tokens[name], cached = first_token(llm, ids)
        kind = next(kind for kind, num in stored.choices.items() if num > before[kind])
        chosen[name] = {"kind": kind, "part_computed": round(1 - cached / args.tokens, 3)}
        while kv.swaps.loads or llm.engine.core.has_work:
            llm.engine.core.step()

    take("auto at first", "auto", None)
    modes: list[tuple[str, str, float | None]] = [(name, name, None) for name in ("cake", "split", "auto")]
    modes += [(f"part {part:.2f}", "split", part) for part in args.parts]
    random.Random(f"{args.seed}-{mb_s}-{number}").shuffle(modes)
    for mode in modes:
        take(*mode)
    rates = {"read_mb_s": stored.rates.bytes_s(DISK) / 1e6, "tokens_s": stored.rates.tokens_s}
    alike = len({tuple(found) for found in tokens.values()}) == 1
    return {"seconds": seconds, "chosen": chosen, "rates": rates, "alike": alike, "tokens": tokens["auto"]}


def sweep(args: argparse.Namespace, say: Any) -> dict[str, Any]:
    """Compute-only is part 1, load-only part 0."""
    links: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=args.place) as place:
        folder = str(Path(place) / "kv")
        expected = asked(args, "")["tokens"]
        alike = asked(args, folder)["tokens"] == expected  # writes
        for number in range(args.rounds):
            for mb_s in [float(x) for x in args.sweep.split(",")]:
                more = ["--sweep-once", folder, str(mb_s), str(number), "--seed", str(args.seed)]
                found = told(args, *more)
                link = links.setdefault(f"{mb_s:g}", {"seconds": {}, "chosen": [], "rates": []})
                for name, value in found["seconds"].items():
                    link["seconds"].setdefault(name, []).append(value)
                link["chosen"].append(found["chosen"])
                link["rates"].append(found["rates"])
                alike = alike and found["alike"] and found["tokens"] == expected
                say(f"round {number}, {mb_s:g} MB/s: {found['seconds']}")
    for link in links.values():
        link["median_s"] = {name: statistics.median(values) for name, values in link["seconds"].items()}
        median = link["median_s"]
        ends = min(median["part 0.00"], median["part 1.00"])
        best = min(value for name, value in median.items() if name.startswith("part"))
        link["over_ends"] = {name: median[name] / ends for name in ("auto", "split", "cake", "auto at first")}
        link["over_best"] = {name: median[name] / best for name in ("auto", "split", "cake", "auto at first")}
    return {"tokens": args.tokens, "alike": alike, "links": links}


def measure(args: argparse.Namespace, say: Any) -> dict[str, Any]:
    rounds: dict[str, list[float]] = {}
    alike = True

    def add(name: str, value: float) -> None:
        rounds.setdefault(name, []).append(value)
        say(f"{name} {value * 1e3:.1f} ms")

    with tempfile.TemporaryDirectory(dir=args.place) as place:
        folder = Path(place) / "kv"
        expected = asked(args, "")["tokens"]
        alike = asked(args, str(folder))["tokens"] == expected  # writes
        blocks = [p.stat().st_size for p in folder.glob("*/*/*-*")]
        for _ in range(args.rounds):
            found = asked(args, "")
            add("computed", found["first_s"])
            for policy in ("wait", "cake"):
                for cold in (False, True):
                    read_s(folder, cold=False)
                    if cold:
                        drop(folder)
                    got = asked(args, str(folder), policy)
                    add(f"{'cold' if cold else 'warm'} {policy}", got["first_s"])
                    alike = alike and got["tokens"] == expected
                    if policy == "wait":
                        add("device", got["again_s"])
            add("read warm", read_s(folder, cold=False))
            add("read cold", read_s(folder, cold=True))
    with tempfile.TemporaryDirectory(dir=args.place) as place:
        ratios = beside(args, str(Path(place) / "kv")) if args.pairs else []
    return {
        "tokens": args.tokens, "blocks": len(blocks), "bytes": sum(blocks), "alike": alike,
        "seconds": {name: figures(values) for name, values in rounds.items()},
        "on_over_off": figures(ratios) if ratios else None, "ratios": ratios,
    }  # fmt: skip


@contextmanager
def server(secret: Path) -> Iterator[tuple[str, int]]:
    """What an engine is told of it, and its process."""
    command = [sys.executable, "-m", "penstock", "cache", "serve", "memory", "--listen", "127.0.0.1:0"]
    with subprocess.Popen([*command, "--secret-file", str(secret)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("listening"))
        try:
            yield f"{line.split()[-1]},{secret}", process.pid
        finally:
            process.kill()


def measure_remote(args: argparse.Namespace, say: Any) -> dict[str, Any]:
    rounds: dict[str, list[float]] = {}
    alike, counts = True, []
    with tempfile.TemporaryDirectory(dir=args.place) as place:
        for _ in range(args.rounds):
            with server(Path(place) / "secret") as (remote, pid):
                expected = asked(args, "")
                asked(args, remote)  # writes
                for name, policy, kill in (
                    ("remote wait", "wait", 0),
                    ("remote cake", "cake", 0),
                    ("killed", "wait", pid),
                ):
                    got = asked(args, remote, policy, kill)
                    rounds.setdefault(name, []).append(got["first_s"])
                    alike = alike and got["tokens"] == expected["tokens"]
                    counts.append(got["cached"])
                    say(f"{name} {got['first_s'] * 1e3:.1f} ms")
                rounds.setdefault("computed", []).append(expected["first_s"])
        with server(Path(place) / "secret") as (remote, _):
            ratios = beside(args, remote) if args.pairs else []
    return {
        "tokens": args.tokens, "alike": alike, "cached": counts,
        "seconds": {name: figures(values) for name, values in rounds.items()},
        "on_over_off": figures(ratios) if ratios else None, "ratios": ratios,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=20, help="of W3-like loads without and with a folder")
    parser.add_argument("--place", help="where the folder is made (default: the system's temporary folder)")
    parser.add_argument("--remote", action="store_true", help="a server of blocks in place of a folder")
    parser.add_argument("--once", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--sweep", help="speeds of the link to the folder, in MB/s; 0: as it is")
    parser.add_argument("--parts", type=float, nargs="+", default=PARTS, help="of a text that are computed, in a sweep")
    parser.add_argument("--format", default="plain", help="of blocks: --kv-offload-format")
    parser.add_argument("--seed", type=int, default=0, help="of the order in a sweep")
    parser.add_argument("--sweep-once", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--out")
    args = parser.parse_args(argv)
    if args.once:
        print(json.dumps(once(args.model, args.once[0], args.tokens, args.once[1], int(args.once[2]), args.format)))
        return 0
    if args.sweep_once:
        folder, mb_s, number = args.sweep_once
        print(json.dumps(swept(args, folder, float(mb_s), int(number))))
        return 0
    console = Console()
    with console.status("") as status:
        run = measure_remote if args.remote else sweep if args.sweep else measure
        found = run(args, status.update)
    console.print_json(json.dumps(found))
    save(args.out, about(asked={"model": Path(args.model).name, "tokens": args.tokens}, found=found))
    return 0 if found["alike"] else 1


if __name__ == "__main__":
    sys.exit(main())
