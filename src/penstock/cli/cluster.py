"""`penstock cluster ACTION URL [NUMBER]`: the engines behind a running server, for whoever has its admin key."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

_TEXTS = {
    "status": "show the engines", "add": "start one more", "drain": "give it nothing new, wait until it has nothing",
    "resume": "give a drained one requests again", "remove": "drain it, then end it",
    "restart": "end it and start another in its place; without NUMBER all, one after the other",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text in _TEXTS.items():
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("url", metavar="URL", help="of the server, such as http://127.0.0.1:8000")
        if name in ("drain", "resume", "remove", "restart"):
            action.add_argument("number", metavar="NUMBER", type=int, nargs="?" if name == "restart" else None,
                                help="of the engine (penstock cluster status)")  # fmt: skip
        if name in ("drain", "remove", "restart"):
            action.add_argument("--timeout", type=float, metavar="SECONDS",
                                help="then the others go on with what it has (default: as long as it takes; restart: 0)"
                                )  # fmt: skip
        action.add_argument("--key", metavar="KEY", help="the admin key; default: PENSTOCK_ADMIN_API_KEY")
        if name == "status":
            action.add_argument("--json", action="store_true", help="for programs")


def cluster(args: argparse.Namespace) -> int:
    """Run one of the actions. Raises ModelError with what the server says against it."""
    key = args.key or os.environ.get("PENSTOCK_ADMIN_API_KEY", "")
    base = args.url.rstrip("/") + "/internal/replicas"
    if args.action == "status":
        return _show(_asked("GET", base, key), as_json=args.json)
    body = {} if getattr(args, "timeout", None) is None else {"timeout": args.timeout}
    match args.action, getattr(args, "number", None):
        case "add", _:
            print(f"engine {_asked('POST', base, key)['number']} serves")
        case "restart", None:
            away = _asked("POST", f"{base}/restart", key, body)["away_s"]
            print("\n".join(f"engine {number} was away for {away_s:.1f} s" for number, away_s in away.items()))
        case action, number:
            said = _asked("POST", f"{base}/{number}", key, {"action": action, **body})
            done = {"drain": "has nothing left, and gets nothing new", "resume": "gets requests again",
                    "remove": "is gone"}  # fmt: skip
            print(f"engine {number} {done.get(action) or 'was away for {away_s:.1f} s'.format(**said)}")
    return 0


def _asked(method: str, url: str, key: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The server's answer. Raises ModelError."""
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    from penstock.base.errors import ModelError

    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if method == "GET" else json.dumps(body or {}).encode()
    try:
        with urlopen(Request(url, data, headers, method=method)) as answer:
            return dict(json.load(answer))
    except HTTPError as error:
        raise ModelError(_sentence(error.code, error.read())) from None
    except (URLError, ValueError, OSError) as error:
        why = getattr(error, "reason", error)
        raise ModelError(f"{url}: there is no answer ({why}); penstock ps shows the servers that run") from None


def _sentence(status: int, body: bytes) -> str:
    try:
        said = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        said = body.decode(errors="replace")[:200]
    if status == 404 and said.startswith("there is nothing at"):
        return "the server has no admin key, or is none that has engines: start it with --admin-api-key"
    return said


# HAS: requests; TO READ: tokens of prompts that wait in the engine; FOUND: of its prompts' tokens, in its cache.
def _show(found: dict[str, Any], *, as_json: bool) -> int:
    from rich.console import Console
    from rich.markup import escape

    from penstock.cli.model_facts import write_json
    from penstock.report.tables import table

    if as_json:
        write_json(found)
        return 0
    heads = ["NO", "STATE", "HAS", "RUN", "TO READ", "KV", "FOUND", "TOKENS", "DIED", "UP", "PID", "BUILD"]
    rows, notes = [], []
    for one in found["data"]:
        state = "draining" if one["draining"] and one["state"] == "ready" else one["state"]
        rows.append([
            str(one["number"]), state, str(one["requests"]), str(one["running"]), str(one["waiting_tokens"]),
            _share(one["kv_used"], one["kv_total"]), _share(one["hit_tokens"], one["query_tokens"]),
            str(one["generated_tokens"]), str(one["restarts"]), _span(one["for_s"]), str(one["pid"] or "-"),
            one["version"],
        ])  # fmt: skip
        if one["host"]:  # lines are as wide as a terminal without it
            notes.append(f"{one['number']}: on {one['host']}")
        if one["reason"]:
            notes.append(f"{one['number']}: {one['reason']}")
    console = Console(highlight=False)
    console.print(table(heads, rows, left=2, wrap=False))
    for note in notes:
        console.print(escape(note))
    console.print(f"{len(rows)} of at most {found['most']}, routed by {found['router']}")
    return 0


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
