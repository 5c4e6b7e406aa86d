"""A request as the engine takes it in: ids only, checked, frozen, fit for a wire."""

from __future__ import annotations

from array import array

import msgspec

from penstock.base.errors import InputError
from penstock.core.kv_hints import KVHint
from penstock.core.sampling import BeamSearchParams, RepetitionDetectionParams, TokenRules
from penstock.core.weight_swap import WeightsOrder

REPETITION = ("repetition", "repetition_detected")
"""Finish reason and stop reason (vLLM's words) of a sample that ran in circles."""


_MODULES = "|modules="


def module_taint(taint: str, modules: list[int], recompute: float = 0.0) -> str:
    """The taint of a request with `modules`. One alone is an ordinary beginning, and taints nothing."""
    if len(modules) < 2:
        return taint
    return f"{taint}{_MODULES}{','.join(map(str, modules))}" + (f" recompute={recompute!r}" if recompute else "")


class Resume(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How far a request had come in an engine that is gone.

    Attributes:
        samples: (index, generated ids) of each sample that has not ended; those left out are not made again. Either
            all of them have tokens or none has.
        num_prompt_logprobs: prompt positions whose logprobs have been reported.
    """

    samples: list[tuple[int, list[int]]]
    num_prompt_logprobs: int = 0

    def check(self, request: Request) -> None:
        """Raises InputError unless `request` can have come so far."""
        lengths = {index: len(ids) for index, ids in self.samples}
        known = 0 < len(lengths) == len(self.samples) and min(lengths) >= 0 and max(lengths) < request.n
        if request.whole or not known:
            raise InputError("resume names samples that the request does not have", param="resume")
        if len({length > 0 for length in lengths.values()}) > 1 or max(lengths.values()) >= request.max_tokens:
            raise InputError("resume names samples that cannot have come so far", param="resume")


class ApiCall(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tool that a request calls in the middle of its sample, which goes on with the result.

    Attributes:
        after: generated tokens, results of calls before it included, behind which it begins, > 0.
        expected_s: how long it is expected to take, in seconds.
        pause_s: how long it takes. None: until a `Control` of kind `resume` brings the result.
        result: tokens that it brings, unless a `Control` does.
    """

    after: int
    expected_s: float
    pause_s: float | None = None
    result: list[int] = []


class Request(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """One prompt and what to make of it.

    Attributes:
        request_id: unique among live requests.
        prompt_token_ids: never empty; ids in [0, vocab).
        rules: the token-level sampling rules.
        n: samples to make.
        max_tokens: generated tokens at most per sample; prompt + max_tokens fits the context.
        stop_token_ids: ids that end a sample and are reported as its stop reason.
        eos_token_ids: ids that end a sample as "stop"; empty when ignored.
        beam: set for beam search; `n` is then 1.
        pooling: for a pooled hidden state instead of tokens (`core.pooler`); `n` is then 1.
        priority: smaller goes first (only policies that say so look at it).
        namespace: identity under which blocks may be shared (tenant, adapter, salt, position scheme, taint).
        taint: label of a lossy method chosen for this request from the start; "" is lossless.
        arrival_s: clock reading at arrival; metrics, and policies that look at ages.
        tenant: whose request it is, by name; `weight`: that tenant's share (only the policy `fair` looks at them).
        slo_ttft_s: seconds after its arrival in which the first token should be there (only the policy `slo` looks at
            it). None: no promise.
        slo_tpot_s: seconds that a token after the first should take on average; drafts go to those who are behind
            first (`sched.drafts.slo`). None: no promise.
        expected_ttft_s, expected_tds: seconds in which its reader expects the first token, and tokens per second after
            it (`core.qoe`; of the policies, `andes` looks at them). None: what that policy assumes.
        resume: set if another engine has worked on it already: it goes on from there, with the same tokens.
        repetition: what counts as running in circles, which ends a sample; None: nothing does.
        calls: tools that its one sample calls, in order (`sched.pauses`). What they bring counts as generated.
        expected_tokens: how many it is expected to generate (policies that say so look at it); 0: `max_tokens`.
        hints: what is to happen to its blocks.
        kv_share: the part of each tier of KV that its tenant has, and of what running requests may hold while others
            wait, 0 to 1; 0: tenants have no parts (`kv.shares`, `sched.shares`).
        keeper: under whose name a store keeps its blocks, if not the tenant's: those of a group that shares them.
        modules: where the texts end with which the prompt begins and each of which is computed by itself
            (`kv.modules`): whole blocks, at least one token less than the prompt. `taint` says so (`module_taint`).
        recompute: share of the tokens of modules behind the first, 0 to 1, that is computed again in the whole context.
        offline_s: for so many seconds from its arrival it is offline work, which runs in what others leave
            (`sched.offline`); then it is as they are. None: it never is.
    """

    request_id: str
    prompt_token_ids: list[int]
    rules: TokenRules
    n: int = 1
    max_tokens: int = 16
    stop_token_ids: list[int] = []
    eos_token_ids: list[int] = []
    beam: BeamSearchParams | None = None
    pooling: str = ""
    priority: int = 0
    namespace: bytes = b""
    taint: str = ""
    arrival_s: float = 0.0
    tenant: str = ""
    weight: float = 1.0
    slo_tpot_s: float | None = None
    slo_ttft_s: float | None = None
    expected_ttft_s: float | None = None
    expected_tds: float | None = None
    resume: Resume | None = None
    repetition: RepetitionDetectionParams | None = None
    calls: list[ApiCall] = []
    expected_tokens: int = 0
    hints: list[KVHint] = []
    kv_share: float = 0.0
    keeper: str = ""
    modules: list[int] = []
    recompute: float = 0.0
    offline_s: float | None = None

    def ending(self, num_generated: int, token_id: int) -> tuple[str | None, int | str | None]:
        """(finish reason, stop reason) of a sample whose `num_generated`-th token is `token_id`; None: it goes on."""
        if num_generated >= self.rules.min_tokens:
            if token_id in self.eos_token_ids:
                return "stop", None
            if token_id in self.stop_token_ids:
                return "stop", token_id
        return ("length" if num_generated >= self.max_tokens else None), None

    def circles(self, token_ids: array[int]) -> bool:
        """Whether a sample that would go on, with these tokens of prompt and output, ends because it repeats itself."""
        start = len(self.prompt_token_ids)
        return (
            self.repetition is not None
            and len(token_ids) - start >= self.rules.min_tokens
            and self.repetition.found(token_ids, start)
        )

    def check_calls(self) -> None:
        """Raises InputError unless its calls can be made."""
        if self.n > 1 or self.whole or self.resume is not None:
            raise InputError("calls are for one sample that is generated from its beginning", param="calls")
        done = 0
        for call in self.calls:
            if not done < call.after < self.max_tokens or min(call.expected_s, call.pause_s or 0.0) < 0:
                raise InputError(
                    "calls begin behind at least one new token each and before max_tokens, and last 0 s or more",
                    param="calls",
                )
            done = call.after + len(call.result)

    @property
    def reads_cache(self) -> bool:
        """Whether blocks of others may stand in for its own: not if something is owed for every position."""
        return self.rules.num_prompt_logprobs < 0 and not self.pooling

    @property
    def plain_taint(self) -> str:
        """`taint` without what modules add to it."""
        return self.taint.partition(_MODULES)[0]

    @property
    def prefetches(self) -> bool:
        """It only brings blocks to the device: no token is made."""
        return bool(self.hints) and any(hint.action == "prefetch" for hint in self.hints)

    @property
    def whole(self) -> bool:
        """Its result comes in one piece: hypotheses or a vector, not a stream of tokens."""
        return self.beam is not None or bool(self.pooling)


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """Stop a request (or one sample of it). `reason` becomes its finish reason; nothing is owed afterwards."""

    request_id: str
    index: int | None = None
    reason: str = "abort"


FENCED = "fenced"
"""Finish reason of the answer to a fence. It never reaches a client."""


class Control(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """An order to the engine that concerns no new request. Used by operators and by the tests of the laws.

    Kinds: `preempt` (sequence or all of a request), `ragged` (give a sequence private pages), `taint` (mark a
    sequence as lossy from here on), `reset_prefix_cache`, `sleep` (the same, and memory that nobody uses then is
    given back at once), `evict_prefix_cache` (what nobody uses, and nobody has for `age_s` seconds; with `label`, of
    this tenant alone), `resume` (the call that a request is in has ended and brings `token_ids`), `pause` (a
    conversation, `token_ids` of `namespace`, waits for a tool for about `expected_s` seconds: `sched.pauses` decides
    what becomes of its blocks), `weights` (swap them; `request_id` is how its news is called), `hold` (nobody runs
    until `go_on`; with `label` "retract" the running give up their memory, with "abort" all are aborted, with "wait"
    those who have begun end first), `freeze` and `thaw` (adaptive mode moves no knob between the two), `fence` (an
    output of this `request_id` and the reason FENCED says that all before it has taken effect).
    """

    kind: str
    request_id: str = ""
    index: int | None = None
    label: str | None = None
    token_ids: list[int] = []
    age_s: float = 0.0
    namespace: bytes = b""
    expected_s: float = 0.0
    weights: WeightsOrder | None = None


Intake = Request | Abort | Control
