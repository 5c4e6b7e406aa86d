"""/v1/decisions and /v1/systemone over a socket: probabilities are those of the naive oracle, what questions share is
computed once, and limits, errors and clients that leave are those of every other path."""

from __future__ import annotations

import json
import logging
import math
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from penstock import LLM, DecisionOption, DecisionQuestion
from penstock.base.errors import InputError
from penstock.config import serve_from_kwargs
from penstock.core.sampling import SamplingParams
from penstock.families.registry import open_model
from penstock.launch.tokenizer import load_tokenizer
from penstock.server.live import LiveServer
from penstock.text.decisions import asked, label_tree, wording
from penstock.text.template import encode_chat
from penstock.weights.load import load_weights
from tests.api.conftest import bundled
from tests.api.test_disconnect import core_of, is_free, until
from tests.oracle import NaiveModel

KEYS = """
[two]
key = "k2"
max_concurrent = 2
[poor]
key = "kp"
tokens_per_minute = 400
[good]
key = "kg"
"""
TEXT = "The miller's son went down to the river, and there he saw a fox that had lost its way. " * 4
DECISIONS, SYSTEMONE = "/v1/decisions", "/v1/systemone"
YES: dict[str, Any] = {"type": "predicate", "instructions": "Is there a fox?"}
TEAM: dict[str, Any] = {
    "type": "choice", "name": "who", "instructions": "Who went?",
    "choices": [{"value": "the son", "description": "of the miller"}, {"value": "the fox"}, {"value": True}],
}  # fmt: skip
HOW: dict[str, Any] = {
    "type": "score", "name": "how", "instructions": "How sad is it?",
    "levels": [{"label": "not at all"}, {"label": "rather"}, {"label": "very", "description": "tears"}],
}  # fmt: skip
MANY: dict[str, Any] = {
    "type": "choice", "name": "many", "instructions": "Which?", "choices": [{"value": f"v{i}"} for i in range(29)],
}  # fmt: skip
ANY_MASS = {"min_label_mass": 0}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(KEYS)
    config = serve_from_kwargs(
        model=bundled(), port=0, ops="ref", kv_cache_dtype="float32", engine_in_process=True, max_model_len=512,
        num_gpu_blocks_override=512, block_size=16, max_num_seqs=8, api_keys_file=str(keys), max_queue_wait=5,
    )  # fmt: skip
    with LiveServer(config) as server:
        yield server


@pytest.fixture(scope="module")
def oracle() -> Any:
    """(messages, question as the library has it) -> the logarithm of each label's probability, recomputed whole."""
    checkpoint = open_model(bundled())  # type: ignore[arg-type]
    spec = checkpoint.spec
    tokenizer = load_tokenizer(checkpoint.tokenizer, spec)
    naive = NaiveModel(spec, dict(load_weights(checkpoint, spec, "bfloat16")))  # type: ignore[arg-type]

    def logprobs(ids: list[int]) -> Any:
        row = naive.logits(ids, last_only=True)[0].astype(np.float64)
        return row - (row.max() + np.log(np.exp(row - row.max()).sum()))

    def of(messages: list[dict[str, Any]], question: DecisionQuestion) -> list[float]:
        names = label_tree(tokenizer, question, spec.vocab_size).names
        ids = encode_chat(
            tokenizer, checkpoint.tokenizer.chat_template or "", asked(messages, wording(question, names))
        )
        found: dict[tuple[int, ...], Any] = {}
        out = []
        for name in names:
            bare, spaced = (tuple(tokenizer.encode(t, add_special_tokens=False)) for t in (name, " " + name))
            mass = 0.0
            for way in {bare, spaced} if len(spaced) == len(bare) else {bare}:
                log = 0.0
                for d, token in enumerate(way):
                    if way[:d] not in found:
                        found[way[:d]] = logprobs([*ids, *way[:d]])
                    log += found[way[:d]][token]
                mass += math.exp(log)
            out.append(math.log(mass))
        return out

    return of


def post(live: LiveServer, path: str, body: dict[str, Any], key: str = "kg") -> httpx.Response:
    return httpx.post(live.url + path, json=body, headers={"authorization": f"Bearer {key}"}, timeout=60)


def as_question(wire: dict[str, Any]) -> DecisionQuestion:
    listed = wire.get("choices") or wire.get("levels") or ()
    options = [DecisionOption(o.get("value", o.get("label")), o.get("description", "")) for o in listed]
    return DecisionQuestion(wire["type"], wire["instructions"], tuple(options))


def probabilities(answer: dict[str, Any]) -> list[float]:
    if answer["type"] == "predicate":
        return [answer["probability"], 1 - answer["probability"]]
    return [one["probability"] for one in answer["probabilities"]]


def test_probabilities_are_those_of_the_oracle(own: LiveServer, oracle: Any) -> None:
    """Of labels that are one token, and of pairs of letters, which are two: a tree of five runs."""
    questions = [YES, TEAM, HOW, MANY]
    text = TEXT[:88]
    answers = post(own, DECISIONS, {"input": text, "questions": questions, **ANY_MASS}).json()["answers"]
    assert [a["name"] for a in answers] == [None, "who", "how", "many"]
    for wire, answer in zip(questions, answers, strict=True):
        logs = oracle([{"role": "user", "content": text}], as_question(wire))
        want = np.exp(logs)
        assert answer["type"] == wire["type"]
        assert answer["label_mass"] == pytest.approx(want.sum(), rel=1e-5)
        assert probabilities(answer) == pytest.approx(list(want / want.sum()), rel=1e-5)
    who, how = answers[1], answers[2]
    shares = probabilities(who)
    assert [one["value"] for one in who["probabilities"]] == ["the son", "the fox", True]
    assert who["choice"] == ["the son", "the fox", True][int(np.argmax(shares))]
    assert who["confidence"] == pytest.approx((3 * max(shares) - 1) / 2)
    assert [(one["value"], one["label"]) for one in how["probabilities"]] == [
        (0, "not at all"),
        (1, "rather"),
        (2, "very"),
    ]
    assert how["score"] == pytest.approx(np.dot(probabilities(how), [0, 1, 2]))


def test_company_order_and_the_cache_change_no_bit(own: LiveServer) -> None:
    questions = [YES, TEAM, HOW]
    core_of(own).kv.reset_prefix_cache()
    together = post(own, DECISIONS, {"input": TEXT, "questions": questions, **ANY_MASS}).json()["answers"]
    again = post(own, DECISIONS, {"input": TEXT, "questions": questions[::-1], **ANY_MASS}).json()["answers"]
    assert again[::-1] == together
    for wire, answer in zip(questions, together, strict=True):
        core_of(own).kv.reset_prefix_cache()
        assert post(own, DECISIONS, {"input": TEXT, "questions": [wire], **ANY_MASS}).json()["answers"] == [answer]


def test_systemone_is_the_same_under_other_names(own: LiveServer) -> None:
    state = {"text": TEXT, "pages": [1, 2]}
    wire = {"input": json.dumps(state, separators=(",", ":")), "questions": [YES, TEAM, HOW], **ANY_MASS}
    wire["questions"][1] = {**TEAM, "choices": TEAM["choices"][:2]}
    want = post(own, DECISIONS, wire).json()
    found = post(own, SYSTEMONE, {
        "state": state, **ANY_MASS,
        "questions": {
            "fox": {"type": "noul", "instructions": "Is there a fox?"},
            "who": {"type": "choice", "instructions": "Who went?",
                    "criteria": {"the son": "of the miller", "the fox": None}},
            "how": {"type": "score", "instructions": "How sad is it?",
                    "criteria": ["not at all", "rather", "very: tears"]},
        },
    }).json()  # fmt: skip
    fox, who, how = want["answers"]
    assert list(found["answers"]) == ["fox", "who", "how"]
    assert found["answers"]["fox"] == {"type": "noul", "noul": fox["probability"], "label_mass": fox["label_mass"]}
    assert found["answers"]["who"] == {
        "type": "choice", "choice": who["choice"], "confidence": who["confidence"], "label_mass": who["label_mass"],
        "probabilities": {one["value"]: one["probability"] for one in who["probabilities"]},
    }  # fmt: skip
    assert found["answers"]["how"] == {
        "type": "score", "score": how["score"], "confidence": how["confidence"], "label_mass": how["label_mass"],
        "legend": {"0": "not at all", "1": "rather", "2": "very: tears"},
        "probabilities": {str(n): p for n, p in enumerate(probabilities(how))},
    }  # fmt: skip
    assert found["usage"]["input_tokens"] == want["usage"]["input_tokens"]


def test_the_official_client(live: LiveServer) -> None:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        told: Any = [{"role": "user", "content": [{"type": "input_text", "text": "A fox."}]}]
        listed: list[Any] = [YES, TEAM, HOW]
        found = client.decisions.create(
            model="nano", input=told, questions=listed, safety_identifier="u1", prompt_cache_key="k",
            extra_body=ANY_MASS,
        )  # fmt: skip
        refused = client.decisions.create(
            model="nano", input="A fox.", questions=[YES], extra_body={"min_label_mass": 1}
        )  # type: ignore[list-item]
    assert [(a.type, a.name) for a in found.answers] == [("predicate", None), ("choice", "who"), ("score", "how")]
    assert found.usage.output_tokens == 0
    assert found.usage.total_tokens == found.usage.input_tokens > 20
    assert (refused.answers[0].type, refused.answers[0].name) == ("refusal", None)


def test_the_same_offline(own: LiveServer) -> None:
    llm = LLM(bundled(), ops="ref", kv_cache_dtype="float32", max_model_len=512, num_gpu_blocks_override=64)
    wire = [YES, TEAM, HOW, MANY]
    want = post(own, DECISIONS, {"input": TEXT, "questions": wire, **ANY_MASS}).json()["answers"]
    found = llm.decide(TEXT, [as_question(one) for one in wire], min_label_mass=0)
    for answer, own_answer in zip(want, found, strict=True):
        assert probabilities(answer) == pytest.approx(list(own_answer.probabilities), abs=1e-12)
        assert (answer["label_mass"], own_answer.refused) == (own_answer.label_mass, False)
    assert llm.engine.core.stats.num_prefix_hit_tokens > 0
    with pytest.raises(InputError, match="choices has 0 entries"):
        llm.decide(TEXT, [DecisionQuestion("choice", "x")])
    (output,) = llm.generate("Once", SamplingParams(temperature=0, max_tokens=2, logprob_token_ids=[7, 3]))
    assert output.outputs[0].logprobs is not None
    for token, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
        assert list(entry) == [7, 3, token]
        assert (entry[7].rank, entry[token].rank) == (None, 1)


def test_what_questions_share_is_computed_and_counted_once(own: LiveServer) -> None:
    core, server = core_of(own), own.server
    assert server is not None
    questions = [{**YES, "instructions": f"Are there {i} foxes?"} for i in range(40)]
    core.kv.reset_prefix_cache()
    before, admitted = core.stats.num_scheduled_tokens, server.parts["admission"].num_admitted
    usage = post(own, DECISIONS, {"input": TEXT, "questions": questions}).json()["usage"]
    computed = core.stats.num_scheduled_tokens - before
    one = post(own, DECISIONS, {"input": TEXT, "questions": questions[:1]}).json()["usage"]
    assert server.parts["admission"].num_admitted == admitted + 41
    assert usage["input_tokens"] < one["input_tokens"] + 40 * 45 < 40 * one["input_tokens"] / 2
    assert computed == usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"]
    assert one["input_tokens_details"]["cached_tokens"] >= one["input_tokens"] - 16
    again = post(own, DECISIONS, {"input": TEXT, "questions": questions}).json()["usage"]
    assert again["input_tokens"] == usage["input_tokens"] > again["input_tokens_details"]["cached_tokens"] > 0


def test_tenants_pay_for_what_is_new(own: LiveServer) -> None:
    """20 prompts of 130 tokens are more than 400, and than two at once; the text once, and the questions, are not."""
    questions = [{**YES, "instructions": f"{i}?"} for i in range(4)]
    answer = post(own, DECISIONS, {"input": TEXT, "questions": questions}, key="kp")
    assert answer.status_code == 200
    assert answer.json()["usage"]["input_tokens"] < 400 - 100
    over = post(own, DECISIONS, {"input": TEXT, "questions": questions}, key="kp")
    assert (over.status_code, over.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert post(own, DECISIONS, {"input": TEXT, "questions": questions * 5}, key="k2").status_code == 200
    assert httpx.post(own.url + DECISIONS, json={"input": "a", "questions": [YES]}).status_code == 401


def test_a_call_of_many_tokens_is_not_taken_for_a_long_wait(own: LiveServer) -> None:
    """Admission predicts from what is to be computed: 40 prompts of 130 tokens, nearly all of them shared."""
    server = own.server
    assert server is not None
    pace = server.parts["admission"].pace
    known, pace._prefill_per_s = pace._prefill_per_s, 100.0
    try:
        core_of(own).kv.reset_prefix_cache()
        questions = [{**YES, "instructions": f"Are there {i}?"} for i in range(40)]
        assert post(own, DECISIONS, {"input": TEXT, "questions": questions}).status_code == 200
    finally:
        pace._prefill_per_s = known


def test_work_stops_when_the_client_leaves_and_at_the_time_limit(own: LiveServer) -> None:
    core, server = core_of(own), own.server
    assert server is not None
    questions = [{**YES, "instructions": f"{'Well, ' * 40} {i}?"} for i in range(200)]
    body = {"input": TEXT, "questions": questions, **ANY_MASS}
    text, gate = json.dumps(body).encode(), server.parts["admission"]
    before = gate.num_admitted
    host, port = own.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        head = b"POST /v1/decisions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer kg\r\nContent-Length: %d\r\n\r\n"
        sock.sendall(head % len(text) + text)
        until(lambda: gate.num_admitted - before >= 8)  # as many at once there need not be, on a busy machine
    until(lambda: is_free(core) and server.client.num_live == 0)
    assert gate.num_admitted - before < 100, "the questions behind were asked all the same"
    late = post(own, DECISIONS, body | {"timeout": 0.02})
    assert (late.status_code, late.json()["error"]["code"]) == (408, "timeout")
    until(lambda: is_free(core) and server.client.num_live == 0)
    assert gate.num_waiting == 0


def test_each_run_is_in_the_log_without_its_text(own: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock")
    post(own, SYSTEMONE, {"state": "xyzzy-7f3a", "questions": {"a": {"type": "noul", "instructions": "xyzzy-7f3b?"}}})
    lines = [json.loads(r.getMessage()) for r in caplog.records if r.name == "penstock.request"]
    assert [(line["endpoint"], line["tenant"], line["status"]) for line in lines] == [("systemone", "good", 200)]
    assert "xyzzy" not in caplog.text
    metrics = httpx.get(own.url + "/metrics", headers={"authorization": "Bearer kg"}).text
    assert 'endpoint="systemone"' in metrics


def test_conversations_and_calls_of_tools(own: LiveServer, oracle: Any) -> None:
    said = [
        {"role": "system", "content": "Be short."}, {"role": "user", "content": "A fox."},
        {"role": "assistant", "content": "Yes."},
    ]  # fmt: skip
    items = [said[0], {"type": "message", **said[1]}, {**said[2], "content": [{"type": "output_text", "text": "Yes."}]}]
    answer = post(own, DECISIONS, {"input": items, "questions": [YES], **ANY_MASS}).json()["answers"][0]
    want = np.exp(oracle(said, as_question(YES)))
    assert answer["probability"] == pytest.approx(want[0] / want.sum(), rel=1e-5)
    data = [{"role": "user", "content": [{"type": "input_json", "data": {"a": [1, None]}}]}]
    answer = post(own, DECISIONS, {"input": data, "questions": [YES], **ANY_MASS}).json()["answers"][0]
    want = np.exp(oracle([{"role": "user", "content": '{"a":[1,null]}'}], as_question(YES)))
    assert answer["probability"] == pytest.approx(want[0] / want.sum(), rel=1e-5)
    called = [
        said[1], {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "There is a fox."},
    ]  # fmt: skip
    seen = post(own, DECISIONS, {"input": called, "questions": [YES], **ANY_MASS}).json()["answers"][0]
    called[2] |= {"output": "Nothing."}
    other = post(own, DECISIONS, {"input": called, "questions": [YES], **ANY_MASS}).json()["answers"][0]
    assert seen["type"] == "predicate"
    assert seen["probability"] != other["probability"], "what came of the call is read"
    parts = {**YES, "instructions": [{"type": "input_text", "text": "Is there a fox?"}]}
    again = post(own, DECISIONS, {"input": data, "questions": [parts], **ANY_MASS}).json()["answers"][0]
    assert again == answer


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"questions": [YES]}, "input", "missing"),
        ({"input": "a"}, "questions", "missing"),
        ({"input": "", "questions": [YES]}, "input", "empty"),
        ({"input": [], "questions": [YES]}, "input", "0 items"),
        ({"input": "a", "questions": []}, "questions", "1 to 400"),
        ({"input": "a", "questions": [YES] * 401}, "questions", "401"),
        ({"input": "a", "questions": [{**YES, "type": "guess"}]}, "questions[0].type", "predicate, choice, score"),
        ({"input": "a", "questions": [{"type": "predicate"}]}, "questions[0].instructions", "missing"),
        ({"input": "a", "questions": [{**YES, "instructions": " "}]}, "questions[0].instructions", "empty"),
        ({"input": "a", "questions": [{**YES, "choices": TEAM["choices"]}]}, "questions[0].choices", "belong to"),
        ({"input": "a", "questions": [YES, {**TEAM, "choices": [{"value": "a"}]}]}, "questions[1].choices", "2 to 255"),
        ({"input": "a", "questions": [{**TEAM, "choices": [{"value": "a"}] * 2}]}, "questions[0].choices[1]", "there"),
        ({"input": "a", "questions": [{**TEAM, "choices": [{"value": str(i)} for i in range(256)]}]},
         "questions[0].choices", "256"),
        ({"input": "a", "questions": [{**HOW, "levels": [{"label": "a"}]}]}, "questions[0].levels", "2 to 255"),
        ({"input": "a", "questions": [{**YES, "instructions": [{"type": "input_image", "image_url": "x"}]}]},
         "questions[0].instructions[0]", "no images"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}], "questions": [YES]},
         "input[0].content[0].type", "no images"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}], "questions": [YES]},
         "input[0].call_id", "no call"),
        ({"input": "a " * 600, "questions": [YES]}, "input", "tokens"),
        ({"input": "a", "questions": [YES], "temperature": 0}, "temperature", "above 0"),
        ({"input": "a", "questions": [YES], "min_label_mass": 2}, "min_label_mass", "from 0 to 1"),
        ({"input": "a", "questions": [YES], "stream": True}, "stream", "together"),
        ({"input": "a", "questions": [YES], "cache_salt": "x" * 300}, "cache_salt", "256"),
        ({"input": "a", "questions": [YES], "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs", "takes no"),
    ],
)  # fmt: skip
def test_bad_input_is_named(http: httpx.Client, body: dict[str, Any], param: str, words: str) -> None:
    answer = http.post(DECISIONS, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert words in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"questions": {"a": {"type": "noul", "instructions": "x"}}}, "state", "missing"),
        ({"state": 5, "questions": {"a": {"type": "noul", "instructions": "x"}}}, "state", "must be a text"),
        ({"state": {}, "questions": {"a": {"type": "noul", "instructions": "x"}}}, "state", "not empty"),
        ({"state": "a " * 600, "questions": {"a": {"type": "noul", "instructions": "x"}}}, "state", "tokens"),
        ({"state": "a", "questions": {}}, "questions", "1 to 400"),
        ({"state": "a", "questions": {"a": {"type": "yes", "instructions": "x"}}}, "questions.a.type", "noul, choice"),
        ({"state": "a", "questions": {"a": {"type": "noul", "instructions": 3}}}, "questions.a.instructions", "a text"),
        ({"state": "a", "questions": {"a": {"type": "noul", "instructions": {}}}}, "questions.a.instructions", "empty"),
        ({"state": "a", "questions": {"a": {"type": "noul", "instructions": "x", "criteria": {"true": "y"}}}},
         "questions.a.criteria", "true"),
        ({"state": "a", "questions": {"a": {"type": "choice", "instructions": "x"}}}, "questions.a.criteria", "object"),
        ({"state": "a", "questions": {"a": {"type": "choice", "instructions": "x", "criteria": {"b": "c"}}}},
         "questions.a.criteria", "2 to 255"),
        ({"state": "a", "questions": {"a": {"type": "score", "instructions": "x", "criteria": ["b"] * 11}}},
         "questions.a.criteria", "2 to 10"),
        ({"state": "a", "questions": {"a": {"type": "score", "instructions": "x", "criteria": {"b": 1, "c": 2}}}},
         "questions.a.criteria", "list of its levels"),
    ],
)  # fmt: skip
def test_bad_states_are_named(http: httpx.Client, body: dict[str, Any], param: str, words: str) -> None:
    answer = http.post(SYSTEMONE, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert words in error["message"]


def test_an_unknown_model_is_404(http: httpx.Client) -> None:
    for path, body in ((DECISIONS, {"input": "a", "questions": [YES]}), (SYSTEMONE, {"state": "a", "questions": {}})):
        answer = http.post(path, json=body | {"model": "gpt-9"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
