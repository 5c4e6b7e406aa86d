"""B17: whole blocks on ranks that lend their memory to each other have the tokens of one large rank."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.base.errors import ConfigError, EngineError
from penstock.core.model_spec import Alibi, cache_groups
from penstock.kv.placed import PlacedManager
from penstock.parallel import shard as sharding
from penstock.plan.ranks import ranked_groups
from tests import specs
from tests.engine.harness import Knobs, config_for, plan_for, real_engine, request, run
from tests.native.running import pytestmark_native
from tests.native.test_context_parallel import model, shares
from tests.native.test_laws import in_turmoil
from tests.native.test_model import weights_as
from tests.sampled import draws

pytestmark = pytestmark_native


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of tiny models are shared out, too."""
    monkeypatch.setattr(sharding, "UNIT", 5)
    monkeypatch.setattr(sharding, "LEAST_ROWS", 2)


def homes(num_blocks: int, size: int = 2, **more: Any) -> Knobs:
    return Knobs(
        ops="native", block_size=4, num_blocks=num_blocks, ranks=size, by_tokens="flat", placement="home",
        max_model_len=128, **more,
    )  # fmt: skip


def test_B17_a_request_longer_than_its_home_borrows_and_has_the_tokens_of_one_large_rank() -> None:
    """Twelve blocks on each rank: 90 tokens are 23 of them, eleven are borrowed, and all are given back."""
    spec, weights = weights_as("llama_mqa", "float32")
    small = Knobs(ops="native", block_size=4, num_blocks=12, prefix_cache="none", max_model_len=128)
    large = Knobs(ops="native", block_size=4, num_blocks=24, prefix_cache="none", max_model_len=128)
    two = homes(24, prefix_cache="none")
    held = plan_for(spec, small).kv_bytes
    assert plan_for(spec, two).kv_bytes == held, "each rank has the memory of the small one"
    told = request([3 + i * 7 % 50 for i in range(40)], request_id="long", max_tokens=50)
    core = real_engine(spec, weights, two)
    assert isinstance(core.kv, PlacedManager)
    assert [rank.storage.num_bytes for rank in core.executor.runners] == [held, held]
    found = run(core, [told])["long"].tokens[0]
    assert core.kv.ledger.num_borrowed == 11
    assert core.kv.ledger.debts == []
    core.executor.close()
    core = real_engine(spec, weights, large)
    assert found == run(core, [told])["long"].tokens[0]
    core.executor.close()
    core = real_engine(spec, weights, small)
    with pytest.raises(EngineError, match="the KV pool is too small"):
        run(core, [told])
    core.executor.close()


@pytest.mark.parametrize(("name", "size"), [("llama_mqa", 4), ("llama_gqa", 2), ("latent", 2), ("slots", 2)])
def test_B17_log_probabilities_differ_by_rounding_alone(name: str, size: int) -> None:
    """Many short sequences and some long ones: blocks lie on all ranks in every mixture."""
    spec, weights = model(name)
    rng = random.Random(name)
    asked = [
        request(
            [rng.randrange(3, spec.vocab_size) for _ in range(rng.choice([2, 9, 30]))],
            request_id=f"r{i}", max_tokens=rng.choice([3, 12, 20]), num_logprobs=3,
        )
        for i in range(6)
    ]  # fmt: skip
    found = []
    for knobs in (homes(size * 10, size), Knobs(ops="native", block_size=4, num_blocks=40, max_model_len=128)):
        core = real_engine(spec, weights, knobs)
        found.append(run(core, asked))
        core.executor.close()
    for request_id, got in found[0].items():
        want = found[1][request_id]
        assert got.tokens == want.tokens
        for mine, theirs in zip(got.logprobs[0], want.logprobs[0], strict=True):
            assert mine.top_ids == theirs.top_ids
            assert mine.top_logprobs == pytest.approx(theirs.top_logprobs, abs=1e-4)


def placed(name: str, size: int, **mixer: Any) -> Any:
    spec = specs.make(name)[0]
    layers = tuple(replace(layer, mixer=replace(layer.mixer, **mixer)) if mixer else layer for layer in spec.layers)
    spec = replace(spec, layers=layers)
    config = config_for(Knobs(ops="native", ranks=size, by_tokens="flat", placement="home", block_size=4 * size))
    return ranked_groups(config, spec, cache_groups(spec, "float32"))


@pytest.mark.parametrize(
    ("name", "size", "reduce"), [("llama_mqa", 2, "flat"), ("llama_gqa", 4, "tree"), ("slots", 4, "flat")]
)
def test_B17_tokens_depend_on_nothing_but_the_request(name: str, size: int, reduce: str) -> None:
    """The engine's laws, its books audited after every step: prefixes, preemption, samples, beams, aborts."""
    if not shares(name, size):
        pytest.skip("heads do not divide")
    rng = random.Random(f"homes-{name}-{size}")
    for _ in range(draws(2, 6)):
        block_size = size * rng.choice([1, 2, 4])
        in_turmoil(
            name, "float32", "float32", rng, 1, ranks=size, by_tokens=reduce, placement="home", depth=1,
            block_size=block_size, preemption="recompute",
        )  # fmt: skip


def test_what_cannot_lie_anywhere_is_refused_with_what_to_do() -> None:
    groups, why = placed("slots", 2)
    assert {g.spec.kind: (g.spec.ranks, g.spec.whole) for g in groups} == {"slot": (1, False), "paged": (2, True)}
    assert why == "each rank keeps whole blocks of 2 layers, and all of 2"
    for name, size, match in (
        ("windowed", 2, "forget what lies before a window, block by block; use round"),
        ("indexed", 3, "need all tokens"),
    ):
        with pytest.raises(ConfigError, match=match):
            placed(name, size)
    with pytest.raises(ConfigError, match="go by how far keys are apart, and blocks of a rank lie anywhere; use round"):
        placed("llama_gqa", 2, alibi=Alibi(), rope=None)
    for name, value in (("preemption", "swap"), ("offload", True), ("kv_offload", "disk:/tmp/x,1GiB")):
        with pytest.raises(ConfigError, match="which context_parallel_placement home does not go with"):
            config_for(Knobs(ops="native", ranks=2, by_tokens="flat", placement="home", **{name: value}))
