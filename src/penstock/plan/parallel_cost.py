"""What layers cost on several devices: seconds of a step, bytes on the wire and bytes that a rank keeps.

A stage is a run of layers on `degree` devices, its ranks. The ranks share products out by their outputs, those of every
expert too, and attention by heads, and gather where rows are needed whole, as `penstock.parallel.shard` does it; what
that runs whole on every rank (latent attention, recurrences, small products, the embedding) costs every rank all of it
here, too. Time is the roofline's (`plan.cost`), layer by layer, plus the exchanges. One device and layers that are
alike: the same.

What is not in it: exchanges that go on while something is computed, buffers of activations, quantised weights.
"""

from __future__ import annotations

from math import prod
from operator import add
from typing import NamedTuple, TypeGuard

import msgspec

from penstock.base.errors import ConfigError
from penstock.core.cache_spec import DTYPE_BYTES
from penstock.core.matrix_format import is_product
from penstock.core.mixers import Shapes
from penstock.core.model_spec import Attention, Experts, Layer, Mixer, ModelSpec, SharedBlock, cache_specs, layer_shapes
from penstock.core.step_shape import StepShape
from penstock.plan.devices import Device
from penstock.plan.flops import StepWork, model_work
from penstock.plan.ranks import LEAST_ROWS, output_ranges, possible_sizes

_WIRE_BYTES = 4  # activations are exchanged in float32
_ABSORBED = ("kv_b", "k_b", "v_b", "o_a")  # multiplied within attention, on every rank: not with rows


class DeviceLink(NamedTuple):
    """Between any two devices: bytes/s that one of them can give, and seconds that an exchange takes at least."""

    bytes_per_s: float
    latency_s: float


class SequenceLoad(NamedTuple):
    """Sequences of `prompt` tokens that get `output` tokens each; `waiting` of them are there at any time."""

    prompt: int
    output: int
    waiting: int

    def step(self, rows: int) -> StepShape:
        """The mean step of a micro-batch of `rows` sequences: each gets a token, behind half of its output, and as
        many tokens of new prompts are read as ends of sequences make room for (rounded up)."""
        tokens = -(-rows * self.prompt // self.output)
        prompts = -(-tokens // self.prompt)
        context = self.prompt + (self.output + 1) // 2
        pairs = rows * context + tokens * (self.prompt + 1) // 2
        return StepShape(rows + tokens, rows + prompts, rows * context + prompts * self.prompt, pairs, rows)


class RankCost(NamedTuple):
    """What layers cost each rank of a stage in the step of one micro-batch. Units: seconds and bytes.

    `compute_s` and `read_s`: of the phases that computing and reading memory hold back. `wire_bytes`: given away by all
    ranks together. `weight_bytes`, and `kv_bytes` of one sequence at its full length: kept by each rank.
    """

    compute_s: float = 0.0
    read_s: float = 0.0
    link_s: float = 0.0
    overhead_s: float = 0.0
    wire_bytes: int = 0
    weight_bytes: int = 0
    kv_bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.compute_s + self.read_s + self.link_s + self.overhead_s

    def plus(self, other: RankCost) -> RankCost:
        return RankCost(*map(add, self, other))


class ParallelCosts:
    """Costs of the layers and stages of one model under one load. They depend on nothing else and never change."""

    def __init__(
        self, spec: ModelSpec, device: Device, link: DeviceLink, load: SequenceLoad, dtype: str,
        kv_dtype: str | None = None,
    ) -> None:  # fmt: skip
        """`dtype` of weights, `kv_dtype` of the cache (None: the same). Raises ConfigError for numbers below 1, a link
        without speed, an encoder, or a dtype the device has no figure for."""
        for name, value in load._asdict().items():
            if value < 1:
                raise ConfigError(f"{name}: must be at least 1, not {value}", field=name)
        if not link.bytes_per_s > 0 or not link.latency_s >= 0:
            raise ConfigError(f"link: needs more than 0 bytes/s and no latency below 0, not {link}", field="link")
        if spec.is_encoder or not spec.layers:
            raise ConfigError("a model that writes no text has no tokens per second; plan for a decoder", field="model")
        self._spec, self._device, self._link, self.load = spec, device, link, load
        self._dtype, self._kv_dtype, self._flops = dtype, kv_dtype, device.flops(dtype)
        self._ends = msgspec.structs.replace(spec, layers=())
        self._kinds: list[tuple[Layer, ...]] = []  # a layer, behind the one whose keys it reads
        self._kind_of = [self._kind(layer) for layer in spec.layers]
        self._kv = [self._kept(n) for n in range(len(spec.layers))]
        self._works: dict[tuple[int, int], StepWork] = {}
        self._costs: dict[tuple[int, int, int], RankCost] = {}

    @property
    def num_layers(self) -> int:
        return len(self._spec.layers)

    def may_begin(self, n: int) -> bool:
        """Whether a stage may begin with layer n: nobody behind it reads keys and values of a layer before it."""
        return all(layer.kv_from is None or layer.kv_from >= n for layer in self._spec.layers[n:])

    def degrees(self, num_devices: int) -> tuple[int, ...]:
        """Numbers of ranks that share attention heads out evenly (`plan.ranks`), else powers of two."""
        has_heads = any(isinstance(layer.mixer, Attention) for layer in self._spec.layers)
        fit = (t for t in possible_sizes(self._spec) if t <= num_devices)
        return tuple(t for t in fit if has_heads or t & (t - 1) == 0)

    def stage(self, first: int, last: int, degree: int, rows: int) -> RankCost:
        """Layers first ... last - 1 on `degree` devices, for a micro-batch of `rows` sequences."""
        cost = self.entry(first, degree, rows)
        for n in range(first, last):
            cost = cost.plus(self.layer(n, degree, rows))
        return cost

    def entry(self, first: int, degree: int, rows: int) -> RankCost:
        """What a stage that begins with layer `first` costs besides its layers: every rank gets all hidden states."""
        if not first:
            return RankCost(overhead_s=self._device.step_overhead_s)
        given = self.load.step(rows).num_tokens * self._spec.hidden_size * _WIRE_BYTES
        return RankCost(
            link_s=self._link.latency_s + given / self._link.bytes_per_s,
            overhead_s=self._device.step_overhead_s,
            wire_bytes=given * degree,
        )

    def layer(self, n: int, degree: int, rows: int) -> RankCost:
        """Layer n; the first one comes with the embedding, the last one with the LM head (its own, even if tied)."""
        kind = self._kind_of[n]
        if (kind, degree, rows) not in self._costs:
            self._costs[kind, degree, rows] = self._layer(kind, degree, rows)
        cost = self._costs[kind, degree, rows]
        cost = cost._replace(kv_bytes=self._of_heads(self._kv[n], self._spec.layers[n].mixer, degree))
        if n == 0:
            cost = cost.plus(self._embedding(rows))
        return cost.plus(self._head(degree, rows)) if n == self.num_layers - 1 else cost

    # -- one layer -----------------------------------------------------------------------------------------------

    def _kind(self, layer: Layer) -> int:
        source = () if layer.kv_from is None else (self._spec.layers[layer.kv_from],)
        if source and isinstance(layer.mixer, Attention):
            layer = msgspec.structs.replace(layer, mixer=msgspec.structs.replace(layer.mixer, kv_from=0))
        if (*source, layer) not in self._kinds:
            self._kinds.append((*source, layer))
        return self._kinds.index((*source, layer))

    def _kept(self, n: int) -> int:
        """Bytes of one sequence at its full length in layer n, all heads."""
        tokens, total = self.load.prompt + self.load.output, 0
        for cache in cache_specs(self._spec, self._kv_dtype or self._dtype)[n]:
            seen = tokens if cache.window is None else min(tokens, cache.window)
            total += cache.num_bytes * (seen if cache.per_token else 1)
            total += sum(-(-tokens // (plane.every or tokens)) * plane.num_bytes for plane in cache.page_planes)
        return total

    def _layer(self, kind: int, degree: int, rows: int) -> RankCost:
        layer, shape = self._kinds[kind][-1], self.load.step(rows)
        kept, gathered = self.shared(layer, degree)
        everything, numbers = (sum(map(prod, w.values())) for w in (self._weights(layer), self._products(layer)))
        idle = 1.0 - kept / numbers if numbers else 0.0  # of the products: what other ranks do
        work = self._work(kind, rows)
        experts = work.linear_bytes - self._work_without_experts(kind, rows)
        chosen, all_experts, others, exchanged = self.experts(layer, degree)
        compute, read = self._phase(
            work.linear_flops - 2 * shape.num_tokens * (numbers * idle + chosen * others),
            work.linear_bytes - (work.linear_bytes - experts) * idle - experts * others,
        )
        parts = degree if self._by_heads(layer.mixer, degree) else 1
        more = self._phase(work.mixer_flops / parts, self._of_heads(work.mixer_bytes, layer.mixer, degree))
        link_s, wire = self._gathers([*gathered, *exchanged], shape.num_tokens, degree)
        return RankCost(
            compute_s=compute + more[0],
            read_s=read + more[1],
            link_s=link_s,
            overhead_s=self._device.layer_overhead_s,
            wire_bytes=wire,
            weight_bytes=round((everything - numbers + kept - all_experts * others) * DTYPE_BYTES[self._dtype]),
        )

    def _weights(self, layer: Layer) -> Shapes:
        e = self._spec.hidden_size
        block = layer.mixer.shared_shapes(e) if isinstance(layer.mixer, SharedBlock) else {}
        return {**layer_shapes(layer, e), **block}

    def _products(self, layer: Layer) -> Shapes:
        """Of a layer, without those of its experts."""
        found = self._weights(layer).items()
        return {name: s for name, s in found if is_product(name, s) and not name.startswith("experts.")}

    def shared(self, layer: Layer, degree: int) -> tuple[float, list[int]]:
        """Numbers of the products' weights that a rank keeps, and the width of every gather."""
        kept, gathered, mixer = 0.0, [], layer.mixer
        for name, (outputs, inputs) in ((k, (s[0], s[1])) for k, s in self._products(layer).items()):
            own = 1.0
            if name in ("q", "k", "v") and self._by_heads(mixer, degree):
                own = 1 / degree if name == "q" else max(1, mixer.num_kv_heads // degree) / mixer.num_kv_heads
                if name == "q" and degree > 1:
                    gathered.append(mixer.num_heads * mixer.value_dim)  # what attention gives
            elif degree > 1 and outputs >= LEAST_ROWS * degree and name not in _ABSORBED:
                own = 1 / degree
                if not name.endswith("gate") or name == "o_gate":  # gate and up are gathered once, as activations
                    gathered.append(outputs)
            kept += outputs * inputs * own
        return kept, gathered

    def experts(self, layer: Layer, degree: int) -> tuple[int, int, float, list[int]]:
        """Numbers in the matrices of a token's experts, and of all; the part of them that a rank leaves to others; and
        what is exchanged of a token: its rows between the products, and what its experts give."""
        f = layer.ffn
        if not isinstance(f, Experts):
            return 0, 0, 0.0, []
        width, size, first = f.expert.width, f.expert_size(self._spec.hidden_size), 2 if f.expert.gated else 1
        inner, outputs = bool(output_ranges(width, degree)), bool(output_ranges(size, degree))
        one = (first + 1) * width * size
        others = (first * inner + outputs) / (first + 1) * (1 - 1 / degree)
        exchanged = [f.top_k * width] if inner and degree > 1 else []
        # Where a shared expert's outputs are apart, too, their sum is what is gathered.
        apart = f.shared is None or f.shared_gate or f.apart is not None or f.latent is not None
        if outputs and degree > 1 and apart:
            exchanged.append(size)
        return f.top_k * one, f.num_experts * one, others, exchanged

    def _gathers(self, widths: list[int], tokens: int, degree: int) -> tuple[float, int]:
        """Seconds, and bytes of all ranks: each gives its columns to all others."""
        given = [tokens * width * _WIRE_BYTES * (degree - 1) / degree for width in widths]
        seconds = len(given) * self._link.latency_s + sum(given) / self._link.bytes_per_s
        return seconds, round(sum(given) * degree)

    @staticmethod
    def _by_heads(mixer: Mixer | None, degree: int) -> TypeGuard[Attention]:
        """Whether heads of keys and values are shared out; where there are fewer than ranks, several have the same."""
        if type(mixer) is not Attention:
            return False
        return mixer.num_kv_heads % degree == 0 or degree % mixer.num_kv_heads == 0

    def _of_heads(self, num_bytes: int, mixer: Mixer | None, degree: int) -> int:
        """Of the bytes of keys and values, those that a rank has."""
        if not self._by_heads(mixer, degree):
            return num_bytes
        return -(-num_bytes * max(1, mixer.num_kv_heads // degree) // mixer.num_kv_heads)

    def _work(self, kind: int, rows: int) -> StepWork:
        """Of one layer, as the difference that it makes to a model."""
        if (kind, rows) not in self._works:
            with_it, without = self._kinds[kind], self._kinds[kind][:-1]
            a, b = (self._model(layers, rows) for layers in (with_it, without))
            self._works[kind, rows] = StepWork(*(x - y for x, y in zip(a, b, strict=True)))
        return self._works[kind, rows]

    def _model(self, layers: tuple[Layer, ...], rows: int) -> StepWork:
        spec = msgspec.structs.replace(self._spec, layers=layers)
        return model_work(spec, self._dtype, self._kv_dtype).step(self.load.step(rows))

    def _work_without_experts(self, kind: int, rows: int) -> int:
        """Bytes that the layer's products move, but for the weights of experts."""
        work, layer = self._work(kind, rows), self._kinds[kind][-1]
        if not isinstance(layer.ffn, Experts):
            return work.linear_bytes
        spec = msgspec.structs.replace(self._spec, layers=(layer,))
        if layer.kv_from is not None:
            spec = msgspec.structs.replace(spec, layers=self._kinds[kind])
        own = model_work(spec, self._dtype, self._kv_dtype).experts[-1]
        return work.linear_bytes - own.read_bytes(self.load.step(rows).num_tokens)

    def _phase(self, flops: float, num_bytes: float) -> tuple[float, float]:
        """Seconds of a phase, as computing's or as reading's: the longer one counts."""
        compute, read = flops / self._flops, num_bytes / self._device.read_bytes_per_s
        return (compute, 0.0) if compute > read else (0.0, read)

    # -- both ends -----------------------------------------------------------------------------------------------

    def _embedding(self, rows: int) -> RankCost:
        compute, read = self._phase((work := self._model((), rows)).linear_flops, work.linear_bytes)
        inside = sum(prod(shape) for layer in self._spec.layers for shape in self._weights(layer).values())
        numbers = max(self._ends.num_params, self._spec.num_params - inside)  # whatever belongs to no layer is here
        if not self._spec.tie_embeddings and self._spec.has_head:
            numbers -= self._spec.vocab_size * self._spec.vector_size
        return RankCost(compute_s=compute, read_s=read, weight_bytes=numbers * DTYPE_BYTES[self._dtype])

    def _head(self, degree: int, rows: int) -> RankCost:
        work, vocab = self._model((), rows), self._spec.vocab_size
        parts = degree if vocab >= LEAST_ROWS * degree else 1
        compute, read = self._phase(work.head_flops / parts, work.head_bytes / parts)
        link_s, wire = self._gathers([vocab] if parts > 1 else [], rows, degree)
        held = -(-vocab * self._spec.vector_size * DTYPE_BYTES[self._dtype] // parts)
        return RankCost(compute_s=compute, read_s=read, link_s=link_s, wire_bytes=wire, weight_bytes=held)
