"""AutoRound: GPTQ's or AWQ's tensors, as its `packing_format` says.

Zero points of "auto_round:auto_gptq" and "auto_round:gptq" are stored less one, those of "auto_round", "auto_round:
gptqmodel" and "auto_round:exllamav2" as they are. Matrices may have bits and groups of their own (`extra_config`), told
by their tensors. Source: `export_to_autoround` and `inference/backend.py` of github.com/intel/auto-round.
"""

from __future__ import annotations

from penstock.families.quantization.grouped import Grouped
from penstock.families.quantization.settings import Settings

_LESS_ONE = ("auto_round:auto_gptq", "auto_round:gptq")
_AS_THEY_ARE = ("auto_round", "auto_round:gptqmodel", "auto_round:exllamav2", "auto_round:tritonv2")
_AWQ = ("auto_round:auto_awq", "auto_round:awq")
_FIELDS = {"bits", "group_size", "sym", "data_type", "act_bits", "packing_format", "extra_config", "super_bits",
           "super_group_size", "quant_lm_head", "rotation_configs"}  # fmt: skip
_NOTES = {
    "quant_method", "autoround_version", "iters", "lr", "minmax_lr", "low_gpu_mem_usage", "nsamples", "seqlen",
    "batch_size", "dataset", "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input", "scale_dtype",
    "block_name_to_quantize", "to_quant_block_names", "act_sym", "act_group_size", "act_data_type", "act_dynamic",
    "backend", "amp", "gradient_accumulate_steps", "modules_to_not_convert", "static_kv_dtype",
    "static_attention_dtype", "regex_config", "not_use_best_mse", "lr_scheduler", "enable_alg_ext", "nblocks", "device",
    "export_format", "model_free", "quant_block_list", "supported_types", "static_attention_granularity",
    "static_kv_granularity",
}  # fmt: skip
_BITS = (2, 3, 4, 5, 6, 7, 8)
_OWN = {"bits", "group_size", "sym", "data_type", "act_bits", "act_data_type", "act_sym", "act_group_size",
        "act_dynamic", "scale_dtype", "super_bits", "super_group_size", "fixed_by_user", "in_blocks"}  # fmt: skip
_ROUNDED = 15
"""Activations of so many bits or fewer are rounded; 16 and 32 say that they are not."""


def read(settings: Settings) -> Grouped:
    settings.allow(_FIELDS | _NOTES)
    _check(settings)
    bits, group = settings.bits(_BITS, "bits"), settings.group("group_size")
    symmetric, every = settings.flag("sym", True), [bits]
    packing = settings.get("packing_format") or "auto_round:auto_gptq"
    if packing not in (*_LESS_ONE, *_AS_THEY_ARE, *_AWQ):
        raise settings.refused(
            f"packing_format {packing!s:.60}; auto_round:auto_gptq and auto_round:auto_awq are read: export it as one"
        )
    extra = settings.given.get("extra_config") or {}
    for name, given in settings.inner(extra, "extra_config").given.items():
        own = settings.inner(given, f"extra_config of {name!s:.60}")
        own.allow(_OWN)
        kept = own.given.get("bits")
        if type(kept) is int and kept > _ROUNDED:
            continue  # a matrix that is stored as it was
        _check(own)
        if own.given.get("bits") is not None:
            every.append(own.bits(_BITS, "bits"))
        symmetric = symmetric and own.flag("sym", True)
    if packing in _AWQ:
        if any(b != 4 for b in every):
            raise settings.refused(
                f"packing_format {packing} with other than 4 bits; export it as auto_round:auto_gptq"
            )
        return Grouped("auto-round", "awq", (4,), group, settings.where, by_shape=bool(extra))
    return Grouped(
        "auto-round",
        "gptq",
        tuple(dict.fromkeys(every)),
        group,
        settings.where,
        symmetric=symmetric,
        first_zero=1 if packing in _LESS_ONE else 0,
        by_shape=bool(extra),
        lm_head=settings.flag("quant_lm_head", False),
    )


def _check(settings: Settings) -> None:
    settings.one_of("data_type", ("int", "int_sym", "int_asym", "float"))
    for name in ("super_bits", "super_group_size", "rotation_configs"):
        if settings.given.get(name):
            raise settings.refused(f"{name}; plain groups of codes are read")
    act_bits = settings.given.get("act_bits")
    if type(act_bits) is int and act_bits <= _ROUNDED and settings.given.get("act_dynamic") is False:
        raise settings.refused("act_bits with static scales; weights alone may be codes")
