"""`penstock cache`: what a folder of KV blocks (`--kv-offload`) holds; deleting, pinning and filling of it."""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.base.errors import ConfigError
from penstock.cli import cache_serve
from penstock.cli.cache_warm import evict_on_server, is_url, warm
from penstock.cli.models import JSON, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.launch.kv_store import BlockFile, StorePlace

_AGE = re.compile(r"(\d+)([smhd])")
MAX_PINS = 1000
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "ls: models and tenants whose blocks are in a folder that --kv-offload named, how many, how old. rm: delete "
        "them, all that the options name; a server that runs computes them again. verify: read every block, and say "
        "which are not what was written; --delete removes those. pin: what the options name leaves a full folder after "
        "all others, --for so long; unpin: it does so no more. evict: as rm, but for what is pinned; or, of a server "
        "that runs (its address instead of a folder, with its admin key), from its memory. warm: compute the prompts "
        "of a file, on a server that runs, or with --model into a folder, so that who comes finds them. "
        "serve: keep blocks for engines that name --kv-offload remote:HOST:PORT, in a folder, or in memory if it is "
        "called that."
    )
    parser.add_argument("action", choices=("ls", "rm", "verify", "pin", "unpin", "evict", "warm", "serve"))
    parser.add_argument("place", metavar="FOLDER", help="or, for evict and warm, http://HOST:PORT")
    parser.add_argument("--tenant", metavar="NAME", help="of this tenant alone; '' is who comes without a key")
    parser.add_argument(
        "--model", metavar="ID", help="of this model alone: as ls names it, or the name it was served by"
    )
    parser.add_argument("--name", metavar="PREFIX", help="blocks whose file names begin so")
    parser.add_argument("--for", dest="for_s", metavar="TIME", type=_age, help="pin, warm: how long (pin: 30d)")
    parser.add_argument("--prompts", metavar="FILE", type=Path, help="warm: .jsonl (prompt or messages), or any text")
    parser.add_argument("--pin", action="store_true", help="warm: pin on the server, not only retain")
    parser.add_argument("--api-key", metavar="KEY", help="of a server; default: from the environment, OPENAI_API_KEY")
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

    args.folder = Path(args.place)
    if args.action == "serve":
        return cache_serve.serve(args)
    if args.action == "warm":
        return warm(args)
    if is_url(args.place):
        if args.action != "evict":
            raise ConfigError(f"{args.action} needs a folder; a server takes evict and warm", field="")
        return evict_on_server(args)
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
    if not (args.all or args.tenant is not None or args.model or args.unused_for or args.name):
        print("say what: --tenant NAME, --model ID, --name PREFIX, --unused-for 30d, or --all", file=sys.stderr)
        return 2
    if args.action in ("pin", "unpin"):
        return _pin(found, args)
    spared = tuple(_pinned(args.folder)) if args.action == "evict" else ()
    num, num_bytes = 0, 0
    for place in found:
        for block in place.blocks:
            if spared and block.name.startswith(spared):
                continue
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
    if args.name:
        place.blocks = [b for b in place.blocks if b.path.name.startswith(args.name)]
    if args.unused_for:
        place.blocks = [b for b in place.blocks if b.used_s < time.time() - args.unused_for]
    return bool(place.blocks)


def _pinned(folder: Path) -> list[str]:
    """Beginnings of names of blocks that are pinned now."""
    from penstock.launch.kv_store import read_pins

    return [pin.path for pin in read_pins(folder) if pin.until_s > time.time()]


def _pin(found: list[StorePlace], args: argparse.Namespace) -> int:
    """What was chosen by whole places, or by the beginning of a name, stays chosen for blocks that come; what was
    chosen by age is named block by block."""
    from penstock.launch.kv_store import FolderPin, read_pins, write_pins

    if args.unused_for:
        paths = [block.name for place in found for block in place.blocks]
    else:
        paths = [f"{place.print_}/{place.space}/{args.name or ''}" for place in found]
    mine = tuple(paths)
    kept = [p for p in read_pins(args.folder) if p.until_s > time.time() and not (mine and p.path.startswith(mine))]
    if args.action == "pin":
        until_s = time.time() + (30 * 86400 if args.for_s is None else args.for_s)
        kept += [FolderPin(path, until_s) for path in paths]
    if len(kept) > MAX_PINS:
        raise ConfigError(f"these are {len(kept):,} pins; at most {MAX_PINS:,} are possible: name tenants or models, "
                          "not ages", field="")  # fmt: skip
    write_pins(args.folder, kept)
    num = sum(len(place.blocks) for place in found)
    print(f"{num:,} blocks {args.action}ned; a server that runs hears of it within some seconds")
    return 0


def _ls(found: list[StorePlace], args: argparse.Namespace) -> int:
    pins = tuple(_pinned(args.folder))
    rows: list[dict[str, Any]] = [
        {
            "model": p.about.model if p.about else "?", "id": p.print_, "tenant": p.space, "blocks": len(p.blocks),
            "bytes": sum(b.num_bytes for b in p.blocks),
            "tokens": len(p.blocks) * (p.about.block_size if p.about else 0),
            "oldest_s": max(0.0, time.time() - min(b.used_s for b in p.blocks)),
            "newest_s": max(0.0, time.time() - max(b.used_s for b in p.blocks)),
            "pinned": sum(b.name.startswith(pins) for b in p.blocks) if pins else 0,
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
    shown = table(("model", "id", "tenant", "blocks", "tokens", "size", "last use", "first", "pinned"), left=3)
    for row in rows:
        ages = [_ago(row[key]) for key in ("newest_s", "oldest_s")]
        cells = (str(row[k]) for k in ("model", "id", "tenant"))
        shown.add_row(
            *cells, f"{row['blocks']:,}", f"{row['tokens']:,}", size_text(row["bytes"]), *ages, f"{row['pinned']:,}"
        )
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
