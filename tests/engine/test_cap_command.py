"""`penstock cap`: the whole command on nano, with few examples."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import msgspec
import pytest

from penstock.cli.cap_page import html_page
from penstock.config import from_kwargs
from penstock.eval.cap import run as runs
from penstock.eval.cap.conditions import Conditions
from penstock.eval.cap.fit import seats
from penstock.eval.cap.report import Report
from penstock.eval.cap.text import selecting
from penstock.launch.llm import LLM
from tests.command import penstock
from tests.pages import Page

YARN = '{"rope_type": "yarn", "factor": 2}'
BOARD = ["--with", "int8:kv_cache_dtype=int8", "--with", f"<b>long</b>:rope_scaling={YARN}"]
SMALL = [
    "--bos", "--limit", "12", "--tasks", "lookup?pairs=10", "--context-task", "needle?depths=0+1", "--lengths",
    "256,512,1024", "--text-tokens", "600", "--kl-top", "16", "--input-len", "96", "--output-len", "6", "--requests",
    "10", "--repeats", "1", "--rounds", "2", "--speed-seconds", "0", "--max-num-seqs", "16", "--kv-memory", "1408K",
]  # fmt: skip


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, str]:
    """JSON, page and printed tables of one board, and that no two engines were there at once."""
    folder = tmp_path_factory.mktemp("cap")
    started: list[weakref.ref[Any]] = []
    most = 0

    class Watched(LLM):
        def _start(self, config: Any) -> None:
            nonlocal most
            gc.collect()
            super()._start(config)
            started.append(weakref.ref(self._engine.core))
            most = max(most, sum(ref() is not None for ref in started))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "LLM", Watched)
        patch.setenv("COLUMNS", "200")
        done = penstock(
            "cap", "nano", *BOARD, *SMALL, "--json", str(folder / "r.json"), "--html", str(folder / "page.html")
        )
    assert done.returncode == 0, done.stderr
    assert len(started) == 3 * (1 + 1 + 2), "quality, context, two rounds of speed, for three configurations"
    assert most == 1, "two engines were in memory at once"
    return json.loads((folder / "r.json").read_text()), (folder / "page.html").read_text(), done.stdout


def row(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(r for r in found["rows"] if r["name"] == name)


def test_the_plain_one_is_first_and_everybody_is_asked_the_same(measured: tuple[dict[str, Any], str, str]) -> None:
    found = measured[0]
    assert [r["name"] for r in found["rows"]] == ["full", "int8", "<b>long</b>"]
    for of in (
        lambda r: r["tasks"][0]["digest"],
        lambda r: r["text"]["digest"],
        lambda r: r["context"]["task"]["digest"],
    ):
        assert len({of(r) for r in found["rows"]}) == 1
    assert found["rows"][0]["verdict"] is None
    assert found["rows"][0]["kl"] is None


def test_int8_kv_halves_the_memory_and_so_reaches_further(measured: tuple[dict[str, Any], str, str]) -> None:
    full, int8 = row(measured[0], "full"), row(measured[0], "int8")
    # Blocks of 32 tokens, 6 layers, 2 x 3 heads of 32 numbers: 4 blocks hold 96 + 6 tokens.
    assert full["performance"]["kv_end_bytes"] == 4 * 32 * 6 * 2 * 3 * 32 * 2
    assert int8["performance"]["kv_end_bytes"] == 4 * 32 * 6 * 2 * 3 * (32 + 4)
    assert full["performance"]["kv_prefill_bytes"] <= full["performance"]["kv_end_bytes"]
    assert full["context"]["fits"] == 608
    assert int8["context"]["fits"] == 1088
    assert (full["context"]["longest"], full["context"]["limited_by"]) == (512, "memory")
    assert (int8["context"]["longest"], int8["context"]["limited_by"]) == (1024, "the grid ends")
    assert full["performance"]["peak_running"] < int8["performance"]["peak_running"]
    assert int8["verdict"]["words"]["C"] == "improved"
    assert int8["verdict"]["words"]["P"] in ("improved", "mixed")
    assert int8["verdict"]["declared"] == "CP"
    assert 0 < int8["kl"]["kl"] < 0.01
    assert int8["kl"]["same_top"] > 0.95
    assert "top 16 and one bucket for the rest" in int8["kl"]["method"]


def test_other_positions_change_what_is_expected(measured: tuple[dict[str, Any], str, str]) -> None:
    yarn = row(measured[0], "<b>long</b>")
    assert yarn["kl"]["kl"] > row(measured[0], "int8")["kl"]["kl"]
    assert yarn["context"]["max_model_len"] == 4096
    assert yarn["verdict"]["declared"] == "C"


def test_the_page_loads_nothing_and_runs_nothing(measured: tuple[dict[str, Any], str, str]) -> None:
    found, text, _ = measured
    Page(text)
    assert "@import" not in text
    assert "url(" not in text
    assert "<b>long" not in text, "names are a user's: escaped"
    assert text.count('class="shape"') == 2, "a triangle per configuration"
    assert text.count('class="map num"') == 3, "a map per configuration"
    assert text.count("<figure>") == 2 + 3
    for said in ("What the data say", "&lt;b&gt;long&lt;/b&gt;", "Machine:", "penstock", "one bucket for the rest",
                 "Speed: 2 rounds in"):  # fmt: skip
        assert said in text
    assert html_page(msgspec.convert(found, Report)) == text, "the page follows from the JSON"


def test_the_tables_say_what_the_data_confirm(measured: tuple[dict[str, Any], str, str]) -> None:
    out = measured[2]
    assert measured[0]["rounds"]["number"] == 2
    assert ("narrow enough" in measured[0]["rounds"]["why"]) or ("still wide" in measured[0]["rounds"]["why"])
    for said in (
        "Against the plain one",
        "Speed: 2 rounds in",
        "improved",
        "The trilemma held",
        "longest context",
        "KL of int8, ",
    ):
        assert said in out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "nothing to compare"),
        (["--with", "kv_cache_dtype"], "name=value"),
        (["--with", "kv_cache_dtypes=int8"], "did you mean kv_cache_dtype"),
        (["--with", "kv_selector=snapkv,kv_budget=0%"], "keeps nothing"),
        (["--with", "block_size=16", "--with", "eviction=mru"], "'eviction=mru'"),
        (["--with", "block_size=16", "--tasks", "nedle"], "did you mean needle"),
        (["--with", "block_size=16", "--tasks", "perplexity"], "has no score"),
        (["--with", "block_size=16", "--board", "nowhere.toml"], "cannot be read"),
        (["--with", "block_size=16", "--lengths", "a,b"], "whole numbers joined by commas"),
        (["--with", "block_size=16", "--threshold", "2"], "--threshold"),
        (["--with", "block_size=16", "--kv-memory", "100K"], "fewer than the 512 of --input-len"),
        (["--with", "max_model_len=99"], "its context holds 99 tokens"),
        (["--with", "max_model_len=9999"], "'max_model_len=9999': max_model_len: 9999 is more"),
    ],
)
def test_bad_input_is_one_sentence_before_anything_runs(
    args: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "measure_board", lambda *a, **k: pytest.fail("something ran"))
    done = penstock("cap", "nano", *args)
    assert done.returncode == 1
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not done.stdout


def test_a_selector_has_to_select_within_the_text() -> None:
    plain = from_kwargs(model="nano")
    assert selecting(plain, 64) is plain
    snap = from_kwargs(model="nano", kv_selector="snapkv", kv_selector_config='{"sinks": 2}')
    options = selecting(snap, 48).selection
    assert options is not None
    assert (options.options.prompt_interval, options.options.sinks) == (48, 2)
    own = from_kwargs(model="nano", kv_selector="snapkv", kv_selector_config='{"prompt_interval": 7}')
    assert selecting(own, 48) is own


def test_memory_is_that_of_four_plain_requests_by_default() -> None:
    from penstock.eval.cap.board import Configuration, make_board
    from penstock.eval.tasks import make_tasks

    needle, text = make_tasks(["needle", "perplexity"])
    conditions = Conditions(tasks=(), context=needle, text=text, input_len=100, output_len=28)
    board = make_board(from_kwargs(model="nano"), [Configuration("int8", {"kv_cache_dtype": "int8"})])
    plain, int8 = seats(board, conditions)
    assert plain.kv_memory == 16 * 32 * 6 * 2 * 3 * 32 * 2
    assert (plain.fits, int8.fits) == (512, 896)
