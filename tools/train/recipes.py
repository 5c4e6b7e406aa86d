"""The shapes that are trained: all Llama-like with one tokenizer, so that one can draft for another."""

from __future__ import annotations

from penstock.core.model_spec import (
    Alibi,
    Attention,
    FeedForward,
    Latent,
    Layer,
    Mixer,
    ModelSpec,
    Norm,
    Recurrent,
    Rope,
)

VOCAB = 4096
CONTEXT = 2048
NORM = Norm(eps=1e-5)


def _model(mixers: list[Mixer], hidden: int, width: int) -> ModelSpec:
    layers = tuple(Layer(mixer=m, ffn=FeedForward(width=width), norm=NORM) for m in mixers)
    return ModelSpec(
        family="llama", vocab_size=VOCAB, hidden_size=hidden, layers=layers, final_norm=NORM, tie_embeddings=True,
        max_position=CONTEXT, bos_token_id=0, eos_token_ids=(0, 2), dtype="bfloat16",
    )  # fmt: skip


# Far above the usual 10,000: heads are small, and half of their few dimensions have to turn slowly enough to compare
# what stands 2,000 tokens apart.
THETA = 1e8


def _heads(heads: int, kv_heads: int, dim: int = 32, **more: object) -> Attention:
    options: dict[str, object] = {"rope": Rope(dim=dim, theta=THETA)} | more
    return Attention(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, **options)  # type: ignore[arg-type]


RECIPES: dict[str, ModelSpec] = {
    # 3.2 M parameters, 6.4 MB in bfloat16: what ships in the package.
    "nano": _model([_heads(6, 3)] * 6, 192, 512),
    # 6.2 M: for who has a GPU, or a day.
    "nano-large": _model([_heads(8, 4)] * 7, 256, 704),
    # 0.4 M: drafts for nano.
    "pico": _model([_heads(3, 3)] * 2, 64, 256),
    # Variants of nano, one difference each.
    "nano-mqa": _model([_heads(6, 1)] * 6, 192, 512),
    "nano-mla": _model(
        [Latent(num_heads=6, kv_rank=48, nope_dim=32, rope_dim=16, v_dim=32, rope=Rope(dim=16))] * 6, 192, 512
    ),
    "nano-alibi": _model([_heads(6, 3, rope=None, alibi=Alibi())] * 6, 192, 512),
    "nano-hybrid": _model(
        [_heads(6, 3) if i % 3 == 2 else Recurrent(num_heads=6, key_dim=32, value_dim=32) for i in range(6)], 192, 512
    ),
    # For tests of the trainer itself.
    "tiny": _model([_heads(2, 1, 16)] * 2, 32, 64),
}
