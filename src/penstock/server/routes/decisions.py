"""/v1/decisions in OpenAI's shape, /v1/systemone in TypeSafe's: typed questions about one text, with probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from penstock.base.errors import InputError
from penstock.server.responses.input import chat_messages, input_items
from penstock.server.schema.decisions import (
    DecisionAnswer,
    DecisionAsked,
    DecisionRequest,
    DecisionResponse,
    DecisionUsage,
    OptionProbability,
    SystemOneAnswer,
    SystemOneQuestion,
    SystemOneRequest,
    SystemOneResponse,
    SystemOneUsage,
)
from penstock.server.schema.decode import read, renamed
from penstock.server.schema.extras import ACCEPTED
from penstock.server.schema.responses import InputTokensDetails
from penstock.server.transport.sse import as_json, unless_gone
from penstock.server.turns.asking import Caller, caller_of, check_model
from penstock.server.turns.deciding import decide
from penstock.text.decisions import (
    KINDS,
    DecisionOption,
    DecisionQuestion,
    Judgement,
    as_text,
    check_question,
)

T = TypeVar("T")

MAX_SYSTEMONE_LEVELS = 10
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "stream": ((False,), "is not supported: the answers come together"),
    "messages": ((), "is not supported; send them as input"),
    "prompt": ((), "is not supported; send the text as input"),
}
_OUTPUTS = {"function_call_output": "function_call", "custom_tool_call_output": "custom_tool_call"}


async def decisions(request: Request) -> Response:
    caller = caller_of(request)
    body = await read(request, DecisionRequest, refused=_REFUSED, accepted=ACCEPTED)
    return as_json(await unless_gone(request, answer_questions(caller, body)))


async def systemone(request: Request) -> Response:
    caller = caller_of(request)
    body = await read(request, SystemOneRequest, refused=_REFUSED, accepted=ACCEPTED)
    return as_json(await unless_gone(request, answer_state(caller, body)))


# -- OpenAI's ----------------------------------------------------------------------------------------------------------


async def answer_questions(caller: Caller, body: DecisionRequest) -> DecisionResponse:
    """The answer to a checked body, for callers that are no HTTP request too; cancelling aborts.

    Raises InputError, RefusedError, WireError, EngineError.
    """
    model = check_model(caller.server, body.model)
    questions = [_question(given, f"questions[{i}]") for i, given in enumerate(body.questions)]
    made = await decide(caller, _messages(body.input), questions, body, "decisions")
    answers = [_answer(*pair) for pair in zip(body.questions, made.answers, strict=True)]
    usage = DecisionUsage(
        input_tokens=made.num_tokens, total_tokens=made.num_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=made.num_cached),
    )  # fmt: skip
    return DecisionResponse(model=model, answers=answers, usage=usage)


def _messages(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Raises InputError."""
    listed = given if isinstance(given, str) else [_plain_item(*pair) for pair in enumerate(given)]
    items = input_items(listed, _nothing)
    calls: set[tuple[str, str]] = set()
    for i, item in enumerate(items):
        kind = item["type"]
        calls.add((kind, str(item.get("call_id"))))
        if kind in _OUTPUTS and (_OUTPUTS[kind], str(item.get("call_id"))) not in calls:
            raise InputError(f"input[{i}].call_id is that of no call before it", param=f"input[{i}].call_id")
    return chat_messages(items)


def _nothing(_: str) -> None:
    """No response is stored here that an item could refer to."""


def _plain_item(i: int, item: dict[str, Any]) -> dict[str, Any]:
    """With JSON parts as text."""
    fields = {}
    for name in ("content", "output"):
        if isinstance(item.get(name), list):
            fields[name] = [_plain_part(part, f"input[{i}].{name}[{j}]") for j, part in enumerate(item[name])]
    return {**item, **fields}


def _plain_part(part: Any, where: str) -> Any:
    """Raises InputError."""
    if not isinstance(part, dict) or part.get("type") != "input_json":
        return part
    data = part.get("data")
    if not isinstance(data, dict | list):
        raise InputError(f"{where}.data must be an object or a list of objects", param=f"{where}.data")
    return {"type": "input_text", "text": as_text(data)}


def _question(given: DecisionAsked, at: str) -> DecisionQuestion:
    """Raises InputError."""
    options = [DecisionOption(c.value, c.description or "") for c in given.choices or ()]
    levels = [DecisionOption(level.label, level.description or "") for level in given.levels or ()]
    for name, listed, kind in (("choices", options, "choice"), ("levels", levels, "score")):
        if listed and given.type != kind and given.type in KINDS:
            raise InputError(f"{at}.{name} belong to a {kind}; leave them out", param=f"{at}.{name}")
    made = DecisionQuestion(given.type, _instructions(given, at), tuple(options or levels), at)
    check_question(made)
    return made


def _instructions(given: DecisionAsked, at: str) -> str:
    """Raises InputError."""
    if isinstance(given.instructions, str):
        return given.instructions
    texts = []
    for j, part in enumerate(given.instructions):
        where = f"{at}.instructions[{j}]"
        plain = _plain_part(part, where)
        if plain.get("type") != "input_text" or not isinstance(plain.get("text"), str):
            raise InputError(f"{where} must be of type input_text or input_json; no images are read", param=where)
        texts.append(plain["text"])
    return "\n".join(texts)


def _answer(given: DecisionAsked, made: Judgement) -> DecisionAnswer:
    p, name, mass = made.probabilities, given.name, made.label_mass
    if made.refused:
        return DecisionAnswer(type="refusal", name=name, label_mass=mass)
    if given.type == "predicate":
        return DecisionAnswer(type="predicate", probability=p[0], name=name, label_mass=mass)
    if given.type == "choice":
        values = [c.value for c in given.choices or ()]
        shares = [OptionProbability(value=v, probability=share) for v, share in zip(values, p, strict=True)]
        return DecisionAnswer(
            type="choice",
            choice=values[made.best],
            confidence=made.confidence,
            probabilities=shares,
            name=name,
            label_mass=mass,
        )
    levels = [
        OptionProbability(value=n, label=level.label, probability=p[n]) for n, level in enumerate(given.levels or ())
    ]
    return DecisionAnswer(
        type="score", score=made.score, confidence=made.confidence, probabilities=levels, name=name, label_mass=mass
    )  # fmt: skip


# -- TypeSafe's --------------------------------------------------------------------------------------------------------


async def answer_state(caller: Caller, body: SystemOneRequest) -> SystemOneResponse:
    """As `answer_questions`."""
    model = check_model(caller.server, body.model)
    if not isinstance(body.state, str | dict | list) or not body.state:
        raise InputError("state must be a text, an object or a list, and not empty", param="state")
    questions = {name: _named(given, f"questions.{name[:80]}") for name, given in body.questions.items()}
    messages = [{"role": "user", "content": as_text(body.state)}]
    with renamed({"input": "state"}):
        made = await decide(caller, messages, list(questions.values()), body, "systemone")
    answers = {
        name: _typed(question, answer) for (name, question), answer in zip(questions.items(), made.answers, strict=True)
    }
    return SystemOneResponse(model=model, answers=answers, usage=SystemOneUsage(input_tokens=made.num_tokens))


def _named(given: SystemOneQuestion, at: str) -> DecisionQuestion:
    """Raises InputError."""
    kinds = {"noul": "predicate", "choice": "choice", "score": "score"}
    if given.type not in kinds:
        raise InputError(f"{at}.type must be one of {', '.join(kinds)}, not {given.type[:40]!r}", param=f"{at}.type")
    if not isinstance(given.instructions, str | dict | list):
        raise InputError(f"{at}.instructions must be a text, an object or a list", param=f"{at}.instructions")
    options = _criteria(given.type, given.criteria, f"{at}.criteria")
    words = as_text(given.instructions) if given.instructions else ""
    made = DecisionQuestion(kinds[given.type], words, options, at)
    with renamed({f"{at}.choices": f"{at}.criteria", f"{at}.levels": f"{at}.criteria"}):
        check_question(made, most_levels=MAX_SYSTEMONE_LEVELS)
    return made


def _criteria(kind: str, given: Any, at: str) -> tuple[DecisionOption, ...]:
    """Raises InputError."""
    if kind == "score":
        if not isinstance(given, list):
            raise InputError(f"{at} of a score must be the list of its levels, the lowest first", param=at)
        return tuple(DecisionOption(as_text(level)) for level in given)
    if kind == "noul" and given is None:
        return ()
    if not isinstance(given, dict):
        raise InputError(f"{at} must be an object: what each answer means", param=at)
    if kind == "choice":
        return tuple(DecisionOption(name, _meaning(given[name])) for name in given)
    if given.keys() != {"true", "false"}:
        raise InputError(f'{at} of a noul must say what "true" and "false" mean, and no more', param=at)
    return tuple(DecisionOption(name, _meaning(given[name])) for name in ("true", "false"))


def _meaning(given: Any) -> str:
    return "" if given is None else as_text(given)


def _typed(question: DecisionQuestion, made: Judgement) -> SystemOneAnswer:
    p, mass = made.probabilities, made.label_mass
    if made.refused:
        return SystemOneAnswer(type="refusal", label_mass=mass)
    if question.kind == "predicate":
        return SystemOneAnswer(type="noul", noul=p[0], label_mass=mass)
    names = [str(option.name) for option in question.options]
    if question.kind == "choice":
        return SystemOneAnswer(
            type="choice", choice=names[made.best], confidence=made.confidence, label_mass=mass,
            probabilities=dict(zip(names, p, strict=True)),
        )  # fmt: skip
    return SystemOneAnswer(
        type="score", score=made.score, confidence=made.confidence, label_mass=mass, legend=_numbered(names),
        probabilities=_numbered(p),
    )  # fmt: skip


def _numbered(values: Sequence[T]) -> dict[str, T]:
    return {str(n): value for n, value in enumerate(values)}


ROUTES: list[BaseRoute] = [
    Route("/v1/decisions", decisions, methods=["POST"]),
    Route("/v1/systemone", systemone, methods=["POST"]),
]
DOCS = {
    ("POST", "/v1/decisions"): ("Typed questions about a text, with probabilities", DecisionRequest, DecisionResponse),
    ("POST", "/v1/systemone"): ("The same in System One's shape", SystemOneRequest, SystemOneResponse),
}
_STATE = "I was charged twice, and nobody answers. Please help today."
EXAMPLES = {
    "/v1/decisions": {
        "input": _STATE,
        "questions": [
            {"type": "predicate", "name": "urgent", "instructions": "Is this urgent?"},
            {"type": "choice", "name": "team", "instructions": "Which team should answer?",
             "choices": [{"value": "billing"}, {"value": "technical"}]},
            {"type": "score", "name": "anger", "instructions": "How angry is the customer?",
             "levels": [{"label": "calm"}, {"label": "annoyed"}, {"label": "furious"}]},
        ],
    },
    "/v1/systemone": {
        "state": _STATE,
        "questions": {
            "urgent": {"type": "noul", "instructions": "Is this urgent?"},
            "team": {"type": "choice", "instructions": "Which team should answer?",
                     "criteria": {"billing": "money, refunds", "technical": None}},
        },
    },
}  # fmt: skip
