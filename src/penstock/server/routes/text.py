"""/tokenize, /detokenize and /apply-template: what the tokenizer and the chat template make of a text."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from penstock.base.errors import InputError
from penstock.server.context import Prompt, Server
from penstock.server.decode import read
from penstock.server.parsing import check_tools
from penstock.server.schema.text import (
    DetokenizeRequest,
    DetokenizeResponse,
    TemplateRequest,
    TemplateResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from penstock.server.sse import encoder
from penstock.server.turns import check_model

MAX_TOKENS = 1 << 20


async def tokenize(request: Request) -> Response:
    server: Server = request.app.state.server
    body = await read(request, TokenizeRequest)
    check_model(server, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InputError("give either prompt or messages", param="prompt")
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        prompt = await server.service.encode(body.prompt, add_special_tokens=special)
    else:
        prompt = await _chat(server, body)
    tokenizer = server.service.need_tokenizer()
    answer = TokenizeResponse(
        count=len(prompt.ids),
        max_model_len=server.service.limits.context[0],
        tokens=prompt.ids,
        token_strs=[tokenizer.id_to_piece(i) for i in prompt.ids] if body.return_token_strs else UNSET,
    )
    return _json(answer)


async def detokenize(request: Request) -> Response:
    server: Server = request.app.state.server
    body = await read(request, DetokenizeRequest)
    check_model(server, body.model)
    tokenizer = server.service.need_tokenizer()
    if len(body.tokens) > MAX_TOKENS:
        raise InputError(f"tokens has {len(body.tokens)} ids; at most {MAX_TOKENS} are possible", param="tokens")
    size = server.service.limits.vocab_size
    for n, token_id in enumerate(body.tokens):
        if not 0 <= token_id < size:
            raise InputError(f"tokens[{n}] must be from 0 to {size - 1}, not {str(token_id)[:40]}", param="tokens")
    text = tokenizer.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
    return _json(DetokenizeResponse(prompt=text))


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
        vocab_size=server.service.limits.vocab_size,
        model_max_length=server.service.limits.context[0],
        chat_template=server.service.chat_template,
    )
    return _json(answer)


async def apply_template(request: Request) -> Response:
    server: Server = request.app.state.server
    body = await read(request, TemplateRequest)
    check_model(server, body.model)
    prompt = await _chat(server, body)
    text = server.service.need_tokenizer().decode(prompt.ids, skip_special_tokens=False)
    return _json(TemplateResponse(prompt=text, tokens=prompt.ids, count=len(prompt.ids)))


async def _chat(server: Server, body: TokenizeRequest | TemplateRequest) -> Prompt:
    return await server.service.encode_chat(
        body.messages or [],
        tools=check_tools(body.tools) or None,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
    )


def _json(value: Any) -> Response:
    return Response(encoder.encode(value), media_type="application/json")


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
