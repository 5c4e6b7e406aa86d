"""`function`: anybody's drafts."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import ConfigError
from penstock.config import SpeculativeConfig
from penstock.core.draft import NO_DRAFT, DraftTree
from penstock.drafters import DRAFTERS
from penstock.drafters.bench import DraftBench
from penstock.drafters.function import FunctionDrafter
from tests.drafting import answer, job


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = ModuleType("my_drafter")
    monkeypatch.setitem(sys.modules, "my_drafter", found)
    return found


def make(name: str | None, encode: Any = None) -> Any:
    nothing: Any = None
    config = SpeculativeConfig(method="function", function=name)
    return DRAFTERS.get("function")(
        DraftBench(config=config, vocab_size=50, rows=nothing, storage=nothing, encode=encode)
    )


def says(said: Any, **more: Any) -> DraftTree:
    (tree,) = FunctionDrafter(lambda tokens, count: said, None).propose([job([1, 2, 3], **more)])
    return tree


def test_it_is_told_the_tokens_and_how_many_are_wanted(module: ModuleType) -> None:
    heard = []

    def propose(tokens: list[int], count: int) -> list[int]:
        heard.append((tokens, count))
        return [7, 8]

    module.propose = propose  # type: ignore[attr-defined]
    (tree,) = make("my_drafter:propose").propose([job([1, 2, 3], num_nodes=9, max_depth=4)])
    assert heard == [([1, 2, 3], 4)]
    assert tree == DraftTree([7, 8], [-1, 0])


@pytest.mark.parametrize("nothing", [None, [], (), [[]], np.zeros(0, np.int64)])
def test_it_may_have_none(nothing: Any) -> None:
    assert says(nothing) == NO_DRAFT


def test_it_may_have_several() -> None:
    assert says([[1, 2], [1, 3], [4]]) == DraftTree([1, 2, 3, 4], [-1, 0, 0, -1])
    assert says([[1, 2], [1, 3]], chain_only=True) == DraftTree([1, 2], [-1, 0])
    assert says(np.array([5, 6])) == DraftTree([5, 6], [-1, 0])
    assert says(i for i in (5, 6)) == DraftTree([5, 6], [-1, 0])
    assert says(list(range(20)), num_nodes=3) == DraftTree([0, 1, 2], [-1, 0, 1])


def test_it_may_say_it_in_words(module: ModuleType) -> None:
    def propose(tokens: list[int], count: int) -> Any:
        return "ab" if tokens == [1] else ["ab", "", "ac"]

    propose.text = True  # type: ignore[attr-defined]
    module.propose = propose  # type: ignore[attr-defined]
    drafter = make("my_drafter:propose", encode=lambda text: [ord(c) - 96 for c in text])
    assert drafter.propose([job([1]), job([2])]) == [DraftTree([1, 2], [-1, 0]), DraftTree([1, 2, 3], [-1, 0, 0])]
    with pytest.raises(ConfigError, match="has no tokenizer"):
        make("my_drafter:propose")


@pytest.mark.parametrize("wrong", ["text", [1.5], [["a"]], 7, [[1], 2], {"a": 1}])
def test_what_is_no_draft_is_none(wrong: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert says(wrong) == NO_DRAFT
    assert "the drafter function failed" in caplog.text


def test_a_failure_costs_one_sequence_one_step(caplog: pytest.LogCaptureFixture) -> None:
    def propose(tokens: list[int], count: int) -> list[int]:
        return [1 // tokens[0]]

    drafter = FunctionDrafter(propose, None)
    for _ in range(3):
        trees = drafter.propose([job([1]), job([0]), job([1])])
        assert [tree.token_ids for tree in trees] == [[1], [], [1]]
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (None, "needs one"), ("my_drafter", "form module:name"), (":propose", "form module:name"),
        ("no_such_module:propose", "cannot be imported.*PYTHONPATH"), ("my_drafter:nothing", "does not exist"),
        ("my_drafter:number", "cannot be called"), (".relative:x", "fails when it is imported"),
    ],
)  # fmt: skip
def test_a_function_that_is_none_is_refused(module: ModuleType, name: str | None, why: str) -> None:
    module.number = 7  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=why) as error:
        make(name)
    assert error.value.field == "speculative_config"


def test_D33_a_user_s_function_drafts_and_changes_no_token() -> None:
    """Right drafts save steps, wrong ones and failures do not change the output, greedy or sampled."""
    prompt = "Once upon a time there was a cat. "
    draws: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 8}]
    for sampling in draws:
        plain = answer(prompt, None, **sampling)
        told = plain.token_ids[0]

        def oracle(tokens: list[int], count: int, told: list[int] = told) -> list[int]:
            done = next(n for n in range(len(told), -1, -1) if tokens[len(tokens) - n :] == told[:n])
            return told[done : done + count]

        def liar(tokens: list[int], count: int) -> list[list[int]]:
            return [[tokens[-1] + i, 5, -3, 10**6] for i in range(count)]

        def broken(tokens: list[int], count: int) -> list[int]:
            raise RuntimeError("no")

        for function, most in ((oracle, 12), (liar, 64), (broken, 64)):
            drafted = answer(prompt, FunctionDrafter(function, None), 8, **sampling)
            assert drafted.token_ids == plain.token_ids
            assert drafted.num_steps <= most, (function, drafted)
