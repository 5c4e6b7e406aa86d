"""`NAME:knob=value,knob=value`: a part's name with arguments of its constructor, which all have defaults."""

from __future__ import annotations

from inspect import signature
from typing import Any

from penstock.base.errors import ConfigError


def knobs(build: Any, what: str, field: str, given: str) -> dict[str, Any]:
    """`a=1,b=x` as arguments of `build`; the type of each is that of its default. `what` is how errors call the part.

    Raises ConfigError for `field`, naming what there is, for an unknown one and for a value of another type.
    """
    known = {p.name: p.default for p in signature(build).parameters.values() if p.default is not p.empty}
    found: dict[str, Any] = {}
    for item in filter(None, given.split(",")):
        key, _, text = (part.strip() for part in item.partition("="))
        if key not in known:
            choices = f"it has {', '.join(sorted(known))}" if known else "it has none"
            raise ConfigError(f"{what} has no knob {key!r}; {choices}", field=field)
        try:
            found[key] = type(known[key])(text)
        except ValueError:
            want = type(known[key]).__name__
            raise ConfigError(f"knob {key!r} of {what} is {text!r}, not {want}", field=field) from None
    return found
