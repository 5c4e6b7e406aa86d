"""Structured output and tools by clients on their own defaults: instructor, pydantic-ai and langchain.

    python -m venv /tmp/clients && /tmp/clients/bin/pip install instructor pydantic-ai-slim[openai] langchain-openai
    penstock serve MODEL & /tmp/clients/bin/python tools/clients.py http://127.0.0.1:8000 --record requests.jsonl

Each line says what a client made of the answer, or its error. Nothing but shapes is judged: small models talk nonsense.
`--record`: the bodies they sent, for `tests/data/clients.jsonl`, which the tests send without any client.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel

TEXT = "Anna Berger is 34 years old and lives in Vienna."
QUESTION = "What is the weather in Paris? Use the tool."


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
    args = parser.parse_args()
    bodies: list[dict[str, Any]] = []

    def keep(request: httpx.Request) -> None:
        bodies.append({"client": case.__name__, "path": request.url.path, "body": json.loads(request.content)})

    async def akeep(request: httpx.Request) -> None:
        keep(request)

    base, failed = args.url.rstrip("/") + "/v1", 0
    model = httpx.get(base + "/models").json()["data"][0]["id"]
    http = httpx.Client(event_hooks={"request": [keep]}, timeout=300)
    ahttp = httpx.AsyncClient(event_hooks={"request": [akeep]}, timeout=300)
    for case in CASES:
        try:
            print(f"{case.__name__:28} {case(base, model, http, ahttp)!r}", flush=True)
        except Exception as error:
            failed += 1
            print(f"{case.__name__:28} FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
    if args.record:
        args.record.write_text("".join(json.dumps(body, ensure_ascii=False) + "\n" for body in bodies))
    return failed


def instructor_tools(base: str, model: str, http: Any, ahttp: Any) -> Any:
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


def pydantic_ai_output(base: str, model: str, http: Any, ahttp: Any) -> Any:
    from pydantic_ai import Agent

    return Agent(_pydantic_model(base, model, ahttp), output_type=Person).run_sync(TEXT).output


def pydantic_ai_tool(base: str, model: str, http: Any, ahttp: Any) -> Any:
    from pydantic_ai import Agent

    agent = Agent(_pydantic_model(base, model, ahttp), tools=[weather])
    result = agent.run_sync(QUESTION)
    called = sum(part.part_kind == "tool-call" for m in result.all_messages() for part in m.parts)
    return called, result.output[:100]


def _chat(base: str, model: str, http: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=model, base_url=base, api_key="none", http_client=http)


def langchain_structured(base: str, model: str, http: Any, ahttp: Any) -> Any:
    return _chat(base, model, http).with_structured_output(Person).invoke(TEXT)


def langchain_function_calling(base: str, model: str, http: Any, ahttp: Any) -> Any:
    return _chat(base, model, http).with_structured_output(Person, method="function_calling").invoke(TEXT)


def langchain_bind_tools(base: str, model: str, http: Any, ahttp: Any) -> Any:
    answer = _chat(base, model, http).bind_tools([weather]).invoke(QUESTION)
    return answer.tool_calls, answer.content[:100]


def langchain_stream(base: str, model: str, http: Any, ahttp: Any) -> Any:
    whole = None
    for chunk in _chat(base, model, http).bind_tools([weather]).stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    return whole.tool_calls, whole.content[:100]


CASES: tuple[Callable[..., Any], ...] = (
    instructor_tools, pydantic_ai_output, pydantic_ai_tool, langchain_structured, langchain_function_calling,
    langchain_bind_tools, langchain_stream,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
