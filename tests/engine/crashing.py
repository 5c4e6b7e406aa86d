"""A front end over engines that die when a test says so, without processes, threads or an event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock.base.clock import MonotonicClock
from penstock.core.messages import EngineInfo, Outputs
from penstock.core.request import Intake, Request
from penstock.core.sampling import BeamSearchParams, SamplingParams
from penstock.engine.blackbox import handle_of
from penstock.engine.core import EngineCore
from penstock.engine.frontend import EngineClient
from penstock.engine.link import Down
from penstock.engine.stream import Stream
from penstock.text.limits import Limits
from penstock.text.tokenizer import Tokenizer
from penstock.text.validate import build_request
from tests.engine.fake_model import VOCAB

EOS = 2
LIMITS = Limits(vocab_size=VOCAB, max_model_len=256, kv_capacity_tokens=None, eos_token_ids=(EOS,))
TOKENIZER = Tokenizer.from_pieces(
    [(b"<unk>", 0.0), (b"<s>", 0.0), (b"</s>", 0.0)] + [(bytes([c]), 0.0) for c in b" abcdefghijklmnopqrstuvwxy"],
    1,
    EOS,
)
PROMPT = [1, 5, 6, 7, 9, 11, 4, 4, 8, 21, 22, 3]
KINDS: dict[str, tuple[list[int], SamplingParams | BeamSearchParams]] = {
    "greedy": (PROMPT, SamplingParams(temperature=0, max_tokens=9)),
    "seeded": (PROMPT[:5], SamplingParams(seed=7, max_tokens=12)),
    "unseeded": (PROMPT[:7], SamplingParams(temperature=1.5, top_p=0.9, max_tokens=10, ignore_eos=True)),
    "three": (PROMPT[2:9], SamplingParams(n=3, seed=3, max_tokens=8, logprobs=2)),
    "three-stops": (PROMPT[:4], SamplingParams(n=3, max_tokens=14, stop=["a", "b", "k"], temperature=2.0)),
    "penalties": (
        PROMPT,
        SamplingParams(
            temperature=0, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3, max_tokens=10,
            ignore_eos=True,
        ),
    ),
    "stop": (PROMPT[3:], SamplingParams(seed=11, max_tokens=20, stop=["ab", "qr", "e", "m"], min_tokens=3)),
    "min-tokens": (
        PROMPT[:6],
        SamplingParams(seed=5, min_tokens=6, max_tokens=20, stop_token_ids=[4, 9, 10, 13, 15, 20, 25]),
    ),
    "logprobs": (PROMPT[:3], SamplingParams(temperature=0.7, logprobs=3, max_tokens=7)),
    "prompt-logprobs": (PROMPT * 3, SamplingParams(temperature=0, prompt_logprobs=2, logprobs=0, max_tokens=6)),
    "bad-words": (PROMPT[4:], SamplingParams(seed=1, bad_words=["a"], logit_bias={8: 3.0}, max_tokens=8)),
    "beams": (PROMPT[:8], BeamSearchParams(beam_width=3, max_tokens=6)),
}  # fmt: skip


class Crashing:
    """`client` talks to `core`; `step`, `crash` and `up` happen when they are called.

    News arrives `lag` steps late: by then the engine has done more.
    """

    def __init__(
        self, make: Callable[[], EngineCore], tokenizer: Tokenizer | None = TOKENIZER, *, lag: int = 0
    ) -> None:
        self.client = EngineClient(self, tokenizer, MonotonicClock())
        self.streams: dict[str, Stream] = {}
        self.beams: dict[str, Any] = {}
        self.sent: list[Intake] = []
        self._make = make
        self._lag = lag
        self._on_the_way: list[Outputs] = []
        self._epoch = -1
        self.core = make()
        self.up()

    # -- a Link --------------------------------------------------------------------------------------------------

    async def start(self, listener: Any) -> None: ...

    def send(self, items: Sequence[Intake]) -> None:
        self.sent += items
        for item in items:
            self.core.add(item)

    def progress_age_s(self) -> float:
        return 0.0

    async def close(self) -> None: ...

    # -- what a test does ----------------------------------------------------------------------------------------

    def up(self) -> None:
        self.core = self._make()
        self._epoch += 1
        self._on_the_way.clear()
        self.client.replicas[0].on_up(EngineInfo(vocab_size=VOCAB, max_model_len=256), self._epoch)

    def crash(self, suspects: Sequence[str] = ()) -> None:
        self.client.replicas[0].on_down(Down("it died", tuple(handle_of(s) for s in suspects)))

    def submit(self, name: str, prompt: list[int], params: SamplingParams | BeamSearchParams) -> Request:
        request = build_request(name, prompt, params, limits=LIMITS, tokenizer=TOKENIZER, seed=len(name))
        sampling = params if isinstance(params, SamplingParams) else None
        self.streams[name] = self.client.submit(request, sampling)
        return request

    def submit_all(self) -> None:
        for name, (prompt, params) in KINDS.items():
            self.submit(name, prompt, params)

    def step(self) -> None:
        self._on_the_way.append(Outputs(self._epoch, self.core.step()))
        while len(self._on_the_way) > self._lag:
            self.client.replicas[0].on_outputs(self._on_the_way.pop(0))
        for name, stream in self.streams.items():
            if stream.request.beam is not None and name not in self.beams:
                found = self.client.take_beams(stream)
                if found is not None:
                    self.beams[name] = found

    def drain(self, limit: int = 2000) -> int:
        steps = 0
        while self.core.has_work or any(message.outputs for message in self._on_the_way):
            self.step()
            steps += 1
            assert steps < limit
        return steps

    def results(self) -> dict[str, Any]:
        """Everything a client can see of each request."""
        out: dict[str, Any] = {}
        for name, stream in self.streams.items():
            if stream.request.beam is not None:
                out[name] = self.beams[name]
                continue
            o = stream.output
            assert o.finished, name
            out[name] = (o.error, o.prompt_logprobs, o.outputs)
        return out
