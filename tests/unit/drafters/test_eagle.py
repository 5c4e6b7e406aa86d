"""EAGLE: the drafter computes what was trained, remembers what it should, and refuses what does not fit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from penstock.base.errors import ConfigError
from penstock.core.batch import SchedulerOutput
from penstock.core.draft import NO_DRAFT, ROOT, DraftJob, DraftTree, Outcome
from penstock.core.sampling import TokenRules
from penstock.drafters.eagle import DEPTH, EagleDrafter
from penstock.drafters.eagle_head import NAMES, EagleHead, read_eagle
from penstock.runner.sampler import Sampler
from tests.drafting import appended, job

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
from train.eagle import EagleModule, loss_of, optimisers, save, without_prompts
from train.heads import hidden_states, logits_of
from train.interpreter import SpecModule
from train.recipes import RECIPES

E, V, WINDOW, HEADS = 8, 40, 5, 2
RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(V, E)).astype(np.float32)
OUTPUT = (RNG.normal(size=(V, E)) * 2).astype(np.float32)


def module(seed: int = 1) -> EagleModule:
    torch.manual_seed(seed)
    made = EagleModule(E, HEADS, WINDOW, 12, 1.0)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_((torch.randn_like(p) * 0.5).bfloat16())
    return made


def head(seed: int = 1) -> EagleHead:
    return EagleHead(*(getattr(module(seed), name).detach().numpy() for name in NAMES))


class Output:
    """The model's output matrix alone."""

    def run(self, plan: Any, planes: Any) -> Any:
        raise AssertionError("a head needs no layer")

    run_pooling = run

    def run_head(self, hidden: Any, planes: Any) -> Any:
        return hidden @ OUTPUT.T


class NoStorage:
    planes = ()


def drafter() -> EagleDrafter:
    return EagleDrafter(head(), Output(), lambda ids: TABLE[ids], NoStorage(), Sampler(V), V)  # type: ignore[arg-type]


class Text:
    """A sequence, and the model's feature of each position, told (`known`) or not."""

    def __init__(self, seq_id: int, prompt: int) -> None:
        self.seq_id, self.rng = seq_id, np.random.default_rng(seq_id)
        self.tokens = self.rng.integers(0, V, prompt).tolist()
        self.known: dict[int, Any] = {}

    def job(self, **more: Any) -> DraftJob:
        return job(self.tokens, seq_id=self.seq_id, **more)

    def outcome(self, tree: DraftTree, path: list[int]) -> Outcome:
        """Verified, the path accepted and one token behind it."""
        root, hidden = len(self.tokens) - 1, self.rng.normal(size=(1 + len(tree.token_ids), E)).astype(np.float32)
        for i, node in enumerate([ROOT, *path]):
            self.known[root + i] = hidden[node + 1].copy()
        new = [*(tree.token_ids[i] for i in path), int(self.rng.integers(V))]
        self.tokens += new
        choices = [-1] * len(hidden)
        for node, token in zip([ROOT, *path], new, strict=True):
            choices[node + 1] = token
        return Outcome(self.seq_id, tree, path, choices, hidden)

    def probs(self, path: list[int]) -> Any:
        """[V] what the trained module gives behind drafts: a pass per draft, over the whole text at once."""
        tokens = [*self.tokens, *path]
        slots = len(self.tokens) - 1
        features = np.zeros((len(tokens) - 1, E), np.float32)
        known = np.zeros(len(tokens) - 1, np.bool_)
        for i in range(slots):
            if i in self.known:
                features[i], known[i] = self.known[i], True
        given = (torch.from_numpy(t)[None] for t in (features, known, TABLE[tokens[1:]]))
        with torch.no_grad():
            found = module()(*given, len(path) + 1)[-1][0, -1].numpy()
        logits = OUTPUT @ found
        wide = np.exp(logits - logits.max())
        return wide / wide.sum()


def paths(tree: DraftTree) -> list[list[int]]:
    out: list[list[int]] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        out.append([*(out[parent] if parent != ROOT else []), token])
    return out


def check(text: Text, tree: DraftTree) -> None:
    for path, prob in zip(paths(tree), tree.probs, strict=True):
        assert prob == pytest.approx(float(text.probs(path[:-1])[path[-1]]), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("chain_only", [False, True])
def test_drafts_are_those_of_the_trained_module(chain_only: bool) -> None:
    """Three sequences side by side, longer than the window, with gaps where nothing was told; every node's probability.

    The module looks at whole texts and knows no cache, ring, batch or tree.
    """
    d = drafter()
    texts = [Text(1, 2), Text(2, 9), Text(3, 4)]
    rng, depths = np.random.default_rng(5), set()
    for turn in range(9):
        present = [t for t in texts if (turn + t.seq_id) % 4]
        for t in texts:
            if t not in present:
                t.tokens += [1, 2][: 1 + turn % 2]  # a step without room for drafts
        trees = d.propose([t.job(num_nodes=9, max_depth=4, chain_only=chain_only) for t in present])
        outcomes = []
        for t, tree in zip(present, trees, strict=True):
            check(t, tree)
            assert tree.is_chain or not chain_only
            assert len(tree.token_ids) == (4 if chain_only else 9)
            depths.add(max(tree.depths()))
            node = int(rng.integers(-1, 9 if not chain_only else 4))
            path: list[int] = []
            while node != ROOT:
                path.insert(0, node)
                node = tree.parents[node]
            outcomes.append(t.outcome(tree, path))
        d.observe(outcomes)
    assert max(depths) == 4


def test_the_likeliest_drafts_are_proposed() -> None:
    """Against all paths of the likeliest four behind each, three deep."""
    d, text = drafter(), Text(1, 6)
    (tree,) = d.propose([text.job(num_nodes=4, max_depth=3)])
    worth: dict[tuple[int, ...], float] = {(): 1.0}
    level: list[tuple[int, ...]] = [()]
    for _ in range(3):
        below = []
        for path in level:
            probs = text.probs(list(path))
            for token in np.argsort(-probs)[:4].tolist():
                worth[(*path, token)] = worth[path] * float(probs[token])
                below.append((*path, token))
        level = below
    want = sorted(worth, key=lambda path: -worth[path])[1:5]
    assert sorted(tuple(path) for path in paths(tree)) == sorted(want)


def test_right_behind_a_prompt_it_drafts_from_the_tokens_alone() -> None:
    d, text = drafter(), Text(4, 7)
    (tree,) = d.propose([text.job()])
    assert len(tree.token_ids) == 8
    assert max(tree.depths()) <= DEPTH
    check(text, tree)
    assert d.propose([job([3], seq_id=9)]) == [NO_DRAFT]  # one token: there is no pair


def test_windows_are_freed() -> None:
    d, text = drafter(), Text(1, 3)
    tree = d.propose([text.job()])[0]
    d.observe([text.outcome(tree, [])])
    d.propose([text.job(), Text(2, 40).job()])
    assert {s.ring.shape for s in d.states.values()} == {(2, WINDOW, E)}
    d.track(appended(1, [5], rollback=1))
    assert list(d.states) == [2]
    d.track(SchedulerOutput(1, removed=[2]))
    assert not d.states
    d.observe([text.outcome(NO_DRAFT, [])])
    assert not d.states


def test_hidden_states_that_are_not_finite_lead_to_no_draft() -> None:
    """Of the sequence whose they are; the other's drafts are what they are alone."""
    for bad in (np.nan, np.inf):
        d, sick, well = drafter(), Text(1, 5), Text(2, 5)
        trees = d.propose([sick.job(), well.job()])
        outcome = sick.outcome(trees[0], [0])
        assert outcome.hidden is not None
        outcome.hidden[outcome.path[-1] + 1] = bad
        d.observe([outcome, well.outcome(trees[1], [0])])
        first, second = d.propose([sick.job(), well.job()])
        assert first == NO_DRAFT
        check(well, second)
        assert second.token_ids


def write(folder: Path, **changes: Any) -> None:
    folder.mkdir(exist_ok=True)
    config = {"kind": "eagle", "base": "ab", "hidden_size": E} | changes.pop("config", {})
    tensors = dict(zip(NAMES, head(), strict=True)) | changes
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: np.ascontiguousarray(t) for n, t in tensors.items() if t is not None}, folder / "model.safetensors")


def test_heads_are_read_as_they_were_saved(tmp_path: Path) -> None:
    save(module(), tmp_path, "ab")
    for read, own in zip(read_eagle(tmp_path, E, "ab"), head(), strict=True):
        np.testing.assert_array_equal(read, own)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"config": {"kind": "medusa"}}, "of kind 'medusa', not 'eagle'; tools/train/eagle.py"),
        ({"config": {"base": "cd"}}, "trained on another model"),
        ({"config": {"hidden_size": 6}}, "trained on another model"),
        ({"fc": None}, "lack a tensor fc"),
        ({"o": np.ones((E, E), np.int32)}, "lack a tensor o"),
        ({"distance": np.zeros(WINDOW, np.float32)}, "unsound: fc"),
        ({"distance": np.zeros((3, WINDOW), np.float32)}, "unsound"),
        ({"distance": np.zeros((HEADS, 1), np.float32)}, "unsound"),
        ({"down": np.zeros((E, 0), np.float32)}, "unsound"),
        ({"gate_up": np.zeros((12, E), np.float32)}, "unsound"),
        ({"absent": np.full(E, np.nan, np.float32)}, "unsound"),
    ],
)
def test_D13_heads_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    write(tmp_path, **changes)
    with pytest.raises(ConfigError, match=says) as found:
        read_eagle(tmp_path, E, "ab")
    assert "\n" not in str(found.value)


def test_a_prompt_s_states_are_taken_away_in_one_stretch() -> None:
    torch.manual_seed(3)
    known = without_prompts(torch.Size((400, 60)), 10)
    whole = known.all(1)
    assert 0.4 < whole.float().mean() < 0.7
    for row in known[~whole]:
        gone = torch.where(~row)[0]
        assert gone[-1] - gone[0] + 1 == len(gone) <= 10


def test_training_teaches_the_head() -> None:
    """On the tiny recipe: every pass drafts the model's choice more often than before."""
    spec = RECIPES["tiny"]
    torch.manual_seed(0)
    model = SpecModule(spec, 64)
    model.initialise(3)
    model.requires_grad_(False)
    model.named_weights()["embed"].mul_(20)
    own = EagleModule(spec.hidden_size, 2, 8, 64, 0.4)
    torch.nn.init.normal_(own.fc, std=0.1)  # an untrained model repeats its input, which the head begins with
    tokens = torch.randint(0, 50, (4, 48))
    every = optimisers(own, 0.02)
    first, before = loss_of(model, own, tokens, 2, 0.5)
    for _ in range(80):
        loss, after = loss_of(model, own, tokens, 2, 0.5)
        own.zero_grad()
        loss.backward()
        for optimiser in every:
            optimiser.step()
    assert float(loss.detach()) < 0.7 * float(first.detach())
    assert bool((after > before + 0.2).all())
    (features,) = hidden_states(model, tokens, (len(spec.layers),))
    torch.testing.assert_close(logits_of(model, features), model(tokens))


def test_rules_are_the_requests_own() -> None:
    """A sampled row's first draft looks at its own draw, so the seed can change it; a greedy row's cannot."""
    d, text = drafter(), Text(6, 6)
    firsts = set()
    for seed in range(20):
        rules = TokenRules(temperature=8.0, seed=seed)
        (tree,) = d.propose([text.job(rules=rules)])
        firsts.add(tree.token_ids[0])
        assert len(set(zip(tree.parents, tree.token_ids, strict=True))) == len(tree.token_ids)
    assert len(firsts) > 2
