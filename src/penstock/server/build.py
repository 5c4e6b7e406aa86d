"""From a configuration to a running server's parts: the engine first, then everything around it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.base.clock import MonotonicClock
from penstock.config import ServeConfig
from penstock.config.several import seconds_of
from penstock.engine.link import Link
from penstock.engine.spawn import Spawned
from penstock.launch.front import begin_front
from penstock.server.admission import gate, keys
from penstock.server.admission.keys import fair_share
from penstock.server.assembly import add_membership, assembled, checked, furnish, make_client, model_name, with_adapters
from penstock.server.batches import files, runner
from penstock.server.context import Server
from penstock.server.observation import energy, loop_watch, metrics, request_log, traces
from penstock.server.responses import store
from penstock.server.scaling import add_scaling, check_autoscale
from penstock.server.transport.tls import Watching, open_tls
from penstock.server.turns import grammars

if TYPE_CHECKING:
    from penstock.launch.engine_hosts import EngineHosts

log = logging.getLogger("penstock.server")
_PARTS = (loop_watch, keys, metrics, energy, request_log, traces, gate, grammars, store, files, runner)
"""Installed in this order; closed in the opposite one."""


async def build(config: ServeConfig, *, link: Link | None = None, spare: Spawned | None = None) -> Server:
    """Start the engine and put the server together. Raises what keeps either from starting.

    `link`: an engine that is reached in another way than `engine_in_process` says (tests). `spare`: its process, if
    that was spawned already.
    """
    if config.engine.execution.distributed_executor_backend != "ray":
        return await _build_with_hosts(config, link, spare)
    from penstock.launch.ray_hosts import RayHosts  # nobody else needs it

    hosts = await asyncio.to_thread(RayHosts, config.engine)
    try:
        server = await _build_with_hosts(replace(config, engine=hosts.config), link, spare)
    except BaseException:
        hosts.close()
        raise
    server.closers.insert(0, hosts.close)  # behind the engine
    return server


async def _build_with_hosts(config: ServeConfig, link: Link | None, spare: Spawned | None) -> Server:
    """With a port where other hosts come with engines, if some of them are there."""
    if not config.engine.execution.num_elsewhere or link is not None or config.models:  # refused behind this
        return await _build(config, link, spare)
    from penstock.launch.engine_hosts import EngineHosts  # nobody else needs it

    hosts = EngineHosts(config.engine)
    try:
        server = await _build(config, link, spare, hosts)
    except BaseException:
        hosts.close()
        raise
    server.closers.insert(0, hosts.close)  # behind the engines
    return server


async def _build(
    config: ServeConfig, link: Link | None, spare: Spawned | None, hosts: EngineHosts | None = None
) -> Server:  # fmt: skip
    tls = open_tls(config.server)  # what can be wrong is looked at before the model is
    traces.check_traces(config.server)
    meter = energy.check_power(config)
    check_autoscale(config)
    given = checked(config)
    config = fair_share(with_adapters(config))
    further = None
    if config.models:
        from penstock.server.further import Further  # all of an engine: who serves one model has no use for it here

        further = await asyncio.to_thread(Further.of, config)
        config = further.config
    load_front = begin_front(config.engine)
    clock = MonotonicClock()
    client = make_client(config, clock, link, spare)
    if hosts is not None:
        from penstock.engine.remote_link import RemoteLink

        hosts.begin([late for one in client.replicas if isinstance(late := one.late, RemoteLink)])
    starting = asyncio.create_task(client.start())
    try:
        front = await asyncio.to_thread(load_front)  # meanwhile: the engine reads its own
    except BaseException:
        starting.cancel()
        with contextlib.suppress(Exception, asyncio.CancelledError):
            await starting
        await client.stop()
        raise
    await starting
    try:
        names = config.server.names("served_model_name") or [model_name(config.engine.model.model)]
        server = assembled(config, client, front, given, names, clock)
        server.parts["tls"], server.parts["energy_meter"] = tls, meter
        if further is None:
            add_membership(server, config)
            add_scaling(server, config)
        if tls is not None:
            server.closers.append(Watching(tls).close)
        await furnish(server, config, _PARTS)
        if further is not None:
            await further.install(server)
        elif config.server.keep_alive is not None:
            from penstock.server.admission.waking import models_of

            models_of(server).stay(None, seconds_of(config.server.keep_alive))
            models_of(server).watch()
    except BaseException:
        await client.stop()
        raise
    return server


async def close(server: Server) -> None:
    """Undo `build`. What still runs ends with an error. One part that fails does not keep the others open."""
    while server.closers:
        try:
            done = server.closers.pop()()
            if inspect.isawaitable(done):
                await done
        except Exception:
            log.exception("a part could not be closed")
