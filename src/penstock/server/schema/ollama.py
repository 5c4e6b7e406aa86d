"""Wire shapes of Ollama's API. Durations are nanoseconds."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from penstock.server.schema.known import TOOLS, Shape
from penstock.server.schema.sampling import LlamaCppSampling


class OllamaOptions(LlamaCppSampling, kw_only=True):
    """`num_predict`: 0 and less fills the context. `num_ctx`: the context is chosen when the server starts; what does
    not fit is refused, never cut. The last ones are taken only where they change nothing."""

    num_predict: int | None = None
    num_ctx: int | None = None
    mirostat: int | None = None
    typical_p: float | None = None
    tfs_z: float | None = None


class OllamaGenerating(msgspec.Struct, kw_only=True):
    """`format`: "json" or a JSON schema. `think`: true, false, or how much: low, medium, high. `stream`: true where
    nothing is said. `keep_alive`: how long the model stays after its last request, where it does not stay for
    ever."""

    model: str | None = None
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    think: bool | str | None = None
    keep_alive: str | float | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class OllamaChatRequest(OllamaGenerating, kw_only=True):
    inner: ClassVar[Shape] = {"tools": TOOLS}

    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaGenerating, kw_only=True):
    """`raw`: the prompt goes to the model as it is. `suffix`: what stands behind the gap that is to be filled in."""

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None


class OllamaEmbedRequest(msgspec.Struct, kw_only=True):
    """`truncate`: inputs that are too long are cut at their end if this is true, refused otherwise."""

    input: str | list[str]
    model: str | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    options: OllamaOptions | None = None
    keep_alive: str | float | None = None


class OllamaEmbeddingRequest(msgspec.Struct, kw_only=True):
    """Of /api/embeddings, the older form."""

    prompt: str
    model: str | None = None
    options: OllamaOptions | None = None
    keep_alive: str | float | None = None


class OllamaName(msgspec.Struct, kw_only=True):
    """`name`: the older name of `model`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
    stream: bool | None = None
    insecure: bool | None = None


class OllamaFunction(msgspec.Struct, kw_only=True):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(msgspec.Struct, kw_only=True):
    id: str
    function: OllamaFunction


class OllamaMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET


class OllamaAnswer(msgspec.Struct, kw_only=True):
    """One line of a stream, or all of an answer: `message` in a chat, `response` and `thinking` elsewhere.

    What stands behind `done` comes with the last line: `done_reason` is stop, length or load.
    """

    model: str
    created_at: str
    message: OllamaMessage | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    logprobs: list[dict[str, Any]] | UnsetType = UNSET
    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    weight_version: str | UnsetType = UNSET
    weight_versions: list[list[tuple[int, int, str]]] | UnsetType = UNSET


class OllamaEmbeddings(msgspec.Struct, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class OllamaEmbedding(msgspec.Struct, kw_only=True):
    embedding: list[float]


class OllamaDetails(msgspec.Struct, kw_only=True):
    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(msgspec.Struct, kw_only=True):
    """`digest` names what is served, not a file: it is made of the model's name, size and formats."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str | UnsetType = UNSET
    size_vram: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class OllamaModels(msgspec.Struct, kw_only=True):
    models: list[OllamaModel]


class OllamaShown(msgspec.Struct, kw_only=True):
    """`template` is the model's own, in Jinja."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(msgspec.Struct, kw_only=True):
    version: str


class OllamaError(msgspec.Struct, kw_only=True):
    error: str
