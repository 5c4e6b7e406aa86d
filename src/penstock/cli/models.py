"""`penstock pull | list | show | rm`: models by name."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.launch.store import ModelStore, NamedModel


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
    elif command == "show":
        parser.add_argument("model", metavar="MODEL", help="a name, an id, or the path of a folder or file")
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
        rows = [
            [name, size_text(alias.num_bytes), alias.licence + (", --accept-terms" if alias.terms else ""),
             "yes" if name in here else ""] for name, alias in ALIASES.items()
        ]  # fmt: skip
        console.print(table(["NAME", "SIZE", "LICENCE", "HERE"], rows, left=5))
        console.print(
            "penstock pull NAME brings one; so do ids of the Hugging Face Hub (org/name, org/name/file.gguf)."
        )
        return 0
    rows = []
    for record in records:
        use = "in use" if store.in_use(record.name) else "" if record.whole else "not whole: pull it again"
        if record.whole and record.missing() is not None:
            use = "files are gone"
        when = age_text(record.pulled_s) + " ago" if record.pulled_s else ""
        rows.append([escape(record.name), size_text(record.num_bytes), record.quantization, when, use])
    if rows:
        console.print(table(["NAME", "SIZE", "FORMAT", "MODIFIED", "USE"], rows, left=5))
    else:
        console.print("No model was pulled yet; penstock list --available says what there is.")
    console.print(f"With Penstock: {', '.join(bundled_names())}.", style="dim")
    return 0


def _show(args: argparse.Namespace, store: ModelStore) -> int:
    from rich.console import Console
    from rich.markup import escape

    from penstock.launch.aliases import ALIASES
    from penstock.report.tables import table

    record, alias = store.get(args.model), ALIASES.get(args.model)
    if record is None and alias is not None and not Path(args.model).exists():
        where = "/".join(part for part in (alias.model.repo, alias.model.file) if part)
        rows = [
            ("source", f"Hugging Face Hub: {where}"), ("revision", alias.model.revision or "main"),
            ("size", size_text(alias.num_bytes)), ("licence", alias.licence), ("terms", alias.terms),
            ("SHA-256", alias.sha256 or "as the hub says when it is pulled"),
            ("state", f"not here: penstock pull {args.model}" + (" --accept-terms" if alias.terms else "")),
        ]  # fmt: skip
    else:
        rows = _facts(args.model, record)
    shown = [[name, escape(text)] for name, text in rows if text]
    Console(highlight=False).print(table(["", ""], shown, left=2, head=False))
    return 0


def _facts(model: str, record: NamedModel | None) -> list[tuple[str, str]]:
    from penstock.families.registry import open_model
    from penstock.launch.hub import local_path
    from penstock.launch.pull import quantization_of

    path = local_path(model)
    checkpoint = open_model(path)
    spec, tokens = checkpoint.spec, checkpoint.tokenizer
    template = tokens.chat_template
    kind = "none: completions only" if template is None else f"yes ({len(template):,} characters" + (
        ", with tools)" if "tool" in template else ", without tools)"
    )  # fmt: skip
    source, files = "", []
    if record is not None:
        source = f"Hugging Face Hub: {record.repo}" if record.repo else "a folder or file of yours"
        for name, file in sorted(record.files.items()):
            digest = f"{'SHA-256' if len(file.digest) == 64 else 'git'} {file.digest}" if file.digest else ""
            files.append(("file", f"{name}, {size_text(file.num_bytes)} {digest}".strip()))
    return [
        ("model", model), ("source", source), ("commit", "" if record is None else record.commit), ("path", str(path)),
        ("family", spec.family), ("parameters", f"{spec.num_params / 1e6:,.1f} M"),
        ("layers", f"{len(spec.layers)} of width {spec.hidden_size}, vocabulary {spec.vocab_size:,}"),
        ("context", f"{spec.max_position:,} tokens"), ("format", quantization_of(checkpoint)),
        ("template", kind), ("licence", "" if record is None else record.licence), *files,
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
