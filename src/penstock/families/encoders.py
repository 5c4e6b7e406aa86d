"""Encoders: BERT, RoBERTa, XLM-RoBERTa, ModernBERT and Nomic's BERT, alone or with a classifier's head.

Sources: Devlin et al., BERT, arXiv 1810.04805; Liu et al., RoBERTa, arXiv 1907.11692; Conneau et al., arXiv
1911.02116; Warner et al., ModernBERT, arXiv 2412.13663; Nussbaum et al., Nomic Embed, arXiv 2402.01613; defaults of
absent fields as in transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import EncoderAttention, FeedForward, Layer, ModelSpec, Norm
from penstock.core.pooler import HeadLayer, PoolingSpec
from penstock.core.weight_map import Cut, WeightMap
from penstock.families.fields import Fields
from penstock.families.gpt_like import offset_positions, read_equal_heads
from penstock.families.naming import fused_rows, named
from penstock.families.positions import read_rope, read_ropes
from penstock.families.reading import MAX_SIZE, WHERE, finish, read_activation, read_layer_types, read_sizes
from penstock.formats.files import quoted

_FULL, _SLIDING = "full_attention", "sliding_attention"
_HARMLESS = (
    "is_decoder", "add_cross_attention", "bos_token_id", "eos_token_id", "tie_word_embeddings", "use_cache",
    "attention_probs_dropout_prob", "sbert_ce_default_activation_function", "sentence_transformers", "language",
)  # fmt: skip
_BERT_TOP = {
    "embed": "embeddings.word_embeddings", "positions": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings", "embed_norm": "embeddings.LayerNorm",
}  # fmt: skip
_BERT_LAYER = {
    "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
    "o": "attention.output.dense", "attn_norm": "attention.output.LayerNorm", "up": "intermediate.dense",
    "down": "output.dense", "ffn_norm": "output.LayerNorm",
}  # fmt: skip
_NOMIC_NAMES = {
    "hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner", "max_position_embeddings": "n_positions", "rope_theta": "rotary_emb_base",
    "layer_norm_eps": "layer_norm_epsilon",
}  # fmt: skip
_NOMIC_COMPUTES = {
    "prenorm": False, "activation_function": "swiglu", "qkv_proj_bias": False, "mlp_fc1_bias": False,
    "mlp_fc2_bias": False, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "causal": False,
    "parallel_block": False, "use_rms_norm": False, "rotary_emb_scale_base": None, "rotary_scaling_factor": None,
    "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True,
}  # fmt: skip
"""Of Nomic's published files: what the family computes."""
_NOMIC_ASIDE = (
    "use_flash_attn", "use_xentropy", "fused_bias_fc", "fused_dropout_add_ln", "dense_seq_output",
    "max_trained_positions", "pad_vocab_size_multiple", "last_layer_subset", "reorder_and_upcast_attn",
    "mlp_checkpoint_lvl",
)  # fmt: skip
_UNREAD = r"(.*\.)?position_ids|(.*\.)?token_type_ids|cls\..*|lm_head\..*|decoder\..*|head\..*|(\w+\.)?pooler\..*"
"""Buffers, and what was there for training: heads that guess masked words, and BERT's pooler where nobody reads it."""


class _Encoder:
    """`prefix`: what stands before the names of tensors in files that have a head."""

    name: str
    classifier: str
    prefix: str
    architectures: tuple[str, ...]

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        return re.fullmatch(_UNREAD, name) is not None

    def _named(self, spec: ModelSpec, top: Mapping[str, str], layer: Mapping[str, str], stack: str) -> dict[str, Any]:
        return named(spec, {name: f"{self.prefix}.{at}" for name, at in top.items()}, layer, f"{self.prefix}.{stack}")

    def is_classifier(self, config: Mapping[str, Any]) -> bool:
        return self.classifier in (config.get("architectures") or ())

    def finished(
        self, fields: Fields, sizes: Any, layers: Sequence[Layer], config: Mapping[str, Any],
        hidden: Sequence[HeadLayer], mode: str = "cls", **more: Any,
    ) -> ModelSpec:  # fmt: skip
        """`hidden`: what a classifier has before its last product."""
        pooler = read_labels(config, hidden, mode) if self.is_classifier(config) else PoolingSpec()
        return finish(
            fields, self.name, sizes, layers, harmless=_HARMLESS, pooler=pooler, has_head=False, tie=False, **more
        )


class Bert(_Encoder):
    """The `ModelFamily` of BertModel."""

    name = "bert"
    prefix = "bert"
    classifier = "BertForSequenceClassification"
    architectures: tuple[str, ...] = ("BertModel", "BertForMaskedLM", "BertForSequenceClassification")

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        hidden = HeadLayer(width=int(config.get("hidden_size") or 1), activation="tanh")
        fields = Fields(config, WHERE)
        sizes = read_sizes(fields, default_positions=512)
        offset = self._offset(fields)
        if sizes.max_position <= offset:
            raise ModelError(f"{WHERE}: max_position_embeddings {sizes.max_position} leaves no position behind padding")
        sizes = sizes._replace(max_position=sizes.max_position - offset)
        kind = fields.string("position_embedding_type", default="absolute")
        if kind != "absolute":
            raise UnsupportedError(f"{WHERE} asks for positions of the kind {quoted(kind)}; absolute ones are computed")
        heads = read_equal_heads(fields, sizes.hidden_size)
        norm = Norm(kind="layer", eps=fields.number("layer_norm_eps", default=1e-12))
        layer = Layer(
            mixer=EncoderAttention(num_heads=heads.num_heads, head_dim=heads.head_dim),
            ffn=FeedForward(
                width=fields.integer("intermediate_size", high=MAX_SIZE, default=3072),
                activation=read_activation(fields, default="gelu"), gated=False, bias=True,
            ),
            norm=norm, placement="sum",
        )  # fmt: skip
        return self.finished(
            fields, sizes, [layer] * sizes.num_layers, config, [hidden], positions=True, embed_norm=norm,
            token_types=fields.integer("type_vocab_size", high=64, default=2), final_norm=None,
        )  # fmt: skip

    def _offset(self, fields: Fields) -> int:
        return 0

    def _heads(self) -> tuple[str, str]:
        return f"{self.prefix}.pooler.dense", "classifier"

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        places: dict[str, str | Cut] = self._named(spec, _BERT_TOP, _BERT_LAYER, "encoder.layer")
        for i, name in enumerate(self._heads() if spec.pooler is not None and spec.pooler.labels else ()):
            places |= {f"head.{i}": name + ".weight", f"head.{i}.bias": name + ".bias"}
        return places


class Roberta(Bert):
    """The `ModelFamily` of RobertaModel: positions begin behind the padding id."""

    name = "roberta"
    prefix = "roberta"
    classifier = "RobertaForSequenceClassification"
    architectures = ("RobertaModel", "RobertaForMaskedLM", "RobertaForSequenceClassification")

    def _offset(self, fields: Fields) -> int:
        return fields.integer("pad_token_id", low=0, high=MAX_SIZE, default=1) + 1

    def _heads(self) -> tuple[str, str]:
        return "classifier.dense", "classifier.out_proj"

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        places = dict(super().weight_map(spec))
        # Which id is padding is no part of a spec: of all published files it is 1.
        return places | {"positions": offset_positions(spec, f"{self.prefix}.embeddings.position_embeddings")}


class XlmRoberta(Roberta):
    """The `ModelFamily` of XLMRobertaModel."""

    name = "xlm-roberta"
    classifier = "XLMRobertaForSequenceClassification"
    architectures = ("XLMRobertaModel", "XLMRobertaForMaskedLM", "XLMRobertaForSequenceClassification")


class ModernBert(_Encoder):
    """The `ModelFamily` of ModernBertModel: rotary, norms in front, and most layers see their neighbours only."""

    name = "modernbert"
    prefix = "model"
    classifier = "ModernBertForSequenceClassification"
    architectures: tuple[str, ...] = (
        "ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"
    )  # fmt: skip

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields = Fields(config, WHERE)
        sizes = read_sizes(fields, default_positions=8192)
        heads = read_equal_heads(fields, sizes.hidden_size, rotary=True)
        norm = Norm(
            kind="layer", eps=fields.number("norm_eps", default=1e-5), bias=fields.flag("norm_bias", default=False)
        )
        bias, mlp_bias = fields.flag("attention_bias"), fields.flag("mlp_bias")
        every = fields.integer("global_attn_every_n_layers", high=4096, default=3)
        kinds = read_layer_types(fields, sizes.num_layers, (_FULL, _SLIDING)) or [
            _SLIDING if i % every else _FULL for i in range(sizes.num_layers)
        ]
        thetas = {_FULL: ("global_rope_theta", 160000.0), _SLIDING: ("local_rope_theta", 10000.0)}
        ropes = read_ropes(fields, heads.head_dim, sizes.max_position, thetas)
        reach = fields.integer("local_attention", low=2, high=MAX_SIZE, default=128) // 2
        ffn = FeedForward(
            width=fields.integer("intermediate_size", high=MAX_SIZE, default=1152),
            activation=read_activation(fields, "hidden_activation", "gelu"), bias=mlp_bias,
        )  # fmt: skip
        layers = [
            Layer(
                mixer=EncoderAttention(
                    num_heads=heads.num_heads, head_dim=heads.head_dim, rope=ropes[kind],
                    reach=reach if kind == _SLIDING else None, qkv_bias=bias, o_bias=bias,
                ),
                ffn=ffn, norm=norm, raw_mixer=i == 0,
            )
            for i, kind in enumerate(kinds)
        ]  # fmt: skip
        hidden = HeadLayer(
            width=sizes.hidden_size, bias=fields.flag("classifier_bias"), norm_eps=norm.eps,
            activation=read_activation(fields, "classifier_activation", "gelu"),  # type: ignore[arg-type]
        )  # fmt: skip
        mode = fields.string("classifier_pooling", default="cls")
        if mode not in ("cls", "mean"):
            raise UnsupportedError(f"{WHERE} sets classifier_pooling to {quoted(mode)}; known ones: cls, mean")
        if self.is_classifier(config) and norm.bias:
            raise UnsupportedError(f"{WHERE} sets norm_bias, and a classifier's norm is computed without")
        for name in ("decoder_bias", "deterministic_flash_attn", "sparse_prediction", "sparse_pred_ignore_index",
                     "initializer_cutoff_factor", "mlp_dropout", "classifier_dropout", "repad_logits_with_grad",
                     "reference_compile", "embedding_dropout", "layer_norm_eps"):  # fmt: skip
            fields.raw(name)  # training, or how it is computed elsewhere
        return self.finished(fields, sizes, layers, config, [hidden], mode, embed_norm=norm, final_norm=norm)

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        top = {"embed": "embeddings.tok_embeddings", "embed_norm": "embeddings.norm", "final_norm": "final_norm"}
        layer = {"attn_norm": "attn_norm", "ffn_norm": "mlp_norm", "o": "attn.Wo", "down": "mlp.Wo"}
        places = self._named(spec, top, layer, "layers")
        for i, one in enumerate(spec.layers):
            assert isinstance(one.ffn, FeedForward), "every layer is dense"
            at, width = f"{self.prefix}.layers.{i}", spec.hidden_size
            places |= fused_rows(spec, i, f"{at}.attn.Wqkv", dict.fromkeys(("q", "k", "v"), width), width)
            places |= fused_rows(spec, i, f"{at}.mlp.Wi", dict.fromkeys(("gate", "up"), one.ffn.width), width)
        if spec.pooler is not None and spec.pooler.labels:
            places |= {"head.0": "head.dense.weight", "head.0.norm": "head.norm.weight"}
            places |= {"head.1": "classifier.weight", "head.1.bias": "classifier.bias"}
            if spec.pooler.head[0].bias:
                places["head.0.bias"] = "head.dense.bias"
        return places


class NomicBert(_Encoder):
    """The `ModelFamily` of NomicBertModel: BERT with rotary positions, gates, and no biases of products.

    Published files name their fields after GPT-2's, and their tensors in a way of their own.
    """

    name = "nomic_bert"
    prefix = "nomic_bert"
    classifier = "NomicBertForSequenceClassification"
    architectures: tuple[str, ...] = ("NomicBertModel", "NomicBertForMaskedLM")

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        config = self._renamed(config)
        fields = Fields(config, WHERE)
        sizes = read_sizes(fields, default_positions=2048)
        heads = read_equal_heads(fields, sizes.hidden_size, rotary=True)
        if fields.integer("head_dim", high=MAX_SIZE, default=heads.head_dim) != heads.head_dim:
            raise UnsupportedError(f"{WHERE} gives heads that together are not as wide as the hidden state")
        norm = Norm(kind="layer", eps=fields.number("layer_norm_eps", default=1e-12))
        layer = Layer(
            mixer=EncoderAttention(
                num_heads=heads.num_heads, head_dim=heads.head_dim, qkv_bias=False, o_bias=False,
                rope=read_rope(fields, heads.head_dim, sizes.max_position, theta=1000.0),
            ),
            ffn=FeedForward(
                width=fields.integer("intermediate_size", high=MAX_SIZE, default=3072),
                activation=read_activation(fields),
            ),
            norm=norm, placement="sum",
        )  # fmt: skip
        return self.finished(
            fields, sizes, [layer] * sizes.num_layers, config, [], embed_norm=norm, final_norm=None,
            token_types=fields.integer("type_vocab_size", high=64, default=2),
        )  # fmt: skip

    def _renamed(self, config: Mapping[str, Any]) -> dict[str, Any]:
        out = dict(config)
        if "n_embd" not in out:
            return out
        for name, wanted in _NOMIC_COMPUTES.items():
            given = out.pop(name, wanted)
            if given != wanted:
                raise UnsupportedError(f"{WHERE} sets {name} to {quoted(given, 60)}; this family computes {wanted}")
        for name in _NOMIC_ASIDE:
            out.pop(name, None)
        return out | {name: out.pop(old) for name, old in _NOMIC_NAMES.items() if old in out}

    def told(self, config: Mapping[str, Any], tensors: Any) -> Mapping[str, Any]:
        return config

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        top = {k: v for k, v in _BERT_TOP.items() if k != "positions"}
        layer = {
            "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
            "attn_norm": "post_attention_layernorm", "ffn_norm": "post_mlp_layernorm", "gate": "mlp.gate_proj",
            "up": "mlp.up_proj", "down": "mlp.down_proj",
        }  # fmt: skip
        return self._named(spec, top, layer, "layers")

    def layout(self, spec: ModelSpec, tensors: Any) -> WeightMap:
        """`weight_map`, by the names that the file has."""
        if not any(name.endswith("emb_ln.weight") for name in tensors):
            return self.weight_map(spec)
        top = {k: v for k, v in _BERT_TOP.items() if k != "positions"} | {"embed_norm": "emb_ln"}
        layer = {
            "o": "attn.out_proj", "attn_norm": "norm1", "ffn_norm": "norm2", "up": "mlp.fc11", "gate": "mlp.fc12",
            "down": "mlp.fc2",
        }  # fmt: skip
        places = self._named(spec, top, layer, "encoder.layers")
        for i in range(len(spec.layers)):
            rows = dict.fromkeys(("q", "k", "v"), spec.hidden_size)
            places |= fused_rows(spec, i, f"{self.prefix}.encoder.layers.{i}.attn.Wqkv", rows, spec.hidden_size)
        return places


def read_labels(config: Mapping[str, Any], hidden: Sequence[HeadLayer], mode: str) -> PoolingSpec:
    """A classifier's head: its labels, and how their numbers become scores.

    Raises: ModelError for labels that are not numbered from 0 on, UnsupportedError for a kind of scores.
    """
    named = config.get("id2label")
    if named is None:
        count = config.get("num_labels", 2)
        named = {str(i): f"LABEL_{i}" for i in range(count if isinstance(count, int) and 0 < count <= 4096 else 2)}
    if not isinstance(named, dict) or not named or len(named) > 1 << 16:
        raise ModelError(f"{WHERE}: id2label must name the labels by their numbers")
    by_id = {str(key): str(value) for key, value in named.items()}
    if set(by_id) != {str(i) for i in range(len(by_id))}:
        raise ModelError(f"{WHERE}: id2label must name the labels 0 to {len(by_id) - 1}")
    labels = tuple(by_id[str(i)] for i in range(len(by_id)))
    kinds = {"regression": "none", "single_label_classification": "softmax", "multi_label_classification": "sigmoid"}
    problem = config.get("problem_type")
    if problem is not None and problem not in kinds:
        raise UnsupportedError(f"{WHERE} sets problem_type to {quoted(problem, 60)}; known ones: {', '.join(kinds)}")
    scores = kinds[problem] if problem is not None else "sigmoid" if len(labels) == 1 else "softmax"
    nested = config.get("sentence_transformers")
    told = config.get("sbert_ce_default_activation_function") or (
        nested.get("activation_fn") if isinstance(nested, dict) else None
    )
    if told is not None:
        acts = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
        last = str(told).rsplit(".", 1)[-1]
        if last not in acts:
            raise UnsupportedError(f"{WHERE} asks for scores by {quoted(told, 60)}; known ones: {', '.join(acts)}")
        scores = acts[last]
    head = (*hidden, HeadLayer(width=len(labels)))
    return PoolingSpec(mode=mode, head=head, normalize=False, labels=labels, scores=scores)  # type: ignore[arg-type]
