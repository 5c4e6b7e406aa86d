"""L8: who runs a model's graph. A backend is an object: whether it can, and what it makes of a graph and weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.base.registry import Registry
from penstock.core.backend import REFERENCE, BackendTraits

if TYPE_CHECKING:
    from penstock.backends.backend import Backend

BACKENDS: Registry[type[Backend], BackendTraits] = Registry("ops")
BACKENDS.add("ref", "penstock.backends.reference:ReferenceBackend", REFERENCE)
BACKENDS.add("blas", "penstock.backends.reference:BlasBackend", BackendTraits(batch_invariant=False))
BACKENDS.add("torch", "penstock.backends.gpu.backend:TorchBackend", BackendTraits(widens=False, rounds=True))
BACKENDS.add("native", "penstock.backends.native.backend:NativeBackend", BackendTraits(widens=False, quantizes=True))

PREFERRED = ("native", "ref")
"""What `ops="auto"` tries, in this order."""
