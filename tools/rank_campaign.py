"""Many seeded runs over several ranks: the engine's laws, and kills. What came of it is stored.

    python tools/rank_campaign.py laws --runs 2000 --seed 1 --out FILE
    python tools/rank_campaign.py kills --kills 300 --seed 1 --out FILE

`laws`: a tiny model, a number of ranks and knobs are drawn; requests are run while the engine is disturbed, and every
token and every reason to end is compared with that of the model run on whole texts. `kills`: SIGKILL of any rank or of
the engine while four streams run, whose texts are compared: of two ranks, then of two stages. The tests run a few of
both.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def laws(runs: int, seed: int, seconds: float) -> dict[str, Any]:
    from tests.native import test_ranks
    from tests.native.test_laws import in_turmoil

    from penstock.parallel import shard

    shard.UNIT, shard.LEAST_ROWS = 5, 2  # products of tiny models are shared out, too
    rng, done, failed = random.Random(seed), Counter[str](), []
    until = time.monotonic() + seconds
    for number in track(range(runs), "laws"):
        name, dtype, kv_dtype, size = rng.choice(test_ranks.LAWS)
        run = f"{seed}-{number}-{name}-{dtype}-{kv_dtype}-{size}"
        try:
            in_turmoil(name, dtype, kv_dtype, random.Random(run), 1, ranks=size, depth=1)
        except Exception as error:  # the campaign goes on, and tells of all
            traceback.print_exc()
            failed.append({"run": run, "error": f"{type(error).__name__}: {error}"[:500]})
        done[f"{name}, {size} ranks"] += 1
        gc.collect()
        if time.monotonic() > until:
            break
    return {"runs": sum(done.values()), "failed": failed, "of each kind": dict(sorted(done.items()))}


def kills(count: int, seed: int) -> dict[str, Any]:
    os.environ |= {"PENSTOCK_RANK_KILLS": str(count), "PENSTOCK_RANK_SEED": str(seed)}
    from tests.engine import test_rank_kills

    ways = {
        "ranks": test_rank_kills.test_H01_streams_survive_kills_of_any_rank_unchanged,
        "stages": test_rank_kills.test_H03_streams_survive_kills_of_any_stage_unchanged,
    }
    failed, seconds = [], {}
    for name, survive in ways.items():
        began = time.monotonic()
        try:
            survive()
        except Exception as error:  # the other way is tried as well
            traceback.print_exc()
            failed.append({"run": name, "error": f"{type(error).__name__}: {error}"[:500]})
        seconds[name] = round(time.monotonic() - began)
    return {"kills of each": count, "failed": failed, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["laws", "kills"])
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="laws: at most so long")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.what == "laws":
        found = laws(options.runs, options.seed, options.seconds)
    else:
        found = kills(options.kills, options.seed)
    found = {"what": options.what, "seed": options.seed, **found}
    print(json.dumps(found, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(bool(found.get("failed")))


if __name__ == "__main__":
    main()
