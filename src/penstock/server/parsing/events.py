"""What a parser of model output says: text, thoughts and tool calls, in pieces whose order is that of the output."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's thoughts."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. `index` counts the calls of one sample from 0; `id` and `name` are said only here."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments. The pieces of one `index`, joined, are the arguments."""

    index: int
    text: str


Event = Content | Reasoning | CallStart | CallArguments
