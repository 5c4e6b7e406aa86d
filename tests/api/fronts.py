"""Every way to ask for text, in one table: how each says a field, and how its answers, streams and errors are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

HELLO = "Tell me about the sea."
ONCE = "Once upon a time"


@dataclass(frozen=True)
class Front:
    """`place`: our name -> where it stands in a request ("a.b" is b within a); None: it has no such field.

    `text`: of a whole answer; `piece`: of one event or line of a stream; `error`: of an error's body.
    """

    path: str
    good: Mapping[str, Any]
    place: Mapping[str, str | None] = field(default_factory=dict)
    text: Callable[[Any], str] = lambda body: str(body["choices"][0]["text"])
    piece: Callable[[Any], str] = lambda event: event["choices"][0]["text"] if event.get("choices") else ""
    error: Callable[[Any], str] = lambda body: str(body["error"]["message"])
    prompt: str = "prompt"
    chat: bool = False

    def name(self, ours: str) -> str | None:
        return self.place.get(ours, ours)

    def body(self, **fields: Any) -> dict[str, Any]:
        """A good request with fields under our names; `prompt` is the text that is asked about."""
        out: dict[str, Any] = json.loads(json.dumps(self.good))
        for ours, value in fields.items():
            if ours == "prompt" and self.prompt == "messages":
                out["messages"] = [{"role": "user", "content": value}]
                continue
            name = self.prompt if ours == "prompt" else self.name(ours)
            assert name is not None, (self.path, ours)
            outer, _, inner = name.rpartition(".")
            (out.setdefault(outer, {}) if outer else out)[inner] = value
        return out


def _ollama(event: Any) -> str:
    return str(event["message"]["content"] if "message" in event else event["response"])


_MESSAGES = [{"role": "user", "content": HELLO}]
_OPTIONS: dict[str, str | None] = {
    name: f"options.{name}" for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty")
} | {"max_tokens": "options.num_predict", "repetition_penalty": "options.repeat_penalty", "timeout": None,
     "priority": None}  # fmt: skip
_TGI: dict[str, str | None] = {
    name: f"parameters.{name}" for name in ("temperature", "top_p", "top_k", "seed", "stop", "repetition_penalty",
                                            "frequency_penalty")
} | {"max_tokens": "parameters.max_new_tokens", "min_p": None, "presence_penalty": None, "timeout": None,
     "priority": None}  # fmt: skip
_LLAMA: dict[str, str | None] = {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty"}
GREEDY = {"temperature": 0}

FRONTS = {
    front.path: front
    for front in (
        Front(
            "/v1/chat/completions", {"messages": _MESSAGES, "max_tokens": 6, **GREEDY}, prompt="messages", chat=True,
            text=lambda body: str(body["choices"][0]["message"]["content"]),
            piece=lambda event: event["choices"][0]["delta"].get("content", "") if event.get("choices") else "",
        ),
        Front("/v1/completions", {"prompt": ONCE, "max_tokens": 6, **GREEDY}),
        Front(
            "/v1/responses", {"input": HELLO, "max_output_tokens": 6, **GREEDY}, {"max_tokens": "max_output_tokens"},
            prompt="input", chat=True,
            text=lambda body: str(body["output"][0]["content"][0]["text"]),
            piece=lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
        ),
        Front(
            "/v1/messages", {"messages": _MESSAGES, "max_tokens": 6, **GREEDY}, {"stop": "stop_sequences"},
            prompt="messages", chat=True,
            text=lambda body: str(body["content"][0]["text"]),
            piece=lambda event: event["delta"]["text"] if event["type"] == "content_block_delta" else "",
        ),
        Front(
            "/api/chat", {"messages": _MESSAGES, "options": {"num_predict": 6, **GREEDY}, "stream": False}, _OPTIONS,
            prompt="messages", chat=True, text=_ollama, piece=_ollama, error=lambda body: str(body["error"]),
        ),
        Front(
            "/api/generate", {"prompt": HELLO, "options": {"num_predict": 6, **GREEDY}, "stream": False}, _OPTIONS,
            chat=True, text=_ollama, piece=_ollama, error=lambda body: str(body["error"]),
        ),
        Front(
            "/completion", {"prompt": ONCE, "n_predict": 6, **GREEDY}, _LLAMA,
            text=lambda body: str(body["content"]), piece=lambda event: str(event["content"]),
        ),
        Front(
            "/infill", {"input_prefix": ONCE, "input_suffix": " the end", "n_predict": 6, **GREEDY}, _LLAMA,
            text=lambda body: str(body["content"]), piece=lambda event: str(event["content"]), prompt="input_prefix",
        ),
        Front(
            "/generate", {"inputs": ONCE, "parameters": {"max_new_tokens": 6}}, _TGI, prompt="inputs",
            text=lambda body: str(body["generated_text"]), error=lambda body: str(body["error"]),
            piece=lambda event: "" if event["token"]["special"] else str(event["token"]["text"]),
        ),
    )
}  # fmt: skip


def events(text: str) -> list[Any]:
    """Of a stream: of server-sent events, or of lines of JSON."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line and not line.startswith(("event:", ":"))]
    return [json.loads(line) for line in lines if line != "[DONE]"]
