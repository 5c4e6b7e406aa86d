"""Wire shapes of /v1/embeddings."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.server.schema.openai import PromptTokensDetails


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """`input`: a text, a list of texts, token ids, or a list of lists of token ids.

    `pooling` (last, mean, cls, max, weightedmean, mean_sqrt_len), `normalize` and `prompt_name` are ours: which hidden
    state of the model, whether its length is 1, and which of the model's prompts goes before each text. Where they are
    left out, the model's own files decide.
    """

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None
    pooling: str | None = None
    prompt_name: str | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None


class EmbeddingObject(msgspec.Struct, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage
