"""How to run a model on several devices: layers cut into stages, ranks of each, micro-batches and batch, by search.

A batch of `batch` sequences goes through the stages in `micro_batches` equal parts; all get a token when the last part
has left the last stage: a step takes sum(t) + (micro_batches - 1) max(t), t being the seconds of each stage for one
part. Of that a share of (stages - 1) / (micro_batches + stages - 1) is waiting, if stages are equal. The plan is the
one with the most tokens per second, batch / step, of those that fit.

For one batch and its parts: dynamic programming over (first layer, devices left) finds the smallest sum among plans
whose slowest stage takes less than a bound; the bound falls from infinity to what each result needs, until a smaller
one cannot pay. That is Alpa's pass between operators (Zheng et al., arXiv 2201.12023, section 5.1, equations 2 and 3),
whose bound rises; like it, the result is the best there is. Batches are tried in the order of an upper bound on their
tokens per second, so the search ends when the next one's is below what was found. Up to 64 sequences and parts every
number is tried, beyond that those of six binary digits, at most 1/32 apart: a smaller batch has no longer step, so that
costs at most 3 % up to 4,096 sequences. What is tried does not depend on devices or memory: more are never worse.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from math import inf
from typing import NamedTuple

import msgspec

from penstock.base.errors import CapacityError, ConfigError
from penstock.core.model_spec import ModelSpec
from penstock.plan.devices import Device
from penstock.plan.memory import gib, largest
from penstock.plan.parallel_cost import DeviceLink, ParallelCosts, RankCost, SequenceLoad

Cut = tuple[int, int, int]
"""A stage: first layer, last layer + 1, devices."""


class StagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Layers first ... last - 1 on `degree` devices. `seconds`: of one micro-batch; `memory_bytes`: of each device,
    weights and the keys and values of the whole batch; `wire_bytes`: what its devices give away in a step."""

    first: int
    last: int
    degree: int
    seconds: float
    memory_bytes: int
    wire_bytes: int


class ParallelPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Units: seconds, bytes, tokens that sequences get. `limit`: what the slowest stage's time goes to, and what keeps
    the batch from being larger, in words."""

    stages: tuple[StagePlan, ...]
    micro_batches: int
    batch: int
    step_s: float
    tokens_per_s: float
    bubble_share: float
    limit: str

    @property
    def num_devices(self) -> int:
        return sum(stage.degree for stage in self.stages)

    @property
    def wire_bytes(self) -> int:
        """Of a step."""
        return sum(stage.wire_bytes for stage in self.stages)


def plan_parallel(
    spec: ModelSpec, device: Device, num_devices: int, memory_bytes: int, link: DeviceLink, load: SequenceLoad, *,
    dtype: str, kv_dtype: str | None = None, max_token_s: float | None = None,
) -> ParallelPlan:  # fmt: skip
    """The plan with the most tokens per second on at most `num_devices`, each with `memory_bytes` for weights and KV.

    `max_token_s`: seconds that a step may take. Raises CapacityError, with what would help, if no plan fits, and
    ConfigError for numbers that make no sense.
    """
    for name, value in (("num_devices", num_devices), ("memory_bytes", memory_bytes)):
        if value < 1:
            raise ConfigError(f"{name}: must be at least 1, not {value}", field=name)
    if max_token_s is not None and not max_token_s > 0:
        raise ConfigError(f"max_token_s: must be above 0, not {max_token_s}", field="max_token_s")
    costs = ParallelCosts(spec, device, link, load, dtype, kv_dtype)
    return _Search(costs, num_devices, memory_bytes).plan(inf if max_token_s is None else max_token_s)


def step_seconds(stages: list[float], micro_batches: int) -> float:
    """Seconds of a step whose stages take so long for one micro-batch each."""
    return sum(stages) + (micro_batches - 1) * max(stages)


def counts(most: int) -> list[int]:
    """1 ... 64, then numbers of six binary digits, and `most`."""
    fine = (n for n in range(1, min(most, 64) + 1))
    coarse = (n << s for s in range(1, most.bit_length()) for n in range(33, 65) if n << s > 64 and n << s < most)
    return sorted({*fine, *coarse, most})


class _Times(NamedTuple):
    """Of micro-batches of one size. `upto[t][n]`: seconds of the layers before layer n on t devices; `entry[t]`: of
    the first and of any other stage besides. `least_sum`: no step is shorter; `least_work`: device-seconds of one;
    `least_max`: of the slowest stage."""

    upto: dict[int, list[float]]
    entry: dict[int, tuple[float, float]]
    least_sum: float
    least_work: float
    least_max: float


class _Search:
    def __init__(self, costs: ParallelCosts, num_devices: int, memory_bytes: int) -> None:
        self._costs, self._devices, self._memory = costs, num_devices, memory_bytes
        self._layers = costs.num_layers
        self._degrees = costs.degrees(num_devices)
        self._begins = [costs.may_begin(n) for n in range(self._layers)]
        self._kept: dict[int, tuple[list[int], list[int]]] = {}
        for t in self._degrees:
            layers = [costs.layer(n, t, 1) for n in range(self._layers)]
            self._kept[t] = (
                list(accumulate((c.weight_bytes for c in layers), initial=0)),
                list(accumulate((c.kv_bytes for c in layers), initial=0)),
            )
        self._times: dict[int, _Times] = {}

    def plan(self, limit_s: float) -> ParallelPlan:
        waiting = self._costs.load.waiting
        if not self._fits(1, self._memory):
            raise self._too_small()
        best: tuple[float, int, int, list[Cut]] | None = None
        most = largest(lambda n: self._fits(n, self._memory), 1, waiting)
        tried = counts(waiting)
        pairs = [(m, rows) for rows in tried for m in tried if m * rows <= most]
        for bound, m, rows in sorted((-m * rows / self._least_s(m, rows), m, rows) for m, rows in pairs):
            if best is not None and -bound <= best[0]:
                break
            below = limit_s if best is None else min(limit_s, m * rows / best[0])
            found = self._shortest(m, rows, below)
            if found is not None:
                best = (m * rows / found[0], m, rows, found[1])
        if best is None:
            raise self._too_slow(limit_s)
        return self._made(best[1], best[2], best[3], most, waiting)

    def _shortest(self, m: int, rows: int, below: float) -> tuple[float, list[Cut]] | None:
        """The shortest step under `below` seconds, and its stages."""
        times, ends = self._of(rows), self._ends(m * rows, self._memory)
        slowest = max(times.least_max, times.least_work / self._devices)
        best, cap, least = None, inf, times.least_sum
        while True:
            if m > 1:  # no shorter step has a stage that takes longer: the sum only grows as the bound falls
                cap = min(cap, (below - least) / (m - 1))
            if cap < slowest or (found := self._cheapest(times, ends, cap)) is None:
                return best
            each = [self._seconds(times, cut) for cut in found]
            least = sum(each) * (1 - 1e-12)
            if (step := step_seconds(each, m)) < below:
                best, below = (step, found), step
            if m == 1:
                return best
            cap = min(cap, max(each)) * (1 - 1e-9)

    def _cheapest(self, times: _Times, ends: dict[int, list[int]], cap: float) -> list[Cut] | None:
        """Stages with the least sum of seconds, each at most `cap`, none with a layer behind `ends[degree][first]`."""
        n, devices = self._layers, self._devices
        best = [[inf] * (devices + 1) for _ in range(n)] + [[0.0] * (devices + 1)]
        chosen: list[list[tuple[int, int]]] = [[(0, 0)] * (devices + 1) for _ in range(n)]
        # behind[t][d][j]: the layers before j on t devices, and the rest, from j on, on d others
        behind = {t: [[inf] * n + [times.upto[t][n]] for _ in range(devices + 1)] for t in self._degrees}
        for i in range(n - 1, -1, -1):
            if not self._begins[i]:
                continue
            for t in self._degrees:
                upto = times.upto[t]
                fixed = times.entry[t][i > 0] - upto[i]
                end = min(ends[t][i], bisect_right(upto, cap - fixed) - 1)
                if end <= i:
                    continue
                for d in range(t, devices + 1):
                    rest = behind[t][d - t][i + 1 : end + 1]
                    least = min(rest)
                    if least + fixed < best[i][d]:
                        best[i][d] = least + fixed
                        chosen[i][d] = (i + 1 + rest.index(least), t)
            for t in self._degrees:
                for d in range(devices + 1):
                    behind[t][d][i] = times.upto[t][i] + best[i][d]
        if best[0][devices] == inf:
            return None
        cuts, i, d = [], 0, devices
        while i < n:
            last, t = chosen[i][d]
            cuts.append((i, last, t))
            i, d = last, d - t
        return cuts

    def _seconds(self, times: _Times, cut: Cut) -> float:
        first, last, t = cut
        return times.entry[t][first > 0] + times.upto[t][last] - times.upto[t][first]

    def _of(self, rows: int) -> _Times:
        if rows not in self._times:
            c, layers = self._costs, range(self._layers)
            each = {t: [c.layer(n, t, rows).seconds for n in layers] for t in self._degrees}
            first = c.entry(0, 1, rows).seconds
            least = [min(each[t][n] for t in self._degrees) for n in layers]
            work = sum(min(t * each[t][n] for t in self._degrees) for n in layers)
            self._times[rows] = _Times(
                {t: list(accumulate(each[t], initial=0.0)) for t in self._degrees},
                {t: (first, c.entry(1, t, rows).seconds) for t in self._degrees},
                (first + sum(least)) * (1 - 1e-9),
                (first + work) * (1 - 1e-9),
                (first + max(least)) * (1 - 1e-9),
            )
        return self._times[rows]

    def _least_s(self, m: int, rows: int) -> float:
        """No step of m micro-batches is shorter."""
        times = self._of(rows)
        return times.least_sum + (m - 1) * max(times.least_max, times.least_work / self._devices)

    # -- memory --------------------------------------------------------------------------------------------------

    def _ends(self, batch: int, memory: int) -> dict[int, list[int]]:
        """By degree and first layer: how far a stage may reach."""
        out = {}
        for t, (weights, kv) in self._kept.items():
            upto = [w + batch * k for w, k in zip(weights, kv, strict=True)]
            out[t] = [bisect_right(upto, memory + before) - 1 for before in upto]
        return out

    def _fits(self, batch: int, memory: int) -> bool:
        return self._cheapest(self._of(1), self._ends(batch, memory), inf) is not None

    def _too_small(self) -> CapacityError:
        high = self._memory
        while not self._fits(1, high):
            high *= 2
        least = 1 + bisect_left(range(1, high + 1), 1, key=lambda memory: int(self._fits(1, memory)))
        load = self._costs.load
        return CapacityError(
            f"no plan fits: on {self._devices} device{'s' * (self._devices > 1)} of {gib(self._memory)}, the weights "
            f"and one sequence of {load.prompt + load.output} tokens need {gib(least)} on each; use "
            "more devices, devices with that memory, shorter sequences or a smaller type of weights",
            field="memory_bytes",
        )

    def _too_slow(self, limit_s: float) -> CapacityError:
        found = self._shortest(1, 1, inf)
        assert found is not None
        return CapacityError(
            f"no plan fits: one sequence alone gets a token every {found[0] * 1.005:.3g} s, not every {limit_s:.3g} s; "
            "allow that time per token, or use more or faster devices or a faster link",
            field="max_token_s",
        )

    # -- the result ----------------------------------------------------------------------------------------------

    def _made(self, m: int, rows: int, cuts: list[Cut], most: int, waiting: int) -> ParallelPlan:
        each = [self._costs.stage(*cut, rows) for cut in cuts]
        batch, step = m * rows, step_seconds([cost.seconds for cost in each], m)
        if batch == waiting:
            why = "the batch holds every sequence that waits"
        elif any(cost.weight_bytes + (batch + 1) * cost.kv_bytes > self._memory for cost in each):
            why = "a larger batch does not fit in these stages' memory"
            why += "" if batch == most else ", and in others it is slower"
        else:
            why = "a larger batch gives no more tokens per second that are in time"
        return ParallelPlan(
            stages=tuple(
                StagePlan(
                    first=first, last=last, degree=t, seconds=cost.seconds, wire_bytes=m * cost.wire_bytes,
                    memory_bytes=cost.weight_bytes + batch * cost.kv_bytes,
                )
                for (first, last, t), cost in zip(cuts, each, strict=True)
            ),
            micro_batches=m,
            batch=batch,
            step_s=step,
            tokens_per_s=batch / step,
            bubble_share=(len(cuts) - 1) / (m + len(cuts) - 1),
            limit=f"{_limit(max(each, key=lambda cost: cost.seconds))}; {why}",
        )  # fmt: skip


def _limit(cost: RankCost) -> str:
    parts = {
        "computing": cost.compute_s, "reading memory": cost.read_s, "the link": cost.link_s,
        "fixed costs of steps and layers": cost.overhead_s,
    }  # fmt: skip
    name = max(parts, key=lambda part: parts[part])
    return f"{name} takes {parts[name] / cost.seconds:.0%} of the slowest stage"
