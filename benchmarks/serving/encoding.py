"""What a long text costs before it is refused: memory, seconds, and what other keys and deadlines see of it.

    python benchmarks/serving/encoding.py --penstock OTHER/.venv/bin/penstock --out before.json
    python benchmarks/serving/encoding.py --penstock .venv/bin/penstock --out after.json

Needs nothing of Penstock but its command, so any version can be measured. Linux; texts come of `--seed`. Everything
runs against `penstock serve` with its bundled model, or `--model`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

KEYS = '[flood]\nkey = "kf"\nmax_concurrent = 8\n[good]\nkey = "kg"\n'
LETTERS = "abcdefghijklmnopqrstuvwxyz      "
Asked = dict[str, Any]


@dataclass
class Serving:
    port: int
    process: subprocess.Popen[str]

    def post(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> Asked:
        """Status (0: no answer came), code of the error and seconds."""
        began, status, code = time.perf_counter(), 0, None
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        with suppress(OSError, http.client.HTTPException, ValueError):
            connection.request("POST", path, body, {"content-type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            said = json.loads(answer.read())
            status, code = answer.status, said.get("error", {}).get("code")
        connection.close()
        return {"status": status, "code": code, "seconds": round(time.perf_counter() - began, 3)}

    def memory_bytes(self, name: str = "VmHWM") -> int:
        """Of the API process; 0 if it is gone."""
        with suppress(OSError):
            found = re.search(rf"{name}:\s+(\d+)", Path(f"/proc/{self.process.pid}/status").read_text())
            return int(found[1]) * 1024 if found else 0
        return 0


@contextmanager
def serving(command: str, args: list[str], limit_bytes: int = 0) -> Iterator[Serving]:
    """`limit_bytes`: address space that each process of the server may have."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        keys = Path(folder) / "keys.toml"
        keys.write_text(KEYS)
        line = [command, "serve", *args, "--port", str(port), "--api-keys-file", str(keys), "--no-request-log"]
        line += ["--files-dir", folder]
        if limit_bytes:
            line = ["bash", "-c", f'ulimit -v {limit_bytes >> 10}; exec "$@"', "x", *line]
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert process.stdout is not None
            while f":{port}" not in (said := process.stdout.readline()):
                assert said, f"the server ended with {process.wait()}"
            yield Serving(port, process)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(90)
            except subprocess.TimeoutExpired:
                process.kill()


def together(asked: list[Any]) -> list[Any]:
    """Results of calls that are made at once."""
    results: list[Any] = [None] * len(asked)

    def call(i: int) -> None:
        results[i] = asked[i]()

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def body_of(prompt: str, **more: Any) -> bytes:
    return json.dumps({"prompt": prompt, "max_tokens": 4, **more}).encode()


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


def two_bodies(command: str, args: list[str], limit_bytes: int) -> Asked:
    """Two bodies of 32 MB (16 M newlines each), while another key's requests go on."""
    big = body_of("\n" * 16_000_000)
    short = body_of("Once", ignore_eos=True)
    with serving(command, args, limit_bytes) as server:
        before = server.memory_bytes()
        over, waits = threading.Event(), []

        def others() -> None:
            while not over.is_set():
                waits.append(server.post("/v1/completions", short, key("kg")))
                time.sleep(0.02)

        watching = threading.Thread(target=others)
        watching.start()
        began = time.perf_counter()
        answers = together([lambda: server.post("/v1/completions", big, key("kf"))] * 2)
        took_s = time.perf_counter() - began
        over.set()
        watching.join()
        return {
            "answers": answers, "seconds": round(took_s, 3), "bytes_before": before,
            "peak_bytes": server.memory_bytes(), "server_alive": server.process.poll() is None,
            "other_requests": len(waits), "other_failed": sum(w["status"] != 200 for w in waits),
            "other_longest_s": max((w["seconds"] for w in waits), default=0.0),
        }  # fmt: skip


def another_key(command: str, args: list[str], texts: dict[str, str]) -> Asked:
    """A prompt of 4,940 characters of one key, alone and behind three texts of 5 MB of another."""
    mine = body_of("the cat sat on the mat and saw a dog. " * 130)
    found: Asked = {}
    with serving(command, args) as server:
        found["alone"] = [server.post("/v1/completions", mine, key("kg")) for _ in range(5)]
        for name, text in texts.items():
            flood = partial(server.post, "/v1/completions", body_of(text), key("kf"))

            def later() -> Asked:
                time.sleep(0.5)
                return server.post("/v1/completions", mine, key("kg"))

            found[f"behind_{name}"], *found[f"flood_{name}"] = together([later, flood, flood, flood])
        found["peak_bytes"] = server.memory_bytes()
    return found


def deadline(command: str, args: list[str], texts: dict[str, str]) -> Asked:
    """A time limit of 1 s on a text, on the same as one of a list of prompts that fit, and on counting it."""
    found: Asked = {}
    hurry = key("kg") | {"x-request-timeout": "1"}
    parts = ["the cat sat on the mat and saw a dog. " * 100] * 1024
    with serving(command, args) as server:
        for name, text in texts.items():
            found[f"completion_{name}"] = server.post("/v1/completions", body_of(text), hurry)
            found[f"tokenize_{name}"] = server.post("/tokenize", json.dumps({"prompt": text}).encode(), hurry)
        found["list_of_prompts"] = server.post("/v1/embeddings", json.dumps({"input": parts}).encode(), hurry)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--penstock", default="penstock", help="the command of the version to measure")
    parser.add_argument("--model", help="by default the bundled one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-gib", type=float, default=0.0, help="address space for the two large bodies; 0: any")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rng = random.Random(asked.seed)
    texts = {"letters": "".join(rng.choices(LETTERS, k=5_000_000)), "spaces": " " * 5_000_000}
    args = [asked.model] if asked.model else []
    command = str(Path(asked.penstock).resolve()) if os.sep in asked.penstock else asked.penstock
    found = {
        "command": command, "model": asked.model or "bundled", "seed": asked.seed, "cpus": os.cpu_count(),
        "two_bodies": two_bodies(command, args, int(asked.limit_gib * 2**30)),
        "another_key": another_key(command, args, texts),
        "deadline": deadline(command, args, texts),
    }  # fmt: skip
    text = json.dumps(found, indent=1)
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
