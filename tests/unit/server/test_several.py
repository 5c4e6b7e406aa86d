"""Which models are in memory: started once, left when idle, never more than fits, and no request lost."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from penstock.base.clock import VirtualClock
from penstock.base.errors import EngineGoneError, ModelError, RefusedError
from penstock.core.messages import EngineInfo, Outputs
from penstock.core.output import EngineOutput
from penstock.core.request import Control, Intake, Request
from penstock.core.sampling import SamplingParams, TokenRules
from penstock.engine.frontend import EngineClient
from penstock.engine.link import Listener
from penstock.server.several import models as module
from penstock.server.several.memory import Holder, leavers
from penstock.server.several.models import Models
from penstock.server.several.served import AWAKE, DOZING, GONE, ServedModel

INFO = EngineInfo(vocab_size=64, max_model_len=64)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TICK_S", 0.001)  # whoever waits looks again soon


class Engine:
    """A link to an engine that takes `slow` turns of the loop for a start and for each request."""

    def __init__(self, slow: Callable[[], int] = lambda: 2) -> None:
        self.slow, self.is_up, self.num_starts, self.holds = slow, False, 0, False
        self.problem: Exception | None = None
        self.orders: list[Control] = []
        self.held: list[Request] = []
        self._epoch = 0

    async def start(self, listener: Listener) -> None:
        assert not self.is_up, "started twice"
        for _ in range(self.slow()):
            await asyncio.sleep(0)
        if self.problem is not None:
            raise self.problem
        self.is_up, self._listener = True, listener
        self.num_starts += 1
        listener.on_up(INFO, self._epoch)

    def send(self, items: Sequence[Intake]) -> None:
        assert self.is_up
        self.orders += [item for item in items if isinstance(item, Control)]
        for item in items:
            if isinstance(item, Request):
                self.held.append(item)
                if not self.holds:
                    asyncio.get_running_loop().create_task(self._later(item))

    async def _later(self, request: Request) -> None:
        for _ in range(self.slow()):
            await asyncio.sleep(0)
        self.answer(request)

    def answer(self, request: Request) -> None:
        assert self.is_up, "an engine with a request was ended"
        self.held.remove(request)
        out = EngineOutput(request_id=request.request_id, index=0, token_ids=[7], finish_reason="length")
        self._listener.on_outputs(Outputs(self._epoch, [out]))

    def progress_age_s(self) -> float:
        return 0.0

    async def close(self) -> None:
        assert not self.held, "a request is lost"
        self.is_up = False
        self._epoch += 1
        await asyncio.sleep(0)


class House:
    """Models of `sizes` bytes (weights, KV) in `limit`, asleep at first."""

    def __init__(
        self, *sizes: tuple[int, int], limit: int, patience_s: float = math.inf, slow: Any = None, **more: Any
    ) -> None:
        self.clock, self.limit = VirtualClock(), limit
        self.models = Models(self.clock, {"": limit}, patience_s=patience_s)
        self.engines: list[Engine] = []
        self.served: list[ServedModel] = []
        self._count = 0
        for i, (weights, kv) in enumerate(sizes):
            engine = Engine(slow) if slow is not None else Engine()
            client = EngineClient(engine, None, self.clock)
            client.begin_asleep(INFO)
            one = ServedModel("abcdefgh"[i], client, weights, kv, **{"keep_alive_s": math.inf} | more)
            self.engines.append(engine)
            self.served.append(one)
            self.models.add(one)

    def check(self) -> None:
        held = self.models.held_bytes("")
        assert held <= self.limit
        for engine, one in zip(self.engines, self.served, strict=True):
            assert not engine.is_up or one.level != GONE, "an engine that nobody counts"

    async def ask(self, i: int, *, look: bool = True) -> list[int]:
        """Its tokens. `look` False: as what comes without a look at its model first."""
        one = self.served[i]
        if look:
            await self.models.awake(one)
        self.check()
        self._count += 1
        params = SamplingParams(max_tokens=1, detokenize=False)
        request = Request(request_id=str(self._count), prompt_token_ids=[1], rules=TokenRules(), max_tokens=1)
        stream = one.client.submit(request, params)
        found = await stream.result()
        self.check()
        return found.outputs[0].token_ids


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 30))


def test_who_has_been_idle_longest_leaves_first() -> None:
    holders = [
        Holder("a", 5, 3.0, True),
        Holder("b", 5, 1.0, True),
        Holder("c", 9, 0.0, False),
        Holder("d", 0, 0, True),
    ]
    assert leavers(4, 4, holders) == []
    assert leavers(5, 4, holders) == ["b"]
    assert leavers(10, 4, holders) == ["b", "a"]
    assert leavers(15, 4, holders) is None
    assert leavers(15, 4, holders, idle_only=False) == ["b", "a", "c"]


def test_many_that_come_at_once_start_a_model_once() -> None:
    async def main() -> None:
        house = House((10, 10), limit=20)
        found = await asyncio.gather(*(house.ask(0) for _ in range(8)))
        assert found == [[7]] * 8
        assert house.engines[0].num_starts == house.served[0].num_starts == 1
        assert house.served[0].start_s.num == 1

    run(main())


def test_a_model_leaves_when_its_time_is_over_and_not_before() -> None:
    async def main() -> None:
        house = House((10, 10), (10, 10), limit=40, keep_alive_s=300)
        await house.ask(0)
        await house.ask(1)
        house.models.stay("b", math.inf)
        house.clock.wait_until(299)
        house.models.tick()
        assert house.served[0].level == AWAKE
        await house.ask(0)
        house.clock.wait_until(598)
        house.models.tick()
        assert house.served[0].leaving is None
        house.clock.wait_until(599)
        house.models.tick()
        await house.served[0].leaving  # type: ignore[misc]
        assert [one.level for one in house.served] == [GONE, AWAKE]
        assert house.served[0].stops["idle"] == 1
        assert await house.ask(0) == [7]
        assert house.engines[0].num_starts == 2

    run(main())


def test_a_request_that_runs_keeps_its_model() -> None:
    async def main() -> None:
        house = House((10, 10), (10, 10), limit=20, keep_alive_s=0.0, max_wait_s=0.01)
        house.engines[0].holds = True
        asked = asyncio.create_task(house.ask(0))
        while not house.engines[0].held:
            await asyncio.sleep(0)
        house.clock.wait_until(1000)
        house.models.tick()
        assert house.served[0].leaving is None
        with pytest.raises(RefusedError, match="waits for memory that others use") as refused:
            await house.ask(1)
        assert refused.value.status == 503
        assert refused.value.retry_after_s
        assert house.served[1].coming is None, "nobody wants it any more"
        house.engines[0].answer(house.engines[0].held[0])
        assert await asked == [7]
        assert await house.ask(1) == [7]
        assert house.served[0].stops["memory"] == 1

    run(main())


def test_a_request_that_comes_while_its_model_leaves_is_answered() -> None:
    async def main() -> None:
        house = House((10, 10), limit=20, keep_alive_s=0.0)
        for wait in range(6):
            await house.ask(0)
            house.models.tick()
            for _ in range(wait):
                await asyncio.sleep(0)
            assert await house.ask(0, look=wait % 2 == 0) == [7]
        assert await house.ask(0, look=False) == [7]

    run(main())


def test_drawn_requests_never_take_more_than_there_is_and_none_is_lost() -> None:
    for seed in range(150):
        rng = random.Random(seed)

        async def main(rng: random.Random = rng) -> None:
            sizes = [(rng.randrange(1, 9), rng.randrange(0, 4)) for _ in range(rng.randrange(2, 6))]
            house = House(
                *sizes, limit=rng.randrange(12, 24), patience_s=rng.choice([0.0, math.inf]),
                slow=lambda: rng.randrange(4), keep_alive_s=rng.choice([0.0, 3.0, math.inf]),
            )  # fmt: skip
            num = 40
            asked = []
            for n in range(num):
                asked.append(asyncio.create_task(house.ask(rng.randrange(len(sizes)), look=rng.random() < 0.9)))
                for _ in range(rng.randrange(5)):
                    await asyncio.sleep(0)
                house.clock.wait_until(n * rng.random())
                if rng.random() < 0.3:
                    house.models.tick()
                if rng.random() < 0.1:
                    one = rng.choice(house.served)
                    asyncio.create_task(house.models.sleep(one, rng.choice([DOZING, GONE])))  # noqa: RUF006
                house.check()
            assert await asyncio.gather(*asked) == [[7]] * num

        run(main())


def test_what_has_come_for_one_that_dozes_keeps_it_from_no_turn_of_another() -> None:
    async def main() -> None:
        house = House((8, 0), (8, 2), limit=13)
        await house.ask(0)
        await house.models.sleep(house.served[0], DOZING)
        assert await asyncio.gather(house.ask(1), house.ask(0, look=False)) == [[7], [7]]

    run(main())


def test_a_start_that_nobody_wants_any_more_ends_though_news_come_with_that() -> None:
    async def main() -> None:
        house = House((8, 0), (8, 0), limit=13)
        house.engines[0].holds = True
        first = asyncio.create_task(house.ask(0))
        second = asyncio.create_task(house.ask(1))
        for _ in range(20):
            await asyncio.sleep(0)
        coming = house.served[1].coming
        assert coming is not None
        second.cancel()  # which is news
        await asyncio.wait({second, coming}, timeout=5)
        assert coming.cancelled()
        house.engines[0].answer(house.engines[0].held[0])
        assert await first == [7]

    run(main())


def test_who_waits_long_gets_the_memory_of_one_that_is_always_in_use() -> None:
    async def main() -> None:
        house = House((10, 0), (10, 0), limit=10, patience_s=0.0, slow=lambda: 4)
        done = False

        async def busy() -> None:
            while not done:
                await house.ask(0)

        at_work = [asyncio.create_task(busy()) for _ in range(3)]
        for _ in range(30):
            await asyncio.sleep(0)
        assert await house.ask(1) == [7]
        done = True
        await asyncio.gather(*at_work)

    run(main())


def test_a_start_that_fails_is_told_and_not_tried_again_at_once() -> None:
    async def main() -> None:
        house = House((10, 0), (10, 0), limit=10)
        house.engines[0].problem = ModelError("/secret/path: the file is cut off")
        for _ in range(2):
            with pytest.raises(RefusedError, match="the model a could not be started") as refused:
                await house.ask(0)
            assert "secret" not in str(refused.value)
        assert house.models.held_bytes("") == 0
        assert await house.ask(1) == [7]
        with pytest.raises(EngineGoneError):
            await house.ask(0, look=False)
        house.engines[0].problem = None
        house.clock.wait_until(module.RETRY_S + 1)
        assert await house.ask(0) == [7]

    run(main())


def test_only_so_many_wait_for_a_start() -> None:
    async def main() -> None:
        house = House((10, 0), limit=10, max_waiting=2)
        found = await asyncio.gather(*(house.ask(0) for _ in range(5)), return_exceptions=True)
        refused = [one for one in found if isinstance(one, RefusedError)]
        assert [one.status for one in refused] == [429] * 3
        assert found.count([7]) == 2

    run(main())


def test_sleep_waits_for_what_runs_and_requests_wake() -> None:
    async def main() -> None:
        house = House((10, 5), (1, 4), limit=16)
        one, engine = house.served[0], house.engines[0]
        await house.ask(0)
        engine.holds = True
        asked = asyncio.create_task(house.ask(0))
        while not engine.held:
            await asyncio.sleep(0)
        sleeping = asyncio.create_task(house.models.sleep(one, DOZING))
        await asyncio.sleep(0.01)
        assert not sleeping.done()
        engine.holds = False
        later = asyncio.create_task(house.ask(0))  # waits until it sleeps, and wakes it
        await asyncio.sleep(0.01)
        assert not later.done()
        engine.answer(engine.held[0])
        await sleeping
        assert [order.kind for order in engine.orders] == ["sleep"]
        assert (await asked, await later) == ([7], [7])
        assert one.level == AWAKE
        await house.models.sleep(one, DOZING)
        assert (one.level, one.held_bytes, one.state) == (DOZING, 10, "sleeping")
        assert await house.ask(1) == [7]  # beside its weights
        assert one.level == DOZING
        assert await house.ask(0, look=False) == [7]  # for which the other leaves
        assert [one.level for one in house.served] == [AWAKE, GONE]
        one.client.state = "failed"
        await house.models.sleep(one, DOZING)
        assert one.level == GONE
        assert await house.ask(0) == [7]
        one.stops.clear()
        await house.models.sleep(one, GONE)
        assert (one.level, engine.is_up, one.stops["asked"]) == (GONE, False, 1)
        assert await house.ask(0) == [7]

    run(main())


def test_an_engine_that_was_given_up_starts_anew_a_minute_later() -> None:
    async def main() -> None:
        house = House((10, 0), limit=10)
        await house.ask(0)
        client = house.served[0].client
        client.state = "failed"
        house.models.tick()
        house.clock.wait_until(module.GIVEN_UP_S - 1)
        house.models.tick()
        assert house.served[0].leaving is None
        house.clock.wait_until(module.GIVEN_UP_S)
        house.models.tick()
        await house.served[0].leaving  # type: ignore[misc]
        assert client.state == "asleep"
        assert await house.ask(0) == [7]

    run(main())
