"""H26, H27, H28, B15: pools of simulated engines, whose keys and values take their time from one to the other."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from benchmarks.studies.disaggregation import WithoutOverlap, poisson
from benchmarks.studies.disaggregation import machines as study_machines

from penstock.base.errors import ConfigError
from penstock.plan.devices import find_device
from penstock.sim.disaggregated import EARLY, WASTED, Cluster, EngineLink, imbalance
from penstock.sim.metrics import Slo
from penstock.sim.sizing import EngineLayout, Machines, attained, cheapest, goodputs, layouts
from penstock.sim.specs import find_spec
from penstock.sim.synthetic import synthetic
from penstock.sim.workload import TimedRequest, Workload, from_list

ROLES = ("prefill", "decode", "mixed")
TOKEN_BYTES = 2 * 32 * 8 * 128 * 2
"""Of keys and values of the 8B in bfloat16."""


def machines(**settings: Any) -> Machines:
    device, router = find_device("a100-80g"), settings.pop("router", "least-tokens")
    return Machines(
        find_spec("llama-3.1-8b"), "llama-3.1-8b", dict.fromkeys(ROLES, device), dict.fromkeys(ROLES, 2.0),
        settings={"max_model_len": 8192} | settings, router=router,
    )  # fmt: skip


def load(rate: float, requests: int = 120, prompt: int = 512, output: int = 60, seed: int = 1) -> Workload:
    return synthetic(f"synthetic:poisson?rate={rate:g}&requests={requests}&prompt={prompt}&output={output}", seed)


def test_H26_engines_for_prompts_make_one_token_and_others_the_rest() -> None:
    asked = synthetic("synthetic:poisson?rate=20&requests=60&prompt=300&prompt_cv=1&output=20&output_cv=1", 3)
    run = machines().cluster(EngineLayout(2, 2)).run(asked)
    requests = run.result.requests
    assert sorted(requests.num_output) == sorted(r.num_output for r in asked)
    assert run.result.stats.num_sampled_tokens == requests.num_output.sum()
    assert run.result.failed == 0
    prompts, decodes = ([e for e in run.engines if e.role == role] for role in ("prefill", "decode"))
    assert sum(e.sampled for e in prompts) == 60
    assert sum(e.computed for e in prompts) == requests.num_prompt.sum()
    tails = sum(int(n) % 32 for n, out in zip(requests.num_prompt, requests.num_output, strict=True) if out > 1)
    assert sum(e.computed for e in decodes) == sum(e.sampled for e in decodes) + tails, (
        "no whole block is computed again"
    )
    assert run.num_passed == sum(r.num_output > 1 for r in asked)
    again = machines().cluster(EngineLayout(2, 2)).run(asked)
    assert np.array_equal(again.result.requests.finish_s, requests.finish_s), "the same every time"
    three = machines().cluster(EngineLayout(2, 1, 1)).run(asked)
    assert three.result.requests.num_output.sum() == requests.num_output.sum(), "with a pool of both, too"
    assert all(engine.sampled for engine in three.engines)


@pytest.mark.parametrize("rate", [25e9, 1e9])
def test_H26_keys_and_values_take_bytes_over_bandwidth_and_stand_in_a_queue(rate: float) -> None:
    """A prompt of 32 whole blocks; then two of them at once: the link is one."""
    made = replace(machines(), link=EngineLink(rate))
    alone = made.cluster(EngineLayout(1, 1)).run(from_list("one", [TimedRequest(0.0, 512, 10)]))
    wire_s = 512 * TOKEN_BYTES / rate
    assert alone.transfer_s == pytest.approx([wire_s], rel=0.02)
    second = alone.result.gaps_s.max()
    assert second >= 2 * wire_s, "written, then read"
    assert second == pytest.approx(2 * wire_s, abs=0.03)
    both = made.cluster(EngineLayout(1, 1)).run(from_list("two", [TimedRequest(0.0, 512, 10)] * 2))
    assert max(both.transfer_s) == pytest.approx(2 * wire_s, rel=0.1)


def test_what_makes_no_sense_is_refused_in_a_sentence() -> None:
    made = machines()
    with pytest.raises(ConfigError, match="no engine would be left for tokens"):
        made.cluster(EngineLayout(prefill=2)).run(load(1, 1))
    (mixed,) = made.cluster(EngineLayout(mixed=1)).pools
    without = Cluster((replace(mixed, role="prefill"), replace(mixed, role="decode")))
    with pytest.raises(ConfigError, match="give kv_offload"):
        without.run(load(1, 1))
    with pytest.raises(ConfigError, match="'never' is none of late, now, predicted"):
        replace(made.cluster(EngineLayout(1, 1)), reject="never").run(load(1, 1))


def test_layouts_use_all_devices_and_name_themselves() -> None:
    found = list(layouts(4, (1, 2), nodes=(1, 2), pool_of_both=True))
    assert all(one.num_devices == 4 for one in found)
    assert len(set(found)) == len(found)
    labels = {one.label for one in found}
    assert {
        "mixed=2 of 2",
        "prefill=2, decode=1, mixed=1",
        "prefill=1 of 2, decode=2",
        "2 x (prefill=1, decode=1)",
    } <= labels


TIGHT, LOOSE = Slo(0.5, 0.0107), Slo(2.0, 0.1)
LONG = {"requests": 120, "prompt": 1500, "output": 60}


def test_H26_pools_keep_a_tight_level_at_lower_cost_than_mixed_engines_and_no_loose_one() -> None:
    """Mixed engines with the steps that they have by default; those whose steps were made as short as the level asks
    need no help (`docs/concepts/disaggregation.md`)."""
    asked, made, costs = load(16, **LONG), machines(), {}
    for word, slo, most in (("tight", TIGHT, 5), ("loose", LOOSE, 3)):
        for roles in (False, True):
            tried = [one for n in range(1, most + 1) for one in layouts(n) if one.has_roles == roles]
            best = cheapest(made, tried, asked, slo, 0.9)
            assert best is not None
            assert best.attainment >= 0.9
            costs[word, roles] = best.price
    assert costs["tight", True] <= 0.7 * costs["tight", False]
    assert costs["loose", True] > costs["loose", False]
    fine = made.cluster(EngineLayout(mixed=2, chunk=192)).run(asked)
    assert attained(fine, TIGHT) >= 0.9
    assert made.price(EngineLayout(mixed=2)) < costs["tight", True], "so it is not said to pay there"


def test_H27_goodput_of_a_searched_layout_is_at_least_that_of_mixed_engines_where_limits_are_tight() -> None:
    asked = load(8, **LONG | {"requests": 80})
    found = goodputs(
        machines(), [EngineLayout(mixed=3), EngineLayout(1, 2), EngineLayout(2, 1)], asked, TIGHT, 0.9, tolerance=0.2
    )
    best = {roles: next(one.goodput or 0 for one in found if one.layout.has_roles == roles) for roles in (True, False)}
    assert best[True] >= 1.3 * best[False] > 0
    assert found[0].layout == EngineLayout(2, 1)


def test_H27_engines_are_placed_by_bandwidth() -> None:
    """Where the network between nodes is slow, groups within nodes are better than one over all; where it is fast,
    no worse off is who has all engines to choose from."""
    asked = load(20, 120, prompt=1024)
    slow = replace(machines(), link=EngineLink(0.6e9), node_link=EngineLink(100e9))
    across, within = (slow.cluster(one).run(asked) for one in (EngineLayout(2, 2), EngineLayout(1, 1, nodes=2)))
    assert attained(within, TIGHT) > attained(across, TIGHT) + 0.2
    decodes = [engine for engine in within.engines if engine.role == "decode"]
    assert all(engine.computed == engine.sampled for engine in decodes), "nobody goes on in another node"


def test_H27_phases_have_degrees_of_their_own() -> None:
    """Two devices that share a prompt's layers halve its first token's time, but for what they exchange over PCIe."""
    one, two = (
        machines().cluster(EngineLayout(1, 1, prefill_degree=n)).run(from_list("one", [TimedRequest(0.0, 2000, 4)]))
        for n in (1, 2)
    )
    times = [run.result.requests.first_token_s[0] for run in (one, two)]
    assert times[1] < 0.9 * times[0]
    assert machines().price(EngineLayout(1, 1, prefill_degree=2)) == 6.0


def uneven(seed: int, requests: int = 100) -> Workload:
    """One answer in five is ten times as long, and is expected to be."""
    rng, now_s, kept = random.Random(seed), 0.0, []
    for _ in range(requests):
        now_s += rng.expovariate(25)
        out = 400 if rng.random() < 0.2 else 40
        kept.append(TimedRequest(now_s, 200, out, expected=out))
    return from_list("uneven", kept)


def test_H28_the_load_of_those_who_decode_is_more_even_than_by_chance() -> None:
    for seed in range(2):
        found = {
            router: imbalance(machines(router=router).cluster(EngineLayout(1, 4)).run(uneven(seed)))
            for router in ("length-buckets", "random")
        }
        assert found["length-buckets"] <= 1.15 < found["random"], found


def test_B15_an_early_refusal_wastes_no_prompt() -> None:
    """Four times what there is room for: without a look ahead prompts are computed in vain, and with it hardly any."""
    asked, slo = load(16, 100, prompt=3000, output=200), Slo(4.0, 0.05)
    small = machines(max_num_seqs=8)
    found = {
        reject: small.cluster(EngineLayout(2, 2), reject=reject, slo=slo).run(asked)
        for reject in ("late", "now", "predicted")
    }
    wasted = {reject: run.wasted_tokens for reject, run in found.items()}
    assert wasted["late"] > wasted["now"] > wasted["predicted"]
    assert wasted["predicted"] <= 0.1 * wasted["late"]
    for reject, run in found.items():
        refused = run.result.refused
        assert len(run.result.requests) + sum(refused.values()) == 100, "everybody is served or refused"
        assert refused.get(WASTED, 0) * 3000 == run.wasted_tokens
        assert (refused.get(EARLY, 0) > 0) == (reject != "late")
    columns = {reject: run.result.requests for reject, run in found.items()}
    waits = {reject: np.percentile(c.first_token_s - c.arrival_s, 90) for reject, c in columns.items()}
    assert waits["predicted"] < 0.6 * waits["late"], "whoever is served waits for nobody's wasted prompt"


def talks(seed: int = 1, talks: int = 24, turns: int = 5) -> Workload:
    rng, left, now_s, requests, piece = random.Random(seed), [turns] * talks, 0.0, [], talks
    texts: list[tuple[int, ...]] = [(talk,) for talk in range(talks)]
    while any(left):
        talk = rng.choice([n for n in range(talks) if left[n]])
        left[talk] -= 1
        piece += 1
        texts[talk] = (*texts[talk], piece)
        now_s += rng.expovariate(8)
        requests.append(TimedRequest(now_s, 64 * len(texts[talk]), 4, blocks=texts[talk]))
    return from_list("talks", requests, block_tokens=64)


def test_B15_a_memory_in_common_finds_more_than_those_of_each_engine() -> None:
    made = machines(router="round-robin").cluster(EngineLayout(3, 1))
    found = {
        reuse: int(replace(made, reuse=reuse).run(talks()).result.requests.cached.sum()) for reuse in (False, True)
    }
    assert found[True] > 1.5 * found[False] > 0


def test_H27_where_nothing_overlaps_in_a_step_roles_beat_mixed_engines_with_steps_of_any_size() -> None:
    """As on the real engine, where a step with a prompt beside decodes takes as long as both alone. Five devices."""
    asked = poisson(16, 120, 1500, 60, 1)
    made = replace(study_machines(), kind=WithoutOverlap)
    tried = {"roles": EngineLayout(3, 2), "mixed": EngineLayout(mixed=5), "fine": EngineLayout(mixed=5, chunk=192)}
    found = {name: attained(made.cluster(layout).run(asked), TIGHT) for name, layout in tried.items()}
    assert found["roles"] >= 0.9 > max(found["mixed"], found["fine"]), found
