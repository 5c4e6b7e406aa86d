"""What is sampled with where a request names nothing: the model's own defaults, or ours where its files give none.

Source of ours: top_p and min_p are llama.cpp's (`common_params_sampling` of `common/common.h`: 0.95 and 0.05); min_p is
Nguyen et al., arXiv 2407.01082. The temperature is a little milder than llama.cpp's 0.8 (`docs/log.md` has the table).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from penstock.base.errors import ConfigError, InputError
from penstock.core.events import Decision
from penstock.core.sampling import RepetitionDetectionParams, SamplingParams
from penstock.text.limits import Limits
from penstock.text.validate import validate_sampling

log = logging.getLogger("penstock")
MILD: dict[str, Any] = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}
"""For models whose files say nothing of how to sample: the plain distribution of a small model derails soon."""
_NAMES = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens",
}  # fmt: skip
"""Fields of generation_config.json that are read, as in vLLM, and what they are here."""
FIELDS = ("temperature", "top_p", "top_k", "min_p")
_SHAPING = frozenset(FIELDS)
"""A file that gives one of these has an idea of its own of the distribution: nothing is mixed into it."""


class Wanted(NamedTuple):
    """The settings of these names."""

    generation_config: str = "auto"
    repetition_detection: str | None = None


class Defaults(NamedTuple):
    """`values`: by our fields; `max_tokens` is a wish: a prompt may leave room for less. `mild`: MILD is among them."""

    values: dict[str, Any]
    mild: bool = False

    def beside(self, named: Iterable[str]) -> dict[str, Any]:
        """For a request that names these fields. Who names anything about the distribution means the plain one else:
        temperature 1 alone is what evaluations and training ask for."""
        if self.mild and not _SHAPING.isdisjoint(named):
            return {name: value for name, value in self.values.items() if name not in _SHAPING}
        return dict(self.values)


def sampling_defaults(
    generation_config: Mapping[str, Any], limits: Limits, wanted: Wanted
) -> Defaults:  # fmt: skip
    """What the files say, or MILD.

    Raises ConfigError for a repetition_detection that no request could have.
    """
    found: dict[str, Any] = {}
    mild = False
    if wanted.generation_config != "vllm":
        own = model_defaults(generation_config, limits)
        mild = not _SHAPING & own.keys()
        found = MILD | own if mild else own
    if wanted.repetition_detection is not None:
        try:
            asked = msgspec.json.decode(wanted.repetition_detection, type=RepetitionDetectionParams)
            validate_sampling(SamplingParams(repetition_detection=asked), limits=limits)
        except (msgspec.MsgspecError, InputError) as error:
            said = str(error).removeprefix("repetition_detection").lstrip(".: ")
            raise ConfigError(
                f'repetition_detection: {said}; for example {{"max_pattern_size": 64, "min_count": 8}}',
                field="repetition_detection",
            ) from None
        found["repetition_detection"] = asked
    return Defaults(found, mild)


def model_defaults(generation_config: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    """What a model's generation_config.json, or its GGUF file, says of sampling, under our names.

    What a request could not ask for is left out, and said in the log: it would fail every request that is silent.
    """
    found: dict[str, Any] = {}
    for theirs, ours in _NAMES.items():
        value = generation_config.get(theirs)
        if value is None:
            continue
        try:
            if ours == "max_tokens" and isinstance(value, int) and value > limits.max_model_len:
                value = limits.max_model_len
            validate_sampling(msgspec.structs.replace(SamplingParams(), **{ours: value}), limits=limits)
        except InputError as error:
            log.warning("%s of the model's generation_config is not used: %s", theirs, error)
        else:
            found[ours] = value
    return found


def sampling_decision(defaults: Defaults, mode: str) -> Decision:
    """For the log and `--explain`: what `sampling_defaults` found, and whose word it is."""
    if mode == "vllm":
        why = "generation_config is vllm: neutral, as OpenAI's"
    elif defaults.mild:
        why = "the model's files give none; for requests that name none of them (--generation-config vllm: neutral)"
    else:
        why = "the model's own, for requests that name none"
    shown = {
        k: msgspec.json.encode(v).decode() if isinstance(v, msgspec.Struct) else v for k, v in defaults.values.items()
    }
    return Decision("sampling_defaults", ", ".join(f"{k} {v}" for k, v in shown.items()) or "neutral", why)
