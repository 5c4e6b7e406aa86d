"""C59: a model's native program with every fusion, with some and with none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from benchmarks.common import clock_of, figures, ratios, take_turns
from benchmarks.models import Model, spec_of, weights_of

from penstock.core.model_spec import weight_shapes
from penstock.model.fuse import PASSES
from penstock.ops.native.program import Pool

VARIANTS: dict[str, tuple[str, ...]] = {
    "none": (), "gates + activations": PASSES[:2], "+ siblings": PASSES[:3], "+ residuals": PASSES[:4], "all": PASSES,
}  # fmt: skip
VOCAB = 2048
"""Small: the head is no layer, and would be most of a few layers' time."""


def compare(
    pool: Pool, shape: str, layers: int, dtypes: Sequence[str], batches: Sequence[int], prompt: int, repeats: int
) -> list[dict[str, Any]]:
    """Steps of several batches and a prompt by all variants, in turns; logits against those of the unfused program."""
    spec, shallow = spec_of(shape, layers=layers, vocab=VOCAB), spec_of(shape, layers=1, vocab=VOCAB)
    ids = np.random.default_rng(0).integers(2, VOCAB, prompt).tolist()
    out = []
    for dtype in dtypes:
        weights = weights_of(spec, dtype)
        most = max(batches)
        models = {
            name: Model(
                spec, weights, pool, max_len=2 * prompt, max_seqs=most, max_tokens=max(prompt, most), passes=passes,
                kv_dtype=dtype,
            )
            for name, passes in VARIANTS.items()
        }  # fmt: skip
        kept = {name: w for name, w in weights.items() if name in weight_shapes(shallow)}
        num_ops = {}
        for name, passes in VARIANTS.items():
            one = Model(shallow, kept, pool, max_len=64, max_tokens=1, passes=passes)
            num_ops[name] = (len(models[name].forward.describe()) - len(one.forward.describe())) / (layers - 1)
        steps = {f"decode, batch {b}": ([ids[:1]] * b, [prompt - 1] * b) for b in batches}
        steps[f"prefill, {prompt} tokens"] = ([ids], [0])
        # Every sequence of the cache holds the prompt, so that no step reads memory that nobody wrote.
        for model in models.values():
            for b in range(most):
                model.step([[]] * b + [ids], [0] * b + [0])
        for title, (texts, starts) in steps.items():
            logits = {name: model.step(texts, starts).copy() for name, model in models.items()}
            errors = {
                name: float(np.abs(made - logits["none"]).max() / np.abs(logits["none"]).max())
                for name, made in logits.items()
            }
            worst = max(errors.values())
            # Fused or not, bfloat16 rounds the rows of every product: not always from the same last bit.
            assert worst <= (1e-5 if dtype == "float32" else 3e-2), f"{title}, {dtype}: fused differs by {worst}"
            works = {name: (lambda m=model, t=texts, s=starts: m.step(t, s)) for name, model in models.items()}
            samples = take_turns(works, repeats, clock_of(pool.num_threads))
            for name, of in samples.items():
                out.append(
                    {"shape": shape, "dtype": dtype, "step": title, "passes": name, "ops_per_layer": num_ops[name],
                     "seconds": figures(of), "of_unfused": ratios(of, samples["none"]), "error": errors[name]}
                )  # fmt: skip
    return out
