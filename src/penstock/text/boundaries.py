"""Where messages end within a prompt, in tokens.

A template is free to put anything anywhere, so no end can be computed from the messages. But a prompt and that of the
same conversation with other text behind a message agree up to there: the tokens they begin with alike are what does not
depend on what follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

MARKS = "~#"
"""What stands before a text that is changed: whichever it does not begin with."""


def num_common(ids: Sequence[int], others: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, others, strict=False)))


def other_text(text: str) -> str:
    """A text that does not begin as `text` does."""
    return MARKS[text.lstrip().startswith(MARKS[0])] + text


def changed_after(messages: Sequence[Mapping[str, Any]], num: int) -> list[Mapping[str, Any]] | None:
    """The same conversation, in chat's shapes, with other text behind its first `num` messages; None: there is none."""
    for n in range(num, len(messages)):
        content = messages[n].get("content")
        if isinstance(content, str) and content:
            changed: Any = other_text(content)
        elif isinstance(content, list) and any(_is_text(part) for part in content):
            first = next(i for i, part in enumerate(content) if _is_text(part))
            changed = [*content[:first], {**content[first], "text": other_text(content[first]["text"])},
                       *content[first + 1 :]]  # fmt: skip
        else:
            continue
        return [*messages[:n], {**messages[n], "content": changed}, *messages[n + 1 :]]
    return None


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str) and bool(part["text"])
