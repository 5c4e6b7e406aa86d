"""Which heads find facts: a profile of a model's kv heads, measured on needles.

Source: Wu et al., Retrieval Head Mechanistically Explains Long-Context Factuality, arXiv 2404.15574, section 2. There a
head scores when its largest weight lies on the very token that is then produced. Here a kv head's score is how much
attention the tokens of the needle's number get, as the mean over the tokens of the answer, of that of its query heads
that gives most: two heads that share the work of finding are both seen. The answer is given, not generated.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.base.bf16 import F32
from penstock.base.errors import InputError
from penstock.eval.answers import said
from penstock.eval.exercises import Noise, Split, hidden
from penstock.eval.maps import LayerMap, MapReader
from penstock.text.tokenizer import Tokenizer

_TRIES = 20


class NeedleText(NamedTuple):
    """A prompt with its answer. `fact`: where in the context its number stands; `answer`: where it is given."""

    token_ids: tuple[int, ...]
    fact: range
    answer: range


class HeadScores(NamedTuple):
    """`scores`: layer -> [G]; `right`: the share of answers' tokens that the model would have given itself."""

    scores: dict[int, F32]
    right: float
    num_texts: int


def needle_texts(
    tokenizer: Tokenizer, bos: int | None, noise: Noise, length: int, count: int, split: Split = "train"
) -> list[NeedleText]:
    """Texts of at most `length` tokens and not much less, at depths of even distances. Nobody is judged by the training
    half of the exercises, so what is chosen for a model is chosen by it.

    Raises: InputError if there is no such text.
    """
    rng = random.Random(f"heads {length}")
    sample = noise(random.Random(0), 4000)
    per_token = len(sample) / len(tokenizer.encode(sample))
    return [_needle_text(tokenizer, bos, noise, rng, split, length, (i + 0.5) / count, per_token) for i in range(count)]


def _needle_text(
    tokenizer: Tokenizer, bos: int | None, noise: Noise, rng: random.Random, split: Split, length: int, depth: float,
    per_token: float,
) -> NeedleText:  # fmt: skip
    size = int((length - 60) * per_token)
    for _ in range(_TRIES):
        made = hidden(rng, split, max(size, 0), noise, depth)
        found = _placed(tokenizer, bos, made.prompt, said(made.answer))
        if found is None:
            continue
        over = len(found.token_ids) - length
        if over <= 0:
            return found
        size -= int((over + 2) * per_token) + 1
    raise InputError(f"no needle in {length} tokens whose number stands in it once; use longer texts")


def _placed(tokenizer: Tokenizer, bos: int | None, prompt: str, value: str) -> NeedleText | None:
    number = tokenizer.encode_inner(" " + value)
    ids = tokenizer.encode(prompt)
    if bos is not None and ids[:1] != [bos]:
        ids = [bos, *ids]
    places = [i for i in range(len(ids) - len(number) + 1) if ids[i : i + len(number)] == number]
    if len(places) != 1:
        return None
    return NeedleText(
        (*ids, *number), range(places[0], places[0] + len(number)), range(len(ids), len(ids) + len(number))
    )


def head_scores(reader: MapReader, texts: Sequence[NeedleText]) -> HeadScores:
    """The mean over texts."""
    total: dict[int, F32] = {}
    right = asked = 0
    for text in texts:
        first = text.answer.start - 1
        logits, maps = reader.read(text.token_ids, first)
        given = logits[first:-1].argmax(axis=-1)
        right += int((given == text.token_ids[text.answer.start :]).sum())
        asked += len(given)
        for layer in maps:
            score = found(layer, text)
            total[layer.layer] = total[layer.layer] + score if layer.layer in total else score
    mean = {layer: np.divide(score, len(texts), dtype=np.float32) for layer, score in total.items()}
    return HeadScores(mean, right / asked, len(texts))


def found(layer: LayerMap, text: NeedleText) -> F32:
    """[G]: attention on the number by the tokens that the answer's tokens are chosen from."""
    on_fact = layer.weights[: len(text.answer), :, :, text.fact.start : text.fact.stop].sum(axis=-1)
    out: F32 = on_fact.mean(axis=0).max(axis=-1)
    return out
