"""Decoding behind a long context: all of it, or what a KV selector reads or keeps.

    python tools/widen.py src/penstock/bundled/nano build/wide --like qwen2.5-0.5b
    python -m benchmarks.engine.long_decode build/wide --text FILE --out benchmarks/results/long_decode.json

One engine for each line of WITH (by default: everything, StreamingLLM and Quest), all on native kernels with the same
weights. Each reads the context once; then all decode in turns, `--steps` tokens in each of `--rounds` rounds, and every
round begins with another engine. Times are of whole engine steps, one sequence. `roof` is the bytes that a step has to
read (packed weights, and the keys and values, or Quest's bounds and pages, that attention looks at) at the rate of the
read probe beside the round; the ratio to the plain engine is taken round by round.

A model made for less goes on to turn by the same frequencies: what it writes there is no measure of quality. `as full`:
share of tokens that are the plain engine's. That a full budget changes nothing is what `tests` show.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import about, figures, ms, ratios, read_rate, save, show
from rich.console import Console
from rich.progress import Progress

from penstock import LLM, SamplingParams
from penstock.bench.bandwidth import ReadProbe

WITH = {
    "full": {},
    "streaming": {"kv_selector": "streaming"},
    "quest": {"kv_selector": "quest"},
}


class Decoder:
    """One engine behind its context."""

    def __init__(self, name: str, model: str, settings: dict[str, Any], ids: list[int], num_tokens: int) -> None:
        self.name, self.settings, self.num_context = name, settings, len(ids)
        began = time.perf_counter()
        self.llm = LLM(model, ops="native", max_num_seqs=1, enable_prefix_caching=False, **settings)
        self.start_s = time.perf_counter() - began
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        self.stream: Iterator[Any] = self.llm.stream({"prompt_token_ids": ids}, params)
        began = time.perf_counter()
        self.tokens = list(next(self.stream).outputs[0].token_ids)
        self.prefill_s = time.perf_counter() - began
        self.step_s: list[float] = []

    def decode(self, steps: int) -> float:
        """Median seconds per token of so many."""
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            out = next(self.stream)
            times.append(time.perf_counter() - began)
        self.tokens = list(out.outputs[0].token_ids)
        return statistics.median(times)

    @property
    def kv_bytes(self) -> int:
        """Of the blocks in use now, as the allocator counts them."""
        core, plan = self.llm.engine.core, self.llm.engine.plan
        stats = core.kv.stats().groups
        return sum(s.used * g.slab_bytes(plan.block_size) for s, g in zip(stats, plan.groups, strict=True))

    def step_bytes(self) -> int:
        """What a step has to read: weights, and what attention looks at."""
        forward: Any = self.llm.engine.core.executor
        packed = forward.runner._forward.matrices.values()
        weights = sum(matrix.num_bytes for matrix in packed)
        return int(weights) + (self._quest() if self.settings.get("kv_selector") == "quest" else self.kv_bytes)

    def _quest(self) -> int:
        selection = self.llm.config.selection
        assert selection is not None
        plan = self.llm.engine.plan
        group = plan.groups[0]
        blocks = -(-len(self.tokens) // plan.block_size) + self.num_context // plan.block_size
        read = -(-selection.budget.of(blocks * plan.block_size) // plan.block_size)
        dense = selection.options.dense_layers
        per_page = group.spec.num_bytes * plan.block_size
        bounds = sum(p.num_bytes for p in group.spec.page_planes)
        sparse = len(group.layers) - dense
        return dense * blocks * per_page + sparse * (blocks * bounds + read * per_page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True, help="file whose text is the context")
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--budget", default="1024")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=list(WITH), default=list(WITH))
    parser.add_argument("--out")
    args = parser.parse_args()
    console = Console()
    num_tokens = 2 + args.steps * (args.rounds + 1)  # nobody ends: the cache is looked at when all is done
    longest = args.context + num_tokens + 1
    common = {
        "max_model_len": longest, "quantization": args.quantization, "threads": args.threads,
        "kv_cache_memory_bytes": 1 << 30,
    }  # fmt: skip
    model = longer(args.model, longest, Path(tempfile.mkdtemp()))
    text = Path(args.text).read_text("utf-8")
    ids = LLM(model, max_model_len=64).get_tokenizer().encode(text[: 8 * args.context])[: args.context]
    assert len(ids) == args.context, f"the text has only {len(ids)} tokens"
    decoders = []
    with Progress(console=console) as progress:
        task = progress.add_task("reading the context", total=len(args.only))
        for name in args.only:
            settings = {**common, **WITH[name], **({} if name == "full" else {"kv_budget": args.budget})}
            decoders.append(Decoder(name, model, settings, ids, num_tokens))
            progress.advance(task)
        task = progress.add_task("decoding", total=args.rounds)
        probe, rates = ReadProbe(64 << 20), []
        for d in decoders:
            d.decode(args.steps)
        for turn in range(args.rounds):
            at = turn % len(decoders)
            rates.append(read_rate(probe, time.perf_counter))
            for d in decoders[at:] + decoders[:at]:
                d.step_s.append(d.decode(args.steps))
            progress.advance(task)
    report(console, args, decoders, rates)


def longer(model: str, longest: int, folder: Path) -> str:
    """The model, or in `folder` a copy of it (of links) whose configuration claims `longest` positions."""
    config = json.loads((Path(model) / "config.json").read_text("utf-8"))
    if longest <= config["max_position_embeddings"]:
        return model
    for file in Path(model).iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": longest}))
    return str(folder)


def report(console: Console, args: argparse.Namespace, decoders: list[Decoder], rates: list[float]) -> None:
    full, rate = decoders[0], statistics.median(rates)
    rows, results = [], []
    for d in decoders:
        step, roof = figures(d.step_s), d.step_bytes() / rate
        against = ratios(full.step_s, d.step_s)
        same = sum(a == b for a, b in zip(d.tokens, full.tokens, strict=False)) / len(full.tokens)
        rows.append([
            d.name, f"{d.prefill_s:.1f}", ms(step["median"]), f"{ms(step['low'])}-{ms(step['high'])}",
            f"{against['median']:.2f}", f"{against['low']:.2f}-{against['high']:.2f}", f"{d.kv_bytes / 2**20:.1f}",
            ms(roof), f"{roof / step['median']:.2f}", f"{same:.2f}",
        ])  # fmt: skip
        results.append({
            "name": d.name, "settings": d.settings, "prefill_s": d.prefill_s, "step_s": d.step_s,
            "faster_than_full": against, "kv_bytes": d.kv_bytes, "step_bytes": d.step_bytes(), "roof_s": roof,
            "tokens_as_full": same,
        })  # fmt: skip
    title = f"Decoding behind {args.context:,} tokens, {args.quantization}, budget {args.budget}"
    columns = ["", "prefill s", "ms a token", "spread", "x full", "spread", "KV MiB", "roof ms", "of roof", "as full"]
    show(console, title, columns, rows)
    save(args.out, about(
        benchmark="long_decode", model=Path(args.model).name, context=args.context, budget=args.budget,
        quantization=args.quantization, read_bytes_per_s=rates, engines=results,
    ))  # fmt: skip


if __name__ == "__main__":
    main()
