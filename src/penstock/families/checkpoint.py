"""A model found on disk: what it computes, where its bytes are, which tokenizer came with it. No tensor data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.matrix_format import MatrixFormat
from penstock.core.model_spec import Experts, ModelSpec, weight_shapes
from penstock.core.weight_map import Cut
from penstock.formats.files import quoted
from penstock.formats.ggml import GGML_FORMATS
from penstock.formats.tensor_ref import TensorRef

LOADABLE_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Stored element types that weights may have as they are -> their names in a ModelSpec."""
WHOLE_DTYPES = {"I64": 8, "I32": 4}
"""Types of whole numbers that tables have -> bytes of one. They are read as float32, which is exact below 2^24."""
BLOCK_DTYPES = frozenset(GGML_FORMATS)
"""Types that are decoded (`weights.stored.ggml`) and hold their scales themselves."""
SCALED_DTYPES = frozenset({"I8", "T2"})
"""Types that are decoded and have their scales in a tensor of their own."""
MAX_EXPERTS = 1 << 17
"""In all layers together; Kimi K2, large as it is, has 23,040."""


@dataclass(frozen=True)
class TokenizerFiles:
    """`path`: the file to read; None for "none", `reason` says why, and "bytes", whose tokens are the 256 bytes.

    Kinds: "hf" tokenizer.json; "llama2c"; "sentencepiece" tokenizer.model; "bpe" vocab.json or encoder.json, with the
    merges in `merges`; "tiktoken"; "rwkv", the World vocabulary; "gguf", a model file with its tokenizer; "pairs".
    `config` is tokenizer_config.json or {}. `chat_template` is Jinja source from a stranger, unrendered;
    `named_templates` are others for a purpose, by name ("tool_use", "rag").
    """

    kind: Literal["hf", "llama2c", "sentencepiece", "bpe", "tiktoken", "rwkv", "gguf", "pairs", "bytes", "none"]
    path: Path | None = None
    config: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    named_templates: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    merges: Path | None = None


@dataclass(frozen=True, slots=True)
class Codes:
    """What belongs to a matrix [N, K] of codes, which can stay as they are, unless `format` is plain: then groups of
    theirs lie across rows, and only values have a description.

    `layout`: who reads it, a name of `weights.stored.STORED_FORMATS`; that class says which `parts` there are: tensors
    beside the codes, by what they are ("scales"), and `numbers` that hold for the whole matrix.
    """

    layout: str
    format: MatrixFormat
    parts: Mapping[str, TensorRef] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WeightRef:
    """Where a weight is: a stored tensor, whole or cut as `cut` says.

    `scales`: the tensor with the scales of a type of SCALED_DTYPES. Shapes: I8 has N scales for as many equal runs of
    elements; T2 has one, (). `codes`: of a tensor whose shape is that of the matrix, or the stack of them, that it
    stands for.
    """

    tensor: TensorRef
    cut: Cut | None = None
    scales: TensorRef | None = None
    codes: Codes | None = None

    @property
    def stored(self) -> MatrixFormat | None:
        """How the matrix is stored, if it can stay so."""
        return None if self.codes is None or self.codes.format.is_plain else self.codes.format

    @property
    def tensors(self) -> tuple[TensorRef, ...]:
        """All that is read for it."""
        codes = () if self.codes is None else self.codes.parts.values()
        return tuple(t for t in (self.tensor, self.scales, *codes) if t is not None)


@dataclass(frozen=True)
class Checkpoint:
    """`weights` has exactly the keys of `weight_shapes(spec)`, with these shapes and dtypes that can be read. `heads`:
    for multi-token prediction (`families.mtp`), in their order."""

    path: Path
    spec: ModelSpec
    weights: dict[str, WeightRef]
    tokenizer: TokenizerFiles
    generation_config: dict[str, Any] = field(default_factory=dict)
    heads: tuple[Checkpoint, ...] = ()

    @property
    def stored(self) -> dict[str, MatrixFormat]:
        """Logical name -> how a matrix is stored, for those that can stay as they are."""
        return {name: ref.stored for name, ref in self.weights.items() if ref.stored is not None}


def check_count(spec: ModelSpec) -> None:
    """Raises ModelError for more experts than any model has, before every weight of each gets a name."""
    experts = sum(layer.ffn.num_experts for layer in spec.layers if isinstance(layer.ffn, Experts))
    if experts > MAX_EXPERTS:
        raise ModelError(f"the model has {experts} experts in all its layers; at most {MAX_EXPERTS} are possible")


def stored_shapes(spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
    """`weight_shapes` of what a checkpoint has: a table of pairs is nothing to be read."""
    return {name: shape for name, shape in weight_shapes(spec).items() if spec.pair is None or name != "embed"}


def check_weights(weights: Mapping[str, WeightRef], spec: ModelSpec) -> None:
    """Raises ModelError if a weight of `spec` is missing or has another shape, UnsupportedError for its dtype."""
    shapes = stored_shapes(spec)
    missing = [name for name in shapes if name not in weights]
    if missing:
        raise ModelError(f"{len(missing)} of {len(shapes)} weights are missing, first {quoted(missing[0])}")
    for name, shape in shapes.items():
        tensor, cut = weights[name].tensor, weights[name].cut
        where = f"tensor {quoted(tensor.name)} of {quoted(tensor.path)}"
        wanted = shape if cut is None else cut.shape
        if tensor.shape != wanted:
            raise ModelError(f"{where} has the shape {quoted(tensor.shape)}, but the model needs {quoted(wanted)}")
        if tensor.dtype in WHOLE_DTYPES and name.endswith("router_table"):
            continue
        if weights[name].codes is None:
            _check_type(where, tensor, weights[name].scales)


def _check_type(where: str, tensor: TensorRef, scales: TensorRef | None) -> None:
    if tensor.dtype in SCALED_DTYPES and scales is not None:
        if not _scales_fit(tensor, scales):
            raise ModelError(
                f"{where} is {tensor.dtype} of shape {quoted(tensor.shape)}; its scales {quoted(scales.name)}, "
                f"{scales.dtype} of shape {quoted(scales.shape)}, do not go with it"
            )
    elif scales is not None or (tensor.dtype not in LOADABLE_DTYPES and tensor.dtype not in BLOCK_DTYPES):
        known = ", ".join([*LOADABLE_DTYPES, *sorted(BLOCK_DTYPES)])
        raise UnsupportedError(
            f"{where} is stored as {tensor.dtype}; weights are read from {known}: store it as one of these"
        )


def _scales_fit(tensor: TensorRef, scales: TensorRef) -> bool:
    shape = tensor.shape
    if scales.dtype not in LOADABLE_DTYPES:
        return False
    if tensor.dtype == "T2":
        return scales.shape == () and prod(shape) % 4 == 0
    return prod(scales.shape) > 0 and prod(shape) > 0 and prod(shape) % prod(scales.shape) == 0
