"""Which model families there are, and the one way in: `open_model`."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from penstock.base.errors import ModelError, UnsupportedError
from penstock.base.registry import Registry
from penstock.core.events import Decision
from penstock.core.matrix_format import MatrixFormat
from penstock.core.model_spec import ModelSpec
from penstock.core.protocols import ModelFamily
from penstock.families.checkpoint import Checkpoint, check_count
from penstock.families.folder import open_folder, pickle_refusal, read_quantization
from penstock.families.missing import missing_part
from penstock.families.mtp import count_mtp, mtp_heads
from penstock.families.quantization.gather import expected_codes
from penstock.formats.files import quoted, unreadable
from penstock.formats.json_file import read_json_object

FAMILIES: Registry[Callable[[], ModelFamily], None] = Registry("model family")
"""`model_type` of config.json -> ModelFamily."""
ARCHITECTURES: dict[str, str] = {}
"""Entry of `architectures` in config.json -> name in FAMILIES."""
ALIASES = {
    "kimi_k2": "deepseek_v3", "deepseek_ref": "deepseek_v4", "deci": "nemotron-nas", "iquestcoder": "llama",
}  # fmt: skip
"""Other values of `model_type` that say the same as a name in FAMILIES."""
_SAME_NAME = {("RwkvForCausalLM", "rwkv5"): "rwkv5"}
"""Architecture and `model_type` -> name in FAMILIES, of those whose architecture goes by an older one's name."""


def _register(name: str, target: str, *architectures: str) -> None:
    FAMILIES.add(name, target)
    ARCHITECTURES.update(dict.fromkeys(architectures, name))


_register("llama", "penstock.families.llama:Llama", "LlamaForCausalLM", "IQuestCoderForCausalLM")
_register("nemotron-nas", "penstock.families.deci:Deci", "DeciLMForCausalLM")
_register("deepseek_v2", "penstock.families.deepseek:DeepseekV2", "DeepseekV2ForCausalLM")
_register("deepseek_v3", "penstock.families.deepseek:DeepseekV3", "DeepseekV3ForCausalLM")
_register("deepseek_v32", "penstock.families.indexed:DeepseekV32", "DeepseekV32ForCausalLM")
_register("deepseek_v4", "penstock.families.deepseek_v4:DeepseekV4", "DeepseekV4ForCausalLM")
_register("glm_moe_dsa", "penstock.families.indexed:GlmMoeDsa", "GlmMoeDsaForCausalLM")
_register("glm4_moe", "penstock.families.qwen_moe:Glm4Moe", "Glm4MoeForCausalLM")
_register("gpt_oss", "penstock.families.gpt_oss:GptOss", "GptOssForCausalLM")
_register("kimi_linear", "penstock.families.kimi_linear:KimiLinear", "KimiLinearForCausalLM")
_register("llama4_text", "penstock.families.llama4:Llama4", "Llama4ForCausalLM")
_register("minimax", "penstock.families.minimax:MiniMax", "MiniMaxForCausalLM", "MiniMaxText01ForCausalLM",
          "MiniMaxM1ForCausalLM")  # fmt: skip
_register("minimax_m2", "penstock.families.mixtral:MiniMaxM2", "MiniMaxM2ForCausalLM")
_register("minimax_m3", "penstock.families.minimax_m3:MiniMaxM3", "MiniMaxM3ForCausalLM", "MiniMaxM3VLForCausalLM")
_register("mixtral", "penstock.families.mixtral:Mixtral", "MixtralForCausalLM")
_register("olmoe", "penstock.families.qwen_moe:Olmoe", "OlmoeForCausalLM")
_register("qwen2_moe", "penstock.families.qwen_moe:Qwen2Moe", "Qwen2MoeForCausalLM")
_register("qwen3_moe", "penstock.families.qwen_moe:Qwen3Moe", "Qwen3MoeForCausalLM")
_register("apertus", "penstock.families.apertus:Apertus", "ApertusForCausalLM")
_register("arcee", "penstock.families.arcee:Arcee", "ArceeForCausalLM")
_register("bitnet", "penstock.families.bitnet:BitNet", "BitNetForCausalLM")
_register("cohere", "penstock.families.cohere:Cohere", "CohereForCausalLM")
_register("cohere2", "penstock.families.cohere:Cohere2", "Cohere2ForCausalLM")
_register("ernie4_5", "penstock.families.ernie:Ernie45", "Ernie4_5ForCausalLM")
_register("exaone", "penstock.families.exaone:Exaone", "ExaoneForCausalLM")
_register("exaone4", "penstock.families.exaone:Exaone4", "Exaone4ForCausalLM")
_register("gemma", "penstock.families.gemma:Gemma", "GemmaForCausalLM")
_register("gemma2", "penstock.families.gemma:Gemma2", "Gemma2ForCausalLM")
_register("gemma3_text", "penstock.families.gemma:Gemma3", "Gemma3ForCausalLM")
_register("gemma3n_text", "penstock.families.gemma3n:Gemma3n", "Gemma3nForCausalLM")
_register("gemma4_text", "penstock.families.gemma4:Gemma4", "Gemma4ForCausalLM")
_register("glm", "penstock.families.glm:Glm", "GlmForCausalLM")
_register("glm4", "penstock.families.glm:Glm4", "Glm4ForCausalLM")
_register("granite", "penstock.families.granite:Granite", "GraniteForCausalLM")
_register("helium", "penstock.families.helium:Helium", "HeliumForCausalLM")
_register("hunyuan_v1_dense", "penstock.families.hunyuan:HunYuanDense", "HunYuanDenseV1ForCausalLM")
_register("hyperclovax", "penstock.families.granite:HyperClovaX", "HyperCLOVAXForCausalLM")
_register("internlm2", "penstock.families.internlm:InternLM2", "InternLM2ForCausalLM")
_register("internlm3", "penstock.families.internlm:InternLM3", "InternLM3ForCausalLM")
_register("mimo", "penstock.families.qwen:MiMo", "MiMoForCausalLM")
_register("mimo_v2_flash", "penstock.families.mimo:MiMoV2Flash", "MiMoV2FlashForCausalLM")
_register("minicpm", "penstock.families.minicpm:MiniCPM", "MiniCPMForCausalLM")
_register("ministral", "penstock.families.mistral:Ministral", "MinistralForCausalLM")
_register("ministral3", "penstock.families.mistral:Ministral3", "Ministral3ForCausalLM")
_register("mistral", "penstock.families.mistral:Mistral", "MistralForCausalLM")
_register("nanochat", "penstock.families.nanochat:NanoChat", "NanoChatForCausalLM")
_register("nemotron", "penstock.families.nemotron:Nemotron", "NemotronForCausalLM")
_register("olmo2", "penstock.families.olmo2:Olmo2", "Olmo2ForCausalLM")
_register("olmo3", "penstock.families.olmo2:Olmo3", "Olmo3ForCausalLM")
_register("phimoe", "penstock.families.phimoe:PhiMoe", "PhiMoEForCausalLM", "PhimoeForCausalLM")
_register("phi3", "penstock.families.phi3:Phi3", "Phi3ForCausalLM")
_register("qwen2", "penstock.families.qwen:Qwen2", "Qwen2ForCausalLM")
_register("qwen3", "penstock.families.qwen:Qwen3", "Qwen3ForCausalLM")
_register("qwen3_5_moe_text", "penstock.families.qwen_next:Qwen35Moe", "Qwen3_5MoeForCausalLM")
_register("qwen3_5_text", "penstock.families.qwen_next:Qwen35", "Qwen3_5ForCausalLM")
_register("qwen3_next", "penstock.families.qwen_next:Qwen3Next", "Qwen3NextForCausalLM")
_register("seed_oss", "penstock.families.seed_oss:SeedOss", "SeedOssForCausalLM")
_register("smollm3", "penstock.families.smollm3:SmolLM3", "SmolLM3ForCausalLM")
_register("afmoe", "penstock.families.afmoe:Afmoe", "AfmoeForCausalLM")
_register("cohere2_moe", "penstock.families.cohere:Cohere2Moe", "Cohere2MoeForCausalLM")
_register("dots1", "penstock.families.dots1:Dots1", "Dots1ForCausalLM")
_register("ernie4_5_moe", "penstock.families.ernie:Ernie45Moe", "Ernie4_5_MoeForCausalLM")
_register("exaone_moe", "penstock.families.exaone:ExaoneMoe", "ExaoneMoeForCausalLM")
_register("flex_olmo", "penstock.families.olmo2:FlexOlmo", "FlexOlmoForCausalLM")
_register("glm4_moe_lite", "penstock.families.deepseek:Glm4MoeLite", "Glm4MoeLiteForCausalLM")
_register("granitemoe", "penstock.families.granite_moe:GraniteMoe", "GraniteMoeForCausalLM")
_register("granitemoeshared", "penstock.families.granite_moe:GraniteMoeShared", "GraniteMoeSharedForCausalLM")
_register("hunyuan_v1_moe", "penstock.families.hunyuan:HunYuanMoe", "HunYuanMoEV1ForCausalLM")
_register("bamba", "penstock.families.granite_hybrid:Bamba", "BambaForCausalLM")
_register("falcon_h1", "penstock.families.falcon_h1:FalconH1", "FalconH1ForCausalLM")
_register("falcon_mamba", "penstock.families.jamba:FalconMamba", "FalconMambaForCausalLM")
_register("granitemoehybrid", "penstock.families.granite_hybrid:GraniteHybrid", "GraniteMoeHybridForCausalLM")
_register("jamba", "penstock.families.jamba:Jamba", "JambaForCausalLM")
_register("lfm2", "penstock.families.lfm2:Lfm2", "Lfm2ForCausalLM")
_register("lfm2_moe", "penstock.families.lfm2:Lfm2Moe", "Lfm2MoeForCausalLM")
_register("mamba", "penstock.families.mamba:MambaFamily", "MambaForCausalLM")
_register("mamba2", "penstock.families.mamba2:Mamba2Family", "Mamba2ForCausalLM")
_register("nemotron_h", "penstock.families.nemotron_h:NemotronH", "NemotronHForCausalLM")
_register("olmo_hybrid", "penstock.families.olmo_hybrid:OlmoHybrid", "OlmoHybridForCausalLM")
_register("recurrent_gemma", "penstock.families.recurrent_gemma:RecurrentGemma", "RecurrentGemmaForCausalLM")
_register("retnet", "penstock.families.retnet:RetNet", "RetNetForCausalLM")
_register("xlstm", "penstock.families.xlstm:XLstm", "xLSTMForCausalLM")
_register("zamba2", "penstock.families.zamba2:Zamba2", "Zamba2ForCausalLM")
_register("rwkv", "penstock.families.rwkv:RwkvFamily", "RwkvForCausalLM")
_register("rwkv5", "penstock.families.rwkv5:Rwkv5Family", "Rwkv5ForCausalLM")
_register("rwkv6", "penstock.families.rwkv5:Rwkv6Family", "Rwkv6ForCausalLM")
_register("rwkv6qwen2", "penstock.families.qrwkv:Rwkv6Qwen2", "RWKV6Qwen2ForCausalLM")
_register("arwkv7", "penstock.families.qrwkv:Arwkv7", "RwkvHybridForCausalLM")
_register("rwkv7", "penstock.families.rwkv7:Rwkv7Family", "RWKV7ForCausalLM")
_register("biogpt", "penstock.families.opt:BioGpt", "BioGptForCausalLM")
_register("bloom", "penstock.families.bloom:Bloom", "BloomForCausalLM")
_register("codegen", "penstock.families.gptj:CodeGen", "CodeGenForCausalLM")
_register("falcon", "penstock.families.falcon:Falcon", "FalconForCausalLM")
_register("gpt2", "penstock.families.gpt2:Gpt2", "GPT2LMHeadModel")
_register("gpt_bigcode", "penstock.families.gpt_bigcode:GptBigCode", "GPTBigCodeForCausalLM")
_register("gpt_neo", "penstock.families.gpt_neo:GptNeo", "GPTNeoForCausalLM")
_register("gpt_neox", "penstock.families.gpt_neox:GptNeoX", "GPTNeoXForCausalLM")
_register("gptj", "penstock.families.gptj:GptJ", "GPTJForCausalLM")
_register("mpt", "penstock.families.mpt:Mpt", "MptForCausalLM", "MPTForCausalLM")
_register("openai-gpt", "penstock.families.gpt2:OpenAiGpt", "OpenAIGPTLMHeadModel")
_register("opt", "penstock.families.opt:Opt", "OPTForCausalLM")
_register("persimmon", "penstock.families.persimmon:Persimmon", "PersimmonForCausalLM")
_register("phi", "penstock.families.phi:Phi", "PhiForCausalLM")
_register("step3p7", "penstock.families.step:Step37", "Step3p7FlashForCausalLM", "Step3p7ForConditionalGeneration")
_register("stablelm", "penstock.families.stablelm:StableLm", "StableLmForCausalLM")
_register("starcoder2", "penstock.families.starcoder2:Starcoder2", "Starcoder2ForCausalLM")
_register("bailing_moe", "penstock.families.bailing:BailingMoe", "BailingMoeForCausalLM")
_register("bailing_moe_v2", "penstock.families.bailing:BailingMoeV2", "BailingMoeV2ForCausalLM")
_register("bailing_hybrid", "penstock.families.ling:BailingHybrid", "BailingHybridForCausalLM")
_register("laguna", "penstock.families.laguna:Laguna", "LagunaForCausalLM")
_register("solar_open", "penstock.families.solar:SolarOpen", "SolarOpenForCausalLM")
_register("flint", "penstock.families.flint:Flint", "FlintForCausalLM")
_register("mellum", "penstock.families.mellum:Mellum", "MellumForCausalLM")
_register("granite_swa", "penstock.families.granite_swa:GraniteSwa", "GraniteSWAForCausalLM")
_register("granitemoe_swa", "penstock.families.granite_swa:GraniteMoeSwa", "GraniteMoeSWAForCausalLM")
_register("cwm", "penstock.families.cwm:Cwm", "CwmForCausalLM")
_register("jais2", "penstock.families.jais:Jais2", "Jais2ForCausalLM")
_register("olmo", "penstock.families.olmo:Olmo", "OlmoForCausalLM")
_register("dbrx", "penstock.families.dbrx:Dbrx", "DbrxForCausalLM")
_register("mistral4", "penstock.families.mistral4:Mistral4", "Mistral4ForCausalLM")
_register("youtu", "penstock.families.youtu:Youtu", "YoutuForCausalLM")
_register("axk1", "penstock.families.axk1:AxK1", "AXK1ForCausalLM")
_register("doge", "penstock.families.doge:Doge", "DogeForCausalLM")
_register("hy_v3", "penstock.families.hunyuan:Hy3", "HYV3ForCausalLM")
_register("minicpm3", "penstock.families.minicpm:MiniCPM3", "MiniCPM3ForCausalLM")
_register("vaultgemma", "penstock.families.gemma:VaultGemma", "VaultGemmaForCausalLM")
_register("lfm3", "penstock.families.lfm2:Lfm3", "Lfm3ForCausalLM")
_register("gpt_neox_japanese", "penstock.families.gpt_neox:GptNeoXJapanese", "GPTNeoXJapaneseForCausalLM")
_register("bert", "penstock.families.encoders:Bert", "BertModel", "BertForMaskedLM", "BertForSequenceClassification")
_register("roberta", "penstock.families.encoders:Roberta", "RobertaModel", "RobertaForMaskedLM",
          "RobertaForSequenceClassification")  # fmt: skip
_register("xlm-roberta", "penstock.families.encoders:XlmRoberta", "XLMRobertaModel", "XLMRobertaForMaskedLM",
          "XLMRobertaForSequenceClassification")  # fmt: skip
_register("modernbert", "penstock.families.encoders:ModernBert", "ModernBertModel", "ModernBertForMaskedLM",
          "ModernBertForSequenceClassification")  # fmt: skip
_register("nomic_bert", "penstock.families.encoders:NomicBert", "NomicBertModel", "NomicBertForMaskedLM")
_register("chatglm", "penstock.families.chatglm:ChatGlm", "ChatGLMModel", "ChatGLMForConditionalGeneration")


_TEXT_PARTS = {"step3p7"}


def _register_text_part(name: str, target: str, *architectures: str) -> None:
    """A family that runs the decoder of a checkpoint that also has a vision tower."""
    _register(name, f"penstock.families.vision:{target}", *architectures)
    _TEXT_PARTS.add(name)


_register_text_part("gemma3", "Gemma3Seeing", "Gemma3ForConditionalGeneration")
_register_text_part("gemma3n", "Gemma3nSeeing", "Gemma3nForConditionalGeneration")
_register_text_part("gemma4", "Gemma4Seeing", "Gemma4ForConditionalGeneration")
_register_text_part("kimi_k25", "KimiK25", "KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration")
_register_text_part("llama4", "Llama4Seeing", "Llama4ForConditionalGeneration")
_register_text_part("llava", "Llava", "LlavaForConditionalGeneration")
_register_text_part("minimax_m3_vl", "MiniMaxM3Seeing", "MiniMaxM3SparseForConditionalGeneration")
_register_text_part("mistral3", "Mistral3", "Mistral3ForConditionalGeneration")
_register_text_part("qwen2_5_vl", "Qwen25VL", "Qwen2_5_VLForConditionalGeneration")
_register_text_part("qwen2_vl", "Qwen2VL", "Qwen2VLForConditionalGeneration")
_register_text_part("qwen3_5", "Qwen35Seeing", "Qwen3_5ForConditionalGeneration")
_register_text_part("qwen3_5_moe", "Qwen35MoeSeeing", "Qwen3_5MoeForConditionalGeneration")
_register_text_part("qwen3_vl", "Qwen3VL", "Qwen3VLForConditionalGeneration")
_register_text_part("qwen3_vl_moe", "Qwen3VLMoe", "Qwen3VLMoeForConditionalGeneration")


def unread_decision(spec: ModelSpec) -> tuple[Decision, ...]:
    """For `--explain`: what the model's checkpoint has that is not run; nothing if all is."""
    if spec.family not in _TEXT_PARTS:
        return ()
    why = (
        f"a {spec.family} checkpoint has a vision tower, which is left out: its text part runs, and requests with "
        "images are refused"
    )
    return (Decision("images", "not read", why),)


def open_model(path: str | os.PathLike[str]) -> Checkpoint:
    """A Hugging Face folder; a GGUF file (any part of a split one) or a folder with one; a .bin file of llama2.c,
    rwkv.cpp or the ternary format, or a folder with one. Reads headers, no weights.

    Raises ModelError (UnsupportedError if Penstock lacks something): one line that says what is wrong and where.
    """
    given = os.fspath(path)
    if not given:
        raise ModelError("no model was named; give the path of a folder")
    model = Path(given)
    if not os.path.exists(given):
        raise ModelError(f"there is no model at {quoted(given)}")
    if not model.is_dir():
        return _open_file(model)
    names = _listing(model)
    gguf = any(name.endswith(".gguf") for name in names)
    # Folders of GGUF files often carry the config.json of the model that they were made from.
    if "config.json" in names and not (gguf and not any(name.endswith(".safetensors") for name in names)):
        config = read_json_object(model / "config.json")
        return open_folder(model, names, config, find_family(config))
    if gguf:
        from penstock.families.gguf.files import open_gguf_folder  # forty modules that other formats have no use of

        return open_gguf_folder(model, names, find_family)
    if any(name.startswith("pytorch_model") for name in names):
        refusal = pickle_refusal(model, names)
        if refusal is not None:
            raise refusal
    marked = [(name, opens) for name in names if name.endswith(".bin") and (opens := _by_magic(model / name))]
    if len(marked) > 1:
        listed = ", ".join(quoted(name) for name, _ in marked[:8])
        raise ModelError(f"{quoted(model)} holds several models, {listed}: name the file to be read")
    if marked:
        name, opens = marked[0]
        return opens(model / name, names)
    from penstock.families.llama2c import open_llama2c_folder

    return open_llama2c_folder(model, names)


class Described(NamedTuple):
    """What a model computes, its matrices that are stored as codes, by logical name, how it wants to be sampled, and
    its heads for multi-token prediction, if it has any."""

    spec: ModelSpec
    stored: Mapping[str, MatrixFormat]
    generation_config: Mapping[str, Any]
    heads: tuple[Described, ...] = ()


def read_spec(path: str | os.PathLike[str]) -> ModelSpec:
    """`read_model` without what is stored how."""
    return read_model(path).spec


def read_model(path: str | os.PathLike[str]) -> Described:
    """For planning: also of a config.json alone, or a folder without its weights.

    Where weights are, they are checked as `open_model` does. Raises as `open_model`.
    """
    model = Path(path)
    folder = model if model.is_dir() else model.parent
    if model.is_dir():
        names = _listing(model)
        if "config.json" not in names or any(name.endswith((".safetensors", ".gguf")) for name in names):
            return _described(open_model(path))
        model = model / "config.json"
    elif model.suffix != ".json" or not model.exists():
        return _described(open_model(path))
    else:
        names = _listing(folder) if model.name == "config.json" else []
    config = read_json_object(model)
    family = find_family(config)
    method = read_quantization(folder, names, config)
    spec = family.spec(config)
    check_count(spec)
    codes = {} if method is None else expected_codes(method, spec, family.weight_map(spec))
    generation = "generation_config.json" in names
    heads = tuple(Described(head.spec, {}, {}) for head in mtp_heads(family, spec, count_mtp(family, config)))
    return Described(spec, codes, read_json_object(folder / "generation_config.json") if generation else {}, heads)


def _described(checkpoint: Checkpoint) -> Described:
    heads = tuple(map(_described, checkpoint.heads))
    return Described(checkpoint.spec, checkpoint.stored, checkpoint.generation_config, heads)


def find_family(config: Mapping[str, Any]) -> ModelFamily:
    """The family that runs a parsed config.json, by its `architectures`, or by `model_type` where it has none.

    Raises UnsupportedError listing the known architectures if there is none.
    """
    model_type = config.get("model_type")
    architectures = config.get("architectures")
    known = ALIASES.get(model_type, model_type) if isinstance(model_type, str) else None
    if architectures is None and known is not None and known in FAMILIES.names():
        return _family(known)
    if not isinstance(architectures, list) or not architectures:
        raise ModelError(
            'config.json names no architecture; `architectures` must be a list such as ["LlamaForCausalLM"]'
        )
    unknown = [name for name in architectures if not isinstance(name, str) or name not in ARCHITECTURES]
    if unknown:
        raise _unknown(unknown[0], config)
    families = sorted({_SAME_NAME.get((name, str(known)), ARCHITECTURES[name]) for name in architectures})
    if len(families) > 1 or (model_type is not None and known != families[0]):
        raise ModelError(
            f"config.json contradicts itself: model_type {quoted(model_type)}, architecture {quoted(architectures[0])}"
        )
    return _family(families[0])


def _family(name: str) -> ModelFamily:
    family: ModelFamily = FAMILIES.get(name)()
    return family


def _unknown(architecture: object, config: Mapping[str, Any]) -> UnsupportedError:
    """Says what is missing, or which known architectures have the nearest names."""
    name = architecture if isinstance(architecture, str) else ""
    part = missing_part(name)
    if part is not None:
        return UnsupportedError(
            f"config.json names the architecture {quoted(name)}, which needs {part}; Penstock does not have that"
        )
    near = difflib.get_close_matches(name, sorted(ARCHITECTURES), n=3, cutoff=0.0)
    code = "; code that a model brings along (auto_map) is never run" if config.get("auto_map") else ""
    return UnsupportedError(
        f"config.json names the architecture {quoted(architecture)}, which Penstock does not know; of the "
        f"{len(ARCHITECTURES)} known ones these have the nearest names: {', '.join(near)}{code}"
    )


def _open_file(path: Path) -> Checkpoint:
    if path.suffix == ".bin":
        refusal = pickle_refusal(path.parent, [path.name]) if path.name.startswith("pytorch_model") else None
        if refusal is not None:
            raise refusal
        from penstock.families.llama2c import open_llama2c_file

        return (_by_magic(path) or open_llama2c_file)(path, _listing(path.parent))
    if path.suffix == ".gguf":
        from penstock.families.gguf.files import open_gguf_file

        return open_gguf_file(path, find_family)
    raise ModelError(f"{quoted(path)} is a file; name the folder it is in, or a .gguf or .bin file")


def _by_magic(path: Path) -> Callable[[Path, list[str]], Checkpoint] | None:
    """What opens a .bin file that says what it is; files of llama2.c do not."""
    from penstock.families.rwkv_cpp import open_rwkv_cpp_file
    from penstock.families.ternary import open_ternary_file
    from penstock.formats.rwkv_cpp import is_rwkv_cpp
    from penstock.formats.ternary import is_ternary

    if is_rwkv_cpp(path):
        return open_rwkv_cpp_file
    return open_ternary_file if is_ternary(path) else None


def _listing(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise unreadable(folder, error) from error
