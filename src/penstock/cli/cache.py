"""`penstock cache`: what a folder of KV blocks (`--kv-offload`) holds, and deleting of it."""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli import cache_serve
from penstock.cli.models import JSON, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.launch.kv_store import BlockFile, StorePlace

_AGE = re.compile(r"(\d+)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "ls: models and tenants whose blocks are in a folder that --kv-offload named, how many, how old. rm: delete "
        "them, all that the options name; a server that runs computes them again. verify: read every block, and say "
        "which are not what was written; --delete removes those. serve: keep blocks for engines that name "
        "--kv-offload remote:HOST:PORT, in a folder, or in memory if it is called that."
    )
    parser.add_argument("action", choices=("ls", "rm", "verify", "serve"))
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("--tenant", metavar="NAME", help="of this tenant alone; '' is who comes without a key")
    parser.add_argument(
        "--model", metavar="ID", help="of this model alone: as ls names it, or the name it was served by"
    )
    parser.add_argument("--unused-for", metavar="TIME", type=_age, help="used last so long ago: 90s, 12h, 30d")
    parser.add_argument("--all", action="store_true", help="rm: really everything")
    parser.add_argument("--delete", action="store_true", help="verify: delete what is damaged")
    parser.add_argument("--json", action="store_true", help=JSON)
    cache_serve.add_arguments(parser)


def _age(text: str) -> float:
    match = _AGE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 90s, 12h or 30d")
    return float(match[1]) * _SECONDS[match[2]]


def cache(args: argparse.Namespace) -> int:
    """Run one of the actions. Raises ConfigError for a folder that is none."""
    from penstock.launch.kv_store import is_served, open_existing, places

    if args.action == "serve":
        return cache_serve.serve(args)
    secret = open_existing(args.folder)
    if is_served(args.folder) and (args.action == "verify" or args.tenant is not None):
        print("engines have the key of these blocks: neither their tenants nor their bytes can be told from here",
              file=sys.stderr)  # fmt: skip
        return 2
    found = [p for p in places(args.folder) if _wanted(p, args, secret)]
    if args.action == "ls":
        return _ls(found, args)
    if args.action == "verify":
        return _verify(found, secret, args)
    if not (args.all or args.tenant is not None or args.model or args.unused_for):
        print("say what: --tenant NAME, --model ID, --unused-for 30d, or --all", file=sys.stderr)
        return 2
    num, num_bytes = 0, 0
    for place in found:
        for block in place.blocks:
            block.path.unlink(missing_ok=True)
            num, num_bytes = num + 1, num_bytes + block.num_bytes
    print(f"{num} blocks deleted, {size_text(num_bytes)}")
    return 0


def _wanted(place: StorePlace, args: argparse.Namespace, secret: bytes) -> bool:
    from penstock.kv.stored import space_of

    if args.tenant is not None and place.space != space_of(secret, args.tenant):
        return False
    if args.model and args.model not in (place.print_, place.about.model if place.about else ""):
        return False
    if args.unused_for:
        place.blocks = [b for b in place.blocks if b.used_s < time.time() - args.unused_for]
    return bool(place.blocks)


def _ls(found: list[StorePlace], args: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = [
        {
            "model": p.about.model if p.about else "?", "id": p.print_, "tenant": p.space, "blocks": len(p.blocks),
            "bytes": sum(b.num_bytes for b in p.blocks),
            "tokens": len(p.blocks) * (p.about.block_size if p.about else 0),
            "oldest_s": time.time() - min(b.used_s for b in p.blocks),
            "newest_s": time.time() - max(b.used_s for b in p.blocks),
        }
        for p in found
    ]  # fmt: skip
    if args.json:
        import msgspec

        print(msgspec.json.encode(rows).decode())
        return 0
    from rich.console import Console

    from penstock.report.tables import table

    if not rows:
        print("no blocks")
        return 0
    shown = table(("model", "id", "tenant", "blocks", "tokens", "size", "last use", "first"), left=3)
    for row in rows:
        ages = [_ago(row[key]) for key in ("newest_s", "oldest_s")]
        cells = (str(row[k]) for k in ("model", "id", "tenant"))
        shown.add_row(*cells, f"{row['blocks']:,}", f"{row['tokens']:,}", size_text(row["bytes"]), *ages)
    Console(highlight=False, soft_wrap=not sys.stdout.isatty()).print(shown)
    return 0


def _verify(found: list[StorePlace], secret: bytes, args: argparse.Namespace) -> int:
    from penstock.runner.block_files import is_whole

    num, bad = 0, []
    for block in _followed([b for p in found for b in p.blocks]):
        num += 1
        if not is_whole(args.folder, block.name, secret):
            bad.append(block)
            print(f"{block.path} is not what was written")
            if args.delete:
                block.path.unlink(missing_ok=True)
    print(f"{num:,} blocks read, {len(bad):,} damaged" + (", and deleted" if bad and args.delete else ""))
    return 1 if bad and not args.delete else 0


def _followed(blocks: list[BlockFile]) -> Iterator[BlockFile]:
    from rich.progress import track

    yield from track(blocks, description="reading", disable=not sys.stderr.isatty(), transient=True)


def _ago(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(0, seconds):.0f} s ago"
