"""First tokens from a store behind a slow link: plain blocks, coded ones (catalogue row F42), and computing.

    python -m benchmarks.serving.coded_store MODEL --tokens 2048 --rates 5 10 20 50 100 --rounds 3 --out FILE.json

A document is written once in each format. Then, in every round and in turns, new engines answer it: without a folder,
and with each folder behind a link that all readers share and that takes the time of a file's bytes (`--rates`, in MB/s;
0: as the machine has it). Seconds to the first token: medians, lowest and highest. `bits`: of a number in the files.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import about, figures, save
from benchmarks.serving.kv_store import engine, first_token, prompt
from rich.console import Console

from penstock.core.block_codec import BLOCK_CODECS, PLAIN
from penstock.runner import block_files
from penstock.runner.block_files import BlockFiles


class Link:
    """Of so many bytes/s (0: no limit); one file after the other."""

    def __init__(self) -> None:
        self.rate = 0.0
        self._lock, self._free_s = threading.Lock(), 0.0
        self._read = BlockFiles._read
        BlockFiles._read = self.read_through(self)  # type: ignore[method-assign]

    @staticmethod
    def read_through(link: Link) -> Any:
        def read(files: BlockFiles, path: str, into: bytearray) -> bool:
            if link.rate:
                with link._lock:
                    begins = max(time.perf_counter(), link._free_s)
                    link._free_s = begins + (files._folder / path).stat().st_size / link.rate
                    until = link._free_s
                time.sleep(max(0.0, until - time.perf_counter()))
            return link._read(files, path, into)

        return read


def closed(llm: Any) -> None:
    llm.engine.core.executor._runner.storage.outside.close(120.0)


def text_of(model: str, file: str | None, length: int) -> list[int]:
    """So many tokens of a file; drawn ones without."""
    if file is None:
        return prompt(length, 0)
    from penstock import LLM

    llm = LLM(model, max_model_len=256)
    ids: list[int] = llm.get_tokenizer().encode(Path(file).read_text())[:length]
    assert len(ids) == length, "a longer text is needed"
    return ids


def measure(args: argparse.Namespace, say: Any) -> dict[str, Any]:
    block_files.PATIENCE_S = 600.0  # type: ignore[misc]
    link, formats = Link(), (PLAIN, *BLOCK_CODECS.names())
    ids = text_of(args.model, args.text, args.tokens)
    seconds: dict[str, list[float]] = {}
    stored: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=args.place) as place:
        for form in formats:
            llm = engine(args.model, f"{place}/{form}", args.tokens, kv_offload_format=form)
            first_token(llm, ids)
            closed(llm)
            group = llm.engine.core.kv.groups[0]
            numbers = len(group.layers) * sum(p.heads * p.dim for p in group.spec.planes) * llm.engine.plan.block_size
            sizes = [p.stat().st_size for p in Path(place, form).glob("*/*/*-*")]
            stored[form] = {"files": len(sizes), "bytes": sum(sizes), "bits": 8 * sum(sizes) / len(sizes) / numbers}
            del llm
        for _ in range(args.rounds):
            for form, rate in [("", 0.0), *((form, rate) for rate in args.rates for form in formats)]:
                more = {"kv_offload_format": form} if form else {}
                llm = engine(args.model, f"{place}/{form}" if form else "", args.tokens, **more)
                link.rate = 0.0
                first_token(llm, [5] * 40)
                link.rate = rate * 1e6
                took, _, cached = first_token(llm, ids)
                if form:
                    closed(llm)
                    assert cached >= args.tokens - 64, "it was not found"
                name = f"{form} at {rate:g} MB/s" if form else "computed"
                seconds.setdefault(name, []).append(took)
                say(f"{name}: {took * 1e3:.0f} ms")
                del llm
    return {"tokens": args.tokens, "stored": stored, "seconds": {name: figures(v) for name, v in seconds.items()}}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--text", help="a file whose beginning is the document (default: drawn tokens)")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rates", type=float, nargs="+", default=[5, 10, 20, 50, 100, 0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--place", help="where the folders are made (default: the system's temporary folder)")
    parser.add_argument("--out")
    args = parser.parse_args(argv)
    console = Console()
    with console.status("") as status:
        found = measure(args, status.update)
    console.print_json(json.dumps(found))
    save(args.out, about(asked={"model": Path(args.model).name, "tokens": args.tokens}, found=found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
