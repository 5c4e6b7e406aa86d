"""How fast weights come into memory from a cold disk and from a warm cache, by the format of their file.

    python -m benchmarks.engine.load_times MODEL [--rounds 5] [--out FILE]

The same bytes (the model's packed matrices) in three files on one disk: a *pickle* (what `torch.save` is in essence),
read by `pickle.load`; *safetensors*, mapped, each tensor copied into memory of its own; and the *own* format, as
`PackedStore.load` reads it at every start: large parts, several at a time, past the system's cache if they are not in
it, straight to their places, with all checks. Cold: the file was dropped from the system's cache, which mincore
confirms. Warm: mincore says that all of it is there. The drive's *raw* rate, past the cache with four readers, is
measured in the same rounds. Every round runs all, and begins with another one; figures are medians.

Two more things are told: whether an engine that packs and one that reads its file say the same tokens, and how far the
estimate of `route.start_place` is from the measured time: the rates are those of a file with every second matrix.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import about, save, show
from rich.console import Console

from penstock import LLM, SamplingParams
from penstock.bench.startup import forget_pages
from penstock.ops.native.direct_file import U8, DirectFile, cached_pages
from penstock.ops.native.packed_file import SUFFIX, PackedStore, huge_pages
from penstock.route.start_place import StartNode

PART, READERS = 4 << 20, 4
HALF = "0" * 64
PROMPT = "def quicksort(items):"


def tokens_of(model: str) -> tuple[str, list[int]]:
    """Of a greedy answer, and whether the packed file was read or made."""
    llm = LLM(model, max_model_len=512, max_num_seqs=1)
    packed_file = llm.engine.core.executor.packed_file
    found = llm.generate([PROMPT], SamplingParams(max_tokens=32, temperature=0.0))[0].outputs[0].token_ids
    llm.engine.core.executor.close()
    return packed_file, list(found)


def write_safetensors(path: Path, arrays: dict[str, U8]) -> None:
    """All as U8: what is measured is bytes."""
    header, at = {}, 0
    for name, array in arrays.items():
        header[name] = {"dtype": "U8", "shape": [array.nbytes], "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(array.data)


def copied_safetensors(path: Path) -> dict[str, U8]:
    """Each tensor in memory of its own."""
    mapped = np.memmap(path, np.uint8, "r")
    length = int.from_bytes(mapped[:8].tobytes(), "little")
    header, start = json.loads(mapped[8 : 8 + length].tobytes()), 8 + length
    spans = {name: entry["data_offsets"] for name, entry in header.items()}
    return {name: np.array(mapped[start + first : start + last]) for name, (first, last) in spans.items()}


def unpickled(path: Path) -> dict[str, U8]:
    with path.open("rb") as file:
        found: dict[str, U8] = pickle.load(file)
    return found


def raw(path: Path) -> U8:
    """The file past the cache, into memory that is used again: what the drive gives."""
    file, size = DirectFile(os.open(path, os.O_RDONLY)), path.stat().st_size // PART * PART
    into = huge_pages(READERS * PART)
    into[:] = 0

    def go(k: int) -> None:
        for at in range(k * PART, size, READERS * PART):
            file.read(at, into[k * PART : (k + 1) * PART])

    with ThreadPoolExecutor(READERS) as readers:
        list(readers.map(go, range(READERS)))
    return into


def share_kept(path: Path) -> float:
    """Of the file's pages, those that are in the system's cache."""
    with path.open("rb") as file:
        found = cached_pages(file.fileno())
    assert found is not None, "this system does not say what its cache has"
    return float(found.mean())


def timed(work: Callable[[Path], Any], path: Path, *, cold: bool) -> float:
    if cold:
        forget_pages([path])
        assert share_kept(path) < 0.01, f"{path} stays in the cache: somebody has it mapped"
    else:
        with path.open("rb", 0) as file:
            while file.read(PART):
                pass
        assert share_kept(path) > 0.99, "memory is too short for a warm cache"
    began_s = time.perf_counter()
    held = work(path)
    took_s = time.perf_counter() - began_s
    del held
    return took_s


def arrays_of(matrices: dict[str, Any]) -> dict[str, U8]:
    """Name -> bytes; the same order and content as in the own file."""
    found = {}
    for name, m in matrices.items():
        for part, array in (("data", m.data), ("bias", m.bias), ("order", m.order)):
            if array is not None:
                found[f"{name}.{part}"] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return found


def measure(model: str, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=PackedStore().folder.parent) as folder:
        os.environ["PENSTOCK_CACHE"] = folder
        made, read = tokens_of(model), tokens_of(model)
        assert (made[0], read[0]) == ("made", "read"), "the model is too small to be kept packed"
        store = PackedStore()
        key = next(store.folder.glob("*" + SUFFIX)).stem
        matrices = store.load(key)
        assert matrices is not None
        half = dict(list(matrices.items())[::2])
        store.save(HALF, half)
        arrays = arrays_of(matrices)
        num_bytes = {"whole": sum(a.nbytes for a in arrays.values())}
        num_bytes["half"] = sum(a.nbytes for a in arrays_of(half).values())
        files = {name: Path(folder) / name for name in ("pickle", "safetensors")}
        with files["pickle"].open("wb") as file:
            pickle.dump(arrays, file, protocol=5)
        write_safetensors(files["safetensors"], arrays)
        files |= {"own": store.path(key), "half": store.path(HALF), "raw": store.path(key)}
        works: dict[str, Callable[[Path], Any]] = {
            "pickle": unpickled, "safetensors": copied_safetensors, "own": lambda _: store.load(key),
            "half": lambda _: store.load(HALF), "raw": raw,
        }  # fmt: skip
        del arrays, half, matrices
        huge_pages(3 * num_bytes["whole"])[::4096] = 1  # virtual machines get memory that was never used slowly
        samples: dict[str, list[float]] = {}
        for turn in range(rounds):
            names = list(works)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                for cold in (True, False) if name != "raw" else (True,):
                    took_s = timed(works[name], files[name], cold=cold)
                    samples.setdefault(f"{name}, {'cold' if cold else 'warm'}", []).append(took_s)
    return judged(samples, num_bytes) | {"same_tokens": made[1] == read[1], "samples_s": samples}


def judged(samples: dict[str, list[float]], num_bytes: dict[str, int]) -> dict[str, Any]:
    median = {name: statistics.median(values) for name, values in samples.items()}
    rates = {name: num_bytes["half" if name.startswith("half") else "whole"] / s for name, s in median.items()}
    estimates = {}
    for tier, state in enumerate(("warm", "cold")):
        node = StartNode(0, (int(rates["half, warm"]), int(rates["half, cold"])), {"m": tier})
        estimates[state] = node.start_us("m", num_bytes["whole"]) / 1e6 / median[f"own, {state}"]
    return {
        "bytes": num_bytes, "median_s": median, "bytes_per_s": rates,
        "of_raw": rates["own, cold"] / rates["raw, cold"], "estimated_of_measured": estimates,
        "times_pickle": {s: median[f"pickle, {s}"] / median[f"own, {s}"] for s in ("cold", "warm")},
        "times_safetensors": {s: median[f"safetensors, {s}"] / median[f"own, {s}"] for s in ("cold", "warm")},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out")
    args = parser.parse_args()
    found = measure(args.model, args.rounds)
    rows = [
        [name, f"{seconds:.3f}", f"{found['bytes_per_s'][name] / 1e9:.2f}"]
        for name, seconds in found["median_s"].items()
    ]
    console = Console()
    show(console, f"{found['bytes']['whole'] / 1e6:,.0f} MB of packed weights", ("file", "s", "GB/s"), rows)
    for name in ("times_pickle", "times_safetensors", "of_raw", "estimated_of_measured", "same_tokens"):
        console.print(f"{name}: {found[name]}")
    save(args.out, about(model=Path(args.model).name, rounds=args.rounds) | found)


if __name__ == "__main__":
    main()
