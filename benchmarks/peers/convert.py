"""A checkpoint of `make_models` in the forms that peers read.

    python -m benchmarks.peers.convert qwen2.5-0.5b --to gguf,q8_0,q4_0,gptq4,awq4,vllm-int8,ov-bf16,ov-int8,ort-int4

GGUF, compressed tensors, GPTQ and AWQ are written here; block formats, OpenVINO and ONNX by the peers' own converters.
What exists is not made again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from benchmarks.peers.codes import to_codes
from benchmarks.peers.engines import CODES, GGUF, Place, default_place, environment
from benchmarks.peers.make_models import write_safetensors
from benchmarks.peers.reference import F32, Reference

from penstock.base.bf16 import narrow

# -- GGUF: a header of typed values, tensor descriptions, aligned data (docs/gguf.md of github.com/ggml-org/ggml)

_U32, _F32, _BOOL, _STRING, _ARRAY, _I32 = 4, 6, 7, 8, 9, 5
_ALIGNMENT = 32
_GGML_F32, _GGML_BF16, _FILE_BF16 = 0, 30, 32
_NORMAL, _CONTROL = 1, 3
_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}  # fmt: skip


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """Type and value. Lists hold strings or whole numbers."""
    if isinstance(value, bool):
        return struct.pack("<IB", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _U32, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    kind = _STRING if isinstance(value[0], str) else _I32
    items = map(_string, value) if kind == _STRING else (struct.pack("<i", v) for v in value)
    return struct.pack("<IIQ", _ARRAY, kind, len(value)) + b"".join(items)


def metadata(config: dict[str, Any], tokenizer: dict[str, Any]) -> dict[str, Any]:
    """What llama.cpp wants to know of a Llama or Qwen2."""
    arch, heads = config["model_type"], config["num_attention_heads"]
    model, special = tokenizer["model"], {t["id"] for t in tokenizer["added_tokens"]}
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    own = {
        "context_length": config["max_position_embeddings"], "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads, "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_theta"]), "vocab_size": config["vocab_size"],
        "attention.key_length": head_dim, "attention.value_length": head_dim, "rope.dimension_count": head_dim,
    }  # fmt: skip
    scaling = config.get("rope_scaling") or {}
    if "attention_factor" in scaling:
        own["rope.scaling.attn_factor"] = float(scaling["attention_factor"])
    eos = config["eos_token_id"]
    return {
        "general.architecture": arch, "general.file_type": _FILE_BF16, **{f"{arch}.{k}": v for k, v in own.items()},
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_CONTROL if i in special else _NORMAL for i in range(len(tokens))],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in model["merges"]],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": eos[0] if isinstance(eos, list) else eos, "tokenizer.ggml.add_bos_token": False,
    }  # fmt: skip


def gguf_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_LAYER_NAMES[stem]}.{kind}"


def interleaved(rows: F32, heads: int) -> F32:
    """Rows of q or k so that components which turn together are neighbours, as llama.cpp's Llama has them."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def to_gguf(folder: Path, out: Path) -> None:
    """bfloat16 matrices, float32 vectors."""
    source = Reference(folder)
    config = source.config
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    names = [n for n in source.header if n != "__metadata__"]
    factors = np.array((config.get("rope_scaling") or {}).get("long_factor", ()), np.float32)
    shapes = {n: tuple(source.header[n]["shape"]) for n in names}
    sizes = {n: int(np.prod(shapes[n])) * (2 if len(shapes[n]) > 1 else 4) for n in names}
    temporary = out.with_name(out.name + ".part")
    with temporary.open("wb") as file:
        tensors = [(gguf_name(n), shapes[n], _GGML_BF16 if len(shapes[n]) > 1 else _GGML_F32, sizes[n]) for n in names]
        if factors.size:  # longrope: each pair of components has a frequency of its own
            tensors.append(("rope_freqs.weight", factors.shape, _GGML_F32, factors.nbytes))
        write_header(file, metadata(config, tokenizer), tensors)
        for n in names:
            tensor = source.weight(n)
            if config["model_type"] == "llama" and n.endswith(("q_proj.weight", "k_proj.weight")):
                tensor = interleaved(tensor, source.heads if "q_proj" in n else source.kv_heads)
            file.write(np.ascontiguousarray(narrow(tensor) if tensor.ndim > 1 else tensor).data)
            pad(file)
        file.write(factors.data)
        pad(file)
    temporary.replace(out)


def write_header(
    file: BinaryIO, values: dict[str, Any], tensors: Sequence[tuple[str, tuple[int, ...], int, int]]
) -> None:
    """Everything before the data. `tensors`: (name, row-major shape, ggml's type, bytes), in the order of their data,
    each of which has to be followed by `pad`."""
    file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)))
    for key, value in values.items():
        file.write(_string(key) + _value(value))
    at = 0
    for name, shape, kind, nbytes in tensors:
        dims = shape[::-1]  # the fastest first
        head = _string(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
        file.write(head + struct.pack("<IQ", kind, at))
        at += nbytes + -nbytes % _ALIGNMENT
    pad(file)


def pad(file: BinaryIO) -> None:
    file.write(b"\0" * (-file.tell() % _ALIGNMENT))


# -- vLLM: compressed tensors, layers only; the head stays in bfloat16


def to_compressed(folder: Path, out: Path, scheme: str) -> None:
    """`int8`: 8-bit weights and activations, scales per output and per token. `w4a16`: 4-bit weights, groups of 128."""
    source = Reference(folder)
    out.mkdir(parents=True, exist_ok=True)
    write_safetensors(out / "model.safetensors", _compressed(source, scheme))
    weights = {"type": "int", "symmetric": True, "dynamic": False, "observer": "minmax"}
    activations = None
    if scheme == "int8":
        weights |= {"num_bits": 8, "strategy": "channel"}
        activations = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    else:
        weights |= {"num_bits": 4, "strategy": "group", "group_size": 128}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    config = source.config | {"quantization_config": {
        "quant_method": "compressed-tensors", "format": "int-quantized" if scheme == "int8" else "pack-quantized",
        "quantization_status": "compressed", "ignore": ["lm_head"], "kv_cache_scheme": None,
        "global_compression_ratio": None, "config_groups": {"group_0": group},
    }}  # fmt: skip
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(folder / name, out / name)


def _compressed(source: Reference, scheme: str) -> Iterator[tuple[str, tuple[int, ...], str, Callable[[], Any]]]:
    for name, entry in source.header.items():
        if name == "__metadata__":
            continue
        shape = tuple(entry["shape"])
        stem = name.removesuffix(".weight")
        if not name.endswith("_proj.weight"):
            yield name, shape, "BF16", lambda n=name: narrow(source.weight(n))  # type: ignore[misc]
        elif scheme == "int8":
            yield name, shape, "I8", lambda n=name: int8(source.weight(n))[0]  # type: ignore[misc]
            yield f"{stem}.weight_scale", (shape[0], 1), "F32", lambda n=name: int8(source.weight(n))[1]  # type: ignore[misc]
        else:
            rows, cols = shape
            yield f"{stem}.weight_packed", (rows, cols // 8), "I32", lambda n=name: int4(source.weight(n))[0]  # type: ignore[misc]
            yield f"{stem}.weight_scale", (rows, cols // 128), "BF16", lambda n=name: narrow(int4(source.weight(n))[1])  # type: ignore[misc]
            yield f"{stem}.weight_shape", (2,), "I64", lambda s=shape: np.array(s, np.int64)  # type: ignore[misc]


def int8(w: F32) -> tuple[Any, F32]:
    """(values [N, K], scales [N, 1])."""
    scale = np.abs(w).max(1, keepdims=True) / np.float32(127)
    return np.clip(np.rint(w / scale), -127, 127).astype(np.int8), scale


def int4(w: F32, group: int = 128) -> tuple[Any, F32]:
    """(eight values + 8 in an int32, the first lowest [N, K/8], scales [N, K/group])."""
    grouped = w.reshape(len(w), -1, group)
    scale = np.abs(grouped).max(2, keepdims=True) / np.float32(7)
    values = (np.clip(np.rint(grouped / scale), -8, 7) + 8).astype(np.uint32).reshape(len(w), -1, 8)
    packed = np.zeros(values.shape[:2], np.uint32)
    for i in range(8):
        packed |= values[:, :, i] << np.uint32(4 * i)
    return packed.view(np.int32), scale[:, :, 0]


# -- everything else: the peers' own tools


def plan(model: str, form: str, place: Place) -> tuple[Path, Callable[[], Any]]:
    """(what is made, how). Raises ValueError for a form that nobody reads."""
    folder = place.model(model)
    base, tool, _, precision = str(folder), *form.partition("-")
    if form == "gguf":
        out = Path(f"{base}-bf16.gguf")
        return out, lambda: to_gguf(folder, out)
    if form in GGUF:
        out, server = Path(f"{base}-{form}.gguf"), place.llama_server()
        if server is None:
            raise ValueError(f"{form} is made by llama.cpp's own llama-quantize, beside llama-server: build it first")
        return out, lambda: _call(
            [str(Path(server).with_name("llama-quantize")), f"{base}-bf16.gguf", str(out), form.upper()]
        )
    if tool == "vllm" and precision in ("int8", "w4a16"):
        out = Path(f"{base}-{precision}")
        return out, lambda: to_compressed(folder, out, precision)
    if form in CODES:
        out = Path(f"{base}-{form}")
        return out, lambda: to_codes(folder, out, form)
    if tool == "ov" and precision in ("bf16", "int8", "int4"):
        out = Path(f"{base}-{form}")
        how = {"bf16": ["fp16"], "int8": ["int8"], "int4": ["int4", "--sym", "--group-size", "128", "--ratio", "1.0"]}
        words = ["export", "openvino", "--task", "text-generation-with-past", "--model", base, "--weight-format"]
        binary = str(place.python("openvino").with_name("optimum-cli"))
        return out, lambda: _call([binary, *words, *how[precision], str(out)])
    if form == "ort-int4":
        out = Path(f"{base}-{form}")
        words = ["-i", base, "-o", str(out), "-p", "int4", "-e", "cpu", "--extra_options", "int4_accuracy_level=4"]
        python = str(place.python("onnxruntime"))
        return out, lambda: _call([python, "-m", "onnxruntime_genai.models.builder", *words])
    raise ValueError(f"there is no form {form!r}")


def _call(words: Sequence[str]) -> None:
    subprocess.run(words, check=True, env=environment())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--to", default="gguf,vllm-int8,vllm-w4a16")
    parser.add_argument("--peers", type=Path, help="default: $PENSTOCK_PEERS or ~/.cache/penstock-peers")
    args = parser.parse_args()
    place = Place(args.peers.expanduser()) if args.peers else default_place()
    for model in args.models:
        for form in args.to.split(","):
            try:
                out, make = plan(model, form, place)
            except ValueError as error:
                parser.error(str(error))
            if not out.exists():
                make()
            print(out)


if __name__ == "__main__":
    main()
