"""Models in GGUF files, one or split into several; `architectures` says which kinds are read.

Names and their meaning: gguf-py/gguf/constants.py and the loaders in `src/models` of github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import ModelSpec
from penstock.core.protocols import ModelFamily
from penstock.core.weight_map import Cut
from penstock.families.blocks import beside_blocks, block_refs
from penstock.families.checkpoint import Checkpoint, TokenizerFiles, WeightRef, check_count, check_weights
from penstock.families.gguf.architectures import ARCHITECTURES, Architecture
from penstock.families.gguf.encoders import with_vectors
from penstock.families.gguf.gemma import is_unused
from penstock.families.gguf.header import Header, read_header
from penstock.families.gguf.heads import find_heads
from penstock.families.gguf.missing import NEEDS
from penstock.families.gguf.places import find_places
from penstock.families.gguf.rope import FACTORS
from penstock.families.gguf.stored import as_stored
from penstock.families.gguf.tokens import sampling_fields, special_tokens, tokenizer_files
from penstock.families.reading import WHERE
from penstock.formats.files import quoted
from penstock.formats.gguf import Gguf, is_first_part, read_gguf, split_paths
from penstock.formats.tensor_ref import TensorRef

FindFamily = Callable[[Mapping[str, Any]], ModelFamily]

_IGNORED = re.compile(r"blk\.\d+\.(attn_rot_embd\.weight|nextn\..*)|blk\.0\.time_mix_v[012]\.weight")
"""Frequencies that follow from the metadata; heads that predict further tokens; what RWKV-7's first layer has no use
of."""
_BLOCK = re.compile(r"blk\.(\d+)\..*")
# How the training code laid its tensors out, and whether scaling was trained in: neither changes what is computed.
# Every architecture that has use of the others reads them: converters also write what follows from a config's defaults.
_HARMLESS = frozenset({
    "tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.original_context_length", "rope.scaling.factor",
    "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon",
    "feed_forward_length",
})  # fmt: skip
_KEYS = {
    "num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length",
    "partial_rotary_factor": "rope.dimension_count", "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window", "num_experts_per_tok": "expert_used_count",
}  # fmt: skip
"""Where fields that are worked out mostly come from: for messages."""
_UNROTATED = frozenset({"rope.dimension_count", "rope.freq_base", "rope.scaling.type"})


def open_gguf_folder(folder: Path, names: list[str], find_family: FindFamily) -> Checkpoint:
    """The one GGUF model in a folder; `names` is its listing. Raises ModelError if there are several."""
    models = sorted(name for name in names if name.endswith(".gguf") and is_first_part(name))
    if not models:
        raise ModelError(f"the first part of the GGUF model in {quoted(folder)} is missing")
    if len(models) > 1:
        listed = ", ".join(quoted(name) for name in models[:8]) + (", ..." if len(models) > 8 else "")
        raise ModelError(f"{quoted(folder)} holds several models, {listed}: name the file to be read")
    return open_gguf_file(folder / models[0], find_family)


def open_gguf_file(path: Path, find_family: FindFamily) -> Checkpoint:
    """The model in one GGUF file, or in all parts of a split one of which `path` is any.

    `find_family`: the family that reads a config.json. Raises ModelError if anything in the file is broken,
    UnsupportedError if it needs what Penstock does not have.
    """
    first, tensors = _joined(path)
    name = first.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise _unknown(path, name)
    architecture = ARCHITECTURES[name]
    header = read_header(first, tensors, name, encoder=architecture.encoder)
    spec = _spec(first, header, architecture, find_family)
    check_count(spec)
    in_turn = architecture.value_heads_in_turn
    spec = as_stored(spec, header, neighbours=architecture.neighbours, in_turn=in_turn)
    places = find_places(
        spec,
        tensors,
        architecture.names,
        halves_apart=architecture.halves_apart,
        per_block=architecture.per_block,
        in_turn=in_turn,
    )
    weights = _match(path, header, spec, places, name)
    check_weights(weights, spec)
    found = find_heads(spec, header.num_layers, tensors, architecture.names) if architecture.drafts else []
    heads = tuple(
        Checkpoint(path, head.spec, block_refs(tensors, head.places, head.spec), TokenizerFiles("none"))
        for head in found
    )
    return Checkpoint(path, spec, weights, tokenizer_files(first), sampling_fields(first), heads)


def _unknown(path: Path, name: object) -> UnsupportedError:
    if isinstance(name, str) and name in NEEDS:
        return UnsupportedError(
            f"{quoted(path)} has the architecture {quoted(name)}, which needs {NEEDS[name]}; Penstock does not have "
            "that"
        )
    near = difflib.get_close_matches(name, ARCHITECTURES, n=3, cutoff=0.0) if isinstance(name, str) else []
    nearest = f"; those with the nearest names are {', '.join(near)}" if near else ""
    return UnsupportedError(
        f"{quoted(path)} has the architecture {quoted(name, 60)}, which is none of the {len(ARCHITECTURES)} that GGUF "
        f"files are read of{nearest}"
    )


def _joined(path: Path) -> tuple[Gguf, dict[str, TensorRef]]:
    """The first part, which has the metadata, and the tensors of all."""
    paths = split_paths(path)
    parts = [read_gguf(part) for part in paths]
    tensors: dict[str, TensorRef] = {}
    for number, part in enumerate(parts):
        if part.metadata.get("split.count", 1) != len(parts) or part.metadata.get("split.no", 0) != number:
            raise ModelError(f"{quoted(part.path)} does not say of itself that it is part {number + 1} of {len(parts)}")
        twice = sorted(tensors.keys() & part.tensors.keys())
        if twice:
            raise ModelError(f"{quoted(part.path)} has the tensor {quoted(twice[0])}, which an earlier part has too")
        tensors |= part.tensors
    total = parts[0].metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise ModelError(f"the parts of {quoted(path)} have {len(tensors)} tensors, but {quoted(total, 40)} were split")
    return parts[0], tensors


def _spec(gguf: Gguf, h: Header, architecture: Architecture, find_family: FindFamily) -> ModelSpec:
    """What the family makes of the metadata."""
    keys = dict(_KEYS)
    config: dict[str, Any] = {"model_type": architecture.family(h)}
    for name, source in architecture.fields.items():
        if callable(source):
            config[name] = source(h)  # None is a null, which some families tell from a field that is not there
            continue
        keys[name] = source.removesuffix("?")
        if keys[name] in h.fields:
            config[name] = h.fields.raw(keys[name])
        elif not source.endswith("?"):
            raise ModelError(f"{quoted(gguf.path)} lacks the metadata {keys[name]}, which its architecture needs")
    bos, eos = special_tokens(gguf, h.vocab_size)
    config |= {"bos_token_id": bos, "eos_token_id": list(eos)}
    try:
        spec = find_family(config).spec(config)
    except ModelError as error:
        raise type(error)(_in_words_of_the_file(str(error), gguf.path, keys)) from None
    spec = with_vectors(spec, h)
    rotates = "rope_parameters" in config
    h.fields.refuse_unread(_HARMLESS if rotates else _HARMLESS | _UNROTATED)
    return spec


def _in_words_of_the_file(text: str, path: Path, keys: Mapping[str, str]) -> str:
    """A family's message about its config.json, which nobody wrote, as one about the metadata it was made of."""
    text = text.replace(WHERE, f"the metadata of {quoted(path)}")
    return re.sub(r"[a-z_][a-z_0-9]*", lambda word: keys.get(word[0], word[0]), text)


def _match(
    path: Path, h: Header, spec: ModelSpec, places: Mapping[str, str | Cut], name: str
) -> dict[str, WeightRef]:  # fmt: skip
    wanted = {place if isinstance(place, str) else place.name for place in places.values()}
    missing = sorted(wanted - h.tensors.keys())
    if missing:
        raise ModelError(f"{quoted(path)} lacks {len(missing)} of {len(wanted)} tensors, first {quoted(missing[0])}")
    further = h.fields.raw("nextn_predict_layers") or 0
    others = h.tensors.keys() - wanted - FACTORS - beside_blocks(h.tensors)
    unexpected = sorted(n for n in others if not _needless(n, h.num_layers, further) and not is_unused(n, spec))
    if unexpected:
        raise UnsupportedError(
            f"{quoted(path)} holds {len(unexpected)} tensors that a {name} model does not have here, first "
            f"{quoted(unexpected[0])}"
        )
    return block_refs(h.tensors, places, spec)


def _needless(name: str, num_layers: int, further: int) -> bool:
    """Whether decoding goes without a tensor: it follows from the metadata, or predicts further tokens."""
    block = _BLOCK.fullmatch(name)
    beyond = block is not None and num_layers <= int(block[1]) < num_layers + further
    return beyond or _IGNORED.fullmatch(name) is not None
