"""Naive answers: one request at a time, everything recomputed from its tokens, no state carried over.

The sampling here is written from the documented order alone (`runner.logits`, `runner.truncate`, `runner.sampler`) in
plain loops over the vocabulary, so that engine and oracle share no code but Philox.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from penstock.base.rng import uniform
from penstock.core.request import Request
from penstock.core.sampling import RepetitionDetectionParams, TokenRules
from tests.engine.fake_model import adapted_hash, history_hash, logits_of
from tests.oracle import NaiveModel

Logits = Callable[[tuple[int, ...]], np.ndarray]
"""Tokens so far -> logits [V] of the next one."""


def fake_logits(tokens: tuple[int, ...], mark: int = 0) -> np.ndarray:
    """`mark`: of the request's adapter."""
    return logits_of(adapted_hash(history_hash(tokens), mark))


def model_logits(model: NaiveModel) -> Logits:
    """Logits of a real model; remembered by token history, because many requests here share theirs."""

    @lru_cache(maxsize=100_000)
    def of(tokens: tuple[int, ...]) -> np.ndarray:
        return model.logits(tokens, last_only=True)[0]

    return of


def processed(logits: np.ndarray, rules: TokenRules, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    """Masks, bias and penalties, token by token, in float32 as the engine keeps them."""
    row = [np.float32(x) for x in logits]
    ninf = np.float32(-np.inf)
    if rules.allowed_ids is not None:
        row = [x if t in rules.allowed_ids else ninf for t, x in enumerate(row)]
    for bad in rules.bad_sequences:
        head = bad[:-1]
        if not head or list(output[-len(head) :]) == list(head):
            row[bad[-1]] = ninf
    if len(output) < rules.min_tokens:
        for t in rules.stop_ids:
            row[t] = ninf
    for t, bias in rules.logit_bias.items():
        row[t] = row[t] + np.float32(bias)
    if rules.repetition_penalty != 1.0:
        p = np.float32(rules.repetition_penalty)
        for t in set(prompt) | set(output):
            row[t] = row[t] / p if row[t] > 0 else row[t] * p
    for t in set(output):
        count = np.float32(list(output).count(t))
        row[t] = row[t] - np.float32(rules.frequency_penalty) * count
        row[t] = row[t] - np.float32(rules.presence_penalty)
    return [float(x) for x in row]


def choose(logits: np.ndarray, rules: TokenRules, prompt: Sequence[int], output: Sequence[int], index: int) -> int:
    """The next token of sample `index`."""
    row = processed(logits, rules, prompt, output)
    ranked = sorted(range(len(row)), key=lambda t: (-row[t], t))
    if rules.greedy:
        return ranked[0]
    top = row[ranked[0]]
    weight = {t: math.exp((row[t] - top) / rules.temperature) for t in ranked}
    kept = [t for t in ranked if weight[t] >= rules.min_p] if rules.min_p > 0 else ranked
    if rules.top_k > 0:
        kept = kept[: rules.top_k]
    if rules.top_p < 1.0:
        target, mass, nucleus = rules.top_p * math.fsum(weight[t] for t in kept), 0.0, []
        for t in kept:
            nucleus.append(t)
            mass += weight[t]
            if mass >= target:
                break
        kept = nucleus
    position = len(prompt) + len(output)
    u = uniform(rules.seed, index, position)
    total = math.fsum(weight[t] for t in kept)
    running = 0.0
    for t in sorted(kept):
        running += weight[t]
        if running > u * total:
            return t
    return max(kept)


def generate(logits: Logits, request: Request, index: int = 0) -> tuple[list[int], str]:
    """(tokens, finish reason) of one sample of a request, by the definition."""
    prompt = list(request.prompt_token_ids)
    output: list[int] = []
    while True:
        token = choose(logits(tuple(prompt + output)), request.rules, prompt, output, index)
        output.append(token)
        if len(output) >= request.rules.min_tokens and (
            token in request.eos_token_ids or token in request.stop_token_ids
        ):
            return output, "stop"
        if len(output) >= request.max_tokens:
            return output, "length"
        if len(output) >= request.rules.min_tokens and circles(output, request.repetition):
            return output, "repetition"


def circles(output: Sequence[int], asked: RepetitionDetectionParams | None) -> bool:
    """Whether the last tokens are a pattern, as often as is asked: by the definition."""
    if asked is None:
        return False
    return any(
        len(output) >= size * asked.min_count
        and list(output[len(output) - size * asked.min_count :]) == list(output[-size:]) * asked.min_count
        for size in range(max(1, asked.min_pattern_size), asked.max_pattern_size + 1)
    )


def log_softmax(row: Sequence[float]) -> list[float]:
    top = max(row)
    norm = top + math.log(math.fsum(math.exp(x - top) for x in row))
    return [x - norm for x in row]


def beam_search(logits: Logits, request: Request) -> list[tuple[list[int], float, str]]:
    """Beam search by the definition: all hypotheses kept as lists, nothing shared."""
    params = request.beam
    assert params is not None
    prompt = list(request.prompt_token_ids)
    width = params.beam_width
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[tuple[list[int], float, str]] = []
    for _ in range(request.max_tokens):
        options = []
        for tokens, score in beams:
            row = log_softmax([float(x) for x in logits(tuple(prompt + tokens))])
            best = sorted(range(len(row)), key=lambda t: (-row[t], t))[: 2 * width]
            options += [([*tokens, t], score + row[t]) for t in best]
        going = []
        for tokens, score in options:
            if tokens[-1] in request.eos_token_ids:
                ended.append((tokens, score, "stop"))
            else:
                going.append((tokens, score))
        beams = sorted(going, key=lambda b: -b[1])[:width]
        if not beams:
            break
    everything = ended + [(tokens, score, "length") for tokens, score in beams]

    def final(h: tuple[list[int], float, str]) -> float:
        length = len(prompt) + len(h[0]) - (h[2] == "stop")
        return h[1] / length**params.length_penalty

    return sorted(everything, key=lambda h: -final(h))[:width]
