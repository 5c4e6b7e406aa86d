"""Programs that must pass their tests. Sources: HumanEval (Chen et al., arXiv 2107.03374), MBPP (Austin et al., arXiv
2108.07732). What the model wrote is run (`eval.execution`): only if the caller allows it."""

from __future__ import annotations

from pathlib import Path

from penstock.eval.execution import passes
from penstock.eval.tasks.base import Answer, Example, Kind, Metric, Options, Reader, Task
from penstock.eval.tasks.files import Row, drawn, needed, read_rows


class Programs:
    """pass@1, greedily. `items`: prompt, what of it belongs to the program, the tests behind it."""

    kind: Kind = "generate"
    metrics: tuple[Metric, ...] = (Metric("pass_at_1"),)
    axes: tuple[str, ...] = ()

    def __init__(
        self, name: str, source: str, items: list[tuple[str, str, str]], stop: tuple[str, ...], options: Options
    ) -> None:
        self.name, self.source, self.items, self.stop = name, source, items, stop
        self.max_tokens = options.number("tokens", 512, 16, 4096)
        self.timeout_s = options.number("seconds", 10, 1, 600)

    def examples(self, reader: Reader, seed: int, limit: int) -> list[Example]:
        return [
            Example([begin, tests], reader.prompt(prompt), max_tokens=self.max_tokens, stop=self.stop)
            for prompt, begin, tests in drawn(self.items, seed, limit)
        ]

    def judge(self, example: Example, answer: Answer) -> dict[str, float]:
        begin, tests = example.expected
        return {"pass_at_1": float(passes(f"{begin}{answer.text}\n\n{tests}\n", self.timeout_s))}


def _humaneval(row: Row) -> tuple[str, str, str]:
    name = row.text("entry_point").strip()
    if not name.isidentifier():
        raise row.wrong(f"'entry_point' must be the name of a function, not {name!r}")
    return row.text("prompt"), row.text("prompt"), f"{row.text('test')}\n\ncheck({name})"


def make_humaneval(path: Path | None, options: Options) -> Task:
    rows = read_rows(needed("humaneval", path, "humaneval.jsonl"))
    source = "the body of a function, run against its tests (HumanEval, arXiv 2107.03374)"
    stop = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\nassert ")
    return Programs("humaneval", source, [_humaneval(row) for row in rows], stop, options)


def _mbpp(row: Row) -> tuple[str, str, str]:
    tests = "\n".join(row.texts("test_list"))
    setup = row.values.get("test_setup_code", "")
    prompt = f'"""\n{row.text("text", "prompt").strip()}\n{tests}\n"""\n'
    return prompt, "", f"{setup if isinstance(setup, str) else ''}\n{tests}"


def make_mbpp(path: Path | None, options: Options) -> Task:
    rows = read_rows(needed("mbpp", path, "mbpp.jsonl"))
    source = "a short function from a sentence and its tests (MBPP, arXiv 2108.07732)"
    return Programs("mbpp", source, [_mbpp(row) for row in rows], ('\n"""', "\nassert ", "\nprint("), options)
