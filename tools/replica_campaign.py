"""Engines behind one client, disturbed at random while streams run, many times. What came of it is stored.

    python tools/replica_campaign.py --runs 50 --actions 40 --seed 1 --out FILE
    python tools/replica_campaign.py --hosts 2 ...     one engine here, others on hosts that are killed and stopped

Each run draws a router and what is done: SIGKILL, drain, resume, add, remove, restart, restart of all. Six streams run
all the time, and each has to end with the tokens of an engine that nobody disturbs. The tests run a short one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def campaigns(runs: int, actions: int, seed: int, seconds: float, pause_s: float, num_hosts: int) -> dict[str, Any]:
    from tests.engine.disturbances import campaign

    done, failed, streams, routers = Counter[str](), [], 0, Counter[str]()
    until, number = time.monotonic() + seconds, 0
    for number in track(range(runs), "runs"):
        try:
            found = asyncio.run(
                asyncio.wait_for(campaign(seed + number, actions, pause_s=pause_s, num_hosts=num_hosts), 600)
            )
        except Exception as error:  # the campaign goes on, and tells of all
            traceback.print_exc()
            failed.append({"seed": seed + number, "error": f"{type(error).__name__}: {error}"[:500]})
        else:
            done.update(found["done"])
            routers[found["router"]] += 1
            streams += found["streams"]
        if time.monotonic() > until:
            break
    return {
        "runs": number + 1, "failed": failed, "streams": streams, "done": dict(sorted(done.items())),
        "routers": dict(sorted(routers.items())),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--actions", type=int, default=40, help="of each run")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two of them, at most")
    parser.add_argument("--hosts", type=int, default=0, help="engines on other hosts, which are processes of this one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="at most about so long")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    found = campaigns(options.runs, options.actions, options.seed, options.seconds, options.pause, options.hosts)
    given = {"seed": options.seed, "actions": options.actions, "hosts": options.hosts}
    found = given | found | {"seconds": round(time.monotonic() - began)}
    print(json.dumps(found, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(bool(found["failed"]))


if __name__ == "__main__":
    main()
