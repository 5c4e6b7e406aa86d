"""What it costs that a rank lives in a process of its own.

    python benchmarks/micro/executors.py [--rounds 200] [--tokens 400]

First the messages: for each kind, its bytes, the time to encode and decode it, and the time that a socket pair takes to
carry it to a thread that waits for it. What shared memory could save is at most the last column: msgspec makes the same
Python objects either way. Then tokens per second of the bundled nano on each executor, interleaved, with the tokens
compared.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from penstock import LLM, SamplingParams
from penstock.core.batch import (
    AddedRow,
    Appended,
    Pooled,
    PromptLogprobs,
    Sampled,
    ScheduledRow,
    SchedulerOutput,
    StepOutput,
    TableUpdate,
    TokenLogprobs,
)
from penstock.core.sampling import TokenRules
from penstock.engine import wire
from penstock.executor.messages import FromRank, Result, RunStep, ToRank


def decode_step(n: int) -> RunStep:
    rows = [ScheduledRow(i, 100, 1, 1) for i in range(n)]
    return RunStep(SchedulerOutput(1, appended=[Appended(i, [5]) for i in range(n)], scheduled=rows))


def prompt(n: int) -> RunStep:
    added = [AddedRow(1, 0, [(i * 7919) % 49152 for i in range(n)], n, TokenRules())]
    tables = [TableUpdate(1, 0, 0, list(range(n // 32)))]
    return RunStep(SchedulerOutput(1, added=added, tables=tables, scheduled=[ScheduledRow(1, 0, 512)]))


def logprobs(n: int, k: int) -> Result:
    entries = [TokenLogprobs(i, -i / 3, i, list(range(k)), [-j / 7 for j in range(k)]) for i in range(n)]
    return Result(StepOutput(1, prompt_logprobs=[PromptLogprobs(1, 0, entries)]))


def vectors(n: int, size: int) -> Result:
    return Result(StepOutput(1, pooled=[Pooled(i, bytes(4 * size)) for i in range(n)]))


MESSAGES: dict[str, Callable[[], RunStep | Result]] = {
    "step, 1 row": lambda: decode_step(1),
    "step, 64 rows": lambda: decode_step(64),
    "result, 64 rows": lambda: Result(StepOutput(1, [Sampled(i, [5]) for i in range(64)])),
    "a prompt of 32,768 tokens": lambda: prompt(32_768),
    "vectors of 16 prompts, 4,096 floats": lambda: vectors(16, 4096),
    "prompt logprobs, 512 tokens, 5 each": lambda: logprobs(512, 5),
    "prompt logprobs, 512 tokens, 20 each": lambda: logprobs(512, 20),
}  # fmt: skip


def messages(rounds: int) -> Table:
    table = Table("message", "bytes", "encode, us", "carry, us", "decode, us", title="medians")
    ours, theirs = socket.socketpair()

    def echo() -> None:
        while wire.read_frame(theirs) is not None:
            theirs.sendall(b"\x01\0\0\0.")

    threading.Thread(target=echo, daemon=True).start()
    for name, make in MESSAGES.items():
        message = make()
        decode = msgspec.msgpack.Decoder(ToRank if isinstance(message, RunStep) else FromRank).decode
        data = wire.frame(message)
        encode_s = _median(rounds, lambda message=message: wire.frame(message))
        decode_s = _median(rounds, lambda data=data, decode=decode: decode(data[4:]))
        carry_s = _median(rounds, lambda data=data: (ours.sendall(data), wire.read_frame(ours)))
        table.add_row(name, f"{len(data):,}", *(f"{s * 1e6:.0f}" for s in (encode_s, carry_s, decode_s)))
    ours.close()
    return table


def _median(rounds: int, f: Callable[[], Any]) -> float:
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        f()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def speeds(num_tokens: int, threads: int) -> Table:
    table = Table("rows", "executor", "depth", "tokens/s, median of 5", "of inproc", title="nano, greedy")
    kinds = [("inproc", 1), ("multiproc", 1), ("multiproc", 2)]
    engines = {
        (name, depth): LLM("nano", executor=name, depth=depth, threads=threads, max_model_len=512)
        for name, depth in kinds
    }
    for rows in (1, 16):
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        prompts = [f"Once there was a child of {i} years who" for i in range(rows)]
        taken: dict[tuple[str, int], list[float]] = {kind: [] for kind in kinds}
        said: dict[tuple[str, int], Any] = {}
        for _ in range(6):  # the first is for warmth
            for kind, llm in engines.items():
                began = time.perf_counter()
                said[kind] = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
                taken[kind].append(time.perf_counter() - began)
        assert all(tokens == said[kinds[0]] for tokens in said.values()), "other tokens"
        speed = {kind: rows * num_tokens / statistics.median(taken[kind][1:]) for kind in kinds}
        for name, depth in kinds:
            share = speed[name, depth] / speed[kinds[0]]
            table.add_row(str(rows), name, str(depth), f"{speed[name, depth]:,.0f}", f"{share:.1%}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    console = Console()
    console.print(messages(args.rounds))
    console.print(speeds(args.tokens, args.threads))


if __name__ == "__main__":
    main()
