"""Architectures that llama.cpp has and Penstock has not, with what they need. Source: `src/models` of
github.com/ggml-org/llama.cpp."""

from __future__ import annotations

_ENCODER = "an encoder, whose tokens see those after them"
_VISION = "positions of three axes, for images"

NEEDS: dict[str, str] = {
    **dict.fromkeys(("nomic-bert-moe", "jina-bert-v2", "jina-bert-v3", "neo-bert",
                     "eurobert", "t5", "t5encoder", "gemma-embedding", "llama-embed"), _ENCODER),
    **dict.fromkeys(("dream", "llada", "llada-moe"), "attention to tokens that come after, for diffusion"),
    **dict.fromkeys(("hunyuan_vl", "paddleocr"), _VISION),
    "deepseek4": "compressed sparse attention",
    "clip": "a language model, for it is a vision tower alone",
    "plamo2": "a family that mixes state spaces or convolutions with attention in its own way",
    **dict.fromkeys(("dbrx", "grok", "arctic", "deepseek", "grovemoe", "smallthinker"),
                    "a mixture of experts of a family of its own"),
}  # fmt: skip
"""`general.architecture` -> what is missing."""
