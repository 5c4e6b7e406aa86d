"""What requests for vectors, scores and classes say: which pooling, which prompt in front, pairs of texts as ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.base.errors import InputError
from penstock.core.pooler import HEAD, POOLINGS, WHOLE, PoolingSpec

if TYPE_CHECKING:
    from penstock.text.limits import Limits
    from penstock.text.tokenizer import Tokenizer

NO_TEXT = (
    "this model reads texts and writes none; ask it for vectors at /v1/embeddings (LLM.embed), for "
    "scores of pairs at /v1/score and /v1/rerank (LLM.score), for classes at /classify (LLM.classify)"
)
TASKS = ("embed", "classify", "token_embed")


def pooling_of(task: str, asked: str | None, limits: Limits) -> str:
    """What a request of `task` (one of TASKS) for a pooling (None: the model's own) tells the rank.

    Raises: InputError for one that the model does not have.
    """
    own = limits.pooler
    if task not in TASKS:
        raise InputError(f"task must be one of {', '.join(TASKS)}, not {task[:40]!r}", param="task")
    if task == "token_embed":
        return WHOLE
    if task == "classify":
        if own is None or not own.labels:
            raise InputError("this model has no classifier's head; ask it for vectors at /v1/embeddings", param="model")
        return own.pooling
    if asked is not None:
        if asked not in POOLINGS:
            raise InputError(f"pooling must be one of {', '.join(POOLINGS)}, not {asked[:40]!r}", param="pooling")
        return asked + HEAD if own is not None and own.head and not own.labels else asked
    if own is not None and own.labels:
        raise InputError(
            "this model is a classifier, and gives no vectors; ask it at /classify, /v1/score or /v1/rerank, or name a "
            "pooling of its hidden states", param="model",
        )  # fmt: skip
    return own.pooling if own is not None else "last"


def check_pooling(pooling: str, limits: Limits) -> None:
    """Raises: InputError unless this is something that `pooling_of` may have given."""
    mode = pooling.removesuffix(HEAD)
    has_head = limits.pooler is not None and bool(limits.pooler.head)
    if mode not in (*POOLINGS, WHOLE) or (mode != pooling and (not has_head or mode == WHOLE)):
        raise InputError(f"pooling must be one of {', '.join(POOLINGS)}, not {pooling[:40]!r}", param="pooling")


def prompt_before(name: str | None, pooler: PoolingSpec | None) -> str:
    """The text that goes before an input. `name`: a prompt of the model; None: its default. Raises: InputError."""
    own = dict(pooler.prompts) if pooler is not None else {}
    if name is None:
        return own.get(pooler.prompt or "", "") if pooler is not None else ""
    if name not in own:
        known = f"known ones: {', '.join(own)}" if own else "it has none"
        raise InputError(f"prompt_name {name[:40]!r} is no prompt of this model; {known}", param="prompt_name")
    return own[name]


def shortened(ids: list[int], most: int, *, encoded: bool) -> list[int]:
    """The first `most` ids of a text; the last one stays last where the tokenizer put it there (`encoded`)."""
    if len(ids) <= most:
        return ids
    return [*ids[: most - 1], ids[-1]] if encoded and most > 1 else ids[:most]


def encode_pair(tokenizer: Tokenizer, first: str, second: str, limits: Limits) -> list[int]:
    """Ids of two texts as a cross-encoder reads them, the second one's of another kind where the model has kinds.

    Raises: InputError for an empty one.
    """
    for text, name in ((first, "text_1"), (second, "text_2")):
        if not text:
            raise InputError(f"{name} must not be empty", param=name)
    ids, kinds = tokenizer.encode_pair(first, second)
    if not limits.num_words:
        return ids
    most = limits.vocab_size // limits.num_words - 1
    return [i + min(kind, most) * limits.num_words for i, kind in zip(ids, kinds, strict=True)]


def check_scorer(num_labels: int) -> None:
    """Raises: InputError for a classifier whose labels are no score of a pair."""
    if num_labels != 1:
        raise InputError(
            f"this model has {num_labels} labels, and a score of a pair needs a model with one; ask it at /classify",
            param="model",
        )
