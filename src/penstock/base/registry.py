"""Named implementations, imported only when used (start-up time is a feature)."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from penstock.base.errors import ConfigError


class Registry:
    """Maps a name to `"module:attribute"` and imports it on first use."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._entries: dict[str, str] = {}

    def add(self, name: str, target: str) -> None:
        """Register `target` (`"package.module:attribute"`) as `name`. Raises ConfigError if the name is taken."""
        if name in self._entries:
            raise ConfigError(f"{self.what} {name!r} is registered twice")
        self._entries[name] = target

    def get(self, name: str) -> Any:
        """The implementation called `name`. Raises ConfigError naming the choices if there is none."""
        try:
            module, attribute = self._entries[name].split(":")
        except KeyError:
            raise ConfigError(
                f"unknown {self.what} {name!r}; choose one of: {', '.join(sorted(self._entries))}", field=self.what
            ) from None
        return getattr(import_module(module), attribute)

    def names(self) -> list[str]:
        return sorted(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())
