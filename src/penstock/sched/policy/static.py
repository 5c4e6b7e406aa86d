"""Request-level batching: a batch is formed once and runs until its longest member ends. The baseline of A03 and A05.

Source: the FasterTransformer behaviour described in Orca, OSDI 2022, section 3 (early-finished and late-joining).
"""

from __future__ import annotations

from penstock.sched.policy.dynamic import Dynamic


class Static(Dynamic):
    """Whoever waits when the engine is empty forms the batch; its members may enter over several steps, nobody else.

    Args: size: requests of a full batch; give it the value of max_num_seqs for a fair comparison.
    """

    name = "static"

    def __init__(self, size: int = 32) -> None:
        super().__init__(timeout_s=0.0, size=size)
