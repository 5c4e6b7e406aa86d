"""Which of its two position schemes a model runs with, if they depend on how long contexts are."""

from __future__ import annotations

from penstock.core.events import Decision
from penstock.core.mixers.rope import Rope
from penstock.core.model_spec import ModelSpec


def rope_decision(spec: ModelSpec, max_model_len: int) -> Decision | None:
    """What `max_model_len` makes of positions that go by the length (`dynamic`, `longrope`); None if none do.

    The value is `original`, as far as the model was trained, or `extended`.
    """
    ropes = {rope for layer in spec.layers if (rope := getattr(layer.mixer, "rope", None)) is not None}
    by_length = [rope for rope in ropes if _by_length(rope)]
    if not by_length:
        return None
    rope = min(by_length, key=lambda r: r.original_max_position)
    trained = rope.original_max_position
    short, long = ("short factors", "long factors") if rope.kind == "longrope" else ("plain theta", "larger theta")
    if max_model_len <= trained:
        why = f"every text has the {short}: max_model_len {max_model_len} is within the {trained} positions trained on"
        return Decision("rope_regime", "original", why)
    why = (
        f"every text has the {long}, also one of up to {trained} tokens, to which transformers gives the {short}: "
        f"max_model_len {max_model_len} is beyond the {trained} positions trained on; max_model_len {trained} gives "
        f"the {short}"
    )
    return Decision("rope_regime", "extended", why)


def _by_length(rope: Rope) -> bool:
    if rope.kind == "longrope":
        return rope.short_factor != rope.long_factor or rope.start_tokens > 0
    return rope.kind == "dynamic"
