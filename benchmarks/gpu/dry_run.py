"""The steps of a GPU without one: torch's fake tensors say where each would be, and compute nothing.

    python -m benchmarks.gpu.run --dry-run

A prompt and decode steps of Llama-3.1-8B's shape go through engine, sampler and backend on a device "cuda" that is not
there. An operation that mixes tensors of host and device raises, as it would there. What is listed besides: where a
step makes the host wait for the device (a number that Python wants, a copy back), what it copies to the device, and how
many operations it starts. Numbers that Python wants are made up (1, true), so only the usual way through the code is
seen.
"""

from __future__ import annotations

import ctypes
import json
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock, patch

import numpy as np
import torch
from benchmarks.gpu.adapters import machine_of
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.device_model import Machine, ask, engine_on
from benchmarks.gpu.shapes import spec_of
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.backends.gpu.graphs import CudaGraph

SHAPES = ("llama-3.1-8b", "qwen3-30b-a3b")
PROMPT = 40
"""Tokens: more than a block, so that a table has two."""
_READS = ("item", "__bool__", "__int__", "__float__", "__index__", "numpy", "__array__")
"""Ways of Python to look into a tensor."""
_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {}, "sampled": {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "seed": 1},
    "logprobs": {"num_logprobs": 5}, "penalised": {"repetition_penalty": 1.1, "frequency_penalty": 0.1},
}  # fmt: skip
"""Rules of rows that decode with two steps in flight."""
_SIZED = ("nonzero", "unique")
"""Whose result's size is a number that lies on the device."""


class Seen:
    """Of one step: operations on the device, waits, copies to it; the last two by place."""

    def __init__(self) -> None:
        self.ops: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()

    def told(self) -> dict[str, Any]:
        return {
            "operations": sum(self.ops.values()), "by_name": dict(self.ops.most_common(12)),
            "kernels": {name: count for name, count in self.ops.items() if name.startswith("kernel ")},
            "waits": dict((+self.waits).most_common()),
            "copies_to_device": dict((+self.copies).most_common()),
        }  # fmt: skip


def place() -> str:
    """The line of Penstock that called torch."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/penstock/" in name:
            return f"{name.rsplit('/penstock/', 1)[-1]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


class MadeUp(TorchFunctionMode):
    """What Python wants to know of a tensor on the device is made up, and counted as a wait. Copies to the device go
    around the check that there is one."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self.seen, self.fakes = Seen(), fakes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
        name = getattr(func, "__name__", "")
        if tensor is not None and name in _READS:
            return self.read(name, tensor)
        if tensor is not None and tensor.device.type == "cuda" and name in _SIZED:
            self.seen.waits[f"{place()}: size of {name}"] += 1
            index = torch.zeros(1, dtype=torch.int64, device=tensor.device)
            if name == "unique":
                return index.to(tensor.dtype)
            return (index,) * tensor.ndim if (kwargs or {}).get("as_tuple") else index[:, None].expand(1, tensor.ndim)
        named = dict(kwargs or {})
        if func is torch.from_numpy:
            return self.fakes.from_tensor(func(*args))
        if func is torch.tensor and torch.device(named.get("device") or "cpu").type == "cuda":
            device = named.pop("device")
            return _moved(self.fakes.from_tensor(func(*args, **named)), device)
        if func is torch.Tensor.to and tensor is not None:
            device, dtype, *_ = torch._C._nn._parse_to(*args[1:], **named)
            if device is not None and device.type == "cuda":
                return _moved(tensor, device, dtype)
        return func(*args, **named)

    def read(self, name: str, tensor: torch.Tensor) -> Any:
        """Ones instead of what a tensor holds. A copy on the host has waited already; only its values are missing."""
        if tensor.device.type == "cuda":
            self.seen.waits[f"{place()}: {name.strip('_')} of {list(tensor.shape)}"] += 1
        return _ones(name, tensor)


def _moved(tensor: torch.Tensor, device: Any, dtype: Any = None) -> torch.Tensor:
    if tensor.device.type == torch.device(device).type and dtype in (None, tensor.dtype):
        return tensor
    return torch.ops.aten._to_copy.default(tensor, device=torch.device(device), dtype=dtype or tensor.dtype)


def _ones(name: str, tensor: torch.Tensor) -> Any:
    kind = {torch.bfloat16: np.int16}.get(tensor.dtype) or np.dtype(str(tensor.dtype).removeprefix("torch."))
    ones = np.ones(tuple(tensor.shape), kind)
    if name in ("numpy", "__array__"):
        return ones
    if name == "tolist":
        return ones.tolist()
    one = ones.reshape(-1)[0].item()
    casts: dict[str, Any] = {"__bool__": bool, "__int__": int, "__float__": float}
    return casts.get(name, lambda x: x)(one)


class Watch(TorchDispatchMode):
    """Counts what reaches the device."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        given, made = _where(tensors), _where([out] if isinstance(out, torch.Tensor) else [])
        if func._schema.name in ("aten::_to_copy", "aten::copy_"):
            source = _where(tensors[-1:])
            if source == {"cpu"} and made == {"cuda"}:
                self.seen.copies[place()] += 1
            elif source == {"cuda"} and made == {"cpu"}:
                self.seen.waits[f"{place()}: copy to the host of {list(out.shape)}"] += 1
        if func._schema.name in ("aten::index", "aten::index_put_") and "cuda" in given:
            indices = [x for x in args[1] if isinstance(x, torch.Tensor)]
            self.seen.copies[place()] += "cpu" in _where(indices)
            self.seen.waits[f"{place()}: size of a mask"] += any(x.dtype == torch.bool for x in indices)
        if "cuda" in given | made and not func.is_view and not func._schema.name.startswith("prim::"):
            self.seen.ops[func._schema.name.removeprefix("aten::")] += 1
        return out


def _where(tensors: list[Any]) -> set[str]:
    return {x.device.type for x in tensors}


def kernels(made: MadeUp) -> AbstractContextManager[object]:
    """Where Triton is installed: its kernels are counted, and not launched; each takes tensors of the device alone."""
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        return nullcontext()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        at_host = [x for x in (*args, *named.values()) if isinstance(x, torch.Tensor) and x.device.type != "cuda"]
        if at_host:
            raise RuntimeError(f"the kernel {kernel.__name__} takes {len(at_host)} tensors that the host has")
        made.seen.ops[f"kernel {kernel.__name__}"] += 1

    return patch.object(JITFunction, "run", run)


class CountedGraphs:
    """In place of CUDA graphs: what a step would capture runs once and is counted; a replay counts as one operation."""

    captured: ClassVar[dict[str, Any]] = {}
    made: ClassVar[Any] = None

    def __init__(self, device: torch.device) -> None:
        """`device`: as `CudaGraphs` has it."""

    def capture(self, fn: Any) -> Any:
        seen, before = Seen(), self.made.seen
        self.made.seen = seen
        with Watch(seen):
            result = fn()
        self.made.seen = before
        self.captured[f"captured step of {len(result)}"] = seen.told()

        def replay() -> None:
            self.made.seen.ops["graph"] += 1

        return CudaGraph(result, replay)


def graphs(made: MadeUp) -> AbstractContextManager[object]:
    """Graphs are mocked, and so is what only a driver has: pinned memory, its events."""
    stack, zeros = ExitStack(), torch.zeros
    CountedGraphs.made = made
    CountedGraphs.captured.clear()
    stack.enter_context(patch("penstock.backends.gpu.warm.CudaGraphs", CountedGraphs))
    stack.enter_context(patch.object(torch.cuda, "Event", Mock))
    stack.enter_context(patch.object(torch.cuda, "memory_reserved", Mock(return_value=0)))
    stack.enter_context(patch.object(torch.cuda, "current_stream", Mock()))
    pageable = lambda *size, pin_memory=False, **named: zeros(*size, **named)  # noqa: E731
    stack.enter_context(patch.object(torch, "zeros", pageable))
    return stack


def guard() -> None:
    """Let torch without GPU libraries name a device "cuda": the guard that changes nothing, which is there for "meta",
    stands in for the one that would change the current device. Fake tensors do the same where torch has the libraries
    and no GPU is there."""
    if torch.cuda.is_available() or torch.version.cuda is not None:
        return
    kinds = torch.autograd.DeviceType
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (int(kinds.Meta) + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[int(kinds.CUDA)] = guards[int(kinds.Meta)]


def steps(bench: Bench, name: str) -> dict[str, Any]:
    """What a prompt of one sequence, decode steps of one and of three, and a sampled one would do; and, with two steps
    in flight, what happens between one step's result and the next: a step is given to the device, and one is read."""
    found: dict[str, Any] = {}
    made = MadeUp(FakeTensorMode(allow_non_fake_inputs=True))
    # Their own `tolist` asks for number by number.
    lists = patch.object(FakeTensor, "tolist", lambda tensor: made.read("tolist", tensor))
    with made.fakes, made, lists, kernels(made), graphs(made):
        machine = engine_on(bench, spec_of(name, bench.tiny), num_seqs=4, num_tokens=256, budget=64)
        found |= CountedGraphs.captured
        found["prefill"] = _step(made, machine, lambda: ask(machine.core, 0, PROMPT, 16, machine.spec.vocab_size))
        found["decode 1"] = _step(made, machine)
        for number in (1, 2):
            _step(made, machine, lambda n=number: ask(machine.core, n, PROMPT, 16, machine.spec.vocab_size))
        found["decode 3"] = _step(made, machine)
        more = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 1}
        _step(made, machine, lambda: ask(machine.core, 3, PROMPT, 16, machine.spec.vocab_size, **more))
        found["decode 4, one of them sampled"] = _step(made, machine)
        machine = engine_on(bench, spec_of(name, bench.tiny), num_seqs=4, num_tokens=256, budget=64, depth=2)
        for number, (kind, rules) in enumerate(_KINDS.items()):
            _step(
                made, machine, lambda n=number, r=rules: ask(machine.core, n, PROMPT, 5, machine.spec.vocab_size, **r)
            )
            found[f"two in flight, {kind}"] = _step(made, machine)
            while machine.core.has_work:
                _step(made, machine)
        if name == SHAPES[0]:
            machine, refs = machine_of(bench, spec_of(name, bench.tiny), 2, 4, num_seqs=4, num_tokens=256, budget=64)
            for number, ref in enumerate((refs[0], None, refs[1])):
                rules = {} if ref is None else {"adapter": ref}
                asked = partial(ask, machine.core, number, PROMPT, 16, machine.spec.vocab_size, **rules)
                _step(made, machine, asked)
            found["decode 3, two of them with adapters"] = _step(made, machine)
            found |= {f"{kind}, with adapters": told for kind, told in CountedGraphs.captured.items()}
    return found


def _step(made: MadeUp, machine: Machine, before: Any = None) -> dict[str, Any]:
    if before is not None:
        before()
    seen = made.seen = Seen()
    with Watch(seen):
        out = machine.core.step()
    errors = [o.error for o in out if o.error]
    if errors or not any(o.token_ids for o in out):
        raise RuntimeError(f"the step gave no tokens: {errors}")
    return seen.told()


def dry_run(out: Path, tiny: bool = False, names: Sequence[str] = SHAPES) -> int:
    """Every shape, with its traceback if it fails; `out/dry-run.json`. Returns an exit status."""
    out.mkdir(parents=True, exist_ok=True)
    guard()
    bench = Bench("cuda:0", tiny, out / "dry-lines.jsonl")
    found: dict[str, Any] = {"torch": torch.__version__}
    for name in names:
        try:
            found[name] = steps(bench, name)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    (out / "dry-run.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    for name, told in found.items():
        if not isinstance(told, dict):
            continue
        if "error" in told:
            print(f"{name}: {told['error']}\n{told['trace']}")
            continue
        for step, seen in told.items():
            copies, waits = sum(seen["copies_to_device"].values()), sum(seen["waits"].values())
            print(f"{name}, {step}: {seen['operations']} operations, {copies} copies to the device, {waits} waits")
            for what in ("waits", "copies_to_device"):
                for where, count in seen[what].items():
                    print(f"    {what}: {count} x {where}")
    return int("error" in found[names[0]])
