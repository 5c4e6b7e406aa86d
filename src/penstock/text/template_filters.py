"""Filters of chat templates, and the checks of operations that could be huge in one execution.

Filters that no chat template needs (`center`, `wordwrap`, `batch`, ...) are absent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import wraps
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS
from jinja2.runtime import Context, Undefined

from penstock.text.template_meter import MAX_NODES, Meter, meter

MAX_INT_BITS = 4096
MAX_PAD = 10_000
"""Characters a padding or indenting operation may add per line."""

_STR_METHODS = """
    strip lstrip rstrip split rsplit splitlines startswith endswith replace upper lower title capitalize swapcase
    casefold join format find rfind index rindex count partition rpartition removeprefix removesuffix zfill center ljust
    rjust isdigit isalpha isalnum isspace isupper islower istitle isnumeric isdecimal isascii
"""
_FILTERS = """
    abs attr capitalize count d default dictsort e escape first float groupby int items last length list lower map max
    min reject rejectattr reverse safe select selectattr sort string title trim truncate unique upper
    urlencode wordcount
"""
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_STR_METHODS.split()),
    dict: frozenset(("get", "items", "keys", "values", "copy")),
    list: frozenset(("index", "count", "copy")),
    tuple: frozenset(("index", "count")),
}
_FREE_FILTERS = frozenset(("count", "length", "first", "last", "default", "d", "int", "float", "safe", "attr"))
_WIDE_FORMAT = re.compile(r"\d{5}|\*|\{[^{}]*\{")
"""Format strings that pad by 10,000 or more, or by a width that only shows at run time."""


def check_product(limit: Meter, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_INT_BITS:
            raise SecurityError("the chat template computes too large a number")
        return
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(times, int):
            size = len(sequence) * max(times, 0)
            limit.fits(size)
            if not isinstance(sequence, str):
                limit.walk(sequence, text=False)
                if size > MAX_NODES:
                    raise SecurityError(f"the chat template makes a list of more than {MAX_NODES} elements")


def check_format(limit: Meter, template: str, values: Any) -> None:
    if _WIDE_FORMAT.search(template):
        raise SecurityError("the chat template pads text too far")
    limit.walk([template, values], text=True)
    # Every place in the template could take the largest value.
    places = template.count("%") + template.count("{")
    items = values if isinstance(values, tuple | list) else [values]
    limit.fits(len(template) + places * max((len(v) if isinstance(v, str) else 64 for v in items), default=0))


def check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MAX_INT_BITS:
        raise SecurityError("the chat template computes too large a number")


def check_call(limit: Meter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Of methods of Python's own values only a known list may be called, and only with results of bounded size."""
    # The sandbox hands out `str.format` in a wrapper of its own.
    wrapped = getattr(function, "__wrapped__", None)
    function = wrapped if isinstance(wrapped, BuiltinMethodType) else function
    receiver = getattr(function, "__self__", None)
    kind = next((kind for kind in _METHODS if isinstance(receiver, kind)), None)
    if kind is None and not isinstance(function, BuiltinMethodType):
        return
    name = function.__name__
    if kind is None or name not in _METHODS[kind]:
        raise SecurityError(f"chat templates may not call {type(receiver).__name__}.{name[:40]}")
    if not isinstance(receiver, str):
        return
    limit.spend(len(receiver) >> 8)
    if name in ("center", "ljust", "rjust", "zfill") and any(isinstance(a, int) and a > MAX_PAD for a in args):
        raise SecurityError("the chat template pads text too far")
    if name == "format":
        check_format(limit, receiver, [*args, *kwargs.values()])
    elif name == "replace" and len(args) >= 2:
        _check_replace(limit, receiver, *args[:2])
    elif name == "join" and args:
        items = list(args[0])
        limit.walk(items, text=True)
        limit.fits(len(receiver) * len(items))
    elif name in ("split", "rsplit", "splitlines", "count"):
        limit.spend(len(receiver) >> 7)


def _check_replace(limit: Meter, text: Any, old: Any, new: Any) -> None:
    text, old, new = str(text), str(old), str(new)
    times = text.count(old)
    limit.fits(len(text) + times * (len(new) - len(old)))
    limit.spend((len(text) >> 7) + times // 8)


def _charged(function: Callable[..., Any], free: bool) -> Callable[..., Any]:
    """One of Jinja's own filters, charged for the size of what it is given and of what it makes."""
    at = 1 if hasattr(function, "jinja_pass_arg") else 0
    sorts = function in (FILTERS["sort"], FILTERS["groupby"], FILTERS["dictsort"])
    prints = function is FILTERS["string"]

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        limit = meter()
        value = args[at] if len(args) > at else None
        if not free:
            if isinstance(value, list | tuple | dict | range):
                limit.spend(1 + len(value) * (8 if sorts else 1))
            elif isinstance(value, str):
                limit.spend(1 + (len(value) >> 7))
            if prints:
                limit.walk(value, text=True)
        limit.spend(1)
        result = function(*args, **kwargs)
        return result if free else limit.made(result)

    return run


@jinja2.pass_context
def _tojson(
    context: Context, value: Any, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    if indent is not None and (not isinstance(indent, int) or not 0 <= indent <= 16):
        raise SecurityError("tojson: indent must be a number from 0 to 16")
    limit = meter()
    limit.walk([value, separators], text=True, indent=indent or 0)
    if isinstance(value, Undefined):
        raise jinja2.UndefinedError("tojson: the value is undefined")
    return str(
        limit.made(
            json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        )
    )


def _picked(context: Context, values: Any, attribute: str | int | None) -> list[Any]:
    """The elements, or of each the attribute that a dotted path names."""
    items = list(values)
    for name in [] if attribute is None else str(attribute).split("."):
        items = [context.environment.getitem(item, int(name) if name.isdigit() else name) for item in items]
    return items


@jinja2.pass_context
def _join(context: Context, value: Any, d: str = "", attribute: Any = None) -> str:
    limit = meter()
    items = _picked(context, value, attribute)
    limit.walk(items, text=True)
    limit.fits(len(str(d)) * len(items))
    return str(limit.made(str(d).join(map(str, items))))


@jinja2.pass_context
def _replace(context: Context, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    _check_replace(meter(), s, old, new)
    return str(meter().made(str(s).replace(str(old), str(new), -1 if count is None else count)))


@jinja2.pass_context
def _indent(context: Context, s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    pad = width if isinstance(width, str) else " " * min(max(width, 0), MAX_PAD)
    text = str(s)
    meter().fits(len(text) + (text.count("\n") + 1) * len(pad))
    lines = (text + "\n").splitlines()
    lines = [pad + line if (n or first) and (line or blank) else line for n, line in enumerate(lines)]
    return str(meter().made("\n".join(lines)))


@jinja2.pass_context
def _format(context: Context, value: Any, *args: Any, **kwargs: Any) -> str:
    check_format(meter(), str(value), [*args, *kwargs.values()])
    return str(meter().made(str(value) % (kwargs or args)))


@jinja2.pass_context
def _sum(context: Context, iterable: Any, attribute: Any = None, start: float = 0) -> Any:
    items = _picked(context, iterable, attribute)
    if not all(isinstance(item, int | float) for item in [start, *items]):
        raise SecurityError("sum: chat templates may only sum numbers")
    meter().spend(1 + len(items) // 8)
    return sum(items, start)


@jinja2.pass_context
def _round(context: Context, value: float, precision: int = 0) -> float:
    if not 0 <= precision <= 15:
        raise SecurityError("round: precision must be a number from 0 to 15")
    return round(float(value), precision)


def make_filters() -> dict[str, Callable[..., Any]]:
    """Every filter a chat template may use, by name."""
    filters = {name: _charged(FILTERS[name], name in _FREE_FILTERS) for name in _FILTERS.split()}
    own: dict[str, Callable[..., Any]] = {
        "tojson": _tojson,
        "join": _join,
        "replace": _replace,
        "indent": _indent,
        "format": _format,
    }
    own |= {"sum": _sum, "round": _round}
    return filters | own
