"""Named implementations, imported only when used (start-up time is a feature)."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any, Generic, TypeVar, cast

from penstock.base.errors import ConfigError

P = TypeVar("P")
"""What a name stands for: a protocol's implementation, or a function that makes one."""
M = TypeVar("M")
"""What must be known of a part before it is imported."""


class Registry(Generic[P, M]):
    """Maps a name to `"module:attribute"`, imported on first use, and to what is known of it before."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._entries: dict[str, tuple[str, Any]] = {}

    def add(self, name: str, target: str, traits: M | None = None) -> None:
        """Register `target` (`"package.module:attribute"`) as `name`. Raises ConfigError if the name is taken."""
        if target.count(":") != 1:
            raise ConfigError(f"{self.what} {name!r}: {target!r} is not of the form package.module:attribute")
        if name in self._entries:
            raise ConfigError(f"{self.what} {name!r} is registered twice")
        self._entries[name] = target, traits

    def get(self, name: str) -> P:
        """The implementation called `name`. Raises ConfigError naming the choices if there is none, and why if what was
        registered is not there."""
        module, attribute = self.target(name).split(":")
        try:
            return cast("P", getattr(import_module(module), attribute))
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{self.what} {name!r} was registered as {module}:{attribute}, which cannot be had: {error}",
                field=self.what,
            ) from error

    def target(self, name: str) -> str:
        """Where it is, as registered; nothing is imported. Raises as `get`."""
        return self._entry(name)[0]

    def traits(self, name: str) -> M:
        """What was registered with the name. Raises as `get`."""
        return cast("M", self._entry(name)[1])

    def _entry(self, name: str) -> tuple[str, Any]:
        try:
            return self._entries[name]
        except KeyError:
            raise ConfigError(
                f"unknown {self.what} {name!r}; choose one of: {', '.join(sorted(self._entries))}", field=self.what
            ) from None

    def names(self) -> list[str]:
        return sorted(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())
