"""What a GGUF file says of its model: the metadata of its architecture, the names and shapes of its tensors."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.base.errors import ModelError, UnsupportedError
from penstock.families.fields import Fields
from penstock.families.reading import MAX_LAYERS, MAX_SIZE
from penstock.formats.files import quoted, read_exactly
from penstock.formats.gguf import Gguf
from penstock.formats.tensor_ref import TensorRef


@dataclass(frozen=True)
class Header:
    """`fields`: the metadata whose keys begin with the architecture's name, by the rest of their keys; a list of equal
    values, one per layer, is that value. `tensors`: of all parts of a split model."""

    path: Path
    fields: Fields
    tensors: Mapping[str, TensorRef]
    vocab_size: int
    hidden_size: int

    def has(self, *names: str) -> bool:
        """Whether the file holds one of these tensors."""
        return any(name in self.tensors for name in names)

    @property
    def num_layers(self) -> int:
        """Layers that decoding runs: those that predict further tokens are counted as blocks, but come after them."""
        blocks = self.fields.integer("block_count", high=MAX_LAYERS)
        further = self.fields.integer("nextn_predict_layers", low=0, high=MAX_LAYERS, default=0)
        if further >= blocks:
            raise ModelError(f"{quoted(self.path)} has {blocks} blocks, of which {further} predict further tokens")
        return blocks - further

    def per_layer(self, name: str, *, low: int = 0, default: int | None = None) -> list[int]:
        """One integer for every layer that is run; the file gives a list, or one value for all."""
        value = self.fields.raw(name)
        if isinstance(value, list):
            values = self.fields.integers(name, low=low, high=MAX_SIZE) or []
            if len(values) < self.num_layers:
                raise ModelError(f"{quoted(self.path)} gives {name} for {len(values)} of {self.num_layers} layers")
            return values[: self.num_layers]
        return [self.fields.integer(name, low=low, high=MAX_SIZE, default=default)] * self.num_layers

    def numbers(self, name: str, count: int) -> list[float]:
        """The few numbers of a tensor of positions, which are no weights: they are read here.

        Raises ModelError unless it is F32 of shape (count,) and all are positive numbers.
        """
        tensor = self.tensors[name]
        where = f"tensor {quoted(tensor.name)} of {quoted(tensor.path)}"
        if tensor.dtype != "F32" or tensor.shape != (count,):
            raise ModelError(f"{where} must be F32 of shape ({count},), not {tensor.dtype} of {quoted(tensor.shape)}")
        values = struct.unpack(f"<{count}f", read_exactly(tensor.path, tensor.offset, tensor.nbytes))
        if not all(math.isfinite(value) and value > 0 for value in values):
            raise ModelError(f"{where} holds a divisor that is not a positive number")
        return list(values)


def read_header(gguf: Gguf, tensors: Mapping[str, TensorRef], architecture: str, *, encoder: bool = False) -> Header:
    """Raises ModelError unless the file has an embedding of the size it says, UnsupportedError if it is not causal, but
    for an `encoder`."""
    fields = section(gguf, architecture + ".")
    embed = tensors.get("token_embd.weight")
    if embed is None or len(embed.shape) != 2:
        raise ModelError(f"{quoted(gguf.path)} has no embedding token_embd.weight of two dimensions")
    vocab_size, hidden_size = embed.shape
    if fields.integer("vocab_size", high=MAX_SIZE, default=vocab_size) != vocab_size:
        raise ModelError(f"{quoted(gguf.path)} gives another vocab_size than its embedding's {vocab_size} rows")
    if fields.integer("embedding_length", high=MAX_SIZE) != hidden_size:
        raise ModelError(f"{quoted(gguf.path)} gives another embedding_length than its embedding's {hidden_size}")
    if not fields.flag("attention.causal", default=True) and not encoder:
        raise UnsupportedError(f"{quoted(gguf.path)} is no causal model (attention.causal is false)")
    return Header(gguf.path, fields, tensors, vocab_size, hidden_size)


def section(gguf: Gguf, prefix: str) -> Fields:
    """The metadata under `prefix`, by the rest of their keys."""
    found: dict[str, Any] = {}
    for key, value in gguf.metadata.items():
        if key.startswith(prefix):
            same = isinstance(value, list) and value and all(v == value[0] for v in value)
            found[key[len(prefix) :]] = value[0] if same else value
    return Fields(found, f"the metadata {prefix}* of {quoted(gguf.path)}")
