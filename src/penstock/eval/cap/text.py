"""How well a fixed text is expected, and how far the expectation is from the plain configuration's.

The engine reads the text itself and gives, at each token, the likeliest ones with their probabilities. KL is taken
over those that both configurations list, and one bucket for all others: at most the whole divergence (it can only lose
by putting tokens together), and 0 where nothing changed. A KV selector forgets nothing before the first selection, so
it is made to select within the text, every so many tokens (`prompt_interval`).
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import msgspec
import numpy as np

from penstock.base.errors import EngineError
from penstock.config import EngineConfig, from_kwargs
from penstock.core.output import Logprob
from penstock.core.sampling import SamplingParams
from penstock.eval.cap.conditions import Conditions
from penstock.eval.intervals import Interval, bootstrap
from penstock.eval.result import Scored, TaskResult, figure
from penstock.eval.run import Prepared
from penstock.launch.llm import LLM

Listed = dict[int, float]
"""Token -> natural logarithm of its probability, the likeliest ones and the one that came."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """A text read: `task` has nats per window, `listed` what was expected at each counted token, window by window."""

    task: TaskResult
    listed: list[list[Listed]]


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """`kl`: mean nats per token, with its interval over windows. `same_top`: share of tokens whose likeliest one is the
    plain configuration's. `method`: how, for people."""

    kl: float
    low: float | None
    high: float | None
    same_top: float
    tokens: int
    method: str


def selecting(config: EngineConfig, interval: int) -> EngineConfig:
    """With selections within prompts, if it has a selector and sets no distance itself."""
    selection = config.selection
    if selection is None or selection.options.prompt_interval:
        return config
    options = json.loads(config.cache.kv_selector_config or "{}") | {"prompt_interval": interval}
    return from_kwargs(**(config.as_kwargs() | {"kv_selector_config": json.dumps(options, sort_keys=True)}))


def how_read(config: EngineConfig, conditions: Conditions) -> str:
    """The sentence on the method that goes with the figures."""
    said = f"the engine's own logprobs, top {conditions.top} and one bucket for the rest"
    selection = selecting(config, conditions.prompt_interval).selection
    if selection is not None:
        said += f"; selections every {selection.options.prompt_interval} tokens within the text"
    return said


def read(llm: LLM, prepared: Prepared, top: int) -> Reading:
    """Raises EngineError."""
    limits = llm.engine.limits
    k = min(top, limits.vocab_size)
    # The limits are there for strangers; whoever runs a board knows what it costs.
    most = max(len(r.ids) for e in prepared.examples for r in e.readings) * (k + 1)
    llm.engine.limits = replace(
        limits, max_logprobs=-1 if limits.max_logprobs < 0 else max(k, limits.max_logprobs),
        max_prompt_logprob_entries=max(most, limits.max_prompt_logprob_entries),
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=k, detokenize=False)
    readings = [e.readings[0] for e in prepared.examples]
    scored, listed = [], []
    try:
        for example, reading in zip(prepared.examples, readings, strict=True):
            (output,) = llm.generate([{"prompt_token_ids": reading.ids}], params)
            if output.error is not None or output.prompt_logprobs is None:
                raise EngineError(f"the text for perplexity: {output.error}")
            window = [_plain(entry) for entry in output.prompt_logprobs[reading.first :]]
            nats = -math.fsum(at[token] for at, token in zip(window, reading.ids[reading.first :], strict=True))
            scores = dict.fromkeys((m.name for m in prepared.asked.task.metrics), nats)
            scored.append(Scored(scores=scores, tags=dict(example.tags), weights=dict(example.weights)))
            listed.append(window)
    finally:
        llm.engine.limits = limits
    task = prepared.asked.task
    result = TaskResult(
        name=prepared.asked.spec, task=task.name, kind=task.kind, source=task.source, digest=prepared.digest,
        values=[figure(metric, scored) for metric in task.metrics], examples=scored, left_out=prepared.left_out,
    )  # fmt: skip
    return Reading(task=result, listed=listed)


def _plain(entry: dict[int, Logprob] | None) -> Listed:
    assert entry is not None, "only the first token has none"
    return {token: found.logprob for token, found in entry.items()}


def divergence(plain: Reading, other: Reading, method: str) -> Divergence:
    """Of `other` from `plain`, which read the same windows."""
    assert plain.task.digest == other.task.digest, "only the same windows can be compared"
    sums, counts, same = [], [], 0
    for theirs, own in zip(plain.listed, other.listed, strict=True):
        sums.append(math.fsum(token_kl(p, q) for p, q in zip(theirs, own, strict=True)))
        counts.append(float(len(own)))
        same += sum(_top(p) == _top(q) for p, q in zip(theirs, own, strict=True))
    tokens = int(sum(counts))
    interval: Interval | None = bootstrap(lambda s, n: s / n, sums, counts)
    low, high = interval or (None, None)
    return Divergence(
        kl=math.fsum(sums) / tokens, low=low, high=high, same_top=same / tokens, tokens=tokens, method=method
    )


def token_kl(p: Listed, q: Listed) -> float:
    """KL of q from p in nats, over what both list and one bucket for the rest."""
    both = sorted(p.keys() & q.keys())
    a, b = (np.array([of[t] for t in both], np.float64) for of in (p, q))
    rest_p, rest_q = (max(1e-12, 1.0 - float(np.exp(x).sum())) for x in (a, b))
    return max(0.0, float((np.exp(a) * (a - b)).sum()) + rest_p * math.log(rest_p / rest_q))


def _top(listed: Listed) -> int:
    return min(listed, key=lambda token: (-listed[token], token))
