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


def encode_pair(
    tokenizer: Tokenizer, first: str, second: str, limits: Limits, most: int | None = None
) -> list[int]:  # fmt: skip
    """Ids of two texts as a cross-encoder reads them, the second one's of another kind where the model has kinds.
    `most`: how many there may be, -1: as many as the model takes, None: all.

    Raises: InputError for an empty one.
    """
    for text, name in ((first, "text_1"), (second, "text_2")):
        if not text:
            raise InputError(f"{name} must not be empty", param=name)
    room = limits.context[0] if most == -1 else most
    own = None if limits.pooler is None else limits.pooler.pair
    if own is not None:
        before, behind = (tokenizer.encode(own[i], add_special_tokens=False) for i in (0, 3))
        asked = tokenizer.encode_plain("".join([own[1], first, own[2], second]))
        if room is not None and (room := room - len(before) - len(behind)) < 1:
            raise InputError(
                f"truncate_prompt_tokens leaves no room behind the {len(before) + len(behind)} tokens of this model's "
                "question", param="truncate_prompt_tokens",
            )  # fmt: skip
        return [*before, *asked[:room], *behind]
    ids, kinds = tokenizer.encode_pair(first, second)
    if limits.num_words:
        last = limits.vocab_size // limits.num_words - 1
        ids = [i + min(kind, last) * limits.num_words for i, kind in zip(ids, kinds, strict=True)]
    return ids if room is None else shortened(ids, room, encoded=True)


def scored_label(pooler: PoolingSpec) -> int:
    """Which label's score is that of a pair. Raises: InputError for a classifier that has none."""
    if pooler.scored is None:
        raise InputError(
            f"this model has {len(pooler.labels)} labels, and a score of a pair needs a model with one; ask it at "
            "/classify", param="model",
        )  # fmt: skip
    return pooler.scored
