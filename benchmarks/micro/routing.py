"""What routing costs the front end: CPU per request and per token, by router, beside a client of one engine.

    python -m benchmarks.micro.routing [--replicas 4] [--prompt 1024] [--out FILE.json]

No engine runs: what would be sent is dropped, and outputs of one token for each of 32 requests are handed in, as an
engine's loop would. Goals: at most 0.3 ms a request, and 20 us a token, more than without a router.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Collection, Sequence

from benchmarks.common import about, save
from rich.console import Console

from penstock.base.clock import MonotonicClock
from penstock.core.messages import BlocksTold, EngineInfo, EngineSnapshot, Outputs
from penstock.core.output import EngineOutput
from penstock.core.request import Intake, Request
from penstock.core.sampling import SamplingParams, TokenRules
from penstock.core.weight_swap import WeightsOrder
from penstock.engine.frontend import EngineClient
from penstock.engine.link import Listener
from penstock.engine.placement import EnginePlacement
from penstock.report.tables import table
from penstock.route import ROUTERS

BATCH = 32


class NoLink:
    """An engine that takes everything and says nothing."""

    weights: WeightsOrder | None = None

    async def start(self, listener: Listener) -> None: ...

    def send(self, items: Sequence[Intake]) -> None: ...

    def progress_age_s(self) -> float:
        return 0.0

    async def close(self) -> None: ...


def client_of(router: str | None, replicas: int) -> EngineClient:
    placing = None if router is None else EnginePlacement(ROUTERS.get(router)())
    links = [NoLink() for _ in range(replicas if router else 1)]
    client = EngineClient(links[0], None, MonotonicClock(), further=links[1:], placing=placing)
    info = EngineInfo(vocab_size=32000, max_model_len=8192, block_size=16, block_secret=b"s" * 32)
    for replica in client.replicas:
        replica.on_up(info, 0)
        if placing is not None and placing.router.reads_blocks:
            replica.on_outputs(Outputs(0, blocks=BlocksTold(True, [], [])))
    if placing is not None:
        placing.follow(info)
    return client


def costs(client: EngineClient, prompts: Collection[list[int]], tokens: int) -> tuple[float, float]:
    """(seconds of CPU per request, per token)."""
    asked_s = token_s = 0.0
    params, said = SamplingParams(max_tokens=tokens, detokenize=False), EngineSnapshot(kv_total=4096, kv_used=100)
    prompts = list(prompts)
    for first in range(0, len(prompts), BATCH):
        requests = [
            Request(request_id=f"{first}-{n}", prompt_token_ids=ids, rules=TokenRules(), max_tokens=tokens)
            for n, ids in enumerate(prompts[first : first + BATCH])
        ]
        began = time.process_time()
        streams = [client.submit(request, params) for request in requests]
        asked_s += time.process_time() - began
        for step in range(tokens):
            by_engine: dict[int, list[EngineOutput]] = {}
            for stream in streams:
                out = EngineOutput(request_id=stream.request_id, index=0, token_ids=[5],
                                   finish_reason="length" if step == tokens - 1 else None)  # fmt: skip
                by_engine.setdefault(stream.replica.number, []).append(out)
            began = time.process_time()
            for number, outputs in by_engine.items():
                told = BlocksTold(False, [hash((first, step, number))], []) if client.placing is not None else None
                client.replicas[number].on_outputs(Outputs(0, outputs, said, told))
            for stream in streams:
                client.take(stream)
            token_s += time.process_time() - began
    return asked_s / len(prompts), token_s / len(prompts) / tokens


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens, half of them shared by all")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out")
    args = parser.parse_args(argv)
    rng = random.Random(0)
    shared = [rng.randrange(32000) for _ in range(args.prompt // 2)]
    prompts = [shared + [rng.randrange(32000) for _ in range(args.prompt - len(shared))] for _ in range(args.requests)]
    names = [None, *ROUTERS.names()]
    found: dict[str | None, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(args.repeats):
        for name in names:
            found[name].append(costs(client_of(name, args.replicas), prompts, args.tokens))
    medians = {name: [statistics.median(x) for x in zip(*rows, strict=True)] for name, rows in found.items()}
    base = medians[None]
    rows, saved = [], {}
    for name, (request_s, token_s) in medians.items():
        more = [1e6 * (request_s - base[0]), 1e6 * (token_s - base[1])]
        saved[name or "one engine"] = {
            "request us": round(1e6 * request_s, 1), "token us": round(1e6 * token_s, 2),
            "more a request us": round(more[0], 1), "more a token us": round(more[1], 2),
        }  # fmt: skip
        rows.append([name or "one engine", *map(str, saved[name or "one engine"].values())])
    Console().print(table(["router", "request us", "token us", "more a request", "more a token"], rows))
    save(args.out, about(asked={"replicas": args.replicas, "prompt": args.prompt}, found=saved))
    return 0


if __name__ == "__main__":
    sys.exit(main())
