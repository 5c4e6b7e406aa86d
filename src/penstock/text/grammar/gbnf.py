"""GBNF (`root ::= ...`), the notation of llama.cpp, in Lark's syntax.

The library that translates it passes escapes on as they are, and takes some that llama.cpp has for something else. So
the text is written anew first: characters stand for themselves or as two hexadecimal digits, rules get plain names, and
there are no comments. Source: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md.
"""

from __future__ import annotations

import re

from penstock.base.errors import InputError

_PART = re.compile(
    r'(?P<quoted>"(?:\\.|[^"\\])*")|(?P<set>\[(?:\\.|[^\]\\])*\])|(?P<open>["\[].*)|(?P<comment>\#[^\r\n]*)|(?P<bounds>\{[^{}]*\})'
    r"|(?P<blank>\s+)|(?P<name>[A-Za-z0-9_-]+)|(?P<any>\.)|(?P<other>.)",
    re.DOTALL,
)
_CHAR = re.compile(
    r"\\(?:x(?P<x>[0-9A-Fa-f]{2})|u(?P<u>[0-9A-Fa-f]{4})|U(?P<U>[0-9A-Fa-f]{8})|(?P<one>.))|(?P<plain>[^\\])", re.DOTALL
)
_RULE = re.compile(r"(?m)(?:^|(?<=[\r\n]))[ \t]*([A-Za-z0-9_-]+)\s*::=")
_SPELLED = {"n": "\n", "r": "\r", "t": "\t"}
_ANY = f"[\\x00-{chr(0x10FFFF)}]"


def gbnf_to_lark(text: str, where: str) -> str:
    """Raises: InputError, with `where` as its place."""
    from llguidance.gbnf_to_lark import gbnf_to_lark as translated

    try:
        return translated(_plain(text, where))
    except InputError:
        raise
    except Exception as error:  # the library raises plain ones
        why = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise InputError(f"{where}: neither Lark (start: ...) nor GBNF (root ::= ...): {why}", param=where) from None


def _plain(text: str, where: str) -> str:
    bare = "".join(" " * len(part[0]) if part.lastgroup in ("quoted", "set", "comment") else part[0]
                   for part in _PART.finditer(text))  # fmt: skip
    rules = dict.fromkeys(found[1] for found in _RULE.finditer(bare))
    names = {name: name if name == "root" else f"r{n}" for n, name in enumerate(rules)}
    out = []
    for part in _PART.finditer(text):
        said = part[0]
        match part.lastgroup:
            case "quoted":
                out.append(f'"{"".join(_in_text(char) for char in _chars(said[1:-1], where))}"')
            case "set":
                out.append(_set(said[1:-1], where))
            case "comment":
                pass
            case "bounds":
                out.append(said.replace("{,", "{0,"))
            case "name":
                out.append(names.get(said, said))
            case "any":
                out.append(_ANY)
            case _:
                while said == "|" and out and out[-1].isspace():
                    out.pop()  # an alternative may begin a line
                out.append(said)
    return "".join(out)


def _chars(text: str, where: str) -> list[str]:
    """Characters; those that were escaped by a backslash only, with it."""
    out = []
    for found in _CHAR.finditer(text):
        code = found["x"] or found["u"] or found["U"]
        if code is not None:
            number = int(code, 16)
            if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                raise InputError(f"{where}: {found[0]} is no character", param=where)
            char = chr(number)
            out.append(f"\\{char}" if char in "-^" else char)
        elif found["plain"]:
            out.append(found["plain"])
        elif found["one"] in _SPELLED:
            out.append(_SPELLED[found["one"]])
        elif found["one"].isalnum():
            raise InputError(
                f"{where}: the escape {found[0]} is not known; there are \\n, \\r, \\t, \\x, \\u, \\U with 2, 4 and 8 "
                "hexadecimal digits, and \\ before a mark", param=where,
            )  # fmt: skip
        else:
            out.append(found[0])
    return out


def _in_text(char: str) -> str:
    char = char[-1]
    if char in '"\\':
        return f"\\{char}"
    return char if char.isprintable() else _code(char)


def _set(text: str, where: str) -> str:
    chars = _chars(text, where)
    negated = bool(chars) and chars[0] == "^"
    out = []
    for n, char in enumerate(chars[negated:]):
        range_mark = char == "-" and 0 < n < len(chars[negated:]) - 1
        out.append("-" if range_mark else _in_set(char[-1]))
    if not out:
        raise InputError(f"{where}: [{text}] holds no character", param=where)
    return f"[{'^' if negated else ''}{''.join(out)}]"


def _in_set(char: str) -> str:
    return char if char.isalnum() or char in " _" or (ord(char) > 0x7F and char.isprintable()) else _code(char)


def _code(char: str) -> str:
    return f"\\x{ord(char):02X}" if ord(char) < 0x80 else char
