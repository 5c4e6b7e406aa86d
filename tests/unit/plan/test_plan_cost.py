"""FLOPs and bytes against hand counts and torch's counter; the roofline timer against its own formula and laws."""

from __future__ import annotations

import timeit
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import ConfigError
from penstock.core.model_spec import (
    Attention,
    FeedForward,
    Latent,
    Layer,
    Mixer,
    ModelSpec,
    Recurrent,
    Rope,
    SharedBlock,
)
from penstock.core.protocols import StepTimer
from penstock.core.step_shape import EMPTY, StepShape
from penstock.plan.cost import RooflineTimer
from penstock.plan.devices import PRESETS, Device, device_from, device_preset, find_device, read_device
from penstock.plan.flops import model_work
from penstock.plan.operators import operators
from tests import specs

ROUND = Device(
    name="round",
    flops_per_s={"float32": 1e9, "bfloat16": 4e9},
    read_bytes_per_s=1e8,
    host_copy_bytes_per_s=5e7,
    step_overhead_s=0.25,
)
E, F, V, H, G, D = 32, 64, 100, 4, 2, 8
FULL = Attention(num_heads=H, num_kv_heads=G, head_dim=D, rope=Rope(dim=D))


def model(*mixers: Mixer, **changes: Any) -> ModelSpec:
    layers = tuple(Layer(mixer=m, ffn=FeedForward(width=F)) for m in mixers or (FULL, FULL))
    fields: dict[str, Any] = {"family": "test", "vocab_size": V, "hidden_size": E, "layers": layers}
    return ModelSpec(**(fields | changes))


# --- FLOPs and bytes


def test_a_decode_step_by_hand() -> None:
    """Two sequences of 10 and 20 tokens get one token each, in float32 with two layers."""
    step = model_work(model(), "float32").step(EMPTY.plus(9, 1, 1).plus(19, 1, 1))
    per_layer = E * H * D + 2 * E * G * D + H * D * E + 3 * E * F
    assert step.linear_flops == 2 * 2 * (2 * per_layer)
    assert step.head_flops == 2 * 2 * E * V
    assert step.mixer_flops == 2 * (4 * H * D) * 30
    assert step.kv_read_bytes == 30 * 2 * (2 * G * D * 4)
    assert step.kv_write_bytes == 2 * 2 * (2 * G * D * 4)
    assert step.state_bytes == 0
    norms = 5 * E
    assert step.linear_bytes - 2 * _activations(per_token_layers=2) == 4 * (2 * per_layer + norms)
    assert step.head_bytes == 4 * E * V + 2 * (3 * E * 4 + V * 4)


def test_a_block_that_layers_share_is_held_once_and_used_by_each() -> None:
    """Three layers of Mamba-2 read what blocks add: two of them the same block."""
    spec, _ = specs.make("shared")
    blocks = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, SharedBlock)]
    apart = [msgspec.structs.replace(m, block=n) for n, m in enumerate(blocks)]
    layers = tuple(
        msgspec.structs.replace(layer, mixer=apart.pop(0)) if isinstance(layer.mixer, SharedBlock) else layer
        for layer in spec.layers
    )
    three = msgspec.structs.replace(spec, layers=layers)
    shared, separate = (model_work(one, "float32") for one in (spec, three))
    matrices = sum(prod(shape) for shape in blocks[0].shared_shapes(E).values() if len(shape) == 2)
    assert three.num_params - spec.num_params == matrices + 3 * E  # and two norms
    assert separate.linear_flops_per_token == shared.linear_flops_per_token
    assert separate.weight_bytes - shared.weight_bytes == 4 * 3 * E


def _activations(per_token_layers: int) -> int:
    """Bytes of one token in float32: inputs and outputs of products, norms (4E), sums (6E), q and what o reads."""
    products = (E + H * D) + 2 * (E + G * D) + (H * D + E) + 2 * (E + F) + (F + E)
    return 4 * (per_token_layers * (products + 10 * E + 2 * H * D) + 2 * E)


def test_a_prefill_counts_causal_pairs_and_one_logit_row() -> None:
    work = model_work(model(), "bfloat16")
    step = work.step(EMPTY.plus(0, 10, 1))
    assert step.mixer_flops == 2 * (4 * H * D) * 55
    assert step.head_flops == 2 * E * V
    assert step.kv_read_bytes == 10 * 2 * (2 * G * D * 2)
    assert step.linear_flops == 10 * work.linear_flops_per_token


def test_weights_are_read_once_whatever_the_batch_and_the_head_only_for_logits() -> None:
    work = model_work(model(), "float32")
    one, many = (work.step(StepShape(num_tokens=n)) for n in (1, 50))
    assert many.linear_bytes - one.linear_bytes == 49 * work.linear_bytes_per_token
    assert one.head_bytes == 0
    assert work.step(EMPTY) == (0,) * 8


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_is_read_but_the_embedding_table(tied: bool) -> None:
    spec = model(tie_embeddings=tied)
    work = model_work(spec, "bfloat16")
    not_read = 0 if tied else V * E
    assert work.weight_bytes + work.head_weight_bytes == 2 * (spec.num_params - not_read)
    assert work.linear_flops_per_token + work.head_flops_per_logit == 2 * (spec.num_params - not_read - 5 * E)


def test_the_cache_may_have_a_dtype_of_its_own() -> None:
    a, b = (model_work(model(), "float32", kv).step(EMPTY.plus(0, 8)) for kv in ("float32", "bfloat16"))
    assert (a.kv_read_bytes, a.kv_write_bytes) == (2 * b.kv_read_bytes, 2 * b.kv_write_bytes)
    assert a.linear_bytes == b.linear_bytes
    with pytest.raises(KeyError):
        model_work(model(), "int3")


def test_latent_attention_works_on_the_latent() -> None:
    m = Latent(num_heads=4, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=6, rope=Rope(dim=4))
    step = model_work(model(m), "float32").step(EMPTY.plus(6, 1))
    assert step.mixer_flops == 7 * (2 * 4 * (16 + 4) + 2 * 4 * 16)
    assert step.kv_read_bytes == 7 * (16 + 4) * 4
    assert model_work(model(m), "float32").linear_flops_per_token == 2 * (
        4 * 12 * E + 20 * E + 4 * (8 + 6) * 16 + E * 4 * 6 + 3 * E * F
    )


def test_a_recurrent_state_costs_the_same_at_every_length() -> None:
    work = model_work(model(Recurrent(num_heads=3, key_dim=5, value_dim=7)), "bfloat16")
    short, long = work.step(EMPTY.plus(0, 1)), work.step(EMPTY.plus(900, 1))
    assert short == long
    assert short.mixer_flops == 5 * 3 * 5 * 7
    assert short.state_bytes == 2 * 3 * 5 * 7 * 4, "read and written, in float32"
    assert short.kv_read_bytes == 0


def test_a_window_bounds_what_is_read() -> None:
    windowed = Attention(num_heads=H, num_kv_heads=G, head_dim=D, rope=Rope(dim=D), window=16)
    full, both = model_work(model(FULL), "float32"), model_work(model(FULL, windowed), "float32")
    for start in (0, 3, 15, 40, 1000):
        shape = EMPTY.plus(start, 1)
        alone, sum_ = full.step(shape), both.step(shape)
        seen = min(start + 1, 16)
        assert sum_.mixer_flops - alone.mixer_flops == 4 * H * D * seen
        assert sum_.kv_read_bytes - alone.kv_read_bytes == 2 * G * D * 4 * seen


@pytest.mark.parametrize(("tokens", "cached"), [(24, 0), (1, 40)], ids=["prefill", "decode"])
def test_flops_agree_with_torch_on_a_llama(tokens: int, cached: int) -> None:
    """Torch counts the products that are really made: eager attention also makes the masked half of the pairs."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    from penstock.families.llama import Llama

    fields = {
        "vocab_size": 300, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    oracle = LlamaForCausalLM._from_config(LlamaConfig(**fields), attn_implementation="eager").eval()
    cache = DynamicCache(config=oracle.config)
    with torch.inference_mode():
        if cached:
            oracle(torch.ones(1, cached, dtype=torch.long), past_key_values=cache, use_cache=True)
        with FlopCounterMode(display=False) as counter:
            oracle(torch.ones(1, tokens, dtype=torch.long), past_key_values=cache, use_cache=True)
    shape = StepShape(tokens, 1, cached + tokens, tokens * (cached + tokens), tokens)
    step = model_work(Llama().spec(fields), "float32").step(shape)
    assert step.flops == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert step.mixer_flops > 0.02 * step.flops, "attention must matter, or an error in it would not show"


@pytest.mark.parametrize("name", specs.ALL)
def test_K11_operators_add_up_to_the_step_whatever_the_layers_are(name: str) -> None:
    spec, _ = specs.make(name)
    work = model_work(spec, "bfloat16")
    for shape in (EMPTY.plus(0, 37, 1), EMPTY.plus(9, 1, 1).plus(19, 1, 1), EMPTY.plus(30, 5)):
        step, found = work.step(shape), operators(spec, work, shape, device_preset("h100-sxm"), "bfloat16")
        assert (sum(o.flops for o in found), sum(o.num_bytes for o in found)) == (step.flops, step.num_bytes)
        assert all(o.flops >= 0 and o.num_bytes >= 0 for o in found)
        others = {"attention", "head", "experts"}
        assert work.experts or sum(o.flops for o in found if o.name not in others) == step.linear_flops
        assert len({o.name for o in found}) == len(found)


def test_K11_an_operator_by_hand() -> None:
    """gate: 3 tokens of a prompt through [F, E] in two layers, on a device of 1 GFLOP/s and 100 MB/s."""
    spec = model()
    work = model_work(spec, "float32")
    found = {o.name: o for o in operators(spec, work, EMPTY.plus(0, 3, 1), ROUND, "float32")}
    gate = found["gate"]
    assert gate.flops == 2 * (2 * 3 * F * E)
    assert gate.num_bytes == 2 * 4 * (F * E + 3 * (F + E))
    assert gate.intensity == gate.flops / gate.num_bytes
    assert (gate.limit, gate.seconds) == ("memory", gate.num_bytes / 1e8)
    assert set(found) == {"q", "k", "v", "o", "gate", "up", "down", "attention", "norms, sums", "head"}
    many = {o.name: o for o in operators(spec, work, EMPTY.plus(0, 3000, 1), ROUND, "float32")}
    assert many["gate"].limit == "compute", "the more rows share a matrix, the more is computed for a byte"
    assert many["gate"].seconds == many["gate"].flops / 1e9


# --- the roofline timer


def test_a_step_is_overhead_and_the_slower_of_computing_and_reading_in_each_phase() -> None:
    check_by_hand(model(), EMPTY.plus(99, 1, 1).plus(0, 200, 1))


@pytest.mark.parametrize("name", specs.ALL)
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_experts_that_tokens_choose_are_read(name: str, tokens: int) -> None:
    check_by_hand(specs.make(name)[0], EMPTY.plus(99, 1, 1).plus(0, tokens, 1))


def check_by_hand(spec: ModelSpec, shape: StepShape) -> None:
    timer: StepTimer = RooflineTimer(spec, ROUND, dtype="float32")
    work = model_work(spec, "float32").step(shape)
    by_hand = 0.25 + sum(
        max(flops / 1e9, num_bytes / 1e8)
        for flops, num_bytes in (
            (work.linear_flops, work.linear_bytes),
            (work.head_flops, work.head_bytes),
            (work.mixer_flops, work.mixer_bytes),
        )
    )
    assert timer.step_s(shape) == pytest.approx(by_hand, rel=1e-12)
    assert 0.25 + sum(phase.seconds for phase in timer.phases(shape)) == pytest.approx(by_hand, rel=1e-12)
    assert timer.copy_s(10**8) == 2.0
    assert timer.step_s(EMPTY) == 0.25
    assert timer.name == "roofline"


def test_overhead_per_layer() -> None:
    device = device_from({**_plain(), "layer_overhead_s": 0.5})
    assert RooflineTimer(model(FULL, FULL, FULL), device, dtype="float32").step_s(EMPTY) == 0.25 + 1.5


def test_decode_is_bound_by_memory_and_prefill_by_computing() -> None:
    spec = model(*[Attention(num_heads=32, num_kv_heads=8, head_dim=128, rope=Rope(dim=128))] * 2, hidden_size=4096)
    timer = RooflineTimer(spec, device_preset("h200"))
    assert {phase.limit for phase in timer.phases(EMPTY.plus(2000, 1, 1))} == {"memory"}
    assert timer.phases(EMPTY.plus(0, 4096))[0].limit == "compute"


def test_a_dtype_the_device_has_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="round has no figure for dtype float16; use one of: float32, bfloat16"):
        RooflineTimer(model(), ROUND, dtype="float16")


WINDOWED = Attention(num_heads=H, num_kv_heads=G, head_dim=D, window=5)
MODELS = [specs.make(name)[0] for name in specs.ALL] + [model(FULL, WINDOWED), model(WINDOWED)]
TIMERS = [RooflineTimer(spec, d, dtype="float32") for spec in MODELS for d in (ROUND, *PRESETS.values())]
SHAPES = st.builds(StepShape, *[st.integers(0, top) for top in (4096, 256, 10**6, 10**9, 4096)])


@given(timer=st.sampled_from(TIMERS), shape=SHAPES, grown=st.sampled_from(StepShape._fields), by=st.integers(1, 10**6))
def test_time_grows_with_every_field_and_the_phases_add_up(
    timer: RooflineTimer, shape: StepShape, grown: str, by: int
) -> None:
    seconds = timer.step_s(shape)
    assert timer.step_s(shape._replace(**{grown: getattr(shape, grown) + by})) >= seconds
    phases = timer.phases(shape)
    assert timer.overhead_s + sum(phase.seconds for phase in phases) == pytest.approx(seconds, rel=1e-9)
    assert [phase.name for phase in phases] == ["layers", "head", "attention"]


def test_asking_costs_about_a_microsecond_whatever_the_model() -> None:
    timer = RooflineTimer(model(*[FULL] * 120), device_preset("h200"))
    shape = EMPTY.plus(500, 100, 1)
    best = min(timeit.repeat(lambda: timer.step_s(shape), number=2000, repeat=7)) / 2000
    print(f"step_s: {best * 1e6:.2f} us")
    assert best < 10e-6, "about 0.7 us on a quiet machine"


# --- devices


def test_every_preset_is_complete_and_names_its_sources() -> None:
    assert set(PRESETS) == {"h200", "h100-sxm", "a100-80g", "l4", "cpu-2core", "cpu-ref"}
    for name, device in PRESETS.items():
        assert device.name == name
        assert device_preset(name) is device
        for field in ("flops_per_s", "read_bytes_per_s", "memory_bytes", "host_copy_bytes_per_s", "step_overhead_s"):
            assert device.sources[field]
        assert device_from({f: getattr(device, f) for f in Device.__struct_fields__}) == device


def test_an_unknown_device_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'h300'; choose one of: a100-80g, cpu-2core, .* or name a \.toml"):
        find_device("h300")


def _plain() -> dict[str, Any]:
    return {f: getattr(ROUND, f) for f in ("name", "read_bytes_per_s", "host_copy_bytes_per_s", "step_overhead_s")} | {
        "flops_per_s": {"float32": 1e9, "bfloat16": 4e9}
    }


TOML = """
name = "mine"
read_bytes_per_s = 1e11
memory_bytes = 16_000_000_000
host_copy_bytes_per_s = 1e10
step_overhead_s = 0
[flops_per_s]
bfloat16 = 1e13
"""


def test_a_device_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "d.toml").write_text(TOML)
    (tmp_path / "d.json").write_text(
        '{"name": "mine", "read_bytes_per_s": 1e11, "memory_bytes": 16000000000, "host_copy_bytes_per_s": 1e10, '
        '"step_overhead_s": 0, "flops_per_s": {"bfloat16": 1e13}}'
    )
    device = find_device(str(tmp_path / "d.toml"))
    assert device == read_device(tmp_path / "d.json")
    assert (device.name, device.memory_bytes, device.flops("bfloat16")) == ("mine", 16 * 10**9, 1e13)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"read_bytes_per_s": 0}, "read_bytes_per_s must be a number above 0"),
        ({"memory_bytes": -1}, "memory_bytes must be a number above 0"),
        ({"host_copy_bytes_per_s": float("inf")}, "host_copy_bytes_per_s must be a number above 0"),
        ({"step_overhead_s": -1e-9}, "step_overhead_s must be at least 0"),
        ({"layer_overhead_s": float("nan")}, "layer_overhead_s must be at least 0"),
        ({"flops_per_s": {}}, "names no dtype; known ones: float32"),
        ({"flops_per_s": {"int3": 1e9}}, "'int3'; known ones: float32"),
        ({"flops_per_s": {"float32": 0}}, "flops_per_s.float32 must be a number above 0"),
        ({"flops_per_s": 7}, "flops_per_s"),
        ({"bandwidth": 7}, "bandwidth"),
    ],
)
def test_figures_that_make_no_sense_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        device_from(_plain() | change)


def test_files_that_are_no_devices_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("name = ")
    (tmp_path / "bad.json").write_text("[")
    (tmp_path / "part.toml").write_text('name = "x"')
    for name, says in (("bad.toml", "TOML"), ("bad.json", "JSON"), ("part.toml", "missing"), ("no.toml", "read")):
        with pytest.raises(ConfigError, match=says):
            read_device(tmp_path / name)
