"""The number that an answer in sentences comes to, however it is written: behind `####`, in `\\boxed{}`, behind "the
answer is", or the last one; with thousands separators, currencies, units, signs, fractions.

Sources of the order: GSM8K's `####` (Cobbe et al., arXiv 2110.14168), MATH's `\\boxed` (Hendrycks et al., arXiv
2103.03874), the last number otherwise, as lm-evaluation-harness' flexible extraction.
"""

from __future__ import annotations

import re
from fractions import Fraction

_SPACES = "\u00a0\u202f\u2009"
_PLAIN = r"\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?(?:[eE][+-]?\d{1,2}(?!\w))?|(?<!\d)\.\d+"
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w.)\]}}])-\s?)?(?:[$€£¥₹]\s?(?P<sign2>-)?)?(?P<top>{_PLAIN})(?:\s?/\s?(?P<bottom>[1-9]\d*)(?![\d/.]))?"
)
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}")
_SAYS = re.compile(r"\banswer\b[^.\n\d]{0,60}?(?:\bis\b|\bwould be\b|\bare\b|[:=])(?=[^\n]*\d)", re.IGNORECASE)
_DROPPED = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox)\s*\{([^{}]*)\}|\\[,!;: ]|\\(?:left|right)\b|[*_`]{2,3}")


def answered(text: str) -> Fraction | None:
    """The number, or None if none is there."""
    text = text.replace("\u2212", "-").replace("{,}", ",")
    _, mark, behind = text.rpartition("####")
    if mark and (first := _first(behind)) is not None:
        return first
    if (inner := boxed(text)) is not None:
        # An equation, or a value with its unit: x = 5, 5 \\text{ cm}.
        return _first(inner.rpartition("=")[2])
    said = list(_SAYS.finditer(text))
    if said:
        clause = re.split(r"\n|[.!?](?=\s|$)|;", text[said[-1].end() :], maxsplit=1)[0]
        found = _first(clause.rpartition("=")[2])
        if found is not None:
            return found
    values = _values(text)
    return values[-1] if values else None


def _first(text: str) -> Fraction | None:
    values = _values(text)
    return values[0] if values else None


def _values(text: str) -> list[Fraction]:
    text = _LATEX_FRACTION.sub(lambda m: f" {m[1].strip()}/{m[2].strip()} ", text)
    text = _DROPPED.sub(lambda m: m[1] or "", text).replace("\\$", "$").replace("\\%", "%")
    text = re.sub(rf"(?<=\d)[{_SPACES}](?=\d{{3}}(?!\d))", ",", text)
    return [_value(found) for found in _NUMBER.finditer(text)]


def _value(found: re.Match[str]) -> Fraction:
    value = Fraction(found["top"].replace(",", ""))
    if found["bottom"] is not None:
        value /= int(found["bottom"])
    return -value if found["sign"] or found["sign2"] else value


def boxed(text: str) -> str | None:
    """What the last `\\boxed{...}` holds, its braces counted; to the end of the text if they are not closed."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    start = text.index("{", start) + 1
    depth = 1
    for i, char in enumerate(text[start:], start):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return text[start:i]
    return text[start:]
