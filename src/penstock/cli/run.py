"""`penstock run MODEL --prompt ...`: text in, text out, as it comes."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

EXPLAIN = "print where settings come from and what Penstock decides by itself, and why; load and run nothing"


def number(text: str) -> int | float:
    """A number as the user wrote it; ranges are the validator's business, so that every front end says the same."""
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from penstock.config.load import add_arguments as add_engine_arguments

    parser.add_argument("--prompt", "-p", help="the prompt; without it, standard input is read")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message: use the chat template")
    sampling = parser.add_argument_group("sampling")
    for flag, text in (
        ("--max-tokens", "generated tokens at most (default: 128)"),
        ("--temperature", "0 is greedy (default, as of all that follows: the model's own, else 0.7)"),
        ("--top-p", "keep the likeliest tokens up to this probability"),
        ("--top-k", "keep this many likeliest tokens"),
        ("--min-p", "keep tokens at least this likely, relative to the likeliest"),
        ("--presence-penalty", "subtract from tokens generated before"),
        ("--frequency-penalty", "subtract for every time a token was generated"),
        ("--repetition-penalty", "divide logits of tokens seen before"),
        ("--min-tokens", "do not end before this many tokens"),
        ("--sampling-seed", "same seed, same text"),
        ("--n", "number of samples"),
    ):
        sampling.add_argument(flag, type=number, default=None, help=text, metavar="N")
    sampling.add_argument("--stop", action="append", help="end at this text (may be repeated)")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    parser.add_argument(
        "--prompt-compression",
        metavar="JSON",
        help='drop tokens of the prompt first: {"method": "llmlingua", "rate": 0.5}',
    )
    parser.add_argument("--explain", action="store_true", help=EXPLAIN)
    parser.add_argument("--stats", action="store_true", help="print tokens and times to standard error at the end")
    add_engine_arguments(parser, model_positional=True)


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    """What was named, and a length."""
    names = (
        "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "min_tokens", "n", "stop",
    )  # fmt: skip
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.sampling_seed is not None:
        given["seed"] = args.sampling_seed
    if args.ignore_eos:
        given["ignore_eos"] = True
    given.setdefault("max_tokens", 128)
    return given


def _compression(text: str | None) -> dict[str, Any] | None:
    """Raises InputError for what is no JSON object; what it says is checked with the prompt."""
    import json

    from penstock.base.errors import InputError

    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InputError(
            '--prompt-compression must be a JSON object such as {"method": "llmlingua", "rate": 0.5}',
            param="prompt_compression",
        )
    return found


def with_default_model(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments, with the bundled model if none was named. Mutates `args`."""
    from penstock.config.load import names_a_model
    from penstock.launch.bundled import DEFAULT, NEXT, bundled_model

    if not names_a_model(args) and bundled_model(DEFAULT) is not None:
        args.model = DEFAULT
        print(
            f"(no MODEL was named: this is {DEFAULT}, which comes with Penstock and only tells tales, badly; for "
            f"answers: {NEXT})",
            file=sys.stderr,
        )
    return args


def explain(args: argparse.Namespace, *, server: bool = False) -> int:
    """Print what was set, and where, and every decision; what does not fit is refused as a start would refuse it.

    No weight is read or fetched, and nothing listens.
    """
    from penstock.config import SERVING, SETTINGS, engine_config, given_by
    from penstock.config.load import models_by, with_models
    from penstock.launch.build import foreseen, plan_of
    from penstock.plan.memory import gib

    settings = SERVING if server else SETTINGS
    given, models = with_models(given_by(with_default_model(args), settings), models_by(args) if server else {})
    config = engine_config(given)
    for name, item in given.items():
        print(f"{name} = {settings[name].shown(item.value)}: given by {item.origin}")
    for d in plan_of(config).decisions:
        print(f"{d.name} = {d.value}: {d.why}")
    for name, own in models.items():
        memory = foreseen(engine_config(own))[1].memory_bytes
        print(f"model {name}: {gib(memory['weights'])} of weights, {gib(memory['kv_limit'])} for KV; starts on demand")
    return 0


def run(args: argparse.Namespace) -> int:
    from penstock.base.errors import InputError
    from penstock.config.load import from_args
    from penstock.launch.llm import LLM

    if args.explain:
        return explain(args)
    config = from_args(with_default_model(args))
    prompt = args.prompt
    if prompt is None:
        if sys.stdin.isatty():
            print("(reading the prompt from standard input; end with Ctrl-D)", file=sys.stderr)
        prompt = sys.stdin.read()
    if not prompt:
        raise InputError("prompt must not be empty", param="prompt")
    compression = _compression(args.prompt_compression)
    llm = LLM.from_config(config)
    params = llm.get_default_sampling_params(**_sampling(args))
    for d in llm.engine.decisions:
        if d.name == "rope_regime" and d.value == "extended":
            print(f"{d.name} = {d.value}: {d.why}", file=sys.stderr)
    started = time.perf_counter()
    # Checked here, before anything is printed: the request is made at once, only its tokens come later.
    if args.chat:
        messages = [{"role": "user", "content": prompt}]
        stream = llm.stream_chat(messages, params, prompt_compression=compression)
    else:
        stream = llm.stream(prompt, params, prompt_compression=compression)
    last = None
    written = 0
    if not args.chat and params.n == 1:
        sys.stdout.write(prompt)
    for output in stream:
        last = output
        if params.n == 1:
            text = output.outputs[0].text
            sys.stdout.write(text[written:])
            sys.stdout.flush()
            written = len(text)
    if last is not None and params.n > 1:
        for sample in last.outputs:
            sys.stdout.write(f"--- {sample.index} ({sample.finish_reason})\n{sample.text}\n")
    sys.stdout.write("\n")
    sys.stdout.flush()
    if last is not None and last.error is not None:
        print(f"penstock: error: {last.error}", file=sys.stderr)
        return 1
    if args.stats and last is not None:
        _print_stats(last, time.perf_counter() - started)
    return 0


def drafts_of(output: Any) -> str:
    """How many drafts were right, if there were any."""
    m = output.metrics
    if not m.num_drafts:
        return ""
    return f", {m.num_accepted_tokens} of {m.num_draft_tokens} drafts right in {m.num_drafts} steps"


def _print_stats(output: Any, wall_s: float) -> None:
    num = sum(len(o.token_ids) for o in output.outputs)
    ttft = output.metrics.ttft_s or 0.0
    print(
        f"prompt {len(output.prompt_token_ids)} tokens ({output.num_cached_tokens} cached), generated {num} tokens, "
        f"TTFT {ttft * 1e3:.1f} ms, {num / wall_s:.1f} tokens/s, ended by {output.outputs[0].finish_reason}"
        f"{drafts_of(output)}",
        file=sys.stderr,
    )
