"""AWQ: what its configuration says.

Source: `gemm.py` of github.com/casper-hansen/AutoAWQ, `AwqConfig` of transformers.
"""

from __future__ import annotations

from penstock.families.quantization.gptq import NOTES
from penstock.families.quantization.grouped import Grouped
from penstock.families.quantization.settings import Settings

_FIELDS = {
    "bits", "w_bit", "group_size", "q_group_size", "zero_point", "version", "checkpoint_format", "format",
    "modules_to_not_convert", "lm_head", "pack_dtype", "sym",
}  # fmt: skip


def read(settings: Settings) -> Grouped:
    settings.allow(_FIELDS | NOTES)
    settings.one_of("pack_dtype", ("int32",))
    bits, group = settings.bits((4,), "bits", "w_bit"), settings.group("group_size", "q_group_size")
    version = str(settings.get("version", "checkpoint_format", "format") or "gemm").lower()
    if version != "gemm":
        raise settings.refused(f"version {version:.40}; the packing of gemm is read: save it with that version")
    if not settings.flag("zero_point", True):
        raise settings.refused("zero_point false; codes with zero points are read")
    return Grouped(
        "awq", "awq", (bits,), group, settings.where, lm_head=settings.flag("lm_head", False),
        spared=settings.names("modules_to_not_convert"),
    )  # fmt: skip
