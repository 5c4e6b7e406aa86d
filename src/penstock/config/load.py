"""Settings from keyword arguments, TOML files and command lines. Precedence: flag, TOML file, default."""

from __future__ import annotations

import argparse
import difflib
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.base.errors import ConfigError
from penstock.config.engine import SECTIONS, SETTINGS, EngineConfig
from penstock.config.foreign import REMOVED, RENAMED
from penstock.config.server import ServeConfig, ServerConfig
from penstock.config.setting import Setting, settings_of

_DTYPE_ALIASES = {"half": "float16", "float": "float32", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmgt]|[KMGT](?:i?B)?)?")
_POSITIONAL = "model_positional"
_SHORT = {"speculative_config": ("-sc",)}
"""vLLM's short flags."""
SERVER_SETTINGS: dict[str, Setting] = {item.name: item for item in settings_of(ServerConfig)}
_SERVING = SETTINGS | SERVER_SETTINGS


def from_kwargs(**kwargs: Any) -> EngineConfig:
    """An EngineConfig from flat names, as `LLM(model=..., block_size=...)` gives them.

    Raises ConfigError for unknown names (with the closest known one), wrong types and values out of range, and for
    what other engines have and Penstock has not.
    """
    return _build(_checked(kwargs, lambda name: name, SETTINGS))


def from_toml(path: str | Path, **overrides: Any) -> EngineConfig:
    """An EngineConfig from a TOML file with the tables [model], [cache], [scheduler], [execution].

    `overrides` beat the file. Raises ConfigError; what is wrong in the file is named `FILE: [table] name: ...`.
    """
    return _build(read_toml(path) | _checked(overrides, lambda name: name, SETTINGS))


def from_args(args: argparse.Namespace) -> EngineConfig:
    """An EngineConfig from what a parser prepared by `add_arguments` has read. Raises ConfigError.

    Other attributes of `args` are left alone, so the parser may have arguments of its own.
    """
    return _build(_given(args, SETTINGS))


def serve_from_args(args: argparse.Namespace) -> ServeConfig:
    """The same for a server: the engine's settings and those of [server]. Raises ConfigError."""
    values = _given(args, _SERVING)
    server = ServerConfig(**{name: value for name, value in values.items() if name in SERVER_SETTINGS})
    return ServeConfig(engine=_build({n: v for n, v in values.items() if n in SETTINGS}), server=server)


def serve_from_kwargs(**kwargs: Any) -> ServeConfig:
    """A ServeConfig from flat names; `config` names a TOML file that they beat. Raises ConfigError."""
    path = kwargs.pop("config", None)
    _checked(kwargs, lambda name: name, _SERVING)
    return serve_from_args(argparse.Namespace(**kwargs, **({} if path is None else {"config": path})))


def _given(args: argparse.Namespace, settings: Mapping[str, Setting]) -> dict[str, Any]:
    given = vars(args)
    known = settings.keys() | REMOVED.keys() | RENAMED.keys()
    flags = {name: given[name] for name in given if name in known}
    positional = given.get(_POSITIONAL)
    if positional is not None:
        if flags.get("model", positional) != positional:
            raise ConfigError(f"two models are given: {positional} and --model {flags['model']}", field="model")
        flags["model"] = positional
    values = _checked(flags, lambda name: "--" + name.replace("_", "-"), settings)
    path = given.get("config")
    return values if path is None else read_toml(path, settings) | values


def read_toml(path: str | Path, settings: Mapping[str, Setting] = SETTINGS) -> dict[str, Any]:
    """The settings that a TOML file gives, by flat name, each checked. A table [server] is left to `penstock serve`.

    Raises ConfigError if the file cannot be read, is not TOML, or holds an unknown table, name or value.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        tables = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from None
    values: dict[str, Any] = {}
    for title, table in tables.items():
        if title == "server" and isinstance(table, dict) and settings is SETTINGS:
            continue  # one file may serve `penstock serve` and `penstock run`
        values |= _checked_table(str(path), title, table, settings)
    return values


def _checked_table(path: str, title: str, table: Any, settings: Mapping[str, Setting]) -> dict[str, Any]:
    if title not in SECTIONS and not (title == "server" and settings is _SERVING):
        if title in SETTINGS and not isinstance(table, dict):
            raise ConfigError(f"{path}: {title}: belongs into the table [{SETTINGS[title].section}]", field=title)
        hint = _closest(title, SECTIONS) or f"the tables are {', '.join(f'[{s}]' for s in SECTIONS)}"
        raise ConfigError(f"{path}: [{title}]: unknown table; {hint}")
    if not isinstance(table, dict):
        # `model = "..."` at the top is the likeliest slip: the table and its first setting share a name.
        raise ConfigError(f"{path}: {title}: must be a table; write [{title}] above its settings", field=title)
    for name in table:
        if name in settings and settings[name].section != title:
            raise ConfigError(
                f"{path}: [{title}] {name}: belongs into the table [{settings[name].section}]", field=name
            )
    return _checked(table, lambda name: f"{path}: [{title}] {name}", settings)


def _checked(values: Mapping[str, Any], label: Callable[[str], str], settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Each value as its proper type; harmless foreign names are dropped. `label(name)` is how the user wrote it."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        if name in settings:
            try:
                out[name] = settings[name].check(_canonical(settings[name], value))
            except ValueError as error:
                raise ConfigError(f"{label(name)}: {error}", field=name) from None
        elif name in REMOVED:
            if REMOVED[name].refuses(value):
                raise ConfigError(f"{label(name)}: {REMOVED[name].why}", field=name)
        elif name in RENAMED:
            raise ConfigError(f"{label(name)}: is another engine's name; here it is {RENAMED[name]}", field=name)
        else:
            hint = _closest(name, settings) or f"the settings are {', '.join(settings)}"
            raise ConfigError(f"{label(name)}: unknown setting; {hint}", field=name)
    return out


def _canonical(item: Setting, value: Any) -> Any:
    # vLLM's users write "half" and torch.float16 too. `str` names a torch dtype without importing torch.
    if item.name not in ("dtype", "kv_cache_dtype") or value is None or isinstance(value, dict):
        return value
    text = str(value).removeprefix("torch.")
    return _DTYPE_ALIASES.get(text, text)


def _closest(name: str, known: Mapping[str, Any]) -> str:
    match = difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1, cutoff=0.6)
    return f"did you mean {match[0]}?" if match else ""


def _build(values: dict[str, Any]) -> EngineConfig:
    if "model" not in values:
        raise ConfigError("model: is missing; name the folder or file of the model", field="model")
    by_section: dict[str, dict[str, Any]] = {title: {} for title in SECTIONS}
    for name, value in values.items():
        by_section[SETTINGS[name].section][name] = value
    sections: dict[str, Any] = {title: SECTIONS[title](**by_section[title]) for title in SECTIONS}
    return EngineConfig(**sections)


def add_arguments(parser: argparse.ArgumentParser, *, model_positional: bool = False, server: bool = False) -> None:
    """Add one --kebab-case flag per setting, and --config for a TOML file; `server`: a server's too. Mutates `parser`.

    `model_positional` also takes the model as an argument without a flag (`penstock serve MODEL`). Flags that were
    not given leave no trace in the namespace, so that a TOML file can speak.
    """
    hide = argparse.SUPPRESS
    if model_positional:
        parser.add_argument(_POSITIONAL, metavar="MODEL", nargs="?", default=hide, help=SETTINGS["model"].help)
    parser.add_argument("--config", metavar="FILE.toml", default=hide, help="Read settings from here; flags win.")
    for title, section in SECTIONS.items():
        group = parser.add_argument_group(title, section.__doc__)
        for item in (s for s in SETTINGS.values() if s.section == title):
            _add_flag(group, item)
    if server:
        group = parser.add_argument_group("server", ServerConfig.__doc__)
        for item in SERVER_SETTINGS.values():
            _add_flag(group, item)
    for name, foreign in REMOVED.items():
        flags = ("--" + name.replace("_", "-"), *foreign.flags)
        if foreign.switch:
            parser.add_argument(*flags, dest=name, action=argparse.BooleanOptionalAction, default=hide, help=hide)
        else:
            parser.add_argument(*flags, dest=name, type=_literal, default=hide, help=hide)
    for name in RENAMED:
        parser.add_argument("--" + name.replace("_", "-"), dest=name, nargs="?", default=hide, help=hide)


def _add_flag(group: argparse._ArgumentGroup, item: Setting) -> None:
    text = item.help.replace("%", "%%")
    if item.default is not None and item.default != "auto":
        text += f" (default: {item.default})".replace("%", "%%")
    if item.kind is bool:
        action = argparse.BooleanOptionalAction
        group.add_argument(item.flag, dest=item.name, action=action, default=argparse.SUPPRESS, help=text)
        return
    # Choices are checked with everything else, after aliases; here they are shown only.
    metavar = "{" + ",".join(item.choices) + "}" if item.choices else {int: "N", float: "X", str: "NAME"}[item.kind]
    convert = _CONVERT[item.kind]
    flags = (item.flag, *_SHORT.get(item.name, ()))
    group.add_argument(*flags, dest=item.name, type=convert, metavar=metavar, default=argparse.SUPPRESS, help=text)


def parse_size(text: str) -> int:
    """An integer with an optional suffix: 4k is 4,000, 4K, 4KB and 4KiB are 4,096; likewise m/M, g/G, t/T.

    Raises argparse.ArgumentTypeError.
    """
    try:
        return int(text)
    except ValueError:
        match = _SIZE.fullmatch(text.strip())
    if match is None or not match[2]:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer such as 4096, 4k (4000) or 4K (4096)")
    unit = match[2]
    power = "kmgt".index(unit[0].lower()) + 1
    scale: int = 1000**power if unit.islower() else 1024**power
    whole, _, fraction = match[1].partition(".")
    exact = int(whole + fraction) * scale
    if exact % 10 ** len(fraction):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(exact // 10 ** len(fraction))


_CONVERT: dict[type, Callable[[str], Any]] = {int: parse_size, float: float, str: str}


def _literal(text: str) -> Any:
    # Flags of other engines: only so much typing that harmless values are recognised.
    if text.lower() in ("none", "null", ""):
        return None
    try:
        return int(text)
    except ValueError:
        return text
