"""Servers of blocks that are killed, stopped and lie while engines use two of them (`store_soak --remote`).

Servers are killed -9 at drawn moments, some after they were stopped for a while, and begin anew over their folders; a
share of what they send was changed, cut or another block's, or is said not to be there; between two lives files change,
too. Engines answer the same texts on and on, every second one with a folder before the servers. Every answer is held
against that of an engine without a store.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.serving.store_soak import NUM_TEXTS, SHARE, answer, answers_of, engine, texts

NUM_SERVERS, KILLS_EACH = 2, 10
"""Kills while one engine runs."""
STUCK_S = 20.0
_FATES = ("flip", "cut", "other", "gone")


def server(folder: str, secret: str, port: int, seed: int) -> int:
    """Keeps blocks, and lies."""
    from penstock.launch.block_server import BlockServer, FolderShelf, listen
    from penstock.launch.kv_store import files_of, open_served
    from penstock.runner.shared_secret import read_secrets

    rng, lock = random.Random(seed), threading.Lock()

    class LyingShelf(FolderShelf):
        def read(self, path: str) -> bytes | None:
            with lock:
                fate = rng.choice(_FATES) if rng.random() < SHARE else ""
            data = super().read(path)
            if data is None or not fate:
                return data
            sys.stdout.write(json.dumps({"lie": fate}) + "\n")  # in one piece: there are several threads
            sys.stdout.flush()
            changed = bytearray(data)
            changed[-50] ^= 1
            other = next((p for p, _ in files_of(Path(folder)) if p != path), path)
            return {"flip": bytes(changed), "cut": data[:-7], "other": super().read(other), "gone": None}[fate]

    open_served(Path(folder))
    sock = listen(f"127.0.0.1:{port}", anywhere=False)
    found = BlockServer(sock, read_secrets(Path(secret)).connection, LyingShelf(Path(folder), files_of), 2 << 20)
    print(json.dumps({"port": sock.getsockname()[1]}), flush=True)
    found.run()
    return 0


class Server:
    """A process, and what it said it had lied."""

    def __init__(self, folder: Path, secret: Path, rng: random.Random) -> None:
        self.folder, self.port, self.lies = folder, 0, Counter[str]()
        self._secret, self._rng = secret, rng
        self.begin()

    def begin(self) -> None:
        command = [sys.executable, "-m", "benchmarks.serving.remote_soak", "--server", str(self.folder)]
        command += [str(self._secret), str(self.port), str(self._rng.getrandbits(32))]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        self.port = json.loads(self.process.stdout.readline())["port"]
        self._thread = threading.Thread(target=self._hear, args=(self.process.stdout,), daemon=True)
        self._thread.start()

    def _hear(self, lines: Any) -> None:
        for line in lines:
            if line.endswith("}\n"):
                self.lies[json.loads(line)["lie"]] += 1

    def kill(self) -> None:
        self.process.kill()
        self._thread.join()
        with self.process:  # waits for it, and closes what it spoke through
            pass

    def harm(self) -> int:
        """Some of its files. Returns how many."""
        places = [path for path in sorted(self.folder.glob("*/*/*")) if not path.name.startswith(".")]
        chosen = [path for path in places if self._rng.random() < SHARE / 5]
        for path in chosen:
            data = bytearray(path.read_bytes())
            data[-50:-49] = b"x"
            path.write_bytes(data if self._rng.random() < 0.5 else data[:-7])
        return len(chosen)


class Asked:
    """An engine in a process of its own, what it answered, and what went wrong."""

    def __init__(self, offload: str, secret: Path, seed: int, right: list[list[int]]) -> None:
        self.answers = self.wrong = 0
        self.slowest_s = 0.0
        self.last: dict[str, Any] = {"read": 0, "lost": 0, "misses": {}}
        self.ready = threading.Event()
        self._right = right
        command = [sys.executable, "-m", "benchmarks.serving.remote_soak", "--engine", offload, str(secret), str(seed)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._thread = threading.Thread(target=self._hear, daemon=True)
        self._thread.start()

    def _hear(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith("}\n"):
                continue  # cut by the kill
            news = json.loads(line)
            self.ready.set()
            if "answers" in news:
                self.answers += len(news["answers"])
                self.wrong += sum(tokens != self._right[int(n)] for n, tokens in news["answers"].items())
                self.slowest_s = max(self.slowest_s, news["s"])
                self.last = news

    def lives(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        self._process.kill()
        self._thread.join()
        with self._process:
            pass


def soak(kills: int, seed: int, place: Path, say: Any = lambda text: None) -> dict[str, Any]:
    """So many kills of servers."""
    from penstock.runner.block_files import is_whole
    from penstock.runner.shared_secret import make_secret, read_secrets

    right = answers_of(engine(), texts(1), range(NUM_TEXTS))
    rng, secret = random.Random(seed), place / "secret"
    make_secret(secret)
    servers = [Server(place / f"served{n}", secret, rng) for n in range(NUM_SERVERS)]
    told: dict[str, Any] = {
        "kills": 0, "stops": 0, "engines": 0, "files_harmed": 0, "answers": 0, "wrong": 0, "stuck": 0, "slowest_s": 0.0,
        "blocks_read": 0, "blocks_lost": 0, "misses": Counter(),
    }  # fmt: skip
    offload = " ".join(f"remote:127.0.0.1:{each.port}" for each in servers)
    try:
        while told["kills"] < kills:
            folder = f"disk:{place / 'kv'},1MiB " if told["engines"] % 2 else ""
            asked = Asked(folder + offload, secret, rng.getrandbits(32), right)
            told["engines"] += 1
            if not asked.ready.wait(60):
                raise RuntimeError("an engine did not start")
            for _ in range(min(KILLS_EACH, kills - told["kills"])):
                time.sleep(rng.uniform(0.05, 1.0))
                victim = rng.choice(servers)
                if rng.random() < 0.2:
                    told["stops"] += 1
                    os.kill(victim.process.pid, signal.SIGSTOP)
                    time.sleep(rng.uniform(0.1, 3.0))
                victim.kill()
                told["kills"] += 1
                told["files_harmed"] += victim.harm()
                time.sleep(rng.choice([0.0, 0.0, rng.uniform(0.0, 1.0)]))
                victim.begin()
                answers, wrong = told["answers"] + asked.answers, told["wrong"] + asked.wrong
                say(f"{told['kills']} kills, {answers} answers, {wrong} wrong")
            if not asked.lives():
                raise RuntimeError("an engine died with a server")
            asked.end()
            told["answers"] += asked.answers
            told["wrong"] += asked.wrong
            told["stuck"] += asked.slowest_s > STUCK_S
            told["slowest_s"] = max(told["slowest_s"], round(asked.slowest_s, 2))
            told["blocks_read"] += asked.last["read"]
            told["blocks_lost"] += asked.last["lost"]
            told["misses"].update(asked.last["misses"])
    finally:
        for each in servers:
            each.kill()
    told["lies"] = dict(sum((each.lies for each in servers), Counter[str]()))
    for each in servers:
        each.begin()  # what was half written goes
        each.kill()
    told["left_half_written"] = sum(len(list(each.folder.glob("*/*/.*.part"))) for each in servers)
    key = read_secrets(secret).blocks
    files = [(each.folder, path) for each in servers for path in each.folder.glob("*/*/*") if path.name[0] != "."]
    told["blocks"] = len(files)
    told["damaged_and_not_read_yet"] = sum(not is_whole(at, str(path.relative_to(at)), key) for at, path in files)
    return told


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", nargs=4)
    parser.add_argument("--engine", nargs=3)
    args = parser.parse_args(argv)
    if args.server:
        folder, secret, port, seed = args.server
        return server(folder, secret, int(port), int(seed))
    offload, secret, seed = args.engine
    return answer(engine(kv_offload=offload, kv_offload_secret_file=secret), random.Random(int(seed)))


if __name__ == "__main__":
    sys.exit(main())
