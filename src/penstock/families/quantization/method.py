"""What every method of quantisation says, and how its tensors are gathered: one rule for every family.

A matrix `x.weight` [N, K] is stored as tensors `x.<part>`; the model sees one tensor `x.weight` of that shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from penstock.base.errors import ModelError
from penstock.core.matrix_format import MatrixFormat
from penstock.families.checkpoint import LOADABLE_DTYPES, Codes
from penstock.formats.files import quoted, read_exactly
from penstock.formats.tensor_ref import TensorRef

_SMALL_BYTES = 4096


@dataclass(frozen=True)
class Module:
    """The tensors of one matrix, by what follows the module's name: ".qweight", ".weight_scale".

    `subject`: the part that messages are about.
    """

    name: str
    tensors: Mapping[str, TensorRef]
    subject: str

    @property
    def where(self) -> str:
        """`tensor 'x.qweight' of 'path'`, the beginning of a message."""
        ref = self.tensors[self.subject]
        return f"tensor {quoted(ref.name)} of {quoted(ref.path)}"

    def get(self, part: str) -> TensorRef | None:
        return self.tensors.get(part)

    def need(self, part: str) -> TensorRef:
        """Raises ModelError if there is none."""
        ref = self.tensors.get(part)
        if ref is None:
            raise ModelError(f"{self.where} has no {part[1:]} beside it")
        return ref

    def about(self, part: str) -> Module:
        """The same, with messages about another of its tensors."""
        return Module(self.name, self.tensors, part)

    def wrong(self, part: str, needed: str) -> ModelError:
        ref = self.tensors[part]
        return ModelError(
            f"{self.where} has {part[1:]} of type {ref.dtype} and shape {quoted(ref.shape)} beside it; "
            f"{needed} is needed"
        )

    def small(self, part: str) -> bytes:
        """All bytes of a tensor of a few numbers. Raises ModelError if it is no such tensor."""
        ref = self.need(part)
        if ref.nbytes > _SMALL_BYTES:
            raise self.wrong(part, f"at most {_SMALL_BYTES} bytes")
        return read_exactly(ref.path, ref.offset, ref.nbytes)

    def scale_dtype(self, part: str, *more: str) -> str:
        """The type of scales by its name in a MatrixFormat; `more`: E8M0 and E4M3, where these can be scales, too.

        Raises ModelError for another type.
        """
        dtype = self.need(part).dtype
        known = LOADABLE_DTYPES | {d: {"U8": "e8m0", "F8_E8M0": "e8m0", "F8_E4M3": "e4m3"}[d] for d in more}
        if dtype not in known:
            raise ModelError(f"{self.where} has {part[1:]} of type {dtype}; {', '.join(known)} are read")
        return known[dtype]


class Method(Protocol):
    """How one method stores a matrix.

    Attributes:
        method: its name.
        marks: parts by which a matrix of it is known.
        parts: all parts that belong to a matrix.
        whole: what follows the module's name in the name of the matrix: ".weight", or "" of a stack of experts.
        read_over: ends of names of tensors that say how others round activations or caches as they go.
        lm_head: whether the output matrix is stored so, too, as far as the configuration tells.
    """

    method: str
    marks: tuple[str, ...]
    parts: tuple[str, ...]
    whole: str
    read_over: tuple[str, ...]
    lm_head: bool

    def matrix(self, module: Module) -> tuple[TensorRef, Codes] | None:
        """The codes of a matrix as a tensor of its shape, and what belongs to them. Nothing but small tensors is read.

        None if the module's weight is no matrix of codes after all. Raises ModelError for tensors that do not go
        together.
        """
        ...

    def expected(self, stored: str, shape: tuple[int, int]) -> MatrixFormat | None:
        """How the matrix of a module of this name is stored as far as the configuration tells, None: as it was."""
        ...


ACTIVATIONS = (
    ".input_scale", ".input_zero_point", ".input_global_scale", ".activation_scale", ".output_scale",
    ".output_zero_point", ".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point", ".prob_output_scale",
)  # fmt: skip
"""Ends of names of scales of what flows through a model, and of its cache."""


def whole_groups(where: str, inputs: int, group: int) -> int:
    """The group of a matrix with so many inputs, 0 for all of them. Raises ModelError unless it divides them."""
    if group and inputs % group:
        raise ModelError(f"{where} has {inputs} inputs (in_features), which are no multiple of the group_size {group}")
    return 0 if group == inputs else group
