"""Sampling fields under the names that llama.cpp gives them, which Ollama's options have, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

_SAME = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "stop")


class LlamaCppSampling(msgspec.Struct, kw_only=True):
    """null is the same as leaving a field out, and so is a seed of -1."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None

    def sampling(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """As arguments of SamplingParams. `defaults`: of what is left out."""
        given = {name: getattr(self, name) for name in _SAME} | {"repetition_penalty": self.repeat_penalty}
        given = {name: defaults.get(name) if value is None else value for name, value in given.items()}
        given = {name: value for name, value in given.items() if value is not None and value != []}
        return given | {"seed": None if self.seed == -1 else self.seed}
