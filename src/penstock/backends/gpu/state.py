"""Whether there is a GPU here and what it takes to use it, in one line. Torch is imported only where both are there."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

MEASURED = "speed was measured on one H100 (docs/guides/gpu.md)"
DRIVERS = ("dev/nvidiactl", "dev/kfd")
"""What the drivers of NVIDIA's and AMD's GPUs leave under /."""


def gpu_state(root: Path = Path("/")) -> str:
    """`root`: where the drivers' files are looked for. Where they are not, torch is not imported."""
    there = any((root / driver).exists() for driver in DRIVERS)
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        found = "there is one" if there else "none found"
        return f"{found}; --device cuda needs torch: pip install 'penstock[gpu]'; {MEASURED}"
    if not there:
        return f"none found; torch {torch_version} is here, so --device cpu-torch tries that backend; {MEASURED}"
    return f"{_seen(torch_version)}; {MEASURED}"


def _seen(torch_version: str) -> str:
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"there is one, and torch {torch_version} cannot be imported ({error})"
    if not torch.cuda.is_available():
        return f"there is one, and torch {torch_version} does not see it"
    named = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    cards = ", ".join(f"{card.name} of {card.total_memory / 2**30:.0f} GiB" for card in named)
    return f"{cards}, by torch {torch_version}: --device cuda"
