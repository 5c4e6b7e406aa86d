"""Lines of a training file as examples: conversations, prompts with completions, or texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.base.errors import InputError
from penstock.core.training import TrainingExample
from penstock.text.template import encode_chat
from penstock.text.tokenizer import Tokenizer

MAX_BYTES, MAX_EXAMPLES = 64 << 20, 50_000
_ROLES = ("system", "user", "assistant")
_PARAM = "training_file"


class Texts(NamedTuple):
    """What reads lines. `end`: the token behind a text; `most`: tokens of an example."""

    tokenizer: Tokenizer
    template: str | None
    end: int | None
    most: int


def read_examples(path: Path, texts: Texts) -> list[TrainingExample]:
    """Raises: InputError that names the first line that cannot be learnt from, and why; OSError."""
    if path.stat().st_size > MAX_BYTES:
        raise InputError(f"the file has {path.stat().st_size} bytes; at most {MAX_BYTES} are read", param=_PARAM)
    lines = path.read_bytes().split(b"\n")
    if lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise InputError("the file has no lines", param=_PARAM)
    if len(lines) > MAX_EXAMPLES:
        raise InputError(f"the file has {len(lines)} lines; at most {MAX_EXAMPLES} are read", param=_PARAM)
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(_example(line, texts))
        except InputError as error:
            raise InputError(f"line {number}: {error}", param=_PARAM) from None
    return found


def _example(line: bytes, texts: Texts) -> TrainingExample:
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InputError("is no JSON object") from None
    keys = set(value) if isinstance(value, dict) else set()
    if "messages" in keys:
        made = _conversation(value["messages"], texts)
    elif {"prompt", "completion"} <= keys:
        asked = texts.tokenizer.encode(_text(value["prompt"], "prompt"))
        answer = texts.tokenizer.encode_inner(_text(value["completion"], "completion"))
        made = _with_end(asked, answer, texts)
    elif "text" in keys:
        made = _with_end([], texts.tokenizer.encode(_text(value["text"], "text")), texts)
    else:
        raise InputError("has neither messages, nor prompt and completion, nor text")
    if len(made.token_ids) > texts.most:
        raise InputError(f"has {len(made.token_ids)} tokens; at most {texts.most} are learnt from at once")
    if not any(made.targets[1:]):
        raise InputError("has nothing to learn: no token of an answer")
    return made


def _with_end(asked: list[int], answer: list[int], texts: Texts) -> TrainingExample:
    ids = [*asked, *answer, *([] if texts.end is None else [texts.end])]
    return TrainingExample(ids, [False] * max(1, len(asked)) + [True] * (len(ids) - max(1, len(asked))))


def _conversation(messages: Any, texts: Texts) -> TrainingExample:
    if texts.template is None:
        raise InputError("has messages, and this model has no chat template; give prompt and completion, or text")
    if not isinstance(messages, list) or not messages:
        raise InputError("has no messages")
    for message in messages:
        _check_message(message)
    learnt = [i for i, message in enumerate(messages) if message["role"] == "assistant" and message.get("weight") != 0]
    if not learnt:
        raise InputError("has no message of the assistant to learn from")
    plain = [{"role": m["role"], "content": m["content"]} for m in messages]
    ids = _ids(plain, texts, asking=False)
    targets = [False] * len(ids)
    for i in learnt:
        before, behind = _ids(plain[:i], texts, asking=True), _ids(plain[: i + 1], texts, asking=False)
        if ids[: len(behind)] != behind or behind[: len(before)] != before:
            raise InputError("has an answer that the chat template writes otherwise when more follows")
        targets[len(before) : len(behind)] = [True] * (len(behind) - len(before))
    targets[0] = False
    return TrainingExample(ids, targets)


def _ids(messages: Sequence[dict[str, Any]], texts: Texts, *, asking: bool) -> list[int]:
    assert texts.template is not None
    return encode_chat(texts.tokenizer, texts.template, messages, add_generation_prompt=asking)


def _check_message(message: Any) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InputError("has a message without a role")
    role = message["role"]
    if role not in _ROLES:
        raise InputError(f"has a message of the role {role[:40]!r}; {', '.join(_ROLES)} are read")
    if message.get("tool_calls") or message.get("function_call"):
        raise InputError("has a call of a tool; texts are learnt from")
    _text(message.get("content"), "content")
    if message.get("weight", 1) not in (0, 1):
        raise InputError("has a weight that is neither 0 nor 1")


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"has no text in {name}")
    return value
