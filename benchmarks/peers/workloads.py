"""What every engine is asked, the same for all of them: greedy, prompts as token ids, the end token ignored.

Lengths never change; tokens are drawn anew for every repeat, so that no prefix cache answers for a prefill. Standard
library only: engines' own interpreters read this.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

LOWEST_ID, HIGHEST_ID = 100, 30_000
"""Ids are drawn from here: ordinary tokens in both models' vocabularies."""

Request = tuple[list[int], int]
"""(prompt token ids, how many tokens to generate)."""
WARM_UP = -1
"""The repeat whose figures are thrown away."""


@dataclass(frozen=True)
class Workload:
    """`before`: requests that run first and are not timed (a shared prefix that is to be in the cache)."""

    name: str
    text: str
    before: list[Request]
    requests: list[Request]


def draw(rng: random.Random, length: int, highest: int) -> list[int]:
    return [rng.randrange(min(LOWEST_ID, highest // 2), highest) for _ in range(length)]


def single(prompt_len: int, new_tokens: int, repeat: int, tag: str | int = 0, highest: int = HIGHEST_ID) -> Request:
    rng = random.Random(f"single/{prompt_len}/{repeat}/{tag}")
    return draw(rng, prompt_len, highest), new_tokens


def mixed(repeat: int | str, num: int = 32, highest: int = HIGHEST_ID) -> list[Request]:
    """Prompts of 32 to 512 tokens, answers of 16 to 128; the lengths are those of every repeat."""
    lengths, tokens = random.Random("offline-lengths"), random.Random(f"offline/{repeat}")
    shapes = [(lengths.randint(32, 512), lengths.randint(16, 128)) for _ in range(num)]
    return [(draw(tokens, prompt, highest), new) for prompt, new in shapes]


def shared(repeat: int, highest: int = HIGHEST_ID, num: int = 16) -> tuple[list[Request], list[Request]]:
    """(one request that brings a prefix of 512 tokens, those that share it and add 32 of their own)."""
    rng = random.Random(f"prefix/{repeat}")
    prefix = draw(rng, 512, highest)
    first = [(prefix + draw(rng, 32, highest), 1)]
    return first, [(prefix + draw(rng, 32, highest), 32) for _ in range(num)]


def arrivals(rate: float, num: int) -> list[float]:
    """Seconds from the start at which requests arrive: Poisson, the same gaps for every rate but for their unit."""
    rng, at, out = random.Random(f"online/{num}"), 0.0, []
    for _ in range(num):
        out.append(at)
        at += rng.expovariate(rate)
    return out


def workload(name: str, repeat: int, *, highest: int = HIGHEST_ID) -> Workload:
    """W1 to W4, and W0, which is small enough for tests. `highest`: below it are the ids (small vocabularies)."""
    match name:
        case "W0":
            return Workload(name, "two short requests", [], [single(16, 8, repeat, t, highest) for t in "ab"])
        case "W1":
            return Workload(name, "one request, 128 + 128 tokens", [], [single(128, 128, repeat, "b", highest)])
        case "W2":
            return Workload(name, "one prompt of 1024 tokens", [], [single(1024, 1, repeat, 0, highest)])
        case "W3":
            return Workload(name, "32 requests of mixed lengths at once", [], mixed(repeat, highest=highest))
        case "W4":
            before, requests = shared(repeat, highest)
            return Workload(name, "16 requests with a cached prefix of 512 tokens", before, requests)
    raise ValueError(f"there is no workload {name!r}: W1, W2, W3, W4")
