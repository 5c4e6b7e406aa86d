"""Which parser a request's output needs, and what its tool_choice asks of decoding."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.base.errors import InputError
from penstock.core.sampling import StructuredOutputs
from penstock.server.parsing.engine import OutputParser
from penstock.server.parsing.formats import ALIASES, FORMATS, THOUGHTS
from penstock.server.parsing.formats.bare import loosely
from penstock.server.parsing.json_wire import NONE, json_arguments
from penstock.server.parsing.reader import Format, Reader, Thoughts
from penstock.server.parsing.tape import Steps
from penstock.server.parsing.template_format import (
    State,
    find_format,
    find_thoughts,
    leaves_marks_out,
    reads_tools,
    thought_state,
)
from penstock.server.parsing.tools import bound_schemas, calls_schema, read_choice, schemas, text_or_calls
from penstock.text.grammar.lead import Lead, thought_lead
from penstock.text.tool_prompt import has_calls, with_tools

if TYPE_CHECKING:
    from penstock.core.sampling import SamplingParams
    from penstock.server.context import Server

Tools = Sequence[Mapping[str, Any]] | None
NO_GRAMMARS: Mapping[str, str] = {}
_ALL = re.compile(r"[\s\S]*")
Messages = Sequence[Mapping[str, Any]]


def parser_for(
    server: Server, tools: Tools, tool_choice: Any = None, chat_template_kwargs: Mapping[str, Any] | None = None,
    *, prompt_text: str = "", parallel: bool = True, bound: bool = False, raw: Collection[str] = (),
) -> OutputParser | None:  # fmt: skip
    """A parser for one sample; None: all output is plain content.

    `tools` are those of `check_tools`; `parallel` is parallel_tool_calls. `prompt_text`: the end of the prompt as text,
    if known; it shows whether the prompt has opened or closed a thought. `bound`: the request binds its answer.
    `raw`: tools whose arguments are no JSON where they are named.

    Raises InputError if this model cannot call tools: its template does not show them to it, or writes calls in no
    known way.
    """
    choice = read_choice(tools, tool_choice)
    needs = _tool_format(server, choice.kind, tools) if choice.kind != "none" else None
    arguments = schemas(tools or (), choice.names)
    calls = choice.kind in ("named", "required")
    if choice.kind == "named":
        needs = _arguments_of(choice.names[0], raw=choice.names[0] in raw)
    elif choice.kind == "required":
        needs = FORMATS["openai"]
    else:
        needs = needs or _framed(server)
    thoughts = _thoughts(server)
    if needs is None and thoughts is None:
        return None
    state = _state(server, thoughts, chat_template_kwargs, prompt_text)
    hidden = _turn_ends(server) if _special(server, None if calls else needs, thoughts) else ()
    return OutputParser(
        needs, thoughts, arguments, opened=state == "opened", closed=state == "closed", parallel=parallel,
        bound=choice.kind == "required", exact=calls or bound, hidden=hidden,
    )  # fmt: skip


def lead_for(
    server: Server, tools: Tools, tool_choice: Any, chat_template_kwargs: Mapping[str, Any] | None, *,
    prompt_text: str, bound: bool, continued: bool = False,
) -> Lead | None:  # fmt: skip
    """What may come before an answer that is bound, by the request (`bound`) or by its tool_choice: a thought.

    None: nothing may. `continued`: the prompt has begun the answer, so no thought begins now. The others are those of
    `parser_for`, which finds the thought by the same marks.
    """
    if not bound and read_choice(tools, tool_choice).kind not in ("named", "required"):
        return None
    thoughts, service = _thoughts(server), server.service
    state = _state(server, thoughts, chat_template_kwargs, prompt_text)
    if thoughts is None or service.tokenizer is None or state == "closed" or (continued and not state):
        return None
    limits = service.limits
    return thought_lead(
        service.tokenizer, limits.vocab_size, limits.eos_token_ids, thoughts.open, thoughts.close,
        opened=state == "opened",
    )  # fmt: skip


def _state(server: Server, thoughts: Thoughts | None, kwargs: Mapping[str, Any] | None, prompt_text: str) -> State:
    if thoughts is None:
        return ""
    return thought_state(server.service.chat_template or "", thoughts, kwargs or {}, prompt_text)


def params_for(
    server: Server, tools: Tools, tool_choice: Any, params: SamplingParams, *, parallel: bool = True,
    grammars: Mapping[str, str] = NO_GRAMMARS,
) -> SamplingParams:  # fmt: skip
    """`params` with what `tool_choice` asks of decoding.

    `required` and a named function bind the output to the tools' schemas, behind a thought where there is one
    (`lead_for`). With `auto`, a `strict` tool binds the arguments once a call has begun, in
    formats and vocabularies that allow it; elsewhere strict is refused. Markers that are special tokens are made
    visible for the parser. `grammars`: in Lark, of what a tool that is named takes instead of JSON.
    Raises InputError if the request binds its output to something else as well, has no such tool, or a schema with
    what cannot be enforced.
    """
    choice = read_choice(tools, tool_choice)
    arguments = schemas(tools or (), choice.names)
    needs = _tool_format(server, "auto", tools) if choice.kind == "auto" else _framed(server)
    special = _special(server, needs if choice.kind in ("none", "auto") else None, _thoughts(server))
    asked: StructuredOutputs | None = None
    if choice.kind == "named" and choice.names[0] in grammars:
        asked = StructuredOutputs(grammar=grammars[choice.names[0]])
    elif choice.kind == "named":
        asked = StructuredOutputs(json=bound_schemas(tools or (), choice.names)[choice.names[0]])
    elif choice.kind == "required":
        asked = StructuredOutputs(json=calls_schema(bound_schemas(tools or (), choice.names), parallel=parallel))
    elif choice.kind == "auto" and (strict := _strict(tools, choice.names)):
        if needs is None or (needs.shape is None and not needs.plain) or special:
            where = f"tools[{next(iter(strict.values()))}].function.strict"
            raise InputError(
                f"{where} is only possible for this model where tool_choice is required or names a function; "
                "leave it out",
                param=where,
            )
        bound = bound_schemas(tools or (), tuple(strict))
        free = {name: bound.get(name, {"type": "object"}) for name in arguments}
        opener = needs.opens[0] if needs.opens else ""
        asked = StructuredOutputs(grammar=text_or_calls(opener, needs.shape, free, needs.plain))
    if special:
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    if asked is None:
        return params
    if params.structured_outputs is not None:
        raise InputError(
            "the output cannot be bound to tool calls and to something else: leave out response_format or the tools",
            param="tool_choice",
        )
    return msgspec.structs.replace(params, structured_outputs=asked)


def _strict(tools: Tools, names: Sequence[str]) -> dict[str, int]:
    """The tools, with their places, whose arguments must always be as their schema says."""
    functions = [tool["function"] for tool in tools or ()]
    return {f["name"]: n for n, f in enumerate(functions) if f["name"] in names and f.get("strict")}


def check_parsers(tool_call_parser: str | None, reasoning_parser: str | None) -> None:
    """Raises InputError for a setting that names no parser."""
    for what, name, known in (
        ("tool_call_parser", tool_call_parser, {**FORMATS, **ALIASES}),
        ("reasoning_parser", reasoning_parser, THOUGHTS),
    ):
        if name is not None and name not in known and name != "none":
            raise InputError(f"{what} is {name!r}; there are none, {', '.join(sorted(known))}", param=what)


def writes_calls(server: Server) -> bool:
    """Whether requests may have tools that the model decides about."""
    return tool_support(server) in ("template", "prompt")


def writes_thoughts(server: Server) -> bool:
    """Whether the model thinks before it answers, in a way that can be told apart."""
    return _thoughts(server) is not None


def tool_support(server: Server) -> str:
    """Of `/v1/models`: "template" for a model whose template shows tools; "prompt" where Penstock tells it of them in
    plain words, "prompt-required" if only where a call is bound; "none"."""
    config = server.config
    template = server.service.tool_template
    if not template or not config.enable_auto_tool_choice or config.tool_call_parser == "none":
        return "none"
    if reads_tools(template):
        return "template"
    return {"auto": "prompt", "required": "prompt-required", "off": "none"}[config.tool_prompt]


def shown(
    server: Server, messages: Messages, tools: list[dict[str, Any]] | None, tool_choice: Any, chat_template: str | None
) -> tuple[Messages, list[dict[str, Any]] | None]:  # fmt: skip
    """Messages and tools as the template gets them: as they are, or all in messages' words (`text.tool_prompt`).

    `tools` are those of `check_tools`. Raises InputError for a tool_choice that is none.
    """
    tools = tools or None
    if not (tools or has_calls(messages)) or chat_template or tool_support(server) not in ("prompt", "prompt-required"):
        return messages, None if tool_choice == "none" else tools
    choice = read_choice(tools, tool_choice)
    return with_tools(messages, tools or (), choice.kind, choice.names), None


def takes_bare(server: Server) -> bool:
    """Whether a call may be nothing but JSON, where a model's template has marks for it."""
    setting = server.config.bare_tool_calls
    return setting == "on" or (setting == "auto" and leaves_marks_out(server.service.tool_template))


def _tool_format(server: Server, kind: str, tools: Tools) -> Format:
    """How this model writes calls, for a tool_choice of `kind`. Raises InputError if it writes none."""
    config, template = server.config, server.service.tool_template
    if not config.enable_auto_tool_choice:
        raise InputError("this server does not take tools (it was started without auto tool choice)", param="tools")
    name = config.tool_call_parser
    support = tool_support(server)
    refused = support == "none" or (support == "prompt-required" and kind == "auto")
    if refused and name in (None, "none"):
        only = " unless tool_choice is required or names a function" if support != "none" else ""
        raise InputError(
            f"this model's chat template does not show tools to the model; leave tools out{only}", param="tools"
        )
    if name is not None:
        check_parsers(name, None)
        found: Format | None = FORMATS[ALIASES.get(name, name)]
    else:
        found = find_format(template) if support == "template" else FORMATS["bare"]
    if found is None:
        raise InputError(
            "this model's chat template does not show how the model writes tool calls; start the server with "
            "--tool-call-parser, or leave tools out",
            param="tools",
        )
    strict = any(tool["function"].get("strict") for tool in tools or ())
    return loosely(found, plain=strict) if support != "template" or takes_bare(server) else found


def _framed(server: Server) -> Format | None:
    """The format of a model that frames everything it writes, calls or not."""
    found = find_format(server.service.chat_template or "") if server.config.tool_call_parser is None else None
    return found if found is not None and found.whole else None


def _thoughts(server: Server) -> Thoughts | None:
    name = server.config.reasoning_parser
    if name is None:
        return find_thoughts(server.service.chat_template or "")
    check_parsers(None, name)
    return THOUGHTS.get(name)


def _arguments_of(name: str, *, raw: bool = False) -> Format:
    """The whole output is the arguments of a call of `name`, in JSON unless they are `raw`."""

    def read(r: Reader, opener: str) -> Steps[None]:
        if not raw:
            yield from r.space()
        yield from r.need()
        r.begin(name)
        yield from r.run(_ALL, r.write) if raw else json_arguments(r, NONE, r.write)
        r.end()

    return Format("named", read, whole=True)


def _special(server: Server, format: Format | None, thoughts: Thoughts | None) -> bool:
    """Whether a marker is a token that is left out of the text by default."""
    tokenizer = server.service.tokenizer
    if tokenizer is None:
        return False
    special = tokenizer.special_literals
    words = [*(format.opens if format else ()), *((thoughts.open, thoughts.close) if thoughts else ())]
    whole = format is not None and format.whole
    return whole or any(literal in word for word in words for literal in special)


def _turn_ends(server: Server) -> tuple[str, ...]:
    tokenizer = server.service.tokenizer
    assert tokenizer is not None
    return tuple(filter(None, (tokenizer.id_to_piece(i) for i in server.service.limits.eos_token_ids)))
