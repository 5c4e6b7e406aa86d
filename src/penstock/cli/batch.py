"""`penstock batch FILE -o OUT`: a file of requests answered on this machine, without a server's sockets."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.config import ServeConfig

EXIT_OK, EXIT_ALL_FAILED = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from penstock.config.load import add_arguments as add_engine_arguments

    parser.description = (
        "Answer a file of requests, one JSON object a line, as OpenAI's batches have them: custom_id, method, url "
        "(/v1/chat/completions, /v1/completions, /v1/embeddings, /v1/responses, /v1/decisions, /v1/rerank, /v1/score, "
        "/classify or /pooling), body. Answers are "
        "appended to OUT as they come, failures among them; started again, it does only what OUT does not have."
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="the requests")
    parser.add_argument("-i", "--input-file", metavar="FILE", help="the same, as vLLM calls it")
    parser.add_argument("-o", "--output-file", metavar="OUT", required=True, help="where the answers go")
    parser.add_argument(
        "--max-in-flight", type=int, metavar="N", help="requests at once (default: four times the engine's slots)"
    )
    add_engine_arguments(parser, server=True)


def batch(args: argparse.Namespace) -> int:
    """Returns 0, or 1 if not one request was answered. Raises InputError, ConfigError, ModelError; PenstockError if
    the disk takes no more answers."""
    from penstock.base.errors import InputError, PenstockError
    from penstock.cli.run import with_default_model
    from penstock.cli.serve import refuse_windows

    refuse_windows("penstock batch")
    from penstock.server.errors import trouble

    named = [path for path in (args.file, args.input_file) if path is not None]
    if len(named) != 1:
        raise InputError("name one file of requests", param="FILE")
    source, target = Path(named[0]), Path(args.output_file)
    if not source.is_file():
        raise InputError(f"{source}: there is no such file of requests", param="FILE")
    if not os.access(source, os.R_OK):
        raise InputError(f"{source}: cannot be read", param="FILE")
    if not target.absolute().parent.is_dir() or target.is_dir():
        raise InputError(f"{target}: is no place for a file", param="--output-file")
    if target.exists() and os.path.samefile(source, target):
        raise InputError("the answers cannot go into the file of requests", param="--output-file")
    if args.max_in_flight is not None and args.max_in_flight < 1:
        raise InputError("--max-in-flight must be at least 1", param="--max-in-flight")
    config = _config(with_default_model(args))
    try:
        with _alone(target):
            return asyncio.run(_run(config, source, target, args.max_in_flight))
    except OSError as error:
        if trouble(error) is None:
            raise
        raise PenstockError(
            f"{target}: {error.strerror}; the answers before that are whole. See to the disk and run it again: "
            "it goes on where it stopped"
        ) from None


def _config(args: argparse.Namespace) -> ServeConfig:
    """What the flags say, without what only a server with clients needs."""
    from dataclasses import replace

    from penstock.config.load import serve_from_args

    config = serve_from_args(args)
    server = replace(
        config.server, api_key=None, api_keys_file=None, admin_api_key=None, engine_in_process=True,
        max_num_queued_reqs=0, max_queue_wait=0.0, max_files_bytes=0, response_store_size=0,
        request_log=False, disable_log_stats=True,
    )  # fmt: skip
    return replace(config, server=server)


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Raises InputError if another process writes there."""
    import fcntl

    from penstock.base.errors import InputError

    with target.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{target}: another process is writing it", param="--output-file") from None
        yield


async def _run(config: ServeConfig, source: Path, target: Path, most: int | None) -> int:
    from penstock.engine.thread_link import ThreadLink
    from penstock.launch.build import local_engine
    from penstock.launch.progress import loading
    from penstock.server.app import make_app
    from penstock.server.batches.job import Job, OpenGate
    from penstock.server.batches.lines import LineReader, Results, read_lines
    from penstock.server.batches.work import SLOTS_AHEAD
    from penstock.server.build import build, close
    from penstock.server.call import ANYONE
    from penstock.server.transport.inner import Answer, post

    results = Results(target, target)
    await asyncio.to_thread(results.open)
    before = results.completed + results.failed
    with loading() as progress:
        server = await build(config, link=ThreadLink(local_engine(config.engine, progress, serving=False)))
    try:
        app = make_app(server)
        slots = server.client.info.max_num_seqs if server.client.info is not None else 8
        # Some wait in the queue, so that a slot that becomes free is taken at once, and a policy has a choice.
        gate = OpenGate(most or SLOTS_AHEAD * slots, lambda: server.client.state in ("failed", "stopped"))
        longest = config.server.max_body_bytes

        async def ask(path: str, body: bytes, request_id: str) -> Answer:
            return await post(app, path, body, ANYONE, request_id)

        total = await asyncio.to_thread(lambda: sum(1 for _ in read_lines(source, longest)))
        with _bar(total) as show:
            job = Job(
                LineReader(source, None, longest, server.model_name), results, ask, gate, "batch",
                on_done=lambda line: show(results.completed, results.failed),
            )  # fmt: skip
            show(results.completed, results.failed)
            await job.run()
    finally:
        try:
            results.close()
        finally:
            await close(server)
    done = results.completed + results.failed
    again = f" ({before} of them before)" if before else ""
    print(f"{done} requests answered{again}, {results.failed} with errors: {target}", file=sys.stderr)
    return EXIT_ALL_FAILED if done and not results.completed else EXIT_OK


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int, int], None]]:
    """Progress on stderr, where a person is looking."""
    if not sys.stderr.isatty():
        yield lambda completed, failed: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns: list[Any] = [
        TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]} failed"),
        TimeElapsedColumn(), TimeRemainingColumn(),
    ]  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("requests", total=total, failed=0)
        yield lambda completed, failed: bar.update(task, completed=completed + failed, failed=failed)
