"""`penstock eval`: the whole command on nano. Rows K14, K15, G34."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM
from penstock.base.errors import EngineError, InputError
from penstock.cli.main import main
from penstock.config import from_kwargs
from penstock.core.matrix_format import NONE
from penstock.eval import gate as gates
from penstock.eval.paired import check_aligned, differences, speeds
from penstock.eval.perplexity import passage, score
from penstock.eval.result import Result, encode, load
from penstock.eval.run import evaluate, prepare
from penstock.eval.sample import SAMPLE
from penstock.eval.scorer import load as load_model
from penstock.eval.scorer import make_scorer
from penstock.eval.tasks import make_tasks
from tests.pages import Page

SMALL = {"num_gpu_blocks_override": 128, "max_num_seqs": 16}
FLAGS = ["--num-gpu-blocks-override", "128", "--max-num-seqs", "16"]
TASKS = ["needle?lengths=256&depths=0+0.5+1", "lookup?pairs=10", "passage", "json", "cloze", "perplexity?tokens=600"]


@pytest.fixture(scope="module")
def nano() -> LLM:
    return LLM("nano", **SMALL)


@pytest.fixture(scope="module")
def plain(nano: LLM) -> Result:
    return evaluate(nano, TASKS, limit=12, bos=True)


@pytest.fixture(scope="module")
def rounded() -> Result:
    return evaluate(LLM("nano", quantization="int4-w4a8", **SMALL), TASKS, limit=12, bos=True)


def command(*args: str) -> int:
    return main(["eval", "nano", "--bos", "--limit", "6", *FLAGS, *args])


# -- figures -----------------------------------------------------------------------------------------------------


def test_K14_accuracy_with_intervals_and_perplexity_by_the_same_code(plain: Result) -> None:
    for task in plain.tasks:
        assert task.values
        for value in task.values:
            assert value.n == len(task.examples)
            assert value.low is not None
            assert value.high is not None
            assert value.low <= value.value <= value.high
            if value.kind in ("rate", "mean"):
                assert 0 <= value.low <= value.high <= 1
    found = {task.task: task.values[0].value for task in plain.tasks}
    assert found["needle"] > 0.8, "nano finds what it was told"
    assert found["passage"] > 0.7
    assert found["lookup"] > 0.4
    assert 40 < found["perplexity"] < 90


def test_K14_perplexity_is_that_of_the_windows_read_alone(nano: LLM) -> None:
    (task,) = evaluate(nano, ["perplexity?tokens=900&window=128&stride=64"]).tasks
    model = load_model(from_kwargs(model="nano", num_gpu_blocks_override=64))
    scorer = make_scorer(model, NONE)
    assert model.tokenizer is not None
    want = score(scorer, passage(SAMPLE, model.tokenizer, scorer, window=128, stride=64, max_tokens=900))
    assert task.value("perplexity").value == pytest.approx(want.perplexity, rel=1e-4)
    assert task.value("bits_per_byte").value == pytest.approx(want.bits_per_byte, rel=1e-4)
    assert sum(e.weights["perplexity"] for e in task.examples) == want.passage.num_tokens


def test_likelihoods_are_the_engine_s_own(nano: LLM) -> None:
    (asked,) = prepare(nano, make_tasks(["cloze"]), limit=5)
    (task,) = evaluate(nano, ["cloze"], limit=5).tasks
    for example, found in zip(asked.examples, task.examples, strict=True):
        (reading,) = example.readings
        from penstock import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=len(reading.ids) - reading.first, ignore_eos=True)
        told = nano.generate([{"prompt_token_ids": list(reading.ids[: reading.first])}], params)[0].outputs[0].token_ids
        assert (told == list(reading.ids[reading.first :])) == bool(found.scores["accuracy"])
        assert found.scores["perplexity"] > 0


def test_chat_asks_by_the_template(nano: LLM) -> None:
    (asked,) = prepare(nano, make_tasks(["passage"]), limit=1, chat=True)
    text = nano.get_tokenizer().decode(asked.examples[0].prompt, skip_special_tokens=False)
    assert text.startswith("<|endoftext|><|im_start|>user\n")
    assert text.endswith("<|im_start|>assistant\n")


# -- alignment ---------------------------------------------------------------------------------------------------


def test_K15_a_digest_is_of_all_that_is_asked_and_of_nothing_else(nano: LLM) -> None:
    def of(spec: str = "copy", llm: LLM = nano, **how: Any) -> str:
        return prepare(llm, make_tasks([spec]), **{"limit": 4} | how)[0].digest

    assert of() == of()
    others = [of(seed=1), of(limit=5), of(chat=True), of(bos=True), of("arithmetic"), of("lookup?pairs=10"),
              of("lookup?pairs=11"), of("needle?lengths=256"), of("needle?lengths=300")]  # fmt: skip
    assert len({of(), *others}) == 10
    # Engine settings cannot change what is asked.
    assert of(llm=LLM("nano", quantization="int4-wo", kv_cache_dtype="int8", prefix_cache="none", **SMALL)) == of()


def test_K15_a_digest_notices_every_part_of_an_example(nano: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    (asked,) = make_tasks(["copy"])
    made = asked.task.examples
    seen = {prepare(nano, [asked], limit=2)[0].digest}
    for changed in (
        {"prompt": (5, 6)}, {"expected": "x"}, {"max_tokens": 3}, {"stop": ("!",)}, {"tags": {"a": 1}},
        {"weights": {"accuracy": 2.0}},
    ):  # fmt: skip
        monkeypatch.setattr(asked.task, "examples", lambda *a, c=changed: [replace(e, **c) for e in made(*a)])
        seen.add(prepare(nano, [asked], limit=2)[0].digest)
    assert len(seen) == 7


def test_K15_other_examples_are_not_compared(nano: LLM, plain: Result) -> None:
    other = evaluate(nano, ["passage"], limit=5, bos=True)
    with pytest.raises(InputError, match="not the examples of the baseline"):
        differences(other, plain)
    with pytest.raises(InputError, match="same seed"):
        check_aligned(prepare(nano, make_tasks(["passage"]), limit=5), plain)
    with pytest.raises(InputError, match="none of these tasks"):
        check_aligned(prepare(nano, make_tasks(["copy"]), limit=5), plain)


def test_K15_no_speed_is_told_where_tokens_differ_unless_losses_are_meant(plain: Result, rounded: Result) -> None:
    drafting = LLM("nano", speculative_config='{"method": "ngram", "num_speculative_tokens": 3}', **SMALL)
    again = evaluate(drafting, TASKS, limit=12, bos=True)
    told = {s.task: s for s in speeds(again, plain)}
    assert set(told) == {"needle?lengths=256&depths=0+0.5+1", "lookup?pairs=10", "passage", "json"}
    assert all(s.same == s.n and s.ratio is not None for s in told.values())
    lossy = {s.task: s for s in speeds(rounded, plain)}
    changed = [s for s in lossy.values() if s.same < s.n]
    assert changed, "four bits change some answers"
    for speed in changed:
        assert speed.ratio is None
        assert f"{speed.n - speed.same} of {speed.n} answers are other tokens" in speed.refused
    assert all(s.ratio is not None for s in speeds(rounded, plain, lossy=True))


def test_differences_are_of_pairs(plain: Result, rounded: Result) -> None:
    found = {(d.task, d.metric.name): d for d in differences(rounded, plain)}
    ppl = found["perplexity?tokens=600", "perplexity"]
    assert ppl.interval is not None
    assert ppl.p is None
    assert ppl.interval[0] <= ppl.value <= ppl.interval[1]
    assert ppl.value == ppl.worse_by > 0
    same = {d.metric.name: d for d in differences(plain, plain) if d.task == "passage"}
    assert same["em"].value == 0
    assert same["em"].interval == (0, 0)
    assert same["em"].p == 1


def test_a_result_is_read_back_as_it_was_written(plain: Result, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    file.write_text(json.dumps(encode(plain)))
    assert load(file) == plain


# -- gates -------------------------------------------------------------------------------------------------------


def gate(tmp_path: Path, rules: Any, result: Result, *specs: str) -> list[gates.Verdict]:
    file = tmp_path / "gate.json"
    file.write_text(rules if isinstance(rules, str) else json.dumps(rules))
    return gates.verdicts(gates.read_gate(file, make_tasks(list(specs) or TASKS)), result)


def test_K14_a_gate_falls_when_four_bits_cost_perplexity(plain: Result, rounded: Result, tmp_path: Path) -> None:
    (tmp_path / "base.json").write_text(json.dumps(encode(plain)))
    rule = {"baseline": "base.json", "max_drop": 0.5}
    rules = {"perplexity?tokens=600.perplexity": rule, "passage.em": {"baseline": "base.json", "max_drop": 1.0}}
    assert [v.passed for v in gate(tmp_path, rules, plain)] == [True, True]
    first, second = gate(tmp_path, rules, rounded)
    assert not first.passed
    assert second.passed
    assert re.search(r"perplexity is \d+\.\d+, the baseline's \d+\.\d+: worse by \d\.\d+, more than 0.5", first.why)
    sure = {"perplexity?tokens=600.perplexity": rule | {"significant": True}}
    (verdict,) = gate(tmp_path, sure, rounded)
    assert "at least" in verdict.why or verdict.passed


def test_bounds(plain: Result, tmp_path: Path) -> None:
    value = plain.task("passage").value("f1").value
    ppl = plain.task("perplexity?tokens=600").value("perplexity").value
    for rule, passed in ((value, True), (value + 0.001, False), ({"min": value}, True), ({"max": value - 0.01}, False)):
        assert gate(tmp_path, {"passage.f1": rule}, plain)[0].passed == passed
    for rule, passed in ((ppl + 0.1, True), (ppl - 0.1, False), ({"min": ppl + 1}, False)):
        assert gate(tmp_path, {"perplexity?tokens=600.perplexity": rule}, plain)[0].passed == passed


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ("{", "is not JSON"), ([], "must be an object"), ({}, "must be an object"),
        ({"passage.accuracy": 1}, "they give: needle"), ({"pasage.em": 1}, "'pasage.em'"), ({"em": 1}, "'em'"),
        ({"passage.em": "high"}, "a number or an object"), ({"passage.em": {}}, "a number or an object"),
        ({"passage.em": True}, "a number or an object"), ({"passage.em": {"least": 1}}, "no 'least'"),
        ({"passage.em": {"min": "1"}}, "min must be a number"), ({"passage.em": {"max_drop": 0.1}}, "belong together"),
        ({"passage.em": {"baseline": "none.json", "max_drop": -1}}, "at least 0"),
        ({"passage.em": {"baseline": "none.json", "max_drop": 0.1}}, "cannot read"),
        ({"passage.em": {"baseline": "gate.json", "max_drop": 0.1}}, "not a result"),
        ({"passage.em": {"baseline": 3, "max_drop": 0.1}}, "name of a file"),
        ({"passage.em": {"min": 0.1, "significant": True}}, "significant belongs"),
        ({"passage.em": {"min": 0.1, "significant": 1}}, "true or false"), ('{"passage.em": NaN}', "a number or"),
    ],
)  # fmt: skip
def test_a_malformed_gate_is_one_sentence_before_anything_runs(
    rules: Any, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLM, "from_config", lambda config: pytest.fail("the model was loaded"))
    file = tmp_path / "gate.json"
    file.write_text(rules if isinstance(rules, str) else json.dumps(rules))
    assert command("--tasks", ",".join(TASKS), "--gate", str(file)) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert says in err


# -- the command -------------------------------------------------------------------------------------------------


def test_K14_G34_tables_json_page_and_gate_of_one_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    file, page, rules = tmp_path / "r.json", tmp_path / "r.html", tmp_path / "gate.json"
    rules.write_text(json.dumps({"lookup?pairs=10.accuracy": 0.2}))
    tasks = "needle?lengths=256&depths=0+1,lookup?pairs=10&positions=3,lookup?pairs=10"
    assert command("--tasks", tasks, "--json", str(file), "--html", str(page), "--gate", str(rules)) == 0
    shown = capsys.readouterr().out
    told = json.loads(file.read_text())
    assert told["settings"] == {"num_gpu_blocks_override": 128, "max_num_seqs": 16}
    assert [t["name"] for t in told["tasks"]] == tasks.split(",")
    assert "lookup?pairs=10: accuracy by position" in shown
    assert re.search(r"^\s*25%\s+█* *\d+\.\d%", shown, re.MULTILINE), "the curve is printed"
    assert "depth by length" in shown
    assert "Gate: all 1 rules hold." in shown
    html = page.read_text()
    read = Page(html)
    assert "http" not in html.replace("http://www.w3.org", "")
    assert read.tags.count("figure") == 2
    assert any("depth (down) by length (across)" in text for text in read.texts)
    # Once more, with rounded weights, against the first.
    rules.write_text(json.dumps({"lookup?pairs=10.accuracy": 1.01}))
    args = ["--tasks", "lookup?pairs=10", "--baseline", str(file), "--gate", str(rules), "--quantization", "int4-w4a8"]
    assert command(*args, "--html", str(page), "--lossy") == 1
    out, err = capsys.readouterr()
    assert "Against the baseline" in out
    assert re.search(r"\d+ of 5 answers are the same tokens; \d+\.\d\d times", out)
    assert re.fullmatch(r"penstock: gate: lookup\?pairs=10\.accuracy is [01]\.\d+, below its least, 1\.01", err.strip())
    assert "rules do not hold" in page.read_text()


def test_G34_the_curve_is_printed_for_any_model(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--ops", "ref", "--tasks", "lookup?pairs=5&positions=3", "--limit", "3"]
    assert main(["eval", "pico", *FLAGS, *args]) == 0
    shown = capsys.readouterr().out
    for position in ("0%", "50%", "100%"):
        assert re.search(rf"^ *{position} +█* *\d+\.\d%", shown, re.MULTILINE)


def test_json_alone_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--tasks", "copy", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["tasks"][0]["name"] == "copy"


def test_what_models_and_files_say_is_no_markup(tmp_path: Path, nano: LLM) -> None:
    from penstock.cli.eval_page import html_page

    file = tmp_path / "x.jsonl"
    row = {"input": "<script>alert(1)</script>", "outputs": ["<b>x</b>"], "length": 1}
    file.write_text(json.dumps(row) + "\n")
    (found,) = evaluate(nano, [f"ruler:{file}?tokens=4"]).tasks
    result = Result(penstock_eval=1, version="", model="<i>", seed=0, limit=1, chat=False, bos=False, settings={},
                    tasks=[found])  # fmt: skip
    html = html_page(result, [], [])
    assert "<script" not in html
    assert "&lt;b&gt;x&lt;/b&gt;" in html
    assert "<i>" not in html


def test_list_of_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--list-tasks"]) == 0
    shown = capsys.readouterr().out
    for word in ("needle", "longbench", "runs code", "gsm8k_test.jsonl"):
        assert word in shown


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--tasks", "neddle"], "did you mean needle"), (["--tasks", ","], "names none"), (["--limit", "0"], "--limit"),
        (["--data", "/nowhere"], "not a folder"), (["--tasks", "gsm8k"], "gsm8k:FILE"), (["--lossy"], "--baseline"),
        (["--baseline", "/nowhere"], "cannot read"), (["--gate", "/nowhere"], "cannot read"),
        (["--tasks", "mbpp:/nowhere"], "--allow-code-execution"), (["--block-size", "0"], "block-size"),
        (["--tasks", "copy", "--skip-tokenizer-init"], "tokenizer"),
        (["--tasks", "needle?lengths=4096"], "none of its"), (["--tasks", "perplexity?window=9999"], "window"),
        (["--tasks", "perplexity?window=64&stride=64"], "stride"), (["--tasks", "lookup?pairs=400"], "do not fit"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence_and_nothing_is_half_run(
    args: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLM, "generate", lambda *a, **k: pytest.fail("something ran"))
    assert command(*args) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("penstock: error: ")
    assert says in err


def test_an_unknown_option_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command("--task", "copy")
    assert "did you mean --tasks?" in capsys.readouterr().err


def test_what_does_not_fit_is_left_out_and_counted(nano: LLM, tmp_path: Path) -> None:
    rows = [{"text": "word " * n + "end"} for n in (5, 5000)]
    file = tmp_path / "l.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (task,) = evaluate(nano, [f"cloze:{file}"]).tasks
    assert (len(task.examples), task.left_out) == (1, 1)
    assert task.values[1].interval is None


def test_an_engine_that_fails_fails_the_evaluation(nano: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = nano.generate

    def broken(*args: Any, **how: Any) -> Any:
        outputs = ask(*args, **how)
        outputs[1].error = "a row was sick"
        return outputs

    monkeypatch.setattr(nano, "generate", broken)
    with pytest.raises(EngineError, match="task 'copy': a row was sick"):
        evaluate(nano, ["copy"], limit=2)


def test_K14_a_run_that_is_cut_warns_and_keeps_no_gate(
    nano: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, file, rules = tmp_path / "q.jsonl", tmp_path / "r.json", tmp_path / "gate.json"
    rows.write_text("".join(json.dumps({"question": f"{i} + 1?", "answer": f"#### {i + 1}"}) + "\n" for i in range(6)))
    spec = f"gsm8k:{rows}?tokens=16&shots=0"
    result = evaluate(nano, [spec])
    assert [w.why for w in result.warnings] == [f"{result.tasks[0].answers.cut:.0%} of 6 answers were cut at the limit "
                                                "of tokens"]  # type: ignore[union-attr]  # fmt: skip
    rules.write_text(json.dumps({"gsm8k:q.jsonl?tokens=16&shots=0.accuracy": 0}))
    assert command("--tasks", spec, "--gate", str(rules), "--json", str(file)) == 1
    out, err = capsys.readouterr()
    assert "no answer found" in out
    assert "penstock: warning: gsm8k:q.jsonl?tokens=16&shots=0: " in err
    assert "penstock: gate: " in err
    assert load(file).warnings
    assert command("--tasks", spec, "--other-form", str(file)) == 1
    assert "of the same form" in capsys.readouterr().err
