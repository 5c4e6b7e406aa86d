"""Giving a new engine what the last one had: suspects one by one first (`engine.suspects`), then all that lives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from penstock.core.output import EngineOutput
from penstock.core.request import Abort, Intake, Request, Resume
from penstock.engine.client import Live, OutputProcessor
from penstock.engine.suspects import Suspects

TRIAL = "trial"
"""Finish reason of a trial run that has shown enough. It never reaches a client."""


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

    While `trial` is set, only that request is in the engine.
    """

    def __init__(
        self, processor: OutputProcessor, send: Callable[[Sequence[Intake]], None], all_clear: Callable[[], None]
    ) -> None:
        self.suspects = Suspects()
        self._processor = processor
        self._send = send
        self._all_clear = all_clear
        self._requests: dict[str, Request] = {}
        self._stopping = False
        self._stopped: set[int] = set()

    @property
    def trial(self) -> str | None:
        return self.suspects.trial

    def begin(self, requests: Iterable[Request]) -> None:
        """A new engine is ready; `requests` are those that live."""
        self._requests = {request.request_id: request for request in requests}
        self.suspects.begin(self._requests)
        self._next()

    def crashed(self, working_on: Sequence[str]) -> str | None:
        """Returns the request that is guilty of it, if any."""
        return self.suspects.crashed(working_on)

    def sift(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        """The news without those that only end a trial."""
        if self.trial is None:
            return outputs
        self._stopped.update(out.index for out in outputs if out.finish_reason == TRIAL)
        return [out for out in outputs if out.finish_reason != TRIAL]

    def after(self, outputs: list[EngineOutput]) -> None:
        """These news have been processed: clear suspects, and go on with the trials."""
        for out in outputs:
            if out.token_ids:
                self.suspects.committed(out.request_id, len(out.token_ids))
        trial = self.trial
        if trial is None:
            return
        live = self._processor.find(trial)
        if live is None or self._processor.is_finished(trial):
            self._next()
        elif self._stopping:
            left = {0} if live.request.whole else {s.index for s in live.samples if s.finish_reason is None}
            if left <= self._stopped:
                self._next()
        elif any(out.token_ids for out in outputs):
            self._stopping = True
            self._send([Abort(request_id=trial, reason=TRIAL)])

    def ended(self, request_id: str) -> None:
        """A request has ended for its client; its abort, if it needs one, has been sent."""
        self.suspects.forget(request_id)
        if request_id == self.trial:
            self._next()

    def _next(self) -> None:
        self._stopping = False
        self._stopped.clear()
        while (trial := self.suspects.next()) is not None:
            live = self._processor.find(trial)
            again = resumed(self._requests[trial], live) if live is not None else None
            if again is not None:
                self._send([again])
                return
        self._requests = {}
        self._all_clear()
