"""Predictions at a front end: made before a request is handed in, held against what came of it."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import msgspec

from penstock.core.output import RequestOutput
from penstock.core.protocols import LengthPredictor
from penstock.core.request import Request
from penstock.lengths.score import Accuracy

ENDS = ("stop", "length")
"""Finish reasons of samples whose length says something: not of those that were aborted, failed or ran in circles."""


class ExpectedLengths:
    """What a front end knows of lengths: one predictor, and how good it is."""

    def __init__(self, predictor: LengthPredictor) -> None:
        self.predictor = predictor
        self.accuracy = Accuracy()
        self._asking: set[str] = set()

    def question(self, request: Request) -> Request | None:
        """What the model is to be asked first; None: nothing."""
        asked = self.predictor.question(request) if generates(request) else None
        if asked is not None:
            self._asking.add(asked.request_id)
        return asked

    def expect(self, request: Request, answer: Seq[int] = ()) -> Request:
        """`request` with its expected length. `answer`: ids of what came of its question."""
        if not generates(request):
            return request
        return msgspec.structs.replace(request, expected_tokens=self.predictor.predict(request, answer))

    def ended(self, request: Request, output: RequestOutput) -> None:
        """Hold it against its prediction and learn from it, unless it says nothing of lengths."""
        if request.request_id in self._asking:
            self._asking.discard(request.request_id)
            return
        if not generates(request):
            return
        for sample in output.outputs:
            if sample.finish_reason in ENDS:
                self.accuracy.add(request.expected_tokens, len(sample.token_ids))
                self.predictor.learn(request, len(sample.token_ids))


def generates(request: Request) -> bool:
    """Whether its samples have lengths of their own: not beams, vectors, prefetches, nor what has one token at most."""
    return not (request.whole or request.prefetches or request.max_tokens == 1)
