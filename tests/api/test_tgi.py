"""/generate, /generate_stream, / and /info: TGI's paths, with Hugging Face's own client and by hand."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from huggingface_hub import InferenceClient, constants
from huggingface_hub.errors import ValidationError

from penstock.server.live import LiveServer
from tests.api.fronts import FRONTS, ONCE, events

GENERATE = FRONTS["/generate"]


def completed(http: httpx.Client, **fields: Any) -> Any:
    body = {"prompt": ONCE, "max_tokens": 12, "temperature": 0, **fields}
    return http.post("/v1/completions", json=body).json()["choices"][0]


def generated(http: httpx.Client, path: str = "/generate", **parameters: Any) -> Any:
    answer = http.post(path, json={"inputs": ONCE, "parameters": {"max_new_tokens": 12, **parameters}})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_L05_hugging_faces_client_generates_and_streams(
    live: LiveServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client knows the server's address alone: it sends to /."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # the suite forbids the hub; this stays on the machine
    want = completed(http)["text"]
    client = InferenceClient(model=live.url, timeout=60)
    assert client.text_generation(ONCE, max_new_tokens=12) == want
    assert "".join(client.text_generation(ONCE, max_new_tokens=12, stream=True)) == want
    assert client.text_generation(ONCE, max_new_tokens=12, return_full_text=True) == ONCE + want
    whole = client.text_generation(ONCE, max_new_tokens=12, details=True, decoder_input_details=True, top_n_tokens=2)
    assert whole.generated_text == want
    assert (whole.details.finish_reason, whole.details.generated_tokens) == ("length", 12)
    assert "".join(token.text for token in whole.details.tokens) == want
    assert all(token.logprob <= 0 for token in whole.details.tokens)
    assert [tops[0]["id"] for tops in whole.details.top_tokens] == [token.id for token in whole.details.tokens]
    assert whole.details.prefill[0].logprob is None
    parts = list(client.text_generation(ONCE, max_new_tokens=12, details=True, stream=True))
    assert [part.index for part in parts] == list(range(1, 13)), "a token an event"
    assert [part.token.id for part in parts] == [token.id for token in whole.details.tokens]
    assert [part.generated_text for part in parts] == [None] * 11 + [want]
    assert parts[-1].details.input_length == len(whole.details.prefill)
    with pytest.raises(ValidationError, match=r"parameters\.top_p"):
        client.text_generation(ONCE, top_p=7.0)


def test_L05_tokens_are_drawn_only_where_something_says_so(http: httpx.Client) -> None:
    greedy = generated(http)["generated_text"]
    assert greedy == completed(http)["text"]
    assert generated(http, seed=3, temperature=1.0, details=True)["details"]["seed"] is None
    one = generated(http, do_sample=True, seed=3, details=True)
    assert one["generated_text"] == completed(http, temperature=1, seed=3, top_p=1)["text"]
    assert one["details"]["seed"] == 3
    warm = generated(http, temperature=0.7, top_k=20, seed=5)["generated_text"]
    assert warm == completed(http, temperature=0.7, top_k=20, seed=5, top_p=1)["text"]


def test_L05_stops_forms_and_cut_prompts(http: httpx.Client) -> None:
    text = generated(http)["generated_text"]
    word = text.split()[2]
    stopped = generated(http, stop=[word], details=True)
    assert stopped["generated_text"] == text[: text.index(word) + len(word)], "the word is part of the answer, as TGI's"
    assert stopped["details"]["finish_reason"] == "stop_sequence"
    bound = generated(http, grammar={"type": "regex", "value": "[0-9]{3}"}, details=True)
    assert bound["generated_text"].isdigit()
    assert bound["details"]["finish_reason"] == "eos_token"
    assert bound["details"]["tokens"][-1]["special"], "the end has no text of its own"
    cut = generated(http, truncate=2, details=True, decoder_input_details=True)
    assert len(cut["details"]["prefill"]) == 2
    assert "details" not in generated(http)
    assert isinstance(generated(http, path="/"), list)


def test_L05_the_end_of_a_stream_that_a_grammar_ends(http: httpx.Client) -> None:
    body = {"inputs": ONCE, "parameters": {"grammar": {"type": "regex", "value": "[0-9]{3}"}, "max_new_tokens": 9}}
    found = events(http.post("/generate_stream", json=body).text)
    text = "".join(event["token"]["text"] for event in found if not event["token"]["special"])
    assert (text, found[-1]["details"]["finish_reason"]) == (found[-1]["generated_text"], "eos_token")


def test_L05_what_does_not_fit_is_refused_in_tgis_shape(http: httpx.Client) -> None:
    for parameters, said in (
        ({"temperature": 0}, "parameters.temperature must be above 0"),
        ({"best_of": 2}, "parameters.best_of is not supported"),
        ({"watermark": True}, "parameters.watermark"),
        ({"typical_p": 0.5}, "parameters.typical_p"),
        ({"max_new_tokens": 0}, "parameters.max_new_tokens"),
        ({"grammar": {"type": "poem", "value": ""}}, "grammar"),
        ({"adapter_id": "nobody"}, "not served here"),
        ({"truncate": -3}, "parameters.truncate"),
    ):
        for path in ("/generate", "/generate_stream", "/"):
            answer = http.post(path, json={"inputs": ONCE, "parameters": parameters})
            assert answer.status_code in (400, 404), (parameters, answer.text)
            assert answer.json()["error_type"] == "validation"
            assert said in answer.json()["error"]
    for body, said in (({"text": ONCE}, "SGLang"), ({"prompt": ONCE}, "inputs"), ({}, "inputs")):
        answer = http.post("/generate", json=body)
        assert said in answer.json()["error"], answer.text
    stream = http.post("/generate_stream", json={"inputs": ONCE, "parameters": {"decoder_input_details": True}})
    assert "does not come in a stream" in stream.json()["error"]


def test_info_tells_the_limits(http: httpx.Client) -> None:
    told = http.get("/info").json()
    assert (told["model_id"], told["max_total_tokens"], told["max_input_tokens"]) == ("nano", 512, 511)
