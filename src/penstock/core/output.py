"""What clients get back. `RequestOutput` and `CompletionOutput` have vLLM's names and fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.core.batch import TokenLogprobs
from penstock.core.weight_swap import FIRST_VERSION


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """News of one sample of one request, emitted by the engine after a step. Ids only."""

    request_id: str
    index: int
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    scheduled_s: float | None = None
    """With a sample's first token: when the engine began to compute its request, on the machine's monotonic clock."""
    error: str | None = None
    beams: list[tuple[list[int], float, str]] = []
    """Final hypotheses of a beam search: generated ids, cumulative logprob, finish reason; best first."""
    num_drafted: int = 0
    """Drafts that were verified in this step for this sample; `num_accepted`: those that the model said too."""
    num_accepted: int = 0
    pooled: bytes = b""
    """The pooled hidden state: float32, little-endian."""


@dataclass(frozen=True)
class Logprob:
    """One entry of a logprobs dictionary (vLLM's name)."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class RequestMetrics:
    """Units: seconds on the engine's clock. `first_token_s` - `arrival_s` is the TTFT.

    `scheduled_s`: when the engine began to compute it; before that it was queued.
    """

    arrival_s: float = 0.0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0
    num_drafts: int = 0
    """Steps in which drafts of it were verified; then the drafts, and those among them that were right."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    quality: float | None = None
    """Quality of experience (`core.qoe`) of a stream that has ended, 0 to 1; of the worst of its samples."""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    def tpot_s(self, num_tokens: int) -> float | None:
        """Mean time per output token after the first."""
        if self.first_token_s is None or self.finished_s is None or num_tokens < 2:
            return None
        return (self.finished_s - self.first_token_s) / (num_tokens - 1)


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None
    weight_versions: list[tuple[int, int, str]] = field(default_factory=list)
    """(first token, end, version) of each run of tokens over the same weights."""


@dataclass
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    num_cached_tokens: int = 0
    lora_request: Any = None
    error: str | None = None
    weight_version: str = FIRST_VERSION
    """Of the weights over which its last token was computed."""


@dataclass
class EmbeddingOutput:
    embedding: list[float]


@dataclass
class EmbeddingRequestOutput:
    """vLLM's name and fields."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass
class PoolingOutput:
    """`data`: float32, [tokens, E] or [N]."""

    data: Any


@dataclass
class PoolingRequestOutput:
    """vLLM's name and fields."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass
class ClassificationOutput:
    """`probs`: a score for each label, in the model's order."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass
class ClassificationRequestOutput:
    """vLLM's name and fields."""

    request_id: str
    outputs: ClassificationOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass
class ScoringOutput:
    score: float


@dataclass
class ScoringRequestOutput:
    """vLLM's name and fields. `prompt_token_ids`: of the pair, or of both texts one after the other."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass
class BeamSearchSequence:
    tokens: list[int]
    """Prompt and generated ids."""
    cum_logprob: float
    text: str | None = None
    finish_reason: str | None = None


@dataclass
class BeamSearchOutput:
    """Best hypothesis first."""

    sequences: list[BeamSearchSequence]
