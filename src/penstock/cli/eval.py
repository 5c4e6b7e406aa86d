"""`penstock eval MODEL`: how well a model does under the engine's settings, and whether that is good enough."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.eval.gate import Rule, Verdict
    from penstock.eval.paired import Difference, Speed
    from penstock.eval.result import Result
    from penstock.eval.tasks import Asked

EXIT_OK, EXIT_FAILED = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from penstock.config.load import add_arguments as add_engine_arguments

    asked = parser.add_argument_group("what is asked")
    asked.add_argument(
        "--tasks", action="append", metavar="LIST",
        help="comma-separated: NAME, NAME:FILE, NAME?option=value&... (default: nine without files; may be repeated)",
    )  # fmt: skip
    asked.add_argument(
        "--list-tasks", action="store_true", help="print all tasks and the files they need, and do nothing else"
    )
    asked.add_argument("--data", metavar="FOLDER", help="where the files of known data sets lie, by their usual names")
    asked.add_argument("--limit", type=int, default=100, metavar="N", help="examples of a task, about (default: 100)")
    asked.add_argument("--examples-seed", type=int, default=0, metavar="N", help="which examples (default: 0)")
    asked.add_argument("--chat", action="store_true", help="prompts are a user's messages: use the chat template")
    asked.add_argument(
        "--bos", action="store_true", help="begin plain prompts with the token that begins a text, as nano was trained"
    )
    asked.add_argument(
        "--allow-code-execution",
        action="store_true",
        help="run what the model wrote, with your rights (humaneval, mbpp)",
    )
    out = parser.add_argument_group("results")
    out.add_argument("--json", metavar="FILE", help="write everything here; -: print it instead of the tables")
    out.add_argument("--html", metavar="FILE", help="write a page with maps, curves and intervals here")
    out.add_argument("--baseline", metavar="FILE", help="an earlier --json: print what changed, in pairs of examples")
    out.add_argument(
        "--lossy",
        action="store_true",
        help="answers may be other tokens than the baseline's: compare speeds all the same",
    )
    out.add_argument(
        "--other-form",
        metavar="FILE",
        help="a --json of the same model with --chat, if this is without, or the other way round: warn of tasks that "
        "are near zero here and not there",
    )
    out.add_argument("--gate", metavar="FILE", help="bounds that must hold, as JSON; if one does not, the status is 1")
    add_engine_arguments(parser, model_positional=True)


def eval_(args: argparse.Namespace) -> int:
    """Raises PenstockError. What can be known to be wrong is said before the model is read, the rest before it runs."""
    from msgspec.structs import replace

    from penstock.base.errors import InputError
    from penstock.cli.run import with_default_model
    from penstock.config.load import from_args
    from penstock.eval.gate import check_gate, read_gate
    from penstock.eval.health import health
    from penstock.eval.paired import check_aligned
    from penstock.eval.result import load
    from penstock.eval.run import prepare, run
    from penstock.launch.llm import LLM

    if args.list_tasks:
        return _list_tasks()
    if args.limit < 1:
        raise InputError(f"--limit must be at least 1, not {args.limit}", param="limit")
    if args.lossy and args.baseline is None:
        raise InputError("--lossy belongs to --baseline; name one, or leave it away", param="lossy")
    tasks = _tasks(args)
    rules = read_gate(Path(args.gate), tasks) if args.gate is not None else []
    baseline = load(Path(args.baseline)) if args.baseline is not None else None
    other = load(Path(args.other_form)) if args.other_form is not None else None
    if other is not None and other.chat == args.chat:
        raise InputError("--other-form: that result is of the same form as this one", param="other_form")
    llm = LLM.from_config(from_args(with_default_model(args)))
    how = {"seed": args.examples_seed, "limit": args.limit, "chat": args.chat, "bos": args.bos}
    prepared = prepare(llm, tasks, **how)
    check_gate(rules, prepared)
    if baseline is not None:
        check_aligned(prepared, baseline)
    watched = sys.stderr.isatty()
    result = run(llm, prepared, **how, show_progress=watched, told=_tell if watched else lambda name, n: None)
    if other is not None:
        result = replace(result, warnings=health(result, other))
    return _report(args, result, baseline, rules)


def _tasks(args: argparse.Namespace) -> list[Asked]:
    from penstock.eval.tasks import DEFAULT, make_tasks, split_specs

    specs = list(DEFAULT) if args.tasks is None else [spec for listed in args.tasks for spec in split_specs(listed)]
    return make_tasks(
        specs, data=Path(args.data) if args.data is not None else None, allow_code=args.allow_code_execution
    )


def _tell(name: str, n: int) -> None:
    print(f"{name}: {n} examples", file=sys.stderr)


def _list_tasks() -> int:
    from penstock.cli.eval_tables import print_tasks

    print_tasks()
    return EXIT_OK


def _report(args: argparse.Namespace, result: Result, baseline: Result | None, rules: Sequence[Rule]) -> int:
    from penstock.cli.eval_page import html_page
    from penstock.cli.eval_tables import print_baseline, print_gate, print_result, print_warnings
    from penstock.eval.gate import verdicts
    from penstock.eval.paired import differences, speeds
    from penstock.eval.result import encode
    from penstock.report.files import print_json, save, save_text

    changed: list[Difference] = differences(result, baseline) if baseline is not None else []
    timed: list[Speed] = speeds(result, baseline, lossy=args.lossy) if baseline is not None else []
    judged: list[Verdict] = verdicts(rules, result)
    if args.json == "-":
        print_json(encode(result))
    else:
        print_result(result)
        if baseline is not None:
            print_baseline(changed, timed)
        if args.json is not None:
            save(Path(args.json), encode(result))
    if args.html is not None:
        save_text(Path(args.html), html_page(result, changed, judged, baseline))
    print_warnings(result, baseline)
    print_gate(judged, quiet=args.json == "-")
    return EXIT_OK if all(v.passed for v in judged) else EXIT_FAILED
