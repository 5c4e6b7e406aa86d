"""`penstock swarm directory|serve|run`: a model over servers that hold some of its layers each."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from penstock.swarm.model import SwarmModel

_NOTE = "All of a swarm have the same secret, the same files of the model and the same build; nothing is encrypted."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    text = "where servers of layers and clients find each other"
    directory = actions.add_parser("directory", help=text, description=f"{text}. {_NOTE}")
    text = "hold some layers of a model, and run them for clients"
    serve = actions.add_parser("serve", help=text, description=f"{text}. {_NOTE}")
    text = "complete a prompt through servers of layers"
    run = actions.add_parser("run", help=text, description=f"{text}. {_NOTE}")
    for action, port in ((directory, 7950), (serve, 0)):
        action.add_argument("--listen", metavar="HOST:PORT", default=f"127.0.0.1:{port}", help="a port 0 is any")
        action.add_argument("--anywhere", action="store_true", help="other machines too; nothing is encrypted")
    for action in (serve, run):
        action.add_argument("model", metavar="MODEL", help="a folder, a file or a name")
        action.add_argument("--directory", metavar="HOST:PORT", default="127.0.0.1:7950", help="of the swarm")
        action.add_argument("--dtype", default="auto", help="as of penstock serve; the same for all of a swarm")
        action.add_argument("--quantization", default="none", metavar="SCHEME", help="the same")
        action.add_argument("--kv-cache-dtype", default="auto", metavar="TYPE", help="the same")
        action.add_argument("--max-model-len", type=int, metavar="N", help="the same")
        action.add_argument("--threads", type=int, metavar="N", help="of this process")
    for action in (directory, serve, run):
        action.add_argument("--secret-file", metavar="FILE", type=Path, required=True,
                            help="directory: made if not there; one line of 32 characters or more")  # fmt: skip
    serve.add_argument("--layers", metavar="FIRST:LAST", required=True, help="such as 0:8, which is layers 0 to 7")
    serve.add_argument("--tokens", type=int, default=8192, metavar="N", help="for which it has room (default: 8192)")
    serve.add_argument("--address", metavar="HOST:PORT", help="where clients reach it, if not where it listens")
    serve.add_argument("--delay-ms", type=float, default=0.0, metavar="MS",
                       help="wait so long before every answer, as if far away: for experiments")  # fmt: skip
    run.add_argument("--prompt", "-p", required=True, help="the text to go on from")
    run.add_argument("--tokenizer", help="if not the model's own")
    run.add_argument("--max-tokens", type=int, default=128, metavar="N", help="greedy; default: 128")
    run.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    run.add_argument("--patience", type=float, default=60.0, metavar="SECONDS",
                     help="to wait for servers of layers that nobody has (default: 60)")  # fmt: skip
    run.add_argument("--within", type=float, default=30.0, metavar="SECONDS",
                     help="a server that does not answer within them counts as gone (default: 30)")  # fmt: skip
    run.add_argument("--stats", action="store_true", help="print chains and what was replayed to standard error")


def swarm(args: argparse.Namespace) -> int:
    """Run one of the actions. Raises PenstockError with one sentence."""
    from penstock.runner.shared_secret import make_secret, read_secrets

    if args.action == "directory" and make_secret(args.secret_file):
        print(f"{args.secret_file} was made: all of the swarm need it too, as --secret-file", flush=True)
    secret = read_secrets(args.secret_file, "--secret-file").connection
    return {"directory": _directory, "serve": _serve, "run": _run}[args.action](args, secret)


def _directory(args: argparse.Namespace, secret: bytes) -> int:
    from penstock.launch.block_server import listen
    from penstock.swarm.directory import Directory

    directory = Directory(listen(args.listen, anywhere=args.anywhere), secret)
    print(f"listening: --directory {directory.serving.address}", flush=True)
    _until_told(directory.serving.run, directory.serving.close)
    return 0


def _serve(args: argparse.Namespace, secret: bytes) -> int:
    from penstock.base.errors import ConfigError
    from penstock.launch.block_server import listen
    from penstock.swarm.model import Layers
    from penstock.swarm.server import LayerServer
    from penstock.swarm.wire import place_of

    place_of(args.directory)
    place_of(args.address or "127.0.0.1:1")
    if args.tokens < 1 or not 0 <= args.delay_ms <= 60_000:
        raise ConfigError("--tokens is 1 or more, --delay-ms 0 to 60000", field="")
    model = _model(args)
    first, last = layers_of(args.layers, model.num_layers)
    sock = listen(args.listen, anywhere=args.anywhere)
    layers = Layers(model, first, last)
    server = LayerServer(sock, secret, layers, num_tokens=args.tokens, delay_s=args.delay_ms / 1000)
    address = args.address or server.serving.address
    threading.Thread(target=server.announce, args=(args.directory, address), name="announce", daemon=True).start()
    print(f"layers {first} to {last - 1} of {model.num_layers} at {address}", flush=True)
    _until_told(server.serving.run, server.close)
    return 0


def _run(args: argparse.Namespace, secret: bytes) -> int:
    from penstock.swarm.client import SwarmClient, text_of
    from penstock.swarm.wire import place_of

    place_of(args.directory)
    model = _model(args, tokenizer=args.tokenizer)
    client = SwarmClient(model, args.directory, secret, within_s=args.within, patience_s=args.patience)

    def write(text: str) -> None:
        print(text, end="", flush=True)

    try:
        tokens = text_of(client, args.prompt, args.max_tokens, ignore_eos=args.ignore_eos, write=write)
    finally:
        client.close()
    print(flush=True)
    if args.stats:
        chains = "; ".join(
            ", ".join(f"{hop.first}:{hop.last} on {hop.server[:8]}" for hop in chain) for chain in client.counts.chains
        )
        print(f"{len(tokens)} tokens; chains: {chains}; {client.counts.replaced} links replaced, "
              f"{client.counts.replayed} rows replayed", file=sys.stderr)  # fmt: skip
    return 0


def _model(args: argparse.Namespace, **more: Any) -> SwarmModel:
    from penstock.swarm.model import open_swarm_model

    names = ("dtype", "quantization", "kv_cache_dtype", "max_model_len", "threads")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return open_swarm_model(args.model, **given, **more)


def layers_of(text: str, num_layers: int) -> tuple[int, int]:
    """`FIRST:LAST`, the last one not among them. Raises ConfigError."""
    from penstock.base.errors import ConfigError

    first, colon, last = text.partition(":")
    numbers = [int(word) for word in (first, last) if word.isascii() and word.isdigit() and len(word) < 6]
    if not colon or len(numbers) != 2 or not numbers[0] < numbers[1] <= num_layers:
        raise ConfigError(
            f"--layers {text} names no layers of this model, which has {num_layers}: 0:{num_layers} are all of them",
            field="",
        )
    return numbers[0], numbers[1]


def _until_told(run: Callable[[], None], close: Callable[[], None]) -> None:
    """`run`, in a thread, until a signal to end; then `close`."""
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    thread = threading.Thread(target=run, name="penstock-accept", daemon=True)
    thread.start()
    over.wait()
    close()
    thread.join(1.0)
