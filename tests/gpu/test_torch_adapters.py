"""Adapters on torch: the tests of the other backends, with this one in their stead; the kernels' are beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from penstock import LLM, LoRARequest, SamplingParams  # noqa: E402
from penstock.backends.backend import Backend  # noqa: E402
from penstock.backends.gpu.backend import TorchBackend  # noqa: E402
from penstock.backends.gpu.fused import fuse_for_kernels  # noqa: E402
from penstock.backends.reference import ReferenceBackend  # noqa: E402
from penstock.base.bf16 import narrow  # noqa: E402
from penstock.base.errors import InputError  # noqa: E402
from penstock.cli.main import main  # noqa: E402
from penstock.core.model_spec import cache_groups  # noqa: E402
from penstock.model.adapted import adaptable, adapted  # noqa: E402
from penstock.model.builder import build  # noqa: E402
from tests import specs  # noqa: E402
from tests.adapting import made, nano, nano_folder  # noqa: E402
from tests.engine import test_adapters as laws  # noqa: E402
from tests.engine.test_coded_adapters import tuned_nano  # noqa: E402
from tests.native import test_adapters as natively  # noqa: E402


@pytest.fixture(autouse=True)
def on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def called(name: str) -> Backend:
        return TorchBackend(torch.device("cpu")) if name == "torch" else ReferenceBackend()

    monkeypatch.setattr(natively, "backend_called", called)
    monkeypatch.setattr(laws, "draws", lambda few, many: 1)
    monkeypatch.setattr(laws, "parts", lambda name, n: made(specs.make(name)[0], n, rank=2 + n, share=0.8))


@pytest.mark.parametrize("name", ["llama_biased", "latent", "experts"])
def test_J25_torch_gives_merged_weights_and_the_same_bits_in_every_batch(name: str) -> None:
    natively.test_J25_rows_of_many_adapters_are_those_of_merged_weights(name, "torch")
    natively.test_J25_a_row_has_its_bits_in_every_batch(name, "torch")


def test_J25_an_adapter_that_has_gone_changes_nothing_on_torch() -> None:
    natively.test_J25_an_adapter_that_has_gone_changes_nothing("torch")


def test_J25_J24_tokens_on_torch_depend_on_the_request_and_its_adapter_alone(tmp_path: Path) -> None:
    laws.test_J25_J24_tokens_depend_on_the_request_and_its_adapter_alone("llama_gqa", "torch", tmp_path)


def test_adapters_of_codes_are_refused_by_name(tmp_path: Path) -> None:
    tuned = tuned_nano(tmp_path / "tuned", 1)
    assert main(["quantize", str(nano()), "--delta-of", str(tuned), "--out", str(tmp_path / "d")]) == 0
    llm = LLM(nano(), enable_lora=True, device="cpu-torch", max_model_len=64)
    with pytest.raises(InputError, match=r"deltas and sets of scales run on the CPU's own kernels .*use device cpu"):
        llm.generate("x", SamplingParams(max_tokens=1), lora_request=LoRARequest("d", 1, str(tmp_path / "d")))


def test_products_are_joined_and_rounded_with_adapters_as_without() -> None:
    """Or rows without one would have other bits beside one, and joined matrices a second place on the device."""
    spec, weights = specs.make("llama_gqa")
    weights = {name: narrow(w) if w.ndim == 2 else w for name, w in weights.items()}
    graph = build(spec, weights, cache_groups(spec, "bfloat16"), max_model_len=32)

    def products(own: Any) -> list[Any]:
        return [(node.weights, node.named.get("narrow")) for node in fuse_for_kernels(own).nodes if node.op == "linear"]

    plain = products(graph)
    assert {kind for _, kind in plain} == {"bfloat16", None}
    assert any(len(names) == 3 for names, _ in plain)
    for names in (adaptable(spec), [f"layers.{i}.{part}" for i in range(len(spec.layers)) for part in "qv"]):
        assert products(adapted(graph, names)) == plain


def test_folders_are_served_on_torch_as_on_the_reference(tmp_path: Path) -> None:
    """With decode graphs, which steps with adapters cannot have without kernels: they run all the same."""
    asked = LoRARequest("a", 1, str(nano_folder(tmp_path / "a", 1, size=0.05)))
    params, found = SamplingParams(temperature=0, max_tokens=6), []
    for how in ({"ops": "ref"}, {"device": "cpu-torch", "cudagraph_capture_sizes": "1,2"}):
        llm = LLM(nano(), enable_lora=True, max_model_len=64, **how)
        out = llm.generate(["Once upon a time", "One day"], params, lora_request=[asked, None])
        found.append([o.outputs[0].text for o in out])
    assert found[0] == found[1]
