"""Prompts that begin with modules (`text.modules`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.base.errors import InputError
from penstock.server.call import Asker, Prompt
from penstock.server.context import Server
from penstock.server.service import Service
from penstock.text.boundaries import changed_after, num_common
from penstock.text.modules import NO_MODULES, AskedModules, joined, padding_id, read_modules


def check_modules(server: Server, given: Any, others: Mapping[str, Any], *, chat: bool = False) -> AskedModules:
    """What the field asks for. `others`: fields that change prompts, by name. Raises InputError."""
    asked = read_modules(given, chat=chat)
    if asked.modules and not _size(server.service):
        raise InputError(NO_MODULES, param="prompt_cache")
    for name, value in others.items() if asked.modules else ():
        if value is not None:
            raise InputError(f"{name} changes the texts of prompt_cache; use one of them", param=name)
    return asked


def _size(service: Service) -> int:
    return 0 if service.client.info is None else service.client.info.module_tokens


async def before(server: Server, prompts: Sequence[Prompt], asked: AskedModules, asker: Asker) -> list[Prompt]:
    """The prompts, each behind these modules. Raises InputError, and as `Service.encode_all`."""
    if not asked.modules:
        return list(prompts)
    service = server.service
    said = [(one.text, one.param) for one in asked.modules if one.text is not None]
    texts = iter(await service.encode_all([text for text, _ in said], [name for _, name in said], asker=asker))
    modules = [next(texts).ids if one.text is not None else list(one.token_ids or ()) for one in asked.modules]
    return [_joined(service, prompt, modules, prompt.ids, asked.recompute) for prompt in prompts]


async def within(
    server: Server, prompt: Prompt, asked: AskedModules, messages: Sequence[Mapping[str, Any]],
    encode: Callable[[Sequence[Mapping[str, Any]]], Awaitable[Prompt]],
) -> Prompt:  # fmt: skip
    """A conversation whose first messages are modules. `encode`: makes a prompt of messages as `prompt` was made.

    Raises InputError, and as `encode`.
    """
    modules, start = [], 0
    for one in asked.modules:
        changed = changed_after(messages, one.num_messages or 0)
        if changed is None:
            raise InputError(f"{one.param}.messages is {one.num_messages}, and no message with text stands behind them",
                             param=f"{one.param}.messages")  # fmt: skip
        end = num_common(prompt.ids, (await encode(changed)).ids)
        if end <= start:
            raise InputError(f"{one.param}: the model's chat template shows nothing between this module and the one "
                             "before", param=one.param)  # fmt: skip
        modules.append(prompt.ids[start:end])
        start = end
    return _joined(server.service, prompt, modules, prompt.ids[start:], asked.recompute) if modules else prompt


def _joined(
    service: Service, prompt: Prompt, modules: Sequence[Sequence[int]], rest: Sequence[int], recompute: float
) -> Prompt:
    ids, ends = joined(modules, rest, _size(service), padding_id(service.tokenizer))
    return replace(prompt, ids=ids, text=None, modules=ends, recompute=recompute)
