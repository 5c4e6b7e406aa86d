"""Adaptive mode: knobs of the scheduler follow the load, each move with its reason.

Every `PERIOD_S` the controller looks at who waits, who decodes, and what steps have taken (`sched.costs`), and asks one
rule for each knob. What it decides goes into the log of the run like a request (`core.events.Move`), so a replay has
the moves without a controller. A number moves only if it would change by more than `BAND`, and not again within the
rule's own time, so that noise moves nothing.

A step's prompt tokens are bounded by what those who decode were promised per token: more would break promises, fewer
would make prompts wait for no one's sake. What is attained corrects what was predicted. The rest follows from the same
two promises: as many sequences as can decode in time, deadlines before the order of arrival while prompts are late,
no prompt that keeps short ones behind it waiting, memory set aside by how often somebody was thrown out, drafts by
whether they have won time.
Source of the requirement: the surveys' call for automatic adaptation (catalogue, R20); the bound on prompts beside
decodes as in Agrawal et al., Sarathi-Serve, arXiv 2403.02310, section 4.3, with the step times of the run itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.core.events import Move
from penstock.core.sequence import Sequence

if TYPE_CHECKING:
    from penstock.sched.knobs import Knobs
    from penstock.sched.scheduler import Scheduler

PERIOD_S = 0.5
BAND = 0.2
"""A number that would change by a smaller share stays."""
LATE_SHARE = 0.2
"""Of the prompts that wait: with more of them late, deadlines decide who goes first."""
FIRST_SHARE = 0.25
"""A step without decodes takes so much of the promise of a first token at most."""
SOME = 0.1
"""Of a look, for what is remembered of several."""
HOPELESS = 3.0
"""A step's limit where a promise per token cannot be kept: so many times what decoding alone takes."""
TRIM = (0.5, 2.0)
"""How far what is attained may correct what is predicted."""
REST_S = {
    "scheduling_policy": 10.0, "max_num_batched_tokens": 1.0, "decode_step_ms": 1.0,
    "long_prefill_token_threshold": 2.0, "max_num_seqs": 2.0, "schedule_conservativeness": 5.0,
    "num_speculative_tokens": 5.0,
}  # fmt: skip
"""How long a knob stays after a move."""
EASE = 0.9
"""As long as a token takes no more of what is promised, the batch grows."""
GAIN = 1.15
"""Another size of steps must get so much more done."""
RETRY_S, TRY_OVER = 60.0, 1.5
"""A size that was tried in vain is not tried again for so long; nor one that is predicted to be this much too slow."""
QUIET_S = 30.0
"""How long nobody has been thrown out before less memory is set aside, or late before deadlines go."""
TENSE, CALM = 0.8, 0.6
"""Of the promise per token: above the one prompts are held up for those who decode, below the other no longer."""
DRAFT_STEPS = 32
"""Steps with drafts from which on their gain is believed."""


class Promise(NamedTuple):
    """Seconds to the first token, and per token after it, for requests that name none themselves."""

    ttft_s: float
    tpot_s: float


class LoadView(NamedTuple):
    """What a look has found. Units: seconds, tokens.

    `num_decodes`, `num_running`, `num_waiting`: online sequences. `tpot_s`: the tightest promise of those who decode;
    `pace_s`: what a token has taken the middle one of them since the last look, 0 if nobody can tell. `backlog`:
    prompts to be computed, (when the first token is due, tokens left), first due first; `late`: the share of them that
    will be.
    """

    now_s: float
    num_decodes: int
    num_running: int
    num_waiting: int
    tpot_s: float
    pace_s: float
    backlog: list[tuple[float, int]]
    late: float


class Wish(NamedTuple):
    value: Any
    why: str


class Controller:
    """`look` is called before every step, and costs next to nothing but every `PERIOD_S`. Mutates nothing but itself:
    who calls it takes the moves up.

    `movable`: the knobs that may move; all others stay as they were given.
    """

    def __init__(self, scheduler: Scheduler, knobs: Knobs, promise: Promise, movable: tuple[str, ...]) -> None:
        self._scheduler, self._knobs, self._promise = scheduler, knobs, promise
        rules: dict[str, Callable[[LoadView], Wish | None]] = {
            "scheduling_policy": self._policy,
            "max_num_batched_tokens": self._tokens,
            "decode_step_ms": self._milliseconds,
            "long_prefill_token_threshold": self._chunk,
            "max_num_seqs": self._batch,
            "schedule_conservativeness": self._aside,
            "num_speculative_tokens": self._drafts,
        }
        self._rules = {name: rules[name] for name in knobs.names if name in movable}
        self._deadlines = f"slo:ttft_s={promise.ttft_s:g},tpot_s={promise.tpot_s:g},whole=1"
        self._order = knobs.values()["scheduling_policy"]
        self._free_s = dict.fromkeys(self._rules, float("-inf"))
        self._next_s = self._looked_s = float("-inf")
        self._seen: dict[int, int] = {}
        self._trim = 1.0
        self._tried: dict[int, float] = {}
        self._pace_s = 0.0
        self._calm_s: float | None = None
        self._quiet_s = float("-inf")
        self._counted = (0, 0)
        self._won = (0, 0.0, 0.0)

    def look(self, now_s: float) -> list[Move]:
        """Moves to be made before the next step."""
        if now_s < self._next_s:
            return []
        self._next_s = now_s + PERIOD_S
        if self._knobs.frozen:
            return []
        load, values, moves = self._load(now_s), self._knobs.values(), []
        self._correct(load)
        for name, rule in self._rules.items():
            if now_s < self._free_s[name]:
                continue
            wish = rule(load)
            if wish is None or not self._differs(name, wish.value, values[name]):
                continue
            self._free_s[name] = now_s + REST_S[name]
            moves.append(Move(name=name, value=self._within(name, wish.value), why=wish.why, was=values[name]))
        return moves

    def _within(self, name: str, value: Any) -> Any:
        if name not in self._knobs.bounds:
            return value
        least, most = self._knobs.bounds[name]
        return min(most, max(least, value))

    def _differs(self, name: str, value: Any, was: Any) -> bool:
        value = self._within(name, value)
        if isinstance(value, str) or not value or not was or name == "max_num_batched_tokens":
            return bool(value != was)
        ends = self._knobs.bounds[name]
        return bool(abs(value - was) > BAND * was or (value != was and value in ends))

    # -- what there is ---------------------------------------------------------------------------------------------

    def _load(self, now_s: float) -> LoadView:
        running = [s for s in self._scheduler.running if not (s.offline or s.held)]
        waiting = [s for s in self._scheduler.waiting if not (s.offline or s.held)]
        decodes = [s for s in running if s.num_generated > 0 and s.lag <= 1]
        prompts = [s for s in (*running, *waiting) if s.num_generated == 0 and s.lag > 0]
        seen, self._seen = self._seen, {s.seq_id: s.num_generated for s in decodes}
        past_s, self._looked_s = now_s - self._looked_s, now_s
        paces = sorted(past_s / max(1, s.num_generated - seen[s.seq_id]) for s in decodes if s.seq_id in seen)
        backlog = sorted((self._due_s(s), s.lag) for s in prompts)
        tightest = min((self._tpot_s(s) for s in decodes), default=self._promise.tpot_s)
        late = self._late(now_s, backlog, len(decodes))
        pace_s = paces[len(paces) // 2] if paces else 0.0
        return LoadView(now_s, len(decodes), len(running), len(waiting), tightest, pace_s, backlog, late)

    def _due_s(self, seq: Sequence) -> float:
        promised = seq.request.slo_ttft_s
        return seq.request.arrival_s + (self._promise.ttft_s if promised is None else promised)

    def _tpot_s(self, seq: Sequence) -> float:
        promised = seq.request.slo_tpot_s
        return self._promise.tpot_s if promised is None else promised

    def _late(self, now_s: float, backlog: list[tuple[float, int]], num_decodes: int) -> float:
        """The share of prompts that miss their time, in the order in which they are due."""
        if not backlog:
            return 0.0
        costs = self._scheduler.pauses.costs
        decode_s, token_s = costs.decode_s(num_decodes), costs.prefill_token_s
        per_step = max(1.0, self._scheduler.max_num_batched_tokens - num_decodes)
        token_s += decode_s / per_step
        at_s, late = now_s, 0
        for due_s, tokens in backlog:
            at_s += tokens * token_s
            late += at_s > due_s
        return late / len(backlog)

    def _correct(self, load: LoadView) -> None:
        """A promise is about the mean of an answer, and not every step has a prompt: what is attained says how much
        longer a step with one may be, or must be shorter."""
        if load.pace_s > 0:
            self._pace_s += (SOME if self._pace_s else 1.0) * (load.pace_s - self._pace_s)
        elif not load.num_decodes:
            self._pace_s *= 1.0 - SOME
        if load.pace_s <= 0 or not load.backlog:
            return
        attained = self._pace_s / load.tpot_s
        if attained > 1.0:
            self._trim = max(TRIM[0], self._trim * 0.85)
        elif attained < 0.8:
            self._trim = min(TRIM[1], self._trim * 1.1)

    def _step_s(self, load: LoadView) -> tuple[float, str] | None:
        """How long a step with prompts may be, and why; None: nothing says anything of it."""
        token_s = self._scheduler.pauses.costs.prefill_token_s
        if not load.backlog or token_s <= 0:
            return None
        if not load.num_decodes:
            limit_s = min(self._scheduler.prefill_step_s, FIRST_SHARE * self._promise.ttft_s)
            return limit_s, "nobody decodes; who comes next waits for the end of a step"
        decode_s = self._scheduler.pauses.costs.decode_s(load.num_decodes)
        if decode_s >= load.tpot_s:
            why = f"decoding alone takes {decode_s:.3g} s a token, more than the {load.tpot_s:.3g} s promised"
            return HOPELESS * decode_s, f"{why}: prompts are not held up for it"
        limit_s = max(self._trim * load.tpot_s, decode_s)
        why = f"{load.num_decodes} decode, {load.tpot_s:.3g} s a token promised, {load.pace_s:.3g} s attained"
        return limit_s, f"{why}; {sum(n for _, n in load.backlog)} prompt tokens wait"

    @property
    def _by_deadlines(self) -> bool:
        return bool(self._knobs.values()["scheduling_policy"] == self._deadlines)

    # -- rules -------------------------------------------------------------------------------------------------------

    def _tokens(self, load: LoadView) -> Wish | None:
        """The size of a step that gets most tokens done in a second; one that takes too long counts for less."""
        limit = self._step_s(load)
        if limit is None:
            return None
        limit_s, why = limit
        # All who may decode before the next look must find room.
        seats = min(self._scheduler.max_num_seqs, load.num_running + load.num_waiting)
        most = int(self._knobs.bounds["max_num_batched_tokens"].most)
        sizes = [1 << k for k in range(most.bit_length()) if seats < 1 << k < most] + [most]
        rates = {size: self._worth(size, load.num_decodes, limit_s) for size in sizes}
        now = min(sizes, key=lambda size: abs(size - self._scheduler.max_num_batched_tokens))
        best = max(sizes, key=lambda size: (rates[size], -size))
        if rates[best] < GAIN * rates[now]:
            best = now
        if load.late > 0 and (untried := self._untried(sizes, best, limit_s, load)):
            return Wish(untried, f"steps of so many tokens have not been tried of late; {why}")
        return Wish(best, f"worth {rates[best]:.3g} tokens a second; {why}")

    def _worth(self, size: int, num_decodes: int, limit_s: float) -> float:
        """Tokens per second in steps of that size, less by the square of how much longer than the limit they take:
        a promise is a mean, and not every step has a prompt. Decodes count as prompts do: neither is to be sped up at
        the other's cost."""
        seconds, tokens = self._scheduler.pauses.costs.sized(size) or (self._predicted_s(size, num_decodes), size)
        return tokens / seconds * min(1.0, limit_s / seconds) ** 2 if seconds > 0 else 0.0

    def _predicted_s(self, size: int, num_decodes: int) -> float:
        costs = self._scheduler.pauses.costs
        return costs.decode_s(num_decodes) + max(0, size - num_decodes) * costs.prefill_token_s

    def _untried(self, sizes: list[int], best: int, limit_s: float, load: LoadView) -> int | None:
        """A neighbour of the best size of which nothing is known: some steps of it, once in a while."""
        at = sizes.index(best)
        for size in (*sizes[max(0, at - 1) : at], *sizes[at + 1 : at + 2]):
            known = self._scheduler.pauses.costs.sized(size) is not None
            if known or load.now_s < self._tried.get(size, float("-inf")) + RETRY_S:
                continue
            if self._predicted_s(size, load.num_decodes) <= TRY_OVER * limit_s:
                self._tried[size] = load.now_s
                return size
        return None

    def _milliseconds(self, load: LoadView) -> Wish | None:
        limit = self._step_s(load)
        if limit is None or not load.num_decodes:  # steps without decodes have a limit of their own
            return None
        return Wish(round(1000 * limit[0], 1), limit[1])

    def _batch(self, load: LoadView) -> Wish | None:
        """By what a token has taken of late, with what prompts and drafts were in the steps."""
        now, pace_s = self._scheduler.max_num_seqs, self._pace_s
        most = int(self._knobs.bounds["max_num_seqs"].most)
        if self._by_deadlines:
            return Wish(most, "deadlines say who enters, so that those who decode keep their pace")
        one_s = self._scheduler.pauses.costs.decode_s(1)
        if one_s <= 0 or not load.num_decodes or pace_s <= 0:
            return None
        if one_s > load.tpot_s:
            return Wish(most, f"one alone takes {one_s:.3g} s a token, more than promised, so no batch keeps it")
        if load.late > LATE_SHARE:  # a shorter queue is worth more than a better pace: decoding alone is to be in time
            pace_s = self._scheduler.pauses.costs.decode_s(load.num_decodes)
        said = f"{load.num_decodes} decode, {pace_s:.3g} s a token of late, {load.tpot_s:.3g} s promised"
        if pace_s > load.tpot_s and load.num_decodes > now // 2:
            return Wish(max(1, now // 2, int(now * load.tpot_s / pace_s)), said)
        if load.num_waiting and now <= load.num_running and pace_s <= EASE * load.tpot_s:
            return Wish(now + max(1, now // 4), f"{load.num_waiting} wait; {said}")
        return None

    def _policy(self, load: LoadView) -> Wish | None:
        if load.late > 0 or self._pace_s > CALM * load.tpot_s:
            self._calm_s = None
        elif self._calm_s is None:
            self._calm_s = load.now_s
        if load.late > LATE_SHARE:
            return Wish(self._deadlines, f"{load.late:.0%} of {len(load.backlog)} prompts will be late as they come")
        if load.backlog and self._pace_s > TENSE * load.tpot_s:
            said = f"{self._pace_s:.3g} s a token of late, {load.tpot_s:.3g} s promised"
            return Wish(self._deadlines, f"{said}: prompts are to wait for those who decode")
        if self._calm_s is not None and load.now_s >= self._calm_s + QUIET_S:
            return Wish(self._order, "no prompt has been late, and no token, for a while: as they come")
        return None

    def _chunk(self, load: LoadView) -> Wish | None:
        if self._by_deadlines:
            return Wish(0, "deadlines say who goes first")
        budget = self._scheduler.max_num_batched_tokens
        lags = [tokens for _, tokens in load.backlog]
        longest = max(lags, default=0)
        if longest > 2 * budget and min(lags) <= budget:
            return Wish(max(self._scheduler.block_size, budget // 2), f"prompts of {min(lags)} wait behind {longest}")
        return Wish(0, "no short prompt waits behind a long one")

    def _aside(self, load: LoadView) -> Wish | None:
        stats, scale = self._scheduler.stats, self._scheduler.reserve.conservativeness
        now = (stats.num_recomputed_tokens, stats.num_scheduled_tokens)
        again, computed = now[0] - self._counted[0], now[1] - self._counted[1]
        if computed < 256:
            return None
        self._counted = now
        if again > 0.02 * computed:
            self._quiet_s = load.now_s
            return Wish(1.5 * scale, f"{again} of {computed} tokens were computed again for want of memory")
        if self._lacks_memory() and load.now_s > self._quiet_s + QUIET_S:
            return Wish(0.7 * scale, f"{load.num_waiting} wait for memory, and nobody was thrown out for a while")
        return None

    def _lacks_memory(self) -> bool:
        """Whether the first in the queue waits for what is set aside. Nothing is asked that would change the cache."""
        scheduler, kv = self._scheduler, self._scheduler.kv
        first = next((seq for seq in scheduler.waiting if not seq.held), None)
        if first is None or len(scheduler.running) >= scheduler.max_num_seqs:
            return False
        pool = kv.stats().groups[kv.main_group or 0]
        left = sum(max(0, s.request.max_tokens - s.num_generated) for s in scheduler.running)
        return first.num_known + scheduler.reserve.share * left > (pool.total - pool.used) * scheduler.block_size

    def _drafts(self, load: LoadView) -> Wish | None:
        stats, limit = self._scheduler.stats, self._knobs.values()["num_speculative_tokens"]
        most = int(self._knobs.bounds["num_speculative_tokens"].most)
        now = (stats.num_spec_steps, stats.spec_compared_s, stats.spec_plain_s)
        steps, took_s, plain_s = (a - b for a, b in zip(now, self._won, strict=True))
        if not limit:
            return Wish(max(1, most // 4), "another try, after a time without drafts") if load.num_decodes else None
        if steps < DRAFT_STEPS or took_s <= 0:
            return None
        self._won = now
        gain = plain_s / took_s
        if gain < 0.98:
            return Wish(limit // 2, f"{steps} steps with drafts took {1 / gain:.3g} times what plain ones take")
        if gain > 1.05:
            return Wish(min(most, 2 * limit), f"{steps} steps with drafts were {gain:.3g} times as fast as plain ones")
        return None
