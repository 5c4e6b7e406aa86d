"""Kill servers that share a folder of batches, and fill its disk, and count what every line was answered.

    python tools/batch_soak.py --seconds 290 --apart 1.5 --seed 11 --out RESULT.json     as in benchmarks/results
    python tools/batch_soak.py --seconds 20                                              a quick look

Two servers (`--servers`) with the bundled model work on one `--files-dir`. Batches of greedy and of seeded lines are
sent through either. Meanwhile, at random times by `--seed`: a server and its engine get SIGKILL and another one is
started in its place a moment later; one is stopped for some seconds (SIGSTOP); the disk is filled to its last byte for
some seconds (it is a tmpfs of 64 MB, which needs root; without root there are no such times, and the result says so).
In the end every batch has to complete, and each of its lines to be there exactly once, with the text that an
undisturbed server gave it. The exit status is 1 if one is not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

FLAGS = ["--max-model-len", "256", "--num-gpu-blocks-override", "128", "--max-num-seqs", "8", "--threads", "1"]
DISK_BYTES = 64 << 20
LINES = 150
BODIES = 40


def body(number: int) -> dict[str, Any]:
    """Greedy, and drawn with a seed, in turn. The same number: the same text."""
    drawn = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0}
    return {"model": "nano", "prompt": f"Once there were {number} cats. They", "max_tokens": 20 + number,
            "ignore_eos": True, **drawn}  # fmt: skip


class Server:
    """`penstock serve` on the shared folder, with all its processes in a group of their own."""

    def __init__(self, files: Path, log: Path) -> None:
        self._command = [sys.executable, "-m", "penstock", "serve", "--port", "0", "--served-model-name", "nano",
                         "--files-dir", str(files), *FLAGS]  # fmt: skip
        self._log = log
        self.process: subprocess.Popen[str] | None = None
        self.url = ""
        self.stopped = False

    def start(self) -> None:
        with self._log.open("a") as log:
            self.process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if " on http" not in line:
            raise RuntimeError(f"the server did not start; see {self._log}: {self._log.read_text()[-500:]}")
        self.url = line.split(" on ")[1].split()[0]
        self.stopped = False

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait()
            self.process = None
        self.stopped = number == signal.SIGSTOP

    @property
    def answers(self) -> bool:
        return self.process is not None and not self.stopped


@contextmanager
def disk() -> Iterator[tuple[Path, bool]]:
    """A folder, and whether it is a disk of its own that may be filled."""
    folder = Path(tempfile.mkdtemp(prefix="batch-soak-"))
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder)]
    own = os.geteuid() == 0 and subprocess.run(command, check=False, capture_output=True).returncode == 0
    try:
        yield folder, own
    finally:
        if own:
            subprocess.run(["umount", "-l", str(folder)], check=False)
        shutil.rmtree(folder, ignore_errors=True)


class Soak:
    def __init__(self, folder: Path, own_disk: bool, num_servers: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.files, self.ballast, self.own_disk = folder / "files", folder / "ballast", own_disk
        self.log = Path(tempfile.mkdtemp(prefix="batch-soak-log-")) / "servers.log"
        self.servers = [Server(self.files, self.log) for _ in range(num_servers)]
        self.happened: Counter[str] = Counter()
        self.batches: dict[str, list[int]] = {}
        self.expected: list[str] = []
        self.due: list[tuple[float, str, int]] = []
        self.client = httpx.Client(timeout=30)
        self.num_faulty = 0

    # -- what clients do -----------------------------------------------------------------------------------------

    def ask(self, method: str, path: str, **more: Any) -> httpx.Response | None:
        """Through any server that can answer; None if it could not (also since it died meanwhile)."""
        able = [server for server in self.servers if server.answers]
        if not able:
            return None
        try:
            return self.client.request(method, self.rng.choice(able).url + path, **more)
        except httpx.HTTPError:
            return None

    def learn(self) -> None:
        """The texts of an undisturbed server."""
        for number in range(BODIES):
            answer = self.ask("POST", "/v1/completions", json=body(number))
            assert answer is not None
            assert answer.status_code == 200, answer.text
            self.expected.append(answer.json()["choices"][0]["text"])

    def send_batch(self) -> None:
        numbers = [self.rng.randrange(BODIES) for _ in range(LINES)]
        lines = [
            json.dumps({"custom_id": f"q{i}", "method": "POST", "url": "/v1/completions", "body": body(number)})
            for i, number in enumerate(numbers)
        ]
        form = {"file": ("in.jsonl", "\n".join(lines).encode())}
        sent = self.ask("POST", "/v1/files", files=form, data={"purpose": "batch"})
        if sent is None or sent.status_code != 200:
            return self._refused(sent)
        wanted = {"input_file_id": sent.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        made = self.ask("POST", "/v1/batches", json=wanted)
        if made is None or made.status_code != 200:
            return self._refused(made)
        self.batches[made.json()["id"]] = numbers
        deleted = self.ask("DELETE", f"/v1/files/{wanted['input_file_id']}")
        if deleted is not None and deleted.status_code == 200 and not self._has_ended(made.json()["id"]):
            self.fault(f"the input of {made.json()['id']} was deleted under it")
        return None

    def _has_ended(self, batch_id: str) -> bool:
        found = self.ask("GET", f"/v1/batches/{batch_id}")
        return found is None or found.json()["status"] == "completed"

    def _refused(self, answer: httpx.Response | None) -> None:
        if answer is None:
            self.happened["requests_cut_off"] += 1
        else:
            self.happened[f"status_{answer.status_code}"] += 1
            if answer.status_code != 507:
                self.fault(f"{answer.status_code}: {answer.text[:200]}")

    def fault(self, text: str) -> None:
        self.num_faulty += 1
        print("FAULT:", text, flush=True)

    # -- what happens to them ------------------------------------------------------------------------------------

    def disturb(self) -> None:
        """One of what may happen, and when it is over."""
        now, index = time.monotonic(), self.rng.randrange(len(self.servers))
        server = self.servers[index]
        kind = self.rng.choice(["kill", "kill", "kill", "stop", "full", "full"])
        lasts_s = self.rng.uniform(0.5, 4.0)
        if kind == "full":
            if self.own_disk and not self.ballast.exists():
                self._fill()
                self.due.append((now + lasts_s, "empty", 0))
                self.happened["disk_full"] += 1
        elif server.answers:
            server.signal(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            self.happened["kills" if kind == "kill" else "stops"] += 1
            self.due.append((now + lasts_s, "start" if kind == "kill" else "continue", index))

    def _fill(self) -> None:
        with self.ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            for size in (1 << 20, 1 << 12):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)):
                        pass

    def mend(self, everything: bool = False) -> None:
        for item in [item for item in self.due if everything or item[0] <= time.monotonic()]:
            self.due.remove(item)
            _, what, index = item
            if what == "empty":
                self.ballast.unlink(missing_ok=True)
            elif what == "start":
                self.servers[index].start()
            else:
                self.servers[index].signal(signal.SIGCONT)

    # -- the whole -----------------------------------------------------------------------------------------------

    def run(self, seconds: float, apart_s: float) -> dict[str, Any]:
        for server in self.servers:
            server.start()
        self.learn()
        began = time.monotonic()
        next_trouble = began + apart_s
        while time.monotonic() < began + seconds:
            self.mend()
            if time.monotonic() >= next_trouble:
                self.disturb()
                next_trouble = time.monotonic() + apart_s * self.rng.uniform(0.3, 1.7)
            if self._num_open() < 3:
                self.send_batch()
            time.sleep(0.1)
        self.mend(everything=True)
        self._wait()
        lines = sum(self.check(batch_id, numbers) for batch_id, numbers in self.batches.items())
        return {
            "seconds": seconds, "servers": len(self.servers), "disk_is_filled": self.own_disk,
            "batches": len(self.batches), "lines": LINES * len(self.batches), "lines_answered_once_and_right": lines,
            "faulty": self.num_faulty, **{name: self.happened[name] for name in sorted(self.happened)},
        }  # fmt: skip

    def _num_open(self) -> int:
        found = self.ask("GET", "/v1/batches", params={"limit": 10})
        if found is None or found.status_code != 200:
            return 99
        return sum(batch["status"] != "completed" for batch in found.json()["data"])

    def _wait(self) -> None:
        """Until all have ended, or nothing has moved for a minute."""
        seen, since = "", time.monotonic()
        while time.monotonic() < since + 60:
            found = self.ask("GET", "/v1/batches", params={"limit": 1000})
            assert found is not None
            told = [(b["status"], b["request_counts"]) for b in found.json()["data"]]
            if all(status == "completed" for status, _ in told):
                return
            if str(told) != seen:
                seen, since = str(told), time.monotonic()
            time.sleep(0.2)

    def check(self, batch_id: str, numbers: list[int]) -> int:
        """Lines that were answered once, with the right text."""
        batch = self.ask("GET", f"/v1/batches/{batch_id}")
        assert batch is not None
        told = batch.json()
        if told["status"] != "completed" or told["request_counts"]["completed"] != LINES:
            self.fault(f"{batch_id}: {told['status']}, {told['request_counts']}, {told['errors']}")
            return 0
        content = self.ask("GET", f"/v1/files/{told['output_file_id']}/content")
        assert content is not None
        got: dict[str, list[str]] = {}
        for line in content.text.splitlines():
            answer = json.loads(line)
            got.setdefault(answer["custom_id"], []).append(answer["response"]["body"]["choices"][0]["text"])
        right = sum(got.get(f"q{i}") == [self.expected[number]] for i, number in enumerate(numbers))
        if right != LINES or len(got) != LINES:
            self.fault(f"{batch_id}: {right} of {LINES} lines are there once and right, {len(got)} are there")
        return right

    def close(self) -> None:
        self.client.close()
        for server in self.servers:
            if server.process is not None:
                server.signal(signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--apart", type=float, default=2.0, help="seconds between two troubles, about")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    args = parser.parse_args()
    with disk() as (folder, own_disk):
        soak = Soak(folder, own_disk, args.servers, args.seed)
        try:
            result = {"seed": args.seed, **soak.run(args.seconds, args.apart)}
        finally:
            soak.close()
    print(json.dumps(result, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if result["faulty"] or result["lines"] != result["lines_answered_once_and_right"]:
        print(f"what the servers said: {soak.log}", file=sys.stderr)
        return 1
    shutil.rmtree(soak.log.parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
