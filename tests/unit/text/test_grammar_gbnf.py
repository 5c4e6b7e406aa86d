"""GBNF: what llama.cpp writes in it means the same here."""

from __future__ import annotations

import re

import pytest

from penstock.base.errors import InputError
from penstock.core.sampling import StructuredOutputs
from penstock.text.grammar.compile import Compiler, Vocabulary
from penstock.text.grammar.source import grammar_of
from tests.speed import cpu_within
from tests.unit.text.grammar_walk import fresh_cache, walk

CACHE = fresh_cache()
BYTES = Compiler(Vocabulary([bytes([n]) for n in range(256)], [], []))
SAME = [
    (r"\x41\x0A\x00\x7f", b"A\n\0\x7f"), (r"\u0041\u000A\u00e9\u4e00", "A\né一".encode()),
    (r"\U0001F600\U0000000A", "😀\n".encode()), (r"\r\n\t", b"\r\n\t"), (r"\\ \" \[ \]", b'\\ " [ ]'),
    ("/ // # ' ::= | { }", b"/ // # ' ::= | { }"), ("é 😀", "é 😀".encode()), (r"\-\^\/", b"-^/"), ("a\tb", b"a\tb"),
]  # fmt: skip
SETS = {
    r"[\x41-\x43]": "[A-C]", r"[^\x00-\x40]": "[^\\x00-@]", r'[^"\\\x7F\x00-\x1F]': '[^"\\\\\x7f\x00-\x1f]',
    r'["\\bfnrt]': '["\\\\bfnrt]', r"[a-z\]\-]": r"[a-z\]\-]", r"[^\]]": r"[^\]]", r"[\u0030-\u0039]": "[0-9]",
    r"[\t\n ]": "[\t\n ]", "[#|]": "[#|]", "[/a]": "[/a]", "[a&&b]": "[a&b]", "[-a]": "[-a]",
    "[a-]": "[a-]", r"[\^a]": r"[\^a]", "[a^]": r"[a^]", "[[a]": r"[\[a]", ".": "(?s:.)", r"[^\n]": "[^\n]",
    r"[\U00000041~]": "[A~]",
}  # fmt: skip


def accepts(grammar: str, text: bytes) -> bool:
    matcher = BYTES.compile(grammar_of(StructuredOutputs(grammar=grammar)))
    return bool(matcher.validate_tokens(list(text)) == len(text) and matcher.consume_tokens(list(text))
                and matcher.is_accepting())  # fmt: skip


@pytest.mark.parametrize(("written", "text"), SAME)
def test_literals(written: str, text: bytes) -> None:
    assert accepts(f'root ::= "{written}"', text)
    assert not accepts(f'root ::= "{written}"', text + b"x")


@pytest.mark.parametrize("written", SETS)
def test_sets(written: str) -> None:
    grammar = BYTES.compile(grammar_of(StructuredOutputs(grammar=f"root ::= {written}")))
    for code in range(128):
        fits = re.fullmatch(SETS[written], chr(code)) is not None
        assert (grammar.validate_tokens([code]) == 1) == fits, (written, chr(code))


RULES = {
    "comments": ('# a # "b"\nroot ::= "a" # root ::= [\n# |\n  | "b" # "\n', "a|b"),
    "bounds": ('root ::= [a-z]{2,3} "x"{2} [0-9]{0,2} "z"{2,} "y"{,1}', "[a-z]{2,3}xx[0-9]{0,2}zz+y?"),
    "names that differ by a mark": (
        'root ::= foo-bar foo_bar fooBar\nfoo-bar ::= "a"\nfoo_bar ::= "b"\nfooBar ::= "c"',
        "abc",
    ),
    "names of Lark": ('root ::= start import 1a\nstart ::= "x"\nimport ::= "z"\n1a ::= "y"', "xzy"),
    "a line that begins with a bar": ('root ::= "a"\n  | "b"\n\n  | c\nc ::= "c"', "a|b|c"),
    "an empty alternative": ('root ::= | "a" root', "a*"),
    "groups over lines": ('root ::= (\n  "a" |\n  "b" # c\n)+ ("c"\n)?', "[ab]+c?"),
}


@pytest.mark.parametrize("name", RULES)
def test_rules(name: str) -> None:
    grammar, regex = RULES[name]
    outs = [walk(grammar_of(StructuredOutputs(grammar=grammar)), seed, CACHE) for seed in range(12)]
    assert all(out is None or re.fullmatch(regex.encode(), out) for out in outs), outs
    assert any(out is not None for out in outs)


JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""
CHESS = r"""# Specifies chess moves as a list in algebraic notation, using PGN conventions

# Force first move to "1. ", then any 1-2 digit number after, relying on model to follow the pattern
root    ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move    ::= (pawn | nonpawn | castle) [+#]?

# piece type, optional file/rank, optional capture, dest file & rank
nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]

# optional file & capture, dest file & rank, optional promotion
pawn    ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?

castle  ::= "O-O" "-O"?
"""


def test_the_examples_of_llama_cpp() -> None:
    assert accepts(JSON, b'{"a\\n": [1, -2.5e+7, {"b": null}], "\\u00e9": "x"}\n  ')
    assert not accepts(JSON, b'{"a": 01}')
    assert accepts(CHESS, b"1. e4 e5\n2. Nf3 Nc6\n3. O-O exd8=Q+\n")
    assert not accepts(CHESS, b"1. e4 e5")
    japanese = "root ::= jp-char+ ([ \\t\\n] jp-char+)*\njp-char ::= kana | cjk\nkana ::= [ぁ-ゟ]\ncjk ::= [一-鿿]\n"
    assert accepts(japanese, "日本 ぁ".encode())
    assert accepts('root  ::= (expr "=" term "\\n")+\nexpr  ::= term ([-+*/] term)*\nterm  ::= num | "(" expr ")"\n'
                   "num   ::= [0-9]+\n", b"1+(2*3)=7\n")  # fmt: skip


@pytest.mark.parametrize(
    "grammar",
    [
        r'root ::= "\x4"', r'root ::= "\q"', r'root ::= "\ud800"', r'root ::= "\U00110000"', "root ::= []",
        "root ::= [^]",
        'root ::= "a', "root ::= [a", "root ::= missing", 'root ::= root "a"', "root ::= a\na ::= b\nb ::= a",
        'ROOT ::= "a"', 'root ::= "a"{99999999999999999999}', "root ::= " + '"' * 99_999, "root ::= " + "[" * 99_999,
        "root ::= " + '["' * 50_000, "root ::= " + "\\" * 99_999, "root ::= " + "{" * 99_999, "root ::= \n" * 99,
    ],
)  # fmt: skip
def test_what_is_no_grammar_is_refused_at_once(grammar: str) -> None:
    with cpu_within(1), pytest.raises(InputError) as caught:
        CACHE.check(grammar_of(StructuredOutputs(grammar=grammar)))
    assert len(str(caught.value)) < 500
