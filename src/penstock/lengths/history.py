"""What requests of the same kind came to before: a quantile of the last ones of a tenant, adapter and prompt length.

Who has sent too few yet is told by the next larger class: the tenant's and adapter's, then everybody's. Counting is all
it does, so it costs nothing, suits any model, and knows no more of a prompt than how long it is.
Source: none of its own; the baseline "historical" of papers that learn lengths.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq

from penstock.core.lengths import bucket_of
from penstock.core.request import Request
from penstock.lengths import refused

MAX_CLASSES = 4096
"""The one used longest ago is forgotten."""
_Class = tuple[str | bytes | int, ...]


class HistoryPredictor:
    """Args:
    quantile: of the lengths seen, that is told, (0, 1]. More reserves more and is outgrown less often.
    window: lengths that a class remembers, >= 1.
    least: lengths that a class has to have seen before it is asked, 1 to window.
    """

    name = "history"

    def __init__(self, quantile: float = 0.75, window: int = 64, least: int = 4) -> None:
        if not (0 < quantile <= 1 and window >= 1 and 1 <= least <= window):
            raise refused("history needs a quantile above 0 and at most 1, and a window of at least `least`, 1 or more")
        self._quantile, self._window, self._least = quantile, window, least
        self._seen: OrderedDict[_Class, deque[int]] = OrderedDict()

    def question(self, request: Request) -> Request | None:
        return None

    def predict(self, request: Request, answer: Seq[int]) -> int:
        for name in self._classes(request):
            lengths = self._seen.get(name)
            if lengths is not None and len(lengths) >= self._least:
                found = sorted(lengths)[math.ceil(self._quantile * len(lengths)) - 1]
                return min(found, request.max_tokens)
        return 0

    def learn(self, request: Request, num_generated: int) -> None:
        for name in self._classes(request):
            self._seen.setdefault(name, deque(maxlen=self._window)).append(num_generated)
            self._seen.move_to_end(name)
        while len(self._seen) > MAX_CLASSES:
            self._seen.popitem(last=False)

    @staticmethod
    def _classes(request: Request) -> Iterator[_Class]:
        """The narrowest first."""
        adapter = b"" if request.rules.adapter is None else request.rules.adapter.hash
        yield (request.tenant, adapter, bucket_of(len(request.prompt_token_ids)))
        yield (request.tenant, adapter)
        yield ()
