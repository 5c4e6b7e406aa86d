"""`Reference` of files in stored formats: what their codes stand for, so that tokens are held against the very weights
that an engine was given, and rounding them before does not count.

GPTQ and AWQ are decoded here, GGUF by llama.cpp's own `gguf` package; nothing of Penstock's is used.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from benchmarks.peers.codes import AWQ_PLACES, nibbles
from benchmarks.peers.convert import gguf_name
from benchmarks.peers.reference import F32, Reference

_GGUF_CONFIG = {
    "hidden_size": "embedding_length", "num_hidden_layers": "block_count", "rope_theta": "rope.freq_base",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}  # fmt: skip


class CodesReference(Reference):
    """A folder of GPTQ (version 1) or AWQ."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.method = self.config["quantization_config"]["quant_method"]

    def weight(self, name: str) -> F32:
        """A matrix [N, K] or a vector, wide. Raises KeyError."""
        stem = name.removesuffix("weight")
        if stem + "qweight" not in self.header:
            return super().weight(name)
        codes, zeros = nibbles(self.raw(stem + "qweight")), nibbles(self.raw(stem + "qzeros"))
        scales = super().weight(stem + "scales")
        n = scales.shape[1]
        if self.method == "awq":
            back = np.argsort(AWQ_PLACES)
            wide, zero = codes[..., back].reshape(-1, n), zeros[..., back].reshape(-1, n)
            of_input = np.arange(len(wide)) // (len(wide) // len(scales))
        else:
            wide, zero = codes.swapaxes(1, 2).reshape(-1, n), zeros.reshape(-1, n) + np.uint32(1)
            of_input = self.raw(stem + "g_idx")
        values = (wide.astype(np.float32) - zero.astype(np.float32)[of_input]) * scales[of_input]
        return np.ascontiguousarray(values.T)


class GgufReference(Reference):
    """A GGUF file of a Llama or Qwen2. Raises ValueError for another architecture or scaled positions, ImportError
    without the package `gguf`."""

    def __init__(self, file: Path) -> None:
        import gguf

        self._decode = gguf.dequantize
        reader = gguf.GGUFReader(file)
        arch = reader.fields["general.architecture"].contents()
        if arch not in ("llama", "qwen2") or any(t.name == "rope_freqs.weight" for t in reader.tensors):
            raise ValueError(f"there is no reference for GGUF files of {arch!r}, or with scaled positions")
        told = {name: reader.fields[f"{arch}.{key}"].contents() for name, key in _GGUF_CONFIG.items()}
        self._tensors = {t.name: t for t in reader.tensors}
        length = reader.fields.get(f"{arch}.attention.key_length")
        self.heads, self.kv_heads = told["num_attention_heads"], told["num_key_value_heads"]
        self.head_dim = length.contents() if length is not None else told["hidden_size"] // self.heads
        self.config = told | {"model_type": arch, "tie_word_embeddings": "output.weight" not in self._tensors}
        self.header = {n: {} for n in self._names() if gguf_name(n) in self._tensors}

    def _names(self) -> list[str]:
        layers = range(self.config["num_hidden_layers"])
        return [f"model.layers.{i}.self_attn.{n}_proj.bias" for i in layers for n in "qkv"]

    def weight(self, name: str) -> F32:
        """A matrix [N, K] or a vector, wide. Raises KeyError."""
        tensor = self._tensors[gguf_name(name)]
        values = np.asarray(self._decode(tensor.data, tensor.tensor_type), np.float32)
        values = values.reshape([int(n) for n in tensor.shape[::-1]])
        if self.config["model_type"] == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = self.heads if "q_proj" in name else self.kv_heads
            half = len(values) // heads // 2
            values = values.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(values.shape)
        return values
