"""From logits to tokens, one row at a time.

Order for each row: health check; raw logprobs; processors (masks, bias, penalties); then greedy argmax, beam
candidates, or temperature, min-p, top-k, top-p (`runner.truncate`) and one draw per sample.

A draw is an inverse CDF over the surviving tokens *in ascending id order* with u = Philox(seed, sample index,
position): the token is the first whose running sum of weights exceeds u times the total, both exact whole numbers.
Ties of the argmax go to the lowest id. No row's result depends on another row.

`runner.kernel_sampler` gives the same results, faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.base.rng import uniform
from penstock.core.batch import PromptLogprobs, RowError, Sampled, TokenLogprobs
from penstock.core.sampling import TokenRules
from penstock.ops.draw_weights import MAX_VOCAB
from penstock.runner.input_batch import Pick
from penstock.runner.logits.chain import LogitsChain
from penstock.runner.logprobs import RowLogprobs
from penstock.runner.truncate import truncate

if TYPE_CHECKING:
    from penstock.runner.logits.grammar_cache import GrammarCache

F32 = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]


class DraftNode(NamedTuple):
    """A row of the logits [R, V] whose token is wanted, and no more: by its own rules, no processor's state."""

    row: int
    rules: TokenRules
    sample_index: int
    position: int


SICK = -1
"""Choice at a node whose logits hold a NaN or an infinity."""


class SamplerOutput(NamedTuple):
    """Each sequence is in `errors` or `ended`, or in the first two as far as it asked; in the order of the picks.

    `choices`: the token of each node, or SICK.
    """

    sampled: list[Sampled]
    prompt_logprobs: list[PromptLogprobs]
    errors: list[RowError]
    ended: Sequence[int] = ()
    choices: Sequence[int] = ()


class Sampler:
    """Owns the processors. `chain.track` must have seen the step's row changes before `sample`."""

    def __init__(self, vocab_size: int, grammars: GrammarCache | None = None) -> None:
        assert vocab_size <= MAX_VOCAB, f"a vocabulary of {vocab_size} tokens"
        self.chain = LogitsChain(vocab_size, grammars)

    def sample(self, logits: F32, picks: Sequence[Pick], nodes: Sequence[DraftNode] = ()) -> SamplerOutput:
        """Choose tokens and collect logprobs. Shapes: logits [R, V], not written to."""
        if not picks and not nodes:
            return SamplerOutput([], [], [])
        ended: list[int] = []
        choices: list[int] = []
        out = SamplerOutput([], [], [], ended, choices)
        logits = np.ascontiguousarray(logits)
        # One pass finds both the greedy tokens and the sick rows: argmax stops at a NaN, and a largest value that is
        # finite rules out NaN and +inf everywhere and -inf in at least one place.
        best = logits.argmax(axis=1)
        healthy = np.isfinite(logits[np.arange(len(best)), best])
        seq_ids, copies = self._process(logits, healthy, picks)
        processed = dict(zip(seq_ids, copies, strict=True))
        for pick in picks:
            problem = sick(healthy, pick)
            sampled: Sampled | None = None
            if problem is None and pick.row >= 0:
                raw, final = logits[pick.row], processed.get(pick.seq_id)
                if final is None:
                    sampled = _choose(pick, raw, raw, int(best[pick.row]))
                else:
                    top = int(final.argmax())
                    problem = self.unusable(pick.seq_id, float(final[top]))
                    if problem == "":
                        ended.append(pick.seq_id)
                        problem = None
                    elif problem is None:
                        sampled = _choose(pick, raw, final, top)
            if problem is not None:
                out.errors.append(RowError(pick.seq_id, problem))
                continue
            if sampled is not None:
                out.sampled.append(sampled)
            if pick.prompt_ids.size:
                out.prompt_logprobs.append(_prompt_logprobs(pick, logits))
        for node in nodes:
            if not healthy[node.row]:
                choices.append(SICK)
            elif node.rules.greedy:
                choices.append(int(best[node.row]))
            else:
                choices += draw(logits[node.row], node.rules, node.sample_index, node.position, 1)
        return out

    def choose_followed(self, seq_id: int, logits: F32, node: DraftNode) -> int | str:
        """The token behind a node of a sequence that processors follow, with their states as they are now.

        A text: no token; "" if the row is complete, else what is wrong. Shapes: logits [V], not written to.
        """
        if not np.isfinite(logits.max()):
            return sick_at(node.position)
        copies = logits[None].copy()
        self.chain.apply(copies, [seq_id])
        final = copies[0]
        top = int(final.argmax())
        problem = self.unusable(seq_id, float(final[top]))
        if problem is not None:
            return problem
        rules = node.rules
        return top if rules.greedy else draw(final, rules, node.sample_index, node.position, 1)[0]

    def _process(self, logits: F32, healthy: npt.NDArray[np.bool_], picks: Sequence[Pick]) -> tuple[list[int], F32]:
        """The sequences whose rows some processor follows, and processed copies of these rows [F, V]."""
        rows = [(p.seq_id, p.row) for p in picks if p.row >= 0 and healthy[p.row] and self.chain.follows(p.seq_id)]
        if not rows:
            return [], logits[:0]
        seq_ids = [seq_id for seq_id, _ in rows]
        copies = logits[[row for _, row in rows]]
        self.chain.apply(copies, seq_ids)
        return seq_ids, copies

    def unusable(self, seq_id: int, peak: float) -> str | None:
        """What is wrong with processed logits whose largest value is `peak`; "": nothing, the row is complete."""
        if np.isfinite(peak):
            return None
        if peak == -np.inf:
            why = self.chain.exhausted(seq_id)
            if why is not None:
                return why
            return "every token is excluded: relax allowed_token_ids, bad_words, min_tokens or stop_token_ids"
        return "logit_bias or the penalties drove a logit beyond float32; use smaller numbers"


def _choose(pick: Pick, raw: F32, final: F32, top: int) -> Sampled:
    """`raw` and `final` [V] are the logits before and after the processors; `top` is the argmax of `final`."""
    if pick.num_candidates > 0:
        return Sampled(pick.seq_id, [], candidates=RowLogprobs(final, pick.num_candidates).best())
    rules = pick.rules
    tokens = [top] * pick.num_samples
    if not rules.greedy:
        tokens = draw(final, rules, pick.sample_index, pick.position, pick.num_samples)
    entries: list[TokenLogprobs] = []
    if rules.num_logprobs >= 0:
        logprobs = RowLogprobs(raw, rules.num_logprobs, rules.logprob_ids)
        entries = [logprobs.entry(token) for token in tokens]
    return Sampled(pick.seq_id, tokens, entries)


def draw(final: F32, rules: TokenRules, sample_index: int, position: int, num_samples: int) -> list[int]:
    """One token per sample index sample_index + 0, 1, ..., all from the same distribution. Shapes: final [V]."""
    ids, weights = truncate(final, rules)
    sums = np.cumsum(weights)
    total = int(sums[-1])
    tokens: list[int] = []
    for j in range(num_samples):
        bits = int(uniform(rules.seed, sample_index + j, position) * 2**53)  # it has no more than these
        # Below the last sum; and "first sum above it" never names a token of weight zero.
        slot = int(np.searchsorted(sums, bits * total >> 53, side="right"))
        tokens.append(slot if ids is None else int(ids[slot]))
    return tokens


def _prompt_logprobs(pick: Pick, logits: F32) -> PromptLogprobs:
    entries = [
        RowLogprobs(logits[pick.prompt_row + j], pick.rules.num_prompt_logprobs).entry(token)
        for j, token in enumerate(pick.prompt_ids.tolist())
    ]
    return PromptLogprobs(pick.seq_id, pick.prompt_start, entries)


def sick(healthy: npt.NDArray[np.bool_], pick: Pick) -> str | None:
    """What is wrong with the raw logits of a row, if anything."""
    position = -1
    prompt = healthy[pick.prompt_row : pick.prompt_row + len(pick.prompt_ids)]
    if not prompt.all():
        position = pick.prompt_start + int(np.argmin(prompt))
    elif pick.row >= 0 and not healthy[pick.row]:
        position = pick.position
    return None if position < 0 else sick_at(position)


def sick_at(position: int) -> str:
    """What a row is told whose logits for `position` are no numbers."""
    return (
        f"the model's logits for position {position} hold a NaN or an infinity, so no token can be chosen; "
        "check the checkpoint, or switch off lossy options"
    )
