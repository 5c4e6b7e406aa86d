"""What adapters do to products, and the reference of it.

Source: Hu et al., "LoRA", arXiv 2106.09685; rows of many adapters in one step: Chen et al., "Punica", arXiv 2310.18547;
scale sets: Kim et al., "PEQA", arXiv 2305.14152; coded differences: Isik et al., "GPT-Zip", 2023, and Liu et al.,
"BitDelta", arXiv 2402.10193.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32, widen
from penstock.ops.plan import I32
from penstock.ops.ref.product import linear
from penstock.ops.step import Step
from penstock.ops.stored import StoredMatrix

Numbers = npt.NDArray[Any]


class Rescaled(NamedTuple):
    """The codes of W with other scales: `scales` [N, G], of the type that W's have. `matrix`: W so; None where W's
    codes are made when it is packed, which only native programs do. `bias`: of the product."""

    scales: Numbers
    matrix: StoredMatrix | None
    bias: F32 | None


class LowRank(NamedTuple):
    """What one adapter makes of y = x W^T + bias: y * gain + shift + factor * ((x a^T) b^T).

    Shapes: a [r, K], b [N, r] of one type (float32, float16, bfloat16 bits as uint16), r 0 if there is no product; gain
    and shift float32 [N], or None. `codes`: before that, y becomes the product with other scales, or x codes^T is
    added.
    """

    a: Numbers
    b: Numbers
    factor: float
    gain: F32 | None = None
    shift: F32 | None = None
    codes: Rescaled | StoredMatrix | None = None

    @property
    def num_bytes(self) -> int:
        vectors = [v.nbytes for v in (self.gain, self.shift) if v is not None]
        codes = self.codes.scales if isinstance(self.codes, Rescaled) else self.codes
        return self.a.nbytes + self.b.nbytes + sum(vectors) + (0 if codes is None else codes.nbytes)


class AdapterTable(Protocol):
    """Adapters by number, in the form in which a backend's operations read them."""

    def prepare(self, parts: Mapping[str, LowRank]) -> Any:
        """What `put` takes, of what an adapter does to the products of these weights. In any thread."""
        ...

    def put(self, number: int, prepared: Any) -> None:
        """From the next step on, `number` is this adapter."""
        ...

    def drop(self, number: int) -> None:
        """Nobody has this adapter any more. Raises: KeyError if there is none."""
        ...


class AdaptingTable(Protocol):
    """An `AdapterTable` whose operation is called product by product."""

    @property
    def adapt(self) -> Callable[..., Any]:
        """y [T, N] of (x [T, K], y, step, what `of` gives) as the adapter of each token makes it; y may be changed."""
        ...

    def of(self, name: str) -> Any:
        """What each adapter does to the product of this weight."""
        ...


class StoredPart(Protocol):
    """What an adapter does to one product, somewhere else."""

    def read(self) -> LowRank: ...


class PlainTable:
    """The reference's table. `of(name)` [number] is what each adapter does to the product of that weight."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._parts: dict[str, list[LowRank | StoredPart | None]] = {}

    def of(self, name: str) -> list[LowRank | StoredPart | None]:
        return self._parts.setdefault(name, [None] * self._count)

    def prepare(self, parts: Mapping[str, LowRank]) -> Mapping[str, LowRank]:
        return parts

    def put(self, number: int, parts: Mapping[str, LowRank | StoredPart]) -> None:
        self.drop(number)
        for name, part in parts.items():
            self.of(name)[number] = part

    def drop(self, number: int) -> None:
        for own in self._parts.values():
            own[number] = None

    @property
    def adapt(self) -> Callable[..., F32]:
        return adapt


def adapt(x: F32, y: F32, step: Step, parts: list[LowRank | StoredPart | None]) -> F32:
    """y [T, N] as the adapter of each token makes it of x [T, K]; rows without one are those of `y`.

    Row by row, as `ops.ref.product.linear`: a row's result does not depend on its company.
    """
    numbers = step.plan.adapters
    if numbers is None:
        return y
    out = y.copy()
    for b, number in enumerate(numbers.tolist()):
        found = None if number < 0 else parts[number]
        if found is None:
            continue
        part = found if isinstance(found, LowRank) else found.read()
        a, up = (widen(m) if m.dtype == np.uint16 else m.astype(np.float32) for m in (part.a, part.b))
        for t in range(step.bounds[b], step.bounds[b + 1]):
            row = out[t] if part.codes is None else _coded(x[t : t + 1], out[t], part.codes)
            if part.gain is not None:
                row = row * part.gain
            if part.shift is not None:
                row = row + part.shift
            if len(a):
                row = row + up @ (np.float32(part.factor) * (a @ x[t]))
            out[t] = row
    return out


def _coded(x: F32, row: F32, codes: Rescaled | StoredMatrix) -> F32:
    if isinstance(codes, Rescaled):
        assert codes.matrix is not None, "the reference has no codes but those of files"
        whole: F32 = linear(x, codes.matrix, codes.bias)[0]
        return whole
    more: F32 = row + linear(x, codes)[0]
    return more


def tokens_of(numbers: I32, query_start_loc: I32) -> I32:
    """The adapter of each token [T], -1: none, of those of the sequences [B]."""
    return np.repeat(numbers, np.diff(query_start_loc))


def num_bytes_of(parts: Iterable[LowRank]) -> int:
    return sum(part.num_bytes for part in parts)
