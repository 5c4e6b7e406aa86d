"""`penstock serve [MODEL]`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.config import EngineConfig, ServeConfig


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

    from penstock.base.cache import cache_folder
    from penstock.cli.run import explain, with_default_model
    from penstock.config.load import serve_from_args

    refuse_windows("penstock serve")
    tell_of_other_engines()
    if args.explain:
        return explain(args, server=True)
    config = serve_from_args(with_default_model(args))
    if config.engine.execution.plugin is not None:
        from penstock.launch.plugins import load_plugins

        load_plugins(config.engine.execution.plugin)  # what is wrong with it is said before a model is brought
    if config.engine.execution.log_file is None:
        # A terminal is for people: stacks of processes are for whoever looks for them.
        config = _logging_to(config, str(cache_folder("log") / "engine.log"))
    if config.server.headless and config.engine.execution.data_parallel_start_rank is not None:
        from penstock.launch.engine_host import run_engine_host

        return run_engine_host(config.engine)
    if config.server.headless:
        from penstock.launch.node import run_node

        return run_node(config.engine)
    # Before anything is started, or even imported: a port that is taken should be known at once.
    from penstock.server.transport.listen import bind

    with closing(bind(config.server)) as sockets:
        for engine in (config.engine, *(model.config.engine for model in config.models)):
            bring(engine)
        from penstock.engine.spawn import spawn

        # The engine's process imports its half while this one imports the server's. It ends by itself if this one does.
        own = not config.server.engine_in_process and config.engine.execution.size_here > 0
        spare = spawn() if own else None
        from penstock.server.main import serve as run

        return run(config, sockets, spare)


def _logging_to(config: ServeConfig, log_file: str) -> ServeConfig:
    from dataclasses import replace

    engine = config.engine
    models = tuple(replace(model, config=_logging_to(model.config, log_file)) for model in config.models)
    engine = replace(engine, execution=replace(engine.execution, log_file=engine.execution.log_file or log_file))
    return replace(config, engine=engine, models=models)


def tell_of_other_engines() -> None:
    """One line about variables of theirs that are set: whoever has them expects that they do something."""
    import logging

    from penstock.config.foreign_variables import seen
    from penstock.config.load import SERVING

    if line := seen(os.environ, SERVING):
        logging.getLogger("penstock.config").warning("%s", line)


def refuse_windows(command: str) -> None:
    """Raises ConfigError where Python has no `fcntl`: engines and locks of files need more than Windows has."""
    from importlib.util import find_spec

    from penstock.base.errors import ConfigError

    if find_spec("fcntl") is None:
        raise ConfigError(
            f"{command} needs Linux or macOS; on Windows run it in WSL, or use penstock run and penstock.LLM"
        )


def bring(engine: EngineConfig) -> None:
    """Pull a model that is not here while nothing else has begun, so that Ctrl-C ends it. Raises as `local_path`."""
    from penstock.launch.bundled import bundled_model
    from penstock.launch.store import ModelStore

    name = engine.model.model
    if os.path.exists(name) or bundled_model(name) is not None or ModelStore().has(name):
        return  # found here again, without the imports that pulling takes
    from penstock.launch.hub import local_path
    from penstock.launch.progress import loading

    with loading(f"pulling {name}", show_from=0) as progress:
        local_path(name, engine.model.revision, progress)
