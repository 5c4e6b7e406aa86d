"""Predictors of output lengths: what they say, what they learn, and what they refuse."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import ConfigError
from penstock.cli.main import main
from penstock.core.output import CompletionOutput, RequestMetrics, RequestOutput
from penstock.core.request import Request
from penstock.core.sampling import TokenRules
from penstock.launch.bundled import bundled_model
from penstock.launch.names import check_names
from penstock.lengths import make_predictor
from penstock.lengths.asked import AskedPredictor
from penstock.lengths.front import ExpectedLengths
from penstock.lengths.history import MAX_CLASSES, HistoryPredictor
from penstock.lengths.learned import LearnedPredictor
from penstock.lengths.score import Accuracy, rank_correlation
from penstock.lengths.taught import EndedRequest, taught


def ask(prompt: list[int] | int = 20, max_tokens: int = 256, **kw: Any) -> Request:
    ids = [5] * prompt if isinstance(prompt, int) else prompt
    return Request(
        request_id=kw.pop("name", "r"), prompt_token_ids=ids, rules=TokenRules(), max_tokens=max_tokens, **kw
    )


class Words:
    """A tokenizer whose ids are characters."""

    def encode_inner(self, text: str) -> list[int]:
        return list(map(ord, text))

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def test_history_knows_tenants_and_prompt_lengths_and_falls_back_on_everybody() -> None:
    history = HistoryPredictor(quantile=0.5, least=4)
    for _ in range(4):
        history.learn(ask(20, tenant="a"), 10)
        history.learn(ask(200, tenant="a"), 100)
        history.learn(ask(20, tenant="b"), 50)
    assert history.predict(ask(20, tenant="a"), ()) == 10
    assert history.predict(ask(199, tenant="a"), ()) == 100
    assert history.predict(ask(20, tenant="b"), ()) == 50
    assert history.predict(ask(900, tenant="b"), ()) == 50, "of this tenant with any prompt"
    assert history.predict(ask(20, tenant="c"), ()) == 50, "of anybody: the median of 10, 50 and 100"
    assert history.predict(ask(20, max_tokens=7, tenant="a"), ()) == 7
    assert HistoryPredictor().predict(ask(), ()) == 0
    assert HistoryPredictor(quantile=1.0).predict(ask(), ()) == 0
    for i in range(MAX_CLASSES):
        history.learn(ask(tenant=f"t{i}"), 3)
    assert len(history._seen) <= MAX_CLASSES


def topical(seed: int, n: int) -> list[EndedRequest]:
    """Prompts of four topics; one word in three is the topic's, whose answers are of about one length."""
    rng, found = random.Random(seed), []
    for _ in range(n):
        topic = rng.randrange(4)
        prompt = [
            100 * topic + rng.randrange(8) if rng.random() < 0.3 else rng.randrange(1000, 9000) for _ in range(40)
        ]
        found.append(EndedRequest(prompt, 512, max(1, round((10, 40, 110, 300)[topic] * rng.uniform(0.85, 1.15)))))
    return found


def test_learned_tells_topics_apart_where_history_cannot(tmp_path: Path) -> None:
    known, asked = topical(1, 400), topical(2, 100)
    learned = LearnedPredictor()
    scores = {p.name: taught(p, known, asked) for p in (learned, HistoryPredictor())}
    print({n: (s.num_hits / s.num, s.error_tokens / s.num, s.correlation) for n, s in scores.items()})
    good, plain = scores["learned"], scores["history"]
    assert good.num == plain.num == 100
    assert good.num_hits >= 60
    assert good.error_tokens < 0.5 * plain.error_tokens
    assert good.correlation is not None
    assert good.correlation > 0.8
    learned.save(tmp_path / "table")
    again = make_predictor(f"learned:file={tmp_path / 'table'}")
    assert [again.predict(e.request(0), ()) for e in asked] == [learned.predict(e.request(0), ()) for e in asked]


def test_a_table_that_is_none_is_refused_in_a_sentence(tmp_path: Path) -> None:
    from penstock.formats.safetensors_out import write_safetensors

    good, bad = tmp_path / "good", tmp_path / "bad"
    LearnedPredictor().save(good)
    for break_it in (
        lambda: bad.write_bytes(good.read_bytes()[:-10]),
        lambda: bad.write_text("lengths"),
        lambda: write_safetensors(bad, {"weights": np.zeros((2, 2), np.float32)}),
        lambda: bad.unlink(),
    ):
        break_it()
        with pytest.raises(ConfigError, match="length_predictor: learned: ") as error:
            make_predictor(f"learned:file={bad}")
        assert error.value.field == "length_predictor"
    nan = bytearray(good.read_bytes())
    nan[-4:] = np.float32(np.nan).tobytes()
    bad.write_bytes(nan)
    with pytest.raises(ConfigError, match="damaged"):
        make_predictor(f"learned:file={bad}")


def test_asked_reads_the_first_number_and_learns_what_a_word_comes_to() -> None:
    asked = AskedPredictor()
    asked.tokenizer = Words()  # type: ignore[assignment]
    one = ask(name="a")
    question = asked.question(one)
    assert question is not None
    assert (question.request_id, question.max_tokens, question.rules.temperature) == ("a-length", 6, 0.0)
    said = Words().encode_inner
    assert asked.predict(one, said(" about 100 words, or 200")) == 140
    assert asked.predict(one, said("1,000")) == 256
    assert asked.predict(one, said("a few")) == asked.predict(one, said("0")) == asked.predict(one, ()) == 0
    for i in range(3):
        asked.predict(ask(name=f"b{i}"), said("10"))
        asked.learn(ask(name=f"b{i}"), 30)
    assert asked.predict(one, said("10")) == 30
    assert asked.question(ask(max_tokens=10)) is None, "the question is longer than the answer"
    assert AskedPredictor().question(one) is None, "no tokenizer"


def test_accuracy_counts_hits_what_was_longer_and_correlates_by_rank() -> None:
    score = Accuracy()
    for predicted, actual in [(20, 24), (20, 25), (100, 30), (0, 9), (64, 60)]:
        score.add(predicted, actual)
    assert (score.num, score.num_unknown, score.num_hits, score.num_outgrown, score.error_tokens) == (4, 1, 2, 1, 83)
    assert score.correlation == pytest.approx(0.738, abs=0.001)
    assert rank_correlation([1, 2, 3, 4], [10, 100, 1000, 10_000]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3], [9, 4, 1]) == pytest.approx(-1.0)
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None
    assert rank_correlation([1, 2], [1, 2]) is None


def ended(request: Request, lengths: list[int], reason: str = "stop") -> RequestOutput:
    outputs = [CompletionOutput(i, "", [7] * n, finish_reason=reason) for i, n in enumerate(lengths)]
    return RequestOutput(request.request_id, None, [], None, outputs, True, RequestMetrics(0.0))


def test_a_front_end_learns_only_from_what_ended_by_itself() -> None:
    lengths = ExpectedLengths(HistoryPredictor(least=1))
    one = lengths.expect(ask())
    assert one.expected_tokens == 0
    for reason in ("abort", "error", "timeout", "repetition"):
        lengths.ended(one, ended(one, [3], reason))
    assert lengths.expect(ask()).expected_tokens == 0, "it learned from what was cut off"
    lengths.ended(one, ended(one, [30, 30]))
    assert lengths.accuracy.num_unknown == 2
    assert lengths.expect(ask()).expected_tokens == 30
    assert lengths.expect(ask(max_tokens=1)).expected_tokens == 0, "there is nothing to predict"
    assert lengths.expect(ask(pooling="last")).expected_tokens == 0


def test_the_answer_to_a_question_is_no_length_of_anything() -> None:
    asked = AskedPredictor()
    asked.tokenizer = Words()  # type: ignore[assignment]
    lengths = ExpectedLengths(asked)
    question = lengths.question(ask())
    assert question is not None
    lengths.ended(question, ended(question, [6], "length"))
    assert lengths.accuracy.num == lengths.accuracy.num_unknown == 0


@pytest.mark.parametrize(
    ("name", "needle"),
    [
        ("crystal", "asked, history, learned, oracle"), ("history:sharpness=1", "least, quantile, window"),
        ("history:quantile=2", "quantile"), ("learned:least=0", "least"), ("asked:tokens=no", "not int"),
        ("oracle:noise=-1", "negative"), ("learned:file=/nowhere/t", "nowhere"),
    ],
)  # fmt: skip
def test_wrong_names_and_knobs_are_refused_before_anything_is_opened(name: str, needle: str) -> None:
    from penstock.config import from_kwargs

    with pytest.raises(ConfigError, match=needle):
        check_names(from_kwargs(model="/nowhere", length_predictor=name))


def test_the_command_teaches_a_table_and_tells_how_good_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "table"
    lines = [{"prompt": [i % 500 for i in e.prompt], "output_tokens": e.num_generated} for e in topical(3, 200)]
    data.write_text("\n".join([*map(json.dumps, lines), json.dumps({"prompt": "Once upon", "output_tokens": 20})]))
    model = str(bundled_model("nano"))
    assert main(["lengths", model, "--data", str(data), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "learned" in shown
    assert "history" in shown
    assert make_predictor(f"learned:file={out}").predict(ask(lines[0]["prompt"], 4096), ()) > 0  # type: ignore[arg-type]
    for line, needle in [
        ("{", "line 1 is not JSON"), ('{"output_tokens": 3}', "needs a prompt"), ("", "no lines"),
        ('{"prompt": [1], "output_tokens": 0}', "output_tokens"), ('{"prompt": [-1], "output_tokens": 1}', "prompt"),
    ]:  # fmt: skip
        data.write_text(line)
        assert main(["lengths", model, "--data", str(data)]) == 1
        assert needle in capsys.readouterr().err
