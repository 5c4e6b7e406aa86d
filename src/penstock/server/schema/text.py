"""Shapes of /tokenize, /detokenize and /apply-template (vLLM's names)."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from penstock.server.schema.known import MESSAGES, TOOLS, Shape


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either `prompt`, or `messages` with what belongs to a chat."""

    inner: ClassVar[Shape] = {"messages": MESSAGES, "tools": TOOLS}

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TokenizeResponse(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """What vLLM tells of a tokenizer, as far as it does not depend on a library. Tokens are their literals."""

    tokenizer_class: str
    bos_token: str | None = None
    eos_token: str | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    vocab_size: int
    model_max_length: int
    chat_template: str | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    prompt: str


class TemplateRequest(msgspec.Struct, kw_only=True):
    """What a chat request would be made into; nothing is generated."""

    inner: ClassVar[Shape] = {"messages": MESSAGES, "tools": TOOLS}

    messages: list[dict[str, Any]]
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TemplateResponse(msgspec.Struct, kw_only=True):
    """`prompt` is the text of `tokens`. A client's own spelling of a special token is text there, and not its id."""

    prompt: str
    tokens: list[int]
    count: int
