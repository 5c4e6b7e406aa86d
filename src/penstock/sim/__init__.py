"""L13: whole services on a virtual clock: real traces through the real scheduler, on a device that only costs time.

`workload` and `traces` say what arrives when, `driver` runs it through an engine from `build`, `metrics` measures,
`report` shows. Source of the idea: Vidur, arXiv 2405.05465.
"""
