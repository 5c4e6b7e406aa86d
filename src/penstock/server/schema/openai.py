"""OpenAI's shapes of completions, chat completions and models, with vLLM's additions."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from penstock.base.errors import InputError
from penstock.server.schema.extras import Sampling
from penstock.server.schema.known import MESSAGES, TOOL_CHOICE, TOOLS, Shape


class CompletionRequest(Sampling, kw_only=True):
    """`prompt`: a text, a list of texts, token ids, or a list of lists of token ids. `suffix`: what stands behind the
    gap between it and the prompt, which is filled in."""

    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    max_tokens: int | UnsetType | None = UNSET
    echo: bool | None = None
    logprobs: int | None = None


class PredictionPart(msgspec.Struct, kw_only=True):
    type: str = "text"
    text: str


class Prediction(msgspec.Struct, kw_only=True):
    """What the answer is likely to repeat, such as a file with a small change: it comes faster, and is the same."""

    type: str
    content: str | list[PredictionPart]

    def text(self) -> str:
        """Raises InputError."""
        if self.type != "content":
            raise InputError(f"prediction.type must be content, not {self.type[:40]!r}", param="prediction.type")
        if isinstance(self.content, str):
            return self.content
        for n, part in enumerate(self.content):
            if part.type != "text":
                name = f"prediction.content[{n}].type"
                raise InputError(f"{name} must be text, not {part.type[:40]!r}", param=name)
        return "".join(part.text for part in self.content)


class ChatRequest(Sampling, kw_only=True):
    inner: ClassVar[Shape] = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": TOOL_CHOICE}

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    prediction: Prediction | None = None


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """`compressed_from`: with `prompt_compression`, how many tokens the prompt had before."""

    cached_tokens: int = 0
    compressed_from: int | UnsetType = UNSET


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    """Drafts that the model was asked about; the accepted ones are among the completion's tokens."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    """Tokens. `cached_tokens` of the prompt were not computed again. With speculation, details of its drafts.

    `weight_version`: of the weights, where these may be swapped. `weight_versions`: of an answer that went over to
    others, for each sample (first token, end, version) of each run of tokens.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    weight_version: str | UnsetType = UNSET
    weight_versions: list[list[tuple[int, int, str]]] | UnsetType = UNSET
    queue_time: float | UnsetType = UNSET
    """These four in seconds, for requests with the header X-Request-Times (Groq's names): until the engine began with
    it, from there to the first token, from there on, and in all."""
    prompt_time: float | UnsetType = UNSET
    completion_time: float | UnsetType = UNSET
    total_time: float | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """`text_offset` counts characters from the beginning of the choice's text."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class PromptLogprob(msgspec.Struct, kw_only=True):
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[CompletionChoice]
    usage: Usage | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: str


class CustomCall(msgspec.Struct, kw_only=True):
    name: str
    input: str


class ToolCall(msgspec.Struct, kw_only=True):
    """Of `type` function or custom; what it says is under that name."""

    id: str
    type: str = "function"
    function: FunctionCall | UnsetType = UNSET
    custom: CustomCall | UnsetType = UNSET


class TopLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[TopLogprob] = []


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[TokenLogprob] | None = None
    refusal: None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """`reasoning` and `reasoning_content` are the same text under the names of two families of clients."""

    role: str = "assistant"
    content: str | None = None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChoice]
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Model(msgspec.Struct, kw_only=True):
    """`default_sampling_params`: what requests that say nothing get: the model's own, or mild ones.

    `capabilities`: `chat`; `tools`, which is "template" if the model's template shows them to it, "prompt" if Penstock
    tells it of them in plain words ("prompt-required": only where a call is required or named), or "none"; and
    `bare_tool_calls`, whether JSON without the template's marks counts as a call.
    """

    id: str
    object: str = "model"
    created: int
    owned_by: str = "penstock"
    root: str | None = None
    parent: str | None = None
    max_model_len: int
    weight_version: str | UnsetType = UNSET
    default_sampling_params: dict[str, Any]
    capabilities: dict[str, Any] = {}


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[Model]


class ErrorDetail(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class Error(msgspec.Struct, kw_only=True):
    error: ErrorDetail
