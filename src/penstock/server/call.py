"""Who asks for what: what every room of the server speaks of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.core.adapter import AdapterRef
    from penstock.core.kv_hints import KVHint
    from penstock.core.qoe import Expected
    from penstock.core.sampling import BeamSearchParams, SamplingParams
    from penstock.text.grammar.lead import Lead


CLASSES = {"interactive": -1, "standard": 0, "batch": 1}
"""Classes of service, and the priority that requests of such a key have at best (smaller goes first)."""


@dataclass(frozen=True)
class Tenant:
    """Whose key it is. `name` is safe to show in logs and metrics; `secret` (never shown) keeps tenants' caches apart.

    `weight`: share of the engine among those who wait. `admin`: may use the admin routes. `tokens_per_minute`: prompt
    and generated tokens; `max_concurrent`: requests at once; None: no limit of its own. `kv_share`: its part of each
    tier of KV, and of what running requests hold while others wait, 0 to 1; 0: tenants have no parts. `kv_group`: with
    whose keys it may share blocks; "": with nobody's. `service_class`: one of `CLASSES`, or "".
    """

    name: str = "default"
    secret: bytes = b""
    weight: float = 1.0
    admin: bool = False
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    kv_share: float = 0.0
    kv_group: str = ""
    service_class: str = ""
    by_model: tuple[tuple[str, int | None, int | None], ...] = ()
    """(model, tokens_per_minute, max_concurrent) where a model has others than these; each model counts by itself."""


ANYONE = Tenant()
"""Everybody, while the server has no keys."""


@dataclass(frozen=True)
class Asker:
    """For whom a text is encoded, and until when: `limit_s` seconds from `arrival_s` (monotonic); None: the server's
    own limit."""

    tenant: Tenant = ANYONE
    arrival_s: float = 0.0
    limit_s: float | None = None


@dataclass(frozen=True)
class Prompt:
    """A prompt as ids. `text` is what was encoded, if anything was; `param` is how errors call it.

    `compressed_from`: tokens it had before it was compressed, 0 if it was not; `compression_s`: seconds that took.
    """

    ids: list[int]
    text: str | None = None
    param: str = "prompt"
    compressed_from: int = 0
    compression_s: float = 0.0
    modules: Sequence[int] = ()
    recompute: float = 0.0
    """Where modules end with which it begins, and the share of them that is computed again (`core.request.Request`)."""


@dataclass(kw_only=True)
class Call:
    """One generation asked for by any front end: what admission, the validator, metrics and the log look at.

    `deadline_s`: seconds from `arrival_s` (monotonic) after which it is worth nothing; None: the server's own limit.
    `slo_tpot_s`: seconds that a token after the first should take on average; `slo_ttft_s`: from `arrival_s`, in which
    the first one should be there. `offline_s`: for so long it is offline work; None: it is not. `reader`:
    what the reader of a stream expects; None: it is no stream. `default_max_tokens`:
    how many tokens are generated where `params` do not say it, if the prompt leaves room for them; None: all there is
    room for. `lead`: what may come before an answer that is bound. `num_shared`: first tokens of the prompt that
    another part of the same request has brought and the engine has computed, so that admission does not count them
    again.
    """

    prompt: Prompt
    params: SamplingParams | BeamSearchParams
    request_id: str
    endpoint: str
    tenant: Tenant = ANYONE
    priority: int = 0
    offline_s: float | None = None
    cache_salt: str | None = None
    deadline_s: float | None = None
    slo_tpot_s: float | None = None
    slo_ttft_s: float | None = None
    reader: Expected | None = None
    default_max_tokens: int | None = None
    lead: Lead | None = None
    num_shared: int = 0
    arrival_s: float = 0.0
    stream: bool = False
    session: str = ""
    """See `turns.asking.Caller`."""
    tells_times: bool = False
    """Whether the usage of the answer says where the time went."""
    pooling: str | None = None
    reference: list[int] = field(default_factory=list)
    """Ids of a text that the output is likely to repeat (OpenAI's `prediction`)."""
    hints: list[KVHint] = field(default_factory=list)
    adapter: AdapterRef | None = None
    """What changes the model for it; `adapter_name`: as the client calls that."""
    adapter_name: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """What the log line of this request says besides the usual."""
