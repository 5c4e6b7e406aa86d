"""Which adapter a request has, as data."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from penstock.base.hashing import digest

UNIT_BYTES = 1024
"""Of the numbers of adapters, what lies together in memory (`ops.adapter_units`)."""


class AdapterRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An adapter by what is in it: `hash` of its numbers, and the folder `path` where a rank finds them. `num_bytes`:
    of the numbers; `name`: what the request calls it, for people; `num_units`: of UNIT_BYTES, that it fills at most."""

    hash: bytes
    path: str
    num_bytes: int = 0
    name: str = ""
    num_units: int = 0


class LoRARequest(NamedTuple):
    """An adapter for offline generation, with vLLM's names. Two of one content are one, whatever they are called."""

    lora_name: str
    lora_int_id: int
    lora_path: str


def number_of(adapter: AdapterRef) -> int:
    """A positive number of 31 bits, the same for one content everywhere."""
    return int.from_bytes(adapter.hash[-4:], "big") & 0x7FFFFFFF or 1


def namespace_of(namespace: bytes, adapter: AdapterRef | None) -> bytes:
    """Where blocks of KV may be shared: with an adapter only among those of its content."""
    return namespace if adapter is None else digest(b"adapter", namespace, adapter.hash)
