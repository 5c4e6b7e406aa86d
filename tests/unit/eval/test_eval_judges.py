"""`penstock.eval`: how answers are compared, what intervals say, what is in a task. Row K14."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest

from penstock.base.errors import ConfigError, PenstockError
from penstock.eval import answers
from penstock.eval.execution import passes
from penstock.eval.exercises import pairs, words
from penstock.eval.intervals import bootstrap, mcnemar, wilson
from penstock.eval.result import Scored, figure, grouped
from penstock.eval.tasks import DEFAULT, TASKS, make_tasks
from penstock.eval.tasks.base import Answer, Example, Metric, Reader
from penstock.eval.tasks.listops import expression, value_of
from penstock.eval.tasks.prose import noise_of, prose, sentences
from penstock.launch.bundled import bundled_model
from penstock.text.tokenizer import Tokenizer
from tests.shared import shared

FOLDER = bundled_model("nano")
assert FOLDER is not None
TOKENIZER = Tokenizer.from_hf(FOLDER / "tokenizer.json", json.loads((FOLDER / "tokenizer_config.json").read_text()))


def reader(room: int = 2048, **how: object) -> Reader:
    return Reader(TOKENIZER, room, **how)  # type: ignore[arg-type]


def asked(spec: str, limit: int = 10, seed: int = 0, room: int = 2048) -> list[Example]:
    (made,) = make_tasks([spec], allow_code=True)
    return made.task.examples(reader(room), seed, limit)


def judged(spec: str, expected: object, *texts: str) -> list[dict[str, float]]:
    (made,) = make_tasks([spec], allow_code=True)
    return [made.task.judge(Example(expected), Answer(text)) for text in texts]


# -- comparing answers -------------------------------------------------------------------------------------------


def test_answers_are_compared_as_squad_says() -> None:
    assert answers.normal("  The  Red, ball. ") == "red ball"
    assert answers.normal("another theme") == "another theme", "only whole words are articles"
    assert answers.exact("a red ball", ["blue ball", "The red ball!"]) == 1
    assert answers.exact("red balls", ["red ball"]) == 0
    assert answers.f1("the red ball", ["a red ball"]) == 1
    assert answers.f1("red red ball", ["red ball"]) == pytest.approx(0.8), "words count with their multiplicity"
    assert answers.f1("ball of snow", ["red ball"]) == pytest.approx(0.4)
    assert answers.f1("", ["red"]) == answers.f1("cat", ["red"]) == 0
    assert answers.f1("the", ["a"]) == 1, "both are nothing"
    assert answers.f1("小猫", ["小狗"]) == pytest.approx(0.5)
    assert answers.holds("It was Marie Curie, I think", ["marie curie"]) == 1
    assert answers.holds("Marie Curies", ["marie curie"]) == 0
    assert answers.stands(" 48213 is it", "48213") == 1
    assert answers.stands(" 482130", "48213") == 0


def test_rouge_and_similarity() -> None:
    assert answers.rouge_l("police killed the gunman", ["police kill the gunman"]) == pytest.approx(2 / 3)
    assert answers.rouge_l("gunman police", ["police gunman"]) == pytest.approx(0.5), "order counts"
    assert answers.similarity("return x", "return x") == 1
    assert answers.similarity("abcd", "bcde") == pytest.approx(0.75)
    assert answers.said(" 12345. And so on") == answers.said("12345\nmore") == "12345"


@pytest.mark.parametrize(
    ("spec", "expected", "right", "wrong", "odd"),
    [
        ("needle", "4821.", " 4821", " 4822", "48210"),
        ("lookup", "4821", " 4821.", " 482", ""),
        ("lines", "48213", " 48213", " 4821", "48213 48214"),
        ("two-hop", "Leo in the mill.", " Leo in the mill", " Leo in the barn", "Leo"),
        ("copy", "qape xe.", " qape xe.", " qape", "qape  xe"),
        ("arithmetic", "14.", "14", "15", "14a"),
        ("passage", "a red ball.", "the red ball", "a blue ball", "red"),
        ("listops", "7", " 7", " 8", "77"),
        ("count", "5", " 5 passages", " 4", "55"),
        ("find", "12", " 12.", " 1", "none"),
        ("json", '{"age": 3, "name": "Leo"}', ' {"name": "Leo", "age": 3}', '{"name": "Leo", "age": 4}', '{"age": 3,'),
    ],
)
def test_K14_a_judge_knows_right_from_wrong(spec: str, expected: str, right: str, wrong: str, odd: str) -> None:
    (made,) = make_tasks([spec])
    head = made.task.metrics[0].name
    scores = judged(spec, expected, right, wrong, odd, "", "\n\n", "\u0000{[")
    assert [s[head] for s in scores] == [1, 0, 0, 0, 0, 0]
    for s in scores:
        assert s.keys() == {m.name for m in made.task.metrics}


def test_an_answer_may_be_a_sentence_that_ends_with_it() -> None:
    """As assistants answer; what is named on the way, or denied, is not the answer."""
    for spec in ("needle", "lookup", "lines", "arithmetic", "listops"):
        right = ("The number of ba-be is 4821.", "ba-be: 4821", "**4821**", 'It was "4821".', "[MAX 1 2 ] = 4821")
        wrong = (
            "It is not 4821",
            "I know 4821",
            "is 14821",
            "It is 4821 or 4822",
            "It is 48 4821",
            "It is 4822. It is 4821",
        )
        scores = judged(spec, "4821", *right, *wrong)
        assert [s["accuracy"] for s in scores] == [1.0] * len(right) + [0.0] * len(wrong), spec
    assert judged("two-hop", "Leo in the mill.", "The ball is Leo in the mill.")[0]["accuracy"] == 1


def test_an_answer_in_a_chat_has_room_for_a_sentence() -> None:
    """A real assistant says the question again first, and was cut before it came to the number."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    specs = "needle", "lookup", "lines", "two-hop", "copy", "passage", "arithmetic", "json", "listops", "count", "find"
    for spec in specs:
        (made,) = make_tasks([spec])
        plain, chat = (made.task.examples(reader(template=t), 0, 4) for t in (None, template))
        assert min(e.max_tokens for e in chat) >= min(e.max_tokens for e in plain) + 40, spec
    (made,) = make_tasks(["needle?lengths=512"])
    needles = made.task.examples(reader(512, template=template), 0, 4)
    assert all(450 < e.num_tokens <= 512 for e in needles), "the longest still fit"


def test_json_may_be_valid_and_wrong() -> None:
    found = judged("json", '{"age": 3}', '{"age": 4}', '{"age": 3, "age": 3}', "[3]", "[" * 100_000)
    assert [(s["valid"], s["right"]) for s in found] == [(1, 0), (0, 0), (1, 0), (0, 0)]
    # An answer ends with its line.
    assert judged("json", '{"age": 3}', '{"age": 3}\nTom is 4') == [{"right": 1, "valid": 1}]
    # Assistants write it over several lines, or as a block of code.
    lines = '{\n  "age": 3\n}'
    assert (
        judged("json", '{"age": 3}', lines, f"```json\n{lines}\n```\nThat is Tom", f"```\n{lines}")
        == [{"right": 1, "valid": 1}] * 3
    )
    wrong = judged("json", '{"age": 3}', '{"age": 3} and {"age": 4}', '{\n"age": 3', f"It is {lines}", "```", "{\n")
    assert wrong == [{"right": 0, "valid": 0}] * 5
    (made,) = make_tasks(["json"])
    assert [
        {e.stop for e in made.task.examples(reader(template=t), 0, 4)} for t in (None, "{{ messages[0].content }}")
    ] == [{(".", "\n")}, {()}]


def test_likelihoods_choose_and_the_first_of_equals_wins(tmp_path: Path) -> None:
    rows = tmp_path / "q.jsonl"
    rows.write_text(json.dumps({"question": "1 + 1?", "choices": ["1", "2", "3"], "answer": 1}) + "\n")
    (made,) = make_tasks([f"mmlu:{rows}"])
    (example,) = made.task.examples(reader(), 0, 5)
    assert [TOKENIZER.decode(r.ids[r.first :]) for r in example.readings] == [" A", " B", " C"]
    for logprobs, right in (((-2.0, -1.0, -3.0), 1), ((-1.0, -1.0, -3.0), 0), ((-5.0, -1.0, -0.5), 0)):
        assert made.task.judge(example, Answer(logprobs=logprobs, greedy=(True,) * 3)) == {"accuracy": right}


# -- intervals ---------------------------------------------------------------------------------------------------


def test_K14_intervals_are_those_of_the_books() -> None:
    for right, n in ((0, 10), (10, 10), (9, 10), (57, 100), (1, 3), (0, 1)):
        want = binomtest(right, n).proportion_ci(method="wilson")
        assert wilson(right, n) == pytest.approx((want.low, want.high), abs=1e-6)
    assert wilson(10, 10)[1] == 1
    assert wilson(0, 0) == (0, 1)
    for first, second in ((0, 0), (5, 0), (3, 9), (10, 10), (40, 20)):
        n = first + second
        want_p = binomtest(first, n).pvalue if n else 1.0
        assert mcnemar(first, second) == pytest.approx(want_p)
    rng = np.random.default_rng(1)
    values = rng.normal(0.5, 0.2, 4000).tolist()
    low, high = bootstrap(lambda x: x, values) or (0, 0)
    se = np.std(values) / math.sqrt(4000)
    assert (low, high) == pytest.approx((np.mean(values) - 1.96 * se, np.mean(values) + 1.96 * se), abs=0.1 * se)
    assert bootstrap(lambda x: x, values) == (low, high), "one figure, one interval"
    assert bootstrap(lambda x: x, [1.0]) is None


def test_figures_of_each_kind() -> None:
    def of(kind: str, scores: list[float], weights: list[float]) -> float:
        metric = Metric("m", kind)  # type: ignore[arg-type]
        made = [Scored(scores={"m": s}, weights={"m": w}) for s, w in zip(scores, weights, strict=True)]
        value = figure(metric, made)
        assert value.low is not None
        assert value.high is not None
        assert value.low <= value.value <= value.high
        return value.value

    assert of("rate", [1, 0, 1, 1], [1, 1, 1, 1]) == 0.75
    assert of("mean", [1, 0.5], [1, 1]) == 0.75
    assert of("perplexity", [10.0, 2.0], [4, 2]) == pytest.approx(math.exp(2)), "nats of all over tokens of all"
    assert of("bits", [10.0, 2.0], [4, 2]) == pytest.approx(2 / math.log(2))
    assert of("perplexity", [1e6, 1e6], [1, 1]) < math.inf, "JSON has no infinity"


def test_groups_are_by_tags_in_order() -> None:
    from penstock.eval.result import TaskResult

    made = [Scored(scores={"m": float(i > 2)}, tags={"d": i % 3, "s": "b" if i % 2 else "a"}) for i in range(6)]
    task = TaskResult(name="t", task="t", kind="generate", source="", digest="", examples=made,
                      values=[figure(Metric("m"), made)])  # fmt: skip
    assert [(k, v.value, v.n) for k, v in grouped(task, "m", ["d"]).items()] == [
        ((0,), 0.5, 2), ((1,), 0.5, 2), ((2,), 0.5, 2)
    ]  # fmt: skip
    assert list(grouped(task, "m", ["s", "d"])) == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("b", 2)]
    assert grouped(task, "m", ["nothing"]) == {}


# -- examples ----------------------------------------------------------------------------------------------------


def test_K14_K15_examples_follow_from_their_seed_alone() -> None:
    names = [name for name in DEFAULT if name != "needle"]
    code = f"next-line:{Path(answers.__file__).parent}?context=128"
    for name in (*names, "needle?lengths=256", "lines?pairs=10", "listops", "count", "find", code):
        first, again, other = asked(name), asked(name), asked(name, seed=1)
        assert first == again, name
        assert (first != other) == (name != "perplexity"), name
        for example in first:
            assert example.num_tokens <= 2048


def test_nothing_of_the_training_half_is_asked() -> None:
    foreign = {word for kind in words("train") for word in kind}
    for name in ("two-hop", "passage", "json", "needle?lengths=256"):
        for example in asked(name, 30):
            text = TOKENIZER.decode(example.prompt) if not name.startswith("needle") else example.expected
            assert not foreign & set(text.replace(".", " ").replace(",", " ").split()), name
            assert not name.startswith("needle") or sum(map(int, example.expected[:-1])) % 5 == 0


def test_G34_every_position_is_asked_equally_often_and_stands_where_it_says() -> None:
    for name in ("lookup", "lines"):
        made = asked(f"{name}?pairs=10+40&positions=5", 40)
        assert len(made) == 40
        counts: dict[tuple[object, object], int] = {}
        for example in made:
            counts[example.tags["pairs"], example.tags["position"]] = (
                counts.get((example.tags["pairs"], example.tags["position"]), 0) + 1
            )
            context, question = TOKENIZER.decode(example.prompt).split("\n\n")
            lines = context.split("\n")
            key = question.removeprefix("The value of ").rpartition(" in line ")[2].split(" ")[0]
            (at,) = [i for i, line in enumerate(lines) if line.split(":")[0].removeprefix("line ") == key]
            assert lines[at].rstrip(".").endswith(example.expected)
            assert at == round(float(example.tags["position"]) * (len(lines) - 1))
            assert len(lines) == example.tags["pairs"]
        assert set(counts.values()) == {4}
        assert len(counts) == 10


def test_needles_stand_at_their_depth_in_their_length() -> None:
    made = asked("needle?lengths=256+1024&depths=0+0.5+1", 30)
    assert len(made) == 30
    for example in made:
        text = TOKENIZER.decode(example.prompt)
        at = text.index(example.expected) / text.rindex("\n\n")
        assert at == pytest.approx(float(example.tags["depth"]), abs=0.25), text
        assert 0.7 * int(example.tags["length"]) < example.num_tokens <= int(example.tags["length"])
        assert text.count(example.expected) == 1


def test_prose_is_filled_up_and_never_cut_short() -> None:
    noise = noise_of(prose(None))
    for size in (10, 500, 20_000):
        assert len(noise(random.Random(3), size)) == pytest.approx(size, abs=3)
    assert len(sentences(prose(None))) >= 30
    assert len(pairs(random.Random(0), "test", 400)) == 400


def test_listops_come_to_what_they_say() -> None:
    for text, value in (
        ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9), ("[SM 8 7 ]", 5), ("[MED 3 1 8 ]", 3), ("[MED 4 1 ]", 1),
        ("[MIN 6 [MED 3 1 8 ] 5 ]", 3),
    ):  # fmt: skip
        assert value_of(text.split()) == value
    rng = random.Random(0)
    for depth in (1, 2, 3, 5):
        words_of = expression(rng, depth, 5)
        deep, most = 0, 0
        for word in words_of:
            deep += word.startswith("[") - (word == "]")
            most = max(most, deep)
        assert most == depth
        assert 0 <= value_of(words_of) <= 9


def test_passages_are_counted_and_found() -> None:
    for example in asked("count?passages=6", 20):
        shown = TOKENIZER.decode(example.prompt).split("\n\n")[0].split("\n")
        assert len(shown) == 6
        assert str(len({line.partition(": ")[2] for line in shown})) == example.expected
    for example in asked("find?passages=6", 12):
        context, question = TOKENIZER.decode(example.prompt).split("\n\n")
        part = question.split('"')[1]
        (line,) = [line for line in context.split("\n") if line.rstrip(".").endswith(part)]
        assert line.startswith(f"Passage {example.expected}:")


def test_a_word_is_scored_as_it_stands_behind_its_text() -> None:
    for example in asked("cloze", 30):
        (reading,) = example.readings
        assert TOKENIZER.decode(reading.ids[reading.first :]) == " " + example.expected
        assert reading.first >= 1
    assert reader(bos=True).ids("A dog")[0] == TOKENIZER.bos_id
    assert reader().ids("A dog")[0] != TOKENIZER.bos_id
    whole = reader(bos=True).reading("The cat", " sat")
    assert TOKENIZER.decode(whole.ids[whole.first :]) == " sat"


# -- asking for tasks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("neddle", "did you mean needle"), ("magic", "there are arithmetic"), ("needle:", "names no file"),
        ("needle?length=3", "it has: depths, lengths"), ("needle?lengths", "name=value"),
        ("needle?lengths=256&lengths=512", "each once"), ("needle?lengths=2", "must be 64"),
        ("needle?lengths=one", "must be a number"), ("needle?lengths=100.5", "whole"), ("needle?depths=2", "0 to 1"),
        ("lookup?positions=3+4", "at most 1 value"), ("copy?x=1", "has no option 'x'; it has: none"),
        ("arithmetic:/tmp", "takes no file"), ("gsm8k", "gsm8k:FILE"), ("mmlu", "mmlu:FILE"), ("longbench", "FILE"),
        ("perplexity:/nowhere", "cannot read"), ("humaneval", "--allow-code-execution"), ("mbpp", "your rights"),
        ("ruler:/nowhere", "cannot read"), ("count?passages=900", "fewer than the 900"),
    ],
)  # fmt: skip
def test_a_task_that_cannot_be_is_one_sentence(spec: str, says: str) -> None:
    with pytest.raises(PenstockError, match=says.replace("?", r"\?")) as error:
        make_tasks([spec])
    assert "\n" not in str(error.value)


def test_lists_of_tasks(tmp_path: Path) -> None:
    for specs, says in (([], "names none"), (["copy", "copy"], "twice")):
        with pytest.raises(ConfigError, match=says):
            make_tasks(specs)
    with pytest.raises(ConfigError, match="not a folder"):
        make_tasks(["copy"], data=tmp_path / "nowhere")
    (tmp_path / "lambada_test.jsonl").write_text('{"text": "The cat sat"}\n')
    (made,) = make_tasks(["cloze"], data=tmp_path)
    assert [e.expected for e in made.task.examples(reader(), 0, 5)] == ["sat"]
    (named,) = make_tasks([f"cloze:{tmp_path}/lambada_test.jsonl"])
    assert named.spec == "cloze:lambada_test.jsonl", "results of two machines are called alike"
    assert set(DEFAULT) <= set(TASKS)


# -- running programs --------------------------------------------------------------------------------------------


def test_programs_pass_only_at_their_end(tmp_path: Path) -> None:
    assert passes("assert 1 + 1 == 2", 10)
    assert not passes("assert 1 + 1 == 3", 10)
    assert not passes("import sys; sys.exit(0)", 10), "leaving early is not passing"
    assert not passes("import os; os._exit(0)", 10)
    assert not passes("def f(:", 10)
    assert not passes("while True: pass", 1)
    assert not passes("x = bytearray(4 << 30)", 10), "memory is limited"
    mark = tmp_path / "mark"
    assert not passes(f"with open({str(mark)!r}, 'w') as f: f.write('x' * 100)", 10), "files are limited"
    assert not mark.exists() or mark.stat().st_size == 0
    assert not passes("import os; assert 'HOME' in os.environ", 10), "no environment"


def test_solutions_of_the_sets_pass_and_others_do_not() -> None:
    for name, file, field in (("humaneval", "humaneval.jsonl", "canonical_solution"), ("mbpp", "mbpp.jsonl", "code")):
        path = shared("data", "eval", file)
        (made,) = make_tasks([f"{name}:{path}"], allow_code=True)
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()[:3]]
        for row, problem in zip(rows, made.task.problems, strict=False):  # type: ignore[attr-defined]
            example = Example([problem.entry, problem.begin, problem.tests])
            for solution in (row[field], f"Sure!\n```python\n{problem.begin}{row[field]}\n```\nThis is it."):
                assert made.task.judge(example, Answer(solution)) == {"pass_at_1": 1}
            assert made.task.judge(example, Answer("    return None\n")) == {"pass_at_1": 0}
