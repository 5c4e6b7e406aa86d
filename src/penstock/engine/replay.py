"""Giving a new engine what the last one had: suspects one by one first (`engine.suspects`), then all that lives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from penstock.core.output import EngineOutput
from penstock.core.request import Abort, Intake, Request, Resume
from penstock.engine.blackbox import handle_of
from penstock.engine.client import Live, OutputProcessor
from penstock.engine.suspects import Suspects, Verdict

TRIAL = "trial"
"""Finish reason of a trial run that has shown enough. It never reaches a client."""
MAX_LEFT = 1024
"""Requests without a client that are remembered; those that leave while an engine hangs add up."""


def resumed(request: Request, live: Live) -> Request | None:
    """The request as another engine has to take it up; None if nothing is left to do."""
    if request.whole:
        return request  # nothing of it has been sent on: it begins anew
    samples = [(s.index, list(s.token_ids)) for s in live.samples if s.finish_reason is None]
    if not samples:
        return None
    num_prompt_logprobs = len(live.prompt_logprobs) - 1
    if not num_prompt_logprobs and len(samples) == request.n and not any(ids for _, ids in samples):
        return request
    return msgspec.structs.replace(request, resume=Resume(samples, num_prompt_logprobs))


class Replay:
    """Drives the trials; `send` reaches the engine, `all_clear` is called when all that lives may be sent.

    While `trial` is set, only that request is in the engine. A suspect whose client has left is tried all the same:
    otherwise whoever has less patience than a restart takes could bring it again and again.
    """

    def __init__(
        self, processor: OutputProcessor, send: Callable[[Sequence[Intake]], None], all_clear: Callable[[], None]
    ) -> None:
        self.suspects = Suspects()
        self._processor = processor
        self._send = send
        self._all_clear = all_clear
        self._requests: dict[str, Request] = {}
        self._left: dict[str, Request] = {}
        """Without a client, but perhaps in the step of an engine that is dying, or suspects."""
        self._left_before: set[str] = set()
        """Those of them that left before the last message came."""
        self._stopping = False
        self._stopped: set[int] = set()

    @property
    def trial(self) -> str | None:
        return self.suspects.trial

    def begin(self, requests: Iterable[Request]) -> None:
        """A new engine is ready; `requests` are those that live."""
        self._requests = {request.request_id: request for request in requests}
        self.suspects.begin([*self._requests, *self._left])
        self._next()

    def crashed(
        self, living: Iterable[str], handles: Collection[int], engine: int, *, from_outside: bool = False
    ) -> tuple[Verdict, Request | None]:
        """Engine number `engine` died while it worked on `handles`. Also returns a guilty request that has left."""
        names = [i for i in (*living, *self._left) if handle_of(i) in handles] if handles else []
        verdict = self.suspects.crashed(names, engine, from_outside=from_outside, yielded=self._stopping)
        gone = self._left.pop(verdict.guilty, None) if verdict.guilty is not None else None
        self._forget_cleared(self._left)
        return verdict, gone

    def sift(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        """The news without those that only end a trial."""
        if self.trial is None:
            return outputs
        ended = [out for out in outputs if out.finish_reason == TRIAL and out.request_id == self.trial]
        self._stopped.update(out.index for out in ended)
        return [out for out in outputs if out.finish_reason != TRIAL]

    def after(self, outputs: list[EngineOutput]) -> None:
        """These news have been processed: clear suspects, and go on with the trials."""
        for out in outputs:
            if out.token_ids:
                self.suspects.committed(out.request_id, len(out.token_ids))
        trial = self.trial
        if trial is None:
            if self._left:  # a second message since they left: no step has them any more
                self._forget_cleared(self._left_before)
                self._left_before = set(self._left)
            return
        news = [out for out in outputs if out.request_id == trial]  # one tried before it may still have some
        if trial in self._left:
            if any(out.token_ids or out.finish_reason is not None for out in news):
                self._send([Abort(request_id=trial, reason=TRIAL)])
                self._dismiss(trial)
            return
        live = self._processor.find(trial)
        if live is None or self._processor.is_finished(trial):
            self._next()
        elif self._stopping:
            left = {0} if live.request.whole else {s.index for s in live.samples if s.finish_reason is None}
            if left <= self._stopped:
                self._next()
        elif any(out.token_ids for out in news):
            self._stopping = True
            self._send([Abort(request_id=trial, reason=TRIAL)])

    def leave(self, live: Live) -> bool:
        """The client of a live request is about to go. Returns whether the engine goes on with it: its trial runs."""
        request = live.request
        name = request.request_id
        if name == self.trial and self._stopping:
            return False
        again = resumed(request, live)
        if again is not None and len(self._left) < MAX_LEFT and (self.trial is None or self.suspects.is_tried(name)):
            self._left[name] = again
        return name == self.trial and name in self._left

    def ended(self, request_id: str) -> None:
        """A request has ended for its client; its abort, if it needs one, has been sent."""
        if request_id not in self._left:
            self._dismiss(request_id)

    def _dismiss(self, request_id: str) -> None:
        self._left.pop(request_id, None)
        self.suspects.forget(request_id)
        if request_id == self.trial:
            self._next()

    def _forget_cleared(self, names: Iterable[str]) -> None:
        """Of those that have left, none that is suspected."""
        for name in [name for name in names if not self.suspects.has_strike(name)]:
            self._left.pop(name, None)

    def _next(self) -> None:
        self._stopping = False
        self._stopped.clear()
        while (trial := self.suspects.next()) is not None:
            live = self._processor.find(trial)
            again = resumed(self._requests[trial], live) if live is not None else self._left.get(trial)
            if again is not None:
                self._send([again])
                return
        self._requests = {}
        self._all_clear()
