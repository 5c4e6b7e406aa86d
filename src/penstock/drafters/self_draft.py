"""The model drafts for itself: a part of its layers drafts, all of them verify. No weights and no cache of its own.

`early-exit`: the first layers and the output matrix, with a trained adapter between them if there is one. Sources: Liu
et al., Kangaroo, arXiv 2404.18911, section 3 (a shallow sub-network drafts until it is in doubt; there the adapter
attends, here it is residual blocks, so it keeps nothing); Elhoushi et al., LayerSkip, arXiv 2404.16710, section 4.3.
`self-draft`: all layers but some. Source: Zhang et al., Draft & Verify, arXiv 2309.08168, section 3.

The part works in the cache of the whole model. It reads what the whole model left there for verified tokens and writes
entries of the newest token and of its own drafts only: slots that the verifying step writes anew in every layer,
before it reads them. So what a skipped layer would have cached is never missing, and never another's.

Without an adapter drafts are read by the model's own final norm and output matrix: good for models that were trained
to read early layers too, a logit lens for all others.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from penstock.base.errors import ConfigError
from penstock.core.batch import SchedulerOutput
from penstock.core.draft import DraftJob, DraftTree, Outcome, chain
from penstock.drafters.bench import DraftBench, Target
from penstock.drafters.forward import F32, Ahead, DraftForward
from penstock.drafters.heads import DraftHeads, heads_problem, read_heads
from penstock.formats.files import quoted
from penstock.model.forward import HeadForward
from penstock.ops.plan import Planes, StepPlan

CONFIDENCE = 0.4
"""A draft that the part itself gives less than this is the last of its chain."""
_LOG = logging.getLogger("penstock")


class Adapted:
    """A part of a model whose hidden states pass through an adapter before they meet the output matrix."""

    def __init__(self, part: HeadForward, adapter: DraftHeads) -> None:
        self._part, self._adapter = part, adapter

    def run(self, plan: StepPlan, planes: Sequence[Planes]) -> F32:
        """As `model.forward.Forward`."""
        wanted = replace(plan, logits_indices=plan.logits_indices[:0], hidden_indices=plan.logits_indices)
        _, hidden = self._part.run_pooling(wanted, planes)
        return self._part.run_head(self._adapter(hidden)[:, 0], planes)


class SelfDrafter:
    """Chains, all sequences side by side; each goes on while its newest draft has a probability of `confidence`.

    The draft that is in doubt is still proposed: it has been paid for.
    """

    wants_hidden = False

    def __init__(self, name: str, ahead: DraftForward, *, confidence: float = CONFIDENCE) -> None:
        self.name = name
        self.ahead = ahead
        self._confidence = confidence

    def track(self, output: SchedulerOutput) -> None:
        """It keeps nothing."""

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        rooms = [min(job.num_nodes, job.max_depth) for job in jobs]
        tokens: list[list[int]] = [[] for _ in jobs]
        probs: list[list[float]] = [[] for _ in jobs]
        live = [i for i, room in enumerate(rooms) if room > 0]
        while live:
            work = [self._next(jobs[i], tokens[i]) for i in live]
            going = []
            for i, logits in zip(live, self.ahead.run(work), strict=True):
                token, prob = likeliest(logits[0])
                tokens[i].append(token)
                probs[i].append(prob)
                if prob >= self._confidence and len(tokens[i]) < rooms[i]:
                    going.append(i)
            live = going
        return [chain(drafted, prob) for drafted, prob in zip(tokens, probs, strict=True)]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """It learns nothing."""

    @staticmethod
    def _next(job: DraftJob, drafted: list[int]) -> Ahead:
        """The newest token known, or drafted."""
        last = len(job.tokens) - 1
        newest = drafted[-1] if drafted else int(job.tokens[last])
        return Ahead(job.seq_id, last + len(drafted), [newest])


def likeliest(logits: F32) -> tuple[int, float]:
    """The token that greedy decoding takes, and its probability. Shapes: logits [V]."""
    token = int(logits.argmax())
    return token, 1.0 / float(np.exp(logits - logits[token]).sum())


def make_early_exit(bench: DraftBench) -> SelfDrafter:
    """Raises: ConfigError, if there is no such layer."""
    target = _target(bench)
    count = len(target.spec.layers)
    stop = bench.config.exit_layer
    if stop is None:
        stop = max(1, count // 3)
    if stop >= count:
        raise ConfigError(
            f"speculative_config: exit_layer {stop}: the model has {count} layers, and the draft must leave some out; "
            f"choose 1 to {count - 1}",
            field="speculative_config",
        )
    return _drafter("early-exit", bench, target, range(stop), _adapter(bench, target, stop))


def _adapter(bench: DraftBench, target: Target, stop: int) -> DraftHeads | None:
    if bench.config.heads is None:
        return None
    folder = Path(bench.config.heads)
    heads, config = read_heads(folder, "adapter", target.spec.hidden_size, target.fingerprint())
    found = config.get("exit_layer")
    if found != stop or len(heads.weight) != 1:
        raise heads_problem(f"heads {quoted(folder)} belong behind {found} layers, and exit_layer is {stop}")
    return heads


def make_self_draft(bench: DraftBench) -> SelfDrafter:
    """Raises: ConfigError, if `skip_layers` names no layers, or all of them."""
    target = _target(bench)
    count = len(target.spec.layers)
    skipped = skipped_layers(bench.config.skip_layers, count)
    return _drafter("self-draft", bench, target, [n for n in range(count) if n not in skipped])


def skipped_layers(text: str | None, count: int) -> frozenset[int]:
    """Layers by number, the first is 0; by default every second one behind the first third, the last excepted.

    First layers are kept because little is right without them: benchmarks/speculation/skip_search.py.

    Raises: ConfigError.
    """
    if text is None:
        return frozenset(range(max(1, count // 3), count - 1, 2)) or frozenset({count - 1})
    try:
        skipped = frozenset(int(part) for part in text.split(","))
    except ValueError:
        skipped = frozenset()
    if not skipped or not skipped < set(range(count)):
        raise ConfigError(
            f"speculative_config: skip_layers {text!r}: name some of the layers 0 to {count - 1}, not all, as 1,3",
            field="speculative_config",
        )
    return skipped


def _target(bench: DraftBench) -> Target:
    method, target = bench.config.method, bench.target
    if target is None or len(target.spec.layers) < 2:
        raise ConfigError(
            f"speculative_config: method {method} drafts with a part of the model's layers, and this model has no two",
            field="speculative_config",
        )
    if any(not group.spec.per_token for group in bench.rows.groups):
        raise ConfigError(
            f"speculative_config: method {method} would spoil the states of recurrent layers, which this model has; "
            "choose another method, as ngram",
            field="speculative_config",
        )
    return target


def _drafter(
    name: str, bench: DraftBench, target: Target, layers: Sequence[int], adapter: DraftHeads | None = None
) -> SelfDrafter:
    part = target.part(layers)
    if adapter is not None:
        assert isinstance(part, HeadForward), "programs give hidden states"
        part = Adapted(part, adapter)
    through = "the final norm and the output matrix" if adapter is None else "an adapter"
    _LOG.info(
        "%s: layers %s of %d draft, read through %s", name, ", ".join(map(str, layers)), len(target.spec.layers),
        through,
    )  # fmt: skip
    return SelfDrafter(name, DraftForward(part, bench.rows, bench.storage))
