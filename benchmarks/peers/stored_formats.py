"""The same GGUF file in Penstock, llama.cpp, ik_llama.cpp and OpenVINO, in turns: prompts, decoding, memory, tokens.

    python -m benchmarks.peers.stored_formats --files a.gguf b.gguf --pairs 7 --out formats.json

Peers run as libraries in processes of their own (README.md says how to build them; `ik-repacked` is ik with weights
rearranged while loading, which its -rtr asks for). All that are measured are loaded; those that wait are stopped. In
every round each has one turn, and every round begins with the next one: the memory's speed, a prompt of --prompt
tokens, then --decode-behind tokens and --new more, of --sequences at once. Prompts are a text in the file's own tokens,
from another place in every round.

The table: medians of tokens/s, plus or minus half of all that was seen; `ours/it` is Penstock's over the engine's with
a 95 % interval over the rounds. `of memory`: decoded tokens/s times the bytes that one token reads, over the bytes/s
that the turn began with. `alike`: in how many rounds the first 32 tokens are Penstock's, and in brackets the earliest
at which they part; engines that round differently part where two tokens are nearly as likely. `MB`: what is resident
behind the first turn, in brackets how much of it is anonymous; pages of a mapped file count once they have been read.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import about, figures, save, show
from benchmarks.peers import measure
from benchmarks.peers.engines import Place, Spec, default_place
from benchmarks.peers.process import EngineError, EngineProcess, started
from benchmarks.peers.rows import compare
from benchmarks.peers.run import bar, machine, order
from benchmarks.peers.workloads import WARM_UP
from rich.console import Console

from penstock.bench.bandwidth import ReadProbe
from penstock.eval.sample import SAMPLE
from penstock.formats.gguf import Gguf, read_gguf
from penstock.plan.probe import probe as probe_machine
from penstock.text.gguf import tokenizer_from_gguf

OURS = "penstock"
COMPARED = 32
STEP, OTHER = 37, 101
"""Tokens between the beginnings of two rounds' prompts, and rounds between those of two sequences."""
CONTESTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    OURS: ("penstock", {"enable_prefix_caching": False}),
    "llama.cpp": ("llama-lib", {"prefix_cache": False}),
    "ik": ("ik", {"prefix_cache": False}),
    "ik-repacked": ("ik", {"prefix_cache": False, "model": {"repack_tensors": True, "use_mmap": False}}),
    "openvino": ("openvino", {"prefix_cache": False}),
}
"""Name -> (the engine of engines.py, what its adapter is told)."""


@dataclass
class Turns:
    """What one engine did with one file; lists have an entry for every round."""

    name: str
    version: str = ""
    start_s: float = 0.0
    resident: dict[str, int] = field(default_factory=dict)
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    probe: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    error: str = ""


def read_per_token(model: Gguf) -> int:
    """Bytes of weights that one decoded token reads: all, but of an embedding that is not the head, too, a row; of
    experts those that a token chooses."""
    beside = "token_embd.weight" if "output.weight" in model.tensors else ""
    kind = model.metadata["general.architecture"]
    chosen, of = (model.metadata.get(f"{kind}.expert_{name}", 1) for name in ("used_count", "count"))
    return sum(
        t.nbytes * chosen // of if "_exps." in name else t.nbytes for name, t in model.tensors.items() if name != beside
    )


def prompt(ids: Sequence[int], length: int, number: int) -> list[int]:
    """`length` of the text's tokens from the round's own place on; the text begins anew at its end."""
    begin = (number - WARM_UP) * STEP
    return [ids[(begin + i) % len(ids)] for i in range(length)]


def resident(pid: int) -> dict[str, int]:
    """Bytes of a process and all it has started: {"all": ..., "anonymous": ...}."""
    total, todo = {"all": 0, "anonymous": 0}, [pid]
    while todo:
        one = Path(f"/proc/{todo.pop()}")
        try:
            lines = dict(line.split(":", 1) for line in (one / "status").read_text().splitlines())
            children = [int(child) for path in one.glob("task/*/children") for child in path.read_text().split()]
        except OSError:
            continue
        total["all"] += 1024 * int(lines["VmRSS"].split()[0])
        total["anonymous"] += 1024 * int(lines["RssAnon"].split()[0])
        todo += children
    return total


def parted(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> list[int | None]:
    """For every round where the first COMPARED tokens part, from 0; None where they do not."""
    return [
        next((i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b), None)
        for mine, other in zip(ours, theirs, strict=False)
    ]


class Match:
    """One file in all engines. `close` ends them."""

    def __init__(self, file: Path, names: Sequence[str], args: argparse.Namespace, place: Place) -> None:
        self.args, self.place, self.file = args, place, file
        self.turns = {name: Turns(name) for name in names}
        model = read_gguf(file)
        self.read_bytes = read_per_token(model)
        self.ids = tokenizer_from_gguf(model.metadata).encode(SAMPLE)
        self.engines: dict[str, EngineProcess] = {}

    def start(self, name: str) -> None:
        """Starts an engine and has it take a turn that does not count; one that cannot is left out from then on."""
        engine, options = CONTESTANTS[name]
        many = self.args.sequences
        room = (
            {"max_model_len": self.args.context}
            if name == OURS
            else {"context": self.args.context * many, "slots": many}
        )
        told = options | room | json.loads(self.args.options).get(name, {})
        turns = self.turns[name]
        self._only(name)
        try:
            process, answer = started(
                Spec(engine, "stored"), self.place, str(self.file), self.args.threads, told,
                timeout_s=self.args.timeout_s, logs=self.place.folder / "logs",
            )  # fmt: skip
            self.engines[name] = process
            turns.version, turns.start_s = answer["version"], answer["start_s"]
            self._run(process, WARM_UP)
            turns.resident = resident(process.pid)
        except (EngineError, ValueError) as error:
            self._drop(name, error)

    def turn(self, name: str, number: int, probe: ReadProbe) -> None:
        turns, process = self.turns[name], self.engines.get(name)
        if process is None:
            return
        self._only(name)
        rate = probe.measure(3).median
        try:
            prefill, decode, tokens = self._run(process, number)
        except (EngineError, ValueError) as error:
            self._drop(name, error)
            return
        turns.probe.append(rate)
        turns.prefill.append(prefill)
        turns.decode.append(decode)
        turns.tokens.append(tokens[:COMPARED])

    def _run(self, process: EngineProcess, number: int) -> tuple[float, float, list[int]]:
        """(prompt tokens/s, decoded tokens/s, the decoded tokens)."""
        found, args = [], self.args
        for length, new, count in ((args.prompt, 1, 1), (args.decode_behind, args.new, args.sequences)):
            requests = [(prompt(self.ids, length, number + i * OTHER), new) for i in range(count)]
            answer = process.ask(args.timeout_s, op="run", requests=requests)
            found.append(measure.figures(requests, answer["stamps"], answer["wall_s"]))
        decoded = found[1]["decode_tps"] if args.sequences == 1 else measure.together_tps(answer["stamps"])
        if decoded is None:
            raise EngineError("the sequences never decoded all at once; give more --new")
        return found[0]["prefill_tps"], decoded, answer["tokens"][0]

    def _only(self, name: str) -> None:
        for other, process in self.engines.items():
            process.freeze(other != name)

    def _drop(self, name: str, error: Exception) -> None:
        self.turns[name].error = str(error)
        process = self.engines.pop(name, None)
        if process is not None:
            process.kill()

    def close(self) -> None:
        for process in self.engines.values():
            process.freeze(False)
            process.stop()


def summary(match: Match) -> dict[str, Any]:
    """Everything about one file, as plain data."""
    ours, found = match.turns.get(OURS), {}
    for name, turns in match.turns.items():
        entry: dict[str, Any] = {"version": turns.version, "start_s": turns.start_s, "resident": turns.resident}
        if turns.error:
            entry["error"] = turns.error
        if turns.decode:
            shares = [rate * match.read_bytes / speed for rate, speed in zip(turns.decode, turns.probe, strict=True)]
            entry |= {
                "prefill_tps": figures(turns.prefill), "decode_tps": figures(turns.decode),
                "of_memory": figures(shares), "rounds": {k: getattr(turns, k) for k in ("prefill", "decode", "probe")},
            }  # fmt: skip
        if turns.decode and ours is not None and ours.decode and name != OURS:
            for figure in ("prefill", "decode"):
                mine, theirs = (dict(enumerate(getattr(t, figure))) for t in (ours, turns))
                ratio = compare(mine, theirs, name, rate=True)
                entry[f"{figure}_ratio"] = {"value": ratio.value, "low": ratio.low, "high": ratio.high}
            entry["parted"] = parted(ours.tokens, turns.tokens)
        found[name] = entry
    return {
        "file": match.file.name,
        "bytes": match.file.stat().st_size,
        "read_bytes": match.read_bytes,
        "engines": found,
    }


def rows(found: dict[str, Any]) -> list[list[str]]:
    """The table of one file; ratios are Penstock's speed over the engine's."""
    out = []
    for name, e in found["engines"].items():
        if "decode_tps" not in e:
            out.append([name, e.get("error", "no round")[:60], *[""] * 6])
            continue
        where = e.get("parted", [])
        earliest = min((at for at in where if at is not None), default=None)
        alike = f"{where.count(None)} of {len(where)}" + ("" if earliest is None else f" ({earliest})")
        out.append([
            f"{name}, failed" if "error" in e else name,
            _spread(e["prefill_tps"]), _ratio(e.get("prefill_ratio")), _spread(e["decode_tps"]),
            _ratio(e.get("decode_ratio")), f"{e['of_memory']['median']:.2f}", alike if where else "",
            f"{e['resident']['all'] / 1e6:,.0f} ({e['resident']['anonymous'] / 1e6:,.0f})",
        ])  # fmt: skip
    return out


def _spread(found: dict[str, float]) -> str:
    return f"{found['median']:,.1f} ±{50 * (found['high'] - found['low']) / found['median']:.0f}%"


def _ratio(found: dict[str, float | None] | None) -> str:
    if found is None:
        return ""
    return f"{found['value']:.2f}" + ("" if found["low"] is None else f" ({found['low']:.2f}–{found['high']:.2f})")


COLUMNS = ("engine", "prompt/s", "ours/it", "decode/s", "ours/it", "of memory", "alike", "MB")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", nargs="+", type=Path, required=True, metavar="GGUF")
    parser.add_argument("--engines", default=",".join(CONTESTANTS))
    parser.add_argument("--pairs", type=int, default=7, help="rounds (default: 7)")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--decode-behind", type=int, default=128, help="tokens before those that are decoded")
    parser.add_argument(
        "--sequences", type=int, default=1, help="decoded at once; `decode` is of all, while all decode"
    )
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=probe_machine().num_cores)
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("--options", default="{}", metavar="JSON", help='{"penstock": {"quantization": "int8-w8a8"}}')
    parser.add_argument("--peers", type=Path, help="default: $PENSTOCK_PEERS or ~/.cache/penstock-peers")
    parser.add_argument("--out")
    args = parser.parse_args(argv)
    names = args.engines.split(",")
    unknown = [name for name in names if name not in CONTESTANTS]
    missing = [str(file) for file in args.files if not file.is_file()]
    if unknown or missing or args.new < COMPARED:
        parser.error(
            f"there is no engine {unknown[0]!r}: {', '.join(CONTESTANTS)}" if unknown
            else f"{missing[0]} is not there" if missing else f"--new is at least {COMPARED}, which are compared"
        )  # fmt: skip
    place = Place(args.peers.expanduser()) if args.peers else default_place()
    console, found = Console(), []
    with ReadProbe(512 << 20, args.threads) as probe, bar(len(args.files) * (args.pairs + 1) * len(names), console) as (
        say, advance,
    ):  # fmt: skip
        for file in args.files:
            match = Match(file.resolve(), names, args, place)
            try:
                for number in range(WARM_UP, args.pairs):
                    for name in names if number == WARM_UP else order(names, number):
                        say(f"{file.name} {name} #{number}")
                        match.start(name) if number == WARM_UP else match.turn(name, number, probe)
                        advance()
            finally:
                match.close()
            found.append(summary(match))
            speed = statistics.median([s for t in match.turns.values() for s in t.probe] or [0.0])
            title = f"{file.name}, {found[-1]['bytes'] / 1e6:,.0f} MB; memory {speed / 1e9:.1f} GB/s"
            show(console, title, COLUMNS, rows(found[-1]))
            asked = {
                k: getattr(args, k)
                for k in ("pairs", "prompt", "decode_behind", "sequences", "new", "context", "threads", "options")
            }
            save(args.out, about(machine=machine(), asked=asked, files=found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
