"""Ten thousand requests in a second on a small server: every one is answered or refused, in order.

    python -m benchmarks.serving.rush --out benchmarks/serving/results/rush.json

Runs `penstock serve` with the bundled model on this machine. `--sockets` connections, opened beforehand, send `--num`
requests spread over a second, as fast as this one process can. Checked: each gets 200 with the text of an idle server,
or 429 or 503 with a time to come again; those taken on are answered in the order in which they came; the server then
answers as before, with no request left and no descriptor more. Told: how late refusals were, memory, holds of the loop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import resource
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from benchmarks.serving.server import ASKED, percentiles, serving


@dataclass
class Answered:
    """Seconds since the rush began."""

    number: int
    sent_s: float
    ended_s: float
    status: int
    good: bool


async def rush(url: str, num: int, sockets: int, tokens: int) -> tuple[list[Answered], float]:
    """(all answers, seconds until the last request was sent)."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(ASKED | {"max_tokens": tokens}).encode()
    message = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    message += b"Content-Length: %d\r\n\r\n" % len(body) + body
    headers = {"content-type": "application/json"}
    answer = httpx.post(url + "/v1/completions", content=body, headers=headers, timeout=60).json()
    expected = answer["choices"][0]["text"]
    found: list[Answered] = []
    pairs = [await asyncio.open_connection(host, int(port)) for _ in range(sockets)]
    todo, sent_last = iter(range(num)), 0.0
    began = time.perf_counter()

    async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent_last
        for number in todo:
            await asyncio.sleep(max(0.0, began + number / num - time.perf_counter()))
            sent_s = sent_last = time.perf_counter() - began
            try:
                writer.write(message)
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
                answer = json.loads(await reader.readexactly(length))
            except (OSError, asyncio.IncompleteReadError, IndexError):
                found.append(Answered(number, sent_s, time.perf_counter() - began, 0, good=False))
                return
            status = int(head.split()[1])
            good = answer["choices"][0]["text"] == expected if status == 200 else b"retry-after: " in head
            found.append(Answered(number, sent_s, time.perf_counter() - began, status, good))
        writer.close()

    await asyncio.gather(*(worker(*pair) for pair in pairs))
    return found, sent_last


def out_of_order(found: list[Answered], slack_s: float) -> float:
    """Of neighbours among those that were answered, in order of sending, how many ended the other way round by more."""
    served = sorted((one for one in found if one.status == 200), key=lambda one: one.sent_s)
    turned = sum(a.ended_s > b.ended_s + slack_s for a, b in pairwise(served))
    return turned / max(1, len(served) - 1)


def facts(pid: int) -> dict[str, float]:
    status = Path(f"/proc/{pid}/status").read_text()
    kib = int(re.findall(r"VmRSS:\s+(\d+)", status)[0])
    return {"rss_mib": kib / 1024, "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--num", type=int, default=10_000)
    parser.add_argument("--sockets", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=8)
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, args.sockets + 256)), hard))
    small = ("--max-model-len", "512", "--num-gpu-blocks-override", "1024", "--max-num-seqs", "64",
             "--max-num-queued-reqs", "256", "--no-request-log")  # fmt: skip
    with serving(*small) as (url, pid, _):
        httpx.post(url + "/v1/completions", json=ASKED | {"max_tokens": 8}, timeout=60)
        before = facts(pid)
        found, sent_s = asyncio.run(rush(url, args.num, args.sockets, args.tokens))
        time.sleep(1.0)
        after = facts(pid)
        text = httpx.get(url + "/metrics", timeout=30).text
        later = httpx.post(url + "/v1/completions", json=ASKED | {"max_tokens": 8}, timeout=60).status_code
    statuses: dict[str, int] = {}
    for one in found:
        statuses[str(one.status)] = statuses.get(str(one.status), 0) + 1
    refused = sorted((one.ended_s - one.sent_s) * 1e3 for one in found if one.status in (429, 503))
    told: dict[str, Any] = {
        "statuses": statuses, "wrong": sum(not one.good for one in found), "sent_in_s": sent_s,
        "all_answered_s": max(one.ended_s for one in found), "client_refusal_ms": percentiles(refused),
        "out_of_order": out_of_order(found, 0.05), "before": before, "after": after, "then": later,
        "loop_holds": float(re.findall(r"^penstock:event_loop_long_holds_total\S* (\S+)", text, re.M)[0]),
        "live": float(re.findall(r"^penstock:live_requests\S* (\S+)", text, re.M)[0]),
    }  # fmt: skip
    print(json.dumps(told, indent=1))
    assert len(found) == args.num
    assert told["wrong"] == 0
    assert later == 200
    assert told["live"] == 0
    if args.out is not None:
        args.out.write_text(json.dumps(told, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
