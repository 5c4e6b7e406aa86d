"""`penstock quantize`: a table, the same as JSON, and one sentence for what cannot be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from penstock.cli.main import main
from penstock.config import from_kwargs
from penstock.core.matrix_format import Scheme, parse_scheme
from penstock.eval import prepare as preparing
from penstock.eval.prepare import key_of, prepare
from penstock.eval.scorer import LoadedModel, load
from penstock.launch.bundled import bundled_model
from penstock.ops.native.abi import Act, Format
from penstock.ops.native.matrix import Packed
from penstock.ops.native.packed_file import PackedStore

NANO = str(bundled_model("nano"))
FEW = ["--max-tokens", "150", "--window", "64", "--num-gpu-blocks-override", "64"]


def quantize(*args: str) -> int:
    return main(["quantize", *args])


def test_a_table_and_the_same_figures_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "r.json"
    assert quantize(NANO, *FEW, "--schemes", "int8-w8a8, int4-wo:32,int8-w8a8", "--json", str(file)) == 0
    shown = capsys.readouterr().out
    told = json.loads(file.read_text())
    assert [m["scheme"] for m in told["schemes"]] == ["none", "int8-w8a8", "int4-wo:32"]
    assert told["window"] == 64
    assert told["stride"] == 32
    assert told["text"] == "built-in sample"
    for m in told["schemes"]:
        assert m["scheme"] in shown
        assert f"{m['perplexity']:.3f}" in shown
        assert m["total_bytes"] > m["matrix_bytes"] > 0
    first, *rest = told["schemes"]
    assert first["kl_max"] == first["perplexity_difference"] == 0
    for m in rest:
        low, high = m["perplexity_difference_interval"]
        assert low <= m["perplexity_difference"] <= high
        assert 0 < m["kl_mean"] <= m["kl_p99"] <= m["kl_max"]
        assert 0.5 < m["top1_agreement"] <= 1
    assert quantize(NANO, *FEW, "--schemes", "int8-wo", "--json", "-") == 0
    assert len(json.loads(capsys.readouterr().out)["schemes"]) == 2


def test_a_text_of_one_s_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The little girl went to the garden, and there she saw a fox. " * 3, encoding="utf-8")
    assert quantize(NANO, *FEW, "--schemes", "none", "--text", str(text), "--json", "-") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["text"] == str(text)
    assert 0 < told["text_bytes"] <= text.stat().st_size


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--schemes", "int5"], "int8-w8a8"),
        (["--schemes", "int4-wo:48"], "32|64|128"),
        (["--schemes", ","], "--schemes names none"),
        (["--text", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--text", "EMPTY"], "is empty"),
        (["--text", "BINARY"], "UTF-8"),
        (["--out", "folder"], "--prepare"),
        (["--window", "3000"], "2048"),
        (["--window", "64", "--stride", "64"], "stride"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--skip-tokenizer-init"], "--tokenizer"),
        (["--prepare", "--ops", "ref"], "nothing to prepare"),
        (["--max-model-len", "5000"], "2048"),
    ],
)
def test_bad_input_is_one_sentence(
    args: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "EMPTY").write_text("\n")
    (tmp_path / "BINARY").write_bytes(b"\xff\xfe\x00")
    named = [str(tmp_path / a) if a in ("EMPTY", "BINARY") else a for a in args]
    assert quantize(NANO, *named) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("penstock: error: ")
    assert says in err


def test_json_that_cannot_be_written_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert quantize(NANO, *FEW, "--schemes", "none", "--json", "/proc/nowhere/r.json") == 1
    assert "cannot be written" in capsys.readouterr().err


# -- preparing ---------------------------------------------------------------------------------------------------


class Packing:
    """Packs nothing real, and counts."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, model: LoadedModel, scheme: Scheme) -> Mapping[str, Packed]:
        self.times += 1
        data = np.full(64 * 4 * 4, self.times, np.uint8)
        return {scheme.name: Packed(Format.F32, Act.F32, 64, 4, False, data)}


def model() -> LoadedModel:
    return load(from_kwargs(model=NANO, num_gpu_blocks_override=64, skip_tokenizer_init=True))


def test_what_is_prepared_is_there_at_the_next_start(tmp_path: Path) -> None:
    store, pack, nano = PackedStore(tmp_path / "cache"), Packing(), model()
    assert [path.name for path in nano.files] == ["model.safetensors"]
    for _ in range(2):
        key, on_disk = prepare(nano, parse_scheme("int8-wo"), store, pack)
        assert on_disk
        assert set(store.load(key) or {}) == {"int8-wo"}
    assert pack.times == 1, "what is there is not packed again"
    (store.folder / f"{key}.pst").write_bytes(b"broken")
    assert prepare(nano, parse_scheme("int8-wo"), store, pack) == (key, True)
    assert pack.times == 2
    others = {key_of(nano, parse_scheme(name), store.folder) for name in ("int8-w8a8", "int4-wo", "int4-wo:32")}
    assert len(others | {key}) == 4


def test_the_command_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pack = Packing()
    monkeypatch.setattr(preparing, "packer", lambda: pack)
    out = tmp_path / "out"
    args = [NANO, "--prepare", "--schemes", "int8-wo,int4-wo", "--num-gpu-blocks-override", "64"]
    assert quantize(*args, "--out", str(out)) == 0
    shown = capsys.readouterr().out
    assert sorted(str(p) for p in out.glob("*.pst")) == sorted(line.split(": ")[1] for line in shown.splitlines())
    assert pack.times == 2
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    assert quantize(*args) == 0
    assert len(list((tmp_path / "cache" / "weights").glob("*.pst"))) == 2
    (tmp_path / "file").write_text("")
    assert quantize(*args, "--out", str(tmp_path / "file")) == 1
    assert "could not be kept" in capsys.readouterr().out
