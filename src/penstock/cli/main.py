"""`penstock`: the entry point. Until a command is known, only the standard library is imported: start-up counts."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from penstock import __version__

EXIT_OK, EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPT = 0, 1, 2, 130

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("run:run", "complete a prompt with a model, on this machine"),
    "serve": ("serve:serve", "serve a model: OpenAI's and Anthropic's APIs, a page"),
    "chat": ("chat:chat", "talk with a model in the terminal"),
    "plan": ("plan:plan", "what of a model fits a machine, and how fast it can be, before it is loaded"),
    "sim": ("sim:sim", "simulate a service: a trace, a model, a device"),
    "study": ("study:study", "a question of serving, simulated, on one page"),
    "batch": ("batch:batch", "answer a file of requests; goes on where it stopped"),
    "bench": ("bench:bench", "measure a server, or a model on this machine"),
    "quantize": ("quantize:quantize", "what every scheme of quantisation costs and saves, on a text"),
    "eval": ("eval:eval_", "how well a model does: tasks with intervals, a page, a gate for releases"),
    "cap": ("cap:cap", "what settings do to context, accuracy and performance, and what they claim"),
    "datastore": ("datastore:datastore", "texts to draft from, for the drafter rest"),
    "lengths": ("lengths:lengths", "teach a predictor of output lengths; how well it does"),
    "cache": ("cache:cache", "what a folder of KV blocks holds; delete, pin, evict, warm, serve"),
    "pull": ("models:models", "bring a model by name, or name one of yours"),
    "list": ("models:models", "the models that were pulled; --available: those that can be"),
    "show": ("models:models", "what a model is: family, context, format, template, licence, files"),
    "rm": ("models:models", "remove models that were pulled"),
    "ps": ("servers:servers", "the servers that run"),
    "cluster": ("cluster:cluster", "the engines behind a server: add, drain, remove, restart"),
    "swarm": ("swarm:swarm", "a model over servers that hold some of its layers each, and come and go"),
    "stop": ("servers:servers", "end a server when it has answered"),
    "tune": ("tune:tune", "settings for a load within limits: searched, tried, written with reasons"),
    "features": ("features:features", "what settings or presets switch on, in the columns of the surveys' table"),
    "doctor": ("doctor:doctor", "what this machine and this installation can do, and why not"),
}
"""Name -> `module:function` under `penstock.cli` (the module also has `add_arguments`), and what the help says."""
_MANY = 30
"""Flags that nobody reads in one sentence."""
_ALIASES = {"batch": ["run-batch"]}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; nobody reads a page of usage to find it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False} | kwargs)
        self.module = ""
        """Of a command, as long as its arguments have not been added: only the one that is typed needs them."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._fill()
        words = list(sys.argv[1:] if args is None else args)
        first = words[0].partition("=")[0] if words else ""
        if self._subparsers is not None and first.startswith("-") and first not in self._option_string_actions:
            self.error(f"unrecognized arguments: {first}")  # or what stands behind it would be taken for a command
        found, extra = super().parse_known_args(words, namespace)
        if extra:  # said here, where the command's own flags are known
            self.error(f"unrecognized arguments: {' '.join(extra)}")
        return found, extra

    def format_help(self) -> str:
        self._fill()
        return super().format_help()

    def _fill(self) -> None:
        module, self.module = self.module, ""
        if module:
            importlib.import_module(module).add_arguments(self)
        if self.usage is None and len(self._actions) > _MANY and self._subparsers is None:
            places = " ".join(f"[{a.metavar or a.dest}]" for a in self._actions if not a.option_strings)
            self.usage = f"{self.prog} {places} [options]"  # what they are called stands below

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: -"):
            # The flag alone: what was meant as its value may be a key.
            typed = message.split()[2].split("=")[0]
            shown = [flag for flag, a in self._option_string_actions.items() if a.help != argparse.SUPPRESS]
            near = get_close_matches(typed, shown, n=1, cutoff=0.75)
            message = f"unrecognized arguments: {typed}" + (f"; did you mean {near[0]}?" if near else "")
        elif message.startswith("argument COMMAND: invalid choice"):
            typed = message.split("'")[1]
            near = get_close_matches(typed, COMMANDS, n=1)
            message = f"there is no command {typed}" + (f"; did you mean {near[0]}?" if near else "")
        self.exit(EXIT_USAGE, f"penstock: error: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="penstock",
        description="An LLM serving engine whose every optimisation is a switchable, measured part.",
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    parser.add_argument("--log-level", default=None, metavar="LEVEL", help="debug, info, warning (default) or error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (where, text) in COMMANDS.items():
        command = commands.add_parser(name, aliases=_ALIASES.get(name, []), help=text)
        command.set_defaults(handler=where)
        command.module = f"penstock.cli.{where.partition(':')[0]}"
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status; errors Penstock knows are one line on stderr."""
    try:
        try:
            return _main(argv)
        finally:
            sys.stdout.flush()  # here, where a reader that is gone is no news
    except BrokenPipeError:
        # The reader of our output went away (`penstock run ... | head`): nothing is left to say to anybody. What the
        # interpreter flushes at its end goes nowhere instead of failing again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_OK
    except BaseException as error:
        if not _is_interrupt(error):
            raise
        print(file=sys.stderr)
        return EXIT_INTERRUPT


def _is_interrupt(error: BaseException | None) -> bool:
    """Also one that comes wrapped: while a class is made, Python 3.11 says that `__set_name__` failed."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _main(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return EXIT_USAGE
    from penstock.base.errors import PenstockError
    from penstock.base.log import setup

    setup(args.log_level, "info" if args.command == "serve" else "warning")
    module, _, function = args.handler.partition(":")
    try:
        status: int = getattr(importlib.import_module(f"penstock.cli.{module}"), function)(args)
    except PenstockError as error:
        print(f"penstock: error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except OSError as error:
        if error.filename is None:
            raise
        print(f"penstock: error: {error.filename}: {error.strerror}", file=sys.stderr)
        return EXIT_ERROR
    return status


if __name__ == "__main__":
    sys.exit(main())
