"""Native kernels or not: the decision, and what it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from penstock.base.errors import ConfigError
from penstock.config import EngineConfig
from penstock.core.events import Decision
from penstock.core.matrix_format import HeldWeights
from penstock.core.model_spec import ModelSpec
from penstock.families.checkpoint import Checkpoint
from penstock.model.native.forward import NativeForward
from penstock.model.native.obstacle import native_matrices, native_obstacle
from penstock.model.program import Program
from penstock.ops.native.content_key import content_key
from penstock.ops.native.library import best_library
from penstock.ops.native.matrix import Packed
from penstock.ops.native.packed_file import PackedStore
from penstock.ops.native.program import Pool
from penstock.plan.devices import Device, device_preset
from penstock.plan.native_device import native_device
from penstock.plan.probe import probe
from penstock.plan.resolve import Plan
from penstock.quant.reference import Scheme, parse_scheme

SMALL_BYTES = 64 << 20
NATIVE_KV = ("auto", "float32", "float16", "bfloat16", "int8")
"""kv_cache_dtype that native kernels read and write."""
NOT_BUILT = "no native kernels were built: install Penstock again where a C++17 compiler is found"


def choose_ops(config: EngineConfig, spec: ModelSpec) -> tuple[EngineConfig, tuple[Decision, ...]]:
    """`ops="auto"` decided, and why.

    Raises: ConfigError if native kernels are asked for, by `ops` or by `quantization`, and cannot be had.
    """
    ops, scheme = config.execution.ops, config.model.quantization
    problem = _problem(config, spec) if ops in ("auto", "native") else None
    if ops == "native" and problem is not None:
        raise ConfigError(f"ops: native kernels cannot run this: {problem}; use ops auto", field="ops")
    if scheme != "none" and (ops not in ("auto", "native") or problem is not None):
        why = problem or f"ops is {ops}"
        raise ConfigError(f"quantization: {scheme} needs the native kernels, and {why}", field="quantization")
    if ops != "auto":
        return config, ()
    if problem is not None:
        chosen, why = "ref", f"{problem}; the reference operations are slow"
    else:
        library = best_library()
        assert library is not None
        chosen, why = "native", f"kernels for {library.pst_isa_name().decode()}, the best this processor runs"
    execution = replace(config.execution, ops=chosen)
    return replace(config, execution=execution), (Decision("ops", chosen, why),)


def device_of(config: EngineConfig, num_cores: int) -> Device:
    """What the chosen operations run on, for predictions. `ops` must have been decided."""
    library = best_library() if config.execution.ops == "native" else None
    if library is None:
        return device_preset("cpu-ref")
    return native_device(library.pst_isa_name().decode(), config.execution.threads or num_cores)


def _problem(config: EngineConfig, spec: ModelSpec) -> str | None:
    if config.execution.attention_backend != "ref":
        return f"attention_backend is {config.execution.attention_backend}, and native programs have their own"
    if best_library() is None:
        return NOT_BUILT
    if config.cache.kv_rotation != "none":
        return f"there are no kernels yet for kv_rotation {config.cache.kv_rotation}"
    if config.cache.kv_cache_dtype not in NATIVE_KV:
        return f"there are no kernels yet for keys and values as {config.cache.kv_cache_dtype}"
    obstacle = native_obstacle(spec)
    return None if obstacle is None else f"there are no kernels yet for {obstacle}"


class PackedWeights:
    """The packed weights of one model, kept on disk from the first start to the next under a `weights_key`."""

    def __init__(self, store: PackedStore, key: str) -> None:
        self._store, self._key = store, key
        self.matrices: Mapping[str, Packed] | None = store.load(key)
        """What an earlier start has left; None if there is nothing, or nothing sound."""

    def names(self) -> frozenset[str]:
        """The weights that are in it, and need not be loaded. A table is looked up in its own type as well."""
        return frozenset(n for name in self.matrices or () for n in name.split()) - {"embed", "positions"}

    def keep(self, matrices: Mapping[str, Packed]) -> None:
        """For the next start; a warning in the log if the disk does not take it."""
        if self.matrices is None:
            self._store.save(self._key, matrices)


def packed_weights(config: EngineConfig, checkpoint: Checkpoint, plan: Plan) -> PackedWeights | None:
    """None where packing anew is quicker than looking for it."""
    if config.execution.ops != "native" or plan.weight_bytes < SMALL_BYTES:
        return None
    store, scheme = PackedStore(), parse_scheme(config.model.quantization)
    files = sorted({t.path for w in checkpoint.weights.values() for t in w.tensors})
    return PackedWeights(store, weights_key(files, scheme, plan.held, checkpoint.spec, store.folder))


def weights_key(
    files: Sequence[Path], scheme: Scheme, held: HeldWeights, spec: ModelSpec, folder: Path | None = None
) -> str:
    """What packed weights are kept under: the files they come from and what else decides their bytes.

    Which weights share a matrix is among that: a version that fuses otherwise must not find those of another.
    """
    library = best_library()
    assert library is not None, "choose_ops has looked"
    identity = f"{held.dtype} {library.pst_isa_name().decode()} {spec!r} {native_matrices(spec)}"
    beside = {n: f for n, f in held.matrices.items() if not scheme.weight_bits or f != scheme.format}
    if beside:  # what becomes of codes
        identity += f" {sorted(beside.items())}"
    return content_key(files, scheme.name, identity, folder=folder)


def native_forward(
    config: EngineConfig, program: Program, plan: Plan, packed: PackedWeights | None = None
) -> NativeForward:
    """`program` compiled for this machine, its weights packed, or taken from where they were packed before."""
    library = best_library()
    assert library is not None, "choose_ops has looked"
    pool = Pool(library, config.execution.threads or probe().num_cores)
    scheme = parse_scheme(config.model.quantization)
    found = None if packed is None or packed.matrices is None else dict(packed.matrices)
    made = NativeForward(program, plan.groups, pool, scheme, max_tokens=plan.max_num_batched_tokens, matrices=found)
    if packed is not None:
        packed.keep(made.matrices)
    return made
