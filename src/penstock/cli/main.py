"""`penstock`: the entry point. Until a command is known, only the standard library is imported: start-up counts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

from penstock import __version__

EXIT_OK, EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPT = 0, 1, 2, 130


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; nobody reads a page of usage to find it."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: -"):
            typed = message.split()[2].split("=")[0]
            known = [flag for parser in (self, *_commands(self)) for flag in parser._option_string_actions]
            near = get_close_matches(typed, known, n=1)
            if near:
                message += f"; did you mean {near[0]}?"
        self.exit(EXIT_USAGE, f"penstock: error: {message} (see {self.prog} --help)\n")


def _commands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    subs = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return [command for a in subs for command in a.choices.values()]


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="penstock",
        allow_abbrev=False,
        description="An LLM serving engine whose every optimisation is a switchable, measured part.",
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    parser.add_argument("--log-level", default=None, metavar="LEVEL", help="debug, info, warning (default) or error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    run = commands.add_parser("run", allow_abbrev=False, help="complete a prompt with a model, on this machine")
    from penstock.cli.run import add_arguments

    add_arguments(run)

    serve = commands.add_parser(
        "serve", allow_abbrev=False, help="serve a model: OpenAI's and Anthropic's APIs, a page"
    )
    from penstock.cli.serve import add_arguments as add_serve_arguments

    add_serve_arguments(serve)

    chat = commands.add_parser("chat", allow_abbrev=False, help="talk with a model in the terminal")
    from penstock.cli.chat import add_arguments as add_chat_arguments

    add_chat_arguments(chat)

    plan = commands.add_parser(
        "plan", allow_abbrev=False, help="what of a model fits a machine, and how fast it can be, before it is loaded"
    )
    from penstock.cli.plan import add_arguments as add_plan_arguments

    add_plan_arguments(plan)

    sim = commands.add_parser("sim", allow_abbrev=False, help="simulate a service: a trace, a model, a device")
    from penstock.cli.sim import add_arguments as add_sim_arguments

    add_sim_arguments(sim)

    study = commands.add_parser("study", allow_abbrev=False, help="a standing question of serving, simulated, on one page")
    from penstock.cli.study import add_arguments as add_study_arguments

    add_study_arguments(study)

    batch = commands.add_parser(
        "batch", aliases=["run-batch"], allow_abbrev=False, help="answer a file of requests; goes on where it stopped"
    )
    from penstock.cli.batch import add_arguments as add_batch_arguments

    add_batch_arguments(batch)

    bench = commands.add_parser("bench", allow_abbrev=False, help="measure a server, or a model on this machine")
    from penstock.cli.bench import add_arguments as add_bench_arguments

    add_bench_arguments(bench)

    quantize = commands.add_parser(
        "quantize", allow_abbrev=False, help="what every scheme of quantisation costs and saves, on a text"
    )
    from penstock.cli.quantize import add_arguments as add_quantize_arguments

    add_quantize_arguments(quantize)

    evaluate = commands.add_parser(
        "eval", allow_abbrev=False, help="how well a model does: tasks with intervals, a page, a gate for releases"
    )
    from penstock.cli.eval import add_arguments as add_eval_arguments

    add_eval_arguments(evaluate)

    cap = commands.add_parser(
        "cap", allow_abbrev=False, help="what settings do to context, accuracy and performance, and what they claim"
    )
    from penstock.cli.cap import add_arguments as add_cap_arguments

    add_cap_arguments(cap)

    datastore = commands.add_parser("datastore", allow_abbrev=False, help="texts to draft from, for the drafter rest")
    from penstock.cli.datastore import add_arguments as add_datastore_arguments

    add_datastore_arguments(datastore)

    from penstock.cli.models import add_arguments as add_models_arguments
    from penstock.cli.servers import add_arguments as add_servers_arguments

    for name, text in (
        ("pull", "bring a model by name, or name one of yours"),
        ("list", "the models that were pulled; --available: those that can be"),
        ("show", "what a model is: family, context, format, template, licence, files"),
        ("rm", "remove models that were pulled"),
    ):
        add_models_arguments(name, commands.add_parser(name, allow_abbrev=False, help=text))
    for name, text in (("ps", "the servers that run"), ("stop", "end a server when it has answered")):
        add_servers_arguments(name, commands.add_parser(name, allow_abbrev=False, help=text))

    doctor = commands.add_parser("doctor", help="what this machine and this installation can do, and why not")
    doctor.add_argument("model", nargs="?", help="also say whether and how this model folder would run")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status; errors Penstock knows are one line on stderr."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return EXIT_USAGE
    from penstock.base.errors import PenstockError
    from penstock.base.log import setup

    setup(args.log_level, "info" if args.command == "serve" else "warning")
    try:
        if args.command == "run":
            from penstock.cli.run import run

            return run(args)
        if args.command == "serve":
            from penstock.cli.serve import serve

            return serve(args)
        if args.command == "chat":
            from penstock.cli.chat import chat

            return chat(args)
        if args.command == "sim":
            from penstock.cli.sim import sim

            return sim(args)
        if args.command == "study":
            from penstock.cli.study import study

            return study(args)
        if args.command == "plan":
            from penstock.cli.plan import plan

            return plan(args)
        if args.command in ("batch", "run-batch"):
            from penstock.cli.batch import batch

            return batch(args)
        if args.command == "bench":
            from penstock.cli.bench import bench

            return bench(args)
        if args.command == "quantize":
            from penstock.cli.quantize import quantize

            return quantize(args)
        if args.command == "eval":
            from penstock.cli.eval import eval_

            return eval_(args)
        if args.command == "cap":
            from penstock.cli.cap import cap

            return cap(args)
        if args.command == "datastore":
            from penstock.cli.datastore import datastore

            return datastore(args)
        if args.command in ("pull", "list", "show", "rm"):
            from penstock.cli.models import models

            return models(args)
        if args.command in ("ps", "stop"):
            from penstock.cli.servers import servers

            return servers(args)
        from penstock.cli.doctor import doctor

        return doctor(args)
    except PenstockError as error:
        print(f"penstock: error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPT
    except BrokenPipeError:
        # The reader of our output went away (`penstock run ... | head`): nothing is left to say to anybody.
        sys.stderr.close()
        return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
