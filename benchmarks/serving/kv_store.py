"""What a folder of KV blocks saves and costs: first tokens after a restart, from memory and from the drive, and beside.

    python -m benchmarks.serving.kv_store MODEL --tokens 4096 --rounds 5 --out kv-store.json

Each round begins engines anew, in processes of their own. `computed`: without a folder. `warm`: the folder's files are
in the system's page cache. `cold`: they were dropped from it (posix_fadvise). `read`: the files alone, read by one
thread, which is what the drive takes. `off` and `on`: generated tokens/s of 16 requests with prompts that nobody asked
before, without and with a folder, in turns in one process. Tokens are compared in every round.

`--remote`: the same with a server of blocks (`penstock cache serve`) on this machine, which keeps them in memory, in
place of the folder; no `cold`, no `read`; and what an engine takes whose server was killed after it had told what it
has.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import about, figures, save
from rich.console import Console

NEW = 16


def prompt(length: int, number: int) -> list[int]:
    return [(7 * i * i + 13 * i + 101 * number * (i % 7 + 1)) % 7000 + 300 for i in range(length)]


def engine(model: str, folder: str, length: int, **more: Any) -> Any:
    from penstock import LLM

    if folder.startswith("remote:"):
        more["kv_offload"], _, more["kv_offload_secret_file"] = folder.partition(",")
    elif folder:
        more["kv_offload"] = f"disk:{folder},20GiB"
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


def once(model: str, folder: str, length: int, policy: str, kill: int = 0) -> dict[str, Any]:
    """In a process of its own: a short answer to warm up, then the document, then a step beside it. `kill`: the process
    that has the blocks, which is killed before the document."""
    more = {"kv_load_policy": policy} if folder else {}
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


def asked(args: argparse.Namespace, folder: str, policy: str = "wait", kill: int = 0) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.serving.kv_store", args.model, "--tokens", str(args.tokens)]
    told = subprocess.run([*command, "--once", folder, policy, str(kill)], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(told.stdout.splitlines()[-1])
    return found


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
    parser.add_argument("--out")
    args = parser.parse_args(argv)
    if args.once:
        print(json.dumps(once(args.model, args.once[0], args.tokens, args.once[1], int(args.once[2]))))
        return 0
    console = Console()
    with console.status("") as status:
        found = (measure_remote if args.remote else measure)(args, status.update)
    console.print_json(json.dumps(found))
    save(args.out, about(asked={"model": Path(args.model).name, "tokens": args.tokens}, found=found))
    return 0 if found["alike"] else 1


if __name__ == "__main__":
    sys.exit(main())
