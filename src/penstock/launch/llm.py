"""`LLM`: offline generation in one process, with vLLM's names."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from penstock.base.errors import EngineError, InputError
from penstock.base.hashing import digest
from penstock.base.rng import derive_seed
from penstock.compress.options import read_options
from penstock.config import EngineConfig, from_kwargs
from penstock.core.adapter import AdapterRef, LoRARequest
from penstock.core.compression import PromptCompression
from penstock.core.kv_hints import KVHint, plain, read_hints
from penstock.core.output import (
    BeamSearchOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    EngineOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from penstock.core.request import Abort, Control, Request
from penstock.core.sampling import BeamSearchParams, SamplingParams
from penstock.core.weight_swap import MODES, WeightsOrder
from penstock.engine.client import OutputProcessor
from penstock.launch.build import Engine, start
from penstock.launch.compressor import ChatSource, Compressor
from penstock.launch.decide import decide
from penstock.launch.lengths import Made, lengths_of, with_lengths
from penstock.launch.progress import StepProgress, loading
from penstock.launch.vectors import Vectors, failed
from penstock.text.boundaries import changed_after, num_common
from penstock.text.decisions import MIN_LABEL_MASS, PLAIN_KWARGS, DecisionQuestion, Ids, Judgement, label_params
from penstock.text.grammar.source import kind_of
from penstock.text.modules import NO_MODULES, AskedModules, joined, padding_id, read_modules
from penstock.text.roles import known_roles
from penstock.text.template import choose_template, encode_chat
from penstock.text.validate import build_request

Prompt = str | Mapping[str, Any]
Message = Mapping[str, Any]
Adapters = LoRARequest | Sequence[LoRARequest | None] | None
Compression = PromptCompression | Mapping[str, Any]


@dataclass(frozen=True)
class _Tokens:
    """A prompt as ids. `param` is how errors call it."""

    text: str | None
    ids: Any
    namespace: bytes = b""
    param: str = "prompt"
    chat: ChatSource | None = None
    """The conversation that it was made of."""
    modules: Sequence[int] = ()
    recompute: float = 0.0


class LLM:
    """A model, loaded and ready.

    >>> llm = LLM("path/to/stories260K")
    >>> llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=32))[0].outputs[0].text

    Args:
        model: a folder with `config.json` and safetensors, or a llama2.c `.bin` (or a folder holding one).
        **settings: any field of `EngineConfig` (`dtype`, `max_model_len`, `block_size`, `skip_tokenizer_init`, ...).
            They beat environment variables (`PENSTOCK_MAX_MODEL_LEN`, ...), which beat the defaults.

    Raises: ModelError or UnsupportedError for a model that cannot be run, ConfigError or CapacityError for settings.
    """

    def __init__(self, model: str | os.PathLike[str], **settings: Any) -> None:
        self._start(from_kwargs(os.environ, model=os.fspath(model), **settings))

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """The same from a configuration that was put together elsewhere (command line, TOML file)."""
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    def _start(self, config: EngineConfig) -> None:
        self.config = config
        with loading() as progress:
            self._engine: Engine = start(self.config, progress=progress)
        self._compressor = Compressor(self.config, self._engine.tokenizer)
        self._processor = OutputProcessor(self._engine.tokenizer, self._engine.clock)
        self._lengths = lengths_of(self.config, self._engine.tokenizer)
        self._counter = 0
        self._vectors = Vectors(self._engine, self.get_tokenizer, self._pool, self._next_number)
        self._news: set[str] = set()

    # -- what vLLM's users call ----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        prompt_compression: Compression | None = None,
        kv_hints: Any = None,
        lora_request: Adapters = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts; outputs come in the order of the prompts.

        A prompt is a string, `{"prompt": str}` or `{"prompt_token_ids": [ids]}`; the dictionaries may add
        `"cache_salt"`, which keeps its cached blocks from requests with another salt. All prompts are checked before
        any of them runs. `priority`: one number per prompt, smaller goes first under `scheduling_policy="priority"`.
        `prompt_compression`: drop tokens of every prompt first (`core.compression`); what is left is the prompt.
        `kv_hints`: what is to happen to the cached blocks of every prompt (`core.kv_hints`), as
        `[{"action": "retain", "ttl": "5m"}]`. `lora_request`: an adapter for all prompts, or one (or None) for each;
        needs `enable_lora`.
        Raises InputError naming the field that has to change.
        """
        listed = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        params = self._params_for(sampling_params, len(listed))
        ranks = self._priorities(priority, len(listed))
        refs = self._adapters(lora_request, len(listed))
        made = [
            (*self._request(self._tokens(p), s, rank, prompt_compression, kv_hints, ref), s)
            for p, s, rank, ref in zip(listed, params, ranks, refs, strict=True)
        ]
        return self._run(made, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        prompt_compression: Compression | None = None,
        kv_hints: Any = None,
        lora_request: Adapters = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them. Text in a message can never open a role.

        `prompt_compression`, `kv_hints` and `lora_request` as in `generate`; a hint may count `messages`, not tokens.
        """
        if len(messages) == 0:
            raise InputError("messages must not be empty", param="messages")
        many = not isinstance(messages[0], Mapping)
        conversations: list[Any] = list(messages) if many else [messages]
        params = self._params_for(sampling_params, len(conversations))
        made = []
        refs = self._adapters(lora_request, len(conversations))
        for conversation, s, ref in zip(conversations, params, refs, strict=True):
            prompt = self._chat_tokens(
                conversation,
                chat_template=chat_template,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
            made.append((*self._request(prompt, s, 0, prompt_compression, kv_hints, ref), s))
        return self._run(made, use_tqdm)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, lora_request: Adapters = None,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:  # fmt: skip
        """The `beam_width` best continuations of each prompt, best first (rules: `engine.beam`)."""
        listed = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        refs = self._adapters(lora_request, len(listed))
        requests = [self._request(self._tokens(p), params, adapter=ref) for p, ref in zip(listed, refs, strict=True)]
        for request, text in requests:
            self._processor.add(request, None, text)
        done: dict[str, BeamSearchOutput] = {}
        with StepProgress(len(requests), use_tqdm) as progress:
            for request_id in self._drive([r for r, _ in requests]):
                if self._processor.is_finished(request_id):
                    done[request_id] = self._processor.beam_output(request_id)
                    progress.finished()
        return [done[r.request_id] for r, _ in requests]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        lora_request: Adapters = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = False,
    ) -> list[EmbeddingRequestOutput]:
        """One vector per prompt: a pooled hidden state (`core.pooler`), of length 1 unless `normalize` is false.

        Where nothing is said, the model's own files decide, or it is the last token's, of length 1.
        `truncate_prompt_tokens`: longer texts are cut to so many tokens; -1: to what the model reads.
        """
        listed = self._listed(prompts)
        return self._vectors.embed(
            listed, pooling=pooling, normalize=normalize, dimensions=dimensions, truncate=truncate_prompt_tokens,
            progress=use_tqdm, adapters=self._adapters(lora_request, len(listed)),
        )  # fmt: skip

    def encode(
        self, prompts: Prompt | Sequence[Prompt], *, pooling_task: str = "token_embed",
        truncate_prompt_tokens: int | None = None, use_tqdm: bool = False,
    ) -> list[PoolingRequestOutput]:  # fmt: skip
        """What the model gives, as numbers: hidden states of all tokens, or what `pooling_task` (embed, classify) asks
        for, before any norm or softmax."""
        return self._vectors.encode(
            self._listed(prompts), task=pooling_task, truncate=truncate_prompt_tokens, progress=use_tqdm
        )

    def classify(
        self, prompts: Prompt | Sequence[Prompt], *, truncate_prompt_tokens: int | None = None, use_tqdm: bool = False
    ) -> list[ClassificationRequestOutput]:
        """A score per label for each prompt. Raises: InputError for a model without a classifier's head."""
        return self._vectors.classify(
            self._listed(prompts), truncate=truncate_prompt_tokens, progress=use_tqdm
        )  # fmt: skip

    def score(
        self, text_1: str | Sequence[str], text_2: str | Sequence[str], *, truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = False,
    ) -> list[ScoringRequestOutput]:  # fmt: skip
        """How well texts go together: by a cross-encoder's head, or the cosine of their vectors."""
        first, second = ([text] if isinstance(text, str) else list(text) for text in (text_1, text_2))
        return self._vectors.score(
            first, second, self._tokens, truncate=truncate_prompt_tokens, progress=use_tqdm
        )  # fmt: skip

    def decide(
        self,
        input: str | Sequence[Message],
        questions: Sequence[DecisionQuestion],
        *,
        temperature: float = 1.0,
        min_label_mass: float = MIN_LABEL_MASS,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = False,
    ) -> list[Judgement]:
        """Answers to typed questions about a text or a conversation, in their order (`text.decisions`).

        Nothing is generated: the model's probabilities of labels are read where its answer would begin. The first
        question computes what all share, the others find it in the prefix cache. `lora_request`: an adapter that the
        answers are read with. Raises InputError.
        """
        kwargs = {**PLAIN_KWARGS, **(chat_template_kwargs or {})}
        adapter = self._adapters(lora_request, 1)[0]

        def encode(messages: Sequence[Message]) -> _Tokens:
            return self._chat_tokens(messages, chat_template_kwargs=kwargs)

        def run(asked: Sequence[tuple[_Tokens, Ids, list[int]]]) -> list[RequestOutput]:
            made = []
            for prompt, before, tokens in asked:
                params = label_params(tokens)
                whole = replace(prompt, ids=[*prompt.ids, *before])
                made.append((*self._request(whole, params, adapter=adapter), params))
            return self._run(made, use_tqdm)

        tokenizer, vocab_size = self.get_tokenizer(), self._engine.limits.vocab_size
        reading = {"temperature": temperature, "min_label_mass": min_label_mass}
        return decide(tokenizer, vocab_size, input, questions, encode, run, **reading)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        prompt_compression: Compression | None = None,
        kv_hints: Any = None,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """One prompt; yields the output so far after every step that changed it. Closing the iterator aborts it.

        The prompt is checked by the call itself, not by the first `next`. Raises InputError.
        """
        params = sampling_params or self.get_default_sampling_params()
        ref = self._adapters(lora_request, 1)[0]
        made = self._request(self._tokens(prompt), params, 0, prompt_compression, kv_hints, ref)
        return self._stream(*made, params)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        prompt_compression: Compression | None = None,
        kv_hints: Any = None,
        lora_request: LoRARequest | None = None,
        **chat: Any,
    ) -> Iterator[RequestOutput]:
        """`stream` for a conversation; `chat` takes the keyword arguments of `chat`."""
        params = sampling_params or self.get_default_sampling_params()
        prompt = self._chat_tokens(messages, **chat)
        ref = self._adapters(lora_request, 1)[0]
        return self._stream(*self._request(prompt, params, 0, prompt_compression, kv_hints, ref), params)

    def get_default_sampling_params(self, **named: Any) -> SamplingParams:
        """What calls without sampling_params get (vLLM's name): the model's own, or mild ones (`text.defaults`).

        `named`: fields that a user named; the others are what a server adds to them. `SamplingParams(...)` stays
        neutral in what it does not name, and their length is its own.
        """
        defaults = self._engine.sampling_defaults
        found = {} if defaults is None else defaults.beside(named)
        found.pop("max_tokens", None)
        return SamplingParams(**(found | named))

    def get_tokenizer(self) -> Any:
        """The tokenizer. Raises InputError if the engine was started without one."""
        if self._engine.tokenizer is None:
            raise InputError(
                f"there is no tokenizer ({self._engine.no_tokenizer}); pass {{'prompt_token_ids': [...]}}, or name one "
                "with tokenizer=...",
                param="prompt",
            )
        return self._engine.tokenizer

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. What runs goes on, but puts nothing into the cache any more."""
        self._engine.core.kv.reset_prefix_cache()

    def update_weights(
        self, path: str | os.PathLike[str], *, version: str | None = None, mode: str = "wait"
    ) -> str:  # fmt: skip
        """Other weights of the same model, from the next token on that this call has not computed. Returns their
        version: `version`, or the beginning of the hash of their content.

        `mode`: what becomes of open streams. `wait`: they end over the old weights first; `abort`; `recompute`: they go
        on over the new ones, and their keys and values are computed again; `keep`: those stay as they are, and what
        follows is that of neither weights. Outputs say which weights their tokens are of (`weight_version`).
        Raises PenstockError with why the old ones stay: of another model, damaged, no memory for both.
        """
        if mode not in MODES:
            raise InputError(f"mode: {mode!r} is none of {', '.join(MODES)}", param="mode")
        core, name = self._engine.core, f"weights-{self._next_number()}"
        facts = core.executor.ready_weights(os.fspath(path))
        order = WeightsOrder(os.fspath(path), version or facts.content[:12], mode, facts)
        self._processor.orders[name] = order
        core.add(Control(kind="weights", request_id=name, weights=order))
        while name in self._processor.orders:
            self._step()
        return order.version

    @property
    def weight_version(self) -> str:
        """Of the weights that run."""
        return self._processor.version

    @property
    def engine(self) -> Engine:
        """The parts: core, plan and its decisions, limits, tokenizer."""
        return self._engine

    # -- prompts and parameters -> requests ----------------------------------------------------------------------

    def _params_for(
        self, params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        if params is None:
            return [self.get_default_sampling_params()] * num_prompts
        if isinstance(params, SamplingParams):
            return [params] * num_prompts
        listed = list(params)
        if len(listed) != num_prompts:
            raise InputError(
                f"{num_prompts} prompts came with {len(listed)} sampling_params; give one for all or one for each",
                param="sampling_params",
            )
        return listed

    def _tokens(self, prompt: Prompt) -> _Tokens:
        if isinstance(prompt, str):
            return _Tokens(prompt, self._encode(prompt))
        if not isinstance(prompt, Mapping):
            raise InputError(
                f"a prompt is a string, {{'prompt': str}} or {{'prompt_token_ids': [int]}}, not a "
                f"{type(prompt).__name__}",
                param="prompt",
            )
        unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt", "prompt_cache"}
        if unknown:
            raise InputError(f"unknown prompt field {sorted(map(str, unknown))[0]!r}", param="prompt")
        salt = prompt.get("cache_salt")
        if salt is not None and (not isinstance(salt, str) or not 0 < len(salt.encode()) <= 256):
            raise InputError("cache_salt must be a string of 1 to 256 bytes", param="cache_salt")
        namespace = digest(b"salt", salt.encode()) if salt is not None else b""
        ids = prompt.get("prompt_token_ids")
        text = prompt.get("prompt")
        asked = read_modules(prompt.get("prompt_cache"))
        if asked.modules:
            return self._of_modules(asked, ids if ids is not None else text, namespace)
        if ids is not None:
            return _Tokens(text if isinstance(text, str) else None, ids, namespace, "prompt_token_ids")
        if not isinstance(text, str):
            raise InputError("a prompt needs 'prompt' (a string) or 'prompt_token_ids' (a list)", param="prompt")
        return _Tokens(text, self._encode(text), namespace)

    def _of_modules(self, asked: AskedModules, rest: Any, namespace: bytes) -> _Tokens:
        if self.config.cache.kv_allocator != "modules":
            raise InputError(NO_MODULES, param="prompt_cache")
        modules = [
            self._encode(one.text) if one.text is not None else list(one.token_ids or ()) for one in asked.modules
        ]
        ids = self.get_tokenizer().encode(rest, add_special_tokens=False) if isinstance(rest, str) else list(rest or ())
        size, padding = self._engine.plan.block_size, padding_id(self._engine.tokenizer)
        ids, ends = joined(modules, ids, size, padding)
        return _Tokens(None, ids, namespace, modules=ends, recompute=asked.recompute)

    def _encode(self, text: str) -> list[int]:
        if not text:
            raise InputError("prompt must not be empty", param="prompt")
        ids: list[int] = self.get_tokenizer().encode(text)
        return ids

    def _chat_tokens(
        self,
        messages: Any,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        **options: Any,
    ) -> _Tokens:
        engine = self._engine
        named = engine.named_templates
        template = choose_template(engine.chat_template, chat_template, trusted=True, named=named, tools=bool(tools))
        messages = known_roles(template, messages)
        tokenizer = self.get_tokenizer()
        options |= {"tools": tools, "kwargs": chat_template_kwargs}
        ids = encode_chat(tokenizer, template, messages, **options)
        return _Tokens(None, ids, param="messages", chat=ChatSource.of(tokenizer, template, messages, options))

    @staticmethod
    def _priorities(priority: Sequence[int] | None, num_prompts: int) -> list[int]:
        ranks = [0] * num_prompts if priority is None else list(priority)
        if len(ranks) != num_prompts or any(type(rank) is not int or abs(rank) > 2**31 for rank in ranks):
            raise InputError(
                f"priority must be {num_prompts} whole numbers, one per prompt, within 2^31", param="priority"
            )
        return ranks

    def _request(
        self,
        prompt: _Tokens,
        params: SamplingParams | BeamSearchParams,
        priority: int = 0,
        compression: Compression | None = None,
        kv_hints: Any = None,
        adapter: AdapterRef | None = None,
    ) -> tuple[Request, str | None]:
        """Check everything, then make the engine's request. Raises InputError."""
        number, arrival_s = self._counter, self._engine.clock.now()
        ids, text = prompt.ids, prompt.text
        if compression is not None and prompt.modules:
            raise InputError("prompt_compression changes the texts of prompt_cache; use one of them",
                             param="prompt_compression")  # fmt: skip
        if compression is not None:
            options = read_options(compression)
            asks = isinstance(params, SamplingParams) and params.prompt_logprobs is not None
            self._compressor.check(options, prompt_logprobs=asks)
            found = self._compressor.compress(ids, options, chat=prompt.chat, param=prompt.param)
            ids, text = found.ids, found.text
        hints = self._hints(kv_hints, prompt)
        request = build_request(
            str(number),
            ids,
            params,
            limits=self._engine.limits,
            tokenizer=self._engine.tokenizer,
            seed=derive_seed(self.config.model.seed, number),
            priority=priority,
            namespace=prompt.namespace,
            arrival_s=arrival_s,
            param=prompt.param,
            hints=hints,
            modules=prompt.modules,
            recompute=prompt.recompute,
            adapter=adapter,
        )
        if request.rules.grammar is not None:
            kind = kind_of(params.structured_outputs) if isinstance(params, SamplingParams) else ""
            self._engine.core.executor.prepare(request.rules.grammar, f"structured_outputs.{kind}")
        self._counter += 1
        return request, text

    def _hints(self, given: Any, prompt: _Tokens) -> list[KVHint]:
        """Hints on the first messages of a conversation become hints on tokens. Raises InputError."""
        asked = read_hints(given)
        chat, found = prompt.chat, []
        for n, one in enumerate(asked):
            num = one.num_messages
            if num is None or chat is None:
                found += plain([one])
                continue
            if num > len(chat.messages):
                name = f"kv_hints[{n}].messages"
                raise InputError(f"{name} is {num}, but there are {len(chat.messages)}", param=name)
            changed = changed_after(chat.messages, num)
            hint = one.hint
            if changed is not None:
                options = {k: v for k, v in chat.render.items() if k not in ("bos_token", "eos_token")}
                other = encode_chat(self.get_tokenizer(), chat.template, changed, **options)
                hint = msgspec.structs.replace(hint, num_tokens=num_common(prompt.ids, other))
            found.append(hint)
        if any(hint.action == "share" for hint in found):
            raise InputError("kv_hints: share is between the keys of a server", param="kv_hints")
        return found

    def _adapters(self, asked: Adapters, count: int) -> list[AdapterRef | None]:
        """Of each prompt. Raises InputError."""
        if asked is None:
            return [None] * count
        from penstock.launch.adapters import requested  # nobody else needs it

        each = [asked] * count if isinstance(asked, LoRARequest) else list(asked)
        if len(each) != count:
            raise InputError(f"{count} prompts came with {len(each)} lora_requests; give one, or one for each",
                             param="lora_request")  # fmt: skip
        return [requested(self._engine.adapters, one) for one in each]

    def _listed(self, prompts: Prompt | Sequence[Prompt]) -> list[_Tokens]:
        return [self._tokens(p) for p in ([prompts] if isinstance(prompts, str | Mapping) else prompts)]

    def _next_number(self) -> int:
        self._counter += 1
        return self._counter - 1

    # -- running -------------------------------------------------------------------------------------------------

    def _run(self, made: list[Made], show_progress: bool) -> list[RequestOutput]:
        return self._run_all(self._expecting(made), show_progress)

    def _expecting(self, made: list[Made]) -> list[Made]:
        if self._lengths is None:
            return made
        return with_lengths(self._lengths, made, lambda asked: self._run_all(asked, False))

    def _learn(self, request: Request, output: RequestOutput) -> None:
        if self._lengths is not None:
            self._lengths.ended(request, output)

    def _run_all(self, made: list[Made], show_progress: bool) -> list[RequestOutput]:
        for request, text, params in made:
            self._processor.add(request, params, text)
        done: dict[str, RequestOutput] = {}
        requests = {request.request_id: request for request, _, _ in made}
        with StepProgress(len(made), show_progress) as progress:
            for request_id in self._drive(list(requests.values())):
                if self._processor.is_finished(request_id):
                    output = self._processor.output(request_id)
                    done[request_id] = output
                    self._learn(requests[request_id], output)
                    progress.tokens(sum(len(o.token_ids) for o in output.outputs))
                    progress.finished()
        return [done[r.request_id] for r, _, _ in made]

    def _pool(self, requests: list[Request], show_progress: bool) -> list[EngineOutput]:
        for request in requests:
            self._processor.add(request, None, None)
        done: dict[str, EngineOutput] = {}
        with StepProgress(len(requests), show_progress) as progress:
            for request_id in self._drive(requests):
                if self._processor.is_finished(request_id):
                    done[request_id] = self._processor.pooled_output(request_id)
                    progress.finished()
        return [failed(done[request.request_id]) for request in requests]

    def _stream(self, request: Request, text: str | None, params: SamplingParams) -> Iterator[RequestOutput]:
        [(request, text, params)] = self._expecting([(request, text, params)])
        self._processor.add(request, params, text)
        for request_id in self._drive([request]):
            output = self._processor.output(request_id)
            if output.finished:
                self._learn(request, output)
            yield output

    def _drive(self, requests: list[Request]) -> Iterator[str]:
        """Step until these requests are done; yields the id of each whenever it has news.

        Several drives may be open at once (streams): whoever steps keeps the others' news for them. A caller that stops
        early, for whatever reason, aborts its own requests and nobody else's.
        """
        core = self._engine.core
        mine = {r.request_id: None for r in requests}
        for request in requests:
            core.add(request)
        try:
            while mine:
                for request_id in [i for i in mine if i in self._news]:
                    self._news.discard(request_id)
                    if self._processor.is_finished(request_id):
                        del mine[request_id]
                    yield request_id
                if mine and self._news.isdisjoint(mine):  # others may have stepped while the caller had our news
                    self._step()
        except BaseException:
            for request_id in mine:
                core.add(Abort(request_id=request_id))
                self._processor.discard(request_id)
                self._news.discard(request_id)
            if mine:
                self._step()
            raise

    def _step(self) -> None:
        """One step of the engine for everybody."""
        core = self._engine.core
        if not core.has_work:
            raise EngineError("the engine has nothing to do, but a request has not ended")
        self._news.update(self._processor.process(core.step()))
        if core.scheduler.wake_s is not None:
            self._engine.clock.wait_until(core.scheduler.wake_s)  # the policy waits for company
        for abort in self._processor.aborts:
            core.add(abort)
        self._processor.aborts.clear()
        while not core.groups and core.has_work:
            core.step()  # aborts and steps in flight of what has ended: let none wait for the next request
