"""`penstock cap MODEL --with X --with Y`: what each configuration does to context, accuracy and performance."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.eval.cap.conditions import Conditions

_TEXT_TOKENS = 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from penstock.config.environment import parse_size
    from penstock.config.load import add_arguments as add_engine_arguments

    board = parser.add_argument_group("what is compared", "with the plain configuration, which is always there")
    board.add_argument(
        "--with", action="append", default=[], dest="with_", metavar="SETTINGS",
        help="one configuration: setting=value,setting=value, or NAME:setting=value,... (may be repeated)",
    )  # fmt: skip
    board.add_argument("--board", metavar="FILE.toml", help="configurations as tables: [NAME], setting = value")
    c = parser.add_argument_group("context", "the longest one that is kept, in a fixed KV memory")
    c.add_argument(
        "--context-task", default="needle", metavar="TASK", help="whose accuracy limits it (default: needle)"
    )
    c.add_argument(
        "--lengths", metavar="N,N,...", help="tokens that are tried (default: 256, 512, ... up to the context)"
    )
    c.add_argument(
        "--threshold", type=float, default=0.9, metavar="X",
        help="share of the plain accuracy at the shortest length that must be kept (default: 0.9)",
    )  # fmt: skip
    c.add_argument(
        "--kv-memory", type=parse_size, metavar="BYTES",
        help="KV memory for context and speed, as 4MiB (default: what the plain one needs for four requests)",
    )  # fmt: skip
    a = parser.add_argument_group("accuracy")
    a.add_argument(
        "--tasks", action="append", metavar="LIST", help="as penstock eval takes them (default: lookup,passage)"
    )
    a.add_argument("--limit", type=int, default=60, metavar="N", help="examples of a task, about (default: 60)")
    a.add_argument("--examples-seed", type=int, default=0, metavar="N", help="which examples (default: 0)")
    a.add_argument("--chat", action="store_true", help="prompts are a user's messages: use the chat template")
    a.add_argument("--bos", action="store_true", help="begin plain prompts with the token that begins a text")
    a.add_argument("--text", metavar="FILE", help="text for bits per byte and KL (default: one in the package)")
    a.add_argument("--text-tokens", type=int, default=_TEXT_TOKENS, metavar="N", help="of it (default: 2048)")
    a.add_argument("--kl-top", type=int, default=64, metavar="N", help="likeliest tokens in the KL (default: 64)")
    p = parser.add_argument_group("performance")
    for name, default, said in (
        ("input-len", 512, "tokens of a prompt"), ("output-len", 32, "tokens of an answer"),
        ("requests", 8, "requests of a batch"), ("repeats", 1, "single requests, and batches, of a round"),
        ("rounds", 4, "rounds through all configurations, at least; a speed has its interval over them"),
    ):  # fmt: skip
        p.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{said} (default: {default})")
    p.add_argument(
        "--speed-seconds", type=float, default=240.0, metavar="S",
        help="more rounds, while an interval is too wide to be read, until this has passed (default: 240; 0: none)",
    )  # fmt: skip
    p.add_argument(
        "--speed-tolerance", type=float, default=0.05, metavar="X",
        help="share within which a speed has not changed (default: 0.05)",
    )  # fmt: skip
    out = parser.add_argument_group("results")
    out.add_argument("--json", metavar="FILE", help="write everything here; -: print it instead of the tables")
    out.add_argument("--html", metavar="FILE", help="write a page with triangles, curves and maps here")
    add_engine_arguments(parser, model_positional=True)


def cap(args: argparse.Namespace) -> int:
    """Raises PenstockError. All configurations are checked before the first one is measured."""
    from penstock.cli.cap_page import html_page
    from penstock.cli.cap_tables import print_report
    from penstock.cli.run import with_default_model
    from penstock.config.load import from_args
    from penstock.eval.cap.board import make_board, parse_with, read_board
    from penstock.eval.cap.fit import seats
    from penstock.eval.cap.report import encode
    from penstock.eval.cap.run import measure_board
    from penstock.report.files import print_json, save, save_text

    named = [parse_with(text) for text in args.with_]
    if args.board is not None:
        named += read_board(Path(args.board))
    plain = from_args(with_default_model(args))
    board = make_board(plain, named)
    conditions = _conditions(args)
    sat = seats(board, conditions)
    with _progress() as told:
        report = measure_board(sat, conditions, command=_command(), told=told)
    if args.json == "-":
        print_json(encode(report))
    else:
        print_report(report)
        if args.json is not None:
            save(Path(args.json), encode(report))
    if args.html is not None:
        save_text(Path(args.html), html_page(report))
    return 0


def _conditions(args: argparse.Namespace) -> Conditions:
    from penstock.base.errors import ConfigError
    from penstock.eval.cap.conditions import DEFAULT_TASKS, Conditions
    from penstock.eval.tasks import make_tasks, split_specs

    specs = list(DEFAULT_TASKS) if args.tasks is None else [s for listed in args.tasks for s in split_specs(listed)]
    try:
        lengths = tuple(int(n) for n in args.lengths.split(",")) if args.lengths is not None else ()
    except ValueError:
        raise ConfigError(
            f"--lengths: {args.lengths!r} are not whole numbers joined by commas, as 256,1024", field="lengths"
        ) from None
    tasks = make_tasks(specs)
    odd = next((t.spec for t in tasks if t.task.metrics[0].kind not in ("rate", "mean")), None)
    if odd is not None:
        raise ConfigError(
            f"--tasks: {odd!r} has no score from 0 to 1; a text is read anyway (--text), leave it away", field="tasks"
        )
    text = f"perplexity{'' if args.text is None else ':' + args.text}?tokens={args.text_tokens}"
    return Conditions(
        tasks=tuple(tasks), context=make_tasks([args.context_task])[0], text=make_tasks([text])[0], lengths=lengths,
        threshold=args.threshold, kv_memory=args.kv_memory, limit=args.limit, seed=args.examples_seed, chat=args.chat,
        bos=args.bos, top=args.kl_top, input_len=args.input_len, output_len=args.output_len, requests=args.requests,
        repeats=args.repeats, rounds=args.rounds, speed_seconds=args.speed_seconds,
        speed_tolerance=args.speed_tolerance,
    )  # fmt: skip


def _command() -> str:
    """As it was typed."""
    return shlex.join(["penstock", *sys.argv[1:]])


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What is being measured, on stderr, where a person is looking."""
    if not sys.stderr.isatty():
        yield lambda line: None
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield lambda line: status.update(line)
