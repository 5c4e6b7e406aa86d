"""How much memory a sequence holds whose cache is cut down on its way: planner, admission and growth agree on it.

Before its first cut it holds all it has computed; from then on what the last selection left, and what came since.
"""

from __future__ import annotations

import math

from penstock.config.selection import Keeping
from penstock.core.sequence import NEVER


def blocks_of(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def num_over(keeping: Keeping, num_tokens: int, dropped: int, block_size: int) -> int:
    """What has to go of a line that has dropped so many of `num_tokens` tokens: tokens, or whole blocks."""
    over = num_tokens - dropped - keeping.config.budget.of(num_tokens)
    if keeping.drops == "tokens":
        return max(over, 1) if keeping.always else over
    # The blocks of the sinks stay, and what the newest tokens stand in.
    blocks = (num_tokens - dropped) // block_size - blocks_of(keeping.config.options.sinks, block_size)
    return min(blocks_of(max(over, 0), block_size), blocks)


def first_cut(keeping: Keeping, prompt_len: int, block_size: int) -> int:
    """How many tokens a sequence has computed when it first gives up anything; NEVER if it never does."""
    if keeping.drops == "nothing" or _uncut(keeping, block_size) == NEVER:
        return NEVER
    budget = keeping.config.budget
    at = 0 if keeping.always or budget.tokens is None else budget.tokens
    while True:
        at = keeping.config.next_position(at, prompt_len)
        if num_over(keeping, at, 0, block_size) > 0:
            return at


def kept_blocks(keeping: Keeping, num_tokens: int, block_size: int) -> int:
    """Blocks for what a selection keeps of `num_tokens` tokens, however unevenly lines share it."""
    kept = keeping.config.budget.of(num_tokens)
    if keeping.drops == "tokens":
        return blocks_of(kept + block_size - 1, block_size)
    # Whole blocks: those of the sinks stay, and the newest, in which the next token may stand.
    return max(blocks_of(kept, block_size), blocks_of(keeping.config.options.sinks, block_size)) + 1


def most_chosen(keeping: Keeping, num_tokens: int, block_size: int, prompt_len: int | None = None) -> int:
    """Blocks besides all that a sequence has of up to `num_tokens` tokens, where nothing is lost: of what was chosen,
    of what came since, and one that others look at, too."""
    first = _uncut(keeping, block_size) if prompt_len is None else first_cut(keeping, prompt_len, block_size)
    if first > num_tokens:
        return 0
    options = keeping.config.options
    gap = max(options.interval, options.prompt_interval)
    return kept_blocks(keeping, num_tokens, block_size) + blocks_of(gap, block_size) + 1


def most_blocks(
    keeping: Keeping, num_tokens: int, block_size: int, prompt_len: int | None = None, *, was_cut: bool = False
) -> int:
    """The most that a sequence of up to `num_tokens` tokens holds at any one time, with memory of its own.

    `prompt_len`: of its prompt; None: whichever needs most. `was_cut`: from where it has given something up.
    """
    whole, options = blocks_of(num_tokens, block_size), keeping.config.options
    if keeping.drops == "nothing":
        return whole
    if keeping.aside:
        return whole + most_chosen(keeping, num_tokens, block_size, prompt_len)
    gap = max(options.prompt_interval or num_tokens, options.interval)
    if prompt_len is None:
        first = _uncut(keeping, block_size) + gap
    else:
        first = first_cut(keeping, prompt_len, block_size)
        if first >= prompt_len:
            gap = options.interval
    if first > num_tokens and not was_cut:
        return whole
    later = kept_blocks(keeping, num_tokens, block_size) + blocks_of(gap, block_size)
    return min(whole, later if was_cut else max(blocks_of(first, block_size), later))


def _uncut(keeping: Keeping, block_size: int) -> int:
    """At least the longest length of which nothing has to go; NEVER if nothing ever has to."""
    budget = keeping.config.budget
    if keeping.always:
        return 0
    if budget.tokens is None and budget.share >= 1:
        return NEVER
    longest = math.ceil(1 / (1 - budget.share)) if budget.tokens is None else budget.tokens
    if keeping.drops == "tokens":
        return longest
    return max(longest, (blocks_of(keeping.config.options.sinks, block_size) + 1) * block_size)
