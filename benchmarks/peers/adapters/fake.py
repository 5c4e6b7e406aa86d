"""No engine: answers without computing. For tests of the harness.

Options: `token_s` seconds per token, `fail` / `hang` / `die` workload sizes (number of requests) at which it does that,
`last` the number of runs behind which it dies,
`refuse` a message with which it does not start, `log` a file that gets a line per operation (and, with ".pids" behind
its name, one with the process ids).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from peer_worker import Engine, Recorder, Request, serve


class Fake(Engine):
    version = "fake 1"
    weight_bytes = 1_000_000

    def start(self, model: str, precision: str, threads: int, options: dict[str, Any]) -> None:
        self.options, self.runs = options, 0
        self._note("start")
        if "log" in options:
            with Path(options["log"] + ".pids").open("a") as pids:
                pids.write(f"{os.getpid()}\n")
        if "refuse" in options:
            raise RuntimeError(options["refuse"])
        print("an engine that talks on standard output")

    def run(self, requests: list[Request], recorder: Recorder) -> None:
        self._note(f"run {len(requests)}")
        if self.options.get("fail") == len(requests):
            raise RuntimeError("made to fail")
        if self.options.get("hang") == len(requests):
            time.sleep(3600)
        self.runs += 1
        if self.options.get("die") == len(requests) or self.runs > self.options.get("last", self.runs):
            os._exit(9)
        for step in range(max(new for _, new in requests)):
            time.sleep(self.options.get("token_s", 0.0))
            for number, (prompt, new) in enumerate(requests):
                if step < new:
                    recorder.add(number, [(prompt[0] + step) % 1000])

    def _note(self, what: str) -> None:
        if "log" in self.options:
            with Path(self.options["log"]).open("a") as log:
                log.write(f"{self.options.get('name', 'fake')} {what}\n")


if __name__ == "__main__":
    serve(Fake())
    sys.stdout.flush()
