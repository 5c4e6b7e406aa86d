"""A live request goes from one engine to another, with its keys and values, by the store that both have.

While it runs on, the blocks of its text are written by the one that has it (`Control` of kind `flush` says when they
are there) and read by the other (a request that only prefetches); again, until hardly anything is new. Only then is it
taken from the first and given to the second, which computes what does not fill a block: one step, however long the text
is. Sources: live migration in stages: Sun et al., Llumnix, arXiv 2406.03243, section 4.2; prompts and tokens on engines
of their own: Patel et al., Splitwise, arXiv 2311.18677, and Zhong et al., DistServe, arXiv 2401.09670.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from penstock.base.errors import EngineGoneError, InputError
from penstock.core.kv_hints import KVHint
from penstock.core.output import EngineOutput
from penstock.core.replica_roles import DECODE, MIXED, PREFILL, problem_of
from penstock.core.request import FLUSHED, Control, Request
from penstock.core.sampling import TokenRules

if TYPE_CHECKING:
    from penstock.core.messages import EngineInfo
    from penstock.engine.client import Live
    from penstock.engine.replica import Replica
    from penstock.engine.stream import Stream

MOST_STAGES = 8
"""Copies while it runs on, at most: then the rest is computed by whoever gets it."""
_log = logging.getLogger("penstock.engine")
_orders = itertools.count()


class Moved(NamedTuple):
    """What became of a migration. `stages`: copies made while the request ran on. `num_tokens`: known of its text when
    it was handed over; `num_copied`: those of them whose blocks the other engine had then (of the longest sample)."""

    stages: int
    num_tokens: int
    num_copied: int


def numbers_of(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


class HandoverOwner(Protocol):
    """Whose engines these are; `frontend.EngineClient` is one."""

    info: EngineInfo | None
    replicas: list[Replica]

    def find(self, request_id: str) -> tuple[Stream, Live] | None: ...

    def choose(self, stream: Stream) -> Replica | None: ...

    def pass_on(self, stream: Stream, to: Replica) -> None: ...


class Handover:
    """All methods belong to the event loop's thread.

    Attributes:
        has_store: engines have a store in common: without one nothing is copied, and roles mean nothing.
        num_passed: prompts that were computed by one engine and went on with another; `num_moved`: requests that were
            moved while they ran; `num_copied_tokens`: of those that blocks were there for.
    """

    def __init__(self, owner: HandoverOwner, *, has_store: bool) -> None:
        self._owner, self.has_store = owner, has_store
        self.num_passed = self.num_moved = self.num_copied_tokens = 0
        self._answers: dict[str, tuple[Replica, asyncio.Future[EngineOutput]]] = {}
        self._prompts: dict[str, int] = {}  # given to an engine, by number, for the sake of their prompts alone
        self._moving: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    # -- roles -------------------------------------------------------------------------------------------------------

    def set_roles(self, roles: Mapping[int, str]) -> None:
        """Engines by number; those that are not named keep theirs. What they have stays with them until it ends.

        Raises InputError if there is no such engine or role, or nobody would be left for prompts, or for tokens.
        """
        if not self.has_store:
            raise InputError("roles need a store that all engines have in common: kv_offload", param="roles")
        known = {replica.number: replica.role for replica in self._owner.replicas}
        for number in roles:
            if number not in known:
                raise InputError(f"there is no engine {number}; there are {numbers_of(known)}", param="roles")
        if problem := problem_of(list((known | dict(roles)).values())):
            raise InputError(problem, param="roles")
        for replica in self._owner.replicas:
            replica.role = roles.get(replica.number, replica.role)

    def suited(self, stream: Stream, found: Sequence[Replica]) -> Sequence[Replica]:
        """Of `found` those whose part it is to go on with this; if there is none, all: nothing waits for a role."""
        request = stream.request
        begun = self._begun(stream) if self._divides(request) else not request.pooling
        wanted = (DECODE, MIXED) if begun else (PREFILL, MIXED)
        return [replica for replica in found if replica.role in wanted] or found

    def _begun(self, stream: Stream) -> bool:
        found = self._owner.find(stream.request_id)
        return found is not None and any(sample.token_ids for sample in found[1].samples)

    def _divides(self, request: Request) -> bool:
        """Whether its prompt can be one engine's work and its tokens another's."""
        plain = request.reads_cache and not (request.whole or request.prefetches or request.calls)
        return plain and self.has_store and request.max_tokens > 1

    def given(self, replica: Replica, request: Request) -> Request:
        """As it is sent to this engine: one for prompts makes its first token alone."""
        self._prompts.pop(request.request_id, None)
        new = request.resume is None or not any(ids for _, ids in request.resume.samples)
        there = (r for r in self._owner.replicas if r is not replica and r.state not in ("failed", "away"))
        others = any(r.role != PREFILL for r in there)
        if replica.role != PREFILL or not (new and others and self._divides(request)):
            return request
        self._prompts[request.request_id] = replica.number
        return msgspec.structs.replace(request, max_tokens=1)

    # -- news --------------------------------------------------------------------------------------------------------

    def sift(self, replica: Replica, outputs: list[EngineOutput]) -> list[EngineOutput]:
        """The news without answers to orders. Who was given to this engine for the prompt alone has not ended."""
        out: list[EngineOutput] = []
        for news in outputs:
            if (asked := self._answers.get(news.request_id)) is not None:
                if news.finish_reason is not None and asked[0] is replica:
                    del self._answers[news.request_id]
                    if not asked[1].done():
                        asked[1].set_result(news)
            elif news.request_id in self._prompts and news.finish_reason == "length":
                out.append(msgspec.structs.replace(news, finish_reason=None, stop_reason=None))
            else:
                out.append(news)
        return out

    def after(self, touched: Sequence[str]) -> None:
        """These have news, which have been taken in: whose prompt is done goes on elsewhere."""
        for name in touched:
            if name not in self._prompts or (found := self._owner.find(name)) is None:
                continue
            stream, live = found
            if all(sample.token_ids or sample.finish_reason is not None for sample in live.samples):
                del self._prompts[name]
                self._begin(self._pass_on(stream, stream.replica))

    def lost(self, replica: Replica) -> None:
        """The engine has died: it answers nothing more, and nothing leaves it."""
        gone = EngineGoneError(f"engine {replica.number} died meanwhile")
        for name, (asked, future) in list(self._answers.items()):
            if asked is replica:
                del self._answers[name]
                if not future.done():
                    future.set_exception(gone)
        self._prompts = {name: number for name, number in self._prompts.items() if number != replica.number}

    def forget(self, request_id: str) -> None:
        """It has ended."""
        self._prompts.pop(request_id, None)

    def close(self) -> None:
        """No engine answers any more."""
        for replica in self._owner.replicas:
            self.lost(replica)

    # -- moves -------------------------------------------------------------------------------------------------------

    async def migrate(self, request_id: str, to: int) -> Moved:
        """Move a request that runs to engine `to`. Its reader sees nothing of it but a pause of a step.

        Raises InputError if it does not run, or cannot be moved there, and EngineGoneError if an engine dies meanwhile:
        then it is where it would be without this.
        """
        target = next((r for r in self._owner.replicas if r.number == to), None)
        found = self._owner.find(request_id)
        problem = self._problem(found, request_id, target)
        if problem or found is None or target is None:
            raise InputError(problem, param="request_id" if found is None else "to")
        (stream, live), source = found, found[0].replica
        self._moving.add(request_id)
        try:
            return await self._in_stages(stream, live, source, target)
        finally:
            self._moving.discard(request_id)

    def can_move(self, stream: Stream) -> bool:
        """Whether it can be moved at all, and is not about to be."""
        name = stream.request_id
        return self._divides(stream.request) and name not in self._moving and name not in self._prompts

    def _problem(self, found: tuple[Stream, Live] | None, name: str, target: Replica | None) -> str:
        if found is None:
            return f"no request {name!r} is running"
        stream = found[0]
        if target is None or target.state != "ready":
            return "there is no such engine" if target is None else f"engine {target.number} is {target.state}"
        if not self.has_store:
            return "engines have no store in common by which keys and values could go; give kv_offload"
        if not self._divides(stream.request):
            return "this request cannot be moved: its result comes in one piece, or it reads no cache"
        if target is stream.replica:
            return f"engine {target.number} has it already"
        if name in self._moving or name in self._prompts:
            return "it is being moved already"
        if stream.replica.state != "ready" or stream.replica.replay.trial is not None:
            return f"engine {stream.replica.number}, which has it, is {stream.replica.state}"
        return ""

    async def _in_stages(self, stream: Stream, live: Live, source: Replica, target: Replica) -> Moved:
        assert self._owner.info is not None, "an engine is ready"
        size, copied = self._owner.info.block_size, 0
        for stage in itertools.count(1):
            longest = max(live.samples, key=lambda sample: len(sample.token_ids))
            known = len(stream.request.prompt_token_ids) + len(longest.token_ids)
            await self.flush(source)
            texts = [[*stream.request.prompt_token_ids, *s.token_ids] for s in live.samples if s.finish_reason is None]
            await asyncio.gather(*(self.fetch(target, stream.request, text) for text in texts))
            self._check_there(stream, source)
            copied = known // size * size
            now = len(stream.request.prompt_token_ids) + len(longest.token_ids)
            if now - copied <= size or stage == MOST_STAGES:
                break
        self._owner.pass_on(stream, target)
        self.num_moved += 1
        self.num_copied_tokens += copied
        return Moved(stage, now, copied)

    def _check_there(self, stream: Stream, source: Replica) -> None:
        if self._owner.find(stream.request_id) is None or stream.ended:
            raise InputError(f"request {stream.request_id!r} has ended meanwhile", param="request_id")
        if not self._has(source, stream):
            raise EngineGoneError(f"engine {source.number}, which had it, is {source.state}")

    async def _pass_on(self, stream: Stream, source: Replica) -> None:
        """Its prompt is done, and its first token made: when the blocks are written, another reads them and goes on."""
        await self.flush(source)
        while self._has(source, stream) and (to := self._owner.choose(stream)) is not None:
            if to is not source and to.state == "ready":
                try:
                    await self.fetch(to, stream.request, stream.request.prompt_token_ids)
                except EngineGoneError:
                    continue  # who was to read them has died: another one
                if not self._has(source, stream):
                    return
            self.num_passed += to is not source
            self._owner.pass_on(stream, to)
            return

    def _has(self, replica: Replica, stream: Stream) -> bool:
        return (
            stream.replica is replica and replica.state == "ready" and self._owner.find(stream.request_id) is not None
        )

    async def flush(self, replica: Replica) -> None:
        """Returns when all that this engine had to write is in the store. Raises EngineGoneError."""
        name = f"flush-{next(_orders)}"
        await self.ask(replica, Control(kind="flush", request_id=name))

    async def fetch(self, replica: Replica, request: Request, text: Sequence[int]) -> int:
        """This engine reads what the store has of `text`, under the name of `request`. Returns the tokens it has then.

        Raises EngineGoneError."""
        name = f"fetch-{next(_orders)}"
        order = Request(
            request_id=name, prompt_token_ids=list(text), rules=TokenRules(), max_tokens=1,
            namespace=request.namespace, taint=request.taint, tenant=request.tenant, weight=request.weight,
            kv_share=request.kv_share, keeper=request.keeper, priority=request.priority, modules=request.modules,
            recompute=request.recompute, arrival_s=request.arrival_s, hints=[KVHint("prefetch")],
        )  # fmt: skip
        return (await self.ask(replica, order)).num_cached_tokens

    async def ask(self, replica: Replica, order: Control | Request) -> EngineOutput:
        """What the engine answers to an order, or at the end of a request of nobody. Raises EngineGoneError."""
        name = order.request_id
        if replica.state != "ready":
            raise EngineGoneError(f"engine {replica.number} is {replica.state}")
        future: asyncio.Future[EngineOutput] = asyncio.get_running_loop().create_future()
        self._answers[name] = replica, future
        try:
            replica.link.send([order])
            answer = await future
        finally:
            self._answers.pop(name, None)
        assert answer.finish_reason == FLUSHED or isinstance(order, Request), f"{order} was answered by {answer}"
        return answer

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        async def run() -> None:
            try:
                await work
            except EngineGoneError as error:
                _log.info("a hand-over ended: %s", error)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
