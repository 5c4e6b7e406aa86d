"""`penstock.eval`: evaluation files in their public formats, as they are and broken. Rows K14, K32, K33, K35."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import PenstockError
from penstock.eval.tasks import make_tasks
from penstock.eval.tasks.base import Answer, Example, Reader, Task
from tests.shared import shared
from tests.unit.eval.test_eval_judges import TOKENIZER

ROOM = 1 << 20


def task(spec: str) -> Task:
    (made,) = make_tasks([spec], allow_code=True)
    return made.task


def examples(spec: str, limit: int = 5, room: int = ROOM) -> list[Example]:
    return task(spec).examples(Reader(TOKENIZER, room), 0, limit)


def text_of(example: Example) -> str:
    return TOKENIZER.decode(example.prompt)


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# -- the real files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "file", "n"),
    [
        ("cloze", "lambada_test.jsonl", 3092), ("gsm8k", "gsm8k_test.jsonl", 908), ("bbh", "bbh_9tasks.jsonl", 978),
        ("truthfulqa", "truthfulqa.jsonl", 572), ("nq-open", "nq_open_oracle.jsonl", 415),
        ("kv", "lost_in_middle_kv75.jsonl", 72), ("humaneval", "humaneval.jsonl", 115), ("mbpp", "mbpp.jsonl", 682),
    ],
)  # fmt: skip
def test_K14_published_files_are_read(name: str, file: str, n: int) -> None:
    path = shared("data", "eval", file)
    made = task(f"{name}:{path}")
    drawn = made.examples(Reader(TOKENIZER, ROOM), 3, 4)
    assert len(drawn) == 4
    assert drawn == made.examples(Reader(TOKENIZER, ROOM), 3, 4)
    assert drawn != made.examples(Reader(TOKENIZER, ROOM), 4, 4)
    listed = {"bbh": "questions", "truthfulqa": "questions", "cloze": "texts", "humaneval": "problems"}
    whole = (listed | {"mbpp": "problems"}).get(name, "items")
    assert len(getattr(made, whole)) == n


def test_K32_gsm8k_shows_solved_ones_first_and_never_asks_them() -> None:
    path = shared("data", "eval", "gsm8k_test.jsonl")
    first = json.loads(path.read_text("utf-8").splitlines()[0])
    for example in examples(f"gsm8k:{path}?shots=16", 5):
        text = text_of(example)
        assert text.count("Question:") == 17
        assert text.startswith(f"Question: {first['question'].strip()}")
        assert "<<" not in text
        assert text.rstrip().endswith("Answer:")
        assert first["question"].strip() not in text.rpartition("Question:")[2]
        judge = task(f"gsm8k:{path}?shots=16").judge
        assert judge(example, Answer(f" so it is {example.expected}.")) == {"accuracy": 1}
        assert judge(example, Answer(f" so it is {example.expected}1.")) == {"accuracy": 0}


def test_G34_the_asked_record_goes_to_each_position() -> None:
    path = shared("data", "eval", "lost_in_middle_kv75.jsonl")
    for keep in (0, 20):
        made = examples(f"kv:{path}?pairs={keep}&positions=3", 6)
        assert [e.tags["position"] for e in made] == [0.0, 0.5, 1.0] * 2
        for example in made:
            text = text_of(example)
            shown = list(json.loads(text[text.index("{") : text.index("}") + 1]).items())
            assert len(shown) == (keep or 75)
            (at,) = [i for i, (_, value) in enumerate(shown) if value == example.expected]
            assert at == round(float(example.tags["position"]) * (len(shown) - 1))
            assert f'Key: "{shown[at][0]}"' in text


def test_G34_the_passage_that_answers_goes_to_each_position() -> None:
    path = shared("data", "eval", "nq_open_oracle.jsonl")
    rows = {row["question"]: row for row in map(json.loads, path.read_text("utf-8").splitlines())}
    for example in examples(f"nq-open:{path}?docs=5&positions=5", 10):
        text = text_of(example)
        shown = text[text.index("[1] ") : text.index("\n\nQuestion:")].split("\n[")
        question = text.rpartition("Question: ")[2].split("\nAnswer")[0]
        gold = rows[question]["ctxs"][0]["text"]
        assert len(shown) >= 5
        assert text.count(gold) == 1
        before = text[: text.index(gold)].count("\n[") - 1
        assert before == round(float(example.tags["position"]) * 4)
        made = task(f"nq-open:{path}")
        assert made.judge(example, Answer(f" It was {example.expected[0]}."))["accuracy"] == 1
        assert made.judge(example, Answer(" nobody"))["accuracy"] == 0


def test_bbh_lists_its_choices() -> None:
    path = shared("data", "eval", "bbh_9tasks.jsonl")
    kinds = set()
    for example in examples(f"bbh:{path}", 120):
        kinds.add(example.tags["subject"])
        told = [TOKENIZER.decode(r.ids[r.first :]).strip() for r in example.readings]
        assert len(told) == len(set(told))
        assert example.expected < len(told)
    assert kinds == {"boolean_expressions", "date_understanding", "object_counting", "penguins_in_a_table", "navigate",
                     "temporal_sequences"}  # fmt: skip


# -- formats of which there is no file here ----------------------------------------------------------------------


def test_mmlu_as_csv_and_as_json(tmp_path: Path) -> None:
    table = tmp_path / "abstract_algebra_test.csv"
    table.write_text(
        'What, is 1 + 1?,1,2,3,4,B\n"What, is 2 + 2?",1,2,3,4,D\n'.replace("What, is 1", '"What, is 1"', 1)
    )
    table.write_text('"What, is 1 + 1?",1,2,3,4,B\n"What, is 2 + 2?",1,2,3,4,D\n')
    (example,) = examples(f"mmlu:{table}?shots=1")
    text = TOKENIZER.decode(example.readings[0].ids)
    assert example.expected == 3
    assert "abstract algebra" in text
    assert text.index("1 + 1?") < text.index("Answer: B") < text.index("2 + 2?")
    row = {"question": "What?", "subject": "law", "choices": ["a", "b"], "answer": 1}
    other = row | {"subject": "art", "answer": "A"}
    made = task(f"mmlu:{lines(tmp_path / 'm.jsonl', row, other)}")
    assert made.axes == ("subject",)
    assert [e.expected for e in made.examples(Reader(TOKENIZER, ROOM), 0, 9)] == [1, 0]


def longbench(**changes: Any) -> dict[str, Any]:
    row = {"input": "Who?", "context": "Ann came. " * 50, "answers": ["Ann"], "length": 100, "dataset": "qasper",
           "language": "en", "all_classes": None, "_id": "1"}  # fmt: skip
    return row | changes


def test_K32_K33_K35_longbench_is_scored_by_data_set(tmp_path: Path) -> None:
    rows = [
        longbench(), longbench(dataset="gov_report", input="", answers=["Ann came to town"]),
        longbench(dataset="trec", answers=["Food"], all_classes=["Food", "Foo", "City"]),
        longbench(dataset="passage_count", answers=["7"]),
        longbench(dataset="passage_retrieval_en", answers=["Paragraph 3"]), longbench(dataset="lcc", answers=["x = 1"]),
    ]  # fmt: skip
    made = task(f"longbench:{lines(tmp_path / 'l.jsonl', *rows)}")
    assert made.axes == ("dataset",)
    found = made.examples(Reader(TOKENIZER, ROOM), 0, 9)
    assert [e.max_tokens for e in found] == [128, 512, 64, 32, 32, 64]
    texts = ((" Ann", "Ben"), ("Ann came to town", "so it is"), ("Food", "City"), ("7", "8"),
             ("Paragraph 3", "Paragraph 30"), ("\n# a remark\nx = 1\ny", "?"))  # fmt: skip
    for example, (right, wrong) in zip(found, texts, strict=True):
        assert made.judge(example, Answer(right)) == {"score": 1}
        assert made.judge(example, Answer(wrong)) == {"score": 0}
        assert made.judge(example, Answer("")) == {"score": 0}
    assert made.judge(found[2], Answer("Food or City")) == {"score": 0.5}
    assert made.judge(found[3], Answer("7, not 8 or 9")) == {"score": pytest.approx(1 / 3)}


def test_longbench_cuts_long_contexts_in_the_middle(tmp_path: Path) -> None:
    context = "FIRST " + "word " * 3000 + "LAST"
    path = lines(tmp_path / "l.jsonl", longbench(context=context))
    (example,) = examples(f"longbench:{path}", room=600)
    text = text_of(example)
    assert example.num_tokens <= 600
    assert len(example.prompt) > 400
    assert example.tags["cut"] == 1
    for part in ("FIRST", "LAST", "Who?"):
        assert part in text


def test_K33_ruler_counts_what_stands_in_the_answer(tmp_path: Path) -> None:
    rows = [{"index": i, "input": "Find it.", "outputs": ["12", "Ann"], "answer_prefix": " It is", "length": 100 + i}
            for i in range(2)]  # fmt: skip
    made = task(f"ruler:{lines(tmp_path / 'niah.jsonl', *rows)}")
    first, _ = made.examples(Reader(TOKENIZER, ROOM), 0, 9)
    assert text_of(first) == "Find it. It is"
    assert [made.judge(first, Answer(t))["score"] for t in ("12 and ann", "12", "no")] == [1, 0.5, 0]
    folder = tmp_path / "qa_1"
    folder.mkdir()
    some = task(f"ruler:{lines(folder / 'validation.jsonl', *rows)}")
    assert [some.judge(first, Answer(t))["score"] for t in ("12 and ann", "12", "no")] == [1, 1, 0]


def test_K34_the_next_line_of_a_program(tmp_path: Path) -> None:
    program = [f"value_{i} = compute({i})" for i in range(30)]
    (tmp_path / "a.py").write_text("\n".join(program))
    made = task(f"next-line:{tmp_path}")
    for example in made.examples(Reader(TOKENIZER, ROOM), 0, 9):
        at = program.index(example.expected)
        assert text_of(example) == "\n".join(program[:at]) + "\n"
        assert made.judge(example, Answer(f"\n  {example.expected}\nmore")) == {"similarity": 1, "exact": 1}
        near = made.judge(example, Answer(example.expected.replace("compute", "Compute")))
        assert near["exact"] == 0
        assert 0.8 < near["similarity"] < 1
    assert all(e.num_tokens <= 300 for e in made.examples(Reader(TOKENIZER, 300), 0, 9))


# -- broken files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("gsm8k", "", "holds no examples"), ("gsm8k", "nonsense", "line 1 is not JSON"),
        ("gsm8k", '{"question": "a", "answer": "#### 1"}\n[1]', "line 2 must be an object"),
        ("gsm8k", "[" * 100_000, "is not JSON"), ("gsm8k", '{"question": "a"}', "no field 'answer'"),
        ("gsm8k", '{"question": "a", "answer": "7"}', "#### and a number"),
        ("gsm8k", '{"question": "a", "answer": "#### 7"}', "shots leave none"),
        ("mmlu", '{"question": "a", "choices": ["b"], "answer": 0}', "2 to 10"),
        ("mmlu", '{"question": "a", "choices": ["b", "c"], "answer": 2}', "0 to 1"),
        ("mmlu", '{"question": "a", "choices": "b c", "answer": true}', "'choices'"),
        ("mmlu?shots=1", '{"question": "a", "choices": ["b", "c"], "answer": 1}', "leave no question"),
        ("bbh", '{"input": "a", "target": "one of a kind"}', "can be listed"),
        ("cloze", '{"text": "word"}', "two words"), ("cloze", '{"text": 3}', "must be a text"),
        ("cloze", '{"txt": "a"}', "has: txt"),
        ("truthfulqa", '{"Question": "a", "Best Answer": "b", "Incorrect Answers": ";"}', "names none"),
        ("humaneval", '{"prompt": "a", "test": "b", "entry_point": "x; y"}', "name of a function"),
        ("mbpp", '{"text": "a", "test_list": [1]}', "list of texts"),
        ("kv", '{"ordered_kv_records": [["a", "b"]], "key": "a", "value": "b"}', "at least two"),
        ("kv", '{"ordered_kv_records": [["a", "b"], ["c"]], "key": "a", "value": "b"}', "pairs of texts"),
        ("kv", '{"ordered_kv_records": [["a", "b"], ["c", "d"]], "key": "x", "value": "b"}', "not among"),
        ("nq-open", '{"question": "a", "answers": ["b"], "ctxs": []}', "'ctxs'"),
        ("nq-open?docs=2", '{"question": "a", "answers": ["b"], "ctxs": [{"title": "", "text": "b"}]}', "too few"),
        ("longbench", json.dumps(longbench(dataset="mine")), "none of LongBench's"),
        ("longbench", json.dumps(longbench(answers=[])), "'answers'"),
        ("ruler", '{"input": "a", "outputs": []}', "'outputs'"), ("perplexity", " \n", "is empty"),
        ("needle", "too short", "too short"),
    ],
)  # fmt: skip
def test_a_broken_file_is_one_sentence(name: str, content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_text(content, encoding="utf-8")
    head, mark, options = name.partition("?")
    with pytest.raises(PenstockError) as error:
        examples(f"{head}:{path}{mark}{options}")
    told = str(error.value)
    assert says in told
    assert "\n" not in told
    assert len(told) < 400


def test_a_broken_table_is_one_sentence(tmp_path: Path) -> None:
    for content, says in (("a,b,c\n", "3 cells, not 6"), ("q,1,2,3,4,E\n", "A, B, C or D"), ("", "no examples"),
                          ('"q,1\n', "CSV")):  # fmt: skip
        path = tmp_path / "m.csv"
        path.write_text(content)
        with pytest.raises(PenstockError, match=says):
            task(f"mmlu:{path}")
    binary = tmp_path / "b.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PenstockError, match="UTF-8"):
        task(f"cloze:{binary}")
