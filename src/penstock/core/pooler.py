"""From the hidden states of a text to a vector or to scores of labels, as the files of a model say."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.core.mixers import Shapes

POOLINGS = ("last", "mean", "cls", "max", "weightedmean", "mean_sqrt_len")
"""How hidden states become one: that of the last token, or of the first (cls); their mean; the largest of each
component; their mean with token i counting i times (Muennighoff, SGPT, arXiv 2202.08904, section 3.1); their sum
divided by the root of their number."""
WHOLE = "all"
"""No pooling: the hidden states themselves, one after the other."""
HEAD = "+head"
"""Behind a pooling: the vector goes through the model's `PoolingSpec.head`."""


class HeadLayer(msgspec.Struct, frozen=True, kw_only=True):
    """act(W x + bias), then a layer norm (weight `norm`, no bias) if `norm_eps` is given. Its numbers are `width`."""

    width: int
    bias: bool = True
    activation: Literal["none", "tanh", "gelu", "gelu_tanh", "relu", "silu", "sigmoid"] = "none"
    norm_eps: float | None = None


class PoolingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's files say of its vectors.

    Attributes:
        mode: one of `POOLINGS`.
        head: what the pooled vector goes through; the weights are `head.0`, `head.0.bias`, ...
        normalize: the vector is brought to length 1.
        labels: of a classifier, whose scores are what `head` gives, one each; none: it gives vectors.
        scores: how numbers of labels become scores.
        prompts: texts that go before a text, by what it is ("query"); `prompt`: the name of the one that goes before
            every text for which nothing is said.
        pair: of a reranker that is asked in words: what stands before the query (two parts; the first one has literals
            of special tokens), between it and the document, and behind (with literals again). None: it is no such one.
        score: the label whose score is that of a pair, where there are several; None: none of them is.
        max_tokens: of a text, where that is less than the model has positions for.
    """

    mode: str = "mean"
    head: tuple[HeadLayer, ...] = ()
    normalize: bool = True
    labels: tuple[str, ...] = ()
    scores: Literal["softmax", "sigmoid", "none"] = "softmax"
    prompts: tuple[tuple[str, str], ...] = ()
    prompt: str | None = None
    pair: tuple[str, str, str, str] | None = None
    score: int | None = None
    max_tokens: int | None = None

    def weight_shapes(self, e: int) -> Shapes:
        out: Shapes = {}
        for i, layer in enumerate(self.head):
            out[f"head.{i}"] = (layer.width, e)
            if layer.bias:
                out[f"head.{i}.bias"] = (layer.width,)
            if layer.norm_eps is not None:
                out[f"head.{i}.norm"] = (layer.width,)
            e = layer.width
        return out

    @property
    def is_classifier(self) -> bool:
        return bool(self.labels)

    @property
    def scored(self) -> int | None:
        """The label whose score is that of a pair; None: a pair has no score."""
        return 0 if len(self.labels) == 1 else self.score

    @property
    def pooling(self) -> str:
        """What a request for this model's vectors (or scores) says."""
        return self.mode + HEAD if self.head else self.mode
