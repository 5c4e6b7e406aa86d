"""The model as its own drafter: no token changes, no weight is held twice, and nothing verified is touched."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock import LLM, SamplingParams
from penstock.backends.native.forward import NativeForward
from penstock.base.errors import ConfigError
from penstock.core.batch import SchedulerOutput
from penstock.core.draft import DraftJob, DraftTree
from penstock.core.model_spec import weight_shapes
from penstock.drafters.self_draft import likeliest, skipped_layers
from penstock.engine.core import EngineCore
from penstock.families.registry import open_model
from penstock.launch.assemble import assemble
from penstock.launch.bundled import bundled_model
from penstock.ops.native.library import best_library
from penstock.ops.native.matrix import Segments
from penstock.runner.runner import Runner
from penstock.weights.load import fingerprint, load_weights
from tests.engine.harness import Knobs, config_for, plan_for, request, run, tiny
from tests.engine.naive import generate
from tests.engine.test_laws_models import oracle
from tests.oracle import NaiveModel

RULES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.2, "seed": 6, "top_k": 5, "top_p": 0.9},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.4},
]
WAYS: list[dict[str, Any]] = [
    {"method": "early-exit", "exit_layer": 1},
    {"method": "self-draft", "skip_layers": "0"},
    {"method": "self-draft"},
]
PROSE = (
    "Once upon a time there was a little girl who lived near the sea.",
    "The old man opened the door and looked at the boy.",
    "What is 12 + 30?",
    "one two three one two three one two three one two",
)
native_only = pytest.mark.skipif(best_library() is None, reason="no native library was built")


def engine(name: str, k: Knobs, speculative: dict[str, Any] | None) -> EngineCore:
    spec, weights = tiny(name)
    config = config_for(k)
    if speculative is not None:
        text = json.dumps({"controller": "fixed", **speculative})
        config = replace(config, execution=replace(config.execution, speculative_config=text))
    return assemble(config, spec, weights, plan_for(spec, k), check_invariants=True, poison=True)


def requests(company: int = 1) -> list[Any]:
    """Greedy and sampled ones, of different lengths: while one decodes, another's prompt is still running."""
    return [
        request([3 + i, 4, 5, *range(7, 7 + 6 * i)], max_tokens=18, request_id=f"r{i}", **RULES[i % len(RULES)])
        for i in range(len(RULES) * company)
    ]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
@pytest.mark.parametrize(
    "name", ["llama_gqa", "layernorm", "latent", "windowed", "sandwich", "experts", "shared_kv", "streams"]
)
@pytest.mark.sampled
def test_a_part_of_the_model_drafts_and_no_token_changes(name: str, way: dict[str, Any]) -> None:
    """Against naive decoding; storage begins as NaN, so what is read before it is written shows."""
    core = engine(name, Knobs(num_blocks=96, budget=24), way)
    asked = requests()
    got = run(core, asked)
    for r in asked:
        assert got[r.request_id].tokens[0] == generate(oracle(name), r)[0]
    assert core.stats.num_drafts > 0


@native_only
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
@pytest.mark.parametrize("name", ["llama_gqa", "windowed"])
def test_no_token_changes_with_native_kernels(name: str, way: dict[str, Any]) -> None:
    k = Knobs(num_blocks=64, budget=24, block_size=16, ops="native")
    plain = run(engine(name, k, None), requests(2))
    core = engine(name, k, way)
    got = run(core, requests(2))
    assert {r: c.tokens for r, c in got.items()} == {r: c.tokens for r, c in plain.items()}
    assert core.stats.num_drafts > 0


@cache
def bundled(ops: str, speculative: str | None) -> LLM:
    return LLM(model="nano", ops=ops, max_model_len=512, speculative_config=speculative)


def nano(ops: str, way: dict[str, Any] | None) -> LLM:
    return bundled(ops, None if way is None else json.dumps({"controller": "fixed", **way}))


# The set is one that benchmarks/speculation/skip_search.py has found.
NANO_WAYS: list[dict[str, Any]] = [
    {"method": "early-exit", "exit_layer": 2},
    {"method": "early-exit", "exit_layer": 4},
    {"method": "self-draft", "skip_layers": "3,4"},
]


@pytest.mark.parametrize(("ops", "length"), [("ref", 12), pytest.param("native", 48, marks=native_only)])
@pytest.mark.parametrize("way", NANO_WAYS, ids=lambda way: "-".join(map(str, way.values())))
@pytest.mark.sampled
def test_D30_D31_a_trained_model_drafts_for_itself_and_no_token_changes(
    ops: str, length: int, way: dict[str, Any]
) -> None:
    """Greedy and sampled in one batch; drafts are accepted, so their entries are those of the verifying step."""
    params = [
        SamplingParams(max_tokens=length, temperature=0.7 if i % 2 else 0.0, seed=i, ignore_eos=True)
        for i in range(len(PROSE))
    ]
    want, llm = nano(ops, None).generate(list(PROSE), params), nano(ops, way)
    got = llm.generate(list(PROSE), params)
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in want]
    stats = llm.engine.core.stats
    assert stats.num_accepted_tokens > 0.15 * stats.num_draft_tokens


def runner_of(core: EngineCore) -> Runner:
    runner: Runner = core.executor.runner  # type: ignore[attr-defined]
    return runner


@native_only
@pytest.mark.parametrize("way", NANO_WAYS[::2], ids=["early-exit", "self-draft"])
def test_D30_D31_no_separate_draft_weights(way: dict[str, Any]) -> None:
    """The draft's matrices are the model's: the same bytes at the same addresses, and no cache group is added."""
    runner = runner_of(nano("native", way).engine.core)
    whole, drafter = runner._forward, runner.drafter
    part = drafter.ahead._forward  # type: ignore[union-attr]
    assert isinstance(whole, NativeForward)
    assert isinstance(part, NativeForward)
    model = {at for op in whole._code.ops for p in op.pointers for at in addresses(p)}
    draft = {at for op in part._code.ops for p in op.pointers for at in addresses(p)}
    assert draft
    assert draft < model
    held = {id(m): m.num_bytes for forward in (whole, part) for m in forward.matrices.values()}
    assert sum(held.values()) == sum(m.num_bytes for m in whole.matrices.values())
    assert len(runner.rows.groups) == 1
    assert len(runner.rows.groups[0].layers) == 6


def addresses(pointer: Any) -> list[int]:
    if isinstance(pointer, Segments):
        return [int(matrix.struct.data) for matrix in pointer.matrices]
    if isinstance(pointer, np.ndarray):
        return [int(pointer.ctypes.data)]
    return [] if pointer is None else [int(pointer.address)]


class Watched:
    """Passes everything on to a drafter, and compares the verified part of the cache before and after it has run."""

    wants_hidden = False

    def __init__(self, inner: Any, runner: Runner) -> None:
        self.name, self._inner, self._runner = inner.name, inner, runner
        self.num_written = 0

    def track(self, output: SchedulerOutput) -> None:
        self._inner.track(output)

    def observe(self, outcomes: Any) -> None:
        self._inner.observe(outcomes)

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        before = [plane.copy() for planes in self._runner.storage.planes for plane in planes.values()]
        trees: list[DraftTree] = self._inner.propose(jobs)
        after = [plane for planes in self._runner.storage.planes for plane in planes.values()]
        allowed = self._unverified(jobs, trees)
        for old, new in zip(before, after, strict=True):
            changed = {
                (int(page), int(slot))
                for page, slot in np.argwhere((old.view(np.uint8) != new.view(np.uint8)).any(axis=(2, 3)))
            }
            assert changed <= allowed, "only slots that the verifying step writes anew"
            self.num_written += len(changed)
        return trees

    def _unverified(self, jobs: Sequence[DraftJob], trees: Sequence[DraftTree]) -> set[tuple[int, int]]:
        rows, out = self._runner.rows, set()
        for job, tree in zip(jobs, trees, strict=True):
            for at in range(len(job.tokens) - 1, len(job.tokens) + len(tree.token_ids)):
                block, slot = divmod(at, rows.block_size)
                for g, group in enumerate(rows.groups):
                    slab = int(rows[job.seq_id].tables[g].view(block + 1)[0][block])
                    out |= {(slab * group.pages_per_slab + i, slot) for i in range(group.pages_per_slab)}
        return out


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_a_draft_writes_nothing_that_is_verified(way: dict[str, Any]) -> None:
    """The newest token's slot and those behind it that are about to be verified: nothing else, ever."""
    core = engine("llama_gqa", Knobs(num_blocks=96, budget=24), way)
    runner = runner_of(core)
    watched = Watched(runner.drafter, runner)
    runner.drafter = watched
    run(core, requests())
    assert runner.drafter is watched
    assert watched.num_written > 0


class Compared:
    """Passes everything on, and compares each chain with greedy decoding by a naive model of the first layers alone."""

    wants_hidden = False

    def __init__(self, inner: Any, small: NaiveModel) -> None:
        self.name, self._inner, self._small = inner.name, inner, small
        self.num_drafts = 0
        self.track, self.observe = inner.track, inner.observe

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        trees: list[DraftTree] = self._inner.propose(jobs)
        for job, tree in zip(jobs, trees, strict=True):
            known = job.tokens.tolist()
            for draft, prob in zip(tree.token_ids, tree.probs, strict=True):
                logits = self._small.logits(known, last_only=True)[0]
                token, likely = likeliest(logits)
                assert draft == token
                assert prob == pytest.approx(likely, rel=1e-3)
                known.append(token)
                self.num_drafts += 1
        return trees


@pytest.mark.parametrize("way", [WAYS[0], {"method": "self-draft", "skip_layers": "1"}], ids=["early-exit", "skip"])
@pytest.mark.parametrize("name", ["llama_gqa", "latent"])
def test_drafts_are_what_the_first_layers_say(name: str, way: dict[str, Any]) -> None:
    """Whole chains, in a batch with prompts and in the steps after drafts were accepted or refused."""
    spec, weights = tiny(name)
    small = msgspec.structs.replace(spec, layers=spec.layers[:1])
    naive = NaiveModel(small, {n: weights[n] for n in weight_shapes(small)})
    core = engine(name, Knobs(num_blocks=96, budget=24), {**way, "num_speculative_tokens": 4})
    runner = runner_of(core)
    drafter = runner.drafter
    drafter._confidence = 0.0  # type: ignore[union-attr]
    compared = runner.drafter = Compared(drafter, naive)
    run(core, requests())
    assert runner.drafter is compared
    assert compared.num_drafts > 100


def counts(way: dict[str, Any], length: int = 48) -> tuple[int, int, list[int]]:
    """Drafts, accepted drafts, and accepted ones by depth, of greedy text."""
    llm = LLM(model="nano", max_model_len=512, speculative_config=json.dumps({"controller": "fixed", **way}))
    llm.generate(list(PROSE[:2]), SamplingParams(max_tokens=length, temperature=0, ignore_eos=True))
    stats = llm.engine.core.stats
    return stats.num_drafts, stats.num_accepted_tokens, stats.accepted_at


def write_adapter(folder: Path, *, by: float = 0.0, **changes: Any) -> str:
    """An adapter for nano behind 2 layers; `by` 0 changes nothing of what it reads."""
    config = {"kind": "adapter", "base": nano_fingerprint(), "hidden_size": 192, "exit_layer": 2} | changes
    weight = (by * np.random.default_rng(0).normal(size=(1, 1, 192, 192))).astype(np.float32)
    save_file({"weight": weight, "bias": np.zeros((1, 1, 192), np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def nano_fingerprint() -> str:
    folder = bundled_model("nano")
    assert folder is not None
    checkpoint = open_model(folder)
    return fingerprint(load_weights(checkpoint, checkpoint.spec, "float32"))


@pytest.mark.parametrize("ops", ["ref", pytest.param("native", marks=native_only)])
@pytest.mark.parametrize("by", [0.0, 0.05])
def test_D30_an_adapter_behind_the_exit(tmp_path: Path, ops: str, by: float) -> None:
    """One that changes nothing drafts as the exit without one; one of noise drafts otherwise; no token changes."""
    length = 12 if ops == "ref" else 40
    params = [SamplingParams(max_tokens=length, temperature=0.7 * (i % 2), seed=i, ignore_eos=True) for i in range(4)]
    way = {**NANO_WAYS[0], "controller": "fixed"}
    plain, adapted = (
        LLM(model="nano", ops=ops, max_model_len=512, speculative_config=json.dumps(config))
        for config in (way, way | {"heads": write_adapter(tmp_path, by=by)})
    )
    want = nano(ops, None).generate(list(PROSE), params)
    counted = []
    for llm in (plain, adapted):
        got = llm.generate(list(PROSE), params)
        assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in want]
        stats = llm.engine.core.stats
        counted.append((stats.num_drafts, stats.num_draft_tokens, stats.accepted_at))
    assert runner_of(adapted.engine.core).drafter is not None
    assert (counted[0] == counted[1]) == (by == 0.0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"exit_layer": 4}, "belong behind 4 layers, and exit_layer is 2"),
        ({"base": "0" * 16}, "another model"),
        ({"kind": "medusa"}, "of kind 'medusa', not 'adapter'"),
    ],
)
def test_D30_an_adapter_of_something_else_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    config = {"method": "early-exit", "exit_layer": 2, "heads": write_adapter(tmp_path, **changes)}
    with pytest.raises(ConfigError, match=says):
        LLM(model="nano", speculative_config=json.dumps(config))


@native_only
def test_more_layers_draft_better() -> None:
    """Whole numbers of one fixed text, so that a draft that reads wrong entries shows: it drafts as if at random."""
    found = {n: counts({"method": "early-exit", "exit_layer": n, "num_speculative_tokens": 1}) for n in (1, 2, 4, 5)}
    share = {n: accepted / drafts for n, (drafts, accepted, _) in found.items()}
    assert share[1] < share[4]
    assert share[2] > 0.25
    assert share[4] > 0.4
    assert share[5] > 0.4


def test_a_draft_in_doubt_is_short() -> None:
    """Kangaroo's early exit: with a confidence of 1 or more nothing follows the first draft."""
    core = engine("llama_gqa", Knobs(num_blocks=96, budget=24), {**WAYS[0], "num_speculative_tokens": 6})
    drafter = runner_of(core).drafter
    drafter._confidence = 1.1  # type: ignore[union-attr]
    run(core, requests())
    assert core.stats.num_draft_tokens == core.stats.num_drafts > 0


def test_probabilities_are_those_of_a_softmax() -> None:
    logits = np.array([1.0, 3.0, 3.0, -np.inf], np.float32)
    token, prob = likeliest(logits)
    assert token == 1
    assert prob == pytest.approx(np.exp(3) / (np.exp(1) + 2 * np.exp(3)))


@pytest.mark.parametrize(
    ("name", "speculative", "says"),
    [
        ("llama_gqa", {"method": "early-exit", "exit_layer": 2}, "exit_layer 2: the model has 2 layers"),
        ("llama_gqa", {"method": "self-draft", "skip_layers": "0,1"}, "skip_layers '0,1'"),
        ("llama_gqa", {"method": "self-draft", "skip_layers": "2"}, "skip_layers '2'"),
        ("llama_gqa", {"method": "self-draft", "skip_layers": "first"}, "skip_layers 'first'"),
        ("slots", {"method": "early-exit", "exit_layer": 1}, "recurrent layers"),
    ],
)
def test_what_cannot_draft_is_refused_at_start(name: str, speculative: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        engine(name, Knobs(), speculative)


def test_layers_that_are_skipped_by_default() -> None:
    assert [sorted(skipped_layers(None, n)) for n in (2, 3, 4, 6, 8)] == [[1], [1], [1], [2, 4], [2, 4, 6]]
    assert skipped_layers("4, 2", 6) == {2, 4}
