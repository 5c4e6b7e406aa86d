"""A Hugging Face model folder: config.json, safetensors, tokenizer files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import ModelSpec
from penstock.core.protocols import ModelFamily, SeveralParts
from penstock.core.weight_map import Cut, WeightMap
from penstock.families.chat_templates import chat_templates
from penstock.families.checkpoint import (
    LOADABLE_DTYPES,
    Checkpoint,
    Codes,
    TokenizerFiles,
    WeightRef,
    check_count,
    check_weights,
)
from penstock.families.fields import Fields
from penstock.families.mtp import mtp_heads
from penstock.families.pooling import with_pooling
from penstock.families.quantization import METHODS, read_method
from penstock.families.quantization.gather import check_claims, codes_ref, drop_empty_biases, gather
from penstock.families.quantization.method import Method
from penstock.families.sparse import laid_out
from penstock.families.yes_no import as_reranker, asks_yes_or_no
from penstock.formats.files import quoted
from penstock.formats.json_file import read_json_object
from penstock.formats.safetensors import INDEX_NAME, read_index, read_safetensors
from penstock.formats.tensor_ref import TensorRef

_SINGLE_NAME = "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def open_folder(folder: Path, names: list[str], config: Mapping[str, Any], family: ModelFamily) -> Checkpoint:
    """The model of `family` in `folder`, whose listing is `names`.

    Raises ModelError if anything in it is broken, UnsupportedError if it needs what Penstock does not have.
    """
    config = dict(config)
    method = read_quantization(folder, names, config)
    reranks = asks_yes_or_no(config, folder, names)
    told: Mapping[str, Any] = config
    if isinstance(family, SeveralParts):
        told = family.told(config, _tensors(folder, names))
    spec = family.spec(told)
    check_count(spec)
    tensors = _tensors(folder, names)
    spec, dense = with_pooling(spec, folder, names)
    untied = spec.has_head and not spec.tie_embeddings and not any(n.endswith("lm_head.weight") for n in tensors)
    if untied and spec.pooler is not None:  # a decoder that was saved for its vectors
        spec = msgspec.structs.replace(spec, has_head=False)
    plain = spec if not dense else msgspec.structs.replace(spec, pooler=None)
    weights, heads = _match(folder, tensors, plain, family, method)
    weights |= dense
    if reranks:
        spec, weights = as_reranker(spec, weights, folder, names)
    check_weights(weights, spec)
    if not _says_dtype(config):
        spec = msgspec.structs.replace(spec, dtype=LOADABLE_DTYPES.get(weights["embed"].tensor.dtype, "bfloat16"))
    generation = _optional_json(folder, names, "generation_config.json")
    eos = Fields(generation, "generation_config.json").token_ids("eos_token_id", spec.vocab_size, default=())
    # Instruction models list the ends of a turn only here.
    spec = msgspec.structs.replace(spec, eos_token_ids=tuple(dict.fromkeys((*spec.eos_token_ids, *eos))))
    files = read_tokenizer_files(folder, names)
    for head in heads:
        check_weights(head.weights, head.spec)
    heads = [replace(h, spec=msgspec.structs.replace(h.spec, dtype=spec.dtype), tokenizer=files) for h in heads]
    return Checkpoint(folder, spec, weights, files, generation, tuple(heads))


def _says_dtype(config: Mapping[str, Any]) -> bool:
    inner = config.get("text_config")
    sections = (config, inner if isinstance(inner, Mapping) else {})
    return any(section.get(name) is not None for section in sections for name in ("dtype", "torch_dtype"))


def pickle_refusal(folder: Path, names: list[str]) -> UnsupportedError | None:
    """The refusal for a folder whose weights are pickles only; None if there are none."""
    pickles = sorted(name for name in names if name.endswith(_PICKLES))
    if not pickles:
        return None
    return UnsupportedError(
        f"{quoted(folder)} has its weights as {quoted(pickles[0])}, a format that can run code when it is read; "
        "convert it to safetensors"
    )


def read_quantization(folder: Path, names: list[str], config: dict[str, Any]) -> Method | None:
    """How the weights are quantised as config.json (its `quantization_config` is taken out of it, and out of its
    `text_config`) or its companion says; None if they are not.

    Raises UnsupportedError for a method, or a kind of one, whose weights cannot be read, ModelError for two at once.
    """
    sections = [config]
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = dict(config["text_config"])
        sections.append(config["text_config"])
    found_at = {name: [s.pop(name, None) for s in sections] for name in ("quantization_config", "compression_config")}
    given = [next(filter(None, values), None) for values in found_at.values()]
    if all(given) and given[0] != given[1]:
        raise ModelError(
            f"config.json of {quoted(folder)} has a quantization_config and another compression_config; leave out the "
            "one that does not describe its tensors"
        )
    quantization: object = given[0] or given[1]
    where, told = "config.json", "quantization_config of config.json"
    if not quantization and "hf_quant_config.json" in names:
        where = told = "hf_quant_config.json"
        found = read_json_object(folder / where).get("quantization")
        quantization = {**(found if isinstance(found, dict) else {}), "quant_method": "modelopt"}
    if not quantization:
        return None
    fields = quantization if isinstance(quantization, dict) else {}
    if fields.get("quant_method") == "fp8" and config.get("expert_dtype") is not None:  # DeepSeek-V4 has it outside
        fields = {"expert_dtype": config["expert_dtype"], **fields}
    method = read_method(fields, told)
    if method is None:
        name = fields.get("quant_method") or "unnamed"
        raise UnsupportedError(
            f"{quoted(folder)} is quantised with the method {quoted(name)} ({where}), which Penstock cannot read; take "
            f"a checkpoint of one of {', '.join(METHODS)}"
        )
    return method


def _tensors(folder: Path, names: list[str]) -> dict[str, TensorRef]:
    if _SINGLE_NAME in names:
        return read_safetensors(folder / _SINGLE_NAME)
    if INDEX_NAME in names:
        return read_index(folder / INDEX_NAME)
    others = sorted(name for name in names if name.endswith(".safetensors"))
    if others:
        raise ModelError(f"{quoted(folder)} has {quoted(others[0])} but neither {_SINGLE_NAME} nor {INDEX_NAME}")
    raise pickle_refusal(folder, names) or ModelError(f"{quoted(folder)} has a config.json but no {_SINGLE_NAME}")


def _match(
    folder: Path, tensors: dict[str, TensorRef], spec: ModelSpec, family: ModelFamily, method: Method | None
) -> tuple[dict[str, WeightRef], list[Checkpoint]]:
    """The model's weights, and its heads for multi-token prediction as far as all of each is there."""
    places = family.layout(spec, tensors) if isinstance(family, SeveralParts) else family.weight_map(spec)
    places = laid_out(places, tensors)
    names = {name: place.name if isinstance(place, Cut) else place for name, place in places.items()}
    tensors = _with_outer_name(tensors, names, lambda name: family.ignores(name, spec))
    codes: dict[str, Codes] = {}
    if method is not None:
        tensors, codes = gather(tensors, method)
        tensors = drop_empty_biases(tensors, codes, set(names.values()))
    check_claims(tensors, set(names.values()), method)
    missing = [name for name in names.values() if name not in tensors]
    if missing:
        raise ModelError(
            f"{quoted(folder)} lacks {len(set(missing))} of the {len(set(names.values()))} tensors its config.json "
            f"asks for, first {quoted(missing[0])}"
        )
    wanted = set(names.values())
    unexpected = [name for name in tensors if name not in wanted and not family.ignores(name, spec)]
    if unexpected:
        raise UnsupportedError(
            f"{quoted(folder)} holds {len(unexpected)} tensors that the {family.name} family does not use with this "
            f"config.json, first {quoted(unexpected[0])}"
        )
    return _refs(places, tensors, codes), _heads(folder, tensors, spec, family, codes)


def _refs(
    places: WeightMap, tensors: Mapping[str, TensorRef], codes: Mapping[str, Codes]
) -> dict[str, WeightRef]:  # fmt: skip
    out: dict[str, WeightRef] = {}
    for logical, place in places.items():
        name, cut = (place.name, place) if isinstance(place, Cut) else (place, None)
        out[logical] = codes_ref(tensors[name], cut, codes[name]) if name in codes else WeightRef(tensors[name], cut)
    return out


def _heads(
    folder: Path, tensors: dict[str, TensorRef], spec: ModelSpec, family: ModelFamily, codes: Mapping[str, Codes]
) -> list[Checkpoint]:
    """Those before the first that is not whole: conversions leave such layers out, more or less."""
    heads: list[Checkpoint] = []
    for found in mtp_heads(family, spec, tensors=tensors):
        places = laid_out(found.places, tensors)
        if any((place.name if isinstance(place, Cut) else place) not in tensors for place in places.values()):
            break
        heads.append(Checkpoint(folder, found.spec, _refs(places, tensors, codes), TokenizerFiles("none")))
    return heads


def _with_outer_name(
    tensors: dict[str, TensorRef], names: Mapping[str, str], ignored: Callable[[str], bool]
) -> dict[str, TensorRef]:
    """A checkpoint of a decoder saved without its head leaves out the outermost module: `h.0.ln_1.weight` instead of
    `transformer.h.0.ln_1.weight` (the published GPT-2 and BLOOM). Such tensors get their full names."""
    outer, dot, inner = names["embed"].partition(".")
    if names["embed"] in tensors or inner not in tensors:
        return tensors
    wanted = set(names.values())
    return {n if n in wanted or ignored(n) else outer + dot + n: tensor for n, tensor in tensors.items()}


def _optional_json(folder: Path, names: list[str], name: str) -> dict[str, Any]:
    return read_json_object(folder / name) if name in names else {}


_BPE_PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
_RWKV_VOCAB = re.compile(r"rwkv_vocab_v\d{8}\.txt")


def read_tokenizer_files(folder: Path, names: list[str]) -> TokenizerFiles:
    """The tokenizer of a folder with these file names. Raises ModelError."""
    config = _optional_json(folder, names, "tokenizer_config.json")
    found = _tokenizer_files(folder, names)
    return replace(found, config=config, **chat_templates(folder, names, config))


def _tokenizer_files(folder: Path, names: list[str]) -> TokenizerFiles:
    if "tokenizer.json" in names:
        return TokenizerFiles("hf", folder / "tokenizer.json")
    if "tokenizer.model" in names:
        return TokenizerFiles("sentencepiece", folder / "tokenizer.model")
    for vocab, merges in _BPE_PAIRS:
        if vocab in names and merges in names:
            return TokenizerFiles("bpe", folder / vocab, merges=folder / merges)
    ranks = sorted(name for name in names if name.endswith(".tiktoken"))
    worlds = sorted(name for name in names if _RWKV_VOCAB.fullmatch(name))
    for found in (ranks, worlds):
        if len(found) > 1:
            raise ModelError(f"{quoted(folder)} has {quoted(found[0])} and {quoted(found[1])}: name one as tokenizer")
    if ranks:
        return TokenizerFiles("tiktoken", folder / ranks[0])
    if worlds:
        return TokenizerFiles("rwkv", folder / worlds[0])
    reason = f"{quoted(folder)} has no tokenizer.json, nor a tokenizer in any other format that is read"
    return TokenizerFiles("none", reason=reason)


def tokenizer_file(path: Path) -> TokenizerFiles | None:
    """The tokenizer that is, or begins with, this file, judged by its name; without what lies beside it. None if its
    name says nothing. Raises ModelError if half of a pair is missing."""
    for pair in _BPE_PAIRS:
        if path.name in pair:
            vocab, merges = (path.with_name(name) for name in pair)
            if not vocab.is_file() or not merges.is_file():
                raise ModelError(f"{quoted(path)} is half a tokenizer: {pair[0]} and {pair[1]} have to lie together")
            return TokenizerFiles("bpe", vocab, merges=merges)
    if path.suffix == ".json":
        return TokenizerFiles("hf", path)
    if ".model" in path.suffixes:
        return TokenizerFiles("sentencepiece", path)
    if path.suffix == ".tiktoken":
        return TokenizerFiles("tiktoken", path)
    if _RWKV_VOCAB.fullmatch(path.name):
        return TokenizerFiles("rwkv", path)
    return TokenizerFiles("gguf", path) if path.suffix == ".gguf" else None
