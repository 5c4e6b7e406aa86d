"""Rerankers that answer in words: Qwen3-Reranker, a decoder that is asked "yes or no?" about a query and a document.

Nothing is written: the score is the share of "yes" of the two words' logits behind the prompt, so of the output matrix
two rows are read. Source: Zhang et al., Qwen3 Embedding, arXiv 2506.05176, section 2; the prompt is the published one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import ModelSpec
from penstock.core.pooler import HeadLayer, PoolingSpec
from penstock.core.weight_map import Cut
from penstock.families.checkpoint import WeightRef
from penstock.formats.files import quoted, read_whole
from penstock.formats.json_file import read_json_object

_FIELD = "classifier_from_token"
_ANSWERS = ("no", "yes")
_TITLE = re.compile(rb"^# Qwen3-Reranker\b", re.MULTILINE)
_README_BYTES, _TOKENIZER_BYTES = 1 << 20, 1 << 28
_PAIR = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: ",
    "\n<Document>: ",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)  # fmt: skip


def asks_yes_or_no(config: dict[str, Any], folder: Path, names: list[str]) -> bool:
    """Whether a model is such a reranker: config.json gives `classifier_from_token` as vLLM's overrides do, or the
    folder has the published README. Mutates: `config`, the field is taken out of it."""
    told = config.pop(_FIELD, None)
    config.pop("is_original_qwen3_reranker", None)
    if config.get("model_type") != "qwen3":
        if told is not None:
            raise UnsupportedError(f"config.json of {quoted(folder)} gives {_FIELD}; that is read of Qwen3 models only")
        return False
    if told is not None:
        if told != list(_ANSWERS):
            raise UnsupportedError(f"config.json of {quoted(folder)}: {_FIELD} must be {list(_ANSWERS)}, as the prompt")
        return True
    if "README.md" not in names or (folder / "README.md").stat().st_size > _README_BYTES:
        return False
    return _TITLE.search(read_whole(folder / "README.md", _README_BYTES)) is not None


def as_reranker(
    spec: ModelSpec, weights: Mapping[str, WeightRef], folder: Path, names: list[str]
) -> tuple[ModelSpec, dict[str, WeightRef]]:  # fmt: skip
    """The decoder with the two rows as its head. Raises: ModelError, UnsupportedError."""
    if "tokenizer.json" not in names:
        raise ModelError(f"{quoted(folder)} has no tokenizer.json, which says what the ids of yes and no are")
    model = read_json_object(folder / "tokenizer.json", _TOKENIZER_BYTES).get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    named = {word: vocab.get(word) if isinstance(vocab, dict) else None for word in _ANSWERS}
    ids = {word: i for word, i in named.items() if isinstance(i, int) and 0 <= i < spec.vocab_size}
    if len(ids) < len(_ANSWERS) or ids["yes"] == ids["no"]:
        raise ModelError(f"the vocabulary of {quoted(folder)} has no tokens yes and no, whose logits are the score")
    source = weights["embed" if spec.tie_embeddings else "lm_head"]
    if source.cut is not None or source.codes is not None:
        raise UnsupportedError(
            f"{quoted(folder)} stores its output matrix in codes; Penstock reads yes and no of floats"
        )
    labels = tuple(sorted(_ANSWERS, key=ids.__getitem__))
    first, last = (ids[word] for word in labels)
    rows = Cut(source.tensor.name, source.tensor.shape, ((first, last + 1, last - first),))
    found = {name: ref for name, ref in weights.items() if name != "lm_head"}
    pooler = PoolingSpec(
        mode="last", head=(HeadLayer(width=2, bias=False),), normalize=False, labels=labels, pair=_PAIR,
        score=labels.index("yes"),
    )  # fmt: skip
    spec = msgspec.structs.replace(spec, has_head=False, tie_embeddings=False, pooler=pooler)
    return spec, found | {"head.0": replace(source, cut=rows)}
