"""What all configurations of a board have in common: questions, text, lengths, memory, tolerances."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.base.errors import ConfigError
from penstock.eval.tasks import Asked, make_tasks

DEFAULT_TASKS = ("lookup", "passage")
SHORTEST = 256


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Units: tokens and bytes as named.

    Attributes:
        context: the task whose accuracy limits C; it has a tag `length`, or its examples are sorted by their own.
        threshold: share of the plain configuration's accuracy, at the shortest length, that must be kept.
        kv_memory: bytes of KV memory for C and P; None: what the plain one needs for four requests.
        text: task of the perplexity kind, for bits per byte and KL.
        top: likeliest tokens that KL is taken over, beside one bucket for the rest.
        prompt_interval: distance of selections within a text, for KV selectors; where none is set.
        requests: of a batch; repeats: of a single request, and of a batch, in each of at least `rounds`.
        speed_seconds: more rounds are run, while an interval is too wide to be read, as long as this has not passed.
        score_tolerance, text_tolerance, speed_tolerance: shares within which nothing has changed.
    """

    tasks: tuple[Asked, ...]
    context: Asked
    text: Asked
    lengths: tuple[int, ...] = ()
    threshold: float = 0.9
    kv_memory: int | None = None
    limit: int = 60
    seed: int = 0
    chat: bool = False
    bos: bool = False
    top: int = 64
    prompt_interval: int = 64
    input_len: int = 512
    output_len: int = 32
    requests: int = 8
    repeats: int = 1
    rounds: int = 4
    speed_seconds: float = 240.0
    score_tolerance: float = 0.02
    text_tolerance: float = 0.01
    speed_tolerance: float = 0.05

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        least = {"limit": 1, "top": 1, "prompt_interval": 1, "input_len": 1, "output_len": 2, "requests": 1,
                 "repeats": 1, "rounds": 1}  # fmt: skip
        for name, low in least.items():
            if getattr(self, name) < low:
                raise _wrong(name, f"must be at least {low}, not {getattr(self, name)}")
        if not 0 < self.threshold <= 1:
            raise _wrong("threshold", f"must be above 0 and at most 1, not {self.threshold:g}")
        for name in ("score_tolerance", "text_tolerance", "speed_tolerance"):
            if not 0 <= getattr(self, name) < 1:
                raise _wrong(name, f"must be at least 0 and less than 1, not {getattr(self, name):g}")
        if not self.speed_seconds >= 0:
            raise _wrong("speed_seconds", f"must be at least 0, not {self.speed_seconds:g}")
        if self.kv_memory is not None and self.kv_memory < 1:
            raise _wrong("kv_memory", f"must be at least 1 byte, not {self.kv_memory}")
        if any(n < 64 for n in self.lengths) or list(self.lengths) != sorted(set(self.lengths)):
            raise _wrong("lengths", "must be 64 tokens or more, each once, in ascending order")


def _wrong(name: str, why: str) -> ConfigError:
    return ConfigError(f"--{name.replace('_', '-')}: {why}", field=name)


def grid(shortest: int, longest: int) -> tuple[int, ...]:
    """Powers of two times `shortest`, and the longest."""
    out, n = [], shortest
    while n < longest:
        out.append(n)
        n *= 2
    return (*out, longest)


def with_lengths(asked: Asked, lengths: tuple[int, ...]) -> Asked:
    """The needle at these lengths, unless it names its own; other tasks as they are."""
    if asked.task.name != "needle" or "lengths=" in asked.spec:
        return asked
    joined = "+".join(map(str, lengths))
    return make_tasks([f"{asked.spec}{'&' if '?' in asked.spec else '?'}lengths={joined}"])[0]
