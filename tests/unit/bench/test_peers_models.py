"""The models of the comparison, and how answers are checked: the reference, forms of weights, runs over HTTP."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.peers import convert, make_models, online, refcheck, results, rows, workloads
from benchmarks.peers import run as bench
from benchmarks.peers.engines import Place, Spec
from benchmarks.peers.reference import Reference, Scores

from penstock.config import from_kwargs
from penstock.core.sampling import SamplingParams
from penstock.launch.bundled import bundled_model
from penstock.launch.llm import LLM
from tests.unit.bench.test_peers_bench import QUIET, A, cell


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Two small models, of both families, in the folder `models`."""
    place = Place(tmp_path_factory.mktemp("peers"))
    make_models.make("tiny", place.models)
    shared = {k: v for k, v in make_models.SHAPES["tiny"].items() if "window" not in k}
    llama = shared | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "head_dim": 32}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(make_models.SHAPES, "tiny-llama", llama)
        make_models.make("tiny-llama", place.models)
    return place


MODELS = pytest.mark.parametrize("model", ["tiny", "tiny-llama"])


def generated(path: Path, prompts: list[list[int]], new: int) -> list[list[int]]:
    llm = LLM(str(path), skip_tokenizer_init=True, dtype="float32", num_gpu_blocks_override=32, max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    return [o.outputs[0].token_ids for o in llm.generate([{"prompt_token_ids": p} for p in prompts], params)]


@MODELS
def test_the_reference_is_transformers(tiny: Place, model: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = tiny.model(model)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = [workloads.single(n, 1, 0, highest=1024)[0] for n in (7, 19)]
    reference = Reference(folder)
    for ids, hidden in zip(texts, reference.hidden(texts), strict=True):
        with torch.no_grad():
            expected = oracle(torch.tensor([ids])).logits[0].numpy()
        np.testing.assert_allclose(reference.logits(hidden), expected, atol=2e-4)


@MODELS
def test_right_tokens_pass_and_wrong_ones_do_not(tiny: Place, model: str) -> None:
    prompts = [workloads.single(n, 1, 0, highest=1024)[0] for n in (16, 33)]
    answers = generated(tiny.model(model), prompts, 24)
    reference = Reference(tiny.model(model))
    right = refcheck.check(reference, list(zip(prompts, answers, strict=True)), 32)
    assert right["ok"]
    assert right["agreement"] == 1.0
    assert right["num_tokens"] == 48
    one_wrong = [list(a) for a in answers]
    one_wrong[1][10] = (one_wrong[1][10] + 1) % 1024
    for bits in (32, 16, 8):
        found = refcheck.check(reference, list(zip(prompts, one_wrong, strict=True)), bits)
        assert not found["ok"]
    nonsense = [[(7 * token + 13) % 1024 for token in a] for a in answers]
    for bits in (32, 16, 8, 4):
        found = refcheck.check(reference, list(zip(prompts, nonsense, strict=True)), bits)
        assert not found["ok"], bits
    unnamed = [[*a[:6], -1, *a[7:]] for a in one_wrong]
    assert refcheck.check(reference, list(zip(prompts, unnamed, strict=True)), 32)["num_tokens"] == 12


@pytest.mark.parametrize("bits", [32, 16, 8, 4])
def test_one_choice_and_all_on_average_are_bounded(bits: int) -> None:
    class Told:
        def __init__(self, *gaps: float) -> None:
            self.gap = np.array(gaps, np.float32)

        def scores(self, requests: Any) -> list[Scores]:
            return [Scores(self.gap, self.gap < 1e-5)]

    one, mean = refcheck.BOUNDS[bits]

    def verdict(*gaps: float) -> dict[str, Any]:
        return refcheck.check(Told(*gaps), [], bits)  # type: ignore[arg-type]

    assert verdict(0.0, mean * 0.99)["ok"]
    assert verdict(one * 0.99, *[0.0] * 1000)["ok"]
    assert not verdict(one * 1.01, *[0.0] * 1000)["ok"]
    assert not verdict(*[mean * 1.01] * 5)["ok"]
    assert not verdict(float("nan"), *[0.0] * 1000)["ok"]


def test_a_run_of_the_real_adapter_is_checked(tiny: Place, tmp_path: Path) -> None:
    """Ours as it is, and a fake that makes tokens up: the first is right, the second is not."""
    ours = Spec("penstock", "bf16")
    s = bench.Settings(tiny, 1, 120.0, 120.0, {"penstock": {"max_model_len": 256, "num_gpu_blocks_override": 32}})
    with results.opened(tmp_path / "r.jsonl") as out:
        assert bench.run([[ours, A]], ["tiny"], ["W0"], {"W0": 1}, s, out, QUIET, probe_bytes=4 << 20) == 0
        assert refcheck.check_all(out, tiny, QUIET) == 1
        num = len(out.entries)
        assert refcheck.check_all(out, tiny, QUIET) == 1
        assert len(out.entries) == num, "verdicts are kept, not made again"
    verdicts = {(r.engine, r.check) for r in rows.rows(results.read(tmp_path / "r.jsonl"))}
    assert verdicts == {("penstock", True), ("fake", False)}
    figures = next(c["figures"] for c in cells_of_file(tmp_path / "r.jsonl") if c["engine"] == "penstock")
    assert 0 < figures["ttft_s"] < figures["wall_s"]


def cells_of_file(file: Path) -> list[dict[str, Any]]:
    return list(results.latest(results.read(file), "cell").values())


def test_a_model_without_a_reference_is_told_not_passed(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "odd"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "mamba", "vocab_size": 1000}')
    with results.opened(tmp_path / "r.jsonl") as out:
        out.add(cell("fake", 0, 1.0, model="odd", workload="W0", tokens=[[1, 2]]))
        assert refcheck.check_all(out, Place(tmp_path), QUIET) == 0
        (verdict,) = out.latest("check").values()
    assert verdict["ok"] is None
    assert "mamba" in verdict["why"]


# -- models and their forms --------------------------------------------------------------------------------------


def logprobs(path: Path, prompt: list[int]) -> list[float]:
    """Of the prompt's own tokens: far more telling than which token is the largest."""
    llm = LLM(str(path), skip_tokenizer_init=True, dtype="float32", num_gpu_blocks_override=32, max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=1)
    (output,) = llm.generate({"prompt_token_ids": prompt}, params)
    assert output.prompt_logprobs is not None
    told = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    return [entry[token].logprob for token, entry in told if entry is not None]


@MODELS
def test_a_gguf_of_ours_is_the_same_model(tiny: Place, model: str) -> None:
    out, make = convert.plan(model, "gguf", tiny)
    make()
    prompt = workloads.single(90, 1, 0, highest=1024)[0]
    assert logprobs(out, prompt) == pytest.approx(logprobs(tiny.model(model), prompt), abs=1e-6)


def test_compressed_weights_stand_for_the_same_matrix() -> None:
    w = np.random.default_rng(0).standard_normal((6, 256), np.float32)
    values, scale = convert.int8(w)
    assert np.abs(values * scale - w).max() <= scale.max() / 2 * 1.001
    packed, scales = convert.int4(w)
    nibbles = np.stack([(packed.view(np.uint32) >> np.uint32(4 * i)) & np.uint32(15) for i in range(8)], axis=2)
    back = (nibbles.reshape(6, 2, 128).astype(np.float32) - 8) * scales[:, :, None]
    assert np.abs(back.reshape(6, 256) - w).max() <= scales.max() / 2 * 1.001


def test_models_are_made_the_same_twice_and_a_form_that_nobody_reads_is_refused(tiny: Place, tmp_path: Path) -> None:
    again = make_models.make("tiny", tmp_path)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (again / name).read_bytes() == (tiny.model("tiny") / name).read_bytes()
    tokenizer = json.loads((again / "tokenizer.json").read_text())
    assert len(tokenizer["model"]["vocab"]) == 1024
    with pytest.raises(ValueError, match="no form"):
        convert.plan("tiny", "ct2-int8", tiny)


# -- over HTTP ---------------------------------------------------------------------------------------------------


def test_a_rate_is_sustained_if_every_round_keeps_it() -> None:
    def entry(rate: float, share: float, round_: int, name: str = "x") -> dict[str, Any]:
        key = online.key_of(name, "m", rate, 200, round_)
        return {"kind": "online", "key": key, "name": name, "model": "m", "rate": rate, "goodput_fraction": share}

    entries = [entry(1, 1.0, 0), entry(1, 0.95, 1), entry(2, 0.99, 0), entry(2, 0.94, 1), entry(1, 0.5, 0, "y")]
    assert online.sustained(entries) == {("x", "m"): 1, ("y", "m"): 0.0}
    assert len({e["key"] for e in entries}) == 5


def test_arrivals_are_poisson_and_the_same_for_all() -> None:
    at = workloads.arrivals(4.0, 2000)
    assert at == sorted(at)
    assert at[0] == 0.0
    assert at[-1] / 2000 == pytest.approx(0.25, rel=0.1)
    assert workloads.arrivals(8.0, 2000) == pytest.approx([t / 2 for t in at])


def test_our_own_server_is_measured(tmp_path: Path) -> None:
    nano = bundled_model("nano")
    assert nano is not None
    given = ["--engines", "penstock:bf16", "--model", str(nano), "--rates", "20", "--requests", "3", "--rounds", "1",
             "--peers", str(tmp_path), "--out", str(tmp_path / "o.jsonl"),
             "--server-args", '{"penstock:bf16": ["--ops", "blas", "--num-gpu-blocks-override", "64"]}']  # fmt: skip
    assert online.main(given) == 0
    (entry,) = results.latest(results.read(tmp_path / "o.jsonl"), "online").values()
    assert (entry["completed"], entry["failed"], entry["wrong_length"]) == (3, 0, 0)
    assert entry["p95_ttft_ms"] >= entry["p50_ttft_ms"] > 0


def test_a_rate_that_is_lost_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of forty misses are one too many: some of those that are due later are never sent."""
    monkeypatch.setattr(online, "SLO_MS", {"ttft": 0.001, "tpot": 150.0})
    given = ["--engines", "penstock:bf16", "--model", str(bundled_model("nano")), "--rates", "20", "--requests", "40",
             "--rounds", "1", "--peers", str(tmp_path), "--out", str(tmp_path / "o.jsonl"), "--stop-when-lost",
             "--server-args", '{"penstock:bf16": ["--ops", "blas", "--num-gpu-blocks-override", "64"]}']  # fmt: skip
    assert online.main(given) == 0
    (entry,) = results.latest(results.read(tmp_path / "o.jsonl"), "online").values()
    assert 3 <= entry["ended"] < 20
    assert (entry["completed"], entry["failed"], entry["wrong_length"]) == (entry["ended"], 0, 0)
    assert entry["goodput_fraction"] == 0.0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int4"])
def test_servers_of_penstock_are_asked_for_what_the_adapter_asks_for(precision: str, tiny: Place) -> None:
    """int8 was once passed on as it is, and the server ended with an error."""
    words = online.command(Spec("penstock", precision), "tiny", tiny, 1234, 2, [])
    asked = dict(zip(words[words.index("serve") + 2 :: 2], words[words.index("serve") + 3 :: 2], strict=True))
    config = from_kwargs(
        model=words[words.index("serve") + 1], dtype=asked["--dtype"], quantization=asked["--quantization"]
    )
    folder = Path(online.__file__).parent / "adapters" / "penstock_.py"
    formats = next(
        ast.literal_eval(node.value)
        for node in ast.parse(folder.read_text()).body
        if isinstance(node, ast.AnnAssign) and node.value is not None
    )
    assert formats[precision] == {"dtype": asked["--dtype"]} | (
        {} if asked["--quantization"] == "none" else {"quantization": config.model.quantization}
    )


def test_no_prompt_comes_back_at_another_rate() -> None:
    """At the second rate a server with a prefix cache had read all prompts before: 0.3 s to the first token for 0.9."""
    asked = [online.asked_at(rate, 20, round_, 1000) for rate in (0.3, 0.6) for round_ in (0, 1)]
    assert asked[0] == online.asked_at(0.3, 20, 0, 1000)
    assert len({tuple(prompt[:16]) for some in asked for prompt, _ in some}) == 80
    assert len({tuple((len(prompt), new) for prompt, new in some) for some in asked}) == 1
