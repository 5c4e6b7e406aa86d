"""How tokens get their experts, as data."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.core.mixers import Shapes


class Router(msgspec.Struct, frozen=True, kw_only=True):
    """How a token chooses its experts. Source: Shazeer et al., arXiv 1701.06538, section 2; DeepSeek-V3, arXiv
    2412.19437, section 2.1.2.

    Scores of the X experts are softmax, sigmoid or sqrt(softplus) of the router's product (weight `router` [X, E],
    `router.bias` if `bias`), or what SparseMixer makes of it: see below. The `top_k` best are chosen, ties by the lower
    id; `correction` (weight `router_correction` [X]) is added to the scores for the choice only. With `groups` > 1,
    only experts of the `top_groups` best of as many equal groups take part; a group is worth its best score ("max") or
    the sum of its two best ("top2"). `listed`: nobody chooses, a token's experts stand in a table (weight
    `router_table` [V, top_k], whole numbers); `hash`: they are what a function of the token's id says (a name of
    `model.hashes.HASHES`; Roller et al., arXiv 2106.04426). With the score `even`, which nothing but these two has,
    each of them weighs 1, and there is no product. An expert weighs its score; `renormalize`: divided by the sum over
    those chosen (plus 1e-20 unless scores are a softmax); `chosen_only`: the softmax runs over the chosen ones alone;
    then times `scale`. `scale_input`: the weight multiplies what goes into the expert, not what comes out (Llama 4).
    `expert_scale`: the weight is multiplied by a learned one of the expert (weight `router_scale` [X]).

    `tasks`: not tokens choose but tasks, of which this is number `task`. In place of the product there is a row of
    logits for each (weight `router_tasks` [tasks, X]), so that a task needs its own experts alone (`weights.tasks`).
    Source: Kudugunta et al., TaskMoE, arXiv 2110.03742, section 3.

    `sparse_mixer` takes one expert after the other: the best of those left, at z. It weighs its share of a softmax over
    those left whose z' is near, (z - z') / max(|z'|, z) <= 2 `jitter`. No other option applies but `scale`. Source: Liu
    et al., GRIN, arXiv 2409.12136, section 2.2.
    """

    score: Literal["softmax", "sigmoid", "sqrtsoftplus", "sparse_mixer", "even"] = "softmax"
    jitter: float = 0.0
    renormalize: bool = False
    chosen_only: bool = False
    scale: float = 1.0
    bias: bool = False
    correction: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    scale_input: bool = False
    expert_scale: bool = False
    listed: bool = False
    hash: str | None = None
    tasks: int = 0
    task: int = 0

    def __post_init__(self) -> None:
        fixed = self.listed + (self.hash is not None) + (self.tasks > 0)
        assert fixed <= 1, "experts are listed, or what a function says, or a task's"
        assert self.score != "even" or (fixed and not self.tasks), "experts that weigh the same are chosen by nobody"
        assert not (self.bias and "router" not in self.weight_shapes(1, 1)), "a bias is one of the product"
        assert 0 <= self.task < max(1, self.tasks), f"there is no task {self.task} of {self.tasks}"

    def weight_shapes(self, num_experts: int, e: int) -> Shapes:
        """`router_table` is the model's: it has a row for every token of the vocabulary."""
        out: Shapes = {}
        if self.tasks:
            out["router_tasks"] = (self.tasks, num_experts)
        elif self.score != "even":
            out["router"] = (num_experts, e)
        if self.bias:
            out["router.bias"] = (num_experts,)
        if self.correction:
            out["router_correction"] = (num_experts,)
        if self.expert_scale:
            out["router_scale"] = (num_experts,)
        return out
