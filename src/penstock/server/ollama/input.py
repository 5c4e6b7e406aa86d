"""What an Ollama request says, in the shapes of chat: messages, options, formats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.base.errors import InputError
from penstock.core.sampling import SamplingParams, StructuredOutputs
from penstock.server.schema.forms import string_in
from penstock.server.schema.ollama import OllamaGenerating, OllamaOptions

Message = dict[str, Any]
NAMES = {
    "max_tokens": "options.num_predict", "repetition_penalty": "options.repeat_penalty",
    **{name: f"options.{name}" for name in ("temperature", "top_k", "top_p", "min_p", "presence_penalty",
                                            "frequency_penalty", "seed", "stop")},
    "logprobs": "top_logprobs", "structured_outputs.json": "format",
    "structured_outputs.json_object": "format",
}  # fmt: skip
"""Our field -> Ollama's."""
_NEUTRAL = {"mirostat": 0, "typical_p": 1, "tfs_z": 1}
_LEVELS = ("low", "medium", "high")


def chat_messages(given: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Chat's messages. Raises InputError.

    Ollama's calls have no ids, and its results name their tool at most: the oldest call without a result is meant.
    """
    out: list[Message] = []
    waiting: list[tuple[str, str]] = []
    for i, message in enumerate(given):
        where = f"messages[{i}]"
        if message.get("images"):
            raise InputError(f"{where}.images: only text is read, no images", param=f"{where}.images")
        kept = {name: message.get(name) for name in ("role", "content") if message.get(name) is not None}
        if message.get("thinking") is not None:
            kept["reasoning_content"] = string_in(message, "thinking", where, empty=True)
        if message.get("tool_calls"):
            calls = kept["tool_calls"] = _calls(message["tool_calls"], f"{where}.tool_calls", len(out))
            waiting += [(call["id"], call["function"]["name"]) for call in calls]
        elif kept.get("role") == "tool":
            kept["tool_call_id"] = _answered(message, waiting)
        out.append(kept)
    return out


def _calls(given: Any, where: str, number: int) -> list[dict[str, Any]]:
    if not isinstance(given, list):
        raise InputError(f"{where} must be a list of calls", param=where)
    out = []
    for j, call in enumerate(given):
        at = f"{where}[{j}].function"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise InputError(f"{at} must be an object with a name and arguments", param=at)
        arguments = function.get("arguments") or {}
        if not isinstance(arguments, Mapping):
            raise InputError(f"{at}.arguments must be an object", param=f"{at}.arguments")
        known = call.get("id")
        made = {"name": string_in(function, "name", at), "arguments": json.dumps(arguments, ensure_ascii=False)}
        out.append({
            "id": known if isinstance(known, str) and known else f"call_{number}_{j}", "type": "function",
            "function": made,
        })  # fmt: skip
    return out


def _answered(message: Mapping[str, Any], waiting: list[tuple[str, str]]) -> str:
    """The id of the call that a tool's message answers. Mutates `waiting`."""
    given, name = message.get("tool_call_id"), message.get("tool_name") or message.get("name")
    at = next((n for n, (i, _) in enumerate(waiting) if i == given), None)
    if at is None:
        at = next((n for n, (_, called) in enumerate(waiting) if called == name), 0)
    if at < len(waiting):
        return waiting.pop(at)[0]
    return given if isinstance(given, str) else "call"


def sampling(body: OllamaGenerating, defaults: Mapping[str, Any], ends: Sequence[int] = ()) -> SamplingParams:
    """Raises InputError."""
    options = body.options or OllamaOptions()
    for name, neutral in _NEUTRAL.items():
        if getattr(options, name) not in (None, neutral):
            raise InputError(f"options.{name} is not supported; leave it out", param=f"options.{name}")
    if body.top_logprobs and not body.logprobs:
        raise InputError("top_logprobs needs logprobs: true", param="top_logprobs")
    length = options.num_predict
    return SamplingParams(
        max_tokens=length if length is not None and (length > 0 or length < -2) else None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        stop_token_ids=list(ends) or None,
        structured_outputs=_form(body.format),
        **options.sampling(defaults),
    )


def _form(given: str | dict[str, Any] | None) -> StructuredOutputs | None:
    if given is None or given == "":
        return None
    if isinstance(given, dict):
        return StructuredOutputs(json=given)
    if given != "json":
        raise InputError(f'format must be "json" or a JSON schema, not {given[:40]!r}', param="format")
    return StructuredOutputs(json_object=True)


def template_kwargs(think: bool | str | None) -> dict[str, Any] | None:
    """`think` as templates know it. Raises InputError."""
    if think is None:
        return None
    if isinstance(think, bool):
        return {"enable_thinking": think}
    if think not in _LEVELS:
        raise InputError(f"think must be true, false or one of {', '.join(_LEVELS)}", param="think")
    return {"enable_thinking": True, "reasoning_effort": think}
