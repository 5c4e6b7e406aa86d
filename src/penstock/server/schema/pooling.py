"""Wire shapes of /v1/rerank, /v1/score, /classify and /pooling, as vLLM, Cohere and Jina have them."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.server.schema.embeddings import EmbeddingUsage

Texts = str | list[str]


class PooledRequest(msgspec.Struct, kw_only=True):
    """What all of them take."""

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None


class ScoreRequest(PooledRequest, kw_only=True):
    """`text_1` with each of `text_2`; or as many of one as of the other, pair by pair. `queries` and `documents` are
    other names of the two."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None


class ScoreObject(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ScoreObject]
    usage: EmbeddingUsage


class RerankDocument(msgspec.Struct, kw_only=True):
    text: str


class RerankRequest(PooledRequest, kw_only=True):
    """The `top_n` documents that answer the query best, best first. A document is a text, or an object with one.

    `max_tokens_per_doc` (Cohere) and `max_chunks_per_doc` (older) are refused: a pair that is too long has to be cut
    with `truncate_prompt_tokens`.
    """

    query: str
    documents: list[str | RerankDocument]
    top_n: int | None = None
    return_documents: bool | None = None


class RerankResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    relevance_score: float
    document: RerankDocument | None = None


class RerankList(msgspec.Struct, kw_only=True):
    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RerankResult]


class ClassifyRequest(PooledRequest, kw_only=True):
    """A text, or a list of texts."""

    input: Texts


class ClassifyObject(msgspec.Struct, kw_only=True):
    """`label` is that of the largest score; `probs` are in the order of the model's labels."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyList(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ClassifyObject]
    usage: EmbeddingUsage


class PoolingRequest(PooledRequest, kw_only=True):
    """`task`: embed, classify or token_embed (the hidden states of all tokens). Left out: what the model is for."""

    input: Texts
    task: str | None = None
    encoding_format: str | None = None


class PoolingObject(msgspec.Struct, kw_only=True):
    """`data`: numbers, rows of numbers (token_embed), or the bytes of either in base64."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float | list[float]] | str


class PoolingList(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PoolingObject]
    usage: EmbeddingUsage
