"""The training loop end to end on a made-up corpus: it learns, it goes on from weights, Penstock runs the result."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `train.corpus` writes, of a few thousand words of very regular prose."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from train.tokenizer import save_tokenizer, train_tokenizer
    finally:
        sys.path.remove(str(ROOT / "tools"))
    rng = random.Random(0)
    animals, colours = ("cat", "dog", "bird", "fish"), ("red", "blue", "green")
    text = " ".join(
        f"The {rng.choice(colours)} {rng.choice(animals)} saw the {rng.choice(animals)}." for _ in range(6000)
    )
    folder = tmp_path_factory.mktemp("data")
    tokenizer = train_tokenizer([text, "What is the pass key? The pass key is 123."])
    save_tokenizer(tokenizer, folder)
    sources = {"children": 1.0, "tinystories": 1.0, "novels": 1.0}
    for name in sources:
        np.array(tokenizer.encode(text).ids, np.uint16).tofile(folder / f"{name}.u16")
    (folder / "sources.json").write_text(json.dumps(sources))
    return folder


def arguments(data: Path, out: Path, *flags: str) -> list[str]:
    return ["tiny", "--data", str(data), "--out", str(out), "--rows", "8", "--length", "48", "--device", "cpu", *flags]


def curve_of(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "loss.jsonl").read_text().splitlines()]


@pytest.fixture
def train(data: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[dict[str, float]]]]:
    """Run the loop on recipe `tiny` in this process; its loss curve."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from train.train import main

    def run(out: Path, *flags: str) -> list[dict[str, float]]:
        monkeypatch.setattr(sys, "argv", ["train", *arguments(data, out, *flags)])
        main()
        return curve_of(out)

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield run
    torch.set_num_threads(before)


def test_it_learns_goes_on_from_weights_and_penstock_runs_the_result(
    data: Path, train: Callable[..., list[dict[str, float]]], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "train.train", *arguments(data, tmp_path / "a", "--steps", "80", "--share", "0.2")]
    env = os.environ | {"PYTHONPATH": str(ROOT / "tools"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    curve = curve_of(tmp_path / "a")
    losses = [point["loss"] for point in curve]
    assert losses[-1] < losses[0] / 2 < math.log(4096)
    assert curve[-1]["tokens"] == 80 * 8 * 48
    resumed = train(tmp_path / "b", "--steps", "20", "--share", "0.2", "--resume", str(tmp_path / "a"))
    assert resumed[0]["loss"] < losses[-1] + 0.3, "going on from weights begins where the first run ended"
    llm = LLM(tmp_path / "b")
    out = llm.generate(["The red"], SamplingParams(max_tokens=12, temperature=0.0))[0]
    assert any(animal in out.outputs[0].text for animal in ("cat", "dog", "bird", "fish"))
    chat = llm.chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=4, temperature=0.0))[0]
    assert chat.prompt_token_ids[0] == 0


def test_lengths_can_take_turns(train: Callable[..., list[dict[str, float]]], tmp_path: Path) -> None:
    flags = ("--rows", "8", "--lengths", "16:0.5,32:0.5", "--steps", "20")
    turns = train(tmp_path / "a", *flags, "--mixed")
    phases = train(tmp_path / "b", *flags)
    assert turns[-1]["tokens"] == phases[-1]["tokens"] == 20 * 8 * 16  # every step has as many tokens
    assert turns[0]["loss"] != phases[0]["loss"]
