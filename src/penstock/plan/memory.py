"""How many KV blocks and states fit, and what to say when they do not.

Letters used here: P bytes of one block over all full groups, Q bytes of one state over all slot groups, n sequences,
b blocks of one full-length sequence, N blocks. Every sequence uses equally many blocks of each full group, so all full
groups get the same number N of slabs, and all slot groups too. Of a window group a sequence holds w blocks at most,
however long it is; the group gets min(N, n * w) slabs, and if memory is short, so many for fewer sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction

from penstock.base.errors import CapacityError, ConfigError
from penstock.config import CacheConfig, EngineConfig
from penstock.config.held import most_blocks
from penstock.config.selection import Keeping
from penstock.core.cache_spec import DTYPE_BYTES, CacheGroup, CacheSpec
from penstock.core.events import Decision
from penstock.core.held_weights import HeldWeights
from penstock.core.machine import Machine
from penstock.core.model_spec import ModelSpec

MIB = 1024**2
MIN_RESERVE_BYTES = 512 * MIB
RESERVE_PERCENT = 5
MIN_CHECKPOINTS = 16
UTILIZATION = 0.9
"""Of what weights and reserve leave, KV takes no more unless it is told to."""
MODEST_TOKENS = 2048
"""By default there is KV memory for max_num_seqs sequences of so many tokens, ..."""
DEFAULT_SHARE = 4
"""... but not more than a `DEFAULT_SHARE`-th of what is free after the weights: others use the machine, too."""
_MAX_PAGES = 2**31 - 1  # page ids are int32


def gib(num_bytes: int) -> str:
    """Bytes for people and, exactly, for machines: "1.50 GiB (1610612736 bytes)"."""
    for unit, size in (("GiB", 1024**3), ("MiB", MIB), ("KiB", 1024)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit} ({num_bytes} bytes)"
    return f"{num_bytes} bytes"


@dataclass(frozen=True)
class CacheSizes:
    """`block_bytes` P and `state_bytes` Q; 0 if the model has no such group. `pages_per_block`: the largest group's.

    `windows`: bytes of a slab and the spec of each window group. `step_tokens`: tokens that one sequence may have in
    steps in flight and the one being planned. `kinds`: of all groups. `keeping`: what sequences give up on their way.
    """

    block_size: int
    block_bytes: int
    state_bytes: int
    pages_per_block: int
    windows: tuple[tuple[int, CacheSpec], ...] = ()
    step_tokens: int = 0
    kinds: tuple[str, ...] = ()
    keeping: Keeping | None = None

    @classmethod
    def of(
        cls, groups: tuple[CacheGroup, ...], block_size: int, step_tokens: int, keeping: Keeping | None = None
    ) -> CacheSizes:
        return cls(
            block_size,
            sum(g.slab_bytes(block_size) for g in groups if g.spec.kind == "paged"),
            sum(g.slab_bytes(block_size) for g in groups if g.spec.kind == "slot"),
            max((g.pages_per_slab for g in groups if g.spec.per_token), default=1),
            tuple((g.slab_bytes(block_size), g.spec) for g in groups if g.spec.window is not None),
            step_tokens,
            tuple(g.spec.kind for g in groups),
            keeping,
        )

    @property
    def has_blocks(self) -> bool:
        return bool(self.block_bytes or self.windows)

    def most_blocks(self, num_tokens: int) -> tuple[int, ...]:
        """w of each window group: blocks that a sequence of so many tokens holds at any one time."""
        return tuple(spec.most_blocks(num_tokens, self.step_tokens, self.block_size) for _, spec in self.windows)

    def blocks(self, num_tokens: int) -> int:
        """N that one sequence of so many tokens needs; 0 for models of states only."""
        if self.block_bytes and self.keeping is not None:
            return most_blocks(self.keeping, num_tokens, self.block_size)
        return -(-num_tokens // self.block_size) if self.block_bytes else max(self.most_blocks(num_tokens), default=0)

    def window_blocks(self, num_blocks: int, num_seqs: int, num_tokens: int) -> tuple[int, ...]:
        """Slabs of each window group beside `num_blocks` of the full ones."""
        return tuple(min(num_blocks, num_seqs * most) for most in self.most_blocks(num_tokens))

    def num_bytes(self, num_blocks: int, num_seqs: int, num_tokens: int) -> int:
        """Bytes of all blocks, those of window groups for `num_seqs` sequences of at most `num_tokens` tokens."""
        slabs = self.window_blocks(num_blocks, num_seqs, num_tokens)
        return num_blocks * self.block_bytes + sum(n * size for n, (size, _) in zip(slabs, self.windows, strict=True))

    def per_group(self, num_blocks: int, num_slots: int, window_blocks: tuple[int, ...]) -> tuple[int, ...]:
        """Slabs of every group from those of each kind."""
        rest = iter(window_blocks)
        return tuple(num_blocks if k == "paged" else num_slots if k == "slot" else next(rest) for k in self.kinds)

    def most_affordable(self, num_bytes: int, num_seqs: int, num_tokens: int, most: int) -> int:
        """The largest N up to `most` whose blocks take at most `num_bytes`."""
        return largest(lambda n: self.num_bytes(n, num_seqs, num_tokens) <= num_bytes, 0, most)


@dataclass(frozen=True)
class Demand:
    max_model_len: int
    max_num_seqs: int
    seqs_are_given: bool
    checkpoints: bool
    on_demand: bool = True
    """Sequences get blocks as they grow; else they reserve those of max_model_len tokens."""
    adapter_blocks: int = 0
    """Those of adapters, where all that may run at once lie in blocks."""


@dataclass(frozen=True)
class Budget:
    """`kv_bytes` is what KV may take; `limit_bytes` what is left after weights: nothing may exceed it."""

    kv_bytes: int
    limit_bytes: int
    why: str
    is_given: bool


@dataclass(frozen=True)
class Memory:
    """Slabs of every full group, slabs of every slot group, the number of sequences that leaves room for, and slabs of
    each window group."""

    num_blocks: int
    num_slots: int
    max_num_seqs: int
    window_blocks: tuple[int, ...] = ()
    decisions: list[Decision] = field(default_factory=list)


def largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest n in [low, high] with fits(n), if all below a fitting n fit too; `low` if none does."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def check_weights(weight_bytes: int, held: HeldWeights, spec: ModelSpec, machine: Machine) -> None:
    """Raises CapacityError if the weights alone exceed the available memory."""
    available = machine.available_bytes
    if weight_bytes <= available:
        return
    own = spec.num_params * DTYPE_BYTES[spec.dtype]
    advice = f"free {gib(weight_bytes - available)} or use a smaller model"
    if own < weight_bytes and own <= available:
        advice = f"use dtype {spec.dtype}, the checkpoint's own: {gib(own)}"
    how = f"({held})" if held.matrices else f"as {held.dtype}"
    raise CapacityError(
        f"the weights take {gib(weight_bytes)} {how}, but only {gib(available)} of memory are available; {advice}",
        field="dtype" if own < weight_bytes else "model",
    )


def asking_for_all(config: EngineConfig) -> EngineConfig:
    """`config` with UTILIZATION where it leaves open how much memory KV may take."""
    if config.sizes_kv:
        return config
    return replace(config, cache=replace(config.cache, gpu_memory_utilization=UTILIZATION))


def budget_for(cache: CacheConfig, weight_bytes: int, machine: Machine, sizes: CacheSizes, demand: Demand) -> Budget:
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
    asked = cache.gpu_memory_utilization
    share = UTILIZATION if asked is None else asked
    usable = int(max(0, limit - reserve) * Fraction(str(share)))
    why = (
        f"{gib(machine.available_bytes)} available - {gib(weight_bytes)} weights - {gib(reserve)} reserve, "
        f"times gpu_memory_utilization {share}"
    )
    everything = Budget(usable, limit, why, False)
    return everything if asked is not None else _modest(everything, sizes, demand)


def _modest(everything: Budget, sizes: CacheSizes, demand: Demand) -> Budget:
    """The default: a part of `everything` that KV may take."""
    n, length, usable = demand.max_num_seqs, demand.max_model_len, everything.kv_bytes
    tokens = min(MODEST_TOKENS, length) if demand.on_demand else length
    # Checkpoints get half of what sequences leave (`_checkpoints`).
    states = sizes.state_bytes * (n + (2 * max(n, MIN_CHECKPOINTS) if demand.checkpoints else 0))
    longest = sizes.blocks(length)
    wanted = sizes.num_bytes(n * sizes.blocks(tokens), n, length) + states + demand.adapter_blocks * sizes.block_bytes
    share = everything.limit_bytes // DEFAULT_SHARE
    least = sizes.num_bytes(longest, 1, length) + states
    chosen = max(least, min(wanted, share))
    if chosen >= usable:
        return everything
    if chosen == wanted:
        adapters = f" and max_loras adapters in {demand.adapter_blocks} blocks" if demand.adapter_blocks else ""
        why = f"what max_num_seqs {n} sequences of {tokens} tokens{adapters} need"
    elif chosen == share:
        why = f"a quarter of the {gib(everything.limit_bytes)} that are free after the weights: others use them, too"
    else:
        why = f"what one sequence of max_model_len {length} needs"
    why += f"; gpu_memory_utilization {UTILIZATION} would allow {gib(usable)}"
    return Budget(chosen, everything.limit_bytes, why, False)


def plan_memory(cache: CacheConfig, sizes: CacheSizes, demand: Demand, budget: Budget) -> Memory:
    """Split the budget into blocks and states. Raises CapacityError, ConfigError."""
    if cache.num_gpu_blocks_override is not None:
        return _overridden(cache.num_gpu_blocks_override, sizes, demand, budget)
    q, b = sizes.state_bytes, sizes.blocks(demand.max_model_len)
    sequence_bytes = sizes.num_bytes(b, 1, demand.max_model_len)
    n = _num_seqs(demand, sequence_bytes, q, budget.kv_bytes)
    if sequence_bytes + n * q > budget.kv_bytes:
        raise _too_small(sizes, demand, n, budget)
    checkpoints = _checkpoints(demand, n, q, budget.kv_bytes - sequence_bytes - n * q)
    num_slots = n + checkpoints if q else 0
    blocks, windowed = 0, 1
    decisions: list[Decision] = []
    if sizes.has_blocks:
        blocks, windowed, why = _blocks(sizes, demand, n, budget, budget.kv_bytes - num_slots * q)
        if sizes.block_bytes:
            decisions.append(Decision("num_gpu_blocks", blocks, why))
    memory = Memory(blocks, num_slots, n, sizes.window_blocks(blocks, windowed, demand.max_model_len), decisions)
    _explain_windows(memory, sizes, demand)
    _explain_slots(memory, demand, n, checkpoints, q)
    return memory


def _blocks(sizes: CacheSizes, demand: Demand, n: int, budget: Budget, available: int) -> tuple[int, int, str]:
    """(N, sequences that window groups are made for, why). Windows for everybody come before more blocks than b.

    Where windows are all there is, N only limits nothing: more than everybody needs could not be used.
    """
    b, length, most = sizes.blocks(demand.max_model_len), demand.max_model_len, _MAX_PAGES // sizes.pages_per_block
    if not sizes.block_bytes:
        windowed = largest(lambda m: sizes.num_bytes(m * b, m, length) <= available, 1, min(n, max(1, most // b)))
        return windowed * b, windowed, ""
    fits = f"what fits into {gib(budget.kv_bytes)} ({budget.why})"
    windowed = _windowed(sizes, demand, b, available)
    if windowed < demand.max_num_seqs:
        return b, windowed, fits
    # Bytes that were asked for are used in full: what no running sequence needs keeps more prefixes.
    affordable = sizes.most_affordable(available, windowed, length, min(most, available // sizes.block_bytes))
    enough = affordable if budget.is_given else n * b + demand.adapter_blocks
    if affordable <= enough:
        return affordable, windowed, fits
    return enough, windowed, f"all of max_num_seqs {n} sequences at max_model_len {demand.max_model_len} need no more"


def _windowed(sizes: CacheSizes, demand: Demand, num_blocks: int, available: int) -> int:
    """For how many sequences there can be window blocks beside `num_blocks` full ones; at least one."""
    length = demand.max_model_len
    return largest(lambda m: sizes.num_bytes(num_blocks, m, length) <= available, 1, demand.max_num_seqs)


def _explain_windows(memory: Memory, sizes: CacheSizes, demand: Demand) -> None:
    for i, (slabs, most) in enumerate(zip(memory.window_blocks, sizes.most_blocks(demand.max_model_len), strict=True)):
        window = sizes.windows[i][1].window
        each = (
            f"{most} blocks of each sequence, whatever its length, hold the window of {window} tokens and the "
            f"{sizes.step_tokens} tokens that steps may add before one is given up"
        )
        if most >= -(-demand.max_model_len // sizes.block_size):
            each = f"no sequence needs more than {most} blocks"
        if sizes.block_bytes and slabs == memory.num_blocks:
            why = f"{each}; no more than num_gpu_blocks are ever in use"
        elif slabs < demand.max_num_seqs * most:
            why = f"{each}; memory is left for {slabs // most} of max_num_seqs {demand.max_num_seqs} sequences"
        else:
            why = f"{each}; there are max_num_seqs {demand.max_num_seqs} sequences"
        name = "num_window_blocks" if len(memory.window_blocks) == 1 else f"num_window_blocks[{i}]"
        memory.decisions.append(Decision(name, slabs, why))


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


def _overridden(num_blocks: int, sizes: CacheSizes, demand: Demand, budget: Budget) -> Memory:
    name = "num_gpu_blocks_override"
    q, b, length = sizes.state_bytes, sizes.blocks(demand.max_model_len), demand.max_model_len
    if not sizes.has_blocks:
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
    block_bytes = sizes.num_bytes(num_blocks, 1, length)
    n = _num_seqs(demand, block_bytes, q, budget.limit_bytes)
    need = block_bytes + n * q
    if need > budget.limit_bytes:
        most = sizes.most_affordable(budget.limit_bytes - n * q, 1, length, num_blocks)
        advice = f"use at most {most} blocks" if most >= b else f"free {gib(need - budget.limit_bytes)} of memory"
        raise CapacityError(
            f"{name}: {num_blocks} blocks and {n} states take {gib(need)}, but {gib(budget.limit_bytes)} are left "
            f"after the weights; {advice}",
            field=name,
        )
    checkpoints = _checkpoints(demand, n, q, budget.limit_bytes - need)
    num_slots = n + checkpoints if q else 0
    windowed = _windowed(sizes, demand, num_blocks, budget.limit_bytes - num_slots * q)
    memory = Memory(num_blocks, num_slots, n, sizes.window_blocks(num_blocks, windowed, length))
    _explain_windows(memory, sizes, demand)
    _explain_slots(memory, demand, n, checkpoints, q)
    return memory


def _too_small(sizes: CacheSizes, demand: Demand, n: int, budget: Budget) -> CapacityError:
    """Every advice below was checked to fit if it is the only change."""
    q, b, length = sizes.state_bytes, sizes.blocks(demand.max_model_len), demand.max_model_len
    block_bytes = sizes.num_bytes(b, 1, length)
    need = block_bytes + n * q
    advice: list[str] = []
    field = "kv_cache_memory_bytes" if budget.is_given else "max_model_len"
    spare = budget.kv_bytes - n * q
    most = largest(lambda t: sizes.num_bytes(sizes.blocks(t), 1, t) <= spare, 0, length)
    if sizes.has_blocks and spare >= 0 and most >= 1:
        advice.append(f"max_model_len {most} (or less)")
    if q and demand.seqs_are_given and (fewer := (budget.kv_bytes - block_bytes) // q) >= 1:
        advice.append(f"max_num_seqs {fewer} (or less)")
    if need <= budget.limit_bytes:
        advice.append(f"kv_cache_memory_bytes {need} (or more)")
    change = f"use {' or '.join(advice)}"
    if not advice:
        change = f"free {gib(need - budget.limit_bytes)} of memory and set kv_cache_memory_bytes {need}"
    parts = f"one sequence of max_model_len {length}" if sizes.has_blocks else "the model"
    states = f" and the states of {n} sequences" if q else ""
    return CapacityError(
        f"{parts}{states} would take {gib(need)} of KV memory, but there are {gib(budget.kv_bytes)} "
        f"({budget.why}); {change}",
        field=field,
    )
