"""Multi-Bin Batching (row A16): batches within ever more bins of predicted length."""

from __future__ import annotations

from benchmarks.policies.case import Case
from benchmarks.policies.length_aware import AZURE, HEAVY, figures
from benchmarks.policies.predicted import predicted

BINS = (1, 2, 4, 8)

CASE = Case(
    name="multi-bin",
    title="Batches within bins of similar predicted length",
    goal="Requests per second rise with the number of bins, 1, 2, 4, 8, within noise.",
    variants={f"{k} bins": {"scheduling_policy": f"multi-bin:bins={k},size=8,timeout_s=1"} for k in BINS},
    loads={
        "heavy tail exact": predicted(HEAVY),
        "heavy tail wrong": predicted(HEAVY, 0.4),
        "Azure exact": predicted(AZURE),
    },
    figures=figures,
    share=2.0,
    requests=128,
)
