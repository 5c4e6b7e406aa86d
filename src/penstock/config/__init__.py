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
from penstock.config.load import add_arguments, from_args, from_kwargs, from_toml, read_toml
from penstock.config.setting import Setting

__all__ = [
    "SECTIONS",
    "SETTINGS",
    "CacheConfig",
    "EngineConfig",
    "ExecutionConfig",
    "ModelConfig",
    "SchedulerConfig",
    "Setting",
    "add_arguments",
    "from_args",
    "from_kwargs",
    "from_toml",
    "read_toml",
]
