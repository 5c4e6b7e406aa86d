"""Feed-forwards read from a file, neuron by neuron (benchmarks/studies/flash_neurons)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from benchmarks.studies.flash_neurons import (
    Counts,
    FlashFeedForward,
    NeuronFile,
    gate_inputs,
    low_rank,
)

from penstock.backends.reference import ReferenceBackend
from penstock.base.bf16 import F32
from penstock.config import from_kwargs
from penstock.eval.sample import SAMPLE
from penstock.eval.scorer import LoadedModel, ProgramScorer, load
from penstock.launch.bundled import bundled_model
from penstock.ops.ref import REF
from penstock.ops.ref.product import rows_as_float32

TOKENS = 40


class Case:
    """nano with ReLU in place of SiLU, and its neurons in files."""

    def __init__(self, folder: Path) -> None:
        source = bundled_model("nano")
        assert source is not None
        for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(source / name, folder / name)
        config = json.loads((source / "config.json").read_text("utf-8")) | {"hidden_act": "relu"}
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        self.model: LoadedModel = load(from_kwargs(model=str(folder), ops="ref", dtype="float32", max_model_len=128))
        assert self.model.tokenizer is not None
        self.ids = self.model.tokenizer.encode(SAMPLE)[:TOKENS]
        self.pairs = NeuronFile(self.model, folder / "pairs", ("up", "down"))
        self.triples = NeuronFile(self.model, folder / "triples", ("gate", "up", "down"))
        self.inputs = gate_inputs(self.model, self.ids)
        self.whole, self.dense = self.exact(everything=True)

    @property
    def num_layers(self) -> int:
        return len(self.model.spec.layers)

    def gates(self, layer: int) -> F32:
        w = self.model.weights[f"layers.{layer}.gate"]
        return rows_as_float32(w, 0, w.shape[0])

    def exact(self, window: int = 0, *, everything: bool = False) -> tuple[F32, Counts]:
        flash = FlashFeedForward(self.model, self.pairs, window=window, everything=everything)
        return flash.scorer(self.model).logits(self.ids), flash.counts


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    made = Case(tmp_path_factory.mktemp("relu"))
    yield made
    made.pairs.close()
    made.triples.close()


@pytest.mark.parametrize("window", [0, 1, 5])
def test_B21_leaving_out_what_relu_makes_zero_changes_no_bit(case: Case, window: int) -> None:
    """The reference reads every neuron of every token; the engine's own operations give nearly the same, too."""
    logits, _ = case.exact(window)
    assert logits.tobytes() == case.whole.tobytes()
    plain = ProgramScorer(case.model, ReferenceBackend()).logits(case.ids)
    np.testing.assert_allclose(logits, plain, atol=2e-4)
    assert logits.argmax(axis=1).tolist() == plain.argmax(axis=1).tolist()


def test_B21_a_windows_bytes_are_those_of_neurons_that_no_recent_token_had(case: Case) -> None:
    """Counted again from what the gates of the plain model give; the wider the window, the fewer."""
    active = [REF["linear"](x, case.gates(i)) > 0 for i, x in enumerate(case.inputs)]  # [T, F] of each layer
    size, before = case.pairs.bundle_bytes, case.dense.num_bytes
    assert size == 2 * 2 * case.model.spec.hidden_size
    assert before == TOKENS * case.num_layers * case.pairs.width * size
    for window in (0, 1, 5):
        _, counts = case.exact(window)
        expected = 0
        for of_layer in active:
            for t, own in enumerate(of_layer):
                recent = of_layer[max(0, t - window) : t].any(axis=0)
                expected += int((own & ~recent).sum())
        assert abs(counts.neurons - expected) <= 0.002 * expected  # gates near zero
        assert counts.num_bytes == counts.neurons * size
        assert counts.tokens == TOKENS
        assert counts.num_bytes < 0.6 * before
        before = counts.num_bytes


def test_B21_a_window_holds_what_its_tokens_had_and_no_more(case: Case) -> None:
    assert case.exact(0)[1].held == 0
    active = sum(int((REF["linear"](x, case.gates(i)) > 0).sum()) for i, x in enumerate(case.inputs))
    held = case.exact(1)[1].held / case.pairs.bundle_bytes
    assert abs(held - active) <= 0.002 * active
    assert case.exact(1)[1].held < case.exact(5)[1].held <= case.dense.num_bytes


def test_B21_a_bundle_is_one_read(case: Case) -> None:
    counts = Counts()
    for file, parts in ((case.pairs, ("up", "down")), (case.triples, ("gate", "up", "down"))):
        rows = file.read(2, np.array([3, 4, 5, 9]), counts)
        assert rows.shape == (4, len(parts), case.model.spec.hidden_size)
        for p, name in enumerate(parts):
            w = case.model.weights[f"layers.2.{name}"]
            whole = rows_as_float32(w, 0, w.shape[0])
            np.testing.assert_array_equal(rows[:, p], (whole.T if name == "down" else whole)[[3, 4, 5, 9]])
    assert counts.reads == 4  # two runs of neighbours in each file
    assert counts.neurons == 8
    assert counts.num_bytes == 4 * (case.pairs.bundle_bytes + case.triples.bundle_bytes)
    for neuron, blocks in ((3, 1), (5, 2)):  # the second begins at byte 3,840 of a block
        alone = Counts()
        case.pairs.read(2, np.array([neuron]), alone)
        assert alone.blocks == blocks
    assert case.pairs.read(0, np.zeros(0, np.int64), counts).shape == (0, 2, case.model.spec.hidden_size)


def test_B21_a_predictor_that_overlooks_nothing_changes_no_bit(case: Case) -> None:
    def same_sums(layer: int, x: F32) -> F32:
        found: F32 = np.add.reduce(case.gates(layer) * x, axis=1)
        return found

    def run(everything: bool) -> F32:
        flash = FlashFeedForward(case.model, case.triples, window=3, predict=same_sums, everything=everything)
        return flash.scorer(case.model).logits(case.ids)

    assert run(False).tobytes() == run(True).tobytes()


def test_B21_a_low_rank_predictor_finds_nearly_all_and_reads_a_part(case: Case) -> None:
    guess = low_rank(case.model, case.inputs, 24)
    assert guess.num_bytes == case.num_layers * 2 * 24 * (case.pairs.width + case.model.spec.hidden_size)
    flash = FlashFeedForward(case.model, case.triples, predict=guess, audit=True)
    flash.scorer(case.model).logits(case.ids)
    assert flash.found / (flash.found + flash.overlooked) > 0.9
    assert flash.counts.neurons < 0.8 * case.dense.neurons
    # A higher threshold overlooks more.
    blind = FlashFeedForward(case.model, case.triples, predict=lambda i, x: guess(i, x) - np.float32(2), audit=True)
    blind.scorer(case.model).logits(case.ids)
    assert blind.overlooked > 2 * flash.overlooked


def test_B21_a_model_without_relu_is_refused(tmp_path: Path) -> None:
    plain = load(from_kwargs(model="nano", ops="ref", dtype="float32", max_model_len=64))
    with pytest.raises(ValueError, match="name a model whose layers all have it"):
        NeuronFile(plain, tmp_path / "neurons", ("up", "down"))
