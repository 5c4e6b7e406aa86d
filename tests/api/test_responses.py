"""/v1/responses with the official client on a real socket: the bundled model, and a script where it must call tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from penstock.base.clock import MonotonicClock
from penstock.config import serve_from_kwargs
from penstock.core.sampling import SamplingParams
from penstock.launch.llm import LLM
from penstock.server.call import ANYONE, Tenant
from penstock.server.errors import WireError
from penstock.server.live import LiveServer
from penstock.server.parsing.events import Content, Reasoning
from penstock.server.responses.events import ResponseWriter, replay
from penstock.server.responses.store import ResponseStore, Stored
from penstock.server.routes import responses as route
from tests.api.conftest import bundled
from tests.api.scripted import SCRIPT, Scripts, splits

MANY = 6
GREEDY: dict[str, Any] = {"model": "nano", "temperature": 0, "max_output_tokens": MANY}
WORDS = "I would like to order a pizza."  # what nano answers with more than MANY tokens


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(bundled(), ops="ref", max_model_len=512, num_gpu_blocks_override=64)


@pytest.fixture
def sdk(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(llm: LLM, messages: list[dict[str, Any]], max_tokens: int = MANY) -> str:
    return llm.chat(messages, SamplingParams(temperature=0, max_tokens=max_tokens))[0].outputs[0].text


def sse(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


# -- the bundled model -------------------------------------------------------------------------------------------


def test_text_is_that_of_chat(sdk: openai.OpenAI, llm: LLM) -> None:
    want = chat(llm, [{"role": "user", "content": WORDS}])
    got = sdk.responses.create(input=WORDS, **GREEDY)
    assert got.output_text == want
    assert got.status == "incomplete"
    assert got.incomplete_details is not None
    assert got.incomplete_details.reason == "max_output_tokens"
    assert got.usage is not None
    assert got.usage.output_tokens == MANY
    assert got.usage.total_tokens == got.usage.input_tokens + MANY
    assert got.usage.input_tokens_details.cached_tokens >= 0
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": WORDS}]},
    ]
    system = {"role": "system", "content": "You know animals.\n\nBe brief."}
    want = chat(llm, [system, {"role": "user", "content": WORDS}])
    assert sdk.responses.create(input=items, instructions="You know animals.", **GREEDY).output_text == want  # type: ignore[arg-type]


def test_a_stream_adds_up_and_is_stored(sdk: openai.OpenAI, llm: LLM) -> None:
    with sdk.responses.stream(input=WORDS, **GREEDY) as stream:
        events = list(stream)
        final = stream.get_final_response() if events[-1].type == "response.completed" else events[-1].response  # type: ignore[union-attr]
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == final.output_text == chat(llm, [{"role": "user", "content": WORDS}])
    assert [e.sequence_number for e in events] == list(range(len(events)))
    stored = sdk.responses.retrieve(final.id)
    assert stored.to_dict() == final.to_dict() or stored.output_text == final.output_text
    assert [i.id for i in stored.output] == [i.id for i in final.output]


def test_an_asynchronous_client_streams(live: LiveServer, llm: LLM) -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="none") as client:
            events = await client.responses.create(input=WORDS, stream=True, **GREEDY)
            return "".join([e.delta async for e in events if e.type == "response.output_text.delta"])

    assert asyncio.run(ask()) == chat(llm, [{"role": "user", "content": WORDS}])


def test_a_conversation_goes_on_from_a_stored_response(sdk: openai.OpenAI, llm: LLM) -> None:
    first = sdk.responses.create(input=WORDS, **GREEDY)
    second = sdk.responses.create(input="And then?", previous_response_id=first.id, **GREEDY)
    messages = [
        {"role": "user", "content": WORDS},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And then?"},
    ]
    assert second.output_text == chat(llm, messages)
    listed = sdk.responses.input_items.list(second.id, order="asc").data
    assert [i.type for i in listed] == ["message"] * 3
    page = sdk.responses.input_items.list(second.id, limit=2, order="asc")
    assert [i.id for i in page.data] == [i.id for i in listed[:2]]
    assert page.has_more
    count = sdk.responses.input_tokens.count(input="And then?", previous_response_id=first.id, model="nano")
    assert second.usage is not None
    assert count.input_tokens == second.usage.input_tokens


def test_what_is_deleted_or_not_stored_is_404(sdk: openai.OpenAI) -> None:
    kept = sdk.responses.create(input="a", **GREEDY)
    sdk.responses.delete(kept.id)
    loose = sdk.responses.create(input="a", store=False, **GREEDY)
    for response_id in (kept.id, loose.id, "resp_nothing"):
        for ask in (sdk.responses.retrieve, sdk.responses.cancel, sdk.responses.delete):
            with pytest.raises(openai.NotFoundError) as caught:
                ask(response_id)
            assert caught.value.code == "response_not_found"
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.responses.create(input="a", previous_response_id=kept.id, **GREEDY)
    assert caught.value.param == "previous_response_id"


def test_cancelling_frees_the_engine(live: LiveServer, sdk: openai.OpenAI) -> None:
    run = sdk.responses.create(input="a", model="nano", background=True, extra_body={"ignore_eos": True})
    assert run.status == "in_progress"
    ended = sdk.responses.cancel(run.id)
    assert ended.status == "cancelled"
    assert sdk.responses.retrieve(run.id).status == "cancelled"
    assert sdk.responses.cancel(run.id).status == "cancelled"
    assert live.server is not None
    assert live.server.client.num_live == 0
    assert not live.server.parts["store"].running


def test_a_reader_that_leaves_ends_its_response(live: LiveServer) -> None:
    body = {"input": "a", "stream": True, "ignore_eos": True, "temperature": 0}
    assert live.server is not None
    store = live.server.parts["store"]
    with httpx.Client(base_url=live.url, timeout=60) as client:
        run = None
        while run is None:  # a stalled machine may let it run to its end before we look
            with client.stream("POST", "/v1/responses", json=body) as stream:
                first = json.loads(next(line for line in stream.iter_lines() if line.startswith("data: "))[6:])
                run = store.running.get(first["response"]["id"])
        assert live.loop is not None
        asyncio.run_coroutine_threadsafe(run.done.wait(), live.loop).result(10)
    assert run.response.status == "cancelled"
    assert run.response.usage is not None
    assert run.response.usage.output_tokens < 400


def test_following_a_running_response_and_again_when_it_is_done(live: LiveServer, http: httpx.Client) -> None:
    body = {"input": "a", "background": True, "ignore_eos": True, "temperature": 0, "max_output_tokens": 60}
    response_id = http.post("/v1/responses", json=body).json()["id"]
    path = f"/v1/responses/{response_id}"
    all_events = sse(http.get(path, params={"stream": "true"}).text)
    assert [e["sequence_number"] for e in all_events] == list(range(len(all_events)))
    assert all_events[-1]["type"] == "response.incomplete"
    assert all_events[-1]["response"] == http.get(path).json()
    later = sse(http.get(path, params={"stream": "true", "starting_after": "5"}).text)
    assert later == all_events[6:]
    assert (
        http.get(path, params={"stream": "true", "starting_after": "-2"}).json()["error"]["param"] == "starting_after"
    )


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "king", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 2**31}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"seed": 2**64}, "seed"),
        ({"cache_salt": "\n"}, "cache_salt"),
    ],
)
def test_bad_input_is_named(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/responses", json={"input": "a", "max_output_tokens": 3, **change})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert error["message"]


# -- tool calls and thoughts, scripted ---------------------------------------------------------------------------


def test_every_split_adds_up_to_the_same_object() -> None:
    """Deltas add up to what "done" says, "done" to the final object, and ids stay what they were."""
    count = 0
    shapes = set()
    for events in splits(SCRIPT):
        writer = ResponseWriter()
        out = [writer.say("created", response={"id": "r", "output": []})]
        for event in events:
            out += writer.feed([event])
        out += writer.finish()
        out.append(writer.say("completed", response={"id": "r", "output": writer.items}))
        assert [e["sequence_number"] for e in out] == list(range(len(out)))
        deltas: dict[tuple[int, str], str] = {}
        begun: dict[int, str] = {}
        for e in out:
            if e["type"].endswith(".delta"):
                at = (e["output_index"], e["type"].removesuffix(".delta"))
                deltas[at] = deltas.get(at, "") + e["delta"]
                assert e["item_id"] == begun[e["output_index"]]
            elif e["type"] == "response.output_item.added":
                begun[e["output_index"]] = e["item"]["id"]
                assert e["item"]["status"] == "in_progress"
                assert not e["item"].get("content")
            elif e["type"].endswith("text.done"):
                assert e["text"] == deltas[e["output_index"], e["type"].removesuffix(".done")]
            elif e["type"].endswith("arguments.done"):
                assert e["arguments"] == deltas[e["output_index"], e["type"].removesuffix(".done")]
            elif e["type"] == "response.output_item.done":
                assert e["item"] == writer.items[e["output_index"]]
                assert e["item"]["id"] == begun[e["output_index"]]
        shapes.add(json.dumps([{k: v for k, v in item.items() if k != "id"} for item in writer.items]))
        count += 1
    assert len(shapes) == 1
    assert count == 255
    kinds = [item["type"] for item in json.loads(shapes.pop())]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]


def test_the_clients_accumulator_agrees(live: LiveServer, sdk: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = Scripts()
    monkeypatch.setattr(route, "begin", scripts.begin)
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": False}
    with sdk.responses.stream(input="a", model="nano", tools=[tool]) as stream:  # type: ignore[list-item]
        events = list(stream)
        final = stream.get_final_response()
    assert scripts.asked[0].tools == [
        {"type": "function", "function": {"name": "weather", "parameters": tool["parameters"], "strict": False}}
    ]
    assert [i.type for i in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert final.output_text == "It is höt 🦊"
    assert final.output[2].arguments == '{"city": "Bern"}'  # type: ignore[union-attr]
    assert final.output[2].call_id == "call_a"  # type: ignore[union-attr]
    assert final.usage is not None
    assert final.usage.output_tokens_details.reasoning_tokens == 1
    assert final.status == "completed"
    wanted = [
        "created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done", "output_item.added", "content_part.added",
        "output_text.delta", "output_text.done", "content_part.done", "output_item.done", "output_item.added",
        "function_call_arguments.delta", "function_call_arguments.done", "output_item.done", "output_item.added",
        "function_call_arguments.delta", "function_call_arguments.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [e.type for e in events] == ["response." + kind for kind in wanted]
    whole = sdk.responses.create(input="a", model="nano")
    strip = [{k: v for k, v in i.to_dict().items() if k != "id"} for i in whole.output]
    assert strip == [
        {k: v for k, v in i.to_dict().items() if k not in ("id", "parsed", "parsed_arguments")}
        for i in sdk.responses.retrieve(final.id).output
    ]


def test_calls_and_their_outputs_go_back_as_one_conversation(
    live: LiveServer, sdk: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = Scripts()
    monkeypatch.setattr(route, "begin", scripts.begin)
    first = sdk.responses.create(input="How is it?", model="nano", instructions="Be kind.")
    outputs: Any = [
        {"type": "function_call_output", "call_id": "call_a", "output": "rain"},
        {"type": "function_call_output", "call_id": "call_b", "output": [{"type": "input_text", "text": "noon"}]},
    ]
    sdk.responses.create(input=outputs, model="nano", previous_response_id=first.id)
    calls = [
        {"id": "call_a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}},
        {"id": "call_b", "type": "function", "function": {"name": "time", "arguments": "{}"}},
    ]
    assert scripts.asked[1].messages == [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": "It is höt 🦊", "reasoning_content": "First I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_a", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_b", "content": "noon"},
    ]


def test_a_failure_midway_is_told_in_the_stream(
    live: LiveServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = Scripts([Content("ab"), Content("cd")], failure=WireError(408, "out of time", code="timeout"))
    monkeypatch.setattr(route, "begin", scripts.begin)
    events = sse(http.post("/v1/responses", json={"input": "a", "stream": True}).text)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "out of time"}
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "abcd"
    answer = http.post("/v1/responses", json={"input": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "timeout")


def test_a_response_that_was_not_streamed_can_be_replayed(
    live: LiveServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route, "begin", Scripts().begin)
    made = http.post("/v1/responses", json={"input": "a"}).json()
    events = sse(http.get(f"/v1/responses/{made['id']}", params={"stream": "true"}).text)
    assert events == json.loads(json.dumps(replay(made)))
    assert events[-1]["response"] == made
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == made["output"]


def test_an_empty_answer_is_an_empty_message() -> None:
    writer = ResponseWriter()
    writer.feed([Content(""), Reasoning("")])
    writer.finish("incomplete")
    assert [(i["type"], i["status"], i["content"][0]["text"]) for i in writer.items] == [("message", "incomplete", "")]


# -- the store ---------------------------------------------------------------------------------------------------


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.s = 0.0

    def now(self) -> float:
        return self.s

    def wait_until(self, time_s: float) -> None:
        self.s = max(self.s, time_s)


def entry(number: int, size: int = 100) -> Stored:
    return Stored(f"resp_{number}", b"x" * size, b"[]", 0, (b"f",))


def test_a_million_responses_do_not_grow_the_store() -> None:
    """Row 70 of the fault list, with a small store."""
    store = ResponseStore(100, 3600, MonotonicClock(), max_bytes=50_000)
    first = entry(0)
    for n in range(1_000_000):
        store.put(ANYONE, Stored(f"resp_{n}", first.response, first.items, 0, first.frames))
        if n % 100_000 == 0:
            assert store.num_bytes <= 50_000
    assert len(store) == 50_000 // entry(999_999).num_bytes < 100
    assert store.get(ANYONE, "resp_0") is None
    assert store.get(ANYONE, "resp_999999") is not None
    assert store.num_bytes == len(store) * entry(0).num_bytes


def test_the_store_forgets_by_age_size_and_tenant() -> None:
    clock = Hand()
    store = ResponseStore(3, 10, clock, max_bytes=10_000)
    one, other = Tenant("one"), Tenant("other")
    assert store.put(one, entry(1))
    assert store.get(other, "resp_1") is None
    assert not store.delete(other, "resp_1")
    assert not store.put(one, entry(2, size=20_000))
    clock.s = 9.9
    assert store.get(one, "resp_1") is not None
    clock.s = 10
    assert store.get(one, "resp_1") is None
    assert (len(store), store.num_bytes) == (0, 0)
    assert not ResponseStore(0, 10, clock).put(one, entry(1))


def test_tenants_do_not_see_each_others_responses_over_http() -> None:
    config = serve_from_kwargs(
        model=bundled(), port=0, ops="blas", max_model_len=128, num_gpu_blocks_override=32, response_store_size=2
    )
    with LiveServer(config) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        assert server.server is not None
        names = {"Bearer a": Tenant("a"), "Bearer b": Tenant("b")}

        class Keys:
            def identify(self, scope: Any) -> Tenant:
                return names[dict(scope["headers"]).get(b"authorization", b"Bearer a").decode()]

        server.server.parts["keys"] = Keys()
        body = {"input": "a", "max_output_tokens": 2}
        made = [http.post("/v1/responses", json=body).json()["id"] for _ in range(3)]
        theirs = {"authorization": "Bearer b"}
        for path, method in (("", "GET"), ("", "DELETE"), ("/cancel", "POST"), ("/input_items", "GET")):
            assert http.request(method, f"/v1/responses/{made[2]}{path}", headers=theirs).status_code == 404
        other = http.post("/v1/responses", json={**body, "previous_response_id": made[2]}, headers=theirs)
        assert (other.status_code, other.json()["error"]["param"]) == (404, "previous_response_id")
        assert [http.get(f"/v1/responses/{i}").status_code for i in made] == [404, 200, 200]
        long = {"input": "a", "background": True, "ignore_eos": True}
        run = http.post("/v1/responses", json=long).json()["id"]
        assert http.get(f"/v1/responses/{run}", headers=theirs).status_code == 404
        assert http.get(f"/v1/responses/{run}").json()["status"] in ("in_progress", "incomplete")
