"""Native kernels or not: the decision, and what it needs."""

from __future__ import annotations

from dataclasses import replace

from penstock.base.errors import ConfigError
from penstock.config import EngineConfig
from penstock.core.events import Decision
from penstock.core.model_spec import ModelSpec
from penstock.model.native.forward import NativeForward
from penstock.model.native.obstacle import native_obstacle
from penstock.model.native.schemes import scheme_of
from penstock.model.program import Program
from penstock.ops.native.library import best_library
from penstock.ops.native.program import Pool
from penstock.plan.probe import probe
from penstock.plan.resolve import Plan

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


def _problem(config: EngineConfig, spec: ModelSpec) -> str | None:
    if config.execution.attention_backend != "ref":
        return f"attention_backend is {config.execution.attention_backend}, and native programs have their own"
    if best_library() is None:
        return NOT_BUILT
    obstacle = native_obstacle(spec)
    return None if obstacle is None else f"there are no kernels yet for {obstacle}"


def native_forward(config: EngineConfig, program: Program, plan: Plan) -> NativeForward:
    """`program` compiled for this machine, its weights packed."""
    library = best_library()
    assert library is not None, "choose_ops has looked"
    pool = Pool(library, config.execution.threads or probe().num_cores)
    scheme = scheme_of(config.model.quantization)
    return NativeForward(program, plan.groups, pool, scheme, max_tokens=plan.max_num_batched_tokens)
