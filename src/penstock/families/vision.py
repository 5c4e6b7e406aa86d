"""The text part of checkpoints that also see: Qwen-VL, Llama 4, Gemma 3, Mistral Small 3, Kimi K2.5, LLaVA.

Their config.json has the decoder's own in `text_config`, and its tensors a name of their own in front. What makes
vectors of images is left out, and images are refused. Layouts and defaults as in transformers' classes of the same
names, and in the files that were published.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, NamedTuple

import msgspec

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import ModelSpec
from penstock.core.protocols import ModelFamily
from penstock.core.weight_map import WeightMap
from penstock.families.deepseek import DeepseekV3
from penstock.families.fields import Fields
from penstock.families.gemma import Gemma3
from penstock.families.gemma3n import Gemma3n
from penstock.families.gemma4 import Gemma4
from penstock.families.llama import Llama
from penstock.families.llama4 import Llama4
from penstock.families.minimax_m3 import MiniMaxM3
from penstock.families.mistral import Ministral3, Mistral
from penstock.families.mtp import MtpNames
from penstock.families.positions import one_axis
from penstock.families.qwen import Qwen2, Qwen3
from penstock.families.qwen_moe import Qwen3VLMoeText
from penstock.families.qwen_next import Qwen35, Qwen35Moe
from penstock.families.reading import HARMLESS, WHERE
from penstock.formats.files import quoted

_TIED = "tie_word_embeddings"
_SHARED = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id")
"""Fields that may stand outside `text_config` and are about the text."""
# Where images go among the tokens, how many tokens one has, and how its vectors come to the decoder's width.
_OUTSIDE = frozenset({
    "text_config", "vision_config", _TIED, *_SHARED, "ignore_index", "vision_feature_layer",
    "vision_feature_select_strategy", "multimodal_projector_bias", "projector_hidden_act", "projector_hidden_size",
    "projector_ln_eps", "projection_hidden_size", "projection_layer_norm_eps", "spatial_merge_size",
    "image_seq_length", "mm_tokens_per_image", "merged_hidden_size", "video_token_index",
    "image_token_id", "video_token_id", "vision_token_id",
    "vision_start_token_id", "vision_end_token_id", "image_token_index", "boi_token_index", "eoi_token_index",
    "audio_config", "audio_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index", "boi_token_id", "eoi_token_id",
    "vision_soft_tokens_per_image", "media_placeholder_token_id", "use_unified_vision_chunk", "video_placeholder",
    "audio_soft_tokens_per_image",
})  # fmt: skip
_SEEING = re.compile(
    r"(model\.)?(visual|vision_tower|vision_model|multi_modal_projector|mm_projector|patch_merge_mlp|embed_vision|"
    r"audio_tower|embed_audio)\..*"
)
"""Names of tensors that see, or lead from there to the decoder."""
_ROPES = ("rope_scaling", "rope_parameters")


class TextPlace(NamedTuple):
    """What stands before the names of the decoder's modules, and of the output matrix."""

    decoder: str
    head: str = "lm_head"


LAYOUTS = (
    TextPlace("model.language_model."),
    TextPlace("language_model.model.", "language_model.lm_head"),
    TextPlace("model."),
)


class TextPart:
    """What text parts share: a `ModelFamily` and a `SeveralParts`.

    Attributes:
        texts: `model_type` of `text_config` and the family of such a text; without one, the first. All of them have
            one set of names.
        published: where the published files have the text.
        tied: whether the output matrix is the embedding where nothing says so.
        defaults: fields of `text_config` that files leave out.
    """

    name: ClassVar[str]
    architectures: ClassVar[tuple[str, ...]]
    texts: ClassVar[tuple[tuple[str, type[Any]], ...]]
    published: ClassVar[TextPlace] = LAYOUTS[0]
    tied: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, Any]] = {}

    @property
    def mtp(self) -> MtpNames | None:
        """Heads that ship with the text: see `families.mtp`."""
        return getattr(self._family(None), "mtp", None)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        text = self._text(config)
        family = self._family(text.get("model_type"))
        usual = dict(self.defaults)
        if any(isinstance(rope := text.get(key), Mapping) and "rope_theta" in rope for key in _ROPES):
            usual.pop("rope_theta", None)
        if text.get("num_local_experts") is not None:
            usual.pop("num_experts", None)
        return msgspec.structs.replace(family.spec({**usual, **text}), family=self.name)

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        return self._named(spec, self.published)

    def layout(self, spec: ModelSpec, tensors: Collection[str]) -> WeightMap:
        """See `SeveralParts.layout`."""
        return self._named(spec, _layout(tensors) or self.published)

    def told(self, config: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
        """See `SeveralParts.told`: versions of transformers differ in what an absent `tie_word_embeddings` means, and
        in which of two counts, so the file says it: it has an output matrix or not."""
        found, said = _layout(tensors), _said(config)
        if found is None or (said[0] is not None and said[1] in (None, said[0])):
            return config
        out = {**config, _TIED: not any(name.startswith(found.head + ".") for name in tensors)}
        inner = out.get("text_config")
        return {**out, "text_config": {**inner, _TIED: None}} if isinstance(inner, Mapping) else out

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        if _SEEING.fullmatch(name):
            return True
        for decoder, head in LAYOUTS:
            for begins, plain in ((decoder, "model."), (head + ".", "lm_head.")):
                if name.startswith(begins) and self._family(None).ignores(plain + name.removeprefix(begins), spec):
                    return True
        return self._family(None).ignores(name, spec)

    def _named(self, spec: ModelSpec, layout: TextPlace) -> WeightMap:
        def moved(name: str) -> str:
            inner = name.removeprefix("model.")
            return layout.decoder + inner if inner != name else layout.head + name.removeprefix("lm_head")

        return {
            logical: moved(place) if isinstance(place, str) else msgspec.structs.replace(place, name=moved(place.name))
            for logical, place in self._family(None).weight_map(spec).items()
        }

    def _family(self, model_type: object) -> ModelFamily:
        known = dict(self.texts)
        if model_type is None:
            model_type = self.texts[0][0]
        if not isinstance(model_type, str) or model_type not in known:
            raise UnsupportedError(
                f"{WHERE} has a text_config of the model_type {quoted(model_type, 60)}; this family has "
                f"{', '.join(known)}"
            )
        family: ModelFamily = known[model_type]()
        return family

    def _text(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config.json that the decoder alone would have. Old ones have all fields side by side."""
        inner = config.get("text_config")
        if inner is None:
            text = {key: value for key, value in config.items() if key not in _OUTSIDE or key in _SHARED}
            text.pop("model_type", None)
        elif isinstance(inner, Mapping):
            Fields(config, WHERE).refuse_unread(HARMLESS | _OUTSIDE)
            text = dict(inner)
            given = {key: config[key] for key in _SHARED if config.get(key) is not None}
            if text.get("dtype") or text.get("torch_dtype"):
                given = {key: value for key, value in given.items() if "dtype" not in key}
            text = {**given, **{key: value for key, value in text.items() if value is not None or key not in given}}
        else:
            raise ModelError(f"{WHERE} gives text_config as {quoted(inner, 60)}; it must be an object")
        given_ties = [value for value in _said(config) if value is not None]
        text[_TIED] = next((value for value in given_ties if value is not True), True) if given_ties else self.tied
        return one_axis(text)


def _said(config: Mapping[str, Any]) -> list[Any]:
    """`tie_word_embeddings`, outside and inside of `text_config`."""
    inner = config.get("text_config")
    return [config.get(_TIED), inner.get(_TIED) if isinstance(inner, Mapping) else None]


def _layout(tensors: Collection[str]) -> TextPlace | None:
    """Where these tensors have the text."""
    return next((found for found in LAYOUTS if found.decoder + "embed_tokens.weight" in tensors), None)


_QWEN2: dict[str, Any] = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_window_layers": 80}
_QWEN3: dict[str, Any] = {"max_position_embeddings": 128000, "rope_theta": 500000.0}
_QWEN3_MOE: dict[str, Any] = _QWEN3 | {
    "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
}  # fmt: skip
_LLAMA4: dict[str, Any] = {"vocab_size": 202048}
_GEMMA3: dict[str, Any] = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8,
}  # fmt: skip

_GEMMA3N: dict[str, Any] = {
    "vocab_size": 262400, "hidden_size": 2048, "num_hidden_layers": 35,
}  # fmt: skip


class Qwen2VL(TextPart):
    """The `ModelFamily` of Qwen2VLForConditionalGeneration."""

    name = "qwen2_vl"
    architectures = ("Qwen2VLForConditionalGeneration",)
    texts = (("qwen2_vl_text", Qwen2),)
    published = LAYOUTS[2]
    defaults = _QWEN2


class Qwen25VL(TextPart):
    """The `ModelFamily` of Qwen2_5_VLForConditionalGeneration."""

    name = "qwen2_5_vl"
    architectures = ("Qwen2_5_VLForConditionalGeneration",)
    texts = (("qwen2_5_vl_text", Qwen2),)
    published = LAYOUTS[2]
    defaults = _QWEN2


class Qwen3VL(TextPart):
    """The `ModelFamily` of Qwen3VLForConditionalGeneration."""

    name = "qwen3_vl"
    architectures = ("Qwen3VLForConditionalGeneration",)
    texts = (("qwen3_vl_text", Qwen3),)
    defaults = _QWEN3


class Qwen3VLMoe(TextPart):
    """The `ModelFamily` of Qwen3VLMoeForConditionalGeneration."""

    name = "qwen3_vl_moe"
    architectures = ("Qwen3VLMoeForConditionalGeneration",)
    texts = (("qwen3_vl_moe_text", Qwen3VLMoeText),)
    defaults = _QWEN3_MOE


class Qwen35Seeing(TextPart):
    """The `ModelFamily` of Qwen3_5ForConditionalGeneration."""

    name = "qwen3_5"
    architectures = ("Qwen3_5ForConditionalGeneration",)
    texts = (("qwen3_5_text", Qwen35),)


class Qwen35MoeSeeing(TextPart):
    """The `ModelFamily` of Qwen3_5MoeForConditionalGeneration: Qwen3.5 and 3.6."""

    name = "qwen3_5_moe"
    architectures = ("Qwen3_5MoeForConditionalGeneration",)
    texts = (("qwen3_5_moe_text", Qwen35Moe),)


class Llama4Seeing(TextPart):
    """The `ModelFamily` of Llama4ForConditionalGeneration: Scout and Maverick."""

    name = "llama4"
    architectures = ("Llama4ForConditionalGeneration",)
    texts = (("llama4_text", Llama4),)
    published = LAYOUTS[1]
    defaults = _LLAMA4


class Gemma3Seeing(TextPart):
    """The `ModelFamily` of Gemma3ForConditionalGeneration, whose published files leave out what is as usual."""

    name = "gemma3"
    architectures = ("Gemma3ForConditionalGeneration",)
    texts = (("gemma3_text", Gemma3),)
    published = LAYOUTS[1]
    tied = True
    defaults = _GEMMA3


class Gemma3nSeeing(TextPart):
    """The `ModelFamily` of Gemma3nForConditionalGeneration, which hears, too."""

    name = "gemma3n"
    architectures = ("Gemma3nForConditionalGeneration",)
    texts = (("gemma3n_text", Gemma3n),)
    tied = True
    defaults = _GEMMA3N


class Gemma4Seeing(TextPart):
    """The `ModelFamily` of Gemma4ForConditionalGeneration, which may hear, too."""

    name = "gemma4"
    architectures = ("Gemma4ForConditionalGeneration",)
    texts = (("gemma4_text", Gemma4),)
    tied = True


class Mistral3(TextPart):
    """The `ModelFamily` of Mistral3ForConditionalGeneration: Mistral Small 3.1 and later, Ministral 3."""

    name = "mistral3"
    architectures = ("Mistral3ForConditionalGeneration",)
    texts = (
        ("mistral", Mistral),
        ("ministral3", Ministral3),
    )
    published = LAYOUTS[1]


class KimiK25(TextPart):
    """The `ModelFamily` of KimiK25ForConditionalGeneration: Kimi K2.5 and K2.6."""

    name = "kimi_k25"
    architectures = ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration")
    texts = (
        ("deepseek_v3", DeepseekV3),
        ("kimi_k2", DeepseekV3),
    )
    published = LAYOUTS[1]


class MiniMaxM3Seeing(TextPart):
    """The `ModelFamily` of MiniMaxM3SparseForConditionalGeneration."""

    name = "minimax_m3_vl"
    architectures = ("MiniMaxM3SparseForConditionalGeneration",)
    texts = (("minimax_m3_vl_text", MiniMaxM3), ("minimax_m3", MiniMaxM3))
    published = LAYOUTS[1]


class Llava(TextPart):
    """The `ModelFamily` of LlavaForConditionalGeneration: LLaVA 1.5, Pixtral."""

    name = "llava"
    architectures = ("LlavaForConditionalGeneration",)
    texts = (
        ("llama", Llama),
        ("mistral", Mistral),
        ("qwen2", Qwen2),
    )
    published = LAYOUTS[1]
