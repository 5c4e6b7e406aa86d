"""One model's server: from what its front end has read to a service and its parts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.base.errors import ConfigError, InputError
from penstock.config import ServeConfig
from penstock.config.lora import parse_modules
from penstock.config.offload import offload_of
from penstock.config.server import ServerConfig
from penstock.core.replica_roles import roles_of
from penstock.engine.faults import parse as parse_fault
from penstock.engine.frontend import EngineClient
from penstock.engine.link import Link
from penstock.engine.membership import Membership
from penstock.engine.process_link import ProcessLink
from penstock.engine.spawn import Spawned
from penstock.launch.front import Front, limits_from
from penstock.launch.lengths import lengths_of
from penstock.server.adapters import Adapters
from penstock.server.admission.early import mode_of
from penstock.server.context import Server
from penstock.server.parsing.choose import check_parsers
from penstock.server.service import Service
from penstock.server.turns import compression
from penstock.text.template import check_template

if TYPE_CHECKING:
    from penstock.base.clock import Clock
    from penstock.engine.remote_link import RemoteLink
    from penstock.launch.adapters import AdapterBook
    from penstock.text.limits import Limits


NO_STORE = (
    "keys and values go from engine to engine by a store; give kv_offload, too (remote:HOST:PORT where engines are on "
    "other hosts)"
)


def checked(config: ServeConfig) -> str | None:
    """The chat template that is given, if there is one. Raises ConfigError for what is wrong with words of a server."""
    try:
        check_parsers(config.server.tool_call_parser, config.server.reasoning_parser)
    except InputError as error:
        raise ConfigError(str(error), field=error.param) from None
    return given_template(config)


def assembled(
    config: ServeConfig, client: EngineClient, front: Front, given: str | None, names: Sequence[str], clock: Clock
) -> Server:
    """One model's server without its parts. The client knows what its engine is, or will be."""
    client.use_tokenizer(front.tokenizer)
    client.tells_weights = config.server.weights_root is not None
    info = client.info
    assert info is not None
    service = Service(
        client,
        front.tokenizer,
        front.chat_template if given is None else given,
        limits_from(
            info,
            max_n=config.server.max_n,
            max_logprobs=config.server.max_logprobs,
            max_logprob_entries=config.server.max_logprob_entries,
        ),
        config.server,
        clock,
        named_templates=front.named_templates if given is None else None,
        no_tokenizer=front.no_tokenizer,
        seed=config.engine.model.seed,
    )
    server = Server(config.server, client, service, names[0], int(time.time()), list(names[1:]))
    found = any(name == "speculative_config" and value != "none" for name, value, _ in info.decisions)
    server.speculates = found or config.engine.speculation is not None  # asked for, or with the checkpoint
    server.warm_grammars = config.engine.cache.warm_grammars
    server.parts["front"] = front
    server.parts["by_due"] = config.engine.scheduler.scheduling_policy.split(":")[0] == "slo"
    lengths = service.lengths = lengths_of(config.engine, front.tokenizer)
    if lengths is not None:
        client.on_finish.append(lambda stream, output: lengths.ended(stream.request, output))
    server.parts["fair"] = config.engine.scheduler.scheduling_policy.split(":")[0] == "fair"
    server.closers += [client.stop, service.encoding.queue.close]
    return server


async def furnish(server: Server, config: ServeConfig, parts: Iterable[Any]) -> None:
    """Raises ConfigError."""
    front: Front = server.parts["front"]
    if front.adapters is not None:
        server.adapters = await open_adapters(
            config.server, front.adapters, [server.model_name, *server.aliases], server.service.limits
        )
        if config.engine.lora.finetune_root is not None:
            from penstock.server.finetuning import jobs  # nobody else needs it

            await jobs.install(server, config.engine)
    compression.install(server, config.engine)
    for part in parts:
        await part.install(server)


def with_adapters(config: ServeConfig) -> ServeConfig:
    """Who names adapters, or makes some, wants them. Raises ConfigError."""
    wanted = config.engine.lora.finetune_root is not None or parse_modules(config.server.lora_modules)
    if not wanted or config.engine.lora.enable_lora:
        return config
    lora = replace(config.engine.lora, enable_lora=True)
    return replace(config, engine=replace(config.engine, lora=lora))


async def open_adapters(config: ServerConfig, book: AdapterBook, taken: Sequence[str], limits: Limits) -> Adapters:
    """Those of lora_modules, read and checked. Raises ConfigError."""
    from penstock.launch.adapters import read_modules  # nobody else needs it

    known = await asyncio.to_thread(read_modules, book, config.lora_modules)
    try:
        return Adapters(book, known, config.lora_root, taken, limits)
    except InputError as error:
        raise ConfigError(str(error), field="lora_modules") from None


def checked_faults(config: ServeConfig) -> list[str]:
    """Raises ConfigError for a fault that does not exist."""
    faults = config.server.names("fault")
    for text in faults:
        parse_fault(text)
    return faults


def make_link(config: ServeConfig, spare: Spawned | None = None, *, block_secret: bytes = b"") -> Link:
    """`block_secret`: see `ProcessLink`. Raises ConfigError for a fault that does not exist."""
    faults = checked_faults(config)
    if not config.server.engine_in_process:
        return ProcessLink(
            config.engine.as_kwargs(), max_restarts_per_minute=config.server.max_restarts_per_minute, faults=faults,
            hang_s=config.server.watchdog_timeout, spare=spare, block_secret=block_secret,
        )  # fmt: skip
    if faults:
        raise ConfigError("fault: an engine in the server's own process would take it along", field="fault")
    # All of an engine, which the process of a front end has no use for otherwise.
    from penstock.engine.thread_link import ThreadLink
    from penstock.launch.build import local_engine

    if config.engine.lora.finetune_root is None:
        return ThreadLink(local_engine(config.engine))
    from penstock.launch.finetune import finetuner_of

    return ThreadLink(local_engine(config.engine), partial(finetuner_of, config.engine))


def make_client(config: ServeConfig, clock: Clock, link: Link | None, spare: Spawned | None) -> EngineClient:
    """Of one engine, or of `data_parallel_size` of them, or of up to `max_replicas`. Raises ConfigError for a policy
    that does not exist."""
    run = config.engine.execution
    size = run.data_parallel_size
    mode_of(config.server.early_rejection, config.server.replica_roles)
    if not run.is_replicated or link is not None:
        return EngineClient(link or make_link(config, spare), None, clock)
    server = config.server
    given = {
        "engine_in_process": server.engine_in_process, "weights_root": server.weights_root is not None,
        "keep_alive": server.keep_alive is not None,
    }  # fmt: skip
    for name in (name for name, is_given in given.items() if is_given):
        raise ConfigError(
            f"{name}: it does not go together with several engines of one model yet; leave it away, or "
            f"{config.engine.execution.replicas_field}",
            field=name,
        )
    # Who serves one engine has no use for routers.
    from penstock.engine.placement import EnginePlacement
    from penstock.route import ROUTERS

    placing = EnginePlacement(ROUTERS.get(server.route_policy)())
    secret = placing.block_secret
    links = [make_link(config, spare if number == 0 else None, block_secret=secret) for number in range(run.size_here)]
    late: list[RemoteLink] = []
    if run.num_elsewhere:
        late = remote_links(config, secret)
    offload = offload_of(config.engine.cache.kv_offload)
    # A disk of one host is nothing that another's engine could read.
    has_store = offload is not None and (not late or bool(offload.remotes))
    roles = None if server.replica_roles is None else roles_for(server.replica_roles, size, has_store=has_store)
    everyone: list[Link] = [*links, *late]
    client = EngineClient(
        everyone[0], None, clock, further=everyone[1:], late=late, placing=placing, has_store=has_store
    )  # fmt: skip
    if roles is not None:
        client.handover.set_roles(dict(enumerate(roles)))
    if server.enable_migration:
        if not has_store:
            raise ConfigError(
                f"enable_migration: {NO_STORE}",
                field="enable_migration",
            )
        from penstock.engine.rescheduling import Rescheduling
        from penstock.route.rescheduling import Rescheduler

        client.rescheduling = Rescheduling(client, Rescheduler())
    return client


def remote_links(config: ServeConfig, block_secret: bytes) -> list[RemoteLink]:
    """To the engines that join from other hosts (`launch.engine_hosts`), by number. Raises as `make_link`, and
    ConfigError for a server whose engines come and go by themselves."""
    from penstock.engine.remote_link import RemoteLink

    server, run = config.server, config.engine.execution
    if server.autoscale is not None:
        raise ConfigError(
            "autoscale: it starts and ends engines of this host; leave it away, or data_parallel_size_local",
            field="autoscale",
        )
    faults = checked_faults(config)
    return [
        RemoteLink(
            number, config.engine.as_kwargs(), max_restarts_per_minute=server.max_restarts_per_minute, faults=faults,
            hang_s=server.watchdog_timeout, block_secret=block_secret,
        )
        for number in range(run.size_here, run.data_parallel_size)
    ]  # fmt: skip


def roles_for(given: str, size: int, *, has_store: bool) -> list[str]:
    """What `replica_roles` makes of so many engines. Raises ConfigError."""
    try:
        roles = roles_of(given, size)
    except ValueError as error:
        raise ConfigError(f"replica_roles: {error}", field="replica_roles") from None
    if not has_store:
        raise ConfigError(
            f"replica_roles: {NO_STORE}",
            field="replica_roles",
        )
    return roles


def add_membership(server: Server, config: ServeConfig) -> None:
    """Engines may come and go from now on."""
    most = config.engine.execution.most_replicas
    placing = server.client.placing
    make = partial(make_link, config, block_secret=b"" if placing is None else placing.block_secret)
    group = server.parts["replicas"] = Membership(server.client, make, most)
    server.closers.append(group.close)


def model_name(path: str) -> str:
    """How clients call a model: a Hub id as it is, a folder or file by its last name (where it is stays private)."""
    return Path(path).resolve().name if Path(path).exists() else path


def given_template(config: ServeConfig) -> str | None:
    """That of `--chat-template` (a file, or the text itself), if there is one. Raises ConfigError if it cannot work."""
    given = config.server.chat_template
    if given is None:
        return None
    where, text = "", given
    try:
        if "{" not in given:
            where = f"{given}: "
            text = Path(given).read_text("utf-8")
        check_template(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template: {given} cannot be read: {error}", field="chat_template") from None
    except InputError as error:
        raise ConfigError(f"chat_template: {where}{error}", field="chat_template") from None
    return text
