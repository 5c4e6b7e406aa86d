"""Models that can be simulated by name alone: nothing of a model but its shape costs time or memory.

Source: the config.json files that were published with the checkpoints (Grattafiori et al., arXiv 2407.21783).
"""

from __future__ import annotations

from penstock.base.errors import ConfigError
from penstock.core.model_spec import Attention, FeedForward, Layer, ModelSpec, Rope


def _llama3(hidden: int, layers: int, heads: int, head_dim: int, width: int, factor: float, tied: bool) -> ModelSpec:
    rope = Rope(kind="llama3", dim=head_dim, theta=500000.0, factor=factor)
    mixer = Attention(num_heads=heads, num_kv_heads=8, head_dim=head_dim, rope=rope)
    return ModelSpec(
        family="llama",
        vocab_size=128256,
        hidden_size=hidden,
        layers=(Layer(mixer=mixer, ffn=FeedForward(width=width)),) * layers,
        tie_embeddings=tied,
        max_position=131072,
        bos_token_id=128000,
        eos_token_ids=(128001,),
        dtype="bfloat16",
    )


SPECS: dict[str, ModelSpec] = {
    "llama-3.2-1b": _llama3(2048, 16, 32, 64, 8192, 32.0, True),
    "llama-3.2-3b": _llama3(3072, 28, 24, 128, 8192, 32.0, True),
    "llama-3.1-8b": _llama3(4096, 32, 32, 128, 14336, 8.0, False),
    "llama-3.1-70b": _llama3(8192, 80, 64, 128, 28672, 8.0, False),
}


def find_spec(name: str) -> ModelSpec:
    """Raises ConfigError naming the choices."""
    try:
        return SPECS[name]
    except KeyError:
        raise ConfigError(f"unknown spec {name!r}; choose one of: {', '.join(SPECS)}", field="spec") from None
