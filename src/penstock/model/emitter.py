"""Appends operations to a graph: what the files of one layer part share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.core.model_spec import ModelSpec, Norm, Rope
from penstock.core.selection import PageReads, TokenReads
from penstock.model.graph import NO_LAYER, STEP_INPUTS, Node, Value, result_of, view_of
from penstock.ops.kept import Kept
from penstock.ops.ref.product import as_float32
from penstock.ops.ref.rotary import rope_table
from penstock.ops.stored import Weight

Weights = Mapping[str, Weight]


class Reading(NamedTuple):
    """How attention uses the cache, for KV selectors.

    Attributes:
        raw_keys: keys are kept as they are and turn when they are read (positions inside the cache).
        observe: the program shows its queries (`model.forward.ObservedForward`).
        pages: tokens behind their prompt read some pages only; pages have bounds (`core.model_spec.cache_spec`).
        hidden: what keys and values are made of is kept beside them, for a store (`core.block_codec.HIDDEN`).
        tokens: they read some tokens only, chosen one layer ahead by parts of keys.
        turns: [G, D, R] of each layer: what these parts are; None: the keys as they are.
    """

    raw_keys: bool = False
    observe: bool = False
    pages: PageReads | None = None
    hidden: bool = False
    tokens: TokenReads | None = None
    turns: Sequence[F32] | None = None


PLAIN = Reading()


class Place(NamedTuple):
    """Where a layer keeps what it keeps: the `layer`-th layer of cache group `group`."""

    group: int
    layer: int


class Emitter:
    """`nodes` grow by one per `emit`; `values` are the registers' contents so far, by name."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, max_model_len: int, kept: Mapping[int, Kept] | None = None,
        rotation: str = "none", reading: Reading = PLAIN, further: Mapping[int, Sequence[Place]] | None = None,
    ) -> None:  # fmt: skip
        """`kept`: where layers keep their newest tokens, if not with the others. `rotation`: how heads are turned
        before they are cached, none or hadamard. `further`: the other places of layers whose caches are several."""
        self.reading = reading
        self.nodes: list[Node] = []
        self.values: dict[str, Value] = {}
        self.spec = spec
        self.weights = weights
        self.max_model_len = max_model_len
        self.layer = NO_LAYER
        """What is emitted belongs to this layer."""
        self.kept, self.rotation = kept or {}, rotation
        self.further = further or {}
        self._angles: dict[Rope, Value] = {}
        self._tables: dict[Rope, F32] = {}

    def emit(
        self, op: str, inputs: tuple[str, ...], output: str, *weights: str, bound: tuple[Any, ...] = (),
        width: int | None = None, **named: Any,
    ) -> None:  # fmt: skip
        """One operation on registers; `weights` are names, bound before `bound`. `width`: see `graph.result_of`."""
        view = view_of(op, self.values[inputs[0]], bound, output) if inputs[0] in self.values else None
        if view is None:
            arrays = tuple(self.weight(name) for name in weights)
            takes = next(((name, i) for i, name in enumerate(inputs) if name in STEP_INPUTS), None)
            values = [self.values[name] for name in inputs if name not in STEP_INPUTS]
            node = Node(
                op, values, (*arrays, *bound), named, weights, takes, self._label(weights, bound, named), self.layer
            )
            node.out = view = result_of(node, output, width)
            self.nodes.append(node)
        if view is not None:
            self.values[output] = view

    def _label(self, weights: tuple[str, ...], bound: tuple[Any, ...], named: dict[str, Any]) -> str:
        label = [f"{name} {list(self.weights[name].shape)}" for name in weights]
        label += [str(value) for value in bound if value is None or isinstance(value, str | int | float | tuple)]
        label += [f"{key}={value}" for key, value in named.items() if not isinstance(value, np.ndarray)]
        return ", ".join(label)

    def weight(self, name: str) -> Weight:
        """Matrices stay in their own format, because the op widens them as it goes; vectors are small."""
        return self.array(name) if len(self.weights[name].shape) == 1 else self.weights[name]

    def array(self, name: str) -> F32:
        """A weight that rows are not multiplied with, so that it is no codes, as float32."""
        w = self.weights[name]
        assert isinstance(w, np.ndarray), "only `core.matrix_format.row_matrices` are held as codes"
        return as_float32(w)

    def of_heads(self, name: str, num_heads: int) -> npt.NDArray[Any]:
        """A matrix [H * n, K] that no rows are multiplied with as a whole, as [H, n, K] in its own type."""
        w = self.weights[name]
        assert isinstance(w, np.ndarray), "only `core.matrix_format.row_matrices` are held as codes"
        return w.reshape(num_heads, -1, w.shape[1])

    def vector(self, name: str) -> F32 | None:
        """A small weight as float32, of any shape; None if the model has none of this name."""
        return self.array(name) if name in self.weights else None

    def linear(self, x: str, output: str, name: str) -> None:
        bias = (name + ".bias",) if name + ".bias" in self.weights else ()
        self.emit("linear", (x,), output, name, *bias)

    def norm(self, x: str, output: str, name: str, norm: Norm) -> None:
        self.raw_norm(x, output, name, norm.kind, norm.eps, norm.offset)

    def raw_norm(self, x: str, output: str, name: str, kind: str, eps: float, offset: float = 0.0) -> None:
        """A norm with the weights called `name`, as far as there are any; `offset` is added to them once, here."""
        weight = self.vector(name)
        if weight is not None and offset:
            weight = weight + np.float32(offset)
        if kind == "layer":
            self.emit("layer_norm", (x,), output, bound=(weight, self.vector(name + ".bias"), eps))
        else:
            self.emit("rms_norm", (x,), output, bound=(weight, eps))

    def scale(self, x: str, factor: float) -> None:
        if factor != 1.0:
            self.emit("scale", (x,), x, bound=(factor,))

    def table(self, rope: Rope) -> F32:
        """`ops.ref.rotary.rope_table`, made once: of a long context it is large."""
        if rope not in self._tables:
            self._tables[rope] = rope_table(rope, self.max_model_len)
        return self._tables[rope]

    def rope(self, x: str, rope: Rope, first: int = 0) -> None:
        """Layers of equal rope share its angles: they are worked out once per step."""
        if rope not in self._angles:
            name = f"angles{len(self._angles)}"
            layer, self.layer = self.layer, NO_LAYER
            self.emit("rope_angles", ("positions",), name, bound=(self.table(rope),))
            self.layer = layer
            self._angles[rope] = self.values[name]
        self.values["angles"] = self._angles[rope]
        self.emit("rope", (x, "angles"), x, bound=(rope.interleaved, first))
