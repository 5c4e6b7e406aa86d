"""Prompt compression: transforms above the engine that drop tokens of a prompt. What they choose is the prompt."""

from __future__ import annotations

from typing import Any

from penstock.base.registry import Registry

CONTEXT_TRANSFORMS: Registry[Any, None] = Registry("context transform")
CONTEXT_TRANSFORMS.add("random", "penstock.compress.random_drop:RandomDrop")
CONTEXT_TRANSFORMS.add("selective-context", "penstock.compress.selective:SelectiveContext")
CONTEXT_TRANSFORMS.add("llmlingua", "penstock.compress.llmlingua:LLMLingua")

DEFAULT_COMPRESSOR = "pico"
"""The bundled model that reads prompts where the setting `prompt_compressor` names no other."""
