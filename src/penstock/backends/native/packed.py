"""The packed weights of one model, kept on disk from the first start to the next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from penstock.backends.native.obstacle import native_matrices
from penstock.base.errors import ConfigError
from penstock.core.held_weights import HeldWeights, WeightMemory
from penstock.core.matrix_format import Scheme
from penstock.core.model_spec import ModelSpec
from penstock.model.graph import Graph
from penstock.ops.native.content_key import content_key
from penstock.ops.native.library import best_library
from penstock.ops.native.matrix import Packed
from penstock.ops.native.packed_file import PackedStore

Runs = tuple[Sequence[str], int, Iterable[tuple[str, Packed]]]
"""Names of matrices, about how many bytes they take, and the matrices, each packed when it is asked for."""


class PackedWeights:
    """The packed weights of one model, kept on disk from the first start to the next under a `weights_key`."""

    def __init__(
        self, store: PackedStore, key: str, tables: Collection[str], *, copy: bool = True, leave: bool = False,
        memory: WeightMemory | None = None, packed: Callable[[Graph], Runs] | None = None,
    ) -> None:  # fmt: skip
        """`tables`: looked up in their own type, whatever is packed of them; `copy`, `leave`: see `PackedStore.load`.
        `memory`: see `Backend.store`; then `packed` packs a graph's matrices one after the other."""
        self._store, self._key, self._tables, self._copy, self._leave = store, key, frozenset(tables), copy, leave
        self._memory, self._packed = memory, packed
        self.path = store.path(key)

    @cached_property
    def matrices(self) -> Mapping[str, Packed] | None:
        """See `backends.backend.WeightStore`."""
        if self._memory is None:
            return self._store.load(self._key, copy=self._copy, leave=self._leave)
        found = self._store.open(self._key, self._memory.limit, self._memory.prefetch)
        return None if found is None else found.matrices

    def sizes(self) -> list[int]:
        """Bytes in memory of what is no layer's, and of each layer. Empty: nothing is packed."""
        found = self._store.open(self._key, None, 0)
        return [] if found is None else [segment.num_bytes for segment in found.segments]

    def names(self) -> frozenset[str]:
        """The weights that are in it, and need not be loaded."""
        return frozenset(n for name in self.matrices or () for n in name.split()) - self._tables

    def prepare(self, graph: Graph) -> None:
        """See `backends.backend.WeightStore`."""
        if self._packed is None or self.matrices is not None:
            return
        names, num_bytes, matrices = self._packed(graph)
        if not self._store.save_each(self._key, matrices, names, num_bytes):
            raise ConfigError(
                f"weight_memory_bytes: weights are read from {self.path}, and it could not be written (the log says "
                "why); make room, or name another folder in PENSTOCK_CACHE",
                field="weight_memory_bytes",
            )
        del self.matrices

    def keep(self, matrices: Mapping[str, Packed]) -> None:
        """For the next start; a warning in the log if the disk does not take it."""
        if self._memory is None and self.matrices is None:
            self._store.save(self._key, matrices)


def weights_key(
    files: Sequence[Path], scheme: Scheme, held: HeldWeights, spec: ModelSpec, row_bits: int,
    folder: Path | None = None, part: str = "",
) -> str:  # fmt: skip
    """What packed weights are kept under: the files they come from and what else decides their bytes.

    Which weights share a matrix is among that: a version that fuses otherwise must not find those of another.
    `row_bits`: see `schemes.packing`. `part`: see `Backend.store`.
    """
    library = best_library()
    assert library is not None, "why_not has looked"
    identity = f"{held.dtype} {library.pst_isa_name().decode()} {spec!r} {native_matrices(spec)}"
    beside = {n: f for n, f in held.matrices.items() if not scheme.weight_bits or f != scheme.format}
    if beside:  # what becomes of codes
        identity += f" {row_bits} {sorted(beside.items())}"
    return content_key(files, scheme.name, f"{identity} {part}" if part else identity, folder=folder)
