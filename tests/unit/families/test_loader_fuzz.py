"""Every loader under mutation: opening and loading a model succeeds or raises a PenstockError, soon, in little memory.

Valid files are changed at random, byte by byte and in their structure. By default a few examples per loader;
PENSTOCK_FUZZ_EXAMPLES=20000 makes a long hunt of it, from a fresh seed, that prints what came out.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from penstock.base.errors import PenstockError
from penstock.core.held_weights import HeldWeights
from penstock.families.registry import ARCHITECTURES, open_model, read_spec
from penstock.weights.load import load_weights
from tests.blocks import write_blocks
from tests.codes import Kind, write
from tests.ggml import gguf_bytes
from tests.models.test_ternary import write_ternary
from tests.quantised import golden
from tests.quantised import write as write_quantised
from tests.shared import shared
from tests.unit.families.test_families import TINY, tiny_tensors
from tests.unit.families.test_gguf import METADATA, mixture, model_metadata, model_tensors
from tests.unit.formats.test_formats import write_llama2c, write_tokenizer
from tests.unit.weights.test_oracles import compressed

HUNT = os.environ.get("PENSTOCK_FUZZ_EXAMPLES")
FUZZ = settings(
    max_examples=int(HUNT or 60), derandomize=HUNT is None, deadline=None, database=None, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
MOST_SECONDS = 10.0
"""For one example, on a busy machine; real ones take milliseconds."""
MOST_BYTES = 256 << 20
"""Address space that all examples of a loader may add."""

Folder = dict[str, bytes]


# --- valid models, as the bytes of their files


def llama_folder(**more: Any) -> Folder:
    return {"config.json": json.dumps(TINY | more).encode(), "model.safetensors": save(tiny_tensors(TINY))}


def sharded_folder() -> Folder:
    tensors = tiny_tensors(TINY)
    names = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    out = {shard: save({k: v for k, v in tensors.items() if names[k] == shard}) for shard in set(names.values())}
    index = {"metadata": {"total_size": 1}, "weight_map": names}
    return out | {"config.json": json.dumps(TINY).encode(), "model.safetensors.index.json": json.dumps(index).encode()}


def dressed_folder() -> Folder:
    return llama_folder() | {
        "generation_config.json": b'{"eos_token_id": [2, 3], "temperature": 0.6}',
        "tokenizer_config.json": b'{"chat_template": [{"name": "default", "template": "{{ x }}"}], "bos_token": "<s>"}',
    }


def from_files(write: Callable[[Path], object]) -> Callable[[Path], Folder]:
    """What `write` puts into an empty folder."""

    def made(folder: Path) -> Folder:
        folder.mkdir()
        write(folder)
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    return made


def fp8_folder() -> Folder:
    """The linear layers in FP8, 160 wide so that a matrix has several scales; norms and embeddings as they are."""
    config = TINY | {"hidden_size": 160, "intermediate_size": 200}
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    header: dict[str, Any] = {}
    data = b""

    def add(name: str, dtype: str, shape: tuple[int, ...], stored: bytes) -> None:
        nonlocal data
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(stored)]}
        data += stored

    for name, array in tiny_tensors(config).items():
        if "proj" not in name:
            add(name, "F32", array.shape, array.tobytes())
            continue
        add(name, "F8_E4M3", array.shape, np.random.default_rng(1).integers(0, 120, array.size, np.uint8).tobytes())
        blocks = tuple(-(-n // 128) for n in array.shape)
        add(name + "_scale_inv", "F32", blocks, np.ones(blocks, np.float32).tobytes())
    text = json.dumps(header).encode()
    told = json.dumps(config | {"quantization_config": quantization}).encode()
    return {"config.json": told, "model.safetensors": struct.pack("<Q", len(text)) + text + data}


def codes_folder(folder: Path, kind: Kind) -> Folder:
    """Every linear layer as codes of 4 or 8 bits."""
    write(folder, kind)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def quantised_folder(folder: Path, case: str) -> Folder:
    """One matrix as a library stored it."""
    name, _, form = case.partition(": ")
    write_quantised(folder, compressed(form) if name == "compressed-tensors" else golden(name)[form])
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def int8_llama(path: Path) -> None:
    """A version 2 file of llama2.c: dim 8, hidden 16, one layer, 2 heads, 1 kv head, 8 tokens, groups of 4."""
    e, f, kv, v, group = 8, 16, 4, 8, 4
    header = struct.pack("<Ii7iBi", 0x616B3432, 2, e, f, 1, 2, 1, v, 16, 1, group)
    rng = np.random.default_rng(0)
    data = rng.standard_normal(3 * e, dtype=np.float32).tobytes()
    for count in (v * e, e * e, kv * e, kv * e, e * e, f * e, e * f, f * e):
        codes = rng.integers(-128, 128, count, dtype=np.int8)
        data += codes.tobytes() + rng.standard_normal(count // group, dtype=np.float32).tobytes()
    path.write_bytes(header + bytes(256 - len(header)) + data)


def llama2c_folder(folder: Path) -> None:
    write_llama2c(folder / "m.bin", tied=False)
    write_tokenizer(folder / "tokenizer.bin", [(b"%d" % i, 0.0) for i in range(16)])


def gguf(kind: str, metadata: dict[str, Any], tensors: dict[str, Any]) -> Folder:
    return {"m.gguf": gguf_bytes(metadata, {n: (kind if a.ndim > 1 else "F32", a) for n, a in tensors.items()})}


def blocks_file(folder: Path, *kinds: str) -> None:
    rest, value, down, up = kinds
    write_blocks(folder / "m.gguf", {"": rest, "attn_v": value, "ffn_down": down, "ffn_up": up}, factor=0.5)


VOCABULARY = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a"] * 16, "tokenizer.ggml.eos_token_id": 2}
MADE: dict[str, tuple[str, Callable[[Path], Folder]]] = {
    # Loader: (the file that is changed, the folder).
    "safetensors": ("model.safetensors", lambda _: llama_folder()),
    "shard": ("model-1.safetensors", lambda _: sharded_folder()),
    "index": ("model.safetensors.index.json", lambda _: sharded_folder()),
    "config": ("config.json", lambda _: llama_folder()),
    "generation config": ("generation_config.json", lambda _: dressed_folder()),
    "tokenizer config": ("tokenizer_config.json", lambda _: dressed_folder()),
    "fp8": ("model.safetensors", lambda _: fp8_folder()),
    "gptq": ("model.safetensors", lambda folder: codes_folder(folder, Kind(symmetric=False, ordered=True))),
    "gptq symmetric": ("model.safetensors", lambda folder: codes_folder(folder, Kind())),
    "awq": ("model.safetensors", lambda folder: codes_folder(folder, Kind("awq"))),
    **{
        case: ("model.safetensors", lambda folder, case=case: quantised_folder(folder, case))
        for case in (
            "gptq: 3 bits act-order",
            "bitsandbytes: nf4 nested",
            "bitsandbytes: int8",
            "hqq: 4 bits",
            "hqq: 3 bits axis 0",
            "modelopt: nvfp4",
            "compressed-tensors: 3 bits asymmetric",
            "compressed-tensors: fp8 of outputs",
            "compressed-tensors: mxfp4",
        )
    },
    "compressed config": ("config.json", lambda folder: quantised_folder(folder, "compressed-tensors: nvfp4")),
    "auto-round config": ("config.json", lambda folder: quantised_folder(folder, "auto_round: auto_awq 4 bits")),
    "bitsandbytes config": ("config.json", lambda folder: quantised_folder(folder, "bitsandbytes: fp4")),
    "hqq config": ("config.json", lambda folder: quantised_folder(folder, "hqq: 2 bits")),
    "modelopt config": ("config.json", lambda folder: quantised_folder(folder, "modelopt: fp8")),
    "gptq config": ("config.json", lambda folder: codes_folder(folder, Kind())),
    "awq config": ("config.json", lambda folder: codes_folder(folder, Kind("awq"))),
    "gguf": ("m.gguf", lambda _: gguf("F32", METADATA | model_metadata() | VOCABULARY, model_tensors())),
    "gguf coded": ("m.gguf", lambda _: gguf("Q4_0", model_metadata("qwen2"), model_tensors())),
    "gguf experts": ("m.gguf", lambda _: gguf("Q8_0", *mixture("qwen2moe", shared=True))),
    "gguf k-quants": ("m.gguf", from_files(lambda folder: blocks_file(folder, "Q4_K", "Q6_K", "Q3_K", "Q2_K"))),
    "gguf tables": ("m.gguf", from_files(lambda folder: blocks_file(folder, "IQ4_XS", "IQ4_NL", "MXFP4", "NVFP4"))),
    "gguf grids": ("m.gguf", from_files(lambda folder: blocks_file(folder, "IQ2_S", "IQ3_XXS", "IQ1_M", "TQ1_0"))),
    "llama2c": ("m.bin", from_files(llama2c_folder)),
    "llama2c tokenizer": ("tokenizer.bin", from_files(llama2c_folder)),
    "llama2c int8": ("m.bin", from_files(lambda folder: int8_llama(folder / "m.bin"))),
    "ternary": ("m.bin", from_files(lambda folder: write_ternary(folder / "m.bin"))),
}
TEXTS = {"index", *(name for name in MADE if name.endswith("config"))}
"""Hardly any change of a byte leaves these whole; their values are changed by `test_fuzz_json`. (That a tokenizer of
llama2.c is broken only shows when it is loaded: a model without one can be opened.)"""


# --- mutations

SIZES = st.sampled_from(
    [0, 1, 2, 3, 7, 8, 16, 31, 32, 33, 255, 256, 2**15, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53,
     2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
)  # fmt: skip
FLOATS = st.sampled_from([float("nan"), float("inf"), -float("inf"), 3e38, -1e-45, 0.0])
EDIT = st.one_of(
    st.tuples(st.just("byte"), st.integers(0, 2**20), st.integers(0, 255)),
    st.tuples(st.just("<I"), st.integers(0, 2**20), SIZES),
    st.tuples(st.just("<Q"), st.integers(0, 2**20), SIZES),
    st.tuples(st.just("<f"), st.integers(0, 2**20), FLOATS),
    st.tuples(st.sampled_from(["cut", "drop", "double", "append"]), st.integers(0, 2**20), st.integers(0, 64)),
)
EDITS = st.lists(st.tuples(st.booleans(), EDIT), min_size=1, max_size=4)


def mutated(data: bytes, edits: list[tuple[bool, tuple[str, int, Any]]]) -> bytes:
    """`data` after these edits, each somewhere in the first 2000 bytes (where headers are) or anywhere."""
    out = bytearray(data)
    for near, (kind, place, value) in edits:
        at = place % max(1, min(len(out), 2000 if near else len(out)))
        if kind == "byte":
            out[at : at + 1] = bytes([value])
        elif kind == "cut":
            del out[at:]
        elif kind == "drop":
            del out[at : at + value]
        elif kind == "double":
            out[at:at] = out[at : at + value]
        elif kind == "append":
            out += bytes([at % 256]) * value
        else:
            number = value if kind == "<f" else value % (1 << 8 * struct.calcsize(kind))
            new = struct.pack(kind, number)
            out[at : at + len(new)] = new
    return bytes(out)


LEAF = st.one_of(
    SIZES, st.integers(-3, 70), FLOATS, st.sampled_from(
        [None, True, False, "", "x", "\0", "Infinity", [], {}, [[]], [1, 2], [None], {"a": 1}, -1, 1e308, 1e-300, 0.5,
         10**400, "float16", "LlamaForCausalLM", "llama", "yarn", "../model-0.safetensors", "model-0.safetensors"]
    ),
    st.sampled_from(sorted(ARCHITECTURES)).map(lambda name: [name]),
)  # fmt: skip
ROPE = st.dictionaries(
    st.sampled_from(["rope_type", "type", "factor", "rope_theta", "original_max_position_embeddings", "beta_fast",
                     "low_freq_factor", "high_freq_factor", "short_factor", "long_factor", "attention_factor"]),
    LEAF | st.sampled_from(["linear", "dynamic", "llama3", "yarn", "longrope", 4.0, [1.0]]), max_size=5,
)  # fmt: skip
CHANGES = st.lists(st.tuples(st.integers(0, 2**16), st.sampled_from(["set", "set", "drop", "new"]), LEAF | ROPE),
                   min_size=1, max_size=3)  # fmt: skip
NEW_KEYS = ("rope_scaling", "rope_parameters", "head_dim", "sliding_window", "layer_types", "quantization_config", "x",
            "num_local_experts", "partial_rotary_factor", "auto_map", "dtype", "dynamic", "sym", "group_size",
            "version", "format", "config_groups", "ignore", "weights", "quant_algo", "extra_config",
            "quant_config")  # fmt: skip


def changed(value: dict[str, Any], changes: list[tuple[int, str, Any]]) -> dict[str, Any]:
    """A JSON object with some of its leaves replaced, left out or added."""
    out: dict[str, Any] = json.loads(json.dumps(value))
    for place, what, given_leaf in changes:
        leaf = json.loads(json.dumps(given_leaf))  # its own: a later change may go into it
        inner = out
        while inner:
            key = list(inner)[place % len(inner)]
            if not (isinstance(inner[key], dict) and inner[key] and place % 3):
                break
            inner = inner[key]
        if what == "new" or not inner:
            inner[NEW_KEYS[place % len(NEW_KEYS)]] = leaf
        elif what == "drop":
            del inner[key]
        else:
            inner[key] = leaf
    return out


# --- the law

SEEN: Counter[tuple[str, str]] = Counter()
SLOWEST: dict[str, float] = {}


def attempt(loader: str, call: Callable[[], object]) -> None:
    """`call` returns, or raises a PenstockError of one printable line, within the limits."""
    started = time.process_time()
    outcome = "read"
    try:
        call()
    except PenstockError as error:
        message = str(error)
        assert message.isprintable(), message
        assert 0 < len(message) < 2000, message
        outcome = type(error).__name__
    taken = time.process_time() - started
    assert taken < MOST_SECONDS, f"{taken:.1f} seconds"
    SEEN[loader, outcome] += 1
    SLOWEST[loader] = max(SLOWEST.get(loader, 0.0), taken)


def load(folder: Path) -> None:
    checkpoint = open_model(folder)
    for dtype in ("float32", "float16"):
        load_weights(checkpoint, checkpoint.spec, dtype)
    if checkpoint.stored:
        held = load_weights(checkpoint, checkpoint.spec, HeldWeights("float32", checkpoint.stored))
        assert all(np.isfinite(held[name].values()).all() for name in checkpoint.stored)


@pytest.fixture(scope="module", autouse=True)
def _report() -> Iterator[None]:
    yield
    if HUNT:
        for loader in sorted({name for name, _ in SEEN}):
            counts = {outcome: n for (name, outcome), n in sorted(SEEN.items()) if name == loader}
            print(f"{loader}: {counts}, slowest {SLOWEST[loader] * 1e3:.0f} ms")


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    """More address space than MOST_BYTES beyond what there is now is refused: a MemoryError fails the test."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path, bytes]]:
    """Loader -> (folder, the file in it that is to be changed, its valid bytes)."""
    out = {}
    for loader, (name, made) in MADE.items():
        root = tmp_path_factory.mktemp("fuzz")
        folder = root / "model"
        folder.mkdir()
        files = made(root / "made")
        for file, data in files.items():
            (folder / file).write_bytes(data)
        load(folder)  # valid it is
        out[loader] = (folder, folder / name, files[name])
    return out


@pytest.mark.parametrize("loader", list(MADE))
def test_fuzz_bytes(valid: dict[str, tuple[Path, Path, bytes]], loader: str) -> None:
    folder, file, data = valid[loader]

    @FUZZ
    @given(edits=EDITS)
    def hunt(edits: list[tuple[bool, tuple[str, int, Any]]]) -> None:
        file.write_bytes(mutated(data, edits))
        attempt(loader, lambda: load(folder))

    hunt()
    file.write_bytes(data)
    outcomes = {outcome for name, outcome in SEEN if name == loader}
    assert "read" in outcomes or loader in TEXTS, "not every change breaks a file"
    assert outcomes - {"read"} or loader == "llama2c tokenizer", "and not every change is harmless"


@pytest.mark.parametrize("loader", sorted(TEXTS))
def test_fuzz_json(valid: dict[str, tuple[Path, Path, bytes]], loader: str) -> None:
    folder, file, data = valid[loader]
    value = json.loads(data)

    @FUZZ
    @given(changes=CHANGES)
    def hunt(changes: list[tuple[int, str, Any]]) -> None:
        file.write_text(json.dumps(changed(value, changes)))
        attempt(loader + " values", lambda: load(folder))

    hunt()
    file.write_bytes(data)


@pytest.mark.parametrize("loader", ["safetensors", "fp8", "gptq", "awq", *(name for name in MADE if ": " in name)])
def test_fuzz_safetensors_headers(valid: dict[str, tuple[Path, Path, bytes]], loader: str) -> None:
    """The header stays JSON, and its length is right: what it says is wrong."""
    folder, file, data = valid[loader]
    length = struct.unpack_from("<Q", data)[0]
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]

    @FUZZ
    @given(changes=CHANGES)
    def hunt(changes: list[tuple[int, str, Any]]) -> None:
        text = json.dumps(changed(header, changes)).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + body)
        attempt(loader + " header", lambda: load(folder))

    hunt()
    file.write_bytes(data)


@pytest.mark.parametrize(("arch", "kind"), [("llama", "Q4_0"), ("qwen3moe", "Q8_0")])
def test_fuzz_gguf_metadata(tmp_path: Path, arch: str, kind: str) -> None:
    """The file is well formed; what its metadata say is wrong, or of another type."""
    metadata, tensors = mixture(arch, shared=False) if "moe" in arch else (model_metadata(), model_tensors())
    metadata = metadata | VOCABULARY | {"tokenizer.chat_template": "x", "llama.rope.scaling.type": "none"}
    coded = {name: (kind if array.ndim > 1 else "F32", array) for name, array in tensors.items()}
    simple = st.one_of(
        st.integers(-(2**31), 2**32 - 1), FLOATS, st.booleans(), st.sampled_from(["", "yarn", "linear", "llama", "x"]),
        st.lists(st.integers(0, 70), max_size=3), st.lists(st.just("a"), max_size=20),
    )  # fmt: skip
    keys = [*metadata, f"{arch}.rope.scaling.factor", f"{arch}.attention.key_length", f"{arch}.expert_gating_func",
            "split.count", "split.no", "general.alignment", f"{arch}.x"]  # fmt: skip

    @FUZZ
    @given(changes=st.dictionaries(st.sampled_from(keys), simple | st.none(), min_size=1, max_size=4))
    def hunt(changes: dict[str, Any]) -> None:
        values = {key: value for key, value in (metadata | changes).items() if value is not None}
        (tmp_path / "m.gguf").write_bytes(gguf_bytes(values, coded))
        attempt("gguf metadata", lambda: load(tmp_path))

    hunt()


def test_fuzz_real_configs() -> None:
    """Published configurations of every family, changed: read as a plan reads them, without weights."""
    paths = sorted(shared("data", "configs", "model").glob("*.config.json"))
    configs = [json.loads(path.read_text()) for path in paths]
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"penstock-fuzz-{os.getpid()}"
    folder.mkdir()

    @FUZZ
    @given(number=st.integers(0, len(configs) - 1), changes=CHANGES)
    def hunt(number: int, changes: list[tuple[int, str, Any]]) -> None:
        (folder / "config.json").write_text(json.dumps(changed(configs[number], changes)))
        attempt("real configs", lambda: read_spec(folder))

    try:
        hunt()
    finally:
        (folder / "config.json").unlink(missing_ok=True)
        folder.rmdir()
