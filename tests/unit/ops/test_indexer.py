"""The indexer of sparse latent attention: which tokens it chooses, and that all of them are plain attention."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from penstock.backends.native.obstacle import native_obstacle
from penstock.base.bf16 import F32
from penstock.core.cache_spec import group_layers
from penstock.core.model_spec import Latent, ModelSpec, cache_spec
from penstock.ops.ref.indexer import best_of, index_scores
from tests import specs
from tests.paged import Paged


def test_of_equal_scores_the_lower_position_is_chosen() -> None:
    scores = np.array([0.0, 2.0, 0.0, -1.0, 2.0, 0.0], np.float32)
    assert best(scores, range(6), 3) == [0, 1, 4]
    assert best(scores, range(6), 6) == [0, 1, 2, 3, 4, 5]
    assert best(np.zeros(5, np.float32), range(5), 2) == [0, 1]


def test_only_what_is_seen_is_chosen_and_numbers_before_others() -> None:
    scores = np.array([np.nan, -np.inf, 2.0, np.nan, 9.0, 9.0], np.float32)
    assert best(scores, range(4), 1) == [2]
    assert best(scores, range(4), 3) == [0, 1, 2]
    assert best(scores, range(4), 4) == [0, 1, 2, 3]
    rows = np.stack([scores, scores])
    assert [x.tolist() for x in best_of(rows, [np.arange(4), np.arange(5)], 2)] == [[1, 2], [2, 4]]
    # The places of a tree's path are among those that it sees.
    assert best(scores, (0, 2, 3, 5), 2) == [1, 3]


def best(scores: F32, seen: Sequence[int], top_k: int) -> list[int]:
    """Alone, and beside another row, which is another way."""
    alone, own = best_of(scores[None], [np.array(seen)], top_k)[0].tolist(), np.array(seen)
    beside = best_of(np.stack([scores, scores]), [own, own], top_k)
    assert [x.tolist() for x in beside] == [alone, alone]
    return alone


def test_scores_equal_the_formula_in_float64() -> None:
    rng = np.random.default_rng(4)
    for heads, dim, n in ((1, 1, 1), (3, 5, 7), (16, 8, 40)):
        q, w, k = (rng.standard_normal(s).astype(np.float32) for s in ((heads, dim), (heads,), (n, dim)))
        want = sum(
            float(w[h]) * np.maximum(k.astype(np.float64) @ q[h].astype(np.float64) * 0.3, 0) for h in range(heads)
        )
        np.testing.assert_allclose(index_scores(q[None], w[None], k, 0.3)[0], want, atol=1e-5)


def test_a_tokens_scores_depend_on_no_other_tokens() -> None:
    """Nor on how many keys there are behind those that it sees: two chunks of them here."""
    rng = np.random.default_rng(6)
    q, w, k = (rng.standard_normal(s).astype(np.float32) for s in ((40, 7, 33), (40, 7), (600, 33)))
    whole = index_scores(q, w, k, 0.3)
    for t in (0, 17, 39):
        for n in (1, 255, 256, 257, 599, 600):
            np.testing.assert_array_equal(index_scores(q[t : t + 1], w[t : t + 1], k[:n], 0.3)[0], whole[t, :n])


def _with_top_k(spec: ModelSpec, top_k: int | None) -> ModelSpec:
    """None: without an indexer."""
    layers = []
    for layer in spec.layers:
        m = layer.mixer
        assert isinstance(m, Latent)
        assert m.indexer is not None or m.reads_choice
        own = None if m.indexer is None or top_k is None else msgspec.structs.replace(m.indexer, top_k=top_k)
        mixer = msgspec.structs.replace(m, indexer=own, reads_choice=m.reads_choice and top_k is not None)
        layers.append(msgspec.structs.replace(layer, mixer=mixer))
    return msgspec.structs.replace(spec, layers=tuple(layers))


def test_contexts_that_are_not_longer_than_top_k_are_plain_latent_attention_bit_for_bit() -> None:
    spec, weights = specs.make("indexed")
    ids = np.random.default_rng(2).integers(0, spec.vocab_size, 40).tolist()
    plain = _with_top_k(spec, None)
    kept = {name: w for name, w in weights.items() if ".index_" not in name}
    want = Paged(plain, kept).one_go("a", ids)
    np.testing.assert_array_equal(Paged(_with_top_k(spec, 40), weights).one_go("a", ids), want)
    few = Paged(_with_top_k(spec, 6), weights).one_go("a", ids)
    np.testing.assert_array_equal(few[:6], want[:6])
    assert np.abs(few[6:] - want[6:]).max(axis=1).min() > 0


def test_index_keys_have_a_plane_and_layers_without_an_indexer_a_group_of_their_own() -> None:
    spec, _ = specs.make("indexed")
    groups = group_layers([cache_spec(layer, "bfloat16") for layer in spec.layers])
    names = [[plane.name for plane in group.spec.planes] for group in groups]
    assert names == [["latent", "k_rope", "index"], ["latent", "k_rope"]]


def test_native_kernels_have_an_indexer() -> None:
    assert native_obstacle(specs.make("indexed")[0]) is None
