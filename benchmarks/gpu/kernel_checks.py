"""Every kernel of `penstock.backends.gpu.kernels` on the device, against plain sums in float64 or the sampler."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import numpy as np
import torch
from benchmarks.gpu.bench import Bench, Stop

from penstock.core.sampling import TokenRules
from penstock.ops.ref import rotary
from penstock.runner.sampler import draw as sampler_draw

KERNELS = "penstock.backends.gpu.kernels"
Results = Iterator[tuple[str, float, float]]
"""(what was tried, how far it was off, how far it may be)."""


def run(bench: Bench) -> None:
    """A line for every kernel. Raises: Stop if there are none, or nothing they could run on."""
    try:
        entries: Any = import_module(KERNELS).KERNELS
        import_module("triton")
    except (ImportError, AttributeError) as error:
        raise Stop(f"there are no kernels of Penstock's own to be had here ({error})") from None
    if bench.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise Stop(f"{len(entries)} kernels, which need a GPU or TRITON_INTERPRET=1")
    for entry in entries:
        if entry.name not in CHECKS:
            bench.check(f"kernel.{entry.name}", False, "this benchmark does not know how to check it")
            continue
        bench.attempt(f"kernel.{entry.name}", lambda entry=entry: check(bench, entry))


def check(bench: Bench, entry: Any) -> None:
    module, _, name = entry.launcher.partition(":")
    launcher = getattr(import_module(module), name)
    wrong, tried, worst = [], 0, 0.0
    for what, off, may in CHECKS[entry.name](launcher, bench.device):
        if bench.left_s() < 2:
            raise Stop(f"the stage's time was over after {tried} cases, of which {len(wrong)} were wrong")
        tried += 1
        worst = max(worst, off)
        if not off <= may:  # NaN is wrong, too
            wrong.append(f"{what}: {off:.1e}, and {may:.0e} may be")
    said = f"{tried} cases, the largest difference {worst:.1e}" + "".join(f"; {text}" for text in wrong)
    bench.check(f"kernel.{entry.name}", not wrong, said)


def _off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference in units of the largest value; infinity for another shape or a NaN."""
    found = found.double().cpu()
    if found.shape != wanted.shape or not bool(torch.isfinite(found).all()):
        return float("inf")
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-9))


def _normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- attention -----------------------------------------------------------------------------------------------------

_RULES: dict[str, dict[str, Any]] = {
    "plain": {}, "window": {"window": 7}, "chunk": {"chunk": 24}, "soft cap": {"soft_cap": 1.5},
    "ALiBi": {"slopes": True}, "sinks": {"sinks": True},
    "all": {"window": 40, "soft_cap": 2.0, "slopes": True, "sinks": True},
}  # fmt: skip
_KINDS = {"float32": 2e-3, "float16": 1e-2, "bfloat16": 5e-2, "int8": 5e-2, "e4m3": 5e-2}


def _attention(prefill: bool) -> Callable[[Any, torch.device], Results]:
    def each(launcher: Any, device: torch.device) -> Results:
        naive: Any = import_module("tests.gpu.kernels.naive")
        made: Any = import_module(f"{KERNELS}.attention_decode")
        new = (1, 0, 5, 1) if prefill else (1, 0, 2, 1)
        cases = [(rule, "float32", False) for rule in _RULES] + [("window", kind, False) for kind in _KINDS]
        cases += [] if prefill else [("plain", "float32", True), ("all", "float32", True)]
        for name, kind, trees in cases:
            step = naive.paged_step(1, (0, 9, 37, 620), (1, 0, 5, 1) if trees else new, heads=8, size=32,
                                    dims={"k": 32, "v": 32}, kind=kind, trees=trees)  # fmt: skip
            rule = made.Rule(0.3, **_RULES[name])
            for i, part in enumerate(("slopes", "sinks")):
                if getattr(rule, part):
                    rule = rule._replace(**{part: torch.rand(8, generator=torch.Generator().manual_seed(i))})
            there = rule._replace(**{p: None if getattr(rule, p) is None else getattr(rule, p).to(device)
                                     for p in ("slopes", "sinks")})  # fmt: skip
            scales = {key: step.scales[key].to(device) if key in step.scales else None for key in ("k", "v")}
            cache = made.Cache(step.planes["k"].to(device), step.planes["v"].to(device), step.pages.to(device),
                               scales["k"], scales["v"])  # fmt: skip
            starts, at = step.query_start_loc.to(device), step.positions.to(device)
            most = int(step.query_start_loc.diff().max()) if prefill else int(step.positions.max())
            more = {} if prefill else {"mask": None if step.mask is None else step.mask.to(device)}
            out = launcher(step.q.to(device), cache, there, starts, at, most, **more)
            yield f"{name}, {kind}{', a tree' if trees else ''}", _off(out, naive.attention(step, rule)), _KINDS[kind]

    return each


def _latent(launcher: Any, device: torch.device) -> Results:
    """Keys that all heads share and that are the values, of a size for which there is a kernel of its own."""
    naive: Any = import_module("tests.gpu.kernels.naive")
    made: Any = import_module(f"{KERNELS}.attention_decode")
    for kind, size in (("bfloat16", 32), ("float16", 64)):
        step = naive.paged_step(2, (0, 9, 700, 63), (1, 0, 1, 1), heads=80, kv_heads=1, size=size, kind=kind,
                                q_kind=kind, dims={"k": 512, "rope": 64, "v": 512})  # fmt: skip
        step.planes["v"], step.decoded["v"] = step.planes["k"], step.decoded["k"]
        rule = made.Rule(0.05, sinks=torch.rand(80, generator=torch.Generator().manual_seed(1)))
        keys = step.planes["k"].to(device)
        cache = made.Cache(keys, keys, step.pages.to(device), rope_keys=step.planes["rope"].to(device))
        where = (step.query_start_loc.to(device), step.positions.to(device), int(step.positions.max()))
        for split in (None, 128):
            out = launcher(step.q.to(device), cache, rule._replace(sinks=rule.sinks.to(device)), *where, split=split)
            yield f"a latent, {kind}, cuts {split}", _off(out, naive.attention(step, rule)), _KINDS[kind]


def _decoding(launcher: Any, device: torch.device) -> Results:
    yield from _attention(False)(launcher, device)
    yield from _latent(launcher, device)


# -- where tokens lie ----------------------------------------------------------------------------------------------


def _token_places(launcher: Any, device: torch.device) -> Results:
    ids, positions = torch.tensor([7, 1, 3]), torch.tensor([0, 37, 64])
    tables = torch.tensor([[-1, -1, -1], [4, 2, -1], [0, 9, 5]])
    found = launcher(*(x.to(device, torch.int32) for x in (ids, positions, tables)), 32, 3, 99)
    pages = [[99, 6, 15], [99, 7, 16], [99, 8, 17]]
    wanted = [pages, [0, 5, 0], ids.tolist(), positions.tolist()]
    yield "three rows, one of them nowhere", float([x.tolist() for x in found] != wanted), 0.0


def _embed(launcher: Any, device: torch.device) -> Results:
    for kind in (torch.bfloat16, torch.float16, torch.float32):
        weight, ids = _normal(1, 90, 1100).to(kind), torch.tensor([89, 0, 5, 90, 5])
        off = _off(launcher(ids.to(device), weight.to(device)), weight[ids % 90].double())
        yield str(kind).removeprefix("torch."), off, 0.0


# -- norms, activations, rotation ----------------------------------------------------------------------------------


def _norm(centred: bool) -> Callable[[Any, torch.device], Results]:
    def each(launcher: Any, device: torch.device) -> Results:
        for rows, width in ((1, 64), (5, 1000), (64, 4096)):
            x, r, w, b = _normal(1, rows, width), _normal(2, rows, width), _normal(3, width), _normal(4, width)
            h = (x + r).double()
            own = h - h.mean(1, keepdim=True) if centred else h
            want = own / (own.square().mean(1, keepdim=True) + 1e-5).sqrt() * w.double()
            weights = (w.to(device), b.to(device)) if centred else (w.to(device),)
            kept, out = launcher(x.to(device), *weights, 1e-5, r.to(device))
            yield f"{rows} of {width}", _off(out, want + b.double() if centred else want), 1e-5
            yield f"{rows} of {width}, the sum", _off(kept, h), 1e-6

    return each


def _gates(launcher: Any, device: torch.device) -> Results:
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu, "relu": torch.relu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "relu2": lambda x: torch.relu(x).square(), "sigmoid": torch.sigmoid, "tanh": torch.tanh,
    }  # fmt: skip
    both = _normal(6, 5, 2 * 1037) * 4
    gate, up = both[:, :1037], both[:, 1037:]
    for name, function in functions.items():
        yield name, _off(launcher(gate.to(device), up.to(device), name), function(gate.double()) * up.double()), 1e-5


def _rope(launcher: Any, device: torch.device) -> Results:
    rng = np.random.default_rng(9)
    positions = np.array([0, 7, 3, 19, 4], np.int32)
    table = rng.standard_normal((2, 20, 8)).astype(np.float32)
    pages, places = torch.tensor([3, 0, 3, 1, 2]), torch.tensor([0, 15, 1, 4, 8])
    angles = rotary.rope_angles(positions, table)
    for interleaved in (False, True):
        q, k, v = _normal(10, 5, 6, 16), _normal(11, 5, 2, 16), _normal(12, 5, 2, 16)
        planes = [torch.zeros((4, 16, 2, 16), device=device) for _ in range(2)]
        out = launcher(
            q.to(device), k.to(device), v.to(device), torch.from_numpy(positions).to(device),
            torch.from_numpy(table).to(device), *planes, pages.to(device), places.to(device), interleaved=interleaved,
        )  # fmt: skip
        turned = [torch.from_numpy(rotary.rope(x.numpy(), angles, interleaved, 0)).double() for x in (q, k)]
        written = [plane.cpu()[pages, places] for plane in planes]
        for what, found, want in (("queries", out, turned[0]), ("keys", written[0], turned[1]),
                                  ("values", written[1], v.double())):  # fmt: skip
            yield f"{what}{', pairs of neighbours' if interleaved else ''}", _off(found, want), 1e-5


# -- products ------------------------------------------------------------------------------------------------------


def _product(bits: int, least: int = 0) -> Callable[[Any, torch.device], Results]:
    def each(launcher: Any, device: torch.device) -> Results:
        for tokens, outputs, inputs, group in ((1, 96, 512, 128), (16, 130, 256, 64), (70, 64, 512, 128)):
            group = max(group, least)
            x, draw = _normal(1, tokens, inputs).to(torch.bfloat16), torch.Generator().manual_seed(2)
            scales = _normal(3, outputs, inputs // group).abs() + 0.1
            wide = scales.double().repeat_interleave(group, 1)
            if bits == 16:
                weight = _normal(2, outputs, inputs).to(torch.bfloat16)
                args, w = (weight,), weight.double()
            elif bits == 8:
                codes = torch.randint(-127, 128, (outputs, inputs), generator=draw)
                args, w = (codes.to(torch.int8), scales), codes.double() * wide
            else:
                codes = torch.randint(0, 16, (outputs, inputs), generator=draw)
                packed = codes[:, 0::2] | codes[:, 1::2] << 4
                args, w = (packed.to(torch.uint8), scales), (codes.double() - 8) * wide
            out = launcher(x.to(device), *(part.to(device) for part in args))
            yield f"{tokens} tokens, {inputs} to {outputs}", _off(out, x.double() @ w.t()), 1e-2

    return each


def _row(launcher: Any, device: torch.device) -> Results:
    for outputs, inputs in ((96, 512), (130, 300), (4096, 4096)):
        x, weight, bias = _normal(1, 1, inputs), _normal(2, outputs, inputs).to(torch.bfloat16), _normal(3, outputs)
        out = launcher(x.to(device), weight.to(device), bias.to(device))
        yield f"{inputs} to {outputs}", _off(out, x.double() @ weight.double().t() + bias.double()), 1e-5


def _coded_row(launcher: Any, device: torch.device) -> Results:
    for outputs, inputs, group, bits in (
        (96, 512, 128, 4),
        (130, 256, 64, 8),
        (64, 4096, 32, 4),
        (70, 384, 128, 4),
        (4096, 4096, 128, 4),
        (40, 14336, 128, 4),
    ):
        draw = torch.Generator().manual_seed(2)
        x = _normal(1, 3 if bits == 4 else 1, inputs)
        scales = _normal(3, outputs, inputs // group).abs() + 0.1
        wide = scales.double().repeat_interleave(group, 1)
        codes = torch.randint(0, 16 if bits == 4 else 256, (outputs, inputs), generator=draw)
        held = (codes[:, 0::2] | codes[:, 1::2] << 4 if bits == 4 else codes).to(torch.uint8)
        out = launcher(x.to(device), held.to(device), scales.to(device), bits=bits, offset=8)
        yield f"{inputs} to {outputs}, {bits} bits", _off(out, x.double() @ ((codes.double() - 8) * wide).t()), 2e-4


def _experts(launcher: Any, device: torch.device) -> Results:
    """Experts with gates, floats and int4, fewer and more pairs of an expert than its narrow tiles have."""
    stack: Any = import_module(f"{KERNELS}.experts").Stack
    num, hidden, width = 8, 256, 192
    for tokens, choices, bits in ((1, 2, 16), (5, 3, 4), (80, 2, 16), (80, 2, 4)):
        draw = torch.Generator().manual_seed(tokens)
        ids = torch.rand((tokens, num), generator=draw).argsort(-1)[:, :choices].sort(-1).values
        shares = torch.rand((tokens, choices), generator=draw)
        x, parts, values = _normal(1, tokens, hidden), [], []
        for rows, columns in ((width, hidden), (width, hidden), (hidden, width)):
            if bits == 16:
                weight = (_normal(2 + len(parts), num * rows, columns) / columns**0.5).to(torch.bfloat16)
                parts.append(stack(weight.to(device)))
            else:
                codes = torch.randint(0, 16, (num * rows, columns), generator=draw)
                scales = (_normal(5, num * rows, columns // 64).abs() + 0.1) / columns
                packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
                parts.append(stack(packed.to(device), 4, scales.to(device), offset=8, group=64))
                weight = (codes - 8) * scales.repeat_interleave(64, 1)
            values.append(weight.double().view(num, rows, columns))
        out = launcher(x.to(device), ids.to(device), shares.to(device), *parts, num, "silu")
        want = torch.zeros((tokens, hidden), dtype=torch.float64)
        for k in range(choices):
            gate, up, down = (value[ids[:, k]] for value in values)
            inner = torch.nn.functional.silu(torch.einsum("tfe,te->tf", gate, x.double()))
            inner = inner * torch.einsum("tfe,te->tf", up, x.double())
            want += torch.einsum("tef,tf->te", down, inner) * shares[:, k, None].double()
        yield f"{tokens} tokens, {choices} of {num} experts, {bits} bits", _off(out, want), 2e-2


def _route(launcher: Any, device: torch.device) -> Results:
    from penstock.core.router import Router
    from penstock.ops.ref.experts import route

    for tokens, num, choices, named in (
        (1, 128, 8, {"renormalize": True}), (5, 60, 4, {}), (9, 256, 8, {"score": "sigmoid", "correction": True}),
        (3, 32, 4, {"chosen_only": True}),
    ):  # fmt: skip
        logits, more = _normal(1, tokens, num), None
        logits[0, 3 : 3 + choices] = 4.0  # equals
        if named.get("correction"):
            more = _normal(2, num)
        want = route(logits.numpy(), choices, Router(**named), None if more is None else more.numpy())  # type: ignore[arg-type]
        how = {k: v for k, v in named.items() if k != "correction"}
        if more is not None:
            how["correction"] = more.to(device)
        ids, weights = launcher(logits.to(device), choices, **how)
        yield f"{choices} of {num}, ids", float((ids.cpu().numpy() != want.ids).sum()), 0.0
        yield f"{choices} of {num}, weights", _off(weights, torch.from_numpy(want.weights).double()), 1e-5


# -- tokens --------------------------------------------------------------------------------------------------------


def _argmax(launcher: Any, device: torch.device) -> Results:
    logits = np.random.default_rng(3).integers(-5, 5, (6, 5000)).astype(np.float32)
    logits[2, 4999], logits[3, :-1] = 7.0, -np.inf
    found, bits = launcher(torch.from_numpy(logits).to(device))
    yield "the first of equals", float(found.tolist() != logits.argmax(1).tolist()), 0.0
    yield "what it is", float(bits.view(torch.float64).tolist() != logits.max(1).tolist()), 0.0
    logits[0, 4500], logits[1, 17] = np.nan, np.inf
    sick = launcher(torch.from_numpy(logits).to(device))[1].view(torch.float64).isnan().tolist()
    yield "rows that are sick", float(sick != [True] * 2 + [False] * 4), 0.0


def _draw(launcher: Any, device: torch.device) -> Results:
    from penstock.ops.draw_weights import scale_of

    rng = np.random.default_rng(0)
    for vocab in (7, 4097, 32000):
        logits = (rng.standard_normal((6, vocab)) * 4).astype(np.float32)
        for cut in (False, True):
            rules = [
                TokenRules(temperature=t, seed=11 * i, top_k=40 * (cut and i % 2), top_p=0.8 if cut else 1.0,
                           min_p=0.02 * (i == 3))
                for i, t in enumerate((1.0, 0.7, 0.05, 3.0, 100.0, 1.0))
            ]  # fmt: skip

            def of(kind: Any, values: Any) -> torch.Tensor:
                return torch.tensor(list(values), dtype=kind, device=device)

            found = launcher(
                torch.from_numpy(logits).to(device), of(torch.float64, [scale_of(r.temperature) for r in rules]),
                of(torch.int64, [r.seed for r in rules]), of(torch.int32, range(6)), of(torch.int64, range(5, 11)),
                min_p=of(torch.float64, [r.min_p for r in rules]), top_k=of(torch.int32, [r.top_k for r in rules]),
                top_p=of(torch.float64, [r.top_p for r in rules]), truncated=cut,
            ).tolist()  # fmt: skip
            want = [sampler_draw(row, r, i, 5 + i, 1)[0] for i, (row, r) in enumerate(zip(logits, rules, strict=True))]
            yield f"{vocab} tokens{', truncated' if cut else ''}", float(found != want), 0.0


def _adapt(launcher: Any, device: torch.device) -> Results:
    made: Any = import_module(f"{KERNELS}.adapters")
    ranks, lengths = (16, 48, 16), (1, 20, 3)
    for name, may in (("float32", 2e-3), ("bfloat16", 3e-2)):
        kind = getattr(torch, name)
        x, y = _normal(1, sum(lengths), 320).to(kind), _normal(2, sum(lengths), 500).to(kind)
        a = [_normal(3 + n, rank, 320).to(kind) for n, rank in enumerate(ranks)]
        b = [_normal(6 + n, 500, rank).to(kind) for n, rank in enumerate(ranks)]
        gain, shift = _normal(9, 500), _normal(10, 500)
        there = [[t.to(device) for t in (a[n], b[n], gain, shift)] for n in range(len(ranks))]
        one = int(torch.tensor(0.5).view(torch.int32))
        table = [[*(0 if n and i > 1 else t.data_ptr() for i, t in enumerate(own)), ranks[n], one]
                 for n, own in enumerate(there)]  # fmt: skip
        slots = made.AdapterSlots(torch.tensor(table, dtype=torch.int64).to(device), there[0][0], max(ranks))
        order = torch.arange(sum(lengths), dtype=torch.int32).to(device)
        own_tiles = [[0, 0, 1], [1, 1, 16], [1, 17, 4], [2, 21, 3], [-1, -1, -1]]
        tiles = torch.tensor(own_tiles, dtype=torch.int32).to(device)
        wanted, first = y.double(), 0
        for n, length in enumerate(lengths):
            own = slice(first, first + length)
            added = 0.5 * (x[own].double() @ a[n].double().t()) @ b[n].double().t()
            wanted[own] = wanted[own] * (gain.double() if n == 0 else 1) + (shift.double() if n == 0 else 0) + added
            first += length
        yield name, _off(launcher(x.to(device), y.clone().to(device), order, tiles, slots), wanted), may


CHECKS: dict[str, Callable[[Any, torch.device], Results]] = {
    "attention_decode": _decoding, "attention_prefill": _attention(True), "token_places": _token_places,
    "embed": _embed, "rms_norm": _norm(False),
    "layer_norm": _norm(True), "activate_gated": _gates, "rope_write": _rope, "product_int8": _product(8),
    "product_int4": _product(4), "product_words": _product(4, 128), "product_fixed": _product(16),
    "product_row": _row, "coded_row": _coded_row, "experts": _experts, "route": _route,
    "adapt": _adapt, "argmax": _argmax, "draw": _draw,
}  # fmt: skip
"""By the names of the list of kernels. Tolerances are those of the operands' types on tensor cores."""
