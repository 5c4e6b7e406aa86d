"""Who asks, when and for what, in the words of every front end; and a call made of it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request

from penstock.base.errors import InputError
from penstock.core.compression import PromptCompression
from penstock.core.kv_hints import KVHint
from penstock.core.qoe import Expected, expected_of
from penstock.core.sampling import SamplingParams
from penstock.server.admission.choosing import unknown_model
from penstock.server.call import ANYONE, CLASSES, Asker, Call, Prompt, Tenant
from penstock.server.context import Server
from penstock.server.transport.inner import OFFLINE_S
from penstock.server.turns.defaults import sampling_defaults
from penstock.server.turns.hints import Bound, of_prompt
from penstock.text.modules import NO_ASKED, AskedModules

MAX_PRIORITY = 2**31
MAX_TIMEOUT_S = 7 * 86400
MAX_TPOT_SLO_MS, MAX_TTFT_SLO_MS = 60_000, 86_400_000
_SLO_HEADERS = {"ttft_slo_ms": "x-ttft-slo-ms", "tpot_slo_ms": "x-tpot-slo-ms"}
TIERS = ("auto", "default", "flex", "priority", "scale")
"""OpenAI's service tiers. flex is offline work; all others are served alike."""
FLEX_S = 600.0
"""Seconds from its arrival after which a request of the tier flex is served as the others are."""


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who asks, and when (seconds). `request_id` is the client's own word for it, or ours; it may repeat."""

    server: Server
    request_id: str = ""
    tenant: Tenant = ANYONE
    arrival_s: float = 0.0
    offline_s: float | None = None
    """For so long its requests are offline work, whatever tier they name; None: as they say."""
    tier: str | None = None
    """The header X-Service-Tier; the field `service_tier` goes before it."""
    session: str = ""
    """The header X-Session-Id: which requests one of several engines gets, by `--route-policy session`."""
    timeout_s: float | None = None
    """The header X-Request-Timeout, in seconds; the field `timeout` goes before it."""
    slo_ms: Mapping[str, float] = field(default_factory=dict)
    """The headers X-TTFT-SLO-Ms and X-TPOT-SLO-Ms, by the fields that go before them."""
    tells_times: bool = False
    """The header X-Request-Times: the usage then says where the time went."""
    trace: Mapping[str, str] = field(default_factory=dict)
    """The headers that say which trace it belongs to (W3C Trace Context)."""


def caller_of(request: Request) -> Caller:
    server: Server = request.app.state.server
    state = request.scope["state"]
    return Caller(
        server=server, request_id=state["request_id"], tenant=state["tenant"],
        arrival_s=state.get("received_s") or server.service.clock.now(), timeout_s=_timeout_s(request),
        offline_s=request.scope.get(OFFLINE_S), tier=request.headers.get("x-service-tier"), slo_ms=_slo_ms(request),
        session=request.headers.get("x-session-id", ""),
        tells_times=request.headers.get("x-request-times", "0") != "0",
        trace={name: request.headers[name] for name in ("traceparent", "tracestate") if name in request.headers},
    )  # fmt: skip


def asker_of(caller: Caller, timeout_s: float | None = None) -> Asker:
    """`timeout_s`: the request's own. Raises InputError."""
    limit_s = caller.timeout_s if timeout_s is None else timeout_s
    if limit_s is not None and not 0 < limit_s <= MAX_TIMEOUT_S:
        raise InputError(
            f"timeout must be above 0 and at most {MAX_TIMEOUT_S} seconds, not {limit_s:g}", param="timeout"
        )
    return Asker(caller.tenant, caller.arrival_s, limit_s)


def _timeout_s(request: Request) -> float | None:
    given = request.headers.get("x-request-timeout")
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise InputError("X-Request-Timeout must be a number of seconds above 0", param="X-Request-Timeout")
    return seconds


def _slo_ms(request: Request) -> dict[str, float]:
    found = {}
    for field_name, header in _SLO_HEADERS.items():
        given = request.headers.get(header)
        if given is None:
            continue
        try:
            found[field_name] = float(given)
        except ValueError:
            raise InputError(f"{header} must be a number of milliseconds above 0", param=header) from None
    return found


def _slo_s(
    caller: Caller, given_ms: float | None, name: str, most_ms: float, otherwise_s: float | None
) -> float | None:
    """Seconds of a promise. Raises InputError."""
    value_ms, param = given_ms, name
    if value_ms is None and name in caller.slo_ms:
        value_ms, param = caller.slo_ms[name], _SLO_HEADERS[name]
    if value_ms is None:
        return otherwise_s
    if not 0 < value_ms <= most_ms:
        raise InputError(f"{param} must be above 0 and at most {most_ms:,} milliseconds, not {value_ms:g}", param=param)
    return value_ms / 1000


@dataclass(kw_only=True)
class Options:
    """What a request says besides its prompt and sampling parameters. `timeout_s`: seconds from arrival; `tpot_slo_ms`:
    milliseconds that a token after the first should take on average; `ttft_slo_ms`: in which the first one should be
    there, from the request's arrival. `tier`: one of TIERS; `background`: nobody waits for it, so it is of the tier
    flex if it names none. `default_max_tokens`: beats the model's own. `cut_max_tokens`: what is more than the prompt
    leaves is a bound that is never reached, and no error."""

    stream: bool = False
    priority: int | None = None
    tier: str | None = None
    background: bool = False
    cache_salt: str | None = None
    timeout_s: float | None = None
    tpot_slo_ms: float | None = None
    ttft_slo_ms: float | None = None
    reader: tuple[float | None, float | None] = (None, None)
    """`expected_ttft_s` and `expected_tds`: what its reader expects (`core.qoe`)."""
    default_max_tokens: int | None = None
    cut_max_tokens: bool = False
    hints: Sequence[KVHint] = ()
    model: str | None = None
    """As the request names it: perhaps an adapter."""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Conversation:
    """A chat request of any front end, in OpenAI's shapes.

    Attributes:
        names: our field -> the client's, for errors ("max_tokens" -> "max_output_tokens", ...).
        param: how errors call the messages.
        prediction: text that the answer is likely to repeat.
        compression: how the prompt is to be made shorter.
        grammars: in Lark, by the name of a tool: what it takes instead of JSON. It has to be named, then.
        bounds: hints on the blocks of the prompt.
        truncate: the prompt's last tokens that are kept, at most; -1: as many as leave room for the answer.
    """

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams
    options: Options = field(default_factory=Options)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    param: str = "messages"
    prediction: str = ""
    compression: PromptCompression | None = None
    grammars: Mapping[str, str] = field(default_factory=dict)
    bounds: Sequence[Bound] = ()
    modules: AskedModules = NO_ASKED
    truncate: int | None = None


def make_call(
    caller: Caller, prompt: Prompt, params: SamplingParams, options: Options, endpoint: str, request_id: str
) -> Call:
    """Raises InputError."""
    priority = options.priority or 0
    if caller.tenant.service_class:  # nobody goes ahead of its class
        best = CLASSES[caller.tenant.service_class]
        priority = best if options.priority is None else max(best, priority)
    offline_s = _offline_s(caller, options)
    asker = asker_of(caller, options.timeout_s)
    if abs(priority) > MAX_PRIORITY:
        raise InputError(
            f"priority must be from {-MAX_PRIORITY} to {MAX_PRIORITY}, not {str(priority)[:40]}", param="priority"
        )
    config = caller.server.config
    promised = priority <= 0  # the server promises nothing to lower classes
    slo_ttft_s = _slo_s(
        caller, options.ttft_slo_ms, "ttft_slo_ms", MAX_TTFT_SLO_MS, config.ttft_slo if promised else None
    )
    slo_tpot_s = _slo_s(
        caller, options.tpot_slo_ms, "tpot_slo_ms", MAX_TPOT_SLO_MS, config.tpot_slo if promised else None
    )
    if options.cut_max_tokens and params.max_tokens is not None:
        left = max(1, caller.server.service.limits.context[0] - len(prompt.ids))
        params = msgspec.structs.replace(params, max_tokens=min(left, params.max_tokens))
    reader = _reader(caller.server, options)
    adapter = None
    if (adapters := caller.server.adapters) is not None:
        check_model(caller.server, options.model)  # it may have been unloaded meanwhile
        adapter = adapters.of(options.model)
    return Call(
        adapter=adapter,
        adapter_name=options.model if adapter is not None else None,
        prompt=prompt,
        params=params,
        request_id=request_id,
        endpoint=endpoint,
        tenant=caller.tenant,
        priority=priority,
        offline_s=offline_s,
        cache_salt=options.cache_salt,
        deadline_s=asker.limit_s,
        arrival_s=caller.arrival_s,
        slo_tpot_s=slo_tpot_s,
        slo_ttft_s=slo_ttft_s,
        reader=reader,
        default_max_tokens=options.default_max_tokens or sampling_defaults(caller.server).get("max_tokens"),
        stream=options.stream,
        session=caller.session,
        tells_times=caller.tells_times,
        hints=of_prompt(options.hints, prompt),
        facts={
            "http_request_id": caller.request_id, **caller.trace, **compression_facts(prompt), **options.facts,
            **({} if offline_s is None else {"offline": True}),
        },
    )  # fmt: skip


def _offline_s(caller: Caller, options: Options) -> float | None:
    """For how long a request is offline work; None: it is not. Raises InputError."""
    name, tier = ("X-Service-Tier", caller.tier) if options.tier is None else ("service_tier", options.tier)
    if tier is not None and tier not in TIERS:
        raise InputError(f"{name} must be one of {', '.join(TIERS)}, not {tier[:40]!r}", param=name)
    if caller.offline_s is not None:
        return caller.offline_s
    nobody_waits = options.background or caller.tenant.service_class == "batch"
    return FLEX_S if tier == "flex" or (nobody_waits and tier in (None, "auto")) else None


def _reader(server: Server, options: Options) -> Expected | None:
    """What the reader of a stream expects, by the request or by default. Raises InputError."""
    config = server.config
    reader = expected_of(*options.reader, Expected(config.qoe_ttft_s, config.qoe_tds)).check()
    return reader if options.stream else None


def compression_facts(prompt: Prompt) -> dict[str, float]:
    """For the log."""
    if not prompt.compressed_from:
        return {}
    return {"compressed_from": prompt.compressed_from, "compression_ms": round(prompt.compression_s * 1000, 3)}


def new_id(prefix: str) -> str:
    """Unique, whatever clients send as X-Request-Id."""
    return prefix + secrets.token_hex(12)


def check_stream_options(stream: bool | None, options: object) -> None:
    """Raises InputError."""
    if options is not None and not stream:
        raise InputError("stream_options belong to a stream; set stream to true or leave them out",
                         param="stream_options")  # fmt: skip


def check_model(server: Server, name: str | None, *, exact: bool = False) -> str:
    """The name to answer under. Raises RefusedError (404) for a model that is not served here.

    `exact`: also where any name is answered (`--any-model-name`).
    """
    if not name:
        return server.model_name
    if name == server.model_name or name in server.aliases:
        return name
    adapters = () if server.adapters is None else tuple(server.adapters.names)
    if name in adapters:
        return name
    if server.config.any_model_name and not exact:
        return server.model_name
    raise unknown_model(name, [name for one in server.each for name in one.names])


def means_another(server: Server, name: str | None, truncate: int | None) -> bool:
    """Whether a request is for another model, as `--any-model-name` allows: then its `max_tokens` is that model's, and
    is cut to what this one has room for. Not where a prompt is cut to leave room for it."""
    ours = {server.model_name, *server.aliases, *(() if server.adapters is None else server.adapters.names)}
    return bool(name) and name not in ours and truncate is None
