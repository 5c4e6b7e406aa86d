"""The blocks of a GGUF file that predict further tokens, as heads that draft (`families.mtp`).

They stand behind the blocks of the layers (`nextn_predict_layers` of them); each is a layer of a kind that the model
has, with tensors `nextn.*` around it. A file may leave such blocks out, or be without what this needs: then there is no
head. Source: `src/models` of github.com/ggml-org/llama.cpp (qwen35.cpp, glm4-moe.cpp: `graph_mtp`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

import msgspec

from penstock.core.model_spec import Layer, ModelSpec, cache_spec, layer_shapes
from penstock.core.weight_map import Cut, WeightMap
from penstock.families.gguf.places import layer_places
from penstock.families.mtp import MAX_HEADS, MtpHead, head_spec
from penstock.formats.tensor_ref import TensorRef

_AROUND = {"token_norm": "nextn.enorm", "hidden_norm": "nextn.hnorm", "embed_in": "nextn.eh_proj"}
_NORM = "nextn.shared_head_norm.weight"


def find_heads(
    spec: ModelSpec, block: int, tensors: Mapping[str, TensorRef], names: Mapping[str, str]
) -> list[MtpHead]:
    """`block`: the number of the first one behind the layers; `names`: see `architectures.Architecture`. They end with
    the first that is not whole, or of another kind than the first: heads in succession have one spec."""
    heads: list[MtpHead] = []
    while len(heads) < MAX_HEADS and (head := _head(spec, block + len(heads), tensors, names)) is not None:
        if heads and head.spec != heads[0].spec:
            break
        heads.append(head)
    return heads


def _head(spec: ModelSpec, block: int, tensors: Mapping[str, TensorRef], names: Mapping[str, str]) -> MtpHead | None:
    """Its mixer and feed-forward are, each, one that the model has: the last whose weights are all there."""
    blk = f"blk.{block}."
    around: dict[str, str | Cut] = {name: f"{blk}{stored}.weight" for name, stored in _AROUND.items()}
    around["final_norm"] = blk + _NORM if blk + _NORM in tensors else "output_norm.weight"
    if any(place not in tensors for place in around.values()):
        return None
    for layer in _kinds(spec):
        places = layer_places(layer, spec.hidden_size, block, tensors, names)
        if _all_there(places, layer_shapes(layer, spec.hidden_size), tensors):
            return MtpHead(head_spec(spec, layer), around | {f"layers.0.{n}": place for n, place in places.items()})
    return None


def _kinds(spec: ModelSpec) -> Iterator[Layer]:
    """Every pair of mixer and feed-forward, those of later layers first; none that keeps a state, which could not take
    back a rejected draft."""
    last = [layer for layer in reversed(spec.layers) if layer.mixer is not None and layer.ffn is not None]
    mixers = {layer.mixer: layer for layer in last}
    for layer, ffn in product(mixers.values(), dict.fromkeys(layer.ffn for layer in last)):
        made = msgspec.structs.replace(layer, ffn=ffn)
        keeps = cache_spec(made, "float32")
        if keeps is not None and keeps.per_token:
            yield made


def _all_there(places: WeightMap, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, TensorRef]) -> bool:
    for name, place in places.items():
        stored, shape = (place.name, place.shape) if isinstance(place, Cut) else (place, shapes[name])
        if stored not in tensors or tensors[stored].shape != shape:
            return False
    return True
