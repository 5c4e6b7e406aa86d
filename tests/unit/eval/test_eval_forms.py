"""Every task in both forms, plain text and chat: prompts, stops, room, and reports of runs that went wrong. Row K14."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.base.errors import ConfigError, InputError
from penstock.cli.eval_page import html_page
from penstock.cli.eval_tables import print_result, print_warnings
from penstock.core.output import CompletionOutput, RequestOutput
from penstock.eval.gate import read_gate, verdicts
from penstock.eval.health import answers_of, health
from penstock.eval.result import Result, Scored, TaskResult, encode, figure, load
from penstock.eval.run import _generated, _judged, _plain
from penstock.eval.tasks import Asked, make_tasks
from penstock.eval.tasks.base import Answer, Example, Metric, Reader
from penstock.launch.bundled import bundled_model
from penstock.text.tokenizer import Tokenizer

FOLDER = bundled_model("nano")
assert FOLDER is not None
TOKENIZER = Tokenizer.from_hf(FOLDER / "tokenizer.json", json.loads((FOLDER / "tokenizer_config.json").read_text()))
CHATML = (
    "{% if messages[0].role != 'system' %}<sys>You are Nano.</sys>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}<assistant>"
)
THINKING = CHATML + "{# <think> #}"

CHECK = "def check(f):\n    assert f() == 1"
ROWS: dict[str, list[dict[str, object]]] = {
    "humaneval": [{"prompt": "def one():\n    '1'\n", "entry_point": "one", "test": CHECK}],
    "mbpp": [{"text": "One.", "code": "def one():\n    return 1", "test_list": ["assert int(one()) == 1", "assert 1"]}],
    "gsm8k": [{"question": f"{i} + 1?", "answer": f"It is <<{i}+1={i + 1}>>{i + 1}.\n#### {i + 1}"} for i in range(6)],
    "mmlu": [{"question": "1 + 1?", "choices": ["1", "2", "3"], "answer": 1}],
    "bbh": [
        {"input": "Which?\nOptions:\n(A) one\n(B) two", "target": "(B)", "task": "x"},
        {"input": "not True is", "target": "False", "task": "y"},
        {"input": "not False is", "target": "True", "task": "y"},
    ],
    "truthfulqa": [{"Question": "Is it?", "Best Answer": "It is", "Incorrect Answers": "It is not; No"}],
    "nq-open": [{"question": "who", "answers": ["Leo"], "ctxs": [{"title": "t", "text": "Leo did.", "isgold": True}]}],
    "kv": [{"ordered_kv_records": [["a", "1"], ["b", "2"]], "key": "a", "value": "1"}],
    "longbench": [{"dataset": "qasper", "input": "who?", "context": "Leo did.", "answers": ["Leo"]}],
    "texts": [{"prompt": "who?", "references": ["Leo did."]}],
    "ruler": [{"input": "who?", "outputs": ["Leo"]}],
}  # fmt: skip
MADE = ("needle?lengths=512", "lookup?pairs=5", "lines?pairs=5", "passage", "two-hop", "copy", "arithmetic", "json",
        "listops", "count", "find")  # fmt: skip


@pytest.fixture(params=[*MADE, *ROWS])
def task(request: pytest.FixtureRequest, tmp_path: Path) -> Asked:
    return one(request.param, tmp_path)


def one(spec: str, tmp_path: Path) -> Asked:
    name, _, options = spec.partition("?")
    if name in ROWS:
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
        spec = f"{name}:{file}{'?' if options else ''}{options}"
    (made,) = make_tasks([spec], allow_code=True)
    return made


def reader(template: str | None = None, room: int = 8192) -> Reader:
    return Reader(TOKENIZER, room, template=template)


def shown(example: Example) -> str:
    return TOKENIZER.decode(list(example.prompt), skip_special_tokens=False)


# -- both forms --------------------------------------------------------------------------------------------------


def test_an_assistant_is_not_stopped_and_has_room_to_speak(task: Asked) -> None:
    plain, chat = (task.task.examples(reader(t), 0, 6) for t in (None, CHATML))
    assert all(e.stop == () for e in chat), "stop strings are those of completions"
    assert all("<user>" in shown(e) and shown(e).endswith("<assistant>") for e in chat)
    if plain[0].readings:
        assert all(e.max_tokens >= 256 and not e.readings for e in chat), "a choice is reasoned about"
    elif task.task.ends:
        assert min(e.max_tokens for e in chat) >= min(e.max_tokens for e in plain) + 40
    thinking = task.task.examples(reader(THINKING), 0, 6)
    assert min(e.max_tokens for e in thinking) >= 1500, "a thought comes first"
    small = task.task.examples(reader(THINKING, room=1500), 0, 6)
    assert all(e.num_tokens <= 1500 for e in small), "as far as the context goes"


def test_the_template_s_own_system_prompt_stands_where_none_is_named(tmp_path: Path) -> None:
    made = [one(f"humaneval?prompt={p}", tmp_path).task for p in ("usual", "qwen", "evalplus")]
    usual, makers, evalplus = (task.examples(reader(CHATML), 0, 1)[0] for task in made)
    assert shown(usual).startswith("<sys>You are Nano.</sys><user>Please provide a self-contained Python script")
    assert "```\ndef one():" in shown(usual)
    assert usual.begun == ""
    assert shown(makers).startswith("<system>You are an intelligent programming assistant")
    assert shown(makers).endswith("```</user><assistant>```python\n")
    assert makers.begun == "```python\n", "the judge reads it before what the model says"
    assert shown(evalplus).endswith("passes corresponding tests:\n```python\n")
    with pytest.raises(ConfigError, match="usual, evalplus, qwen"):
        one("humaneval?prompt=best", tmp_path)


def test_greedy_is_greedy_whatever_the_model_s_own_configuration_says(task: Asked) -> None:
    """Qwen's generation_config.json has a penalty of 1.1 for repetition; its makers evaluate without."""
    for example in task.task.examples(reader(CHATML), 0, 2):
        _, params = _generated(example)
        assert (params.temperature, params.repetition_penalty, params.top_p) == (0, 1, 1)
        assert (params.presence_penalty, params.frequency_penalty, params.min_p) == (0, 0, 0)


def test_maths_is_asked_with_solved_ones_or_step_by_step(tmp_path: Path) -> None:
    asked = one("gsm8k", tmp_path).task
    plain, chat = (asked.examples(reader(t), 0, 1)[0] for t in (None, CHATML))
    assert shown(plain).count("Question:") == 5
    assert "<<" not in shown(plain)
    assert plain.stop == ("\nQuestion:",)
    assert shown(chat).count("<user>") == 1
    assert "put your final answer within \\boxed{}." in shown(chat)
    assert chat.max_tokens == 1024
    assert chat.expected == plain.expected, "both forms are asked the same"
    turns = one("gsm8k?shots=2", tmp_path).task.examples(reader(CHATML), 0, 1)[0]
    assert shown(turns).count("<user>") == 3
    assert "The answer is \\boxed{2}.</assistant>" in shown(turns)
    assert asked.judge(chat, Answer(f"So it is \\boxed{{{chat.expected}}}.")) == {"accuracy": 1}
    assert not asked.found(chat, Answer("I cannot say."))


def test_choices_are_asked_for_in_a_chat(tmp_path: Path) -> None:
    for name, good, bad in (("mmlu", "The answer is B.", "The answer is C."), ("bbh", "The answer is (B).", "(A)")):
        made = one(name, tmp_path).task
        example = made.examples(reader(CHATML), 0, 3)[0]
        assert not example.readings
        assert "The answer is" in shown(example)
        assert [made.judge(example, Answer(t))["accuracy"] for t in (good, bad, "", "B or C, I think")] == [1, 0, 0, 0]
        assert made.found(example, Answer(bad))
        assert not made.found(example, Answer("I do not know."))
        scored = one(f"{name}?by=likelihood", tmp_path).task.examples(reader(CHATML), 0, 3)[0]
        assert scored.readings == made.examples(reader(), 0, 3)[0].readings
    made = one("truthfulqa", tmp_path).task
    example = made.examples(reader(CHATML), 0, 1)[0]
    letter = "ABC"[example.expected[0]]
    assert f"{letter}. It is." in shown(example)
    assert made.judge(example, Answer(f"The answer is {letter}.")) == {"accuracy": 1}
    words = one("bbh", tmp_path).task.examples(reader(CHATML), 0, 3)[1]
    assert "one of: False, True" in shown(words)


def test_programs_in_both_forms(tmp_path: Path) -> None:
    for name in ("humaneval", "mbpp"):
        made = one(name, tmp_path).task
        (example,) = made.examples(reader(CHATML), 0, 1)
        for text, right in (("```python\ndef one():\n    return 1\n```", 1), ("```\ndef one():\n    return 2\n```", 0)):
            assert made.judge(example, Answer(text)) == {"pass_at_1": right}
            assert made.found(example, Answer(text))
        assert made.judge(example, Answer("I cannot.")) == {"pass_at_1": 0}
        assert not made.found(example, Answer("I cannot."))


def test_what_is_judged_is_what_was_said_behind_its_thoughts_and_its_beginning(tmp_path: Path) -> None:
    made = one("humaneval?prompt=qwen", tmp_path).task
    (example,) = made.examples(reader(CHATML), 0, 1)

    def judged(text: str, finish: str = "stop", stop: str | int | None = None, opened: bool = False) -> Scored:
        out = CompletionOutput(0, text, [1, 2, 3], finish_reason=finish, stop_reason=stop)
        return _judged(made, example, RequestOutput("r", None, [], None, [out], True), opened=opened)

    code = "def one():\n    return 1\n```\nThis is one."
    found = judged(code)
    assert (found.scores["pass_at_1"], found.answered, found.thinks, found.end, found.tokens) == (
        1,
        True,
        False,
        "stop",
        3,
    )
    assert judged(f"Hm.\n</think>\n{code}", opened=True).scores["pass_at_1"] == 1
    thought = judged(code, "length", opened=True)
    assert (thought.scores["pass_at_1"], thought.answered, thought.thinks, thought.end) == (0, False, True, "length")
    assert thought.said == code, "the report shows it all the same"
    assert judged("I cannot.").answered is False
    assert judged("def one", "stop", "\ndef ").end == "stop_string"
    assert judged("def one", "stop", 151645).end == "stop", "a token that ends a turn is the model's own end"
    assert _plain(example) != _plain(dataclasses.replace(example, begun="")), "it is a part of the digest"


# -- health ------------------------------------------------------------------------------------------------------


def result(*tasks: TaskResult, chat: bool = True) -> Result:
    made = Result(penstock_eval=1, version="0", model="m", seed=0, limit=9, chat=chat, bos=False, settings={},
                  tasks=list(tasks))  # fmt: skip
    return replace(made, warnings=health(made))


def ran(name: str, scores: Sequence[float], ends: bool = True, **how: object) -> TaskResult:
    fields = {"said": "x", "end": "stop", **how}
    examples = [Scored(scores={"a": s}, **fields) for s in scores]  # type: ignore[arg-type]
    return TaskResult(name=name, task=name, kind="generate", source="", digest="d", ends=ends, examples=examples,
                      values=[figure(Metric("a"), examples)], answers=answers_of(examples))  # fmt: skip


def whys(found: Result, other: Result | None = None) -> list[str]:
    return [warning.why for warning in health(found, other)]


def test_how_answers_ended_is_counted() -> None:
    ends = ("stop", "length", "length", "stop_string")
    made = [Scored(scores={"a": 0}, said="x" * (i > 0), end=end, answered=i > 1) for i, end in enumerate(ends)]
    found = answers_of([*made, Scored(scores={"a": 0})])
    assert found is not None
    assert (found.n, found.cut, found.stopped, found.empty, found.unfound) == (4, 0.5, 0.25, 0.25, 0.5)
    assert answers_of([Scored(scores={"a": 0})]) is None, "of an earlier version, or not generated"


def test_a_run_that_went_wrong_says_so() -> None:
    assert whys(result(ran("gsm8k", [1, 0, 1]))) == []
    (cut,) = whys(result(ran("gsm8k", [1, 0, 1], end="length")))
    assert cut == "100% of 3 answers were cut at the limit of tokens"
    assert whys(result(ran("next-line", [1, 0, 1], ends=False, end="length"))) == [], "any text is cut off there"
    (stopped,) = whys(result(ran("humaneval", [0] * 9, end="stop_string")))
    assert "stopped by a stop string, in a chat" in stopped
    assert whys(result(ran("humaneval", [1] * 9, end="stop_string"), chat=False)) == [], "there they are its end"
    (none,) = whys(result(ran("humaneval", [0] * 9, answered=False), chat=False))
    assert none.startswith("in 100% of 9 answers nothing was found")
    assert "--chat" in none
    (thought,) = whys(result(ran("gsm8k", [0] * 9, answered=False, thinks=True)))
    assert "a thought that did not end" in thought


def test_a_task_near_zero_is_held_against_its_like() -> None:
    both = result(ran("humaneval", [0] * 49), ran("mbpp", [1, 0, 1, 0, 0] * 8))
    assert whys(both) == ["a is 0.0%, mbpp 40.0%: read some of its answers before you believe it"]
    assert whys(result(ran("humaneval", [0] * 49), ran("gsm8k", [1] * 40))) == [], "another skill"
    assert whys(result(ran("humaneval", [0] * 3), ran("mbpp", [1, 0]))) == [], "too few to say"
    assert whys(result(ran("humaneval", [0] * 49), ran("mbpp", [0] * 40))) == [], "it may not know it"
    plain = result(ran("humaneval", [1, 0] * 25), chat=False)
    assert whys(result(ran("humaneval", [0] * 49)), plain) == [
        "a is 0.0%, in plain text 50.0%: read some of its answers before you believe it"
    ]
    assert whys(result(ran("humaneval", [1, 0] * 25)), plain) == []


def test_a_gate_does_not_hold_under_a_warning(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text(json.dumps(encode(result(ran("copy", [1] * 9, end="length")))))
    good, bad = result(ran("copy", [1] * 9)), result(ran("copy", [1] * 9, end="length"))

    def holds(rule: object, found: Result) -> tuple[bool, str]:
        (tmp_path / "gate.json").write_text(json.dumps({"copy.a": rule}))
        copy = make_tasks(["copy"])[0]
        copy.task.metrics = (Metric("a"),)
        (verdict,) = verdicts(read_gate(tmp_path / "gate.json", [copy]), found)
        return verdict.passed, verdict.why

    assert holds(0.5, good)[0]
    assert holds(0.5, bad) == (False, "copy.a is 1.0000, but 100% of 9 answers were cut at the limit of tokens")
    assert holds({"min": 0.5, "warnings": "pass"}, bad)[0], "where the user says so"
    against = {"baseline": "old.json", "max_drop": 0.1}
    assert "in the baseline 100% of 9" in holds(against, good)[1], "nor is such a run something to compare with"
    with pytest.raises(InputError, match='warnings may be "pass"'):
        holds({"min": 0.5, "warnings": "no"}, good)


def test_every_report_tells_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = result(ran("copy", [0] * 9, end="length", answered=False))
    print_result(bad)
    print_warnings(result(ran("copy", [1])), bad)
    out, err = capsys.readouterr()
    assert "no answer found" in out
    assert "100%" in out
    assert err.startswith("penstock: warning: the baseline's copy: 100% of 9 answers were cut")
    page = html_page(bad, [], [])
    assert "Warnings: these figures may be of the measurement" in page
    assert "<th>cut at the limit</th>" in page
    (tmp_path / "r.json").write_text(json.dumps(encode(bad)))
    assert load(tmp_path / "r.json") == bad
    old = encode(bad)
    del old["warnings"]
    for made in old["tasks"]:
        del made["answers"], made["ends"]
        for example in made["examples"]:
            del example["end"], example["answered"], example["thinks"], example["tokens"]
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert load(tmp_path / "old.json").tasks[0].answers is None, "results of versions before are read"
