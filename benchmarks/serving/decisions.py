"""100 decisions over one text of 2,000 tokens against 100 chats that are asked the same, over HTTP.

    python -m benchmarks.serving.decisions MODEL --text FILE --out decisions.json

One server, in turns, the prefix cache emptied before each: `decisions` (one call of all questions), `at once` (all
chats sent together: they share the text's cache once the first has computed it, if they wait for it), `in turn` (one
chat after the other, the text cached from the second on) and `alone` (one after the other, the text computed for each,
as without a prefix cache). Chats are asked the decision's own words with `--answer` behind them. Of `in turn` and
`alone` only `--sampled` chats are asked, and their seconds are told for all. Before anything is timed, the decision's
probabilities are compared with those that a chat's first token has in `logprobs`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from benchmarks.common import about, figures, ratios, save, show
from rich.console import Console

from penstock.config import serve_from_kwargs
from penstock.server.live import LiveServer
from penstock.text.decisions import DecisionQuestion, wording

SUBJECTS = ("an animal", "a child", "a house", "the sea", "a king", "money", "a letter", "rain", "bread", "a quarrel")
ASKED = ("Is there", "Does anybody fear", "Does anybody wish for", "Does somebody lose", "Does somebody find",
         "Does it begin with", "Does it end with", "Is it mostly about", "Is somebody hurt by",
         "Does the text praise")  # fmt: skip
WAYS = ("decisions", "at once", "in turn", "alone")
GOAL = 20.0


def questions(num: int) -> list[str]:
    return [f"{ASKED[i // 10 % 10]} {SUBJECTS[i % 10]}?" for i in range(num)]


class Bench:
    """One server and what is asked of it. `used`: tokens that the last way generated."""

    def __init__(self, url: str, text: str, args: argparse.Namespace) -> None:
        self.http = httpx.Client(base_url=url, timeout=3600)
        self.url, self.text, self.args = url, text, args
        self.asked = questions(args.questions)
        self.salts = 0
        self.generated: dict[str, int] = {}

    def reset(self) -> None:
        self.http.post("/admin/reset_prefix_cache", headers={"authorization": "Bearer admin"}).raise_for_status()

    def chat_body(self, question: str, **more: Any) -> dict[str, Any]:
        words = wording(DecisionQuestion("predicate", question), ("Yes", "No")) + self.args.answer
        message = {"role": "user", "content": f"{self.text}\n\n{words}"}
        return {"messages": [message], "temperature": 0, "max_tokens": self.args.max_tokens, **more}

    def decide(self) -> list[dict[str, Any]]:
        listed = [{"type": "predicate", "instructions": question} for question in self.asked]
        answer = self.http.post("/v1/decisions", json={"input": self.text, "questions": listed, "min_label_mass": 0})
        answer.raise_for_status()
        found: list[dict[str, Any]] = answer.json()["answers"]
        return found

    async def _all(self) -> int:
        limits = httpx.Limits(max_connections=self.args.questions)
        async with httpx.AsyncClient(base_url=self.url, timeout=3600, limits=limits) as client:
            bodies = [self.chat_body(question) for question in self.asked]
            answers = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for body in bodies))
        return sum(self._tokens(answer) for answer in answers)

    def _tokens(self, answer: httpx.Response) -> int:
        answer.raise_for_status()
        return int(answer.json()["usage"]["completion_tokens"])

    def run(self, way: str) -> float:
        """Seconds for all questions."""
        self.reset()
        began = time.perf_counter()
        if way == "decisions":
            self.decide()
            return time.perf_counter() - began
        if way == "at once":
            self.generated[way] = asyncio.run(self._all())
            return time.perf_counter() - began
        some = self.asked[:: max(1, len(self.asked) // self.args.sampled)][: self.args.sampled]
        first_s, tokens = 0.0, 0
        for i, question in enumerate(some):
            more = {}
            if way == "alone":
                self.salts += 1
                more = {"cache_salt": f"s{self.salts}"}
            tokens += self._tokens(self.http.post("/v1/chat/completions", json=self.chat_body(question, **more)))
            if i == 0:
                first_s = time.perf_counter() - began
        all_s, scale = time.perf_counter() - began, len(self.asked) / len(some)
        self.generated[way] = round(tokens * scale)
        if way == "alone":
            return all_s * scale
        return first_s + (all_s - first_s) * (len(self.asked) - 1) / (len(some) - 1)

    def check(self, num: int) -> float:
        """The largest difference between a decision's probability and that of a chat's first token."""
        worst = 0.0
        before, self.args.answer = self.args.answer, ""
        for question, answer in list(zip(self.asked, self.decide(), strict=True))[:num]:
            body = self.chat_body(question, max_tokens=1, logprobs=True, top_logprobs=20)
            chosen = self.http.post("/v1/chat/completions", json=body).json()["choices"][0]
            top = chosen["logprobs"]["content"][0]["top_logprobs"]
            yes, no = (sum(math.exp(t["logprob"]) for t in top if t["token"].strip() == word) for word in ("Yes", "No"))
            worst = max(worst, abs(answer["probability"] - yes / (yes + no)))
        self.args.answer = before
        return worst


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("--text", required=True, help="file; its beginning is asked about")
    parser.add_argument("--chars", type=int, default=8000)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=64, help="of a chat's answer")
    parser.add_argument("--answer", default=" Then say why in one sentence.", help="what chats are told besides")
    parser.add_argument("--sampled", type=int, default=10, help="chats that are asked in turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--settings", default="{}", help="of the engine, as JSON")
    parser.add_argument("--out")
    args = parser.parse_args(argv)
    text = Path(args.text).read_text("utf-8")[: args.chars]
    ways = args.ways.split(",")
    config = serve_from_kwargs(
        model=args.model,
        port=0,
        max_model_len=4096,
        request_log=False,
        max_queue_wait=0,
        admin_api_key="admin",
        **json.loads(args.settings),
    )
    with LiveServer(config) as live:
        bench = Bench(live.url, text, args)
        difference = bench.check(10)
        num_tokens = len(bench.http.post("/tokenize", json={"prompt": text}).json()["tokens"])
        samples: dict[str, list[float]] = {way: [] for way in ways}
        for n in range(args.rounds):
            for way in ways[n % len(ways) :] + ways[: n % len(ways)]:
                samples[way].append(bench.run(way))
                print(f"{way}: {samples[way][-1]:.1f} s", file=sys.stderr)
    result = about(
        model=Path(args.model).name, questions=args.questions, text_tokens=num_tokens, max_tokens=args.max_tokens,
        answer=args.answer, sampled=args.sampled, largest_difference=difference, generated=bench.generated,
        seconds={way: figures(found) for way, found in samples.items()},
        times={way: ratios(found, samples["decisions"]) for way, found in samples.items() if way != "decisions"},
        settings=json.loads(args.settings),
    )  # fmt: skip
    save(args.out, result)
    rows = [
        [way, f"{min(found):.1f}", f"{figures(found)['median']:.1f}", str(bench.generated.get(way, 0)),
         f"{min(found) / min(samples['decisions']):.1f}"] for way, found in samples.items()
    ]  # fmt: skip
    show(Console(), f"{args.questions} questions about {num_tokens} tokens",
         ["way", "fastest s", "median s", "generated", "times"], rows)  # fmt: skip
    return 0 if difference < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
