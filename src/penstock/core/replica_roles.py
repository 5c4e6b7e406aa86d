"""What engines of one server are for: prompts, tokens, or both.

Source: Splitwise (Patel et al., arXiv 2311.18677, section 4): a pool for prompts, one for tokens, and a mixed one.
"""

from __future__ import annotations

from collections.abc import Sequence

PREFILL, DECODE, MIXED = "prefill", "decode", "mixed"
ROLES = (PREFILL, DECODE, MIXED)


def problem_of(roles: Sequence[str]) -> str:
    """What keeps engines from having these roles, in a sentence; "" if nothing does."""
    for role in roles:
        if role not in ROLES:
            return f"{role[:40]!r} is no role; there are {', '.join(ROLES)}"
    for needed, what in ((PREFILL, "prompts"), (DECODE, "tokens")):
        if not {needed, MIXED} & set(roles):
            return f"no engine would be left for {what}: one has to be {needed} or {MIXED}"
    return ""


def roles_of(text: str, size: int) -> list[str]:
    """`prefill=1,decode=3` as a role for each of `size` engines, in that order; those left over are mixed.

    Raises ValueError with what is wrong, in a sentence.
    """
    roles: list[str] = []
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if name not in ROLES or not number.isdecimal():
            raise ValueError(f"{part.strip()[:40]!r} is none of prefill=N, decode=N, mixed=N")
        roles += [name] * int(number)
    if len(roles) > size:
        raise ValueError(f"{text} are {len(roles)} engines, and data_parallel_size is {size}")
    roles += [MIXED] * (size - len(roles))
    if problem := problem_of(roles):
        raise ValueError(problem)
    return roles
