"""The sampler on a backend's kernels: the results of `runner.sampler`, bit for bit.

What the processors change is changed by them, in numpy; all else happens in one call for all rows of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.batch import PromptLogprobs, RowError, Sampled, TokenLogprobs
from penstock.core.sampling import TokenRules
from penstock.ops.draw_weights import scale_of
from penstock.ops.draws import DrawKernel, DrawRows, Ranked
from penstock.runner.input_batch import Pick
from penstock.runner.logprobs import log_sum
from penstock.runner.sampler import F32, SICK, DraftNode, Sampler, SamplerOutput, sick, sick_at

if TYPE_CHECKING:
    from penstock.runner.logits.grammar_cache import GrammarCache

Job = tuple[F32, Sequence[int], int]
"""See `DrawKernel.logprobs`."""


class KernelSampler(Sampler):
    """`Sampler` on `kernel`, for rows of so many logits. They are arrays, or whatever else the kernel takes that has an
    array's indices."""

    def __init__(self, kernel: DrawKernel, vocab_size: int, grammars: GrammarCache | None = None) -> None:
        super().__init__(vocab_size, grammars)
        self._kernel = kernel
        self._raw, self._changed = kernel.rows(), kernel.rows()

    def sample(self, logits: F32, picks: Sequence[Pick], nodes: Sequence[DraftNode] = ()) -> SamplerOutput:
        """See `Sampler.sample`."""
        if not picks and not nodes:
            return SamplerOutput([], [], [])
        if isinstance(logits, np.ndarray) and logits.strides[1] != 4:
            logits = np.ascontiguousarray(logits)
        rows, follows = self._raw, self.chain.follows
        rows.point(logits)
        drawing: list[int] = []
        followed = plain = 0
        for pick in picks:
            if pick.row >= 0:
                if follows(pick.seq_id):
                    followed += 1
                elif not pick.rules.greedy and pick.num_samples:
                    _ask(rows, pick.row, pick)
                    drawing.append(pick.seq_id)
            rules = pick.rules
            plain += not pick.num_candidates and rules.num_logprobs < 0 and not pick.prompt_ids.size
        for node in nodes:
            if not node.rules.greedy:
                _ask_for(rows, node.row, node.rules, node.sample_index, node.position, 1)
        best, healthy = rows.run(len(logits))
        drawn = rows.tokens()
        chosen = dict(zip(drawing, drawn, strict=False))
        choices = _choices(nodes, best, healthy, drawn[len(drawing) :]) if nodes else []
        if not followed and plain == len(picks) and 0 not in healthy:  # nearly every step
            sampled = [Sampled(p.seq_id, chosen.get(p.seq_id) or [best[p.row]] * p.num_samples) for p in picks]
            return SamplerOutput(sampled, [], [], [], choices)
        return self._collect(logits, picks, best, healthy, chosen)._replace(choices=choices)

    def choose_followed(self, seq_id: int, logits: F32, node: DraftNode) -> int | str:
        """See `Sampler.choose_followed`."""
        if not np.isfinite(logits.max()):
            return sick_at(node.position)
        copies = logits[None].copy()
        self.chain.apply(copies, [seq_id])
        rows = self._changed
        rows.point(copies)
        if not node.rules.greedy:
            _ask_for(rows, 0, node.rules, node.sample_index, node.position, 1)
        best, healthy = rows.run(1)
        peak = rows.peak(0) if healthy[0] or not np.isnan(copies[0]).any() else float("nan")
        problem = self.unusable(seq_id, peak)
        if problem is not None:
            return problem
        return best[0] if node.rules.greedy else rows.tokens()[0][0]

    def _collect(
        self, logits: F32, picks: Sequence[Pick], best: list[int], healthy: list[int], chosen: dict[int, list[int]]
    ) -> SamplerOutput:
        ended: list[int] = []
        out = SamplerOutput([], [], [], ended)
        fit = np.array(healthy, np.bool_)
        seq_ids, copies = self._process(logits, fit, picks)
        tops = self._sample_changed(seq_ids, copies, picks, chosen) if seq_ids else {}
        finals = dict(zip(seq_ids, copies, strict=True))
        jobs: list[Job] = []
        wanted: list[tuple[Pick, bool]] = []
        """Picks of `jobs`, and whether they sample: their prompts' jobs follow."""
        for pick in picks:
            problem, samples = sick(fit, pick), pick.row >= 0
            if problem is None and samples and pick.seq_id in finals:
                problem = self.unusable(pick.seq_id, tops[pick.seq_id][1])
                if problem == "":
                    ended.append(pick.seq_id)
                    problem, samples = None, False
            if problem is not None:
                out.errors.append(RowError(pick.seq_id, problem))
                continue
            if samples:
                if not pick.num_candidates and pick.seq_id not in chosen:
                    top = tops[pick.seq_id][0] if pick.seq_id in tops else best[pick.row]
                    chosen[pick.seq_id] = [top] * pick.num_samples
                if pick.num_candidates:
                    jobs.append((finals.get(pick.seq_id, logits[pick.row]), (), pick.num_candidates))
                elif pick.rules.num_logprobs >= 0:
                    jobs.append((logits[pick.row], chosen[pick.seq_id], pick.rules.num_logprobs))
            for j, token in enumerate(pick.prompt_ids.tolist()):
                jobs.append((logits[pick.prompt_row + j], (token,), pick.rules.num_prompt_logprobs))
            wanted.append((pick, samples))
        found = zip(jobs, self._kernel.logprobs(jobs) if jobs else [], strict=True)
        for pick, samples in wanted:
            if samples and pick.num_candidates:
                out.sampled.append(Sampled(pick.seq_id, [], candidates=_candidates(*next(found))))
            elif samples:
                entries = _entries(*next(found), pick.rules.logprob_ids) if pick.rules.num_logprobs >= 0 else []
                out.sampled.append(Sampled(pick.seq_id, chosen[pick.seq_id], entries))
            if pick.prompt_ids.size:
                prompt = [_entries(*next(found))[0] for _ in range(len(pick.prompt_ids))]
                out.prompt_logprobs.append(PromptLogprobs(pick.seq_id, pick.prompt_start, prompt))
        return out

    def _sample_changed(
        self, seq_ids: list[int], copies: F32, picks: Sequence[Pick], chosen: dict[int, list[int]]
    ) -> dict[int, tuple[int, float]]:
        """(first largest, its logit) of rows that processors have changed, by sequence. Mutates: `chosen`."""
        rows = self._changed
        rows.point(copies)
        at = {seq_id: r for r, seq_id in enumerate(seq_ids)}
        drawing = []
        for pick in picks:
            if pick.seq_id in at and not pick.rules.greedy and pick.num_samples:
                _ask(rows, at[pick.seq_id], pick)
                drawing.append(pick.seq_id)
        best, healthy = rows.run(len(copies))
        chosen.update(zip(drawing, rows.tokens(), strict=True))

        def peak(r: int) -> float:
            return rows.peak(r) if healthy[r] or not np.isnan(copies[r]).any() else float("nan")

        return {seq_id: (best[r], peak(r)) for seq_id, r in at.items()}


def _ask(rows: DrawRows, r: int, pick: Pick) -> None:
    _ask_for(rows, r, pick.rules, pick.sample_index, pick.position, pick.num_samples)


def _ask_for(rows: DrawRows, r: int, rules: TokenRules, sample_index: int, position: int, num_samples: int) -> None:
    rows.ask(
        r, scale_of(rules.temperature), rules.min_p, rules.top_k, rules.top_p, rules.seed, sample_index, position,
        num_samples,
    )  # fmt: skip


def _choices(nodes: Sequence[DraftNode], best: list[int], healthy: list[int], drawn: list[list[int]]) -> list[int]:
    """The token of each node; `drawn` has those of the nodes that are not greedy."""
    tokens = iter(drawn)
    chosen = [best[node.row] if node.rules.greedy else next(tokens)[0] for node in nodes]
    return [token if healthy[node.row] else SICK for node, token in zip(nodes, chosen, strict=True)]


def _entries(job: Job, ranked: Ranked, ids: Sequence[int] = ()) -> list[TokenLogprobs]:
    row, tokens, _ = job
    norm = log_sum(ranked.peak, ranked.total)
    shown = list(ids) or ranked.top_ids
    top = (row[shown].astype(np.float64) - norm).tolist()
    return [
        TokenLogprobs(token, float(row[token]) - norm, rank, shown, top)
        for token, rank in zip(tokens, ranked.ranks, strict=True)
    ]


def _candidates(job: Job, ranked: Ranked) -> list[tuple[int, float]]:
    norm = log_sum(ranked.peak, ranked.total)
    top = (job[0][ranked.top_ids].astype(np.float64) - norm).tolist()
    return [pair for pair in zip(ranked.top_ids, top, strict=True) if pair[1] > -np.inf]
