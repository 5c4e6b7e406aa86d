"""Penstock: an LLM serving engine in which every published optimisation is a small, switchable, measured part."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.base.version import __version__

if TYPE_CHECKING:
    from penstock.core.adapter import LoRARequest
    from penstock.core.output import CompletionOutput, Logprob, RequestOutput
    from penstock.core.sampling import BeamSearchParams, SamplingParams
    from penstock.launch.llm import LLM
    from penstock.text.decisions import DecisionOption, DecisionQuestion, Judgement

__all__ = [
    "LLM", "BeamSearchParams", "CompletionOutput", "DecisionOption", "DecisionQuestion", "Judgement", "LoRARequest",
    "Logprob", "RequestOutput", "SamplingParams", "__version__",
]  # fmt: skip

_HOME = {
    "LLM": "penstock.launch.llm",
    "SamplingParams": "penstock.core.sampling",
    "LoRARequest": "penstock.core.adapter",
    "BeamSearchParams": "penstock.core.sampling",
    "RequestOutput": "penstock.core.output",
    "CompletionOutput": "penstock.core.output",
    "Logprob": "penstock.core.output",
    "DecisionQuestion": "penstock.text.decisions",
    "DecisionOption": "penstock.text.decisions",
    "Judgement": "penstock.text.decisions",
}


def __getattr__(name: str) -> Any:
    # Lazy, so that `import penstock` and the command line stay instant.
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
