"""Where a text's end has occurred before. One pass of numpy over the text: nothing is kept between steps."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]


def ends_of(text: I32, tail: I32, least: int, most: int) -> tuple[npt.NDArray[np.intp], int]:
    """(ends, length): where in `text` the longest possible end of `tail` occurs, of `least` ... `most` tokens.

    `ends` are ascending indices of what follows; an occurrence at the very end of `text`, which nothing follows, does
    not count. No occurrence: ([], 0). `text` is read once, whatever `most` is: what ends alike in n + 1 tokens does
    so in n.
    """
    if not len(tail):
        return np.zeros(0, np.intp), 0
    ends = np.flatnonzero(text[:-1] == tail[-1]) + 1
    length = int(ends.size > 0)
    for back in range(2, min(most, len(tail)) + 1):
        longer = ends[ends >= back]
        longer = longer[text[longer - back] == tail[-back]]
        if not longer.size:
            break
        ends, length = longer, back
    return (ends, length) if length >= least else (ends[:0], 0)
