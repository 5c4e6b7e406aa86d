"""`penstock serve [MODEL]`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from penstock.cli.run import EXPLAIN
    from penstock.config.load import add_arguments as add_engine_arguments

    parser.description = (
        "Serve a model with OpenAI's and Anthropic's APIs. Without MODEL, the one that comes with Penstock."
    )
    parser.add_argument("--explain", action="store_true", help=EXPLAIN)
    add_engine_arguments(parser, model_positional=True, server=True)


def serve(args: argparse.Namespace) -> int:
    from contextlib import closing
    from dataclasses import replace

    from penstock.base.cache import cache_folder
    from penstock.cli.run import explain, with_default_model
    from penstock.config.load import serve_from_args

    if args.explain:
        return explain(args, server=True)
    config = serve_from_args(with_default_model(args))
    if config.engine.execution.log_file is None:
        # A terminal is for people: stacks of processes are for whoever looks for them.
        execution = replace(config.engine.execution, log_file=str(cache_folder("log") / "engine.log"))
        config = replace(config, engine=replace(config.engine, execution=execution))
    # Before anything is started, or even imported: a port that is taken should be known at once.
    from penstock.server.transport.listen import bind

    with closing(bind(config.server)) as sockets:
        from penstock.engine.spawn import spawn

        # The engine's process imports its half while this one imports the server's. It ends by itself if this one does.
        spare = None if config.server.engine_in_process else spawn()
        from penstock.server.main import serve as run

        return run(config, sockets, spare)
