"""A model with random weights that are made where they stay: a graph over arrays that take no memory, and a placement
that puts fresh tensors in their stead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import numpy as np
import torch
from benchmarks.gpu.bench import Bench

from penstock.backends.gpu.device_array import DeviceArray
from penstock.backends.gpu.placed import Placement, StoredTensor
from penstock.base.clock import MonotonicClock
from penstock.config import from_kwargs
from penstock.core.matrix_format import MatrixFormat, Shared
from penstock.core.model_spec import ModelSpec, cache_groups, weight_shapes
from penstock.core.request import Request
from penstock.core.sampling import TokenRules
from penstock.engine.core import EngineCore
from penstock.executor.rank import RankSpec
from penstock.launch.assemble import adapter_room, engine_over, model_of
from penstock.launch.backend import backend_of
from penstock.launch.parts import Parts, make_rank
from penstock.ops.stored import StoredMatrix
from penstock.plan.probe import Free
from penstock.plan.resolve import Plan, tokens_in_flight

DEVIATION = 0.02
GROUP = 128
INT4 = MatrixFormat(code="uint", bits=4, scales=(Shared("float16", 1, GROUP),), offset=8)
"""As most published int4 checkpoints: a float16 scale for each 128 inputs, no zero points."""
_PLENTY = Free(memory_bytes=1 << 46, available_bytes=1 << 46)


@cache
def _random_codes(shape: tuple[int, int]) -> tuple[Any, Any]:
    codes = np.random.default_rng(0).integers(0, 16, shape, np.uint8)
    return codes, np.full((shape[0], -(-shape[1] // GROUP)), DEVIATION / 4, np.float16)


class RandomCodes(StoredMatrix):
    """A matrix of random int4 codes. All of one size are one array here; on the device each has its own."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__(INT4, shape, np.dtype(np.uint16), None)

    def _codes(self, rows: Any) -> Any:
        return _random_codes(self.shape)[0][rows]

    def _scales(self, rows: Any) -> Any:
        return (_random_codes(self.shape)[1][rows],)

    @property
    def arrays(self) -> Any:
        return _random_codes(self.shape)

    def fault(self) -> str | None:
        return None


class RandomPlacement(Placement):
    """Arrays without memory of their own (all strides 0) become random bfloat16 tensors, made on the device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._codes: dict[tuple[int, int], Any] = {}

    @property
    def num_bytes(self) -> int:
        """As `Placement.num_bytes`; no two of these share memory, and fake tensors have none."""
        return sum(t.num_bytes if isinstance(t, StoredTensor) else t.numel() * t.element_size() for t in self.alive())

    def _matrix(self, weight: Any) -> Any:
        if isinstance(weight, np.ndarray) and weight.ndim == 2 and not any(weight.strides):
            return torch.empty(weight.shape, dtype=torch.bfloat16, device=self.device).normal_(0.0, DEVIATION)
        if not isinstance(weight, RandomCodes):
            return super()._matrix(weight)
        if weight.shape not in self._codes:
            self._codes[weight.shape] = super()._matrix(weight)
        first = self._codes[weight.shape]
        if not isinstance(first, StoredTensor):
            return first.clone()
        own = copy.copy(first)
        for name, value in vars(first).items():
            if isinstance(value, torch.Tensor):
                setattr(own, name, value.clone())
        return own


def weights_of(spec: ModelSpec, codes: str = "none") -> dict[str, Any]:
    """Stand-ins for all weights; vectors are ones. `codes` "int4": matrices of layers are int4, the others bfloat16."""
    out: dict[str, Any] = {}
    for name, shape in weight_shapes(spec).items():
        if len(shape) == 1:
            out[name] = np.ones(shape, np.float32)
        elif codes == "int4" and name.startswith("layers.") and not name.endswith("router"):
            out[name] = RandomCodes(shape)  # type: ignore[arg-type]
        else:
            out[name] = np.broadcast_to(np.zeros(1, np.uint16), shape)
    return out


class Machine(msgspec.Struct):
    """An engine over such a model.

    Attributes:
        weight_bytes: on the device; `read_bytes`: of them that a decode step reads (not the embedding, unless it is
            the output matrix too; of experts those that are chosen, at most all).
        kv_bytes: of one token.
        skips: while it is True, steps return zeros at once and compute nothing: prompts are as good as computed, behind
            keys and values that are random.
    """

    core: Any
    rank: Any
    forward: Any
    spec: Any
    plan: Any
    weight_bytes: int
    kv_bytes: int
    skips: bool = False


def engine_on(
    bench: Bench, spec: ModelSpec, *, num_seqs: int, num_tokens: int, budget: int, codes: str = "none",
    kv_dtype: str = "bfloat16", backend: Any = None, in_all: int | None = None, load_adapter: Any = None,
    **settings: Any,
) -> Machine:  # fmt: skip
    """`num_seqs` sequences of `num_tokens` tokens fit, or of `in_all` tokens altogether; a step takes at most `budget`
    tokens of prompts. `load_adapter`: reads adapters, where `settings` ask for them."""
    settings = {"depth": bench.depth, **settings}
    config = from_kwargs(model="(random)", device=bench.name, enable_prefix_caching=False, **settings)
    block = config.cache.block_size
    groups = cache_groups(spec, kv_dtype)
    slabs = tuple(-(-(in_all or num_seqs * num_tokens) // block) + num_seqs for _ in groups)
    plan = Plan(
        dtype="bfloat16", kv_dtype=kv_dtype, max_model_len=num_tokens, block_size=block, groups=groups,
        num_slabs=slabs, max_num_seqs=num_seqs, max_num_batched_tokens=budget, long_prefill_token_threshold=0,
        step_tokens=tokens_in_flight(config, num_tokens, budget), kv_capacity_tokens=slabs[0] * block,
        weight_bytes=0, kv_bytes=sum(n * g.slab_bytes(block) for n, g in zip(slabs, groups, strict=True)),
        num_host_slabs=(0,) * len(groups),
    )  # fmt: skip
    backend = backend or backend_of(config)
    placement = backend._placement = RandomPlacement(backend.device_used)
    model = model_of(config, spec, weights_of(spec, codes), plan)
    forward = model.on(backend, max_tokens=budget, adapters=adapter_room(config))
    parts = Parts(forward=forward, vocab_size=spec.vocab_size, backend=backend, load_adapter=load_adapter)
    clock = MonotonicClock()
    kv_bytes = sum(g.slab_bytes(block) for g in groups) // block
    machine = Machine(None, None, forward, spec, plan, placement.num_bytes, kv_bytes)
    _make_skippable(machine)

    def build(_: RankSpec, __: Any) -> Any:
        machine.rank = make_rank(config, plan, parts, clock)
        return machine.rank

    rank_spec = RankSpec(config=config.as_kwargs(), plan=plan)
    machine.core = engine_over(config, plan, rank_spec, build, clock, ask=lambda: _PLENTY, seconds_budget=False)
    for planes in machine.rank.storage.planes:
        for plane in planes.values():
            if plane.tensor.dtype in (torch.bfloat16, torch.float32, torch.float16):
                plane.tensor.normal_()
    return machine


def _make_skippable(machine: Machine) -> None:
    """Wrap the instance's ways to run; what is found by the class stays found."""
    forward = machine.forward

    def wrapped(real: Callable[..., Any], zeros: Callable[[int], Any]) -> Callable[..., Any]:
        def run(plan: Any, *rest: Any, **named: Any) -> Any:
            return zeros(len(plan.logits_indices)) if machine.skips else real(plan, *rest, **named)

        return run

    def tensor(rows: int) -> torch.Tensor:
        return torch.zeros((rows, machine.spec.vocab_size), device=forward.placement.device)

    forward.run = wrapped(forward.run, lambda rows: tensor(rows).cpu().numpy())
    forward.run_greedy = wrapped(forward.run_greedy, lambda rows: [0] * rows)
    forward.run_resident = wrapped(forward.run_resident, lambda rows: DeviceArray(tensor(rows)))


def read_bytes(machine: Machine, batch: int) -> int:
    """Bytes of weights that a decode step of so many rows reads, in expectation where experts are chosen.

    Rows of the embedding that are looked up are left out. Experts: each row takes `top_k` of them, evenly.
    """
    total = machine.weight_bytes
    spec = machine.spec
    if not spec.tie_embeddings:
        total -= 2 * spec.vocab_size * (spec.embed_size or spec.hidden_size)
    for layer in spec.layers:
        num, top = getattr(layer.ffn, "num_experts", 0), getattr(layer.ffn, "top_k", 0)
        if num:
            whole = num * 3 * layer.ffn.expert.width * spec.hidden_size * 2
            total -= round(whole * (1 - top / num) ** batch)
    return total


def ask(core: EngineCore, number: int, length: int, max_tokens: int, vocab: int, **rules: Any) -> None:
    """One more request with a random prompt."""
    prompt = np.random.default_rng(number).integers(2, vocab, length).tolist()
    named = {"temperature": 0.0, **rules}
    core.add(Request(request_id=f"r{number}", prompt_token_ids=prompt, rules=TokenRules(**named),
                     max_tokens=max_tokens))  # fmt: skip
