"""Who leaves memory when another expert comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Worth = npt.NDArray[np.float64]


class ExpertOrder(Protocol):
    """What the experts of a model are worth keeping.

    Experts are numbered through all layers: those of a layer follow each other. Attributes:
        worth: [experts]; of those in memory that nobody needs now, the one with the least leaves, the first of equals.
    """

    worth: Worth

    def __init__(self, layers: Sequence[int]) -> None:
        """`layers`: where each layer's experts begin, and where the last one's end."""
        ...

    def came(self, expert: int) -> None:
        """It has been fetched. Mutates: worth."""
        ...

    def used(self, layer: int, experts: npt.NDArray[np.int64]) -> None:
        """A step runs these of a layer. Mutates: worth."""
        ...
