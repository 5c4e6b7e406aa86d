"""LLMLingua: whole units by perplexity first, then tokens, segment by segment behind what was kept.

Source: Jiang et al., LLMLingua, arXiv 2310.05736, sections 4.1 (budget controller, Algorithm 1) and 4.2 (iterative
token-level prompt compression, Algorithm 2).

Budget controller: instruction and question are what the request does not mark as compressible; they stay whole, so
the budget is the context's. Its demonstrations, here sentences or paragraphs, are kept from the highest perplexity down
until they have `coarse` times the tokens wanted (k, 2 in the paper). Iterative pruning: what is left is read in
segments of 100 tokens, each behind the prompt as compressed so far (equation 5), and each keeps its most surprising
tokens; the threshold of a segment is the one that meets its share of the budget, so that the sum is exact.

Perplexities are those of the text in its place; the paper reads each demonstration by itself.
"""

from __future__ import annotations

from penstock.compress.units import UNITS
from penstock.core.compression import ContextJob, PromptCompression
from penstock.core.protocols import TokenReader


class LLMLingua:
    name = "llmlingua"
    reads = True
    options = frozenset(("unit", "segment_tokens", "coarse"))
    units = ("sentence", "paragraph")

    def __init__(self, options: PromptCompression) -> None:
        self._cut = UNITS[options.unit or "sentence"]
        self._segment = options.segment_tokens or 100
        self._coarse = 2.0 if options.coarse is None else options.coarse

    def keep(self, job: ContextJob, reader: TokenReader | None) -> list[int]:
        assert reader is not None
        return self._prune(job, self._choose(job, reader), reader)

    def _choose(self, job: ContextJob, reader: TokenReader) -> list[int]:
        """Places of the tokens of the units kept: at least `coarse` times the target, or all."""
        wanted = min(job.num_context, self._coarse * job.target)
        if wanted == job.num_context:
            return list(job.context())
        nats = reader.nats((), job.ids[: job.spans[-1][1]]).tolist()
        units = [unit for span in job.spans for unit in self._cut(job.texts, span)]
        order = sorted(units, key=lambda u: (-sum(nats[u[0] : u[1]]) / (u[1] - u[0]), u))
        kept: list[int] = []
        for unit in order:
            if len(kept) >= wanted:
                break
            kept += range(*unit)
        return sorted(kept)

    def _prune(self, job: ContextJob, places: list[int], reader: TokenReader) -> list[int]:
        """`job.target` of `places`."""
        kept: list[int] = []
        prefix: list[int] = []  # the prompt as it will be, up to `read`
        read = 0
        compressible = bytearray(len(job.ids))
        for i in job.context():
            compressible[i] = 1
        for start in range(0, len(places), self._segment):
            segment = places[start : start + self._segment]
            quota = job.target * (start + len(segment)) // len(places) - len(kept)
            candidates = set(segment)
            shown = [i for i in range(read, segment[-1] + 1) if i in candidates or not compressible[i]]
            read = segment[-1] + 1
            nats = dict(zip(shown, reader.nats(prefix, [job.ids[i] for i in shown]).tolist(), strict=True))
            best = set(sorted(segment, key=lambda i: (-nats[i], i))[:quota])
            kept += [i for i in segment if i in best]
            prefix += [job.ids[i] for i in shown if i in best or not compressible[i]]
        return kept
