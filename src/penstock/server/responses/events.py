"""The events of a Responses stream, made of what the output parser says. What they add up to is the final object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.server.parsing.custom import NO_CUSTOM
from penstock.server.parsing.events import CallArguments, CallStart, Content, Event, Reasoning
from penstock.server.parsing.namespaces import NO_SPACES, Names, shown_name
from penstock.server.turns.asking import new_id
from penstock.text.custom import input_of

Item = dict[str, Any]


class ResponseWriter:
    """One stream: sequence numbers, item ids and indices. `items` is the output so far, as the final object shows it.

    What is returned is never changed later. `make_id(prefix)` makes item ids. `custom`: tools that are none of
    functions, and whether their arguments are their input as it is; it comes in one piece. `spaces`: functions that
    have a namespace.
    """

    def __init__(
        self, make_id: Callable[[str], str] = new_id, custom: Mapping[str, bool] = NO_CUSTOM,
        spaces: Mapping[str, Names] = NO_SPACES,
    ) -> None:  # fmt: skip
        self.items: list[Item] = []
        self._make_id = make_id
        self._sequence = 0
        self._open: Item | None = None
        self._calls: dict[int, Item] = {}
        self._custom = custom
        self._spaces = spaces
        self._arguments = ""

    @property
    def reasoning(self) -> bool:
        """Whether what comes now belongs to a thought."""
        return self._open is not None and self._open["type"] == "reasoning"

    def say(self, kind: str, **fields: Any) -> Item:
        """One event, numbered."""
        event = {"type": "response." + kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event

    def feed(self, events: Sequence[Event]) -> list[Item]:
        out: list[Item] = []
        for event in events:
            match event:
                case Content(text) if text:
                    out += self._text("message", text)
                case Reasoning(text) if text:
                    out += self._text("reasoning", text)
                case CallStart(index, call_id, name) if name in self._custom:
                    self._arguments = ""
                    out += self._begin({
                        "id": self._make_id("ctc_"), "type": "custom_tool_call", "status": "in_progress",
                        "call_id": call_id, "name": name, "input": "",
                    })  # fmt: skip
                    self._calls[index] = self.items[-1]
                case CallArguments(index, text) if "input" in self._calls[index]:
                    self._arguments += text
                case CallStart(index, call_id, name):
                    space, name = self._spaces.get(name, (None, name))
                    out += self._begin({
                        "id": self._make_id("fc_"), "type": "function_call", "status": "in_progress",
                        "call_id": call_id, "name": name, "arguments": "",
                        **({} if space is None else {"namespace": space}),
                    })  # fmt: skip
                    self._calls[index] = self.items[-1]
                case CallArguments(index, text) if text:
                    item = self._calls[index]
                    item["arguments"] += text
                    out.append(self._on(item, "function_call_arguments.delta", delta=text))
        return out

    def finish(self, status: str = "completed") -> list[Item]:
        """The last item ends with `status`, completed or incomplete. An empty answer is a message without text."""
        out = [] if self.items else self._text("message", "")
        return out + self._end(status)

    # -- items ---------------------------------------------------------------------------------------------------

    def _on(self, item: Item, kind: str, **fields: Any) -> Item:
        return self.say(kind, item_id=item["id"], output_index=self._index(item), **fields)

    def _begin(self, item: Item) -> list[Item]:
        out = self._end("completed")
        self.items.append(item)
        self._open = item
        shown = {**item, "content": []} if "content" in item else dict(item)
        return [*out, self.say("output_item.added", output_index=len(self.items) - 1, item=shown)]

    def _text(self, kind: str, text: str) -> list[Item]:
        out: list[Item] = []
        if self._open is None or self._open["type"] != kind:
            part: Item
            item: Item
            if kind == "message":
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                item = {"id": self._make_id("msg_"), "type": kind, "status": "in_progress", "role": "assistant"}
            else:
                part = {"type": "reasoning_text", "text": ""}
                item = {"id": self._make_id("rs_"), "type": kind, "status": "in_progress", "summary": []}
            out += self._begin({**item, "content": [part]})
            out.append(self._on(self.items[-1], "content_part.added", content_index=0, part=dict(part)))
        item = self.items[-1]
        item["content"][0]["text"] += text
        if text:
            more: Item = {"logprobs": []} if kind == "message" else {}
            name = "output_text.delta" if kind == "message" else "reasoning_text.delta"
            out.append(self._on(item, name, content_index=0, delta=text, **more))
        return out

    def _end(self, status: str) -> list[Item]:
        item, self._open = self._open, None
        if item is None:
            return []
        item["status"] = status
        out: list[Item] = []
        if item["type"] == "custom_tool_call":
            item["input"] = input_of(self._arguments, self._custom[item["name"]])
            out.append(self._on(item, "custom_tool_call_input.delta", delta=item["input"]))
            out.append(self._on(item, "custom_tool_call_input.done", input=item["input"]))
        elif item["type"] == "function_call":
            out.append(self._on(item, "function_call_arguments.done", name=item["name"], arguments=item["arguments"]))
        else:
            part = dict(item["content"][0])
            message = item["type"] == "message"
            kind = "output_text" if message else "reasoning_text"
            more: Item = {"logprobs": []} if message else {}
            out.append(self._on(item, kind + ".done", content_index=0, text=part["text"], **more))
            out.append(self._on(item, "content_part.done", content_index=0, part=part))
        shown = {**item, "content": [dict(p) for p in item["content"]]} if "content" in item else dict(item)
        return [*out, self.say("output_item.done", output_index=self._index(item), item=shown)]

    def _index(self, item: Item) -> int:
        return next(i for i in reversed(range(len(self.items))) if self.items[i] is item)


def final_kind(status: str) -> str:
    """The event that ends a stream. OpenAI has none for a cancelled response."""
    return {"completed": "completed", "failed": "failed"}.get(status, "incomplete")


def replay(response: Item) -> list[Item]:
    """The events of a finished response that was not streamed: each text in one piece."""
    ids = iter([item["id"] for item in response["output"]])
    custom = {item["name"]: True for item in response["output"] if item["type"] == "custom_tool_call"}
    spaces = {shown_name(i, ""): (i["namespace"], i["name"]) for i in response["output"] if "namespace" in i}
    writer = ResponseWriter(lambda prefix: next(ids), custom, spaces)
    nothing = dict.fromkeys(("usage", "completed_at", "incomplete_details", "error"))
    begun = {**response, **nothing, "status": "in_progress", "output": []}
    out = [writer.say("created", response=begun), writer.say("in_progress", response=begun)]
    for number, item in enumerate(response["output"]):
        out += writer.feed(_events(item, number))
    if response["output"]:
        out += writer.finish(response["output"][-1]["status"])
    return [*out, writer.say(final_kind(response["status"]), response=response)]


def _events(item: Item, number: int) -> list[Event]:
    if item["type"] == "function_call":
        return [CallStart(number, item["call_id"], shown_name(item, "")), CallArguments(number, item["arguments"])]
    if item["type"] == "custom_tool_call":
        return [CallStart(number, item["call_id"], item["name"]), CallArguments(number, item["input"])]
    text = "".join(part["text"] for part in item["content"])
    return [Content(text) if item["type"] == "message" else Reasoning(text)]
