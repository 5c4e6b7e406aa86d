"""How often repeats within repeats come to repeat, counted before anything is compiled."""

from __future__ import annotations

import pytest

from penstock.base.errors import InputError
from penstock.text.grammar.nesting import check_repeats, regex_repeats, rule_repeats
from tests.speed import cpu_within


@pytest.mark.parametrize(
    ("regex", "times"),
    [
        ("abc", 1),
        ("a{3}b{7}", 7),
        ("a{3}{7}", 21),
        ("(a{3}){7}", 21),
        ("(a{30}b{2}){7}", 210),
        ("((a{2}){3}b){5}", 30),
        ("(a{9})(b){2}", 9),
        ("(a{9}(b){2}){2}", 18),
        ("((a{9})b){2}", 18),
        ("[{9}]{4}", 4),
        (r"\(a{3}\){7}", 7),
        ("a{2,5}", 5),
        ("a{0,}", 1),
        ("(" * 50 + "a" + "){99}" * 50, 10**12),
    ],
)
def test_repeats_of_a_regular_expression(regex: str, times: int) -> None:
    assert regex_repeats(regex) == times


@pytest.mark.parametrize(
    ("grammar", "times"),
    [
        ('start: a\na: "x"', 1),
        ('start: a~3\na: b~5\nb: "x"~7', 105),
        ("start: a~3\na: /(x{5}){2}/", 30),
        ("root ::= a{3}\na ::= [x]{5} root", 15),
        ('start: "a~99"\n', 1),
        ("start: a // a~99\na: /x/\n", 1),
        ("start: a~1..4\na: /x/", 4),
    ],
)
def test_repeats_through_the_rules_of_a_grammar(grammar: str, times: int) -> None:
    assert rule_repeats(grammar) == times


def test_long_chains_and_circles_of_rules_take_no_time() -> None:
    chain = "\n".join(f"r{i}: r{i + 1}~9" for i in range(2000)) + '\nr2000: "x"'
    with cpu_within(2):
        assert rule_repeats("start: r0\n" + chain) == 10**12
        assert rule_repeats("start: a~2 b\na: b~3 start\nb: a start") >= 6


def test_more_than_is_allowed_is_refused_with_both_numbers() -> None:
    check_repeats(100, 100, "pattern")
    with pytest.raises(InputError, match=r"pattern.*101.*at most 100"):
        check_repeats(101, 100, "pattern")
