"""The model's own defaults of sampling parameters, where a request gives none."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.base.errors import InputError
from penstock.core.sampling import SamplingParams
from penstock.text.validate import validate_sampling

if TYPE_CHECKING:
    from penstock.server.context import Server
    from penstock.text.limits import Limits

log = logging.getLogger("penstock.server")
_NAMES = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens",
}  # fmt: skip
"""Fields of generation_config.json that are read, as in vLLM, and what they are here."""


def sampling_defaults(server: Server) -> dict[str, Any]:
    """Our fields and their values. `max_tokens` is a wish: a prompt may leave room for less."""
    front = server.parts.get("front")
    if front is None or server.config.generation_config == "vllm":
        return {}
    known = server.parts.get("defaults")
    if known is None or known[0] is not front.generation_config:
        found = model_defaults(front.generation_config, server.service.limits)
        known = server.parts["defaults"] = (front.generation_config, found)
    return dict(known[1])


def model_defaults(generation_config: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    """What a model's generation_config.json says of sampling, under our names.

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
            log.warning("%s of generation_config.json is not used: %s", theirs, error)
        else:
            found[ours] = value
    return found
