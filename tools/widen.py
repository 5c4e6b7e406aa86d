"""Embed a trained model in a larger shape that computes the same function: same text, more bytes and FLOPs.

    python tools/widen.py MODEL OUT --like qwen2.5-0.5b
    python tools/widen.py MODEL OUT --shape 512,8,16,4,32,1408 --dtype float32

MODEL is whatever Penstock opens, of Llama's kind; OUT becomes a folder of the llama family. How each part grows:

- Hidden size E: the residual is padded with copies of itself, the last one scaled so that the mean square stays what
  it was: RMS norms need no change, and their weights are zero for the copies, so nobody reads them. Where not even one
  copy fits, padding is zeros: a norm's root is then sqrt(E_old/E_new) of what it was; its weights and eps make it good.
- Heads: a query head must go on reading its kv head, so the old groups are seated in the new ones (`seats`): several in
  one kv head if its dimension has room, one of them in several if the new groups are smaller. Heads without a seat are
  read by zero columns of `o`.
- Head dimension D: pair j of an old head turns with theta^(-2j/D), which no theta gives for another D where heads share
  one, so frequencies are set pair by pair, by `longrope`'s factors. Queries are zero where a key is not their own.
  `longrope`'s attention factor (D_new/D_old)^(1/4), for q and k each, makes up for the softmax' scale 1/sqrt(D).
- Layers: new ones, spread evenly, have zero `o` and `down`. Feed-forward: new units have zero columns of `down`.
- Vocabulary (kept unless asked): new rows must never win, and a linear head without a bias has nothing to say so with.
  One padded component of the residual therefore holds a small constant; eps pays for its part of the root, and only the
  head reads it: new rows get a huge negative logit, the old ones, if tied, a common one that no softmax sees.

Whatever is only ever multiplied with zeros is random, of the size of the real weights, so that nothing can be skipped
or compressed. In float32 the function is the same up to rounding. In bfloat16 every weight of a bfloat16 model keeps
its bits, but the last copy is rounded, which moves a norm by a ten-thousandth or so (not at all if E_new is a multiple
of E_old and the vocabulary is kept). Norms themselves are rounded only where no copy fits.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import struct
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import Progress

from penstock.base.bf16 import narrow
from penstock.base.errors import PenstockError
from penstock.core.model_spec import Attention, FeedForward, Layer, ModelSpec, Norm, Rope, weight_shapes
from penstock.families.llama import Llama
from penstock.families.registry import open_model
from penstock.ops.ref.rotary import rope_frequencies
from penstock.weights.load import load_weights

F32 = npt.NDArray[np.float32]
Weights = dict[str, npt.NDArray[Any]]
_NEVER = -(2.0**20)
"""What a new row of the vocabulary makes of the constant."""
_COPIED = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json", "vocab.json", "merges.txt",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A target: E, L, H, G, D, feed-forward width F and vocabulary (None: the model's own)."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    vocab: int | None = None


SHAPES = {
    "qwen2.5-0.5b": Shape(896, 24, 14, 2, 64, 4864, 151936),
    "llama-3.2-1b": Shape(2048, 16, 32, 8, 64, 8192, 128256),
}
"""Dimensions of released models, from their config.json."""


@dataclass(frozen=True)
class Seat:
    """Old kv head `old` lives in the new kv head `new`, at its `place`; `queries` are (old, new) query heads."""

    old: int
    new: int
    place: int
    queries: tuple[tuple[int, int], ...]


def seats(old: Attention, shape: Shape) -> tuple[Seat, ...]:
    """Where the old heads go, as few to a new kv head as possible. Raises ValueError if there is no room."""
    per_old, per_new = old.num_heads // old.num_kv_heads, shape.heads // shape.kv_heads
    for places in range(1, shape.head_dim // old.head_dim + 1):
        chunk = min(per_old, per_new // places)
        if chunk == 0:
            break
        parts = -(-per_old // chunk)
        if old.num_kv_heads * parts > shape.kv_heads * places:
            continue
        out = []
        for unit in range(old.num_kv_heads * parts):
            g, part = divmod(unit, parts)
            place, new = divmod(unit, shape.kv_heads)
            mine = range(g * per_old + part * chunk, min(g * per_old + (part + 1) * chunk, (g + 1) * per_old))
            first = new * per_new + place * chunk
            out.append(Seat(g, new, place, tuple((q, first + i) for i, q in enumerate(mine))))
        return tuple(out)
    raise ValueError(
        f"{old.num_heads} query and {old.num_kv_heads} kv heads of {old.head_dim} have no room in {shape.heads} and "
        f"{shape.kv_heads} of {shape.head_dim}"
    )


class Widening:
    """How one model of Llama's kind is embedded in `shape`. Raises ValueError if it cannot be."""

    def __init__(self, spec: ModelSpec, shape: Shape) -> None:
        self.spec, self.shape = spec, shape
        self.mixer, self.width, self.eps = _plain(spec)
        self.vocab = shape.vocab or spec.vocab_size
        pairs = (
            ("hidden size", spec.hidden_size, shape.hidden), ("layers", len(spec.layers), shape.layers),
            ("heads", 1, shape.heads // shape.kv_heads), ("head dimension", self.mixer.head_dim, shape.head_dim),
            ("feed-forward width", self.width, shape.width), ("vocabulary", spec.vocab_size, self.vocab),
        )  # fmt: skip
        for name, old, new in pairs:
            if new < old:
                raise ValueError(f"the target's {name} is {new}, less than the model's {old}")
        if shape.heads % shape.kv_heads or shape.head_dim % 2:
            raise ValueError("kv heads must divide heads, and the head dimension must be even")
        self.seats = seats(self.mixer, shape)
        self.places = 1 + max(seat.place for seat in self.seats)
        self.layers = {i * shape.layers // len(spec.layers): i for i in range(len(spec.layers))}
        grows = int(self.vocab > spec.vocab_size)
        self.copies = (shape.hidden - grows) // spec.hidden_size - 1
        # The whole copies and the last one, squared, have to add up to what is missing of E_new / E_old.
        self.last_scale = math.sqrt(max(0.0, shape.hidden / spec.hidden_size - self.copies))
        # What is left of the mean square.
        self.ratio = 1.0 if self.copies > 0 else spec.hidden_size / shape.hidden
        # The constant takes at most half of what eps adds under the root, and is a power of two: exact in bfloat16.
        self.constant = 0.0
        if grows:
            if shape.hidden == spec.hidden_size:
                raise ValueError("a larger vocabulary needs a larger hidden size: there is no component to spare")
            self.constant = 2.0 ** math.floor(math.log2(math.sqrt(self.eps * spec.hidden_size / 2)))

    @cached_property
    def target(self) -> ModelSpec:
        """The spec of the result, as the llama family reads it."""
        return Llama().spec(self.config("float32"))

    def config(self, dtype: str) -> dict[str, Any]:
        """config.json of the result."""
        spec, shape = self.spec, self.shape
        out: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": self.vocab,
            "hidden_size": shape.hidden, "intermediate_size": shape.width, "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
            "hidden_act": "silu", "rms_norm_eps": self.eps * self.ratio - self.constant**2 / shape.hidden,
            "max_position_embeddings": spec.max_position, "tie_word_embeddings": spec.tie_embeddings,
            "bos_token_id": spec.bos_token_id, "eos_token_id": list(spec.eos_token_ids), "torch_dtype": dtype,
            "rope_theta": self._rope.theta,
        }  # fmt: skip
        old, dim = self._rope, shape.head_dim
        if self.places > 1 or dim != old.dim:
            base = rope_frequencies(Rope(dim=dim, theta=old.theta), spec.max_position)
            wanted = base.copy()
            for place in range(self.places):
                wanted[self._slots(place)] = rope_frequencies(old, spec.max_position)
            factors = (base / wanted).tolist()
            out["rope_scaling"] = {
                "rope_type": "longrope", "factor": 1.0, "original_max_position_embeddings": spec.max_position,
                "short_factor": factors, "long_factor": factors, "attention_factor": (dim / old.dim) ** 0.25,
            }  # fmt: skip
        return out

    @property
    def _rope(self) -> Rope:
        assert self.mixer.rope is not None
        return self.mixer.rope

    def _slots(self, place: int) -> npt.NDArray[np.int64]:
        """Pairs of a new head where the old pairs at `place` are."""
        pairs = np.arange(self.mixer.head_dim // 2)
        return pairs + place * len(pairs)

    def _components(self, place: int) -> npt.NDArray[np.int64]:
        """Components of a new head where the components of an old one at `place` are, in the old one's order."""
        first = self._slots(place)
        halves = (first, first + self.shape.head_dim // 2)
        return np.stack(halves, axis=1).reshape(-1) if self._rope.interleaved else np.concatenate(halves)

    def tensor(self, name: str, weights: Weights, rng: np.random.Generator) -> F32:
        """One weight of the result by its logical name, from the model's float32 weights."""
        shape = weight_shapes(self.target)[name]
        if not name.startswith("layers."):
            return self._outer(name, shape, weights, rng)
        _, index, part = name.split(".")
        identity = int(index) not in self.layers
        old: F32 = weights[f"layers.{self.layers.get(int(index), 0)}.{part}"]
        if part in ("attn_norm", "ffn_norm"):
            return self._norm(old, shape, rng)
        if part in ("o", "down"):
            out = np.zeros(shape, np.float32)
            if identity:
                return out
        else:
            out = _random(shape, old, rng)
            if identity:
                return out
        if part in ("gate", "up", "down"):
            out[: old.shape[0], : old.shape[1]] = old
        else:
            self._seat(part, old, out)
        if part in ("o", "down"):
            self._copy(out)
        return out

    def _copy(self, out: F32) -> None:
        """What is written to the residual, rows of `out`, is written to its copies too."""
        e = self.spec.hidden_size
        for i in range(1, self.copies + 1):
            by = np.float32(self.last_scale if i == self.copies else 1.0)
            np.multiply(out[:e], by, out=out[i * e : (i + 1) * e])

    def _seat(self, part: str, old: F32, out: F32) -> None:
        """Put the heads of q, k, v or o (by its columns) where they belong."""
        e, d, new_d = self.spec.hidden_size, self.mixer.head_dim, self.shape.head_dim
        for seat in self.seats:
            moves = seat.queries if part in ("q", "o") else ((seat.old, seat.new),)
            to = self._components(seat.place)
            for source, target in moves:
                mine = slice(source * d, (source + 1) * d)
                if part == "o":
                    out[:e, target * new_d + to] = old[:, mine]
                    continue
                if part == "q":
                    out[target * new_d : (target + 1) * new_d, :e] = 0
                out[target * new_d + to, :e] = old[mine]

    def _norm(self, old: F32, shape: tuple[int, ...], rng: np.random.Generator) -> F32:
        out = rng.choice(old, shape).astype(np.float32)
        out[: len(old)] = old
        out *= np.float32(math.sqrt(self.ratio))
        if self.copies > 0 or self.constant:
            out[len(old) :] = 0
        return out

    def _outer(self, name: str, shape: tuple[int, ...], weights: Weights, rng: np.random.Generator) -> F32:
        old: F32 = weights[name]
        e, v = self.spec.hidden_size, self.spec.vocab_size
        if name == "final_norm":
            out = self._norm(old, shape, rng)
            if self.constant:
                out[-1] = 1 / self.constant
            return out
        out = _random(shape, old, rng)
        out[:v, :e] = old
        if name == "embed":
            out[:v, e:] = 0
            self._copy(out[:v].T)
            if self.constant:
                out[:, -1] = self.constant
        if self.constant and (name == "lm_head" or self.spec.tie_embeddings):
            out[v:, -1] = _NEVER
            if name == "lm_head":
                out[:v, -1] = 0
        return out


def _plain(spec: ModelSpec) -> tuple[Attention, int, float]:
    """(attention, F, eps) of a model of Llama's kind. Raises ValueError for any other."""
    mixer, ffn, norm = spec.layers[0].mixer, spec.layers[0].ffn, spec.layers[0].norm
    if isinstance(mixer, Attention) and isinstance(ffn, FeedForward) and mixer.rope is not None:
        d, rope = mixer.head_dim, mixer.rope
        same = Attention(
            num_heads=mixer.num_heads, num_kv_heads=mixer.num_kv_heads, head_dim=d,
            rope=Rope(dim=d, theta=rope.theta, interleaved=rope.interleaved),
        )  # fmt: skip
        layer = Layer(mixer=same, ffn=FeedForward(width=ffn.width), norm=Norm(eps=norm.eps))
        plain = ModelSpec(
            family=spec.family, vocab_size=spec.vocab_size, hidden_size=spec.hidden_size,
            layers=(layer,) * len(spec.layers), final_norm=layer.norm, tie_embeddings=spec.tie_embeddings,
            max_position=spec.max_position, bos_token_id=spec.bos_token_id, eos_token_ids=spec.eos_token_ids,
            dtype=spec.dtype,
        )  # fmt: skip
        if plain == spec:
            return mixer, ffn.width, norm.eps
    raise ValueError(
        "only models of Llama's kind can be widened: plain rope on whole heads, silu, RMS norms, no biases"
    )


def _random(shape: tuple[int, ...], like: F32, rng: np.random.Generator) -> F32:
    out = rng.standard_normal(shape, np.float32)
    out *= like.std()
    return out


def write(widening: Widening, weights: Weights, out: Path, dtype: str, progress: Progress | None = None) -> None:
    """Write config.json and model.safetensors, one tensor after another."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(widening.config(dtype), indent=1) + "\n", "utf-8")
    size, kind = (4, "F32") if dtype == "float32" else (2, "BF16")
    shapes = weight_shapes(widening.target)
    places = Llama().weight_map(widening.target)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * size
        header[str(places[name])] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    task = progress.add_task("widening", total=end) if progress is not None else None
    part = out / "model.safetensors.part"
    with part.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for number, name in enumerate(shapes):
            tensor = widening.tensor(name, weights, np.random.default_rng([0, number]))
            data = tensor if dtype == "float32" else narrow(tensor)
            file.write(np.ascontiguousarray(data).data)
            if progress is not None and task is not None:
                progress.advance(task, data.nbytes)
    part.replace(out / "model.safetensors")


def widen(model: Path, out: Path, shape: Shape, dtype: str = "float32", console: Console | None = None) -> ModelSpec:
    """Embed the model at `model` in `shape`, write the folder `out`, return its spec.

    Raises ValueError if the shape has no room for it, ModelError for a model that cannot be read.
    """
    checkpoint = open_model(model)
    widening = Widening(checkpoint.spec, shape)
    weights = load_weights(checkpoint, checkpoint.spec, "float32")
    if console is None:
        write(widening, weights, out, dtype)
    else:
        with Progress(console=console) as progress:
            write(widening, weights, out, dtype, progress)
    folder = model if model.is_dir() else model.parent
    for name in _COPIED:
        if (folder / name).is_file():
            shutil.copy(folder / name, out / name)
    return widening.target


def _shape(text: str) -> Shape:
    sizes = [int(part) for part in text.split(",")]
    if len(sizes) not in (6, 7) or min(sizes) < 1:
        raise argparse.ArgumentTypeError("give E,L,H,G,D,F or E,L,H,G,D,F,V")
    return Shape(*sizes)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--like", choices=sorted(SHAPES), help="the dimensions of a released model")
    target.add_argument("--shape", type=_shape, help="E,L,H,G,D,F[,V]: hidden, layers, heads, kv heads, head dim, ...")
    parser.add_argument(
        "--full-vocab", action="store_true", help="with --like: its vocabulary too, not the model's own"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    args = parser.parse_args(arguments)
    shape: Shape = args.shape or SHAPES[args.like]
    if args.like and not args.full_vocab:
        shape = Shape(**{**vars(shape), "vocab": None})
    console = Console(stderr=True)
    try:
        before = open_model(args.model).spec
        after = widen(args.model, args.out, shape, args.dtype, console)
    except (ValueError, PenstockError) as error:
        console.print(f"error: {error}", style="red")
        return 1
    console.print(f"{before.num_params:,} parameters became {after.num_params:,}, in {args.out}")
    if not (args.out / "tokenizer.json").exists():
        console.print("no tokenizer.json was copied: name the model's tokenizer with --tokenizer")
    return 0


if __name__ == "__main__":
    sys.exit(main())
