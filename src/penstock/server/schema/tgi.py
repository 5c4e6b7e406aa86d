"""Wire shapes of Text Generation Inference's own paths, /generate and its kin. Names and meaning are TGI's."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from penstock.base.errors import InputError
from penstock.core.sampling import SamplingParams
from penstock.server.schema.forms import Form, foreign_forms, only

DEFAULT_MAX_NEW_TOKENS = 100
_NEUTRAL: dict[str, tuple[Any, ...]] = {"best_of": (1,), "typical_p": (1,), "watermark": (False,)}


class TGIParameters(msgspec.Struct, kw_only=True):
    """Tokens are drawn if `do_sample` is true or temperature, top_k or top_p say something; else the likeliest one is
    taken. What is left out is neutral, whatever the model's own defaults are. `adapter_id`: a model or adapter of this
    server. `grammar`: {"type": "json", "regex" or "json_schema", "value": ...}. `truncate`: the prompt's last tokens
    that are kept."""

    adapter_id: str | None = None
    best_of: int | None = None
    decoder_input_details: bool | None = None
    details: bool | None = None
    do_sample: bool | None = None
    frequency_penalty: float | None = None
    grammar: dict[str, Any] | None = None
    max_new_tokens: int | None = None
    repetition_penalty: float | None = None
    return_full_text: bool | None = None
    seed: int | None = None
    stop: list[str] | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_n_tokens: int | None = None
    top_p: float | None = None
    truncate: int | None = None
    typical_p: float | None = None
    watermark: bool | None = None

    @property
    def draws(self) -> bool:
        warped = self.temperature not in (None, 1) or self.top_k is not None or self.top_p not in (None, 1)
        return bool(self.do_sample) or warped

    def form(self) -> Form | None:
        """What the answer is bound to. Raises InputError."""
        return only(foreign_forms(self.grammar, None))

    def sampling(self, *, streams: bool) -> SamplingParams:
        """Raises InputError."""
        for name, neutral in _NEUTRAL.items():
            if getattr(self, name) not in (None, *neutral):
                raise InputError(f"parameters.{name} is not supported; leave it out", param=f"parameters.{name}")
        if self.temperature is not None and self.temperature <= 0:
            raise InputError(
                "parameters.temperature must be above 0; leave it out for the likeliest token at each place",
                param="parameters.temperature",
            )
        if self.decoder_input_details and streams:
            raise InputError(
                "parameters.decoder_input_details does not come in a stream; leave it out, or use /generate",
                param="parameters.decoder_input_details",
            )
        form, shown = self.form(), self.top_n_tokens or 0
        others = ("frequency_penalty", "repetition_penalty", "top_p", "top_k")
        given = {name: value for name in others if (value := getattr(self, name)) is not None}
        return SamplingParams(
            temperature=(1.0 if self.temperature is None else self.temperature) if self.draws else 0.0,
            seed=self.seed,
            max_tokens=self.max_new_tokens,
            stop=[*(self.stop or ()), *(self.stop_sequences or ())] or None,
            include_stop_str_in_output=True,
            logprobs=shown if streams or self.details or shown else None,
            prompt_logprobs=0 if self.decoder_input_details else None,
            structured_outputs=None if form is None else form.asked,
            **given,
        )


class TGIRequest(msgspec.Struct, kw_only=True):
    """`stream`: of a request to /; the other paths say it themselves. `model`: one of several models of this server."""

    inputs: str
    parameters: TGIParameters | None = None
    stream: bool | None = None
    model: str | None = None


class TGIToken(msgspec.Struct, kw_only=True):
    """`special`: its text is no part of the answer."""

    id: int
    text: str
    logprob: float | None
    special: bool | UnsetType = UNSET


class TGIDetails(msgspec.Struct, kw_only=True):
    """`finish_reason`: length, eos_token or stop_sequence. `prefill`: the prompt's tokens, of which the first has no
    logprob."""

    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[TGIToken] | UnsetType = UNSET
    tokens: list[TGIToken] | UnsetType = UNSET
    top_tokens: list[list[TGIToken]] | UnsetType = UNSET
    input_length: int | UnsetType = UNSET


class TGIAnswer(msgspec.Struct, kw_only=True):
    """`details`: where they were asked for."""

    generated_text: str
    details: TGIDetails | UnsetType = UNSET
    weight_version: str | UnsetType = UNSET
    weight_versions: list[list[tuple[int, int, str]]] | UnsetType = UNSET


class TGIEvent(msgspec.Struct, kw_only=True):
    """One token of a stream; the last one has `generated_text` and `details`."""

    index: int
    token: TGIToken
    generated_text: str | None = None
    details: TGIDetails | None = None
    top_tokens: list[TGIToken] | UnsetType = UNSET
    weight_version: str | UnsetType = UNSET
    weight_versions: list[list[tuple[int, int, str]]] | UnsetType = UNSET


class TGIInfo(msgspec.Struct, kw_only=True):
    model_id: str
    model_sha: str | None
    model_dtype: str
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    max_client_batch_size: int
    version: str
    router: str
