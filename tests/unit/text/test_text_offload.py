"""Long encodings in threads: exact results, a free event loop, lines that share, bounded queues, cancellation."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from penstock.base.errors import InputError
from penstock.text.encoding import encode_steps, one_step
from penstock.text.offload import Crowded, Dropped, Offload
from tests.unit.text import text_vocabularies as vocabularies

TEXT = "The quick brown fox jumps over the lazy dog, 123 times. Größe 日本語 🦙\n" * 6_000


def run(scenario, **options):
    async def whole():
        offload = Offload(**options)
        try:
            return await scenario(offload)
        finally:
            offload.close()

    return asyncio.run(whole())


def encode(offload, tokenizer, text, special=True):
    return offload.run(len(text), encode_steps(tokenizer, text, 1 << 30, special))


class Steps:
    """A job of steps that a test lets go one by one; `log` gets each step's name as it begins."""

    def __init__(self, name, sizes, log):
        self.name, self.sizes, self.log = name, sizes, log
        self.go = threading.Semaphore(0)

    def __call__(self):
        for size in self.sizes:
            yield size
            self.log.append(self.name)
            assert self.go.acquire(timeout=20)
        return self.name


async def until(told):
    for _ in range(4000):
        if told():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came to it")


def test_the_loop_stays_free_while_megabytes_are_encoded():
    tokenizer = vocabularies.gpt2()
    started = time.perf_counter()
    expected = tokenizer.encode(TEXT)
    blocking = time.perf_counter() - started

    async def scenario(offload):
        task = asyncio.ensure_future(encode(offload, tokenizer, TEXT))
        longest, last = 0.0, time.perf_counter()
        while not task.done():
            await asyncio.sleep(0.002)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        return await task, longest

    got, longest = run(scenario)
    assert got == expected
    assert longest < blocking / 2


@pytest.mark.parametrize("vocabulary", ["gpt2", "stories512", "llama2"])
def test_results_are_those_of_the_call_itself(vocabulary):
    tokenizer = getattr(vocabularies, vocabulary)()
    texts = ["", "a", "Hello <|endoftext|> <s>", TEXT[:5000], TEXT[:9000] + "\ue000", "x" * 20_000, TEXT[:200_000]]

    async def scenario(offload):
        return await asyncio.gather(*(encode(offload, tokenizer, t, s) for t in texts for s in (True, False)))

    assert run(scenario, inline=4) == [tokenizer.encode(t, s) for t in texts for s in (True, False)]


def test_short_work_is_done_at_once_and_long_work_in_a_thread():
    async def scenario(offload):
        return [await offload.run(size, one_step(size, threading.current_thread)) for size in (10, 11)]

    short, long = run(scenario, inline=10)
    assert short is threading.main_thread()
    assert long.name == "penstock-encoded"


def test_errors_come_back_and_free_their_place():
    async def scenario(offload):
        with pytest.raises(InputError, match="lone surrogate"):
            await encode(offload, vocabularies.gpt2(), "a\ud800" * 10)
        return offload.queued

    assert run(scenario, inline=1) == 0


def test_lines_take_turns_however_much_one_of_them_wants():
    log = []

    async def scenario(offload):
        flood = [Steps(f"flood{i}", [100] * 4, log) for i in range(3)]
        tasks = [asyncio.ensure_future(offload.run(400, job(), line="flood")) for job in flood]
        await until(lambda: log)
        good = Steps("good", [100, 100], log)
        tasks.append(asyncio.ensure_future(offload.run(200, good(), line="good")))
        await asyncio.sleep(0)
        for job in (*flood, good):
            job.go.release(10)
        assert await asyncio.gather(*tasks) == ["flood0", "flood1", "flood2", "good"]

    run(scenario, num_threads=1, inline=0)
    assert "good" in log[1:3]
    assert log[1:5].count("good") == 2
    assert {*log[:6]} >= {"flood0", "flood1", "flood2"}, "within a line, jobs take turns too"


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_lines_get_what_their_weights_say(weight):
    log = []

    async def scenario(offload):
        jobs = [Steps("a", [10] * 80, log), Steps("b", [10] * 80, log), Steps("first", [1], log)]
        tasks = [asyncio.ensure_future(offload.run(1, jobs[2]()))]
        await until(lambda: log)
        tasks += [asyncio.ensure_future(offload.run(800, jobs[0](), line="a", weight=weight))]
        tasks += [asyncio.ensure_future(offload.run(800, jobs[1](), line="b"))]
        await asyncio.sleep(0)
        for job in jobs:
            job.go.release(100)
        await asyncio.gather(*tasks)

    run(scenario, num_threads=1, inline=0)
    assert abs(log[1:61].count("a") - 60 * weight / (1 + weight)) <= 2


def test_a_line_that_comes_again_and_again_gets_no_more_than_others():
    """It is empty between its jobs, but what it has used is not forgotten."""
    log = []

    async def scenario(offload):
        steady = Steps("steady", [100] * 31, log)
        tasks = [asyncio.ensure_future(offload.run(3100, steady(), line="steady"))]
        await until(lambda: log)
        for i in range(30):
            if log.count("again") == len(tasks) - 1:
                await asyncio.gather(*tasks[1:])
                again = Steps("again", [1000], log)
                again.go.release(1)
                tasks.append(asyncio.ensure_future(offload.run(1000, again(), line="again")))
                await asyncio.sleep(0)
            steady.go.release(1)
            await until(lambda: log.count("steady") > i + 1)  # noqa: B023
        steady.go.release(1)
        await asyncio.gather(*tasks)

    run(scenario, num_threads=1, inline=0)
    assert 2 <= log[: len(log) - log[::-1].index("steady")].count("again") <= 4


def test_a_thread_is_kept_free_of_long_steps():
    log = []

    async def scenario(offload):
        long = [Steps(f"long{i}", [1000], log) for i in range(3)]
        tasks = [asyncio.ensure_future(offload.run(1000, job(), line=job.name)) for job in long]
        await until(lambda: log)
        await asyncio.sleep(0.05)
        assert log == ["long0"]
        short = Steps("short", [10], log)
        short.go.release(1)
        assert await offload.run(10, short(), line="other") == "short"
        for job in long:
            job.go.release(1)
        await asyncio.gather(*tasks)

    run(scenario, num_threads=2, inline=0, short=100)
    assert log == ["long0", "short", "long1", "long2"]


def test_cancelled_work_ends_before_its_next_step_and_frees_its_place_at_once():
    log = []

    async def scenario(offload):
        jobs = [Steps(name, [50, 50], log) for name in "abc"]
        tasks = [asyncio.ensure_future(offload.run(100, job())) for job in jobs]
        await until(lambda: log)
        assert (offload.queued, offload.num_jobs) == (300, 3)
        tasks[1].cancel()
        tasks[0].cancel()  # a step of it is under way
        await asyncio.gather(*tasks[:2], return_exceptions=True)
        assert offload.queued == 100
        for job in jobs:
            job.go.release(2)
        assert await tasks[2] == "c"
        await until(lambda: offload.num_jobs == 0)
        return offload.queued

    assert run(scenario, num_threads=1, inline=0) == 0
    assert log == ["a", "c", "c"]


def test_queued_characters_are_bounded_in_all_and_for_each_line():
    log = []

    async def scenario(offload):
        def ask(size, line):
            job = Steps(line, [size], log)
            jobs.append(job)
            return asyncio.ensure_future(offload.run(size, job(), line=line))

        jobs = []
        tasks = [ask(40, "a")]
        await asyncio.sleep(0)
        with pytest.raises(Crowded, match="40 characters are waiting to be encoded"):
            await ask(11, "a")  # half of all is the most of a line
        with pytest.raises(InputError, match="51 characters is too long; 50 are possible"):
            await ask(51, "b")
        tasks += [ask(50, "b")]
        await asyncio.sleep(0)
        with pytest.raises(Crowded):
            await ask(40, "c")
        tasks += [ask(33, "c")]  # its share
        await asyncio.sleep(0)
        assert await offload.run(5, one_step(5, str, 5)) == "5"  # short work needs no place
        for job in jobs:
            job.go.release(1)
        await asyncio.gather(*tasks)
        assert offload.num_refused == 2
        return offload.queued

    assert run(scenario, inline=10, max_queued=100) == 0


def test_waiting_is_told():
    waits = []

    async def scenario(offload):
        await offload.run(1, one_step(1, str))
        await asyncio.sleep(0.01)

    run(scenario, inline=0, on_begun=waits.append)
    assert len(waits) == 1
    assert 0 <= waits[0] < 20


def test_closing_drops_what_waits_and_ends_what_runs_at_its_next_step():
    log = []

    async def scenario():
        offload = Offload(num_threads=1, inline=0)
        job = Steps("first", [1, 1], log)
        first = asyncio.ensure_future(offload.run(2, job()))
        second = asyncio.ensure_future(offload.run(1, one_step(1, log.append, "second")))
        await until(lambda: log)
        threading.Timer(0.05, job.go.release, [2]).start()
        offload.close()
        for task in (first, second):
            with pytest.raises(Dropped):
                await task
        with pytest.raises(Dropped):
            await offload.run(1, one_step(1, str))
        assert offload.queued == 0

    asyncio.run(scenario())
    assert log == ["first"]
