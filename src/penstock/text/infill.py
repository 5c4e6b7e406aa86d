"""Filling in code between a prefix and a suffix, with the tokens that a model was taught it by.

Sources: Bavarian et al., "Efficient Training of Language Models to Fill in the Middle" (2022), prefix-suffix-middle
order; Hui et al., "Qwen2.5-Coder Technical Report" (2024), sections 3.1 and 3.2, for the files of a repository.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.text.encoding import Steps, TooManyTokens, bounded

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder, Refact
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
)
_REPOSITORY = ("<|repo_name|>", "<repo_name>", "<reponame>")
_FILE = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")
_ENDS = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|endoftext|>", "▁<EOT>", *_REPOSITORY, *_FILE)


@dataclass(frozen=True)
class FillMarks:
    """Ids of a vocabulary's marks. `ends`: what a model writes when the gap is filled, besides its end of sequence."""

    prefix: int
    suffix: int
    middle: int
    repository: int | None
    file: int | None
    ends: tuple[int, ...]


def fill_marks(tokenizer: Tokenizer) -> FillMarks | None:
    """None: this vocabulary has no marks."""

    def first(literals: Sequence[str]) -> int | None:
        return next((i for i in map(tokenizer.piece_to_id, literals) if i is not None), None)

    for literals in _MARKS:
        ids = [i for i in map(tokenizer.piece_to_id, literals) if i is not None]
        if len(ids) == len(literals):
            ends = tuple(i for i in map(tokenizer.piece_to_id, _ENDS) if i is not None)
            return FillMarks(ids[0], ids[1], ids[2], first(_REPOSITORY), first(_FILE), ends)
    return None


def fill_steps(
    tokenizer: Tokenizer, marks: FillMarks, prefix: str, suffix: str, files: Sequence[tuple[str, str]], begun: str,
    most: int,
) -> Steps[list[int]]:  # fmt: skip
    """Ids of a prompt, in steps. `files`: names and texts around it; `begun`: what the filling begins with.

    The texts are read as nothing but text: a mark that they spell is none. Raises: TooManyTokens, InputError.
    """
    texts = [*(text for file in files for text in file), prefix, suffix, begun]
    yield from bounded(tokenizer, "".join(texts), most)

    def plain(text: str) -> list[int]:
        return tokenizer.encode_plain(text) if text else []

    probe = tokenizer.encode("a")
    out = [tokenizer.bos_id] if tokenizer.bos_id is not None and probe[:1] == [tokenizer.bos_id] else []
    if files and marks.repository is not None and marks.file is not None:
        out += [marks.repository, *plain("repository\n")]
    for name, text in files:
        yield len(text)
        out += plain(f"{text}\n\n") if marks.file is None else [marks.file, *plain(f"{name}\n{text}\n")]
    if files and marks.file is not None:
        out += [marks.file, *plain("filename\n")]
    yield len(prefix) + len(suffix)
    out += [marks.prefix, *plain(prefix), marks.suffix, *plain(suffix), marks.middle, *plain(begun)]
    if len(out) > most:
        raise TooManyTokens(len(out), exact=True)
    return out
