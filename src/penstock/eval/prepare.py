"""Packing ahead of time, so that the next start maps what is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from penstock.base.errors import UnsupportedError
from penstock.eval.scorer import LoadedModel
from penstock.ops.native.content_key import content_key
from penstock.ops.native.matrix import Packed
from penstock.ops.native.packed_file import PackedStore
from penstock.quant.reference import Scheme

Packer = Callable[[LoadedModel, Scheme], Mapping[str, Packed]]
"""The matrices of a model as its native program takes them."""


def packer() -> Packer:
    """Who packs. Raises UnsupportedError: no program of this version runs on packed weights yet."""
    raise UnsupportedError("this version runs no model on packed weights: there is nothing to prepare")


def key_of(model: LoadedModel, scheme: Scheme, folder: Path | None = None) -> str:
    """What the packed weights of a model are kept under: its files, its shape, its dtype, the scheme."""
    return content_key(model.files, scheme.name, f"{model.dtype} {model.spec!r}", folder=folder)


def prepare(model: LoadedModel, scheme: Scheme, store: PackedStore, pack: Packer) -> tuple[str, bool]:
    """Pack, unless a sound file is there. Returns the key, and whether a file of it is on the disk now."""
    key = key_of(model, scheme, store.folder)
    if store.load(key, copy=False) is not None:
        return key, True
    return key, store.save(key, pack(model, scheme))
