"""From hints as clients write them to the engine's: messages become tokens, keys become rights.

What a key may: pin up to its part of `--kv-pin-share`, and share blocks with the other keys of its `kv_group`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.base.errors import InputError
from penstock.core.kv_hints import WHOLE, AskedHint, KVHint
from penstock.server.call import Prompt
from penstock.text.boundaries import changed_after, num_common

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Bound:
    """A hint on the blocks up to some place of a conversation. `changed`: the conversation with other text behind it;
    None: there is nothing behind it."""

    hint: KVHint
    changed: Sequence[Message] | None = None


def bounds_of(asked: Sequence[AskedHint], messages: Sequence[Message]) -> list[Bound]:
    """Hints with `messages` end there. Raises InputError for more messages than there are."""
    found = []
    for one in asked:
        num = one.num_messages
        if num is not None and num > len(messages):
            raise InputError(f"{one.param}.messages is {num}, but there are {len(messages)}",
                             param=f"{one.param}.messages")  # fmt: skip
        found.append(Bound(one.hint, None if num is None else changed_after(messages, num)))
    return found


async def in_tokens(
    bounds: Sequence[Bound], prompt: Prompt, encode: Callable[[Sequence[Message]], Awaitable[Prompt]], *, whole: bool
) -> list[KVHint]:
    """The hints in tokens of `prompt`. `encode`: makes a prompt of messages as that was made; `whole`: it was cut or
    compressed meanwhile, and hints on a part of it are on all of it.

    A template that refuses the changed conversation leaves the hint on all of the prompt.
    """
    out, known = [], {}
    for bound in bounds:
        hint, changed = bound.hint, bound.changed
        if changed is not None and not whole:
            if id(changed) not in known:
                try:
                    known[id(changed)] = num_common(prompt.ids, (await encode(changed)).ids)
                except InputError:
                    known[id(changed)] = len(prompt.ids)
            hint = msgspec.structs.replace(hint, num_tokens=known[id(changed)])
        out.append(hint)
    return [_of_prompt(hint, prompt) for hint in out]


def _of_prompt(hint: KVHint, prompt: Prompt) -> KVHint:
    """What is pinned is counted before it is asked for, so an answer is not pinned."""
    if hint.action != "pin":
        return hint
    known = len(prompt.ids)
    return msgspec.structs.replace(hint, num_tokens=known if hint.num_tokens == WHOLE else min(known, hint.num_tokens))


def of_prompt(hints: Sequence[KVHint], prompt: Prompt) -> list[KVHint]:
    """Of a prompt that is no conversation."""
    return [_of_prompt(hint, prompt) for hint in hints]


def written(hints: Sequence[KVHint], num_prompt: int, num_cached: int, block_size: int) -> dict[float, int]:
    """Seconds to live -> tokens of the prompt that were computed and are retained for so long, whole blocks of them."""
    out: dict[float, int] = {}
    done = num_cached
    kept = [hint for hint in hints if hint.action in ("retain", "pin")]
    for hint in sorted(kept, key=lambda hint: -hint.ttl_s):
        end = num_prompt if hint.num_tokens == WHOLE else min(num_prompt, hint.num_tokens)
        end = end // block_size * block_size
        if end > done:
            out[hint.ttl_s] = out.get(hint.ttl_s, 0) + end - done
            done = end
    return out
