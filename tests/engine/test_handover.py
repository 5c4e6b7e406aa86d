"""H26, H30, B16: requests go from engine to engine of one server, with their keys and values."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import pytest

from penstock.base.errors import InputError
from penstock.core.request import Control
from penstock.core.sampling import SamplingParams, StructuredOutputs
from penstock.engine.core import EngineCore
from penstock.engine.handover import Moved
from penstock.engine.rescheduling import Rescheduling
from penstock.engine.stream import Stream
from penstock.launch.build import start
from penstock.launch.front import limits_from
from penstock.launch.kv_store import files_of
from penstock.route.rescheduling import Rescheduler
from penstock.runner.block_files import BlockFiles
from penstock.runner.shared_secret import make_secret
from penstock.text.validate import build_request
from tests.engine.beside import Beside, beside
from tests.engine.processes import nano, within
from tests.engine.test_process_link import params
from tests.engine.test_remote_blocks import port_of, serving

CALLS = ("prepare_store", "prepare_load", "load", "complete_load", "evict")
STORY = "Once upon a time there was a small dog who lived in a large house with a red door and a blue roof. " * 2
PROMPTS = [f"{number}. {STORY}" for number in range(6)]


def store(folder: Path) -> str:
    return f"disk:{folder / 'blocks'},200MiB"


def num_tokens(stream: Stream) -> int:
    return len(stream.output.outputs[0].token_ids) if not stream.ended else 1 << 20


async def calm(engine: Beside) -> list[object]:
    """What each is, where nobody moves."""
    streams = [engine.submit(f"calm{i}", PROMPTS[i], params(i)) for i in range(6)]
    return [output.outputs for output in await asyncio.gather(*(stream.result() for stream in streams))]


@within(60)
async def test_B16_a_prefix_of_one_engine_is_read_by_the_other(tmp_path: Path) -> None:
    async with beside(2, kv_offload=store(tmp_path), kv_load_policy="wait", block_size=16) as engine:
        first = await engine.complete("a", STORY + "One", params(0))
        await engine.client.handover.flush(engine.client.replicas[0])
        second = engine.submit("b", STORY + "One", params(0))
        assert second.replica.number == 1
        output = await second.result()
        assert output.num_cached_tokens == 16 * ((len(first.prompt_token_ids or []) - 1) // 16) > 0
        assert [o.token_ids for o in output.outputs] == [o.token_ids for o in first.outputs]


@within(60)
async def test_H26_a_flush_is_answered_when_blocks_are_there_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is slow: whoever is told too early finds nothing there."""

    def slow(site: str, path: Path) -> None:
        if site == "store-rename":
            time.sleep(0.05)

    monkeypatch.setattr(BlockFiles, "trouble", staticmethod(slow))
    async with beside(2, kv_offload=store(tmp_path), block_size=16) as engine:
        output = await engine.complete("a", STORY, params(0))
        await engine.client.handover.flush(engine.client.replicas[0])
        known = len(output.prompt_token_ids or []) + len(output.outputs[0].token_ids) - 1
        assert len([path for path, _ in files_of(tmp_path / "blocks") if "/." not in path]) == known // 16


@pytest.mark.parametrize("length", [50, 500, 1900])
def test_H30_downtime_is_a_step_whatever_the_length(length: int, tmp_path: Path) -> None:
    @within(60)
    async def run() -> None:
        wide = {"max_model_len": 2048, "num_gpu_blocks_override": 160, "ops": "auto", "block_size": 16}
        prompt = [3 + (7 * i) % 4000 for i in range(length)]
        greedy = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
        async with beside(2, kv_offload=store(tmp_path), kv_load_policy="wait", **wide) as engine:
            stream = engine.submit("r", prompt, greedy)
            source = stream.replica.number
            task = asyncio.create_task(stream.result())
            await engine.until(lambda: num_tokens(stream) >= 20)
            moved = await engine.client.handover.migrate("r", 1 - source)
            at = len(engine.steps)
            assert stream.replica.number == 1 - source
            got = (await task).outputs
            later = [told for told in engine.steps[at:] if told.number != source]
            first = next(n for n, told in enumerate(later) if any(out.token_ids for out in told.outputs))
            assert first == 0, "the first step of the other engine makes a token"
            assert later[0].num_tokens <= 2 * 16, "it computes what fills no block, however long the text is"
            assert moved.num_copied >= length // 16 * 16
            engine.client.control(Control(kind="reset_prefix_cache"))
            assert (await engine.complete("calm", prompt, greedy)).outputs == got

    run()


@within(60)
async def test_H26_prompts_on_one_engine_tokens_on_another_are_the_same(tmp_path: Path) -> None:
    async with beside(2, kv_offload=store(tmp_path), block_size=16, max_model_len=256) as engine:
        client = engine.client
        want = await calm(engine)
        client.control(Control(kind="reset_prefix_cache"))
        client.handover.set_roles({0: "prefill", 1: "decode"})
        engine.steps.clear()
        streams = [engine.submit(f"r{i}", PROMPTS[i], params(i)) for i in range(6)]
        # The last one wants log-probabilities of its prompt: it reads no cache, and stays where its tokens are made.
        assert [stream.replica.number for stream in streams] == [0, 0, 0, 0, 0, 1]
        outputs = await asyncio.gather(*(stream.result() for stream in streams))
        assert [output.outputs for output in outputs] == want
        made = {number: [len(out.token_ids) for told in engine.steps if told.number == number for out in told.outputs
                         if out.token_ids and out.request_id != "r5"] for number in (0, 1)}  # fmt: skip
        assert sum(made[0]) == 4 + 3, "one token of each sample, and no more"
        assert client.handover.num_passed == 5
        prompts = sum(len(output.prompt_token_ids or []) for output in outputs[:5])
        computed = sum(told.num_tokens for told in engine.steps if told.number == 0)
        assert computed <= prompts, "no token is made twice"
        lone = [told for told in engine.steps if told.number == 1 and told.num_tokens > 16 * 5 + 120]
        assert not lone, "what decodes computes no prompt"


@within(60)
async def test_H26_roles_change_live(tmp_path: Path) -> None:
    async with beside(3, kv_offload=store(tmp_path), block_size=16) as engine:
        client = engine.client
        want = await calm(engine)
        streams = []
        for n, roles in enumerate(({0: "prefill", 1: "decode"}, {0: "mixed", 1: "mixed"}, {0: "decode", 1: "prefill"})):
            streams += [engine.submit(f"{n}-{i}", PROMPTS[i], params(i)) for i in (2 * n, 2 * n + 1)]
            client.handover.set_roles(roles)
            await engine.until(lambda streams=streams: num_tokens(streams[-2]) >= 2)
        outputs = await asyncio.gather(*(stream.result() for stream in streams))
        assert [output.outputs for output in outputs] == want
        with pytest.raises(InputError, match="no engine would be left for tokens"):
            client.handover.set_roles({0: "prefill", 1: "prefill", 2: "prefill"})
        with pytest.raises(InputError, match="no engine 7"):
            client.handover.set_roles({7: "mixed"})
        assert [replica.role for replica in client.replicas] == ["decode", "prefill", "mixed"]


@within(60)
async def test_H30_requests_move_to_and_fro_unchanged(tmp_path: Path) -> None:
    """Greedy, drawn, several samples with log-probabilities and stop strings, penalties; moved whenever possible."""
    async with beside(2, kv_offload=store(tmp_path), block_size=16) as engine:
        want = await calm(engine)
        streams = [engine.submit(f"r{i}", PROMPTS[i], params(i)) for i in range(6)]
        outputs = asyncio.gather(*(stream.result() for stream in streams))

        async def move(stream: Stream) -> int:
            done = 0
            while not stream.ended:
                try:
                    await engine.client.handover.migrate(stream.request_id, 1 - stream.replica.number)
                    done += 1
                except InputError:  # it has ended
                    break
            return done

        moves = await asyncio.gather(*(move(stream) for stream in streams[:5]))
        assert [output.outputs for output in await outputs] == want
        assert engine.client.handover.num_moved == sum(moves) >= 3
        with pytest.raises(InputError, match="no request 'r0' is running"):
            await engine.client.handover.migrate("r0", 1)


@within(60)
async def test_H26_H30_grammars_and_drafts_go_along(tmp_path: Path) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    shape = StructuredOutputs(regex=r"[a-d]{3}( [a-d]{2}){30}")
    asked = [
        SamplingParams(seed=3, max_tokens=90, structured_outputs=shape),
        SamplingParams(temperature=0, max_tokens=90, ignore_eos=True, logprobs=2),
    ]
    async with beside(2, kv_offload=store(tmp_path), block_size=16, speculative_config=drafts) as engine:
        want = [(await engine.complete(f"calm{i}", PROMPTS[i], p)).outputs for i, p in enumerate(asked)]
        assert re.match(r"[a-d]{3} [a-d]{2} ", want[0][0].text)
        engine.client.handover.set_roles({0: "prefill", 1: "decode"})
        streams = [engine.submit(f"r{i}", PROMPTS[i], p) for i, p in enumerate(asked)]
        results = asyncio.gather(*(stream.result() for stream in streams))
        await engine.until(lambda: all(num_tokens(stream) >= 5 for stream in streams))
        assert [stream.replica.number for stream in streams] == [1, 1]
        moves = (engine.client.handover.migrate(stream.request_id, 0) for stream in streams)
        found = await asyncio.gather(*moves, return_exceptions=True)
        assert all(isinstance(one, Moved | InputError) for one in found), found  # an answer may have ended meanwhile
        assert any(isinstance(one, Moved) for one in found)
        assert [output.outputs for output in await results] == want


@within(60)
async def test_H30_what_cannot_be_moved_says_why(tmp_path: Path) -> None:
    async with beside(2, kv_offload=store(tmp_path), block_size=16) as engine:
        stream = engine.submit("r", PROMPTS[5], params(5))
        with pytest.raises(InputError, match="reads no cache"):
            await engine.client.handover.migrate("r", 1 - stream.replica.number)
        with pytest.raises(InputError, match="no such engine"):
            await engine.client.handover.migrate("r", 9)
        await stream.result()
    async with beside(2) as engine:
        stream = engine.submit("r", PROMPTS[0], params(0))
        with pytest.raises(InputError, match="no store in common"):
            await engine.client.handover.migrate("r", 1 - stream.replica.number)
        with pytest.raises(InputError, match="need a store"):
            engine.client.handover.set_roles({0: "prefill"})
        await stream.result()


@within(60)
async def test_H30_who_waits_for_memory_goes_where_there_is_some(tmp_path: Path) -> None:
    """All are given to one engine, whose memory is too small for them; the policy moves them while they run."""
    small = {"num_gpu_blocks_override": 16, "block_size": 16, "max_num_seqs": 8}
    async with beside(2, kv_offload=store(tmp_path), **small) as engine:
        client = engine.client
        want = await calm(engine)
        client.rescheduling = Rescheduling(client, Rescheduler(), every_s=0.01)
        client.control(Control(kind="reset_prefix_cache"))
        await engine.until(lambda: client.replicas[0].snapshot.kv_total == 16)
        limits = limits_from(client.info)
        streams = []
        for i in range(5):
            ids = engine.front.tokenizer.encode(PROMPTS[i])
            request = build_request(f"r{i}", ids, params(i), limits=limits, tokenizer=engine.front.tokenizer,
                                    seed=len(ids))  # fmt: skip
            streams.append(client.submit(request, params(i), engine=0))
        client.rescheduling.begin()
        outputs = await asyncio.gather(*(stream.result() for stream in streams))
        assert [output.outputs for output in outputs] == want[:5]
        assert client.handover.num_moved >= 1
        assert {stream.replica.number for stream in streams} == {0, 1}


@within(60)
async def test_B16_one_api_for_host_disk_and_another_process_and_reuse_across_a_split(tmp_path: Path) -> None:
    """A folder and a server of blocks: what the engine for prompts has in its cache is not computed again, nor is what
    only the other one, or neither, has in memory."""
    shared = tmp_path / "shared"
    assert make_secret(shared)
    with serving(shared) as server:
        port = port_of(server)
        for offload in (f"remote:127.0.0.1:{port}", f"{store(tmp_path)} remote:127.0.0.1:{port}"):
            settings = {"kv_offload_secret_file": str(shared), "block_size": 16, "kv_load_policy": "wait"}
            async with beside(2, kv_offload=offload, enable_hierarchical_cache=True, swap_space=0.1, **settings) as one:
                for tier in (tier for core in one.cores.values() for tier in tiers_of(core)):
                    assert all(callable(getattr(tier, name)) for name in CALLS), tier
                one.client.handover.set_roles({0: "prefill", 1: "decode"})
                first = await one.complete("a", PROMPTS[1], params(0))
                again = await one.complete("b", PROMPTS[1], params(0))
                assert again.outputs == first.outputs
                assert again.num_cached_tokens == 16 * ((len(first.prompt_token_ids or []) - 1) // 16) > 0
                assert one.client.handover.num_passed == 2
                told = [t for t in one.steps if t.number == 1 and t.num_tokens]
                assert max(t.num_tokens for t in told) <= 16, "the engine for tokens computes no prompt"


def tiers_of(core: EngineCore) -> list[object]:
    assert core.kv.stored is not None
    return [core.kv.swaps.tier, *core.kv.stored.tiers]


def test_an_engine_that_may_get_company_looks_for_what_others_write(tmp_path: Path) -> None:
    for most in (None, 2):
        engine = start(nano(kv_offload=f"disk:{tmp_path},1GiB", max_replicas=most), serving=True)
        assert engine.core.kv.stored is not None
        assert (engine.core.kv.stored.look is not None) == (most is not None)
        engine.core.executor.close()
