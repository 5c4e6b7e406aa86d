"""What a training beside them costs requests: time per output token with and without a job, in turns.

    python -m benchmarks.serving.finetune MODEL [--tokenizer FILE] [--share 0.05] [--rounds 6] [--out FILE]

One server. In each round a few streams decode at once, first while a job waits for the time that they leave, then
without one. Ratios are of the medians over streams of a round, and their median is told; so is the largest gap between
two tokens, how many seconds of training were done in between, and that texts are the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from penstock.config import serve_from_kwargs
from penstock.server.live import LiveServer

TEXT = "The tide came in over the flats while the two of them argued about the price of the boat. " * 6


async def stream(client: httpx.AsyncClient, number: int, tokens: int) -> tuple[list[float], str]:
    """Times of the tokens, and the text."""
    body = {"model": "m", "prompt": f"{number}. Once upon a time", "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "stream": True}  # fmt: skip
    times, text = [], ""
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
                text += json.loads(line[6:])["choices"][0]["text"]
    return times, text


async def measure(url: str, streams: int, tokens: int) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        found = await asyncio.gather(*(stream(client, n, tokens) for n in range(streams)))
    each = [(times[-1] - times[0]) / (len(times) - 1) for times, _ in found]
    gaps = [b - a for times, _ in found for a, b in pairwise(times)]
    return {"tpot_s": statistics.median(each), "largest_gap_s": max(gaps), "texts": [text for _, text in found]}


def spent(client: httpx.Client) -> float:
    """Seconds of training between steps, so far."""
    time.sleep(1.2)  # what the engine says of itself is that old at most
    lines = client.get("/metrics").text.splitlines()
    return sum(float(x.split()[-1]) for x in lines if x.startswith("penstock:finetune_beside_seconds_total"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokenizer")
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        more = {} if options.tokenizer is None else {"tokenizer": options.tokenizer}
        config = serve_from_kwargs(
            model=options.model, served_model_name="m", port=0, max_model_len=1024, max_num_seqs=8,
            finetune_root=f"{scratch}/jobs", finetune_share=options.share, files_dir=f"{scratch}/files", **more,
        )  # fmt: skip
        with LiveServer(config) as live, httpx.Client(base_url=live.url, timeout=600) as client:
            data = b"".join(json.dumps({"text": TEXT}).encode() + b"\n" for _ in range(50))
            file = client.post("/v1/files", files={"file": ("a.jsonl", data)}, data={"purpose": "fine-tune"}).json()

            def begin() -> str:
                body = {"model": "m", "training_file": file["id"], "hyperparameters": {"n_epochs": 50}}
                job: str = client.post("/v1/fine_tuning/jobs", json=body).json()["id"]
                while client.get(f"/v1/fine_tuning/jobs/{job}").json()["status"] != "running":
                    time.sleep(0.1)
                return job

            def end(job: str) -> None:
                client.post(f"/v1/fine_tuning/jobs/{job}/cancel").raise_for_status()
                time.sleep(1.0)

            asyncio.run(measure(live.url, options.streams, 8))
            rounds = []
            for _ in range(options.rounds):
                job, before = begin(), spent(client)
                beside = asyncio.run(measure(live.url, options.streams, options.tokens))
                taken = spent(client) - before
                end(job)
                while client.get("/v1/fine_tuning/jobs").json()["data"][0]["status"] != "cancelled":
                    time.sleep(0.1)
                alone = asyncio.run(measure(live.url, options.streams, options.tokens))
                rounds.append({
                    "beside": beside["tpot_s"], "alone": alone["tpot_s"], "gap_beside": beside["largest_gap_s"],
                    "gap_alone": alone["largest_gap_s"], "same_texts": beside["texts"] == alone["texts"],
                    "training_s": taken,
                })  # fmt: skip
                print(rounds[-1], flush=True)
    result = {
        "model": Path(options.model).name, "share": options.share, "streams": options.streams, "tokens": options.tokens,
        "tpot_ratio": statistics.median(r["beside"] / r["alone"] for r in rounds), "rounds": rounds,
        "same_texts": all(r["same_texts"] for r in rounds),
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
