"""Encoders in GGUF files, and what files say of vectors.

Source: `BertModel`, `NomicBertModel` and `ModernBertModel` of convert_hf_to_gguf.py, `src/models/bert.cpp` and
modern-bert.cpp, github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import ModelSpec
from penstock.core.pooler import PoolingSpec
from penstock.families.gguf.header import Header
from penstock.families.gguf.readers import Read
from penstock.families.llama_like import FULL, SLIDING
from penstock.families.reading import MAX_LAYERS, MAX_POSITION, MAX_SIZE
from penstock.formats.files import quoted

_POOLINGS = {1: "mean", 2: "cls", 3: "last"}
_RANK = 4
NAMES = {"head.0": "cls", "head.0.norm": "cls.norm", "head.1": "cls.output"}
AROUND = {**NAMES, "attn_norm": "attn_output_norm", "ffn_norm": "layer_output_norm"}
"""Of layers whose norms stand behind their halves."""


def kind(base: str, classifier: str) -> Read:
    """`architectures`: a classifier is a file with its last product."""
    return lambda h: [classifier if h.has("cls.output.weight") else base]


def labels(h: Header) -> dict[str, str] | None:
    """`id2label`, where there is a head."""
    named = h.fields.raw("classifier.output_labels")
    last = h.tensors.get("cls.output.weight")
    if last is None:
        return None
    count = last.shape[0] if len(last.shape) == 2 else 1
    listed = [named] * count if isinstance(named, str) else named  # equal ones are told once
    if listed is None:
        return {str(i): f"LABEL_{i}" for i in range(count)}
    if not isinstance(listed, list) or len(listed) != count:
        raise ModelError(f"{quoted(h.path)} names its labels unlike the {count} that its head has")
    return {str(i): str(label) for i, label in enumerate(listed)}


def positions(h: Header) -> int:
    """As many as the table has: converters drop the rows in front that stand for padding."""
    h.fields.integer("context_length", high=MAX_POSITION)
    table = h.tensors.get("position_embd.weight")
    if table is None:
        raise ModelError(f"{quoted(h.path)} lacks the tensor position_embd.weight")
    return table.shape[0]


def token_types(h: Header) -> int:
    table = h.tensors.get("token_types.weight")
    if table is None:
        raise ModelError(f"{quoted(h.path)} lacks the tensor token_types.weight")
    return 1 if len(table.shape) == 1 else table.shape[0]


def has(name: str) -> Read:
    return lambda h: h.has(name)


def reaches(h: Header) -> list[str]:
    """Every n-th layer, from the first on, sees all of the text."""
    every, name = 3, "attention.sliding_window_pattern"
    found = h.fields.raw(name)
    if isinstance(found, list):
        slides = [bool(flag) for flag in found]
        if len(slides) != h.num_layers:
            raise ModelError(f"{quoted(h.path)} gives {name} for {len(slides)} of {h.num_layers} layers")
    else:
        if isinstance(found, int) and not isinstance(found, bool):
            every = h.fields.integer(name, low=1, high=MAX_LAYERS)
        slides = [i % every != 0 for i in range(h.num_layers)]
    return [SLIDING if flag else FULL for flag in slides]


def two_thetas(h: Header) -> dict[str, Any]:
    """`rope_parameters` of ModernBERT."""
    thetas = {FULL: ("rope.freq_base", 160000.0), SLIDING: ("rope.freq_base_swa", 10000.0)}
    h.fields.raw("rope.scaling.type")
    return {name: {"rope_type": "default", "rope_theta": h.fields.number(key, default=theta)}
            for name, (key, theta) in thetas.items()}  # fmt: skip


def plain_rope(h: Header) -> dict[str, Any]:
    h.fields.raw("rope.scaling.type")
    h.fields.integer("rope.dimension_count", high=MAX_SIZE, default=1)
    return {"rope_type": "default", "rope_theta": h.fields.number("rope.freq_base", default=1000.0)}


def with_vectors(spec: ModelSpec, h: Header) -> ModelSpec:
    """`spec` with the pooling that the file names, also of a decoder. Raises: UnsupportedError for another one."""
    said = h.fields.integer("pooling_type", low=0, high=16, default=0)
    own = spec.pooler
    if own is not None and own.labels:
        return spec  # its head says from which token on
    if not said:
        return spec
    if said not in _POOLINGS:
        raise UnsupportedError(f"{quoted(h.path)} pools hidden states in a way (pooling_type {said}) that is not known")
    return msgspec.structs.replace(spec, pooler=msgspec.structs.replace(own or PoolingSpec(), mode=_POOLINGS[said]))
