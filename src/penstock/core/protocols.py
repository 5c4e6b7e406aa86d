"""The narrow seams. Each has one conformance suite in `tests/conformance`; registering an implementation enrols it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from penstock.base.errors import UnsupportedError

if TYPE_CHECKING:
    from array import array

    import numpy as np
    import numpy.typing as npt

    from penstock.core.batch import SchedulerOutput, StepOutput
    from penstock.core.compression import ContextJob
    from penstock.core.draft import DraftJob, DraftTree, Outcome
    from penstock.core.model_spec import ModelSpec
    from penstock.core.page_ops import LoadOp, StoreOp
    from penstock.core.request import Request
    from penstock.core.sampling import TokenRules
    from penstock.core.selection import PageReads
    from penstock.core.sequence import Sequence
    from penstock.core.step_shape import StepShape
    from penstock.core.weight_map import WeightMap
    from penstock.core.weight_swap import WeightFacts


Ids = Seq[Seq[int]]
Keys = TypeVar("Keys", contravariant=True)


@runtime_checkable
class Executor(Protocol):
    """All that the engine wants of its ranks. Steps run in order; what ranks do beside them is asked for here, too.

    An executor is derived from this class: what it leaves out, its ranks have nothing of. `prepare` and `holds` may be
    called from any thread, all else from the one that steps.

    A step without rows asks for news of late loads: its `collect` should wait for some, but not for long.
    """

    depth: int
    """Steps that may be in flight."""
    packed_file: str = ""
    """What the ranks' weights came from: "read", packed by an earlier start, or "made" by this one; "": no such file
    is kept of them."""

    def submit(self, output: SchedulerOutput) -> None:
        """Take a step. Never blocks on its result."""
        ...

    def collect(self) -> StepOutput:
        """The oldest step's result. Raises what broke the rank, or an EngineError that says it."""
        ...

    def close(self) -> None:
        """End the ranks, whatever is in flight. May be called twice."""
        ...

    def check(self) -> None:
        """Raises RankGoneError if a rank is gone: an idle engine asks, or it would hear of it with the next step."""
        return

    def back(self, num_slabs: Seq[int]) -> None:
        """Take memory for the first `num_slabs` of each cache group, and give that behind them back.

        What is given back is behind every step in flight.
        """
        return

    def holds(self, grammar: str) -> bool:
        """Whether a step with this grammar would not wait for it to be compiled; False where only the rank knows."""
        return True

    def prepare(self, grammar: str, param: str = "structured_outputs") -> None:
        """Returns when the rank has compiled it. Raises InputError, of the parameter `param`, if that cannot be done,
        and RankGoneError."""
        return

    def ready_weights(self, path: str) -> WeightFacts:
        """Read other weights of the model, in any thread, beside the steps; the running ones stay as they are.

        Raises PenstockError with why they cannot be had."""
        raise UnsupportedError("weights cannot be swapped on this executor")

    def switch_weights(self) -> float:
        """From the next step on those that were readied last are run. No step is in flight. Returns seconds."""
        return 0.0

    def spoil(self) -> None:
        """A fault for tests: the logits of the step submitted next get a row of NaN."""
        raise UnsupportedError("this executor has no logits to spoil")

    @property
    def processes(self) -> Seq[int]:
        """Ids of the processes that ranks live in, if it is not this one. They write their stacks at SIGUSR1."""
        return ()


class SchedulingPolicy(Protocol):
    """Answers three questions: in what order, how many tokens, whom to preempt."""

    name: str
    displaces: bool
    """Whether `displaced` is worth asking."""
    max_rows: int
    """Sequences in one step at most: the others keep their memory and pause. 0: no bound."""
    spare: float
    """Share of the memory that is kept free by copying those that pause to a tier. 0: nobody is copied ahead."""
    packs: bool
    """Whether a waiting sequence that does not fit lets those behind it in `order` pass. Who says so must see to it
    that nobody is passed for ever."""

    def begin_step(self, now_s: float, kv: Any) -> None:
        """Called before each step. `now_s` is the only time a policy may look at; `kv` (KVManager) answers `match`."""
        ...

    def key(self, seq: Sequence) -> tuple[int, ...]:
        """Sort key of both queues: smaller goes first."""
        ...

    def order(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> list[Sequence]:
        """Candidates of this step, first served first; both queues come sorted by `key`.

        May leave sequences out; must not starve any for ever.
        """
        ...

    def leaves(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> Seq[Sequence]:
        """Who gives its memory up before this step, although nobody has asked for it, and waits again.

        Whoever a step in flight works on stays, and is asked about again.
        """
        ...

    def num_tokens(self, seq: Sequence, lag: int, budget_left: int) -> int:
        """How many of its `lag` tokens to run now; at most `budget_left`; 0 skips it in this step."""
        ...

    def outranks(self, seq: Sequence, other: Sequence) -> bool:
        """Whether `other` would yield memory to `seq`, were it not for a step in flight."""
        ...

    def next_run_s(self, seqs: Seq[Sequence]) -> list[float]:
        """Estimated seconds until each of these, which do not run now, does: who is copied out first, and back."""
        ...

    def claims(self, waiting: Seq[Sequence]) -> Seq[Sequence]:
        """Who among those waiting may displace others, in the order in which `displaced` is asked about them."""
        ...

    def displaced(self, running: Seq[Sequence], newcomer: Sequence) -> Sequence | None:
        """Whom to preempt so that a waiting `newcomer` can be admitted; None if it should wait."""
        ...

    def not_before_s(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> float | None:
        """Time before which nothing should start although somebody waits; None to start at once."""
        ...

    def victim(self, running: Seq[Sequence], needy: Sequence) -> Sequence | None:
        """Whom to preempt so that `needy` gets memory; `needy` itself if nobody should yield to it."""
        ...


class LengthPredictor(Protocol):
    """How many tokens a sample will have, told before it begins, where requests are made (`penstock.lengths`).

    What it says goes into the request (`Request.expected_tokens`), and so into the log of a run: the engine never asks.
    """

    name: str

    def question(self, request: Request) -> Request | None:
        """What the model is to be asked first, in few tokens and over the same prompt; None: nothing."""
        ...

    def predict(self, request: Request, answer: Seq[int]) -> int:
        """Tokens of a sample, 1 to max_tokens; 0: it does not know. `answer`: what came of `question`, ids."""
        ...

    def learn(self, request: Request, num_generated: int) -> None:
        """One sample of `request` has ended with so many tokens, by itself or at max_tokens."""
        ...


class PrefixCache(Protocol):
    """Remembers full blocks by what was computed in them. Ids only. See `kv.prefix` for the laws.

    A *block* is known by the tokens up to its end and owns one id per cache group with block tables (a tuple, in group
    order): a slab, or what stands for one (`kv.window_pool`). To the cache they are numbers.
    A *checkpoint* is the state of all slot groups at the end of a block: one slab id per slot group. An *entry* is an
    opaque handle of one prefix; whoever acquired it stands on it until `release`, and its path cannot be evicted. The
    cache never touches a pool: what it lets go is returned, and the caller drops the references.
    """

    name: str
    version: int
    """Changes whenever something is forgotten; what `match` returned may be acquired while it stays the same."""
    num_query_tokens: int
    num_hit_tokens: int

    @property
    def num_evictable(self) -> int:
        """Blocks that `evict` can give up now. O(1)."""
        ...

    @property
    def num_checkpoints(self) -> int:
        """Checkpoints kept; every one can be given up. O(1)."""
        ...

    def tick(self) -> int:
        """The number of one more operation, as `EvictionPolicy` counts them, for entries of others in one order."""
        ...

    def first_key(self) -> tuple[int, Any] | None:
        """Rank and key, by the policy, of the entry whose blocks `evict` gives up first; None: there is none."""
        ...

    def match(
        self, namespace: bytes, tokens: array[int], num_blocks: int, keys: list[bytes], at_checkpoint: bool
    ) -> tuple[Any, int]:
        """Longest known prefix of at most `num_blocks` whole blocks of `tokens`: (entry, blocks), or (None, 0).

        `keys` is a memo that lives with the tokens: the cache may append to it. `at_checkpoint`: only a prefix that
        ends at a checkpoint counts.
        """
        ...

    def num_idle(self, entry: Any, num_blocks: int) -> int:
        """Blocks of a matched prefix that are evictable now and will not be once it is acquired."""
        ...

    def acquire(
        self, namespace: bytes, entry: Any, num_blocks: int, num_query_tokens: int
    ) -> tuple[Any, list[tuple[int, ...]]]:
        """Stand on a matched prefix (or on the empty one: None, 0): (entry to hold, slabs of every block in order).

        Counts `num_query_tokens` tokens asked for, of which the prefix was a hit.
        """
        ...

    def path(self, entry: Any) -> list[tuple[int, ...]]:
        """Slabs of every block of an entry's prefix, in order. Linear; for checks."""
        ...

    def share(self, entry: Any) -> None:
        """One more holder of the same entry."""
        ...

    def release(self, entry: Any) -> None:
        """One holder less."""
        ...

    def withdraw(self, entry: Any) -> tuple[Any, list[tuple[int, ...]]]:
        """A holder takes back the blocks at the end of its entry that nobody else stands on or goes on from.

        (The entry it holds instead, the slabs of blocks that the cache has forgotten, last first.)
        """
        ...

    def insert(self, entry: Any, tokens: bytes, slabs: list[tuple[int, ...]]) -> tuple[Any, list[tuple[int, ...]], int]:
        """Go on from a held `entry` by whole blocks (`tokens`: 4 bytes per id): (new entry, existing, num_new).

        The holder now stands on the new entry instead. Blocks 0 ... len(existing) were there already, with these slabs;
        the next `num_new` are new and keep the given slabs. The sum falls short of len(slabs) if the cache
        refuses the rest.
        """
        ...

    def evict(self, num_blocks: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Forget up to `num_blocks` blocks, ends of paths first: slabs of (blocks, checkpoints) that were let go."""
        ...

    def sketch(self, num_nodes: int) -> list[tuple[int, int, int]]:
        """Something for people to look at: (depth, blocks, holders) of some nodes, parents first. Bounded in time."""
        ...

    def checkpoint(self, entry: Any) -> tuple[int, ...] | None:
        """Slabs of the checkpoint at the end of an entry's prefix."""
        ...

    def add_checkpoint(self, entry: Any, slabs: tuple[int, ...]) -> None:
        """Keep `slabs` as the checkpoint of a held entry that has none."""
        ...

    def take_checkpoint(self, entry: Any, slabs: tuple[int, ...]) -> bool:
        """Forget the checkpoint of a held entry if it is that with these slabs, and nobody has begun from it."""
        ...

    def evict_checkpoint(self, keep: Any) -> tuple[int, ...] | None:
        """Forget one checkpoint, not that of entry `keep`: its slabs, or None."""
        ...

    def contents(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Slabs of all (blocks, checkpoints)."""
        ...

    def reset(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Forget everything, even what is held: slabs of (blocks, checkpoints). Entries given out are void."""
        ...

    def check_invariants(self, held: Iterable[Any]) -> None:
        """Raises AssertionError unless the structure is sound and `held` are exactly the entries held."""
        ...


class BlockTier(Protocol[Keys]):
    """The books of where blocks wait outside the device. It plans copies and moves nothing: a rank has the bytes.

    `Keys` name blocks there: ids that the tier hands out (`IdTier`: host memory), or names that say what a block holds
    (`kv.named_tier`: a folder, a server of blocks). The calls are those of vLLM's manager of offloaded blocks.
    """

    name: str
    late: bool
    """Whether a load may take longer than the step that carries it: whoever needs it waits until a step reports it."""

    def prepare_load(self, keys: Keys) -> None:
        """They are about to be read, or waited with: until `complete_load` nothing else takes their place."""
        ...

    def complete_load(self, keys: Keys, *, good: bool = True) -> None:
        """Whoever called `prepare_load`, or `prepare_store` of ids, needs them no more. `good`: they were what had been
        stored."""
        ...

    def evict(self, keys: Keys) -> None:
        """Given up. Whoever is reading them still has them."""
        ...


class IdTier(BlockTier[Ids], Protocol):
    """A tier whose blocks have numbers. An id names one block of one cache group (a state, of a slot group): ids are
    lists per group, in group order. What waits here need not have a name: a sequence with a block that is half full."""

    keeps: bool
    """Whether what a sequence takes back to the device stays here, too, as long as there is room."""

    def num_free(self, group: int) -> int:
        """Blocks of a group for which there is room now."""
        ...

    def prepare_store(self, needs: Seq[int]) -> list[list[int]] | None:
        """Ids for `needs[g]` blocks of each group, or None, and nothing taken, if there are fewer. Whoever has them
        gives them back, as after `prepare_load`."""
        ...

    def store(self, group: int, slabs: Seq[int], ids: Seq[int]) -> None:
        """Plan to copy slabs of the device to ids. Complete at once: the slabs may be freed right behind it."""
        ...

    def load(self, group: int, ids: Seq[int], slabs: Seq[int], move: int) -> None:
        """Plan to copy what was stored back into slabs of the device, as a part of load `move`.

        Unless loads are late, the load may be completed right behind it.
        """
        ...

    def check_invariants(self, held: Ids) -> None:
        """Raises AssertionError unless exactly the ids `held` of each group are taken, by as many holders."""
        ...


class PageStore(Protocol):
    """The bytes of a tier on a rank. Its pages are an `IdTier`'s ids, times the pages of a slab."""

    num_pages: tuple[int, ...]
    """Of each cache group."""

    def store(self, op: StoreOp, planes: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take the op's pages of `planes`, which hold all pages of its group on the device, as they are now."""
        ...

    def load(self, op: LoadOp, planes: dict[str, npt.NDArray[Any]]) -> bool | None:
        """Write what was stored into `planes`. False, and nothing written, if it is not what was stored.

        None: a late load that begins with `begin`; `ended` will tell of it.
        """
        ...

    def look(self, group: int) -> Mapping[str, npt.NDArray[Any]]:
        """All pages that it has of a group, to read some of them where they are."""
        ...

    def begin(self) -> None:
        """The step's operations are done, and it is about to compute."""
        ...

    def ended(self, wait_s: float = 0.0) -> dict[int, bool]:
        """Late loads that were on their way and have ended since the last call, and whether they are good.

        With `wait_s` it waits so long for one, if there is any.
        """
        ...


class EvictionPolicy(Protocol):
    """Orders evictable entries: the smallest key goes first. An entry has an attribute `tick` for the policy's use.

    `tick` counts the cache's operations. `on_hit` is called when an entry is found and when its last holder leaves it.
    A key may change in `on_insert` and `on_hit` only.
    """

    name: str

    request_priority: int
    """Priority of the request whose entries come next (smaller is more urgent); set by the KV manager."""

    def on_insert(self, entry: Any, tick: int) -> None: ...

    def on_hit(self, entry: Any, tick: int) -> None: ...

    def key(self, entry: Any) -> Any: ...


class LogitsProcessor(Protocol):
    """Changes logits before sampling. Batched; state per row, kept on the rank."""

    name: str

    def add(self, seq_id: int, rules: TokenRules, prompt: Seq[int], output: Seq[int]) -> bool:
        """Begin to follow a row. False: nothing to do for it (the row is not followed)."""
        ...

    def apply(self, logits: npt.NDArray[np.float32], seq_ids: Seq[int]) -> None:
        """Mutates `logits` [R, V] in place; row r belongs to `seq_ids[r]` (rows not followed are left alone)."""
        ...

    def advance(self, seq_id: int, token_ids: Seq[int]) -> None: ...

    def rollback(self, seq_id: int, n: int) -> None: ...

    def fork(self, parent_id: int, child_id: int) -> None: ...

    def remove(self, seq_id: int) -> None: ...

    def exhausted(self, seq_id: int) -> str | None:
        """Asked when no token is left for a row: "" if it is complete so, else why; None: not this one's doing."""
        ...


class Drafter(Protocol):
    """Drafts what comes next. Lives on the rank; whatever it proposes, no token changes: see `runner.verify`."""

    name: str
    wants_hidden: bool
    """Whether `observe` shall be given hidden states."""

    def track(self, output: SchedulerOutput) -> None:
        """The row lists of a step (forked, removed, added, appended), before the rows change.

        Steps in which rows only decode, without drafts, are left out (`runner.runner.concerns_drafter`): what they
        append is in `DraftJob.tokens` when drafts are asked for, and in the rank's rows until they are removed.
        """
        ...

    def propose(self, jobs: Seq[DraftJob]) -> list[DraftTree]:
        """A tree of drafts for each job, in their order; `core.draft.NO_DRAFT` where it has none."""
        ...

    def observe(self, outcomes: Seq[Outcome]) -> None:
        """What the model said to the last proposals, jobs without a draft included."""
        ...


@runtime_checkable
class PromptDrafter(Drafter, Protocol):
    """One that follows the text from its beginning."""

    def read(self, runs: Seq[tuple[int, int, npt.NDArray[np.float32]]]) -> None:
        """Known tokens of rows have run, as those of a prompt do: sequence, position of the first, and the hidden
        states [n, E] of them all. Steps of rows that decode without drafts are left out."""
        ...


class DraftController(Protocol):
    """Decides in every step how much to draft for whom. Integers and recorded durations only: schedules replay."""

    name: str

    def begin_step(self, running: Seq[Sequence], now_s: float | None = None) -> Mapping[int, tuple[int, int]]:
        """Sequence id -> (drafts, depth) for some of those that run and may draft; the scheduler may give less.

        `running`: everybody who runs, also those who may not draft (`sched.drafts.state.can_draft`); `now_s`: when the
        step begins, a recorded time.
        """
        ...

    def observe(self, output: SchedulerOutput, result: StepOutput) -> None:
        """A step has been committed."""
        ...

    def forget(self, seq_id: int) -> None:
        """The sequence has ended."""
        ...


class TokenReader(Protocol):
    """A small model that says how surprising tokens are. One job at a time."""

    def nats(self, prefix: Seq[int], ids: Seq[int]) -> npt.NDArray[np.float64]:
        """[len(ids)]: minus the natural logarithm of each id's probability behind `prefix` and the ids before it.

        Texts beyond the model's context are read in windows. Behind nothing at all an id costs ln(vocabulary). Work
        on a `prefix` that begins as the last text did is not done again.
        """
        ...


class ContextTransform(Protocol):
    """Chooses which tokens of a prompt the engine gets to see. Made of the request's options; see `compress`."""

    name: str
    reads: bool
    """Whether it asks a model; if not, it is given no reader."""

    def keep(self, job: ContextJob, reader: TokenReader | None) -> list[int]:
        """Places in `job.ids` of the compressible tokens that stay: exactly `job.target`, ascending.

        A function of the job and of what the reader says: the same request gives the same prompt. Mutates nothing.
        """
        ...


class AttentionBackend(Protocol):
    """Softmax attention of a step's tokens over paged planes. Implementations are named in `ops.ref.attention`.

    Shape letters: T tokens, H query heads, G kv heads (G divides H; query head h reads kv head h // (H/G)), D key dim,
    W value dim.
    """

    name: str
    online: bool
    """Whether the softmax is computed in one pass, chunk by chunk, with a running maximum."""

    def attend(
        self, q: npt.NDArray[np.float32], step: Any, group: int, layer: int, *, keys: tuple[str, ...], value: str,
        scale: float, window: int | None = None, chunk: int | None = None, soft_cap: float | None = None,
        slopes: npt.NDArray[np.float32] | None = None, sinks: npt.NDArray[np.float32] | None = None,
        rotation: tuple[npt.NDArray[np.float32], bool, int] | None = None, kept: Any = None,
        pages: PageReads | None = None, chosen: Any = None,
    ) -> npt.NDArray[np.float32]:  # fmt: skip
        """q [T, H, D] -> [T, H, W].

        `step` (an `ops.step.Step`) gives the plan and the planes of every cache group; `layer` counts within `group`.
        The keys are the planes named `keys` side by side (dims add up to D), the values the plane `value`; this step's
        own tokens are already in them. The token at position p sees positions p-window+1 ... p (all from 0 without a
        window), none before the last multiple of `chunk` if there is one. Scores are scale * q.k, or
        soft_cap * tanh(scale * q.k / soft_cap), minus slopes[h] * (p - position of the key). With sinks [H], exp(sink)
        is added to the sum that divides head h's weights. With a `rotation` (table [2, positions, dim/2], interleaved,
        first component) the cache holds raw keys, which turn as they are read, at their slots. Lines that have dropped
        tokens (`ops.plan.GroupPlan`) see slots for positions, and have no windows, chunks or slopes. `kept` (an
        `ops.kept.Kept`, only without window and chunk) says where newest and first tokens are, if codes are all that
        `group` has of the others. With `pages` a token that chooses (`ops.step.Step.chooses`) reads some pages only,
        each kv head its own. With `chosen` (a `TokenReads`) it
        reads what op `rehearse` has left for it, if anything. The result of a token must not depend, bit for bit, on
        the other tokens of the step, on where its pages lie or on how its context was cut into steps. Mutates nothing.
        """
        ...


class ModelFamily(Protocol):
    """One kind of checkpoint folder: config.json -> ModelSpec and weight names; see `families.registry`."""

    name: str
    """As `model_type` in config.json says it."""
    architectures: tuple[str, ...]
    """The entries of `architectures` in config.json that this family can run."""

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        """A parsed config.json as a ModelSpec.

        Raises ModelError for a field that is missing or makes no sense; UnsupportedError for one that asks for
        something the family does not compute, every field it has never heard of included.
        """
        ...

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        """Logical name (the keys of `model_spec.weight_shapes(spec)`, all of them) -> where the checkpoint has it."""
        ...

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        """Whether the tensor `name` of a checkpoint can be left unread without changing a result."""
        ...


@runtime_checkable
class SeveralParts(Protocol):
    """A `ModelFamily` that runs one part of checkpoints which have others, too: what it computes and where its tensors
    are depends on the file."""

    def told(self, config: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
        """The config.json with what only the names of the tensors tell."""
        ...

    def layout(self, spec: ModelSpec, tensors: Collection[str]) -> WeightMap:
        """`ModelFamily.weight_map` of a file with tensors of these names."""
        ...


class StepTimer(Protocol):
    """Predicts how long a step takes. Frozen while an engine runs, so that schedules can be replayed."""

    name: str

    def step_s(self, shape: StepShape) -> float:
        """Seconds of a step of this shape; grows with every field of it."""
        ...

    def copy_s(self, num_bytes: int) -> float:
        """Seconds to move so many bytes between device and host memory, one way."""
        ...
