"""Prompts that are cut because the request says so: `truncate_prompt_tokens`, as in vLLM. Nothing else cuts them."""

from __future__ import annotations

from dataclasses import replace

from penstock.base.errors import InputError
from penstock.core.compression import PromptCompression
from penstock.server.call import Prompt
from penstock.server.encoding import PromptFit
from penstock.text.limits import Limits


def check_truncation(most: int | None, limits: Limits, compression: PromptCompression | None = None) -> None:
    """Raises InputError."""
    if most is None:
        return
    room = limits.context[0]
    if not (most == -1 or 1 <= most <= room):
        raise InputError(
            f"truncate_prompt_tokens must be -1, for what leaves room for the answer, or from 1 to {room}, not {most}",
            param="truncate_prompt_tokens",
        )
    if compression is not None:
        raise InputError(
            "truncate_prompt_tokens and prompt_compression exclude each other; give one of them",
            param="truncate_prompt_tokens",
        )


def to_cut(most: int | None, limits: Limits) -> PromptFit | None:
    """How long a prompt may be that is to be cut; None: it is not."""
    return None if most is None else PromptFit.to_count(limits)


def truncated(prompt: Prompt, most: int | None, room: int, *, keep_first: bool = False) -> Prompt:
    """The last `most` tokens of a prompt, or the first ones; -1: as many as `room`."""
    if most is None:
        return prompt
    left = max(1, room if most == -1 else most)
    if len(prompt.ids) <= left:
        return prompt
    return replace(prompt, ids=prompt.ids[:left] if keep_first else prompt.ids[-left:], text=None)
