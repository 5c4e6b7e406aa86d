"""Draft models before they run: planned, refused, and what becomes of their logits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from penstock.base.errors import CapacityError, ConfigError
from penstock.config import from_kwargs
from penstock.core.cache_spec import CacheGroup, CacheSpec, PlaneSpec
from penstock.core.draft import ROOT, UNKNOWN, DraftJob, DraftTree, Outcome
from penstock.core.machine import Machine
from penstock.core.page_ops import HOST, LoadOp, PageOp, StoreOp
from penstock.core.sampling import TokenRules
from penstock.drafters.aligned import Alignment
from penstock.drafters.choose import Candidate, Chooser, Sprout
from penstock.drafters.expanders import MIN_GAIN, KAry, Likeliest, Sequoia
from penstock.drafters.filled import Filled
from penstock.drafters.specinfer import Merged, Rates, SpecInferDrafter, best_nodes, best_path, merge, side_by_side
from penstock.drafters.tree_shapes import RankStatistics, best_shape
from penstock.launch.build import plan_of, start
from penstock.launch.bundled import bundled_model
from penstock.launch.names import check_method
from penstock.plan import resolve
from penstock.plan.devices import device_preset
from penstock.plan.memory import gib
from penstock.plan.report import report
from penstock.runner.sampler import Sampler
from penstock.runner.sampler import draw as sample
from penstock.runner.truncate import truncate
from tests.trees import fill, grown_tree, opt_tree
from tests.unit.plan.test_plan import FULL, GIB, LATENT, MIB, SLIDING, SLOT, machine, model, why


def job(num_nodes: int = 8, max_depth: int = 8, num_tokens: int = 3, **rules: Any) -> DraftJob:
    return DraftJob(1, np.arange(num_tokens, dtype=np.int32), 1, num_nodes, max_depth, TokenRules(**rules), 0)


# --- plans


def test_a_draft_model_is_paid_from_the_same_pool() -> None:
    config = from_kwargs(model="m")
    alone = resolve(config, model(), machine())
    p = resolve(config, model(), machine(), [("small", model(FULL)), ("other", model(LATENT, SLIDING))])
    assert [g.index for g in p.groups] == [0, 1, 2, 3]
    assert [draft.groups for draft in p.drafts] == [(1,), (2, 3)]
    assert p.own_groups == alone.groups
    assert [g.spec.kind for g in p.groups] == ["paged"] * 4, "windows of a draft model keep their blocks"
    assert p.num_slabs == alone.num_slabs * 4
    assert p.kv_bytes == sum(n * g.slab_bytes(32) for n, g in zip(p.num_slabs, p.groups, strict=True))
    assert p.weight_bytes == alone.weight_bytes
    assert p.drafts[0].weight_bytes == 4 * model(FULL).num_params
    assert "cache group 1 of every sequence" in why(p, "draft_model[0]")
    assert gib(p.drafts[1].weight_bytes) in why(p, "draft_model[1]")


def test_memory_that_drafts_take_is_not_there_for_others() -> None:
    config = from_kwargs(model="m", max_num_seqs=4096)
    box = machine(600 * MIB)
    alone = resolve(config, model(), box)
    p = resolve(config, model(), box, [("same", model())])
    used = p.kv_bytes + p.weight_bytes + p.drafts[0].weight_bytes
    assert used <= 600 * MIB
    assert alone.num_slabs[0] // 2 - 16 <= p.num_slabs[0] <= alone.num_slabs[0] // 2


def test_a_draft_model_that_does_not_fit_is_refused() -> None:
    spec = model()
    box = Machine(num_cores=1, memory_bytes=GIB, available_bytes=4 * spec.num_params + 100)
    with pytest.raises(CapacityError, match=r"the weights of small take .* use a smaller draft model"):
        resolve(from_kwargs(model="m", dtype="float32"), spec, box, [("small", model(FULL))])


def test_a_draft_model_with_a_state_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mamba has layers with a recurrent state.*attention layers only"):
        resolve(from_kwargs(model="m"), model(), machine(), [("mamba", model(FULL, SLOT))])
    resolve(from_kwargs(model="m"), model(SLOT), machine(), [("full", model(FULL))])  # the target may have one


def test_a_draft_model_made_for_fewer_positions_drafts_up_to_there() -> None:
    p = resolve(from_kwargs(model="m"), model(), machine(), [("short", model(FULL, max_position=100))])
    assert (p.max_model_len, p.drafts[0].max_len) == (256, 100)
    assert "goes on without its drafts" in why(p, "draft_max_len")


def test_the_report_says_whose_layers_they_are() -> None:
    r = report(from_kwargs(model="m"), model(), machine(), device_preset("cpu-ref"), 64, [("small", model(FULL))])
    assert [line.model for line in r.groups] == ["", "small"]
    assert r.kv_bytes_per_token == sum(line.num_bytes for line in r.groups)


def test_plan_of_the_bundled_pair() -> None:
    p = plan_of(from_kwargs(model="nano", speculative_config={"method": "draft-model", "model": "pico"}), machine())
    assert [(draft.name, draft.groups) for draft in p.drafts] == [("pico", (1,))]
    assert "draft_model" in {d.name for d in p.decisions}


# --- refusals


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"method": "draft-model"}, "model: is missing: the method draft-model needs"),
        ({"method": "specinfer"}, "model: is missing: the method specinfer needs"),
        ({"method": "ngram", "model": "pico"}, "the method ngram takes no draft model"),
        ({"method": "draft_model", "model": "pico,pico"}, "takes one draft model, not 2; use the method specinfer"),
        ({"method": "specinfer", "model": ",".join(["pico"] * 9)}, "takes at most 8 drafters, not 9"),
        ({"method": "specinfer", "model": "pico,draft-model"}, "draft-model is a method that needs a draft model"),
    ],
)
def test_methods_and_models_that_do_not_go_together(given: dict[str, Any], text: str) -> None:
    config = from_kwargs(model="nano", speculative_config=given)
    assert config.speculation is not None
    with pytest.raises(ConfigError, match=text):
        check_method(config.speculation)
    with pytest.raises(ConfigError, match=text):
        plan_of(config)


def small(folder: Path, **config: Any) -> Path:
    """pico, with another config."""
    source = bundled_model("pico")
    assert source is not None
    shutil.copytree(source, folder)
    given = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(given | config))
    return folder


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("gone", "'.*nowhere' cannot be used: .*"),
        ("unknown", "'.*' cannot be used: .*NonsenseForCausalLM"),
        (
            "tokens",
            r"token 300 of .* is '.*' and the model's is '.*'; use a draft model with the model's own tokenizer",
        ),
    ],
)
def test_draft_models_that_cannot_draft_for_this_model(change: str, text: str, tmp_path: Path) -> None:
    draft = tmp_path / "nowhere"
    if change == "unknown":
        small(draft, model_type="nonsense", architectures=["NonsenseForCausalLM"])
    elif change == "tokens":
        small(draft)
        tokenizer = json.loads((draft / "tokenizer.json").read_text())
        vocab = tokenizer["model"]["vocab"]
        names = {i: t for t, i in vocab.items()}
        vocab[names[300]], vocab[names[301]] = 301, 300
        (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    given = {"method": "draft-model", "model": str(draft)}
    with pytest.raises(ConfigError, match="speculative_config: model: " + text) as caught:
        start(from_kwargs(model="nano", speculative_config=given))
    assert "\n" not in str(caught.value)


def test_vocabularies_are_compared_where_there_is_no_tokenizer(tmp_path: Path) -> None:
    from penstock.launch.drafts import OpenDraft, check_tokens

    class Other:
        spec = model(vocab_size=99)

    with pytest.raises(ConfigError, match="small has 99 tokens and the model has 100"):
        check_tokens(OpenDraft("small", Other()), model(), None)  # type: ignore[arg-type]


# --- what has been seen


class FakeTable:
    def __init__(self, pages: list[int]) -> None:
        self.line = np.array(pages, np.int32)

    def pages(self, first: int, last: int) -> Any:
        return np.concatenate([self.line[first:last], 99 + self.line[first:last]])  # a second layer, to be ignored


def test_pages_carry_what_they_hold() -> None:
    class Rows:
        block_size = 4
        tables: ClassVar = {7: FakeTable([2, 5, 0]), 8: FakeTable([2, 3, 1])}

        def __getitem__(self, seq_id: int) -> Any:
            return type("Row", (), {"tables": {1: self.tables[seq_id]}})

    class Storage:
        num_pages = (9, 9)
        tiers: ClassVar = {HOST: SimpleNamespace(num_pages=(0, 4))}

    group = CacheGroup(1, CacheSpec("paged", (PlaneSpec("k", 1, 1, "float32"),)), (0,))
    filled = Filled([group], Rows(), Storage())  # type: ignore[arg-type]
    assert filled.num_tokens(7, 11) == 0
    filled.fill(7, 0, 10)
    assert [filled.num_tokens(7, most) for most in (3, 4, 9, 10, 12)] == [3, 4, 9, 10, 10]
    assert filled.num_tokens(8, 12) == 4, "the first block is shared"
    filled.track([PageOp(0, -1, 0, 9)])
    assert filled.num_tokens(7, 12) == 10, "another model's pages"
    filled.track([PageOp(1, 5, 3, 1), StoreOp(1, 2, 1, 1), PageOp(1, -1, 2, 1)])
    assert (filled.num_tokens(7, 12), filled.num_tokens(8, 12)) == (0, 0)
    filled.track([LoadOp(1, 1, 2, 1, 0)])
    assert (filled.num_tokens(7, 12), filled.num_tokens(8, 12)) == (10, 8), "swapped out, and in again"
    filled.fill(7, 10, 12)
    assert filled.num_tokens(7, 12) == 12, "from within the last block on"


# --- drafts


def test_draws_are_from_the_distribution_that_is_told() -> None:
    """200 x 64 draws of 7 tokens: chi-square with 6 degrees of freedom stays below its 99.9 % point."""
    row = np.array([0.3, -1.0, 2.0, 0.0, 1.5, -0.5, 0.9], np.float32)
    chooser = Chooser(Sampler(7), 7, own_draws=True)
    counts = np.zeros(7)
    for n in range(200):
        sprout = Sprout(job(num_tokens=3 + n, temperature=0.9, seed=4), 63, 1)
        candidates = chooser.drawn(sprout, ROOT, row, 0, 64)
        dist = candidates[0].drawn_from
        assert dist is not None
        counts += np.bincount([candidate.token_id for candidate in candidates], minlength=7)
    ids, weights = truncate(row, TokenRules(temperature=0.9))
    assert ids is None
    assert dist == pytest.approx(weights / weights.sum(), abs=1e-6)
    want = dist * counts.sum()
    assert ((counts - want) ** 2 / want).sum() < 22.5
    other = Chooser(Sampler(7), 7, own_draws=True, number=1).drawn(sprout, ROOT, row, 0, 64)
    assert [g.token_id for g in other] != [g.token_id for g in candidates], "two drafters draw for themselves"


def test_drafts_under_sampling_learn_how_far_the_sums_of_two_models_drift() -> None:
    rng = np.random.default_rng(3)
    rules = TokenRules(temperature=0.8, seed=8)
    pairs = []
    for _ in range(600):
        target = (2.5 * rng.standard_normal(1000)).astype(np.float32)
        pairs.append((target, (target + rng.standard_normal(1000)).astype(np.float32)))
    found = {}
    for learns in (False, True):
        alignment, right = Alignment(), 0
        for position, (target, draft) in enumerate(pairs):
            token, draw = alignment.choose(draft, rules, 0, position)
            truth = sample(target, rules, 0, position, 1)[0]
            right += token == truth
            if learns:
                alignment.learn(draw, truth)
        found[learns] = right
    assert found[True] > 1.05 * found[False]
    same = Alignment()
    for position, (target, _) in enumerate(pairs):
        token, draw = same.choose(target, rules, 0, position)
        assert token == sample(target, rules, 0, position, 1)[0]
        same.learn(draw, token)
    assert same.distance == 0


def pairs(sprout: Sprout) -> list[tuple[int, int]]:
    return [(g.token_id, g.parent) for g in sprout.candidates]


def test_k_ary_trees_have_the_choice_and_the_likeliest_others() -> None:
    sprout = Sprout(job(num_nodes=5), 5, 4)
    probs = np.array([[0.1, 0.4, 0.2, 0.3]], np.float32)
    KAry(3).grow(sprout, probs, [0])
    assert pairs(sprout) == [(0, ROOT), (1, ROOT), (3, ROOT)]
    assert [g.prob for g in sprout.candidates] == pytest.approx([0.1, 0.4, 0.3])
    assert sprout.front == [0, 1, 2]
    assert KAry(3).shape(sprout, probs) == [2, 0, 0], "as many as there is room for"
    KAry(3).grow(sprout, np.array([[0.7, 0.1, 0.1, 0.1]] * 3, np.float32), [0, 0, -1])
    assert pairs(sprout)[3:] == [(0, 0), (0, 1)], "the choice ranks as the likeliest"
    assert sprout.front == [], "no room is left"
    sick = Sprout(job(), 5, 4)
    KAry(1).grow(sick, probs, [-1])
    assert not sick.candidates, "a sick row has no choice"


def test_D28_the_small_model_falls_back_where_it_is_unsure() -> None:
    sprout = Sprout(job(), 5, 4)
    unsure = KAry(1, least=0.5)
    unsure.grow(sprout, np.array([[0.6, 0.2, 0.2, 0.0]], np.float32), [0])
    assert pairs(sprout) == [(0, ROOT)]
    unsure.grow(sprout, np.array([[0.4, 0.3, 0.2, 0.1]], np.float32), [0])
    assert (pairs(sprout), sprout.front) == ([(0, ROOT)], [])


def test_D25_opt_trees_keep_the_likeliest_paths() -> None:
    """What is given up makes room for what is likelier behind others; entries count up to the first that went."""
    sprout = Sprout(job(num_nodes=3), 3, 9)
    opt = Likeliest()
    opt.grow(sprout, np.array([[0.6, 0.3, 0.08, 0.02]], np.float32), [0])
    assert pairs(sprout) == [(0, ROOT), (1, ROOT), (2, ROOT)]
    sprout.num_run = 3
    opt.grow(sprout, np.array([[0.9, 0.1, 0, 0], [0.5, 0.5, 0, 0], [1, 0, 0, 0]], np.float32), [0, 0, 0])
    assert pairs(sprout) == [(0, ROOT), (1, ROOT), (0, 0)], "0.54 behind the first beats 0.08"
    assert (sprout.num_run, sprout.front) == (2, [2])
    sprout.num_run = 3
    opt.grow(sprout, np.array([[0.9, 0.1, 0, 0]], np.float32), [0])
    assert pairs(sprout) == [(0, ROOT), (0, 0), (0, 1)], "0.486 beats 0.3"
    assert (sprout.num_run, sprout.front) == (1, [2]), "what stood in the second place has moved"
    opt.grow(sprout, np.array([[0.05, 0.05, 0.05, 0.85]], np.float32), [3])
    assert sprout.front == [], "a level that adds nothing ends it"


@pytest.mark.parametrize("seed", range(20))
def test_D24_D25_what_grows_level_by_level_is_the_oracle_s_tree(seed: int) -> None:
    """opt, grown and sequoia beside the same trees made all at once, over random probabilities of two tokens back."""
    rng = np.random.default_rng(seed)
    table = rng.dirichlet(np.full(6, 0.3), (7, 7)).astype(np.float32)
    num_nodes, depth, width = int(rng.integers(1, 14)), int(rng.integers(1, 7)), int(rng.integers(2, 4))

    def probs(paths: Any) -> Any:
        return np.stack([table[([6, 6, *path])[-2], ([6, 6, *path])[-1]] for path in paths])

    def paths_of(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
        out: list[tuple[int, ...]] = []
        for token, parent in zip(tokens, parents, strict=True):
            out.append((*(out[parent] if parent != ROOT else ()), token))
        return sorted(out)

    def grown(expander: Any) -> list[tuple[int, ...]]:
        sprout = Sprout(job(num_nodes, depth), num_nodes, depth)
        while sprout.front:
            rows = probs([sprout.path(node) for node in sprout.front])
            expander.grow(sprout, rows, rows.argmax(axis=1).tolist())
        return paths_of(sprout.token_ids, sprout.parents)

    shape, _ = best_shape(RankStatistics(4).acceptance(), num_nodes, depth)
    wanted = {
        "opt": opt_tree(probs, num_nodes, depth, min_gain=MIN_GAIN),
        "grown": grown_tree(probs, num_nodes, depth, width),
        "sequoia": fill(shape, probs),
    }
    found = {"opt": grown(Likeliest()), "grown": grown(Likeliest(width)), "sequoia": grown(Sequoia())}
    for name, tree in wanted.items():
        assert found[name] == paths_of(tree.token_ids, tree.parents), name


def test_D24_sequoia_learns_its_shape() -> None:
    """Where second drafts are never right it becomes a chain, where they often are it branches."""
    probs = np.array([[0.4, 0.3, 0.2, 0.1]], np.float32)

    def grown(sequoia: Sequoia) -> list[int]:
        sprout = Sprout(job(num_nodes=8), 8, 8)
        while sprout.front:
            n = len(sprout.front)
            sequoia.grow(sprout, np.repeat(probs, n, 0), [0] * n)
        return sprout.parents

    def outcome(choice: int) -> Outcome:
        path = {0: [0], 1: [1], 9: []}[choice]
        return Outcome(1, DraftTree([0, 1], [ROOT, ROOT]), path, [choice, UNKNOWN, UNKNOWN])

    first, second = Sequoia(), Sequoia()
    for i in range(256):
        first.observe(outcome(0 if i % 10 else 9))
        second.observe(outcome((0, 1, 9)[i % 3]))
    assert grown(first) == list(range(-1, 7)), "a chain"
    assert grown(second).count(ROOT) > 1


def test_sprouts_know_their_paths() -> None:
    sprout = Sprout(job(), 8, 3)
    sprout.add([Candidate(5, ROOT, 0.5), Candidate(6, ROOT, 0.25)])
    assert not sprout.is_chain
    sprout.add([Candidate(7, 1, 0.5)])
    assert (sprout.path(2), sprout.worth(2), sprout.path(ROOT)) == ([6, 7], 0.125, [])
    sprout.add([Candidate(8, 2, 0.5)])
    assert sprout.front == [], "three deep"


def tree(*nodes: tuple[int, int, float]) -> DraftTree:
    return DraftTree([n[0] for n in nodes], [n[1] for n in nodes], [n[2] for n in nodes])


def test_D11_equal_paths_are_merged_and_the_likeliest_drafts_kept() -> None:
    a = tree((4, ROOT, 0.9), (5, 0, 0.8), (6, 1, 0.1))
    b = tree((4, ROOT, 0.5), (7, 0, 0.5), (8, 1, 0.5))
    merged = merge([a, b], Rates())
    assert merged.tree.token_ids == [4, 5, 6, 7, 8]
    assert merged.tree.parents == [ROOT, 0, 1, 0, 3]
    assert merged.scores == pytest.approx([0.9, 0.72, 0.072, 0.45, 0.225])
    assert [len(sources) for sources in merged.sources] == [2, 1, 1, 1, 1]
    assert best_nodes(merged, 4) == [0, 1, 3, 4]
    assert best_path(merged) == [0, 1, 2]


def test_D11_what_a_drafter_is_worth_is_learnt() -> None:
    class Says:
        wants_hidden = False

        def __init__(self, token: int) -> None:
            self.token = token

        def track(self, output: Any) -> None: ...

        def observe(self, outcomes: Any) -> None: ...

        def propose(self, jobs: Any) -> list[DraftTree]:
            return [DraftTree([self.token], [ROOT]) for _ in jobs]

    drafter = SpecInferDrafter([Says(3), Says(9)], 10)  # type: ignore[list-item]
    assert drafter.propose([job(num_nodes=1)])[0].token_ids == [3], "the first of equals"
    for _ in range(3):
        (proposed,) = drafter.propose([job(num_nodes=2)])
        drafter.observe([Outcome(1, proposed, [1], [9, 5, 5])])
    assert drafter.propose([job(num_nodes=1)])[0].token_ids == [9]


def test_side_by_side_keeps_every_draw_and_its_distribution() -> None:
    q = np.full((2, 4), 0.25, np.float32)
    drawn = DraftTree([1, 2], [ROOT, 0], [0.25, 0.25], q)
    both = side_by_side([drawn, DraftTree([1], [ROOT])], 4)
    assert (both.token_ids, both.parents) == ([1, 2, 1], [ROOT, 0, ROOT])
    assert both.drawn_from is not None
    assert both.drawn_from[2].tolist() == [0, 1, 0, 0]
    assert isinstance(merge([both], Rates()), Merged)
