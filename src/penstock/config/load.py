"""Settings from keyword arguments, command lines, the environment and TOML files, each beating those behind it."""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from penstock.base.errors import ConfigError
from penstock.config.engine import SECTIONS, SETTINGS, EngineConfig
from penstock.config.environment import CONVERT, from_environment, literal
from penstock.config.foreign import ALIASES, FOREIGN, VALUES
from penstock.config.presets import preset_settings
from penstock.config.server import FurtherModel, ServeConfig, ServerConfig
from penstock.config.setting import PREFIX, Setting, settings_of
from penstock.config.several import NOT_SHARED, OF_A_MODEL, add_named, named

_DTYPE_ALIASES = {"half": "float16", "float": "float32", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
_ATTENTION_ALIASES = {"flex_attention": "flex", "flashinfer": "flashinfer"}
"""vLLM's names, in small letters."""
_POSITIONAL = "model_positional"
_FOREIGN = "foreign:"
"""Before other engines' names in a namespace: commands have arguments of their own that are called so."""
_MODELS = "named_models"
_SHORT = {"speculative_config": ("-sc",)}
"""vLLM's short flags."""
_SEVERAL = ("lora_modules",)
"""Whose flag takes several words."""
SERVER_SETTINGS: dict[str, Setting] = {item.name: item for item in settings_of(ServerConfig)}
SERVING = SETTINGS | SERVER_SETTINGS
log = logging.getLogger("penstock.config")


class Given(NamedTuple):
    """A value that somebody has set, and where, in the words of whoever did."""

    value: Any
    origin: str


def from_kwargs(_environment: Mapping[str, str] | None = None, /, **kwargs: Any) -> EngineConfig:
    """An EngineConfig from flat names, as `LLM(model=..., block_size=...)` gives them; they beat the environment, if
    there is one.

    Raises ConfigError for unknown names (with the closest known one), wrong types and values out of range, and for
    what other engines have and Penstock has not.
    """
    given = _checked(kwargs, lambda name: name, SETTINGS)
    return engine_config(_from_environment(_environment or {}, SETTINGS) | given)


def from_toml(path: str | Path, **overrides: Any) -> EngineConfig:
    """An EngineConfig from a TOML file with the tables [model], [cache], [scheduler], [execution].

    `overrides` beat the file. Raises ConfigError; what is wrong in the file is named `FILE: [table] name: ...`.
    """
    return engine_config(read_toml(path) | _checked(overrides, lambda name: name, SETTINGS))


def from_args(args: argparse.Namespace, environment: Mapping[str, str] | None = None) -> EngineConfig:
    """An EngineConfig from what a parser prepared by `add_arguments` has read, and from the environment (by default
    the process's). Raises ConfigError.

    Other attributes of `args` are left alone, so the parser may have arguments of its own.
    """
    return engine_config(given_by(args, SETTINGS, environment))


def serve_from_args(args: argparse.Namespace, environment: Mapping[str, str] | None = None) -> ServeConfig:
    """The same for a server: the engine's settings and those of [server]. Raises ConfigError."""
    return _serve_config(*with_models(given_by(args, SERVING, environment), models_by(args)))


def serve_from_kwargs(**kwargs: Any) -> ServeConfig:
    """A ServeConfig from flat names; `config` names a TOML file that they beat, `models` further models by name: paths
    or dictionaries of settings. Raises ConfigError."""
    path, models = kwargs.pop("config", None), kwargs.pop("models", {})
    tables = {} if path is None else _models_of(path)
    for name, one in models.items():
        table = one if isinstance(one, dict) else {"model": one}
        add_named(tables, name, _model_table("models", name, table), "models")
    given = _checked(kwargs, lambda name: name, SERVING)
    return _serve_config(*with_models(given if path is None else read_toml(path, SERVING) | given, tables))


def models_by(args: argparse.Namespace) -> dict[str, Mapping[str, Given]]:
    """The models that `--model NAME=PATH` and the tables [models.NAME] of the file name. Raises ConfigError."""
    path = vars(args).get("config")
    tables = {} if path is None else _models_of(path)
    for name, where in vars(args).get(_MODELS, ()):
        add_named(tables, name, {"model": Given(where, f"--model {name}=")}, "--model")
    return tables


def _models_of(path: str | Path) -> dict[str, Mapping[str, Given]]:
    """Of a TOML file's tables [models.NAME]. Raises ConfigError."""
    tables: dict[str, Mapping[str, Given]] = {}
    for name, table in _tables(path).get("models", {}).items():
        add_named(tables, name, _model_table(str(path), name, table), f"{path}: [models]")
    return tables


def _model_table(path: str, name: str, table: Any) -> dict[str, Given]:
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: [models.{name}]: must be a table", field="models")
    for given in table:
        if given in SERVER_SETTINGS and given not in OF_A_MODEL:
            raise ConfigError(f"{path}: [models.{name}] {given}: belongs into the table [server]", field=given)
    if isinstance(table.get("keep_alive"), int):
        table = table | {"keep_alive": str(table["keep_alive"])}
    values = _checked(table, lambda one: f"{path}: [models.{name}] {one}", SERVING)
    if "model" not in values:
        raise ConfigError(f"{path}: [models.{name}]: has no model; name its folder or file", field="model")
    return values


def with_models(
    given: dict[str, Given], tables: Mapping[str, Mapping[str, Given]]
) -> tuple[dict[str, Given], dict[str, Mapping[str, Given]]]:
    """The first model's settings, and the whole of each other one's. If no first one is named, it is that of the first
    table."""
    rest = dict(tables)
    if "model" not in given and rest:
        name, table = next(iter(rest.items()))
        del rest[name]
        given = {"served_model_name": Given(name, table["model"].origin)} | dict(table) | given
    shared = {name: value for name, value in given.items() if name not in NOT_SHARED}
    return given, {name: shared | dict(table) for name, table in rest.items()}


def given_by(
    args: argparse.Namespace, settings: Mapping[str, Setting] = SETTINGS, environment: Mapping[str, str] | None = None
) -> dict[str, Given]:
    """By name, what flags, environment and file set, each checked. Raises ConfigError."""
    attributes = vars(args)
    flags = {name: attributes[name] for name in settings if name in attributes}
    flags |= {name.removeprefix(_FOREIGN): attributes[name] for name in attributes if name.startswith(_FOREIGN)}
    positional = attributes.get(_POSITIONAL)
    if positional is not None:
        if flags.get("model", positional) != positional:
            raise ConfigError(f"two models are given: {positional} and --model {flags['model']}", field="model")
        flags["model"] = positional
    # What was typed is looked at first: whoever reads a complaint knows best what that was.
    typed = _checked(flags, lambda name: "--" + name.replace("_", "-"), settings)
    values = _from_environment(os.environ if environment is None else environment, settings) | typed
    path = attributes.get("config")
    return values if path is None else read_toml(path, settings) | values


def names_a_model(args: argparse.Namespace) -> bool:
    """Whether a flag or the environment does, or there is a file, which may."""
    if vars(args).get(_MODELS):
        return True
    names = ("model", *(name for name, alias in ALIASES.items() if alias.ours == "model"))
    flags = {"model", _POSITIONAL, "config", *(_FOREIGN + name for name in names)}
    return not flags.isdisjoint(vars(args)) or any(os.environ.get(PREFIX + name.upper()) for name in names)


def _from_environment(environment: Mapping[str, str], settings: Mapping[str, Setting]) -> dict[str, Given]:
    try:
        values, variables = from_environment(environment, settings, SERVING)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return _checked(values, variables.__getitem__, settings)


def read_toml(path: str | Path, settings: Mapping[str, Setting] = SETTINGS) -> dict[str, Given]:
    """The settings that a TOML file gives, by flat name, each checked. A table [server] is left to `penstock serve`.

    Raises ConfigError if the file cannot be read, is not TOML, or holds an unknown table, name or value.
    """
    values: dict[str, Given] = {}
    for title, table in _tables(path).items():
        if title == "models" and isinstance(table, dict):
            continue  # `models_by` reads them
        if title == "server" and isinstance(table, dict) and settings is SETTINGS:
            continue  # one file may serve `penstock serve` and `penstock run`
        values |= _checked_table(str(path), title, table, settings)
    return values


def _tables(path: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from None


def _checked_table(path: str, title: str, table: Any, settings: Mapping[str, Setting]) -> dict[str, Given]:
    if title not in SECTIONS and not (title == "server" and settings is SERVING):
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


def _checked(
    values: Mapping[str, Any], label: Callable[[str], str], settings: Mapping[str, Setting]
) -> dict[str, Given]:
    """Each value as its proper type. `label(name)` is how the user wrote it. Names of other engines become ours, or are
    dropped where they change nothing."""
    out: dict[str, Given] = {}
    for name, value in values.items():
        alias = ALIASES.get(name)
        if name in settings or (alias is not None and alias.ours in settings):
            ours = name if alias is None else alias.ours
            if alias is not None:
                value = _translated(name, value, label, settings)
                if ours in out or ours in values:
                    raise ConfigError(f"{label(name)}: is another engine's name for {ours}, which is given, too")
            try:
                out[ours] = Given(settings[ours].check(_canonical(settings[ours], value)), label(name))
            except ValueError as error:
                raise ConfigError(f"{label(name)}: {error}", field=name) from None
        elif name in FOREIGN:
            if FOREIGN[name].refuses(value):
                if not FOREIGN[name].unused:
                    raise ConfigError(f"{label(name)}: {FOREIGN[name].why}", field=name)
                log.warning("%s has no effect: %s", label(name), FOREIGN[name].why)
        else:
            hint = _closest(name, settings) or f"the settings are {', '.join(settings)}"
            raise ConfigError(f"{label(name)}: unknown setting; {hint}", field=name)
    return out


def _translated(name: str, value: Any, label: Callable[[str], str], settings: Mapping[str, Setting]) -> Any:
    """The value that our setting has for what another engine's says."""
    alias = ALIASES[name]
    item = settings[alias.ours]
    if value in alias.unset and not isinstance(value, bool):
        value = item.default
    elif alias.opposite and isinstance(value, bool):
        value = not value
    log.warning("%s is taken for %s %s", label(name), alias.ours, item.shown(value))
    return value


def _canonical(item: Setting, value: Any) -> Any:
    if item.name in VALUES and isinstance(value, str) and value.lower() in VALUES[item.name]:
        raise ValueError(f"{value} is another engine's: {VALUES[item.name][value.lower()]}")
    if item.name == "attention_backend" and isinstance(value, str):
        return _ATTENTION_ALIASES.get(value.lower(), value)
    # vLLM's users write "half" and torch.float16 too. `str` names a torch dtype without importing torch.
    if item.name not in ("dtype", "kv_cache_dtype") or value is None or isinstance(value, dict):
        return value
    text = str(value).removeprefix("torch.")
    return _DTYPE_ALIASES.get(text, text)


def _closest(name: str, known: Mapping[str, Any]) -> str:
    match = difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1, cutoff=0.6)
    return f"did you mean {match[0]}?" if match else ""


def _serve_config(given: Mapping[str, Given], models: Mapping[str, Mapping[str, Given]]) -> ServeConfig:
    server = ServerConfig(**{name: item.value for name, item in given.items() if name in SERVER_SETTINGS})
    others = [FurtherModel(name=name, config=_serve_config(one, {})) for name, one in models.items()]
    return ServeConfig(engine=engine_config(given), server=server, models=tuple(others))


def engine_config(given: Mapping[str, Given]) -> EngineConfig:
    """From what `given_by` found; a server's settings are left alone. Raises ConfigError."""
    values = {name: item.value for name, item in given.items() if name in SETTINGS}
    if "model" not in values:
        raise ConfigError("model: is missing; name the folder or file of the model", field="model")
    if str(values.get("device")).startswith("cuda"):
        values.setdefault("depth", 2)  # while a GPU computes, the host plans what comes next
    if values.get("preset") is not None:
        values = preset_settings(values["preset"], values) | values
    by_section: dict[str, dict[str, Any]] = {title: {} for title in SECTIONS}
    for name, value in values.items():
        by_section[SETTINGS[name].section][name] = value
    sections: dict[str, Any] = {title: SECTIONS[title](**by_section[title]) for title in SECTIONS}
    return EngineConfig(**sections)


def add_arguments(parser: argparse.ArgumentParser, *, model_positional: bool = False, server: bool = False) -> None:
    """Add one --kebab-case flag per setting, and --config for a TOML file; `server`: a server's too. Mutates `parser`.

    `model_positional` also takes the model as an argument without a flag (`penstock serve MODEL`). Flags that were
    not given leave no trace in the namespace, so that a TOML file can speak.
    Flags that the parser has already stay its.
    """
    hide = argparse.SUPPRESS
    if model_positional:
        parser.add_argument(_POSITIONAL, metavar="MODEL", nargs="?", default=hide, help=SETTINGS["model"].help)
    parser.add_argument("--config", metavar="FILE.toml", default=hide, help="Read settings from here; flags win.")
    for title, section in SECTIONS.items():
        group = parser.add_argument_group(title, section.__doc__)
        for item in (s for s in SETTINGS.values() if s.section == title):
            if item.flag not in parser._option_string_actions:
                _add_flag(group, item, several=server)
    if server:
        group = parser.add_argument_group("server", ServerConfig.__doc__)
        for item in SERVER_SETTINGS.values():
            _add_flag(group, item)
    settings = SERVING if server else SETTINGS
    for name, alias in ALIASES.items():
        if alias.ours in settings:
            kind = settings[alias.ours].kind
            _add_hidden(parser, name, alias.flags, None if kind is bool else CONVERT[kind])
    for name, foreign in FOREIGN.items():
        _add_hidden(parser, name, foreign.flags, None if foreign.switch else literal, nargs="?")


class _ModelOrNamed(argparse.Action):
    """`--model PATH` as ever; `--model NAME=PATH` adds another model, as often as it is given."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if (found := named(values)) is None:
            namespace.model = values
        else:
            setattr(namespace, _MODELS, [*getattr(namespace, _MODELS, ()), found])


class _Joined(argparse.Action):
    """Several words as one text, as a file or the environment gives it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, " ".join(values))


def _add_hidden(
    parser: argparse.ArgumentParser,
    name: str,
    more: tuple[str, ...],
    convert: Callable[[str], Any] | None,
    **kwargs: Any,
) -> None:
    """A flag that help does not show, under those of its names that are free. No `convert`: a switch."""
    flags = [f for f in ("--" + name.replace("_", "-"), *more) if f not in parser._option_string_actions]
    if convert is None:
        kwargs = {"action": argparse.BooleanOptionalAction}
    else:
        kwargs["type"] = convert
    if flags:
        parser.add_argument(*flags, dest=_FOREIGN + name, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **kwargs)


def _add_flag(group: argparse._ArgumentGroup, item: Setting, *, several: bool = False) -> None:
    text = item.help.replace("%", "%%")
    if several and item.name == "model":
        text += " NAME=PATH, as often as you like: another model behind the same server."
        group.add_argument(item.flag, dest="model", action=_ModelOrNamed, default=argparse.SUPPRESS, help=text)
        return
    if item.default is not None and item.default != "auto":
        text += f" (default: {item.default})".replace("%", "%%")
    text += f" [{item.variable}]"
    if item.kind is bool:
        action = argparse.BooleanOptionalAction
        group.add_argument(item.flag, dest=item.name, action=action, default=argparse.SUPPRESS, help=text)
        return
    # Choices are checked with everything else, after aliases; here they are shown only.
    metavar = "{" + ",".join(item.choices) + "}" if item.choices else {int: "N", float: "X", str: "NAME"}[item.kind]
    convert = CONVERT[item.kind]
    flags = (item.flag, *_SHORT.get(item.name, ()))
    if item.name in _SEVERAL:
        group.add_argument(
            *flags, dest=item.name, nargs="+", action=_Joined, metavar="NAME=PATH", default=argparse.SUPPRESS, help=text
        )
        return
    group.add_argument(*flags, dest=item.name, type=convert, metavar=metavar, default=argparse.SUPPRESS, help=text)
