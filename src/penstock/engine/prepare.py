"""Requests that need something slow before their first step (a grammar to compile) wait aside, so that steps do not."""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from penstock.base.errors import PenstockError, RankGoneError
from penstock.core.request import Abort, Control, Intake, Request
from penstock.core.weight_swap import WeightFacts

if TYPE_CHECKING:
    from penstock.engine.core import EngineCore

NUM_THREADS = 2
Watch = Callable[[int, Request | None], None]


@dataclass
class _Waiting:
    request: Request
    aborts: list[Intake] = field(default_factory=list)
    """Of single samples, which go in behind it."""


class Preparation:
    """`needed` says whether a request has to wait for `work`, which runs in threads of this object.

    A request whose work fails goes on: whoever needs the result says so in its own words. All methods may be called
    from any thread.
    """

    def __init__(
        self, needed: Callable[[Request], bool], work: Callable[[Request], Any], watch: Watch = lambda _, __: None,
        read: Callable[[str], WeightFacts] | None = None,
    ) -> None:  # fmt: skip
        """`read`: reads other weights, for orders to swap them."""
        self._needed = needed
        self._work = work
        self._watch = watch
        self._read = read
        self._lock = threading.Lock()
        self._waiting: dict[str, _Waiting] = {}
        self._queue: queue.SimpleQueue[tuple[_Waiting, Callable[[Sequence[Intake]], None]]] = queue.SimpleQueue()
        self._started = False

    @classmethod
    def of(cls, core: EngineCore, watch: Watch) -> Preparation:
        """Compiling grammars on the ranks of `core`, and looking at the store for what others have written.

        `watch` is told in a thread of this what that thread, by number, begins to work on, and with None that it has.
        """
        executor, stored = core.executor, core.kv.stored

        def compiles(request: Request) -> bool:
            return request.rules.grammar is not None and not executor.holds(request.rules.grammar)

        def needed(request: Request) -> bool:
            return (stored is not None and stored.look is not None) or compiles(request)

        def work(request: Request) -> None:
            if stored is not None and stored.look is not None:
                stored.look(request)
            if compiles(request):
                assert request.rules.grammar is not None, "it has one"
                executor.prepare(request.rules.grammar)

        return cls(needed, work, watch, executor.ready_weights)

    def sift(self, items: Sequence[Intake], later: Callable[[Sequence[Intake]], None]) -> list[Intake]:
        """The items that can go in now; the others go to `later` when they are prepared, aborted ones never."""
        out: list[Intake] = []
        for item in items:
            if isinstance(item, Request) and self._needed(item):
                self._begin(_Waiting(item), later)
            elif isinstance(item, Control) and item.weights is not None and item.weights.facts is None:
                threading.Thread(target=self._weights, args=(item, later), name="penstock-weights", daemon=True).start()
            elif not (isinstance(item, Abort) and self._aborted(item)):
                out.append(item)
        return out

    def _weights(self, item: Control, later: Callable[[Sequence[Intake]], None]) -> None:
        """Whatever comes of it, the order goes on and is answered."""
        order = item.weights
        assert order is not None, "it names some"
        assert self._read is not None, "whoever orders a swap can be answered"
        try:
            order = replace(order, facts=self._read(order.path))
        except RankGoneError:
            return
        except (PenstockError, OSError, MemoryError) as error:
            order = replace(order, problem=str(error) or type(error).__name__)
        except Exception as error:
            traceback.print_exc()
            order = replace(order, problem=f"the weights cannot be read ({type(error).__name__}: {error})")
        later([replace(item, weights=order)])

    def _begin(self, waiting: _Waiting, later: Callable[[Sequence[Intake]], None]) -> None:
        with self._lock:
            self._waiting[waiting.request.request_id] = waiting
            if not self._started:
                self._started = True
                for place in range(NUM_THREADS):
                    threading.Thread(target=self._run, args=(place,), name="penstock-prepare", daemon=True).start()
        self._queue.put((waiting, later))

    def _aborted(self, abort: Abort) -> bool:
        """Whether an abort concerns a request that waits here; then it has taken effect."""
        with self._lock:
            found = self._waiting.get(abort.request_id)
            if found is not None:
                if abort.index is None:
                    del self._waiting[abort.request_id]
                else:
                    found.aborts.append(abort)
            return found is not None

    def _run(self, place: int) -> None:
        while True:
            waiting, later = self._queue.get()
            name = waiting.request.request_id
            if self._waiting.get(name) is not waiting:
                continue
            self._watch(place, waiting.request)
            try:
                self._work(waiting.request)
            except RankGoneError:
                return  # and so is the engine, in a moment; whose grammar this was must stay written down until then
            except BaseException:
                pass
            self._watch(place, None)
            with self._lock:
                # Handed on under the lock, so that an abort comes either before it or behind it.
                if self._waiting.get(name) is waiting:
                    del self._waiting[name]
                    later([waiting.request, *waiting.aborts])
