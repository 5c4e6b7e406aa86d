"""What each optimisation claims: which of Context, Accuracy and Performance it is there to improve.

The six types C, A, P, CA, CP, AP are those of the CAP survey (arXiv 2405.11299, table 1): it holds that no optimisation
improves all three. Its table: positional embedding C; sparse attention, quantisation and pruning P; prompt compression
CP; StreamingLLM, in its text, CP. What it leaves to other surveys (paging, batching, caches, kernels, speculation) is P
here, and exact: accuracy must not move. A label is a claim; the board says whether it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.config.speculative import parse_speculative
from penstock.core.kv_codec import KV_CODECS
from penstock.runner.verifiers import LOSSY, VERIFIERS
from penstock.select import KV_SELECTORS

AXES = "CAP"


@dataclass(frozen=True)
class Label:
    """`axes`: letters of AXES, in that order; empty: nothing is claimed. `exact`: no token may change."""

    axes: str
    exact: bool
    why: str


_SELECTOR = Label("CP", False, "drops keys and values: room for context, less to read (StreamingLLM: CP, 2405.11299)")
_READS_LESS = Label("P", False, "sparse attention: P (2405.11299, table 1); it frees no memory")
_KV_CODEC = Label("CP", False, "quantisation: P (2405.11299, table 1); of keys and values it makes room, C, as well")
_WEIGHTS = Label("P", False, "quantisation: P (2405.11299, table 1)")
_POSITIONS = Label("C", False, "positional embedding: C (2405.11299, table 1)")
_SYSTEM = Label("P", True, "a system method: P, and no token changes (2407.12391)")
_NUMBERS = Label("P", False, "other number formats or sums: P")
_LONGER = Label("C", True, "how long a sequence may be: C")

LABELS: dict[str, Label] = {
    "kv_selector": _SELECTOR,
    "kv_cache_dtype": _KV_CODEC,
    "quantization": _WEIGHTS,
    "activation_quantization": _NUMBERS,
    "rope_scaling": _POSITIONS,
    "rope_theta": _POSITIONS,
    "max_model_len": _LONGER,
    "dtype": _NUMBERS,
    "ops": _NUMBERS,
    "attention_backend": _NUMBERS,
    "cascade_attention": _SYSTEM,
    "max_loras": _SYSTEM,
    "max_cpu_loras": _SYSTEM,
    "lora_memory": _SYSTEM,
    "finetune_share": _SYSTEM,
    "lora_merge_threshold": _NUMBERS,
    "speculative_config": _SYSTEM,
    "enable_prefix_caching": _SYSTEM,
    "prefix_cache": _SYSTEM,
    "eviction": _SYSTEM,
    "kv_allocator": _SYSTEM,
    "module_chunk_tokens": Label(
        "P", False, "parts of a prompt that do not see each other: P, for accuracy (2405.16444)"
    ),
    "kv_layer_tpot": _SYSTEM,
    "kv_layer_rows": _SYSTEM,
    "block_size": _SYSTEM,
    "swap_space": _SYSTEM,
    "swap_tier": _SYSTEM,
    "enable_hierarchical_cache": _SYSTEM,
    "kv_offload": _SYSTEM,
    "kv_offload_secret_file": _SYSTEM,
    "kv_offload_format": _NUMBERS,
    "kv_load_policy": _SYSTEM,
    "kv_fetch_ahead": _SYSTEM,
    "kv_pin_share": _SYSTEM,
    "kv_offload_eviction": _SYSTEM,
    "slot_checkpoint_tokens": _SYSTEM,
    "slot_checkpoint_rule": _SYSTEM,
    "scheduling_policy": _SYSTEM,
    "length_predictor": _SYSTEM,
    "max_num_seqs": _SYSTEM,
    "max_num_batched_tokens": _SYSTEM,
    "preemption_mode": _SYSTEM,
    "pause_mode": _SYSTEM,
    "offline_policy": _SYSTEM,
    "offline_step_ms": _SYSTEM,
    "offline_slowdown": _SYSTEM,
    "schedule_conservativeness": _SYSTEM,
    "enable_chunked_prefill": _SYSTEM,
    "decode_step_ms": _SYSTEM,
    "adaptive": _SYSTEM,
    "adaptive_slo": _SYSTEM,
    "adaptive_knobs": _SYSTEM,
    "long_prefill_token_threshold": _SYSTEM,
    "preset": _SYSTEM,
    "tuned_for": _SYSTEM,
    "threads": _SYSTEM,
    "packed_weights": _SYSTEM,
    "memory_bytes": _SYSTEM,
    "offload_rates": _SYSTEM,
    "weight_memory_bytes": _SYSTEM,
    "weight_prefetch": _SYSTEM,
    "expert_memory_bytes": _SYSTEM,
    "expert_eviction": _SYSTEM,
    "expert_prediction": _SYSTEM,
    "executor": _SYSTEM,
    "depth": _SYSTEM,
}
"""By setting. One that is not here (kv_budget, say) is a part of another, and claims nothing by itself."""

VALUES: dict[tuple[str, Any], Label | None] = {
    ("kv_selector", "none"): None,
    ("quantization", "none"): None,
    ("kv_offload_format", "plain"): None,
    ("kv_cache_dtype", "auto"): _NUMBERS,
    **{("kv_cache_dtype", codec): _NUMBERS for codec in KV_CODECS if not KV_CODECS.traits(codec).quantises},
}
"""Values that claim something else than their setting does; None: nothing."""


def label_of(settings: Mapping[str, Any]) -> Label:
    """What a configuration claims: all that any of its settings claims; exact only if all of them are."""
    found = [label for name, value in settings.items() if (label := _one(name, value)) is not None]
    axes = "".join(axis for axis in AXES if any(axis in label.axes for label in found))
    return Label(axes, all(label.exact for label in found), "; ".join(dict.fromkeys(label.why for label in found)))


def _one(name: str, value: Any) -> Label | None:
    if isinstance(value, str) and (name, value) in VALUES:
        return VALUES[name, value]
    if name == "kv_selector" and KV_SELECTORS.traits(value).drops == "nothing":
        return _READS_LESS
    if name == "speculative_config":
        speculation = parse_speculative(value)
        if speculation is not None and VERIFIERS.traits(speculation.verifier) == LOSSY:
            return Label("P", False, f"speculation with the verifier {speculation.verifier}: P, for accuracy")
    return LABELS.get(name)
