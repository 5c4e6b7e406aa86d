"""GPTQ: what its configuration says.

Source: `qlinear_cuda.py` of github.com/AutoGPTQ/AutoGPTQ, `QuantizeConfig` of github.com/ModelCloud/GPTQModel,
`GPTQConfig` of transformers.
"""

from __future__ import annotations

from penstock.families.quantization.grouped import Grouped, overrides
from penstock.families.quantization.settings import Settings

_FIELDS = {
    "bits", "group_size", "desc_act", "sym", "checkpoint_format", "format", "lm_head", "dynamic", "is_marlin_format",
    "adapter", "rotation", "activation", "pack_dtype",
}  # fmt: skip
"""Fields that say what is stored, and how."""
NOTES = {
    "quant_method", "method", "meta", "gptaq", "foem", "hessian", "mock_quantization", "damp_percent",
    "damp_auto_increment", "true_sequential", "static_groups", "mse", "act_group_aware", "model_name_or_path",
    "model_file_base_name", "model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block",
    "modules_in_block_to_quantize", "cache_block_outputs", "dataset", "tokenizer", "batch_size", "pad_token_id",
    "max_input_length", "use_exllama", "use_cuda_fp16", "disable_exllama", "exllama_config", "backend", "device",
    "parallel_packing", "hyb_act", "quantizer", "do_fuse", "fuse_max_seq_len", "modules_to_fuse",
    "export_compatible",
}  # fmt: skip
"""Fields about how the codes were found, or which kernels others use."""
BITS = (2, 3, 4, 8)


def read(settings: Settings) -> Grouped:
    settings.allow(_FIELDS | NOTES)
    settings.one_of("pack_dtype", ("int32",))
    bits, group = settings.bits(BITS, "bits"), settings.group("group_size")
    kind = settings.get("checkpoint_format", "format") or "gptq"
    if kind not in ("gptq", "gptq_v2"):
        raise settings.refused(f"checkpoint_format {kind!s:.40}; gptq and gptq_v2 are read: convert it to one of them")
    if settings.given.get("is_marlin_format"):
        raise settings.refused("is_marlin_format; gptq and gptq_v2 are read: convert it to one of them")
    for name in ("adapter", "rotation", "activation"):
        if settings.given.get(name):
            raise settings.refused(f"{name}, which changes what the model computes")
    changes = overrides(settings, settings.given.get("dynamic"))
    others = [settings.inner(change, "dynamic").bits(BITS, "bits") for change in changes if change.get("bits")]
    return Grouped(
        "gptq",
        "gptq",
        tuple(dict.fromkeys([bits, *others])),
        group,
        settings.where,
        ordered=settings.flag("desc_act", False),
        symmetric=settings.flag("sym", True),
        first_zero=1 if kind == "gptq" else 0,
        by_shape=bool(changes),
        lm_head=settings.flag("lm_head", False),
    )
