"""Prompts that ask a model to fill in what is between two texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.base.errors import InputError
from penstock.server.call import Asker, Prompt
from penstock.server.encoding import PromptFit
from penstock.text.infill import FillMarks, fill_marks, fill_steps

if TYPE_CHECKING:
    from penstock.server.context import Server


def marks_of(server: Server) -> FillMarks | None:
    """How the model that is served was taught to fill in; None if its vocabulary has no marks for it."""
    if "fill_marks" not in server.parts:
        tokenizer = server.service.tokenizer
        server.parts["fill_marks"] = None if tokenizer is None else fill_marks(tokenizer)
    found: FillMarks | None = server.parts["fill_marks"]
    return found


async def fill_prompt(
    server: Server, prefix: str, suffix: str, asker: Asker, *, files: Sequence[tuple[str, str]] = (), begun: str = "",
    param: str = "input_prefix",
) -> tuple[Prompt, list[int]]:  # fmt: skip
    """The prompt, and ids that end a filling. Raises InputError where the model cannot fill in, and as
    `Service.encode_all`; errors call the whole by `param`."""
    tokenizer, marks = server.service.need_tokenizer(), marks_of(server)
    if marks is None:
        raise InputError(
            f"{server.model_name} cannot fill in: its vocabulary has no tokens for prefix, suffix and middle; serve a "
            "model of code that has them (Qwen2.5-Coder, StarCoder, CodeGemma, DeepSeek-Coder), or ask it to write on",
            code="no_infill", param="suffix" if param == "prompt" else param,
        )  # fmt: skip
    fit = PromptFit.to_generate(server.service.limits)
    size = len(prefix) + len(suffix) + len(begun) + sum(len(name) + len(text) for name, text in files)
    ids = await server.service.encoding.run(
        size, lambda in_all: fill_steps(tokenizer, marks, prefix, suffix, files, begun, min(fit.most, in_all)), fit,
        asker, param,
    )  # fmt: skip
    return Prompt(ids, None, param), [i for i in marks.ends if i not in server.service.limits.eos_token_ids]
