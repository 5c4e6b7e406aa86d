"""Doctor's line about GPUs: what is there, what is missing, and where speed was measured, whatever is there."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from penstock.backends.gpu import state


def with_driver(root: Path) -> Path:
    (root / "dev").mkdir()
    (root / "dev" / "nvidiactl").touch()
    return root


def no_torch(name: str) -> str:
    raise PackageNotFoundError(name)


def test_without_torch_it_says_what_brings_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "version", no_torch)
    said = "--device cuda needs torch: pip install 'penstock[gpu]'; speed was measured on one H100 (docs/guides/gpu.md)"
    assert state.gpu_state(tmp_path) == f"none found; {said}"
    assert state.gpu_state(with_driver(tmp_path)) == f"there is one; {said}"


def test_without_a_gpu_torch_is_not_imported() -> None:
    program = "import sys; from penstock.backends.gpu.state import gpu_state; from pathlib import Path\n"
    program += "print(gpu_state(Path('/nowhere')), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("none found; torch 2.")
    assert "cpu-torch" in done.stdout
    assert done.stdout.endswith("speed was measured on one H100 (docs/guides/gpu.md) False\n")


def test_a_gpu_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = with_driver(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "does not see it; speed was measured on one H100 (docs/guides/gpu.md)" in state.gpu_state(root)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    card = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: card)
    assert state.gpu_state(root).startswith(
        "NVIDIA H100 80GB HBM3 of 80 GiB, NVIDIA H100 80GB HBM3 of 80 GiB, by torch"
    )
    assert state.gpu_state(root).endswith("--device cuda; speed was measured on one H100 (docs/guides/gpu.md)")
