"""MXFP4 as gpt-oss is published: stacks of experts `x_blocks` [X, R, K / 32, 16], exponents `x_scales` [X, R, K / 32].

Source: the checkpoints of gpt-oss; `Mxfp4Config` of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.matrix_format import MatrixFormat
from penstock.families.checkpoint import Codes
from penstock.families.quantization.method import Module
from penstock.families.quantization.scaled import MXFP4, fp4_matrix
from penstock.families.quantization.settings import Settings, is_spared
from penstock.formats.tensor_ref import TensorRef


@dataclass(frozen=True)
class Mxfp4:
    """A `Method`."""

    spared: tuple[str, ...] = ()
    method: str = "mxfp4"
    marks: tuple[str, ...] = ("_blocks",)
    parts: tuple[str, ...] = ("_blocks", "_scales")
    whole: str = ""
    read_over: tuple[str, ...] = ()
    lm_head: bool = False

    def matrix(self, module: Module) -> tuple[TensorRef, Codes]:
        """See `Method.matrix`."""
        return fp4_matrix(module, "_blocks", "_scales")

    def expected(self, stored: str, shape: tuple[int, int]) -> MatrixFormat | None:
        """See `Method.expected`."""
        return MXFP4 if ".experts." in stored and not is_spared(stored, self.spared) else None


def read(settings: Settings) -> Mxfp4:
    settings.allow({"quant_method", "modules_to_not_convert", "dequantize"})
    return Mxfp4(settings.names("modules_to_not_convert"))
