"""Wire shapes of /v1/decisions (OpenAI's) and /v1/systemone (TypeSafe's). `label_mass` in answers is an addition."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from penstock.server.schema.known import ITEMS, Shape, names
from penstock.server.schema.responses import InputTokensDetails, OutputTokensDetails

Parts = str | list[dict[str, Any]]
_PART = names("type", "text", "refusal", "annotations", "logprobs", "data", "prompt_cache_breakpoint")
_ITEMS: Shape = {**ITEMS, "content": _PART, "output": _PART}


class ChoiceOption(msgspec.Struct, kw_only=True):
    value: str | bool
    description: str | None = None


class ScoreLevel(msgspec.Struct, kw_only=True):
    label: str
    description: str | None = None


class DecisionAsked(msgspec.Struct, kw_only=True):
    """`type`: predicate, choice (of `choices`) or score (on `levels`, the lowest first). `instructions`: a text, or
    parts of the types input_text and input_json."""

    type: str
    instructions: Parts
    name: str | None = None
    choices: list[ChoiceOption] | None = None
    levels: list[ScoreLevel] | None = None


class DecisionReading(msgspec.Struct, kw_only=True):
    """How answers are read, and what every request may say; ours, on both paths.

    `temperature` divides the logarithms of the labels' probabilities before they are shared out; below `min_label_mass`
    an answer is a refusal.
    """

    model: str | None = None
    temperature: float | None = None
    min_label_mass: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None


class DecisionRequest(DecisionReading, kw_only=True):
    """`input`: a text, or a list of messages and of calls of tools with their outputs."""

    inner: ClassVar[Shape] = {"input": _ITEMS}

    input: str | list[dict[str, Any]]
    questions: list[DecisionAsked]
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


class OptionProbability(msgspec.Struct, kw_only=True):
    """`value` of a choice; of a level its number, counted from 0, with its `label`."""

    value: str | bool | int
    label: str | UnsetType = UNSET
    probability: float


class DecisionAnswer(msgspec.Struct, kw_only=True):
    """`probability` of a predicate; `choice`, or `score` (the mean level, counted from 0), with probabilities and a
    `confidence` from 0 to 1. `label_mass`: what of the model's probability was on the labels."""

    type: Literal["predicate", "choice", "score", "refusal"]
    name: str | None
    label_mass: float
    probability: float | UnsetType = UNSET
    choice: str | bool | UnsetType = UNSET
    score: float | UnsetType = UNSET
    confidence: float | UnsetType = UNSET
    probabilities: list[OptionProbability] | UnsetType = UNSET


class DecisionUsage(msgspec.Struct, kw_only=True):
    """What all questions share counts once. Nothing is generated."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    total_tokens: int
    output_tokens: int = 0
    output_tokens_details: OutputTokensDetails = msgspec.field(default_factory=OutputTokensDetails)


class DecisionResponse(msgspec.Struct, kw_only=True):
    model: str
    answers: list[DecisionAnswer]
    usage: DecisionUsage


class SystemOneQuestion(msgspec.Struct, kw_only=True):
    """`criteria` of a noul (a yes or no): what "true" and "false" mean, or nothing; of a choice: what each option
    means, by its name; of a score: its levels, the lowest first."""

    type: str
    instructions: Any
    criteria: Any = None


class SystemOneRequest(DecisionReading, kw_only=True):
    """`state`: a text, an object or a list."""

    state: Any
    questions: dict[str, SystemOneQuestion]


class SystemOneAnswer(msgspec.Struct, kw_only=True):
    type: Literal["noul", "choice", "score", "refusal"]
    label_mass: float
    noul: float | UnsetType = UNSET
    choice: str | UnsetType = UNSET
    score: float | UnsetType = UNSET
    confidence: float | UnsetType = UNSET
    legend: dict[str, str] | UnsetType = UNSET
    probabilities: dict[str, float] | UnsetType = UNSET


class SystemOneUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    output_tokens: int = 0


class SystemOneResponse(msgspec.Struct, kw_only=True):
    model: str
    answers: dict[str, SystemOneAnswer]
    usage: SystemOneUsage
