"""B15, H28 with three engine processes, one for prompts and two that decode: who is refused, where long answers go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from penstock.base.errors import ConfigError
from penstock.config import serve_from_kwargs
from penstock.route import ROUTERS
from penstock.server.live import LiveServer
from tests.api.test_replicas import USUAL

POOLS: dict[str, Any] = {
    "data_parallel_size": 3, "replica_roles": "prefill=1,decode=2", "block_size": 16, "kv_load_policy": "wait",
    "max_model_len": 512, "ops": "auto", "max_num_seqs": 2, "admin_api_key": "boss", "max_queue_wait": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("store") / "blocks"
    how = USUAL | POOLS | {"kv_offload": f"disk:{folder},200MiB", "early_rejection": "predicted"}
    with LiveServer(serve_from_kwargs(**how)) as found:
        yield found


def ask(url: str, n: int, max_tokens: int, ids: list[int] | None = None) -> httpx.Response:
    prompt = ids or [3 + (n * 131 + 7 * i) % 4000 for i in range(100)]
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return httpx.post(url + "/v1/completions", json=body, timeout=120)


def counted(live: LiveServer, name: str) -> list[float]:
    """Of each engine, when they have told."""
    assert live.server is not None
    time.sleep(0.5)
    return [replica.counted.counters.get(name, 0) for replica in live.server.client.replicas]


def idle(live: LiveServer) -> None:
    assert live.server is not None
    for _ in range(600):
        if not live.server.client.num_live and not any(r.snapshot.num_running for r in live.server.client.replicas):
            return
        time.sleep(0.05)
    pytest.fail("requests do not end")


def test_B15_no_refused_request_has_cost_a_prompt(live: LiveServer) -> None:
    """Twelve come at once, and there are four places to decode."""
    for n in range(3):
        assert ask(live.url, 900 + n, 40).status_code == 200  # steps are measured
    before = counted(live, "num_scheduled_tokens")
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda n: ask(live.url, n, 300), range(12)))
    idle(live)
    taken = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(taken) + len(refused) == 12
    assert len(taken) >= 4, "there is room for so many"
    assert len(refused) >= 4
    for answer in refused:
        error = answer.json()["error"]
        assert error["code"] == "early"
        assert "there is room for 4 in all" in error["message"]
        assert int(answer.headers["retry-after"]) >= 1
    after = counted(live, "num_scheduled_tokens")
    computed = [b - a for a, b in zip(before, after, strict=True)]
    assert computed[0] == 100 * len(taken), "the engine for prompts has computed those that were taken on, and no more"
    assert sum(computed[1:]) <= len(taken) * (299 + 16), "and who decodes computes none"
    lines = httpx.get(live.url + "/metrics").text.splitlines()
    told = [line for line in lines if "penstock:admission_rejections_total{" in line and 'reason="early"' in line]
    assert [float(line.rsplit(" ", 1)[1]) for line in told] == [len(refused)]
    shown = httpx.get(live.url + "/internal/state", headers={"authorization": "Bearer boss"}).json()["early_rejection"]
    assert shown == {"mode": "predicted", "places": 4, "decoding": 0, "prompts": 0, "refused": len(refused)}


def test_B15_who_comes_again_when_told_is_served(live: LiveServer) -> None:
    idle(live)
    with ThreadPoolExecutor(16) as pool:
        asked: list[Future[httpx.Response]] = []
        while not (refused := [a.result() for a in asked if a.done() and a.result().status_code == 429]):
            assert len(asked) < 200, "nobody is refused"
            asked.append(pool.submit(ask, live.url, 100 + len(asked), 400))
            time.sleep(0.02)
        began_s = time.monotonic()
        for _ in range(3):  # times are those of a busy machine
            time.sleep(int(refused[0].headers["retry-after"]))
            again = ask(live.url, 300, 5)
            if again.status_code == 200:
                break
        assert again.status_code == 200
        assert time.monotonic() - began_s < 60


def test_H28_long_answers_are_spread_over_those_who_decode(live: LiveServer) -> None:
    """The same requests by chance and by lengths: how uneven what the two have sampled is. Six coins come to 1.3 in the
    mean, the four draws here to 1.24."""
    assert live.server is not None
    placing = live.server.client.placing
    assert placing is not None
    idle(live)
    gate = live.server.parts["admission"]
    usual, found, refusing, gate._early = placing.router, {}, gate._early, None  # all are to be there at once
    for name, seeds in (("random", (4, 5, 6, 7)), ("length-buckets", (4,))):
        shares = []
        for seed in seeds:
            placing.router = ROUTERS.get(name)()
            placing.router._rng.seed(seed)  # type: ignore[attr-defined]
            shares.append(uneven(live))
        found[name] = sum(shares) / len(shares)
    gate._early = refusing
    placing.router = usual
    assert found["length-buckets"] <= 1.1 < found["random"], found


def uneven(live: LiveServer) -> float:
    """Of the two that decode, what one has sampled at most over the mean: 18 requests, a third of them long."""
    before = counted(live, "num_sampled_tokens")
    with ThreadPoolExecutor(18) as pool:
        asked = []
        for n in range(18):
            asked.append(pool.submit(ask, live.url, 400 + n, 240 if n % 3 == 0 else 8))
            time.sleep(0.01)
    assert {one.result().status_code for one in asked} == {200}
    idle(live)
    sampled = [b - a for a, b in zip(before, counted(live, "num_sampled_tokens"), strict=True)][1:]
    return max(sampled) * 2 / sum(sampled)


def test_B15_what_one_has_computed_is_found_by_all_and_by_itself_alone_without_a_memory_in_common(
    live: LiveServer,
) -> None:
    """Six requests with one beginning go to two engines for prompts in turn."""
    assert live.server is not None
    client = live.server.client
    shared = [[5 + (3 * i) % 4000 for i in range(160)] + [9 + 11 * n] * 20 for n in range(6)]
    idle(live)
    usual, client.placing.router = client.placing.router, ROUTERS.get("round-robin")()  # type: ignore[union-attr]
    client.handover.set_roles({0: "prefill", 1: "prefill", 2: "decode"})
    common = [ask(live.url, 0, 4, ids).json()["usage"] for ids in shared]
    client.handover.set_roles({0: "prefill", 1: "decode", 2: "decode"})
    client.placing.router = usual  # type: ignore[union-attr]
    alone = USUAL | {"data_parallel_size": 2, "block_size": 16, "ops": "auto", "route_policy": "round-robin"}
    with LiveServer(serve_from_kwargs(**alone)) as other:
        local = [ask(other.url, 0, 4, ids).json()["usage"] for ids in shared]
    found = [sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages) for usages in (common, local)]
    assert found[0] == 5 * 160, "all but the first one"
    assert found[1] == 4 * 160, "all but the first one of each engine"


def test_early_rejection_needs_roles() -> None:
    with pytest.raises(ConfigError, match="early_rejection: it looks at engines that decode"):
        LiveServer(serve_from_kwargs(**USUAL, early_rejection="now", data_parallel_size=2)).__enter__()
