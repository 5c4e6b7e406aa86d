"""The table of weight formats: which cells there are, what a cell says, and that nothing is measured twice."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.quality import formats
from benchmarks.quality.formats import COLUMNS, KeptOnDisk, cells, exact, markdown, row, speeds

from penstock.formats.gguf import Gguf
from penstock.formats.tensor_ref import BLOCKS, TensorRef
from tests.blocks import random_blocks

CELL: dict[str, Any] = {
    "name": "a-Q8_0", "scheme": "none", "file_bytes": 98_000_000, "resident": 109_000_000, "exact": {"Q8_0": True},
    "perplexity": 18.2671, "over_float32": 0.0102, "over_float32_interval": [0.0075, 0.0188], "kl": 317e-5,
    "kl_interval": [292e-5, 362e-5], "same": 0.973,
}  # fmt: skip


def file_of(path: Path, kinds: list[str]) -> Gguf:
    """A matrix [3, two blocks] of each type, one behind the other."""
    tensors, parts, offset = {}, [], 0
    for n, kind in enumerate(kinds):
        numbers, size = BLOCKS[kind]
        blocks = random_blocks(kind, 6, np.random.default_rng(n), scale=0.1)
        parts.append(blocks.tobytes())
        tensors[f"t{n}"] = TensorRef(path, f"t{n}", kind, (3, 2 * numbers), offset, 6 * size)
        offset += 6 * size
    path.write_bytes(b"".join(parts))
    return Gguf(path, 3, {}, tensors, 32)


def test_exact_looks_at_every_type_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = file_of(tmp_path / "f", ["Q8_0", "Q4_K", "IQ3_S", "Q8_0"])
    assert exact(made) == {"Q8_0": True, "Q4_K": True, "IQ3_S": True}

    def off(kind: str, blocks: Any) -> Any:
        values = formats_decoded(kind, blocks)
        return values + np.float32(1e-6) if kind == "Q4_K" else values

    formats_decoded = formats.decoded_blocks
    monkeypatch.setattr(formats, "decoded_blocks", off)
    assert exact(made) == {"Q8_0": True, "Q4_K": False, "IQ3_S": True}


def test_cells_are_the_original_the_others_by_size_and_its_schemes(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("small.gguf", "large.gguf", "original.gguf")]
    for size, file in enumerate(files):
        file.write_bytes(b"x" * (size + 1))
    found = [(c.name, c.file.name, c.scheme) for c in cells(files[2], files, ["int8-w8a8"])]
    assert found == [
        ("as stored", "original.gguf", "none"), ("large", "large.gguf", "none"), ("small", "small.gguf", "none"),
        ("int8-w8a8", "original.gguf", "int8-w8a8"),
    ]  # fmt: skip


def test_a_row_says_figures_with_intervals_and_who_is_beside() -> None:
    speed = {"penstock": {"prefill_tps": {"median": 1500.0}, "decode_tps": {"median": 80.0}}}
    told = row(CELL, speed | {"ik": {"decode_tps": {"median": 70.0}}, "llama.cpp": {"decode_tps": {"median": 60.0}}})
    assert told == [
        "a-Q8_0", "98", "109", "yes", "18.267", "+1.02% (+0.75% to +1.88%)", "317 (292 to 362)", "97.3%", "1,500",
        "80 (70)",
    ]  # fmt: skip
    assert row({**CELL, "exact": {"Q8_0": True, "Q4_K": False}}, {})[3] == "no"
    assert row({**CELL, "scheme": "int8-w8a8", "exact": {}}, {})[1:4] == ["", "109", "rounded"]
    refused = row({**CELL, "error": "there are no kernels"}, {})
    assert (len(refused), refused[2]) == (len(COLUMNS), "there are no kernels")
    assert markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"


def test_speeds_are_found_by_file_and_scheme(tmp_path: Path) -> None:
    file = tmp_path / "speeds.json"
    options = json.dumps({"penstock": {"quantization": "int8-w8a8"}})
    file.write_text(
        json.dumps({"asked": {"options": options}, "files": [{"file": "a.gguf", "engines": {"penstock": {}}}]})
    )
    assert speeds([file]) == {("a.gguf", "int8-w8a8"): {"penstock": {}}}


def test_logits_of_the_reference_are_computed_once_and_outlive_the_run(tmp_path: Path) -> None:
    class Once:
        vocab_size, max_len, calls = 3, 8, 0

        def logits(self, token_ids: Any) -> Any:
            self.calls += 1
            return np.full((len(token_ids), 3), sum(token_ids), np.float32)

    scorer = Once()
    for kept in (KeptOnDisk(scorer, tmp_path), KeptOnDisk(scorer, tmp_path)):
        np.testing.assert_array_equal(kept.logits([1, 2]), np.full((2, 3), 3))
        np.testing.assert_array_equal(kept.logits([2, 2]), np.full((2, 3), 4))
    assert scorer.calls == 2


def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, out = tmp_path / "o.gguf", tmp_path / "out.json"
    original.write_bytes(b"")
    asked: list[str] = []

    def measure(missing: Any, kept: Any, what: Any, args: Any) -> None:
        asked.extend(cell.name for cell in missing)
        for cell in missing:
            kept[cell.name] = CELL | {"name": cell.name, "scheme": cell.scheme}
        formats.save(str(args.out), {"asked": what, "cells": list(kept.values())})

    monkeypatch.setattr(formats, "measure", measure)
    command = ["formats", str(original), "--text", "t.txt", "--out", str(out), "--markdown", str(tmp_path / "page.md")]
    for schemes in ("int8-w8a8", "int8-w8a8,int4-wo", "int8-w8a8,int4-wo"):
        monkeypatch.setattr(sys, "argv", [*command, "--schemes", schemes])
        formats.main()
    assert asked == ["as stored", "int8-w8a8", "int4-wo"]
    assert (tmp_path / "page.md").read_text().count("\n") == 5
    monkeypatch.setattr(sys, "argv", [*command, "--max-tokens", "9"])
    with pytest.raises(SystemExit, match="measured with"):
        formats.main()
