"""Programs that must pass their tests. Sources: HumanEval (Chen et al., arXiv 2107.03374), MBPP (Austin et al., arXiv
2108.07732). What the model wrote is run (`eval.execution`): only if the caller allows it.

Prompts of a chat: EvalPlus' instruction (Liu et al., arXiv 2305.01210), by default without its words at the beginning
of the answer; `evalplus` adds them, `qwen` is what the makers of Qwen2.5-Coder evaluated with (arXiv 2409.12186; their
repository, qwencoder-eval/instruct/eval_plus).
"""

from __future__ import annotations

import ast
import builtins
from dataclasses import dataclass
from pathlib import Path

from penstock.eval.execution import passes
from penstock.eval.programs import parsed, program
from penstock.eval.tasks.base import Answer, Example, Kind, Metric, Options, Reader, Task
from penstock.eval.tasks.files import Row, drawn, needed, read_rows

_PLAIN_TOKENS, _CHAT_TOKENS = 512, 1024
_SCRIPT = "Please provide a self-contained Python script that solves the following problem in a markdown code block:"
_BELOW = (
    "Below is a Python script with a self-contained function that solves the problem and passes corresponding tests"
)


@dataclass(frozen=True)
class _Form:
    """`{0}` is the problem."""

    ask: str
    begun: str = ""
    system: str | None = None


_FORMS = {
    "usual": _Form(_SCRIPT + "\n```\n{0}\n```\n"),
    "evalplus": _Form(_SCRIPT + "\n```\n{0}\n```\n", _BELOW + ":\n```python\n"),
    "qwen": _Form(
        "Can you complete the following Python function?\n```python\n{0}\n```", "```python\n",
        "You are an intelligent programming assistant to produce Python algorithmic solutions",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """`text`: what a completion goes on from; `short`: as the makers of the other forms show it; `begin`: what of the
    text belongs to the program."""

    entry: str
    text: str
    short: str
    begin: str
    tests: str


class Programs(Task):
    """pass@1, greedily."""

    kind: Kind = "generate"
    metrics: tuple[Metric, ...] = (Metric("pass_at_1"),)
    axes: tuple[str, ...] = ()

    def __init__(
        self, name: str, source: str, problems: list[Problem], stop: tuple[str, ...], options: Options
    ) -> None:
        self.name, self.source, self.problems, self.stop = name, source, problems, stop
        self.max_tokens = options.number("tokens", 0, 16, 65536)
        self.timeout_s = options.number("seconds", 10, 1, 600)
        self.form = options.text("prompt", "usual", tuple(_FORMS))

    def examples(self, reader: Reader, seed: int, limit: int) -> list[Example]:
        return [self._example(reader, problem) for problem in drawn(self.problems, seed, limit)]

    def _example(self, reader: Reader, problem: Problem) -> Example:
        expected = [problem.entry, problem.begin, problem.tests]
        if not reader.chat:
            return Example(
                expected, reader.prompt(problem.text), max_tokens=self.max_tokens or _PLAIN_TOKENS, stop=self.stop
            )
        form = _FORMS[self.form]
        shown = (problem.text if self.form == "usual" else problem.short).strip()
        prompt = reader.prompt(form.ask.format(shown), system=form.system, begun=form.begun)
        most = self.max_tokens or reader.budget(prompt, _CHAT_TOKENS)
        return Example(expected, prompt, max_tokens=most, begun=form.begun)

    def judge(self, example: Example, answer: Answer) -> dict[str, float]:
        written = _written(example, answer)
        if written is None:
            return {"pass_at_1": 0.0}
        return {"pass_at_1": float(passes(f"{written}\n\n{example.expected[2]}\n", self.timeout_s))}

    def found(self, example: Example, answer: Answer) -> bool:
        return _written(example, answer) is not None


def _written(example: Example, answer: Answer) -> str | None:
    entry, begin, _ = example.expected
    return program(answer.text, entry, begin)


def _humaneval(row: Row) -> Problem:
    name, text = row.text("entry_point").strip(), row.text("prompt")
    if not name.isidentifier():
        raise row.wrong(f"'entry_point' must be the name of a function, not {name!r}")
    return Problem(name, text, text, text, f"{row.text('test')}\n\ncheck({name})")


def make_humaneval(path: Path | None, options: Options) -> Task:
    rows = read_rows(needed("humaneval", path, "humaneval.jsonl"))
    source = "the body of a function, run against its tests (HumanEval, arXiv 2107.03374)"
    stop = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\nassert ")
    return Programs("humaneval", source, [_humaneval(row) for row in rows], stop, options)


def _mbpp(row: Row) -> Problem:
    listed = row.texts("test_list")
    tests, said = "\n".join(listed), row.text("text", "prompt").strip()
    setup = row.values.get("test_setup_code", "")
    solution = row.values.get("code", "")
    entry = _tested(tests, solution if isinstance(solution, str) else "")
    if entry is None:
        raise row.wrong("'test_list' calls no function that a program could define")
    text, short = (f'"""\n{said}\n{shown}\n"""\n' for shown in (tests, listed[0]))
    return Problem(entry, text, short, "", f"{setup if isinstance(setup, str) else ''}\n{tests}")


def _tested(tests: str, solution: str) -> str | None:
    """The function that tests are of: of those they call, one that the known solution defines, else the first."""
    tree, solved = parsed(tests), parsed(solution)
    if tree is None:
        return None
    nodes = solved.body if solved is not None else []
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    called = [n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    own = [name for name in called if name in defined] or [name for name in called if not hasattr(builtins, name)]
    return own[0] if own else None


def make_mbpp(path: Path | None, options: Options) -> Task:
    rows = read_rows(needed("mbpp", path, "mbpp.jsonl"))
    source = "a short function from a sentence and its tests (MBPP, arXiv 2108.07732)"
    return Programs("mbpp", source, [_mbpp(row) for row in rows], ('\n"""', "\nassert ", "\nprint("), options)
