"""A file or room per published format of codes. `STORED_FORMATS`: those whose matrices can stay as they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from penstock.base.registry import Registry
from penstock.formats.ggml import GGML_FORMATS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from penstock.families.checkpoint import Codes
    from penstock.ops.stored import StoredMatrix


class StoredLayout(Protocol):
    """Who reads one layout."""

    def __call__(
        self, codes: Codes, arrays: Mapping[str, npt.NDArray[Any]], shape: tuple[int, int], dtype: np.dtype[Any],
        rows: npt.NDArray[np.int64] | None,
    ) -> StoredMatrix:  # fmt: skip
        """A matrix over mapped arrays, none of whose numbers is looked at: `codes` and each of `codes.parts`, of the
        shapes and types of their tensors: float32, float16, int32 words (uint32), else bytes (uint8; bfloat16: uint16);
        of blocks and words the codes are flat. `shape`: of what it stands for, of `rows` of it unless that is None."""
        ...


STORED_FORMATS: Registry[StoredLayout, None] = Registry("stored format")
"""`families.checkpoint.Codes.layout` -> its reader."""
STORED_FORMATS.add("awq", "penstock.weights.stored.awq:AwqMatrix")
STORED_FORMATS.add("bitnet", "penstock.weights.stored.bitnet:PackedTernary")
STORED_FORMATS.add("bitnet-online", "penstock.weights.stored.bitnet:TrainedTernary")
STORED_FORMATS.add("bnb4", "penstock.weights.stored.bnb4:TableMatrix")
STORED_FORMATS.add("bnb8", "penstock.weights.stored.eight:ScbMatrix")
STORED_FORMATS.add("bytes", "penstock.weights.stored.eight:ByteMatrix")
STORED_FORMATS.add("fp4", "penstock.weights.stored.fp4:Fp4Matrix")
STORED_FORMATS.add("gptq", "penstock.weights.stored.gptq:GptqMatrix")
for _kind in GGML_FORMATS:
    STORED_FORMATS.add(_kind.lower(), "penstock.weights.stored.ggml.matrix:BlockMatrix")
STORED_FORMATS.add("hqq", "penstock.weights.stored.hqq:HqqMatrix")
STORED_FORMATS.add("packed", "penstock.weights.stored.packed:PackedMatrix")
