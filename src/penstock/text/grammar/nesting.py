"""How often repeats within repeats come to repeat: what compiles in no time may explode when it is used.

`((a{1,1000}){1,1000}){1,1000}` has few characters and 10^9 states.
"""

from __future__ import annotations

import re

from penstock.base.errors import InputError

MAX_REGEX_REPEATS = 25_000
"""Of repeats nested in a regular expression: 20,000 compile in 0.2 s, 90,000 in 5 s."""
MAX_RULE_REPEATS = 10_000_000
"""Of repeats nested through the rules of a grammar."""

_MOST = 10**12
_BOUNDS = re.compile(r"\{\s*(\d*)\s*(?:(,)\s*(\d*)\s*)?\}|~\s*(\d+)(?:\s*\.\.\s*(\d+))?")
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|\(|\)|" + _BOUNDS.pattern, re.DOTALL)
_RULE = re.compile(r"(?m)^[ \t]*([\w-]+)[^\n:]*?::?=?(?!:)")
_NAME = re.compile(r"[A-Za-z_][\w-]*")
_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"|/((?:\\.|[^/\\\n])+)/[a-z]*|\[(?:\\.|[^\]\\\n])*\]|(?:\#|//)[^\n]*')


def regex_repeats(regex: str) -> int:
    """The largest product of the bounds of repeats that lie in one another; 1 if there are none."""
    open_groups: list[int] = []
    inner, last, most = 1, 1, 1  # of the group so far, of the item just read, of everything
    for token in _TOKEN.finditer(regex):
        if token[0] == "(":
            open_groups.append(inner)
            inner = last = 1
        elif token[0] == ")":
            last = inner
            inner = max(inner, open_groups.pop() if open_groups else 1)
        elif token[0][0] in "{~":
            # Without a character between them, a repeat repeats what the one before did.
            touches = token.start() and regex[token.start() - 1] in ")}"
            last = min((last if touches else 1) * _bound(token[0]), _MOST)
            inner = max(inner, last)
            most = max(most, last)
        else:
            last = 1
    return most


def rule_repeats(grammar: str) -> int:
    """The same through the rules of a grammar in Lark's syntax or GBNF; its own regular expressions count as well."""
    found = list(_RULE.finditer(_QUOTED.sub(lambda quoted: " " * len(quoted[0]), grammar)))
    bodies: dict[str, tuple[int, set[str]]] = {}
    for at, rule in enumerate(found):
        body = grammar[rule.end() : found[at + 1].start() if at + 1 < len(found) else len(grammar)]
        inside = max((regex_repeats(quoted[1]) for quoted in _QUOTED.finditer(body) if quoted[1]), default=1)
        plain = _QUOTED.sub(" ", body)
        bodies[rule[1]] = (max(inside, regex_repeats(plain)), set(_NAME.findall(plain)))
    weights: dict[str, int] = {}

    def weight(name: str, depth: int) -> int:
        if name not in weights:
            weights[name] = 1  # what leads back to itself repeats without bound, and that is cheap
            own, names = bodies[name]
            below = (
                max((weight(other, depth + 1) for other in names if other in bodies), default=1) if depth < 99 else 1
            )
            weights[name] = min(own * below, _MOST)
        return weights[name]

    return max((weight(name, 0) for name in bodies), default=1)


def check_repeats(number: int, most: int, where: str) -> None:
    """Raises InputError."""
    if number > most:
        times = f"{number:,}" if number < _MOST else f"{_MOST:,} or more"
        raise InputError(
            f"{where} cannot be compiled: it is too complex: repeats within repeats come to {times}; at most {most:,} "
            "are possible", param=where,
        )  # fmt: skip


def _bound(text: str) -> int:
    numbers = [int(number[:9]) for number in re.findall(r"\d+", text)]
    return max(numbers, default=1) or 1
