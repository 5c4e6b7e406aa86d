"""Lengths where requests are made: predicted before they go in, told by /metrics, and never a token's business."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from penstock import LLM, SamplingParams
from penstock.core.request import Request
from penstock.engine.record import Recorder
from penstock.server.observation.metrics import LENGTH_COUNTERS
from tests.api.conftest import bundled
from tests.api.watch import COMPLETIONS, scrape, small

PROMPTS = ["Once upon a time", "The dog said", "In the morning", "Tell me"]


def intake(core: Any) -> list[Request]:
    return [item for one in core.recorder.iterations for item in one.intake if isinstance(item, Request)]


def test_A14_a_server_predicts_learns_and_tells_how_good_it_is() -> None:
    """What is predicted is in the requests that the engine takes in, and so in the log of its run."""
    with small(length_predictor="history:least=2,quantile=1") as server:
        asked: list[Request] = []
        client = server.server.client
        submit = client.submit

        def watch(request: Request, *args: Any, **kwargs: Any) -> Any:
            asked.append(request)
            return submit(request, *args, **kwargs)

        client.submit = watch  # type: ignore[method-assign]
        for i in range(4):
            body = {"model": "nano", "prompt": PROMPTS[i], "max_tokens": 40 + i, "ignore_eos": True}
            assert httpx.post(server.url + COMPLETIONS, json=body, timeout=60).status_code == 200
        assert [r.expected_tokens for r in asked] == [0, 0, 41, 42]
        found = scrape(server.url)
        names = {f"penstock:length_prediction_{name}_total" for name, _, _ in LENGTH_COUNTERS}
        assert names <= found.keys()
        assert found["penstock:length_prediction_unknown_total"] == 2
        assert found["penstock:length_prediction_outputs_total"] == 2
        assert found["penstock:length_prediction_bucket_hits_total"] == 2
        assert found["penstock:length_prediction_error_tokens_total"] == 2


def test_A15_a_server_asks_its_model_first_and_the_answer_stays_the_same() -> None:
    answers, asked = {}, []
    for predictor in (None, "asked"):
        with small(length_predictor=predictor, ops="ref") as server:
            client, submit = server.server.client, server.server.client.submit

            def watch(request: Request, *args: Any, submit: Any = submit, **kwargs: Any) -> Any:
                asked.append(request)
                return submit(request, *args, **kwargs)

            client.submit = watch
            body = {"model": "nano", "prompt": PROMPTS[0], "max_tokens": 80, "temperature": 0, "ignore_eos": True}
            answer = httpx.post(server.url + COMPLETIONS, json=body, timeout=60).json()
            answers[predictor] = (answer["choices"][0]["text"], answer["usage"]["completion_tokens"])
            if predictor is not None:
                found = scrape(server.url)
                assert found["penstock:requests_total{ending=length,endpoint=length}"] == 1, (
                    "the question costs, and is told"
                )
                told = (
                    found["penstock:length_prediction_unknown_total"]
                    + found["penstock:length_prediction_outputs_total"]
                )
                assert told == 1, "the question is no request of anybody"
    assert answers[None] == answers["asked"]
    assert [r.request_id.endswith("-length") for r in asked] == [False, True, False]
    assert asked[1].prompt_token_ids[: len(asked[2].prompt_token_ids)] == asked[2].prompt_token_ids


def test_A15_offline_too_the_model_is_asked_first() -> None:
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (90, 60, 5, 70)]
    plain = LLM(bundled(), ops="ref", max_model_len=512)
    llm = LLM(bundled(), ops="ref", max_model_len=512, length_predictor="asked", scheduling_policy="length-aware")
    lengths = llm._lengths
    assert lengths is not None
    said = iter(["about 12 words", "none", "9"])
    lengths.predictor.tokenizer = Says(llm.get_tokenizer(), said)  # type: ignore[attr-defined]
    core = llm.engine.core
    core.recorder = Recorder()
    got = llm.generate(PROMPTS, params)
    taken = intake(core)
    assert [r.request_id.endswith("-length") for r in taken] == [True] * 3 + [False] * 4, (
        "too short an answer: not asked"
    )
    assert [r.expected_tokens for r in taken[3:]] == [17, 0, 0, 13]
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in plain.generate(PROMPTS, params)]
    assert lengths.accuracy.num == lengths.accuracy.num_unknown == 2
    streamed = list(llm.stream(PROMPTS[1], params[2]))[-1]
    assert streamed.outputs[0].token_ids == got[1].outputs[0].token_ids[:5]
    assert lengths.accuracy.num_unknown == 3


class Says:
    """Reads whatever the model says as what it is given."""

    def __init__(self, tokenizer: Any, said: Any) -> None:
        self.encode_inner, self._said = tokenizer.encode_inner, said

    def decode(self, ids: list[int]) -> str:
        return str(next(self._said))


@pytest.mark.parametrize("policy", ["s3", "multi-bin:bins=2,size=2", "length-aware:size=2,group=4"])
def test_A16_policies_by_length_serve_a_real_model_the_same_tokens(policy: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    found = []
    for settings in ({}, {"scheduling_policy": policy, "length_predictor": "oracle:noise=0.5"}):
        llm = LLM(bundled(), ops="ref", max_model_len=256, **settings)
        found.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)])
    assert found[0] == found[1]
