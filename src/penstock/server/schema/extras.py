"""What requests of OpenAI's two generating paths have in common, and vLLM's additions to them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.base.errors import InputError
from penstock.core.compression import PromptCompression
from penstock.core.sampling import SamplingParams, StructuredOutputs
from penstock.text.grammar.schema import json_schema_check

_ID = re.compile(r"0|[1-9][0-9]{0,19}")


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=False):
    """`include_usage`: a last chunk with the usage; `continuous_usage_stats`: the usage so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class StructuredOutputsField(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`: exactly one of these."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None

    def chosen(self) -> StructuredOutputs:
        """Raises InputError for options that would change what is asked, silently."""
        for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
            if getattr(self, name):
                raise InputError(
                    f"structured_outputs.{name} is not supported; leave it out", param=f"structured_outputs.{name}"
                )
        return StructuredOutputs(
            json=self.json, regex=self.regex, choice=self.choice, grammar=self.grammar, json_object=self.json_object,
            structural_tag=self.structural_tag,
        )  # fmt: skip


class ResponseFormatSchema(msgspec.Struct, kw_only=True):
    name: str | None = None
    schema: dict[str, Any] | str | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """OpenAI's: text, json_object, or json_schema with a schema."""

    type: str
    json_schema: ResponseFormatSchema | None = None

    def chosen(self) -> StructuredOutputs | None:
        """Raises InputError."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return StructuredOutputs(json_object=True)
            case "json_schema":
                if self.json_schema is None or self.json_schema.schema is None:
                    raise InputError(
                        "response_format of type json_schema needs json_schema.schema",
                        param="response_format.json_schema.schema",
                    )
                # By the client's name for it; what only compiling finds is told as structured_outputs.json.
                json_schema_check(self.json_schema.schema, "response_format.json_schema.schema")
                return StructuredOutputs(json=self.json_schema.schema)
        raise InputError(
            f"response_format.type must be text, json_object or json_schema, not {self.type[:40]!r}",
            param="response_format.type",
        )


class Sampling(msgspec.Struct, kw_only=True):
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
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    structured_outputs: StructuredOutputsField | None = None
    response_format: ResponseFormat | None = None
    priority: int | None = None
    tpot_slo_ms: float | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    request_id: str | None = None
    prompt_compression: PromptCompression | None = None

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
        structured = self._structured()
        if structured is not None:
            given["structured_outputs"] = structured
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **given)

    def _structured(self) -> StructuredOutputs | None:
        format = None if self.response_format is None else self.response_format.chosen()
        field = None if self.structured_outputs is None else self.structured_outputs.chosen()
        if format is not None and field is not None:
            raise InputError(
                "response_format and structured_outputs exclude each other; give one of them",
                param="structured_outputs",
            )
        return format or field


_SAME = (
    "n", "temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "stop", "top_k", "min_p",
    "repetition_penalty", "min_tokens", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
    "skip_special_tokens", "spaces_between_special_tokens", "allowed_token_ids", "bad_words", "prompt_logprobs",
)  # fmt: skip


def _token_id(key: str) -> int:
    if _ID.fullmatch(key) is None:
        raise InputError(f"logit_bias: {key[:40]!r} is no token id; write it as a plain number", param="logit_bias")
    return int(key)


def _guided(new: str) -> tuple[tuple[Any, ...], str]:
    return (), f"is gone; write structured_outputs: {{{new}: ...}} instead"


REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "guided_json": _guided('"json"'),
    "guided_regex": _guided('"regex"'),
    "guided_choice": _guided('"choice"'),
    "guided_grammar": _guided('"grammar"'),
    "guided_decoding_backend": ((), "is gone; there is one backend, leave it out"),
    "guided_whitespace_pattern": ((), "is gone; write structured_outputs instead, without a pattern for blanks"),
    "structural_tag": ((), "is not supported; write structured_outputs with json, regex, choice or grammar"),
    "best_of": ((1,), "is not supported: OpenAI and vLLM have dropped it; ask for n samples with logprobs and choose"),
    "truncate_prompt_tokens": ((), "is not supported: a prompt is never cut; shorten it before it is sent"),
    "logits_processors": ((), "is not supported: a request cannot bring code"),
    "prompt_embeds": ((), "is not supported; send text or token ids"),
    "mm_processor_kwargs": (({},), "is not supported: this model reads text only"),
    "media_io_kwargs": (({},), "is not supported: this model reads text only"),
    "kv_transfer_params": (({},), "is not supported by this server"),
    "vllm_xargs": (({},), "is not supported by this server"),
    "repetition_detection": (({},), "is not supported; use repetition_penalty or max_tokens"),
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
