"""What well-kept libraries would do in place of small parts of ours: start time, speed, and the same spoiled inputs.

    python benchmarks/libraries.py [--examples 2000] [--only gguf,multipart]

Every reader runs in a process of its own with limits of time and memory, so that a crash or an endless loop is a result
and not the end. A spoiled input is a sound file with some bytes changed, cut out, repeated or cut off; all readers get
the same ones. The figures of docs/design/0017 come from here. Needs, besides the tests' packages, python-multipart and
pydantic-settings.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SECONDS, BYTES = 5, 3 << 30
BOUNDARY = b"b-0"


# --- sound inputs


def form(size: int = 64) -> bytes:
    part = b"--" + BOUNDARY + b'\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
    return (
        part % (b"purpose", b"", b"batch")
        + part % (b"file", b'; filename="a.jsonl"', b"x\r\n-" * (size // 4))
        + (b"--" + BOUNDARY + b"--\r\n")
    )


def safetensors_file(tensors: int = 8) -> bytes:
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for i in range(tensors):
        header[f"layer.{i}.weight"] = {"dtype": "F32", "shape": [4, 4], "data_offsets": [at, at + 64]}  # type: ignore[dict-item]
        at += 64
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


def gguf_file() -> bytes:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    tokens = b"".join(text(f"t{i}") for i in range(32))
    out = b"GGUF" + struct.pack("<IQQ", 3, 4, 3)
    out += text("general.architecture") + struct.pack("<I", 8) + text("llama")
    out += text("llama.block_count") + struct.pack("<II", 4, 1)
    out += text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 32) + tokens
    for i in range(4):
        out += text(f"blk.{i}.w") + struct.pack("<IQQIQ", 2, 32, 2, 0, 256 * i)
    return out + bytes(-len(out) % 32) + bytes(1024)


def sentencepiece_file() -> bytes:
    return (ROOT.parent / "shared" / "models" / "stories260K" / "tok512.model").read_bytes()


# --- readers: bytes -> anything that can be compared; they raise what their users are meant to catch


def ours_form(data: bytes) -> Any:
    from penstock.server.transport.multipart import MultipartReader, Part, PartEnd

    reader, out = MultipartReader(BOUNDARY), []
    for i in range(0, len(data), 65536):
        for event in reader.feed(data[i : i + 65536]):
            if isinstance(event, Part):
                out.append([event.name, event.filename, 0])
            elif not isinstance(event, PartEnd):
                out[-1][2] += len(event)
    reader.close()
    return out


def theirs_form(data: bytes) -> Any:
    from python_multipart.multipart import MultipartParser, parse_options_header

    out: list[Any] = []
    headers: dict[bytes, bytes] = {}
    field, value = bytearray(), bytearray()

    def header_end() -> None:
        headers[bytes(field).lower()] = bytes(value)
        field.clear()
        value.clear()

    def headers_finished() -> None:
        _, options = parse_options_header(headers.get(b"content-disposition", b""))
        name = options[b"name"].decode("utf-8", "replace")
        filename = options.get(b"filename")
        out.append([name, None if filename is None else filename.decode("utf-8", "replace"), 0])
        headers.clear()

    def part_data(data: bytes, start: int, end: int) -> None:
        out[-1][2] += end - start

    ended = []
    parser = MultipartParser(BOUNDARY, {
        "on_header_field": lambda d, s, e: field.extend(d[s:e]),
        "on_header_value": lambda d, s, e: value.extend(d[s:e]),
        "on_header_end": header_end, "on_headers_finished": headers_finished, "on_part_data": part_data,
        "on_end": lambda: ended.append(1),
    })  # fmt: skip
    for i in range(0, len(data), 65536):
        parser.write(data[i : i + 65536])
    parser.finalize()
    if not ended:
        raise ValueError("cut off")
    return out


def _as_file(data: bytes) -> Path:
    path = Path(os.environ["SCRATCH"]) / "input"
    path.write_bytes(data)
    return path


def ours_safetensors(data: bytes) -> Any:
    from penstock.formats.safetensors import read_safetensors

    return {name: [ref.dtype, list(ref.shape)] for name, ref in read_safetensors(_as_file(data)).items()}


def theirs_safetensors(data: bytes) -> Any:
    from safetensors import safe_open

    with safe_open(_as_file(data), framework="np") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  no mapping
        return {name: [part.get_dtype(), list(part.get_shape())] for name, part in slices.items()}


def ours_gguf(data: bytes) -> Any:
    from penstock.formats.gguf import read_gguf

    found = read_gguf(_as_file(data))
    return [found.metadata, {name: list(ref.shape) for name, ref in found.tensors.items()}]


def theirs_gguf(data: bytes) -> Any:
    from gguf import GGUFReader

    reader = GGUFReader(_as_file(data))
    fields = {n: f.contents() for n, f in reader.fields.items() if not n.startswith("GGUF.")}
    return [fields, {t.name: [int(n) for n in reversed(t.shape)] for t in reader.tensors}]


TEXT = "Once upon a time there was a little house by the sea, and the sea was blue. " * 4


def ours_sentencepiece(data: bytes) -> Any:
    from penstock.formats.sentencepiece import parse_sentencepiece
    from penstock.text.sentencepiece import ScoredPieces, sentencepiece_tokenizer

    model = parse_sentencepiece(data)
    tokenizer = sentencepiece_tokenizer(ScoredPieces(**vars(model)), {"add_bos_token": False})
    return list(tokenizer.encode(TEXT))


def theirs_sentencepiece(data: bytes) -> Any:
    from sentencepiece import SentencePieceProcessor

    return SentencePieceProcessor(model_proto=data).encode(TEXT)


READERS: dict[str, tuple[Callable[[], bytes], Callable[[bytes], Any], Callable[[bytes], Any]]] = {
    "multipart": (form, ours_form, theirs_form),
    "safetensors": (safetensors_file, ours_safetensors, theirs_safetensors),
    "gguf": (gguf_file, ours_gguf, theirs_gguf),
    "sentencepiece": (sentencepiece_file, ours_sentencepiece, theirs_sentencepiece),
}


def spoiled(data: bytes, rng: random.Random) -> bytes:
    """A few changes of the kinds that files suffer, and that people who mean harm make."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at, span = rng.randrange(len(out)), rng.randrange(1, 9)
        match rng.randrange(6):
            case 0:
                out[at] = rng.randrange(256)
            case 1:
                out[at : at + span] = rng.randbytes(span)
            case 2:
                del out[at : at + span]
            case 3:
                out[at:at] = out[at : at + span] * rng.choice((1, 2, 1000))
            case 4:
                del out[at:]
            case _:
                edge = rng.choice((2**63 - 1, 2**64 - 1, 2**32, 2**31, 0, 1 << 40))
                out[at : at + 8] = struct.pack("<Q", edge)
        if not out:
            return b""
    return bytes(out)


def worker(name: str, side: str, seeds: range) -> None:
    """A line for each seed: the seed, the kind of outcome, what came out."""
    from penstock.base.errors import PenstockError

    sound, ours, theirs = READERS[name]
    read, data = (ours if side == "ours" else theirs), sound()
    read(data)  # so that imports count for nobody
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    for seed in seeds:
        print(seed, "begun", flush=True)
        signal.alarm(SECONDS)
        try:
            outcome, value = "read", read(spoiled(data, random.Random(seed)))
        except PenstockError:
            outcome, value = "refused", None
        except MemoryError:
            outcome, value = "memory", None
        except BaseException as error:
            outcome, value = type(error).__name__, None
        signal.alarm(0)
        print(seed, outcome, json.dumps(value, default=str, sort_keys=True)[:4000], flush=True)


def fuzz(name: str, side: str, examples: int, scratch: str) -> dict[int, tuple[str, str]]:
    found: dict[int, tuple[str, str]] = {}
    at = 0
    while at < examples:
        done = subprocess.run(
            [sys.executable, __file__, "--worker", name, side, str(at), str(examples)], capture_output=True, text=True,
            env=os.environ | {"SCRATCH": scratch}, errors="replace",
        )  # fmt: skip
        for line in done.stdout.splitlines():
            seed, outcome, *rest = line.split(" ", 2)
            found[int(seed)] = (outcome, rest[0] if rest else "")
        begun = [seed for seed, (outcome, _) in found.items() if outcome == "begun"]
        if not begun:
            if len(found) < examples:
                raise SystemExit(f"{name} {side}: {done.stderr[-2000:]}")
            break
        found[begun[0]] = ("endless" if done.returncode == -signal.SIGALRM else f"died of {-done.returncode}", "")
        at = begun[0] + 1
    return found


# --- times


def best_s(call: Callable[[], Any], repeats: int = 5) -> float:
    """Processor time, of children too: others may use the machine."""
    times = []
    for _ in range(repeats):
        began = sum(os.times()[:4])
        call()
        times.append(sum(os.times()[:4]) - began)
    return min(times)


def import_ms(module: str) -> float:
    def run(code: str) -> float:
        return best_s(lambda: subprocess.run([sys.executable, "-c", code], check=True), 7)

    return 1e3 * (run(f"import {module}") - run("import json"))


def decode_streams() -> None:
    """Ids one by one to text: ours and that of `tokenizers`, on the same tokenizer."""
    from tokenizers import Tokenizer as Hub
    from tokenizers.decoders import DecodeStream

    from penstock.text.detokenize import IncrementalDetokenizer, WindowStream
    from penstock.text.tokenizer import Tokenizer

    path = ROOT.parent / "shared" / "data" / "tokenizers" / "phi-3-mini" / "tokenizer.json"
    if not path.exists():
        return
    hub, own = Hub.from_file(str(path)), Tokenizer.from_hf(path, {})
    text = "A naïve café — 日本語のテキスト 🙂🙂🙂 and plain words, many of them. " * 50
    ids = hub.encode(text, add_special_tokens=False).ids

    def theirs() -> str:
        stream = DecodeStream(skip_special_tokens=True)
        return "".join(stream.step(hub, i) or "" for i in ids)

    def ours() -> str:
        stream = IncrementalDetokenizer(own)
        return "".join(stream.add_one(i) for i in ids) + stream.flush()

    def window() -> str:
        stream = WindowStream(lambda some: own.decode(some, True, True))
        return "".join(stream.feed((i,)) for i in ids) + stream.finish()

    whole = hub.decode(ids)
    for name, run in (("ours, table of bytes", ours), ("ours, window", window), ("tokenizers.DecodeStream", theirs)):
        same = "the whole text" if run() == whole else "NOT the whole text"
        seconds = best_s(lambda run=run: [run() for _ in range(50)]) / 50  # type: ignore[misc]
        print(f"  {name}: {seconds / len(ids) * 1e6:.2f} us a token, {same}")
    cut = hub.encode("🙂", add_special_tokens=False).ids[:-1]
    stream, mine = DecodeStream(skip_special_tokens=True), IncrementalDetokenizer(own)
    print(f"  a character that is cut off ({cut}): DecodeStream {[stream.step(hub, i) for i in cut]}, "
          f"ours {[mine.add_one(i) for i in cut] + [mine.flush()]}, whole {hub.decode(cut)!r}")  # fmt: skip


def speeds(name: str) -> None:
    sound, ours, theirs = READERS[name]
    data = sound()
    if name == "multipart":
        data = form(64 << 20)
    if name == "safetensors":
        data = safetensors_file(2000)
    if name == "gguf":
        cache = sorted((Path.home() / ".cache" / "penstock").glob("*.gguf"))
        if cache:
            data = cache[0].read_bytes()
            print(f"  (the file is {cache[0].name})")
    a = best_s(lambda: ours(data), 3)
    b = best_s(lambda: theirs(data), 3)
    print(f"  one sound input of {len(data):,} bytes: ours {a * 1e3:.1f} ms, theirs {b * 1e3:.1f} ms")


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], sys.argv[3], range(int(sys.argv[4]), int(sys.argv[5])))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--only", default=",".join([*READERS, "imports", "stream"]))
    args = parser.parse_args()
    only = args.only.split(",")
    if "imports" in only:
        for module in (
            "penstock.server.transport.multipart", "python_multipart", "penstock.config", "pydantic_settings",
            "penstock.formats.gguf", "gguf", "penstock.formats.safetensors", "safetensors.numpy",
            "penstock.formats.sentencepiece", "sentencepiece", "tokenizers",
        ):  # fmt: skip
            print(f"import {module}: {import_ms(module):.0f} ms")
    if "stream" in only:
        print("stream")
        decode_streams()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["SCRATCH"] = scratch
        for name in READERS:
            if name not in only:
                continue
            print(name)
            speeds(name)
            found = {side: fuzz(name, side, args.examples, scratch) for side in ("ours", "theirs")}
            for side, results in found.items():
                print(f"  {side}: {dict(Counter(outcome for outcome, _ in results.values()).most_common())}")
            pairs = [(found["ours"][seed], found["theirs"][seed]) for seed in range(args.examples)]
            both = [(a, b) for a, b in pairs if a[0] == b[0] == "read"]
            print(f"  both read {len(both)}, the same {sum(a[1] == b[1] for a, b in both)}; theirs read "
                  f"{sum(b[0] == 'read' and a[0] != 'read' for a, b in pairs)} that ours refused, ours "
                  f"{sum(a[0] == 'read' and b[0] != 'read' for a, b in pairs)} that theirs refused")  # fmt: skip


if __name__ == "__main__":
    main()
