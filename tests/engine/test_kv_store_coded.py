"""A store whose blocks are coded (`kv_offload_format`): what comes back is the rounded block, bit for bit."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.base.errors import ConfigError
from penstock.core.block_codec import PLAIN
from penstock.eval.sample import SAMPLE
from penstock.launch.bundled import bundled_model
from penstock.launch.kv_store import make_block_codec
from penstock.ops.native.library import best_library
from penstock.runner import block_files
from penstock.runner.block_files import OVERHEAD, BlockFiles, is_whole

pytestmark = pytest.mark.skipif(best_library() is None, reason="needs the native kernels")
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LENGTH = 20 * 32 + 3


def engine(folder: Path, form: str = "cachegen", **more: Any) -> LLM:
    usual: dict[str, Any] = {"max_model_len": 1024, "num_gpu_blocks_override": 64, "kv_cache_dtype": "bfloat16"}
    return LLM(str(bundled_model("nano")), kv_offload=f"disk:{folder}", kv_offload_format=form, **(usual | more))


def text(llm: LLM) -> list[int]:
    """Of real words."""
    ids: list[int] = llm.get_tokenizer().encode(SAMPLE)
    return (ids * (1 + LENGTH // len(ids)))[:LENGTH]


def ask(llm: LLM, ids: list[int]) -> tuple[list[int], int]:
    (out,) = llm.generate([{"prompt_token_ids": ids}], PARAMS)
    return list(out.outputs[0].token_ids), out.num_cached_tokens


def core(llm: LLM) -> Any:
    return llm.engine.core


def closed(llm: LLM) -> None:
    core(llm).executor._runner.storage.outside.close(60.0)


def files(folder: Path) -> dict[str, int]:
    """Blocks below the folder, and their bytes."""
    found = [p for p in folder.glob("*/*/*-*") if not p.name.startswith(".")]
    return {str(p.relative_to(folder)): p.stat().st_size for p in found}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no disk that hangs."""
    monkeypatch.setattr(block_files, "PATIENCE_S", 60.0)


class Seen:
    """What was given to be written, and what was put into pages, by path."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: dict[str, bytes] = {}
        self.filled: dict[str, bytes] = {}
        coded, fill = BlockFiles._coded, BlockFiles._fill

        def seen_coded(files: BlockFiles, path: str, copy: bytearray) -> bytearray | None:
            self.given[path] = bytes(copy[16:-32])
            return coded(files, path, copy)

        def seen_fill(files: BlockFiles, op: Any, block: bytearray) -> None:
            self.filled[op.path] = bytes(block[16:-32])
            fill(files, op, block)

        monkeypatch.setattr(BlockFiles, "_coded", seen_coded)
        monkeypatch.setattr(BlockFiles, "_fill", seen_fill)


@pytest.mark.parametrize("policy", ["wait", "cake"])
def test_F42_pages_hold_the_rounded_block_and_files_a_third_of_8_bits(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen(monkeypatch)
    first = engine(tmp_path)
    ids = text(first)
    expected, cached = ask(first, ids)
    assert cached == 0
    closed(first)
    again = engine(tmp_path, kv_load_policy=policy)
    got, cached = ask(again, ids)
    assert cached == 20 * 32 or policy == "cake"
    assert len(got) == len(expected)
    (group,), codec = core(again).kv.groups, make_block_codec("cachegen", core(again).kv.groups, 32)
    assert codec is not None
    assert len(seen.filled) >= (20 if policy == "wait" else 1)
    changed = 0
    for path, block in seen.filled.items():
        data = codec.encode(memoryview(seen.given[path]))
        back = bytearray(len(block))
        assert data is not None
        assert codec.decode(memoryview(data), memoryview(back))
        assert back == block
        changed += back != seen.given[path]
    assert changed == len(seen.filled), "it is lossy"
    numbers = len(seen.filled[path]) // 2  # of 8 bits one byte each, without scales
    sizes = files(tmp_path)
    assert len(sizes) >= 20
    assert group.spec.planes[0].dtype == "bfloat16"
    assert numbers / (sum(sizes.values()) / len(sizes)) >= 3, "header, MAC, steps and all"


def test_the_books_learn_what_blocks_take(tmp_path: Path) -> None:
    llm = engine(tmp_path)
    ask(llm, text(llm))
    kv = core(llm).kv
    closed(llm)
    llm.generate([{"prompt_token_ids": [5]}], PARAMS)  # a step that reports what was written
    assert kv.stored.tiers[-1].index.num_bytes > 3 * sum(files(tmp_path).values()), "room for what cannot be foreseen"
    again = engine(tmp_path)
    index = core(again).kv.stored.tiers[-1].index
    again.generate([{"prompt_token_ids": [5]}], PARAMS)
    assert index.num_bytes == sum(files(tmp_path).values())
    ask(again, text(again))
    assert core(again).kv.stored.tiers[-1].read_bytes == sum(files(tmp_path).values())


def test_F42_other_formats_have_other_names(tmp_path: Path) -> None:
    """What is rounded never reaches who did not ask for it, nor the other way round."""
    for form, found in (("cachegen", 0), (PLAIN, 0), ("cachegen", 20 * 32), (PLAIN, 20 * 32)):
        llm = engine(tmp_path, form)
        assert ask(llm, text(llm))[1] == found, form
        closed(llm)
    assert len({Path(name).parts[0] for name in files(tmp_path)}) == 2


def test_a_changed_file_is_a_miss(tmp_path: Path) -> None:
    llm = engine(tmp_path)
    ids = text(llm)
    ask(llm, ids)
    closed(llm)
    names = sorted(files(tmp_path), key=lambda name: int(name.rpartition("-")[2], 16))
    for n, name in enumerate(names[3:20:4]):
        data = bytearray((tmp_path / name).read_bytes())
        if n % 2:
            data[len(data) // 2] ^= 1
        else:
            del data[-5:]
        (tmp_path / name).write_bytes(data)
    again = engine(tmp_path)
    ask(again, ids)
    assert core(again).kv.stored.tiers[-1].num_lost == 5
    closed(again)
    secret = (tmp_path / "secret").read_bytes()
    assert set(files(tmp_path)) >= set(names), "they were computed, and written again"
    assert all(is_whole(tmp_path, name, secret) for name in files(tmp_path))


def test_codes_are_not_coded_again(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_offload_format: cachegen writes .*keeps .*int8"):
        engine(tmp_path, kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match="kv_offload_format"):
        engine(tmp_path, "zip")


def test_F42_behind_a_slow_link_the_first_token_comes_sooner_than_from_plain_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link of 500 kB/s for both: it takes the time of the bytes."""
    rate, read, first = 0.5e6, BlockFiles._read, {}

    def slow(files: BlockFiles, path: str, into: bytearray) -> bool:
        time.sleep((files._folder / path).stat().st_size / rate)
        return read(files, path, into)

    for form in (PLAIN, "cachegen"):
        llm = engine(tmp_path, form)
        ids = text(llm)
        ask(llm, ids)
        closed(llm)
    monkeypatch.setattr(BlockFiles, "_read", slow)
    for form in (PLAIN, "cachegen"):
        llm = engine(tmp_path, form)
        began = time.perf_counter()
        for _ in llm.stream({"prompt_token_ids": ids}, PARAMS):
            break
        first[form] = time.perf_counter() - began
    sizes = [p.stat().st_size for p in tmp_path.glob("*/*/*-*")]
    assert max(sizes) > 5 * min(sizes) > 5 * OVERHEAD
    assert first["cachegen"] < 0.6 * first[PLAIN]


GGUF = Path.home() / ".cache" / "penstock" / "smollm2-135m-instruct.gguf"


@pytest.mark.skipif(not GGUF.is_file(), reason=f"{GGUF} is not there: python tools/models.py smollm2-135m")
def test_F42_behind_a_link_of_20_mb_a_second_coded_blocks_beat_plain_ones_and_computing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that was really trained, 1,024 tokens: 3.8 MB coded, 23.6 MB plain."""
    rate, read, link = 20e6, BlockFiles._read, threading.Lock()

    def slow(files: BlockFiles, path: str, into: bytearray) -> bool:
        with link:
            time.sleep((files._folder / path).stat().st_size / rate)
        return read(files, path, into)

    def started(form: str) -> LLM:
        llm = LLM(str(GGUF), max_model_len=1280, kv_offload=f"disk:{tmp_path}", kv_offload_format=form)
        llm.generate([{"prompt_token_ids": [5] * 40}], PARAMS)
        return llm

    def first_token(llm: LLM) -> float:
        began = time.perf_counter()
        for _ in llm.stream({"prompt_token_ids": ids}, PARAMS):
            break
        took = time.perf_counter() - began
        while llm.engine.core.has_work:  # its end, too, so that it is written
            llm.engine.core.step()
        return took

    took = {}
    for form in (PLAIN, "cachegen"):
        llm = started(form)
        ids = (llm.get_tokenizer().encode(SAMPLE) * 4)[:1024]
        took["computed"] = first_token(llm)
        closed(llm)
    monkeypatch.setattr(BlockFiles, "_read", slow)
    for form in (PLAIN, "cachegen"):
        llm = started(form)
        took[form] = first_token(llm)
        assert core(llm).kv.stored.tiers[-1].num_loaded >= 31
    assert took["cachegen"] < took[PLAIN]
    assert took["cachegen"] < took["computed"]
