"""What every backend owes: it says whether it can run a model, and what it compiles computes the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.backends import BACKENDS, PREFERRED
from penstock.backends.backend import Backend
from penstock.base.errors import ConfigError
from penstock.config import from_kwargs
from penstock.launch.backend import choose_ops, traits_of
from penstock.runner.assemble import DecoderModel, make_sampler
from penstock.runner.sampler import Sampler
from tests import specs
from tests.oracle import NaiveModel
from tests.paged import Paged

CONFIG = from_kwargs(model="m", threads=2)
MODELS = ("llama_gqa", "windowed", "latent", "slots", "experts", "mamba2_hybrid", "rwkv7")
IDS = [3 + i * 7 % 50 for i in range(40)]


PAIRS = [
    (name, model)
    for name in BACKENDS
    for model in MODELS
    if BACKENDS.get(name).why_not(CONFIG, specs.make(model)[0]) is None
]
"""Backends and the models that they say they run."""
ABLE = sorted({name for name, _ in PAIRS})


def made(name: str) -> Backend:
    return BACKENDS.get(name).of(CONFIG, 2)


def test_a_plain_decoder_runs_everywhere() -> None:
    assert {name for name, model in PAIRS if model == "llama_gqa"} >= set(BACKENDS) - ({"native"} - set(ABLE))
    assert {model for name, model in PAIRS if name == "ref"} == set(MODELS), "the oracle runs everything"


def paged(spec: Any, weights: Any, backend: Backend, **more: Any) -> Paged:
    """Drives what the backend makes of the model's graph."""
    return Paged(spec, weights, **more).on(backend)


@pytest.mark.parametrize(("name", "model"), PAIRS)
def test_what_it_compiles_computes_the_model(name: str, model: str) -> None:
    spec, weights = specs.make(model)
    backend = made(name)
    want = NaiveModel(spec, weights).logits(IDS)
    got = paged(spec, weights, backend).one_go("a", IDS)
    np.testing.assert_allclose(got, want, atol=2e-3 * max(1.0, float(np.abs(want).max())))


@pytest.mark.parametrize(("name", "model"), [pair for pair in PAIRS if pair[1] in ("llama_gqa", "windowed", "slots")])
def test_one_graph_is_lowered_again_and_again(name: str, model: str) -> None:
    """Nobody changes the graph, whatever passes it ran over it."""
    spec, weights = specs.make(model)
    backend = made(name)
    want = Paged(spec, weights).one_go("a", IDS)
    driver = Paged(spec, weights)
    nodes = [node.op for node in driver.graph.nodes]
    driver.on(backend)
    for seq in "bc":
        driver.program = backend.compile(driver.graph, driver.groups, max_tokens=64)
        np.testing.assert_allclose(driver.one_go(seq, IDS), want, atol=2e-3 * max(1.0, float(np.abs(want).max())))
    assert [node.op for node in driver.graph.nodes] == nodes


@pytest.mark.parametrize("name", ABLE)
@pytest.mark.parametrize("layers", [(), (0,), (1,), (0, 1)])
def test_a_model_without_some_layers_is_the_others_on_the_same_weights(name: str, layers: tuple[int, ...]) -> None:
    spec, weights = specs.make("llama_gqa")
    backend = made(name)
    driver = Paged(spec, weights).on(backend)
    model = DecoderModel(spec=spec, weights=weights, groups=driver.groups, max_model_len=300)
    whole: Any = model.on(backend, max_tokens=64)
    driver.program = whole
    complete = driver.one_go("a", IDS).copy()
    part: Any = model.part(backend, whole, layers, max_tokens=64)
    driver.program = part
    got = driver.one_go("b", IDS).copy()
    # A layer that adds nothing is a layer that is not there.
    silent = {
        n: np.zeros_like(w) if n.endswith((".o", ".down")) and int(n.split(".")[1]) not in layers else w
        for n, w in weights.items()
    }
    want = NaiveModel(spec, silent).logits(IDS)
    np.testing.assert_allclose(got, want, atol=2e-3 * max(1.0, float(np.abs(want).max())))
    if layers == (0, 1):
        np.testing.assert_array_equal(got, complete)
    held, shared = backend.matrices(whole), backend.matrices(part)
    assert all(shared[key] is held[key] for key in shared)


@pytest.mark.parametrize("name", ABLE)
def test_traits_are_kept(name: str) -> None:
    """Where a row's result does not depend on its company, it does not by a bit."""
    spec, weights = specs.make("llama_gqa")
    backend = made(name)
    assert backend.name == name
    assert backend.label
    if not BACKENDS.traits(name).batch_invariant:
        return
    driver = paged(spec, weights, backend)
    alone = driver.one_go("a", IDS)
    together = driver.run({"b": (IDS, [len(IDS) - 1]), "c": (IDS[:9], [8])})["b"]
    np.testing.assert_array_equal(together[0], alone[-1])


@pytest.mark.parametrize("name", ABLE)
def test_its_sampler_samples(name: str) -> None:
    spec, _ = specs.make("llama_gqa")
    backend = made(name)
    assert isinstance(make_sampler(backend, spec.vocab_size), Sampler)


@pytest.mark.parametrize("name", BACKENDS.names())
def test_who_measures_gets_one_product_for_all_rows(name: str) -> None:
    other = BACKENDS.traits(name).in_batches
    assert not other or not BACKENDS.traits(other).in_batches


def test_auto_takes_the_first_that_can_and_says_why_not_the_others() -> None:
    for model in MODELS:
        spec, _ = specs.make(model)
        config, decisions = choose_ops(CONFIG, spec)
        chosen = config.execution.ops
        before = PREFERRED[: PREFERRED.index(chosen)]
        for other in before:
            problem = BACKENDS.get(other).why_not(CONFIG, spec)
            assert problem is not None
            assert problem in decisions[0].why
            with pytest.raises(ConfigError, match="use ops auto"):
                choose_ops(from_kwargs(model="m", ops=other), spec)
        assert traits_of(config) == BACKENDS.traits(chosen)
