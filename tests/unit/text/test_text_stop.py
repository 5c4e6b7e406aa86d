"""Stop strings against the definition: look at the whole text after every character."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.text.stop import StopMatcher

SMALL = st.text(st.sampled_from("ab"), min_size=1, max_size=4)


def naive(tokens, stops, include, min_tokens):
    """(text, hit): the stop string that first ends in text after the first `min_tokens` tokens; longest of equals."""
    text = "".join(tokens)
    floor = len("".join(tokens[:min_tokens]))
    for end in range(floor + 1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


@settings(max_examples=600, deadline=None)
@given(
    tokens=st.lists(st.text(st.sampled_from("abc"), max_size=4), max_size=12),
    stops=st.lists(SMALL, min_size=1, max_size=4),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
)
@example(tokens=["ab", "ab", "aba"], stops=["ababa", "bb"], include=False, min_tokens=0)
@example(tokens=["a", "a", "a", "b"], stops=["aab"], include=False, min_tokens=0)
@example(tokens=["ab", "a", "b"], stops=["ab"], include=False, min_tokens=1)
def test_matches_the_definition(tokens, stops, include, min_tokens):
    matcher = StopMatcher(stops, include, min_tokens)
    shown, hit = "", None
    text, stop = naive(tokens, stops, include, min_tokens)
    seen = 0
    for token in tokens:
        seen += len(token)
        emit, hit = matcher.feed(token)
        shown += emit
        assert text.startswith(shown)  # never anything of a stop string, nor behind it
        if hit is not None:
            break
        # Held back is only what could still become a stop string.
        held = "".join(tokens)[len(shown) : seen]
        assert held == "" or any(s.startswith(held) for s in stops)
        assert len(held) < max(map(len, stops))
    assert hit == stop
    assert shown + matcher.flush() == text
    if hit is None:
        assert matcher.flush() == ""


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(st.sampled_from("abc"), max_size=30),
    stops=st.lists(SMALL, min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=6),
    include=st.booleans(),
)
def test_result_does_not_depend_on_how_the_text_is_cut(text, stops, cuts, include):
    bounds = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    matcher = StopMatcher(stops, include)
    out, hit = "", None
    for a, b in pairwise(bounds):
        emit, hit = matcher.feed(text[a:b])
        out += emit
    assert (out + matcher.flush(), hit) == naive([text], stops, include, 0)


def test_a_stop_string_over_many_deltas_is_never_shown():
    matcher = StopMatcher(["<|end|>"])
    assert [matcher.feed(c) for c in "x<|end"] == [("x", None)] + [("", None)] * 5
    assert matcher.feed("|>tail") == ("", "<|end|>")
    assert matcher.feed("more") == ("", "<|end|>")
    assert matcher.flush() == ""
    assert matcher.hit == "<|end|>"


def test_text_that_was_no_stop_string_after_all_is_shown():
    matcher = StopMatcher(["\n\nUser:", "###"])
    assert matcher.feed("Hi\n") == ("Hi", None)
    assert matcher.feed("\n#") == ("\n\n", None)
    assert matcher.feed("1") == ("#1", None)
    assert matcher.feed("\n\nUser") == ("", None)
    assert matcher.flush() == "\n\nUser"


def test_included_stop_strings_end_the_text():
    matcher = StopMatcher(["END", "DE"], include_stop=True)
    assert matcher.feed("aEN") == ("a", None)
    assert matcher.feed("DE") == ("END", "END")


def test_ties_go_to_the_longest_and_otherwise_to_the_first_end():
    assert StopMatcher(["b", "ab"]).feed("xab") == ("x", "ab")
    assert StopMatcher(["abc", "b"]).feed("abc") == ("a", "b")


def test_min_tokens_lets_text_of_the_first_tokens_pass():
    matcher = StopMatcher(["ab"], min_tokens=2)
    assert matcher.feed("ab") == ("ab", None)
    assert matcher.feed("xa") == ("x", None)
    assert matcher.feed("b") == ("", "ab")  # begins before, ends behind the second token
    many = StopMatcher(["ab"], min_tokens=2)
    assert many.feed("ab", num_tokens=3) == ("", "ab")


def test_without_stop_strings_everything_passes():
    assert StopMatcher([]).feed("abc") == ("abc", None)
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def test_hostile_stop_strings_cost_a_bounded_number_of_steps():
    """64 strings of 4096 characters that share everything but their end: memory and steps stay linear."""
    stops = ["a" * 4095 + chr(0x100 + i) for i in range(64)]
    matcher = StopMatcher(stops)
    shown = ""
    for _ in range(5):
        emit, hit = matcher.feed("a" * 1000)
        shown += emit
        assert hit is None
    assert len(shown) == 5000 - 4095
    emit, hit = matcher.feed(chr(0x100 + 7))
    assert (len(emit), hit) == (0, stops[7])
