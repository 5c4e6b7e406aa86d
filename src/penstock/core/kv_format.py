"""How each layer keeps its keys and values: what the setting kv_cache_dtype says, as data.

A *codec* is a name in `core.kv_codec.KV_CODECS`; an *alias* gives one to keys and another to values. Source: KIVI,
arXiv 2402.02750, section 3 (keys by channel, values by token, the newest tokens whole).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from penstock.base.errors import ConfigError
from penstock.core.kv_codec import KV_CODECS, codecs_by_token

ALIASES = {"kivi4": ("channel4", "int4"), "kivi2": ("channel2", "int2")}
"""Name -> codecs of keys and of values."""
DEFAULT_RECENT = 64
EXAMPLE = '{"dtype": "int4", "layers": {"0-1": "int8", "2": {"k": "int8", "v": "int4"}}, "recent": 64, "sinks": 32}'
_KEYS = ("dtype", "layers", "recent", "sinks")


class LayerFormat(msgspec.Struct, frozen=True):
    """One layer. `keys`, `values`: one codec for all kv heads, or one per kv head.

    `recent`: so many of the newest tokens, and what else shares a block with them, are read as float16; so are the
    first `sinks`. Blocks are encoded when they are complete; with 0 every token is encoded as it comes.
    """

    keys: tuple[str, ...]
    values: tuple[str, ...]
    recent: int = 0
    sinks: int = 0

    @property
    def pair(self) -> bool:
        """One codec for all keys, one for all values, and nothing besides."""
        return len(self.keys) == len(self.values) == 1 and not self.recent

    @property
    def plain(self) -> str | None:
        """The codec of everything, if there is but one and nothing besides."""
        return self.keys[0] if self.pair and self.keys == self.values else None


class KvFormat(msgspec.Struct, frozen=True):
    """All layers: `layers[n]` for those that are named, `default` for the others."""

    default: LayerFormat
    layers: dict[int, LayerFormat] = {}

    def of(self, layer: int) -> LayerFormat:
        return self.layers.get(layer, self.default)

    @property
    def every(self) -> tuple[LayerFormat, ...]:
        """What it consists of."""
        return (self.default, *self.layers.values())


def wrong(text: str) -> ConfigError:
    return ConfigError(f"kv_cache_dtype: {text}", field="kv_cache_dtype")


@lru_cache(maxsize=64)
def parse_kv_format(given: str) -> KvFormat:
    """A name, or a JSON object such as `EXAMPLE`. Raises ConfigError naming the part that is wrong."""
    if not given.lstrip().startswith("{"):
        return KvFormat(_layer(given, {}, ""))
    try:
        found = json.loads(given)
    except ValueError as error:
        raise wrong(f"is not JSON: {error}; for example {EXAMPLE}") from None
    for name in found:
        if name not in _KEYS:
            raise wrong(f"{name}: unknown; known: {', '.join(_KEYS)}; for example {EXAMPLE}")
    besides = {name: _count(name, found[name]) for name in ("recent", "sinks") if name in found}
    if "dtype" not in found:
        raise wrong(f"dtype is missing: what layers have that are not named; for example {EXAMPLE}")
    named = found.get("layers", {})
    if not isinstance(named, dict):
        raise wrong(f"layers: must be an object of numbers or ranges of layers; for example {EXAMPLE}")
    layers: dict[int, LayerFormat] = {}
    for span, one in named.items():
        for n in _span(span):
            if n in layers:
                raise wrong(f"layers: {n} is named twice")
            layers[n] = _layer(one, besides, f"layers: {span}: ")
    return KvFormat(_layer(found["dtype"], besides, "dtype: "), layers)


def _layer(given: Any, besides: Mapping[str, int], where: str) -> LayerFormat:
    if isinstance(given, dict):
        if set(given) != {"k", "v"}:
            raise wrong(f'{where}must be a name or have exactly the keys k and v, as {{"k": "int8", "v": "int4"}}')
        keys, values = (_codecs(given[name], f"{where}{name}: ", name == "k") for name in ("k", "v"))
    elif isinstance(given, str) and given in ALIASES:
        (key, value) = ALIASES[given]
        keys, values = (key,), (value,)
    elif isinstance(given, str) and given in codecs_by_token():
        keys = values = (given,)
    else:
        known = ", ".join((*(() if where else ("auto",)), *codecs_by_token(), *ALIASES))
        raise wrong(f"{where}must be one of {known}{' or a JSON object' * (not where)}, not {json.dumps(given)}")
    sinks = besides.get("sinks", 0)
    whole = bool(sinks) or any(KV_CODECS.traits(codec).scales == "block" for codec in keys)
    recent = besides.get("recent", DEFAULT_RECENT if whole else 0)
    if whole and not recent:
        raise wrong(f"{where}recent: 0 leaves nowhere to collect a block; use at least 1 (by default {DEFAULT_RECENT})")
    return LayerFormat(keys, values, recent, sinks)


def _codecs(given: Any, where: str, of_keys: bool) -> tuple[str, ...]:
    names = given if isinstance(given, list) else [given]
    known = KV_CODECS.names() if of_keys else codecs_by_token()
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise wrong(f"{where}must be one of {', '.join(known)}, not {json.dumps(name)}")
    if not names:
        raise wrong(f"{where}a list needs one codec for each kv head")
    return (names[0],) if len(set(names)) == 1 and not isinstance(given, list) else tuple(names)


def _count(name: str, given: Any) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or not 0 <= given < 2**31:
        raise wrong(f"{name}: must be a number of tokens, not {json.dumps(given)}")
    return given


def _span(given: str) -> range:
    """`3`, or `2-5` with both ends."""
    first, _, last = given.partition("-")
    if not (first.isdecimal() and (last or first).isdecimal()) or int(last or first) < int(first):
        raise wrong(f'layers: "{given}" is no layer and no range of layers, as "3" or "2-5"')
    if int(last or first) > 9999:
        raise wrong(f'layers: "{given}": no model has so many layers')
    return range(int(first), int(last or first) + 1)
