"""Types and limits of every node of the configuration; the defaults are in `conf/`, with their comments."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import Any

from resilient_train.ground.errors import ConfigError
from resilient_train.ground.files import conf
from resilient_train.ground.reader import (
    AccelerateConfig,
    ClipConfig,
    DataConfig,
    DiskConfig,
    MemoryConfig,
    checked,
    limited,
)
from resilient_train.loop.settings import ChecksConfig
from resilient_train.report.tracker import TrackingConfig

CONF = conf()


@dataclass(kw_only=True)
class RunConfig:
    name: str | None
    dir: str
    steps: int = limited(at_least=1)
    seed: int = limited(at_least=0)
    log_every: int = limited(at_least=1)
    eval_every: int = limited(at_least=0)
    resume: str
    data_changed: str = limited(one_of=("refuse", "accept"))
    init_from: str | None
    max_hours: float | None = limited(above=0)
    deterministic: bool
    start_timeout: float = limited(at_least=0)
    step_timeout: float = limited(at_least=0)
    save_timeout: float = limited(at_least=0)
    grace: float = limited(above=0)


@dataclass
class CheckpointConfig:
    memory: MemoryConfig
    disk: DiskConfig
    verify_after: int = limited(at_least=1)


def _words(key: str, value: Any) -> list[str]:
    text = checked(key, value, str | None, {}) or ""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(key, value, f"cannot be split into words: {error}") from error


@dataclass
class NotifyConfig:
    command: list[str] = field(metadata={"read": _words})  # empty: none


@dataclass
class Config:
    """A whole run. Nodes with a `_target_` stay plain: their keys are whatever their target takes."""

    run: RunConfig
    model: dict[str, Any]
    data: DataConfig
    objective: dict[str, Any]
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    clip: ClipConfig
    accelerate: AccelerateConfig
    checks: ChecksConfig
    recovery: dict[str, Any]
    checkpoint: CheckpointConfig
    tracking: TrackingConfig
    notify: NotifyConfig
    drill: dict[str, Any]
    experiment: str | None = None
