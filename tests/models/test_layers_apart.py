"""A run that pauses between layers is the run that does not, bit for bit; a layer's cache changes in its turn."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from penstock.model.forward import LayeredForward
from penstock.ops.native.library import best_library
from tests import specs
from tests.engine.harness import Knobs, real_engine, request, run

SHOWN = ("llama_gqa", "windowed", "slots", "latent", "yoco", "shared_kv", "streams", "entries", "experts", "parallel")


class Watch:
    """What `pause` calls: looks at which pages have changed since it was called last."""

    def __init__(self, storage: Any, num_layers: int) -> None:
        self.storage, self.num_layers = storage, num_layers
        self.calls: list[int] = []
        self.changed: set[int] = set()
        self._seen: list[list[bytes]] = []

    def _pages(self) -> list[list[bytes]]:
        return [
            [
                b"".join(array[page].tobytes() for array in planes.values())
                for page in range(len(next(iter(planes.values()))))
            ]
            for planes in self.storage.planes
            if planes
        ]

    def __call__(self, n: int) -> None:
        pages = self._pages()
        if n:
            for g, (old, new) in enumerate(zip(self._seen, pages, strict=True)):
                width = self.storage.pages_per_slab[g]
                own = width // len(self.layers[g])
                for page, (a, b) in enumerate(zip(old, new, strict=True)):
                    if a != b:
                        layer = self.layers[g][page % width // own]
                        assert layer == n - 1, f"layer {layer} wrote its cache in the turn of layer {n - 1}"
                        self.changed.add(layer)
        self._seen = pages
        self.calls.append(n)

    layers: list[tuple[int, ...]]


def answers(name: str, ops: str, *, apart: bool) -> tuple[Any, list[bytes]]:
    spec, weights = specs.make(name)
    core = real_engine(spec, weights, Knobs(ops=ops, num_blocks=12, num_slots=4, max_num_seqs=3))
    runner: Any = core.executor.runner  # type: ignore[attr-defined]
    forward = runner._forward
    assert isinstance(forward, LayeredForward)
    assert forward.num_layers == len(spec.layers)
    watch = Watch(runner.storage, forward.num_layers)
    watch.layers = [group.layers for group in core.kv.groups]
    if apart:
        forward.pause(watch)
    rng = random.Random(7)
    load = [
        request(
            [rng.randrange(3, spec.vocab_size) for _ in range(n)],
            request_id=str(n),
            max_tokens=4,
            num_prompt_logprobs=1,
        )
        for n in (3, 9)
    ]
    got = run(core, load)
    if apart:
        turn = list(range(forward.num_layers + 1))
        assert watch.calls == turn * (len(watch.calls) // len(turn))
        assert watch.changed == {layer for group in core.kv.groups for layer in group.layers}
    found = {k: (c.tokens, c.prompt_logprobs) for k, c in got.items()}
    return found, [array.tobytes() for planes in runner.storage.planes for array in planes.values()]


@pytest.mark.parametrize("ops", ["ref", "native"])
@pytest.mark.parametrize("name", SHOWN)
def test_a_pause_between_layers_changes_no_bit(name: str, ops: str) -> None:
    if ops == "native" and best_library() is None:
        pytest.skip("no native kernels")
    try:
        whole = answers(name, ops, apart=False)
    except Exception as error:  # a model without native form
        if ops == "native" and "no kernels" in str(error):
            pytest.skip(str(error))
        raise
    assert answers(name, ops, apart=True) == whole


def test_what_a_pause_raises_ends_the_run() -> None:
    spec, weights = specs.make("llama_gqa")
    core = real_engine(spec, weights, Knobs())
    forward: Any = core.executor.runner._forward  # type: ignore[attr-defined]

    def stop(n: int) -> None:
        if n == 1:
            raise OSError("no such weights")

    forward.pause(stop)
    core.add(request([3, 4, 5], max_tokens=2))
    with pytest.raises(OSError, match="no such weights"):
        core.step()
    forward.pause(None)


def test_every_product_of_a_layer_lies_within_its_bounds() -> None:
    """What streams weights needs: the pause behind a layer comes when nothing of it is to be read any more."""
    if best_library() is None:
        pytest.skip("no native kernels")
    spec, weights = specs.make("llama_gqa")
    core = real_engine(spec, weights, Knobs(ops="native"))
    code: Any = core.executor.runner._forward._code  # type: ignore[attr-defined]
    found = [(i, int(n)) for i, label in enumerate(code.labels) for n in re.findall(r"layers\.(\d+)\.", label)]
    assert {n for _, n in found} == set(range(len(spec.layers)))
    assert all(code.bounds[n] <= i < code.bounds[n + 1] for i, n in found)
    assert code.bounds[-1] <= code.head
