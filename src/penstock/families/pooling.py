"""What sentence-transformers writes beside a model: how hidden states become vectors.

`modules.json` lists what a text goes through: the model, a pooling, perhaps dense layers, perhaps a norm. Each has a
folder with a config.json; dense layers have weights. Source: Reimers & Gurevych, Sentence-BERT, arXiv 1908.10084,
section 3; the file formats as sentence-transformers writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import ModelSpec
from penstock.core.pooler import HeadLayer, PoolingSpec
from penstock.families.checkpoint import WeightRef
from penstock.families.fields import Fields
from penstock.formats.files import quoted, read_whole
from penstock.formats.json_file import CONFIG_LIMIT_BYTES, parse_json_object, read_json_object
from penstock.formats.safetensors import read_safetensors

_MODES = {
    "pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len", "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}  # fmt: skip
_NEW_MODES = {"lasttoken": "last", "max": "max", "mean": "mean", "cls": "cls", "weightedmean": "weightedmean",
              "mean_sqrt_len_tokens": "mean_sqrt_len"}  # fmt: skip
_DENSE_ACTIVATIONS = {"Identity": "none", "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu", "SiLU": "silu",
                      "Sigmoid": "sigmoid"}  # fmt: skip
_KNOWN = ("Transformer", "Pooling", "Dense", "Normalize")


def with_pooling(spec: ModelSpec, folder: Path, names: list[str]) -> tuple[ModelSpec, dict[str, WeightRef]]:
    """`spec` with what the files of `folder`, whose listing is `names`, say of vectors; and the weights for it.

    A classifier's head stands in config.json: only its longest text is taken from here. Raises: ModelError,
    UnsupportedError for a step that Penstock does not compute.
    """
    pooler = spec.pooler
    if "modules.json" not in names and "sentence_bert_config.json" not in names:
        return spec, {}
    pooler = pooler or PoolingSpec(mode="last")
    told = _object(folder, "sentence_bert_config.json")
    most = told.get("max_seq_length")
    if isinstance(most, int) and not isinstance(most, bool) and most > 0:
        pooler = msgspec.structs.replace(pooler, max_tokens=min(most, spec.max_position))
    weights: dict[str, WeightRef] = {}
    if "modules.json" in names and not pooler.labels:
        pooler, weights = _modules(pooler, folder, spec.hidden_size)
        pooler = _prompts(pooler, folder)
    if weights and spec.has_head:
        raise UnsupportedError(
            f"{quoted(folder)} puts dense layers behind a model that writes text; Penstock has these for encoders only"
        )
    return msgspec.structs.replace(spec, pooler=pooler), weights


def _modules(pooler: PoolingSpec, folder: Path, width: int) -> tuple[PoolingSpec, dict[str, WeightRef]]:
    data = read_whole(folder / "modules.json", CONFIG_LIMIT_BYTES)
    listed = parse_json_object(b'{"modules": ' + data + b"}", quoted(folder / "modules.json"))["modules"]
    if not isinstance(listed, list) or not all(isinstance(m, dict) for m in listed):
        raise ModelError(f"{quoted(folder / 'modules.json')} is not a list of modules")
    head: list[HeadLayer] = []
    weights: dict[str, WeightRef] = {}
    normalize = False
    for module in listed:
        kind, path = str(module.get("type", "")).rsplit(".", 1)[-1], str(module.get("path", ""))
        if kind not in _KNOWN:
            raise UnsupportedError(
                f"{quoted(folder / 'modules.json')} has a module {quoted(kind)}; known ones: {', '.join(_KNOWN)}"
            )
        inner = folder / path
        if ".." in Path(path).parts or Path(path).is_absolute():
            raise ModelError(f"{quoted(folder / 'modules.json')} names a folder outside of the model: {quoted(path)}")
        if kind == "Pooling":
            pooler = msgspec.structs.replace(pooler, mode=_mode(read_json_object(inner / "config.json"), inner))
        elif kind == "Dense":
            if normalize:
                raise UnsupportedError(f"{quoted(folder / 'modules.json')} has a dense layer behind the norm")
            layer, found = _dense(inner, len(head), width)
            head.append(layer)
            weights |= found
            width = layer.width
        normalize = normalize or kind == "Normalize"
    return msgspec.structs.replace(pooler, head=tuple(head), normalize=normalize), weights


def _mode(config: Mapping[str, Any], folder: Path) -> str:
    given = config.get("pooling_mode")
    if isinstance(given, str):
        modes = [_NEW_MODES.get(given, given)]
    else:
        modes = [mode for name, mode in _MODES.items() if config.get(name) is True]
    if len(modes) != 1 or modes[0] not in _MODES.values():
        raise UnsupportedError(
            f"{quoted(folder / 'config.json')} asks for {len(modes)} poolings ({', '.join(map(quoted, modes))}); one "
            f"of {', '.join(_MODES.values())} is possible"
        )
    return modes[0]


def _dense(folder: Path, number: int, width: int) -> tuple[HeadLayer, dict[str, WeightRef]]:
    fields = Fields(read_json_object(folder / "config.json"), f"config.json of {folder.name}")
    told = fields.string("activation_function", default="torch.nn.modules.linear.Identity").rsplit(".", 1)[-1]
    if told not in _DENSE_ACTIVATIONS:
        raise UnsupportedError(
            f"{quoted(folder)} has the activation {quoted(told)}; known ones: {', '.join(_DENSE_ACTIVATIONS)}"
        )
    if fields.integer("in_features", high=1 << 24) != width:
        raise ModelError(f"{quoted(folder)} reads vectors of another width than the {width} that come before it")
    layer = HeadLayer(
        width=fields.integer("out_features", high=1 << 24), bias=fields.flag("bias", default=True),
        activation=_DENSE_ACTIVATIONS[told],  # type: ignore[arg-type]
    )  # fmt: skip
    path = folder / "model.safetensors"
    if not path.is_file():
        raise UnsupportedError(f"{quoted(folder)} has its weights not as model.safetensors; convert them")
    tensors = read_safetensors(path)
    weights = {}
    for logical, name in ((f"head.{number}", "linear.weight"), (f"head.{number}.bias", "linear.bias")):
        if name not in tensors and (layer.bias or not logical.endswith("bias")):
            raise ModelError(f"{quoted(path)} lacks the tensor {name}")
        if name in tensors:
            weights[logical] = WeightRef(tensors[name])
    return layer, weights


def _prompts(pooler: PoolingSpec, folder: Path) -> PoolingSpec:
    told = _object(folder, "config_sentence_transformers.json")
    prompts = told.get("prompts")
    if not isinstance(prompts, dict):
        return pooler
    found = tuple((str(name), text) for name, text in prompts.items() if isinstance(text, str))
    default = told.get("default_prompt_name")
    if default is not None and default not in dict(found):
        raise ModelError(f"{quoted(folder)} names the default prompt {quoted(default)}, which it does not have")
    return msgspec.structs.replace(pooler, prompts=found, prompt=default)


def _object(folder: Path, name: str) -> dict[str, Any]:
    return read_json_object(folder / name) if (folder / name).is_file() else {}
