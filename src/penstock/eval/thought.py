"""What a model says once it has thought: judges never see a chain of thought that stands between marks.

Templates differ in who opens a thought: the model (`<think>` in its answer), or the template (the prompt ends with the
mark, and the answer holds only the closing one).
"""

from __future__ import annotations

_MARKS = (
    ("<think>", "</think>"), ("<thinking>", "</thinking>"), ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"), ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"),
)  # fmt: skip


_HARMONY = "assistantfinal"
"""What is left of gpt-oss's marks once special tokens are dropped."""


def spoken(text: str, *, opened: bool = False) -> str | None:
    """`text` behind its last thought; all of it if there is none; None if a thought never ends.

    `opened`: the prompt ended within a thought.
    """
    if text.startswith("analysis") and opened is False and (final := text.rpartition(_HARMONY)[1:])[0]:
        return final[1]
    for begin, end in _MARKS:
        _, closed, behind = text.rpartition(end)
        if closed:
            # Behind a closed thought another one may begin, and not end.
            return spoken(behind)
        if text.lstrip().startswith(begin):
            return None
    return None if opened else text


def opens_thought(prompt: str) -> bool:
    """Whether a prompt, as text, ends within a thought."""
    return prompt.rstrip().endswith(tuple(begin for begin, _ in _MARKS))


def may_think(template: str) -> bool:
    """Whether a chat template knows thoughts: models of such templates think before they answer."""
    return any(begin in template for begin, _ in _MARKS)
