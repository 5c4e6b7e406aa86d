"""The native kernels as a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.backends.backend import AdapterRoom
from penstock.backends.native.forward import NativeForward, packed_one_by_one
from penstock.backends.native.obstacle import native_obstacle
from penstock.backends.native.packed import PackedWeights, Runs, weights_key
from penstock.config import EngineConfig
from penstock.core.cache_spec import CacheGroup
from penstock.core.events import Decision
from penstock.core.held_weights import HeldWeights, WeightMemory
from penstock.core.matrix_format import TABLES, parse_scheme
from penstock.core.model_spec import ModelSpec
from penstock.model.forward import Forward
from penstock.model.graph import Graph
from penstock.ops.native.library import best_library
from penstock.ops.native.matrix import Packed
from penstock.ops.native.packed_file import PackedStore
from penstock.ops.native.program import Pool
from penstock.ops.native.sample import Kernel
from penstock.plan.devices import Device
from penstock.plan.native_device import native_device
from penstock.plan.resolve import Plan

if TYPE_CHECKING:
    from penstock.backends.native.experts.left import LeftExperts

SMALL_BYTES = 64 << 20
KV_DTYPES = ("auto", "float32", "float16", "bfloat16", "int8")
"""kv_cache_dtype that native kernels read and write."""
NOT_BUILT = "no native kernels are installed: on Linux a wheel of Penstock brings them, or a C++17 compiler builds them"


class NativeBackend:
    """See `backends.backend.Backend`. Its models, and the sampler, run on one pool of threads."""

    name, new_plane = "native", None

    def __init__(
        self, pool: Pool, row_bits: int = 8, *, cascade: bool = True, leave: LeftExperts | None = None
    ) -> None:
        """`row_bits`: see `schemes.packing`. `cascade`: see `NativeProgram.share_prefixes`. `leave`: see
        `NativeForward`."""
        self.leave = leave
        self.cascade = cascade
        self.pool = pool
        self.draws = partial(Kernel, pool)
        self.row_bits = row_bits
        self.label = f"native kernels on {pool.num_threads} threads"

    @classmethod
    def of(cls, config: EngineConfig, num_cores: int) -> NativeBackend:
        row_bits = 8 if config.model.activation_quantization == "int8" else 0
        pool = Pool(_library(), config.execution.threads or num_cores)
        leave, run = None, config.execution
        if run.expert_memory_bytes is not None:
            from penstock.backends.native.experts.left import LeftExperts  # few want it

            leave = LeftExperts(run.expert_memory_bytes, run.expert_eviction, run.expert_prediction)
        return cls(pool, row_bits, cascade=config.execution.cascade_attention, leave=leave)

    @classmethod
    def why_not(cls, config: EngineConfig, spec: ModelSpec) -> str | None:
        if config.execution.attention_backend != "ref":
            return f"attention_backend is {config.execution.attention_backend}, and native programs have their own"
        if best_library() is None:
            return NOT_BUILT
        if config.cache.kv_rotation != "none":
            return f"there are no kernels yet for kv_rotation {config.cache.kv_rotation}"
        if config.cache.kv_cache_dtype not in KV_DTYPES:
            return f"there are no kernels yet for keys and values as {config.cache.kv_cache_dtype}"
        obstacle = native_obstacle(spec)
        return None if obstacle is None else f"there are no kernels yet for {obstacle}"

    @classmethod
    def why(cls) -> str:
        return f"kernels for {_library().pst_isa_name().decode()}, the best this processor runs"

    @classmethod
    def device(cls, config: EngineConfig, num_cores: int) -> Device:
        return native_device(_library().pst_isa_name().decode(), config.execution.threads or num_cores)

    @classmethod
    def memory(cls, config: EngineConfig, spec: ModelSpec) -> None:
        return None

    @classmethod
    def decisions(cls, config: EngineConfig, spec: ModelSpec, plan: Plan) -> tuple[Decision, ...]:
        return ()

    def compile(
        self, graph: Graph, groups: Sequence[CacheGroup], *, max_tokens: int, quantization: str = "none",
        matrices: Mapping[str, Packed] | None = None, like: Forward | None = None, adapters: AdapterRoom | None = None,
    ) -> NativeForward:  # fmt: skip
        assert like is None or isinstance(like, NativeForward), "made by this backend"
        make: Callable[..., NativeForward] = NativeForward
        if adapters is not None:
            from penstock.backends.native.adapted import AdaptedNative  # nobody else needs it at the start

            make = partial(AdaptedNative, count=adapters.count, max_rank=adapters.max_rank)
        return make(
            graph, groups, self.pool, parse_scheme(quantization) if like is None else like.scheme,
            max_tokens=max_tokens, matrices=None if matrices is None else dict(matrices), row_bits=self.row_bits,
            like=like, cascade=self.cascade, leave=self.leave,
        )  # fmt: skip

    def matrices(self, forward: Forward) -> Mapping[str, Packed]:
        assert isinstance(forward, NativeForward), "made by this backend"
        return forward.matrices

    def store(
        self, files: Sequence[Path], spec: ModelSpec, *, held: HeldWeights, quantization: str, num_bytes: int,
        copy: bool = True, memory: WeightMemory | None = None, part: str = "",
    ) -> PackedWeights | None:  # fmt: skip
        if num_bytes < SMALL_BYTES and memory is None:
            return None
        store, scheme = PackedStore(), parse_scheme(quantization)
        key = weights_key(files, scheme, held, spec, self.row_bits, store.folder, part)
        tables = [name for name in TABLES if name not in held.matrices or name in held.beside]
        if memory is None:
            return PackedWeights(store, key, tables, copy=copy, leave=self.leave is not None)

        def packed(graph: Graph) -> Runs:
            names, matrices = packed_one_by_one(graph, self.pool, scheme, self.row_bits)
            return names, num_bytes, matrices

        return PackedWeights(store, key, tables, memory=memory, packed=packed)


def _library() -> Any:
    library = best_library()
    assert library is not None, "why_not has looked"
    return library
