"""Texts of requests to ids: bounded, in turn, on the request's clock, before anything is admitted.

Short texts are encoded at once. Longer ones wait in the line of their tenant (`text.offload`), count as one of its
requests meanwhile, and are refused as soon as it is certain that they do not fit the context, or what their tenant may
use now. A client that leaves, a time limit and the server's end stop the work at its next step.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.base.errors import InputError, RefusedError
from penstock.server.call import Asker
from penstock.server.distribution import TTFT_S, Distribution
from penstock.server.errors import WireError
from penstock.text.encoding import TOO_LONG, Steps, TooManyTokens, encode_all_steps, one_step
from penstock.text.offload import INLINE_CHARS, Crowded, Dropped, Offload
from penstock.text.template import encode_chat_steps

if TYPE_CHECKING:
    from penstock.server.protocols import Serving
    from penstock.text.limits import Limits
    from penstock.text.tokenizer import Tokenizer

T = TypeVar("T")

MAX_COUNTED_TOKENS = 1 << 20
"""Where tokens are only counted or shown, this many are possible, or what the context holds."""
MAX_REQUEST_TOKENS = 1 << 22
"""Of all prompts of a request together."""
_REASONS = ("length", "tenant_tokens", "tenant_concurrency", "queue", "deadline", "shutdown")
MAX_NODES = 100_000
"""Values of a conversation that are looked at to tell its size; more make it large, whatever they are."""


@dataclass(frozen=True)
class PromptFit:
    """How many tokens a text may have. `why` ends the sentence "prompt has 5 tokens"; `code` is the error's.

    `charged`: they count in the tokens that a tenant may use in a minute.
    """

    most: int
    why: str
    code: str | None = TOO_LONG
    charged: bool = True

    def refusal(self, param: str, error: TooManyTokens) -> InputError:
        number = f"{'' if error.exact else 'at least '}{error.at_least}"
        return InputError(f"{param} has {number} tokens{self.why}", param=param, code=self.code)

    @classmethod
    def to_generate(cls, limits: Limits) -> PromptFit:
        room, what = limits.context
        return cls(room - 1, f", but {what} {room} tokens, of which at least 1 must be left to generate: at most "
                   f"{room - 1} are possible")  # fmt: skip

    @classmethod
    def to_pool(cls, limits: Limits) -> PromptFit:
        room, what = limits.context
        return cls(room, f", but {what} {room} tokens")

    @classmethod
    def to_predict(cls, limits: Limits) -> PromptFit:
        most = limits.max_model_len
        return cls(most, f"; the context holds {most}, more are not possible", None, charged=False)

    @classmethod
    def to_count(cls, limits: Limits) -> PromptFit:
        most = max(MAX_COUNTED_TOKENS, limits.context[0])
        return cls(most, f"; at most {most} are possible", charged=False)


class TextEncoding:
    """The one way from texts to ids in a server, and what metrics tell of it.

    Attributes:
        queue: the work that waits or is being done.
        refused: texts refused before they were encoded, by reason: length, tenant_tokens, tenant_concurrency, queue,
            deadline, shutdown.
        waited: seconds that texts have waited for their first step.
    """

    def __init__(self, service: Serving) -> None:
        self._service = service
        self.refused: Counter[str] = Counter()
        self.waited = Distribution(TTFT_S)
        self.queue = Offload(on_begun=self.waited.observe)

    async def texts(
        self, tokenizer: Tokenizer, texts: Sequence[str], params: Sequence[str], fit: PromptFit, asker: Asker,
        *, add_special_tokens: bool = True,
    ) -> list[list[int]]:  # fmt: skip
        """Ids of each text; errors call it by its name in `params`. Raises: as `work`."""

        def steps(in_all: int) -> Steps[list[list[int]]]:
            return encode_all_steps(tokenizer, texts, params, fit.most, in_all, add_special_tokens)

        return await self.run(sum(map(len, texts)), steps, fit, asker, params[0])

    async def chat(
        self, tokenizer: Tokenizer, template: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any],
        fit: PromptFit, asker: Asker, param: str,
    ) -> list[int]:  # fmt: skip
        """Ids of a conversation. `options`: as for `text.template.encode_chat`. Raises: as `work`."""
        size = size_of((messages, options.get("tools"), options.get("kwargs")))

        def steps(in_all: int) -> Steps[list[int]]:
            most = min(fit.most, in_all)
            return encode_chat_steps(tokenizer, template, messages, **options, most=most, size=size)

        return await self.run(size, steps, fit, asker, param)

    async def work(self, size: int, asker: Asker, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """`work(*args, **kwargs)`, which takes time in proportion to `size` (in characters of text).

        Raises: what it raises, RefusedError (429, 503), WireError (408).
        """
        return await self.run(size, lambda _: one_step(size, work, *args, **kwargs), _ANY, asker, "")

    def refusals(self) -> dict[str, int]:
        """For metrics: every reason, also those that have not occurred."""
        return dict.fromkeys(_REASONS, 0) | dict(self.refused)

    def drop(self) -> None:
        """The server ends: what waits is refused, and nothing more is taken."""
        self.queue.drop()

    async def run(self, size: int, steps: Callable[[int], Steps[T]], fit: PromptFit, asker: Asker, param: str) -> T:
        admission = self._service.admission
        try:
            if size <= INLINE_CHARS:
                return await self.queue.run(size, steps(MAX_REQUEST_TOKENS))
            if self._service.draining:
                raise Dropped
            release = admission.hold(asker.tenant)
        except TooManyTokens as error:
            raise self._too_many(error, fit, asker, param) from None
        except Dropped:
            raise self._ending() from None
        except RefusedError:
            self.refused["tenant_concurrency"] += 1
            raise
        try:
            left = admission.tokens_left(asker.tenant) if fit.charged else None
            in_all = MAX_REQUEST_TOKENS if left is None else min(left, MAX_REQUEST_TOKENS)
            return await self._in_time(self._in_turn(size, steps(in_all), asker), asker)
        except TooManyTokens as error:
            raise self._too_many(error, fit, asker, param) from None
        except InputError as error:
            raise InputError(str(error), param=error.param or param or None, code=error.code) from None
        finally:
            release()

    async def _in_turn(self, size: int, steps: Steps[T], asker: Asker) -> T:
        try:
            return await self.queue.run(size, steps, line=asker.tenant.name, weight=asker.tenant.weight)
        except Dropped:
            raise self._ending() from None
        except Crowded as error:
            self.refused["queue"] += 1
            raise RefusedError(str(error), status=503, code="overloaded", retry_after_s=1.0) from None

    async def _in_time(self, work: Awaitable[T], asker: Asker) -> T:
        return await in_time(work, self._service, asker, on_late=lambda: self.refused.update(deadline=1))

    def _too_many(self, error: TooManyTokens, fit: PromptFit, asker: Asker, param: str) -> Exception:
        name = error.param or param
        if error.at_least > fit.most:
            self.refused["length"] += 1
            return fit.refusal(name, error)
        if error.before + error.at_least > MAX_REQUEST_TOKENS:
            self.refused["length"] += 1
            return InputError(
                f"with {name} the request has at least {error.before + error.at_least} tokens; at most "
                f"{MAX_REQUEST_TOKENS} are possible", param=name, code=TOO_LONG,
            )  # fmt: skip
        self.refused["tenant_tokens"] += 1
        return self._service.admission.too_costly(asker.tenant, error.before + error.at_least)

    def _ending(self) -> RefusedError:
        self.refused["shutdown"] += 1
        return self._service.shutting_down()


_ANY = PromptFit(MAX_REQUEST_TOKENS, "", charged=False)


async def in_time(
    work: Awaitable[T], service: Serving, asker: Asker, on_late: Callable[[], object] = lambda: None
) -> T:
    """What `work` returns, if that comes within the request's time limit; it is cancelled then. Raises WireError (408),
    and what `work` raises."""
    limit_s = asker.limit_s if asker.limit_s is not None else service.config.request_timeout
    if limit_s is None:
        return await work
    left_s = asker.arrival_s + limit_s - service.clock.now()
    try:
        async with asyncio.timeout(left_s):
            return await work
    except TimeoutError:
        on_late()
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0,
                 "prompt_tokens_details": {"cached_tokens": 0}}  # fmt: skip
        raise WireError(
            408, f"the request has to end within {limit_s:g} s, and its prompt was not ready by then", code="timeout",
            extra={"usage": usage},
        ) from None  # fmt: skip


def size_of(value: Any) -> int:
    """Characters of a conversation: of every string, keys included, and one for each other value.

    More than `MAX_NODES` values count as large and are not looked at.
    """
    size, nodes, todo = 0, 0, [value]
    while todo:
        item = todo.pop()
        nodes += 1
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, (dict, Mapping)):  # the first alone is quick
            for key in item:
                if isinstance(key, str):
                    size += len(key)
            todo += item.values()
        elif isinstance(item, (list, Iterable)) and not isinstance(item, bytes):
            todo += item
        if nodes > MAX_NODES or len(todo) > MAX_NODES:
            return max(size + nodes, INLINE_CHARS + 1)
    return size + nodes
