"""Wire shapes of /v1/responses. Items are plain objects: `responses.input` reads them, `responses.events` writes."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from penstock.server.schema.extras import Sampling
from penstock.server.schema.forms import ResponseFormat
from penstock.server.schema.known import FLAT_TOOLS, ITEMS, TOOL_CHOICE, Shape


class TextField(msgspec.Struct, kw_only=True):
    """`format`: {"type": "text" | "json_object"}, or {"type": "json_schema", "name": ..., "schema": ...}."""

    format: ResponseFormat | None = None
    verbosity: str | None = None


class ReasoningField(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(Sampling, kw_only=True):
    """`input`: a text, or a list of messages, function calls with their outputs, and reasoning items."""

    inner: ClassVar[Shape] = {"input": ITEMS, "tools": FLAT_TOOLS, "tool_choice": TOOL_CHOICE}

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    text: TextField | None = None
    reasoning: ReasoningField | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    truncation: str | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class InputTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    weight_version: str | UnsetType = UNSET
    weight_versions: list[list[tuple[int, int, str]]] | UnsetType = UNSET


class ResponseObject(msgspec.Struct, kw_only=True):
    """`status`: queued, in_progress, completed, incomplete, failed or cancelled. Times are seconds since 1970."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    background: bool = False
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, Any] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    model: str
    output: list[dict[str, Any]] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: dict[str, Any]
    service_tier: str = "default"
    store: bool = True
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = []
    top_logprobs: int = 0
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    metadata: dict[str, str] = {}


class InputItems(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class InputTokens(msgspec.Struct, kw_only=True):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ResponseDeleted(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True
