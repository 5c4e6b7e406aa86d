"""What is taken out of an answer: programs, numbers, choices, short answers, what stands behind a thought.

Right answers in every dress are right, and no dress makes a wrong one right. Row K14.
"""

from __future__ import annotations

from fractions import Fraction

import pytest

from penstock.eval.answers import rests, said, told
from penstock.eval.choices import chosen
from penstock.eval.execution import passes
from penstock.eval.numbers import answered
from penstock.eval.programs import blocks, program
from penstock.eval.tasks import make_tasks
from penstock.eval.tasks.base import Answer, Example
from penstock.eval.thought import may_think, opens_thought, spoken

HEAD = '''from typing import List


def helper(x: int) -> int:
    """ Twice x. """
    return 2 * x


def total(xs: List[int]) -> int:
    """ Sum of all numbers, each twice.
    >>> total([1, 2])
    6
    """
'''
TESTS = "def check(candidate):\n    assert candidate([1, 2]) == 6\n    assert candidate([]) == 0\n\ncheck(total)"
RIGHT = "def total(xs: List[int]) -> int:\n    return sum(helper(x) for x in xs)"
NONE, OTHER = "def total(xs):\n    return None", "def other(x):\n    return x"
WRONG = "def total(xs: List[int]) -> int:\n    return sum(xs)"


def fenced(code: str, tag: str = "python") -> str:
    return f"```{tag}\n{code}\n```"


def dresses(code: str) -> dict[str, str]:
    """One program as models write it."""
    indented = "\n".join("   " + line for line in code.splitlines())
    body = "\n".join(code.splitlines()[1:])
    return {
        "alone": code,
        "fence": fenced(code),
        "py": fenced(code, "py"),
        "Python3": fenced(code, "Python3"),
        "no tag": fenced(code, ""),
        "tag with more": fenced(code, 'python title="x.py"'),
        "tag on a line of its own": fenced("python\n" + code, ""),
        "tildes": f"~~~python\n{code}\n~~~",
        "four marks": f"````python\n{code}\n````",
        "prose around": f"Sure! Here is the function:\n\n{fenced(code)}\n\nIt works by adding (see `helper`).",
        "not closed": f"Here it is:\n```python\n{code}\n",
        "closed on the last line": f"```python\n{code}```",
        "cut in a test": f"```python\n{code}\n\n# Test\nprint(total([1, 2",
        "cut in prose": f"{fenced(code)}\nThis function ta",
        "in a list": f"1. The function:\n\n   ```python\n{indented}\n   ```\n2. Done.",
        "windows lines": fenced(code).replace("\n", "\r\n"),
        "prose, no fence": f"Here is the function.\n\n{code}\n\nIt adds all numbers, each one twice.",
        "tests behind": fenced(f"{code}\n\nassert total([1]) == 99\nprint(total(None))"),
        "main": fenced(f'{code}\n\nif __name__ == "__main__":\n    print(total(eval(input())))'),
        "main function": fenced(f"{code}\n\ndef main():\n    xs = input()\n    print(total(xs))\n\nmain()"),
        "input": fenced(f"{code}\n\nn = int(input())\nfor i in range(n):\n    print(total([i]))"),
        "unittest": fenced(
            f"import unittest\n\n{code}\n\nclass T(unittest.TestCase):\n    def test(self):\n"
            "        self.assertEqual(total([1]), 5)\n\nunittest.main()"
        ),
        "doctest": fenced(f"import doctest\n{code}\ndoctest.testmod()"),
        "example in a block of its own": f"{fenced(code)}\n\nUse it like this:\n\n{fenced('print(total([1, 2]))')}",
        "output in a block of its own": f"{fenced(code)}\n\nThis prints:\n\n{fenced('6', 'text')}",
        "shell first": f"{fenced('pip install numpy', 'bash')}\n\n{fenced(code)}",
        "an attempt first": f"{fenced(NONE)}\n\nThat is not right. Instead:\n\n{fenced(code)}",
        "helper in a block before": f"{fenced(OTHER)}\n\nNow:\n\n{fenced(code)}",
        "nested in markdown": f"````markdown\n# Answer\n```python\n{code}\n```\n````",
        "nested, same marks": f"```markdown\n# Answer\n```python\n{code}\n```\n```",
        "own imports": fenced(f"from typing import List\nimport math\n\n{code}"),
        "the whole head again": fenced(HEAD + body),
        "constants": fenced(f"ONE = 1\nTWO = ONE + 1\n{code}"),
        "another name for it": fenced(code.replace("def total", "def add_up") + "\n\ntotal = add_up"),
        "only the body": body,
        "only the body, fenced": fenced(body),
        "only the body, not indented": fenced("\n".join(line.strip() for line in body.splitlines())),
        "body, then prose": f"{body}\n\nThis adds all numbers.",
        "body, then a fence": f"{body}\n```\n\nThe function adds all numbers.",
        "a fence in its description": fenced(
            code.replace("int:\n", 'int:\n    """Adds.\n\n    ```python\n    total([1])\n    ```\n    """\n', 1)
        ),
    }


@pytest.mark.parametrize("name", list(dresses(RIGHT)))
def test_a_program_is_found_in_every_dress_and_stays_what_it_is(name: str) -> None:
    for code, right in ((RIGHT, True), (WRONG, False)):
        found = program(dresses(code)[name], "total", HEAD)
        assert found is not None, dresses(code)[name]
        assert passes(f"{found}\n\n{TESTS}\n", 10) == right, found


@pytest.mark.parametrize(
    "text",
    [
        "", "I cannot help with that.", "```python\n```", "```\n\n", "```python\ndef total(xs", "total([1, 2]) is 6",
        fenced("print(6)"), fenced("def totals(xs):\n    return 6"),
        fenced("int total(int[] xs) { return 6; }", "java"),
        "def total(xs: List[int]) -> int", "def total(xs):", '    """ Sum. """', "x = " + "1 + " * 20000, "(" * 5000,
        "\x00", "class A:\n    def total(self, xs):\n        return 6",
    ],
)  # fmt: skip
def test_where_no_program_is_none_is_found(text: str) -> None:
    assert program(text, "total", HEAD) is None


def test_what_is_chosen_does_not_follow_from_what_passes() -> None:
    """The last one counts, also if only the first was right."""
    text = f"{fenced(RIGHT)}\n\nBetter:\n\n{fenced(WRONG)}"
    assert not passes(f"{program(text, 'total', HEAD)}\n{TESTS}", 10)
    shadowed = fenced(f"{RIGHT}\n\n{WRONG}")
    assert not passes(f"{program(shadowed, 'total', HEAD)}\n{TESTS}", 10)


def test_statements_that_the_function_needs_are_kept() -> None:
    table = "SQUARES = {}\nfor i in range(10):\n    SQUARES[i] = i * i\n\ndef square(x):\n    return SQUARES[x]"
    limits = "import sys\nsys.setrecursionlimit(5000)\n\ndef square(x):\n    return x * x if sys else 0"
    either = "try:\n    import nothing_like_it\nexcept ImportError:\n    pass\n\ndef square(x):\n    return x * x"
    for code in (table, limits, either):
        found = program(fenced(code + "\n\nprint(square(3))\nresult = square('no')\nprint(result)"), "square")
        assert found is not None
        assert passes(f"{found}\nassert square(3) == 9", 10), found
        assert "result" not in found
        assert "print" not in found


def test_a_completion_is_the_head_that_was_shown_and_its_body() -> None:
    found = program("    return sum(helper(x) for x in xs)\n", "total", HEAD)
    assert found is not None
    assert passes(f"{found}\n{TESTS}", 10)
    cut = program(
        "    out = 0\n    for x in xs:\n        out += helper(x)\n    return out\n\n\nfoo = (1,", "total", HEAD
    )
    assert cut is not None
    assert passes(f"{cut}\n{TESTS}", 10)


def test_blocks_in_order() -> None:
    assert blocks("```a\n1\n```\ntext\n~~~\n2\n~~~") == ["1", "2"]
    assert blocks("a ```python print(1)``` b") == ["print(1)"]
    assert blocks("none `x` here") == []
    assert blocks("```\nopen") == ["open"]


# -- numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("#### 18", 18), ("so 5\n#### 18\n\nQuestion: 7", 18), ("#### $1,234.50", Fraction("1234.5")), ("18", 18),
        ("She makes $18 every day.", 18), ("The answer is 18.", 18), ("**Answer:** 18 dollars", 18),
        ("The final answer is: $\\boxed{18}$. I hope it is correct.", 18),
        ("\\boxed{18}\nLet me check 5 * 3 = 15.", 18),
        ("\\boxed{x = 18}", 18),
        ("\\boxed{3 + 15 = 18}", 18),
        ("\\boxed{18\\text{ cm}^2}", 18), ("\\boxed{\\$18}", 18), ("\\boxed{1,080}", 1080),
        ("\\boxed{1{,}080}", 1080), ("\\boxed{1\\,080}", 1080), ("\\boxed{\\frac{3}{4}}", Fraction(3, 4)),
        ("\\boxed{\\dfrac{1}{2}", Fraction(1, 2)), ("\\boxed{-7}", -7), ("It is \u22127 degrees", -7),
        ("It is -7 degrees", -7), ("16-3-4=9", 9), ("16 - 3 - 4 = 9 eggs", 9), ("pages 10-12", 12),
        ("between 10-12", 12), ("costs 2,000,000 euros", 2_000_000), ("1\u202f250 people", 1250),
        ("about 12.5%", Fraction("12.5")),
        ("3/4 of them", Fraction(3, 4)), ("5/2 = 2.5", Fraction("2.5")), ("$.50 each", Fraction("0.5")),
        ("So 2 + 3 = 5. The answer is 5 apples, which is 2 more than 3.", 5),
        ("the answer is 2 * 9 = 18", 18), ("The answer is 18\nHuman: what is 3 + 3?", 18),
        ("The answer is 17. No, wait. The answer is 18.", 18), ("Total: 7, 8 and 18", 18), ("1e3", 1000),
        ("Answer: **42**", 42), ("$42.00", 42), ("18.", 18), ("(18)", 18), ("\\(18\\)", 18), ("18th", 18),
        ("12/25/1937 was 3 days", 3), ("10:30 is 2 hours", 2), ("The answer is: \\[ 18 \\]", 18),
        ("Therefore, Janet makes $18 every day at the farmer's market.\n\n\\[\n\\boxed{18}\n\\]", 18),
        ("\\boxed{A} has 18", None),
        ("", None), ("none", None), ("eighteen", None), ("####", None), ("\\boxed{}", None), ("$", None), ("-", None),
    ],
)  # fmt: skip
def test_the_number_that_an_answer_comes_to(text: str, value: Fraction | int | None) -> None:
    assert answered(text) == value


def test_maths_that_is_wrong_stays_wrong() -> None:
    for text in (
        "18 - 1 = 17. The answer is 17.", "\\boxed{17} is not 18?", "#### 17\n18", "The answer is 1.8", "180", "1,8",
        "-18", "18/2", "The answer is 17, and 18 is what she had before.",
    ):  # fmt: skip
        assert answered(text) != 18, text


# -- choices -----------------------------------------------------------------------------------------------------

LETTERS, TEXTS = ("(A)", "(B)", "(C)"), ("12/25/1937", "12/24/1937", "01/04/1938")


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("(B)", 1), ("B", 1), ("B.", 1), ("**B**", 1), ("The answer is (B).", 1), ("The answer is B.", 1),
        ("The answer is: **(B)** 12/24/1937", 1), ("The correct answer is option B.", 1), ("Answer: B) 12/24/1937", 1),
        ("\\boxed{B}", 1), ("$\\boxed{\\text{(B)}}$", 1), ("(A) is wrong, because it is later. The answer is (B).", 1),
        ("So the answer is 12/24/1937.", 1), ("It was (A)?\nNo.\nFinal answer: (C)", 2), ("12/24/1937", 1),
        ("A day before that. So (B)", 1), ("Option B", 1),
        ("(A) or (B)", None), ("", None), ("I do not know", None), ("The answer is (A) or (B).", None), ("A day", None),
        ("(D)", None), ("Both are right", None),
    ],
)  # fmt: skip
def test_the_letter_that_an_answer_gives(text: str, index: int | None) -> None:
    assert chosen(text, LETTERS, TEXTS) == index


def test_answers_that_are_words() -> None:
    for text, index in (
        ("True", 1), ("The answer is true.", 1), ("not (True) is False. So the answer is **True**.", 1), ("Yes", None),
        ("The expression is False", 0), ("False and True", None),
    ):  # fmt: skip
        assert chosen(text, ("False", "True")) == index, text
    assert chosen("There are 12 of them. The answer is 12.", ("2", "12")) == 1
    assert chosen("It is not valid, so the answer is invalid", ("invalid", "valid")) == 0


# -- thoughts ----------------------------------------------------------------------------------------------------


def test_a_thought_is_not_judged() -> None:
    assert spoken("4") == "4"
    assert spoken("<think>5?</think>\n4") == "\n4"
    assert spoken("Hm, 5?\n</think>\n\n4", opened=True) == "\n\n4", "the template opens it"
    assert spoken("Hm, 5?\n</think>\n\n4") == "\n\n4"
    assert spoken("<think>5? </think> no <think> 6 </think>4") == "4"
    assert spoken("[THINK]5[/THINK]4") == spoken("<thinking>5</thinking>4") == "4"
    assert spoken("analysis5? perhaps 6assistantfinal4") == "4"
    assert spoken("<think>\n\n</think>\n\n4") == "\n\n4", "an empty one"
    for text, opened in (("<think>5, so 5", False), ("so 5", True), ("<think>a</think><think>so 5", False), ("", True)):
        assert spoken(text, opened=opened) is None, "a thought that does not end is no answer"
    assert opens_thought("<|im_start|>assistant\n<think>\n")
    assert not opens_thought("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert may_think("{{ '<think>' }}")
    assert not may_think("{{ messages }}")


# -- short answers -----------------------------------------------------------------------------------------------


def test_a_short_answer_stands_behind_what_assistants_open_with() -> None:
    for text in (
        "4821", "The pass key is 4821.", "Sure! The pass key is 4821.", "Certainly!\n\nThe pass key is **4821**.",
        "Here is the answer:\n4821", "Answer:\n\n4821\n\nIt was told in line 3.", "Sure.\nIt is 4821",
        "The pass key is 4821. It is not 4822.",
    ):  # fmt: skip
        assert told(text, "4821") == 1, text
    for text in (
        "Sure! The pass key is 4822. I had 4821 first.", "Here is the answer:\n4822\n4821", "I do not know. 4821?",
        "Sure!", "", "The pass key is 14821.", "Not 4821",
    ):  # fmt: skip
        assert told(text, "4821") == 0, text
    assert said("It is 3.5 metres. Or so") == "It is 3.5 metres"
    assert said("Sure!") == "Sure"


def test_a_question_said_again_is_not_part_of_the_answer() -> None:
    question = "What did Tom find? Tom found"
    assert "red ball" in rests("Tom found a red ball", question)
    assert "red ball" not in rests("Tom lost a red ball", question)
    assert rests("a red ball", "") == [], "of plain text the whole is the answer"
    (made,) = make_tasks(["passage"])
    example = Example(["a red ball.", question])
    for text, em in (
        ("Tom found a red ball.", 1), ("a red ball", 1), ("Sure! Tom found a red ball.", 1), ("A red ball. Yes.", 1),
        ("The thing that he came upon was a red ball.", 1), ("The answer is: a red ball.", 1),
        ("It was not a red ball.", 0), ("It was a kite or it was a red ball.", 0), ("It was a red ball with a kite", 0),
        ("Tom found a blue ball.", 0), ("Tom found a red ball and a kite.", 0), ("Tom", 0), ("", 0),
    ):  # fmt: skip
        assert made.task.judge(example, Answer(text))["em"] == em, text


def test_json_behind_prose_and_in_blocks() -> None:
    (made,) = make_tasks(["json"])
    right = '{"age": 3, "name": "Leo"}'
    for text in (
        f"Here is the JSON object:\n\n{right}", f"Sure!\n```json\n{right}\n```\nDone.", f"```JSON\n{right}\n```", right,
        'Here:\n\n{\n  "name": "Leo",\n  "age": 3\n}\n\nI hope this helps.', f"```json\n{right}",
    ):  # fmt: skip
        assert made.task.judge(Example(right), Answer(text)) == {"right": 1, "valid": 1}, text
    for text in (
        f"```json\n{right[:-1]}\n```",
        'x\n{"age": 4, "name": "Leo"}',
        "```json\n```",
        f"```\n{right} {right}\n```",
    ):
        assert made.task.judge(Example(right), Answer(text))["right"] == 0, text
