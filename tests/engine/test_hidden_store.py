"""A store of hidden states (`kv_offload_format` hidden, catalogue row B14): keys and values are made of them again."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.peers.make_models import SHAPES, make

from penstock import LLM, SamplingParams
from penstock.backends.native.schemes import WITH_BF16
from penstock.base.bf16 import widen
from penstock.base.errors import ConfigError
from penstock.core.page_ops import DISK, GetOp
from penstock.launch.bundled import bundled_model
from penstock.ops.native.library import best_library
from penstock.runner.block_files import OVERHEAD, BlockFiles
from penstock.runner.restored import RestoredOutside, Restorer
from tests.engine.store_draws import run_seed

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
IDS = [(7 * i * i + 13 * i) % 1000 + 3 for i in range(20 * 32 + 3)]
NATIVE = best_library()
SHORT = NATIVE is not None and NATIVE.pst_isa_name().decode() in WITH_BF16
"""Whether products round what they read to bfloat16, so that files of it lose nothing."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make("tiny-mha", tmp_path_factory.mktemp("models")))


def engine(model: str, folder: Path, form: str = "hidden", **more: Any) -> LLM:
    usual: dict[str, Any] = {"max_model_len": 1024, "num_gpu_blocks_override": 64, "skip_tokenizer_init": True}
    return LLM(model, kv_offload=f"disk:{folder}", kv_offload_format=form, **(usual | more))


def ask(llm: LLM) -> tuple[list[int], int]:
    (out,) = llm.generate([{"prompt_token_ids": IDS}], PARAMS)
    return list(out.outputs[0].token_ids), out.num_cached_tokens


def first_token_s(llm: LLM) -> float:
    began = time.perf_counter()
    for _ in llm.stream({"prompt_token_ids": IDS}, PARAMS):
        return time.perf_counter() - began
    raise AssertionError("no token")


def closed(llm: LLM) -> None:
    storage(llm).outside.close(60.0)


def storage(llm: LLM) -> Any:
    return llm.engine.core.executor._runner.storage  # type: ignore[attr-defined]


def sizes(folder: Path) -> set[int]:
    return {p.stat().st_size for p in folder.glob("*/*/*-*") if not p.name.startswith(".")}


class Pages:
    """Keys and values of each block as it was put, and as it was restored, by its number in the text."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.planes: Any = None
        self.put: dict[int, list[Any]] = {}
        self.restored: dict[int, list[Any]] = {}
        put, restore = BlockFiles.put, Restorer.restore

        def seen_put(files: BlockFiles, op: Any) -> None:
            self.put[int(op.path.rpartition("-")[2], 16)] = self._of(op.pages[0])
            put(files, op)

        def seen_restore(restorer: Restorer, blocks: Any) -> None:
            for _, page in blocks:
                for name in ("k", "v"):
                    self.planes[0][name][page : page + 2] = 0
            restore(restorer, blocks)
            self.restored |= {number: self._of(page) for number, page in blocks}

        monkeypatch.setattr(BlockFiles, "put", seen_put)
        monkeypatch.setattr(Restorer, "restore", seen_restore)

    def _of(self, page: int) -> list[Any]:
        return [self.planes[0][name][page : page + 2].copy() for name in ("k", "v")]  # of both layers


@pytest.mark.parametrize(
    ("ops", "kv_dtype"), [("ref", "float32"), ("native", "float32"), ("native", "bfloat16"), ("native", "wait")]
)
def test_B14_what_is_restored_are_the_same_keys_and_values(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ops: str, kv_dtype: str
) -> None:
    if ops == "native" and NATIVE is None:
        pytest.skip("needs the native kernels")
    policy, kv_dtype = ("wait", "float32") if kv_dtype == "wait" else ("cake", kv_dtype)
    settings = {"ops": ops, "kv_cache_dtype": kv_dtype, "kv_load_policy": policy}
    seen = Pages(monkeypatch)
    first = engine(model, tmp_path, **settings)
    seen.planes = storage(first).planes
    expected, cached = ask(first)
    assert cached == 0
    closed(first)
    again = engine(model, tmp_path, **settings)
    seen.planes = storage(again).planes
    got, cached = ask(again)
    if ops == "native":  # over the same weights
        part = storage(again).outside._restorer._forward.matrices["layers.1.k layers.1.v"]
        runner: Any = again.engine.core.executor._runner  # type: ignore[attr-defined]
        assert np.shares_memory(part.data, runner._forward.matrices["layers.1.q layers.1.k layers.1.v"].data)
    assert cached == 20 * 32 or policy == "cake"
    assert len(seen.restored) >= (20 if policy == "wait" else 1)
    exact = kv_dtype == "float32" or SHORT
    assert got == expected or not exact
    for number, block in seen.restored.items():
        for one, other in zip(block, seen.put[number], strict=True):
            if exact:
                assert np.array_equal(one, other), f"block {number}"  # within 1e-5, and more
            else:
                assert np.abs(widen(one) - widen(other)).max() <= 0.02 * np.abs(widen(other)).max()


def test_B14_files_are_half_of_keys_and_values_and_the_engine_says_so(model: str, tmp_path: Path) -> None:
    for form in ("plain", "hidden"):
        llm = engine(model, tmp_path / form, form)
        ask(llm)
        closed(llm)
    (plain,), (hidden,) = sizes(tmp_path / "plain"), sizes(tmp_path / "hidden")
    assert hidden - OVERHEAD == (plain - OVERHEAD) / 2 == 2 * 32 * 64 * 2
    index = llm.engine.core.kv.stored.tiers[-1].index
    llm.generate([{"prompt_token_ids": [5]}], PARAMS)  # a step that reports what was written
    assert index.num_bytes == 20 * hidden, "the books count what the files have"
    (said,) = [d for d in llm.engine.plan.decisions if d.name == "kv_offload_format"]
    assert "128 bytes in the store in place of the 256" in said.why
    assert "0.50 of them), and 384 in memory" in said.why


def test_B14_where_few_heads_have_keys_and_values_it_is_refused_with_both_sizes(tmp_path: Path) -> None:
    nano = str(bundled_model("nano"))  # 6 heads, 3 of keys and values
    with pytest.raises(ConfigError, match=r"would write 384 bytes .* keys and values are 384.*use plain"):
        engine(nano, tmp_path, kv_cache_dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"hidden writes float32, float16, bfloat16, and kv_cache_dtype is int8"):
        engine(nano, tmp_path, kv_cache_dtype="int8")
    assert not list(tmp_path.iterdir()), "nothing was begun"


def test_B14_behind_a_slow_link_it_is_sooner_than_keys_and_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that takes the time of the bytes; what computing takes is benchmarks.serving.hidden_store's to say."""
    monkeypatch.setitem(SHAPES, "wide", SHAPES["tiny-mha"] | {"intermediate_size": 8192})
    model, rate, read, link, took = str(make("wide", tmp_path)), 1e6, BlockFiles._read, threading.Lock(), {}

    def slow(files: BlockFiles, path: str, into: bytearray) -> bool:
        with link:
            time.sleep(len(into) / rate)
        return read(files, path, into)

    for form in ("plain", "hidden"):
        llm = engine(model, tmp_path / form, form, ops="ref", kv_cache_dtype="float32")
        first_token_s(llm)
        closed(llm)
    monkeypatch.setattr(BlockFiles, "_read", slow)
    for form in ("plain", "hidden"):
        took[form] = first_token_s(engine(model, tmp_path / form, form, ops="ref", kv_cache_dtype="float32"))
    assert took["hidden"] < 0.8 * took["plain"], took


@pytest.mark.parametrize("drafted", [False, True])
def test_B14_a_drawn_disk_of_hidden_states_changes_no_token_and_no_name_has_two_contents(drafted: bool) -> None:
    """All policies of loading: with `cake` and `split` a text is computed from its front and restored from its end."""
    logging.disable(logging.WARNING)
    try:
        truth: dict[str, bytes] = {}
        read = sum(run_seed("llama_mha", seed, truth, form="hidden", drafted=drafted) for seed in range(3))
        assert read > 10, "hardly anything was read"
    finally:
        logging.disable(logging.NOTSET)


class Tier:
    """Blocks come when they are told to."""

    def __init__(self) -> None:
        self.come: deque[dict[int, bool]] = deque()
        self.read: deque[tuple[int, float, float]] = deque()

    def get(self, op: GetOp) -> None:
        """Nothing comes by itself."""

    def ended(self, wait_s: float) -> dict[int, bool]:
        return self.come.popleft() if self.come else {}

    def took(self) -> tuple[int, float, float] | None:
        return self.read.popleft() if self.read else None


class Restored:
    def __init__(self) -> None:
        self.calls: list[list[tuple[int, int]]] = []

    def restore(self, blocks: list[tuple[int, int]]) -> None:
        self.calls.append(blocks)
        time.sleep(0.02)


def test_a_step_waits_for_a_bounded_part_and_nobody_hears_of_what_is_not_restored() -> None:
    tier, restorer = Tier(), Restored()
    outside = RestoredOutside({DISK: tier}, restorer, 128)  # type: ignore[dict-item, arg-type]
    for n in range(6):
        outside.order(GetOp(f"m/t/ab-{n + 10:x}", (3 * n,), 100, n))
    tier.come += [{n: n != 2 for n in range(6)} | {100: False}, {7: True}]
    assert outside.ended() == {2: False, 0: True, 1: True, 3: True, 4: True}
    assert restorer.calls == [[(10, 0), (11, 3), (13, 9), (14, 12)]], "512 tokens"
    assert outside.ended(0.02) == {7: True, 5: True, 100: False}, "a load is over with its last block"
    assert restorer.calls[1:] == [[(15, 15)]]
    assert outside.ended() == {}


def test_what_a_load_takes_is_the_longer_of_reading_and_restoring() -> None:
    tier = Tier()
    outside = RestoredOutside({DISK: tier}, Restored(), 32)  # type: ignore[dict-item, arg-type]
    outside.order(GetOp("m/t/ab-0", (0,), 100, 0))
    tier.come.append({0: True, 100: True})
    tier.read += [(0, 0.0, 0.5), (1000, 0.001, 0.0), (1000, 0.001, 0.0)]
    outside.ended()
    assert outside.took() == {DISK: (0, 0.0, 0.5)}, "of a first block nothing but when it came is known"
    assert 0.02 <= outside.took()[DISK][1] < 10
    assert outside.took() == {DISK: (1000, 0.001, 0.0)}, "each is told once"
    assert outside.took() == {}
