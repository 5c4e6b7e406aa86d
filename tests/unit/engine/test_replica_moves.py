"""H04: a request that leaves a living engine and comes back: what the engine said of it before is nobody's news."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from penstock.base.clock import VirtualClock
from penstock.base.errors import RefusedError
from penstock.core.messages import EngineInfo, EngineSnapshot, Outputs
from penstock.core.output import EngineOutput
from penstock.core.request import FENCED, Abort, Control, Intake, Request
from penstock.core.sampling import SamplingParams, TokenRules
from penstock.core.weight_swap import WeightsOrder
from penstock.engine.frontend import EngineClient
from penstock.engine.link import Listener
from penstock.engine.membership import Membership
from penstock.engine.placement import EnginePlacement
from penstock.route import ROUTERS


class Heard:
    """An engine that only remembers what it was sent."""

    weights: WeightsOrder | None = None

    def __init__(self) -> None:
        self.items: list[Intake] = []

    async def start(self, listener: Listener) -> None: ...

    def send(self, items: Sequence[Intake]) -> None:
        self.items += items

    def progress_age_s(self) -> float:
        return 0.0

    async def close(self) -> None: ...


def two() -> tuple[EngineClient, list[Heard]]:
    links = [Heard(), Heard()]
    placing = EnginePlacement(ROUTERS.get("least-requests")())
    client = EngineClient(links[0], None, VirtualClock(), further=links[1:], placing=placing)
    for replica in client.replicas:
        replica.on_up(EngineInfo(vocab_size=100, max_model_len=64, block_size=16), 0)
    return client, links


def said(*token_ids: int, end: str | None = None) -> EngineOutput:
    return EngineOutput(request_id="r", index=0, token_ids=list(token_ids), finish_reason=end)


def test_H04_what_an_engine_said_before_the_fence_is_dropped() -> None:
    client, links = two()
    first, second = client.replicas
    params = SamplingParams(max_tokens=8, detokenize=False)
    request = Request(request_id="r", prompt_token_ids=[1, 2], rules=TokenRules(), max_tokens=8)
    stream = client.submit(request, params)
    assert stream.replica is first
    first.on_outputs(Outputs(0, [said(5)]))
    first.draining = True
    client.move_all(first)
    assert stream.replica is second
    abort, fence = links[0].items[-2:]
    assert isinstance(abort, Abort)
    assert isinstance(fence, Control)
    assert fence.kind == "fence"
    first.draining, second.draining = False, True
    client.move_all(second)  # and back, before the first engine has heard of anything
    assert stream.replica is first
    again = links[0].items[-1]
    assert isinstance(again, Request)
    assert again.resume is not None
    assert again.resume.samples == [(0, [5])]
    first.on_outputs(Outputs(0, [said(6)]))
    first.on_outputs(Outputs(0, [said(7), said(end="moved")]))
    assert client.output("r").outputs[0].token_ids == [5], "those are of the run that was given up"
    fenced = EngineOutput(request_id=fence.request_id, index=0, finish_reason=FENCED)
    first.on_outputs(Outputs(0, [fenced, said(6)]))
    second.on_outputs(Outputs(0, [said(9)]))
    assert client.output("r").outputs[0].token_ids == [5, 6]
    assert not first.leaving
    stream.abort()
    loads = client.placing._loads.values()  # type: ignore[union-attr]
    assert all(load.requests == load.tokens == 0 for load in loads)


def test_H04_an_engine_that_is_asleep_is_left_alone() -> None:
    client, _ = two()
    client.state = "asleep"
    group = Membership(client, Heard, 2)
    for action in (group.restart(0), group.drain(1), group.remove(1)):
        with pytest.raises(RefusedError, match=r"engine . is asleep: it starts anew with the next request"):
            asyncio.run(action)  # type: ignore[arg-type]


def test_H04_counters_of_a_removed_engine_stay() -> None:
    client, _ = two()
    for number, replica in enumerate(client.replicas):
        replica.on_outputs(Outputs(0, snapshot=EngineSnapshot(counters={"num_steps": 10.0 + number}, num_running=1)))
    client.replicas[0].num_restarts = 2
    client.leaves(client.replicas[0])
    assert client.snapshot.counters == {"num_steps": 21.0}
    assert client.snapshot.num_running == 1, "it runs nothing any more"
    assert client.num_restarts == 2
    assert client.replicas_open == client.replicas


@pytest.mark.parametrize("state", ["ready", "restarting"])
def test_H04_a_drained_engine_is_chosen_where_no_other_can_be(state: str) -> None:
    client, _ = two()
    first, second = client.replicas
    first.draining, second.state = True, "failed"
    first.state = state
    request = Request(request_id="r", prompt_token_ids=[1], rules=TokenRules(), max_tokens=8)
    assert client.submit(request, SamplingParams(max_tokens=8, detokenize=False)).replica is first
