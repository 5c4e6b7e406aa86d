"""The fields of a quantization_config, each read or refused by name: what is not known may change what is computed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from penstock.base.errors import UnsupportedError
from penstock.formats.files import quoted


class Settings:
    """What a configuration says about one method. `where`: of which file, for messages."""

    def __init__(self, method: str, given: Mapping[str, Any], where: str) -> None:
        self.method, self.given, self.where = method, given, where

    def refused(self, what: str) -> UnsupportedError:
        text = what if what.isprintable() else quoted(what)
        return UnsupportedError(
            f"the weights are quantised with the method {quoted(self.method)}, and {self.where} says {text}"
        )

    def inner(self, given: object, what: str) -> Settings:
        """The settings in an object inside of it."""
        if not isinstance(given, Mapping):
            raise self.refused(f"{what} {given!s:.40}; an object is needed")
        return Settings(self.method, given, self.where)

    def allow(self, known: Collection[str]) -> None:
        """Raises UnsupportedError for any other field that is set."""
        for name, value in self.given.items():
            if value and name not in known:
                raise self.refused(f"{name!s:.40}, a field that is not known")

    def get(self, *names: str) -> Any:
        """The first of these that is set, None if none is."""
        return next((self.given[name] for name in names if self.given.get(name) is not None), None)

    def flag(self, name: str, default: bool) -> bool:
        value = self.given.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.refused(f"{name} {value!s:.40}; true or false is needed")
        return default if value is None else value

    def bits(self, known: Sequence[int], *names: str) -> int:
        value = self.get(*names)
        if type(value) is not int or value not in known:
            listed = [str(b) for b in known]
            choices = " and ".join([", ".join(listed[:-1]), listed[-1]] if len(listed) > 1 else listed)
            raise self.refused(f"{names[0]} {value!s:.40}; codes of {choices} bits are read")
        return value

    def group(self, *names: str) -> int:
        """Inputs that share a scale; 0: all of them, which files call -1."""
        value = self.get(*names)
        if type(value) is not int or not (value == -1 or 0 < value < 1 << 31):
            raise self.refused(f"{names[0]} {value!s:.40}; a number of inputs is needed, or -1 for all of them")
        return max(value, 0)

    def names(self, *fields: str) -> tuple[str, ...]:
        """A list of names of modules, or of patterns; () if there is none."""
        value = self.get(*fields) or []
        if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
            raise self.refused(f"{fields[0]} that is no list of names")
        return tuple(value)

    def one_of(self, name: str, values: Sequence[Any]) -> Any:
        """The value of a field that must be one of these; the first of them if it is not set."""
        value = self.given.get(name)
        if value is None:
            return values[0]
        if value not in values:
            known = ", ".join(str(v) for v in values if v is not None)
            raise self.refused(f"{name} {value!s:.40}; {known} can be read")
        return value


def is_spared(name: str, patterns: Sequence[str]) -> bool:
    """Whether a module is stored as it was, as far as a configuration tells: for planning, since a file shows it.

    A pattern is a name, the beginning or a part of one, or has "*" for anything. Expressions ("re:...") are a
    stranger's and never run; those of names, dots and ".*" are taken for what they say.
    """
    return _spared(tuple(patterns)).has(name)


@lru_cache(8)
def _spared(patterns: tuple[str, ...]) -> _Spared:
    return _Spared(patterns)


class _Spared:
    """Configurations name hundreds of modules beside tens of thousands of matrices: a name is compared only with the
    patterns whose inner parts it has."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._any: list[str] = []
        self._by_inner: dict[str, list[str]] = {}
        """Those of at least three parts and no sign, by what is between their first and their last dot."""
        for pattern in dict.fromkeys(patterns):
            first, last = pattern.find("."), pattern.rfind(".")
            if first < last and not pattern.startswith("re:") and "*" not in pattern:
                self._by_inner.setdefault(pattern[first + 1 : last], []).append(pattern)
            else:
                self._any.append(pattern)

    def has(self, name: str) -> bool:
        if any(_matches(name, pattern) for pattern in self._any):
            return True
        if not self._by_inner:
            return False
        parts = name.split(".")
        for end in range(2, len(parts)):
            for begin in range(1, end):
                some = self._by_inner.get(".".join(parts[begin:end]), ())
                if any(pattern in name for pattern in some):
                    return True
        return False


def _matches(name: str, pattern: str) -> bool:
    text = pattern
    if text.startswith("re:"):
        text = text[3:].removeprefix("^").removesuffix("$").replace(r"\.", ".").replace(".*", "*")
        if any(sign in text for sign in "\\()[]{}|+?"):
            return False
    if "*" not in text:
        return text == name or text in name
    first, *parts = text.split("*")
    if not name.startswith(first):
        return False
    at = len(first)
    for part in parts:  # the nearest place of each part leaves the most room for the next
        found = name.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return not parts[-1] or name.endswith(parts[-1])
