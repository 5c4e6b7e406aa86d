"""Ask a model all examples of some tasks, judge its answers, keep every score.

Alignment: examples are made before anything runs, and they and the way answers are decoded (greedy, so many tokens,
these stops) are put into a digest. Engine settings can change neither, so what two configurations answered can be
compared example by example, and what cannot be compared is noticed (`eval.paired`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from penstock import __version__
from penstock.base.errors import EngineError, InputError
from penstock.base.hashing import digest
from penstock.config import SETTINGS
from penstock.core.output import Logprob, RequestOutput
from penstock.core.sampling import SamplingParams
from penstock.eval.health import answers_of, health
from penstock.eval.result import FORMAT, Result, Scored, TaskResult, figure
from penstock.eval.tasks import Asked, make_tasks
from penstock.eval.tasks.base import Answer, Example, Kind, Reader, Task
from penstock.eval.thought import opens_thought, spoken
from penstock.launch.llm import LLM
from penstock.text.decisions import LabelTree, label_params

_SHOWN = 16_000
_NOT_TOLD = ("model",)
Told = Callable[[str, int], None]
"""(task, how many examples): what begins now."""


@dataclass(frozen=True)
class Prepared:
    """A task with the examples that fit, and their digest."""

    asked: Asked
    examples: tuple[Example, ...]
    left_out: int
    digest: str

    @property
    def kind(self) -> Kind:
        """How it is asked: a task of choices is answered in a chat."""
        if self.examples[0].labels is not None:
            return "decide"
        return self.asked.task.kind if self.examples[0].readings else "generate"


def evaluate(
    llm: LLM, tasks: Sequence[str | Asked], *, seed: int = 0, limit: int = 100, chat: bool = False, bos: bool = False,
    show_progress: bool = False, told: Told = lambda name, n: None,
) -> Result:  # fmt: skip
    """Everything: `tasks` by name (`eval.tasks`) or made. Raises ConfigError, InputError, EngineError."""
    made = [task if isinstance(task, Asked) else make_tasks([task])[0] for task in tasks]
    prepared = prepare(llm, made, seed=seed, limit=limit, chat=chat, bos=bos)
    return run(llm, prepared, seed=seed, limit=limit, chat=chat, bos=bos, show_progress=show_progress, told=told)


def prepare(
    llm: LLM, tasks: Sequence[Asked], *, seed: int = 0, limit: int = 100, chat: bool = False, bos: bool = False,
    room: int | None = None,
) -> list[Prepared]:  # fmt: skip
    """The examples, before any of them runs.

    `limit`: about how many of each task; `seed`: which. `chat`: prompts are messages of a user (likelihoods are of
    plain text all the same). `bos`: plain texts begin with the token that begins a text, whatever the tokenizer does.
    `room`: tokens that the context holds, where it is not this engine's own (several engines are asked the same).
    Raises InputError.
    """
    if limit < 1:
        raise InputError(f"limit must be at least 1, not {limit}", param="limit")
    reader = reader_of(llm, chat=chat, bos=bos, room=room)
    return [_prepare(asked, reader, seed, limit) for asked in tasks]


def reader_of(llm: LLM, *, chat: bool = False, bos: bool = False, room: int | None = None) -> Reader:
    """How texts become ids. Raises InputError if the model has no chat template, or no token that begins a text."""
    template = llm.engine.chat_template if chat else None
    if chat and template is None:
        raise InputError("--chat: this model has no chat template; leave --chat away", param="chat")
    room = llm.engine.limits.max_model_len if room is None else room
    return Reader(llm.get_tokenizer(), room, template=template, bos=bos)


def _prepare(asked: Asked, reader: Reader, seed: int, limit: int) -> Prepared:
    examples = asked.task.examples(reader, seed, limit)
    kept = tuple(e for e in examples if e.num_tokens <= reader.room)
    if not kept:
        least = min((e.num_tokens for e in examples), default=0)
        raise InputError(
            f"task {asked.spec!r}: none of its {len(examples)} examples fits a context of {reader.room} tokens; the "
            f"shortest needs {least}",
            param="tasks",
        )
    said = [asked.task.name, asked.task.kind, [m.name for m in asked.task.metrics], [_plain(e) for e in kept]]
    return Prepared(asked, kept, len(examples) - len(kept), digest(b"eval", msgspec.json.encode(said)).hex())


def _plain(e: Example) -> list[object]:
    """All that an example asks, and how it is decoded and judged."""
    readings = [[r.ids, r.first] for r in e.readings]
    said = [e.prompt, readings, e.expected, e.max_tokens, e.stop, dict(e.tags), dict(e.weights)]
    if e.labels is not None:
        said.append([e.labels.names, e.labels.runs])
    return [*said, e.begun] if e.begun else said


def run(
    llm: LLM, prepared: Sequence[Prepared], *, seed: int = 0, limit: int = 100, chat: bool = False, bos: bool = False,
    show_progress: bool = False, told: Told = lambda name, n: None,
) -> Result:  # fmt: skip
    """Ask what was prepared. Raises EngineError if the engine fails at an example."""
    results = []
    for task in prepared:
        told(task.asked.spec, len(task.examples))
        results.append(_run(llm, task, show_progress))
    made = Result(
        penstock_eval=FORMAT, version=__version__, model=str(llm.config.model.model), seed=seed, limit=limit, chat=chat,
        bos=bos, settings=settings_of(llm), tasks=results,
    )  # fmt: skip
    return replace(made, warnings=health(made))


def settings_of(llm: LLM) -> dict[str, object]:
    """Settings that are not the defaults."""
    given = llm.config.as_kwargs()
    return {name: value for name, value in given.items() if name not in _NOT_TOLD and value != SETTINGS[name].default}


def _run(llm: LLM, prepared: Prepared, show_progress: bool) -> TaskResult:
    task, examples = prepared.asked.task, prepared.examples
    started = time.perf_counter()
    generated = prepared.kind == "generate"
    made = _decided if prepared.kind == "decide" else _scored
    asks = [_generated(e) for e in examples] if generated else [r for e in examples for r in made(e)]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in asks], [p for _, p in asks], use_tqdm=show_progress)
    seconds = time.perf_counter() - started
    failed = next((output.error for output in outputs if output.error is not None), None)
    if failed is not None:
        raise EngineError(f"task {prepared.asked.spec!r}: {failed}")
    left = iter(outputs)
    if generated:
        thinks = opens_thought(llm.get_tokenizer().decode(list(examples[0].prompt[-16:]), skip_special_tokens=False))
        scored = [_judged(task, e, next(left), opened=thinks) for e in examples]
    elif prepared.kind == "decide":
        scored = [_scored_by(task, e, _probabilities(e.labels, left)) for e in examples if e.labels is not None]
    else:
        scored = [_scored_by(task, e, _likelihoods(e, [next(left) for _ in e.readings])) for e in examples]
    return TaskResult(
        name=prepared.asked.spec, task=task.name, kind=prepared.kind, source=task.source, digest=prepared.digest,
        values=[figure(metric, scored) for metric in task.metrics], examples=scored, axes=list(task.axes),
        left_out=prepared.left_out, prompt_tokens=sum(len(ids) for ids, _ in asks),
        output_tokens=sum(len(o.outputs[0].token_ids) for o in outputs) if generated else 0,
        seconds=seconds, ends=task.ends, answers=answers_of(scored),
    )  # fmt: skip


def _judged(task: Task, e: Example, output: RequestOutput, *, opened: bool) -> Scored:
    """What was said behind all thoughts is judged; a thought that never ends is no answer."""
    made = output.outputs[0]
    text = spoken(made.text, opened=opened)
    answer = Answer(e.begun + text if text is not None else "")
    end = "stop_string" if isinstance(made.stop_reason, str) else made.finish_reason or ""
    return replace(
        _scored_by(task, e, answer), said=made.text[:_SHOWN], output=_output_digest(output), end=end,
        answered=text is not None and task.found(e, answer), thinks=text is None, tokens=len(made.token_ids),
    )  # fmt: skip


def _scored_by(task: Task, e: Example, answer: Answer) -> Scored:
    scores = task.judge(e, answer)
    assert scores.keys() == {m.name for m in task.metrics}, "a judge gives a score for every metric"
    expected = e.expected if isinstance(e.expected, str) else msgspec.json.encode(e.expected).decode()
    return Scored(scores=scores, tags=dict(e.tags), weights=dict(e.weights), expected=expected[:_SHOWN])


def _generated(e: Example) -> tuple[tuple[int, ...], SamplingParams]:
    return e.prompt, SamplingParams(temperature=0.0, max_tokens=e.max_tokens, stop=list(e.stop) or None)


def _scored(e: Example) -> list[tuple[tuple[int, ...], SamplingParams]]:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    return [(reading.ids, params) for reading in e.readings]


def _decided(e: Example) -> list[tuple[tuple[int, ...], SamplingParams]]:
    assert e.labels is not None
    return [((*e.prompt, *before), label_params(tokens)) for before, tokens in e.labels.runs]


def _probabilities(labels: LabelTree, outputs: Iterator[RequestOutput]) -> Answer:
    found = {}
    for before, _ in labels.runs:
        entries = next(outputs).outputs[0].logprobs
        assert entries, "they were asked for"
        found[before] = {token: entry.logprob for token, entry in entries[0].items()}
    return Answer(logprobs=tuple(labels.read(found)))


def _likelihoods(example: Example, outputs: Sequence[RequestOutput]) -> Answer:
    sums, greedy = [], []
    for reading, output in zip(example.readings, outputs, strict=True):
        entries = [_entry(output, reading.ids, at) for at in range(reading.first, len(reading.ids))]
        sums.append(sum(entry.logprob for entry in entries))
        greedy.append(all(entry.rank == 1 for entry in entries))
    return Answer(logprobs=tuple(sums), greedy=tuple(greedy))


def _entry(output: RequestOutput, ids: tuple[int, ...], at: int) -> Logprob:
    entries = output.prompt_logprobs
    assert entries is not None, "they were asked for"
    entry = entries[at]
    assert entry is not None, "only the first token has none"
    return entry[ids[at]]


def _output_digest(output: RequestOutput) -> str:
    ids = output.outputs[0].token_ids
    return digest(b"output", msgspec.json.encode(ids), size=8).hex()
