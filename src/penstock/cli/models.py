"""`penstock pull | list | show | rm`: models by name."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.model_facts import Facts, available, listed, not_asked, shown, write_json

if TYPE_CHECKING:
    from penstock.launch.store import ModelStore

JSON = "as JSON, for programs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command = parser.prog.rpartition(" ")[2]
    if command == "pull":
        from penstock.config.environment import parse_size

        parser.description = (
            "Bring a model by name (penstock list --available), by its id on the Hugging Face Hub (org/name, "
            "org/name@revision, org/name/file.gguf), or give a folder or file of yours a name. What was cut goes on."
        )
        parser.add_argument("model", metavar="MODEL", help="a name, an id, or the path of a folder or file")
        parser.add_argument("--name", help="name of a folder or file of yours (default: its own)")
        parser.add_argument(
            "--max-disk", type=parse_size, metavar="SIZE",
            help="what all models that were pulled may take, this one included: 20G (default: what the disk has free)",
        )  # fmt: skip
        parser.add_argument("--accept-terms", action="store_true", help="for models that come under terms of use")
    elif command == "list":
        parser.add_argument("--available", action="store_true", help="the names that can be pulled")
        parser.add_argument("--json", action="store_true", help=JSON)
    elif command == "show":
        parser.add_argument("model", metavar="MODEL", help="a name, an id, or the path of a folder or file")
        parser.add_argument("--json", action="store_true", help=JSON)
    else:
        parser.add_argument("models", metavar="NAME", nargs="+", help="names of models (penstock list)")


def models(args: argparse.Namespace) -> int:
    """Run one of the commands. Raises ModelError, UnsupportedError."""
    from penstock.launch.store import ModelStore

    store = ModelStore()
    return {"pull": _pull, "list": _list, "show": _show, "rm": _rm}[args.command](args, store)


def size_text(num_bytes: float) -> str:
    """491 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit != "GB" or num_bytes >= 100 else f"{num_bytes:.1f} GB"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def age_text(since_s: float, now_s: float | None = None) -> str:
    """3 min: how long ago that was."""
    seconds = max(0.0, (time.time() if now_s is None else now_s) - since_s)
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length * (2 if unit == "days" else 1):
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _pull(args: argparse.Namespace, store: ModelStore) -> int:
    from penstock.base.errors import ConfigError
    from penstock.launch.aliases import ALIASES
    from penstock.launch.progress import loading
    from penstock.launch.pull import name_local, pull

    path = Path(args.model)
    if args.model not in ALIASES and path.exists():
        record = name_local(store, path, args.name)
    elif args.name is not None:
        raise ConfigError("--name: only folders and files of yours take a name; what is pulled has its own")
    else:
        with loading(f"pulling {args.model}", show_from=0) as progress:
            record = pull(
                store, args.model, max_bytes=args.max_disk, accept_terms=args.accept_terms, progress=progress,
                say=lambda text: print(text, file=sys.stderr),
            )  # fmt: skip
    about = ", ".join(part for part in (size_text(record.num_bytes), record.quantization, record.licence) if part)
    print(f"{record.name} is here ({about})\nnext: penstock serve {record.name}")
    return 0


def _list(args: argparse.Namespace, store: ModelStore) -> int:
    from rich.console import Console
    from rich.markup import escape

    from penstock.launch.aliases import ALIASES
    from penstock.launch.bundled import bundled_names
    from penstock.report.tables import table

    console, records = Console(highlight=False), store.all()
    if args.available:
        here = {record.name for record in records if record.whole}
        names = [available(name, name in here) for name in ALIASES]
        if args.json:
            write_json({"available": names})
            return 0
        rows = [
            [one["name"], size_text(one["size_bytes"]), one["licence"] + (", --accept-terms" if one["terms"] else ""),
             "yes" if one["here"] else ""] for one in names
        ]  # fmt: skip
        console.print(table(["NAME", "SIZE", "LICENCE", "HERE"], rows, left=5))
        console.print(
            "penstock pull NAME brings one; so do ids of the Hugging Face Hub (org/name, org/name/file.gguf)."
        )
        return 0
    found = [listed(record, store) for record in records]
    if args.json:
        write_json({"models": found, "bundled": list(bundled_names())})
        return 0
    uses = {"ready": "", "in_use": "in use", "partial": "not whole: pull it again", "missing": "files are gone"}
    rows = [
        [escape(one["name"]), size_text(one["size_bytes"]), one["format"],
         age_text(one["pulled_s"]) + " ago" if one["pulled_s"] else "", uses[one["state"]]] for one in found
    ]  # fmt: skip
    if rows:
        console.print(table(["NAME", "SIZE", "FORMAT", "MODIFIED", "USE"], rows, left=5))
    else:
        console.print("No model was pulled yet; penstock list --available says what there is.")
        _note()
    console.print(f"With Penstock: {', '.join(bundled_names())}.", style="dim")
    return 0


def _note() -> None:
    if note := not_asked():
        print(note, file=sys.stderr)


def _show(args: argparse.Namespace, store: ModelStore) -> int:
    from rich.console import Console
    from rich.markup import escape

    from penstock.launch.aliases import ALIASES
    from penstock.report.tables import table

    record = store.get(args.model)
    if record is None and args.model in ALIASES and not Path(args.model).exists():
        facts = available(args.model, False)
    else:
        facts = shown(args.model, record)
    if args.json:
        write_json(facts)
        return 0
    rows = _present(facts, record is not None) if facts["here"] else _absent(facts)
    cells = [[name, escape(text)] for name, text in rows if text]
    Console(highlight=False).print(table(["", ""], cells, left=2, head=False))
    return 0


def _absent(facts: Facts) -> list[tuple[str, str]]:
    where = "/".join(part for part in (facts["repo"], facts["file"]) if part)
    return [
        ("source", f"Hugging Face Hub: {where}"), ("revision", facts["commit"] or "main"),
        ("size", size_text(facts["size_bytes"])), ("licence", facts["licence"]), ("terms", facts["terms"] or ""),
        ("SHA-256", facts["sha256"] or "as the hub says when it is pulled"),
        ("state", f"not here: penstock pull {facts['name']}" + (" --accept-terms" if facts["terms"] else "")),
    ]  # fmt: skip


def _present(facts: Facts, named: bool) -> list[tuple[str, str]]:
    length, source, files = facts["chat_template_chars"], "", []
    kind = "none: completions only" if length is None else f"yes ({length:,} characters" + (
        ", with tools)" if facts["takes_tools"] else ", without tools)"
    )  # fmt: skip
    if facts["source"] == "hub":
        source = f"Hugging Face Hub: {facts['repo']}"
    elif named:
        source = "a folder or file of yours"
    for file in facts["files"]:
        digest = f"{'SHA-256' if len(file['digest']) == 64 else 'git'} {file['digest']}" if file["digest"] else ""
        files.append(("file", f"{file['name']}, {size_text(file['size_bytes'])} {digest}".strip()))
    return [
        ("model", facts["name"]), ("source", source), ("commit", facts["commit"] or ""), ("path", facts["path"]),
        ("family", facts["family"]), ("parameters", f"{facts['num_params'] / 1e6:,.1f} M"),
        ("layers", f"{facts['num_layers']} of width {facts['hidden_size']}, vocabulary {facts['vocab_size']:,}"),
        ("context", f"{facts['context_tokens']:,} tokens"), ("format", facts["format"]),
        ("template", kind), ("licence", facts["licence"] or ""), *files,
    ]  # fmt: skip


def _rm(args: argparse.Namespace, store: ModelStore) -> int:
    from penstock.launch.pull import remove

    for name in args.models:
        record, num_bytes = remove(store, name)
        if num_bytes:
            print(f"removed {name}, {size_text(num_bytes)} are free again")
        else:
            kept = record.path if not record.repo else "they were there before, or another name has them"
            print(f"{name} is no name any more; its files stay ({kept})")
    return 0
