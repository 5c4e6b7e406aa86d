"""Wire shapes of Anthropic's /v1/messages, with our sampling parameters beside them."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from penstock.core.compression import PromptCompression
from penstock.core.sampling import RepetitionDetectionParams
from penstock.server.schema.forms import StructuredOutputsField
from penstock.server.schema.known import ANTHROPIC, Shape


class CountRequest(msgspec.Struct, kw_only=True):
    """What a prompt is made of. `system`: a text or a list of text blocks."""

    inner: ClassVar[Shape] = ANTHROPIC

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """`output_config`: {"format": {"type": "json_schema", "schema": ...}} and {"effort": ...}.

    `output_format`: the same format, under its older name. `structured_outputs`: vLLM's, for what that cannot say.
    """

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    priority: int | None = None
    tpot_slo_ms: float | None = None
    ttft_slo_ms: float | None = None
    expected_ttft_s: float | None = None
    expected_tds: float | None = None
    prompt_compression: PromptCompression | None = None
    output_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputsField | None = None
    cache_salt: str | None = None
    cache_control: dict[str, Any] | None = None
    kv_hints: list[dict[str, Any]] | dict[str, Any] | None = None
    timeout: float | None = None


class CacheCreation(msgspec.Struct, frozen=True, kw_only=True):
    """Of the tokens that were written, those to be kept for five minutes, and for an hour."""

    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class MessageUsage(msgspec.Struct, kw_only=True):
    """`cache_read_input_tokens` came from the prefix cache; `cache_creation_input_tokens` were computed, and are kept
    as `cache_control` says; `input_tokens` are all others. Together they are the prompt."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_creation: CacheCreation = CacheCreation()
    weight_version: str | UnsetType = UNSET
    weight_versions: list[list[tuple[int, int, str]]] | UnsetType = UNSET


class MessageObject(msgspec.Struct, kw_only=True):
    """`stop_reason`: end_turn, max_tokens, stop_sequence or tool_use."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(msgspec.Struct, kw_only=True):
    input_tokens: int


class BatchedMessage(msgspec.Struct, kw_only=True):
    """`params`: the body of a request to /v1/messages. It is checked when its turn comes, not before."""

    custom_id: str
    params: dict[str, Any]


class MessageBatchRequest(msgspec.Struct, kw_only=True):
    requests: list[BatchedMessage]


class MessageBatchCounts(msgspec.Struct, kw_only=True):
    """All of them are `processing` until the batch has ended."""

    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class MessageBatch(msgspec.Struct, kw_only=True):
    """`processing_status`: in_progress, canceling or ended. Times are RFC 3339, in UTC."""

    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: str
    request_counts: MessageBatchCounts
    created_at: str
    expires_at: str
    ended_at: str | None = None
    cancel_initiated_at: str | None = None
    archived_at: str | None = None
    results_url: str | None = None


class MessageBatchList(msgspec.Struct, kw_only=True):
    data: list[MessageBatch]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None


class MessageBatchDeleted(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"
