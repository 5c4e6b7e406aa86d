"""What one setting is: a dataclass field that carries its own help, bounds and checks."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator
from numbers import Integral, Real
from types import UnionType
from typing import Any, TypeVar, get_args, get_type_hints

from penstock.base.errors import ConfigError

T = TypeVar("T")
PREFIX = "PENSTOCK_"

_described: dict[type, tuple[Setting, ...]] = {}  # a memo: resolving annotations anew for every config is slow
_KIND_WORDS = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One field of a section, as the command line, the TOML loader and the docs see it.

    `above` is an exclusive lower bound; `minimum` and `maximum` are inclusive. `required` settings have no default.
    """

    name: str
    section: str
    kind: type
    optional: bool
    required: bool
    default: Any
    help: str
    minimum: int | float | None
    above: float | None
    maximum: int | float | None
    choices: tuple[str, ...] | None
    allow_empty: bool = False
    takes_object: bool = False
    """A dictionary is taken for its JSON text."""
    secret: bool = False
    """Its value is never shown."""

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return PREFIX + self.name.upper()

    def shown(self, value: Any) -> str:
        """A value as people may see it."""
        return "***" if self.secret and value is not None else str(value)

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def check(self, value: Any) -> Any:
        """The value as its proper type. Raises ValueError whose text completes "<name>: ..."."""
        if value is None:
            if self.optional:
                return None
            raise ValueError(f"must be {_KIND_WORDS[self.kind]}, not None")
        value = self._cast(value)
        if self.choices is not None and value not in self.choices:
            raise ValueError(f"must be one of {', '.join(self.choices)}, not {value!r}")
        if self.minimum is not None and value < self.minimum:
            raise ValueError(f"must be at least {self.minimum}, not {value}")
        if self.above is not None and not value > self.above:
            raise ValueError(f"must be above {self.above}, not {value}")
        if self.maximum is not None and value > self.maximum:
            raise ValueError(f"must be at most {self.maximum}, not {value}")
        return value

    def _cast(self, value: Any) -> Any:
        # bool is a subclass of int: `block_size=True` is a mistake, never a 1.
        if self.kind is bool or isinstance(value, bool):
            if self.kind is bool and isinstance(value, bool):
                return value
        elif self.kind is int and isinstance(value, Integral):
            return int(value)
        elif self.kind is float and isinstance(value, Real) and math.isfinite(value):
            return float(value)
        elif self.takes_object and isinstance(value, dict):
            return json.dumps(value, sort_keys=True)
        elif self.kind is str and isinstance(value, str | os.PathLike):
            text = os.fspath(value)
            if isinstance(text, str) and (text.strip() or self.allow_empty):
                return text
            raise ValueError("must not be empty")
        shown = "***" if self.secret else repr(value)
        raise ValueError(f"must be {_KIND_WORDS[self.kind]}, not {shown} ({type(value).__name__})")


def setting(
    default: T,
    help: str,
    *,
    minimum: int | float | None = None,
    above: float | None = None,
    maximum: int | float | None = None,
    choices: tuple[str, ...] | None = None,
    allow_empty: bool = False,
    takes_object: bool = False,
    secret: bool = False,
) -> T:
    """A dataclass field with its help text and bounds."""
    return dataclasses.field(
        default=default,
        repr=not secret,
        metadata={
            "help": help,
            "minimum": minimum,
            "above": above,
            "maximum": maximum,
            "choices": choices,
            "allow_empty": allow_empty,
            "takes_object": takes_object,
            "secret": secret,
        },
    )


class Section:
    """Base of every section: checks each field when the (frozen) dataclass is made.

    Raises ConfigError naming the field.
    """

    def __post_init__(self) -> None:
        for item in settings_of(type(self)):
            try:
                value = item.check(getattr(self, item.name))
            except ValueError as error:
                raise ConfigError(f"{item.name}: {error}", field=item.name) from None
            object.__setattr__(self, item.name, value)


def settings_of(section: type) -> tuple[Setting, ...]:
    """The settings of one section class, in the order they are written in."""
    if section not in _described:
        _described[section] = tuple(_describe(section))
    return _described[section]


def _describe(section: type) -> Iterator[Setting]:
    hints = get_type_hints(section)
    title = section.__name__.removesuffix("Config").lower()
    for item in dataclasses.fields(section):
        hint = hints[item.name]
        members = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        kind = next(m for m in members if m is not type(None))
        required = item.default is dataclasses.MISSING
        meta = item.metadata
        yield Setting(
            name=item.name,
            section=title,
            kind=kind,
            optional=type(None) in members,
            required=required,
            default=None if required else item.default,
            help=meta["help"],
            minimum=meta.get("minimum"),
            above=meta.get("above"),
            maximum=meta.get("maximum"),
            choices=meta.get("choices"),
            allow_empty=meta.get("allow_empty", False),
            takes_object=meta.get("takes_object", False),
            secret=meta.get("secret", False),
        )
