"""What an Anthropic request says, in the shapes of chat: blocks as messages, tools, formats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.base.errors import InputError
from penstock.core.sampling import StructuredOutputs
from penstock.server.schema.forms import Form, only, string_in
from penstock.server.schema.messages import CountRequest, MessagesRequest

Message = dict[str, Any]
_ONLY_TEXT = "only text is read, no images"


def chat_messages(body: CountRequest) -> tuple[list[Message], bool]:
    """Chat's messages, and whether the last one is to be written on (Anthropic's prefill). Raises InputError."""
    if not body.messages:
        raise InputError("messages must not be empty", param="messages")
    out: list[Message] = []
    if body.system:
        out.append({"role": "system", "content": _text(body.system, "system")})
    for i, message in enumerate(body.messages):
        role, content = message.get("role"), message.get("content")
        if isinstance(content, str) and role in ("user", "assistant", "system"):
            out.append({"role": role, "content": content})
            continue
        where = f"messages[{i}]"
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
            raise InputError(f"{where}.content must be a string or a list of blocks", param=f"{where}.content")
        match role:
            case "user":
                out += _user(content, f"{where}.content")
            case "assistant":
                out.append(_assistant(content, f"{where}.content"))
            case "system":
                out.append({"role": "system", "content": _text(content, f"{where}.content")})
            case _:
                raise InputError(f"{where}.role must be user, assistant or system", param=f"{where}.role")
    last = out[-1]
    prefilled = last["role"] == "assistant" and "tool_calls" not in last and bool(last["content"])
    return out, prefilled


def _user(blocks: Sequence[Mapping[str, Any]], where: str) -> list[Message]:
    """Results of tools are messages of their own, in the order of the blocks."""
    out: list[Message] = []
    texts: list[Mapping[str, Any]] = []
    for j, block in enumerate(blocks):
        if block.get("type") != "tool_result":
            texts.append({"type": "text", "text": _block_text(block, where, j)})
            continue
        at = f"{where}[{j}]"
        if texts:
            out.append({"role": "user", "content": _joined(texts)})
            texts = []
        content = block.get("content")
        text = "" if content is None else _text(content, f"{at}.content")
        if block.get("is_error") is True:
            text = f"Error: {text}"
        out.append({"role": "tool", "tool_call_id": string_in(block, "tool_use_id", at), "content": text})
    if texts or not out:
        out.append({"role": "user", "content": _joined(texts)})
    return out


def _assistant(blocks: Sequence[Mapping[str, Any]], where: str) -> Message:
    texts: list[Mapping[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for j, block in enumerate(blocks):
        at = f"{where}[{j}]"
        match block.get("type"):
            case "thinking":
                thoughts.append(string_in(block, "thinking", at, empty=True))
            case "redacted_thinking":
                pass  # nobody but its maker can read it
            case "tool_use":
                given = block.get("input")
                if not isinstance(given, dict):
                    raise InputError(f"{at}.input must be an object", param=f"{at}.input")
                function = {
                    "name": string_in(block, "name", at),
                    "arguments": json.dumps(given, ensure_ascii=False, separators=(", ", ": ")),
                }
                calls.append({"id": string_in(block, "id", at), "type": "function", "function": function})
            case _:
                texts.append({"type": "text", "text": _block_text(block, where, j)})
    out: Message = {"role": "assistant", "content": _joined(texts) if texts or not calls else None}
    if thoughts:
        out["reasoning_content"] = "\n".join(thoughts)
    if calls:
        out["tool_calls"] = calls
    return out


def _joined(texts: Sequence[Mapping[str, Any]]) -> Any:
    """As chat clients would send it: a string, or several parts."""
    if not texts:
        return ""
    return texts[0]["text"] if len(texts) == 1 else list(texts)


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InputError(f"{where} must be a string or a list of text blocks", param=where)
    return "\n".join(_block_text(block, where, j) for j, block in enumerate(content))


def _block_text(block: Any, where: str, j: int) -> str:
    """Of block `j` of `where`; there may be tens of thousands."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text" and isinstance(text := block.get("text"), str):
        return text
    at = f"{where}[{j}]"
    if kind != "text":
        raise InputError(f"{at}.type is {str(kind)[:40]!r}; {_ONLY_TEXT}", param=f"{at}.type")
    return string_in(block, "text", at, empty=True)


def chat_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Raises InputError for tools that would have to run on the server."""
    if tools is None:
        return None
    made = []
    for i, tool in enumerate(tools):
        if tool.get("type") not in (None, "custom"):
            raise InputError(
                f"tools[{i}].type is {str(tool['type'])[:40]!r}, which would run on the server, and this one runs no "
                "tools: leave it out; only tools of the client are possible here", param=f"tools[{i}].type",
            )  # fmt: skip
        function = {k: tool[k] for k in ("name", "description", "strict") if tool.get(k) is not None}
        if tool.get("input_schema") is not None:
            function["parameters"] = tool["input_schema"]
        made.append({"type": "function", "function": function})
    return made


def chat_tool_choice(choice: Mapping[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool]:
    """(tool_choice, parallel_tool_calls). Raises InputError."""
    if choice is None:
        return None, True
    parallel = choice.get("disable_parallel_tool_use") is not True
    kind = choice.get("type")
    names = {"auto": "auto", "any": "required", "none": "none"}
    if isinstance(kind, str) and kind in names:
        return names[kind], parallel
    if kind != "tool":
        raise InputError("tool_choice.type must be auto, any, tool or none", param="tool_choice.type")
    return {"type": "function", "function": {"name": string_in(choice, "name", "tool_choice")}}, parallel


def template_kwargs(body: CountRequest) -> dict[str, Any] | None:
    """`thinking` and `effort` as templates know them. Raises InputError."""
    kwargs = dict(body.chat_template_kwargs or {})
    if body.thinking is not None:
        kind = body.thinking.get("type")
        if kind not in ("enabled", "disabled", "adaptive"):
            raise InputError("thinking.type must be enabled, disabled or adaptive", param="thinking.type")
        if kind != "adaptive":
            kwargs.setdefault("enable_thinking", kind == "enabled")
    effort = (body.output_config or {}).get("effort")
    if isinstance(effort, str):
        kwargs.setdefault("reasoning_effort", effort)
    return kwargs or None


def form(body: MessagesRequest) -> Form | None:
    """What the answer is bound to. Raises InputError."""
    field = body.structured_outputs
    return only((
        _format((body.output_config or {}).get("format"), "output_config.format"),
        _format(body.output_format, "output_format"),
        None if field is None else Form("structured_outputs", field.chosen()),
    ))  # fmt: skip


def _format(given: Any, where: str) -> Form | None:
    if given is None:
        return None
    if not isinstance(given, dict) or given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        raise InputError(f'{where} must be {{"type": "json_schema", "schema": {{...}}}}', param=where)
    return Form(f"{where}.schema", StructuredOutputs(json=given["schema"]))
