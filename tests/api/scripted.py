"""A mock of a turn: what the model "writes" is a script of parser events. For shapes that a tiny model cannot make.

And one of an engine, below everything that reads and writes text.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

from penstock.core.messages import EngineInfo, Outputs
from penstock.core.output import EngineOutput
from penstock.core.request import Intake, Request
from penstock.engine.link import Listener
from penstock.engine.stream import Delta
from penstock.server.call import Call, Prompt
from penstock.server.errors import WireError
from penstock.server.parsing.events import CallArguments, CallStart, Content, Event, Reasoning
from penstock.server.schema.openai import PromptTokensDetails, Usage
from penstock.server.turns.asking import Caller, Conversation, Options, make_call, new_id
from penstock.server.turns.turn import Answer, Piece
from penstock.text.tokenizer import Tokenizer

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

    def written(self, num_cached: int) -> dict[float, int]:
        return {}

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


class ScriptedLink:
    """An engine that answers a prompt with `reply(prompt)`, a token at a time. `requests`: what it was sent.

    `tokenizer` is to be set when the server runs. What is longer than asked for ends as "length".
    """

    def __init__(self, reply: Callable[[str], str], *, vocab_size: int, room: int) -> None:
        self._reply = reply
        self._info = EngineInfo(
            vocab_size=vocab_size, max_model_len=room, kv_capacity_tokens=4 * room, block_size=16,
            num_blocks=room // 4, max_num_seqs=8, max_num_batched_tokens=room,
        )  # fmt: skip
        self.requests: list[Request] = []
        self.tokenizer: Tokenizer | None = None

    async def start(self, listener: Listener) -> None:
        self._listener = listener
        listener.on_up(self._info, 0)

    def send(self, items: Sequence[Intake]) -> None:
        for item in items:
            if isinstance(item, Request):
                self.requests.append(item)
                asyncio.get_running_loop().call_soon(self._answer, item)

    def _answer(self, request: Request) -> None:
        assert self.tokenizer is not None
        said = self._reply(self.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False))
        ids = self.tokenizer.encode(said, add_special_tokens=False)
        end = "stop" if len(ids) <= request.max_tokens else "length"
        for n, token in enumerate(ids := ids[: request.max_tokens]):
            out = EngineOutput(
                request_id=request.request_id, index=0, token_ids=[token],
                finish_reason=end if n == len(ids) - 1 else None,
            )  # fmt: skip
            self._listener.on_outputs(Outputs(0, [out]))

    def progress_age_s(self) -> float:
        return 0.0

    async def close(self) -> None:
        pass
