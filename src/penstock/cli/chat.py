"""`penstock chat [MODEL]`: a conversation in the terminal, answers as they come."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.core.sampling import SamplingParams
    from penstock.launch.llm import LLM

HELP = (
    "/reset begins anew, /system TEXT sets the system message and begins anew, /stats shows the last answer's times, "
    "/exit or Ctrl-D ends; Ctrl-C stops an answer"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from penstock.cli.run import number
    from penstock.config.load import add_arguments as add_engine_arguments

    parser.description = f"Talk with a model. {HELP}."
    parser.add_argument("--system", metavar="TEXT", help="a system message before everything else")
    sampling = parser.add_argument_group("sampling")
    for flag, text in (
        ("--max-tokens", "tokens of an answer at most (default: 256)"),
        ("--temperature", "0 is greedy (default, as of all that follows: the model's own, else 0.7)"),
        ("--top-p", "keep the likeliest tokens up to this probability"),
        ("--top-k", "keep this many likeliest tokens"),
        ("--min-p", "keep tokens at least this likely, relative to the likeliest"),
        ("--sampling-seed", "same seed, same answers"),
    ):
        sampling.add_argument(flag, type=number, default=None, help=text, metavar="N")
    add_engine_arguments(parser, model_positional=True)


def chat(args: argparse.Namespace) -> int:
    """Read a line, answer it, and so on. Without a terminal every line of standard input is a turn."""
    from penstock.cli.run import with_default_model
    from penstock.config.load import from_args
    from penstock.launch.llm import LLM

    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p")
    given: dict[str, Any] = {"max_tokens": 256} | {n: v for n in names if (v := getattr(args, n)) is not None}
    if args.sampling_seed is not None:
        given["seed"] = args.sampling_seed
    llm = LLM.from_config(from_args(with_default_model(args)))
    conversation = Conversation(llm, llm.get_default_sampling_params(**given), args.system)
    interactive = sys.stdin.isatty()
    if interactive:
        print(HELP, file=sys.stderr)
    while True:
        line = _read(interactive)
        if line is None or line in ("/exit", "/quit"):
            return 0
        if line.startswith("/"):
            print(conversation.command(line), file=sys.stderr)
        elif line:
            conversation.answer(line)


def _read(interactive: bool) -> str | None:
    """The next line without blanks around it; None at the end."""
    if not interactive:
        line = sys.stdin.readline()
        return line.strip() if line else None
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return None


class Conversation:
    """What has been said so far. The prefix cache keeps its blocks, so a turn computes only what is new."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._stats = "nothing has been said yet"
        self._begin(system)

    def _begin(self, system: str | None) -> None:
        self._system = system
        self._messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]

    def command(self, line: str) -> str:
        """Carry out a line that begins with a slash; what to tell the user."""
        name, _, rest = line.partition(" ")
        if name == "/reset":
            self._begin(self._system)
            return "begun anew"
        if name == "/system":
            self._begin(rest.strip() or None)
            return "begun anew" + ("" if rest.strip() else " without a system message")
        return self._stats if name == "/stats" else HELP

    def answer(self, text: str) -> None:
        """Say `text`, write the answer to standard output as it comes, and remember both.

        What is refused (too long, no chat template) is told and forgotten: the conversation goes on without it.
        """
        from penstock.base.errors import InputError
        from penstock.cli.run import drafts_of

        messages = [*self._messages, {"role": "user", "content": text}]
        written, output, started = "", None, time.perf_counter()
        try:
            for output in self._llm.stream_chat(messages, self._params):
                new = output.outputs[0].text
                sys.stdout.write(new[len(written) :])
                sys.stdout.flush()
                written = new
        except InputError as error:
            print(f"penstock: error: {error}", file=sys.stderr)
            return
        except KeyboardInterrupt:  # the stream's end aborts the request; what was said stays said
            print(" [stopped]", file=sys.stderr, end="")
        sys.stdout.write("\n")
        if output is not None and output.error is not None:
            print(f"penstock: error: {output.error}", file=sys.stderr)
            return
        self._messages = [*messages, {"role": "assistant", "content": written}]
        if output is not None:
            num, wall_s = len(output.outputs[0].token_ids), time.perf_counter() - started
            self._stats = (
                f"prompt {len(output.prompt_token_ids)} tokens ({output.num_cached_tokens} cached), {num} generated, "
                f"TTFT {(output.metrics.ttft_s or 0.0) * 1e3:.1f} ms, {num / wall_s:.1f} tokens/s"
                f"{drafts_of(output)}"
            )
