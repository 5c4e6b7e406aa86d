"""The events of an Anthropic stream, made of what the output parser says; the same blocks without a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from penstock.server.parsing.events import CallArguments, CallStart, Content, Event, Reasoning

Block = dict[str, Any]

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "repetition": "max_tokens", "tool_calls": "tool_use"}


def stop_of(finish_reason: str, stop_reason: int | str | None, room_was_less: bool = False) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence) in Anthropic's words. `room_was_less`: than `max_tokens`, which were not reached."""
    if finish_reason == "length" and room_was_less:
        return "model_context_window_exceeded", None
    if finish_reason == "stop" and isinstance(stop_reason, str):
        return "stop_sequence", stop_reason
    return STOP_REASONS.get(finish_reason, "end_turn"), None


class BlockWriter:
    """One stream's blocks: `feed` gives their events, `blocks` is the content of the message they add up to."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._arguments: dict[int, str] = {}
        self._at: dict[int, int] = {}
        self._open = False

    def feed(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        for event in events:
            match event:
                case Content(text) if text:
                    out += self._text("text", text)
                case Reasoning(text) if text:
                    out += self._text("thinking", text)
                case CallStart(index, call_id, name):
                    out += self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})
                    self._at[index] = len(self.blocks) - 1
                    self._arguments[self._at[index]] = ""
                case CallArguments(index, text) if text:
                    at = self._at[index]
                    self._arguments[at] += text
                    out.append(self._delta(at, {"type": "input_json_delta", "partial_json": text}))
        return out

    def finish(self) -> list[dict[str, Any]]:
        return self._end()

    def _text(self, kind: str, text: str) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        if not self._open or self.blocks[-1]["type"] != kind:
            begun: Block = {"type": kind, kind: ""}
            if kind == "thinking":
                begun["signature"] = ""
            out += self._begin(begun)
        self.blocks[-1][kind] += text
        return [*out, self._delta(len(self.blocks) - 1, {"type": f"{kind}_delta", kind: text})]

    def _begin(self, block: Block) -> list[dict[str, Any]]:
        out = self._end()
        self.blocks.append(block)
        self._open = True
        start = {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}
        return [*out, start]

    @staticmethod
    def _delta(at: int, delta: Block) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": at, "delta": delta}

    def _end(self) -> list[dict[str, Any]]:
        if not self._open:
            return []
        self._open = False
        at = len(self.blocks) - 1
        if at in self._arguments:
            self.blocks[at]["input"] = _object(self._arguments[at])
        return [{"type": "content_block_stop", "index": at}]


def _object(arguments: str) -> dict[str, Any]:
    """A call's arguments. What is no JSON object (a call that was cut off) goes under Anthropic's name for such."""
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}
