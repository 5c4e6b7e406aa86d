"""`penstock cache serve`: a process that keeps blocks for engines (`--kv-offload remote:HOST:PORT`)."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.models import size_text

if TYPE_CHECKING:
    import argparse

    from penstock.launch.block_server import Shelf

SAY_S = 60.0
"""Between two lines of what was done, if anything was."""
MEMORY = Path("memory")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--listen", metavar="HOST:PORT", default="127.0.0.1:7900", help="serve: where; a port 0 is any")
    parser.add_argument("--secret-file", metavar="FILE", type=Path, help="serve: what engines have; made if not there")
    parser.add_argument("--size", default="10GiB", help="serve, warm: what all blocks may take, such as 20GiB")
    parser.add_argument("--anywhere", action="store_true", help="serve: other machines too; nothing is encrypted")


def serve(args: argparse.Namespace) -> int:
    """Until a signal to end. Raises ConfigError."""
    from penstock.base.errors import ConfigError
    from penstock.config.offload import size_of
    from penstock.launch.block_server import BlockServer, listen
    from penstock.runner.shared_secret import make_secret, read_secrets

    if args.secret_file is None:
        raise ConfigError("serve needs --secret-file FILE, which engines have too (it is made if not there)", field="")
    if make_secret(args.secret_file):
        print(f"{args.secret_file} was made: engines need it too, as --kv-offload-secret-file", flush=True)
    secret = read_secrets(args.secret_file).connection
    limit_bytes = size_of(args.size)
    server = BlockServer(listen(args.listen, anywhere=args.anywhere), secret, _shelf(args.folder), limit_bytes)
    host, port = server.sock.getsockname()[:2]
    print(f"{server.num_blocks} blocks, {size_text(server.num_bytes)} of {size_text(limit_bytes)}", flush=True)
    print(f"listening: --kv-offload remote:{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    thread = threading.Thread(target=server.run, name="penstock-accept", daemon=True)
    thread.start()
    said = ""
    while not over.wait(SAY_S):
        c = server.counts
        line = f"{c.got} read, {c.missed} not there, {c.put} written, {c.no_room} without room, {c.refused} refused"
        if line != said:
            print(f"{server.num_blocks} blocks, {size_text(server.num_bytes)}; since start {line}", flush=True)
            said = line
    server.close()
    thread.join(1.0)
    return 0


def _shelf(place: Path) -> Shelf:
    from penstock.launch.block_server import FolderShelf, MemoryShelf
    from penstock.launch.kv_store import files_of, open_served

    if place == MEMORY:
        return MemoryShelf()
    open_served(place)
    return FolderShelf(place, files_of)
