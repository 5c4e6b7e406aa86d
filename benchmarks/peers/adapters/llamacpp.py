"""llama.cpp through its own server: token ids to /completion, tokens back as a stream.

Options: `server` (the binary), `slots`, `context`, `is_ik` (ik_llama.cpp's server, which divides the context among the
slots, and names tokens only after the change that README.md makes). The model is `<model>-<precision>.gguf`.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from peer_worker import Engine, Recorder, Request, file_bytes, serve

LLAMA_CPP, IK = ("--kv-unified", "--no-webui"), ("--webui", "none", "--flash-attn", "off")
UNKNOWN = -1
"""Stands for a token that the server counted but never named: one whose text is not whole yet."""


class LlamaCpp(Engine):
    def start(self, model: str, precision: str, threads: int, options: dict[str, Any]) -> None:
        binary = options.get("server") or os.environ["LLAMA_SERVER"]
        slots = int(options.get("slots", 32))
        file = Path(f"{model}-{precision}.gguf")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.server = subprocess.Popen(
            [binary, "-m", str(file), "--port", str(self.port), "-t", str(threads), "-tb", str(threads),
             "-np", str(slots), "-c", str(options.get("context", 32768)), "-b", "2048", "-ub", "512",
             "--threads-http", str(slots + 8), *(IK if options.get("is_ik") else LLAMA_CPP)],
            stdin=subprocess.DEVNULL, stdout=sys.stderr,
        )  # fmt: skip
        self.weight_bytes = file_bytes(file)
        self.pool = ThreadPoolExecutor(64)
        told = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False)
        self.version = ((told.stdout + told.stderr).strip().splitlines() or ["llama-server"])[0]
        while not self._is_healthy():
            if self.server.poll() is not None:
                raise RuntimeError(f"llama-server ended with status {self.server.returncode}")
            time.sleep(0.05)

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def run(self, requests: list[Request], recorder: Recorder) -> None:
        jobs = [self.pool.submit(self._one, n, request, recorder) for n, request in enumerate(requests)]
        for job in jobs:
            job.result()

    def _one(self, number: int, request: Request, recorder: Recorder) -> None:
        prompt, new = request
        body = {
            "prompt": prompt, "n_predict": new, "ignore_eos": True, "temperature": 0, "top_k": 1, "samplers": ["top_k"],
            "cache_prompt": True, "return_tokens": True, "stream": True,
        }  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=3600)
        try:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(answer.read(500).decode("utf-8", "replace"))
            for line in answer:
                if line.startswith(b"data: {"):
                    self._take(number, json.loads(line[6:]), recorder)
        finally:
            connection.close()

    @staticmethod
    def _take(number: int, event: dict[str, Any], recorder: Recorder) -> None:
        """`tokens_predicted` counts all so far; tokens whose text is not whole yet are left out of `tokens`."""
        named = event.get("tokens") or []
        missing = event.get("tokens_predicted", 0) - len(recorder.tokens[number]) - len(named)
        recorder.add(number, [UNKNOWN] * max(0, missing) + named)

    def processes(self) -> list[int]:
        return [self.server.pid]

    def stop(self) -> None:
        self.server.terminate()
        self.server.wait(10)


if __name__ == "__main__":
    serve(LlamaCpp())
