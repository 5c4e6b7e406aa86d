"""What GPTQ, AWQ and AutoRound have in common: `x.qweight` with `x.scales`, `x.qzeros` and perhaps `x.g_idx`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.base.errors import ModelError
from penstock.core.matrix_format import MatrixFormat, Shared
from penstock.families.checkpoint import LOADABLE_DTYPES, Codes
from penstock.families.quantization.method import Module, whole_groups
from penstock.families.quantization.settings import Settings, is_spared
from penstock.formats.files import quoted
from penstock.formats.tensor_ref import TensorRef
from penstock.formats.words import num_words

_PARTS = {".scales": "scales", ".qzeros": "zeros", ".g_idx": "order"}


@dataclass(frozen=True)
class Grouped:
    """A `Method`. `layout`: gptq or awq; `bits`: what a matrix may have, the first being usual; `group`: inputs that
    share a scale, 0 for all of them; `by_shape`: some matrices have other bits or groups, told by their tensors;
    `spared`: parts of names of modules that are stored as they were."""

    method: str
    layout: str
    bits: tuple[int, ...]
    group: int
    where: str
    ordered: bool = False
    symmetric: bool = False
    first_zero: int = 0
    by_shape: bool = False
    lm_head: bool = False
    spared: tuple[str, ...] = ()
    marks: tuple[str, ...] = (".qweight",)
    parts: tuple[str, ...] = (".qweight", *_PARTS)
    whole: str = ".weight"
    read_over: tuple[str, ...] = ()

    def format(self, bits: int, group: int, scale: str = "float16") -> MatrixFormat:
        """Of codes that are read; a group of all inputs has no order."""
        zeros = () if self.symmetric else (Shared(f"uint{bits}", 1, group),)
        return MatrixFormat(
            "uint", bits, (Shared(scale, 1, group),), zeros, offset=1 << bits - 1 if self.symmetric else 0,
            ordered=self.ordered and group != 0,
        )  # fmt: skip

    def expected(self, stored: str, shape: tuple[int, int]) -> MatrixFormat | None:
        """See `Method.expected`."""
        if is_spared(stored, self.spared):
            return None
        return self.format(self.bits[0], whole_groups(stored, shape[1], self.group))

    def matrix(self, module: Module) -> tuple[TensorRef, Codes]:
        """See `Method.matrix`."""
        words, where = module.need(".qweight"), module.where
        scales, zeros, order = module.need(".scales"), module.need(".qzeros"), module.get(".g_idx")
        if words.dtype != "I32" or len(words.shape) != 2 or 0 in words.shape or len(scales.shape) != 2:
            raise ModelError(
                f"{where} is {words.dtype} of shape {quoted(words.shape)}; int32 words of a matrix are needed"
            )
        bits = next((b for b in self.bits if self._fits(b, words, zeros, order)), self.bits[0])
        n, k = self._shape(words, bits)
        group = self.group
        if self.by_shape:
            group = k // scales.shape[0] if 1 < scales.shape[0] <= k else 0
        group = whole_groups(where, k, group)
        num_groups = k // group if group else 1
        wanted = {
            ".scales": (num_groups, n), ".qzeros": (num_groups, num_words(n, bits)), ".g_idx": (k,)
        }  # fmt: skip
        for part, shape in wanted.items():
            ref = module.get(part)
            if ref is not None and (ref.shape != shape or (part != ".scales" and ref.dtype != "I32")):
                raise ModelError(
                    f"{where} stands for a matrix of {n} x {k} in groups of {group or k}, but its {part[1:]} is "
                    f"{ref.dtype} of shape {quoted(ref.shape)}; {shape} is needed{self._perhaps(words, scales)}"
                )
        if scales.dtype not in LOADABLE_DTYPES:
            raise ModelError(f"{where} has scales of type {scales.dtype}; {', '.join(LOADABLE_DTYPES)} are read")
        format = self.format(bits, group, LOADABLE_DTYPES[scales.dtype])
        if order is None and format.ordered:
            raise ModelError(f"{where} has no g_idx beside it, though {self.where} says desc_act")
        found = {name: ref for part, name in _PARTS.items() if (ref := module.get(part)) is not None}
        return replace(words, shape=(n, k)), Codes(self.layout, format, found, {"first_zero": self.first_zero})

    def _shape(self, words: TensorRef, bits: int) -> tuple[int, int]:
        rows, columns = words.shape
        return (columns * 32 // bits, rows) if self.layout == "awq" else (columns, rows * 32 // bits)

    def _fits(self, bits: int, words: TensorRef, zeros: TensorRef, order: TensorRef | None) -> bool:
        n, k = self._shape(words, bits)
        return zeros.shape[1:] == (num_words(n, bits),) and (order is None or order.shape == (k,))

    def _perhaps(self, words: TensorRef, scales: TensorRef) -> str:
        """A word on what the tensors look like instead: the two layouts are each other's on their side."""
        if self.layout == "gptq" and scales.shape[-1] == words.shape[1] * 8:
            return " (they would fit AWQ: quant_method awq)"
        if self.layout == "awq" and scales.shape[-1] == words.shape[1]:
            return " (they would fit GPTQ: quant_method gptq)"
        return ""


def overrides(settings: Settings, patterns: object) -> list[Mapping[str, object]]:
    """What GPTQ's `dynamic` changes for some matrices: bits and groups. Its patterns are never run."""
    if not patterns:
        return []
    if not isinstance(patterns, Mapping):
        raise settings.refused("a dynamic that is no object of patterns")
    changes = [v for pattern, v in patterns.items() if not str(pattern).startswith("-:")]
    for change in changes:
        names = list(change) if isinstance(change, Mapping) else ["no object"]
        other = next((name for name in names if name not in ("bits", "group_size")), None)
        if other is not None:
            raise settings.refused(f"dynamic with {other!s:.40}; bits and group_size may differ between matrices")
    return changes
