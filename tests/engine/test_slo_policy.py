"""Policy `slo`, on the virtual clock: more are in time than by order of arrival, streams keep their pace, nobody
starves."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import msgspec
import pytest

from penstock.base.errors import ConfigError
from penstock.core.request import Request
from penstock.core.sequence import Sequence
from penstock.core.step_shape import StepShape
from penstock.sched.costs import LearntCosts, step_s
from penstock.sched.policy import make_policy
from penstock.sched.policy.slo import WITHOUT
from tests.engine.policy_sim import LinearTimer, Played, ask, play, poisson, quantile

CPU = LinearTimer(0.02, 0.0005)
MACHINE = {"timer": CPU, "num_blocks": 2000, "max_num_seqs": 32, "budget": 512}


def heavy_tailed(seed: int, rate_hz: float, seconds: float) -> list[Request]:
    rng = random.Random(seed)
    load = []
    for t in poisson(rng, rate_hz, seconds):
        prompt = min(1500, max(16, int(rng.lognormvariate(4.7, 1.0))))
        load.append(ask(rng, t, prompt, min(256, max(2, int(rng.lognormvariate(3.5, 0.8))))))
    return load


def tpot_s(played: Played, request: Request) -> float:
    span_s = played.end_s[request.request_id] - played.first_s[request.request_id]
    return span_s / max(1, request.max_tokens - 1)


def in_time(played: Played, load: Seq[Request], ttft_s: float = 1.0, pace_s: float = 0.1) -> float:
    good = [t <= ttft_s and tpot_s(played, r) <= pace_s for r, t in zip(load, played.ttft_s(load), strict=True)]
    return sum(good) / len(good)


@pytest.mark.parametrize("seed", [1, 2])
def test_more_requests_are_in_time_in_an_overload(seed: int) -> None:
    """Half as much again as the engine can serve."""
    load = heavy_tailed(seed, 10, 20)
    runs = {policy: play(policy, load, **MACHINE) for policy in ("fcfs", "slo")}
    shares = {policy: in_time(played, load) for policy, played in runs.items()}
    print(seed, shares, {policy: round(played.makespan_s, 1) for policy, played in runs.items()})
    assert shares["slo"] > shares["fcfs"] + 0.2
    assert runs["slo"].makespan_s < 1.1 * runs["fcfs"].makespan_s


def test_who_is_due_first_goes_first() -> None:
    """Ten came before it, with more time: it overtakes those that have not begun."""
    rng = random.Random(1)
    patient = [msgspec.structs.replace(ask(rng, 0.0, 400, 4), slo_ttft_s=20.0) for _ in range(10)]
    urgent = msgspec.structs.replace(ask(rng, 0.05, 400, 4), slo_ttft_s=0.6)
    load = [*patient, urgent]
    first = {policy: play(policy, load, **MACHINE).first_s[urgent.request_id] for policy in ("slo", "fcfs")}
    print(first)
    assert first["slo"] <= 0.65 < 2 < first["fcfs"]


def test_who_cannot_make_it_lets_those_pass_who_can() -> None:
    """A prompt that takes longer than all the time it has, and short ones that would be late behind it."""
    rng = random.Random(2)
    hopeless = ask(rng, 0.0, 1500, 4)
    seen = [ask(rng, -5 + 0.4 * n, 100, 4) for n in range(10)]  # what steps take is known by then
    short = [ask(rng, 0.001 * n, 100, 4) for n in range(1, 9)]
    load = sorted([*seen, hopeless, *short], key=lambda r: r.arrival_s)
    load = [msgspec.structs.replace(r, arrival_s=r.arrival_s + 5, slo_ttft_s=0.74) for r in load]
    kept = {}
    for policy in ("slo", "fcfs"):
        played = play(policy, load, **MACHINE)
        kept[policy] = sum(t <= 0.74 for t in played.ttft_s(load))
    print(kept)
    assert kept["slo"] >= len(load) - 2
    assert kept["fcfs"] < len(load) - 6


def test_streams_keep_their_pace_beside_long_prompts() -> None:
    rng = random.Random(3)
    streams = [ask(rng, 0.0, 32, 200) for _ in range(4)]
    long = [ask(rng, 1.0 + 0.1 * n, 1400, 2) for n in range(10)]
    load = [*streams, *(msgspec.structs.replace(r, slo_ttft_s=30.0) for r in long)]
    load = [msgspec.structs.replace(r, slo_tpot_s=0.04) for r in load]
    worst = {}
    for policy in ("slo", "fcfs"):
        played = play(policy, load, **MACHINE)
        worst[policy] = max(tpot_s(played, r) for r in streams)
    print(worst)
    assert worst["slo"] <= 0.0401
    assert worst["fcfs"] > 0.05


def test_a_pace_that_cannot_be_kept_stops_no_prefill() -> None:
    rng = random.Random(4)
    streams = [msgspec.structs.replace(ask(rng, 0.0, 32, 100), slo_tpot_s=0.001) for _ in range(4)]
    late = ask(rng, 1.0, 1000, 2)
    played = play("slo", [*streams, late], **MACHINE)
    assert played.first_s[late.request_id] - 1.0 < 0.8


def test_nobody_starves() -> None:
    """One who could never be in time has its turn although those who can keep coming."""
    rng = random.Random(5)
    hopeless = ask(rng, 1.0, 1500, 4)
    stream = [ask(rng, t, 150, 8) for t in poisson(rng, 10, 40)]
    load = sorted([hopeless, *stream], key=lambda r: r.arrival_s)
    load = [msgspec.structs.replace(r, slo_ttft_s=0.7) for r in load]
    waited = {}
    for policy in ("slo:patience_s=2", "slo:patience_s=1000"):
        played = play(policy, load, **MACHINE)
        waited[policy] = played.first_s[hopeless.request_id] - 1.0
    print(waited)
    assert waited["slo:patience_s=2"] < 8
    assert waited["slo:patience_s=1000"] > 30, "nobody would starve anyhow"


def test_a_class_puts_deadlines_back() -> None:
    policy = make_policy("slo:class_s=30")
    rng = random.Random(6)
    request = ask(rng, 10.0, 20, 4)

    def due(**fields: object) -> float:
        seq = Sequence(1, msgspec.structs.replace(request, **fields), 0)
        return policy.key(seq)[0] / 1e6

    assert due() == 11.0
    assert due(slo_ttft_s=0.25) == 10.25
    assert due(slo_ttft_s=0.25, priority=1) == 40.25
    assert due(priority=-1) == -19.0


@pytest.mark.parametrize("knob", ["ttft_s=-1", "tpot_s=-1", "turns=0", "class_s=0", "min_chunk=0", "window=0"])
def test_knobs_that_make_no_sense_are_refused(knob: str) -> None:
    with pytest.raises(ConfigError, match="slo"):
        make_policy(f"slo:{knob}")


def test_what_steps_take_is_learnt_apart_for_decodes_and_prompts() -> None:
    costs = LearntCosts()
    for _ in range(20):
        costs.observe(4, 0, 0.02)
    costs.observe(4, 200, 0.12)
    assert costs.prefill_token_s == pytest.approx(0.0005)
    for _ in range(500):
        costs.observe(4, 0, 0.02)
    assert costs.prefill_token_s == pytest.approx(0.0005), "pure decoding says nothing of prompts"
    costs.observe(4, 0, 10.0)
    assert costs.decode_s(4) < 0.03, "one step that stands out"
    assert step_s([0.01, 0.0, 0.03], 1) == 0.01
    assert 0.01 < step_s([0.01, 0.0, 0.03], 3) < 0.03
    assert step_s([0.01, 0.0, 0.03], 64) == 0.03
    assert step_s([], 5) == 0.0


def test_p99_of_first_tokens_is_told_beside_the_share() -> None:
    """The price: those that go behind wait longer than they would have otherwise, by a bounded time."""
    load = heavy_tailed(1, 8, 20)
    times = {policy: quantile(play(policy, load, **MACHINE).ttft_s(load), 0.99) for policy in ("fcfs", "slo")}
    print(times)
    assert times["slo"] < 5 * times["fcfs"]


class TileTimer(LinearTimer):
    """Steps of more than 8 tokens cost as much as the next multiple of 32."""

    def step_s(self, shape: StepShape) -> float:
        tokens = shape.num_tokens
        return 0.02 + 0.005 * tokens if tokens <= 8 else 0.02 + 0.1 * -(-tokens // 32)


TILES = {"timer": TileTimer(), "num_blocks": 2000, "max_num_seqs": 32, "budget": 32}


def test_whole_pieces_keep_the_pace_and_get_prompts_done_sooner() -> None:
    """A step with a tile takes 0.12 s, and 0.1 s are promised: a tile now and then is worth more than parts of it."""
    rng = random.Random(3)
    streams = [ask(rng, 0.0, 8, 400) for _ in range(4)]
    long = [msgspec.structs.replace(ask(rng, 1.0, 600, 2), slo_ttft_s=60.0) for _ in range(12)]
    load = [msgspec.structs.replace(r, slo_tpot_s=0.1) for r in (*streams, *long)]
    worst, first = {}, {}
    for policy in ("slo", "slo:whole=1"):
        played = play(policy, load, **TILES)
        worst[policy] = max(tpot_s(played, r) for r in streams)
        first[policy] = sum(played.ttft_s(long)) / len(long)
    print(worst, first)
    assert worst["slo:whole=1"] <= 0.1 < worst["slo"]
    assert first["slo:whole=1"] < 0.8 * first["slo"]


def test_whole_pieces_are_given_in_the_end_even_if_there_is_never_time() -> None:
    rng = random.Random(4)
    streams = [msgspec.structs.replace(ask(rng, 0.0, 8, 400), slo_tpot_s=0.0401) for _ in range(4)]
    late = msgspec.structs.replace(ask(rng, 1.0, 280, 2), slo_ttft_s=60.0)
    played = play("slo:whole=1", [*streams, late], **TILES)
    pieces = -(-280 // 28)
    assert played.first_s[late.request_id] - 1.0 <= pieces * (0.12 + (WITHOUT + 1) * 0.05)


def test_beside_decodes_a_prompt_has_one_token_but_a_whole_tile_after_so_many_steps_without_time() -> None:
    """A tile of it takes 0.31 s, and there is never more than 0.05 s for it."""
    policy = make_policy("slo:tpot_s=0.1,whole=1")
    policy.costs.decode[:] = [0.05]  # type: ignore[attr-defined]
    policy.costs.prefill_token_s = 0.01  # type: ignore[attr-defined]
    rng = random.Random(8)
    decodes, prompt = Sequence(1, ask(rng, 0.0, 20, 4), 1), Sequence(2, ask(rng, 0.0, 500, 4), 2)
    decodes.num_computed = 19

    def given() -> int:
        policy.begin_step(1.0, None)
        policy.order([decodes], [prompt])
        return policy.num_tokens(prompt, 500, 31)

    assert [given() for _ in range(3 * (WITHOUT + 1))] == [*[1] * WITHOUT, 31] * 3


def test_a_prompt_without_time_goes_on_when_the_only_stream_has_to_yield() -> None:
    """The stream is due last, so it yields itself when it finds no block; then there is only the prompt."""
    rng = random.Random(9)
    stream = msgspec.structs.replace(ask(rng, 0.0, 8, 200), slo_ttft_s=60.0, slo_tpot_s=0.031)
    prompt = msgspec.structs.replace(ask(rng, 1.0, 306, 2), slo_ttft_s=30.0)
    runs = [play("slo:whole=1", [stream, prompt], **{**TILES, "num_blocks": n, "budget": 16}) for n in range(27, 32)]
    assert any(played.num_preemptions for played in runs), "memory was never short"


def test_whole_pieces_go_on_where_nobody_else_can() -> None:
    """Little memory, two steps in flight: somebody always makes progress, or the engine would say that nobody can."""
    rng = random.Random(5)
    load = [
        msgspec.structs.replace(ask(rng, 0.05 * n, rng.randrange(8, 200), rng.randrange(2, 60)), slo_tpot_s=0.06)
        for n in range(40)
    ]
    for depth in (1, 2):
        played = play("slo:whole=1", load, **{**TILES, "num_blocks": 20, "depth": depth})
        assert len(played.end_s) == len(load)
        assert played.num_preemptions > 0, "memory was never short"


def test_who_is_held_keeps_nobody_out() -> None:
    """A sample that waits for a tool has no pace to keep: it would be the reason for ever that nobody enters."""
    policy = make_policy("slo:tpot_s=0.1")
    policy.costs.decode[:] = [0.05, 0.2]  # type: ignore[attr-defined]
    rng = random.Random(7)
    decodes, waits = (Sequence(n, ask(rng, 0.0, 20, 4), n) for n in (1, 2))
    decodes.num_computed = 19
    policy.begin_step(1.0, None)
    assert waits not in policy.order([decodes], [waits])
    decodes.held = True
    assert waits in policy.order([decodes], [waits])
