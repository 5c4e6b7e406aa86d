"""Wire shapes of llama-server's own paths, /completion and /infill. Their names are llama.cpp's, the meaning too."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.server.schema.forms import Form, foreign_forms, only
from penstock.server.schema.sampling import LlamaCppSampling


class LlamaSampling(LlamaCppSampling, kw_only=True):
    """`n_predict`: -1 fills the context. `cache_prompt`: false does without the prefix cache. `logit_bias`: pairs of a
    token id and a number, or false. `grammar`: in GBNF; "" and a `json_schema` of "" are the same as leaving it out."""

    grammar: str | dict[str, Any] | None = None
    json_schema: dict[str, Any] | str | None = None
    model: str | None = None
    n_predict: int | None = None
    stream: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: list[list[int | float | bool | str]] | dict[str, float | bool] | None = None
    n_probs: int | None = None
    cache_prompt: bool | None = None
    return_tokens: bool | None = None
    response_fields: list[str] | None = None
    priority: int | None = None
    timeout: float | None = None

    def form(self) -> Form | None:
        """What the answer is bound to. Raises InputError."""
        return only(foreign_forms(self.grammar, self.json_schema))


class LlamaCompletionRequest(LlamaSampling, kw_only=True):
    """`prompt`: a text, token ids, or texts and ids in turn."""

    prompt: str | list[str | int]


class ExtraFile(msgspec.Struct, kw_only=True):
    text: str
    filename: str | None = None


class InfillRequest(LlamaSampling, kw_only=True):
    """What stands before and behind the gap. `prompt`: what the filling begins with; `input_extra`: other files."""

    input_prefix: str
    input_suffix: str
    prompt: str | None = None
    input_extra: list[ExtraFile] | None = None


class LlamaTimings(msgspec.Struct, kw_only=True):
    """`cache_n` tokens of the prompt came from the prefix cache, `prompt_n` were computed."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class LlamaCompletion(msgspec.Struct, kw_only=True):
    """`stop_type`: eos, limit or word. In a stream each event has `content`, and only the last one the rest."""

    index: int = 0
    content: str
    tokens: list[int]
    id_slot: int = 0
    stop: bool = True
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    generation_settings: dict[str, Any]
    prompt: str
    has_new_line: bool
    truncated: bool = False
    stop_type: str
    stopping_word: str
    tokens_cached: int
    timings: LlamaTimings
    completion_probabilities: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    weight_version: str | msgspec.UnsetType = msgspec.UNSET
    weight_versions: list[list[tuple[int, int, str]]] | msgspec.UnsetType = msgspec.UNSET
