"""Short names of small models: where each lies on the Hugging Face Hub.

A revision and a SHA-256 stand here where they are known: for qwen2.5-coder the files themselves were hashed, for the
others projects that pin the file agree on them. Where there is none, what the hub says when the model is pulled is
checked and recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

GEMMA_TERMS = "Gemma's terms of use (https://ai.google.dev/gemma/terms)"
LLAMA_TERMS = "the Llama 3.2 licence (https://www.llama.com/llama3_2/license)"


@dataclass(frozen=True)
class HubModel:
    """A repository. `file`: one GGUF file of it, instead of its model folder."""

    repo: str
    revision: str | None = None
    file: str | None = None


@dataclass(frozen=True)
class KnownModel:
    """`sha256`: of the file, "" if it is not known. `num_bytes`: about, for people. `terms`: what has to be accepted
    before it is pulled, "" for free licences."""

    model: HubModel
    licence: str
    num_bytes: int
    sha256: str = ""
    terms: str = ""


def _gguf(repo: str, file: str, revision: str | None, num_bytes: int, sha256: str = "", terms: str = "") -> KnownModel:
    licence = {GEMMA_TERMS: "gemma", LLAMA_TERMS: "llama3.2"}.get(terms, "apache-2.0")
    return KnownModel(HubModel(repo, revision, file), licence, num_bytes, sha256, terms)


ALIASES = {
    "smollm2:135m": _gguf(
        "bartowski/SmolLM2-135M-Instruct-GGUF", "SmolLM2-135M-Instruct-Q8_0.gguf", None, 145_000_000,
    ),
    "smollm2:360m": _gguf(
        "HuggingFaceTB/SmolLM2-360M-Instruct-GGUF", "smollm2-360m-instruct-q8_0.gguf",
        "593b5a2e04c8f3e4ee880263f93e0bd2901ad47f", 386_404_992,
        "48ab3034d0dd401fbc721eb1df3217902fee7dab9078992d66431f09b7750201",
    ),
    "smollm2:1.7b": _gguf(
        "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF", "smollm2-1.7b-instruct-q4_k_m.gguf", None, 1_055_609_536,
        "decd2598bc2c8ed08c19adc3c8fdd461ee19ed5708679d1c54ef54a5a30d4f33",
    ),
    "qwen2.5:0.5b": _gguf(
        "Qwen/Qwen2.5-0.5B-Instruct-GGUF", "qwen2.5-0.5b-instruct-q4_k_m.gguf",
        "9217f5db79a29953eb74d5343926648285ec7e67", 491_400_032,
        "74a4da8c9fdbcd15bd1f6d01d621410d31c6fc00986f5eb687824e7b93d7a9db",
    ),
    "qwen2.5:1.5b": _gguf(
        "Qwen/Qwen2.5-1.5B-Instruct-GGUF", "qwen2.5-1.5b-instruct-q4_k_m.gguf",
        "91cad51170dc346986eccefdc2dd33a9da36ead9", 1_117_320_736,
        "6a1a2eb6d15622bf3c96857206351ba97e1af16c30d7a74ee38970e434e9407e",
    ),
    "qwen2.5-coder:0.5b": _gguf(
        "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "ebb2015119c907b064c512bf053e945850b5875f", 491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder:1.5b": _gguf(
        "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "2ab9f8f42af02fc212effaef7c4850c885e965f4", 1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "qwen3:0.6b": _gguf(
        "Qwen/Qwen3-0.6B-GGUF", "Qwen3-0.6B-Q8_0.gguf", "23749fefcc72300e3a2ad315e1317431b06b590a", 639_446_688,
        "9465e63a22add5354d9bb4b99e90117043c7124007664907259bd16d043bb031",
    ),
    "qwen3:1.7b": _gguf(
        "Qwen/Qwen3-1.7B-GGUF", "Qwen3-1.7B-Q8_0.gguf", "90862c4b9d2787eaed51d12237eafdfe7c5f6077", 1_834_426_016,
        "061b54daade076b5d3362dac252678d17da8c68f07560be70818cace6590cb1a",
    ),
    "qwen3:4b": _gguf(
        "Qwen/Qwen3-4B-GGUF", "Qwen3-4B-Q4_K_M.gguf", "bc640142c66e1fdd12af0bd68f40445458f3869b", 2_497_280_256,
        "7485fe6f11af29433bc51cab58009521f205840f5b4ae3a32fa7f92e8534fdf5",
    ),
    "llama3.2:1b": _gguf(
        "bartowski/Llama-3.2-1B-Instruct-GGUF", "Llama-3.2-1B-Instruct-Q4_K_M.gguf",
        "067b946cf014b7c697f3654f621d577a3e3afd1c", 807_694_464,
        "6f85a640a97cf2bf5b8e764087b1e83da0fdb51d7c9fab7d0fece9385611df83", LLAMA_TERMS,
    ),
    "gemma3:270m": _gguf(
        "ggml-org/gemma-3-270m-it-GGUF", "gemma-3-270m-it-Q8_0.gguf", None, 291_545_600,
        "0ef57d2c838458a1952664260dcba38e5bdda37494f3af732f06e4add24068e3", GEMMA_TERMS,
    ),
    "gemma3:1b": _gguf(
        "ggml-org/gemma-3-1b-it-GGUF", "gemma-3-1b-it-Q4_K_M.gguf", "f9c28bcd85737ffc5aef028638d3341d49869c27",
        806_058_240, "8ccc5cd1f1b3602548715ae25a66ed73fd5dc68a210412eea643eb20eb75a135", GEMMA_TERMS,
    ),
    "all-minilm": KnownModel(
        HubModel("sentence-transformers/all-MiniLM-L6-v2", "1110a243fdf4706b3f48f1d95db1a4f5529b4d41"),
        "apache-2.0", 91_300_000,
    ),
}  # fmt: skip
"""Name -> KnownModel. What a name without a tag would mean is not guessed: the nearest names are said."""
