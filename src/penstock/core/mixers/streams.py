"""Several residual streams in place of one."""

from __future__ import annotations

import msgspec

from penstock.core.mixers import Shapes


class Streams(msgspec.Struct, frozen=True, kw_only=True):
    """Manifold-constrained hyper-connections: the residual is `num` = n streams [n, E], which begin as copies of the
    embedding.

    A half of a layer works out three sets of weights from all streams: normed together (RMS, `norm_eps`, no weights),
    times a matrix [(2 + n) n, n E], each set times a learned number (`scale` [3]) plus what is learned for each
    (`base`). sigmoid + `eps`: how much of each stream the half reads. 2 sigmoid: how much of its result each stream
    gets. softmax over rows + `eps`, made doubly stochastic by `iterations` of Sinkhorn and Knopp, [n, n]: how the
    streams go over into each other, new[k] = sum over j of mix[j, k] old[j]. At the end a matrix [n, n E] with one
    `scale` weighs the streams for the head in the first way.

    Weights `attn_streams`, `ffn_streams` of a layer and `head_streams` of the model, each with `.base` and `.scale`.
    Source: Xie et al. (2026), DeepSeek-V4, section 2.2; Zhu et al., Hyper-Connections, arXiv 2409.19606.
    """

    num: int
    iterations: int
    eps: float = 1e-6
    norm_eps: float = 1e-6

    def weight_shapes(self, name: str, e: int, *, last: bool = False) -> Shapes:
        """Those of a half, or of the head (`last`)."""
        rows = self.num if last else (2 + self.num) * self.num
        return {name: (rows, self.num * e), name + ".base": (rows,), name + ".scale": (1 if last else 3,)}
