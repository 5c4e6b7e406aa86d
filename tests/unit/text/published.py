"""Chat templates as they were published, in `shared`."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from penstock.families.chat_templates import chat_templates
from tests.shared import shared

NAMES = (
    "chatglm.tokenizer_config.json", "gemma-4.chat_template.jinja", "gemma.tokenizer_config.json",
    "gpt-oss.chat_template.jinja", "mistralrs_chatml.json", "mistralrs_llama2.json", "mistralrs_llama3.json",
    "mistralrs_mistral.json", "mistralrs_phi3.5.json", "mistralrs_phi3.json", "mistralrs_vicuna.json",
    "nvidia-mistral.tokenizer_config.json", "phi-3-medium.tokenizer_config.json", "phi-3-mini.tokenizer_config.json",
    "phi-3.tokenizer_config.json", "phi-4-base.tokenizer_config.json", "phi-4-mini.tokenizer_config.json",
    "qwen2.5.tokenizer_config.json", "qwen3.tokenizer_config.json", "smollm3.chat_template.jinja",
)  # fmt: skip


@cache
def template(name: str) -> Any:
    """None of a configuration without one."""
    path = shared("data", "configs", "chat", name)
    text = path.read_text("utf-8")
    return text if path.suffix == ".jinja" else chat_templates(path.parent, [], json.loads(text))["chat_template"]
