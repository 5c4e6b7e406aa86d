"""Architectures that llama.cpp has and Penstock has not, with what they need. Source: `src/models` of
github.com/ggml-org/llama.cpp."""

from __future__ import annotations

_DELTA = "layers of gated delta-rule linear attention"
_ENCODER = "an encoder, whose tokens see those after them"
_VISION = "positions of three axes, for images"

NEEDS: dict[str, str] = {
    "kimi-linear": _DELTA,
    **dict.fromkeys(("bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3", "neo-bert",
                     "eurobert", "t5", "t5encoder", "gemma-embedding", "llama-embed"), _ENCODER),
    **dict.fromkeys(("dream", "llada", "llada-moe"), "attention to tokens that come after, for diffusion"),
    **dict.fromkeys(("hunyuan_vl", "paddleocr"), _VISION),
    **dict.fromkeys(("deepseek32", "glm-dsa"), "a reader of its GGUF layout (its folders of safetensors are read)"),
    "deepseek4": "compressed sparse attention",
    "clip": "a language model, for it is a vision tower alone",
    "rwkv6": "RWKV-6 time mixing", "rwkv6qwen2": "RWKV-6 time mixing",
    "rwkv7": "a reader of its GGUF layout (RWKV-7 is read from rwkv.cpp files)",
    "arwkv7": "RWKV-7 time mixing with the feed-forward of Qwen2",
    **dict.fromkeys(("jamba", "plamo2", "falcon-h1"),
                    "a family that mixes state spaces or convolutions with attention in its own way"),
    **dict.fromkeys(("phimoe", "dbrx", "grok", "arctic", "deepseek", "bailingmoe", "bailingmoe2", "exaone-moe",
                     "grovemoe", "smallthinker", "afmoe", "cohere2moe", "mistral4", "mimo2", "step35"),
                    "a mixture of experts of a family of its own"),
}  # fmt: skip
"""`general.architecture` -> what is missing."""
