"""The difference of a fine-tuned model to its base, written in few bits as an adapter.

Sources: Isik et al., "GPT-Zip: Deep Compression of Finetuned Large Language Models", 2023; Liu et al., "BitDelta",
arXiv 2402.10193, section 3.1 (signs, and the mean size as their scale).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.base.errors import ModelError
from penstock.families.checkpoint import Checkpoint, stored_shapes
from penstock.formats.files import quoted
from penstock.formats.peft import CONFIG_NAME, DELTA, WEIGHTS_NAME
from penstock.formats.safetensors_out import write_safetensors
from penstock.weights.adapters import Site, Sites
from penstock.weights.coded_adapters import bias_of
from penstock.weights.load import read_weight

_CLIPS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
"""Of the largest difference of a group, what the largest code may stand for: the one whose squared error is least."""
_SMALLEST = 6.2e-5
"""Below this a float16 loses bits."""


class WrittenDelta(NamedTuple):
    """`num_bytes` of a delta's file, what share of the squared difference of its modules is lost, and weights that
    differ and that it leaves out."""

    modules: int
    num_bytes: int
    lost: float
    left_out: tuple[str, ...]


def coded(difference: F32, bits: int, group: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[Any], F32]:
    """Codes [N, ceil(K b / 8)], scales [N, G] and what they stand for, of [N, K]; `group` 0: a scale for each row."""
    n, k = difference.shape
    rows = difference.reshape(n, -1, group or k)
    scales = _scales(rows, bits)
    half = 1 << bits - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        units = np.where(scales[..., None] > 0, rows / scales[..., None], 0)
    if bits == 1:
        codes = (rows >= 0).astype(np.uint8)
        values = np.where(rows >= 0, scales[..., None], -scales[..., None])
    else:
        whole = np.clip(np.rint(units), -half, half - 1)
        codes, values = (whole + half).astype(np.uint8), whole * scales[..., None]
    return _packed(codes.reshape(n, k), bits), scales, values.astype(np.float32).reshape(n, k)


def _scales(rows: F32, bits: int) -> npt.NDArray[Any]:
    if bits == 1:
        return _short(np.abs(rows).mean(axis=2))
    half, largest = 1 << bits - 1, np.abs(rows).max(axis=2)
    best, least = largest / max(1, half - 1), np.full(largest.shape, np.inf)
    for clip in _CLIPS:
        scales = largest * clip / max(1, half - 1)
        each = np.maximum(scales, 1e-30)[..., None]
        error = np.square(np.clip(np.rint(rows / each), -half, half - 1) * each - rows).sum(axis=2)
        best, least = np.where(error < least, scales, best), np.minimum(error, least)
    return _short(best)


def _short(scales: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """In 16 bits, if that keeps their bits."""
    fits = scales.max(initial=0) < 60000 and scales[scales > 0].min(initial=1) > _SMALLEST
    return scales.astype(np.float16 if fits else np.float32)


def _packed(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    per = 8 // bits
    whole = np.zeros((len(codes), -(-codes.shape[1] // per) * per), np.uint8)
    whole[:, : codes.shape[1]] = codes
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    out: npt.NDArray[np.uint8] = np.bitwise_or.reduce(whole.reshape(len(codes), -1, per) << shifts, axis=2)
    return out


def write_delta(
    base: Checkpoint, tuned: Checkpoint, sites: Sites, folder: Path, *, bits: int, group: int, name: str = "",
    progress: Callable[[], None] | None = None,
) -> WrittenDelta:  # fmt: skip
    """What `tuned` has more than `base` in the modules of `sites` (`weights.adapters.model_sites` of the base), in
    `folder`. A module that does not differ is left out. `name`: of the base.

    Raises: ModelError if the two are not of one shape or do not differ, or groups do not fit; OSError.
    """
    shapes = stored_shapes(base.spec)
    if stored_shapes(tuned.spec) != shapes:
        raise ModelError(f"{quoted(tuned.path)} is no fine-tuned {quoted(base.path)}: its weights have other shapes")
    own, other = _reader(base, shapes), _reader(tuned, shapes)
    tensors: dict[str, npt.NDArray[Any]] = {}
    whole = lost = 0.0
    seen: set[str] = set()
    for module, parts in sites.items():
        difference = _gathered(parts, own, other)
        seen.update(site.weight for site in parts)
        if difference.any():
            if group and difference.shape[1] % group:
                raise ModelError(
                    f"{quoted(module)} has {difference.shape[1]} inputs, no whole number of groups of {group}"
                )
            codes, scales, values = coded(difference, bits, group)
            whole += float(np.square(difference, dtype=np.float64).sum())
            lost += float(np.square(difference - values, dtype=np.float64).sum())
            tensors |= {f"{module}.codes": codes, f"{module}.scales": scales}
        bias, changed = _biases(parts, own, other)
        seen.update(site.weight + ".bias" for site in parts)
        if changed and f"{module}.codes" in tensors:
            tensors[f"{module}.bias"] = bias
        elif changed:
            seen.difference_update(site.weight + ".bias" for site in parts)
        if progress is not None:
            progress()
    if not tensors:
        raise ModelError(f"{quoted(tuned.path)} and {quoted(base.path)} do not differ in any product of a layer")
    left = tuple(n for n in shapes if n not in seen and n in base.weights and not np.array_equal(own(n), other(n)))
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / WEIGHTS_NAME, tensors)
    targets = sorted({n.rpartition(".")[0].rpartition(".")[2] for n in tensors})
    config = {"peft_type": DELTA, "bits": bits, "group_size": group, "target_modules": targets,
              "base_model_name_or_path": name}  # fmt: skip
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=1))
    num_bytes = (folder / WEIGHTS_NAME).stat().st_size
    return WrittenDelta(sum(n.endswith(".codes") for n in tensors), num_bytes, lost / whole, left)


def _reader(checkpoint: Checkpoint, shapes: Any) -> Callable[[str], F32]:
    return lambda name: read_weight(checkpoint.weights[name], shapes[name])


def _gathered(parts: list[Site], own: Callable[[str], F32], other: Callable[[str], F32]) -> F32:
    """Of a whole module, whose products are parts of it."""
    out = np.zeros((parts[0].outputs, parts[0].inputs), np.float32)
    for site in parts:
        out[slice(None) if site.rows is None else site.rows] = other(site.weight) - own(site.weight)
    return out


def _biases(parts: list[Site], own: Callable[[str], F32], other: Callable[[str], F32]) -> tuple[F32, bool]:
    """Those of the fine-tuned module, and whether they are others."""
    out, changed = np.zeros(parts[0].outputs, np.float32), False
    for site in parts:
        before, after = bias_of(own, site.weight), bias_of(other, site.weight)
        if before is not None and after is not None:
            out[slice(None) if site.rows is None else site.rows] = after
            changed |= not np.array_equal(before, after)
    return out, changed
