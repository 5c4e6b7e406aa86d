"""Prompt compression in a server: one worker thread beside the event loop, bounded, given up with its client.

A prompt is compressed between its encoding and its admission, on the request's own clock: the time counts in the time
to the first token and towards its time limit. What admission, the context's length and the usage see is what is left.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.base.errors import RefusedError
from penstock.config import EngineConfig
from penstock.core.compression import PromptCompression
from penstock.launch.compressor import MAX_TOKENS, ChatSource, Compressed, Compressor
from penstock.server.call import Asker, Prompt
from penstock.server.context import Server
from penstock.server.distribution import TTFT_S, Distribution
from penstock.server.encoding import PromptFit, in_time
from penstock.text.encoding import Steps, one_step
from penstock.text.offload import Crowded, Dropped, Offload
from penstock.text.roles import known_roles

if TYPE_CHECKING:
    from penstock.server.protocols import Serving
    from penstock.server.turns.asking import Conversation

MAX_QUEUED_TOKENS = 1 << 20
"""Of prompts that wait to be compressed or are being compressed: some minutes of work at most."""

TO_COMPRESS = PromptFit(MAX_TOKENS, f"; at most {MAX_TOKENS} can be compressed", charged=False)
"""How long a prompt may be that is to be compressed."""


class _Left(Exception):
    """The client has gone; nobody waits for this prompt."""


class PromptCompressing:
    """server.parts["compression"]. Numbers for metrics; units: seconds and tokens."""

    def __init__(self, compressor: Compressor, *, max_queued_tokens: int = MAX_QUEUED_TOKENS) -> None:
        self.compressor = compressor
        self.seconds = Distribution(TTFT_S)
        """From being asked for to the shorter prompt, the wait for others included."""
        self.tokens: Counter[str] = Counter({"before": 0, "after": 0})
        self.prompts: Counter[str] = Counter()
        """Prompts by method."""
        self._queue = Offload(1, inline=0, max_queued=max_queued_tokens, unit="tokens", done="compressed")

    def memory_bytes(self) -> int:
        return self.compressor.num_bytes

    async def run(
        self, prompt: Prompt, options: PromptCompression, service: Serving, asker: Asker, chat: ChatSource | None = None
    ) -> Prompt:
        """Raises InputError, EngineError, RefusedError (503) if too much waits, WireError (408). Cancelling ends it at
        its next step."""
        left = threading.Event()
        began = time.monotonic()

        def check() -> None:
            if left.is_set():
                raise _Left

        steps = one_step(
            len(prompt.ids), self.compressor.compress, prompt.ids, options, chat=chat, param=prompt.param, check=check
        )
        try:
            found: Compressed = await in_time(self._in_turn(prompt, steps, service, asker), service, asker)
        finally:
            left.set()
        took_s = time.monotonic() - began
        self.seconds.observe(took_s)
        self.prompts[options.method] += 1
        self.tokens["before"] += len(prompt.ids)
        self.tokens["after"] += len(found.ids)
        return Prompt(found.ids, found.text, prompt.param, compressed_from=len(prompt.ids), compression_s=took_s)

    async def _in_turn(self, prompt: Prompt, steps: Steps[Compressed], service: Serving, asker: Asker) -> Compressed:
        tenant = asker.tenant
        try:
            return await self._queue.run(len(prompt.ids), steps, line=tenant.name, weight=tenant.weight)
        except Crowded as error:
            raise RefusedError(
                f"{error}, or leave prompt_compression out", status=503, code="overloaded", retry_after_s=1.0
            ) from None
        except Dropped:
            raise service.shutting_down() from None

    def close(self) -> None:
        self._queue.close()


def check_compression(
    server: Server, options: PromptCompression | None, *, echo: bool = False, prompt_logprobs: bool = False
) -> None:
    """Before anything is encoded. Raises InputError."""
    if options is not None:
        _part(server).compressor.check(options, echo=echo, prompt_logprobs=prompt_logprobs)


async def compress_prompt(server: Server, prompt: Prompt, options: PromptCompression, asker: Asker) -> Prompt:
    """As `PromptCompressing.run`."""
    return await _part(server).run(prompt, options, server.service, asker)


async def compress_chat(
    server: Server, prompt: Prompt, options: PromptCompression, asked: Conversation,
    tools: Sequence[Mapping[str, Any]] | None, asker: Asker,
) -> Prompt:  # fmt: skip
    """The same for the prompt that `asked` has become. `tools`: those it was rendered with."""
    service = server.service
    template = service.template(asked.chat_template, tools)
    rendered = {
        "tools": tools, "kwargs": asked.chat_template_kwargs, "add_generation_prompt": asked.add_generation_prompt,
        "continue_final_message": asked.continue_final_message,
    }  # fmt: skip
    chat = ChatSource.of(service.need_tokenizer(), template, known_roles(template, asked.messages), rendered)
    return await _part(server).run(prompt, options, service, asker, chat)


def _part(server: Server) -> PromptCompressing:
    part: PromptCompressing = server.parts["compression"]
    return part


def install(server: Server, config: EngineConfig) -> None:
    """Raises ConfigError for a compressor that is named and cannot be used."""
    part = PromptCompressing(Compressor(config, server.service.tokenizer))
    server.parts["compression"] = part
    server.closers.append(part.close)
