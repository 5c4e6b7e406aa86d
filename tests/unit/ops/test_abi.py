"""The Python side of the native header is what the header says."""

from __future__ import annotations

import ctypes as c
from pathlib import Path

import pytest
from tools import grids
from tools.abi import TARGET, bare, enums, functions, generated, structs

from penstock.ops.native import abi

pytestmark = pytest.mark.skipif(not (Path(TARGET).parents[4] / "csrc").is_dir(), reason="the sources are not here")


def test_the_binding_is_the_header_s() -> None:
    assert TARGET.read_text() == generated(), "run python tools/abi.py"


def test_the_grids_of_the_kernels_are_those_of_the_reader() -> None:
    assert grids.TARGET.read_text() == grids.generated(), "run python tools/grids.py"


def test_what_it_understands_of_c() -> None:
    text = bare("""
    /* int32_t no; */
    #define NO 1
    enum pst_kind { PST_ONE = 1, PST_TWO, PST_NINE = 9, PST_TEN };
    typedef struct pst_some_row { int32_t a, b; const float *in; double d[3]; const void *p[2]; } pst_some_row;
    PST_API int32_t pst_do(const pst_matrix *m, const void *const *rows, int64_t n, char *error);
    PST_API void pst_end(pst_pool *pool);
    """)
    (kind,) = enums(text)
    assert "ONE = 1\n    TWO = 2\n    NINE = 9\n    TEN = 10\n" in kind
    (row,) = structs(text)
    assert "class SomeRow" in row
    assert '("a", c.c_int32), ("b", c.c_int32), ("inputs", c.c_void_p)' in row
    assert '("d", c.c_double * 3), ("p", c.c_void_p * 2)' in row
    do, end = functions(text)
    assert do.strip() == '"pst_do": (c.c_int32, [c.POINTER(Matrix), c.c_void_p, c.c_int64, c.c_char_p]),'
    assert end.strip() == '"pst_end": (None, [c.c_void_p]),'


def test_structs_have_c_s_sizes() -> None:
    """As `static_assert`s of a C compiler would say: every pointer and 64-bit number on its own boundary."""
    assert c.sizeof(abi.Op) == 4 + 24 + 4 + 48 + 16 + 32
    assert abi.Op.p.offset % 8 == 0
    assert c.sizeof(abi.Matrix) == 44 + 4 + 32
