"""Scores as people read them: Markdown for the model card, a heat map that needs nothing but a browser."""

from __future__ import annotations

from html import escape
from typing import Any

_CELL, _LEFT, _TOP = 84, 90, 60


def rate(score: dict[str, Any]) -> str:
    """87 % (79-93), 95 % interval in brackets."""
    return f"{score['rate']:.0%} ({score['low']:.0%} to {score['high']:.0%})"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def markdown(found: dict[str, Any]) -> str:
    """The card's measured part."""
    forms = sorted({form for scores in found["skills"].values() for form in scores}, reverse=True)
    skills = [[name, *(rate(scores[f]) for f in forms)] for name, scores in found["skills"].items()]
    needle, lookup, prose = found["needle"], found["lookup"], found["prose"]
    depths = [
        [f"{depth:.0%}", *(f"{s['rate']:.0%}" for s in row)]
        for depth, row in zip(needle["depths"], needle["scores"], strict=True)
    ]
    fifths = [f"{i / lookup['bins']:.0%} to {(i + 1) / lookup['bins']:.0%}" for i in range(lookup["bins"])]
    positions = [
        [str(count), *(f"{s['rate']:.0%}" for s in row)]
        for count, row in zip(lookup["pairs"], lookup["scores"], strict=True)
    ]
    cell = needle["scores"][0][0]["n"]
    parts = [
        f"{found['parameters']:,} parameters, {found['dtype']}, context {found['context']} tokens.\n",
        f"## Skills\n\nExact answers to {found['n']} exercises of each; names, numbers and wordings of the test half; "
        f"95 % intervals.\n\n{table(['skill', *forms], skills)}",
        f"## A needle in held-out prose\n\nDepth by length in tokens, {cell} each.\n\n"
        f"{table(['depth', *map(str, needle['lengths'])], depths)}",
        "## Key-value lookup\n\nNumber of pairs by where the wanted one stands.\n\n"
        f"{table(['pairs', *fifths], positions)}",
        f"## Prose\n\n{_prose(prose)}",
        f"## Samples\n\nUnselected, temperature 0.8, sample i has seed i.\n\n{_texts(found['samples'])}",
    ]
    if found["chats"]:
        parts.append(f"## Chat\n\nGreedy.\n\n{_texts(found['chats'])}")
    return "\n".join(parts)


def _prose(prose: dict[str, Any]) -> str:
    text = (
        f"{prose['bits_per_byte']:.3f} bits per byte on {prose['bytes']:,} bytes of children's books that are not "
        "trained on"
    )
    baselines: dict[str, float] = prose.get("kneser_ney", {})
    for trained_on, bits in baselines.items():
        less = 1 - prose["bits_per_byte"] / bits
        text += (
            f"; an interpolated modified Kneser-Ney 5-gram of {trained_on} needs {bits:.3f}: {abs(less):.1%} "
            f"{'fewer' if less >= 0 else 'more'}"
        )
    return text + ".\n"


def _texts(texts: list[dict[str, str]]) -> str:
    return "\n".join(f"{i}. **{_line(t['prompt'])}** {_line(t['text'])}" for i, t in enumerate(texts, 1)) + "\n"


def _line(text: str) -> str:
    """One line of Markdown in which nothing is markup."""
    for mark in "\\`*_[]<>#|":
        text = text.replace(mark, "\\" + mark)
    return " ".join(text.split())


def heat_map(needle: dict[str, Any]) -> str:
    """An HTML page with one SVG: depth down, length to the right, red is 0 % and green 100 %."""
    lengths, depths, scores = needle["lengths"], needle["depths"], needle["scores"]
    width, height = _LEFT + _CELL * len(lengths) + 10, _TOP + 40 * len(depths) + 10
    parts = [f'<text x="{_LEFT}" y="18">prompt, tokens</text>', f'<text x="4" y="{_TOP - 8}">depth</text>']
    parts += [
        f'<text x="{_LEFT + _CELL * i + _CELL // 2}" y="{_TOP - 8}" class="m">{length}</text>'
        for i, length in enumerate(lengths)
    ]
    for r, (depth, row) in enumerate(zip(depths, scores, strict=True)):
        y = _TOP + 40 * r
        parts.append(f'<text x="4" y="{y + 25}">{depth:.0%}</text>')
        for c, s in enumerate(row):
            x = _LEFT + _CELL * c
            hue = round(120 * s["rate"])
            parts.append(
                f'<rect x="{x}" y="{y}" width="{_CELL - 2}" height="38" fill="hsl({hue} 70% 75%)">'
                f"<title>{s['right']} of {s['n']}; {escape(rate(s))}</title></rect>"
                f'<text x="{x + _CELL // 2}" y="{y + 24}" class="m">{s["rate"]:.0%}</text>'
            )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Needle map</title>'
        "<style>body{font:14px sans-serif}text{font:13px sans-serif}.m{text-anchor:middle}</style>"
        "<h1>A needle in held-out prose</h1><p>Share of exact answers by depth of the needle and length of the prompt."
        f'</p><svg width="{width}" height="{height}" role="img" aria-label="needle map">{"".join(parts)}</svg></html>\n'
    )
