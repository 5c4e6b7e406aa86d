"""How many KV blocks and states fit, and what to say when they do not.

Letters used here: P bytes of one block over all paged groups, Q bytes of one state over all slot groups, n sequences,
b blocks of one full-length sequence. Every sequence uses equally many blocks of each paged group, so all paged groups
get the same number of slabs, and all slot groups too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from penstock.base.errors import CapacityError, ConfigError
from penstock.config import CacheConfig
from penstock.core.cache_spec import DTYPE_BYTES, CacheGroup
from penstock.core.events import Decision
from penstock.core.machine import Machine
from penstock.core.model_spec import ModelSpec

MIB = 1024**2
MIN_RESERVE_BYTES = 512 * MIB
RESERVE_PERCENT = 5
MIN_CHECKPOINTS = 16
_MAX_PAGES = 2**31 - 1  # page ids are int32


def gib(num_bytes: int) -> str:
    """Bytes for people and, exactly, for machines: "1.50 GiB (1610612736 bytes)"."""
    for unit, size in (("GiB", 1024**3), ("MiB", MIB), ("KiB", 1024)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit} ({num_bytes} bytes)"
    return f"{num_bytes} bytes"


@dataclass(frozen=True)
class Sizes:
    """`block_bytes` P and `state_bytes` Q; 0 if the model has no such group. `pages_per_block`: the largest group's."""

    block_size: int
    block_bytes: int
    state_bytes: int
    pages_per_block: int

    @classmethod
    def of(cls, groups: tuple[CacheGroup, ...], block_size: int) -> Sizes:
        paged = [g for g in groups if g.spec.kind == "paged"]
        return cls(
            block_size,
            sum(g.slab_bytes(block_size) for g in paged),
            sum(g.slab_bytes(block_size) for g in groups if g.spec.kind == "slot"),
            max((g.pages_per_slab for g in paged), default=1),
        )

    def blocks(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens of one sequence; 0 for models without paged groups."""
        return -(-num_tokens // self.block_size) if self.block_bytes else 0


@dataclass(frozen=True)
class Demand:
    max_model_len: int
    max_num_seqs: int
    seqs_are_given: bool
    checkpoints: bool


@dataclass(frozen=True)
class Budget:
    """`kv_bytes` is what KV may take; `limit_bytes` what is left after weights: nothing may exceed it."""

    kv_bytes: int
    limit_bytes: int
    why: str
    is_given: bool


@dataclass(frozen=True)
class Memory:
    """Slabs of every paged group, slabs of every slot group, and the number of sequences that leaves room for."""

    num_blocks: int
    num_slots: int
    max_num_seqs: int
    decisions: list[Decision] = field(default_factory=list)


def check_weights(weight_bytes: int, dtype: str, spec: ModelSpec, machine: Machine) -> None:
    """Raises CapacityError if the weights alone exceed the available memory."""
    available = machine.available_bytes
    if weight_bytes <= available:
        return
    own = spec.num_params * DTYPE_BYTES[spec.dtype]
    advice = f"free {gib(weight_bytes - available)} or use a smaller model"
    if own < weight_bytes and own <= available:
        advice = f"use dtype {spec.dtype}, the checkpoint's own: {gib(own)}"
    raise CapacityError(
        f"the weights take {gib(weight_bytes)} as {dtype}, but only {gib(available)} of memory are available; {advice}",
        field="dtype" if own < weight_bytes else "model",
    )


def budget_for(cache: CacheConfig, weight_bytes: int, machine: Machine) -> Budget:
    """What KV may take. Explicit sizes may use the reserve too: whoever gives them knows the machine."""
    limit = machine.available_bytes - weight_bytes
    if cache.kv_cache_memory_bytes is not None:
        given = cache.kv_cache_memory_bytes
        if given > limit:
            raise CapacityError(
                f"kv_cache_memory_bytes: {gib(given)} do not fit: {gib(machine.available_bytes)} are available and the "
                f"weights take {gib(weight_bytes)}; use at most {limit}",
                field="kv_cache_memory_bytes",
            )
        return Budget(given, limit, "kv_cache_memory_bytes", True)
    reserve = max(MIN_RESERVE_BYTES, machine.available_bytes * RESERVE_PERCENT // 100)
    # Through the decimal text, so that 0.9 is nine tenths and not its nearest binary neighbour.
    share = Fraction(str(cache.gpu_memory_utilization))
    usable = int(max(0, limit - reserve) * share)
    why = (
        f"{gib(machine.available_bytes)} available - {gib(weight_bytes)} weights - {gib(reserve)} reserve, "
        f"times gpu_memory_utilization {cache.gpu_memory_utilization}"
    )
    return Budget(usable, limit, why, False)


def plan_memory(cache: CacheConfig, sizes: Sizes, demand: Demand, budget: Budget) -> Memory:
    """Split the budget into blocks and states. Raises CapacityError, ConfigError."""
    if cache.num_gpu_blocks_override is not None:
        return _overridden(cache.num_gpu_blocks_override, sizes, demand, budget)
    p, q, b = sizes.block_bytes, sizes.state_bytes, sizes.blocks(demand.max_model_len)
    n = _num_seqs(demand, b * p, q, budget.kv_bytes)
    if b * p + n * q > budget.kv_bytes:
        raise _too_small(sizes, demand, n, budget)
    spare = budget.kv_bytes - b * p - n * q
    checkpoints = _checkpoints(demand, n, q, spare)
    num_slots = n + checkpoints if q else 0
    memory = Memory(0, num_slots, n)
    if p:
        affordable = min((budget.kv_bytes - num_slots * q) // p, _MAX_PAGES // sizes.pages_per_block)
        # Bytes that were asked for are used in full: what no running sequence needs keeps more prefixes.
        enough = affordable if budget.is_given else n * b
        blocks = min(affordable, enough)
        memory = Memory(blocks, num_slots, n)
        if blocks < affordable:
            why = f"all of max_num_seqs {n} sequences at max_model_len {demand.max_model_len} need no more"
        else:
            why = f"what fits into {gib(budget.kv_bytes)} ({budget.why})"
        memory.decisions.append(Decision("num_gpu_blocks", blocks, why))
    _explain_slots(memory, demand, n, checkpoints, q)
    return memory


def _num_seqs(demand: Demand, sequence_bytes: int, q: int, kv_bytes: int) -> int:
    """If nobody said how many: one, and as many more as half of what one full-length sequence leaves over can hold.

    The other half stays for blocks: many states without blocks to grow into would only preempt each other.
    """
    if demand.seqs_are_given or not q:
        return demand.max_num_seqs
    spare = max(0, kv_bytes - sequence_bytes - q)
    return min(demand.max_num_seqs, 1 + spare // 2 // q)


def _checkpoints(demand: Demand, n: int, q: int, spare: int) -> int:
    """States kept for prefix hits: one per running sequence and at least a handful, but never more than half of what
    full-length service leaves over: no checkpoint is needed for a right answer."""
    if not q or not demand.checkpoints:
        return 0
    return min(max(n, MIN_CHECKPOINTS), spare // 2 // q)


def _explain_slots(memory: Memory, demand: Demand, n: int, checkpoints: int, q: int) -> None:
    if not q:
        return
    wanted = max(n, MIN_CHECKPOINTS)
    if not demand.checkpoints:
        why = f"one state for each of max_num_seqs {n} sequences; prefix caching is off, so none are kept"
    elif checkpoints == wanted:
        why = (
            f"one state for each of max_num_seqs {n} sequences and {checkpoints} checkpoints "
            f"(as many again, at least {MIN_CHECKPOINTS}), where prefix hits can resume"
        )
    else:
        why = (
            f"one state for each of max_num_seqs {n} sequences and {checkpoints} checkpoints for prefix hits "
            f"({wanted} were wanted; they get half of the memory that is left over)"
        )
    memory.decisions.append(Decision("num_slots", memory.num_slots, why))


def _overridden(num_blocks: int, sizes: Sizes, demand: Demand, budget: Budget) -> Memory:
    name = "num_gpu_blocks_override"
    p, q, b = sizes.block_bytes, sizes.state_bytes, sizes.blocks(demand.max_model_len)
    if not p:
        raise ConfigError(f"{name}: this model keeps no KV blocks, only fixed states; leave it away", field=name)
    if num_blocks < b:
        raise CapacityError(
            f"{name}: {num_blocks} blocks hold {num_blocks * sizes.block_size} tokens, but one sequence of "
            f"max_model_len {demand.max_model_len} needs {b} blocks of {sizes.block_size}; use at least {b} blocks or "
            f"max_model_len {num_blocks * sizes.block_size} at most",
            field=name,
        )
    if num_blocks * sizes.pages_per_block > _MAX_PAGES:
        most = _MAX_PAGES // sizes.pages_per_block
        raise ConfigError(f"{name}: {num_blocks} is more than page ids can count; use at most {most}", field=name)
    n = _num_seqs(demand, num_blocks * p, q, budget.limit_bytes)
    need = num_blocks * p + n * q
    if need > budget.limit_bytes:
        most = (budget.limit_bytes - n * q) // p
        advice = f"use at most {most} blocks" if most >= b else f"free {gib(need - budget.limit_bytes)} of memory"
        raise CapacityError(
            f"{name}: {num_blocks} blocks and {n} states take {gib(need)}, but {gib(budget.limit_bytes)} are left "
            f"after the weights; {advice}",
            field=name,
        )
    checkpoints = _checkpoints(demand, n, q, budget.limit_bytes - need)
    memory = Memory(num_blocks, n + checkpoints if q else 0, n)
    _explain_slots(memory, demand, n, checkpoints, q)
    return memory


def _too_small(sizes: Sizes, demand: Demand, n: int, budget: Budget) -> CapacityError:
    """Every advice below was checked to fit if it is the only change."""
    p, q, b = sizes.block_bytes, sizes.state_bytes, sizes.blocks(demand.max_model_len)
    need = b * p + n * q
    advice: list[str] = []
    field = "kv_cache_memory_bytes" if budget.is_given else "max_model_len"
    if p and (most := (budget.kv_bytes - n * q) // p * sizes.block_size) >= 1:
        advice.append(f"max_model_len {most} (or less)")
    if q and demand.seqs_are_given and (fewer := (budget.kv_bytes - b * p) // q) >= 1:
        advice.append(f"max_num_seqs {fewer} (or less)")
    if need <= budget.limit_bytes:
        advice.append(f"kv_cache_memory_bytes {need} (or more)")
    change = f"use {' or '.join(advice)}"
    if not advice:
        change = f"free {gib(need - budget.limit_bytes)} of memory and set kv_cache_memory_bytes {need}"
    parts = f"one sequence of max_model_len {demand.max_model_len}" if p else "the model"
    states = f" and the states of {n} sequences" if q else ""
    return CapacityError(
        f"{parts}{states} would take {gib(need)} of KV memory, but there are {gib(budget.kv_bytes)} "
        f"({budget.why}); {change}",
        field=field,
    )
