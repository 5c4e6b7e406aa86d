"""What every ContextTransform promises. Registering one enrols it.

The reader is a stand-in whose answers depend on all that stands before a token, as a model's do.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from penstock.compress import CONTEXT_TRANSFORMS
from penstock.compress.options import make_transform
from penstock.core.compression import ContextJob, PromptCompression, Span
from penstock.core.protocols import ContextTransform

WORDS = (
    "The",
    " old",
    " house",
    " of",
    " Ann",
    ",",
    ".",
    " was",
    "\n",
    "\n\n",
    " 4",
    "8",
    "ing",
    "\ufffd",
    " ",
    "?",
    '"',
)


class FakeReader:
    """Nats of a token are drawn from a seed that is the text up to it."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], list[int]]] = []

    def nats(self, prefix: Sequence[int], ids: Sequence[int]) -> np.ndarray:
        self.asked.append((list(prefix), list(ids)))
        text = [*prefix, *ids]
        return np.array([random.Random(str(text[: n + 1])).random() * 8 for n in range(len(prefix), len(text))])


@pytest.fixture(params=CONTEXT_TRANSFORMS.names())
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def variants(name: str) -> list[PromptCompression]:
    """A method with each of its units, and with the options at their ends."""
    kind = CONTEXT_TRANSFORMS.get(name)
    made = [PromptCompression(method=name, rate=0.5, unit=unit) for unit in (None, *kind.units)]
    if "segment_tokens" in kind.options:
        made += [PromptCompression(method=name, rate=0.5, segment_tokens=n) for n in (1, 7, 1000)]
    if "coarse" in kind.options:
        made += [PromptCompression(method=name, rate=0.5, coarse=c) for c in (1.0, 1.1, 100.0)]
    if "seed" in kind.options:
        made.append(PromptCompression(method=name, rate=0.5, seed=9))
    return made


def job(seed: int, target: int | None = None) -> ContextJob:
    rng = random.Random(seed)
    size = rng.randint(3, 160)
    ids = [rng.randrange(len(WORDS)) for _ in range(size)]
    cuts = sorted(rng.sample(range(size + 1), 2 * min(rng.randint(1, 3), (size + 1) // 2)))
    spans: list[Span] = list(zip(cuts[::2], cuts[1::2], strict=True))
    total = sum(b - a for a, b in spans)
    return ContextJob(ids, [WORDS[i] for i in ids], spans, rng.randint(1, total) if target is None else target or total)


def keep(transform: ContextTransform, given: ContextJob) -> list[int]:
    return transform.keep(given, FakeReader() if transform.reads else None)


def test_it_has_its_name_and_says_what_it_takes(name: str) -> None:
    for options in variants(name):
        assert make_transform(options).name == name
    kind = CONTEXT_TRANSFORMS.get(name)
    assert kind.options <= set(PromptCompression.__struct_fields__)


@pytest.mark.parametrize("seed", range(12))
def test_exactly_so_many_of_the_right_tokens_stay(name: str, seed: int) -> None:
    for options in variants(name):
        given = job(seed)
        kept = keep(make_transform(options), given)
        assert len(kept) == given.target
        assert kept == sorted(set(kept))
        assert set(kept) <= set(given.context())


@pytest.mark.parametrize("seed", range(4))
def test_all_is_all_and_one_is_one(name: str, seed: int) -> None:
    for options in variants(name):
        whole = job(seed, 0)
        assert keep(make_transform(options), whole) == list(whole.context())
        assert len(keep(make_transform(options), job(seed, 1))) == 1


@pytest.mark.parametrize("seed", range(4))
def test_the_same_job_gives_the_same_tokens(name: str, seed: int) -> None:
    """From another object, and from one that has seen others; the job is as it was."""
    for options in variants(name):
        used, given = make_transform(options), job(seed)
        before = (list(given.ids), list(given.texts), list(given.spans))
        first = keep(used, given)
        keep(used, job(seed + 50))
        assert keep(used, given) == first == keep(make_transform(options), job(seed))
        assert (list(given.ids), list(given.texts), list(given.spans)) == before


@pytest.mark.parametrize("seed", range(4))
def test_what_stands_behind_the_last_span_changes_nothing(name: str, seed: int) -> None:
    """A question at the end decides nothing (no method here is aware of it), and is not read."""
    kind = CONTEXT_TRANSFORMS.get(name)
    if not kind.reads:
        pytest.skip("it looks at nothing")
    given = job(seed)
    end = given.spans[-1][1]
    longer = ContextJob(
        [*given.ids[:end], 3, 4, 5], [*given.texts[:end], " of", " Ann", ","], given.spans, given.target
    )
    for options in variants(name):
        reader = FakeReader()
        assert make_transform(options).keep(longer, reader) == keep(make_transform(options), given)
        assert all(len(prefix) + len(ids) <= end for prefix, ids in reader.asked)
