"""The further models of a server: what all of them take is known before any is loaded; each is a server of its own
behind the first one's door, whose engine starts with the first request for it."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

from penstock.base.errors import ConfigError
from penstock.config import ServeConfig
from penstock.config.several import KEEP_ALIVE, seconds_of
from penstock.engine.frontend import EngineClient
from penstock.launch.front import open_front
from penstock.launch.several import Foreseen, foresee
from penstock.plan.probe import probe
from penstock.server.admission import gate
from penstock.server.admission.keys import fair_share
from penstock.server.admission.waking import follow
from penstock.server.assembly import assembled, checked, furnish, make_link, model_name, with_adapters
from penstock.server.context import Server
from penstock.server.observation import metrics, request_log, traces
from penstock.server.several.models import Models
from penstock.server.several.served import ServedModel
from penstock.server.turns import grammars

_PARTS = (metrics, request_log, traces, gate, grammars)
"""What each model has of its own; the rest is the first one's."""
_SHARED = ("keys", "store", "files", "batches", "tls")


@dataclass(frozen=True)
class Further:
    """`config`: of the first model, with what was decided about it; `planned`: by name, the first one's first."""

    config: ServeConfig
    configs: dict[str, ServeConfig]
    planned: dict[str, Foreseen]

    @classmethod
    def of(cls, config: ServeConfig) -> Further:
        """Raises, before anything is loaded: ConfigError for a name that two have, and for models that cannot fit;
        ModelError for one that is not there."""
        first = config.server.names("served_model_name") or [model_name(config.engine.model.model)]
        names = [*first]
        configs: dict[str, ServeConfig] = {}
        for further in config.models:
            names += [further.name, *further.config.server.names("served_model_name")]
            configs[further.name] = fair_share(with_adapters(further.config))
        _distinct(names)
        for one in (config, *configs.values()):
            if one.engine.execution.is_replicated:
                field = one.engine.execution.replicas_field
                raise ConfigError(
                    f"{field}: a server of several models has one engine of each; leave it away, or the further models",
                    field=field,
                )
        machine, given_gib = probe(), config.server.models_memory
        limit = None if given_gib is None else int(given_gib * 2**30)
        planned = {
            name: foresee(name, one.engine, machine, limit) for name, one in {first[0]: config, **configs}.items()
        }
        for name, one in configs.items():
            checked(one)
            configs[name] = replace(one, engine=planned[name].config)
        return cls(replace(config, engine=planned[first[0]].config), configs, planned)

    async def install(self, server: Server) -> None:
        """Mutates: `server`, the first model's, which is there. Raises what keeps another one from being served."""
        limits: dict[str, int] = {}
        for foreseen in self.planned.values():
            place, limit = foreseen.place, foreseen.limit_bytes
            limits[place] = min(limit, limits.get(place, limit))
        models = Models(server.service.clock, limits)
        for name, config in self.configs.items():
            server.others.append(await self._server(name, config, server))
        _distinct([name for one in server.each for name in one.names])
        for one in server.each:
            planned = self.planned[one.model_name]
            served = ServedModel(
                one.model_name, one.client, planned.weight_bytes, planned.kv_bytes, planned.place,
                keep_alive_s=seconds_of(one.config.keep_alive or KEEP_ALIVE), names=partial(getattr, one, "names"),
                grows=planned.grows, max_waiting=one.config.max_num_queued_reqs, max_wait_s=one.config.max_queue_wait,
            )  # fmt: skip
            follow(one, models, served)
        models.watch()
        server.closers.append(models.close)

    async def _server(self, name: str, config: ServeConfig, first: Server) -> Server:
        """Of a model whose engine is not there."""
        front = await asyncio.to_thread(open_front, config.engine)
        clock = first.service.clock
        client = EngineClient(make_link(config), front.tokenizer, clock)
        client.begin_asleep(self.planned[name].info)
        names = [name, *config.server.names("served_model_name")]
        server = assembled(config, client, front, checked(config), names, clock)
        server.first = first
        server.parts |= {part: first.parts[part] for part in _SHARED if part in first.parts}
        try:
            await furnish(server, config, _PARTS)
        finally:
            first.closers += server.closers
            server.closers = first.closers
        return server


def _distinct(names: list[str]) -> None:
    """Raises ConfigError."""
    doubled = [name for name, num in Counter(names).items() if num > 1]
    if doubled:
        raise ConfigError(f"two models are called {doubled[0]}; give one of them another name", field="models")
