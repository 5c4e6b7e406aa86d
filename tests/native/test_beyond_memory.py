"""Weights that memory does not hold (rows B20, B23, A24): layers come from the disk as they are needed."""

from __future__ import annotations

import ctypes
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock import LLM, SamplingParams
from penstock.backends.native.forward import packed_one_by_one
from penstock.backends.native.packed import PackedWeights
from penstock.base.errors import ConfigError, EngineError
from penstock.core.held_weights import WeightMemory
from penstock.core.matrix_format import NONE
from penstock.core.model_spec import ModelSpec
from penstock.core.request import Request
from penstock.engine.core import EngineCore
from penstock.engine.record import Recorder, load, replay
from penstock.model.graph import Graph
from penstock.ops.native import direct_file, resident
from penstock.ops.native.library import best_library
from penstock.ops.native.packed_file import PackedStore
from penstock.ops.native.program import Pool
from penstock.ops.native.resident import ResidentWeights
from penstock.plan.offload import window_bytes
from penstock.sched.drafts.fixed import FixedDrafts
from tests import specs
from tests.engine.harness import Knobs, disturbed, plain_core, real_engine, request, run
from tests.engine.test_laws_models import CONTROLS, draw_knobs, workload
from tests.native.running import pytestmark_native
from tests.native.test_laws import expected
from tests.native.test_model import weights_as
from tests.sampled import draws

pytestmark = pytestmark_native
KEY = "0" * 64
LEAST = 1 << 62
"""Asks for the smallest limit there is."""


def packed(folder: Path, limit: int | None = None, prefetch: int = 1) -> PackedWeights:
    """Weights in a folder, packed there if they are not yet, of which `limit` bytes may be in memory."""
    library = best_library()

    def runs(graph: Graph) -> Any:
        names, matrices = packed_one_by_one(graph, Pool(library, 1), NONE, 8)
        return names, 0, matrices

    return PackedWeights(PackedStore(folder), KEY, ("embed",), memory=WeightMemory(limit, prefetch), packed=runs)


def streaming(
    folder: Path, spec: ModelSpec, weights: Any, knobs: Knobs, *, prefetch: int = 1, more: int = 0, **named: Any
) -> tuple[EngineCore, ResidentWeights]:
    """An engine with the least memory for weights, and `more` layers."""
    real_engine(spec, weights, knobs, packed=packed(folder))
    whole = PackedStore(folder).open(KEY, None, prefetch)
    assert whole is not None
    sizes = [s.num_bytes for s in whole.segments]
    fixed = next(s.num_bytes for s in whole.segments if s.at == 0)
    limit = fixed + window_bytes(sizes[1:], prefetch) + more * max(sizes[1:])
    core = real_engine(spec, weights, knobs, packed=packed(folder, limit, prefetch), **named)
    found = resident_of(core)
    assert found.most_bytes <= limit
    return core, found


def resident_of(core: EngineCore) -> ResidentWeights:
    runner: Any = core.executor.runner  # type: ignore[attr-defined]
    found: ResidentWeights = runner._forward._course.resident
    return found


def deep(times: int = 3) -> tuple[ModelSpec, dict[str, Any]]:
    """One of the small models, with its layers several times over."""
    spec, weights = specs.make("llama_gqa")
    num = len(spec.layers)
    more = {
        f"layers.{int(key.split('.')[1]) + num * i}.{key.split('.', 2)[2]}": array
        for key, array in weights.items()
        if key.startswith("layers.")
        for i in range(times)
    }
    return msgspec.structs.replace(spec, layers=spec.layers * times), {**weights, **more}


def load_of(spec: ModelSpec, num: int, seed: int = 1, max_tokens: int = 10) -> list[Request]:
    rng = random.Random(seed)
    return [
        request(
            [rng.randrange(3, spec.vocab_size) for _ in range(rng.randrange(4, 30))], request_id=str(i),
            max_tokens=max_tokens,
        )
        for i in range(num)
    ]  # fmt: skip


SMALL = Knobs(ops="native", num_blocks=60, budget=24, max_num_seqs=8, prefix_cache="none")


# -- the same tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["experts"])
def test_B20_layers_from_the_disk_obey_the_engines_laws(name: str, tmp_path: Path) -> None:
    """Cut into chunks, in company, preempted, forked, aborted: the tokens of texts that ran alone, in memory."""
    spec, weights = weights_as(name, "float32")
    tokens, beams = expected(name, "float32", "float32")
    rng = random.Random(f"beyond-{name}")
    for _ in range(draws(1, 4)):
        knobs = draw_knobs(rng)
        knobs.ops, knobs.window_blocks, knobs.budget = "native", 0, max(8, knobs.budget)
        knobs.num_blocks = max(knobs.num_blocks, 64 // knobs.block_size + 1)
        core, found = streaming(tmp_path, spec, weights, knobs, prefetch=0)
        assert found.streams
        collector = disturbed(core, workload(spec.vocab_size), rng, CONTROLS, note=knobs)
        for request_id, samples in tokens.items():
            got = collector.requests[request_id]
            assert [(got.tokens[i], got.reasons[i]) for i in range(len(samples))] == samples, (request_id, knobs)
        assert [(b[0], b[2]) for b in collector.requests["beam"].beams] == [(b[0], b[2]) for b in beams], knobs
        assert found.num_read > 3 * found.num_bytes, "nothing came twice"


@pytest.mark.parametrize(("prefetch", "more"), [(0, 0), (1, 0), (3, 0), (0, 2), (1, 2)])
def test_B20_tokens_are_those_of_weights_in_memory(prefetch: int, more: int, tmp_path: Path) -> None:
    spec, weights = deep()
    wanted = {k: c.tokens for k, c in run(real_engine(spec, weights, SMALL), load_of(spec, 12)).items()}
    core, found = streaming(tmp_path, spec, weights, SMALL, prefetch=prefetch, more=more)
    assert sum(s.stays for s in found.segments) == 1 + more
    assert {k: c.tokens for k, c in run(core, load_of(spec, 12)).items()} == wanted


@pytest.mark.parametrize("depth", [1, 2])
def test_a_run_that_streams_replays(tmp_path: Path, depth: int) -> None:
    spec, weights = deep()
    knobs = Knobs(**{**vars(SMALL), "depth": depth})
    core, _ = streaming(tmp_path / "weights", spec, weights, knobs)
    core.recorder = Recorder()
    emitted, todo = [], load_of(spec, 8)
    while todo or core.has_work:
        for item in todo[:2]:
            core.add(item)
        todo = todo[2:]
        emitted += core.step()
    core.recorder.save(tmp_path / "run.log")
    assert replay(load(tmp_path / "run.log"), lambda e, c: plain_core(spec, knobs, e, c), depth=depth) == emitted


# -- the memory --------------------------------------------------------------------------------------------------------


def pages_in_memory(found: ResidentWeights) -> int:
    """Bytes of the region that the system has memory for."""
    libc, page = ctypes.CDLL(None, use_errno=True), os.sysconf("SC_PAGESIZE")
    flags = (ctypes.c_ubyte * (found.num_bytes // page))()
    assert libc.mincore(ctypes.c_void_p(found.address), ctypes.c_size_t(found.num_bytes), flags) == 0
    return page * sum(flag & 1 for flag in flags)


@pytest.mark.parametrize(("prefetch", "more"), [(0, 0), (1, 0), (2, 0), (1, 2)])
def test_B20_one_layer_and_those_that_come_are_in_memory(prefetch: int, more: int, tmp_path: Path) -> None:
    """Counted by the system in front of every layer of every step, when all that was asked for has come."""
    spec, weights = deep()
    core, found = streaming(tmp_path, spec, weights, SMALL, prefetch=prefetch, more=more)
    peaks: list[int] = []
    runner: Any = core.executor.runner  # type: ignore[attr-defined]

    def count(n: int) -> None:
        for segment in found.segments:
            for _, parts in segment._coming or ():
                for part in parts:
                    part.result()
        peaks.append(pages_in_memory(found))

    runner._forward.pause(count)
    run(core, load_of(spec, 6))
    layers = [s.num_bytes for s in found.segments[1:]]
    assert len(set(layers)) == 1
    assert max(peaks) == found.segments[0].num_bytes + (1 + prefetch + more) * layers[0] == found.most_bytes
    assert found.num_bytes > found.most_bytes


def test_B20_bytes_are_shared_by_all_rows_of_a_step(tmp_path: Path) -> None:
    """Eight sequences together read what one reads alone."""
    spec, weights = deep()
    read = {}
    for num in (1, 8):
        core, found = streaming(tmp_path, spec, weights, SMALL, more=1)
        todo = [request([5, 6, 7 + i], request_id=str(i), max_tokens=20) for i in range(num)]
        run(core, todo)
        read[num] = found.num_read / (20 * num)
    assert read[8] == pytest.approx(read[1] / 8, rel=0.1)


def test_who_gives_too_little_memory_hears_how_much_it_takes(tmp_path: Path) -> None:
    spec, weights = deep()
    real_engine(spec, weights, SMALL, packed=packed(tmp_path))
    with pytest.raises(ConfigError, match="give at least") as error:
        real_engine(spec, weights, SMALL, packed=packed(tmp_path, 1))
    least = int(str(error.value).split("give at least ")[1].split(",")[0])
    assert resident_of(real_engine(spec, weights, SMALL, packed=packed(tmp_path, least))).most_bytes == least
    with pytest.raises(ConfigError):
        real_engine(spec, weights, SMALL, packed=packed(tmp_path, least - 1))


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def emitted_until(core: EngineCore, todo: Sequence[Request], after: int, then: Callable[[], None]) -> dict[str, Any]:
    """Tokens by request, until the engine ends with an EngineError; `then` is called behind step `after`."""
    for r in todo:
        core.add(r)
    got: dict[str, list[int]] = {}

    def go_on() -> None:
        for step in range(10_000):
            if step == after:
                then()
            for event in core.step():
                if (token := getattr(event, "token_id", None)) is not None:
                    got.setdefault(event.request_id, []).append(token)

    with pytest.raises(EngineError) as error:
        go_on()
    return {"said": str(error.value), "tokens": got}


def changed(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 16]))


def shortened(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(("harm", "says"), [(changed, "damaged"), (shortened, "shorter")])
def test_a_file_that_changes_ends_the_run_and_is_packed_anew(
    harm: Callable[[Path], None], says: str, tmp_path: Path
) -> None:
    spec, weights = deep()
    wanted = {k: c.tokens[0] for k, c in run(real_engine(spec, weights, SMALL), load_of(spec, 6)).items()}
    core, _ = streaming(tmp_path, spec, weights, SMALL)
    path = next(tmp_path.glob("*.pst"))
    found = emitted_until(core, load_of(spec, 6), 5, lambda: harm(path))
    assert says in found["said"]
    assert "packed anew" in found["said"]
    assert "\n" not in found["said"]
    for request_id, tokens in found["tokens"].items():
        assert tokens == wanted[request_id][: len(tokens)], "a wrong token"
    assert not path.exists()
    core, _ = streaming(tmp_path, spec, weights, SMALL)
    assert {k: c.tokens[0] for k, c in run(core, load_of(spec, 6)).items()} == wanted


def test_a_disk_that_fails_is_told_in_a_sentence_and_may_get_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, weights = deep()
    core, _ = streaming(tmp_path, spec, weights, SMALL)
    real = os.preadv

    def broken(*args: Any) -> int:
        raise OSError(5, "Input/output error")

    found = emitted_until(core, load_of(spec, 6), 5, lambda: monkeypatch.setattr(os, "preadv", broken))
    assert "cannot be read" in found["said"]
    assert "Input/output error" in found["said"]
    assert next(tmp_path.glob("*.pst")).exists(), "nothing is wrong with the file"
    monkeypatch.setattr(os, "preadv", real)
    core, _ = streaming(tmp_path, spec, weights, SMALL)
    wanted = {k: c.tokens for k, c in run(real_engine(spec, weights, SMALL), load_of(spec, 6)).items()}
    assert {k: c.tokens for k, c in run(core, load_of(spec, 6)).items()} == wanted


def test_without_reading_past_the_cache_it_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, weights = deep()
    wanted = {k: c.tokens for k, c in run(real_engine(spec, weights, SMALL), load_of(spec, 4)).items()}
    monkeypatch.setattr(direct_file, "_direct", lambda fd: None)
    core, _ = streaming(tmp_path, spec, weights, SMALL)
    assert {k: c.tokens for k, c in run(core, load_of(spec, 4)).items()} == wanted


# -- a model that loads while it runs ----------------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The last bytes of a file are not read before this is set."""
    opened, real = threading.Event(), resident._read

    def read(file: Any, offset: int, part: Any) -> bytes:
        if offset + len(part) == os.fstat(file.fd).st_size:
            assert opened.wait(60), "nobody ran while the last bytes were missing"
        return real(file, offset, part)

    monkeypatch.setattr(resident, "_read", read)
    yield opened
    opened.set()


def test_A24_layers_compute_before_the_last_ones_are_there(tmp_path: Path, gate: threading.Event) -> None:
    """The first step begins while the last layer is not read, which it is only once the layer before has run."""
    spec, weights = deep()
    gate.set()
    wanted = {k: c.tokens for k, c in run(real_engine(spec, weights, SMALL), load_of(spec, 4)).items()}
    real_engine(spec, weights, SMALL, packed=packed(tmp_path))
    gate.clear()
    core = real_engine(spec, weights, SMALL, packed=packed(tmp_path))
    runner: Any = core.executor.runner  # type: ignore[attr-defined]
    enter, reached = runner._forward._course.enter, []

    def watch(k: int) -> bool:
        reached.append(k)
        if k == len(spec.layers):  # the layer before the last has run
            gate.set()
        found: bool = enter(k)
        return found

    runner._forward._course.enter = watch
    assert {k: c.tokens for k, c in run(core, load_of(spec, 4)).items()} == wanted
    assert reached == list(range(len(spec.layers) + 2)), "once all is there nobody asks"
    assert runner._forward._course is None


# -- drafts ------------------------------------------------------------------------------------------------------------


def test_B23_bytes_per_token_fall_by_the_mean_accepted_length(tmp_path: Path) -> None:
    """Counted: a pass over the weights verifies all drafts, so a token costs a pass divided by tokens of a step."""
    spec, weights = deep()
    found = {}
    rng = random.Random(37)
    prompt = [rng.randrange(3, spec.vocab_size) for _ in range(5)]  # one whose answer repeats itself
    for speculation in (None, {"method": "ngram", "num_speculative_tokens": 4}):
        drafts = None if speculation is None else FixedDrafts(4, 63)
        core, weights_of = streaming(tmp_path, spec, weights, SMALL, speculation=speculation, drafts=drafts)
        todo = [request(prompt, request_id="0", max_tokens=48)]
        got = run(core, todo)["0"].tokens[0]
        found[speculation is None] = got, weights_of.num_read / len(got), core.stats.num_steps / len(got)
    plain, drafted = found[True], found[False]
    assert drafted[0] == plain[0]
    accepted = plain[2] / drafted[2]
    assert accepted > 1.25, "the model does not repeat itself"
    assert plain[1] / drafted[1] == pytest.approx(accepted, rel=0.1)


def test_the_metrics_count_what_was_read(tmp_path: Path) -> None:
    spec, weights = deep()
    core, found = streaming(tmp_path, spec, weights, SMALL)
    run(core, load_of(spec, 3))
    assert core.stats.num_weight_bytes == found.num_read > 3 * found.num_bytes
    assert 0.0 < core.stats.weight_wait_s == pytest.approx(found.stalled_s)
    plain = real_engine(spec, weights, SMALL)
    run(plain, load_of(spec, 3))
    assert plain.stats.num_weight_bytes == 0


def test_a_selector_that_needs_other_matrices_does_not_find_those_of_the_plain_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    monkeypatch.setattr("penstock.backends.native.backend.SMALL_BYTES", 0)
    for more in ({}, {"kv_selector": "infinigen", "kv_budget": "50%"}, {}):
        llm = LLM("pico", max_model_len=64, num_gpu_blocks_override=8, **more)
        assert llm.generate(["Once"], SamplingParams(max_tokens=2))[0].outputs[0].token_ids
    assert len(list(tmp_path.glob("weights/*.pst"))) == 1
    with pytest.raises(ConfigError, match="another kv_selector"):
        LLM("pico", max_model_len=64, kv_selector="infinigen", kv_budget="50%", weight_memory_bytes=700_000)
    with pytest.raises(ConfigError, match="use native"):
        LLM("pico", max_model_len=64, ops="ref", weight_memory_bytes=700_000)
    with pytest.raises(ConfigError, match="leave packed_weights away"):
        LLM("pico", max_model_len=64, packed_weights="mapped", weight_memory_bytes=700_000)
