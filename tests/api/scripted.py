"""A mock of a turn: what the model "writes" is a script of parser events. For shapes that a tiny model cannot make."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

from penstock.engine.stream import Delta
from penstock.server.call import Call, Prompt
from penstock.server.errors import WireError
from penstock.server.parsing.events import CallArguments, CallStart, Content, Event, Reasoning
from penstock.server.schema.openai import PromptTokensDetails, Usage
from penstock.server.turns.asking import Caller, Conversation, Options, make_call, new_id
from penstock.server.turns.turn import Answer, Piece

SCRIPT: tuple[Event, ...] = (
    Reasoning("First I look."),
    Content("It is höt 🦊"),
    CallStart(0, "call_a", "weather"),
    CallArguments(0, '{"city": "Bern"}'),
    CallStart(1, "call_b", "time"),
    CallArguments(1, "{}"),
)


class ScriptedTurn:
    """Yields one piece per event, and waits for `gate` (if given) before the last."""

    def __init__(
        self, call: Call, events: Sequence[Event], *, finish: str = "tool_calls", gate: asyncio.Event | None = None,
        failure: WireError | None = None,
    ) -> None:  # fmt: skip
        self.call, self.id, self.prompt = call, call.request_id, call.prompt
        self.stream = SimpleNamespace(unread_chars=0)  # what a client that reads slowly is judged by
        self.aborted = asyncio.Event()
        self._events, self._finish, self._gate, self._failure = events, finish, gate, failure
        self._count = 0

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        for n, event in enumerate(self._events):
            last = n == len(self._events) - 1
            if last and self._gate is not None:
                waits = [asyncio.ensure_future(e.wait()) for e in (self._gate, self.aborted)]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
            if self.aborted.is_set():
                raise WireError(503, "the request was aborted", code="aborted")
            self._count += 1
            delta = Delta(0, "", [n])
            yield [Piece(0, [event], delta, self._finish if last and self._failure is None else None)]
            await asyncio.sleep(0)
        if self._failure is not None:
            raise self._failure

    async def answers(self) -> list[Answer]:
        out = Answer(0)
        async for pieces in self.pieces():
            for piece in pieces:
                out.add(piece)
        return [out]

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=7, completion_tokens=self._count, total_tokens=7 + self._count,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=4),
        )  # fmt: skip

    def abort(self) -> None:
        self.aborted.set()


class Scripts:
    """Stands in for `turns.begin`; `turns` collects what was begun, `asked` what was asked."""

    def __init__(self, events: Sequence[Event] = SCRIPT, **options: Any) -> None:
        self.events, self.options = events, options
        self.asked: list[Conversation] = []
        self.turns: list[ScriptedTurn] = []

    async def begin(self, caller: Caller, asked: Conversation, endpoint: str, *, prefix: str = "") -> Any:
        call = make_call(caller, Prompt([5] * 7), asked.params, Options(), endpoint, new_id(prefix))
        self.asked.append(asked)
        self.turns.append(ScriptedTurn(call, self.events, **self.options))
        return self.turns[-1]


def splits(events: Sequence[Event], cuts: int = 2) -> Iterator[list[Event]]:
    """The same events with one of their texts cut in up to `cuts` places, every way there is."""
    yield list(events)
    for n, event in enumerate(events):
        if isinstance(event, CallStart):
            continue
        text = event.text
        for k in range(1, cuts + 1):
            for places in combinations(range(1, len(text)), k):
                bounds = [0, *places, len(text)]
                parts = [text[a:b] for a, b in pairwise(bounds)]
                pieces = [_with(event, part) for part in parts]
                yield [*events[:n], *pieces, *events[n + 1 :]]


def _with(event: Event, text: str) -> Event:
    return CallArguments(event.index, text) if isinstance(event, CallArguments) else type(event)(text)  # type: ignore[call-arg,arg-type]
