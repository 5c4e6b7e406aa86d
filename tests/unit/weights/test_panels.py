"""Which native panels hold which formats, and that they take no more than files do."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.core.matrix_format import MatrixFormat, Shared, parse_scheme, plain
from penstock.core.panels import GRIDS, Panels, panels_of, takes
from tests.stored import FORMATS

WANTED = {
    "Q8_0": Panels("U8", 32, "F16", offset=128), "Q4_1": Panels("U4", 32, "F16", "F16"),
    "Q5_0": Panels("U5", 32, "F16", offset=16), "Q2_K": Panels("U2", 16, "U8_F16", "U8_F16"),
    "Q3_K": Panels("U3", 16, "I8_F16", offset=4), "Q4_K": Panels("U4", 32, "U8_F16", "U8_F16"),
    "Q6_K": Panels("U6", 16, "I8_F16", offset=32), "Q8_K": Panels("U8", 256, "F32", offset=128),
    "TQ2_0": Panels("U2", 256, "F16", offset=1), "GPTQ": Panels("U4", 128, "F16", "U8"),
    "GPTQ 8 bits": Panels("U8", 32, "F16", "F16_CODES"), "GPTQ act-order": Panels("U4", 32, "F16", "U8"),
    "GPTQ groups of 512": Panels("U4", 256, "F16", "U8"), "GPTQ whole rows": Panels("U4", 0, "F16", offset=8),
    "compressed-tensors int4": Panels("U4", 128, "BF16", "U8"), "FP8 block": Panels("E4M3", 128, "F32"),
    "FP8 tensor": Panels("E4M3", 0, "F32"), "bnb int8": Panels("U8", 0, "F32", offset=128),
    "HQQ": Panels("U4", 64, "F16", "F16_CODES"), "HQQ of bfloat16": Panels("U4", 64, "BF16", "BF16_CODES"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_panels_that_take_what_a_file_does(name: str) -> None:
    format = FORMATS[name]
    panels = panels_of(format, 4096)
    assert panels is not None
    assert panels == WANTED.get(name, panels)
    assert panels.num_bytes((4096, 4096)) <= 1.06 * format.num_bytes((4096, 4096))
    assert panels.row_block == {"F4": 0, "E4M3": 0}.get(panels.code, panels.group if panels.group in (64, 128) else 32)


def test_codes_of_other_sizes_lie_in_the_next_larger_ones() -> None:
    for bits, code in ((1, "U2"), (7, "U8")):
        panels = panels_of(MatrixFormat("int", bits, (Shared("float16", 1, 128),)), 512)
        assert panels is not None
        assert (panels.code, panels.offset) == (code, 1 << bits - 1)


def test_tables_of_whole_numbers_are_multiplied_as_such() -> None:
    assert panels_of(FORMATS["IQ4_XS"], 512) == Panels("T4", 32, "I8_F16", table=FORMATS["IQ4_XS"].table)
    small = panels_of(FORMATS["MXFP4"], 512)
    assert small is not None
    assert (small.code, small.scale, small.factor, small.has_factor) == ("T4", "E8M0", 0.5, False)
    assert [0.5 * v for v in small.table] == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    nvfp4, of_ggml = panels_of(FORMATS["NVFP4"], 512), panels_of(FORMATS["NVFP4 of ggml"], 512)
    assert nvfp4 is not None
    assert of_ggml == msgspec.structs.replace(nvfp4, has_factor=False)
    floats = panels_of(FORMATS["bnb nf4"], 512)
    assert floats is not None
    assert floats.code == "F4"


def test_grids_are_held_by_the_name_of_their_layout() -> None:
    for name in GRIDS:
        panels = panels_of(MatrixFormat("grid", 3, block=(256, 110), layout=name.lower()), 512)
        assert panels is not None
        assert panels.num_bytes((64, 512)) == 64 * 2 * 110
    assert panels_of(MatrixFormat("grid", 3, block=(256, 110), layout="q1_0"), 512) is None


@pytest.mark.parametrize("change", [
    {"scales": ()}, {"bits": 9}, {"scales": (Shared("float16", 1, 24),)}, {"scales": (Shared("float16", 1, 8),)},
    {"zeros": (Shared("float32", 1, 64),)}, {"zeros": (Shared("uint4", 1, 32),)},
    {"zeros": (Shared("bfloat16", 1, 64),), "zeros_are": "values"}, {"offset": 300},
    {"code": "int", "zeros": (Shared("float16", 1, 64),), "zeros_are": "values"},
    {"code": "e4m3", "bits": 8, "zeros": (Shared("uint8", 1, 64),)}, {"code": "table", "table": (0.0,) * 8},
    {"ordered": True, "scales": (Shared("float16", 1, 96),)}, {"ordered": True, "scales": (Shared("float16", 1, 512),)},
    {"code": "grid", "layout": "?", "block": (256, 99)},
])  # fmt: skip
def test_what_no_panels_hold(change: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"code": "uint", "bits": 4, "scales": (Shared("float16", 1, 64),), "offset": 8}
    assert panels_of(MatrixFormat(**fields), 1536) is not None
    assert panels_of(MatrixFormat(**(fields | change)), 1536) is None
    assert panels_of(plain("float16"), 1536) is None


def test_an_order_needs_groups_of_one_size() -> None:
    assert panels_of(FORMATS["GPTQ act-order"], 4096) is not None
    assert panels_of(FORMATS["GPTQ act-order"], 4096 + 8) is None, "the last group is short"


def test_a_scheme_takes_codes_of_its_own_kind() -> None:
    assert takes(parse_scheme("int4-wo:32"), FORMATS["Q4_0"], 512)
    assert takes(parse_scheme("int4-w4a8"), FORMATS["GPTQ symmetric"], 512)
    assert takes(parse_scheme("int8-wo"), FORMATS["bnb int8"], 512)
    assert not takes(parse_scheme("int4-wo"), FORMATS["Q4_0"], 512)
    assert not takes(parse_scheme("none"), FORMATS["Q4_0"], 512)
    ordered = msgspec.structs.replace(FORMATS["Q4_0"], ordered=True)
    assert not takes(parse_scheme("int4-wo:32"), ordered, 512)
