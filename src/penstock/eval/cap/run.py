"""Measure a whole board: one engine at a time, the same questions and prompts for all.

Quality first, each configuration once; then speed, all configurations in turn, in rounds (`eval.cap.rounds`), so that a
machine that grows slower does so for everybody. An engine is gone before the next one is started.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from penstock import __version__
from penstock.base.errors import InputError
from penstock.config import EngineConfig
from penstock.eval.cap.conditions import SHORTEST, Conditions, grid, with_lengths
from penstock.eval.cap.context import Scores, ask, context_of
from penstock.eval.cap.fit import Seat
from penstock.eval.cap.labels import label_of
from penstock.eval.cap.report import FORMAT, Report, Row, measures_of, performance_of, score_of
from penstock.eval.cap.rounds import run_rounds
from penstock.eval.cap.speed import Speed, draw, time_round
from penstock.eval.cap.text import Reading, divergence, how_read, read, selecting
from penstock.eval.cap.verdict import verdict
from penstock.eval.result import TaskResult
from penstock.eval.run import Prepared, prepare, reader_of, run
from penstock.launch.llm import LLM
from penstock.plan.probe import probe

Told = Callable[[str], None]
"""What begins now, for people."""


@dataclass
class _Found:
    tasks: list[TaskResult] = field(default_factory=list)
    text: Reading | None = None
    scores: Scores | None = None
    speed: Speed = field(default_factory=Speed)


@dataclass(frozen=True)
class _Asked:
    """The same for all. `lengths`: the grid of C."""

    tasks: list[Prepared]
    text: Prepared
    context: Prepared
    lengths: tuple[int, ...]


def measure_board(
    seats: Sequence[Seat], conditions: Conditions, *, command: str = "", told: Told = lambda line: None
) -> Report:
    """`seats`: of `eval.cap.fit`, the plain one first. Raises InputError, EngineError."""
    how: dict[str, Any] = {
        "seed": conditions.seed, "limit": conditions.limit, "chat": conditions.chat, "bos": conditions.bos,
    }  # fmt: skip
    found = [_Found() for _ in seats]
    asked: _Asked | None = None
    for seat, one in zip(seats, found, strict=True):
        name = seat.configuration.name
        told(f"{name}: tasks and text")
        asked = _quality(seat, one, asked, seats, conditions, how)
        told(f"{name}: context")
        _in_engine(seat.limited(), partial(_context, seat=seat, one=one, asked=asked, how=how))
    assert asked is not None, "a board has at least the plain configuration"

    def timed(i: int, number: int) -> None:
        told(f"{seats[i].configuration.name}: speed, round {number + 1}")
        _in_engine(seats[i].limited(), partial(_speed, one=found[i], number=number, conditions=conditions))

    rounds = run_rounds([one.speed for one in found], conditions, timed)
    rows = [_row(seat, one, found[0], seats[0], asked, conditions) for seat, one in zip(seats, found, strict=True)]
    machine = probe()
    return Report(
        penstock_cap=FORMAT, version=__version__, model=str(seats[0].config.model.model), command=command,
        machine={"cores": machine.num_cores, "memory_bytes": machine.memory_bytes, "arch": machine.arch,
                 "flags": sorted(f for f in machine.flags if f.startswith(("avx", "amx", "sve", "neon")))},
        conditions=_plain(conditions, asked), lengths=list(asked.lengths), kv_memory=seats[0].kv_memory, rows=rows,
        rounds=rounds,
    )  # fmt: skip


def _in_engine(config: EngineConfig, do: Callable[[LLM], None]) -> None:
    """Start an engine, use it, and let go of it and its memory."""
    llm = LLM.from_config(config)
    try:
        do(llm)
    finally:
        llm.engine.core.executor.close()
        del llm
        gc.collect()  # engines have cycles: without this two of them would be there at once


def _quality(
    seat: Seat, one: _Found, asked: _Asked | None, seats: Sequence[Seat], conditions: Conditions, how: dict[str, Any]
) -> _Asked:
    """Tasks and text. A selector that must select within the text gets an engine of its own for it."""
    made: list[_Asked] = [] if asked is None else [asked]
    reading = selecting(seat.config, conditions.prompt_interval)

    def tasks(llm: LLM) -> None:
        if not made:
            made.append(_prepare(llm, seats, conditions, how))
        one.tasks = run(llm, made[0].tasks, **how).tasks if made[0].tasks else []
        if reading == seat.config:
            one.text = read(llm, made[0].text, conditions.top)

    def text(llm: LLM) -> None:
        one.text = read(llm, made[0].text, conditions.top)

    _in_engine(seat.config, tasks)
    if reading != seat.config:
        _in_engine(reading, text)
    return made[0]


def _prepare(llm: LLM, seats: Sequence[Seat], conditions: Conditions, how: dict[str, Any]) -> _Asked:
    """Examples that every configuration can be asked; those of C may be longer than some can hold."""
    shortest, longest = (of(seat.max_model_len for seat in seats) for of in (min, max))
    lengths = conditions.lengths or grid(min(SHORTEST, shortest), longest)
    context = with_lengths(conditions.context, lengths)
    if context.task.kind != "generate":
        raise InputError(f"--context-task {context.spec!r} does not generate; use needle or lookup", param="context")
    prepared = prepare(llm, [*conditions.tasks, conditions.text], room=shortest, **how)
    (of_context,) = prepare(llm, [context], room=longest, **how)
    return _Asked(prepared[:-1], prepared[-1], of_context, lengths)


def _context(llm: LLM, seat: Seat, one: _Found, asked: _Asked, how: dict[str, Any]) -> None:
    one.scores = ask(llm, asked.context, seat, asked.lengths, how)


def _speed(llm: LLM, one: _Found, number: int, conditions: Conditions) -> None:
    time_round(llm, draw(reader_of(llm, bos=conditions.bos), conditions, number), conditions, one.speed)


def _row(seat: Seat, one: _Found, plain: _Found, first: Seat, asked: _Asked, conditions: Conditions) -> Row:
    assert one.text is not None
    assert plain.text is not None
    assert one.scores is not None
    assert plain.scores is not None
    args = asked.context, asked.lengths, conditions.threshold
    context = context_of(one.scores, plain.scores, seat, *args)
    base = context_of(plain.scores, plain.scores, first, *args)
    score, interval = score_of(one.tasks) if one.tasks else (0.0, None)
    low, high = interval or (None, None)
    measures, judged, kl = [], None, None
    if one is not plain:
        kl = divergence(plain.text, one.text, how_read(seat.config, conditions))
        measures = measures_of(
            (context, one.scores, one.tasks, one.text.task, one.speed),
            (base, plain.scores, plain.tasks, plain.text.task, plain.speed), asked.lengths, conditions,
        )  # fmt: skip
        judged = verdict(label_of(seat.configuration.settings), measures)
    return Row(
        name=seat.configuration.name, settings=dict(seat.configuration.settings), context=context, score=score,
        score_low=low, score_high=high, tasks=one.tasks, text=one.text.task, kl=kl,
        performance=performance_of(one.speed), measures=measures, verdict=judged,
    )  # fmt: skip


def _plain(c: Conditions, asked: _Asked) -> dict[str, Any]:
    return {
        "tasks": [t.spec for t in c.tasks], "context task": asked.context.asked.spec, "text": c.text.spec,
        "threshold": c.threshold, "limit": c.limit, "seed": c.seed, "chat": c.chat, "bos": c.bos, "kl top": c.top,
        "prompt interval": c.prompt_interval, "input len": c.input_len, "output len": c.output_len,
        "requests": c.requests, "repeats": c.repeats, "rounds, at least": c.rounds,
        "speed seconds": c.speed_seconds, "score tolerance": c.score_tolerance,
        "text tolerance": c.text_tolerance, "speed tolerance": c.speed_tolerance,
    }  # fmt: skip
