"""A model of which memory holds a part: tokens/s, beside what the drive and the bytes allow (rows A24, B19, B20, B23).

    python -m benchmarks.engine.beyond_memory MODEL [--share 0.5] [--batches 1,32] [--rounds 5] [--json FILE]
    python -m benchmarks.engine.beyond_memory MODEL --only readers --readers 2,4,6 --batches 32 [--json FILE]

All figures are medians over rounds in which everything takes turns: the drive (the layers that come in a step, read in
order by as many threads into memory that is warm), an engine with all weights in memory, and those that stream. A step
can take no less than its bytes at the drive's rate, nor than the same step in memory: `of_drive` is tokens/s over what
the first allows, `of_bound` over what both together allow. Memory is what the system counts, in front of each layer.

`readers`: the same engine with so many threads that read, in turns, and the rate of the best of them. `idle`
is the share of a run's time for which no read was on its way, `depth` how many were otherwise.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from penstock import LLM, SamplingParams
from penstock.ops.native.packed_file import huge_pages
from penstock.ops.native.resident import ResidentWeights

PROMPT = "def read_numbers(path):\n    with open(path) as file:\n        return ["
CODE = '''def add(a, b):
    """Return the sum of a and b."""
    return a + b


def subtract(a, b):
    """Return the difference of a and b."""
    return a - b


def multiply(a, b):
'''


def resident_of(llm: LLM) -> ResidentWeights | None:
    runner: Any = llm.engine.core.executor.runner  # type: ignore[union-attr, attr-defined]
    course = runner._forward._course
    return None if course is None else course.resident


def pages_in_memory(found: ResidentWeights) -> int:
    """Bytes of the region that the system has memory for."""
    page = os.sysconf("SC_PAGESIZE")
    flags = np.zeros(found.num_bytes // page, np.uint8)
    ctypes.CDLL(None).mincore(ctypes.c_void_p(found.address), ctypes.c_size_t(found.num_bytes), flags.ctypes)
    return page * int((flags & 1).sum())


class Steps:
    """Seconds and bytes of the decode steps of one engine."""

    def __init__(self, llm: LLM, batch: int) -> None:
        self.llm, self.batch = llm, batch
        self.runner: Any = llm.engine.core.executor.runner  # type: ignore[union-attr, attr-defined]
        self.resident = resident_of(llm)
        self.seconds: list[float] = []
        self.bytes: list[int] = []
        self.stalls: list[float] = []
        self._inner = self.runner.forward
        self.runner.forward = self._timed
        self._before: tuple[float, int, float] | None = None

    def _now(self) -> tuple[float, int, float]:
        r = self.resident
        return time.perf_counter(), 0 if r is None else r.num_read, 0.0 if r is None else r.stalled_s

    def _timed(self, planned: Any) -> Any:
        now = self._now()
        if self._before is not None:
            self.seconds.append(now[0] - self._before[0])
            self.bytes.append(now[1] - self._before[1])
            self.stalls.append(now[2] - self._before[2])
        self._before = now if len(planned.step.token_ids) == self.batch else None
        return self._inner(planned)

    def run(self, prompts: list[Any], tokens: int) -> list[Any]:
        self._before = None
        found = self.llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
        return [out.outputs[0].token_ids for out in found]

    def median(self, values: list[Any]) -> float:
        return statistics.median(values) if values else 0.0


def drive_rate(path: Path, parts: list[tuple[int, int]]) -> float:
    """Bytes per second of the spans `parts` of the file, past the system's cache, by the engine's own reader, into
    memory that is warm."""
    from concurrent.futures import ThreadPoolExecutor

    from penstock.ops.native import resident as r
    from penstock.ops.native.direct_file import DirectFile

    file = DirectFile(os.open(path, os.O_RDONLY))
    out = huge_pages(max(n for _, n in parts))
    out[:] = 0
    start = time.perf_counter()
    with ThreadPoolExecutor(r._READERS) as readers:
        for offset, num_bytes in parts:

            def read(a: int, o: int = offset, n: int = num_bytes) -> None:
                file.read(o + a, out[a : min(a + r._PART_BYTES, n)])

            list(readers.map(read, range(0, num_bytes, r._PART_BYTES)))
    return sum(n for _, n in parts) / (time.perf_counter() - start)


def spans_of(found: ResidentWeights) -> list[tuple[int, int]]:
    """What a step reads: of each layer that comes, where it begins in the file, and its bytes."""
    spans = []
    for segment in found.segments:
        if not segment.stays:
            first = min(e.span[0] for e in segment.entries)
            spans.append((first, sum(e.span[1] for e in segment.entries)))
    return spans


def prompts_of(llm: LLM, num: int) -> list[Any]:
    rng = random.Random(num)
    ids = llm.get_tokenizer().encode(PROMPT)
    return [{"prompt_token_ids": [*ids, rng.randrange(100, 1000)]} for _ in range(num)]


def measure_batch(
    model: str, options: dict[str, Any], limit: int, batch: int, rounds: int, tokens: int, path: Path
) -> dict[str, Any]:
    common = options | {"max_num_seqs": batch, "max_model_len": 256, "kv_cache_memory_bytes": 256 << 20,
                        "enable_prefix_caching": False}  # fmt: skip
    whole = Steps(LLM(model, **common), batch)
    part = Steps(LLM(model, weight_memory_bytes=limit, **common), batch)
    assert part.resident is not None, "it streams"
    todo, rates = prompts_of(whole.llm, batch), []
    spans = spans_of(part.resident)
    whole.run(todo, 4)
    part.run(todo, 4)
    for steps in (whole, part):
        steps.seconds, steps.bytes, steps.stalls = [], [], []
    for _ in range(rounds):
        rates.append(drive_rate(path, spans))
        wanted = whole.run(todo, tokens)
        assert part.run(todo, tokens) == wanted, "the same tokens"
    peak: list[int] = []
    found = part.resident
    part.runner._forward.pause(lambda n: peak.append(pages_in_memory(found)))
    part.run(todo, 4)
    rate, each = statistics.median(rates), part.median(part.bytes)
    io_s, compute_s, step_s = each / rate, whole.median(whole.seconds), part.median(part.seconds)
    return {
        "batch": batch, "drive_gb_s": rate / 1e9, "drive_gb_s_all": [r / 1e9 for r in rates], "bytes_per_step": each,
        "drive_ms": 1e3 * io_s, "in_memory_ms": 1e3 * compute_s, "step_ms": 1e3 * step_s,
        "stalled_ms": 1e3 * part.median(part.stalls), "tokens_s": batch / step_s,
        "tokens_s_in_memory": batch / compute_s,
        "of_drive": io_s / step_s, "of_bound": max(io_s, compute_s) / step_s, "limit_bytes": limit,
        "peak_bytes": max(peak), "all_bytes": found.num_bytes, "steps": len(part.seconds),
    }  # fmt: skip


def measure_columns(
    model: str, options: dict[str, Any], limit: int, num: int, row: int, rounds: int, tokens: int
) -> dict[str, Any]:
    """`num` sequences through a layer before the next one comes, beside `row` of them through all layers at a time."""
    common = options | {"max_model_len": 256, "kv_cache_memory_bytes": 256 << 20, "enable_prefix_caching": False,
                        "weight_memory_bytes": limit}  # fmt: skip
    llms = {n: LLM(model, max_num_seqs=n, **common) for n in (num, row)}
    todo, seconds, read = prompts_of(llms[num], num), {num: [], row: []}, {}
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    answers: dict[int, Any] = {}
    for k in range(rounds + 1):
        for n, llm in llms.items():
            found = resident_of(llm)
            assert found is not None
            before, start = found.num_read, time.perf_counter()
            answers[n] = [out.outputs[0].token_ids for out in llm.generate(todo, params)]
            if k:
                seconds[n].append(time.perf_counter() - start)
                read[n] = (found.num_read - before) / (num * tokens)
        assert answers[num] == answers[row], "the same tokens"
    rates = {n: num * tokens / statistics.median(s) for n, s in seconds.items()}
    return {"sequences": num, "tokens_s_column": rates[num], "tokens_s_row_by_row": rates[row], "row": row,
            "faster": statistics.median(b / a for a, b in zip(seconds[num], seconds[row], strict=True)),
            "bytes_per_token_column": read[num], "bytes_per_token_row_by_row": read[row]}  # fmt: skip


def measure_drafts(model: str, options: dict[str, Any], limit: int, tokens: int) -> dict[str, Any]:
    """Bytes per token with drafts from the text itself, and without."""
    out: dict[str, Any] = {}
    answers = []
    drafts = {"method": "ngram", "num_speculative_tokens": 6, "controller": "fixed"}
    for name, more in (("plain", {}), ("drafted", {"speculative_config": drafts})):
        llm = LLM(
            model, max_model_len=512, kv_cache_memory_bytes=64 << 20, weight_memory_bytes=limit, **options, **more
        )
        llm.generate([CODE], SamplingParams(temperature=0, max_tokens=4))
        found, core = resident_of(llm), llm.engine.core
        assert found is not None
        steps, read, start = core.stats.num_steps, found.num_read, time.perf_counter()
        got = llm.generate([CODE], SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))[0].outputs[0]
        answers.append(got.token_ids)
        out |= {f"{name}_bytes_per_token": (found.num_read - read) / tokens,
                f"{name}_tokens_per_step": tokens / (core.stats.num_steps - steps),
                f"{name}_tokens_s": tokens / (time.perf_counter() - start)}  # fmt: skip
        del llm
        gc.collect()
    assert answers[0] == answers[1], "the same tokens"
    return out


def measure_loading(model: str, options: dict[str, Any], path: Path, rounds: int) -> dict[str, Any]:
    """Seconds to the first token of a model whose file the system's cache does not hold: read and then run, and run
    while it is read."""
    taken: dict[str, list[float]] = {"copied": [], "streamed": []}
    tokens = {}
    for k in range(rounds + 1):
        for how in taken:
            _forget(path)
            gc.collect()
            start = time.perf_counter()
            llm = LLM(model, max_model_len=512, kv_cache_memory_bytes=64 << 20, packed_weights=how, **options)
            got = llm.generate([CODE], SamplingParams(temperature=0, max_tokens=1))[0].outputs[0]
            if k:  # the first round makes memory of the host's
                taken[how].append(time.perf_counter() - start)
            tokens[how] = got.token_ids
            del llm
    assert tokens["copied"] == tokens["streamed"]
    ratios = [b / a for a, b in zip(taken["copied"], taken["streamed"], strict=True)]
    return {f"{how}_s": statistics.median(s) for how, s in taken.items()} | {
        "ratio": statistics.median(ratios), "all": taken,
    }  # fmt: skip


def measure_readers(
    model: str, options: dict[str, Any], limit: int, batch: int, counts: list[int], rounds: int, tokens: int, path: Path
) -> dict[str, Any]:
    """Steps with so many threads that read, and what the drive did meanwhile."""
    from penstock.ops.native import resident as r

    common = options | {"max_num_seqs": batch, "max_model_len": 256, "kv_cache_memory_bytes": 256 << 20,
                        "enable_prefix_caching": False, "weight_memory_bytes": limit}  # fmt: skip
    spans: list[tuple[float, float]] = []
    plain, before = r._read, r._READERS

    def timed(file: Any, offset: int, part: Any) -> bytes:
        began = time.perf_counter()
        file.read(offset, part)
        spans.append((began, time.perf_counter()))
        return r.page_sums(part)

    engines: dict[int, Steps] = {}
    rates: dict[int, list[float]] = {n: [] for n in counts}
    used: dict[int, list[tuple[float, float]]] = {n: [] for n in counts}
    try:
        for n in counts:
            r._READERS = n
            engines[n] = Steps(LLM(model, **common), batch)
            engines[n].run(prompts_of(engines[n].llm, batch), 4)
            engines[n].seconds, engines[n].stalls = [], []
        wanted = None
        for _ in range(rounds):
            for n, steps in engines.items():
                r._READERS = n
                assert steps.resident is not None
                rates[n].append(drive_rate(path, spans_of(steps.resident)))
                spans.clear()
                r._read, began = timed, time.perf_counter()
                got = steps.run(prompts_of(steps.llm, batch), tokens)
                used[n].append(in_flight(spans, time.perf_counter() - began))
                r._read = plain
                assert wanted in (None, got), "the same tokens"
                wanted = got
    finally:
        r._READERS, r._read = before, plain
    rate = max(statistics.median(found) for found in rates.values())
    out: dict[str, Any] = {"batch": batch, "drive_gb_s": rate / 1e9, "readers": {}}
    for n, steps in engines.items():
        drive_s, step_s = steps.median(steps.bytes) / rate, steps.median(steps.seconds)
        out["readers"][n] = {
            "drive_gb_s": statistics.median(rates[n]) / 1e9, "step_ms": 1e3 * step_s,
            "stalled_ms": 1e3 * steps.median(steps.stalls), "of_drive": drive_s / step_s,
            "quickest_ms": 1e3 * min(steps.seconds), "idle": statistics.median(i for i, _ in used[n]),
            "depth": statistics.median(d for _, d in used[n]),
        }  # fmt: skip
    return out


def in_flight(spans: list[tuple[float, float]], seconds: float) -> tuple[float, float]:
    """The share of the time with no read on its way, and how many there were in the rest."""
    marks = sorted([(began, 1) for began, _ in spans] + [(ended, -1) for _, ended in spans])
    depth, last, busy, area = 0, 0.0, 0.0, 0.0
    for at, change in marks:
        if depth:
            busy += at - last
            area += depth * (at - last)
        depth, last = depth + change, at
    return 1 - busy / seconds, area / max(busy, 1e-9)


def _forget(path: Path) -> None:
    """Make the system's cache give the file up."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def packed_path(model: str, options: dict[str, Any]) -> Path:
    """Of the model, which is packed if it is not."""
    llm = LLM(model, max_model_len=64, kv_cache_memory_bytes=16 << 20, packed_weights="streamed", **options)
    found = resident_of(llm)
    assert found is not None, "it streams"
    return Path(str(found._path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--share", type=float, default=0.5, help="of the packed weights, what memory may hold")
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--prefetch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--only", default="batches,columns,drafts,loading")
    parser.add_argument("--readers", default="2,4,6", help="with --only readers")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    options: dict[str, Any] = {"weight_prefetch": args.prefetch}
    path = packed_path(args.model, options)
    limit, only = int(path.stat().st_size * args.share), args.only.split(",")
    found: dict[str, Any] = {
        "model": args.model.rsplit("/", 1)[-1], "file_bytes": path.stat().st_size, "limit_bytes": limit,
        "prefetch": args.prefetch, "rounds": args.rounds, "load_before": os.getloadavg(),
    }  # fmt: skip
    if "batches" in only:
        found["batches"] = []
        for batch in map(int, args.batches.split(",")):
            found["batches"].append(measure_batch(args.model, options, limit, batch, args.rounds, args.tokens, path))
            print(json.dumps(found["batches"][-1], indent=1))
    if "readers" in only:
        counts = [int(n) for n in args.readers.split(",")]
        found["readers"] = [
            measure_readers(args.model, options, limit, batch, counts, args.rounds, args.tokens, path)
            for batch in map(int, args.batches.split(","))
        ]
        print(json.dumps(found["readers"], indent=1))
    if "columns" in only:
        found["columns"] = measure_columns(args.model, options, limit, 32, 4, args.rounds, args.tokens)
        print(json.dumps(found["columns"], indent=1))
    if "drafts" in only:
        found["drafts"] = measure_drafts(args.model, options, limit, 4 * args.tokens)
        print(json.dumps(found["drafts"], indent=1))
    if "loading" in only:
        found["loading"] = measure_loading(args.model, options, path, args.rounds)
        print(json.dumps(found["loading"], indent=1))
    found["load_after"] = os.getloadavg()
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
