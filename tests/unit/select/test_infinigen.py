"""InfiniGen (catalogue row B18): the choice of tokens, and the laws of a model that reads by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.bf16 import F32
from penstock.base.errors import ConfigError
from penstock.config.selection import SelectionConfig, SelectionOptions, parse_budget
from penstock.core.cache_spec import group_layers
from penstock.core.model_spec import cache_spec
from penstock.core.selection import PARTIAL, TokenReads
from penstock.model.emitter import Reading
from penstock.ops.ref.rehearsal import choose
from penstock.select.infinigen import token_reads, turns_of
from tests import specs
from tests.paged import Paged

IDS = tuple(int(x) for x in np.random.default_rng(2).integers(3, 60, 64))
READS = TokenReads(share=0.3, recent=3, reach=0.05)


def model(reads: TokenReads | None, *, turns: Any = None, **more: Any) -> Paged:
    spec, weights = specs.make("llama_gqa")
    return Paged(spec, weights, reading=Reading(tokens=reads, turns=turns), **more)


def test_B18_choice_by_hand() -> None:
    keys = np.zeros((8, 2, 1), np.float32)
    keys[:, 0, 0] = [5, 1, 4, 4.5, 0, 4.5, 0, 0]
    keys[:, 1, 0] = [-5, 1, 0, 0, 0, 0, 0, 0]
    q = np.array([[1], [1], [0], [-1]], np.float32)  # two queries a kv head, the third of which looks at all alike
    near = [kept.tolist() for kept in choose(q, keys, 1.0, TokenReads(reach=0.75, recent=2, share=0.8))]
    assert near == [[0, 1, 2, 3, 5, 7, 8], [0, 2, 3, 4, 5, 7, 8]], "four and eight before it are near: six"
    few = [kept.tolist() for kept in choose(q, keys, 1.0, TokenReads(reach=0.75, recent=2, tokens=4))]
    assert few == [[0, 3, 7, 8], [0, 2, 7, 8]], "the largest weights; of equal ones the first"
    keys[6, 0] = np.nan
    assert 6 in choose(q, keys, 1.0, TokenReads(reach=0.0, recent=1))[0], "what is no number shows"


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("attention", ["ref", "ref-online"])
def test_B18_laws_of_a_model(attention: str, turned: bool) -> None:
    """Exact at a full budget; less is read behind the prompt; company, pages and cuts of the text change nothing."""
    spec, weights = specs.make("llama_gqa")
    keys = spec.layers[0].mixer
    rng = np.random.default_rng(1)
    turns = None
    if turned:
        shape = (len(spec.layers), keys.num_kv_heads, keys.head_dim, keys.head_dim)  # type: ignore[union-attr]
        turns = np.linalg.qr(rng.standard_normal(shape))[0].astype(np.float32)
    plain = Paged(spec, weights, attention=attention).chunked("a", IDS, (40, 1))

    def run(reads: TokenReads, sizes: tuple[int, ...], seed: int = 0) -> F32:
        paged = model(reads, turns=turns, attention=attention, seed=seed)
        paged.choose_from["a"] = 40
        return paged.chunked("a", IDS, sizes)

    for full in (TokenReads(), TokenReads(tokens=64), TokenReads(share=0.1, dense_layers=len(spec.layers))):
        np.testing.assert_array_equal(run(full, (40, 1)), plain)
    want = run(READS, (40, 1))
    np.testing.assert_array_equal(want[:40], plain[:40])
    assert np.abs(want[40:] - plain[40:]).max() > 1e-3
    for n, sizes in enumerate([(64,), (17, 23, 3, 1, 9), (1,), (39, 1, 24)]):
        np.testing.assert_array_equal(run(READS, sizes, seed=n), want)
    other = model(READS, turns=turns, attention=attention, seed=5)
    other.choose_from |= {"a": 40, "b": 9, "c": 30}
    parts: list[F32] = [other.run({"b": (IDS[:9], [0]), "a": (IDS[:40], range(40))})["a"]]
    parts.append(other.run({"a": (IDS[40:43], range(3)), "c": (IDS[:30], [0])})["a"])
    parts += [other.run({"c": ([i], [0]), "a": ([i], [0]), "b": ([i], [0])})["a"] for i in IDS[43:]]
    np.testing.assert_array_equal(np.concatenate(parts), want)


def test_B18_a_layer_is_rehearsed_before_the_layer_in_front_of_it_attends() -> None:
    """What is chosen follows from the layer before: it stands there before that layer's own attention runs."""
    nodes = model(READS).graph.nodes
    attention = {node.layer: i for i, node in enumerate(nodes) if node.op == "attention"}
    ahead = {node.bound[1]: i for i, node in enumerate(nodes) if node.op == "rehearse" and not node.bound[5]}
    assert ahead.keys() == attention.keys() - {0}
    assert all(i < attention[layer - 1] for layer, i in ahead.items())
    assert all(i > attention[layer - 2] for layer, i in ahead.items() if layer > 1)


def test_B18_settings_say_what_is_read_and_kept() -> None:
    options = SelectionOptions(recent=7, dense_layers=0, reach=3.0, rank=0.5)
    config = SelectionConfig("infinigen", parse_budget("25%"), options)
    assert token_reads(config) == TokenReads(None, 0.25, 7, 1, 3.0, 0.5)
    spec, _ = specs.make("llama_gqa")
    (group,) = group_layers([cache_spec(layer, "int8", part=0.5) for layer in spec.layers])
    keys, part = group.spec.planes[0], group.spec.planes[-1]
    assert (part.name, part.heads, part.dim, part.dtype) == (PARTIAL, keys.heads, keys.dim // 2, "float32")


def test_B18_a_profile_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    spec, _ = specs.make("llama_gqa")
    m: Any = spec.layers[0].mixer
    turn = np.tile(np.eye(m.head_dim, dtype=np.float32), (m.num_kv_heads, 1, 1))
    turns = {f"layers.{n}": turn for n in range(len(spec.layers))}

    def read(profile: Path | None, **options: Any) -> Any:
        given = SelectionOptions(profile=None if profile is None else str(profile), **{"rank": 0.5, **options})
        return turns_of(SelectionConfig("infinigen", parse_budget("25%"), given), spec, lambda: "mine")

    assert read(None, rank=1.0) is None
    good, other, short, no = (tmp_path / f"{name}.npz" for name in ("good", "other", "short", "no"))
    np.savez(good, fingerprint=np.array("mine"), **turns)  # type: ignore[arg-type]
    np.savez(other, fingerprint=np.array("another"), **turns)  # type: ignore[arg-type]
    np.savez(short, fingerprint=np.array("mine"), **{"layers.0": turn})  # type: ignore[arg-type]
    no.write_text("no archive")
    assert [t.shape for t in read(good)] == [(m.num_kv_heads, m.head_dim, m.head_dim // 2)] * len(spec.layers)
    for file, why in ((None, "rehearsal_turns"), (other, "another model"), (short, "every layer"), (no, "cannot be")):
        with pytest.raises(ConfigError, match=why):
            read(file)
