"""tools/train: heads that look back are planted, lengths grow, contexts are asked more than once."""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
from train import skills
from train.induction import plant, plantable
from train.interpreter import SpecModule
from train.recipes import RECIPES
from train.train import phases


@pytest.mark.parametrize("recipe", ["nano", "nano-mqa", "pico"])
def test_a_planted_model_copies_before_it_is_trained(recipe: str) -> None:
    model = SpecModule(RECIPES[recipe], 256)
    plain = copied(model)
    plant(model)
    assert plain < 0.02
    # One kv head copies a third of a token in each of three layers, which only training brings together.
    assert copied(model) > {"nano": 0.75, "pico": 0.3, "nano-mqa": 0.05}[recipe]


def copied(model: SpecModule) -> float:
    """The part of repeated random tokens that the model finds likeliest."""
    generator = torch.Generator().manual_seed(1)
    segment = torch.randint(3, 4096, (8, 60), generator=generator)
    ids = torch.cat([segment, segment], dim=1)
    with torch.no_grad():
        found = model(ids[:, :-1]).argmax(-1)
    return float((found[:, 63:] == ids[:, 64:]).float().mean())  # the first few repeats have too little before them


def test_what_has_no_two_equal_rotary_layers_is_not_planted() -> None:
    assert not plantable(RECIPES["nano-alibi"])
    assert not plantable(RECIPES["nano-hybrid"])
    with pytest.raises(ValueError, match="two equal attention layers"):
        plant(SpecModule(RECIPES["nano-alibi"], 64))


def test_lengths_grow_by_phases_that_fill_the_run() -> None:
    assert phases("256:0.5,1024:0.25,2048:0.25") == [(256, 0.5), (1024, 0.75), (2048, 1.0)]
    with pytest.raises(argparse.ArgumentTypeError, match="add up to"):
        phases("256:0.5,1024:0.25")


@pytest.mark.parametrize("skill", sorted(skills.SKILLS))
def test_further_questions_are_for_training_only(skill: str) -> None:
    rng = random.Random(3)
    noise = "It was a fine day. Nobody was there. " * 40
    many = [skills.SKILLS[skill](rng, "train", 400, lambda r, n: noise[:n]) for _ in range(20)]
    few = [skills.SKILLS[skill](rng, "test", 400, lambda r, n: noise[:n]) for _ in range(20)]
    assert not any(e.more for e in few)
    if skill in ("needle", "lookup", "two-hop", "passage"):
        assert any(e.more for e in many)
    for e in many:
        answers = [p.text.strip() for p in e.pieces(chat=False) if p.answer]
        assert answers == [e.answer, *(a for _, a in e.more)]
        for prompt, answer in e.more:
            if skill == "arithmetic":
                assert eval(prompt.rstrip("=")) == int(answer.rstrip("."))
            elif skill == "json":
                assert all(str(value) in prompt for value in json.loads(answer).values())
            else:
                assert answer.rstrip(".").split()[-1] in e.prompt  # what is asked was said


@pytest.mark.parametrize("chat", [False, True])
def test_stories_around_needles_are_told_apart_from_them(chat: bool) -> None:
    rng = random.Random(5)
    story = "A cat sat there. Nobody saw it. "
    for size in (0, 40, 200, 900):
        for _ in range(50):
            made = skills.needle(rng, "train", size, lambda r, n: (story * 40)[:n])
            first, *others = made.pieces(chat)
            assert not any(piece.prose for piece in others)
            told = "".join(first.text[a:b] for a, b in first.prose)
            assert told.replace(" ", "") == (story * 40)[:size].replace(" ", "")  # all of the story, nothing else
    assert not any(p.prose for p in skills.lookup(rng, "train", 200, lambda r, n: "").pieces(chat))
