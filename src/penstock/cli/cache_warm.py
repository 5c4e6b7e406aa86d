"""`penstock cache warm`, and what `penstock cache` asks of a server that runs."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.base.errors import ConfigError, EngineError

if TYPE_CHECKING:
    import argparse

    from penstock.bench.http import HttpClient


def is_url(place: str) -> bool:
    return place.startswith(("http://", "https://"))


def prompts_of(path: Path) -> list[dict[str, Any]]:
    """`prompt` or `messages` of each line of a .jsonl file; of any other file its whole text is one prompt.

    Raises ConfigError that names the line.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", field="") from None
    if path.suffix != ".jsonl":
        return [{"prompt": text}]
    found = []
    for n, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError:
            item = None
        if not isinstance(item, dict) or ("prompt" in item) == ("messages" in item):
            raise ConfigError(f'{path}, line {n}: write {{"prompt": "..."}} or {{"messages": [...]}}', field="")
        found.append({name: item[name] for name in ("prompt", "messages") if name in item})
    if not found:
        raise ConfigError(f"{path} has no prompts", field="")
    return found


def warm(args: argparse.Namespace) -> int:
    """Run the prompts, one token each, so that their blocks are where they are looked for. Raises ConfigError."""
    if args.prompts is None:
        raise ConfigError("say which: --prompts FILE (.jsonl with prompt or messages a line, or any text)", field="")
    prompts = prompts_of(args.prompts)
    remote = is_url(args.place)
    tokens, cached = asyncio.run(_warm_server(args, prompts)) if remote else _warm_folder(args, prompts)
    print(f"{len(prompts):,} prompts, {tokens:,} tokens, {cached:,} of them were there")
    return 0


def _warm_folder(args: argparse.Namespace, prompts: list[dict[str, Any]]) -> tuple[int, int]:
    if not args.model:
        raise ConfigError("a folder is warmed by a model: --model PATH, with the settings of the server that will use "
                          "the folder in the environment (PENSTOCK_BLOCK_SIZE, ...)", field="")  # fmt: skip
    from penstock.core.sampling import SamplingParams
    from penstock.launch.llm import LLM

    llm = LLM(args.model, kv_offload=f"disk:{args.place},{args.size}")
    params = SamplingParams(temperature=0, max_tokens=1)
    tokens = cached = 0
    for n, item in enumerate(prompts, 1):
        out = (llm.chat(item["messages"], params) if "messages" in item else llm.generate(item["prompt"], params))[0]
        tokens += len(out.prompt_token_ids)
        cached += out.num_cached_tokens or 0
        _say(n, len(prompts))
    core = llm.engine.core
    while core.has_work:  # the last blocks' orders; what is not written by then is when the process ends
        core.step()
    return tokens, cached


async def _warm_server(args: argparse.Namespace, prompts: list[dict[str, Any]]) -> tuple[int, int]:
    client = _client(args)
    hints: list[dict[str, Any]] = []
    if args.pin or args.for_s is not None:
        hints = [{"action": "pin" if args.pin else "retain", "ttl": min(86400.0, args.for_s or 3600.0)}]
    tokens = cached = 0
    try:
        for n, item in enumerate(prompts, 1):
            path = "/v1/chat/completions" if "messages" in item else "/v1/completions"
            more = {"kv_hints": hints} if hints else {}
            answer = await _post(client, path, {**item, **more, "max_tokens": 1, "temperature": 0})
            usage = answer["usage"]
            tokens += usage["prompt_tokens"]
            cached += usage["prompt_tokens_details"]["cached_tokens"]
            _say(n, len(prompts))
    finally:
        await client.close()
    return tokens, cached


def evict_on_server(args: argparse.Namespace) -> int:
    """Raises ConfigError, EngineError."""

    async def order() -> None:
        client = _client(args)
        try:
            await _post(
                client, "/admin/evict_prefix_cache", {"tenant": args.tenant, "unused_for": args.unused_for or 0}
            )
        finally:
            await client.close()

    asyncio.run(order())
    print("the server has been told")
    return 0


def _client(args: argparse.Namespace) -> HttpClient:
    from penstock.bench.http import HttpClient

    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    return HttpClient(args.place, {"authorization": f"Bearer {key}"} if key else {})


async def _post(client: HttpClient, path: str, body: dict[str, Any]) -> Any:
    from penstock.bench.http import CallError

    try:
        reply = await client.call("POST", path, json.dumps(body).encode())
    except CallError as error:
        raise EngineError(f"the server did not answer: {error}") from None
    try:
        answer = json.loads(reply.body)
    except ValueError:
        answer = {}
    if reply.status != 200:
        message = answer.get("error", {}).get("message", "") if isinstance(answer, dict) else ""
        raise EngineError(f"the server answered {reply.status} to {path}: {message[:300]}")
    return answer


def _say(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done:,} of {total:,}", end="" if done < total else "\n", file=sys.stderr)
