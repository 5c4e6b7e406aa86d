"""Decisions offline: the questions of one call to an engine in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from penstock.base.errors import EngineError, InputError
from penstock.core.output import RequestOutput
from penstock.text.decisions import (
    DecisionQuestion,
    Ids,
    Judgement,
    asked,
    check_question,
    check_reading,
    judge,
    label_tree,
    wording,
)
from penstock.text.tokenizer import Tokenizer

P = TypeVar("P")


def decide(
    tokenizer: Tokenizer, vocab_size: int, given: str | Sequence[Mapping[str, Any]],
    questions: Sequence[DecisionQuestion], encode: Callable[[Sequence[Mapping[str, Any]]], P],
    run: Callable[[Sequence[tuple[P, Ids, list[int]]]], list[RequestOutput]], *, temperature: float,
    min_label_mass: float,
) -> list[Judgement]:  # fmt: skip
    """See `LLM.decide`. `encode`: a conversation as a prompt; `run`: what came of (prompt, ids behind it, tokens to
    tell of). Raises InputError, EngineError."""
    check_reading(temperature, min_label_mass)
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
    if not messages or not given:
        raise InputError("input must not be empty", param="input")
    for question in questions:
        check_question(question)
    trees = [label_tree(tokenizer, question, vocab_size) for question in questions]
    prompts = [encode(asked(messages, wording(q, tree.names))) for q, tree in zip(questions, trees, strict=True)]
    runs = [(i, before, tokens) for i, tree in enumerate(trees) for before, tokens in tree.runs]
    found: list[dict[Ids, dict[int, float]]] = [{} for _ in trees]
    for part in (runs[:1], runs[1:]):  # the first one computes what all share
        outputs = run([(prompts[i], before, tokens) for i, before, tokens in part])
        for (i, before, _), output in zip(part, outputs, strict=True):
            if output.error is not None:
                raise EngineError(output.error)
            entries = output.outputs[0].logprobs or [{}]
            found[i][before] = {token: entry.logprob for token, entry in entries[0].items()}
    reading = {"temperature": temperature, "min_label_mass": min_label_mass}
    return [judge(tree.read(read), **reading) for tree, read in zip(trees, found, strict=True)]
