"""The list of operations a model is made of: what each computes, and a table of who computes it.

A table maps every name of `CONTRACTS` to a callable. `ops.ref.REF` is the plain one, the oracle of all others; faster
kernels replace its entries one by one with `OpTable.replaced`.

Shape letters: T tokens, R logit rows, E hidden, F feed-forward width, H query heads, G kv heads, D head dim, V vocab,
C latent rank, K and W key and value dim of a recurrent head, N and M input and output width of a product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

Op = Callable[..., Any]


class OpContract(NamedTuple):
    """What an implementation of `name` has to do.

    `inputs` and `output` describe arrays that flow through the program; `bound` what the builder fixes once. Arrays are
    float32 and C-contiguous unless said otherwise; an op returns a new array (or a view of its input where the contract
    says "view") and mutates nothing but the planes named in `mutates`. The result of a token (row) must not depend, bit
    for bit, on the other rows of the call.
    """

    name: str
    computes: str
    inputs: str
    bound: str
    output: str
    mutates: str = ""


CONTRACTS: tuple[OpContract, ...] = (
    OpContract("embed", "rows of a table", "token_ids int32 [T]", "weight [V, E]", "[T, E]"),
    OpContract("select", "the rows whose logits are wanted", "x [T, E]; rows int32 [R]", "", "[R, E]"),
    OpContract("linear", "x W^T + bias", "x [T, N]", "weight [M, N] float32, float16 or bfloat16 bits; bias [M]",
               "[T, M]"),
    OpContract("rms_norm", "x / sqrt(mean(x^2) + eps) * weight over the last axis", "x [..., N]", "weight [N]; eps",
               "[..., N]"),
    OpContract("layer_norm", "(x - mean) / sqrt(var + eps) * weight + bias over the last axis", "x [..., N]",
               "weight [N]; bias [N] or None; eps", "[..., N]"),
    OpContract("heads", "view of the last axis as heads", "x [T, H*D]", "number of heads", "[T, H, D] (view)"),
    OpContract("flat", "view of heads as one axis", "x [T, H, D]", "", "[T, H*D] (view)"),
    OpContract("columns", "a contiguous copy of columns start..stop", "x [T, N]", "start; stop", "[T, stop-start]"),
    OpContract("rope_angles", "cosines and sines of the tokens' positions", "positions int32 [T]",
               "table [2, P, dim/2] with P > every position", "[2, T, dim/2]"),
    OpContract("rope", "rotation of `dim` components of every head from component `first` on; the rest pass through",
               "x [T, H, D]; angles [2, T, dim/2]", "interleaved; first", "[T, H, D]"),
    OpContract("activate", "act(x)", "x [T, F]", "activation name", "[T, F]"),
    OpContract("activate_gated", "act(gate) * up", "gate [T, F]; up [T, F]", "activation name", "[T, F]"),
    OpContract("add", "x + y", "x [T, E]; y [T, E]", "", "[T, E]"),
    OpContract("write_kv", "rounds to the planes' dtype and stores at the tokens' positions",
               "step; a [T, G, D]; b [T, G, D]", "group; layer of the group; the two planes' names", "None",
               mutates="two planes of the group"),
    OpContract("attention", "softmax attention of every token over its own context (core.protocols.AttentionBackend)",
               "q [T, H, D]; step", "group; layer of the group; keys; value; scale; window; soft_cap", "[T, H, W]"),
    OpContract("latent_query", "query of absorbed latent attention: its part without position times the key projection",
               "q [T, H, nope + rope]", "key [H, nope, C]", "[T, H, C + rope]"),
    OpContract("latent_output", "values of absorbed latent attention out of the attended latent", "x [T, H, C]",
               "value [H, W, C]", "[T, H, W]"),
    OpContract("recurrent", "gated linear attention, token by token from the sequence's state",
               "q, k [T, H, K]; v [T, H, W]; decay [T, H] before the sigmoid; step", "group; layer of the group",
               "[T, H, W]", mutates="plane `state` of the group"),
)  # fmt: skip

OP_NAMES = frozenset(c.name for c in CONTRACTS)


class OpTable(Mapping[str, Op]):
    """Op name -> callable, complete over `CONTRACTS` except `attention`, which the chosen AttentionBackend computes.

    `batch_invariant`: keeps the contract that a row's result does not depend on its company, bit for bit. A table that
    does not is for measurements and for people who accept other tokens where logits nearly tie.
    """

    def __init__(self, name: str, entries: Mapping[str, Op], *, batch_invariant: bool = True) -> None:
        needed = OP_NAMES - {"attention"}
        assert set(entries) == needed, f"op table {name!r} differs from the contracts: {set(entries) ^ needed}"
        self.name = name
        self.batch_invariant = batch_invariant
        self._entries = dict(entries)

    def replaced(self, name: str, entries: Mapping[str, Op], *, batch_invariant: bool = True) -> OpTable:
        """A table called `name` with these entries in place of this one's."""
        return OpTable(name, {**self._entries, **entries}, batch_invariant=batch_invariant)

    def __getitem__(self, name: str) -> Op:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
