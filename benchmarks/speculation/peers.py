"""Speculation beside llama.cpp's and vLLM's own, on the same model, the same prompts, in turns.

    python tools/widen.py src/penstock/bundled/nano WIDE --shape 896,24,14,2,64,4864 --dtype bfloat16
    python -m benchmarks.speculation.peers --model WIDE --draft pico --out FILE.json
        [--llama-server PATH/llama-server] [--vllm-python PYTHON]

The model is nano in Qwen2.5-0.5B's layers: real text, real bytes. Both engines greedy, one request at a time, the same
number of threads, bfloat16. Every turn runs all settings of both engines on one prompt, beginning with another one each
time; tokens of a setting with speculation must be those of the same engine without (marked if not), and it is said how
many of an engine's answers are the other's too. Figures: tokens/s from the first token on by each engine's own clock,
medians over prompts and turns; gain is over the same engine without speculation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import about
from benchmarks.peers.convert import to_gguf
from rich.console import Console
from rich.progress import track
from rich.table import Table

from penstock import LLM, SamplingParams
from penstock.launch.hub import local_path

PROMPTS = {
    "repeats itself": (
        "Once upon a time there was a small dog. The small dog",
        "The cat sat on the mat. The cat sat on the mat. The cat sat on the mat. The cat",
        "One, two, three, one, two, three, one, two, three, one, two,",
        "She said no. He said yes. She said no. He said yes. She said no. He",
    ),
    "free": (
        "The old man looked at the house for a long time. Then he said",
        "In the morning the children went to the river, and the boy",
        "It was a cold day in winter. The small bird sat on the tree and",
        "The king had three sons. The eldest of them",
    ),
}
OURS: dict[str, dict[str, Any] | None] = {
    "off": None,
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "draft-model": {"method": "draft-model"},
}
THEIRS: dict[str, list[str]] = {
    "off": [],
    "ngram-simple": ["--spec-type", "ngram-simple"],
    "ngram-simple 3/8": [
        "--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8",
    ],
    "ngram-cache": ["--spec-type", "ngram-cache"],
    "draft-simple": ["--spec-type", "draft-simple"],
}  # fmt: skip

VLLM: dict[str, dict[str, Any] | None] = {
    "off": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
}

Run = Callable[[list[int], int], tuple[list[int], float]]
"""(prompt, tokens wanted) -> (tokens, tokens/s from the first one on)."""


def penstock(model: str, draft: str, setting: dict[str, Any] | None, threads: int) -> Run:
    if setting is not None and setting["method"] == "draft-model":
        setting = {**setting, "model": draft}
    llm = LLM(model, threads=threads, speculative_config=setting, enable_prefix_caching=False)

    def run(prompt: list[int], count: int) -> tuple[list[int], float]:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        out = llm.generate([{"prompt_token_ids": prompt}], params)[0]
        times = out.metrics
        assert times.first_token_s is not None
        assert times.finished_s is not None
        return list(out.outputs[0].token_ids), (count - 1) / (times.finished_s - times.first_token_s)

    return run


class LlamaServer:
    """A process of llama.cpp's server with one setting. Ends with `close`."""

    def __init__(self, program: Path, files: tuple[Path, Path], more: list[str], threads: int, port: int) -> None:
        words = [str(program), "-m", str(files[0]), "-t", str(threads), "-c", "2048", "-np", "1", "--port", str(port)]
        if "draft-simple" in more:
            words += ["-md", str(files[1])]
        self._url = f"http://127.0.0.1:{port}"
        log = subprocess.DEVNULL
        self._process = subprocess.Popen([*words, "--poll", "0", *more], stdout=log, stderr=log)
        for _ in range(200):
            try:
                urllib.request.urlopen(self._url + "/health", timeout=1)
                return
            except OSError:
                time.sleep(0.2)
        raise SystemExit(f"llama-server did not start with {' '.join(more)}")

    def run(self, prompt: list[int], count: int) -> tuple[list[int], float]:
        body = {
            "prompt": prompt, "n_predict": count, "temperature": 0, "ignore_eos": True, "return_tokens": True,
            "cache_prompt": False,
        }  # fmt: skip
        data = json.dumps(body).encode()
        request = urllib.request.Request(self._url + "/completion", data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            got = json.load(answer)
        timings = got["timings"]
        return got["tokens"], (timings["predicted_n"] - 1) / timings["predicted_ms"] * 1e3

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class VllmWorker:
    """A process of vLLM with one setting (CPU, eager). Ends with `close`."""

    def __init__(self, python: Path, model: str, setting: dict[str, Any] | None, threads: int) -> None:
        words = [str(python), str(Path(__file__).with_name("vllm_worker.py")), model, json.dumps(setting)]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": ""},
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        if not self._out.readline():
            raise SystemExit(f"vLLM did not start with {setting}")

    def run(self, prompt: list[int], count: int) -> tuple[list[int], float]:
        print(json.dumps({"prompt": prompt, "count": count}), file=self._in, flush=True)
        got = json.loads(self._out.readline())
        return got["tokens"], got["rate"]

    def close(self) -> None:
        self._in.close()
        self._process.wait(30)


def measure(runs: dict[str, Run], encode: Callable[[str], list[int]], turns: int, count: int) -> list[dict[str, Any]]:
    """One row per engine, setting and kind of text."""
    names, rows = list(runs), []
    for kind, prompts in PROMPTS.items():
        rates: dict[str, list[float]] = {name: [] for name in names}
        answers: dict[str, list[list[int]]] = {name: [] for name in names}
        for turn in track(range(turns * len(prompts)), description=kind):
            prompt = encode(prompts[turn % len(prompts)])
            at = turn % len(names)
            for name in names[at:] + names[:at]:
                tokens, rate = runs[name](prompt, count)
                rates[name].append(rate)
                answers[name].append(tokens)
        for name in names:
            off = name.split(":")[0] + ":off"
            gains = [a / b for a, b in zip(rates[name], rates[off], strict=True)]
            rows.append(
                {
                    "engine": name.split(":")[0], "setting": name.split(":")[1], "text": kind,
                    "tokens_per_s": statistics.median(rates[name]), "gain": statistics.median(gains),
                    "gain_low": min(gains), "gain_high": max(gains),
                    "same_as_off": sum(a == b for a, b in zip(answers[name], answers[off], strict=True)),
                    "same_as_penstock": sum(
                        a == b for a, b in zip(answers[name], answers["penstock:off"], strict=True)
                    ),
                    "answers": len(answers[name]),
                }
            )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the widened model")
    parser.add_argument("--draft", default="pico")
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--vllm-python", type=Path, help="the interpreter of an environment that has vLLM's CPU build")
    parser.add_argument("--vllm", default=",".join(VLLM))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=2, help="per prompt")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--ours", default=",".join(OURS))
    parser.add_argument("--theirs", default=",".join(THEIRS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    runs: dict[str, Run] = {}
    for name in args.ours.split(","):
        runs[f"penstock:{name}"] = penstock(args.model, args.draft, OURS[name], args.threads)
    tokenizer = LLM(args.draft, threads=1).engine.tokenizer
    assert tokenizer is not None
    servers: list[LlamaServer | VllmWorker] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            if args.llama_server:
                files = (Path(folder) / "model.gguf", Path(folder) / "draft.gguf")
                for source, file in zip((args.model, args.draft), files, strict=True):
                    to_gguf(Path(local_path(source)), file)
                for i, name in enumerate(args.theirs.split(",")):
                    llama = LlamaServer(args.llama_server, files, THEIRS[name], args.threads, 18300 + i)
                    servers.append(llama)
                    runs[f"llama.cpp:{name}"] = llama.run
            for name in args.vllm.split(",") if args.vllm_python else ():
                worker = VllmWorker(args.vllm_python, args.model, VLLM[name], args.threads)
                servers.append(worker)
                runs[f"vllm:{name}"] = worker.run
            rows = measure(runs, lambda text: list(tokenizer.encode(text)), args.turns, args.max_tokens)
        finally:
            for server in servers:
                server.close()
    table = Table("engine", "setting", "text", "tokens/s", "gain over its off", "same as off", "same as Penstock")
    for r in rows:
        table.add_row(
            r["engine"], r["setting"], r["text"], f"{r['tokens_per_s']:.1f}",
            f"{r['gain']:.2f} ({r['gain_low']:.2f} to {r['gain_high']:.2f})", f"{r['same_as_off']}/{r['answers']}",
            f"{r['same_as_penstock']}/{r['answers']}",
        )  # fmt: skip
    Console().print(table)
    if args.out:
        settings = {name: str(value) for name, value in vars(args).items() if name != "out"}
        args.out.write_text(json.dumps({"about": about(**settings), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
