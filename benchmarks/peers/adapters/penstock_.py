"""Penstock in this process, through `penstock.LLM`. Options are settings of the engine (`{"ops": "blas"}`).

The precision `stored` leaves to Penstock what it makes of the file; so do formats of GGUF, for `<model>-<format>.gguf`,
and those of `CODES`, for the folder `<model>-<form>`.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from peer_worker import Engine, Recorder, Request, serve

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "stored": {},
    "int8": {"dtype": "bfloat16", "quantization": "int8-w8a8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4-w4a8:128"},
}
CODES = ("gptq4", "gptq4-order", "awq4")


def path_of(model: str, precision: str) -> str:
    """What is loaded."""
    if precision in PRECISIONS:
        return model
    return f"{model}-{precision}" + ("" if precision in CODES else ".gguf")


def _commit() -> str:
    """Which state of the repository this is; empty outside of one."""
    told = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return told.stdout.strip()


class Penstock(Engine):
    def start(self, model: str, precision: str, threads: int, options: dict[str, Any]) -> None:
        from penstock import __version__
        from penstock.config import SETTINGS
        from penstock.launch.llm import LLM

        wanted = PRECISIONS.get(precision, {}) | options
        known = set(SETTINGS)
        missing = sorted(set(wanted) - known)
        if missing:
            raise RuntimeError(f"this Penstock has no setting {missing[0]!r}")
        for name in ("threads", "num_threads"):
            if name in known:
                wanted.setdefault(name, threads)
        self.llm = LLM(path_of(model, precision), skip_tokenizer_init=True, **wanted)
        self.version = f"{__version__} {_commit()}".strip()
        plan, spec = self.llm.engine.plan, self.llm.engine.spec
        # What one token reads: of a tied embedding beside its quantised form, a row.
        beside = "quantization" in wanted and spec.tie_embeddings
        self.weight_bytes = plan.weight_bytes - beside * spec.vocab_size * spec.hidden_size * 2

    def run(self, requests: list[Request], recorder: Recorder) -> None:
        """One request is streamed, several go together."""
        from penstock.core.sampling import SamplingParams

        if len(requests) > 1:
            self._together(requests, recorder)
            return
        ((prompt, new),) = requests
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        for output in self.llm.stream({"prompt_token_ids": prompt}, params):
            self._check(output)
            recorder.add(0, output.outputs[0].token_ids[len(recorder.tokens[0]) :])

    def _together(self, requests: list[Request], recorder: Recorder) -> None:
        """All at once; of each the engine's own times of the first and the last token."""
        from penstock.core.sampling import SamplingParams

        params = [SamplingParams(temperature=0, max_tokens=new, ignore_eos=True) for _, new in requests]
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt, _ in requests], params)
        for number, output in enumerate(outputs):
            self._check(output)
            ids, times = output.outputs[0].token_ids, output.metrics
            assert times.first_token_s is not None
            assert times.finished_s is not None
            # The engine's clock is another one: arrivals are the common moment.
            recorder.add(number, ids[:1], recorder.began_s + times.first_token_s - times.arrival_s)
            recorder.add(number, ids[1:], recorder.began_s + times.finished_s - times.arrival_s)

    @staticmethod
    def _check(output: Any) -> None:
        if output.error is not None:
            raise RuntimeError(output.error)


if __name__ == "__main__":
    serve(Penstock())
