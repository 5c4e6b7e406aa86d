"""Whole numbers of any size: which of them llguidance holds exactly, and ranges of them as regular expressions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from penstock.text.grammar.keywords import EXACT

_INT64 = 1 << 63


def inexact(schema: Mapping[str, Any]) -> bool:
    """Whether a schema in compiled form, without those below it, holds numbers that the library would change."""
    said = schema.get("type", "number")
    whole = "number" not in ([said] if isinstance(said, str) else said)
    if any(_bound_changes(key, schema[key], whole) for key in _BOUNDS if key in schema):
        return True
    return any(_value_changes(value) for value in [*schema.get("enum", []), schema.get("const")])


_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def _bound_changes(key: str, value: int | float, whole: bool) -> bool:
    # The library takes doubles, and makes 64-bit integers or texts of them.
    if abs(value) <= EXACT:
        return False
    if key == "maximum" and value == _INT64 - 1 and whole:
        return False  # becomes 2^63, which is cut to what it was
    if key.startswith("exclusive") or abs(value) >= _INT64 or int(float(value)) != value:
        return True
    return not whole and _printed(value) != value


def _value_changes(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_value_changes, value))
    if isinstance(value, Mapping):
        return any(map(_value_changes, value.values()))
    return isinstance(value, int) and abs(value) > EXACT and _printed(value) != value


def _printed(value: int | float) -> int | None:
    """What a double's shortest digits, filled up with zeros, say."""
    try:
        return int(Decimal(repr(float(value))))
    except OverflowError:
        return None


def bounds(schema: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """The smallest and the largest whole number that the bounds of a schema allow."""
    low = [math.ceil(schema[key]) for key in ("minimum",) if key in schema]
    low += [math.floor(schema[key]) + 1 for key in ("exclusiveMinimum",) if key in schema]
    high = [math.floor(schema[key]) for key in ("maximum",) if key in schema]
    high += [math.ceil(schema[key]) - 1 for key in ("exclusiveMaximum",) if key in schema]
    return max(low, default=None), min(high, default=None)


def within(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value, if it is a number, keeps the bounds of a schema."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    return (
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
        and not value <= schema.get("exclusiveMinimum", -math.inf)
        and not value >= schema.get("exclusiveMaximum", math.inf)
    )


def integers(low: int | None, high: int | None) -> list[str]:
    """Regular expressions that together match the numbers of a range, as JSON writes them; [] if there are none."""
    out = []
    if low is None or low < 0:
        below = _natural(max(1, 1 if high is None else -high), None if low is None else -low)
        out += [f"-(?:{'|'.join(below)})"] if below else []
    if high is None or high >= 0:
        out += _natural(max(0, low or 0), high)
    return out


def decimals(low: int | None, high: int | None) -> list[str]:
    """The same of numbers with a fraction. Both bounds are inclusive; of the others, none is left out."""
    out = []
    if low is None or low < 0:
        below = _natural(0 if high is None else max(0, -high), None if low is None else -low - 1)
        out += [rf"-(?:{'|'.join(below)})\.[0-9]+"] if below else []
    if high is None or high > 0:
        above = _natural(max(0, low or 0), None if high is None else high - 1)
        out += [rf"(?:{'|'.join(above)})\.[0-9]+"] if above else []
    return out


def _natural(low: int, high: int | None) -> list[str]:
    """From `low`, which is not negative."""
    if high is not None and low > high:
        return []
    first, digits = str(low), len(str(low))
    if high is None:
        return [_same_length(first, "9" * digits), f"[1-9][0-9]{{{digits},}}"]
    last, most = str(high), len(str(high))
    if digits == most:
        return [_same_length(first, last)]
    out = [_same_length(first, "9" * digits), _same_length("1" + "0" * (most - 1), last)]
    if most - digits > 1:
        out.append(f"[1-9][0-9]{{{digits},{most - 2}}}")
    return out


def _same_length(low: str, high: str) -> str:
    """Digits from `low` to `high`."""
    if low == high:
        return low
    if low[0] == high[0]:
        return low[0] + _same_length(low[1:], high[1:])
    rest = len(low) - 1
    if not rest:
        return f"[{low}-{high}]"
    parts = []
    first, last = int(low[0]), int(high[0])
    if low[1:].strip("0"):
        parts.append(low[0] + _same_length(low[1:], "9" * rest))
        first += 1
    if high[1:].strip("9"):
        parts.append(high[0] + _same_length("0" * rest, high[1:]))
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}][0-9]{{{rest}}}")
    return f"(?:{'|'.join(parts)})"
