"""Settings from environment variables: PENSTOCK_ and the setting's name in capitals, for each of them."""

from __future__ import annotations

import argparse
import difflib
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

from penstock.config.foreign import ALIASES, ENVIRONMENT, FOREIGN
from penstock.config.setting import PREFIX, Setting

log = logging.getLogger("penstock.config")
OTHERS: dict[str, str] = {
    "PENSTOCK_CACHE": "Folder of packed weights and log files; by default ~/.cache/penstock (or XDG_CACHE_HOME's).",
    "PENSTOCK_CPU_ISA": "Kernels of this instruction set: avx2, avx512, neon, ...; penstock doctor says which is used.",
    "PENSTOCK_LOG_LEVEL": "debug, info, warning or error; --log-level beats it.",
    "PENSTOCK_BUILD_ISAS": "Building: the kernel libraries to build, with commas.",
    "PENSTOCK_BUILD_MACHINE": "Building: the processor family to build for, if it is not this machine's.",
    "PENSTOCK_BUILD_LINKER": "Building: what links the kernel libraries.",
    "PENSTOCK_PEERS": "Benchmarks: where other engines are installed.",
    "PENSTOCK_LLAMA_CPP": "Tests and benchmarks: where llama.cpp's programs are.",
    "PENSTOCK_FORMATS": "Tools: which formats of weights are measured.",
    "PENSTOCK_PARITY_LOG": "Tests: where differences from oracles are written down.",
    "PENSTOCK_TESTS": "Tests: all runs all cases of grids that repeat one proof.",
    "PENSTOCK_LAW_EXAMPLES": "Tests: examples of each law.",
    "PENSTOCK_LAW_SEEDS": "Tests: seeds of each law.",
    "PENSTOCK_RANK_KILLS": "Tests: how many processes of a model on two ranks are killed.",
    "PENSTOCK_RANK_SEED": "Tests: which of them, and when.",
    "PENSTOCK_REPLICA_KILLS": "Tests: how many engines of a server with two are killed.",
    "PENSTOCK_HANDOVER_KILLS": "Tests: how many engines are killed while requests go from one to another.",
    "PENSTOCK_HANDOVER_SEED": "Tests: with which seed.",
    "PENSTOCK_REPLICA_SEED": "Tests: which of them, and when.",
    "PENSTOCK_FUZZ_EXAMPLES": "Tests: examples of each fuzzed parser.",
}
"""What is read elsewhere, and no setting."""
_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
# What Kubernetes puts into every container of a namespace that has a service called penstock.
_SERVICE = re.compile(r"PENSTOCK_(SERVICE_(HOST|PORT.*)|PORT_[0-9]+_(TCP|UDP).*)")


def from_environment(
    environment: Mapping[str, str], settings: Mapping[str, Setting], every: Mapping[str, Setting]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Name -> value for what is set, of `settings` and of other engines' names; and name -> its variable.

    Those of `every` that are none of `settings` belong to other commands. An empty variable counts as not set. A name
    that nobody knows is logged with the nearest. Raises ValueError with the whole sentence for a text that is no value.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for variable, name in ENVIRONMENT.items():
        if environment.get(variable) and not environment.get(PREFIX + name.upper()) and name in settings:
            values[name], origins[name] = converted(every[name], environment[variable]), variable
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or not text or variable in OTHERS or _SERVICE.fullmatch(variable):
            continue
        name = variable.removeprefix(PREFIX).lower()
        ours = ALIASES[name].ours if name in ALIASES else name
        if variable == PREFIX + "PORT" and text.startswith(("tcp://", "udp://")):
            log.warning("%s is %s, which Kubernetes has set and no port: it is left unread", variable, text)
        elif ours in settings:
            try:
                values[name] = converted(every[ours], text)
            except (ValueError, argparse.ArgumentTypeError) as error:
                raise ValueError(f"{variable}: {error}") from None
        elif name in FOREIGN:
            values[name] = boolean(text) if FOREIGN[name].switch else literal(text)
        elif ours not in every:
            near = difflib.get_close_matches(variable, [*OTHERS, *(s.variable for s in every.values())], n=1)
            log.warning("%s is set, and nothing reads it%s", variable, f"; did you mean {near[0]}?" if near else "")
        if name in values:
            origins[name] = variable
    return values, origins


def converted(item: Setting, text: str) -> Any:
    """A text as the setting's kind. Raises ValueError or argparse.ArgumentTypeError."""
    return (boolean if item.kind is bool else CONVERT[item.kind])(text)


def boolean(text: str) -> bool:
    word = text.strip().lower()
    if word not in _ON + _OFF:
        raise ValueError(f"must be true or false (1, 0, yes, no, on, off), not {text!r}")
    return word in _ON


def literal(text: str) -> Any:
    """Names of other engines: only so much typing that harmless values are recognised."""
    if text.lower() in ("none", "null", ""):
        return None
    try:
        return int(text)
    except ValueError:
        return text


_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmgt]|[KMGT](?:i?B)?)?")


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


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


CONVERT: dict[type, Callable[[str], Any]] = {int: parse_size, float: _number, str: str}
