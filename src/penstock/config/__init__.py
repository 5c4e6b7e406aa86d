"""L2: the settings of an engine: frozen dataclasses by concern, and how they are read.

Nothing is decided here: None and "auto" stay until `plan.resolve` has seen the model and the machine.
"""

from __future__ import annotations

from penstock.config.engine import (
    SECTIONS,
    SETTINGS,
    CacheConfig,
    EngineConfig,
    ExecutionConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.config.load import (
    SERVER_SETTINGS,
    SERVING,
    Given,
    add_arguments,
    engine_config,
    from_args,
    from_kwargs,
    from_toml,
    given_by,
    names_a_model,
    read_toml,
    serve_from_args,
    serve_from_kwargs,
)
from penstock.config.server import ServeConfig, ServerConfig
from penstock.config.setting import Setting
from penstock.config.speculative import SpeculativeConfig, parse_speculative

__all__ = [
    "SECTIONS",
    "SERVER_SETTINGS",
    "SERVING",
    "SETTINGS",
    "CacheConfig",
    "EngineConfig",
    "ExecutionConfig",
    "Given",
    "ModelConfig",
    "SchedulerConfig",
    "ServeConfig",
    "ServerConfig",
    "Setting",
    "SpeculativeConfig",
    "add_arguments",
    "engine_config",
    "from_args",
    "from_kwargs",
    "from_toml",
    "given_by",
    "names_a_model",
    "parse_speculative",
    "read_toml",
    "serve_from_args",
    "serve_from_kwargs",
]
