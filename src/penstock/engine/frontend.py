"""EngineClient: what a server talks to. Requests go in, text comes out, whatever happens to the engine in between.

It remembers of every live request what it takes to begin again: the request itself, the tokens that were sent on, the
text state. So a dead engine costs its clients a pause: the next one is given the same requests with their tokens so far
(`Request.resume`), and Philox counters make the rest the same. Of several engines (replicas), those that live take over
from one that has died at once, but for what it may have died of.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import msgspec

from penstock.base.errors import EngineGoneError, InputError, ModelError, RefusedError
from penstock.core.messages import EngineInfo, EngineSnapshot, Outputs
from penstock.core.output import (
    BeamSearchOutput,
    CompletionOutput,
    EngineOutput,
    RequestMetrics,
    RequestOutput,
)
from penstock.core.request import Abort, Control, Intake, Request
from penstock.core.weight_swap import BUSY, WeightFacts, WeightsOrder
from penstock.engine.capacity import capacity_of
from penstock.engine.client import Live, OutputProcessor, Tally
from penstock.engine.convictions import Convictions
from penstock.engine.handover import Handover
from penstock.engine.link import Down, LateLink, Link
from penstock.engine.replay import resumed
from penstock.engine.replica import Placing, Replica, RunsBeside, summed
from penstock.engine.stream import Delta, Stream

if TYPE_CHECKING:
    from penstock.base.clock import Clock
    from penstock.core.sampling import SamplingParams
    from penstock.text.tokenizer import Tokenizer

log = logging.getLogger("penstock.engine")
_orders = itertools.count()
_STATES = ("ready", "starting", "restarting", "asleep", "away", "stopped", "failed")
"""The best first. away: its host is out of reach, or has not come yet."""

GIVEN_UP = "the engine failed again and again and is given up; try again later"
OUT_OF_REACH = "no engine can be reached; try again later"
_POLL_S = 0.02
UNREADY_AFTER_S = 4.0
"""Seconds without a sign of life from which an engine is not ready: known well within five."""
CHARS_PER_LOGPROB = 64
"""An entry takes about as many bytes, whether it is kept as numbers or as JSON."""
GUILTY = (
    "the engine failed again and again while it worked on this request, at last on nothing else; it will not be tried "
    "again"
)
REFUSED = (
    "the engine failed while it worked on nothing but a request like this one; the same prompt is not tried again "
    "for an hour: send another, and tell who runs this server"
)


FinishListener = Callable[[Stream, RequestOutput], None]
MessageListener = Callable[[Outputs, Tally], None]


class EngineClient:
    """Follows requests through an engine behind a `Link`. All methods belong to the event loop's thread.

    The listeners in `on_finish` are called with every request's last output, however it ended: metrics and logs hang
    there. That of a beam search has its hypotheses as `outputs`.
    """

    def __init__(
        self,
        link: Link,
        tokenizer: Tokenizer | None,
        clock: Clock,
        *,
        on_finish: FinishListener | None = None,
        further: Sequence[Link] = (),
        late: Sequence[LateLink] = (),
        placing: Placing | None = None,
        has_store: bool = False,
    ) -> None:
        """`further`: of more engines of the same model; `placing` chooses between them all. `late`: those links among
        them whose engines are on other hosts and come when they come. `has_store`: of blocks, which they have in
        common."""
        self.link = link
        self.clock = clock
        self.info: EngineInfo | None = None
        self.on_finish: list[FinishListener] = [] if on_finish is None else [on_finish]
        self.on_message: list[MessageListener] = []
        """Called with every message of the engine and what it brought: live metrics hang there."""
        self.on_wanted: Callable[[], None] | None = None
        """Called with every request that comes while the engine is asleep."""
        self.last_outputs_s = 0.0
        self._processor = OutputProcessor(tokenizer, clock)
        self._streams: dict[str, Stream] = {}
        lates = {id(one): one for one in late}
        self.replicas = [self.replica_of(n, one, lates.get(id(one))) for n, one in enumerate((link, *further))]
        self._placing = placing
        self._departed = EngineSnapshot()
        """Counters of engines that were removed; `_departed_restarts` likewise."""
        self._departed_restarts = 0
        self.handover = Handover(self, has_store=has_store)
        self.rescheduling: RunsBeside | None = None
        """Moves requests between engines by itself; None: only who asks does."""
        assert placing is not None or not further, "somebody has to choose between engines"
        self.convictions = Convictions(clock)
        self.weights: WeightsOrder | None = None
        """Those that were swapped in; None: the engine has those that it started with."""
        self.tells_weights = False
        """Answers say which weights they are of."""
        self.paused = False
        """Nobody runs until `go_on`."""
        self._swap: tuple[str, asyncio.Future[EngineOutput]] | None = None
        self._processor.on_swap = self._on_swap

    # -- all engines together --------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """starting, ready, restarting, away, failed, stopped or asleep: there is none, until a request wants one. Of
        several engines, that of the one which is best off."""
        return min((replica.state for replica in self.replicas), key=_STATES.index)

    @state.setter
    def state(self, state: str) -> None:
        for replica in self.replicas:
            replica.state = state

    @property
    def reason(self) -> str:
        """Why it is not ready."""
        return next((r.reason for r in self.replicas if r.state == self.state), "")

    @reason.setter
    def reason(self, reason: str) -> None:
        for replica in self.replicas:
            replica.reason = reason

    @property
    def snapshot(self) -> EngineSnapshot:
        if self._placing is None:
            return self.replicas[0].snapshot
        return summed([*(replica.counted for replica in self.replicas), self._departed])

    @snapshot.setter
    def snapshot(self, snapshot: EngineSnapshot) -> None:
        for replica in self.replicas:
            replica.snapshot = snapshot

    @property
    def loading(self) -> tuple[int, int]:
        """Bytes of weights read so far, and in all."""
        return sum(r.loading[0] for r in self.replicas), sum(r.loading[1] for r in self.replicas)

    @property
    def num_restarts(self) -> int:
        return sum((replica.num_restarts for replica in self.replicas), self._departed_restarts)

    # -- replicas come and go (`engine.membership` decides when) ---------------------------------------------------

    def replica_of(self, number: int, link: Link, late: LateLink | None = None) -> Replica:
        """One that is not among the replicas yet."""
        return Replica(self, number, link, self._processor, late)

    def leaves(self, replica: Replica) -> None:
        """It is given nothing any more and its engine has ended; what had it has been moved."""
        self.replicas.remove(replica)
        self._departed = summed([EngineSnapshot(counters=replica.counted.counters), self._departed])
        self._departed_restarts += replica.num_restarts
        if self._placing is not None:
            self._placing.left(replica)

    def unfinished(self, replica: Replica) -> list[Stream]:
        """Of what it has, what it still has to work on."""
        return [s for s in replica.streams.values() if not self._processor.is_finished(s.request_id)]

    def move_all(self, replica: Replica) -> None:
        """Others go on with all that it has, if there are any: with the same tokens."""
        self._move(replica, list(replica.streams.values()))

    def leave_soon(self, replica: Replica) -> None:
        """Its engine will be killed (a machine that is taken away says so before), and has told all that it computed:
        others go on at once with what it has. Without others it works for as long as it may."""
        replica.noticed = True
        others = [one for one in self.replicas_open if one is not replica and one.state == "ready"]
        log.warning(
            "engine %d is to be ended: %s", replica.number,
            f"{len(replica.streams)} requests go on with others" if others else "no other is ready, so it works on",
        )  # fmt: skip
        if others:
            replica.draining = True
            self.move_all(replica)
        if not self.paused:
            replica.link.send([Control(kind="go_on")])

    def lost_cache(self, replica: Replica) -> None:
        """Its engine has been ended: nothing that was cached there is."""
        if self._placing is not None:
            self._placing.router.gone(replica.number)

    @property
    def placing(self) -> Placing | None:
        """Who chooses between engines; None: there is one, for good."""
        return self._placing

    # -- life ----------------------------------------------------------------------------------------------------

    def use_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        """Before the first request: for a client that was made before its tokenizer was read."""
        self._processor.tokenizer = tokenizer

    async def start(self) -> EngineInfo:
        """Returns when all engines of this host are ready, or the first of others if there is none here. Raises what
        keeps one of them from starting."""
        try:
            await asyncio.gather(*(one.link.start(one) for one in self.replicas if one.late is None))
            for replica in self.replicas:
                if replica.late is not None:
                    replica.state, replica.missed = "away", True
                    replica.late.begin(replica)
            while self.info is None:
                await asyncio.sleep(_POLL_S)
        except BaseException:
            if len(self.replicas) > 1:
                await self._close()
            raise
        assert self.info is not None
        if self._placing is not None:
            self._placing.follow(self.info)
        if self.rescheduling is not None:
            self.rescheduling.begin()
        return self.info

    def begin_asleep(self, info: EngineInfo) -> None:
        """Instead of `start`: there is no engine yet; `info` is what it will say."""
        self.info, self.state = info, "asleep"

    def doze(self) -> None:
        """The engine, which has nothing to do, gives its KV back. What comes from now on waits for `resume`."""
        self.control(Control(kind="sleep"))
        self.state, self.reason = "asleep", "it goes on with the next request"

    def resume(self) -> None:
        """The engine may work again. One that has died meanwhile is started by its link, and needs no word."""
        if self.state == "asleep":
            self.state = "starting"
            for replica in self.replicas:
                replica.all_clear()

    async def sleep(self) -> None:
        """End the engine while nothing lives. What comes from now on waits for `wake`."""
        self.state, self.reason = "asleep", "it starts with the next request"
        await self._close()
        self.snapshot = EngineSnapshot()

    async def wake(self) -> None:
        """Start an engine again. Raises what keeps it from starting; then it is asleep as before."""
        self.state, self.reason = "starting", "the model is being loaded"
        try:
            await self.start()
        except BaseException:
            self.state = "asleep"
            raise

    def give_up(self, message: str) -> None:
        """End whatever lives with an error: the engine cannot be started for it."""
        self._end_all(message, gone=True)

    async def stop(self) -> None:
        """End the engine; whatever still runs ends with an error."""
        self.state, self.reason = "stopped", "the server is shutting down"
        await self._close()
        self._end_all(self.reason, gone=True)

    async def _close(self) -> None:
        self.handover.close()
        if self.rescheduling is not None:
            self.rescheduling.end()
        await asyncio.gather(*(replica.link.close() for replica in self.replicas))

    def ready(self) -> tuple[bool, str]:
        """Whether new requests are being worked on now, and if not, why."""
        if self.state == "asleep":
            return True, ""
        if self.state != "ready":
            waiting = sum(replica.replay.suspects.num_waiting for replica in self.replicas)
            return False, (self.reason or f"the engine is {self.state}") + (f" ({waiting} to go)" if waiting else "")
        age_s = min(r.link.progress_age_s() for r in self.replicas if r.state == "ready")
        if age_s >= UNREADY_AFTER_S:
            return False, f"the engine has not moved for {age_s:.0f} s"
        return True, ""

    # -- what one engine tells (see `replica.Replica`) -----------------------------------------------------------

    def went_down(self, replica: Replica, down: Down) -> Collection[int]:
        """See `link.Listener.on_down`."""
        self.handover.lost(replica)
        if self._swap is not None:
            name, why = self._swap[0], f"{down.reason}; the old weights serve on"
            self._processor.orders.clear()
            self._on_swap(name, EngineOutput(request_id=name, index=0, error=why))
        if down.fatal:
            replica.state, replica.missed = ("away", True) if down.away else ("failed", replica.missed)
            if all(one.is_hopeless for one in self.replicas):
                self._end_all(OUT_OF_REACH if down.away else GIVEN_UP, gone=True)
            else:
                self._move(replica, list(replica.streams.values()))
            return ()
        verdict, gone = replica.replay.crashed(
            replica.streams, down.suspects, replica.epoch, from_outside=down.from_outside
        )
        replica.state = "away" if down.away else "restarting"
        for stream in replica.streams.values():
            stream.num_replays += 1
        if verdict.guilty is not None:
            found = self._streams.get(verdict.guilty)
            request = gone if found is None else found.request
            assert request is not None, "whoever is tried lives, or is remembered"
            self._convict(request, self._num_tokens(request.request_id, gone))
        self._move(replica, [s for s in replica.streams.values() if self._may_move(replica, s, down)])
        return verdict.explained

    def _may_move(self, replica: Replica, stream: Stream, down: Down) -> bool:
        """A suspect would take the next engine along. But an engine that somebody else may have killed speaks against
        nobody, the first time."""
        return (down.from_outside and stream.num_replays == 1) or not replica.replay.suspects.has_strike(
            stream.request_id
        )

    def came_back(self, replica: Replica) -> None:
        """Its engine works: what waits for hosts that are out of reach goes on with it."""
        for other in self.replicas:
            if other.state == "away" and other is not replica:
                tried = other.replay.suspects.has_strike
                self._move(other, [s for s in other.streams.values() if other.missed or not tried(s.request_id)])

    def refuses(self, info: EngineInfo) -> str:
        """See `link.Listener`: it has to hold what requests were told that they may ask for."""
        if self.info is None:
            return ""
        there, needed = capacity_of(info), capacity_of(self.info)
        return "" if there >= needed else (
            f"an engine there would have memory for {there} tokens of a request, and requests may have {needed}; free "
            "memory there, or start the server with a smaller max_model_len"
        )  # fmt: skip

    def _move(self, lost: Replica, streams: Sequence[Stream]) -> None:
        """Others go on with what `lost` had; without any, it waits for it."""
        if self._placing is None:
            return
        if lost.state != "ready":
            self._placing.router.gone(lost.number)
        for stream in streams:
            if (to := self.choose(stream)) is None or to is lost:
                return
            self.pass_on(stream, to)

    def pass_on(self, stream: Stream, to: Replica) -> None:
        """`to` goes on with it, whether or not the engine that has it works on it still (`Replica.let_go`)."""
        lost: Replica = stream.replica
        again = resumed(stream.request, self._processor.live(stream.request_id))
        if again is None:
            return  # it has ended, and nobody has looked yet
        if to is not lost and self._placing is not None:
            lost.let_go(stream)
            self._placing.ended(stream.request_id, lost)
            lost.replay.ended(stream.request_id)
            self._place(stream, to)
        if to.state == "ready":
            to.link.send([self.given(to, again)])

    def given(self, replica: Replica, request: Request) -> Request:
        """As this engine gets it."""
        return self.handover.given(replica, request)

    def find(self, request_id: str) -> tuple[Stream, Live] | None:
        """A request that has not ended."""
        stream, live = self._streams.get(request_id), self._processor.find(request_id)
        if stream is None or live is None or self._processor.is_finished(request_id):
            return None
        return stream, live

    def choose(self, stream: Stream) -> Replica | None:
        """An engine that works, or will, for how far it has come: None if none does."""
        if self._placing is None:
            return self.replicas[0]
        for wanted in (self.replicas_open, self.replicas):
            for state in ("ready", "starting", "restarting", "asleep", "away"):
                found = [one for one in wanted if one.state == state and not one.is_hopeless]
                if found:
                    return self._placing.choose(stream, self.handover.suited(stream, found))
        return None

    @property
    def replicas_open(self) -> list[Replica]:
        """Those that may be given something new, if they work."""
        return [replica for replica in self.replicas if not replica.draining]

    def _place(self, stream: Stream, replica: Replica) -> None:
        replica.streams[stream.request_id] = stream
        stream.replica = replica
        if self._placing is not None:
            self._placing.placed(stream, replica)

    def _convict(self, request: Request, num_tokens: int) -> None:
        """End it, refuse its like from now on, and end what lives of those that have come no further."""
        log.error(
            "request %s is given up: engines died of it, the last one with nothing else to do", request.request_id
        )
        self.convictions.convict(request, num_tokens)
        for stream in list(self._streams.values()):
            alike = self.convictions.cover(stream.request, self._num_tokens(stream.request_id))
            if alike or stream.request_id == request.request_id:
                stream.convicted = True
                self._end(stream, GUILTY)

    def _num_tokens(self, request_id: str, gone: Request | None = None) -> int:
        """Generated so far, by the longest of its samples."""
        live = self._processor.find(request_id)
        if live is not None:
            return max((len(sample.token_ids) for sample in live.samples), default=0)
        return max((len(ids) for _, ids in gone.resume.samples), default=0) if gone and gone.resume else 0

    # -- requests ------------------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        return len(self._streams)

    @property
    def streams(self) -> list[Stream]:
        """Everything that lives."""
        return list(self._streams.values())

    def started(self, stream: Stream) -> bool:
        return self._processor.live(stream.request_id).metrics.first_token_s is not None

    def check(self, request: Request) -> None:
        """Raises what keeps a request from being taken in, whoever waits.

        EngineGoneError if the engine is gone, InputError if the request's id is in use, RefusedError (422) if engines
        have died of its like.
        """
        if self.state in ("failed", "stopped") or all(one.is_hopeless for one in self.replicas):
            raise EngineGoneError(f"the engine is not there: {self.reason}")
        if request.request_id in self._streams:
            raise InputError(f"request id {request.request_id!r} is in use", param="request_id")
        if self.convictions.refuses(request):
            raise RefusedError(REFUSED, status=422, code="request_convicted")

    def submit(
        self, request: Request, params: SamplingParams | None, text: str | None = None, *, session: str = "",
        engine: int | None = None,
    ) -> Stream:  # fmt: skip
        """Take a request in. `params` is None for beam search and pooling. `session`: requests of one are sent to one
        engine by routers that go by it. `engine`: it goes to this one, by number. Raises as `check`."""
        self.check(request)
        stream = self._streams[request.request_id] = Stream(self, request)
        stream.session = session
        self._processor.add(request, params, text)
        stream.prompt_logprobs = self._processor.live(request.request_id).prompt_logprobs
        named = (replica for replica in self.replicas if replica.number == engine)
        replica = self.choose(stream) if engine is None else next(named)
        assert replica is not None, "`check` refuses where all have failed"
        self._place(stream, replica)
        if replica.state == "ready":
            replica.link.send([self.given(replica, request) if engine is None else request])
        elif replica.state == "asleep" and self.on_wanted is not None:
            self.on_wanted()
        return stream  # otherwise it is sent with `on_up`

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """Drop a request: its reader has gone, or its time is up."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        replica: Replica = stream.replica
        goes_on = replica.replay.leave(self._processor.live(request_id))
        if replica.state == "ready" or (request_id == replica.replay.trial and not goes_on):
            replica.link.send([Abort(request_id=request_id, reason=reason)])
        if not stream.request.whole:
            self._processor.end(request_id, reason)
            self._finish(stream)
        else:
            stream.aborted = reason
            self._drop(stream)
            self._report_whole(stream, reason, None)

    def control(self, item: Control) -> None:
        """To all engines that work."""
        for replica in self.replicas:
            if replica.state == "ready":
                replica.link.send([item])

    # -- weights -------------------------------------------------------------------------------------------------

    @property
    def weight_version(self) -> str:
        """Of the weights that what comes now is computed over."""
        return self._processor.version

    def weight_versions(self, stream: Stream) -> list[list[tuple[int, int, str]]] | None:
        if not self.tells_weights:
            return None
        if stream.final is not None:
            return [sample.weight_versions for sample in stream.final.outputs]
        live = self._processor.find(stream.request_id)
        return [] if live is None else [sample.versions(self.weight_version) for sample in live.samples]

    async def swap_weights(self, order: WeightsOrder) -> WeightsOrder:
        """Returns the order as it was carried out, once it was: with the hash of the weights.

        Raises RefusedError (409) while another is, EngineGoneError, and ModelError with why the old ones serve on.
        """
        if self._swap is not None:
            raise RefusedError(BUSY, status=409, code="weights_busy")
        if self.state != "ready":
            raise EngineGoneError(f"the engine is not there: {self.reason or 'it starts with the next request'}")
        name = f"weights-{next(_orders)}"
        self._swap = name, asyncio.get_running_loop().create_future()
        self._processor.orders[name] = order
        self.link.send([Control(kind="weights", request_id=name, weights=order)])
        out = await asyncio.shield(self._swap[1])
        if out.error is not None:
            raise ModelError(out.error)
        assert self.weights is not None, "it was carried out"
        return self.weights

    def _on_swap(self, name: str, out: EngineOutput) -> None:
        if self._swap is None or self._swap[0] != name:
            return
        (_, future), self._swap = self._swap, None
        order = self._processor.order
        if out.error is None and order is not None:
            facts = WeightFacts(str(out.stop_reason), "")
            self.tells_weights = True
            self.weights = self.link.weights = msgspec.structs.replace(order, facts=facts)
        if not future.done():
            future.set_result(out)

    def hold(self, how: str | None) -> None:
        """Nobody runs until `go_on`. `how`: see `core.request.Control`."""
        self.paused = True
        self.control(Control(kind="hold", label=how))

    def go_on(self) -> None:
        self.paused = False
        self.control(Control(kind="go_on"))

    def take_in(self, replica: Replica, message: Outputs) -> None:
        """News of one engine."""
        self.last_outputs_s = self.clock.now()
        if message.snapshot is not None:
            replica.snapshot = message.snapshot
        tally = self._processor.tally = Tally() if self.on_message else None
        outputs = replica.replay.sift(message.outputs)
        if self._placing is not None and message.blocks is not None:
            self._placing.told(replica, message.blocks)
        if self._placing is not None:  # who was moved is another's
            outputs = self.handover.sift(replica, replica.without_left(outputs, self._streams))
        touched = self._processor.process(outputs)
        for request_id in touched:
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.notify()
        if self._placing is not None:
            self._placing.progressed(touched, replica)
        if tally is not None:
            if self._placing is not None:  # whoever counts sees one engine that never ends
                whole = None if message.snapshot is None else self.snapshot
                message = msgspec.structs.replace(message, epoch=0, snapshot=whole)
            for listener in self.on_message:
                listener(message, tally)
        if self._processor.aborts:
            orders: list[Intake] = list(self._processor.aborts)
            self._processor.aborts.clear()
            replica.link.send(orders)
        replica.replay.after(outputs)
        if self._placing is not None:
            self.handover.after(touched)

    # -- what streams ask for ------------------------------------------------------------------------------------

    def take(self, stream: Stream) -> list[Delta]:
        """What `stream` has not seen yet; with its last piece `stream.final` (and `error`) are set."""
        if stream.request_id not in self._streams:
            fresh, stream.rest = stream.rest, []
            return fresh
        fresh = self._collect(stream)
        if self._processor.is_finished(stream.request_id):
            self._finish(stream)
        return fresh

    def _collect(self, stream: Stream) -> list[Delta]:
        live = self._processor.live(stream.request_id)
        fresh = []
        for index, cursor in stream.seen.items():
            sample = live.samples[index]
            tokens = sample.token_ids[cursor.tokens :]
            text = "".join(sample.text[cursor.pieces :])
            ended = sample.finish_reason is not None and not cursor.ended
            if not (tokens or text or ended):
                continue
            asked = live.params is not None and live.params.tells_logprobs
            logprobs = None
            if asked:
                logprobs = sample.logprobs if stream.forgets else sample.logprobs[cursor.tokens :]
            if stream.forgets:
                sample.logprobs = []
            cursor.tokens, cursor.pieces = len(sample.token_ids), len(sample.text)
            cursor.ended = cursor.ended or ended
            reasons = (sample.finish_reason, sample.stop_reason) if ended else (None, None)
            fresh.append(Delta(index, text, tokens, logprobs, *reasons))
        return fresh

    def take_beams(self, stream: Stream) -> BeamSearchOutput | None:
        if stream.request_id not in self._streams or not self._processor.is_finished(stream.request_id):
            return None
        found = self._processor.beam_output(stream.request_id)
        self._drop(stream)
        self._report_whole(stream, "stop", None, found)
        return found

    def take_pooled(self, stream: Stream) -> EngineOutput | None:
        if stream.request_id not in self._streams or not self._processor.is_finished(stream.request_id):
            return None
        found = self._processor.pooled_output(stream.request_id)
        self._drop(stream)
        self._report_whole(stream, found.finish_reason or "stop", found.error)
        return found

    def output(self, request_id: str) -> RequestOutput:
        return self._processor.output(request_id, keep=True)

    def num_cached(self, stream: Stream) -> int:
        return self._processor.live(stream.request_id).num_cached

    def metrics(self, stream: Stream) -> RequestMetrics:
        return self._processor.live(stream.request_id).metrics

    def unread_chars(self, stream: Stream) -> int:
        """Characters that are kept for the stream's reader: text, log-probabilities and, where they are sent, ids."""
        live = self._processor.live(stream.request_id)
        total = 0
        for i, cursor in stream.seen.items():
            sample = live.samples[i]
            total += sum(map(len, sample.text[cursor.pieces :]))
            total += stream.chars_per_token * (len(sample.token_ids) - cursor.tokens)
            unread = sample.logprobs if stream.forgets else sample.logprobs[cursor.tokens :]
            total += CHARS_PER_LOGPROB * sum(1 + len(entry.top_ids) for entry in unread)
        return total

    # -- endings -------------------------------------------------------------------------------------------------

    def _finish(self, stream: Stream) -> None:
        stream.rest = self._collect(stream)
        output = self._processor.output(stream.request_id, logprobs=not stream.forgets)
        stream.final, stream.error = output, output.error
        self._drop(stream)
        self._report(stream, output)

    def _report_whole(
        self, stream: Stream, reason: str, error: str | None, beams: BeamSearchOutput | None = None
    ) -> None:
        """Tell `on_finish` of a request that has no deltas: a beam search, or pooling."""
        request = stream.request
        prompt = request.prompt_token_ids
        metrics = RequestMetrics(arrival_s=request.arrival_s, finished_s=self.clock.now())
        outputs = [CompletionOutput(index=0, text="", token_ids=[], finish_reason=reason)]
        if beams is not None and beams.sequences:
            outputs = [
                CompletionOutput(i, s.text or "", s.tokens[len(prompt) :], finish_reason=s.finish_reason)
                for i, s in enumerate(beams.sequences)
            ]
        output = RequestOutput(request.request_id, None, prompt, None, outputs, True, metrics, error=error)
        self._report(stream, output)

    def _report(self, stream: Stream, output: RequestOutput) -> None:
        for listener in self.on_finish:
            listener(stream, output)

    def _drop(self, stream: Stream) -> None:
        self._streams.pop(stream.request_id, None)
        self.handover.forget(stream.request_id)
        replica: Replica = stream.replica
        replica.streams.pop(stream.request_id, None)
        self._processor.discard(stream.request_id)
        if self._placing is not None:
            self._placing.ended(stream.request_id, replica)
        replica.replay.ended(stream.request_id)
        stream.end()

    def _end_all(self, message: str, *, gone: bool = False) -> None:
        for stream in list(self._streams.values()):
            stream.engine_gone = gone
            self._end(stream, message)

    def _end(self, stream: Stream, message: str) -> None:
        if stream.request.whole:
            stream.error = message
            self._drop(stream)
            self._report_whole(stream, "error", message)
        elif self._processor.is_finished(stream.request_id):
            self._finish(stream)  # it had ended, but nobody has looked yet
        else:
            self._processor.end(stream.request_id, "error", message)
            self._finish(stream)
