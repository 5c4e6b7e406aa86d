"""Three calls for parts of requests, of which routers make what they want: data parallelism, prompts and tokens on
engines of their own, moves of what runs.

Source: Jin et al., A System for Microserving of LLMs, arXiv 2412.12488, section 3: `prep_recv` (what does the receiver
lack?), `remote_send` (compute it and send it there), `start_generate`. There, the receiver says where in its memory
keys and values go; here, a store has them by name, and the receiver reads them from there.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec

from penstock.base.errors import EngineGoneError, InputError
from penstock.core.request import Request, Resume
from penstock.core.sampling import TokenRules
from penstock.engine.handover import numbers_of

if TYPE_CHECKING:
    from penstock.core.sampling import SamplingParams
    from penstock.engine.frontend import EngineClient
    from penstock.engine.replica import Replica
    from penstock.engine.stream import Stream

_numbers = itertools.count()


class Microserving:
    """Engines are named by their numbers. Raises, all calls: InputError (no such engine; a text that is none; without a
    store in common nothing can be sent), EngineGoneError (it died, or is not ready)."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    async def prep_recv(self, engine: int, request: Request, end: int) -> int:
        """How many of the first `end` tokens of this text the engine has, or has read from the store by now: the
        sender begins there. In whole blocks; one token at least is always left."""
        return await self._client.handover.fetch(self._engine(engine), request, _text(request, end))

    async def remote_send(self, engine: int, request: Request, end: int, to: int) -> int:
        """The engine computes what it lacks of the first `end` tokens of this text, and `to` gets them. Returns as
        `prep_recv` of `to`."""
        sender, receiver, handover = self._engine(engine), self._engine(to), self._client.handover
        if not handover.has_store:
            raise InputError("engines have no store in common to send by; give kv_offload", param="to")
        text = _text(request, end)
        order = msgspec.structs.replace(
            request, request_id=f"send-{next(_numbers)}", prompt_token_ids=text, rules=TokenRules(), n=1, max_tokens=1,
            stop_token_ids=[], eos_token_ids=[], resume=None,
        )  # fmt: skip
        await handover.ask(sender, order)
        await handover.flush(sender)
        return await handover.fetch(receiver, request, text)

    def start_generate(
        self, engine: int, request: Request, params: SamplingParams, generated: list[int] | None = None
    ) -> Stream:
        """The engine generates. `generated`: it goes on behind these tokens, as if it had made them: what is drawn
        depends on the seed and the place alone. Deltas have new tokens only."""
        number = self._engine(engine).number
        if generated:
            if request.n > 1 or not request.max_tokens > len(generated):
                raise InputError("generated: fewer than max_tokens, of one sample", param="generated")
            request = msgspec.structs.replace(request, resume=Resume([(0, generated)]))
        stream = self._client.submit(request, params, engine=number)
        if generated and (found := self._client.find(request.request_id)) is not None:
            (sample,), cursor = found[1].samples, stream.seen[0]
            sample.token_ids += generated
            if sample.detokenizer is not None:
                sample.text.append(sample.detokenizer.add(generated))
            cursor.tokens, cursor.pieces = len(generated), len(sample.text)
        return stream

    def _engine(self, number: int) -> Replica:
        replicas = {replica.number: replica for replica in self._client.replicas}
        if (found := replicas.get(number)) is None:
            raise InputError(f"there is no engine {number}; there are {numbers_of(replicas)}", param="engine")
        if found.state != "ready":
            raise EngineGoneError(f"engine {number} is {found.state}")
        return found


def _text(request: Request, end: int) -> list[int]:
    if not 0 < end <= len(request.prompt_token_ids):
        raise InputError(f"end: {end} is not within the {len(request.prompt_token_ids)} tokens given", param="end")
    return request.prompt_token_ids[:end]
