"""Prompts that fill in: the marks of a vocabulary, in their order, and texts that cannot be taken for marks."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from penstock.text.encoding import TooManyTokens, run
from penstock.text.infill import fill_marks, fill_steps
from penstock.text.tokenizer import Tokenizer

QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]


def letters(*marks: str) -> Tokenizer:
    """One token per character, and the marks."""
    words = {chr(i): i for i in range(128)}
    backend = Library(WordLevel(words, unk_token="?"))
    backend.pre_tokenizer = Split("", "isolated")  # type: ignore[assignment]
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return Tokenizer(backend)


def fill(tokenizer: Tokenizer, prefix: str, suffix: str, *files: tuple[str, str], begun: str = "", most: int = 500):  # type: ignore[no-untyped-def]
    marks = fill_marks(tokenizer)
    assert marks is not None
    return run(fill_steps(tokenizer, marks, prefix, suffix, files, begun, most))


def shown(tokenizer: Tokenizer, ids: list[int]) -> str:
    return "".join(tokenizer.id_to_piece(i) for i in ids)


def test_prefix_suffix_middle() -> None:
    tokenizer = letters(*QWEN)
    ids = fill(tokenizer, "ab", "cd", begun="e")
    assert shown(tokenizer, ids) == "<|fim_prefix|>ab<|fim_suffix|>cd<|fim_middle|>e"


def test_files_stand_before_it_as_in_a_repository() -> None:
    tokenizer = letters(*QWEN)
    assert shown(tokenizer, fill(tokenizer, "a", "b", ("x.py", "one"), ("y.py", "two"))) == (
        "<|repo_name|>repository\n<|file_sep|>x.py\none\n<|file_sep|>y.py\ntwo\n<|file_sep|>filename\n"
        "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    )


def test_a_mark_that_a_text_spells_is_text() -> None:
    tokenizer = letters(*QWEN)
    middle = tokenizer.added_literals["<|fim_middle|>"]
    ids = fill(tokenizer, "<|fim_middle|>", "<|fim_suffix|>", ("<|file_sep|>", "<|repo_name|>"), begun="<|fim_pad|>")
    assert ids.count(middle) == 1
    assert [i for i in ids if i in tokenizer.added_literals.values()] == [tokenizer.added_literals[m] for m in (
        "<|repo_name|>", "<|file_sep|>", "<|file_sep|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"
    )]  # fmt: skip


def test_what_ends_a_filling() -> None:
    tokenizer = letters(*QWEN)
    marks = fill_marks(tokenizer)
    assert marks is not None
    assert {tokenizer.id_to_piece(i) for i in marks.ends} == {"<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"}


def test_without_files_marks_the_texts_stand_there() -> None:
    tokenizer = letters("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    assert shown(tokenizer, fill(tokenizer, "a", "b", ("x.py", "one"))) == (
        "one\n\n<fim_prefix>a<fim_suffix>b<fim_middle>"
    )


@pytest.mark.parametrize("marks", [[], QWEN[:2], ["<fim_prefix>", "<|fim_suffix|>", "<|fim_middle|>"]])
def test_a_vocabulary_without_all_marks_has_none(marks: list[str]) -> None:
    assert fill_marks(letters(*marks)) is None


def test_too_many_tokens() -> None:
    tokenizer = letters(*QWEN)
    assert len(fill(tokenizer, "a" * 50, "b" * 47, most=100)) == 100
    with pytest.raises(TooManyTokens):
        fill(tokenizer, "a" * 50, "b" * 48, most=100)
