"""BitNet: weights of -1, 0 and +1 with one number for the matrix.

Packed ("offline"): bytes `x.weight` [N / 4, K] with `x.weight_scale`, which multiplies (linear_class autobitlinear) or
divides (bitlinear). As they were trained ("online"): float matrices that are rounded when they are read; their products
are called `..._proj` in every family that is stored so, and the output matrix stays as it is.

Activations, which the originals round to 8 bits, are computed as Penstock computes them. Source: `integrations/
bitnet.py` of transformers; Ma et al., arXiv 2402.17764, section 2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from penstock.base.errors import ModelError
from penstock.core.matrix_format import MatrixFormat, Shared
from penstock.families.checkpoint import LOADABLE_DTYPES, Codes
from penstock.families.quantization.method import ACTIVATIONS, Module
from penstock.families.quantization.settings import Settings, is_spared
from penstock.formats.files import quoted
from penstock.formats.tensor_ref import TensorRef

PER_BYTE = 4
_FIELDS = {
    "quant_method", "linear_class", "quantization_mode", "modules_to_not_convert", "use_rms_norm", "rms_norm_eps",
}  # fmt: skip
_PROJ = "_proj.weight"


def ternary(scale: str = "float32") -> MatrixFormat:
    """Codes 0, 1, 2 of -1, 0, +1, with one `scale` of the matrix."""
    return MatrixFormat("uint", 2, (Shared(scale, 0, 0),), offset=1)


@dataclass(frozen=True)
class BitNetMethod:
    """A `Method`. `online`: matrices are stored as they were trained. `divides`: their number divides."""

    online: bool
    divides: bool
    spared: tuple[str, ...]
    marks: tuple[str, ...]
    parts: tuple[str, ...]
    whole: str
    method: str = "bitnet"
    read_over: tuple[str, ...] = ACTIVATIONS
    lm_head: bool = False

    def matrix(self, module: Module) -> tuple[TensorRef, Codes] | None:
        """See `Method.matrix`."""
        if self.online:
            ref = module.need(_PROJ)
            if is_spared((module.name + _PROJ).removesuffix(".weight"), self.spared):
                return None
            if ref.dtype not in LOADABLE_DTYPES or len(ref.shape) != 2 or 0 in ref.shape:
                raise ModelError(
                    f"{module.where} is {ref.dtype} of shape {quoted(ref.shape)}; quantization_mode online needs the "
                    "float matrix of training"
                )
            return ref, Codes("bitnet-online", ternary())
        ref, module = module.need(".weight"), module.about(".weight")
        if ref.dtype != "U8" or len(ref.shape) != 2 or 0 in ref.shape:
            raise ModelError(
                f"{module.where} is {ref.dtype} of shape {quoted(ref.shape)}, though it has weight_scale beside it; "
                "bytes of four codes each are needed"
            )
        scale = module.need(".weight_scale")
        dtype = module.scale_dtype(".weight_scale")
        if prod(scale.shape) != 1:
            raise module.wrong(".weight_scale", "one number")
        rows, columns = ref.shape
        format = ternary("float32" if self.divides else dtype)
        numbers = {"divides": float(self.divides), "bfloat16": float(dtype == "bfloat16")}
        return replace(ref, shape=(rows * PER_BYTE, columns)), Codes("bitnet", format, {"scales": scale}, numbers)

    def expected(self, stored: str, shape: tuple[int, int]) -> MatrixFormat | None:
        """See `Method.expected`."""
        return None if is_spared(stored, self.spared) else ternary()


def read(settings: Settings) -> BitNetMethod:
    settings.allow(_FIELDS)
    settings.one_of("use_rms_norm", (False,))  # a norm of its own in front of every product
    kind = settings.one_of("linear_class", ("bitlinear", "autobitlinear"))
    mode = settings.one_of("quantization_mode", ("offline", "online"))
    spared = settings.names("modules_to_not_convert")
    if kind == "autobitlinear" and mode == "online":
        return BitNetMethod(True, False, spared, (_PROJ,), (_PROJ,), _PROJ)
    return BitNetMethod(False, kind == "bitlinear", spared, (".weight_scale",), (".weight", ".weight_scale"), ".weight")
