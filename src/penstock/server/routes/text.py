"""/tokenize, /detokenize and /apply-template: what the tokenizer and the chat template make of a text."""

from __future__ import annotations

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from penstock.base.errors import InputError
from penstock.server.call import Asker, Prompt
from penstock.server.context import Server
from penstock.server.encoding import PromptFit
from penstock.server.parsing import check_tools, shown
from penstock.server.parsing.custom import read_tools
from penstock.server.schema.decode import read, renamed
from penstock.server.schema.text import (
    DetokenizeRequest,
    DetokenizeResponse,
    TemplateRequest,
    TemplateResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from penstock.server.transport.sse import as_json, unless_gone
from penstock.server.turns.asking import Caller, asker_of, caller_of, check_model

MAX_TOKENS = 1 << 20


async def tokenize(request: Request) -> Response:
    caller = caller_of(request)
    body = await read(request, TokenizeRequest)
    return as_json(await unless_gone(request, _tokenized(caller, body)))


async def _tokenized(caller: Caller, body: TokenizeRequest) -> TokenizeResponse:
    """Raises InputError, and as `Service.encode_all`."""
    server, asker = caller.server, asker_of(caller)
    check_model(server, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InputError("give either prompt or messages", param="prompt")
    if body.prompt is not None:
        special, fit = body.add_special_tokens is not False, PromptFit.to_count(server.service.limits)
        prompt = await server.service.encode(body.prompt, add_special_tokens=special, fit=fit, asker=asker)
    else:
        prompt = await _chat(server, body, asker)
    piece = server.service.need_tokenizer().id_to_piece
    strings: list[str] | UnsetType = UNSET
    if body.return_token_strs:
        strings = await server.service.encoding.work(len(prompt.ids), asker, lambda: [piece(i) for i in prompt.ids])
    return TokenizeResponse(
        count=len(prompt.ids), max_model_len=server.service.limits.context[0], tokens=prompt.ids, token_strs=strings
    )


async def detokenize(request: Request) -> Response:
    caller = caller_of(request)
    body = await read(request, DetokenizeRequest)
    return as_json(DetokenizeResponse(prompt=await unless_gone(request, _detokenized(caller, body))))


async def _detokenized(caller: Caller, body: DetokenizeRequest) -> str:
    """Raises InputError, and as `TextEncoding.work`."""
    server = caller.server
    check_model(server, body.model)
    tokenizer = server.service.need_tokenizer()
    if len(body.tokens) > MAX_TOKENS:
        raise InputError(f"tokens has {len(body.tokens)} ids; at most {MAX_TOKENS} are possible", param="tokens")
    size = server.service.limits.vocab_size

    def text() -> str:
        for n, token_id in enumerate(body.tokens):
            if not 0 <= token_id < size:
                raise InputError(f"tokens[{n}] must be from 0 to {size - 1}, not {str(token_id)[:40]}", param="tokens")
        return tokenizer.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))

    return await server.service.encoding.work(len(body.tokens), asker_of(caller), text)


async def tokenizer_info(request: Request) -> Response:
    """vLLM's, which remote tokenizers read (lm-eval's: the tokens and the template). For everybody with a key."""
    server: Server = request.app.state.server
    tokenizer = server.service.need_tokenizer()
    answer = TokenizerInfo(
        tokenizer_class=type(tokenizer).__name__,
        bos_token=tokenizer.bos_token or None,
        eos_token=tokenizer.eos_token or None,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_ids[0] if tokenizer.eos_ids else None,
        vocab_size=server.service.limits.num_words or server.service.limits.vocab_size,
        model_max_length=server.service.limits.context[0],
        chat_template=server.service.chat_template,
    )
    return as_json(answer)


async def apply_template(request: Request) -> Response:
    caller = caller_of(request)
    body = await read(request, TemplateRequest)
    return as_json(await unless_gone(request, _applied(caller, body)))


async def _applied(caller: Caller, body: TemplateRequest) -> TemplateResponse:
    """Raises InputError, and as `Service.encode_all`."""
    server, asker = caller.server, asker_of(caller)
    check_model(server, body.model)
    ids = (await _chat(server, body, asker)).ids
    decode = server.service.need_tokenizer().decode
    text = await server.service.encoding.work(len(ids), asker, decode, ids, skip_special_tokens=False)
    return TemplateResponse(prompt=text, tokens=ids, count=len(ids))


async def _chat(server: Server, body: TokenizeRequest | TemplateRequest, asker: Asker) -> Prompt:
    asked = read_tools(body.tools, nested=True)
    with renamed(asked.names):
        checked = check_tools(asked.listed)
    messages, tools = shown(server, body.messages or [], checked, None, body.chat_template)
    return await server.service.encode_chat(
        messages,
        tools=tools,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        fit=PromptFit.to_count(server.service.limits),
        asker=asker,
    )


ROUTES: list[BaseRoute] = [
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/tokenizer_info", tokenizer_info, methods=["GET"]),
    Route("/apply-template", apply_template, methods=["POST"]),
]
DOCS = {
    ("POST", "/tokenize"): ("Token ids of a text or of a conversation", TokenizeRequest, TokenizeResponse),
    ("POST", "/detokenize"): ("The text of token ids", DetokenizeRequest, DetokenizeResponse),
    ("GET", "/tokenizer_info"): ("The tokenizer's special tokens and the chat template", None, TokenizerInfo),
    ("POST", "/apply-template"): ("A conversation as the model will read it", TemplateRequest, TemplateResponse),
}
EXAMPLES = {
    "/tokenize": {"prompt": "Once upon a time"},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/apply-template": {"messages": [{"role": "user", "content": "Hello!"}]},
}
