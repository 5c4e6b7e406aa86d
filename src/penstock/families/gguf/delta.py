"""Where the weights of the gated delta rule are in a GGUF file.

Qwen3-Next has the parts of beta and dt of a key head together. Qwen3.5 has each by itself, but where several value
heads share a key head they lie in another order: first the first of every key head, then the second of every one.
Source: `Qwen3NextModel` and `_LinearAttentionVReorderBase` of conversion/qwen.py, github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from penstock.base.errors import UnsupportedError
from penstock.core.model_spec import GatedDelta
from penstock.core.weight_map import Cut


def delta_places(blk: str, m: GatedDelta, e: int, *, in_turn: bool) -> dict[str, str | Cut]:
    """Logical name inside the layer -> tensor of the block `blk`, or a part of one. `in_turn`: as in Qwen3.5."""
    g, share, total = m.key_heads, m.value_heads // m.key_heads, 2 * m.keys + m.values
    out: dict[str, str | Cut] = {"head_norm": f"{blk}ssm_norm.weight"}
    for name, start in (("q", 0), ("k", m.keys)):
        take = ((start, start + m.keys),)
        out[name] = Cut(f"{blk}attn_qkv.weight", (total, e), take)
        out[f"{name}.conv"] = Cut(f"{blk}ssm_conv1d.weight", (total, m.conv), take)
    rows = ((2 * m.keys, total),)
    if not in_turn:
        for n, name in enumerate(("beta", "dt")):
            out[name] = Cut(f"{blk}ssm_ba.weight", (2 * m.value_heads, e), ((0, g), n), (g, 2, share, e))
    if not in_turn or share == 1:
        whole = {"z": "attn_gate.weight", "dt.bias": "ssm_dt.bias", "a_log": "ssm_a", "o": "ssm_out.weight"}
        if in_turn:
            whole |= {"beta": "ssm_beta.weight", "dt": "ssm_alpha.weight"}
        return out | {name: blk + stored for name, stored in whole.items()} | {
            "v": Cut(f"{blk}attn_qkv.weight", (total, e), rows),
            "v.conv": Cut(f"{blk}ssm_conv1d.weight", (total, m.conv), rows),
        }  # fmt: skip
    before, rest = divmod(2 * m.key_dim, m.value_dim)
    if rest:
        raise UnsupportedError(
            f"value heads of {m.value_dim} components beside key heads of {m.key_dim} are in an order that is not read"
        )
    # Seen as [share, key heads, ...], the values behind what q and k take of it.
    for name, stored, columns in (("v", "attn_qkv.weight", e), ("v.conv", "ssm_conv1d.weight", m.conv)):
        view, take = (before + share, g, m.value_dim, columns), ((before, before + share),)
        out[name] = Cut(blk + stored, (total, columns), take, view, (1, 0, 2, 3))
    out["z"] = Cut(f"{blk}attn_gate.weight", (m.values, e), (), (share, g, m.value_dim, e), (1, 0, 2, 3))
    out["o"] = Cut(f"{blk}ssm_out.weight", (e, m.values), (), (e, share, g, m.value_dim), (0, 2, 1, 3))
    for name, stored in (("beta", "ssm_beta.weight"), ("dt", "ssm_alpha.weight")):
        out[name] = Cut(blk + stored, (m.value_heads, e), (), (share, g, e), (1, 0, 2))
    for name, stored in (("dt.bias", "ssm_dt.bias"), ("a_log", "ssm_a")):
        out[name] = Cut(blk + stored, (m.value_heads,), (), (share, g), (1, 0))
    return out
