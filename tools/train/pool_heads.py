"""Fewer key and value heads, each the mean of those it replaces: where uptraining begins.

    PYTHONPATH=tools python -m train.pool_heads nano build/nano nano-mqa build/mqa-start --data build/corpus

Source: Ainslie et al., GQA, arXiv 2305.13245, section 2.1 (mean pooling, then some 5 % of the training again).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.core.model_spec import Attention, ModelSpec, weight_shapes
from train.export import export, read_weights
from train.interpreter import SpecModule
from train.recipes import RECIPES

F32 = npt.NDArray[np.float32]


def pooled(weights: dict[str, F32], source: ModelSpec, target: ModelSpec) -> dict[str, F32]:
    """`weights` of `source` for `target`, which differs in the number of key and value heads only.

    Raises: ValueError for specs that differ in more.
    """
    shapes = weight_shapes(target)
    out = dict(weights)
    for i, (old, new) in enumerate(zip(source.layers, target.layers, strict=True)):
        a, b = old.mixer, new.mixer
        if not isinstance(a, Attention) or not isinstance(b, Attention) or a.num_kv_heads % b.num_kv_heads:
            raise ValueError("heads are pooled into a number that divides theirs, in attention layers")
        for name in ("k", "v"):
            heads = weights[f"layers.{i}.{name}"].reshape(b.num_kv_heads, -1, a.head_dim, source.hidden_size)
            out[f"layers.{i}.{name}"] = heads.mean(axis=1).reshape(-1, source.hidden_size)
    if any(out[name].shape != shape for name, shape in shapes.items()):
        raise ValueError("the two shapes differ in more than their key and value heads")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", choices=sorted(RECIPES))
    parser.add_argument("folder", type=Path, help="of the source's weights")
    parser.add_argument("target", choices=sorted(RECIPES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder that train.corpus wrote, for the tokenizer")
    args = parser.parse_args()
    source, target = RECIPES[args.source], RECIPES[args.target]
    model = SpecModule(target, 512)
    model.load(pooled(read_weights(args.folder, source), source, target))
    export(model, args.data, args.out)


if __name__ == "__main__":
    main()
