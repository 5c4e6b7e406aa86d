"""Schema-driven fuzzing of a running server by its own OpenAPI document: no 5xx is acceptable.

    python tools/fuzz_api.py --minutes 10

Installs schemathesis into an environment of its own under build/ (it is no dependency of the project), starts
`penstock serve` with the bundled model, and lets it try every route for the given time. Exit status: schemathesis'.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

BUILD = Path("build/fuzz")
SERVER = (
    "serve", "--port", "0", "--ops", "blas", "--max-model-len", "256", "--num-gpu-blocks-override", "64",
    "--request-timeout", "5", "--no-request-log",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--out", type=Path, default=BUILD / "server.log", help="where the server's log goes")
    args, rest = parser.parse_known_args()
    tool = BUILD / "bin" / "schemathesis"
    if not tool.exists():
        subprocess.run([sys.executable, "-m", "venv", str(BUILD)], check=True)
        subprocess.run([str(BUILD / "bin" / "pip"), "install", "-q", "schemathesis"], check=True)
    with (
        args.out.open("w", encoding="utf-8") as log,
        subprocess.Popen(
            [sys.executable, "-m", "penstock.cli.main", *SERVER], stdout=subprocess.PIPE, stderr=log, text=True
        ) as server,
    ):
        try:
            assert server.stdout is not None
            url = next(word for word in server.stdout.readline().split() if word.startswith("http"))
            threading.Thread(target=_drain, args=(server.stdout,), daemon=True).start()
            done = subprocess.run(
                [
                    str(tool), "run", f"{url}/openapi.json", "--max-time", str(int(args.minutes * 60)),
                    "--workers", str(args.workers), "--checks", "not_a_server_error", "--request-timeout", "30",
                    "--continue-on-failure", "--suppress-health-check", "all", *rest,
                ],
                check=False,
            )  # fmt: skip
            alive = server.poll() is None
        finally:
            server.terminate()
    sys.exit(done.returncode if alive else "the server is dead")


def _drain(stdout: IO[str]) -> None:
    for _ in stdout:
        pass


if __name__ == "__main__":
    main()
