"""Modules: texts that are computed each by itself and stand anywhere (`kv.modules`), against a naive loop in which the
tokens of a module look at their module alone."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest

from penstock.base.hashing import digest
from penstock.core.request import Control, Request, module_taint
from penstock.runner.blending import Blender
from tests import oracle
from tests.engine.harness import Collected, Collector, Knobs, disturbed, drain, real_engine, request, run, tiny
from tests.engine.naive import Logits, beam_search, generate, model_logits
from tests.sampled import draws

NAMES = ["llama_gqa", "llama_biased", "parallel", "experts"]
SIZE = 4


class ModulesModel(oracle.NaiveModel):
    """`ends`: where modules end."""

    def __init__(self, spec: Any, weights: Any, ends: Sequence[int]) -> None:
        super().__init__(spec, weights)
        self.ends = ends

    def logits(self, token_ids: Sequence[int], *, last_only: bool = False) -> Any:
        starts = [0, *self.ends]

        def attend(q: Any, k: Any, v: Any, scale: float, window: Any = None, soft_cap: Any = None, **more: Any) -> Any:
            rows = []
            for i in range(len(q)):
                first = max(s for s in starts if s <= i) if i < starts[-1] else 0
                see = slice(first, i + 1)
                rows.append(
                    _softmax_attention(q[see], k[see], v[see], scale, window, soft_cap, **more | {"only": i - first})
                )
            return np.concatenate(rows)

        with mock.patch.object(oracle, "softmax_attention", attend):
            return super().logits(token_ids, last_only=last_only)


_softmax_attention = oracle.softmax_attention


@cache
def logits_of(name: str, ends: tuple[int, ...]) -> Logits:
    spec, weights = tiny(name)
    return model_logits(ModulesModel(spec, weights, ends) if len(ends) > 1 else oracle.NaiveModel(spec, weights))


@cache
def texts(vocab: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, vocab) for _ in range(n)] for n in (8, 16, 4, 12)]


def of_modules(
    name: str, order: Sequence[int], rest: Sequence[int], size: int = 1, recompute: float = 0.0, **more: Any
) -> Request:
    """A request whose prompt is these texts, each repeated to whole blocks of `size` tokens, and `rest`."""
    ids: list[int] = []
    ends = []
    for i in order:
        text = texts(tiny(name)[0].vocab_size)[i]
        ids += text + text[: -len(text) % size]
        ends.append(len(ids))
    ends = ends if len(ends) > 1 else []
    taint = module_taint("", ends, recompute)
    return request([*ids, *rest], modules=ends, recompute=recompute, taint=taint, **more)


def workload(name: str, size: int) -> list[Request]:
    """Modules in several orders, in company of prompts without; greedy and sampled, several samples, beams."""
    vocab = tiny(name)[0].vocab_size
    rest = [5, 9, 11, 6, 8]
    return [
        of_modules(name, [0, 1], rest, size, request_id="two", max_tokens=8),
        of_modules(name, [1, 0], rest[:2], size, request_id="turned", max_tokens=7, temperature=0.9, seed=4),
        of_modules(name, [2, 1, 0, 3], rest, size, request_id="four", n=3, max_tokens=5, temperature=1.1, seed=5),
        of_modules(name, [1], rest, size, request_id="prefix", max_tokens=8),
        of_modules(name, [3, 2], rest, size, request_id="beam", beam_width=2, max_tokens=4),
        of_modules(
            name, [0, 2], rest, size, request_id="logprobs", max_tokens=4, num_logprobs=2, num_prompt_logprobs=1
        ),
        of_modules(name, [0, 1], [*rest, 7], size, request_id="longer", max_tokens=6),
        of_modules(name, [3, 0, 1], rest, size, request_id="anew", max_tokens=6, recompute=1.0),
        of_modules(name, [1, 2], rest, size, request_id="anew n", n=2, max_tokens=5, temperature=1.0, recompute=1.0),
        request(texts(vocab)[0] + texts(vocab)[1] + rest, request_id="plain", max_tokens=6),
    ]


@cache
def expected(name: str, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for r in workload(name, size):
        logits = logits_of(name, () if r.recompute else tuple(r.modules))
        found[r.request_id] = (
            [(tokens, why) for tokens, _, why in beam_search(logits, r)]
            if r.beam is not None
            else [generate(logits, r, i) for i in range(r.n)]
        )
    return found


def check(name: str, size: int, got: dict[str, Collected]) -> None:
    for request_id, want in expected(name, size).items():
        c = got[request_id]
        mine = [(b[0], b[2]) for b in c.beams] if c.beams else [(c.tokens[i], c.reasons[i]) for i in range(len(want))]
        assert mine == want, request_id


@pytest.mark.parametrize("name", NAMES)
def test_B11_J04_modules_are_what_they_are_by_themselves_whatever_else_happens(name: str) -> None:
    rng = random.Random(f"modules-{name}")
    for _ in range(draws(2, 8)):
        size = rng.choice([1, 2, 4])
        knobs = Knobs(
            kv_allocator="modules", block_size=size, num_blocks=rng.choice([96, 128, 256]) * SIZE // size // 4 * 2,
            budget=rng.choice([1, 3, 16, 64, 256]), max_num_seqs=rng.choice([1, 3, 8]), depth=rng.choice([1, 2]),
            policy=rng.choice(["fcfs", "prefill-first"]), prefix_cache=rng.choice(["radix", "radix", "hash", "none"]),
            wire=rng.random() < 0.5, host_blocks=rng.choice([0, 64]), preemption=rng.choice(["swap", "recompute"]),
            threshold=rng.choice([0, 4]),
        )  # fmt: skip
        spec, weights = tiny(name)
        core = real_engine(spec, weights, knobs)
        for kinds in (["preempt", "preempt", "ragged", "taint"], ["preempt", "reset_prefix_cache"]):
            got = disturbed(core, workload(name, size), rng, kinds, note=knobs)
            check(name, size, got.requests)


def test_B11_modules_that_were_computed_are_not_computed_again_wherever_they_stand() -> None:
    """A prompt of known modules in another order computes what follows them, and nothing else: 52 tokens become 5."""
    name = "llama_gqa"
    # Memory for the modules and one prompt of them: what was put together goes before they do.
    core = real_engine(*tiny(name), Knobs(kv_allocator="modules", block_size=SIZE, budget=64, num_blocks=25))
    rest = [5, 9, 11, 6, 8]

    def computed(r: Request) -> int:
        before = core.stats.num_scheduled_tokens
        (got,) = run(core, [r]).values()
        assert got.tokens[0] == generate(logits_of(name, tuple(r.modules)), r)[0]
        return core.stats.num_scheduled_tokens - before - (r.max_tokens - 1)

    for i, text in enumerate(texts(61)):
        assert computed(of_modules(name, [i], rest, SIZE, max_tokens=3)) == len(text) + len(rest)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 0]):
        assert computed(of_modules(name, order, rest, SIZE, max_tokens=3)) == len(rest)
    stats = core.kv.stats()
    assert stats.num_module_tokens == stats.num_module_hit_tokens == 2 * 40 + 12
    # One that is not known is computed alone, and those behind it are found.
    core.kv.reset_prefix_cache()
    assert computed(of_modules(name, [1, 2], rest, SIZE, max_tokens=3)) == 16 + 4 + len(rest)
    assert computed(of_modules(name, [0, 2, 1], rest, SIZE, max_tokens=3)) == 8 + len(rest)


def test_B11_a_first_module_alone_is_an_ordinary_prompt() -> None:
    """[EX]: the same tokens as without modules, and as in an engine that keeps rotated keys; blocks are shared with
    prompts that begin so, and with nobody else."""
    name = "llama_gqa"
    spec, weights = tiny(name)
    rest = [5, 9, 11, 6, 8]
    r = of_modules(name, [1], rest, SIZE, request_id="one", max_tokens=8)
    plain = request(texts(61)[1] + rest, request_id="plain", max_tokens=8)
    assert (r.modules, r.taint) == ([], "")
    core = real_engine(spec, weights, Knobs(kv_allocator="modules", block_size=SIZE))
    other = run(real_engine(spec, weights, Knobs(block_size=SIZE)), [plain])["plain"].tokens
    first, second = run(core, [r])["one"], run(core, [plain])["plain"]
    assert first.tokens == second.tokens == other
    assert second.cached == 20
    # As a second module it is another text's, and what follows it is nobody's but such a text's.
    mixed = of_modules(name, [0, 1], rest, SIZE, request_id="mixed", max_tokens=8)
    run(core, [mixed])
    same = request(mixed.prompt_token_ids, request_id="same", max_tokens=8)
    assert run(core, [same])["same"].cached == 8


@cache
def deep() -> tuple[Any, Any]:
    """Four layers: all tokens run through the first two anyway."""
    spec, weights = tiny("llama_gqa")
    for n in (0, 1):
        own = {name: w for name, w in weights.items() if name.startswith(f"layers.{n}.")}
        weights = weights | {name.replace(f".{n}.", f".{n + 2}.", 1): w for name, w in own.items()}
    return msgspec.structs.replace(spec, layers=spec.layers * 2), weights


def blended(ids: Sequence[int], share: float, **more: Any) -> Request:
    ends = [8, 16, 24]
    taint = module_taint("", ends, share)
    return request(ids, modules=ends, recompute=share, taint=taint, num_logprobs=61, **more)


def test_J04_the_more_is_computed_again_the_nearer_it_is_to_the_whole_context() -> None:
    """Logprobs of the next token, means over texts: nothing again, half of the tokens, all of them (as without modules,
    to the last bit). The half that changes most does better than the half that changes least."""
    rng = random.Random(5)
    core = real_engine(*deep(), Knobs(kv_allocator="modules", block_size=SIZE, budget=64))
    far = dict.fromkeys(("nothing", "half", "other half", "all"), 0.0)
    most_changed = Blender._most_changed
    for _ in range(8):
        ids = [rng.randrange(3, 61) for _ in range(27)]
        full = run(core, [request(ids, request_id="full", max_tokens=1, num_logprobs=61)])["full"].logprobs[0][0]
        want = dict(zip(full.top_ids, full.top_logprobs, strict=True))
        for way, share in zip(far, (0.0, 0.5, 0.50001, 1.0), strict=True):
            chosen = most_changed if way == "half" else lambda *a: most_changed(*a)[::-1]
            with mock.patch.object(Blender, "_most_changed", chosen):
                got = run(core, [blended(ids, share, request_id="r", max_tokens=1)])["r"].logprobs[0][0]
            far[way] += sum(abs(want[t] - x) for t, x in zip(got.top_ids, got.top_logprobs, strict=True))
    assert far["all"] == 0.0
    assert 0 < far["half"] < 0.8 * far["nothing"]
    assert far["half"] < far["other half"]
    assert core.kv.stats().num_blended_tokens == 8 * (8 + 9 + 16)


def test_J04_which_tokens_are_computed_again_depends_on_nothing_but_the_request() -> None:
    """Logprobs of a share of 0.4 in company, cut, preempted, swapped, with a beginning in the cache, are as alone."""
    rng = random.Random(6)
    ids = [rng.randrange(3, 61) for _ in range(33)]
    load = [blended([*ids[:24], *ids[24 + n :]], 0.4, request_id=f"{n}", max_tokens=4) for n in range(3)]
    alone = {}
    for r in load:
        core = real_engine(*deep(), Knobs(kv_allocator="modules", block_size=SIZE, budget=64))
        alone[r.request_id] = run(core, [r])[r.request_id].logprobs
    tokens, taint = array("I", ids), load[0].taint.encode()
    for depth, budget, host in ((1, 5, 64), (2, 64, 0)):
        knobs = Knobs(
            kv_allocator="modules", block_size=SIZE, budget=budget, depth=depth, host_blocks=host, num_blocks=25,
            preemption="swap" if host else "recompute",
        )  # fmt: skip
        core = real_engine(*deep(), knobs)
        for _ in range(2):
            got = disturbed(core, load, rng, ["preempt"], note=knobs).requests
            assert {name: got[name].logprobs for name in alone} == alone
            while core.kv.cache.match(digest(b"", taint), tokens, 6, [], False)[1] > 3:
                core.kv._room.evict(1)
    for steps in range(1, 7):  # swapped before, and after some are computed again, when nothing of it is cached
        core = real_engine(*deep(), Knobs(kv_allocator="modules", block_size=SIZE, host_blocks=64, preemption="swap"))
        collector = Collector()
        core.add(load[0])
        for _ in range(steps):
            collector.take(core.step())
        core.add(Control(kind="preempt", request_id="0"))
        core.add(Control(kind="reset_prefix_cache"))
        drain(core, collector)
        assert collector.requests["0"].logprobs == alone["0"], steps


def test_J04_what_fills_a_module_up_is_chosen_last() -> None:
    ids = [*range(10, 18), *range(20, 25), 7, 7, 7, *range(30, 36), 7, 7, *range(40, 43)]
    core = real_engine(*deep(), Knobs(kv_allocator="modules", block_size=SIZE, budget=64))
    seen: list[list[int]] = []
    runs = Blender._run

    def run_and_note(self: Blender, forward: Any, seq_id: int, positions: Any) -> None:
        seen.append(positions.tolist())
        runs(self, forward, seq_id, positions)

    with mock.patch.object(Blender, "_run", run_and_note):
        run(core, [blended(ids, 13 / 16, request_id="r", max_tokens=1)])
    assert seen[-1] == [n for n in range(8, 24) if n not in (14, 15, 23)]
