"""GPTQ and AWQ: what is read is what the published definitions say, and codes stay codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.backends import BACKENDS
from penstock.backends.native.backend import NOT_BUILT
from penstock.base.errors import CapacityError
from penstock.config import from_kwargs
from penstock.core.cache_spec import DTYPE_BYTES
from penstock.core.held_weights import HeldWeights
from penstock.core.machine import Machine
from penstock.core.matrix_format import (
    NONE,
    MatrixFormat,
    Shared,
    parse_scheme,
    plain,
    rounded_matrices,
    row_matrices,
)
from penstock.core.model_spec import weight_shapes
from penstock.core.panels import panels_of
from penstock.core.weight_map import Cut
from penstock.families.checkpoint import Codes
from penstock.families.quantization import read_method
from penstock.families.quantization.gather import is_rows
from penstock.families.quantization.grouped import Grouped
from penstock.families.registry import find_family, open_model, read_model
from penstock.launch.build import plan_of
from penstock.ops.native.abi import Act, Format
from penstock.ops.native.library import best_library
from penstock.ops.native.matrix import order, pack
from penstock.ops.ref.product import linear
from penstock.ops.stored import StoredMatrix, alike
from penstock.plan.resolve import resolve
from penstock.plan.weights import hold_weights
from penstock.quant.reference import QuantisedLinear
from penstock.weights import load as loading
from penstock.weights.load import apply_cut, load_weights, rows_of
from penstock.weights.stored import STORED_FORMATS
from tests import specs
from tests.codes import Kind, coded, kept, write

KINDS = {
    "symmetric": Kind(),
    "asymmetric": Kind(symmetric=False),
    "version 2": Kind(symmetric=False, version=2),
    "act-order": Kind(ordered=True),
    "asymmetric act-order": Kind(symmetric=False, ordered=True),
    "whole rows": Kind(group=-1),
    "whole rows, act-order": Kind(group=-1, ordered=True, symmetric=False),
    "groups of 8": Kind(group=8, symmetric=False),
    "8 bits": Kind(bits=8),
    "8 bits asymmetric act-order": Kind(bits=8, symmetric=False, ordered=True),
    "8 bits version 2": Kind(bits=8, version=2),
    "lm_head": Kind(lm_head=True),
    "awq": Kind("awq"),
    "awq whole rows": Kind("awq", group=-1),
}
MACHINE = Machine(num_cores=2, memory_bytes=1 << 34, available_bytes=1 << 33)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("codes")
    return {name: write(root / name.replace(",", ""), kind) for name, kind in KINDS.items()}


@pytest.mark.parametrize("name", list(KINDS))
def test_values_are_those_of_the_published_definition(
    folders: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_CHUNK", 300)
    folder = folders[name]
    checkpoint, dense = open_model(folder), open_model(folder.with_name(folder.name + "-dense"))
    want = load_weights(dense, dense.spec, "float32")
    done: list[tuple[int, int]] = []
    decoded = load_weights(checkpoint, checkpoint.spec, "float32", lambda *at: done.append(at))
    stored = kept(folder)
    for weight in want:
        np.testing.assert_array_equal(decoded[weight], want[weight], err_msg=weight)
    assert done[-1][0] == done[-1][1]
    matrices = [n for n in want if isinstance(stored[n], StoredMatrix)]
    assert len(matrices) == 14 + KINDS[name].lm_head
    for n in matrices:
        np.testing.assert_array_equal(stored[n].values(), want[n], err_msg=n)
        np.testing.assert_array_equal(stored[n].values(3, 10), want[n][3:10], err_msg=n)


@pytest.mark.parametrize("name", list(KINDS))
def test_codes_stay_mapped_and_take_the_bytes_that_the_plan_counts(folders: dict[str, Path], name: str) -> None:
    checkpoint = open_model(folders[name])
    plan = resolve(from_kwargs(model="m", ops="ref"), checkpoint.spec, MACHINE, stored=checkpoint.stored)
    weights = load_weights(checkpoint, checkpoint.spec, plan.held)
    assert plan.weight_bytes == sum(w.nbytes for w in weights.values())
    for n, w in weights.items():
        if isinstance(w, StoredMatrix):
            words, scales, *others = w.arrays
            assert all(a.base is not None for a in w.arrays), "a view of the file"
            of_use = [zeros for zeros in others[:1] if w.format.zeros] + [o for o in others[1:] if w.format.ordered]
            assert w.nbytes == words.nbytes + scales.nbytes + sum(a.nbytes for a in of_use), n


@pytest.mark.parametrize("name", list(KINDS))
def test_the_product_of_a_row_is_that_of_the_values_whatever_its_company(folders: dict[str, Path], name: str) -> None:
    rng = np.random.default_rng(0)
    for n, w in kept(folders[name]).items():
        if isinstance(w, StoredMatrix) and n.startswith("layers.0"):
            x = rng.standard_normal((5, w.shape[1]), dtype=np.float32)
            together = linear(x, w)
            np.testing.assert_array_equal(together, linear(x, w.values()))
            for t in range(5):
                np.testing.assert_array_equal(linear(x[t : t + 1], w)[0], together[t])


@pytest.mark.parametrize("more", [1, 2, 3])
@pytest.mark.parametrize("name", ["asymmetric act-order", "awq"])
def test_words_may_begin_at_any_byte_of_a_file(folders: dict[str, Path], tmp_path: Path, name: str, more: int) -> None:
    whole = (folders[name] / "model.safetensors").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    moved = (length + more).to_bytes(8, "little") + whole[8 : 8 + length] + b" " * more + whole[8 + length :]
    (tmp_path / "model.safetensors").write_bytes(moved)
    (tmp_path / "config.json").write_bytes((folders[name] / "config.json").read_bytes())
    for n, w in kept(folders[name]).items():
        if isinstance(w, StoredMatrix):
            np.testing.assert_array_equal(kept(tmp_path)[n].values(), w.values())


# --- what is one description


def test_formats_of_other_publishers_have_a_description_of_the_right_size() -> None:
    """Bytes of a block or matrix as the formats' own definitions say."""
    k_quant = (Shared("uint6", 1, 32), Shared("float16", 1, 256))
    q4_k = MatrixFormat("uint", 4, k_quant, k_quant, zeros_are="values")
    assert q4_k.num_bytes((10, 512)) == 10 * 2 * 144
    q6_k = MatrixFormat("int", 6, (Shared("int8", 1, 16), Shared("float16", 1, 256)))
    assert q6_k.num_bytes((10, 256)) == 10 * 210
    nvfp4 = MatrixFormat("e2m1", 4, (Shared("e4m3", 1, 16), Shared("float32", 0, 0)))
    assert nvfp4.num_bytes((8, 64)) == 8 * 32 + 8 * 4 + 4
    fp8 = MatrixFormat("e4m3", 8, (Shared("float32", 128, 128),))
    assert fp8.num_bytes((200, 300)) == 200 * 300 + 2 * 3 * 4
    per_tensor = MatrixFormat("e4m3", 8, (Shared("float32", 0, 0),))
    assert per_tensor.num_bytes((200, 300)) == 200 * 300 + 4
    packed = MatrixFormat("int", 4, (Shared("float16", 1, 128),), (Shared("uint4", 1, 128),))
    assert packed.num_bytes((16, 256)) == 16 * 128 + 16 * 2 * 2 + 16
    nested = MatrixFormat("table", 4, (Shared("uint8", 1, 64), Shared("float32", 4, 64)))
    assert nested.num_bytes((64, 64)) == 64 * 32 + 64 + 16 * 4
    assert [str(f) for f in (nvfp4, fp8, plain("bfloat16"))] == [
        "4-bit codes (e2m1), a e4m3 scale per 16 inputs, a float32 scale per matrix",
        "8-bit codes (e4m3), a float32 scale per 128 x 128", "bfloat16",
    ]  # fmt: skip


def matrix(n: int, k: int, kind: Kind) -> tuple[StoredMatrix, Any]:
    """A matrix over arrays in memory, and its values."""
    parts, values = coded(np.random.default_rng(n), n, k, kind)
    config = read_method(kind.config, "here")
    assert isinstance(config, Grouped)
    arrays = {"codes": parts["qweight"].view("<u4").reshape(-1), "scales": parts["scales"]}
    arrays |= {"zeros": parts["qzeros"].view("<u4")} | ({"order": parts["g_idx"]} if "g_idx" in parts else {})
    format = config.format(kind.bits, 0 if kind.group in (-1, k) else kind.group)
    codes = Codes(kind.method, format, numbers={"first_zero": config.first_zero})
    return STORED_FORMATS.get(kind.method)(codes, arrays, (n, k), np.dtype(np.float32), None), values


@pytest.mark.skipif(best_library() is None, reason=NOT_BUILT)
@pytest.mark.parametrize(("kind", "k", "group"), [
    (Kind(group=32), 64, 32), (Kind(group=96, symmetric=False), 192, 32), (Kind(group=-1), 88, 0),
    (Kind("awq", group=64), 192, 64), (Kind(group=32, ordered=True), 128, 32), (Kind(bits=8, symmetric=False), 96, 32),
])  # fmt: skip
@pytest.mark.parametrize("sizes", [(40, 16), (64, 64), (200, 72, 8)])
def test_panels_are_the_codes_of_matrices_of_any_size(kind: Kind, k: int, group: int, sizes: tuple[int, ...]) -> None:
    library: Any = best_library()
    if kind.ordered:
        sizes = sizes[:1]  # each has an order of its own
    made = [matrix(n, k, kind) for n in sizes]
    stored, values = [m for m, _ in made], np.concatenate([v for _, v in made])
    panels = panels_of(stored[0].format, k)
    assert panels is not None
    assert panels.group == group
    for pair in (False, True) if len(set(sizes)) == 1 and len(sizes) == 2 else (False,):
        found = pack(library, stored, Format.BLOCK, Act.F32, panels=panels, as_stored=True, pair=pair)
        where = order(sizes, pair)
        inputs = slice(None) if found.order is None else found.order
        want = np.where(where[:, None] < 0, 0, values[where])[:, inputs]
        np.testing.assert_array_equal(found.values(library), want)


def test_a_scheme_of_the_same_groups_multiplies_with_the_codes_themselves() -> None:
    w, values = matrix(40, 64, Kind())
    x = np.random.default_rng(0).standard_normal((3, 64), dtype=np.float32)
    want = x @ values.T
    np.testing.assert_allclose(QuantisedLinear(parse_scheme("int4-wo:32"))(x, w), want, rtol=1e-5, atol=1e-5)
    assert np.abs(QuantisedLinear(parse_scheme("int4-wo:64"))(x, w) - want).max() > 1e-3


def test_what_is_held_is_decided_by_checkpoint_setting_and_kernels(folders: dict[str, Path]) -> None:
    def held(name: str, dtype: str = "bfloat16", scheme: str = "none", native: bool = True, exact: bool = True) -> Any:
        c = open_model(folders[name])
        found = hold_weights(
            c.spec,
            dtype,
            parse_scheme(scheme),
            c.stored,
            traits=BACKENDS.traits("native" if native else "ref"),
            exact=exact,
        )
        return found.of("layers.1.down"), found.of("lm_head")

    symmetric = MatrixFormat("uint", 4, (Shared("float16", 1, 32),), offset=8)
    asymmetric = MatrixFormat("uint", 4, (Shared("float16", 1, 32),), (Shared("uint4", 1, 32),))
    assert held("symmetric") == (symmetric, plain("bfloat16"))
    assert held("awq", native=False) == (asymmetric, plain("bfloat16"))
    assert held("awq") == held("awq", exact=False) == (asymmetric, plain("bfloat16")), "whatever the dtype is"
    assert held("act-order")[0] == msgspec.structs.replace(symmetric, ordered=True)
    assert held("8 bits")[0].bits == 8
    assert held("groups of 8") == (plain("float32"), plain("bfloat16")), "no panels have such groups: exact values"
    assert held("groups of 8", exact=False) == (plain("bfloat16"), plain("bfloat16")), "somebody gave a dtype"
    assert held("whole rows, act-order", native=False)[0].ordered is False, "one group has no order"
    rounded = parse_scheme("int4-wo").format
    assert held("symmetric", scheme="int4-wo") == (rounded, rounded), "groups of 64, not the checkpoint's"
    assert held("symmetric", scheme="int4-w4a8:32") == (symmetric, parse_scheme("int4-w4a8:32").format)
    assert held("awq", scheme="int8-wo") == (parse_scheme("int8-wo").format,) * 2


@pytest.mark.parametrize("name", specs.ALL)
@pytest.mark.parametrize("scheme", ["none", "int4-wo:32"])
def test_only_what_rows_are_multiplied_with_or_looked_up_in_stays_codes(name: str, scheme: str) -> None:
    """Whatever a checkpoint stores as codes: the halves of a latent projection, a convolution are values, and a table
    whose codes a scheme rounds is values beside these."""
    spec = specs.make(name)[0]
    symmetric = MatrixFormat("uint", 4, (Shared("float16", 1, 32),), offset=8)
    stored = {n: symmetric for n, shape in weight_shapes(spec).items() if len(shape) == 2}
    held = hold_weights(spec, "bfloat16", parse_scheme(scheme), stored, traits=BACKENDS.traits("ref"), exact=True)
    codes = {n for n, format in held.matrices.items() if format == symmetric}
    if scheme != "none":
        assert codes == rounded_matrices(spec).keys() - {"embed"}
        assert held.beside == (("embed",) if spec.tie_embeddings else ())
    else:
        tables = {"embed", "ple_embed"} & weight_shapes(spec).keys()
        assert codes == {*tables, *row_matrices(spec)}


def test_rows_cannot_be_looked_up_in_panels_of_an_order() -> None:
    spec = specs.make("llama_gqa")[0]
    ordered = MatrixFormat("uint", 4, (Shared("float16", 1, 32),), offset=8, ordered=True)
    for native, count in ((True, 0), (False, 1)):
        traits = BACKENDS.traits("native" if native else "ref")
        held = hold_weights(spec, "bfloat16", NONE, {"embed": ordered}, traits=traits, exact=True)
        assert len(held.matrices) == count


def test_what_is_held_can_be_sent(folders: dict[str, Path]) -> None:
    checkpoint = open_model(folders["asymmetric act-order"])
    held = hold_weights(checkpoint.spec, "float16", NONE, checkpoint.stored, traits=BACKENDS.traits("ref"), exact=True)
    assert msgspec.json.decode(msgspec.json.encode(held), type=HeldWeights) == held
    assert len(held.matrices) == 14


def test_bytes_by_format_are_all_bytes(folders: dict[str, Path]) -> None:
    plan = plan_of(from_kwargs(model=str(folders["awq"]), ops="native"), MACHINE)
    spec = open_model(folders["awq"]).spec
    by_format = plan.held.bytes_by_format(spec)
    matrices = {name: shape for name, shape in row_matrices(spec).items() if name in plan.held.matrices}
    plain = spec.num_params - sum(rows * columns for rows, columns in matrices.values())
    assert by_format == {
        "4-bit codes, a float16 scale per 32 inputs, zero points": sum(
            plan.held.matrix_bytes(name, shape) for name, shape in matrices.items()
        ),
        plan.dtype: plain * DTYPE_BYTES[plan.dtype],
    }
    assert sum(by_format.values()) == plan.weight_bytes
    rounded = plan_of(from_kwargs(model=str(folders["awq"]), ops="native", quantization="int8-wo"), MACHINE)
    assert sum(rounded.held.bytes_by_format(spec).values()) == rounded.weight_bytes
    dense = HeldWeights("float16")
    assert dense.bytes_by_format(spec) == {"float16": 2 * spec.num_params}


def test_a_plan_of_config_json_alone_is_that_of_the_checkpoint(folders: dict[str, Path], tmp_path: Path) -> None:
    for name, folder in folders.items():
        (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
        spec, stored, *_ = read_model(tmp_path)
        checkpoint = open_model(folder)
        assert (spec, dict(stored)) == (checkpoint.spec, checkpoint.stored), name


def test_the_plan_says_what_is_held_how_and_what_it_costs(folders: dict[str, Path]) -> None:
    def said(name: str, **more: Any) -> list[tuple[Any, str]]:
        plan = plan_of(from_kwargs(model=str(folders[name]), **more), MACHINE)
        return [(d.value, d.why) for d in plan.decisions if d.name == "weights"]

    ((value, why),) = said("symmetric", ops="ref")
    assert value == "4-bit codes, a float16 scale per 32 inputs"
    assert "14 matrices" in why
    assert "neither decoded nor rounded" in why
    ((value, why),) = said("awq", ops="native")
    assert value == "4-bit codes, a float16 scale per 32 inputs, zero points"
    ((value, why),) = said("groups of 8", ops="native")
    assert value == "float32"
    assert "per 8 inputs, zero points" in why
    assert "a dtype of 16 bits" in why
    ((value, why),) = said("groups of 8", ops="native", dtype="bfloat16")
    assert value == "bfloat16"
    assert "rounded" in why
    assert len(said("symmetric", quantization="int8-wo", ops="native")) == 1
    dense = folders["awq"].with_name("awq-dense")
    assert not [d for d in plan_of(from_kwargs(model=str(dense)), MACHINE).decisions if d.name == "weights"]


def test_values_that_do_not_fit_are_refused_with_the_dtype_that_does(folders: dict[str, Path]) -> None:
    small = Machine(num_cores=1, memory_bytes=180_000, available_bytes=180_000)
    with pytest.raises(
        CapacityError, match=r"\(14 matrices of float32; the rest float16\).*use dtype float16"
    ) as refused:
        plan_of(from_kwargs(model=str(folders["groups of 8"]), ops="native"), small)
    assert refused.value.field == "dtype"
    wide = Machine(num_cores=1, memory_bytes=1 << 34, available_bytes=1 << 34)
    plan = plan_of(from_kwargs(model=str(folders["groups of 8"]), ops="native", dtype="float16"), wide)
    assert plan.weight_bytes < 180_000


def test_matrices_of_different_codes_are_not_one(folders: dict[str, Path]) -> None:
    symmetric, ordered = kept(folders["symmetric"]), kept(folders["act-order"])
    q, k, v = (symmetric[f"layers.0.{n}"] for n in "qkv")
    assert alike(q, k)
    assert not alike(q, symmetric["lm_head"])
    assert not alike(q, ordered["layers.0.q"])
    assert not alike(ordered["layers.0.q"], ordered["layers.0.k"]), "each has an order of its own"
    assert alike(ordered["layers.0.q"], ordered["layers.0.q"])
    assert not alike(v, kept(folders["awq"])["layers.0.v"])


# --- parts of stored matrices


@pytest.mark.parametrize("cut", [
    Cut("x", (12, 6), ((4, 9),)), Cut("x", (12, 6), ((0, 12, 2), (0, 6))), Cut("x", (12, 6)),
    Cut("x", (12, 6), ((0, 2), 1), view=(2, 3, 2, 6)),
    Cut("x", (12, 6), (1, (0, 3)), view=(2, 3, 2, 6), axes=(1, 0, 2)),
    Cut("x", (12, 6), view=(3, 4, 6), axes=(1, 0, 2)), Cut("x", (2, 6, 6), (1,)),
    Cut("x", (3, 2, 2, 6), (2, 1)), Cut("x", (3, 4, 6), (1, (1, 4, 2), (0, 6))),
])  # fmt: skip
def test_a_part_of_a_matrix_of_codes_is_a_choice_of_its_rows(cut: Cut) -> None:
    assert is_rows(cut)
    table = np.arange(12)[:, None] * np.ones(6, int)
    want = apply_cut(table.reshape(cut.shape), cut).reshape(-1, 6)[:, 0]
    np.testing.assert_array_equal(rows_of(cut), want)


@pytest.mark.parametrize("cut", [
    Cut("x", (12, 6), ((0, 12), (0, 3))), Cut("x", (12, 6), axes=(1, 0)), Cut("x", (12, 6), view=(24, 3)),
    Cut("x", (12, 6), ((0, 12), 2)), Cut("x", (12, 6), view=(3, 4, 6), axes=(2, 0, 1)),
])  # fmt: skip
def test_no_other_part_is(cut: Cut) -> None:
    assert not is_rows(cut)


FAMILIES: dict[str, dict[str, Any]] = {
    "rows of q, k and v": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 48,
        "max_position_embeddings": 64, "original_max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "pad_token_id": 0, "dtype": "float32",
    },
    "stored [in, out]": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 4,
        "n_positions": 64, "vocab_size": 48, "dtype": "float32",
    },
    "heads take turns": {
        "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 48, "max_position_embeddings": 64,
        "rotary_pct": 0.25, "dtype": "float32",
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", [Kind(), Kind(symmetric=False, ordered=True), Kind("awq")])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_one_rule_finds_the_codes_of_every_family(tmp_path: Path, name: str, kind: Kind) -> None:
    config = FAMILIES[name]
    family = find_family(config)
    spec = family.spec(config)
    rng = np.random.default_rng(5)
    shapes = weight_shapes(spec)
    dense: dict[str, Any] = {}
    stored: dict[str, Any] = {}
    for logical, place in family.weight_map(spec).items():
        at, shape = (place.name, place.shape) if isinstance(place, Cut) else (place, shapes[logical])
        if at in dense:
            continue
        turned = isinstance(place, Cut) and place.axes == (1, 0)
        if len(shape) == 2 and logical.startswith("layers."):
            parts, values = coded(rng, *(shape[::-1] if turned else shape), kind)
            stored |= {f"{at.removesuffix('weight')}{part}": array for part, array in parts.items()}
            dense[at] = np.ascontiguousarray(values.T if turned else values)
        else:
            stored[at] = dense[at] = rng.standard_normal(shape, dtype=np.float32)
    found = []
    for folder, tensors, more in (("a", dense, {}), ("b", stored, {"quantization_config": kind.config})):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(config | more))
        save_file(tensors, tmp_path / folder / "model.safetensors")
        checkpoint = open_model(tmp_path / folder)
        found.append(load_weights(checkpoint, checkpoint.spec, "float32"))
    assert len(checkpoint.stored) >= 4
    for logical, want in found[0].items():
        np.testing.assert_array_equal(found[1][logical], want, err_msg=logical)
    for logical, w in kept(tmp_path / "b").items():
        if isinstance(w, StoredMatrix):
            np.testing.assert_array_equal(w.values(1, 7), found[0][logical][1:7], err_msg=logical)
