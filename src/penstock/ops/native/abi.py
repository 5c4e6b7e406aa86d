"""The structs and numbers of `csrc/include/penstock.h`, for ctypes. Meanings are there."""

from __future__ import annotations

import ctypes as c
from enum import IntEnum

ABI = 6
PANEL = 64
"""Outputs of a panel."""

Float = c.POINTER(c.c_float)
Int32 = c.POINTER(c.c_int32)


class DType(IntEnum):
    F32 = 0
    F16 = 1
    BF16 = 2
    I8 = 3


class Format(IntEnum):
    F32 = 0
    F16 = 1
    BF16 = 2
    I8 = 3
    I4 = 4


class Act(IntEnum):
    F32 = 0
    BF16 = 1
    I8 = 2


class Kind(IntEnum):
    EMBED = 1
    SELECT = 2
    NORM = 3
    LINEAR = 4
    ROPE = 5
    WRITE = 6
    ATTEND = 7
    ADD = 8
    MUL = 9
    SCALE = 10
    CLIP = 11
    SOFT_CAP = 12
    ACT = 13
    GATED = 14
    GATE_ROWS = 15
    SCALE_QUERIES = 16
    ARGMAX = 17


ACTIVATIONS = {
    "silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4, "sigmoid": 5, "tanh": 6, "swiglu_clamped": 7,
    "quick_gelu": 8,
}  # fmt: skip
NORMS = {"none": 0, "rms": 1, "layer": 2}
TOKENS, SELECTED = 0, 1


class Matrix(c.Structure):
    _fields_ = (
        ("format", c.c_int32), ("act", c.c_int32), ("rows", c.c_int32), ("cols", c.c_int32), ("group", c.c_int32),
        ("pair", c.c_int32), ("data", c.c_void_p), ("scales", c.c_void_p), ("bias", c.c_void_p),
    )  # fmt: skip


class Register(c.Structure):
    _fields_ = (("data", c.c_void_p), ("stride", c.c_int64), ("width", c.c_int32), ("rows", c.c_int32))


class Rotation(c.Structure):
    _fields_ = (
        ("table", c.c_void_p), ("positions", c.c_int32), ("first", c.c_int32), ("half", c.c_int32),
        ("interleaved", c.c_int32),
    )  # fmt: skip


class Pages(c.Structure):
    _fields_ = (
        ("share", c.c_double), ("low", c.c_int32), ("high", c.c_int32), ("tokens", c.c_int32), ("recent", c.c_int32),
        ("max_tokens", c.c_int32),
    )  # fmt: skip


class Op(c.Structure):
    _fields_ = (
        ("kind", c.c_int32), ("inputs", c.c_int32 * 4), ("out", c.c_int32), ("n", c.c_int32 * 12), ("f", c.c_float * 4),
        ("p", c.c_void_p * 4),
    )  # fmt: skip


class Group(c.Structure):
    _fields_ = (
        ("num_lines", c.c_int32), ("block_size", c.c_int32), ("tables", c.c_void_p), ("shared", c.c_void_p),
        ("strides", c.c_void_p), ("dropped", c.c_void_p),
    )  # fmt: skip


class Plane(c.Structure):
    _fields_ = (
        ("data", c.c_void_p), ("dtype", c.c_int32), ("heads", c.c_int32), ("dim", c.c_int32), ("scales", c.c_int32),
        ("page_stride", c.c_int64), ("token_stride", c.c_int64), ("head_stride", c.c_int64),
    )  # fmt: skip


class StepArgs(c.Structure):
    _fields_ = (
        ("num_tokens", c.c_int32), ("num_seqs", c.c_int32), ("num_rows", c.c_int32), ("num_groups", c.c_int32),
        ("token_ids", c.c_void_p), ("positions", c.c_void_p), ("query_start_loc", c.c_void_p), ("rows", c.c_void_p),
        ("groups", c.c_void_p), ("mask", c.c_void_p), ("choose_from", c.c_void_p),
    )  # fmt: skip


class SampleRow(c.Structure):
    _fields_ = (
        ("logits", c.c_void_p), ("scale", c.c_double), ("min_p", c.c_double), ("top_p", c.c_double),
        ("seed", c.c_uint64), ("position", c.c_uint64), ("top_k", c.c_int32), ("sample_index", c.c_int32),
        ("num_tokens", c.c_int32), ("best", c.c_int32), ("tokens", c.c_void_p), ("peak", c.c_float),
        ("healthy", c.c_int32),
    )  # fmt: skip


class LogprobRow(c.Structure):
    _fields_ = (
        ("logits", c.c_void_p), ("tokens", c.c_void_p), ("num_tokens", c.c_int32), ("num_top", c.c_int32),
        ("ranks", c.c_void_p), ("top_ids", c.c_void_p), ("total", c.c_uint64), ("peak", c.c_float),
        ("unused", c.c_int32),
    )  # fmt: skip


SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "pst_abi": (c.c_int32, []),
    "pst_isa_name": (c.c_char_p, []),
    "pst_score": (c.c_int32, []),
    "pst_self_test": (c.c_int32, [c.c_char_p, c.c_int32]),
    "pst_pool_new": (c.c_void_p, [c.c_int32, c.c_int32, c.c_int32]),
    "pst_pool_free": (None, [c.c_void_p]),
    "pst_pool_threads": (c.c_int32, [c.c_void_p]),
    "pst_pool_watch": (None, [c.c_void_p, c.c_void_p]),
    "pst_panel_bytes": (c.c_int64, [c.c_int32, c.c_int32, c.c_int32]),
    "pst_panel_scale_bytes": (c.c_int64, [c.c_int32, c.c_int32, c.c_int32]),
    "pst_pack": (
        c.c_int32,
        [c.c_int32, c.c_int32, c.c_int32, c.c_int32, c.c_void_p, c.c_int32, c.c_int32, c.c_void_p, c.c_void_p],
    ),
    "pst_unpack": (c.c_int32, [c.POINTER(Matrix), c.c_int32, c.c_void_p]),
    "pst_program_new": (
        c.c_void_p,
        [c.c_void_p, c.c_int32, c.c_void_p, c.c_int32, c.c_void_p, c.c_void_p, *[c.c_int32] * 4, c.c_char_p, c.c_int32],
    ),
    "pst_program_free": (None, [c.c_void_p]),
    "pst_program_run": (c.c_int32, [c.c_void_p, c.c_void_p, c.POINTER(StepArgs), c.c_int32, c.c_int32]),
    "pst_program_profile": (None, [c.c_void_p, c.c_void_p]),
    "pst_sampler_new": (c.c_void_p, [c.c_int32, c.c_int32]),
    "pst_sampler_free": (None, [c.c_void_p]),
    "pst_sample": (c.c_int32, [c.c_void_p, c.c_void_p, c.c_void_p, c.c_int32]),
    "pst_logprobs": (c.c_int32, [c.c_void_p, c.c_void_p, c.c_void_p, c.c_int32]),
    "pst_read": (c.c_uint64, [c.c_void_p, c.c_void_p, c.c_int64]),
    "pst_multiply": (c.c_int64, [c.c_void_p, c.c_int32, c.c_int32, c.c_int64]),
}
