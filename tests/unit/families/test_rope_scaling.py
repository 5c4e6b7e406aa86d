"""Other positions than the checkpoint's: formulas, lengths, factors per head, refusals (G05, G06, G07, G09, G37)."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.base.errors import ConfigError
from penstock.config import ModelConfig, from_kwargs
from penstock.core.model_spec import Alibi, Attention, FeedForward, Latent, Layer, ModelSpec, Rope
from penstock.families.stretch import stretch_decision, stretched
from penstock.ops.ref.rotary import rope, rope_angles, rope_frequencies, rope_table

TRAINED, DIM, THETA = 256, 16, 10000.0


def model(*mixers: Any, max_position: int = TRAINED) -> ModelSpec:
    layers = tuple(Layer(mixer=m, ffn=FeedForward(width=32)) for m in mixers or (attention(), attention()))
    return ModelSpec(family="made-up", vocab_size=64, hidden_size=32, layers=layers, max_position=max_position)


def attention(how: Rope | None = Rope(dim=DIM, theta=THETA), **more: Any) -> Attention:  # noqa: B008
    return Attention(num_heads=4, num_kv_heads=2, head_dim=DIM, rope=how, **more)


def after(scaling: dict[str, Any] | None, spec: ModelSpec | None = None, theta: float | None = None) -> ModelSpec:
    text = None if scaling is None else json.dumps(scaling)
    return stretched(spec or model(), ModelConfig(model="m", rope_scaling=text, rope_theta=theta))


def rope_of(spec: ModelSpec, layer: int = 0) -> Rope:
    found = spec.layers[layer].mixer.rope  # type: ignore[union-attr]
    assert found is not None
    return found


def frequencies(scaling: dict[str, Any], length: int = 2 * TRAINED) -> np.ndarray:
    return rope_frequencies(rope_of(after(scaling)), length)


PLAIN = rope_frequencies(Rope(dim=DIM, theta=THETA), TRAINED)

# --- formulas


def test_G05_linear_divides_every_position() -> None:
    np.testing.assert_array_equal(frequencies({"rope_type": "linear", "factor": 4}), PLAIN / 4)
    stretched_table = rope_table(rope_of(after({"rope_type": "linear", "factor": 2.0})), 2 * TRAINED)
    np.testing.assert_array_equal(stretched_table[:, ::2], rope_table(Rope(dim=DIM, theta=THETA), TRAINED))


def test_G06_ntk_changes_the_base_so_that_only_the_slowest_pair_is_stretched_whole() -> None:
    got = frequencies({"rope_type": "ntk", "factor": 4.0})
    np.testing.assert_allclose(got, (THETA * 4.0 ** (DIM / (DIM - 2))) ** -(np.arange(0, DIM, 2) / DIM), rtol=1e-12)
    assert got[0] == PLAIN[0] == 1.0
    assert got[-1] == pytest.approx(PLAIN[-1] / 4, rel=1e-12)
    assert (np.diff(PLAIN / got) > 0).all()


def test_G06_dynamic_equals_plain_up_to_the_trained_length() -> None:
    how = rope_of(after({"rope_type": "dynamic", "factor": 4.0}))
    plain = Rope(dim=DIM, theta=THETA)
    for length in (1, TRAINED - 1, TRAINED):
        np.testing.assert_array_equal(rope_table(how, length), rope_table(plain, length))
    longer = rope_frequencies(how, 2 * TRAINED)
    np.testing.assert_allclose(longer[-1], PLAIN[-1] / (4.0 * 2 - 3.0), rtol=1e-12)


@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0, 32.0])
def test_G07_yarn_temperature_and_ramp(factor: float) -> None:
    how = rope_of(after({"rope_type": "yarn", "factor": factor, "beta_fast": 8, "beta_slow": 1, "truncate": False}))
    assert how.attention_factor == pytest.approx(0.1 * math.log(factor) + 1.0)
    assert rope_table(how, 4)[0, 0].tolist() == [np.float32(how.attention_factor)] * (DIM // 2)
    got = rope_frequencies(how, int(factor) * TRAINED)
    turns = TRAINED * PLAIN / (2 * math.pi)
    np.testing.assert_allclose(got[turns > 8], PLAIN[turns > 8], rtol=1e-12)
    np.testing.assert_allclose(got[turns < 1], PLAIN[turns < 1] / factor, rtol=1e-12)
    between = (turns > 1) & (turns < 8)
    assert between.any()
    assert ((got[between] <= PLAIN[between]) & (got[between] >= PLAIN[between] / factor)).all()
    given = rope_of(after({"rope_type": "yarn", "factor": factor, "attention_factor": 1.5}))
    assert given.attention_factor == 1.5


@pytest.mark.parametrize("kind", ["linear", "ntk", "yarn"])
def test_G05_G06_G07_a_factor_of_one_changes_nothing(kind: str) -> None:
    how = rope_of(after({"rope_type": kind, "factor": 1}))
    np.testing.assert_array_equal(rope_table(how, TRAINED), rope_table(Rope(dim=DIM, theta=THETA), TRAINED))


def test_G09_longrope_divides_each_pair_by_its_own_number_behind_the_first_positions() -> None:
    factors = [1.0 + i / 4 for i in range(DIM // 2)]
    scaling = {"rope_type": "longrope", "factor": 4, "long_factor": factors, "start_tokens": 5}
    how = rope_of(after(scaling))
    assert how.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(TRAINED)))
    np.testing.assert_allclose(rope_frequencies(how, 4 * TRAINED), PLAIN / factors, rtol=1e-12)
    table = rope_table(how, 4 * TRAINED) / how.attention_factor
    plain = rope_table(Rope(dim=DIM, theta=THETA), TRAINED)
    np.testing.assert_allclose(table[:, :5], plain[:, :5], atol=1e-6)
    np.testing.assert_allclose(table[0, 5:40], np.cos(np.arange(5, 40)[:, None] * (PLAIN / factors)), atol=1e-6)
    # Up to the trained length: the short factors, one each unless they are given, and no positions apart.
    np.testing.assert_allclose(rope_table(how, TRAINED) / how.attention_factor, plain, atol=1e-6)


def test_G37_each_head_sees_distances_divided_by_its_factor() -> None:
    how = Rope(dim=DIM, theta=THETA, head_factors=(1.25, 2.0))
    table = rope_table(how, 64)
    assert table.shape == (2, 64, 2, DIM // 2)
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((1, 4, DIM)).astype(np.float32), rng.standard_normal((1, 2, DIM)).astype(np.float32)

    def at(x: np.ndarray, position: int) -> np.ndarray:
        return rope(x, rope_angles(np.array([position], np.int32), table), False)[0]

    for head in range(4):
        group = head // 2
        plain = rope_table(Rope(kind="linear", dim=DIM, theta=THETA, factor=how.head_factors[group]), 64)
        for p, distance in ((0, 0), (3, 8), (20, 40)):
            got = np.dot(at(q, p + distance)[head], at(k, p)[group])
            moved = rope(q[:, head : head + 1], rope_angles(np.array([distance], np.int32), plain), False)[0, 0]
            assert got == pytest.approx(float(np.dot(moved, k[0, group])), abs=1e-4)


def test_G37_factors_of_one_are_the_plain_rotation_bit_for_bit() -> None:
    scaling = {"rope_type": "default", "head_factors": [[1.0, 1.0], [1, 1]]}
    how = rope_of(after(scaling))
    assert how.head_factors == (1.0, 1.0)
    x = np.random.default_rng(1).standard_normal((30, 4, DIM)).astype(np.float32)
    positions = np.arange(30, dtype=np.int32)
    got = rope(x, rope_angles(positions, rope_table(how, 30)), False)
    want = rope(x, rope_angles(positions, rope_table(Rope(dim=DIM, theta=THETA), 30)), False)
    np.testing.assert_array_equal(got, want)


# --- lengths, and which layers


def test_the_longest_context_grows_by_the_factor() -> None:
    for kind in ("linear", "ntk", "dynamic", "yarn"):
        assert after({"rope_type": kind, "factor": 2.5}).max_position == 640
    assert after({"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 128}).max_position == 256
    assert after({"rope_type": "default", "head_factors": [[1, 2]] * 2}).max_position == TRAINED
    assert after(None) is not after({"rope_type": "linear", "factor": 1})
    own = model()
    assert stretched(own, ModelConfig(model="m")) is own


def test_theta_alone_changes_theta_alone() -> None:
    yarn = Rope(kind="yarn", dim=DIM, factor=2.0, original_max_position=128)
    got = after(None, model(attention(yarn)), theta=5e5)
    assert rope_of(got) == msgspec.structs.replace(yarn, theta=5e5)
    assert got.max_position == TRAINED
    assert rope_of(after({"rope_type": "linear", "factor": 2, "rope_theta": 500})).theta == 500
    assert rope_of(after({"rope_type": "linear", "factor": 2}, theta=500)).theta == 500


def test_layers_that_look_back_a_bounded_way_keep_their_own_kind() -> None:
    local, far = Rope(dim=DIM, theta=100.0), Rope(dim=DIM, theta=1e6)
    got = after({"rope_type": "linear", "factor": 2}, model(attention(local, window=8), attention(far)))
    assert rope_of(got) == local
    assert rope_of(got, 1) == Rope(kind="linear", dim=DIM, theta=1e6, factor=2.0)
    same = after({"rope_type": "linear", "factor": 2}, model(attention(far, window=8), attention(far)))
    assert rope_of(same) == rope_of(same, 1)
    mixed = after({"rope_type": "linear", "factor": 2}, model(attention(None), attention(far)))
    assert mixed.layers[0].mixer == attention(None)
    assert rope_of(mixed, 1).kind == "linear"


def test_yarn_of_latent_attention_cools_whole_scores() -> None:
    latent = Latent(num_heads=2, kv_rank=8, nope_dim=8, rope_dim=8, v_dim=8, rope=Rope(dim=8, interleaved=True))
    got = after({"rope_type": "yarn", "factor": 4}, model(latent)).layers[0].mixer
    assert isinstance(got, Latent)
    assert got.scale == pytest.approx(16**-0.5 * (0.1 * math.log(4) + 1) ** 2)
    assert (got.rope.kind, got.rope.attention_factor, got.rope.interleaved) == ("yarn", 1.0, True)


def test_the_decision_says_what_was_changed() -> None:
    own = model()
    (made,) = stretch_decision(own, after({"rope_type": "yarn", "factor": 4}, own))
    assert (made.name, made.value) == ("rope", "yarn")
    assert "256 positions becomes one of 1024" in made.why
    assert stretch_decision(own, own) == ()


def test_an_engine_that_packs_weights_does_not_mix_up_models_of_other_positions() -> None:
    """The key under which packed weights are kept holds the whole spec; prefix caches end with their engine."""
    assert repr(after({"rope_type": "ntk", "factor": 2})) != repr(model())
    assert repr(after({"rope_type": "default", "head_factors": [[1, 2]] * 2})) != repr(model())


# --- what is refused


@pytest.mark.parametrize(("scaling", "text"), [
    ("{", "is not JSON"),
    ("3", "must be an object"),
    ("{}", "rope_type is missing"),
    ('{"rope_type": "spiral", "factor": 2}', "must be one of default, linear, ntk, dynamic, llama3, yarn, longrope"),
    ('{"rope_type": 3, "factor": 2}', "must be one of"),
    ('{"rope_type": "linear", "type": "ntk", "factor": 2}', "differ"),
    ('{"rope_type": "linear", "factors": 2}', "factors: unknown for the kind linear; known: rope_type"),
    ('{"rope_type": "ntk", "factor": 2, "beta_fast": 2}', "beta_fast: unknown for the kind ntk"),
    ('{"rope_type": "linear"}', "factor: must be a number of at least 1"),
    ('{"rope_type": "yarn", "factor": 0.5}', "factor: must be a number of at least 1"),
    ('{"rope_type": "yarn", "factor": true}', "factor: must be a number"),
    ('{"rope_type": "yarn", "factor": NaN}', "factor: must be a number"),
    ('{"rope_type": "yarn", "factor": Infinity}', "factor: must be a number"),
    ('{"rope_type": "dynamic", "factor": 1}', "factor: must be a number above 1"),
])  # fmt: skip
def test_G05_what_cannot_be_right_for_any_model_is_refused_with_the_settings(scaling: str, text: str) -> None:
    with pytest.raises(ConfigError, match="rope_scaling: ") as caught:
        from_kwargs(model="m", rope_scaling=scaling)
    assert text in str(caught.value)
    assert caught.value.field == "rope_scaling"


STRETCHED = model(attention(Rope(kind="llama3", dim=DIM, factor=8.0)))


@pytest.mark.parametrize(("scaling", "spec", "text"), [
    ({"rope_type": "linear", "factor": 2}, model(attention(None, alibi=Alibi())), "has no rotary positions"),
    ({"rope_type": "linear", "factor": 2}, STRETCHED, "original_max_position_embeddings: is missing"),
    ({"rope_type": "linear", "factor": 2, "original_max_position_embeddings": 0}, None, "must be an integer from 1"),
    ({"rope_type": "linear", "factor": 1e9}, None, "at most 2147483647 are possible"),
    ({"rope_type": "linear", "factor": 2, "rope_theta": -1}, None, "rope_theta"),
    ({"rope_type": "yarn", "factor": 2, "beta_fast": "x"}, None, "beta_fast"),
    ({"rope_type": "llama3", "factor": 2}, None, "lacks low_freq_factor"),
    ({"rope_type": "longrope", "factor": 2}, None, "long_factor"),
    ({"rope_type": "longrope", "factor": 2, "long_factor": [1, 2]}, None, "8 pairs are rotated"),
    ({"rope_type": "longrope", "factor": 2, "long_factor": [1] * 8, "start_tokens": -1}, None, "start_tokens"),
    ({"rope_type": "ntk", "factor": 2}, model(attention(Rope(dim=2))), "two pairs"),
    ({"rope_type": "default", "head_factors": [[1, 1]]}, None, "each of the 2 layers"),
    ({"rope_type": "default", "head_factors": [[1, 1], [1]]}, None, "layer 1 needs 2 numbers of at least 1"),
    ({"rope_type": "default", "head_factors": [[1, 1], [1, 0.5]]}, None, "layer 1 needs 2 numbers of at least 1"),
    ({"rope_type": "default", "head_factors": [[1, 1], [1, True]]}, None, "layer 1 needs 2 numbers of at least 1"),
    ({"rope_type": "default", "head_factors": [[1, 1]] * 2}, model(attention(), attention(None)), "put null there"),
])  # fmt: skip
def test_G05_G37_what_does_not_fit_the_model_is_refused(
    scaling: dict[str, Any], spec: ModelSpec | None, text: str
) -> None:
    with pytest.raises(ConfigError, match="rope_scaling: ") as caught:
        after(scaling, spec)
    assert text in str(caught.value)
    assert caught.value.field == "rope_scaling"
    assert "config.json" not in str(caught.value)


def test_theta_twice_and_theta_without_rope() -> None:
    with pytest.raises(ConfigError, match="rope_theta: is 5 here and 6 beside it"):
        after({"rope_type": "linear", "factor": 2, "rope_theta": 5}, theta=6.0)
    with pytest.raises(ConfigError, match="rope_theta: this model has no rotary positions"):
        after(None, model(attention(None)), theta=6.0)
