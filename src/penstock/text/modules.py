"""The field `prompt_cache`: texts with which a prompt begins and each of which is computed by itself (`kv.modules`).

    "prompt_cache": [{"text": "..."}, {"token_ids": [1, 2, 3]}], "prompt": "..."        of a prompt
    "prompt_cache": [{"messages": 1}, {"messages": 3}], "messages": [...]                of a conversation

Of a conversation each ends behind so many messages. Instead of the list, `{"modules": [...], "recompute": 0.15}`
computes that share of the tokens of modules behind the first again, in the whole context (`runner.blending`).

Every module is encoded as a prompt of its own, and filled up to whole blocks with the token of a line break (if a text
of that is one token; else of a space, else an end token), so that it has the same tokens wherever it stands.
Source: Prompt Cache, Gim et al., arXiv 2311.04934, section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.base.errors import InputError

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

MAX_MODULES = 256
PARAM = "prompt_cache"
NO_MODULES = (
    "prompt_cache: this engine keeps no modules; start it with kv_allocator modules, or put the texts into the prompt"
)


class AskedModule(NamedTuple):
    """One of the others has been given; `param`: its name."""

    param: str
    text: str | None = None
    token_ids: Sequence[int] | None = None
    num_messages: int | None = None


class AskedModules(NamedTuple):
    """What the field says."""

    modules: Sequence[AskedModule] = ()
    recompute: float = 0.0


NO_ASKED = AskedModules()


def read_modules(given: Any, *, chat: bool = False) -> AskedModules:
    """What the field says. Raises InputError that names the field within it."""
    if given is None:
        return NO_ASKED
    if not isinstance(given, Mapping):
        return AskedModules(_modules(given, PARAM, chat))
    share = given.get("recompute", 0.0)
    if not set(given) <= {"modules", "recompute"} or "modules" not in given:
        raise InputError(f"{PARAM} must be a list of modules, or an object with modules and recompute", param=PARAM)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise InputError(f"{PARAM}.recompute must be a share from 0 to 1, not {str(share)[:40]}",
                         param=f"{PARAM}.recompute")  # fmt: skip
    return AskedModules(_modules(given["modules"], f"{PARAM}.modules", chat), float(share))


def _modules(given: Any, where: str, chat: bool) -> list[AskedModule]:
    kinds = ("messages",) if chat else ("text", "token_ids")
    if not isinstance(given, Sequence) or isinstance(given, str | bytes) or len(given) > MAX_MODULES:
        raise InputError(f"{where} must be a list of at most {MAX_MODULES} modules, each with {' or '.join(kinds)}",
                         param=where)  # fmt: skip
    found: list[AskedModule] = []
    for n, item in enumerate(given):
        param = f"{where}[{n}]"
        if not isinstance(item, Mapping) or len(item) != 1 or next(iter(item)) not in kinds:
            raise InputError(f"{param} must be an object with {' or '.join(kinds)} and nothing else", param=param)
        ((kind, value),) = item.items()
        if kind == "text" and (not isinstance(value, str) or not value):
            raise InputError(f"{param}.text must be a text that is not empty", param=param)
        if kind == "token_ids" and (not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value):
            raise InputError(f"{param}.token_ids must be a list of at least one token id", param=param)
        if kind == "messages":
            least = (found[-1].num_messages or 0) + 1 if found else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"{param}.messages must be a number of messages, {least} or more", param=param)
        found.append(AskedModule(param)._replace(**{"num_messages" if chat else kind: value}))
    return found


def padding_id(tokenizer: Tokenizer | None) -> int:
    """The token with which modules are filled up; 0 without a tokenizer."""
    if tokenizer is None:
        return 0
    for text in ("\n", " "):
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) == 1:
            return ids[0]
    return tokenizer.eos_ids[0] if tokenizer.eos_ids else 0


def joined(
    modules: Sequence[Sequence[int]], rest: Sequence[int], size: int, padding: int
) -> tuple[list[int], list[int]]:
    """(ids, where they end) of a prompt that begins with `modules`, each filled up to whole blocks of `size` tokens."""
    ids: list[int] = []
    ends = []
    for module in modules:
        ids += module
        ids += [padding] * (-len(ids) % size)
        ends.append(len(ids))
    return [*ids, *rest], ends
