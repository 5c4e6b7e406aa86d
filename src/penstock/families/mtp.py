"""Heads for multi-token prediction that ship in a checkpoint: found by the names of their tensors, described as a spec.

A family that publishes them says where they are by one attribute, `mtp`. Their block is a decoder layer of the family's
own kind, the model's last, so its weights are named as the family names those of a layer.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2; layouts as in the published checkpoints of DeepSeek-V3, GLM-4.5,
Qwen3-Next, Qwen3.5 and MiMo.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from penstock.core.model_spec import Layer, ModelSpec, Norm, Pair, cache_spec
from penstock.core.protocols import ModelFamily
from penstock.core.weight_map import Cut, WeightMap
from penstock.families.fields import Fields
from penstock.families.reading import MAX_LAYERS, WHERE


class MtpNames(NamedTuple):
    """Where a family's checkpoints have the first of these heads; later ones are not run.

    Attributes:
        block: module of its decoder layer; "{n}" is the number of the model's layers.
        token_norm, hidden_norm, embed_in, final_norm: modules, "{block}" being the one above.
        hidden_first: the hidden state stands before the embedding in what `embed_in` reads.
        fields: of config.json, that say how many heads there are; the first that is there counts.
    """

    block: str = "model.layers.{n}"
    token_norm: str = "{block}.enorm"
    hidden_norm: str = "{block}.hnorm"
    embed_in: str = "{block}.eh_proj"
    final_norm: str = "{block}.shared_head.norm"
    hidden_first: bool = False
    fields: tuple[str, ...] = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")


NEXTN = MtpNames()
"""DeepSeek-V3's and GLM-4.5's: a layer behind the last."""
MTP_LAYERS = MtpNames(
    block="model.mtp_layers.0", token_norm="{block}.token_layernorm", hidden_norm="{block}.hidden_layernorm",
    embed_in="{block}.input_proj", final_norm="{block}.final_layernorm", hidden_first=True,
)  # fmt: skip
"""MiMo's."""
MTP_MODULE = MtpNames(
    block="mtp.layers.0", token_norm="mtp.pre_fc_norm_embedding", hidden_norm="mtp.pre_fc_norm_hidden",
    embed_in="mtp.fc", final_norm="mtp.norm",
)  # fmt: skip
"""Qwen3-Next's and Qwen3.5's."""


class MtpHead(NamedTuple):
    """What a head computes, and where its weights are: all but `embed`, which is no weight."""

    spec: ModelSpec
    places: WeightMap


def mtp_head(family: ModelFamily, spec: ModelSpec) -> MtpHead | None:
    """The head that a checkpoint of `spec` may have; None if the family publishes none, or one whose block keeps a
    state, which could not take back a rejected draft."""
    names = getattr(family, "mtp", None)
    if names is None:
        return None
    assert isinstance(names, MtpNames)
    last, n = spec.layers[-1], len(spec.layers)
    keeps = cache_spec(last, "float32")
    if keeps is None or not keeps.per_token:
        return None
    head = head_spec(spec, last, hidden_first=names.hidden_first)
    block = names.block.format(n=n)
    longer = msgspec.structs.replace(spec, layers=(*spec.layers, last))
    own, stored = f"layers.{n}.", f"model.layers.{n}."
    places: dict[str, str | Cut] = {
        "layers.0." + name.removeprefix(own): _moved(place, stored, block + ".")
        for name, place in family.weight_map(longer).items()
        if name.startswith(own)
    }
    for name in ("token_norm", "hidden_norm", "embed_in", "final_norm"):
        places[name] = getattr(names, name).format(block=block) + ".weight"
    return MtpHead(head, places)


def head_spec(spec: ModelSpec, layer: Layer, *, hidden_first: bool = False) -> ModelSpec:
    """A head on a model of `spec` whose block is `layer`."""
    norm = Norm() if spec.final_norm is None else spec.final_norm
    return ModelSpec(
        family=spec.family, vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, layers=(layer,), final_norm=norm,
        max_position=spec.max_position, bos_token_id=spec.bos_token_id, eos_token_ids=spec.eos_token_ids,
        dtype=spec.dtype, embed_size=2 * spec.hidden_size, pair=Pair(norm=norm, hidden_first=hidden_first),
    )  # fmt: skip


def says_mtp(family: ModelFamily, config: Mapping[str, Any]) -> bool:
    """Whether a config.json without its weights tells of such a head. Raises ModelError for a number that is none."""
    names = getattr(family, "mtp", None)
    inner = config.get("text_config")
    fields = Fields(inner if isinstance(inner, Mapping) else config, WHERE)
    given: list[str] = [] if names is None else [name for name in names.fields if name in fields]
    return bool(given) and fields.integer(given[0], low=0, high=MAX_LAYERS) > 0


def _moved(place: str | Cut, old: str, new: str) -> str | Cut:
    if isinstance(place, str):
        return new + place.removeprefix(old)
    return msgspec.structs.replace(place, name=new + place.name.removeprefix(old))
