"""Heads for multi-token prediction that ship in a checkpoint: found by the names of their tensors, described as specs.

A family that publishes them says where they are by one attribute, `mtp`. Their block is a decoder layer of the family's
own kind, the model's last unless told, so its weights are named as the family names those of a layer. Where there are
several, each follows the one before: head k predicts the k-th further token from what head k - 1 makes of the text.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2; layouts as in the published checkpoints of DeepSeek-V3, GLM-4.5,
Qwen3-Next, Qwen3.5, MiMo and MiMo-V2-Flash (technical report arXiv 2601.02780, section 2.2).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import msgspec

from penstock.core.model_spec import Layer, ModelSpec, Norm, Pair, cache_spec
from penstock.core.protocols import ModelFamily, SeveralParts
from penstock.core.weight_map import Cut, WeightMap
from penstock.families.fields import Fields
from penstock.families.reading import MAX_LAYERS, WHERE

MAX_HEADS = 8
"""That are looked for; published checkpoints have up to three."""
_MODEL = "model."


def last_layer(spec: ModelSpec) -> Layer | None:
    return spec.layers[-1]


class MtpNames(NamedTuple):
    """Where a family's checkpoints have these heads.

    Attributes:
        block: module of a head's decoder layer; "{n}" is the number of the layer behind the model's last, one more for
            each further head; "{k}" the number of the head, from 0.
        token_norm, hidden_norm, embed_in, final_norm: modules, "{block}" being the one above. Those that do not name it
            are shared by all heads.
        hidden_first: the hidden state stands before the embedding in what `embed_in` reads.
        fields: of config.json, that say how many heads there are; the first that is there counts.
        layer: the layer that their blocks are like; None: there is none.
        renamed: modules of a block that are called otherwise than in a layer.
    """

    block: str = "model.layers.{n}"
    token_norm: str = "{block}.enorm"
    hidden_norm: str = "{block}.hnorm"
    embed_in: str = "{block}.eh_proj"
    final_norm: str = "{block}.shared_head.norm"
    hidden_first: bool = False
    fields: tuple[str, ...] = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
    layer: Callable[[ModelSpec], Layer | None] = last_layer
    renamed: tuple[tuple[str, str], ...] = ()


NEXTN = MtpNames()
"""DeepSeek-V3's and GLM-4.5's: layers behind the last."""
MTP_LAYERS = MtpNames(
    block="model.mtp_layers.{k}", token_norm="{block}.token_layernorm", hidden_norm="{block}.hidden_layernorm",
    embed_in="{block}.input_proj", final_norm="{block}.final_layernorm", hidden_first=True,
)  # fmt: skip
"""MiMo's."""
MTP_MODULE = MtpNames(
    block="mtp.layers.{k}", token_norm="mtp.pre_fc_norm_embedding", hidden_norm="mtp.pre_fc_norm_hidden",
    embed_in="mtp.fc", final_norm="mtp.norm",
)  # fmt: skip
"""Qwen3-Next's and Qwen3.5's."""


class MtpHead(NamedTuple):
    """What a head computes, and where its weights are: all but `embed`, which is no weight."""

    spec: ModelSpec
    places: WeightMap


def mtp_heads(
    family: ModelFamily, spec: ModelSpec, most: int = MAX_HEADS, tensors: Collection[str] = ()
) -> list[MtpHead]:
    """The first `most` heads that a checkpoint of `spec` may have, in their order. None if the family publishes none,
    or such whose block keeps a state, which could not take back a rejected draft.

    `tensors`: of a checkpoint whose family asks where its text is.
    """
    names = getattr(family, "mtp", None)
    if names is None:
        return []
    assert isinstance(names, MtpNames)
    like, n = names.layer(spec), len(spec.layers)
    keeps = None if like is None else cache_spec(like, "float32")
    if like is None or keeps is None or not keeps.per_token:
        return []
    head = head_spec(spec, like, hidden_first=names.hidden_first)
    longer = msgspec.structs.replace(spec, layers=(*spec.layers, like))
    several = isinstance(family, SeveralParts) and tensors
    found = family.layout(longer, tensors) if several else family.weight_map(longer)  # type: ignore[attr-defined]
    own = f"layers.{n}."
    layer = {"layers.0." + name.removeprefix(own): place for name, place in found.items() if name.startswith(own)}
    return [MtpHead(head, _places(names, layer, n, k)) for k in range(most)]


def head_spec(spec: ModelSpec, layer: Layer, *, hidden_first: bool = False) -> ModelSpec:
    """A head on a model of `spec` whose block is `layer`."""
    norm = Norm() if spec.final_norm is None else spec.final_norm
    return ModelSpec(
        family=spec.family, vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, layers=(layer,), final_norm=norm,
        max_position=spec.max_position, bos_token_id=spec.bos_token_id, eos_token_ids=spec.eos_token_ids,
        dtype=spec.dtype, embed_size=2 * spec.hidden_size, pair=Pair(norm=norm, hidden_first=hidden_first),
    )  # fmt: skip


def count_mtp(family: ModelFamily, config: Mapping[str, Any]) -> int:
    """Of how many such heads a config.json without its weights tells. Raises ModelError for a number that is none."""
    names = getattr(family, "mtp", None)
    inner = config.get("text_config")
    fields = Fields(inner if isinstance(inner, Mapping) else config, WHERE)
    given: list[str] = [] if names is None else [name for name in names.fields if name in fields]
    return min(MAX_HEADS, fields.integer(given[0], low=0, high=MAX_LAYERS)) if given else 0


def _places(names: MtpNames, layer: WeightMap, n: int, k: int) -> WeightMap:
    """Of the weights of head k. `layer`: where those of its block were, if it were layer n of the model."""
    block, inside = names.block.format(n=n + k, k=k), f"layers.{n}."
    stored = {name: place if isinstance(place, str) else place.name for name, place in layer.items()}
    if block.startswith(_MODEL):  # where the decoder is, which has a name of its own beside a vision tower
        block = next(iter(stored.values())).partition(inside)[0] + block.removeprefix(_MODEL)
    places: dict[str, str | Cut] = {}
    for name, place in layer.items():
        end = stored[name].partition(inside)[2]
        for usual, here in names.renamed:
            if end.startswith(usual + "."):
                end = here + end.removeprefix(usual)
        moved = f"{block}.{end}"
        places[name] = moved if isinstance(place, str) else msgspec.structs.replace(place, name=moved)
    for name in ("token_norm", "hidden_norm", "embed_in", "final_norm"):
        places[name] = getattr(names, name).format(block=block) + ".weight"
    return places
