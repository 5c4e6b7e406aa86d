"""How every weight is held: decided here, once, and read by the planner, the loader, the packer and the evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from penstock.config import EngineConfig
from penstock.core.backend import BackendTraits
from penstock.core.events import Decision
from penstock.core.matrix_format import (
    TABLES,
    BlockFormats,
    HeldWeights,
    MatrixFormat,
    Scheme,
    panel_group,
    parse_scheme,
    plain,
    rounded_matrices,
    row_matrices,
)
from penstock.core.model_spec import ModelSpec
from penstock.plan.memory import gib

StoredFormats = Mapping[str, MatrixFormat]
"""Logical name -> how the checkpoint stores a matrix, for those that it stores as codes that can be held."""
NO_CODES: StoredFormats = MappingProxyType({})
BLOCKS_IN_PANELS = False
"""Whether native panels are asked for what GGUF files hold in blocks; else native kernels multiply with its values."""


def hold_weights(
    spec: ModelSpec, dtype: str, scheme: Scheme, stored: StoredFormats, *, traits: BackendTraits, exact: bool
) -> HeldWeights:
    """`dtype`: of everything that is held as plain numbers.

    A scheme rounds every matrix that it may, but for codes that are what it rounds to already. Without a scheme a
    matrix stays the codes that it was stored as; where native panels cannot hold these, it is their values: in float32,
    which has each of them exactly, if `exact` and it is no block of a GGUF file, else in `dtype`. What rows are not
    multiplied with is always values in `dtype`.
    """
    in_blocks = isinstance(stored, BlockFormats)
    if in_blocks and traits.quantizes and not BLOCKS_IN_PANELS:
        stored = NO_CODES
    if scheme.weight_bits:
        shapes = rounded_matrices(spec)
        mine = [name for name in shapes if name in stored and name not in TABLES]
        kept = {name: stored[name] for name in mine if scheme.takes(stored[name], shapes[name][1])}
        return HeldWeights(dtype, dict.fromkeys(shapes, scheme.format) | kept)
    matrices: dict[str, MatrixFormat] = {}
    for name, shape in row_matrices(spec).items() if stored else ():
        format = stored.get(name)
        if format is None or name in TABLES:
            continue
        if not traits.quantizes or panel_group(format, shape[1]) is not None:
            matrices[name] = format
        elif exact and not in_blocks and dtype != "float32":
            matrices[name] = plain("float32")
    return HeldWeights(dtype, matrices)


def held_by(
    config: EngineConfig, spec: ModelSpec, dtype: str, stored: StoredFormats, traits: BackendTraits
) -> HeldWeights:
    """`hold_weights` as the settings say; `ops` must have been decided. Who gives a dtype has values rounded to it."""
    scheme = parse_scheme(config.model.quantization)
    return hold_weights(spec, dtype, scheme, stored, traits=traits, exact=config.model.dtype == "auto")


def weight_decisions(spec: ModelSpec, held: HeldWeights, stored: StoredFormats) -> list[Decision]:
    """What is held how, and what that costs; nothing for a model of plain weights."""
    if not held.matrices and not stored:
        return []
    shapes = row_matrices(spec)
    told = [name for name in shapes if name in held.matrices or name in stored]
    out = []
    for format in sorted({held.of(name) for name in told}, key=str):
        names = [name for name in told if held.of(name) == format]
        num_bytes = sum(format.num_bytes(shapes[name]) for name in names)
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
