"""Write docs/families.md: which families there are, what was compared with transformers, and what real configs become.

`python tools/families.py` runs the parity tests (a minute or two) and writes the page; `--configs FOLDER` names the
folder with real config.json files (`<owner>--<name>.config.json`), otherwise that table stays as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from penstock.base.errors import ModelError
from penstock.families.gguf.architectures import ARCHITECTURES as GGUF
from penstock.families.gguf.missing import NEEDS
from penstock.families.registry import ARCHITECTURES, FAMILIES, find_family

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "families.md"
CONFIGS = "## Real configs"


def measure() -> list[dict[str, Any]]:
    """What `tests/models/parity.py` saw, a dict per comparison. Raises SystemExit if a test fails."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "parity.jsonl"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "tests/models"]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PENSTOCK_PARITY_LOG": str(log)}, check=False)
        if done.returncode:
            raise SystemExit("the parity tests fail; the page was not written")
        return [json.loads(line) for line in log.read_text("utf-8").splitlines()]


def families_table(seen: list[dict[str, Any]]) -> list[str]:
    """A line per family: architectures, file and its lines, what was compared and the worst difference."""
    by_family: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for entry in seen:
        by_family[entry["family"]].append(entry)
    lines = [
        "| family | architectures | GGUF | file | lines | comparisons | positions | stored as | worst logit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in FAMILIES.names():
        target = type(FAMILIES.get(name)()).__module__
        path = ROOT / "src" / Path(*target.split(".")).with_suffix(".py")
        entries = by_family.get(name, [])
        positions = ", ".join(sorted({kind for e in entries for kind in e["positions"]})) or "none"
        stored = ", ".join(sorted({e["dtype"] for e in entries}))
        worst = f"{max(e['worst'] for e in entries):.1e}" if entries else "its own suite"
        names = ", ".join(sorted(a for a, family in ARCHITECTURES.items() if family == name))
        gguf = gguf_names(name)
        count = len(path.read_text("utf-8").splitlines())
        link = f"[{path.name}](../src/penstock/families/{path.name})"
        lines.append(
            f"| {name} | {names} | {gguf} | {link} | {count} | {len(entries)} | {positions} | {stored} | {worst} |"
        )
    return lines


def gguf_names(family: str) -> str:
    """Under which names of llama.cpp's GGUF files of a family are read."""
    return ", ".join(sorted(name for name, entry in GGUF.items() if family in entry.families))


def gguf_table() -> list[str]:
    """A line per thing that GGUF files need and that is not here."""
    needs: dict[str, list[str]] = defaultdict(list)
    for name, need in NEEDS.items():
        needs[need].append(name)
    return [
        "## GGUF", "",
        f"Files of {len(GGUF)} architectures are read, by the names that llama.cpp gives them: the column GGUF above.",
        "[architectures.py](../src/penstock/families/gguf/architectures.py) turns the metadata of each into the",
        "config.json of its family; [test_gguf_architectures.py](../tests/models/test_gguf_architectures.py) writes a",
        "tiny model of each as llama.cpp's converter does and finds the same model in the file, and, where",
        "`PENSTOCK_LLAMA_CPP` names a Python with llama-cpp-python, llama.cpp's logits. Other names are refused; of",
        "these it is said what they need:", "",
        "| architecture | needs |", "|---|---|",
        *[f"| {', '.join(sorted(names))} | {need} |" for need, names in sorted(needs.items())], "",
    ]  # fmt: skip


def configs_table(folder: Path) -> list[str]:
    """A line per real config.json: its size, or what is missing."""
    specs: list[str] = []
    refused: dict[str, list[str]] = defaultdict(list)
    for path in sorted(folder.glob("*.config.json")):
        config = json.loads(path.read_text("utf-8"))
        for section in (config, config.get("text_config") or {}):
            section.pop("quantization_config", None)
        name = path.name.removesuffix(".config.json").replace("--", "/")
        try:
            spec = find_family(config).spec(config)
        except ModelError as error:
            refused[str(error)].append(name)
        else:
            specs.append(f"| {name} | {spec.family} | {spec.num_params:,} | {spec.max_position:,} |")
    total = len(specs) + sum(len(names) for names in refused.values())
    return [
        CONFIGS, "",
        f"Of {total} published `config.json` files at hand, {len(specs)} become a spec; "
        f"{total - len(specs)} are refused, for {len(refused)} reasons. How their weights are stored is left out here.",
        "", "| config | family | parameters | longest context |", "|---|---|---|---|", *specs, "",
        "| refused | because |", "|---|---|",
        *[f"| {', '.join(names)} | {reason} |" for reason, names in sorted(refused.items())], "",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", type=Path)
    args = parser.parse_args()
    before = PAGE.read_text("utf-8") if PAGE.exists() else ""
    seen = measure()
    text = [
        "# Families", "",
        "Written by `tools/families.py`. Every comparison makes a tiny random model with transformers (every",
        "parameter random), saves it, opens it with Penstock and compares with transformers' own forward in float64:",
        "float32 logits within 1e-4 and the same 64 greedy tokens, the prompt in one go, in chunks, token by token,",
        "alone and in a batch, prompts longer than windows and original contexts. The last column is the largest",
        "difference of a logit; the logits' own spread is between "
        f"{min(e['spread'] for e in seen):.1f} and {max(e['spread'] for e in seen):.1f}.",
        f"{len(FAMILIES.names())} families, {len(ARCHITECTURES)} architectures, {len(seen)} comparisons.", "",
        "Families with a suite of their own: encoders",
        "([test_encoder_parity.py](../tests/models/test_encoder_parity.py)), Mamba, Mamba-2, Nemotron-H",
        "([test_mamba_parity.py](../tests/models/test_mamba_parity.py),",
        "[test_nemotron_h_parity.py](../tests/models/test_nemotron_h_parity.py)), RWKV-4 and 7",
        "([test_rwkv_golden.py](../tests/models/test_rwkv_golden.py)), RWKV-5 and 6, judged by the paper's parallel",
        "form ([test_rwkv5_parity.py](../tests/models/test_rwkv5_parity.py)). Without a class in transformers, and",
        "judged by another class that computes the same, its tensors written by the family's own names: exaone,",
        "internlm2, minicpm, mimo, chatglm ([llama_like_cases.py](../tests/models/llama_like_cases.py)), bailing_moe,",
        "bailing_moe_v2 and nemotron-nas ([test_parity_renamed.py](../tests/models/test_parity_renamed.py)); of the",
        "latter blocks without halves are checked against the published size.", "",
        *families_table(seen), "", *gguf_table(),
    ]  # fmt: skip
    if args.configs is not None:
        text += configs_table(args.configs)
    elif CONFIGS in before:
        text += before[before.index(CONFIGS) :].splitlines()
    PAGE.write_text("\n".join(text).rstrip("\n") + "\n", "utf-8")


if __name__ == "__main__":
    main()
