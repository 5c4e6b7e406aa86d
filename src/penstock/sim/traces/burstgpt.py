"""BurstGPT: times and lengths of requests to ChatGPT and GPT-4, with the failed ones among them.

A request whose response has 0 tokens failed; it was asked, but nothing is known of the work it would have been, so it
is left out. Columns are found by their names: later releases have a session and an elapsed time as well.

Source: Wang et al., BurstGPT, arXiv 2401.17644; github.com/HPMLL/BurstGPT.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.base.errors import InputError
from penstock.sim.traces import TraceOptions
from penstock.sim.traces.reading import columns, lines, num_lines, seconds, whole
from penstock.sim.workload import MAX_TOKENS, Broken, TimedRequest, Workload

NEEDED = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")


class BurstGpt:
    name = "burstgpt"
    about = "time, prompt tokens, output tokens, and the model as tenant; failed requests are left out"

    def recognises(self, path: Path, head: bytes) -> bool:
        names = _names(head.partition(b"\n")[0].decode("utf-8", "replace"))
        return set(NEEDED) <= set(names)

    def open(self, path: Path, options: TraceOptions) -> Workload:
        broken = Broken(options.skip_broken)
        total = num_lines(path)
        return Workload(
            path.stem,
            f"BurstGPT trace {path.name}, without failed requests",
            lambda: _requests(path, broken),
            num_requests=None if total is None else max(0, total - 1),
            broken=broken,
        )


def _names(header: str) -> list[str]:
    return [name.strip() for name in header.lstrip("\ufeff").strip().split(",")]


def _requests(path: Path, broken: Broken) -> Iterator[TimedRequest]:
    """Raises InputError naming file and line."""
    rows = lines(path)
    number, header = next(rows, (1, ""))
    names = _names(header)
    missing = [name for name in NEEDED if name not in names]
    if missing:
        raise InputError(f"{path}:{number}: the header lacks {', '.join(missing)}", param="trace")
    time, model, prompt, output = (names.index(name) for name in ("Timestamp", "Model", *NEEDED[2:4]))
    first_s: float | None = None
    latest_s = 0.0
    for number, text in rows:
        try:
            cells = columns(text, len(names))
            at_s = seconds(cells[time], "Timestamp")
            num_prompt = whole(cells[prompt], "Request tokens", 0, MAX_TOKENS)
            num_output = whole(cells[output], "Response tokens", 0, MAX_TOKENS)
            if at_s < latest_s:
                raise ValueError("arrived before the line above it; sort the file by time")
        except ValueError as error:
            broken.add(f"{path}:{number}", str(error))
            continue
        latest_s = at_s
        first_s = at_s if first_s is None else first_s
        if num_prompt and num_output:
            yield TimedRequest(at_s - first_s, num_prompt, num_output, tenant=cells[model].strip())
