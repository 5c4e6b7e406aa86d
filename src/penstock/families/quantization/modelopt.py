"""NVIDIA's Model Optimizer: FP8 of a matrix or of its outputs, NVFP4, MXFP8; by hf_quant_config.json or config.json.

`x.weight` with `x.weight_scale`, of NVFP4 also `x.weight_scale_2`, the scale of the matrix. Which modules are stored so
is seen by their tensors; methods that scale activations beforehand (`pre_quant_scale` of AWQ and SVDQuant) are refused.
Source: `modelopt/torch/export/quant_utils.py` and `nvfp4_tensor.py` of github.com/NVIDIA/Model-Optimizer 0.47.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.base.errors import UnsupportedError
from penstock.core.matrix_format import MatrixFormat, Shared
from penstock.families.checkpoint import Codes
from penstock.families.quantization.method import ACTIVATIONS, Module
from penstock.families.quantization.scaled import NVFP4, byte_matrix, fp4_matrix
from penstock.families.quantization.settings import Settings, is_spared
from penstock.formats.tensor_ref import TensorRef

_ALGORITHMS: dict[str, MatrixFormat] = {
    "FP8": MatrixFormat("e4m3", 8, (Shared("float32", 0, 0),)),
    "FP8_PER_CHANNEL_PER_TOKEN": MatrixFormat("e4m3", 8, (Shared("float32", 1, 0),)),
    "FP8_PB_WO": MatrixFormat("e4m3", 8, (Shared("float32", 128, 128),)),
    "MXFP8": MatrixFormat("e4m3", 8, (Shared("e8m0", 1, 32),)),
    "NVFP4": NVFP4, "W4A16_NVFP4": NVFP4, "W4A8_NVFP4_FP8": NVFP4,
}  # fmt: skip
_FIELDS = {
    "quant_method", "quant_algo", "group_size", "exclude_modules", "ignore", "quantized_layers", "producer",
    "kv_cache_quant_algo", "kv_cache_scheme", "config_groups", "has_zero_point", "pre_quant_scale", "modelopt_version",
    "version",
}  # fmt: skip


@dataclass(frozen=True)
class ModelOpt:
    """A `Method`. `usual`: how a matrix is stored; `own`: how that of a module is, by its name."""

    usual: MatrixFormat | None
    own: dict[str, MatrixFormat]
    spared: tuple[str, ...] = ()
    lm_head: bool = True
    method: str = "modelopt"
    marks: tuple[str, ...] = (".weight_scale", ".pre_quant_scale")
    parts: tuple[str, ...] = (".weight", ".weight_scale", ".weight_scale_2", ".pre_quant_scale")
    whole: str = ".weight"
    read_over: tuple[str, ...] = ACTIVATIONS

    def matrix(self, module: Module) -> tuple[TensorRef, Codes]:
        """See `Method.matrix`."""
        if module.get(".pre_quant_scale") is not None:
            raise UnsupportedError(
                f"{module.about('.pre_quant_scale').where} scales what goes into a matrix (AWQ, SVDQuant); a "
                "checkpoint of NVFP4 or FP8 without it is read"
            )
        if module.need(".weight").dtype == "U8":
            return fp4_matrix(module, ".weight", ".weight_scale", ".weight_scale_2")
        return byte_matrix(module, ".weight", ".weight_scale", [(128, 128), (1, 32)])

    def expected(self, stored: str, shape: tuple[int, int]) -> MatrixFormat | None:
        """See `Method.expected`."""
        name = stored
        while name:  # what is said of a module holds for those inside of it
            if name in self.own:
                return self.own[name]
            name = name.rpartition(".")[0]
        return None if is_spared(stored, self.spared) else self.usual


def read(settings: Settings) -> ModelOpt:
    settings.allow(_FIELDS)
    if settings.given.get("pre_quant_scale"):
        raise settings.refused("pre_quant_scale; weights alone may be codes")
    spared = settings.names("exclude_modules", "ignore")
    if settings.given.get("quant_algo") == "MIXED_PRECISION" or settings.given.get("quantized_layers"):
        layers = settings.inner(settings.given.get("quantized_layers"), "quantized_layers").given
        own = {
            name: _format(settings.inner(layer, f"quantized_layers of {name!s:.60}")) for name, layer in layers.items()
        }
        return ModelOpt(None, own, spared)
    return ModelOpt(_format(settings), {}, spared)


def _format(settings: Settings) -> MatrixFormat:
    name = settings.given.get("quant_algo")
    name = name.upper() if isinstance(name, str) else name  # some are written small
    if not isinstance(name, str) or name not in _ALGORITHMS:
        raise settings.refused(f"quant_algo {name!s:.40}; {', '.join(_ALGORITHMS)} are read")
    format = _ALGORITHMS[name]
    size = settings.given.get("group_size")
    if size is not None and format.group and size != format.group and name != "FP8_PB_WO":
        raise settings.refused(f"group_size {size!s:.40}; {name} is read with {format.group}")
    return format
