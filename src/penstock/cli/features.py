"""`penstock features`: what a configuration switches on, in the columns by which surveys compare serving systems."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.config.engine import EngineConfig

_YES, _NO = "yes", "no"
_SIDE_BY_SIDE = 3
"""Systems that have a column each; more have a line each."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from penstock.config.load import add_arguments as add_engine_arguments

    parser.add_argument("--columns", metavar="LIST", help="only these, with commas between them")
    parser.add_argument("--presets", metavar="LIST", help="one row for each of these presets, or all; without it: one "
                        "row for the settings that are given")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    add_engine_arguments(parser, model_positional=True)


def features(args: argparse.Namespace) -> int:
    """Raises ConfigError."""
    from rich.console import Console

    from penstock.report import files
    from penstock.report.tables import table

    rows = rows_of(args)
    columns = chosen(args.columns)
    if args.json is not None:
        files.save(args.json, {"rows": [{name: row[name] for name in columns} | {"preset": row["preset"]}
                                        for row in rows]})  # fmt: skip
    if len(rows) > _SIDE_BY_SIDE:
        shown = table(["", *columns], ([row["preset"], *(row[name] for name in columns)] for row in rows),
                      left=len(columns) + 1)  # fmt: skip
    else:
        shown = table(["", *(row["preset"] for row in rows)],
                      ([name, *(row[name] for row in rows)] for name in columns), left=len(rows) + 1)  # fmt: skip
    Console().print(shown)
    for row in rows:
        for line in notes_of(row["preset"]):
            print(f"{row['preset']}: {line}")
    return 0


def rows_of(args: argparse.Namespace) -> list[dict[str, str]]:
    from penstock.config.load import Given, engine_config, given_by
    from penstock.config.presets import PRESETS, preset_settings

    given = {"model": Given("nano", "")} | given_by(args)
    if args.presets is None:
        config = engine_config(given)
        return [{"preset": config.execution.preset or "as given"} | columns_of(config)]
    names = list(PRESETS) if args.presets == "all" else [name.strip() for name in args.presets.split(",")]
    rows = []
    for name in names:
        preset_settings(name)  # or what is wrong with it
        rows.append({"preset": name} | columns_of(engine_config(given | {"preset": Given(name, "")})))
    return rows


def chosen(text: str | None) -> list[str]:
    """Names of columns. Raises ConfigError for unknown ones."""
    from difflib import get_close_matches

    from penstock.base.errors import ConfigError

    if text is None:
        return list(COLUMNS)
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in COLUMNS:
            near = get_close_matches(name, COLUMNS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the columns are {', '.join(COLUMNS)}"
            raise ConfigError(f"--columns: {name!r} is no column; {hint}", field="columns")
    return names


def columns_of(config: EngineConfig) -> dict[str, str]:
    """Column -> what the configuration switches on, as text."""
    return {name: tell(config) for name, tell in COLUMNS.items()}


def notes_of(preset: str) -> list[str]:
    """What a preset leaves to the user, and what the system had that is not there (yet)."""
    from penstock.config.engine import SETTINGS
    from penstock.config.load import from_kwargs
    from penstock.config.presets import PARALLEL, PRESETS

    if preset not in PRESETS:
        return []
    found = PRESETS[preset]
    absent = [column for column, setting in PARALLEL.items()
              if found.survey.get(column) == _YES and setting not in SETTINGS]  # fmt: skip
    notes = [f"not yet switched on: {', '.join([*absent, *found.lacks])}"] if absent or found.lacks else []
    if found.survey.get("offload") == _YES and _offload(from_kwargs(model="-", preset=preset)) == _NO:
        notes.append("nothing is offloaded without swap_space, kv_offload, weight_memory_bytes or memory_bytes")
    asks = dict(found.asks)
    for column, setting in PARALLEL.items():
        if found.survey.get(column) == _YES and setting in SETTINGS:
            asks[setting] = "over how many ranks; without it the model is on one"
    return notes + [f"give {name}: {why}" for name, why in asks.items()]


# -- the columns -------------------------------------------------------------------------------------------------


def _parallel(column: str) -> Callable[[EngineConfig], str]:
    def tell(config: EngineConfig) -> str:
        from penstock.config.presets import PARALLEL

        degree = config.as_kwargs().get(PARALLEL[column])
        return "not there yet" if degree is None else _NO if degree == 1 else str(degree)

    return tell


def _offload(config: EngineConfig) -> str:
    cache, execution = config.cache, config.execution
    parts = {
        "weights to disk": execution.weight_memory_bytes is not None or execution.memory_bytes is not None,
        "experts to disk": execution.expert_memory_bytes is not None,
        "keys and values to " + cache.swap_tier: cache.swap_space > 0,
        "blocks kept outside": cache.kv_offload != "none",
    }
    return ", ".join(name for name, on in parts.items() if on) or _NO


def _iteration(config: EngineConfig) -> str:
    from penstock.sched.policy import make_policy
    from penstock.sched.policy.dynamic import Dynamic

    name = config.scheduler.scheduling_policy
    return f"no: {name}" if isinstance(make_policy(name), Dynamic) else f"yes: {name}"


def _prefill(config: EngineConfig) -> str:
    scheduler = config.scheduler
    if not scheduler.enable_chunked_prefill:
        return "whole prompts"
    budget = scheduler.max_num_batched_tokens or "auto"
    return f"in pieces, {budget} tokens a step"


def _decode(config: EngineConfig) -> str:
    cache = config.cache
    drafts = "" if config.speculation is None else f", drafts by {config.speculation.method}"
    if cache.kv_allocator.startswith("contiguous"):
        return "contiguous attention" + drafts
    if cache.kv_allocator in ("virtual", "vtensor"):
        return "contiguous attention over virtual addresses" + drafts
    blocks = "token attention" if cache.block_size == 1 else f"paged attention, blocks of {cache.block_size}"
    return blocks + drafts


def _reuse(config: EngineConfig) -> str:
    return f"{config.cache.prefix_cache}, {config.cache.eviction}" if config.cache.enable_prefix_caching else _NO


def _precision(config: EngineConfig) -> str:
    model, cache = config.model, config.cache
    weights = model.dtype if model.quantization == "none" else model.quantization
    return f"weights {weights}, keys and values {cache.kv_cache_dtype}"


def _most(config: EngineConfig) -> str:
    return str(config.scheduler.max_num_seqs or "auto")


def _hardware(config: EngineConfig) -> str:
    return f"{config.execution.device}, by {config.execution.ops}"


def _language(config: EngineConfig) -> str:
    return "Python, C++" if not config.execution.device.startswith("cuda") else "Python, C++, Triton"


def _models(config: EngineConfig) -> str:
    from penstock.families.registry import FAMILIES

    return f"{len(FAMILIES.names())} architectures"


COLUMNS: dict[str, Callable[[Any], str]] = {
    "tensor parallel": _parallel("tensor parallel"),
    "pipeline parallel": _parallel("pipeline parallel"),
    "offload": _offload,
    "iteration": _iteration,
    "prefill": _prefill,
    "decode": _decode,
    "reuse": _reuse,
    "sequences": _most,
    "precision": _precision,
    "hardware": _hardware,
    "language": _language,
    "models": _models,
}
"""Column -> what it says of a configuration."""
