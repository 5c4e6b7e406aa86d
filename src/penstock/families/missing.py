"""Architectures that people bring and Penstock does not run, each with the part that is missing.

A name alone helps nobody to decide what to do; the missing part does. An entry goes away when its family arrives.
"""

from __future__ import annotations

_VISION = "a vision tower"

MISSING: dict[str, str] = {
    "BitNetForCausalLM": "norms inside both halves of a layer, and a format of ternary weights",
    "Gemma3nForConditionalGeneration": "vision and audio towers and per-layer embeddings",
    "KimiK3ForConditionalGeneration": f"{_VISION}, delta attention (kda_layers) and latent experts",
    "MiniMaxM3ForCausalLM": "block-sparse attention whose blocks a learned indexer selects (sparse_attention_config)",
    "MllamaForConditionalGeneration": f"{_VISION} and cross-attention",
    "T5ForConditionalGeneration": "an encoder (Penstock runs decoders)",
    "WhisperForConditionalGeneration": "an audio encoder (Penstock runs text decoders)",
}
"""Entry of `architectures` in config.json -> what running it would need."""

PURPOSES = {
    "ForSequenceClassification": "a classifier's head",
    "ForTokenClassification": "a token classifier's head",
    "ForQuestionAnswering": "a head that marks spans",
    "ForMaskedLM": "an encoder that sees both sides (Penstock runs decoders)",
}
"""End of an architecture's name -> what running it would need."""


def missing_part(architecture: str) -> str | None:
    """What running `architecture` would need beyond Penstock; None if nothing is known about it."""
    if architecture in MISSING:
        return MISSING[architecture]
    return next((part for end, part in PURPOSES.items() if architecture.endswith(end)), None)
