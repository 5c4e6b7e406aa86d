"""What requests of OpenAI's two generating paths have in common, and vLLM's additions to them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.base.errors import InputError
from penstock.core.compression import PromptCompression
from penstock.core.sampling import RepetitionDetectionParams, SamplingParams
from penstock.server.schema.forms import REFUSED_FORMS, ForeignForms, Form, ResponseFormat, StructuredOutputsField, only

_ID = re.compile(r"0|[1-9][0-9]{0,19}")


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=False):
    """`include_usage`: a last chunk with the usage; `continuous_usage_stats`: the usage so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Sampling(ForeignForms, kw_only=True):
    """Fields of every generating request. null is the same as leaving a field out."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    structured_outputs: StructuredOutputsField | None = None
    response_format: ResponseFormat | None = None
    priority: int | None = None
    service_tier: str | None = None
    tpot_slo_ms: float | None = None
    ttft_slo_ms: float | None = None
    expected_ttft_s: float | None = None
    expected_tds: float | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    request_id: str | None = None
    prompt_compression: PromptCompression | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    kv_hints: list[dict[str, Any]] | dict[str, Any] | None = None
    prompt_cache: list[dict[str, Any]] | dict[str, Any] | None = None

    def sampling(self, defaults: Mapping[str, Any], *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """As the validator takes it. `defaults`: the model's own; of the length, which depends on the prompt,
        `Call.default_max_tokens` tells. Raises InputError."""
        given: dict[str, Any] = {}
        for name in _SAME:
            value = getattr(self, name)
            if value is None:
                value = defaults.get(name)
            if value is not None:
                given[name] = value
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(k): v for k, v in self.logit_bias.items()}
        form = self.form()
        if form is not None:
            given["structured_outputs"] = form.asked
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **given)

    def form(self) -> Form | None:
        """What the answer is bound to. Raises InputError."""
        format = None if self.response_format is None else self.response_format.form()
        field = self.structured_outputs
        own = None if field is None else Form("structured_outputs", field.chosen())
        return only((format, own, *self.foreign_forms()))


_SAME = (
    "n", "temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "stop", "top_k", "min_p",
    "repetition_penalty", "min_tokens", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
    "skip_special_tokens", "spaces_between_special_tokens", "allowed_token_ids", "bad_words", "prompt_logprobs",
    "repetition_detection",
)  # fmt: skip


def _token_id(key: str) -> int:
    if _ID.fullmatch(key) is None:
        raise InputError(f"logit_bias: {key[:40]!r} is no token id; write it as a plain number", param="logit_bias")
    return int(key)


REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    **REFUSED_FORMS,
    "best_of": ((1,), "is not supported: OpenAI and vLLM have dropped it; ask for n samples with logprobs and choose"),
    "logits_processors": ((), "is not supported: a request cannot bring code"),
    "prompt_embeds": ((), "is not supported; send text or token ids"),
    "mm_processor_kwargs": (({},), "is not supported: this model reads text only"),
    "media_io_kwargs": (({},), "is not supported: this model reads text only"),
    "kv_transfer_params": (({},), "is not supported by this server"),
    "vllm_xargs": (({},), "is not supported by this server"),
    "thinking_token_budget": ((), "is not supported; use max_tokens, or chat_template_kwargs of the model"),
    "length_penalty": ((1, 1.0), "belongs to beam search, which this path does not have"),
    "use_beam_search": ((False,), "is not supported over HTTP; ask for n samples instead"),
}
"""Fields of other servers: values that change nothing, and why any other is refused."""

ACCEPTED = frozenset(
    (
        "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "verbosity",
    )
)  # fmt: skip
"""Fields that OpenAI's clients send and that have no meaning for one model on one machine."""
