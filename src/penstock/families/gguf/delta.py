"""Where the weights of the gated delta rule are in a GGUF file.

Qwen3-Next has the parts of beta and dt of a key head together. Qwen3.5 has each by itself, and where several value
heads share a key head they lie so that each next one has the next key head: the mixer takes them so (`in_turn`), for
codes lie along rows, and columns of `o` could not be put in another order.
Source: `Qwen3NextModel` and `_LinearAttentionVReorderBase` of conversion/qwen.py, github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from penstock.core.model_spec import GatedDelta
from penstock.core.weight_map import Cut


def delta_places(blk: str, m: GatedDelta, e: int, *, apart: bool) -> dict[str, str | Cut]:
    """Logical name inside the layer -> tensor of the block `blk`, or a part of one. `apart`: beta and dt are tensors of
    their own, as in Qwen3.5."""
    g, share, total = m.key_heads, m.value_heads // m.key_heads, 2 * m.keys + m.values
    out: dict[str, str | Cut] = {
        "head_norm": f"{blk}ssm_norm.weight", "z": f"{blk}attn_gate.weight", "dt.bias": f"{blk}ssm_dt.bias",
        "a_log": f"{blk}ssm_a", "o": f"{blk}ssm_out.weight",
    }  # fmt: skip
    for name, start, rows in (("q", 0, m.keys), ("k", m.keys, m.keys), ("v", 2 * m.keys, m.values)):
        take = ((start, start + rows),)
        out[name] = Cut(f"{blk}attn_qkv.weight", (total, e), take)
        out[f"{name}.conv"] = Cut(f"{blk}ssm_conv1d.weight", (total, m.conv), take)
    if apart:
        return out | {"beta": f"{blk}ssm_beta.weight", "dt": f"{blk}ssm_alpha.weight"}
    for n, name in enumerate(("beta", "dt")):
        out[name] = Cut(f"{blk}ssm_ba.weight", (2 * m.value_heads, e), ((0, g), n), (g, 2, share, e))
    return out
