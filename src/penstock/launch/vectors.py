"""What `LLM` gives besides text: vectors, classes and scores of pairs, with vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.base.errors import EngineError, InputError
from penstock.core.output import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    EngineOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from penstock.core.request import Request
from penstock.core.vector import check_dimensions, cosine, embedding, label_scores
from penstock.text.pooling import encode_pair, pooling_of, scored_label, shortened
from penstock.text.validate import build_pooling_request

if TYPE_CHECKING:
    from penstock.core.adapter import AdapterRef
    from penstock.launch.build import Engine
    from penstock.text.tokenizer import Tokenizer

Run = Callable[[list[Request], bool], list[EngineOutput]]


class Vectors:
    """Requests for hidden states, made and answered.

    `run`: requests -> what came of each, in their order, and whether to show progress. `number`: the next request's.
    """

    def __init__(self, engine: Engine, tokenizer: Callable[[], Tokenizer], run: Run, number: Callable[[], int]) -> None:
        self._engine, self._tokenizer, self._run, self._number = engine, tokenizer, run, number

    def embed(
        self, prompts: Sequence[Any], *, pooling: str | None, normalize: bool | None, dimensions: int | None,
        truncate: int | None, progress: bool, adapters: Sequence[AdapterRef | None],
    ) -> list[EmbeddingRequestOutput]:  # fmt: skip
        """`prompts`: each with `ids`, `text`, `param` and `namespace`. `adapters`: of each."""
        spec, limits = self._engine.spec, self._engine.limits
        check_dimensions(dimensions, spec.vector_size)
        how = pooling_of("embed", pooling, limits)
        if normalize is None:
            normalize = limits.pooler is None or limits.pooler.normalize or dimensions is not None
        requests = [self._request(p, how, truncate, ref) for p, ref in zip(prompts, adapters, strict=True)]
        made = []
        for request, out in zip(requests, self._run(requests, progress), strict=True):
            vector = embedding(out.pooled, normalize=normalize, dimensions=dimensions).tolist()
            made.append(EmbeddingRequestOutput(request.request_id, EmbeddingOutput(vector), request.prompt_token_ids))
        return made

    def encode(
        self, prompts: Sequence[Any], *, task: str, truncate: int | None, progress: bool
    ) -> list[PoolingRequestOutput]:
        import numpy as np

        how = pooling_of(task, None, self._engine.limits)
        requests = [self._request(prompt, how, truncate) for prompt in prompts]
        made = []
        for request, out in zip(requests, self._run(requests, progress), strict=True):
            data = np.frombuffer(out.pooled, "<f4").copy()
            if task == "token_embed":
                data = data.reshape(len(request.prompt_token_ids), -1)
            made.append(PoolingRequestOutput(request.request_id, PoolingOutput(data), request.prompt_token_ids))
        return made

    def classify(
        self, prompts: Sequence[Any], *, truncate: int | None, progress: bool
    ) -> list[ClassificationRequestOutput]:
        limits = self._engine.limits
        how = pooling_of("classify", None, limits)
        assert limits.pooler is not None, "a classifier has a pooler"
        requests = [self._request(prompt, how, truncate) for prompt in prompts]
        made = []
        for request, out in zip(requests, self._run(requests, progress), strict=True):
            scores = ClassificationOutput(label_scores(out.pooled, limits.pooler.scores))
            made.append(ClassificationRequestOutput(request.request_id, scores, request.prompt_token_ids))
        return made

    def score(
        self, first: Sequence[str], second: Sequence[str], encode: Callable[[str], Any], *, truncate: int | None,
        progress: bool,
    ) -> list[ScoringRequestOutput]:  # fmt: skip
        """One pair each, or one first text with all second ones. `encode`: a text as what `embed` takes."""
        if not second or len(first) not in (1, len(second)):
            raise InputError(
                f"{len(first)} first texts came with {len(second)} second ones; give one first text, or one for each",
                param="text_1",
            )
        limits = self._engine.limits
        firsts = list(first) * (len(second) if len(first) == 1 else 1)
        if limits.pooler is not None and limits.pooler.labels:
            label = scored_label(limits.pooler)
            self._check(truncate)
            pairs = [
                encode_pair(self._tokenizer(), a, b, limits, truncate) for a, b in zip(firsts, second, strict=True)
            ]
            how = pooling_of("classify", None, limits)
            requests = [self._made(ids, how, None, "text_2", encoded=True) for ids in pairs]
            return [
                ScoringRequestOutput(
                    request.request_id, ScoringOutput(label_scores(out.pooled, limits.pooler.scores)[label]),
                    request.prompt_token_ids,
                )
                for request, out in zip(requests, self._run(requests, progress), strict=True)
            ]  # fmt: skip
        how = pooling_of("embed", None, limits)
        requests = [self._request(encode(text), how, truncate) for text in (*first, *second)]
        vectors = [embedding(out.pooled) for out in self._run(requests, progress)]
        made = []
        for i, (request, vector) in enumerate(zip(requests[len(first) :], vectors[len(first) :], strict=True)):
            at = i if len(first) > 1 else 0
            ids = [*requests[at].prompt_token_ids, *request.prompt_token_ids]
            made.append(ScoringRequestOutput(request.request_id, ScoringOutput(cosine(vectors[at], vector)), ids))
        return made

    def _request(self, prompt: Any, pooling: str, truncate: int | None, adapter: AdapterRef | None = None) -> Request:
        return self._made(
            prompt.ids, pooling, truncate, prompt.param, encoded=prompt.param == "prompt", namespace=prompt.namespace,
            adapter=adapter,
        )  # fmt: skip

    def _made(
        self, ids: list[int], pooling: str, truncate: int | None, param: str, *, encoded: bool, namespace: bytes = b"",
        adapter: AdapterRef | None = None,
    ) -> Request:  # fmt: skip
        limits = self._engine.limits
        if truncate is not None:
            self._check(truncate)
            ids = shortened(ids, limits.context[0] if truncate == -1 else truncate, encoded=encoded)
        return build_pooling_request(
            str(self._number()), ids, pooling, limits=limits, namespace=namespace,
            arrival_s=self._engine.clock.now(), param=param, adapter=adapter,
        )  # fmt: skip

    def _check(self, truncate: int | None) -> None:
        """Raises: InputError."""
        room = self._engine.limits.context[0]
        if truncate is not None and truncate != -1 and not 1 <= truncate <= room:
            raise InputError(f"truncate_prompt_tokens must be -1, or from 1 to {room}, not {truncate}",
                             param="truncate_prompt_tokens")  # fmt: skip


def failed(out: EngineOutput) -> EngineOutput:
    """Raises: EngineError if it is one."""
    if out.error is not None:
        raise EngineError(out.error)
    return out
