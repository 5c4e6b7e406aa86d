"""The seam between what is measured and who computes it: a model that reads a text and says what it expected.

`make_scorer` is the only place that knows how a scheme is carried out: by the native kernels, or by numpy, with weights
and rows rounded as the packed formats round them (`quant.reference`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from penstock.backends import BACKENDS
from penstock.backends.backend import Backend
from penstock.backends.reference import BlasBackend
from penstock.base.bf16 import F32
from penstock.config import EngineConfig
from penstock.core.held_weights import HeldWeights
from penstock.core.matrix_format import Scheme, parse_scheme, rounded_matrices
from penstock.core.model_spec import ModelSpec, cache_groups
from penstock.families.checkpoint import Checkpoint
from penstock.families.registry import open_model
from penstock.families.stretch import stretched
from penstock.launch.backend import choose_ops, measuring_backend, traits_of
from penstock.launch.hub import local_path
from penstock.launch.names import check_names
from penstock.launch.progress import loading
from penstock.launch.tokenizer import load_tokenizer, named_tokenizer
from penstock.model.emitter import PLAIN, Reading
from penstock.model.forward import Forward
from penstock.ops.blas import BLAS
from penstock.ops.plan import GroupPlan, StepPlan
from penstock.ops.stored import StoredMatrix, Weight
from penstock.plan.probe import probe
from penstock.plan.resolve import resolve
from penstock.plan.weights import StoredFormats, hold_weights
from penstock.quant.reference import QuantisedLinear, panels_bytes
from penstock.runner.assemble import DecoderModel
from penstock.runner.storage import Storage
from penstock.text.tokenizer import Tokenizer
from penstock.weights.load import dense, load_weights

Weights = Mapping[str, Weight]
_BLOCK = 32
_STEP_TOKENS = 512


class Scorer(Protocol):
    """A model that reads texts of at most `max_len` tokens, one at a time, each from its beginning."""

    vocab_size: int
    max_len: int

    def logits(self, token_ids: Sequence[int]) -> F32:
        """[T, V]: row t is what is expected behind tokens 0 ... t."""
        ...


@dataclass(frozen=True)
class LoadedModel:
    """A model as the engine would hold it. `dtype` and `kv_dtype` as decided by `plan.resolve`."""

    name: str
    spec: ModelSpec
    weights: Weights
    dtype: str
    kv_dtype: str
    max_len: int
    tokenizer: Tokenizer | None = None
    backend: Backend = field(default_factory=BlasBackend)
    attention: str = "ref"
    files: tuple[Path, ...] = ()
    """Of its weights."""
    rotation: str = "none"
    """Of keys and values."""
    stored: StoredFormats = field(default_factory=dict)
    """As `plan.resolve` takes it."""
    exact: bool = True
    """Codes that no panels hold are values in float32, not in `dtype`."""

    def held(self, scheme: Scheme) -> HeldWeights:
        """How the engine would hold its weights under a scheme."""
        traits = BACKENDS.traits(self.backend.name)
        return hold_weights(self.spec, self.dtype, scheme, self.stored, traits=traits, exact=self.exact)

    def weights_under(self, scheme: Scheme) -> Weights:
        """What the engine would load: tables that are looked up in beside what a scheme has rounded are no codes."""
        tables = {name: self.weights[name] for name in self.held(scheme).beside}
        return {**self.weights, **{n: dense(w, self.dtype) for n, w in tables.items() if isinstance(w, StoredMatrix)}}


@dataclass(frozen=True)
class WeightSizes:
    """`matrix_bytes` of the `matrix_params` numbers that a scheme packs; `total_bytes` of all weights."""

    matrix_bytes: int
    matrix_params: int
    total_bytes: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.matrix_bytes / self.matrix_params


class ProgramScorer:
    """Runs a model's list of calls on a cache of its own, a text at a time, in steps of at most 512 tokens.

    Attributes:
        forward: what reads.
        seconds, num_tokens: spent and read so far.
    """

    def __init__(
        self, model: LoadedModel, backend: Backend, quantization: str = "none", *, reading: Reading = PLAIN,
        first: int | None = None,
    ) -> None:  # fmt: skip
        """`reading`: how attention uses the cache; tokens from position `first` on choose what they read."""
        spec = model.spec
        self._choose_from = None if first is None else np.array([first], np.int32)
        self.vocab_size, self.max_len = spec.vocab_size, model.max_len
        self.seconds, self.num_tokens = 0.0, 0
        part = 0.0 if reading.tokens is None else reading.tokens.rank
        groups = cache_groups(spec, model.kv_dtype, bounds=reading.pages is not None, part=part)
        made = DecoderModel(
            spec=spec, weights=model.weights_under(parse_scheme(quantization)), groups=groups,
            max_model_len=model.max_len, rotation=model.rotation, reading=reading,
        )  # fmt: skip
        self.forward: Forward = made.on(backend, max_tokens=_STEP_TOKENS, quantization=quantization)
        blocks = -(-model.max_len // _BLOCK)
        self._sizes = [blocks if g.spec.per_token else 1 for g in groups]
        self._groups = tuple(
            GroupPlan(len(g.layers), _BLOCK, (np.arange(n, dtype=np.int32)[None],))
            for g, n in zip(groups, self._sizes, strict=True)
        )
        self._storage = Storage(groups, self._sizes, _BLOCK)

    def logits(self, token_ids: Sequence[int]) -> F32:
        assert 0 < len(token_ids) <= self.max_len, "a text within the model's length"
        started = time.perf_counter()
        out = np.empty((len(token_ids), self.vocab_size), np.float32)
        for start in range(0, len(token_ids), _STEP_TOKENS):
            part = np.asarray(token_ids[start : start + _STEP_TOKENS], np.int32)
            out[start : start + len(part)] = self._step(part, start)
        self.seconds += time.perf_counter() - started
        self.num_tokens += len(token_ids)
        return out

    def _step(self, ids: npt.NDArray[np.int32], start: int) -> F32:
        rows = np.arange(len(ids), dtype=np.int32)
        bounds, lens = np.array([0, len(ids)], np.int32), np.array([start + len(ids)], np.int32)
        plan = StepPlan(ids, rows + np.int32(start), bounds, lens, rows, self._groups, choose_from=self._choose_from)
        return self.forward.run(plan, self._storage.planes)


def load(config: EngineConfig) -> LoadedModel:
    """The model that `config` names. Raises as `launch.build.start`."""
    check_names(config)
    with loading("downloading") as download:
        path = local_path(config.model.model, config.model.revision, download)
    checkpoint = open_model(path)
    checkpoint = replace(checkpoint, spec=stretched(checkpoint.spec, config.model))
    config, _ = choose_ops(config, checkpoint.spec)
    plan = resolve(config, checkpoint.spec, probe(), stored=checkpoint.stored, traits=traits_of(config))
    files = checkpoint.tokenizer
    if config.model.tokenizer is not None:
        files = named_tokenizer(config.model.tokenizer, checkpoint)
    with loading() as progress:
        weights = load_weights(checkpoint.weights, checkpoint.spec, plan.held, progress)
    return LoadedModel(
        name=config.model.model,
        spec=checkpoint.spec,
        weights=weights,
        dtype=plan.dtype,
        kv_dtype=plan.kv_dtype,
        max_len=plan.max_model_len,
        tokenizer=None if config.model.skip_tokenizer_init else load_tokenizer(files, checkpoint.spec),
        backend=measuring_backend(config),
        attention=config.execution.attention_backend,
        rotation=config.cache.kv_rotation,
        files=tuple(sorted(_files(checkpoint))),
        stored=checkpoint.stored,
        exact=config.model.dtype == "auto",
    )


def _files(checkpoint: Checkpoint) -> set[Path]:
    return {tensor.path for ref in checkpoint.weights.values() for tensor in ref.tensors}


def make_scorer(model: LoadedModel, scheme: Scheme) -> ProgramScorer:
    """The model under a scheme. One product for all rows of a step: what is measured does not need exact batches."""
    if not scheme.weight_bits:
        return ProgramScorer(model, model.backend)
    if BACKENDS.traits(model.backend.name).quantizes:
        return ProgramScorer(model, model.backend, scheme.name)
    rounded = model.held(scheme).matrices
    linear = QuantisedLinear(scheme, [w for name, w in model.weights.items() if name not in rounded])
    table = BLAS.replaced(scheme.name, {"linear": linear}, batch_invariant=False)
    return ProgramScorer(model, BlasBackend(model.attention, table))


def weight_sizes(model: LoadedModel, scheme: Scheme) -> WeightSizes:
    """What the weights take. A table of embeddings that is the output matrix, too, is kept in both forms, unless it
    stays the codes that it is stored as."""
    held, matrices = model.held(scheme), rounded_matrices(model.spec)
    matrix_bytes = sum(panels_bytes(shape, held.of(name)) for name, shape in matrices.items())
    beside = {"embed"} - (held.matrices.keys() - {*held.beside})
    only_packed = matrices.keys() - beside
    other = sum(w.nbytes for name, w in model.weights.items() if name not in only_packed)
    return WeightSizes(matrix_bytes, sum(rows * columns for rows, columns in matrices.values()), matrix_bytes + other)
