"""Many adapters in one batch: decoding speed beside the model's own, and beside one adapter at a time.

    python -m benchmarks.engine.adapters MODEL [--targets q_proj v_proj] [--adapters 64] [--batch 32] [--out FILE]

Made adapters (seeded) of one rank; `--batch` requests, each with another adapter, decode `--tokens` tokens. In turns:
the model without adapters, with them, and (`--one`) the same requests adapter by adapter, and one by one without any:
what a batch gives by itself is the most that adapters in one batch can give. Then the texts of some requests are
compared with those that they have alone. Seconds are those of steps in which everybody decodes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from penstock import LLM, LoRARequest, SamplingParams
from penstock.base.bf16 import narrow

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def made(folder: Path, sites: Any, targets: list[str], rank: int, seed: int, size: float) -> LoRARequest:
    rng, tensors = np.random.default_rng(seed), {}
    for module, (site, *_) in sites.items():
        if module.rpartition(".")[2] in targets:
            a, b = rng.normal(0, size, (rank, site.inputs)), rng.normal(0, size, (site.outputs, rank))
            name = f"base_model.model.{module}.lora_"
            tensors |= {f"{name}A.weight": a.astype(np.float32), f"{name}B.weight": b.astype(np.float32)}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(folder.name, seed + 1, str(folder))


def narrowed(folder: Path) -> None:
    """The same adapter in bfloat16."""
    from penstock.formats.safetensors import read_safetensors

    path = folder / "adapter_model.safetensors"
    refs, whole = read_safetensors(path), path.read_bytes()
    header, data, at = {}, [], 0
    for name, ref in refs.items():
        numbers = np.frombuffer(whole[ref.offset : ref.offset + ref.nbytes], "<f4")
        raw = narrow(numbers).astype("<u2").tobytes()
        header[name] = {"dtype": "BF16", "shape": list(ref.shape), "data_offsets": [at, at + len(raw)]}
        data.append(raw)
        at += len(raw)
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(data))


class Meter:
    """Seconds of the steps in which nothing but decoding happens."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.core = llm, llm.engine.core

    def run(self, requests: list[LoRARequest | None], num_tokens: int, prompt_ids: list[list[int]]) -> dict[str, Any]:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        self.core.kv.reset_prefix_cache()
        steps: list[float] = []
        inner = self.core.step

        def step() -> Any:
            running = self.core.scheduler.running
            decoding = bool(running) and all(seq.is_decoding for seq in running) and not self.core.scheduler.waiting
            start = time.perf_counter()
            out = inner()
            if decoding and len(running) == len(requests):
                steps.append(time.perf_counter() - start)
            return out

        self.core.step = step  # type: ignore[method-assign]
        start = time.perf_counter()
        try:
            found = self.llm.generate(
                [{"prompt_token_ids": ids} for ids in prompt_ids], params,
                lora_request=requests if any(requests) else None,
            )  # fmt: skip
        finally:
            self.core.step = inner  # type: ignore[method-assign]
        whole = time.perf_counter() - start
        ids = [list(out.outputs[0].token_ids) for out in found]
        return {"step_s": float(np.median(steps)) if steps else 0.0, "low_s": min(steps, default=0.0), "s": whole,
                "ids": ids}  # fmt: skip


def one_by_one(meter: Meter, requests: list[LoRARequest | None], prompts: list[list[int]], num_tokens: int) -> float:
    """Seconds."""
    start = time.perf_counter()
    for one, ids in zip(requests, prompts, strict=True):
        meter.run([one], num_tokens, [ids])
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--targets", nargs="+", default=["q_proj", "v_proj"], help="or: all")
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=float, default=0.02)
    parser.add_argument("--bfloat16", action="store_true", help="adapters in 16 bits")
    parser.add_argument("--pool", action="store_true", help="adapters lie in blocks of KV")
    parser.add_argument("--one", action="store_true", help="also one adapter at a time")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    targets = list(ALL) if options.targets == ["all"] else options.targets
    llm = LLM(
        options.model, enable_lora=True, max_loras=options.batch, max_cpu_loras=options.adapters,
        lora_memory=None if options.pool else 4.0,
        max_lora_rank=options.rank, dtype=options.dtype, max_num_seqs=options.batch, max_model_len=512,
        threads=options.threads,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    vocab = llm.engine.spec.vocab_size
    prompts = rng.integers(0, min(vocab, 50_000), (options.batch, options.prompt)).tolist()
    with tempfile.TemporaryDirectory() as scratch:
        assert llm.engine.adapters is not None
        sites = llm.engine.adapters.sites
        adapters = [
            made(Path(scratch) / f"a{i}", sites, targets, options.rank, i, options.size)
            for i in range(options.adapters)
        ]
        if options.bfloat16:
            for one in adapters:
                narrowed(Path(one.lora_path))
        meter = Meter(llm)
        chosen = [adapters[i % len(adapters)] for i in rng.permutation(options.adapters)[: options.batch]]
        chosen += [adapters[i % len(adapters)] for i in range(options.batch - len(chosen))]
        for one in (None, chosen):  # warm
            meter.run([None] * options.batch if one is None else list(chosen), 3, prompts)
        rounds = []
        for _ in range(options.rounds):
            base = meter.run([None] * options.batch, options.tokens, prompts)
            many = meter.run(list(chosen), options.tokens, prompts)
            rounds.append((base, many))
            print(f"step: {base['step_s'] * 1e3:.2f} ms without, {many['step_s'] * 1e3:.2f} ms with, "
                  f"speed {base['step_s'] / many['step_s']:.3f}", flush=True)  # fmt: skip
        ratio = float(np.median([base["step_s"] / many["step_s"] for base, many in rounds]))
        low = min(b["low_s"] for b, _ in rounds) / min(m["low_s"] for _, m in rounds)
        for i in (0, options.batch // 2, options.batch - 1):
            alone = meter.run([chosen[i]], options.tokens, [prompts[i]])
            assert alone["ids"][0] == rounds[-1][1]["ids"][i], "a request has other tokens alone"
        result: dict[str, Any] = {
            "model": Path(options.model).name, "targets": targets, "adapters": options.adapters,
            "batch": options.batch, "rank": options.rank, "bfloat16": options.bfloat16, "threads": options.threads,
            "pool": options.pool,
            "steps_ms": [[b["step_s"] * 1e3, m["step_s"] * 1e3] for b, m in rounds], "speed": ratio, "speed_low": low,
            "alone_equal": True,
        }  # fmt: skip
        if options.one:
            each = one_by_one(meter, list(chosen), prompts, options.tokens)
            bare = one_by_one(meter, [None] * options.batch, prompts, options.tokens)
            whole, base_whole = (min(pair[i]["s"] for pair in rounds) for i in (1, 0))
            result |= {"one_at_a_time_s": each, "together_s": whole, "times": each / whole}
            result |= {"base_one_at_a_time_s": bare, "base_together_s": base_whole, "base_times": bare / base_whole}
    print(json.dumps({k: v for k, v in result.items() if k != "steps_ms"}, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
