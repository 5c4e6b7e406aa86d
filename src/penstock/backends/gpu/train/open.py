"""A model on disk, opened for training: its files are mapped, and nothing of them is held twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from penstock.backends.gpu.train.pieces import GraphPieces
from penstock.backends.gpu.train.trainer import Arrays, Trainer
from penstock.backends.gpu.train.tuned import LowRankPairs, Scales
from penstock.core.held_weights import HeldWeights
from penstock.core.model_spec import cache_groups
from penstock.core.training import Recipe, TrainingExample
from penstock.families.checkpoint import Checkpoint
from penstock.model.adapted import adaptable
from penstock.model.builder import build
from penstock.ops.stored import Weight
from penstock.weights.adapters import Sites, model_sites
from penstock.weights.load import load_weights

Trained = LowRankPairs | Scales
Make = Callable[[Sites, Mapping[str, Weight], Recipe], Trained]


def _low_rank(sites: Sites, weights: Mapping[str, Weight], recipe: Recipe) -> LowRankPairs:
    return LowRankPairs(sites, recipe.targets, recipe.rank, recipe.alpha, recipe.seed)


def _scales(sites: Sites, weights: Mapping[str, Weight], recipe: Recipe) -> Scales:
    return Scales(sites, recipe.targets, weights)


_KINDS: dict[str, Make] = {"lora": _low_rank, "peqa": _scales}


def open_trainer(
    checkpoint: Checkpoint, examples: Sequence[TrainingExample], recipe: Recipe, *, state: Arrays | None = None
) -> tuple[Trainer, Trained]:
    """`state`: what an earlier training said of itself.

    Raises: ModelError as `load_weights`, UnsupportedError for models and modules that cannot be trained.
    """
    spec = checkpoint.spec
    weights = load_weights(checkpoint, spec, HeldWeights(spec.dtype, checkpoint.stored))
    graph = build(spec, weights, cache_groups(spec, "float32"), max_model_len=spec.max_position)
    trained = _KINDS[recipe.kind](model_sites(checkpoint.weights, spec, adaptable(spec)), weights, recipe)
    return Trainer(GraphPieces(graph, trained.tuned), trained, examples, recipe, state=state), trained
