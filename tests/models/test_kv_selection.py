"""KV selectors on nano's own attention (catalogue rows F01, F03, F04, F05, F06, F22, F23, F24), without a runtime."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.reference import BlasBackend
from penstock.eval.heads import NeedleText, found, head_scores, needle_texts
from penstock.eval.maps import LayerMap, MapReader
from penstock.eval.retained import Played, play
from penstock.eval.sample import SAMPLE
from penstock.eval.scorer import ProgramScorer
from penstock.eval.tasks.prose import noise_of, prose
from penstock.select.retrieval import PROFILE, Retrieval
from penstock.select.snapkv import votes
from tests.selecting import HEADS, LAYERS, at, config_of, line, nano, nano_mark, nano_reading, selector

PROMPT = 256
GIVEN = {"recent": 8, "interval": 32}
LOOKS_FAR = 1
"""The layer of nano in which facts are found; the others attend to what is near."""


@cache
def played(name: str, budget: str, more: tuple[tuple[str, Any], ...] = ()) -> Played:
    config, reading = config_of(name, budget, **GIVEN, **dict(more)), nano_reading()
    return play(selector(config), config, reading.maps, reading.ids, PROMPT)


def of_layer(one: Played, layer: int) -> float:
    rows = np.array([n == layer for n, _ in one.lines])
    return float(one.retained[rows].mean())


@cache
def needle() -> tuple[NeedleText, list[LayerMap]]:
    tokenizer = nano().tokenizer
    assert tokenizer is not None
    (text,) = needle_texts(tokenizer, nano().spec.bos_token_id, noise_of(prose(None)), 400, 1, "test")
    return text, MapReader(nano()).read(text.token_ids)[1]


def fact_kept(name: str, budget: str = "25%", **more: Any) -> float:
    """Of the attention that layer 1 pays to the needle's number, what would still find it."""
    text, maps = needle()
    config = config_of(name, budget, **(GIVEN | more))
    one = play(selector(config), config, maps, text.token_ids, text.answer.start)
    weights = found(maps[LOOKS_FAR]._replace(weights=maps[LOOKS_FAR].weights[text.answer.start - 1 :]), text)
    whole_layers = len(one.lines) == LAYERS
    shares = []
    for g in range(HEADS):
        index = one.lines.index((LOOKS_FAR, 0 if whole_layers else g))
        shares.append(np.isin(np.array(text.fact), one.cuts[0].kept[index]).mean())
    return float((weights * shares).sum() / weights.sum())


def test_maps_are_those_of_the_model_that_reads() -> None:
    ids = nano_reading().ids[:200]
    logits, maps = MapReader(nano()).read(ids)
    assert np.allclose(logits, ProgramScorer(nano(), BlasBackend()).logits(ids), atol=1e-3)
    assert [(m.layer, m.weights.shape) for m in maps] == [(n, (200, HEADS, 2, 200)) for n in range(LAYERS)]
    for m in maps:
        assert np.allclose(m.weights.sum(axis=-1), 1, atol=1e-5)
        assert not m.weights[np.triu_indices(200, 1)[0], :, :, np.triu_indices(200, 1)[1]].any()
    part = MapReader(nano()).read(ids, 150)[1]
    assert all(np.array_equal(b.weights, a.weights[150:]) for a, b in zip(maps, part, strict=True))


def test_with_everything_kept_all_attention_is_retained() -> None:
    for name in ("window", "snapkv", "h2o"):
        assert np.allclose(played(name, "100%").retained, 1, atol=1e-5)


def test_playing_loses_what_was_dropped_and_nothing_else() -> None:
    """A window of 64: behind the prompt, what lies further back than it did at the last selection."""
    one, reading = played("window", "64"), nano_reading()
    assert [cut.num_tokens for cut in one.cuts] == list(range(PROMPT, 449, 32))
    for t in (PROMPT, PROMPT + 31, PROMPT + 32, 447):
        first = PROMPT + (t - PROMPT) // 32 * 32 - 64
        expected = [m.weights[t, :, :, first : t + 1].sum(-1).mean() for m in reading.maps]
        assert np.allclose(one.retained[:, t - PROMPT], expected, atol=1e-5)


@pytest.mark.parametrize("name", ["h2o", "scissorhands"])
def test_steps_change_nothing_on_real_attention(name: str) -> None:
    config, reading = config_of(name, "25%", **GIVEN), nano_reading()
    again = play(selector(config), config, reading.maps, reading.ids, PROMPT, step=50)
    assert np.array_equal(again.retained, played(name, "25%").retained)


@pytest.mark.parametrize("budget", ["20%", "25%"])
@pytest.mark.parametrize("name", ["h2o", "scissorhands", "snapkv", "pyramidkv", "adakv", "fastgen", "retrieval"])
def test_F03_F04_F05_F06_F22_F23_F24_scores_are_better_than_chance(name: str, budget: str) -> None:
    assert played(name, budget).retained.mean() > played("random", budget).retained.mean() + 0.03


@pytest.mark.parametrize("name", ["scissorhands", "snapkv", "adakv", "fastgen"])
def test_F04_F05_F06_F23_at_a_quarter_scores_are_better_than_a_window(name: str) -> None:
    assert played(name, "25%").retained.mean() > played("window", "25%").retained.mean()


@pytest.mark.parametrize("budget", ["20%", "25%"])
@pytest.mark.parametrize("name", ["pyramidkv", "retrieval"])
def test_F22_F24_are_better_than_a_window_where_a_layer_looks_far(name: str, budget: str) -> None:
    """In the mean over all layers of nano, whose attention is mostly near, they are not; `h2o` is not even here."""
    assert of_layer(played(name, budget), LOOKS_FAR) > of_layer(played("window", budget), LOOKS_FAR)


def test_F01_sinks_cost_a_window_next_to_nothing() -> None:
    """nano has no attention sinks to speak of, so they are no gain either."""
    assert abs(played("streaming", "25%").retained.mean() - played("window", "25%").retained.mean()) < 0.005


@pytest.mark.parametrize("floor", [0.0, 0.2])
def test_F23_in_every_layer_adakv_keeps_at_least_what_equal_shares_do(floor: float) -> None:
    """By attention itself: votes of the last tokens without smoothing."""
    reading, given = nano_reading(), {"pool": 1, **GIVEN}
    lines = [
        line(range(PROMPT), layer=m.layer, head=g) for m in reading.maps for g in range(HEADS)
    ]  # fmt: skip
    for one in lines:
        rows = reading.maps[one.layer].weights[PROMPT - 32 : PROMPT, one.head, :, :PROMPT]
        one.recent = lambda rows=rows: rows  # type: ignore[misc]
    options = config_of("adakv", floor=floor, **given).options
    where = at(PROMPT, PROMPT // 4)
    ours = selector(config_of("adakv", floor=floor, **given)).select(where, lines)
    equal = selector(config_of("snapkv", **given)).select(where, lines)
    for n in range(LAYERS):
        a, b = (
            sum(votes(lines[i], where, options)[kept[i]].sum() for i in range(n * HEADS, (n + 1) * HEADS))
            for kept in (ours, equal)
        )
        assert a >= b - 1e-6
        assert sum(len(ours[i]) for i in range(n * HEADS, (n + 1) * HEADS)) <= HEADS * (PROMPT // 4)


def test_F05_the_cache_shrinks_as_far_as_the_threshold_lets_it() -> None:
    shares = [played("fastgen", "100%", (("threshold", t),)).kept_share for t in (0.7, 0.95, 1.0)]
    assert shares[0] < shares[1] < shares[2] == 1
    left = played("fastgen", "100%", (("threshold", 0.95),)).retained.mean()
    assert left > 0.95, "of tokens that were not there yet when policies were chosen"


def test_F24_a_fact_is_found_by_retrieval_heads_and_lost_without_them() -> None:
    assert fact_kept("retrieval") > 0.999
    assert fact_kept("retrieval", keep="streaming") < 0.1
    assert fact_kept("streaming") < 0.1


@pytest.mark.parametrize("name", ["snapkv", "pyramidkv", "adakv"])
def test_F06_F22_F23_a_fact_that_the_prompt_asks_for_survives_the_cut(name: str) -> None:
    """The question is in the window that votes. `h2o` and `scissorhands`, whose scores are of the past, lose it."""
    assert fact_kept(name, pool=15) > 0.9
    assert fact_kept(name, pool=15) > fact_kept("random") + 0.3


def test_F24_the_bundled_profile_is_of_these_weights_and_can_be_measured_again() -> None:
    made = selector(config_of("retrieval"))
    assert isinstance(made, Retrieval)
    (file,) = (Path(__file__).resolve().parents[2] / "src" / "penstock" / "bundled" / "nano").glob(PROFILE)
    kept = json.loads(file.read_text("utf-8"))
    assert kept["fingerprint"] == nano_mark()
    assert file.stat().st_size < 5000
    tokenizer = nano().tokenizer
    assert tokenizer is not None
    texts = needle_texts(tokenizer, nano().spec.bos_token_id, noise_of(SAMPLE), 300, 3)
    again = head_scores(MapReader(nano()), texts)
    assert again.right == 1
    for n, row in enumerate(kept["scores"]):
        assert np.abs(again.scores[n] - row).max() < 0.15
        assert (min(row) > 0.5) == (n == LOOKS_FAR)


def test_F24_the_number_stands_where_it_is_said_to() -> None:
    tokenizer = nano().tokenizer
    assert tokenizer is not None
    for text in needle_texts(tokenizer, 0, noise_of(SAMPLE), 300, 4):
        number = text.token_ids[text.answer.start :]
        assert text.token_ids[text.fact.start : text.fact.stop] == number
        assert len(text.token_ids) <= 300
        whole = tokenizer.decode(list(text.token_ids))
        assert whole.count(tokenizer.decode(list(number)).strip()) == 2
