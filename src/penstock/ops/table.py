"""The list of operations a model is made of: what each computes, and a table of who computes it.

A table maps every name of `CONTRACTS` to a callable. `ops.ref.REF` is the plain one, the oracle of all others; faster
kernels replace its entries one by one with `OpTable.replaced`.

Shape letters: T tokens, R logit rows, E hidden, F feed-forward width, H query heads, G kv heads, D head dim, V vocab,
C latent rank, X experts, K chosen ones, K and W also key and value dim of a recurrent head, N and M input and output
width of a product.
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
    OpContract("embed", "rows of a table; ids beyond it read row 0", "token_ids int32 [T]",
               "weight [V, E]; for tokens of several kinds (ModelSpec.token_types): word or type, V", "[T, E]"),
    OpContract("select", "the rows whose logits are wanted", "x [T, E]; rows int32 [R]", "", "[R, E]"),
    OpContract("linear", "x W^T + bias", "x [T, N]", "weight [M, N], an ops.stored.Weight; bias [M]", "[T, M]"),
    OpContract("gather", "what all ranks have of a row, side by side (parallel.shard)", "x [T, widths[rank]]",
               "the ranks (parallel.comm.Comm); widths", "[T, sum of widths]"),
    OpContract("merge", "attention to all tokens, of a rank's heads, of what ranks found (parallel.shard)",
               "parts [T, H*(W+2)]", "the ranks; H; W; pairwise; sinks [H/ranks] or None", "[T, H/ranks * W]"),
    OpContract("send", "gives rows to the next stage (parallel.stages)", "x [T, N]", "a parallel.pipe.SharedChannel",
               "None"),
    OpContract("receive", "rows of the stage before", "", "a parallel.pipe.SharedChannel", "[T, N]"),
    OpContract("adapt", "what the adapter of each token makes of a product (ops.adapters)",
               "x [T, K], which was multiplied; y [T, N], what came of it; step", "name of the weight", "[T, N]"),
    OpContract("rms_norm", "x / sqrt(mean(x^2) + eps) * weight over the last axis", "x [..., N]",
               "weight, broadcast over x, or None; eps", "[..., N]"),
    OpContract("layer_norm", "(x - mean) / sqrt(var + eps) * weight + bias over the last axis", "x [..., N]",
               "weight and bias, broadcast over x, or None; eps", "[..., N]"),
    OpContract("heads", "view of the last axis as heads", "x [T, H*D]", "number of heads", "[T, H, D] (view)"),
    OpContract("flat", "view of heads as one axis", "x [T, H, D]", "", "[T, H*D] (view)"),
    OpContract("columns", "a contiguous copy of columns start..stop", "x [T, N]", "start; stop", "[T, stop-start]"),
    OpContract("rope_angles", "cosines and sines of the tokens' positions", "positions int32 [T]",
               "table [2, P, dim/2] or [2, P, G, dim/2] with P > every position", "[2, T, dim/2] or [2, T, G, dim/2]"),
    OpContract("rope", "rotation of `dim` components of every head from component `first` on; the rest pass through",
               "x [T, H, D]; angles [2, T, dim/2], or [2, T, G, dim/2] for G equal runs of heads", "interleaved; first",
               "[T, H, D]"),
    OpContract("activate", "act(x)", "x [T, F]", "activation name", "[T, F]"),
    OpContract("activate_gated", "act(gate) * up; swiglu_clamped and a limit as core.model_spec.FeedForward says",
               "gate [T, F]; up [T, F]", "activation name; limit or None", "[T, F]"),
    OpContract("xielu", "positive x^2 + x/2 above 0, else negative (expm1(min(x, -1e-6)) - x) + x/2", "x [T, F]",
               "positive; negative", "[T, F]"),
    OpContract("add", "x + y", "x [T, E]; y [T, E]", "", "[T, E]"),
    OpContract("multiply", "x * y", "x [T, E]; y [T, E]", "", "[T, E]"),
    OpContract("scale", "x * factor", "x [T, ...]", "factor", "[T, ...]"),
    OpContract("clip", "x cut to [-limit, limit]", "x [T, N]", "limit", "[T, N]"),
    OpContract("soft_cap", "cap * tanh(x / cap)", "x [R, V]", "cap", "[R, V]"),
    OpContract("gate_rows", "x * sigmoid(gate), or x * softplus(gate)",
               "x [T, E]; gate [T, 1] or [T, E]; or of heads: x [T, H, D]; gate [T, H, 1]",
               "sigmoid (also if nothing is bound) or softplus", "[T, E] or [T, H, D]"),
    OpContract("biased_heads", "heads with four more components: a number that counts in scores, and zeros",
               "x [T, H, D]; dt [T, H], or x again without a",
               "a [H] or None; factor: the number is factor e^(a softplus(dt)), or factor", "[T, H, D + 4]"),
    OpContract("cut_off", "max(gate - (mean + factor * standard deviation of its row), 0)", "gate [T, F]", "factor",
               "[T, F]"),
    OpContract("match_magnitude", "x as large as another row in the root mean square", "x [T, E]; like [T, E]", "",
               "[T, E]"),
    OpContract("scale_columns", "x * weight", "x [T, E]", "weight [E]", "[T, E]"),
    OpContract("stack_streams", "rows side by side (ops.ref.streams)", "n of [T, E]", "", "[T, n, E]"),
    OpContract("mix_streams", "x_i + sum over j of weights_(n i + j) x_j", "x [T, n, E]; weights [T, n*n]", "",
               "[T, n, E]"),
    OpContract("correct_streams", "x_i + (found - x_active) (1 + weights_i)",
               "x [T, n, E]; found [T, E]; weights [T, n]", "active", "[T, n, E]"),
    OpContract("add_streams", "x plus y in all streams but the first", "x [T, n, E]; y [T, E]", "", "[T, n, E]"),
    OpContract("scale_queries", "x * (1 + beta * log(1 + floor((p + shift) / floor))) at position p",
               "x [T, H, D]; positions int32 [T]", "beta; floor; shift", "[T, H, D]"),
    OpContract("route", "the experts of each token and what they weigh (core.model_spec.Router)", "logits [T, X]",
               "top_k; router; correction [X] or None; what experts weigh besides [X]",
               "Routes: ids int32 [T, K] ascending, weights [T, K]"),
    OpContract("route_listed", "the same, with experts that are listed for every token of the vocabulary, or for all",
               "logits [T, X] (even scores: any rows); token_ids int32 [T]",
               "top_k; router; experts of each token int32 [V, K] or [1, K], ascending; as in route [X]", "Routes"),
    OpContract("experts", "each token through its experts, weighed and added in id order", "x [T, E]; routes",
               "ExpertWeights of every expert; activation name; limit or None; scale_input; the table's `linear`",
               "[T, E]"),
    OpContract("write_kv", "rounds to the planes' dtype and stores at the tokens' positions (a tree: slots)",
               "step; a [T, G, D]; b [T, G, D]", "group; layer of the group; the two planes' names; planes of bounds",
               "None", mutates="two planes of the group, and the bounds"),
    OpContract("hadamard", "rotation of every head by its Hadamard matrix (ops.ref.rotation)", "x [T, H, D]", "",
               "[T, H, D]"),
    OpContract("write_kept", "stores the newest and the first tokens as float16 and encodes complete blocks",
               "step; k [T, G, D]; v [T, G, D]", "group and layer of the codes; ops.kept.Kept", "None",
               mutates="planes k and v, and those of their scales, of two groups or three"),
    OpContract("observe", "shows a layer's queries to who chooses by attention (Step.observed)", "q [T, H, D]; step",
               "group; layer of the group", "None"),
    OpContract("attention", "softmax attention of each token over its own context (core.protocols.AttentionBackend)",
               "q [T, H, D]; step", "group; layer of the group; keys; value; scale; window; chunk; soft_cap; slopes "
               "[H]; sinks [H]; rotation of raw keys; kept if newest tokens are kept apart; pages that are read; "
               "chosen if tokens were; share, (ranks, rank), if ranks have some tokens each", "[T, H, W]"),
    OpContract("attend_text", "softmax attention of each token over the whole of its text, which begins in this step",
               "q, k, v [T, H, D]; step", "scale; how far a token sees to both sides, or None", "[T, H, D]"),
    OpContract("latent_query", "query of absorbed latent attention: its part without position times the key projection",
               "q [T, H, nope + rope]", "key [H, nope, C]", "[T, H, C + rope]"),
    OpContract("choose_tokens", "the tokens that each token's sparse attention reads (core.mixers.attention.Indexer)",
               "q [T, H, D]; weights [T, H]; step", "group; layer of the group; plane of keys; top_k; scale of q.k",
               "T arrays of up to top_k places among the tokens seen, ascending"),
    OpContract("attend_chosen", "softmax attention of each token over the tokens it has chosen",
               "q [T, H, D]; chosen; step", "group; layer of the group; keys; value; scale", "[T, H, W]"),
    OpContract("rehearse", "the tokens that kv heads of a layer shall read (ops.ref.rehearsal): `attention` finds them",
               "q [T, H, R], rehearsed queries; step",
               "group; layer of the group; plane of parts of keys; scale; core.selection.TokenReads; whether of tokens "
               "whose predecessors run in the step, or of the others", "None"),
    OpContract("attend_blocks", "softmax attention over the blocks that an indexer chooses for each kv head "
               "(core.mixers.blocks.BlockAttention)", "q [T, H, D]; index_q [T, G, I]; step",
               "group; layer of the group; tokens of a block; top_k; newest blocks; scale", "[T, H, D]"),
    OpContract("latent_output", "each head times a matrix: values out of the attended latent, gates by blocks",
               "x [T, H, C]", "value [H, W, C]", "[T, H, W]"),
    OpContract("write_entries", "keeps what tokens give to entries, and makes those that end in this step "
               "(core.mixers.compressed.EntryAttention)", "step; value, score [T, s*D]",
               "group and layer of what waits; group and layer of the entries; plane; every; overlap; bias [m, s*D]; "
               "weight [D]; eps; rope table [2, P, dim/2]; interleaved", "None",
               mutates="planes `PLANE_value` and `PLANE_score` of the one group, the plane of the other"),
    OpContract("choose_entries", "the entries that each token reads (core.mixers.compressed.EntryIndexer)",
               "q [T, H, D]; weights [T, H]; step", "group; layer of the group; plane; top_k; scale of q.entry; every",
               "whole numbers [T, top_k], ascending, -1 for none"),
    OpContract("attend_entries", "softmax attention of each token over its window and entries",
               "q [T, H, D]; step; what choose_entries gave, or none: all it may see",
               "group and layer of the window; those of the entries; planes of both; every; window; scale; sinks [H]",
               "[T, H, D]"),
    OpContract("spread", "a vector as so many equal streams (core.mixers.streams.Streams)", "x [T, E]", "n",
               "[T, n*E]"),
    OpContract("weigh_streams", "what streams weigh: to read, to write and to mix; of the head to read only",
               "x [T, (2+n)n] or [T, n]", "scale [3] or [1]; base; n; iterations; eps", "[T, (2+n)n] or [T, n]"),
    OpContract("collapse_streams", "the sum of the streams by their first n weights", "x [T, n*E]; weights", "n",
               "[T, E]"),
    OpContract("blend_streams", "streams go over into each other and get what a half adds",
               "x [T, n*E]; weights [T, (2+n)n]; y [T, E]", "n", "[T, n*E]"),
    OpContract("recurrent", "gated linear attention, token by token from the sequence's state",
               "q, k [T, H, K]; v [T, H, W]; decay [T, H] before the sigmoid; step", "group; layer of the group",
               "[T, H, W]", mutates="plane `state` of the group"),
    OpContract("retention", "the same with a fixed decay per head", "q, k [T, H, K]; v [T, H, W]; step",
               "group; layer of the group; decay [H]", "[T, H, W]", mutates="plane `state` of the group"),
    OpContract("token_shift", "x of the token before each, zeros for the first of a text", "x [T, E]; step",
               "group; layer of the group; plane", "[T, E]", mutates="the named plane of the group"),
    OpContract("interpolate", "x + (y - x) * weight", "x [T, E]; y [T, E]; weight [T, E] unless bound", "weight [E]",
               "[T, E]"),
    OpContract("wkv4", "RWKV-4's fading weighted mean of the values so far", "k, v [T, W]; step",
               "decay [W] below zero; first [W]; group; layer of the group", "[T, W]",
               mutates="planes `num`, `den` and `exponent` of the group"),
    OpContract("removal_key", "unit vectors of k * weight, head by head", "k [T, H*D]", "weight [H*D]; number of heads",
               "[T, H, D]"),
    OpContract("replacement_key", "k * (1 + (rate - 1) * weight)", "k, rate [T, W]", "weight [W]", "[T, W]"),
    OpContract("wkv5", "RWKV-5's fading sum of values by their keys, token by token from the sequence's state",
               "r, k, v [T, H, D]; step", "group; layer of the group; first [H, D]; decay [H, D], 0 to 1", "[T, H, D]",
               mutates="plane `state` of the group"),
    OpContract("wkv6", "the same with a decay per token", "r, k, v, w (decay exp(-exp(w))) [T, H, D]; step",
               "group; layer of the group; first [H, D]", "[T, H, D]", mutates="plane `state` of the group"),
    OpContract("shared_wkv6", "the same without a bonus, of shared keys that are as large as what fades",
               "r, w [T, H, K]; k [T, G, K]; v [T, G, W]; in the order r, k, v, w; step", "group; layer of the group",
               "[T, H, W]", mutates="plane `state` of the group"),
    OpContract("wkv7", "RWKV-7's generalised delta rule, token by token from the sequence's state",
               "r, w (before sigmoid and decay), k, v, removal, rate, all [T, H, D]; step", "group; layer of the group",
               "[T, H, D]", mutates="plane `state` of the group"),
    OpContract("value_bonus", "(sum of r * k * weight over D) * v", "r, k, v [T, H, D]", "weight [H, D]", "[T, H, D]"),
    OpContract("causal_conv", "convolution of every channel with its own last inputs, zeros before the first token",
               "x [T, N]; step",
               "group; layer of the group; taps [K, N], the oldest first; bias [N] or None; plane, else `conv`",
               "[T, N]", mutates="that plane of the group"),
    OpContract("mamba_scan", "Mamba's state space, token by token from the sequence's state (ops.ref.mamba)",
               "x, dt [T, N] (dt before softplus); b, c [T, K]; step", "group; layer of the group; a [N, K]; d [N]",
               "[T, N]", mutates="plane `state` of the group"),
    OpContract("mamba2_scan", "the same with one decay per head; H/G heads share b and c",
               "x [T, H, D]; dt [T, H]; b, c [T, G, K]; step",
               "group; layer of the group; a [H]; d [H]; dt_bias [H]; smallest and largest dt after softplus",
               "[T, H, D]", mutates="plane `state` of the group"),
    OpContract("gated_delta", "the gated delta rule, token by token from the sequence's state (ops.ref.delta)",
               "q, k [T, G, K]; v [T, H, W]; dt [T, H] or [T, H*K] before softplus; beta [T, H] before the "
               "sigmoid; step",
               "group; layer of the group; a [H]; eps of unit vectors; what beta is multiplied by; whether every G-th "
               "head shares a key head, not those in a row", "[T, H, W]",
               mutates="plane `state` of the group"),
    OpContract("concat", "x and y side by side", "x [T, N]; y [T, M]", "", "[T, N+M]"),
    OpContract("rg_lru", "a real-gated linear recurrent unit, from the sequence's state (ops.ref.diagonal)",
               "x, gates of the input and of the state (both before bias and sigmoid) [T, N]; step",
               "group; layer of the group; a [N] below zero; the gates' biases [N]", "[T, N]",
               mutates="plane `state` of the group"),
    OpContract("diagonal_scan", "a complex diagonal recurrence, token by token from the sequence's state "
               "(ops.ref.diagonal)", "x [T, N], complex rows as real, then imaginary parts; step",
               "group; layer of the group; a, c [2, N, K] real and imaginary parts; d [N], or None for complex rows",
               "as x", mutates="planes `re` and `im` of the group"),
    OpContract("mlstm_gates", "of an mLSTM what is not linear: decay, share of the new, and scale of each head",
               "gates of the input and of the state [T, H]; q, k [T, H, K]; step", "group; layer of the group; eps",
               "[T, 3*H]", mutates="planes `norm` and `max` of the group"),
    OpContract("mlstm", "the mLSTM's matrices, token by token from the sequence's state (ops.ref.mlstm)",
               "q, k [T, H, K]; v [T, H, W]; gates [T, 3*H]; step", "group; layer of the group", "[T, H, W]",
               mutates="plane `state` of the group"),
)  # fmt: skip

OP_NAMES = frozenset(c.name for c in CONTRACTS)
BESIDE = frozenset({"attention", "adapt", "gather", "merge", "send", "receive"})
"""In no table: an AttentionBackend computes the first, `ops.adapters` the second, `parallel.comm` the third, native
kernels alone the others."""


class OpTable(Mapping[str, Op]):
    """Op name -> callable, complete over `CONTRACTS` but those that are `BESIDE`.

    `batch_invariant`: keeps the contract that a row's result does not depend on its company, bit for bit. A table that
    does not is for measurements and for people who accept other tokens where logits nearly tie.
    """

    def __init__(self, name: str, entries: Mapping[str, Op], *, batch_invariant: bool = True) -> None:
        needed = OP_NAMES - BESIDE
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
