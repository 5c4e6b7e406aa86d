"""Ranks of a sequence that change with the request, on devices that do not exist (catalogue row H13).

    python -m benchmarks.ranks.elastic [--requests 200] [--long 0.1] [--rates 1,2,4,8] [--out FILE]

Eight devices have all weights each. Requests come at random times; most are short, some very long. *Fixed*: groups of
so many devices share out every prompt, keep its keys and values together and decode together. *Elastic* (Wu et al.,
LoongServe, arXiv 2404.09526): a prompt gets the devices with which it ends first, or the fewest that end nearly as
soon; behind it one of them keeps its keys and values, taken as they came by (nothing moves), and decodes; the others
are free at once. Whoever reads a prompt does not decode meanwhile. Not simulated: prompts in chunks, more masters for
one decode, and the paper's dynamic program over batches (here each prompt is placed by itself).

A request is in time if its seconds are at most `SLACK` times those that it takes alone with the best fixed number. What
counts is the rate up to which nine of ten short requests and nine of ten long ones are in time, of five draws. Times
are a roofline's: FLOP at 60 % of the device's peak, bytes at all of its rate, `plan.flops` for both, and a ring's
blocks, which overlap, over `plan.parallel_cost.DeviceLink`.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import about, save, show
from rich.console import Console

from penstock.core.model_spec import Attention, FeedForward, Layer, ModelSpec, Rope
from penstock.core.step_shape import StepShape
from penstock.plan.devices import device_preset
from penstock.plan.flops import model_work
from penstock.plan.parallel_cost import DeviceLink

DEVICES = 8
FIXED = (1, 2, 4, 8)
SLACK = 5.0
_REACHED = 0.6
_DEVICE, _LINK = device_preset("h100-sxm"), DeviceLink(200e9, 10e-6)
_LAYER = Layer(
    mixer=Attention(num_heads=32, num_kv_heads=8, head_dim=128, rope=Rope(dim=128)), ffn=FeedForward(width=14336)
)
_SPEC = ModelSpec(family="llama", vocab_size=128256, hidden_size=4096, layers=(_LAYER,) * 32, max_position=1 << 20)
_WORK = model_work(_SPEC, "bfloat16")
_KV = 32 * 2 * 8 * 128 * 2
_LONG = 100_000
_STRIDE = 8
"""Tokens that are decoded from one event to the next."""
_WORTH = 0.95
"""Another device has to make the end come so much sooner."""
_MOST = 6
"""Devices that a prompt gets at most, so that short ones find others."""
_NEAR_S = 0.25
"""So long a prompt waits for devices that are in the middle of a step."""


@dataclass(frozen=True)
class Load:
    """Requests that come `per_s`; `long_share` of them have 100,000 to 250,000 tokens, the others 200 to 4,000."""

    num_requests: int
    per_s: float
    long_share: float
    seed: int = 0

    def drawn(self) -> list[Request]:
        rng, at, made = random.Random(self.seed), 0.0, []
        for _ in range(self.num_requests):
            at += rng.expovariate(self.per_s)
            long = rng.random() < self.long_share
            prompt = rng.randrange(_LONG, 250_000) if long else rng.randrange(200, 4_000)
            made.append(Request(at, prompt, 8 * rng.randrange(4, 40)))
        return made


@dataclass(eq=False)
class Request:
    at: float
    prompt: int
    output: int
    done: int = 0
    ended: float = 0.0

    @property
    def context(self) -> int:
        return self.prompt + self.done


class Throughput(NamedTuple):
    """`tokens_per_s` of requests in time; `in_time` as a share of short ones or of long ones, whichever is less; all
    tokens that were made and read."""

    tokens_per_s: float
    in_time: float
    num_tokens: int


@cache
def prompt_s(tokens: int, size: int) -> float:
    """A prompt on `size` devices, evenly shared out, blocks of keys and values round a ring while they compute."""
    work = _WORK.step(StepShape(tokens, 1, tokens, tokens * (tokens + 1) // 2, 1))
    flops = (work.linear_flops + work.mixer_flops) / size / (_DEVICE.flops("bfloat16") * _REACHED)
    ring = (size - 1) / size * tokens * _KV / _LINK.bytes_per_s
    waits = 32 * (size - 1) * _LINK.latency_s
    return max(flops, ring, _WORK.weight_bytes / _DEVICE.read_bytes_per_s) + waits + _DEVICE.step_overhead_s


def decode_s(context: int, rows: int, size: int) -> float:
    """A token for each of `rows` sequences whose keys, `context` tokens in all, are on `size` devices; queries go to
    them and what they find comes back."""
    flops = rows * _WORK.linear_flops_per_token / size / (_DEVICE.flops("bfloat16") * _REACHED)
    read = (_WORK.weight_bytes + _WORK.head_weight_bytes + context * _KV / size) / _DEVICE.read_bytes_per_s
    waits = 32 * 2 * _LINK.latency_s * (size > 1)
    return max(flops, read) + waits + _DEVICE.step_overhead_s


def alone_s(request: Request) -> float:
    return min(
        prompt_s(request.prompt, size) + request.output * decode_s(request.prompt + request.output, 1, size)
        for size in FIXED
    )


@dataclass
class _Group:
    """Devices that decode together, and the prompts that wait for them."""

    size: int
    free_at: float = 0.0
    running: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)

    @property
    def context(self) -> int:
        """Tokens whose keys it keeps."""
        return sum(request.context for request in self.running)

    def step(self, now: float) -> float:
        """A few tokens for everybody: when that ends."""
        self.free_at = now + _STRIDE * decode_s(self.context, len(self.running), self.size)
        for request in self.running:
            request.done += _STRIDE
            request.ended = self.free_at
        self.running = [r for r in self.running if r.done < r.output]
        return self.free_at


def simulated(load: Load, fixed: int | None) -> Throughput:
    """`fixed`: devices of a group; None: elastic."""
    requests = load.drawn()
    groups = [_Group(fixed or 1) for _ in range(DEVICES // (fixed or 1))]
    waiting: list[Request] = []
    events = [(r.at, n, -1) for n, r in enumerate(requests)]  # a request comes, or a group is free
    heapq.heapify(events)
    number = len(requests)

    def wake(n: int) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (groups[n].free_at, number, n))

    asleep = set(range(len(groups)))
    while events:
        now, n, which = heapq.heappop(events)
        if which < 0 and fixed is not None:
            least = min(range(len(groups)), key=lambda i: _ahead(groups[i], now))
            groups[least].waiting.append(requests[n])
        elif which < 0:
            waiting.append(requests[n])
        if which >= 0 and groups[which].free_at <= now:  # else it has been given something else to do
            asleep.add(which)
        if fixed is None:
            for i in _place(groups, waiting, now):
                asleep.discard(i)
                wake(i)
        for i in sorted(asleep):
            group = groups[i]
            if group.free_at > now:
                continue
            if group.waiting:
                request = group.waiting.pop(0)
                group.free_at = now + prompt_s(request.prompt, group.size)
                group.running.append(request)
            elif group.running:
                group.step(now)
            else:
                continue
            asleep.discard(i)
            wake(i)
    return _result(requests)


def _ahead(group: _Group, now: float) -> float:
    """Seconds until a group could begin with another prompt."""
    return max(0.0, group.free_at - now) + sum(prompt_s(r.prompt, group.size) for r in group.waiting)


def _place(groups: list[_Group], waiting: list[Request], now: float) -> list[int]:
    """Prompts that are given their devices now: those devices."""
    begun: list[int] = []
    for request in list(waiting):
        order = sorted(range(DEVICES), key=lambda i: (max(now, groups[i].free_at), groups[i].context))
        best: tuple[float, int] | None = None
        for size in range(1, _MOST + 1):
            end = max(now, groups[order[size - 1]].free_at) + prompt_s(request.prompt, size)
            if best is None or end - now < (best[0] - now) * _WORTH ** (size - best[1]):
                best = (end, size)
        assert best is not None
        end, size = best
        if max(now, groups[order[size - 1]].free_at) - now > _NEAR_S:
            continue  # it ends sooner with devices that read another prompt now
        for i in order[:size]:
            groups[i].free_at = end
        groups[min(order[:size], key=lambda i: groups[i].context)].running.append(request)
        begun += order[:size]
        waiting.remove(request)
    return begun


def _result(requests: list[Request]) -> Throughput:
    assert all(r.done >= r.output for r in requests), "everybody has ended"
    fine = [r for r in requests if r.ended - r.at <= SLACK * alone_s(r)]
    seconds = max(r.ended for r in requests) - requests[0].at
    tokens = sum(r.prompt + r.output for r in fine)
    shares = [
        sum(r in fine for r in some) / len(some)
        for long in (False, True)
        if (some := [r for r in requests if (r.prompt >= _LONG) == long])
    ]
    return Throughput(tokens / seconds, min(shares), sum(r.prompt + r.output for r in requests))


def sustained(load: Load, fixed: int | None, rates: Sequence[float], share: float = 0.9) -> float:
    """The highest of ascending rates up to which at least so many requests are in time; 0: not even the lowest."""
    found = 0.0
    for rate in rates:
        if simulated(replace(load, per_s=rate), fixed).in_time < share:
            break
        found = rate
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--long", type=float, default=0.1)
    parser.add_argument("--rates", default="0.5,1,2,3,4")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    names = {None: "elastic", **{size: f"{size} fixed" for size in FIXED}}
    rows, kept = [], []
    for rate in map(float, args.rates.split(",")):
        found = {name: simulated(Load(args.requests, rate, args.long), size) for size, name in names.items()}
        rows.append([f"{rate:g}", *(f"{x.tokens_per_s:,.0f} ({x.in_time:.0%})" for x in found.values())])
        kept.append({"per_s": rate, **{name: x._asdict() for name, x in found.items()}})
    steps = [0.1 * n for n in range(2, 60)]
    most = {
        name: [sustained(Load(args.requests, 1, args.long, seed), size, steps) for seed in range(5)]
        for size, name in names.items()
    }
    rows.append(["90 % in time up to", *(" ".join(f"{x:.1f}" for x in sorted(found)) for found in most.values())])
    title = "tokens per second of requests in time (share in time), 8 simulated devices"
    show(Console(width=140), title, ["requests per second", *names.values()], rows)
    how = {"requests": args.requests, "long_share": args.long, "slack": SLACK}
    save(None if args.out is None else str(args.out), {"about": about(), **how, "rates": kept, "sustained": most})


if __name__ == "__main__":
    main()
