"""Engines in memory for benchmarks: many with different settings on one native program, and timed runs of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
from benchmarks.common import Clock

from penstock.backends.native.backend import NativeBackend
from penstock.config import EngineConfig, from_kwargs
from penstock.core.machine import Machine
from penstock.core.model_spec import ModelSpec
from penstock.core.request import Request
from penstock.core.sampling import TokenRules
from penstock.engine.core import EngineCore
from penstock.launch.assemble import connect
from penstock.launch.backend import traits_of
from penstock.ops.native.program import Pool
from penstock.plan.resolve import Plan, resolve
from penstock.runner.assemble import DecoderModel

HUGE = Machine(num_cores=2, memory_bytes=1 << 36, available_bytes=1 << 36)
"""Engines get the blocks that a benchmark says, not those that this machine has room for."""
OnStep = Callable[[EngineCore], None]


class Maker:
    """Makes engines of one model. They share its packed weights, and must not run at the same time."""

    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, npt.NDArray[Any]], pool: Pool, *, dtype: str, scheme: str = "none",
        max_tokens: int = 512, max_len: int,
    ) -> None:  # fmt: skip
        self.spec, self._scheme = spec, scheme
        self._fixed = {
            "model": "(benchmark)", "dtype": dtype, "ops": "native", "quantization": scheme,
            "threads": pool.num_threads, "max_model_len": max_len, "max_num_batched_tokens": max_tokens,
        }  # fmt: skip
        _, plan = self._planned()
        self._backend = NativeBackend(pool)
        model = DecoderModel(spec=spec, weights=weights, groups=plan.groups, max_model_len=max_len)
        self.forward = model.on(self._backend, max_tokens=max_tokens, quantization=scheme)

    def _planned(self, **settings: Any) -> tuple[EngineConfig, Plan]:
        config = from_kwargs(**{"num_gpu_blocks_override": 4096, **self._fixed, **settings})
        return config, resolve(config, self.spec, HUGE, traits=traits_of(config))

    def engine(self, **settings: Any) -> EngineCore:
        """A fresh one, with an empty cache; it has run one token, so that its program is ready."""
        config, plan = self._planned(**settings)
        core = connect(config, plan, self.forward, self.spec.vocab_size, backend=self._backend)
        Run(core).serve([request("(warm)", [1], 1)])
        return core


def request(name: str, prompt: list[int], max_tokens: int, **more: Any) -> Request:
    """Greedy, to the end of `max_tokens`."""
    return Request(request_id=name, prompt_token_ids=prompt, rules=TokenRules(), max_tokens=max_tokens, **more)


@dataclass
class Run:
    """A timed drive of an engine. Seconds are those of `clock`, from the beginning of `serve`.

    `tokens`, `arrived_s`, `first_s`: per request. `steps`: (seconds, tokens made) of each step.
    """

    core: EngineCore
    clock: Clock = time.perf_counter
    tokens: dict[str, list[int]] = field(default_factory=dict)
    arrived_s: dict[str, float] = field(default_factory=dict)
    first_s: dict[str, float] = field(default_factory=dict)
    steps: list[tuple[float, int]] = field(default_factory=list)
    wall_s: float = 0.0

    def serve(
        self, load: list[Request], more: Callable[[str], list[Request]] | None = None, on_step: OnStep | None = None
    ) -> Run:
        """Everybody of `load` at once; `more(id)` when a request has ended: who comes then."""
        began = self.clock()
        for r in load:
            self._add(r, 0.0)
        while self.core.has_work:
            step_began = self.clock()
            outputs = self.core.step()
            now = self.clock()
            self.steps.append((now - step_began, sum(len(out.token_ids) for out in outputs)))
            for out in outputs:
                assert out.error is None, out.error
                self.tokens[out.request_id] += out.token_ids
                if out.token_ids:
                    self.first_s.setdefault(out.request_id, now - began)
                if out.finish_reason is not None and more is not None:
                    for r in more(out.request_id):
                        self._add(r, now - began)
            if on_step is not None:
                on_step(self.core)
        self.wall_s = self.clock() - began
        return self

    def _add(self, r: Request, now_s: float) -> None:
        self.tokens[r.request_id] = []
        self.arrived_s[r.request_id] = now_s
        self.core.add(r)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))

    @property
    def ttft_s(self) -> list[float]:
        return [self.first_s[name] - at for name, at in self.arrived_s.items()]

    def summary(self) -> dict[str, float]:
        ttft = sorted(self.ttft_s)
        return {
            "wall_s": self.wall_s, "tokens_per_s": self.num_tokens / self.wall_s, "num_steps": len(self.steps),
            "requests": len(self.tokens), "ttft_s": statistics.median(ttft), "ttft_p95_s": ttft[len(ttft) * 95 // 100],
        }  # fmt: skip
