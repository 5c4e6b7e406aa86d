"""Attention that KV selectors leave a model on held-out text (catalogue rows F01, F03-F06, F22-F24).

    PYTHONPATH=.:tools python benchmarks/quality/retained.py --corpus CORPUS --out benchmarks/results/retained.json

Every window of prose is a prompt and what follows it; the selectors are played over the full model's attention maps
(`penstock.eval.retained`), so nothing of a runtime takes part. *retained*: of the attention of the tokens behind the
prompt, the mean over windows and half of a 95 % interval of it; *least*: of a layer; *kept*: tokens kept at the
selections, of those there were. *fact*: in needle texts of the test half, how much of the attention that the answer's
tokens pay to the needle's number still finds it when the prompt has been cut.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from benchmarks.common import about, save, show
from rich.console import Console

from penstock.config import from_kwargs
from penstock.config.selection import SelectionConfig, SelectionOptions, parse_budget
from penstock.core.selection import KVSelector
from penstock.eval.heads import NeedleText, needle_texts
from penstock.eval.maps import LayerMap, MapReader
from penstock.eval.retained import Played, play
from penstock.eval.scorer import LoadedModel, load
from penstock.eval.tasks.prose import noise_of
from penstock.select import KV_SELECTORS
from penstock.select.bench import SelectionBench
from penstock.weights.load import fingerprint
from train.text import held_out_prose

ROWS: list[tuple[str, str, dict[str, Any]]] = [
    ("window", "window", {}),
    ("random", "random", {}),
    ("random, no sinks", "random", {"sinks": 0}),
    ("streaming", "streaming", {}),
    ("h2o", "h2o", {}),
    ("h2o, heavy 0.25", "h2o", {"heavy": 0.25}),
    ("scissorhands", "scissorhands", {}),
    ("snapkv", "snapkv", {}),
    ("snapkv, pool 1", "snapkv", {"pool": 1}),
    ("snapkv, pool 15", "snapkv", {"pool": 15}),
    ("pyramidkv", "pyramidkv", {}),
    ("pyramidkv, slope 1.5", "pyramidkv", {"slope": 1.5}),
    ("adakv", "adakv", {}),
    ("adakv, pool 1", "adakv", {"pool": 1}),
    ("adakv, pool 15", "adakv", {"pool": 15}),
    ("fastgen", "fastgen", {}),
    ("retrieval", "retrieval", {}),
    ("retrieval, turned round", "retrieval", {"keep": "streaming"}),
    ("retrieval, by chance", "retrieval", {"keep": "random"}),
]
"""Label, selector, its options."""
UNBOUND: list[tuple[str, str, dict[str, Any]]] = [
    (f"fastgen, threshold {t}", "fastgen", {"threshold": t}) for t in (0.8, 0.9, 0.95, 0.99)
]
"""What keeps as much as it likes: at a budget of 100 %."""
COLUMNS = ("selector", "budget", "retained", "±", "least", "fact", "kept")


class Candidate(NamedTuple):
    """One row of the table."""

    label: str
    config: SelectionConfig
    selector: KVSelector


def candidates(model: LoadedModel, budgets: Sequence[str]) -> list[Candidate]:
    asked = [(budget, *row) for budget in budgets for row in ROWS] + [("100%", *row) for row in UNBOUND]
    tokenizer = model.tokenizer
    assert tokenizer is not None
    marks = [is_punctuation(tokenizer.decode([i], skip_special_tokens=False)) for i in range(tokenizer.vocab_size)]
    special, own = tokenizer.special_ids, fingerprint(model.weights)
    out = []
    for budget, label, name, given in asked:
        config = SelectionConfig(name, parse_budget(budget), SelectionOptions(**given))
        bench = SelectionBench(config, model.spec, special.__contains__, marks.__getitem__, lambda: own)
        out.append(Candidate(label, config, KV_SELECTORS.get(name)(bench)))
    return out


def is_punctuation(text: str) -> bool:
    """Nothing but marks, whatever space is around them."""
    plain = text.strip()
    return bool(plain) and not any(c.isalnum() for c in plain)


def windows(model: LoadedModel, prose: str, count: int, length: int) -> list[list[int]]:
    """Tokens from all over the prose."""
    assert model.tokenizer is not None
    bos = [] if model.spec.bos_token_id is None else [model.spec.bos_token_id]
    starts = [len(prose) * i // count for i in range(count)]
    out = [(bos + model.tokenizer.encode_inner(prose[i : i + 12 * length]))[:length] for i in starts]
    assert all(len(ids) == length for ids in out), "prose for all windows"
    return out


def fact_kept(played: Played, maps: Sequence[LayerMap], text: NeedleText) -> float:
    """Of the attention that the answer pays to the needle's number, what finds it behind the prompt."""
    on_fact = {m.layer: m.weights[text.answer.start - 1 : -1, :, :, text.fact.start : text.fact.stop] for m in maps}
    left = 0.0
    for (layer, head), kept in zip(played.lines, played.cuts[0].kept, strict=True):
        weights = on_fact[layer].sum(axis=(0, 2))  # [G, fact]
        whole_layer = sum(n == layer for n, _ in played.lines) < len(weights)
        still = np.isin(np.array(text.fact), kept)
        left += float(((weights.sum(axis=0) if whole_layer else weights[head]) * still).sum())
    return left / float(sum(w.sum() for w in on_fact.values()))


def by_layer(played: Sequence[Played]) -> list[float]:
    layers = np.array([layer for layer, _ in played[0].lines])
    each = np.mean([p.retained.mean(axis=1) for p in played], axis=0)
    return [round(float(each[layers == n].mean()), 5) for n in sorted(set(layers.tolist()))]


def row_of(candidate: Candidate, played: Sequence[Played], facts: Sequence[float]) -> dict[str, Any]:
    each = np.array([p.retained.mean() for p in played])
    config = candidate.config
    budget = f"{config.budget.share:.0%}" if config.budget.tokens is None else str(config.budget.tokens)
    return {
        "label": candidate.label, "selector": config.method, "budget": budget,
        "retained": float(each.mean()), "half_interval": 1.96 * float(each.std(ddof=1)) / len(each) ** 0.5,
        "windows": each.round(5).tolist(), "by_layer": by_layer(played), "fact": float(np.mean(facts)),
        "facts": np.round(facts, 5).tolist(), "kept": float(np.mean([p.kept_share for p in played])),
    }  # fmt: skip


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    shares = (row["retained"], row["half_interval"], min(row["by_layer"]), row["fact"], row["kept"])
    return row["label"], row["budget"], *(f"{x:.1%}" for x in shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--budgets", nargs="+", default=["25%", "50%"])
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--needles", type=int, default=10)
    parser.add_argument("--prompt", type=int, default=768)
    parser.add_argument("--behind", type=int, default=256)
    parser.add_argument("--out")
    options = parser.parse_args()
    model = load(from_kwargs(model=options.model, ops="ref"))
    assert model.tokenizer is not None
    prose, length = held_out_prose(options.corpus), options.prompt + options.behind
    asked = candidates(model, options.budgets)
    played: list[list[Played]] = [[] for _ in asked]
    facts: list[list[float]] = [[] for _ in asked]
    reader = MapReader(model)
    for ids in windows(model, prose, options.windows, length):  # one text's maps at a time
        maps = reader.read(ids)[1]
        for c, found in zip(asked, played, strict=True):
            found.append(play(c.selector, c.config, maps, ids, options.prompt))
    noise = noise_of(prose)
    for text in needle_texts(model.tokenizer, model.spec.bos_token_id, noise, length, options.needles, "test"):
        maps = reader.read(text.token_ids)[1]
        for c, shares in zip(asked, facts, strict=True):
            shares.append(fact_kept(play(c.selector, c.config, maps, text.token_ids, text.answer.start), maps, text))
    rows = [row_of(*found) for found in zip(asked, played, facts, strict=True)]
    title = f"{options.model}: {options.windows} windows of {options.prompt} + {options.behind} tokens"
    show(Console(), title, COLUMNS, [cells(row) for row in rows], left=2)
    counts = {"needles": options.needles, "prompt": options.prompt, "behind": options.behind}
    save(options.out, about(model=options.model, **counts, rows=rows))


if __name__ == "__main__":
    main()
