"""How weights are held and rows are rounded: the schemes that `--quantization` names."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.base.errors import ConfigError
from penstock.ops.native.abi import Act, Format

DEFAULT_GROUP = 64
GROUPS = (32, 64, 128)
NAMES = ("none", "int8-w8a8", "int4-w4a8", "int8-wo", "int4-wo")


@dataclass(frozen=True)
class Scheme:
    """`format` None: weights stay in their own type. `group`: inputs that share a scale, 0 where there are none."""

    name: str
    format: Format | None
    act: Act | None
    group: int = 0

    def of(self, dtype: np.dtype[np.generic], isa: str) -> tuple[Format, Act, int]:
        """What a weight of `dtype` is packed as, and what rows become before its products."""
        exact = {np.dtype(np.float32): Format.F32, np.dtype(np.float16): Format.F16, np.dtype(np.uint16): Format.BF16}
        # Without instructions for bfloat16, rounding the rows would cost accuracy and win nothing.
        short = Act.BF16 if isa == "avx512bf16" else Act.F32
        if self.format is None:
            format = exact[dtype]
            return format, short if format == Format.BF16 else Act.F32, 0
        act = short if self.act is None else self.act
        return self.format, act, self.group


def scheme_of(text: str) -> Scheme:
    """ "int4-w4a8:128" -> its Scheme. Raises: ConfigError, naming what there is."""
    name, _, size = text.partition(":")
    if name not in NAMES or (size and not name.startswith("int4")):
        raise ConfigError(
            f"quantization: {text!r} is not known; use one of {', '.join(NAMES)} "
            f"(int4 with a group size of {', '.join(map(str, GROUPS))}, as int4-w4a8:128)",
            field="quantization",
        )
    group = int(size) if size.isascii() and size.isdigit() else DEFAULT_GROUP if not size else -1
    if group not in GROUPS:
        raise ConfigError(
            f"quantization: {text!r} has a group size that does not exist; use {', '.join(map(str, GROUPS))}",
            field="quantization",
        )
    match name:
        case "none":
            return Scheme(text, None, None)
        case "int8-w8a8":
            return Scheme(text, Format.I8, Act.I8)
        case "int8-wo":
            return Scheme(text, Format.I8, None)
        case "int4-w4a8":
            return Scheme(text, Format.I4, Act.I8, group)
        case _:
            return Scheme(text, Format.I4, None, group)
