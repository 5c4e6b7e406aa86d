"""How every weight is held: decided here, once, and read by the planner, the loader, the packer and the evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from penstock.base.errors import ConfigError
from penstock.config import EngineConfig
from penstock.config.selection import Keeping
from penstock.core.backend import BackendTraits
from penstock.core.events import Decision
from penstock.core.held_weights import HeldWeights
from penstock.core.machine import Machine
from penstock.core.matrix_format import (
    TABLES,
    MatrixFormat,
    Scheme,
    codes_matrices,
    parse_scheme,
    plain,
    rounded_matrices,
    row_matrices,
)
from penstock.core.model_spec import ModelSpec
from penstock.core.panels import panels_of, takes
from penstock.plan.memory import gib

StoredFormats = Mapping[str, MatrixFormat]
"""Logical name -> how the checkpoint stores a matrix, for those that it stores as codes that can be held."""
NO_CODES: StoredFormats = MappingProxyType({})
MOST_COPIED_PERCENT = 75
"""Of the available memory, for weights that are copied out of their file."""


def hold_weights(
    spec: ModelSpec, dtype: str, scheme: Scheme, stored: StoredFormats, *, traits: BackendTraits, exact: bool
) -> HeldWeights:
    """`dtype`: of everything that is held as plain numbers.

    A scheme rounds every matrix that it may, but for codes that are what it rounds to already; a table is then looked
    up in `dtype`. Without a scheme a matrix, and the table of embeddings, stays the codes that it was stored as; where
    native panels cannot hold these, it is their values: in float32, which has each of them exactly, if `exact`, else in
    `dtype`. What rows are not multiplied with and tokens not looked up in is always values in `dtype`.
    """
    if scheme.weight_bits:
        shapes = rounded_matrices(spec)
        mine = [name for name in shapes if name in stored and name not in TABLES]
        kept = {name: stored[name] for name in mine if takes(scheme, stored[name], shapes[name][1])}
        tables = tuple(name for name in shapes if name in TABLES)
        return HeldWeights(dtype, dict.fromkeys(shapes, scheme.format) | kept, tables, traits.quantizes)
    matrices: dict[str, MatrixFormat] = {}
    for name, shape in codes_matrices(spec).items() if stored else ():
        format = stored.get(name)
        if format is None:
            continue
        # Rows cannot be looked up in a table whose inputs are in an order of their own.
        panels = panels_of(format, shape[1]) if traits.quantizes else None
        if not traits.quantizes or (panels is not None and not (name in TABLES and format.ordered)):
            matrices[name] = format
        elif exact and dtype != "float32" and name not in TABLES:
            matrices[name] = plain("float32")
    return HeldWeights(dtype, matrices, (), traits.quantizes)


def held_by(
    config: EngineConfig, spec: ModelSpec, dtype: str, stored: StoredFormats, traits: BackendTraits
) -> HeldWeights:
    """`hold_weights` as the settings say; `ops` must have been decided. Who gives a dtype has values rounded to it."""
    scheme = parse_scheme(config.model.quantization)
    return hold_weights(spec, dtype, scheme, stored, traits=traits, exact=config.model.dtype == "auto")


def copies_packed(config: EngineConfig, weight_bytes: int, machine: Machine) -> Decision:
    """Whether weights that were packed before are read into memory ("copied"), or mapped."""
    given, available = config.execution.packed_weights, machine.available_bytes
    most = config.execution.weight_memory_bytes
    if most is not None:
        why = f"at most {gib(most)} of {gib(weight_bytes)} are in memory; the other layers are read in every step"
        return Decision("packed_weights", "streamed", why)
    if given != "auto":
        return Decision("packed_weights", given, "as given")
    if weight_bytes <= most_copied(machine):
        return Decision("packed_weights", "copied", "into huge pages, which products read faster than a mapped file")
    why = (
        f"{gib(weight_bytes)} of weights are more than {MOST_COPIED_PERCENT} % of the available {gib(available)}: the "
        "system can give pages of a file back"
    )
    return Decision("packed_weights", "mapped", why)


def resident_bytes(config: EngineConfig, weight_bytes: int, traits: BackendTraits, keeping: Keeping | None) -> int:
    """Of `weight_bytes`, what is in memory at a time. Raises ConfigError if all of them have to be there."""
    most = config.execution.weight_memory_bytes
    if config.execution.memory_bytes is not None:
        raise ConfigError(
            "memory_bytes: it is shared out for an engine that runs on this machine; here give weight_memory_bytes and "
            "kv_cache_memory_bytes",
            field="memory_bytes",
        )
    if most is not None or config.execution.packed_weights == "streamed":
        name, why = "packed_weights" if most is None else "weight_memory_bytes", None
        if not traits.quantizes:
            why = f"only native kernels compute while weights are read, and ops is {config.execution.ops}; use native"
        elif keeping is not None and keeping.ahead:
            why = f"{keeping.config.method} tries a layer's weights in the layer before it; use another kv_selector"
        if why is not None:
            raise ConfigError(f"{name}: {why}, or leave it away", field=name)
    return weight_bytes if most is None else min(most, weight_bytes)


def most_copied(machine: Machine) -> int:
    """Bytes of weights up to which they are copied out of their packed file by default."""
    return machine.available_bytes * MOST_COPIED_PERCENT // 100


def activation_decision(
    config: EngineConfig, spec: ModelSpec, held: HeldWeights, stored: StoredFormats
) -> Decision | None:
    """What activations become before products with codes as stored; None where there are none."""
    shapes = row_matrices(spec)
    kept = [name for name in shapes if name in stored and held.matrices.get(name) == stored[name]]
    if not held.packed or not kept or config.model.quantization != "none":
        return None
    found = [panels_of(stored[name], shapes[name][1]) for name in kept]
    blocks = sorted({panels.row_block for panels in found if panels is not None})
    if config.model.activation_quantization == "none":
        return Decision("activation_quantization", "none", "as given: activations are not rounded to integers")
    rounded = [size for size in blocks if size]
    if not rounded:
        return Decision("activation_quantization", "none", "codes of floats are multiplied with floats")
    sizes = " or ".join(map(str, rounded))
    why = f"8 bits with a scale per {sizes} inputs, as the groups of the weights are; none rounds to no integers"
    return Decision("activation_quantization", "int8", why)


def weight_decisions(spec: ModelSpec, held: HeldWeights, stored: StoredFormats) -> list[Decision]:
    """What is held how, and what that costs; nothing for a model of plain weights."""
    if not held.matrices and not stored:
        return []
    shapes = codes_matrices(spec)
    told = [name for name in shapes if name in held.matrices or name in stored]
    out = []
    for format in sorted({held.of(name) for name in told}, key=str):
        names = [name for name in told if held.of(name) == format]
        num_bytes = sum(held.matrix_bytes(name, shapes[name]) for name in names)
        kept = sum(stored[name].num_bytes(shapes[name]) for name in names if name in stored)
        as_stored = all(stored.get(name) == format for name in names)
        why = f"{gib(num_bytes)} for {len(names)} matrices, "
        if as_stored:
            why += "the codes of the checkpoint, which are neither decoded nor rounded again"
        elif not format.is_plain:
            why += "rounded as quantization says" + (f", whatever their {gib(kept)} of codes were" if kept else "")
        else:
            exact = "each exactly; a dtype of 16 bits takes half and rounds" if format.code == "float32" else "rounded"
            why += f"the values of {gib(kept)} of codes, {exact}: no native panels hold {stored[names[0]]}"
        out.append(Decision("weights", str(format), why))
    return out
