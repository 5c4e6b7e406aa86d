"""Single cases of the server's parts: pages of lists, rates, defaults, each without a server."""

from __future__ import annotations

import asyncio
import logging
import math
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.base.clock import VirtualClock
from penstock.base.errors import InputError
from penstock.core.messages import EngineSnapshot
from penstock.server.admission.pace import ALPHA, Pace
from penstock.server.observation.request_log import Throughput
from penstock.server.observation.stats import Stats
from penstock.server.routes import batches, models
from penstock.server.routes.embeddings import _prompts
from penstock.server.routes.files import page
from penstock.server.schema.batches import BatchObject, RequestCounts
from penstock.server.schema.embeddings import EmbeddingRequest
from penstock.server.schema.openapi import _operations
from penstock.text.defaults import model_defaults
from penstock.text.limits import Limits


def asking(**query: str) -> Any:
    return SimpleNamespace(query_params=query, state=SimpleNamespace(tenant=None))


def things(count: int) -> list[Any]:
    return [SimpleNamespace(id=f"id-{i}") for i in range(count)]


@pytest.mark.parametrize("limit", ["1", "10000"])
def test_the_smallest_and_the_largest_page_are_given(limit: str) -> None:
    shown, more = page(asking(limit=limit), things(3), 20)
    assert (len(shown), more) == (min(3, int(limit)), int(limit) < 3)


@pytest.mark.parametrize("limit", ["0", "10001", "-1", "2.5", "many"])
def test_a_page_of_another_size_is_refused(limit: str) -> None:
    with pytest.raises(InputError, match="from 1 to 10000"):
        page(asking(limit=limit), things(3), 20)


def test_pages_go_on_behind_the_last_one_of_the_page_before() -> None:
    ids = [thing.id for thing in things(5)]
    for order, want in (("desc", ids), ("asc", ids[::-1])):
        found: list[str] = []
        more = True
        while more:
            query = {"limit": "2", "order": order} | ({"after": found[-1]} if found else {})
            shown, more = page(asking(**query), things(5), 20)
            found += [one.id for one in shown]
        assert found == want
    with pytest.raises(InputError, match="nothing called"):
        page(asking(after="id-9"), things(5), 20)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_list_of_batches_names_its_first_and_its_last(count: int) -> None:
    """A client asks for what comes behind `last_id`."""
    same = {"endpoint": "/v1/completions", "input_file_id": "f", "completion_window": "24h", "status": "completed"}
    made = [BatchObject(id=f"batch-{i}", created_at=i, request_counts=RequestCounts(), **same) for i in range(count)]

    class Runner:
        async def list(self, tenant: object) -> list[BatchObject]:
            return made

    request = asking()
    request.app = SimpleNamespace(state=SimpleNamespace(server=SimpleNamespace(parts={"batches": Runner()})))
    found = msgspec.json.decode(bytes(asyncio.run(batches.list_batches(request)).body))
    ends = (made[0].id, made[-1].id) if made else (None, None)
    assert (found["first_id"], found["last_id"], found["has_more"]) == (*ends, False)


def test_defaults_of_a_model_are_what_a_request_could_ask_for() -> None:
    limits = Limits(vocab_size=10, max_model_len=100)
    given = {"temperature": 0.5, "top_k": True, "top_p": "0.9", "repetition_penalty": 2, "max_new_tokens": True}
    assert model_defaults(given, limits) == {"temperature": 0.5, "repetition_penalty": 2}
    assert model_defaults({"max_new_tokens": 7}, limits) == {"max_tokens": 7}
    assert model_defaults({"max_new_tokens": 700}, limits) == {"max_tokens": 100}
    assert model_defaults({"max_new_tokens": 0, "temperature": -1}, limits) == {}


def test_a_speed_is_first_what_was_seen_and_then_a_mean_that_favours_the_past() -> None:
    pace = Pace()
    pace.finished(100.0)
    pace.observe(EngineSnapshot(time_s=0, step=0, num_running=1, counters={}))
    pace.observe(EngineSnapshot(time_s=1, step=1, num_running=1, counters={"num_sampled_tokens": 10.0}))
    assert pace.endings_s(1.0, 1) == pytest.approx(10.0), "100 tokens at 10 a second"
    pace.finished(200.0)
    assert pace.endings_s(1.0, 1) == pytest.approx((100 + ALPHA * 100) / 10)


def test_the_description_names_every_method_but_head() -> None:
    """HEAD comes with every GET; nobody reads about it twice."""
    found = [(path, method) for path, method, _ in _operations(models)]
    assert ("/v1/models", "GET") in found
    assert "HEAD" not in {method for _, method in found}


def test_nothing_to_embed_is_refused_with_the_count() -> None:
    """An empty list holds neither texts nor token ids."""
    limits = SimpleNamespace(context=(64, "the context"), pooler=None)
    service = SimpleNamespace(limits=limits, encode_all=print)
    server = SimpleNamespace(service=service, config=SimpleNamespace(max_prompts=8))
    body = EmbeddingRequest(input=[])
    caller: Any = SimpleNamespace(server=server, timeout_s=None, tenant=None, arrival_s=0.0)
    with pytest.raises(InputError, match="input has 0 entries; 1 to 8"):
        asyncio.run(_prompts(caller, body))


@pytest.mark.parametrize(
    ("asked", "hit", "rate"), [(0.0, 0.0, "0.0%"), (200.0, 50.0, "25.0%"), (9.0, math.nan, "0.0%")]
)
def test_a_hit_rate_of_nothing_and_one_that_is_unknown_are_zero(
    asked: float, hit: float, rate: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.throughput")
    clock = VirtualClock()
    client = SimpleNamespace(snapshot=EngineSnapshot(num_running=1, kv_total=10, kv_used=5))
    now = {"num_prefix_queries_tokens": 0.0, "num_prefix_hit_tokens": 0.0}
    stats: Any = SimpleNamespace(clock=clock, client=client, num_generation_tokens=0, num_prompt_tokens=0,
                                 num_cached_tokens=0, counter=now.__getitem__)  # fmt: skip
    throughput = Throughput(stats, every=1)
    now.update(num_prefix_queries_tokens=asked, num_prefix_hit_tokens=hit)
    clock.advance(1.0)
    throughput.tick()
    (record,) = caplog.records
    assert record.getMessage().endswith(f"Prefix cache hit rate: {rate}")


def test_a_point_of_the_history_says_what_came_in_its_time() -> None:
    """Each figure of its own: 40 tokens, 300 of prompts, 100 of them cached, two first tokens, ten gaps."""
    clock = VirtualClock()
    client: Any = SimpleNamespace(info=None, on_message=[], on_finish=[], snapshot=EngineSnapshot(
        num_running=3, num_waiting=2, kv_used=7))  # fmt: skip
    stats = Stats(client, clock)
    for _ in range(2):
        clock.advance(2.0)
        stats.num_generation_tokens += 40
        stats.num_prompt_tokens += 300
        stats.num_cached_tokens += 100
        stats.ttft.observe(1.5, 2)
        stats.itl.observe(0.05, 10)
        point = stats.tick()
    assert (point.num_running, point.num_waiting, point.kv_used) == (3, 2, 7)
    assert (point.generation_tokens_s, point.prompt_tokens_s) == (20.0, 100.0)
    assert (point.ttft_s, point.tpot_s) == pytest.approx((1.5, 0.05))
    clock.advance(1.0)
    quiet = stats.tick()
    assert (quiet.generation_tokens_s, quiet.ttft_s, quiet.tpot_s) == (0.0, None, None)
    assert [p["generation_tokens_s"] for p in stats.history(2)] == [20.0, 0.0]
