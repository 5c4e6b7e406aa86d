"""Does a stored text come sooner if it is read layer by layer, while layers whose part has come compute?

    python -m benchmarks.micro.layer_loads MODEL [--tokens 4096] [--rounds 7] [--json FILE]

A text's blocks are written to files; then the step behind them (what is left of the last block) runs, once all files
have been read, checked and copied (as the store does it), and once as soon as the first `span` layers have, the others
being read by the same two threads meanwhile. Each span has a MAC of its own: what is not checked is not computed with.
Milliseconds from the first order to the logits, which are compared with those of the text in memory. Spans are tried in
turn, with files in the page cache and dropped from it.
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from penstock import LLM, SamplingParams

KEY, MAC_BYTES, NUM_READERS = b"k" * 32, 32, 2


class Text:
    """A step that has been planned behind a long text, and that text's blocks as files of spans of layers."""

    def __init__(self, model: str, num_tokens: int, folder: Path) -> None:
        self.llm = LLM(model, max_model_len=num_tokens + 128, max_num_seqs=2, enable_prefix_caching=True)
        self.runner: Any = self.llm.engine.core.executor.runner
        self.forward = self.runner._forward
        self.inner, self.planned = self.runner.forward, None
        self.planes = self.runner.storage.planes[0]
        (self.width,) = self.runner.storage.pages_per_slab
        self.folder = folder
        rng = np.random.default_rng(0)
        prompt = rng.integers(1000, 5000, num_tokens + 20).tolist()
        greedy = SamplingParams(temperature=0, max_tokens=1)
        self.llm.generate([{"prompt_token_ids": prompt}], greedy)  # computes it
        self.runner.forward = self._keep
        self.llm.generate([{"prompt_token_ids": prompt}], greedy)  # finds it
        assert self.planned is not None
        plan = self.planned.step
        self.num_new = len(plan.token_ids)
        (table,) = plan.groups[0].tables
        size = next(iter(self.planes.values())).shape[1]
        self.slabs = table[0][: int(plan.positions[0]) // size].tolist()
        self.logits = np.array(self.run())

    def _keep(self, planned: Any) -> Any:
        self.planned = planned
        return self.inner(planned)

    def run(self) -> Any:
        return self.forward.run(self.planned.step, self.runner.storage.planes)

    def views(self, block: int, first: int, last: int) -> list[Any]:
        page = self.slabs[block] * self.width
        return [array[page + first : page + last].reshape(-1).view(np.uint8) for array in self.planes.values()]

    def write(self, span: int) -> None:
        for block in range(len(self.slabs)):
            data = b""
            for first in range(0, self.width, span):
                part = b"".join(v.tobytes() for v in self.views(block, first, first + span))
                data += part + hmac.new(KEY, part, "sha256").digest()
            path = self.folder / f"{span}-{block}"
            with path.open("wb") as file:
                file.write(data)
                os.fsync(file.fileno())

    def drop(self, span: int) -> None:
        for block in range(len(self.slabs)):
            fd = os.open(self.folder / f"{span}-{block}", os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def forget(self) -> None:
        for block in range(len(self.slabs)):
            for view in self.views(block, 0, self.width):
                view[:] = 0

    def load(self, span: int, *, beside: bool) -> tuple[float, float, float]:
        """Milliseconds until all was read, until the logits were there, and of processor time that reading took."""
        num_spans = self.width // span
        left = [len(self.slabs)] * num_spans
        ready = [threading.Event() for _ in range(num_spans)]
        lock = threading.Lock()
        files: dict[int, int] = {}
        start, read_s, cpu_s = time.perf_counter(), [0.0], [0.0]

        def read(number: int, block: int) -> None:
            begun = time.thread_time()
            fd = files.get(block)
            if fd is None:
                fd = files[block] = os.open(self.folder / f"{span}-{block}", os.O_RDONLY)
            views = self.views(block, number * span, (number + 1) * span)
            size = sum(v.nbytes for v in views)
            data = os.pread(fd, size + MAC_BYTES, number * (size + MAC_BYTES))
            assert hmac.compare_digest(hmac.digest(KEY, data[:size], "sha256"), data[size:])
            at = 0
            for view in views:
                view[:] = np.frombuffer(data, np.uint8, view.nbytes, at)
                at += view.nbytes
            with lock:
                cpu_s[0] += time.thread_time() - begun
                left[number] -= 1
                if not left[number]:
                    ready[number].set()
                    read_s[0] = time.perf_counter() - start

        def wait(layer: int) -> None:
            if layer < self.width and layer % span == 0:
                ready[layer // span].wait()

        with ThreadPoolExecutor(NUM_READERS) as pool:
            work = [pool.submit(read, n, b) for n in range(num_spans) for b in range(len(self.slabs))]
            if not beside:
                ready[-1].wait()
            self.forward.pause(wait if beside else None)
            logits = np.array(self.run())
            end = time.perf_counter() - start
            self.forward.pause(None)
            for item in work:
                item.result()
        for fd in files.values():
            os.close(fd)
        assert np.array_equal(logits, self.logits), "other logits"
        return 1e3 * read_s[0], 1e3 * end, 1e3 * cpu_s[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        text = Text(args.model, args.tokens, Path(name))
        spans = [
            n for n in (text.width, text.width // 2, text.width // 4, text.width // 12) if n and not text.width % n
        ]
        for span in spans:
            text.write(span)
        taken: dict[tuple[str, int, bool], list[tuple[float, float, float]]] = {}
        alone: list[float] = []
        for _ in range(args.rounds):
            begin = time.perf_counter()
            text.run()
            alone.append(1e3 * (time.perf_counter() - begin))
            for cache in ("warm", "dropped"):
                for span, beside in [(spans[0], False), *((span, True) for span in spans[1:])]:
                    if cache == "dropped":
                        text.drop(span)
                    text.forget()
                    taken.setdefault((cache, span, beside), []).append(text.load(span, beside=beside))
    rows = [
        {
            "files": cache, "layers_at_once": span, "beside": beside,
            "read_ms": statistics.median(r for r, _, _ in found),
            "read_processor_ms": statistics.median(c for _, _, c in found),
            "logits_ms": statistics.median(t for _, t, _ in found),
            "least_ms": min(t for _, t, _ in found), "most_ms": max(t for _, t, _ in found),
        }
        for (cache, span, beside), found in taken.items()
    ]  # fmt: skip
    out = {
        "model": Path(args.model).name, "tokens": args.tokens, "blocks": len(text.slabs), "new_tokens": text.num_new,
        "rounds": args.rounds, "step_ms": statistics.median(alone), "load": os.getloadavg(), "rows": rows,
    }  # fmt: skip
    print(json.dumps(out, indent=1))
    if args.json:
        args.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
