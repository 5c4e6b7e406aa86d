"""Promised times at the door: what is predicted, what is refused and when it may come again; then on a real server."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from statistics import fmean

import httpx
import msgspec
import pytest

from penstock.base.errors import InputError
from penstock.config import serve_from_kwargs
from penstock.core.request import Request
from penstock.server.admission.forecast import EngineSpeed, Generating, QueueForecast, Wait
from penstock.server.admission.seen import PIECE, SeenPrefixes
from penstock.server.live import LiveServer
from tests.api.conftest import bundled
from tests.api.gate_sim import Fate, GateSim
from tests.engine.policy_sim import ask, poisson

SPEED = EngineSpeed(slots=2, kv_tokens=10_000, max_chunk=512, decode=[0.02], prefill_token_s=0.001, min_chunk=16)
OPEN = {"max_queue_wait": 0.0, "max_num_queued_reqs": 0}


def heavy_tailed(
    seed: int, rate_hz: float, seconds: float, ttft_s: float | None = None, tpot_s: float | None = None, most: int = 900
) -> list[Request]:
    """Log-normal lengths; arrivals from second 100 on, when a GateSim's clock begins."""
    rng = random.Random(seed)
    load = []
    for t in poisson(rng, rate_hz, seconds):
        prompt = min(most, max(16, int(rng.lognormvariate(4.7, 1.0))))
        load.append(ask(rng, 100 + t, prompt, min(256, max(2, int(rng.lognormvariate(3.5, 0.8))))))
    return [msgspec.structs.replace(r, slo_ttft_s=ttft_s, slo_tpot_s=tpot_s) for r in load]


# -- playing the queue forward ---------------------------------------------------------------------------------------


def test_an_empty_engine_takes_what_the_prompt_takes() -> None:
    line = QueueForecast(SPEED, [], [])
    assert line.empty
    assert line.first_s(300, 1) == pytest.approx(0.3, abs=0.02)


def test_who_waits_for_a_place_waits_for_an_ending() -> None:
    """Two places, taken by one with 10 tokens left and one with 100."""
    line = QueueForecast(SPEED, [Generating(10, 1, 100), Generating(100, 1, 100)], [])
    assert line.start(100, 1) == (pytest.approx(10 * 0.02), 1)
    assert QueueForecast(SPEED, [Generating(10, 1, 100)], []).start(100, 1)[0] == 0


def test_memory_is_a_limit_too() -> None:
    line = QueueForecast(SPEED, [Generating(10, 1, 9_950)], [])
    assert line.start(100, 1)[0] == pytest.approx(10 * 0.02)
    assert line.start(40, 1)[0] == 0


def test_prompts_ahead_are_computed_first_and_share_steps() -> None:
    many = EngineSpeed(slots=100, kv_tokens=10_000, max_chunk=512, decode=[0.02], prefill_token_s=0.0001)
    one = QueueForecast(many, [], [Wait(512, 1, 50, 600)]).start(10, 1)[0]
    assert one == pytest.approx(0.0512, rel=0.1)
    short = QueueForecast(many, [Generating(50, 1, 10)], [Wait(8, 1, 50, 60) for _ in range(64)]).start(10, 1)[0]
    assert short < 3 * (512 * 0.0001 + 0.02), "64 prompts of 8 tokens are a step or two, not 64"


def test_who_is_due_first_goes_first_and_makes_nobody_late() -> None:
    waits = [Wait(100, 1, 5, 110, due_s=0.5), Wait(100, 1, 5, 110, due_s=5.0)]
    line = QueueForecast(SPEED, [], waits, by_due=True)
    assert line.first_s(100, 1, due_s=0.1) < line.first_s(100, 1, due_s=1.0) < line.first_s(100, 1, due_s=9.0)
    assert line.makes_late(450, 1, due_s=0.4)
    assert not line.makes_late(450, 1, due_s=1.0)
    assert not line.makes_late(450, 1, due_s=9.0)


def test_when_it_is_possible_is_when_the_queue_has_become_short_enough() -> None:
    line = QueueForecast(SPEED, [Generating(100, 1, 100), Generating(100, 1, 100)], [])
    first_s = line.first_s(100, 1)
    assert line.possible_in_s(100, 1, ttft_s=0.5) == pytest.approx(first_s - 0.5)
    assert line.possible_in_s(100, 1, ttft_s=first_s + 1) == 0


def test_a_pace_waits_for_endings() -> None:
    speed = paced(decode=[0.02, 0.03, 0.05])
    line = QueueForecast(
        speed, [Generating(10, 1, 10), Generating(20, 1, 10), Generating(30, 1, 10), Generating(1000, 1, 10)], []
    )
    assert line.possible_in_s(10, 1, math.inf, tpot_s=0.031) > 0.5


def paced(decode: list[float]) -> EngineSpeed:
    return EngineSpeed(slots=100, kv_tokens=10_000, max_chunk=512, decode=decode, prefill_token_s=0.001)


def test_beginnings_that_were_computed_are_remembered() -> None:
    seen = SeenPrefixes(4 * PIECE)
    text = list(range(3 * PIECE + 5))
    assert seen.num_known(b"", text) == 0
    seen.add(b"", text)
    assert seen.num_known(b"", [*text, 1, 2]) == 3 * PIECE
    assert seen.num_known(b"another", text) == 0
    assert seen.num_known(b"", text[:PIECE]) == PIECE - 1, "a token is always left to compute"
    seen.add(b"", list(range(1000, 1000 + 4 * PIECE)))
    assert seen.num_known(b"", text) == 0, "others have its room now"


# -- the gate before the real scheduler, on the virtual clock --------------------------------------------------------


@pytest.mark.parametrize("rate_hz", [4.0, 9.0])
def test_predictions_are_nearer_than_those_of_rates_alone(rate_hz: float) -> None:
    sim = GateSim(**OPEN)
    fates = [f for f in sim.run(heavy_tailed(1, rate_hz, 20)) if f.predicted_s is not None][10:]
    new = fmean(abs((f.predicted_s or 0) - f.ttft_s) for f in fates)
    old = fmean(abs(f.old_s - f.ttft_s) for f in fates)
    mean = fmean(f.ttft_s for f in fates)
    print(f"{rate_hz:g}/s: mean TTFT {mean:.3f} s; mean error {new:.3f} s, of rates alone {old:.3f} s")
    assert new < 0.6 * old
    assert new < 0.2 * mean + 0.03
    ratios = sim.gate.promises.ratios
    assert ratios.num >= len(fates)


def test_what_is_taken_on_is_in_time_and_the_rest_is_refused() -> None:
    """Twice as much as the engine can serve: first come, first served keeps the promise to one in seven."""

    def kept(fates: list[Fate]) -> float:
        return fmean(f.refused is None and f.ttft_s <= 1.0 for f in fates)

    load = heavy_tailed(1, 12, 20)
    promised = [msgspec.structs.replace(r, slo_ttft_s=1.0) for r in load]
    without = kept(GateSim(slots=32, **OPEN).run(load))
    shares = {}
    for policy in ("fcfs", "slo"):
        fates = GateSim(policy, slots=32, **OPEN).run(promised)
        taken = [f for f in fates if f.refused is None]
        shares[policy] = (kept(fates), kept(taken))
        assert all(f.refused.code == "slo" and f.refused.status == 429 for f in fates if f.refused is not None)
    print(f"without a promise {without:.3f}; with one, of all and of those taken on: {shares}")
    assert without < 0.3
    for of_all, of_taken in shares.values():
        assert of_all > 2 * without
        assert of_taken > 0.9


@pytest.mark.parametrize("ttft_s", [1.0, 2.0])
@pytest.mark.parametrize("policy", ["fcfs", "slo"])
def test_who_comes_again_at_the_time_it_was_told_is_taken_on_and_in_time(policy: str, ttft_s: float) -> None:
    """And who comes at once is not (first come, first served): the time is no excuse."""
    for seed in (1, 2, 3):
        sim = GateSim(policy, **OPEN)
        for request in heavy_tailed(seed, 14, 30, ttft_s):
            fate = sim.ask_at(request)
            if fate.refused is not None and sim.clock.now() > 105:
                break
        assert fate.refused is not None
        again = msgspec.structs.replace(request, request_id="at once")
        assert policy != "fcfs" or sim.ask(again).refused is not None
        wait_s = fate.refused.retry_after_s
        assert wait_s is not None
        again = msgspec.structs.replace(request, request_id="again", arrival_s=sim.clock.now() + wait_s)
        came = sim.ask_at(again)
        assert came.refused is None, f"told to come in {wait_s} s, and then in {came.refused.retry_after_s} s"
        sim.run([])
        assert came.ttft_s <= ttft_s


def test_a_pace_that_those_who_run_would_lose_is_refused() -> None:
    sim = GateSim(slots=64, **OPEN)
    rng = random.Random(7)
    sim.run([ask(rng, 100, 16, 40 + n) for n in range(64)])  # how long steps of many are is known
    now = sim.clock.now()
    load = [msgspec.structs.replace(ask(rng, now, 16, 200), slo_tpot_s=0.03) for _ in range(64)]
    fates = [sim.ask(request) for request in load]
    taken = [f for f in fates if f.refused is None]
    sim.run([])
    assert 2 <= len(taken) < 64
    assert fmean(f.tpot_s <= 0.033 for f in taken) > 0.9


def test_what_was_computed_lately_is_expected_to_be_found() -> None:
    """A conversation that goes on: 1,200 tokens take 0.6 s, and a promise of 0.3 s is possible once they are known."""
    sim = GateSim(**OPEN)
    sim.run(heavy_tailed(1, 4, 5))
    rng = random.Random(3)
    first = msgspec.structs.replace(ask(rng, sim.clock.now(), 1200, 4), slo_ttft_s=0.3)
    with pytest.raises(InputError, match="1200 prompt tokens"):
        sim.ask(first)
    sim.run([msgspec.structs.replace(first, slo_ttft_s=None)])
    again = msgspec.structs.replace(first, request_id="again", arrival_s=sim.clock.now())
    fate = sim.ask(again)
    sim.run([])
    assert fate.refused is None
    assert fate.ttft_s <= 0.3


def test_a_promise_of_the_server_that_a_prompt_cannot_keep_is_none() -> None:
    """The client has named nothing: it gets no error, and a long prompt is served."""
    sim = GateSim(ttft_slo=0.3, **OPEN)
    sim.run(heavy_tailed(1, 4, 5))
    rng = random.Random(3)
    fate = sim.ask(msgspec.structs.replace(ask(rng, sim.clock.now(), 1200, 4), slo_ttft_s=0.3))
    assert fate.refused is None


# -- a real server ---------------------------------------------------------------------------------------------------

ASK = {"prompt": "Once upon a time", "max_tokens": 4, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def promising() -> Iterator[LiveServer]:
    config = serve_from_kwargs(
        model=bundled(), port=0, ops="blas", engine_in_process=True, max_model_len=512, num_gpu_blocks_override=256,
        max_num_seqs=4, scheduling_policy="slo", ttft_slo=60.0, tpot_slo=30.0,
    )  # fmt: skip
    with LiveServer(config) as server:
        yield server


def posted(server: LiveServer, path: str, body: dict[str, object], **headers: str) -> httpx.Response:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(server.url + path, json=body, headers=sent, timeout=60)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", ASK),
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", CHAT),
        ("/v1/responses", {"input": "Hi"}),
    ],
)
def test_times_that_nobody_can_keep_are_told_what_is_possible(
    promising: LiveServer, path: str, body: dict[str, object]
) -> None:
    assert posted(promising, path, body).status_code == 200
    for value in (0, -1, 1e-6, "soon", True, 1e12, None):
        for name in ("ttft_slo_ms", "tpot_slo_ms"):
            answer = posted(promising, path, body | {name: value})
            assert answer.status_code == (200 if value is None else 400), (name, value, answer.text)
            if value is not None:
                assert name in answer.text
    said = posted(promising, path, body | {"ttft_slo_ms": 1e-6}).json()["error"]["message"]
    assert "here with nothing else to do" in said
    answer = posted(promising, path, body, x_ttft_slo_ms="soon")
    assert (answer.status_code, "x-ttft-slo-ms" in answer.text) == (400, True)
    assert posted(promising, path, body, x_tpot_slo_ms="-3").status_code == 400


def test_promises_reach_the_engine_and_are_counted(promising: LiveServer) -> None:
    assert promising.server is not None
    stats = promising.server.parts["stats"]
    before = dict(stats.ttft_slo)
    assert posted(promising, "/v1/completions", ASK).status_code == 200
    assert stats.ttft_slo["yes"] == before["yes"] + 1, "the server's own promise"
    assert posted(promising, "/v1/completions", ASK | {"priority": 1}).status_code == 200
    assert stats.ttft_slo["yes"] == before["yes"] + 1, "none to lower classes"
    text = httpx.get(promising.url + "/metrics").text
    for name in (
        "penstock:request_ttft_slo_total", "penstock:predicted_time_to_first_token_seconds_bucket",
        "penstock:time_to_first_token_by_prediction_bucket", "penstock:time_to_first_token_error_seconds_bucket",
    ):  # fmt: skip
        assert name in text
    assert promising.server.parts["admission"].promises.ratios.num > 0


def test_a_refusal_has_the_shape_that_clients_know(promising: LiveServer) -> None:
    """The engine is made to seem slow: a second for each prompt token."""
    assert promising.server is not None
    gate = promising.server.parts["admission"]
    real = gate.promises.speed
    busy = EngineSpeed(slots=1, kv_tokens=1000, max_chunk=64, decode=[1.0], prefill_token_s=1.0)
    try:
        gate.promises.speed = lambda share=1.0: busy
        line = QueueForecast(busy, [Generating(50, 1, 10)], [])
        gate.promises.whole_line = lambda entries, now: line
        answer = posted(promising, "/v1/completions", ASK | {"ttft_slo_ms": 20_000})
        messages = posted(promising, "/v1/messages", CHAT | {"ttft_slo_ms": 20_000})
    finally:
        gate.promises.speed = real
        del gate.promises.whole_line
    assert answer.status_code == messages.status_code == 429
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("rate_limit_error", "slo")
    assert 30 <= int(answer.headers["retry-after"]) <= 60
    assert messages.json()["error"]["type"] == "rate_limit_error"
    assert gate.refused["slo"] == 2
