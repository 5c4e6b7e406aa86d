"""Service: the one way from a checked wire request to a stream of the engine, shared by every front end.

encode (off the loop if long) -> validate -> admit -> submit -> deltas. A front end only translates shapes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.base.errors import EngineError, InputError, RefusedError
from penstock.base.hashing import digest
from penstock.base.rng import derive_seed
from penstock.core.adapter import namespace_of
from penstock.core.request import Control, Request
from penstock.core.sampling import BeamSearchParams, SamplingParams
from penstock.launch.lengths import question_params
from penstock.server.call import ANYONE, Asker, Call, Prompt, Tenant
from penstock.server.encoding import PromptFit, TextEncoding
from penstock.server.pins import PinLedger
from penstock.server.protocols import Admission
from penstock.server.tool_times import ToolTimes, ToolUse
from penstock.text.pooling import NO_TEXT
from penstock.text.roles import known_roles
from penstock.text.template import choose_template
from penstock.text.validate import (
    bad_sequences,
    build_pooling_request,
    build_request,
    validate_reference,
    validate_sampling,
)

if TYPE_CHECKING:
    from penstock.base.clock import Clock
    from penstock.config.server import ServerConfig
    from penstock.engine.frontend import EngineClient
    from penstock.engine.stream import Stream
    from penstock.lengths.front import ExpectedLengths
    from penstock.text.limits import Limits
    from penstock.text.tokenizer import Tokenizer

MAX_SALT_BYTES = 256


class Open:
    """Admits everything. For tests."""

    def admit(self, call: Call, request: Request) -> Callable[[], None]:
        return lambda: None

    def follow(self, request: Request, stream: Stream) -> None:
        pass

    def hold(self, tenant: Tenant) -> Callable[[], None]:
        return lambda: None

    def tokens_left(self, tenant: Tenant) -> int | None:
        return None

    def too_costly(self, tenant: Tenant, num_tokens: int) -> RefusedError:
        raise AssertionError("there is no limit")


class Service:
    """`limits` are those of the running engine. `prepare` hooks may replace a Call's params before they are checked."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer | None,
        chat_template: str | None,
        limits: Limits,
        config: ServerConfig,
        clock: Clock,
        *,
        admission: Admission | None = None,
        named_templates: Mapping[str, str] | None = None,
        no_tokenizer: str = "",
        seed: int = 0,
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.named_templates = dict(named_templates or {})
        self.limits = limits
        self.config = config
        self.clock = clock
        self.admission: Admission = admission or Open()
        self.encoding = TextEncoding(self)
        self.prepare: list[Callable[[Call], Any]] = []
        """Each is awaited with the Call before it is validated: compiling grammars, for example. May raise."""
        self.draining = False
        """Set when the server shuts down: nothing new is taken on."""
        self._no_tokenizer = no_tokenizer
        self._seed = seed
        self._counter = 0
        self._pins: PinLedger | None = None
        self.tool_times = ToolTimes()
        self.lengths: ExpectedLengths | None = None
        """Who says how long an output will be; None: nobody."""

    # -- prompts -------------------------------------------------------------------------------------------------

    def need_tokenizer(self) -> Tokenizer:
        """Raises InputError if the server runs without one."""
        if self.tokenizer is None:
            raise InputError(
                f"this server has no tokenizer ({self._no_tokenizer}); send token ids as the prompt", param="prompt"
            )
        return self.tokenizer

    async def encode(
        self, text: str, *, param: str = "prompt", add_special_tokens: bool = True, fit: PromptFit | None = None,
        asker: Asker,
    ) -> Prompt:  # fmt: skip
        """A text as a prompt. Raises: as `encode_all`."""
        return (await self.encode_all([text], [param], add_special_tokens=add_special_tokens, fit=fit, asker=asker))[0]

    async def encode_all(
        self, texts: Sequence[str], params: Sequence[str], *, add_special_tokens: bool = True,
        fit: PromptFit | None = None, asker: Asker,
    ) -> list[Prompt]:  # fmt: skip
        """Texts as prompts; `params` is how errors call them, `fit` by default what can be generated from.

        Raises InputError for an empty one or one that cannot fit, RefusedError (429, 503) if it is too much for now,
        WireError (408) if it takes too long.
        """
        for text, param in zip(texts, params, strict=True):
            if not text:
                raise InputError(f"{param} must not be empty", param=param)
        found = await self.encoding.texts(
            self.need_tokenizer(), texts, params, fit or PromptFit.to_generate(self.limits), asker,
            add_special_tokens=add_special_tokens,
        )  # fmt: skip
        return [Prompt(ids, text, param) for ids, text, param in zip(found, texts, params, strict=True)]

    async def encode_reference(self, text: str, *, param: str = "prediction", asker: Asker) -> list[int]:
        """Ids of a text that an output is likely to repeat. Raises: as `encode_all`, for one too long for an output."""
        fit = PromptFit.to_predict(self.limits)
        if not text:
            return []
        found = await self.encode(text, param=param, add_special_tokens=False, fit=fit, asker=asker)
        return validate_reference(found.ids, self.limits, param=param)

    def template(self, requested: str | None, tools: object) -> str:
        """For a conversation with `tools`, or without. Raises InputError as `choose_template`, and for an encoder."""
        if not self.limits.generates:
            raise InputError(NO_TEXT, param="model")
        return choose_template(
            self.chat_template, requested, trusted=self.config.trust_request_chat_template,
            named=self.named_templates, tools=bool(tools),
        )  # fmt: skip

    @property
    def tool_template(self) -> str:
        """The template that tells the model of tools; "" if it has none."""
        return self.named_templates.get("tool_use", self.chat_template or "")

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        param: str = "messages",
        fit: PromptFit | None = None,
        asker: Asker,
    ) -> Prompt:
        """A conversation as a prompt. Raises: as `encode_all`, also for a template in a request that is not allowed."""
        if len(messages) == 0:
            raise InputError(f"{param} must not be empty", param=param)
        tokenizer = self.need_tokenizer()
        template = self.template(chat_template, tools)
        messages = known_roles(template, messages, param)
        options = {
            "tools": tools, "kwargs": chat_template_kwargs, "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }  # fmt: skip
        fit = fit or PromptFit.to_generate(self.limits)
        ids = await self.encoding.chat(tokenizer, template, messages, options, fit, asker, param)
        return Prompt(ids, None, param)

    # -- requests ------------------------------------------------------------------------------------------------

    async def submit(self, call: Call) -> Stream:
        """Validate, admit and hand in. Raises InputError, RefusedError, EngineError. The caller owns the stream."""
        if self.draining:
            raise self.shutting_down()
        for hook in self.prepare:
            await hook(call)
        await self._encode_bad_words(call)
        request = self._request(call)
        if call.offline_s is not None:
            request = msgspec.structs.replace(request, offline_s=call.offline_s)
        if call.tenant is not ANYONE:
            keeper = f"kv_group:{call.tenant.kv_group}" if shares(call) else ""
            request = msgspec.structs.replace(
                request, tenant=call.tenant.name, weight=call.tenant.weight, kv_share=call.tenant.kv_share,
                keeper=keeper,
            )  # fmt: skip
        self.client.check(request)  # before admission: there is no use in coming again later
        release = self.admission.admit(call, request)
        try:
            self._count_pins(request)
            if self.lengths is not None:
                request = await self._expecting(call, request, self.lengths)
            params = call.params if isinstance(call.params, SamplingParams) and call.pooling is None else None
            stream = self.client.submit(request, params, call.prompt.text, session=call.session)
        except BaseException:
            release()
            raise
        stream.call, stream.forgets = call, True
        self.admission.follow(request, stream)
        stream.on_end(release)
        left_s = self._left_s(call)
        if left_s is not None:
            timer = asyncio.get_running_loop().call_later(left_s, stream.abort, "timeout")
            stream.on_end(timer.cancel)
        return stream

    def _left_s(self, call: Call) -> float | None:
        """Seconds until it is worth nothing; None: there is no limit."""
        limit_s = call.deadline_s if call.deadline_s is not None else self.config.request_timeout
        return None if limit_s is None else max(0.0, call.arrival_s + limit_s - self.clock.now())

    async def _expecting(self, call: Call, request: Request, lengths: ExpectedLengths) -> Request:
        """With its expected length, for which the model may be asked first. Nothing that goes wrong there fails it."""
        question, answer = lengths.question(request), list[int]()
        if question is not None:
            stream = self.client.submit(question, question_params(question))
            stream.call = dataclasses.replace(call, request_id=question.request_id, endpoint="length")
            with contextlib.suppress(TimeoutError, EngineError):
                async with asyncio.timeout(self._left_s(call)):
                    answer = (await stream.result()).outputs[0].token_ids
        return lengths.expect(request, answer)

    def _count_pins(self, request: Request) -> None:
        """Raises InputError for more than the tenant's part."""
        for hint in request.hints:
            if hint.action == "pin":
                info, now_s = self.client.info, self.clock.now()
                if self._pins is None:
                    size = 1 if info is None else info.block_size
                    self._pins = PinLedger(0 if info is None else info.pin_blocks, size)
                ids = request.prompt_token_ids[: hint.num_tokens if hint.num_tokens >= 0 else None]
                self._pins.pin(request.tenant, request.kv_share, request.namespace, ids, now_s + hint.ttl_s, now_s)

    async def _encode_bad_words(self, call: Call) -> None:
        """Off the loop where it takes long; the validator then finds them. Raises: as `encode_all`."""
        params = call.params
        if not isinstance(params, SamplingParams) or not params.bad_words:
            return
        validate_sampling(params, limits=self.limits)
        words, asker = tuple(params.bad_words), Asker(call.tenant, call.arrival_s, call.deadline_s)
        size = 2 * sum(map(len, words))
        await self.encoding.work(size, asker, bad_sequences, words, self.tokenizer, self.limits.vocab_size)

    def shutting_down(self) -> RefusedError:
        return RefusedError(
            "the server is shutting down", status=503, code="shutting_down",
            retry_after_s=self.config.shutdown_timeout or 1.0,
        )  # fmt: skip

    def drain(self) -> None:
        """Nothing new is taken on from now, and texts that are being encoded are given up."""
        self.draining = True
        self.encoding.drop()

    def _request(self, call: Call) -> Request:
        number = self._counter
        self._counter += 1
        if call.pooling is not None:
            return build_pooling_request(
                call.request_id, call.prompt.ids, call.pooling, limits=self.limits, priority=call.priority,
                namespace=self._namespace(call), arrival_s=call.arrival_s, param=call.prompt.param,
                adapter=call.adapter,
            )  # fmt: skip
        limits = self.limits
        params = _with_length(call, limits)
        if call.stream:  # nothing is kept but what its reader has not read, which has a bound of its own
            limits = dataclasses.replace(limits, max_logprob_entries=None)
        return build_request(
            call.request_id,
            call.prompt.ids,
            params,
            limits=limits,
            tokenizer=self.tokenizer,
            seed=derive_seed(self._seed, number),
            priority=call.priority,
            namespace=self._namespace(call),
            arrival_s=call.arrival_s,
            param=call.prompt.param,
            reference=call.reference,
            slo_tpot_s=call.slo_tpot_s,
            slo_ttft_s=call.slo_ttft_s,
            reader=call.reader,
            hints=[hint for hint in call.hints if hint.action not in ("share", "pause")],
            modules=call.prompt.modules,
            recompute=call.prompt.recompute,
            adapter=call.adapter,
        )

    def paused(self, call: Call, token_ids: list[int], uses: Sequence[ToolUse]) -> None:
        """An answer of `call` has ended in tool calls; `token_ids`: the conversation with it."""
        now_s, tenant = self.clock.now(), call.tenant.name
        asked = next((hint.ttl_s for hint in call.hints if hint.action == "pause"), None)
        if asked is None:
            return
        expected_s = asked or self.tool_times.expected_s(tenant, uses)
        self.tool_times.called(tenant, uses, now_s)
        if expected_s is not None:
            namespace = namespace_of(self._namespace(call), call.adapter)
            self.client.control(Control(kind="pause", token_ids=token_ids, namespace=namespace, expected_s=expected_s))

    @staticmethod
    def _namespace(call: Call) -> bytes:
        """Blocks are shared only within one tenant and one salt."""
        salt = call.cache_salt
        fits = salt is None or (0 < len(salt.encode("utf-8", "replace")) <= MAX_SALT_BYTES and salt.isprintable())
        if not fits:
            raise InputError(f"cache_salt must be 1 to {MAX_SALT_BYTES} bytes of printable text", param="cache_salt")
        if shares(call):
            return digest(b"kv_group", call.tenant.kv_group.encode(), b"salt", (salt or "").encode())
        if salt is None and not call.tenant.secret:
            return b""
        return digest(b"tenant", call.tenant.secret, b"salt", (salt or "").encode())


def shares(call: Call) -> bool:
    """Whether its blocks are those of its group. Raises InputError: its key belongs to none."""
    if not any(hint.action == "share" for hint in call.hints):
        return False
    if not call.tenant.kv_group:
        raise InputError(
            "kv_hints: this key shares blocks with no other: the server's keys file names no kv_group for it",
            param="kv_hints",
        )
    return True


def _with_length(call: Call, limits: Limits) -> SamplingParams | BeamSearchParams:
    """The parameters, with the default length where they have none: never more than is left, nor less than asked."""
    params, most = call.params, call.default_max_tokens
    if not isinstance(params, SamplingParams) or params.max_tokens is not None or most is None:
        return params
    left = limits.beside(call.adapter).context[0] - len(call.prompt.ids)
    if left < max(1, params.min_tokens):
        return params  # the validator says what is too much
    return msgspec.structs.replace(params, max_tokens=min(left, max(most, params.min_tokens)))
