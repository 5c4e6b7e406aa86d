"""ModelSpec -> Program: the only place that knows how the ops of a decoder follow each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.errors import ModelError
from penstock.core.cache_spec import CacheGroup
from penstock.core.model_spec import Attention, FeedForward, Latent, ModelSpec, Norm, Recurrent, Rope, weight_shapes
from penstock.core.protocols import AttentionBackend
from penstock.model.program import Call, Program
from penstock.ops.ref import REF
from penstock.ops.ref.attention import ATTENTION_BACKENDS
from penstock.ops.ref.product import as_float32
from penstock.ops.ref.rotary import rope_table
from penstock.ops.table import OpTable

Weights = dict[str, npt.NDArray[Any]]
_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.uint16))


def build(
    spec: ModelSpec, weights: Weights, groups: tuple[CacheGroup, ...], *, max_model_len: int, ops: OpTable = REF,
    attention: str = "ref",
) -> Program:  # fmt: skip
    """Bind the ops of `spec` to its weights.

    `weights` maps every name of `core.model_spec.weight_shapes` to float32, float16 or bfloat16 bits (uint16); matrices
    are kept as they are (no copy), vectors are widened. `groups` says where each layer caches. Rope tables hold
    `max_model_len` positions.

    Raises: ModelError for weights that are missing, unknown or of wrong shape or type; ConfigError for an unknown
    attention backend.
    """
    _check_weights(spec, weights)
    assert sorted(n for g in groups for n in g.layers) == list(range(len(spec.layers))), "a layer is in one group"
    backend: AttentionBackend = ATTENTION_BACKENDS.get(attention)
    b = _Builder(spec, weights, ops, backend, max_model_len)
    places = {n: (g.index, i) for g in groups for i, n in enumerate(g.layers)}
    b.emit("embed", ("token_ids",), "x", "embed")
    for n, layer in enumerate(spec.layers):
        p = f"layers.{n}."
        b.norm("x", "h", p + "attn_norm", layer.norm)
        match layer.mixer:
            case Attention() as mixer:
                b.attention(p, mixer, layer.norm, *places[n])
            case Latent() as mixer:
                b.latent(p, mixer, layer.norm, *places[n])
            case Recurrent() as mixer:
                b.recurrent(p, mixer, *places[n])
        b.emit("add", ("x", "y"), "x")
        b.norm("x", "h", p + "ffn_norm", layer.norm)
        b.feed_forward(p, layer.ffn)
        b.emit("add", ("x", "y"), "x")
    b.emit("select", ("x", "rows"), "x")
    b.norm("x", "x", "final_norm", spec.final_norm)
    b.linear("x", "logits", "embed" if spec.tie_embeddings else "lm_head")
    return Program(b.code, vocab_size=spec.vocab_size, max_model_len=max_model_len)


def _check_weights(spec: ModelSpec, weights: Weights) -> None:
    shapes = weight_shapes(spec)
    if missing := sorted(shapes.keys() - weights.keys()):
        raise ModelError(f"{len(missing)} weights are missing, the first: {missing[0]}")
    if unknown := sorted(weights.keys() - shapes.keys()):
        raise ModelError(f"{len(unknown)} weights are not part of the model, the first: {unknown[0]}")
    for name, shape in shapes.items():
        if weights[name].shape != shape:
            raise ModelError(f"weight {name} has shape {list(weights[name].shape)}, the model needs {list(shape)}")
        if weights[name].dtype not in _DTYPES:
            raise ModelError(f"weight {name} is {weights[name].dtype}, not float32, float16 or bfloat16 (as uint16)")


class _Builder:
    """Appends calls to `code`. Registers: x residual, h normed input, y what a layer half adds to x."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, ops: OpTable, backend: AttentionBackend, max_model_len: int
    ) -> None:
        self.code: list[Call] = []
        self._spec = spec
        self._weights = weights
        self._ops = ops
        self._backend = backend
        self._max_model_len = max_model_len
        self._angles: dict[Rope, str] = {}

    def emit(
        self, op: str, inputs: tuple[str, ...], output: str, *weights: str, bound: tuple[Any, ...] = (), **named: Any
    ) -> None:
        """One call; `weights` are names, bound before `bound`."""
        fn = self._backend.attend if op == "attention" else self._ops[op]
        arrays = tuple(self.weight(name) for name in weights)
        label = [f"{name} {list(self._weights[name].shape)}" for name in weights]
        label += [str(value) for value in bound if not isinstance(value, np.ndarray)]
        label += [f"{key}={value}" for key, value in named.items()]
        self.code.append(Call(op, fn, inputs, output, (*arrays, *bound), named, ", ".join(label)))

    def weight(self, name: str) -> npt.NDArray[Any]:
        """Matrices stay in their own format, because the op widens them as it goes; vectors are small."""
        w = self._weights[name]
        return as_float32(w) if w.ndim == 1 else w

    def linear(self, x: str, output: str, name: str) -> None:
        bias = (name + ".bias",) if name + ".bias" in self._weights else ()
        self.emit("linear", (x,), output, name, *bias)

    def norm(self, x: str, output: str, name: str, norm: Norm) -> None:
        if norm.kind == "rms":
            self.emit("rms_norm", (x,), output, name, bound=(norm.eps,))
        else:
            self.emit("layer_norm", (x,), output, name, name + ".bias", bound=(norm.eps,))

    def angles(self, rope: Rope) -> str:
        """The register with this rope's angles. Layers of equal rope share it: it is worked out once per step."""
        if rope not in self._angles:
            name = f"angles{len(self._angles)}"
            self._angles[rope] = name
            self.emit("rope_angles", ("positions",), name, bound=(rope_table(rope, self._max_model_len),))
        return self._angles[rope]

    def rope(self, x: str, rope: Rope, first: int = 0) -> None:
        self.emit("rope", (x, self.angles(rope)), x, bound=(rope.interleaved, first))

    def attention(self, p: str, m: Attention, norm: Norm, group: int, layer: int) -> None:
        for name, heads in (("q", m.num_heads), ("k", m.num_kv_heads), ("v", m.num_kv_heads)):
            self.linear("h", name, p + name)
            self.emit("heads", (name,), name, bound=(heads,))
        for name in ("q", "k"):
            if m.qk_norm:
                self.emit("rms_norm", (name,), name, p + name + "_norm", bound=(norm.eps,))
            if m.rope is not None:
                self.rope(name, m.rope)
        self.emit("write_kv", ("step", "k", "v"), "", bound=(group, layer, ("k", "v")))
        scale = m.head_dim**-0.5 if m.scale is None else m.scale
        self.emit(
            "attention", ("q", "step"), "a", bound=(group, layer),
            keys=("k",), value="v", scale=scale, window=m.window, soft_cap=m.soft_cap,
        )  # fmt: skip
        self.emit("flat", ("a",), "a")
        self.linear("a", "y", p + "o")

    def latent(self, p: str, m: Latent, norm: Norm, group: int, layer: int) -> None:
        if m.q_rank is None:
            self.linear("h", "q", p + "q")
        else:
            self.linear("h", "q", p + "q_a")
            self.emit("rms_norm", ("q",), "q", p + "q_a_norm", bound=(norm.eps,))
            self.linear("q", "q", p + "q_b")
        self.emit("heads", ("q",), "q", bound=(m.num_heads,))
        self.rope("q", m.rope, first=m.nope_dim)
        self.linear("h", "kv", p + "kv_a")
        self.emit("columns", ("kv",), "latent", bound=(0, m.kv_rank))
        self.emit("rms_norm", ("latent",), "latent", p + "kv_a_norm", bound=(norm.eps,))
        self.emit("heads", ("latent",), "latent", bound=(1,))
        self.emit("columns", ("kv",), "k_rope", bound=(m.kv_rank, m.kv_rank + m.rope_dim))
        self.emit("heads", ("k_rope",), "k_rope", bound=(1,))
        self.rope("k_rope", m.rope)
        self.emit("write_kv", ("step", "latent", "k_rope"), "", bound=(group, layer, ("latent", "k_rope")))
        kv_b = as_float32(self._weights[p + "kv_b"]).reshape(m.num_heads, m.nope_dim + m.v_dim, m.kv_rank)
        self.emit("latent_query", ("q",), "q", bound=(kv_b[:, : m.nope_dim],))
        scale = (m.nope_dim + m.rope_dim) ** -0.5 if m.scale is None else m.scale
        self.emit(
            "attention", ("q", "step"), "a", bound=(group, layer),
            keys=("latent", "k_rope"), value="latent", scale=scale, window=None, soft_cap=None,
        )  # fmt: skip
        self.emit("latent_output", ("a",), "a", bound=(kv_b[:, m.nope_dim :],))
        self.emit("flat", ("a",), "a")
        self.linear("a", "y", p + "o")

    def recurrent(self, p: str, m: Recurrent, group: int, layer: int) -> None:
        for name in ("q", "k", "v"):
            self.linear("h", name, p + name)
            self.emit("heads", (name,), name, bound=(m.num_heads,))
        self.linear("h", "decay", p + "decay")
        self.emit("recurrent", ("q", "k", "v", "decay", "step"), "a", bound=(group, layer))
        self.emit("flat", ("a",), "a")
        self.linear("a", "y", p + "o")

    def feed_forward(self, p: str, f: FeedForward) -> None:
        self.linear("h", "up", p + "up")
        if f.gated:
            self.linear("h", "gate", p + "gate")
            self.emit("activate_gated", ("gate", "up"), "up", bound=(f.activation,))
        else:
            self.emit("activate", ("up",), "up", bound=(f.activation,))
        self.linear("up", "y", p + "down")
