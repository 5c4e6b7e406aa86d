"""`penstock cap`: what is compared, and when the data may be said to show something."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import ConfigError
from penstock.cli.cap_page import triangle
from penstock.config import SETTINGS, from_kwargs
from penstock.eval.cap.board import Configuration, make_board, parse_with, read_board, told
from penstock.eval.cap.conditions import Conditions, grid, with_lengths
from penstock.eval.cap.context import ACCURACY, GRID_ENDS, MEMORY, Scores, context_of, gain_of
from penstock.eval.cap.fit import Seat
from penstock.eval.cap.labels import AXES, LABELS, label_of
from penstock.eval.cap.rounds import MOST_ROUNDS, num_wide, run_rounds
from penstock.eval.cap.speed import Speed
from penstock.eval.cap.text import token_kl
from penstock.eval.cap.verdict import Label, Measure, confirm, judge, measure, together, verdict
from penstock.eval.result import Scored, TaskResult, figure
from penstock.eval.run import Prepared
from penstock.eval.tasks import make_tasks
from penstock.eval.tasks.base import Example
from penstock.measure.intervals import ratio_interval

NANO = from_kwargs(model="nano")


# -- what is compared --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "settings"),
    [
        ("kv_cache_dtype=int8", "kv_cache_dtype=int8", {"kv_cache_dtype": "int8"}),
        ("small: kv_selector=snapkv, kv_budget=25%", "small", {"kv_selector": "snapkv", "kv_budget": "25%"}),
        ("quantization=int4-w4a8:128", "quantization=int4-w4a8:128", {"quantization": "int4-w4a8:128"}),
        ("y:rope_scaling={\"rope_type\":\"yarn\",\"factor\":2},block-size=16", "y",
         {"rope_scaling": '{"rope_type":"yarn","factor":2}', "block_size": 16}),
        ("max_num_batched_tokens=4K,enable_prefix_caching=off", "max_num_batched_tokens=4K,enable_prefix_caching=off",
         {"max_num_batched_tokens": 4096, "enable_prefix_caching": False}),
        ("swap_space=0.5,max_num_seqs=none", "swap_space=0.5,max_num_seqs=none",
         {"swap_space": 0.5, "max_num_seqs": None}),
    ],
)  # fmt: skip
def test_with_reads_settings_and_names(text: str, name: str, settings: dict[str, Any]) -> None:
    assert parse_with(text) == Configuration(name, settings)
    assert parse_with(told(settings)).settings == settings


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kv_cache_dtype", "name=value"),
        ("a=", "name=value"),
        ("", "name=value"),
        (":kv_cache_dtype=int8", "no name before the colon"),
        ('rope_scaling={"rope_type":"yarn"', "not closed"),
        ("block_size=4,block-size=8", "given twice"),
        ("block_size=many", "a whole number"),
        ("enable_prefix_caching=maybe", "true or false"),
        ("swap_space=x", "a number"),
    ],
)
def test_a_malformed_with_is_one_sentence(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_with(text)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kv_cache_dtypes": "int8"}, "did you mean kv_cache_dtype"),
        ({"kv_cache_dtype": "int7"}, "must be one of"),
        ({"kv_selector": "snapkv", "kv_budget": "0%"}, "keeps nothing"),
        ({"kv_selector": "snapkv", "kv_budget": "101%"}, "at most 100%"),
        ({"kv_selector": "snapkv+h2o"}, "names several"),
        ({"model": "pico"}, "has to be the same for all"),
        ({"kv_cache_memory_bytes": 5}, "--kv-memory is for all"),
        ({"block_size": 32}, "the same as 'full'"),
        ({}, "changes no setting"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match="'odd'") as error:
        make_board(NANO, [Configuration("good", {"block_size": 16}), Configuration("odd", settings)])
    assert says in str(error.value)


def test_the_plain_one_is_first_and_names_are_unique() -> None:
    int8 = Configuration("int8", {"kv_cache_dtype": "int8"})
    board = make_board(NANO, [int8])
    assert [one.name for one, _ in board] == ["full", "int8"]
    assert board[0][1] == NANO
    assert board[1][1].cache.kv_cache_dtype == "int8"
    with pytest.raises(ConfigError, match="nothing to compare"):
        make_board(NANO, [])
    with pytest.raises(ConfigError, match="the plain one"):
        make_board(NANO, [Configuration("full", {"block_size": 4})])
    with pytest.raises(ConfigError, match="called so"):
        make_board(NANO, [int8, Configuration("int8", {"block_size": 4})])


def test_a_board_file_has_a_table_per_configuration(tmp_path: Path) -> None:
    file = tmp_path / "board.toml"
    file.write_text('[int8]\nkv_cache_dtype = "int8"\n["YaRN x2"]\nrope_scaling = { rope_type = "yarn", factor = 2 }\n')
    assert [one.name for one in read_board(file)] == ["int8", "YaRN x2"]
    assert make_board(NANO, read_board(file))[2][1].model.rope_scaling == '{"factor": 2, "rope_type": "yarn"}'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read"), ("[a", "is not TOML"), ("", "has no configuration"),
        ("block_size = 3", "outside of a table"),
    ],
)  # fmt: skip
def test_a_malformed_board_file_is_one_sentence(tmp_path: Path, text: str | None, says: str) -> None:
    file = tmp_path / "board.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_board(file)


@pytest.mark.parametrize(
    "changes", [{"threshold": 0.0}, {"threshold": 1.5}, {"kv_memory": 0}, {"limit": 0}, {"rounds": 0},
                {"output_len": 1},
                {"speed_seconds": -1.0}, {"lengths": (32,)}, {"lengths": (512, 256)}, {"speed_tolerance": 1.0}],
)  # fmt: skip
def test_conditions_that_measure_nothing_are_refused(changes: dict[str, Any]) -> None:
    (needle, text) = make_tasks(["needle", "perplexity"])
    with pytest.raises(ConfigError, match="--" + next(iter(changes)).replace("_", "-")):
        Conditions(tasks=(), context=needle, text=text, **changes)


def test_the_grid_is_powers_of_two_and_the_end() -> None:
    assert grid(256, 2048) == (256, 512, 1024, 2048)
    assert grid(256, 3000) == (256, 512, 1024, 2048, 3000)
    assert grid(100, 100) == (100,)
    (needle, own, lookup) = make_tasks(["needle?depths=0", "needle?lengths=99", "lookup"])
    assert with_lengths(needle, (64, 128)).spec == "needle?depths=0&lengths=64+128"
    assert with_lengths(own, (64,)) is own
    assert with_lengths(lookup, (64,)) is lookup


# -- labels ------------------------------------------------------------------------------------------------------


def test_labels_are_of_settings_that_exist_and_of_the_six_types() -> None:
    assert set(LABELS) <= set(SETTINGS)
    assert all(label.axes in ("C", "A", "P", "CA", "CP", "AP") for label in LABELS.values())
    for settings, axes, exact in (
        ({"kv_selector": "snapkv", "kv_budget": "25%"}, "CP", False),
        ({"kv_selector": "quest"}, "P", False),
        ({"kv_cache_dtype": "int8"}, "CP", False),
        ({"kv_cache_dtype": "float32"}, "P", False),
        ({"quantization": "int8-w8a8"}, "P", False),
        ({"rope_scaling": '{"rope_type":"yarn","factor":2}'}, "C", False),
        ({"rope_scaling": '{"rope_type":"yarn","factor":2}', "quantization": "int8-wo"}, "CP", False),
        ({"speculative_config": '{"method":"ngram"}'}, "P", True),
        ({"speculative_config": '{"method":"ngram","verifier":"typical"}'}, "P", False),
        ({"enable_prefix_caching": False}, "P", True),
        ({"kv_budget": "5%"}, "", True),
    ):
        label = label_of(settings)
        assert (label.axes, label.exact) == (axes, exact), settings


# -- verdicts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval", "beyond", "word"),
    [
        ((0.06, 0.2), 0.05, "improved"), ((0.04, 0.2), 0.05, "not shown"), ((0.04, 0.2), 0.0, "improved"),
        ((-0.3, -0.06), 0.05, "worse"), ((-0.3, -0.04), 0.05, "not shown"), ((-0.04, 0.05), 0.05, "unchanged"),
        ((0.0, 0.0), 0.05, "unchanged"), ((0.01, 0.02), 0.0, "unchanged"), ((-0.2, 0.2), 0.0, "not shown"),
        (None, 0.0, "not shown"),
    ],
)  # fmt: skip
def test_only_an_interval_says_that_something_changed(interval: Any, beyond: float, word: str) -> None:
    assert judge(interval, same=0.05, beyond=beyond) == word


def gained(gain: float, low: float, high: float, *, axis: str = "P", name: str = "m") -> Measure:
    return measure(axis, name, "x", 1, 1 + gain, gain, (low, high), same=0.05, beyond=0.05)


BETTER, WORSE, SAME = gained(0.3, 0.2, 0.4), gained(-0.3, -0.4, -0.2), gained(0.0, -0.01, 0.01)
WIDE, WIDE_BETTER, WIDE_WORSE = gained(0.0, -0.5, 0.5), gained(0.6, -0.1, 1.7), gained(-0.38, -0.7, 0.3)


@pytest.mark.parametrize(
    ("measures", "word"),
    [
        ([BETTER, WIDE, SAME], "improved"), ([WORSE, SAME], "worse"), ([WORSE, BETTER], "mixed"),
        ([SAME, SAME], "unchanged"), ([SAME, WIDE], "not shown"), ([WIDE_BETTER], "not shown"), ([], "not shown"),
        ([BETTER, WIDE_BETTER], "improved"), ([WORSE, WIDE_WORSE], "worse"),
        ([BETTER, WIDE_WORSE], "mixed"), ([WORSE, WIDE_BETTER], "mixed"), ([WIDE_BETTER, WIDE_WORSE], "not shown"),
    ],
)  # fmt: skip
def test_measures_of_an_axis_come_together(measures: list[Measure], word: str) -> None:
    assert together(measures) == word


def test_memory_that_halved_does_not_hide_that_throughput_fell() -> None:
    """2,999 to 1,864 tokens per second on a loaded machine, where the interval of the ratio was wide."""
    counted = gained(0.78, 0.78, 0.78, name="KV memory of a request")
    timed = gained(1864 / 2999 - 1, -0.7, 0.3, name="throughput")
    judged = verdict(Label("CP", False, ""), [counted, timed])
    assert judged.words["P"] == "mixed"
    assert "better: KV memory of a request; worse: perhaps throughput" in judged.said
    assert judged.label != "confirmed"


def test_the_triangle_says_of_an_axis_what_the_table_says() -> None:
    from types import SimpleNamespace

    measures = [
        gained(1.0, 0.9, 1.1, axis="C", name="longest context"),
        gained(0.78, 0.78, 0.78, name="KV memory of a request"),
        gained(-0.38, -0.7, 0.3, name="throughput in the memory"),
        gained(0.0, -0.3, 0.3, axis="A", name="mean score of the tasks"),
    ]  # fmt: skip
    judged = verdict(Label("CP", False, ""), measures)
    row: Any = SimpleNamespace(name="x", measures=measures, verdict=judged)
    drawn = triangle(row, row)
    for said in ("C x2.00, improved", "P x0.62, mixed", "A x1.00, not shown"):
        assert said in drawn
    assert drawn.count('class="tip open"') == 2
    assert drawn.count('class="tip"') == 1


def test_a_corner_shows_the_measure_that_decided() -> None:
    from types import SimpleNamespace

    measures = [
        gained(-0.02, -0.04, 0.01, name="throughput in the memory"), gained(0.78, 0.78, 0.78, name="KV memory"),
    ]  # fmt: skip
    judged = verdict(Label("P", False, ""), measures)
    row: Any = SimpleNamespace(name="x", measures=measures, verdict=judged)
    drawn = triangle(row, row)
    assert "P x1.78, improved" in drawn
    assert ">KV memory<" in drawn


# -- how often speed is measured ---------------------------------------------------------------------------------


def conditions(**changes: Any) -> Conditions:
    (needle, text) = make_tasks(["needle", "perplexity"])
    return Conditions(tasks=(), context=needle, text=text, **changes)


def rounds_of(changes: dict[str, Any], ratio: Any, seconds: float = 1.0) -> tuple[Any, list[tuple[int, int]]]:
    """Rounds of two configurations; in round k the second takes `ratio(k)` times as long."""
    speeds, order, clock = [Speed(), Speed()], [], [0.0]
    wanted = conditions(**changes)

    def timed(i: int, number: int) -> None:
        order.append((i, number))
        clock[0] += seconds
        for column in (speeds[i].ttft_s, speeds[i].tpot_s, speeds[i].batch_s):
            column += [ratio(number) if i else 1.0] * wanted.repeats

    return run_rounds(speeds, wanted, timed, lambda: clock[0]), order


def test_rounds_end_when_intervals_can_be_read_and_alternate() -> None:
    found, order = rounds_of({"rounds": 4}, lambda k: 1.0 + 0.01 * (k % 2))
    assert found.number == 4
    assert "narrow enough" in found.why
    assert order == [(i, k) for k in range(4) for i in ((0, 1) if k % 2 == 0 else (1, 0))]
    assert found.busy is None or 0 <= found.busy <= 1


def test_a_noisy_machine_gets_more_rounds_until_the_time_is_over() -> None:
    noisy = lambda k: (0.6, 1.6, 1.0, 1.3)[k % 4]  # noqa: E731
    found, _ = rounds_of({"rounds": 4, "speed_seconds": 60.0}, noisy)
    assert found.number == 30, "two seconds a round"
    assert "3 of 3 intervals of times are still wide, and --speed-seconds 60 are over" in found.why
    assert rounds_of({"rounds": 4, "speed_seconds": 0.0}, noisy)[0].number == 4
    settled, _ = rounds_of({"rounds": 2, "speed_seconds": 1e9}, lambda k: 1.0 + 0.15 * (-1) ** k)
    assert 30 < settled.number < 50, "a spread of 15 % needs some 36 pairs for 5 %"
    assert rounds_of({"rounds": 2, "speed_seconds": 1e9}, noisy, 0.0)[0].number == MOST_ROUNDS


def test_an_interval_is_wide_by_its_width_not_by_where_it_lies() -> None:
    def pair(*ratios: float) -> list[Speed]:
        n = len(ratios)
        return [Speed(*[[1.0] * n] * 3), Speed(*[list(ratios)] * 3)]

    wanted = conditions()
    assert num_wide(pair(0.99, 1.0, 1.01), wanted) == 0
    assert num_wide(pair(0.8, 1.0, 1.25), wanted) == 3
    assert num_wide(pair(0.49, 0.5, 0.51), wanted) == 0, "twice as fast, give or take a tenth, can be read"
    assert num_wide(pair(2.0), wanted) == 3, "one round has no interval"


@pytest.mark.parametrize(
    ("axes", "exact", "found", "label"),
    [
        ("CP", False, ("improved", "worse", "improved"), "confirmed"),
        ("CP", False, ("improved", "worse", "unchanged"), "not confirmed"),
        ("CP", False, ("improved", "unchanged", "not shown"), "not shown"),
        ("P", False, ("unchanged", "unchanged", "mixed"), "in part"),
        ("P", True, ("unchanged", "worse", "improved"), "not confirmed"),
        ("P", False, ("unchanged", "worse", "improved"), "confirmed"),
        ("P", True, ("improved", "unchanged", "improved"), "more than declared"),
        ("", True, ("unchanged", "unchanged", "unchanged"), "nothing declared"),
    ],
)
def test_a_label_is_confirmed_only_by_the_axes_it_names(axes: str, exact: bool, found: Any, label: str) -> None:
    assert confirm(Label(axes, exact, ""), dict(zip(AXES, found, strict=True)))[0] == label


def test_the_trilemma_is_broken_by_three_improvements_only() -> None:
    def of(*gains: tuple[str, float]) -> bool:
        rows = [measure(a, a, "x", 1, 1 + g, g, (g - 0.01, g + 0.01), same=0.05, beyond=0.0) for a, g in gains]
        return verdict(Label("P", False, ""), rows).trilemma

    assert of(("C", 1.0), ("A", 0.0), ("P", 1.0))
    assert not of(("C", 1.0), ("A", 0.2), ("P", 1.0))


def test_ratios_of_pairs_have_student_s_interval() -> None:
    gain, interval = ratio_interval([2.0, 4.0, 8.0], [1.0, 2.0, 4.0])
    assert gain == pytest.approx(1.0)
    assert interval == pytest.approx((1.0, 1.0))
    assert ratio_interval([2.0], [1.0]) == (pytest.approx(1.0), None)
    gain, interval = ratio_interval([1.1, 1.0, 1.2], [1.0, 1.0, 1.0])
    logs = [math.log(x) for x in (1.1, 1.0, 1.2)]
    mean = sum(logs) / 3
    half = 4.303 * math.sqrt(sum((x - mean) ** 2 for x in logs) / 2 / 3)
    assert interval == pytest.approx((math.expm1(mean - half), math.expm1(mean + half)))


# -- KL and context ----------------------------------------------------------------------------------------------


def test_kl_over_the_top_and_the_rest_is_at_most_the_whole() -> None:
    p, q = {0: 0.5, 1: 0.3, 2: 0.15, 3: 0.05}, {0: 0.4, 1: 0.2, 2: 0.1, 3: 0.3}
    whole = sum(p[t] * math.log(p[t] / q[t]) for t in p)
    logs = [{t: math.log(v) for t, v in d.items()} for d in (p, q)]
    assert token_kl(*logs) == pytest.approx(whole, abs=1e-9)
    cut = [{t: d[t] for t in kept} for d, kept in zip(logs, ((0, 1), (0, 3)), strict=True)]
    want = 0.5 * math.log(0.5 / 0.4) + 0.5 * math.log(0.5 / 0.6)
    assert token_kl(*cut) == pytest.approx(want)
    assert token_kl(*cut) < whole
    assert token_kl(logs[0], logs[0]) == 0.0


def scores(*right: list[int]) -> Scores:
    """Right answers at 256, 512, ..., as far as they were asked."""
    flat = [(256 << k, float(x)) for k, xs in enumerate(right) for x in xs]
    examples = [Scored(scores={"accuracy": x, "found": x}, tags={"length": n}) for n, x in flat]
    (asked,) = make_tasks(["needle"])
    task = TaskResult(name="needle", task="needle", kind="generate", source="", digest="",
                      values=[figure(m, examples) for m in asked.task.metrics], examples=examples)  # fmt: skip
    return Scores(task, list(range(len(flat))), [n for n, _ in flat])


GRID = (256, 512, 1024)


def of(own: Scores, plain: Scores, fits: int = 1 << 20) -> Any:
    (asked,) = make_tasks(["needle"])
    examples = tuple(Example("", (1,), tags={"length": n}) for n in GRID)
    seat = Seat(Configuration("x", {}), NANO, 1 << 20, fits, 1)
    return context_of(own, plain, seat, Prepared(asked, examples, 0, ""), GRID, 0.9)


def test_the_longest_context_is_the_last_one_before_a_fall() -> None:
    full = scores([1] * 8, [1] * 8, [1] * 8)
    assert (of(full, full).longest, of(full, full).limited_by) == (1024, GRID_ENDS)
    fallen = of(scores([1] * 8, [0] * 4 + [1] * 4, [1] * 8), full)
    assert (fallen.longest, fallen.limited_by) == (256, ACCURACY)
    short = of(scores([1] * 8, [1] * 8), full, fits=600)
    assert (short.longest, short.limited_by) == (512, MEMORY)
    none = of(scores([0] * 8, [1] * 8, [1] * 8), full)
    assert (none.longest, none.limited_by) == (0, ACCURACY)


def test_the_gain_in_context_has_an_interval_over_pairs() -> None:
    full, short = scores([1] * 8, [1] * 8, [1] * 8), scores([1] * 8, [1] * 8)
    assert gain_of(full, full, GRID, "accuracy", 0.9) == (0.0, 0.0)
    assert gain_of(full, short, GRID, "accuracy", 0.9) == (1.0, 1.0)
    assert gain_of(short, full, GRID, "accuracy", 0.9) == (-0.5, -0.5)
    unsure = scores([1] * 8, [1] * 7 + [0], [1] * 8)
    low, high = gain_of(unsure, full, GRID, "accuracy", 0.9) or (0.0, 0.0)
    assert (low, high) == (-0.75, 0.0), "one of eight may or may not be drawn"
    assert gain_of(full, scores([0] * 8), GRID, "accuracy", 0.9) is None
