"""What hostile but legal requests do to everybody else: silences of a stream and of /health, and the server's memory.

    python benchmarks/serving/event_loop.py [PENSTOCK] [--out FILE]

PENSTOCK: the command, so that it runs against another version too (default: penstock on the PATH). For each load a
fresh server of the bundled model, a stream of eight samples and a client that asks for /health every 20 ms; then
eight bodies of 3 MB of empty lists, a conversation whose bulk is in its tool calls, and n=64 with 20 logprobs, as a
completion and as a chat. At the end what small requests and a chunk cost: CPU time of the server's process, with
nothing else running. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TICK = os.sysconf("SC_CLK_TCK")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class Server:
    """A server of the bundled model on a port of its own."""

    def __init__(self, command: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._files = tempfile.TemporaryDirectory()
        words = [command, "serve", "--port", str(self.port), "--no-request-log", "--files-dir", self._files.name]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        ends_s = time.monotonic() + 60
        while time.monotonic() < ends_s:
            try:
                if self.ask("GET", "/ready")[0] == 200:
                    return
            except OSError:
                time.sleep(0.1)
        raise SystemExit("the server does not start")

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, int]:
        """Status and bytes of the answer."""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            link.request(method, path, body, {"Content-Type": "application/json"})
            answer = link.getresponse()
            size = 0
            while piece := answer.read(1 << 16):
                size += len(piece)
            return answer.status, size
        finally:
            link.close()

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICK

    def memory_mib(self, name: str = "VmHWM") -> float:
        """VmRSS: resident now; VmHWM: the most so far."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._files.cleanup()


class Others:
    """A stream and a client of /health, and the longest that either waited. Seconds."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._ended = False
        self.stream_s = self.health_s = 0.0
        self._threads = [threading.Thread(target=f, daemon=True) for f in (self._stream, self._health)]
        for thread in self._threads:
            thread.start()

    def reset(self) -> None:
        self.stream_s = self.health_s = 0.0

    def _stream(self) -> None:
        body = {"prompt": "Once upon", "max_tokens": 1500, "ignore_eos": True, "stream": True, "temperature": 1, "n": 8}
        while not self._ended:
            link = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=300)
            link.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
            answer = link.getresponse()
            last_s = time.monotonic()
            while answer.readline() and not self._ended:
                now_s = time.monotonic()
                self.stream_s = max(self.stream_s, now_s - last_s)
                last_s = now_s
            link.close()

    def _health(self) -> None:
        while not self._ended:
            began_s = time.monotonic()
            self._server.ask("GET", "/health")
            self.health_s = max(self.health_s, time.monotonic() - began_s)
            time.sleep(0.02)

    def stop(self) -> None:
        self._ended = True
        for thread in self._threads:
            thread.join(30)


def eight_bodies(server: Server) -> list[tuple[int, int]]:
    body = b'{"zz":[' + b",".join([b"[]"] * 990_000) + b"]}"
    answers: list[tuple[int, int]] = []
    threads = [threading.Thread(target=lambda: answers.append(server.ask("POST", COMPLETIONS, body))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def tool_calls(server: Server) -> list[tuple[int, int]]:
    arguments = json.dumps({"text": "x" * 2000})
    talk: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    for turn in range(200):
        calls = [
            {"id": f"c{turn}-{i}", "type": "function", "function": {"name": "f", "arguments": arguments}}
            for i in range(10)
        ]  # fmt: skip
        talk.append({"role": "assistant", "content": "", "tool_calls": calls})
        talk += [{"role": "tool", "tool_call_id": c["id"], "content": "y"} for c in calls]
    return [server.ask("POST", CHAT, json.dumps({"messages": talk, "max_tokens": 1}).encode())]


def many_logprobs(path: str, max_tokens: int) -> Callable[[Server], list[tuple[int, int]]]:
    body: dict[str, Any] = {"n": 64, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 1}
    if path == CHAT:
        body |= {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20}
    else:
        body |= {"prompt": "x", "logprobs": 20}
    return lambda server: [server.ask("POST", path, json.dumps(body).encode())]


LOADS: dict[str, Callable[[Server], list[tuple[int, int]]]] = {
    "eight 3 MB bodies of empty lists": eight_bodies,
    "a conversation of tool calls": tool_calls,
    "n=64, 20 logprobs, 600 tokens, completion": many_logprobs(COMPLETIONS, 600),
    "n=64, 20 logprobs, 600 tokens, chat": many_logprobs(CHAT, 600),
    "n=64, 20 logprobs, 1,900 tokens, chat": many_logprobs(CHAT, 1900),
}


def loads(command: str) -> dict[str, Any]:
    found = {}
    for name, load in LOADS.items():
        server = Server(command)
        others = Others(server)
        try:
            time.sleep(1.5)
            others.reset()
            before = server.memory_mib("VmRSS")
            began_s = time.monotonic()
            answers = load(server)
            took_s = time.monotonic() - began_s
            time.sleep(0.3)
            found[name] = {
                "answers": answers, "took_s": round(took_s, 2), "stream_silence_s": round(others.stream_s, 3),
                "health_s": round(others.health_s, 3), "before_mib": round(before),
                "peak_mib": round(server.memory_mib()),
            }  # fmt: skip
        finally:
            others.stop()
            server.stop()
        print(f"{name}: {found[name]}", flush=True)
    return found


def small(command: str) -> dict[str, float]:
    """CPU time of the server's process per small request, and per chunk of 20 streams."""
    server = Server(command)
    try:
        body = json.dumps({"messages": [{"role": "user", "content": "x" * 800}], "max_tokens": 1}).encode()
        for _ in range(50):
            server.ask("POST", CHAT, body)
        began_s = server.cpu_s()
        for _ in range(1000):
            server.ask("POST", CHAT, body)
        request_ms = server.cpu_s() - began_s  # of a thousand: as many seconds as milliseconds each
        asked = {"prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": True, "temperature": 1}
        threads = [
            threading.Thread(target=server.ask, args=("POST", COMPLETIONS, json.dumps(asked).encode()))
            for _ in range(20)
        ]  # fmt: skip
        began_s = server.cpu_s()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        chunk_us = (server.cpu_s() - began_s) * 1e6 / (20 * 1000)
    finally:
        server.stop()
    return {"request_ms": round(request_ms, 3), "chunk_us": round(chunk_us, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("penstock", nargs="?", default="penstock")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {"loads": loads(args.penstock), "small": small(args.penstock)}
    print(f"small requests and chunks: {found['small']}")
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
