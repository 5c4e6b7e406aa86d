"""What llama.cpp says about a GGUF file: logits of a text, or how it goes on greedily.

Runs in an environment of its own that has `llama-cpp-python` and numpy (LLAMA_CPP_LIB_PATH names the folder of another
build of the library). `python llama_cpp_logits.py MODEL OUT.npz --ids 1,5,9 [--greedy 64]` writes `logits` [T, V] of
the ids and `tokens`, those that follow them. Keys and values are float32, and attention is the plain one, unless `--kv
default` leaves both to llama.cpp. `MODEL OUT.npy --stream` reads lines of ids instead and writes the logits of each
anew, then "done"; with `--greedy 64` and without OUT it prints the ids that follow each, separated by commas. Texts are
at most as long as `--length`, without it as the first of them. Exits with 3 if llama.cpp refuses the file.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from typing import Any

import llama_cpp
import numpy as np

REFUSED = 3


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator, unused-ignore]
def quiet(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """llama.cpp tells much of what it loads."""


class Model:
    """One file, loaded, with a context of `length` tokens."""

    def __init__(self, path: str, length: int, kv: str = "float32") -> None:
        llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
        settings = llama_cpp.llama_model_default_params()
        settings.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), settings)
        if not self.model:
            raise SystemExit(REFUSED)
        how = llama_cpp.llama_context_default_params()
        how.n_ctx = how.n_batch = how.n_ubatch = length
        if kv == "float32":
            how.type_k = how.type_v = 0
            how.flash_attn_type = 0
        how.n_threads = how.n_threads_batch = 1
        self.context = llama_cpp.llama_init_from_model(self.model, how)
        if not self.context:
            raise SystemExit(REFUSED)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.seen = 0

    def step(self, ids: list[int]) -> Any:
        """Logits [len(ids), V] behind each of the next tokens."""
        batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, self.seen + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, 1
        if llama_cpp.llama_decode(self.context, batch):
            raise SystemExit("llama.cpp failed to decode")
        self.seen += len(ids)
        rows = [llama_cpp.llama_get_logits_ith(self.context, i) for i in range(len(ids))]
        out = np.stack([np.ctypeslib.as_array(row, (self.vocab_size,)).copy() for row in rows])
        llama_cpp.llama_batch_free(batch)
        return out

    def forget(self) -> None:
        """The next token is the first of a text."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        self.seen = 0

    def followed(self, last: Any, count: int) -> list[int]:
        """The `count` likeliest tokens, each behind the one before; `last`: logits [V] behind what is seen."""
        tokens: list[int] = []
        while len(tokens) < count:
            tokens.append(int(last.argmax()))
            if len(tokens) < count:
                last = self.step(tokens[-1:])[0]
        return tokens


def stream(path: str, out: str | None, kv: str, length: int, greedy: int) -> None:
    """Texts of the standard input, one a line."""
    model: Model | None = None
    for line in sys.stdin:
        ids = [int(part) for part in line.split(",")]
        if model is None:
            model = Model(path, max(length, len(ids)) + greedy + 8, kv)
        model.forget()
        logits = model.step(ids)
        if out is not None:
            np.save(out, logits)
        print(*model.followed(logits[-1], greedy) if greedy else ["done"], sep=",", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("out", nargs="?")
    parser.add_argument("--ids", help="token ids, separated by commas")
    parser.add_argument("--stream", action="store_true", help="texts from the standard input")
    parser.add_argument("--kv", choices=("float32", "default"), default="float32")
    parser.add_argument("--greedy", type=int, default=0, help="tokens to add")
    parser.add_argument("--length", type=int, default=0, help="tokens of the longest text of a stream")
    args = parser.parse_args()
    if args.stream:
        if args.out is None and not args.greedy:
            parser.error("give OUT for logits, or --greedy")
        stream(args.model, args.out, args.kv, args.length, args.greedy)
        return
    if args.ids is None or args.out is None:
        parser.error("give OUT and --ids, or --stream")
    ids = [int(part) for part in args.ids.split(",")]
    model = Model(args.model, len(ids) + args.greedy + 8, args.kv)
    logits = model.step(ids)
    tokens = model.followed(logits[-1], args.greedy)
    np.savez(args.out, logits=logits, tokens=np.array(tokens, np.int64))


if __name__ == "__main__":
    main()
