"""Architectures that people bring and Penstock does not run, each with the part that is missing.

A name alone helps nobody to decide what to do; the missing part does. An entry goes away when its family arrives.
"""

from __future__ import annotations

_VISION = "a vision tower"

_STREAMS = "hyper-connections (hc_mult)"

MISSING: dict[str, str] = {
    "AXK2ForCausalLM": "norms with gates of low rank",
    "BailingMoeLinearV2ForCausalLM": "lightning attention whose heads are normed in groups",
    "BeamForCausalLM": "queries that grow with a power of their position, and gates with a bias per head",
    "BltForCausalLM": "patches of bytes whose length a model of its own decides",
    "CpmAntForCausalLM": "segments with positions relative to each other, in prompts whose tokens see each other",
    "CTRLLMHeadModel": "sinusoidal positions",
    "DiffLlamaForCausalLM": "attention that is the difference of two softmaxes",
    "Dots3NoteForCausalLM": "latent attention in windows, whose rotary key is normed",
    "Glm5NextForConditionalGeneration": f"{_VISION}, {_STREAMS} and an indexer beside linear attention",
    "HrmTextForCausalLM": "stacks of layers that run several times over",
    "HYV4ForCausalLM": _STREAMS,
    "Inkling2ForCausalLM": "scores of relative positions, and convolutions inside of the layers",
    "InklingForCausalLM": "scores of relative positions, and convolutions inside of the layers",
    "JetMoeForCausalLM": "experts that are heads of attention",
    "Kolibri1ForCausalLM": "a router that corrects logits, not scores",
    "LongcatFlashForCausalLM": "experts that give back their input, beside two halves of a layer at once",
    "MistralLarge4ForConditionalGeneration": f"{_VISION}, layers that share latents, and learned scales of queries",
    "ModernBertDecoderForCausalLM": "a product with an activation and a norm between the last layer and the output",
    "Phi4MMForCausalLM": "towers for images and sounds, with adapters of their own",
    "Phi4MultimodalForCausalLM": "towers for images and sounds, with adapters of their own",
    "Qwen4ExpForCausalLM": "embeddings of n-grams, gated residuals and a sparse choice of keys",
    "XGLMForCausalLM": "sinusoidal positions",
    "ZambaForCausalLM": "attention blocks that several layers share, each with an adapter of its own",
    "ZayaForCausalLM": "attention over keys and values that convolutions compress",
    "Gemma3nForConditionalGeneration": "vision and audio towers and per-layer embeddings",
    "KimiK3ForConditionalGeneration": f"{_VISION}, residuals over blocks of layers (attn_res_block_size), situ gates",
    "MllamaForConditionalGeneration": f"{_VISION} and cross-attention",
    "T5ForConditionalGeneration": "an encoder beside the decoder",
    "WhisperForConditionalGeneration": "an audio encoder (Penstock runs text decoders)",
}
"""Entry of `architectures` in config.json -> what running it would need."""

PURPOSES = {
    "ForSequenceClassification": "a classifier's head",
    "ForTokenClassification": "a token classifier's head",
    "ForQuestionAnswering": "a head that marks spans",
    "ForMaskedLM": "an encoder of another kind than those that are read",
}
"""End of an architecture's name -> what running it would need."""


def missing_part(architecture: str) -> str | None:
    """What running `architecture` would need beyond Penstock; None if nothing is known about it."""
    if architecture in MISSING:
        return MISSING[architecture]
    return next((part for end, part in PURPOSES.items() if architecture.endswith(end)), None)
