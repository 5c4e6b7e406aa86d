"""A whole block of attention and feed-forward whose weights several layers share."""

from __future__ import annotations

from typing import Literal

from penstock.core.mixers import Shapes
from penstock.core.mixers.attention import Attention


class SharedBlock(Attention, frozen=True, kw_only=True, tag="shared_block"):
    """Zamba 2's block number `block`, at one of the layers that use it: out(ffn(norm'(attention(norm([x; e]))))).

    Attention reads the residual x and the token's embedding e side by side, so its norm and its products q, k, v have
    2 E inputs. Nothing is added between the two halves. The block's weights are `shared.<block>.<name>`: `attn_norm`
    [2 E], `q`, `k`, `v`, `o`, `ffn_norm`, `gate`, `up`, `down`. Of the layer alone are the matrices of low rank that
    come to those of the block: `<name>_low` [rank, ...] and `<name>_high` for q, k, v (with `qkv_rank`), `ffn_low` with
    `gate_high` and `up_high` (with `ffn_rank`), and `out` [E, E].
    Source: Glorioso et al., Zamba 2, arXiv 2411.15242, section 2.
    """

    block: int
    ffn_width: int
    ffn_activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"] = "gelu"
    ffn_rank: int = 0
    qkv_rank: int = 0
    eps: float = 1e-5

    @property
    def shared(self) -> str:
        """What the names of the block's weights begin with."""
        return f"shared.{self.block}."

    def weight_shapes(self, e: int) -> Shapes:
        rows, out = self._rows, Shapes()
        for name in rows if self.qkv_rank else ():
            out |= {f"{name}_low": (self.qkv_rank, 2 * e), f"{name}_high": (rows[name], self.qkv_rank)}
        if self.ffn_rank:
            out |= {"ffn_low": (self.ffn_rank, e)}
            out |= {f"{name}_high": (self.ffn_width, self.ffn_rank) for name in ("gate", "up")}
        return out | {"out": (e, e)}

    def shared_shapes(self, e: int) -> Shapes:
        """Of the block's weights, without the beginning of their names."""
        out: Shapes = {"attn_norm": (2 * e,)} | {name: (rows, 2 * e) for name, rows in self._rows.items()}
        out |= {"o": (e, self.num_heads * self.value_dim), "ffn_norm": (e,)}
        return out | {"gate": (self.ffn_width, e), "up": (self.ffn_width, e), "down": (e, self.ffn_width)}

    @property
    def _rows(self) -> dict[str, int]:
        heads = {"q": self.num_heads, "k": self.num_kv_heads, "v": self.num_kv_heads}
        return {name: n * self.head_dim for name, n in heads.items()}
