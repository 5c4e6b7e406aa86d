"""`penstock ps | stop`: the servers of this user that run."""

from __future__ import annotations

import argparse
import sys
import time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from penstock.cli.models import JSON

    command = parser.prog.rpartition(" ")[2]
    if command == "ps":
        parser.add_argument("--json", action="store_true", help=JSON)
    else:
        parser.description = (
            "End a server: it takes nothing new, ends what it has begun (--shutdown-timeout), and goes."
        )
        parser.add_argument("server", metavar="NAME|PORT", help="its model, its port, or its pid (penstock ps)")
        parser.add_argument("--now", action="store_true", help="do not wait for what it has begun")
        parser.add_argument(
            "--timeout", type=float, default=90.0, metavar="SECONDS", help="wait this long (default: 90)"
        )


def servers(args: argparse.Namespace) -> int:
    """Run one of the commands. Raises ModelError."""
    return _ps(args) if args.command == "ps" else _stop(args)


def _ps(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.markup import escape

    from penstock.cli.model_facts import not_asked, served, write_json
    from penstock.cli.models import age_text, size_text
    from penstock.launch.running import running
    from penstock.report.tables import table

    found = [served(entry) for entry in running()]
    if args.json:
        write_json({"servers": found})
        return 0
    console, rows = Console(highlight=False), []
    for one in found:
        busy = _requests(one["num_requests"]) if one["num_requests"] else "idle"
        name, memory = escape(one["names"][0]), size_text(one["memory_bytes"])
        rows.append([name, one["where"], str(one["pid"]), memory, age_text(one["since_s"]), busy])
        rows += [[f"  {escape(model)}", "", "", "", "", state] for model, state in one["models"].items()]
    if rows:
        console.print(table(["MODEL", "WHERE", "PID", "MEMORY", "SINCE", "BUSY"], rows, left=2))
    else:
        console.print("No server of yours runs; begin one: penstock serve MODEL")
        if note := not_asked():
            print(note, file=sys.stderr)
    return 0


def _requests(num: int) -> str:
    return f"{num} request{'' if num == 1 else 's'}"


def _stop(args: argparse.Namespace) -> int:
    from penstock.base.errors import ModelError
    from penstock.cli.model_facts import not_asked
    from penstock.launch.running import find_running, running, started, stop_running

    try:
        entry = find_running(args.server, running())
    except ModelError as error:
        if note := not_asked():
            raise ModelError(f"{error}; {note}") from None
        raise
    stop_running(entry, now=args.now)
    if entry.num_live and not args.now:
        print(f"{entry.names[0]} ends what it has begun ({_requests(entry.num_live)})", file=sys.stderr)
    ends_s = time.monotonic() + args.timeout
    while started(entry.pid) == entry.started and time.monotonic() < ends_s:
        time.sleep(0.05)
    if started(entry.pid) == entry.started:
        print(f"{entry.names[0]} (pid {entry.pid}) has not ended yet; --now ends it at once", file=sys.stderr)
        return 1
    print(f"stopped {entry.names[0]} ({entry.port or entry.where})")
    return 0
