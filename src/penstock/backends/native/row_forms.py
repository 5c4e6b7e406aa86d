"""The native form of what AltUp and sparse gates do to rows (`ops.ref.streams`), and of an encoder's attention."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.backends.native.state_forms import Form
from penstock.model.graph import Node
from penstock.ops.native.abi import Kind
from penstock.ops.ref.streams import LEAST_SQUARE

MIX, CORRECT = 0, 1


def row_form(node: Node) -> Form | None:
    """None for an operation that is none of these."""
    make = _FORMS.get(node.op)
    return None if make is None else make(node)


def _cut_off(node: Node) -> Form:
    return Form(Kind.CUT_OFF, f=(float(node.bound[0]),), in_place=0)


def _match(node: Node) -> Form:
    return Form(Kind.MATCH, f=(LEAST_SQUARE,), in_place=0)


def _scale_columns(node: Node) -> Form:
    return Form(Kind.SCALE, "columns", pointers=(np.ascontiguousarray(node.bound[0], np.float32),), in_place=0)


def _mix(node: Node) -> Form:
    return Form(Kind.STREAMS, "mix", (_count(node), MIX), in_place=0)


def _correct(node: Node) -> Form:
    return Form(Kind.STREAMS, "correct", (_count(node), CORRECT, node.bound[0]), in_place=0)


def _attend_text(node: Node) -> Form:
    scale, reach = node.bound
    n = (_count(node), 0 if reach is None else reach + 1)
    return Form(Kind.ATTEND_TEXT, f"reach {reach}", n, f=(float(scale),))


def _count(node: Node) -> int:
    heads = node.inputs[0].heads
    assert heads is not None, "streams, and heads, lie side by side"
    return heads


_FORMS: dict[str, Callable[[Node], Form]] = {
    "cut_off": _cut_off, "match_magnitude": _match, "scale_columns": _scale_columns, "mix_streams": _mix,
    "correct_streams": _correct, "attend_text": _attend_text,
}  # fmt: skip
