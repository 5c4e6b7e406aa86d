"""Packing ahead of time, so that the next start maps what is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from penstock.backends import BACKENDS
from penstock.backends.native.backend import NativeBackend
from penstock.backends.native.packed import weights_key
from penstock.base.errors import UnsupportedError
from penstock.core.matrix_format import Scheme
from penstock.eval.scorer import LoadedModel, ProgramScorer
from penstock.ops.native.matrix import Packed
from penstock.ops.native.packed_file import PackedStore

Packer = Callable[[LoadedModel, Scheme], Mapping[str, Packed]]
"""The matrices of a model as its native program takes them."""


def packer() -> Packer:
    """Who packs."""
    return packed


def packed(model: LoadedModel, scheme: Scheme) -> Mapping[str, Packed]:
    """As the engine packs at its first start. Raises UnsupportedError where no native kernels run the model."""
    if not BACKENDS.traits(model.backend.name).quantizes:
        raise UnsupportedError("native kernels do not run this model here (--explain says why): nothing to prepare")
    return model.backend.matrices(ProgramScorer(model, model.backend, scheme.name).forward)


def key_of(model: LoadedModel, scheme: Scheme, folder: Path | None = None) -> str:
    """What the packed weights of a model are kept under."""
    row_bits = model.backend.row_bits if isinstance(model.backend, NativeBackend) else 0
    return weights_key(model.files, scheme, model.held(scheme), model.spec, row_bits, folder)


def prepare(model: LoadedModel, scheme: Scheme, store: PackedStore, pack: Packer) -> tuple[str, bool]:
    """Pack, unless a sound file is there. Returns the key, and whether a file of it is on the disk now."""
    key = key_of(model, scheme, store.folder)
    if store.load(key, copy=False) is not None:
        return key, True
    return key, store.save(key, pack(model, scheme))
