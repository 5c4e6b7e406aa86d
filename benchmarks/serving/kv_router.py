"""Other projects' routers in front of two servers: does a text go to the one that has its blocks?

    pip install vllm-router ai-dynamo-runtime        # into an environment of its own
    python -m benchmarks.serving.kv_router MODEL --environment FOLDER --out FILE.json

vllm-router (`--policy kv_aware`) sends requests itself; Dynamo's indexer (`python -m dynamo.indexer`) is asked, and the
request goes where most is. Each hears the servers' events, and nothing else tells it where these texts are: they were
sent to one server behind its back. `found` of `asked` went to the right one:

    told      texts on either server
    moved     after the first server has evicted its texts, and the second one has got them
    gap       batches were lost between server and router; it asks for them again
    blind     the same, without an address to ask (the control: found by chance at most)
    late      the router began after the texts were there
    restart   a server was replaced: what the first one had is not looked for any more
    tier      evicted to main memory (`--enable-hierarchical-cache`): still looked for there

And conversations of several turns through the router, beside round robin: the share of the prompts' tokens that
servers had cached.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import zmq
from benchmarks.common import about, save
from rich.console import Console

BLOCK = 16
WORDS = ("ann", "bob", "cat", "dog", "elk", "fox", "gnu", "hen", "ivy", "jay", "kid", "newt", "owl", "pig", "yak")
SETTLE_S = 0.4
"""From an answer until a router has heard what it left behind."""


def text_of(number: int, words: int = 60) -> str:
    drawn = random.Random(number)
    return f"Story {number}. " + " ".join(drawn.choice(WORDS) for _ in range(words))


def free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [one.getsockname()[1] for one in sockets]


class Replica:
    """A `penstock serve` of its own, with events on."""

    def __init__(self, model: str, place: str, blocks: int, *more: str) -> None:
        port, events, replay = free_ports(3)
        self.url, self.name = f"http://127.0.0.1:{port}", Path(model).name
        self.events, self.replay = f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}"
        said = {"enable_kv_cache_events": True, "endpoint": self.events, "replay_endpoint": self.replay}
        self._command = [
            sys.executable, "-m", "penstock", "serve", model, "--port", str(port), "--block-size", str(BLOCK),
            "--max-model-len", "512", "--num-gpu-blocks-override", str(blocks), "--max-num-seqs", "4",
            "--kv-events-config", json.dumps(said | {"include_token_ids": True}), *more,
        ]  # fmt: skip
        self._log = Path(place, f"{port}.log")
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        until(lambda: httpx.get(self.url + "/health").status_code == 200, self._log)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)

    def ask(self, text: str, max_tokens: int = 1) -> dict[str, Any]:
        return complete(self.url, self.name, text, max_tokens)

    def num_answered(self) -> float:
        lines = httpx.get(self.url + "/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total"))

    def fill(self, first: int, texts: int = 8) -> None:
        """Other texts, until the memory holds nothing else."""
        for number in range(texts):
            self.ask(text_of(first + number))


def complete(url: str, model: str, text: str, max_tokens: int) -> dict[str, Any]:
    body = {"model": model, "prompt": text, "max_tokens": max_tokens, "temperature": 0}
    answer = httpx.post(url + "/v1/completions", json=body, timeout=120)
    answer.raise_for_status()
    return dict(answer.json())


def until(ready: Callable[[], bool], log: Path, limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while True:
        with suppress(httpx.HTTPError):
            if ready():
                return
        if time.monotonic() > end:
            raise TimeoutError(log.read_text(errors="replace")[-2000:])
        time.sleep(0.1)


class LossyLink:
    """Events on their way from a server to a router. While `loses`, none arrive."""

    def __init__(self, source: str) -> None:
        self.address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
        self.loses = self._ends = False
        self._context = zmq.Context()
        self._in, self._out = self._context.socket(zmq.SUB), self._context.socket(zmq.PUB)
        self._in.connect(source)
        self._in.setsockopt_string(zmq.SUBSCRIBE, "")
        self._out.bind(self.address)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends:
            if self._in.poll(50):
                message = self._in.recv_multipart()
                if not self.loses:
                    self._out.send_multipart(message)

    def stop(self) -> None:
        self._ends = True
        self._thread.join()
        self._context.destroy(linger=0)


class VllmRouter:
    """https://pypi.org/project/vllm-router. `sources`: where each server's events come from; `replay`: may it ask."""

    package = "vllm-router"

    def __init__(
        self, environment: Path, place: str, replicas: Sequence[Replica], sources: Sequence[str], *,
        replay: bool = True, policy: str = "kv_aware",
    ) -> None:  # fmt: skip
        port, metrics = free_ports(2)
        self._url, self._replicas = f"http://127.0.0.1:{port}", replicas
        command = [
            str(environment / "bin" / "vllm-router"), "--host", "127.0.0.1", "--port", str(port), "--policy", policy,
            "--prometheus-port", str(metrics), "--worker-urls", *(r.url for r in replicas),
        ]  # fmt: skip
        if policy == "kv_aware":
            command += ["--kv-event-block-size", str(BLOCK), "--kv-event-model", replicas[0].name]
            for one, source in zip(replicas, sources, strict=True):
                command += ["--kv-event-source", f"{one.url}={source}"]
                command += ["--kv-event-replay-source", f"{one.url}={one.replay}"] if replay else []
        log = Path(place, f"{port}.log")
        with log.open("wb") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file)
        until(lambda: httpx.get(self._url + "/health").status_code == 200, log)
        time.sleep(SETTLE_S)

    def ask(self, text: str, max_tokens: int = 1) -> tuple[int | None, dict[str, Any]]:
        """(the number of the server that answered, its answer)."""
        before = [one.num_answered() for one in self._replicas]
        answer = complete(self._url, self._replicas[0].name, text, max_tokens)
        (which,) = (n for n, one in enumerate(self._replicas) if one.num_answered() > before[n])
        return which, answer

    def where(self, text: str) -> int | None:
        return self.ask(text)[0]

    def replaced(self, number: int) -> None:
        """It sees that itself: numbers begin again."""

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)


class DynamoIndexer:
    """https://pypi.org/project/ai-dynamo-runtime, its standalone indexer."""

    package = "ai-dynamo-runtime"

    def __init__(
        self, environment: Path, place: str, replicas: Sequence[Replica], sources: Sequence[str], *, replay: bool = True
    ) -> None:
        (port,) = free_ports(1)
        self._url, self._replicas, self._turn = f"http://127.0.0.1:{port}", replicas, 0
        log = Path(place, f"{port}.log")
        with log.open("wb") as file:
            command = [str(environment / "bin" / "python"), "-m", "dynamo.indexer", "--port", str(port)]
            self._process = subprocess.Popen(command, stdout=file, stderr=file)
        until(lambda: httpx.get(self._url + "/workers").status_code == 200, log)
        self._said = [
            {"instance_id": number, "endpoint": source, "model_name": one.name, "block_size": BLOCK}
            | ({"replay_endpoint": one.replay} if replay else {})
            for number, (one, source) in enumerate(zip(replicas, sources, strict=True))
        ]
        for said in self._said:
            httpx.post(self._url + "/register", json=said).raise_for_status()
        time.sleep(SETTLE_S)

    def replaced(self, number: int) -> None:
        """It passes over numbers that it has seen: a new server has to be registered."""
        who = {"instance_id": number, "model_name": self._said[number]["model_name"]}
        httpx.post(self._url + "/unregister", json=who).raise_for_status()
        httpx.post(self._url + "/register", json=self._said[number]).raise_for_status()

    def where(self, text: str) -> int | None:
        """Who has most of it, by the indexer's tree; None: nobody has any."""
        body = {"model": self._replicas[0].name, "prompt": text}
        ids = httpx.post(self._replicas[0].url + "/tokenize", json=body).json()["tokens"]
        said = {"token_ids": ids, "model_name": self._replicas[0].name}
        found = httpx.post(self._url + "/query", json=said).json()["instances"]
        best = max(found.items(), key=lambda item: [item[1][medium] for medium in ("gpu", "cpu", "disk")], default=None)
        return None if best is None or not best[1]["longest_matched"] else int(best[0])

    def ask(self, text: str, max_tokens: int = 1) -> tuple[int | None, dict[str, Any]]:
        which = self.where(text)
        self._turn += which is None
        return which, self._replicas[self._turn % 2 if which is None else which].ask(text, max_tokens)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)


ROUTERS: dict[str, type[VllmRouter | DynamoIndexer]] = {one.package: one for one in (VllmRouter, DynamoIndexer)}


@contextmanager
def standing(*made: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for one in made:
            stack.callback(one.stop)
        yield


def found(router: Any, where: dict[str, int]) -> dict[str, int]:
    time.sleep(SETTLE_S)
    return {"asked": len(where), "found": sum(router.where(text) == number for text, number in where.items())}


def shown(kind: type[Any], environment: Path, model: str, place: str, texts: int, blocks: int) -> dict[str, Any]:
    """Every case of one router, on servers of its own."""
    drawn = random.Random(0)
    a, b = (Replica(model, place, blocks) for _ in range(2))
    result: dict[str, Any] = {}

    def placed(first: int) -> dict[str, int]:
        where = {text_of(first + n): drawn.randrange(2) for n in range(texts)}
        for text, number in where.items():
            (a, b)[number].ask(text)
        return where

    with standing(a, b):
        pair, direct = (a, b), (a.events, b.events)
        with standing(router := kind(environment, place, pair, direct)):
            result["told"] = found(router, placed(0))
            only_a = {text_of(100 + n): 1 for n in range(texts)}
            for text in only_a:
                a.ask(text)
            a.fill(1000, blocks // 3)
            for text in only_a:
                b.ask(text)
            result["moved"] = found(router, only_a)
        for name, replay in (("gap", True), ("blind", False)):
            links = [LossyLink(one.events) for one in pair]
            with standing(
                router := kind(environment, place, pair, [link.address for link in links], replay=replay), *links
            ):
                for one in pair:
                    one.ask(text_of(200))
                for link in links:
                    link.loses = True
                where = placed(300 if replay else 400)
                time.sleep(SETTLE_S)
                for one, link in zip(pair, links, strict=True):
                    link.loses = False
                    one.ask(text_of(500 + replay))  # the next batch shows that some are missing
                result[name] = found(router, where)
        where = placed(600)
        with standing(router := kind(environment, place, pair, direct)):
            for one in pair:
                one.ask(text_of(700))  # whoever subscribes hears of a gap with the first batch
            result["late"] = found(router, where)
            a.stop()
            a.start()
            router.replaced(0)
            time.sleep(1.0)
            for text, number in where.items():
                if number == 0:
                    b.ask(text)
            result["restart"] = found(router, dict.fromkeys(where, 1))
    a, b = (Replica(model, place, blocks, "--enable-hierarchical-cache", "--swap-space", "1") for _ in range(2))
    with standing(a, b, router := kind(environment, place, (a, b), (a.events, b.events))):
        where = placed(800)
        for one in (a, b):
            one.fill(2000, blocks // 3)
        result["tier"] = found(router, where)
    return result


def conversations(
    kind: type[Any], environment: Path, model: str, place: str, blocks: int, turns: int, **more: Any
) -> dict[str, Any]:
    """Six, taking turns in an order that changes; an answer and a new sentence make the next prompt."""
    a, b = (Replica(model, place, blocks) for _ in range(2))
    prompts, cached, seen, order = [text_of(n, 40) for n in range(6)], 0, 0, random.Random(1)
    with standing(a, b, router := kind(environment, place, (a, b), (a.events, b.events), **more)):
        for turn in range(turns):
            for number in order.sample(range(6), 6):
                _, answer = router.ask(prompts[number], 8)
                time.sleep(SETTLE_S)
                if turn:
                    cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                    seen += answer["usage"]["prompt_tokens"]
                prompts[number] += answer["choices"][0]["text"] + " " + text_of(50 * turn + number, 10)
    return {"prompt_tokens": seen, "cached_tokens": cached, "share": round(cached / seen, 3)}


def version_in(environment: Path, package: str) -> str | None:
    folders = [str(path) for path in (environment / "lib").glob("python*/site-packages")]
    return next((one.version for one in metadata.distributions(name=package, path=folders)), None)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--environment", type=Path, required=True, help="of Python, where the routers are installed")
    parser.add_argument("--texts", type=int, default=6, help="in each case")
    parser.add_argument("--blocks", type=int, default=96, help="of KV memory of each server")
    parser.add_argument("--turns", type=int, default=4, help="of each conversation")
    parser.add_argument("--out")
    args = parser.parse_args(argv)
    console, result = Console(), dict[str, Any]()
    with tempfile.TemporaryDirectory() as place:
        for name, kind in ROUTERS.items():
            if (version := version_in(args.environment, name)) is None:
                console.print(f"{name} is not installed in {args.environment}")
                continue
            cases = shown(kind, args.environment, args.model, place, args.texts, args.blocks)
            talk = conversations(kind, args.environment, args.model, place, args.blocks, args.turns)
            result[name] = {"version": version, "cases": cases, "conversations": talk}
            if kind is VllmRouter:
                result["round_robin"] = conversations(
                    kind, args.environment, args.model, place, args.blocks, args.turns, policy="round_robin"
                )
    console.print_json(json.dumps(result))
    save(
        args.out,
        about(asked={"model": Path(args.model).name, "texts": args.texts, "blocks": args.blocks}, found=result),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
