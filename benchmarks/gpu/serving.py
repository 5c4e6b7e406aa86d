"""`penstock serve` over HTTP: how soon it is ready from a checkpoint on disk, and what a few clients get."""

from __future__ import annotations

import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from benchmarks.gpu.bench import Bench, Stop
from benchmarks.gpu.device_model import DEVIATION
from benchmarks.gpu.shapes import config_of
from benchmarks.peers.make_models import shapes, tokenizer, write_safetensors


def stage(name: str, clients: tuple[int, ...]) -> Callable[[Bench], None]:
    """Of one shape: its checkpoint is written, served, and asked by so many `clients` at once, one number after the
    other; none: only until it is ready."""

    def run(bench: Bench) -> None:
        with tempfile.TemporaryDirectory(prefix="penstock-gpu-") as folder:
            config = config_of(name, bench.tiny)
            began = time.perf_counter()
            size = checkpoint(bench, config, Path(folder) / name)
            bench.figure(f"{name}.written_bytes", size, "B", seconds=time.perf_counter() - began)
            with served(bench, Path(folder) / name) as (url, ready_s):
                said = "from the start of the process; the files were just written, so the page cache may have them"
                bench.figure(f"{name}.ready_s", ready_s, "s", said=said)
                for num in clients:
                    bench.attempt(f"{name}.clients{num}", lambda num=num: load(bench, name, config, url, num))

    return run


def checkpoint(bench: Bench, config: dict[str, Any], folder: Path) -> int:
    """Hugging Face's layout with random bfloat16 weights, made on the device one by one. Returns its bytes."""
    folder.mkdir(parents=True)

    def values(name: str, shape: tuple[int, ...]) -> Any:
        if name.endswith("norm.weight"):
            tensor = torch.ones(shape, dtype=torch.bfloat16)
        else:
            tensor = torch.empty(shape, dtype=torch.bfloat16, device=bench.device).normal_(0.0, DEVIATION).cpu()
        bench.need(10, "the checkpoint")
        return tensor.view(torch.int16).numpy().view(np.uint16)

    listed = list(shapes(config))
    free, need = _free_bytes(folder), sum(2 * int(np.prod(shape)) for _, shape in listed)
    if need > 0.9 * free:
        raise Stop(f"a checkpoint of {need / 2**30:.0f} GiB, and {free / 2**30:.0f} GiB are free on the disk")
    path = folder / "model.safetensors"
    write_safetensors(path, ((n, s, "BF16", lambda n=n, s=s: values(n, s)) for n, s in listed))
    files = {
        "config.json": config, "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False},
        "tokenizer.json": tokenizer(config["vocab_size"]),
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>",
                                  "eos_token": "<|endoftext|>"},
    }  # fmt: skip
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content), "utf-8")
    return path.stat().st_size


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


@contextmanager
def served(bench: Bench, model: Path) -> Iterator[tuple[str, float]]:
    """(url, seconds from the start of the process until it listens). Raises: Stop with the end of its log."""
    blocks, length = ("64", "256") if bench.tiny else ("4096", "4096")
    log = model.parent / "serve.log"
    command = [sys.executable, "-m", "penstock.cli.main", "serve", str(model), "--port", "0", "--device", bench.name,
               "--num-gpu-blocks-override", blocks, "--max-model-len", length, "--served-model-name", "m"]  # fmt: skip
    began = time.perf_counter()
    with log.open("w", encoding="utf-8") as errors:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert server.stdout is not None
        over = threading.Timer(max(1.0, min(300.0, bench.left_s() - 3.0)), server.kill)
        over.start()
        try:
            found = re.findall(r"on (http://\S+)", server.stdout.readline())
            over.cancel()
            if not found:
                server.kill()
                server.wait()
                raise Stop("penstock serve was not ready in time, or ended: " + log.read_text("utf-8")[-2000:])
            yield found[0], time.perf_counter() - began
        finally:
            over.cancel()
            server.terminate()
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
            server.stdout.close()


def load(bench: Bench, name: str, config: dict[str, Any], url: str, num: int) -> None:
    """`num` clients, each with a prompt of its own, streaming."""
    length, max_tokens = (32, 4) if bench.tiny else (512, 128)
    results: list[Any] = [None] * num
    prompts = np.random.default_rng(num).integers(2, config["vocab_size"], (num, length)).tolist()

    def one(i: int) -> None:
        try:
            results[i] = stream(url, prompts[i], max_tokens)
        except Exception as error:
            results[i] = error

    for _ in range(2):  # the first time warms
        threads = [threading.Thread(target=one, args=(i,)) for i in range(num)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(min(600.0, max(1.0, bench.left_s())))
        wall_s = time.perf_counter() - began
        bad = [r for r in results if not isinstance(r, tuple)]
        if bad:
            raise RuntimeError(f"{len(bad)} of {num} clients failed, the first: {bad[0]!r}")
    produced = sum(r[2] for r in results)
    if produced != num * max_tokens:
        raise RuntimeError(f"{produced} tokens came, and {num * max_tokens} were asked for")
    label = f"{name}.clients{num}"
    bench.figure(f"{label}.tokens_per_s", produced / wall_s, "tokens/s", said=f"{num} at once, prompts of {length} "
                 f"tokens, {max_tokens} tokens each, the second round")  # fmt: skip
    bench.figure(f"{label}.ttft_s", statistics.median(r[0] for r in results), "s", high=max(r[0] for r in results))
    each = [(r[1] - r[0]) / (max_tokens - 1) for r in results]
    bench.figure(f"{label}.tpot_s", statistics.median(each), "s", high=max(each))


def stream(url: str, prompt: list[int], max_tokens: int) -> tuple[float, float, int]:
    """(seconds to the first chunk, to the end, tokens by the server's count)."""
    host = urlsplit(url)
    connection = http.client.HTTPConnection(host.hostname or "", host.port, timeout=120)
    asked = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
             "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(asked), {"content-type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {answer.read()[:500]!r}")
    first, tokens = 0.0, 0
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        first = first or time.perf_counter() - began
        usage = json.loads(line[6:]).get("usage")
        tokens = usage["completion_tokens"] if usage else tokens
    connection.close()
    return first, time.perf_counter() - began, tokens
