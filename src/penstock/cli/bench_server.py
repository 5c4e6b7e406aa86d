"""What `penstock bench serve` and `penstock bench mlperf` have in common: which server, which prompts, how to ask."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.bench.http import HttpClient
    from penstock.bench.prompts import Dataset
    from penstock.bench.serve import Target


def add_server(parser: argparse.ArgumentParser) -> None:
    to = parser.add_argument_group("server")
    to.add_argument("--base-url", metavar="URL", help="default: http://HOST:PORT")
    to.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1")
    to.add_argument("--port", type=int, default=8000, help="default: 8000")
    to.add_argument("--backend", choices=("openai", "openai-chat"), help="default: by --endpoint, else openai")
    to.add_argument("--endpoint", metavar="PATH", help="default: that of the backend")
    to.add_argument("--model", help="default: the first one that the server names")
    to.add_argument("--api-key", metavar="KEY", help="default: from the environment, OPENAI_API_KEY")
    to.add_argument("--header", action="append", default=[], metavar="NAME=VALUE", help="a header of every request")
    to.add_argument("--insecure", action="store_true", help="do not check the server's certificate")
    to.add_argument("--ready-check-timeout-sec", type=float, default=600.0, metavar="S", help="0: no check first")
    to.add_argument("--request-timeout-sec", type=float, default=6 * 3600.0, metavar="S", help="per request")


def add_sampling(load: Any) -> None:
    """How requests are to be answered."""
    load.add_argument("--ignore-eos", action="store_true", help="generate all the tokens asked for")
    load.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0; -1: not sent")
    load.add_argument("--extra-body", metavar="JSON", help="further fields of every request")
    load.add_argument("--seed", type=int, default=0, metavar="N")


def add_dataset(parser: Any, *, num_prompts: int, lengths: bool) -> None:
    from penstock.bench import DATASETS

    parser.add_argument("--dataset-name", choices=DATASETS, default="random", help="default: random")
    parser.add_argument("--dataset-path", metavar="FILE", help="conversations (JSON, JSONL) or a trace (CSV, JSONL)")
    parser.add_argument("--num-prompts", type=int, default=num_prompts, metavar="N", help=f"default: {num_prompts}")
    names: list[tuple[str, type, Any]] = [
        ("--random-input-len", int, 1024), ("--random-output-len", int, 128), ("--random-range-ratio", float, 0.0),
        ("--random-prefix-len", int, 0), ("--prefix-repetition-prefix-len", int, 256),
        ("--prefix-repetition-suffix-len", int, 256), ("--prefix-repetition-num-prefixes", int, 10),
        ("--prefix-repetition-output-len", int, 128), ("--trace-speed", float, 1.0),
        ("--max-input-len", int, None), ("--max-output-len", int, None),
    ]  # fmt: skip
    for flag, kind, default in names:
        told = None if default is None else f"default: {default}"
        parser.add_argument(flag, type=kind, default=default, metavar="N", help=told)
    for flag in ("--sharegpt-output-len", "--custom-output-len"):
        parser.add_argument(flag, dest="file_output_len", type=int, metavar="N", help="instead of what the file says")
    parser.add_argument("--disable-shuffle", action="store_true", help="prompts in the order of the file")
    if lengths:
        parser.add_argument("--input-len", dest="random_input_len", type=int, metavar="N", help="random prompts")
        parser.add_argument("--output-len", dest="random_output_len", type=int, metavar="N", help="random prompts")


def dataset(args: argparse.Namespace, seed: int) -> Dataset:
    from penstock.bench.prompts import Dataset

    names = [n for n in Dataset.__dataclass_fields__ if n not in ("name", "path", "seed", "output_len")]
    given = {name: getattr(args, name) for name in names}
    return Dataset(name=args.dataset_name, path=args.dataset_path, seed=seed, output_len=args.file_output_len, **given)


def client_of(args: argparse.Namespace) -> HttpClient:
    """Raises ConfigError. Servers that can are asked to tell where the time went."""
    from penstock.bench.http import HttpClient

    return HttpClient(
        args.base_url or f"http://{args.host}:{args.port}",
        {"X-Request-Times": "1"} | headers_of(args),
        timeout_s=args.request_timeout_sec,
        verify=not args.insecure,
    )


async def target_of(args: argparse.Namespace, client: HttpClient) -> Target:
    """Waits until the server is ready. Raises PenstockError."""
    from penstock.bench import serve

    extra = _extra(args)
    backend = args.backend or ("openai-chat" if "chat" in (args.endpoint or "") else "openai")
    target = serve.Target(
        backend=backend,
        endpoint=args.endpoint or serve.BACKENDS[backend],
        model=args.model or await serve.served_model(client),
        ignore_eos=args.ignore_eos,
        temperature=args.temperature if args.temperature >= 0 else None,
        extra=extra,
    )
    if args.ready_check_timeout_sec > 0:
        await serve.wait_ready(client, target, args.ready_check_timeout_sec)
    return target


def headers_of(args: argparse.Namespace) -> dict[str, str]:
    from penstock.base.errors import ConfigError

    out: dict[str, str] = {}
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    if key:
        out["Authorization"] = f"Bearer {key}"
    for item in args.header:
        name, found, value = item.partition("=")
        if not found or not name:
            raise ConfigError(f"--header: {item!r} is not NAME=VALUE", field="header")
        out[name] = value
    return out


def _extra(args: argparse.Namespace) -> dict[str, Any]:
    import json

    from penstock.base.errors import ConfigError

    try:
        extra = json.loads(args.extra_body or "{}")
    except ValueError as error:
        raise ConfigError(f"--extra-body is not JSON: {error}", field="extra_body") from None
    if not isinstance(extra, dict):
        raise ConfigError("--extra-body must be a JSON object", field="extra_body")
    return extra
