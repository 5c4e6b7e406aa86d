"""A call of several questions about one text: the first computes what they share, the others find it in the cache.

Each question is an engine request of one token, so keys, fairness, limits, time limits and replay are those of every
other request. What the others share with the first is not counted again by admission.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from penstock.base.errors import EngineError, InputError
from penstock.server.call import Prompt
from penstock.server.encoding import MAX_REQUEST_TOKENS
from penstock.server.parsing import shown
from penstock.server.schema.decisions import DecisionReading
from penstock.server.turns.asking import Caller, Options, asker_of, make_call, new_id
from penstock.server.turns.turn import Meter
from penstock.text.boundaries import num_common
from penstock.text.decisions import (
    MAX_QUESTIONS,
    MIN_LABEL_MASS,
    PLAIN_KWARGS,
    DecisionQuestion,
    Ids,
    Judgement,
    LabelTree,
    asked,
    check_reading,
    judge,
    label_params,
    label_tree,
    wording,
)

AT_ONCE = 64
"""Questions of one call that are with the engine at a time, at most; never more than it runs at once."""


class Decided(NamedTuple):
    """What came of a call. `num_tokens`: of the text and of all questions, what they share counted once;
    `num_cached`: of these, those that were cached before it."""

    answers: list[Judgement]
    num_tokens: int
    num_cached: int


@dataclass(frozen=True)
class _Run:
    """One engine request: the tokens to tell of behind a question's prompt and `before`."""

    question: int
    before: Ids
    tokens: list[int]


async def decide(
    caller: Caller, messages: Sequence[Mapping[str, Any]], questions: Sequence[DecisionQuestion], body: DecisionReading,
    endpoint: str,
) -> Decided:  # fmt: skip
    """`questions` are checked. Raises InputError, RefusedError, WireError, EngineError; cancelling aborts."""
    server = caller.server
    temperature = 1.0 if body.temperature is None else body.temperature
    floor = MIN_LABEL_MASS if body.min_label_mass is None else body.min_label_mass
    check_reading(temperature, floor)
    if not 1 <= len(questions) <= MAX_QUESTIONS:
        said = f"questions has {len(questions)} entries; 1 to {MAX_QUESTIONS} are possible"
        raise InputError(said, param="questions")
    tokenizer, size = server.service.need_tokenizer(), server.service.limits.vocab_size
    trees = [label_tree(tokenizer, question, size) for question in questions]
    prompts, shared = await _prompts(caller, messages, questions, trees, body)
    call = _Deciding(caller, prompts, shared, body, endpoint)
    found = await call.run([_Run(i, *run) for i, tree in enumerate(trees) for run in tree.runs])
    answers = [
        judge(tree.read(read), temperature=temperature, min_label_mass=floor)
        for tree, read in zip(trees, found, strict=True)
    ]
    return Decided(answers, call.num_tokens, call.num_cached)


async def _prompts(
    caller: Caller, messages: Sequence[Mapping[str, Any]], questions: Sequence[DecisionQuestion],
    trees: Sequence[LabelTree], body: DecisionReading,
) -> tuple[list[Prompt], list[int]]:  # fmt: skip
    """A prompt for each question, and the tokens of whole blocks that it shares with the first one.

    Raises as `Service.encode_chat`.
    """
    server, info = caller.server, caller.server.client.info
    assert info is not None
    size = info.block_size if info.caches_prefixes else 0
    work, asker = server.slices.work(caller.tenant), asker_of(caller, body.timeout)
    given, _ = shown(server, list(messages), None, None, None)
    prompts: list[Prompt] = []
    shared: list[int] = []
    total = 0
    for question, tree in zip(questions, trees, strict=True):
        await work.pause()
        prompt = await server.service.encode_chat(
            asked(given, wording(question, tree.names)), asker=asker, param="input",
            chat_template_kwargs={**PLAIN_KWARGS, **(body.chat_template_kwargs or {})},
        )  # fmt: skip
        total += len(prompt.ids)
        if total > MAX_REQUEST_TOKENS:
            raise InputError(
                f"the text with each question comes to more than {MAX_REQUEST_TOKENS} tokens; ask fewer at once",
                param="questions",
            )
        # The last token of a prompt is always computed.
        common = min(num_common(prompts[0].ids, prompt.ids), len(prompt.ids) - 1) if prompts and size else 0
        shared.append(common // size * size if size else 0)
        prompts.append(prompt)
    return prompts, shared


class _Deciding:
    """The engine requests of one call.

    Attributes:
        num_tokens, num_cached: see `Decided`.
    """

    def __init__(
        self, caller: Caller, prompts: list[Prompt], shared: list[int], body: DecisionReading, endpoint: str
    ) -> None:
        info = caller.server.client.info
        assert info is not None
        self._caller = caller
        self._prompts, self._shared = prompts, shared
        self._endpoint = endpoint
        self._options = Options(
            model=body.model, priority=body.priority, cache_salt=body.cache_salt, timeout_s=body.timeout
        )
        self._id = new_id("dec-")
        most = min(AT_ONCE, max(1, info.max_num_seqs), caller.tenant.max_concurrent or AT_ONCE)
        self._places = asyncio.Semaphore(most)
        self.num_tokens = sum(len(p.ids) - n for p, n in zip(prompts, self._shared, strict=True))
        self.num_cached = 0

    async def run(self, runs: Sequence[_Run]) -> list[dict[Ids, dict[int, float]]]:
        """By question and what stands behind its prompt: the log-probabilities of the tokens that were asked for."""
        found: list[dict[Ids, dict[int, float]]] = [{} for _ in self._prompts]
        found[0][runs[0].before] = await self._one(runs[0], f"{self._id}-0")
        tasks = [
            asyncio.ensure_future(self._placed(run, f"{self._id}-{n}")) for n, run in enumerate(runs[1:], 1)
        ]  # fmt: skip
        try:
            for run, task in zip(runs[1:], tasks, strict=True):
                found[run.question][run.before] = await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return found

    async def _placed(self, run: _Run, request_id: str) -> dict[int, float]:
        async with self._places:
            return await self._one(run, request_id)

    async def _one(self, run: _Run, request_id: str) -> dict[int, float]:
        prompt, shared = self._prompts[run.question], self._shared[run.question]
        prompt = replace(prompt, ids=[*prompt.ids, *run.before])
        call = make_call(self._caller, prompt, label_params(run.tokens), self._options, self._endpoint, request_id)
        call.num_shared = shared
        stream = await self._caller.server.service.submit(call)
        meter = Meter([stream], speculates=False)
        told: dict[int, float] = {}
        try:
            async for deltas in stream.deltas():
                meter.count(stream, deltas)
                failed = meter.failure(deltas)
                if failed is not None:
                    raise failed
                for entry in [entry for delta in deltas for entry in delta.logprobs or ()]:
                    told = dict(zip(entry.top_ids, entry.top_logprobs, strict=True))
        except EngineError as error:
            raise meter.engine_failure(error) from None
        if not run.before:
            self.num_cached += max(0, stream.num_cached_tokens - shared)
        return told
