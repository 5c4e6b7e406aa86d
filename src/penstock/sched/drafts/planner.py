"""How many drafts a step makes, and whose: those that give most expected tokens per expected second.

Sources: see `adaptive`, which knows whether drafting is allowed at all.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from penstock.sched.drafts.acceptance import F64
from penstock.sched.drafts.cost import DraftCosts, StepCosts

MARGIN = 0.015
"""A plan with drafts must promise so much more than one without."""
FIRST_DRAFTS = 16
ALL = 8
STRIDE = 4
"""Numbers of drafts up to ALL are all looked at; beyond it those that fill a tile of STRIDE tokens, and then those
beside the best of them."""


class Planner:
    """Plans of one controller; `costs` and `draft_costs` change under it."""

    def __init__(self, costs: StepCosts, draft_costs: DraftCosts) -> None:
        self._costs = costs
        self._draft_costs = draft_costs

    def plan(self, chances: F64, context: int, prefill_tokens: int, draft_rate: float) -> list[int]:
        """Drafts for each sequence, or [] for nobody: those likelier than what pays, of equal ones the first.

        `chances`: [sequences, D] see `AcceptanceModel.chances`; `context`: cached tokens of all together;
        `prefill_tokens`: prompt tokens expected in the step; `draft_rate`: the share of proposals that hold a draft.
        """
        falling = -chances.ravel()
        order = np.arange(len(falling)) if len(chances) == 1 else falling.argsort(kind="stable")
        falling = falling[order]
        most = int(falling.searchsorted(0.0))
        if not self._costs.confirmed:  # a table that nothing has confirmed yet may be far off
            most = min(most, max(FIRST_DRAFTS, len(chances)))
        depths = order[:most] % chances.shape[1] + 1
        count = self._best(falling[:most], depths, len(chances), context, prefill_tokens, draft_rate) if most else 0
        if not count:
            return []
        return [count] if len(chances) == 1 else share(chances, count)

    def _best(
        self, falling: F64, depths: F64, num_rows: int, context: int, prefill_tokens: int, draft_rate: float
    ) -> int:
        """The number of drafts, likeliest first, that gives most tokens per second.

        A drafter has nothing for some sequences, so the width of the step is not certain: with one or two sequences it
        is one of two, with more the mean over one standard deviation less and more stands for all.
        """
        costs, draft_s = self._costs, self._draft_costs.seconds
        table, fill = costs.table(num_rows, context), costs.fill

        def seconds(width: int) -> float:  # costs.seconds, of which a plan asks dozens
            return table.get(width) or fill(table, num_rows, context, width)

        plain_s = seconds(num_rows)
        lost, deepest = falling.cumsum().tolist(), np.maximum.accumulate(depths).tolist()
        spread = (draft_rate * (1.0 - draft_rate) / num_rows) ** 0.5 if num_rows > 2 and draft_rate < 0.99 else 0.0

        drafting: dict[int, float] = {}

        def rate(count: int) -> float:
            if spread:
                low, high = (
                    max(0, round((draft_rate - spread) * count)),
                    min(count, round((draft_rate + spread) * count)),
                )
                step_s = (seconds(num_rows + low) + seconds(num_rows + high)) / 2.0
            elif num_rows <= 2:
                step_s = draft_rate * seconds(num_rows + count) + (1.0 - draft_rate) * plain_s
            else:
                step_s = seconds(num_rows + round(draft_rate * count))
            deep = deepest[count - 1].bit_length()  # draft costs go by powers of two
            more_s = drafting.get(deep)
            if more_s is None:
                more_s = drafting[deep] = draft_s(deepest[count - 1], num_rows)
            return float((num_rows - draft_rate * lost[count - 1]) / (step_s + more_s))

        best, chosen = num_rows / plain_s * (1.0 + MARGIN * draft_rate), 0
        for count in _counts(num_rows, len(falling)):
            found = rate(count)
            if found > best:
                best, chosen = found, count
            elif found < 0.5 * best:  # kernels may work in tiles, so one dip is not the end, but this one is
                break
        if chosen > ALL:
            near = range(chosen - STRIDE + 1, min(chosen + STRIDE, len(falling) + 1))
            best, chosen = max((rate(count), count) for count in near)
        if prefill_tokens and chosen:
            least = self._least_gain(best, num_rows, context, prefill_tokens)
            chosen = min(chosen, int(np.searchsorted(falling, -least, "right")))
        return chosen

    def _least_gain(self, rate: float, num_rows: int, context: int, prefill_tokens: int) -> float:
        """Drafts beside prompt tokens must bring as much per second as they do without: the prompts come anyway."""
        costs = self._costs
        more_s = costs.predicted_s(num_rows, context, 2 * num_rows, prefill_tokens)
        more_s -= costs.predicted_s(num_rows, context, num_rows, prefill_tokens)
        return rate * more_s / num_rows


@lru_cache(512)
def _counts(num_rows: int, most: int) -> tuple[int, ...]:
    counts = [k for k in range(1, most) if k <= ALL or (num_rows + k) % STRIDE == 0]
    return (*counts, most)


def share(chances: F64, count: int) -> list[int]:
    """Drafts for each sequence, if the `count` > 0 likeliest ones of all are made; of equal ones the first.

    A chance of 0 is no draft. Shapes: gains [sequences, D], falling along D.
    """
    flat = np.sort(chances, axis=None)[::-1]
    cut = flat[min(count, len(flat)) - 1]
    if cut <= 0.0:
        return list((chances > 0.0).sum(1).tolist())
    above, ties = (chances > cut).sum(1), (chances == cut).sum(1)
    spare = np.clip(count - int(above.sum()) - (np.cumsum(ties) - ties), 0, ties)
    return list((above + spare).tolist())
