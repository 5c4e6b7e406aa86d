"""First tokens from a store of hidden states, of keys and values, and computed (catalogue row B14, HCache).

    python -m benchmarks.peers.make_models mha-0.5b --folder FOLDER
    python -m benchmarks.serving.hidden_store FOLDER/mha-0.5b --tokens 2048 --rounds 2 --out FILE.json

A document is written once in each format. Then, in every round and at every speed of the link (`--rates`, MB/s; 0: as
the machine has it), new engines answer it from each, as `kv_store --sweep` does: everything read, everything computed,
given parts computed while the rest is read, and as `split`, `cake` and `auto` decide. Tokens are compared in every
round. `alone`: restoring what is in pages, in one process, with nothing to read, and what is restored compared with
what was computed, number by number; also in seconds of the processor, which a busy machine changes less.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import about, figures, save
from benchmarks.serving.kv_store import engine, first_token, prompt, told
from rich.console import Console

from penstock.base.bf16 import widen
from penstock.core.block_codec import HIDDEN, PLAIN

FORMS = (PLAIN, HIDDEN)


def deviation(a: Any, b: Any) -> tuple[float, float]:
    """Largest difference, and it over the root mean square."""
    x, y = (widen(p) if p.dtype == np.uint16 else p.astype(np.float32) for p in (a, b))
    return float(np.abs(x - y).max()), float(np.abs(x - y).max() / np.sqrt(np.mean(x * x)))


def alone(model: str, length: int, repeats: int) -> dict[str, Any]:
    """Restoring what one computed text has left in its pages, and how far the result is from that."""
    with tempfile.TemporaryDirectory() as place:
        llm = engine(model, place, length, kv_offload_format=HIDDEN)
        first_token(llm, [5] * 40)
        PUTS.clear()
        began, cpu = time.perf_counter(), time.process_time()
        first_token(llm, prompt(length, 0))
        computed_s, computed_cpu_s = time.perf_counter() - began, time.process_time() - cpu
        core, size = llm.engine.core, llm.engine.plan.block_size
        storage = core.executor._runner.storage
        (group,), planes = core.kv.groups, storage.planes[0]
        width, restorer = group.pages_per_slab, storage.outside._restorer
        pages = [put[1] for put in sorted(PUTS)]
        first = [slice(page, page + width) for page in pages]
        was = {name: [planes[name][at].copy() for at in first] for name in ("k", "v")}
        for name in was:
            for at in first:
                planes[name][at] = 0
        batch, took, cpu_s = 512 // size, [], []
        for _ in range(repeats):
            began, cpu = time.perf_counter(), time.process_time()
            for n in range(0, len(pages), batch):
                restorer.restore(list(enumerate(pages))[n : n + batch])
            took.append(time.perf_counter() - began)
            cpu_s.append(time.process_time() - cpu)
        found = [deviation(a, planes[name][at]) for name in was for a, at in zip(was[name], first, strict=True)]
        equal = all(np.array_equal(a, planes[name][at]) for name in was for a, at in zip(was[name], first, strict=True))
        storage.outside.close(60.0)
        return {
            "blocks": len(pages), "restore_s": figures(took), "compute_s": computed_s,
            "restore_cpu_s": figures(cpu_s), "compute_cpu_s": computed_cpu_s, "bits_equal": equal,
            "largest": max(f[0] for f in found), "largest_over_rms": max(f[1] for f in found),
        }  # fmt: skip


PUTS: list[tuple[int, int]] = []


def watch() -> None:
    """Which page each block of the text is put from."""
    from penstock.runner.block_files import BlockFiles

    put = BlockFiles.put

    def seen(self: Any, op: Any) -> None:
        PUTS.append((int(op.path.rpartition("-")[2], 16), op.pages[0]))
        put(self, op)

    BlockFiles.put = seen  # type: ignore[method-assign]


def measure(args: argparse.Namespace, say: Any) -> dict[str, Any]:
    links: dict[str, Any] = {}
    stored: dict[str, Any] = {}
    alike = True
    with tempfile.TemporaryDirectory(dir=args.place) as place:
        asks = {form: copy.copy(args) for form in FORMS}
        for form in FORMS:
            asks[form].format = form
            folder = f"{place}/{form}"
            expected = told(asks[form], "--once", "", "wait", "0")["tokens"]
            alike = alike and told(asks[form], "--once", folder, "wait", "0")["tokens"] == expected
            sizes = [p.stat().st_size for p in Path(folder).glob("*/*/*-*")]
            stored[form] = {"files": len(sizes), "bytes": sum(sizes)}
        for number in range(args.rounds):
            for rate in args.rates:
                for form in FORMS if number % 2 else FORMS[::-1]:
                    found = told(asks[form], "--sweep-once", f"{place}/{form}", str(rate), str(number))
                    alike = alike and found["alike"] and found["tokens"] == expected
                    link = links.setdefault(f"{rate:g}", {}).setdefault(form, {"seconds": {}, "chosen": []})
                    for name, value in found["seconds"].items():
                        link["seconds"].setdefault(name, []).append(value)
                    link["chosen"].append(found["chosen"]["auto"])
                    say(f"round {number}, {rate:g} MB/s, {form}: {found['seconds']}")
    for link in links.values():
        for one in link.values():
            one["median_s"] = {name: statistics.median(values) for name, values in one["seconds"].items()}
    return {"tokens": args.tokens, "alike": alike, "stored": stored, "links": links}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rates", type=float, nargs="+", default=[20, 50, 100, 200, 0])
    parser.add_argument("--parts", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75, 1.0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--alone", action="store_true", help="only this")
    parser.add_argument("--place", help="where the folders are made (default: the system's temporary folder)")
    parser.add_argument("--out")
    args = parser.parse_args(argv)
    console = Console()
    watch()
    found: dict[str, Any] = {"alone": alone(args.model, args.tokens, 5)}
    if not args.alone:
        with console.status("") as status:
            found |= measure(args, status.update)
    console.print_json(json.dumps(found))
    save(args.out, about(asked={"model": Path(args.model).name, "tokens": args.tokens}, found=found))
    return 0 if found.get("alike", True) else 1


if __name__ == "__main__":
    sys.exit(main())
