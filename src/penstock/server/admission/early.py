"""Refusals before a prompt is spent, where some engines compute prompts and others decode (`route.early`).

What steps take is what engines of each kind have measured of their own; until they have, what the cost model says.
Source: Qin et al., Mooncake, arXiv 2407.00079, section 7.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from penstock.base.errors import ConfigError
from penstock.core.replica_roles import DECODE, MIXED, PREFILL
from penstock.route.early import PoolForecast, PoolRequest, PoolSpeed, PoolVerdict
from penstock.sched.costs import step_s

if TYPE_CHECKING:
    from penstock.core.messages import EngineInfo
    from penstock.core.request import Request
    from penstock.engine.frontend import EngineClient
    from penstock.engine.stream import Stream
    from penstock.server.admission.promises import PromisedRequest


class TakenOn(Protocol):
    """What the gate keeps of a request that it has taken on."""

    progress: PromisedRequest
    stream: Stream | None
    started: bool


def mode_of(mode: str, replica_roles: str | None) -> str | None:
    """None: nobody is refused early. Raises ConfigError for a mode where no engine has a role."""
    if mode == "off":
        return None
    if replica_roles is None:
        raise ConfigError(
            "early_rejection: it looks at engines that decode beside such as compute prompts; give replica_roles, too",
            field="early_rejection",
        )
    return mode


class EarlyRejection:
    """Belongs to the event loop's thread. `mode`: one of `route.early.MODES`."""

    def __init__(self, client: EngineClient, info: EngineInfo, mode: str) -> None:
        self._client, self._info, self._mode = client, info, mode
        self._slots = max(1, info.max_num_seqs)
        self._kv_tokens = info.kv_capacity_tokens or info.num_blocks * max(1, info.block_size)

    def judge(
        self, request: Request, work: float, out: float, width: int, left_s: float | None, taken: Iterable[TakenOn]
    ) -> PoolVerdict | None:
        """None: nothing is known of how long steps take. `work`: tokens of its prompt to compute; `out`: that each of
        its samples will probably come to; `left_s`: in which its first token should be there. `taken`: in order of
        arrival."""
        speed = self.speed()
        if speed is None:
            return None
        waiting, decoding = [], []
        for one in taken:
            progress = one.progress
            prompt, found = len(progress.request.prompt_token_ids), round(progress.out)
            held = progress.width * found + prompt
            if not one.started:
                waiting.append(PoolRequest(round(progress.work), found, held, progress.width))
            else:
                decoding.append(PoolRequest(0, max(1, found - self._num_made(one)), held, progress.width))
        new = PoolRequest(round(work), round(out), width * round(out) + len(request.prompt_token_ids), width)
        tpot_s = request.slo_tpot_s
        return PoolForecast(speed, waiting, decoding).judge(
            new, mode=self._mode, ttft_us=None if left_s is None else round(1e6 * left_s),
            tpot_us=None if tpot_s is None else round(1e6 * tpot_s),
        )  # fmt: skip

    def shown(self, taken: Iterable[TakenOn], refused: int) -> dict[str, object]:
        """For operators: places to decode, who has one and who will want one."""
        started = [one.started for one in taken]
        speed = self.speed()
        return {
            "mode": self._mode, "places": None if speed is None else speed.slots, "decoding": sum(started),
            "prompts": len(started) - sum(started), "refused": refused,
        }  # fmt: skip

    def speed(self) -> PoolSpeed | None:
        """Of the engines that are there, by their roles."""
        there = [r for r in self._client.replicas if r.state == "ready" and not r.draining]
        prefills = [r for r in there if r.role in (PREFILL, MIXED)] or there
        decodes = [r for r in there if r.role in (DECODE, MIXED)] or there
        alone = self._info.alone_s
        decode_s = next((r.snapshot.decode_s for r in decodes if any(r.snapshot.decode_s)), [])
        token_s = max((r.snapshot.prefill_token_s for r in prefills), default=0.0)
        if not decode_s and alone:
            decode_s = [alone[0][1]]
        if not token_s and alone:
            token_s = alone[-1][1] / alone[-1][0]
        if not there or not decode_s or token_s <= 0:
            return None
        return PoolSpeed(
            len(prefills), len(decodes), len(decodes) * self._slots, len(decodes) * self._kv_tokens,
            max(1, round(1e9 * token_s)), lambda width: max(1, round(1e6 * step_s(decode_s, width))),
        )  # fmt: skip

    def _num_made(self, one: TakenOn) -> int:
        found = None if one.stream is None else self._client.find(one.stream.request_id)
        return 0 if found is None else max((len(sample.token_ids) for sample in found[1].samples), default=0)
