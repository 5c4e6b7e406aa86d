"""The reference ops: plain numpy, row by row. Slow, and the oracle of every other table.

The result of a token never depends, bit for bit, on the other tokens of the batch, on chunking or on paging: products
are one matrix-vector call per row, and attention reduces each token over its own context with shapes that follow from
its position alone.
"""

from __future__ import annotations

from penstock.ops.ref.attention.kept import write_kept
from penstock.ops.ref.blocks import attend_blocks
from penstock.ops.ref.connections import blend_streams, collapse_streams, spread, weigh_streams
from penstock.ops.ref.delta import gated_delta
from penstock.ops.ref.diagonal import diagonal_scan, rg_lru
from penstock.ops.ref.encoder import attend_text
from penstock.ops.ref.entries import attend_entries, choose_entries, write_entries
from penstock.ops.ref.experts import experts, route, route_listed
from penstock.ops.ref.indexer import attend_chosen, choose_tokens
from penstock.ops.ref.latent import latent_output, latent_query
from penstock.ops.ref.mamba import causal_conv, mamba2_scan, mamba_scan
from penstock.ops.ref.mlstm import mlstm, mlstm_gates
from penstock.ops.ref.norm import layer_norm, rms_norm
from penstock.ops.ref.pointwise import (
    activate,
    activate_gated,
    add,
    biased_heads,
    clip,
    columns,
    concat,
    flat,
    gate_rows,
    heads,
    multiply,
    scale,
    scale_queries,
    soft_cap,
    xielu,
)
from penstock.ops.ref.product import embed, linear, select
from penstock.ops.ref.recurrence import recurrent, retention
from penstock.ops.ref.rehearsal import rehearse
from penstock.ops.ref.rotary import rope, rope_angles
from penstock.ops.ref.rotation import hadamard
from penstock.ops.ref.rwkv import (
    interpolate,
    removal_key,
    replacement_key,
    shared_wkv6,
    token_shift,
    value_bonus,
    wkv4,
    wkv5,
    wkv6,
    wkv7,
)
from penstock.ops.ref.storage import observe, write_kv
from penstock.ops.ref.streams import (
    add_streams,
    correct_streams,
    cut_off,
    match_magnitude,
    mix_streams,
    scale_columns,
    stack_streams,
)
from penstock.ops.table import OpTable

REF = OpTable(
    "ref",
    {
        "embed": embed,
        "select": select,
        "linear": linear,
        "rms_norm": rms_norm,
        "layer_norm": layer_norm,
        "heads": heads,
        "flat": flat,
        "columns": columns,
        "rope_angles": rope_angles,
        "rope": rope,
        "activate": activate,
        "xielu": xielu,
        "activate_gated": activate_gated,
        "add": add,
        "multiply": multiply,
        "scale": scale,
        "clip": clip,
        "soft_cap": soft_cap,
        "gate_rows": gate_rows,
        "cut_off": cut_off,
        "match_magnitude": match_magnitude,
        "scale_columns": scale_columns,
        "stack_streams": stack_streams,
        "mix_streams": mix_streams,
        "correct_streams": correct_streams,
        "add_streams": add_streams,
        "biased_heads": biased_heads,
        "scale_queries": scale_queries,
        "route": route,
        "route_listed": route_listed,
        "experts": experts,
        "hadamard": hadamard,
        "write_kv": write_kv,
        "observe": observe,
        "write_kept": write_kept,
        "choose_tokens": choose_tokens,
        "attend_chosen": attend_chosen,
        "rehearse": rehearse,
        "attend_blocks": attend_blocks,
        "attend_text": attend_text,
        "latent_query": latent_query,
        "latent_output": latent_output,
        "write_entries": write_entries,
        "choose_entries": choose_entries,
        "attend_entries": attend_entries,
        "spread": spread,
        "weigh_streams": weigh_streams,
        "collapse_streams": collapse_streams,
        "blend_streams": blend_streams,
        "recurrent": recurrent,
        "retention": retention,
        "token_shift": token_shift,
        "interpolate": interpolate,
        "wkv4": wkv4,
        "removal_key": removal_key,
        "replacement_key": replacement_key,
        "wkv5": wkv5,
        "wkv6": wkv6,
        "shared_wkv6": shared_wkv6,
        "wkv7": wkv7,
        "value_bonus": value_bonus,
        "causal_conv": causal_conv,
        "mamba_scan": mamba_scan,
        "mamba2_scan": mamba2_scan,
        "gated_delta": gated_delta,
        "concat": concat,
        "rg_lru": rg_lru,
        "diagonal_scan": diagonal_scan,
        "mlstm_gates": mlstm_gates,
        "mlstm": mlstm,
    },
)
"""Every op but attention, which `ops.attention.ATTENTION_BACKENDS` names."""
