"""/completion and /infill: what programs made for llama-server send and read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config import serve_from_kwargs
from penstock.server.live import LiveServer
from tests.api.fronts import FRONTS, ONCE, events
from tests.api.test_front_ends import MARKS, filling

COMPLETION = FRONTS["/completion"]
CODER = Path.home() / ".cache" / "penstock" / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"


def ask(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = http.post("/completion", json={**COMPLETION.good, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_an_answer_has_its_fields(http: httpx.Client) -> None:
    found = ask(http)
    assert set(found) == {
        "index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted", "tokens_evaluated",
        "generation_settings", "prompt", "has_new_line", "truncated", "stop_type", "stopping_word", "tokens_cached",
        "timings",
    }  # fmt: skip
    assert (found["stop"], found["stop_type"], found["tokens_predicted"], found["prompt"]) == (True, "limit", 6, ONCE)
    assert found["timings"]["predicted_n"] == 6
    assert found["timings"]["prompt_n"] + found["timings"]["cache_n"] == found["tokens_evaluated"]
    assert found["timings"]["predicted_ms"] > 0
    assert found["generation_settings"]["temperature"] == 0


def test_why_it_stopped(http: httpx.Client) -> None:
    text = ask(http, n_predict=40)["content"]
    word = text.split()[3]
    stopped = ask(http, n_predict=40, stop=[word])
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", word)
    assert stopped["content"] == text[: text.index(word)]
    assert ask(http, n_predict=40, grammar='root ::= "yes"')["stop_type"] == "eos"


def test_grammars_and_schemas_bind(http: httpx.Client) -> None:
    assert ask(http, grammar='root ::= "yes" | "no"', n_predict=20)["content"] in ("yes", "no")
    assert ask(http, json_schema={"enum": [17]}, n_predict=20)["content"] == "17"
    for name in ("regex", "ebnf"):
        refused = http.post("/completion", json={**COMPLETION.good, name: "a"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    refused = http.post("/completion", json={**COMPLETION.good, "grammar": "root ::= ("})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "grammar"


def test_prompts_of_texts_and_ids(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": ONCE}).json()["tokens"]
    plain = ask(http)
    assert ask(http, prompt=ids)["content"] == plain["content"]
    inner = http.post("/tokenize", json={"prompt": " there was", "add_special_tokens": False}).json()["tokens"]
    mixed = ask(http, prompt=[*ids, " there was"])
    assert mixed["content"] == ask(http, prompt=[*ids, *inner])["content"]
    assert http.post("/completion", json={**COMPLETION.good, "prompt": ["a", "b"]}).status_code == 400


def test_probabilities(http: httpx.Client) -> None:
    whole = ask(http, n_probs=3, return_tokens=True)
    listed = whole["completion_probabilities"]
    assert [one["id"] for one in listed] == whole["tokens"]
    assert [len(one["top_logprobs"]) for one in listed] == [3] * 6
    for one in listed:  # greedy: the chosen token is the likeliest
        assert {key: one[key] for key in ("id", "token", "bytes", "logprob")} == one["top_logprobs"][0]
    assert b"".join(bytes(one["bytes"]) for one in listed).decode() == whole["content"]
    parts = events(http.post("/completion", json={**COMPLETION.good, "n_probs": 3, "stream": True}).text)
    assert [one for part in parts for one in part.get("completion_probabilities", [])] == listed


def test_without_the_cache_nothing_is_reused(http: httpx.Client) -> None:
    prompt = ONCE + " there was a cat who sat by the fire and slept all day long." * 3
    ask(http, prompt=prompt)
    assert ask(http, prompt=prompt)["tokens_cached"] > 0
    assert ask(http, prompt=prompt, cache_prompt=False)["tokens_cached"] == 0


def test_fields_that_are_chosen(http: httpx.Client) -> None:
    found = ask(http, response_fields=["content", "timings/prompt_n", "generation_settings/n_predict", "no/such"])
    assert set(found) == {"content", "timings/prompt_n", "generation_settings/n_predict"}


def test_biases(http: httpx.Client) -> None:
    first = ask(http, n_predict=1, return_tokens=True)["tokens"][0]
    assert ask(http, n_predict=1, return_tokens=True, logit_bias=[[first, False]])["tokens"] != [first]
    other = (first + 1) % 4096
    assert ask(http, n_predict=1, return_tokens=True, logit_bias={str(other): 100.0})["tokens"] == [other]
    assert http.post("/completion", json={**COMPLETION.good, "logit_bias": [["a", 1]]}).status_code == 400


@pytest.mark.parametrize("fields", [{"mirostat": 2}, {"dry_multiplier": 0.8}, {"n_predict": 0}, {"n_predict": -3},
                                    {"max_tokens": 5}, {"n_probs": 500}, {"post_sampling_probs": True}])  # fmt: skip
def test_what_cannot_be_done_is_said(http: httpx.Client, fields: dict[str, Any]) -> None:
    answer = http.post("/completion", json={**COMPLETION.good, **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"code", "message", "type", "param"}
    assert (error["code"], error["param"]) == (400, next(iter(fields)))


def test_neutral_values_and_clients_own_knobs_pass(http: httpx.Client) -> None:
    """As llama.vim sends them."""
    fields = {"mirostat": 0, "dry_multiplier": 0.0, "typical_p": 1.0, "id_slot": 0, "samplers": ["top_k"], "seed": -1,
              "t_max_predict_ms": 1000, "n_indent": 2}  # fmt: skip
    answer = http.post("/completion", json={**COMPLETION.good, **fields})
    assert answer.status_code == 200
    assert answer.headers["x-ignored-fields"] == "n_indent, samplers, t_max_predict_ms"


@pytest.fixture(autouse=True)
def _as_it_was(live: LiveServer) -> Iterator[None]:
    """The server is other files' as well, and its model cannot fill in."""
    yield
    assert live.server is not None
    live.server.parts.pop("fill_marks", None)


def test_a_model_without_marks_cannot_fill_in(http: httpx.Client) -> None:
    answer = http.post("/infill", json={"input_prefix": "a", "input_suffix": "b"})
    assert answer.status_code == 400
    assert "Qwen2.5-Coder" in answer.json()["error"]["message"]


def test_a_filling_is_asked_for_with_the_marks(live: LiveServer, http: httpx.Client) -> None:
    filling(live)
    answer = http.post("/infill", json={"input_prefix": "a cat", "input_suffix": "sat", "n_predict": 1}).json()
    assert live.server is not None
    tokenizer = live.server.service.need_tokenizer()
    plain = [tokenizer.encode_plain(text) for text in ("a cat", "sat")]
    want = [MARKS.prefix, *plain[0], MARKS.suffix, *plain[1], MARKS.middle]
    begins = [tokenizer.bos_id] if tokenizer.encode("a")[0] == tokenizer.bos_id else []
    assert answer["prompt"] == tokenizer.decode([*begins, *want], skip_special_tokens=False)


@pytest.fixture(scope="module")
def coder() -> Iterator[LiveServer]:
    if not CODER.exists():
        pytest.skip("Qwen2.5-Coder-0.5B is not here (tools/models.py fetches it)")
    config = serve_from_kwargs(model=str(CODER), port=0, max_model_len=1024, max_num_seqs=2)
    with LiveServer(config) as server:
        yield server


def test_a_real_coder_fills_in(coder: LiveServer) -> None:
    prefix, suffix = 'def add(a, b):\n    """The sum of a and b."""\n    return ', "\n\nprint(add(1, 2))\n"
    body = {"input_prefix": prefix, "input_suffix": suffix, "n_predict": 12, "temperature": 0,
            "input_extra": [{"filename": "notes.py", "text": "# <|fim_middle|> is only text here\n"}]}  # fmt: skip
    with httpx.Client(base_url=coder.url, timeout=120) as http:
        found = http.post("/infill", json=body).json()
        assert found["content"].strip().startswith("a + b")
        assert found["prompt"].count("<|fim_middle|>") == 2  # the mark, and the text that spells it
        shown = http.post("/api/show", json={}).json()
        assert "insert" in shown["capabilities"]
        filled = http.post(
            "/api/generate", json={"prompt": prefix, "suffix": suffix, "stream": False,
                                   "options": {"num_predict": 12, "temperature": 0}},
        ).json()  # fmt: skip
        assert filled["response"].strip().startswith("a + b")


def test_completions_fill_in_too(coder: LiveServer) -> None:
    import openai

    with openai.OpenAI(base_url=coder.url + "/v1", api_key="none") as client:
        found = client.completions.create(
            model="", prompt="def add(a, b):\n    return ", suffix="\n\nprint(add(1, 2))\n", max_tokens=12,
            temperature=0,
        ).choices[0]  # fmt: skip
    assert found.text.strip().startswith("a + b")


def test_a_suffix_belongs_to_one_text(live: LiveServer, http: httpx.Client) -> None:
    filling(live)
    body = {"prompt": ["a", "b"], "suffix": "c", "max_tokens": 1}
    assert http.post("/v1/completions", json=body).json()["error"]["param"] == "suffix"
    answer = http.post("/v1/completions", json=body | {"prompt": "a", "echo": True, "return_token_ids": True}).json()
    assert {MARKS.prefix, MARKS.suffix, MARKS.middle} <= set(answer["choices"][0]["prompt_token_ids"])
