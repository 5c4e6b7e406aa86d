"""Which configurations are compared: `--with` and board files, read and checked before anything runs."""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.base.errors import ConfigError
from penstock.config import SETTINGS, EngineConfig, from_kwargs
from penstock.config.environment import parse_size
from penstock.config.setting import Setting

FULL = "full"
"""What the plain configuration is called."""
_SAME_FOR_ALL = ("model", "revision", "tokenizer", "skip_tokenizer_init", "seed")
_MEMORY = ("kv_cache_memory_bytes", "num_gpu_blocks_override", "gpu_memory_utilization")
_OPEN, _CLOSE = "{[(", "}])"


@dataclass(frozen=True)
class Configuration:
    """What is changed of the plain one."""

    name: str
    settings: Mapping[str, Any]


def parse_with(text: str) -> Configuration:
    """`setting=value,setting=value`, or `NAME:setting=value,...`. Commas within brackets or quotes part nothing.

    Raises ConfigError.
    """
    head, colon, tail = text.partition(":")
    named = bool(colon) and not any(c in head for c in "=,{")
    name, body = (head.strip(), tail) if named else (text.strip(), text)
    settings: dict[str, Any] = {}
    for part in _parts(body, text):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not key or not equals or not value:
            raise _wrong(text, f"settings look like name=value, joined by commas; not {part.strip()!r}")
        key = key.removeprefix("--").replace("-", "_")
        if key in settings:
            raise _wrong(text, f"{key} is given twice")
        settings[key] = _value(SETTINGS.get(key), value, text)
    if named and not name:
        raise _wrong(text, "there is no name before the colon")
    return Configuration(name, settings)


def _parts(body: str, text: str) -> list[str]:
    parts, depth, quoted = [""], 0, False
    for c in body:
        quoted ^= c == '"'
        depth += 0 if quoted else (c in _OPEN) - (c in _CLOSE)
        if c == "," and depth == 0 and not quoted:
            parts.append("")
        else:
            parts[-1] += c
    if depth or quoted:
        raise _wrong(text, "a bracket or a quotation mark is not closed")
    return parts


def _value(item: Setting | None, value: str, text: str) -> Any:
    """A text as the setting's kind; what is unknown is left to `from_kwargs`, which knows what it may have meant."""
    if item is None or item.kind is str:
        return value
    if item.optional and value.lower() in ("none", "null"):
        return None
    try:
        if item.kind is bool:
            return {"true": True, "on": True, "false": False, "off": False}[value.lower()]
        return parse_size(value) if item.kind is int else item.kind(value)
    except (KeyError, ValueError, argparse.ArgumentTypeError):
        what = {bool: "true or false", int: "a whole number", float: "a number"}[item.kind]
        raise _wrong(text, f"{item.name} must be {what}, not {value!r}") from None


def _wrong(text: str, why: str) -> ConfigError:
    return ConfigError(f"--with {text!r}: {why}", field="with")


def read_board(path: Path) -> list[Configuration]:
    """A table of settings per configuration: `[NAME]`, then `setting = value`. Raises ConfigError."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--board {path}: cannot be read: {error.strerror}", field="board") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--board {path}: is not TOML: {error}", field="board") from None
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(
                f"--board {path}: {name} stands outside of a table; write [NAME] above the settings of each "
                "configuration",
                field="board",
            )
    if not tables:
        raise ConfigError(f"--board {path}: has no configuration; write [NAME] and its settings below", field="board")
    return [Configuration(name, table) for name, table in tables.items()]


def make_board(
    plain: EngineConfig, configurations: Sequence[Configuration]
) -> list[tuple[Configuration, EngineConfig]]:
    """The plain one first, then the others, each with all its settings. Raises ConfigError, naming the configuration.

    What depends on the model is left to `eval.cap.fit`.
    """
    if not configurations:
        raise ConfigError("nothing to compare: name configurations by --with or --board", field="with")
    base = plain.as_kwargs()
    board = [(Configuration(FULL, {}), plain)]
    for one in configurations:
        _check(one, [made.name for made, _ in board])
        try:
            config = from_kwargs(**(base | dict(one.settings)))
        except ConfigError as error:
            raise ConfigError(f"{one.name!r}: {error}", field=error.field) from None
        twin = next((made.name for made, other in board if other == config), None)
        if twin is not None:
            raise ConfigError(f"{one.name!r} is the same as {twin!r}: no setting differs", field="with")
        board.append((one, config))
    return board


def _check(one: Configuration, before: Sequence[str]) -> None:
    if not one.settings:
        raise ConfigError(f"{one.name!r} changes no setting", field="with")
    if one.name in before:
        why = "that is the plain one" if one.name == FULL else "two configurations are called so"
        raise ConfigError(f"{one.name!r}: {why}; name it as NAME:setting=value", field="with")
    for name in one.settings:
        if name in _SAME_FOR_ALL:
            raise ConfigError(
                f"{one.name!r}: {name} has to be the same for all, or they could not be compared; give it as --"
                + name.replace("_", "-"),
                field=name,
            )
        if name in _MEMORY:
            raise ConfigError(
                f"{one.name!r}: {name} would give it another memory than the others; --kv-memory is for all", field=name
            )


def told(settings: Mapping[str, Any]) -> str:
    """Settings as they would be typed behind `--with`."""
    return ",".join(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in settings.items())
