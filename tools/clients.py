"""Python's clients on their own defaults: chats, streams, structured output, tools, evaluators.

    python -m venv /tmp/clients && /tmp/clients/bin/pip install httpx instructor langchain-openai
    penstock serve MODEL & /tmp/clients/bin/python tools/clients.py http://127.0.0.1:8000 --record requests.jsonl

Each line says what a client made of the answer, or its error; what is not installed is left out, so that clients that
do not get on with each other can have environments of their own. `--only langchain`: those with this in their name.
Nothing but shapes is judged: small models talk nonsense. `--record`: the bodies they sent, for
`tests/data/clients.jsonl`, which the tests send without any client. What came of it: `docs/guides/clients.md`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel

TEXT = "Anna Berger is 34 years old and lives in Vienna."
QUESTION = "What is the weather in Paris? Use the tool."
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "The weather in a city.",
                                              "parameters": SCHEMA}}  # fmt: skip


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def weather(city: str) -> str:
    """The weather in a city."""
    return f"It is sunny in {city}, 21 degrees."


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    bodies: list[dict[str, Any]] = []

    def keep(request: httpx.Request) -> None:
        if request.content:
            bodies.append({"client": case.__name__, "path": request.url.path, "body": json.loads(request.content)})

    async def akeep(request: httpx.Request) -> None:
        keep(request)

    base, failed = args.url.rstrip("/") + "/v1", 0
    model = httpx.get(base + "/models").json()["data"][0]["id"]
    http = httpx.Client(event_hooks={"request": [keep]}, timeout=300)
    ahttp = httpx.AsyncClient(event_hooks={"request": [akeep]}, timeout=300)
    for case in CASES:
        package = PACKAGES[case.__name__.partition("__")[0]]
        if args.only not in case.__name__ or not _version(package):
            continue
        named = f"{case.__name__:32} {package} {_version(package)}"
        try:
            print(f"{named:60} {' '.join(repr(case(base, model, http, ahttp)).split())}", flush=True)
        except Exception as error:
            failed += 1
            print(f"{named:60} FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
    if args.record:
        args.record.write_text("".join(json.dumps(body, ensure_ascii=False) + "\n" for body in bodies))
    return failed


def instructor__tools(base: str, model: str, http: Any, ahttp: Any) -> Any:
    import instructor
    from openai import OpenAI

    client = instructor.from_openai(OpenAI(base_url=base, api_key="none", http_client=http))
    return client.chat.completions.create(
        model=model, response_model=Person, messages=[{"role": "user", "content": TEXT}]
    )


def _pydantic_model(base: str, model: str, ahttp: Any) -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return OpenAIChatModel(model, provider=OpenAIProvider(base_url=base, api_key="none", http_client=ahttp))


def pydantic_ai__output(base: str, model: str, http: Any, ahttp: Any) -> Any:
    from pydantic_ai import Agent

    return Agent(_pydantic_model(base, model, ahttp), output_type=Person).run_sync(TEXT).output


def pydantic_ai__tool(base: str, model: str, http: Any, ahttp: Any) -> Any:
    from pydantic_ai import Agent

    agent = Agent(_pydantic_model(base, model, ahttp), tools=[weather])
    result = agent.run_sync(QUESTION)
    called = sum(part.part_kind == "tool-call" for m in result.all_messages() for part in m.parts)
    return called, result.output[:100]


def _chat(base: str, model: str, http: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=model, base_url=base, api_key="none", http_client=http)


def langchain__structured(base: str, model: str, http: Any, ahttp: Any) -> Any:
    return _chat(base, model, http).with_structured_output(Person).invoke(TEXT)


def langchain__function_calling(base: str, model: str, http: Any, ahttp: Any) -> Any:
    return _chat(base, model, http).with_structured_output(Person, method="function_calling").invoke(TEXT)


def langchain__bind_tools(base: str, model: str, http: Any, ahttp: Any) -> Any:
    answer = _chat(base, model, http).bind_tools([weather]).invoke(QUESTION)
    return answer.tool_calls, answer.content[:100]


def langchain__stream(base: str, model: str, http: Any, ahttp: Any) -> Any:
    whole = None
    for chunk in _chat(base, model, http).bind_tools([weather]).stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    return whole.tool_calls, whole.content[:100]


def openai__stream_tools(base: str, model: str, http: Any, ahttp: Any) -> Any:
    from openai import OpenAI

    client = OpenAI(base_url=base, api_key="none", http_client=http)
    with client.chat.completions.stream(model=model, messages=[_asked()], tools=[TOOL]) as stream:
        said = stream.get_final_completion().choices[0]
    return said.finish_reason, said.message.tool_calls


def openai__responses(base: str, model: str, http: Any, ahttp: Any) -> Any:
    from openai import OpenAI

    client = OpenAI(base_url=base, api_key="none", http_client=http)
    first = client.responses.create(model=model, input="Say hello.", max_output_tokens=20)
    again = client.responses.parse(model=model, input=TEXT, text_format=Person, previous_response_id=first.id)
    return first.output_text, again.output_parsed


def openai__embeddings_and_batches(base: str, model: str, http: Any, ahttp: Any) -> Any:
    from openai import OpenAI

    client = OpenAI(base_url=base, api_key="none", http_client=http)
    vectors = client.embeddings.create(model=model, input=["one", "two"]).data
    return len(vectors), len(vectors[0].embedding), len(client.batches.list().data)


def anthropic__stream_tools(base: str, model: str, http: Any, ahttp: Any) -> Any:
    from anthropic import Anthropic

    client = Anthropic(base_url=base.removesuffix("/v1"), api_key="none", max_retries=0)
    tool = {"name": "weather", "description": "The weather in a city.", "input_schema": SCHEMA}
    with client.messages.stream(model=model, max_tokens=64_000, messages=[_asked()], tools=[tool]) as stream:
        said = stream.get_final_message()
    return said.stop_reason, [block.type for block in said.content]


def ollama__chat(base: str, model: str, http: Any, ahttp: Any) -> Any:
    import ollama

    client = ollama.Client(host=base.removesuffix("/v1"))
    called = client.chat(model, [_asked()], tools=[weather]).message.tool_calls
    parts = [part.message.content for part in client.chat(model, [{"role": "user", "content": "Hi"}], stream=True)]
    form = client.chat(model, [{"role": "user", "content": TEXT}], format=Person.model_json_schema()).message.content
    return called, len(parts), form, len(client.embed(model, "a")["embeddings"][0]), client.list().models[0].model


def litellm__tools_and_errors(base: str, model: str, http: Any, ahttp: Any) -> Any:
    import litellm

    asked: dict[str, Any] = {"model": f"openai/{model}", "api_base": base, "api_key": "none"}
    said = litellm.completion(messages=[_asked()], tools=[TOOL], **asked)
    parts = list(litellm.completion(messages=[{"role": "user", "content": "Hi"}], stream=True, **asked))
    theirs = litellm.completion(model=f"anthropic/{model}", api_base=base.removesuffix("/v1"), api_key="none",
                                messages=[{"role": "user", "content": "Hi"}], max_tokens=10)  # fmt: skip
    try:
        litellm.completion(messages=[{"role": "user", "content": "one two " * 60_000}], **asked)
    except litellm.ContextWindowExceededError:
        return said.choices[0].message.tool_calls, len(parts), theirs.choices[0].finish_reason, "too long is known"
    raise AssertionError("a prompt that is too long was not known as one")


def llama_index__chat_and_tools(base: str, model: str, http: Any, ahttp: Any) -> Any:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(model=model, api_base=base, api_key="none", is_chat_model=True, is_function_calling_model=True,
                     context_window=4096, timeout=300)  # fmt: skip
    parts = list(llm.stream_chat([ChatMessage(role="user", content="Say hello.")]))
    tool = FunctionTool.from_defaults(weather)
    said = llm.chat_with_tools([tool], user_msg=QUESTION)
    made = llm.as_structured_llm(Person).complete(TEXT).raw
    return len(parts), llm.get_tool_calls_from_response(said, error_on_no_tool_call=False), made


def dspy__predict(base: str, model: str, http: Any, ahttp: Any) -> Any:
    import dspy

    lm = dspy.LM(f"openai/{model}", api_base=base, api_key="none", max_tokens=200, cache=False)
    with dspy.context(lm=lm):
        return dspy.Predict("text -> name: str, age: int")(text=TEXT), dspy.Predict("question -> answer")(
            question="1+1?"
        )


def agents__run(base: str, model: str, http: Any, ahttp: Any) -> Any:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=base, api_key="none")
    out = []
    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        settings = agents.ModelSettings(max_tokens=100)
        agent = agents.Agent(name="a", model=kind(model, client), tools=[agents.function_tool(weather)],
                             model_settings=settings)  # fmt: skip
        try:
            out.append(str(agents.Runner.run_sync(agent, QUESTION, max_turns=4).final_output)[:60])
        except agents.MaxTurnsExceeded:
            out.append("called until its turns were over")
    return out


def smolagents__tool_calling(base: str, model: str, http: Any, ahttp: Any) -> Any:
    import smolagents

    @smolagents.tool
    def forecast(city: str) -> str:
        """The weather in a city.

        Args:
            city: its name
        """
        return weather(city)

    llm = smolagents.OpenAIServerModel(model, api_base=base, api_key="none", max_tokens=150)
    agent = smolagents.ToolCallingAgent([forecast], model=llm, max_steps=2, verbosity_level=0)
    return str(agent.run(QUESTION))[:100], [type(step).__name__ for step in agent.memory.steps]


def outlines__schema(base: str, model: str, http: Any, ahttp: Any) -> Any:
    import outlines
    from openai import OpenAI

    llm = outlines.from_openai(OpenAI(base_url=base, api_key="none"), model)
    theirs = outlines.from_vllm(OpenAI(base_url=base, api_key="none"), model)
    return llm(TEXT, Person), theirs("A number.", outlines.types.regex(r"[0-9]{3}"), max_tokens=10)


def guidance__json(base: str, model: str, http: Any, ahttp: Any) -> Any:
    import guidance

    llm = guidance.models.OpenAI(model, base_url=base, api_key="none", echo=False)
    with guidance.user():
        llm += TEXT
    with guidance.assistant():
        llm += guidance.json(name="person", schema=Person, temperature=0.1)
    return llm["person"]


def prometheus__parser(base: str, model: str, http: Any, ahttp: Any) -> Any:
    from prometheus_client.openmetrics import parser as openmetrics
    from prometheus_client.parser import text_string_to_metric_families

    url = base.removesuffix("/v1") + "/metrics"
    plain = list(text_string_to_metric_families(httpx.get(url).text))
    asked = httpx.get(url, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    return len(plain), len(list(openmetrics.text_string_to_metric_families(asked.text)))


def lm_eval__multiple_choice(base: str, model: str, http: Any, ahttp: Any) -> Any:
    """Prompts as ids and echoed logprobs by `/v1/completions`; a task of two questions from a file, so no data set."""
    folder = Path(tempfile.mkdtemp())
    rows = [{"q": "2 + 2 =", "o": [" 4", " 7"], "a": 0}, {"q": "The sky is", "o": [" soup", " blue"], "a": 1}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tiny.yaml").write_text(
        f"task: tiny\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder}/rows.jsonl\n"
        'test_split: test\noutput_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_choice: "{{o}}"\n'
        'doc_to_target: a\ntarget_delimiter: ""\nmetric_list:\n  - metric: acc\n'
    )
    arguments = f"model={model},base_url={base}/completions,tokenizer_backend=remote,num_concurrent=2"
    command = ["lm_eval", "run", "--model", "local-completions", "--model_args", arguments, "--tasks", "tiny",
               "--include_path", str(folder)]  # fmt: skip
    return _last_lines(command, "acc")


def guidellm__benchmark(base: str, model: str, http: Any, ahttp: Any) -> Any:
    prompts = Path(tempfile.mkdtemp()) / "prompts.txt"
    prompts.write_text("Say hello.\nName a colour.\nCount to three.\n")
    target = f"kind=openai_http,target={base.removesuffix('/v1')},model={model}"
    command = ["guidellm", "run", "--backend", target, "--profile", "kind=synchronous", "--constraint",
               "kind=max_requests,count=3", "--data", f"kind=text_file,path={prompts}", "--output", "kind=console",
               "--disable-progress"]  # fmt: skip
    return _last_lines(command, "synchronous")


def _last_lines(command: list[str], word: str) -> list[str]:
    """Lines of the tables that it prints that have `word`."""
    path = str(Path(sys.executable).parent / command[0])
    ran = subprocess.run([path, *command[1:]], capture_output=True, text=True, timeout=300, check=False)
    if ran.returncode:
        raise RuntimeError((ran.stderr or ran.stdout).strip()[-300:])
    return [line.strip() for line in ran.stdout.splitlines() if line.startswith("|") and word in line][:4]


def _asked() -> dict[str, str]:
    return {"role": "user", "content": QUESTION}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


PACKAGES = {
    "openai": "openai", "anthropic": "anthropic", "ollama": "ollama", "instructor": "instructor",
    "pydantic_ai": "pydantic-ai-slim", "langchain": "langchain-openai", "litellm": "litellm",
    "llama_index": "llama-index-llms-openai-like", "dspy": "dspy", "agents": "openai-agents",
    "smolagents": "smolagents", "outlines": "outlines", "guidance": "guidance", "prometheus": "prometheus-client",
    "lm_eval": "lm-eval", "guidellm": "guidellm",
}  # fmt: skip
"""What a case is named after -> the package that it needs."""
CASES: tuple[Callable[..., Any], ...] = (
    openai__stream_tools, openai__responses, openai__embeddings_and_batches, anthropic__stream_tools, ollama__chat,
    instructor__tools, pydantic_ai__output, pydantic_ai__tool, langchain__structured, langchain__function_calling,
    langchain__bind_tools, langchain__stream, litellm__tools_and_errors, llama_index__chat_and_tools, dspy__predict,
    agents__run, smolagents__tool_calling, outlines__schema, guidance__json, prometheus__parser,
    lm_eval__multiple_choice, guidellm__benchmark,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
