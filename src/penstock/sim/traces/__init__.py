"""Published traces by format. One file each; add a line here to add one.

A format has `name`, `about`, `recognises(path, head)` (`head`: the first bytes of a file, b"" for a folder) and
`open(path, options) -> Workload`. What it yields is bounded and in order of arrival, read line by line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.base.errors import InputError
from penstock.base.registry import Registry

WORKLOADS: Registry[Callable[[], Any], None] = Registry("trace format")
WORKLOADS.add("alibaba", "penstock.sim.traces.alibaba:Alibaba")
WORKLOADS.add("azure2023", "penstock.sim.traces.azure:Azure")
WORKLOADS.add("burstgpt", "penstock.sim.traces.burstgpt:BurstGpt")
WORKLOADS.add("mooncake", "penstock.sim.traces.mooncake:Mooncake")
WORKLOADS.add("servegen", "penstock.sim.traces.servegen:ServeGen")
WORKLOADS.add("vidur", "penstock.sim.traces.vidur:Vidur")

_HEAD_BYTES = 4096


@dataclass(frozen=True)
class TraceOptions:
    """`skip_broken`: count broken lines instead of refusing the file. `seed`: for formats that are distributions.

    `num_prompt`, `num_output`: lengths for formats that have none.
    """

    skip_broken: bool = False
    seed: int = 0
    num_prompt: int = 512
    num_output: int = 128


def open_trace(path: str | Path, options: TraceOptions | None = None, *, format: str | None = None) -> Any:
    """The workload in a trace file or folder, by its content unless `format` names it. Nothing but its head is read
    yet.

    Raises InputError if it cannot be read or is of no known format; ConfigError for an unknown `format`.
    """
    options = options or TraceOptions()
    trace = Path(path)
    if format is not None:
        return WORKLOADS.get(format)().open(trace, options)
    head = b""
    if not trace.is_dir():
        try:
            with open(trace, "rb") as file:
                head = file.read(_HEAD_BYTES)
        except OSError as error:
            raise InputError(f"{trace}: cannot be read: {error.strerror}", param="trace") from None
    for name in WORKLOADS:
        loader = WORKLOADS.get(name)()
        if loader.recognises(trace, head):
            return loader.open(trace, options)
    raise InputError(
        f"{trace}: is a trace of no known format; name one of {', '.join(WORKLOADS)} with --format", param="trace"
    )
