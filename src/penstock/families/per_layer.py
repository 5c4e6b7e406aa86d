"""What Gemma 3n and Gemma 4 share: embeddings for every layer, and last layers that read keys and values of others."""

from __future__ import annotations

import re
from collections.abc import Sequence

from penstock.base.errors import ModelError
from penstock.core.model_spec import ModelSpec, PerLayer
from penstock.families.fields import Fields
from penstock.families.naming import LLAMA_TOP
from penstock.families.reading import MAX_SIZE, WHERE

PER_LAYER_TOP = LLAMA_TOP | {
    "ple_embed": "model.embed_tokens_per_layer", "ple_in": "model.per_layer_model_projection",
    "ple_norm": "model.per_layer_projection_norm",
}  # fmt: skip
PER_LAYER_NAMES = {
    "ple_gate": "per_layer_input_gate", "ple_out": "per_layer_projection", "ple_post_norm": "post_per_layer_input_norm",
}  # fmt: skip
_UNUSED = re.compile(r"model\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*")


def read_per_layer(fields: Fields) -> PerLayer | None:
    """None if layers have no embeddings of their own; then the size of the table says nothing."""
    width = fields.integer("hidden_size_per_layer_input", low=0, high=MAX_SIZE, default=0)
    rows = fields.integer("vocab_size_per_layer_input", high=MAX_SIZE, default=262144)
    return PerLayer(width=width, rows=rows) if width else None


def read_sources(fields: Fields, kinds: Sequence[str], default: int = 0) -> list[int | None]:
    """For each layer the one whose keys and values it reads: the last `num_kv_shared_layers` read those of the last
    layer of their kind before. Raises ModelError if there is none."""
    shared = fields.integer("num_kv_shared_layers", low=0, high=len(kinds), default=default)
    first = len(kinds) - shared
    last = {kind: n for n, kind in enumerate(kinds[:first])}
    missing = [kind for kind in kinds[first:] if kind not in last]
    if missing:
        raise ModelError(
            f"{WHERE}: the last {shared} layers share keys and values (num_kv_shared_layers), and no layer of the kind "
            f"{missing[0]} comes before them"
        )
    return [None if n < first else last[kind] for n, kind in enumerate(kinds)]


def is_unused(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor makes keys or values of a layer that reads another's: checkpoints carry them along."""
    found = _UNUSED.fullmatch(name)
    if found is None or len(found[1]) > 9 or int(found[1]) >= len(spec.layers):
        return False
    return spec.layers[int(found[1])].kv_from is not None
