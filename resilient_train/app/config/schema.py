"""Every node of the configuration. Types and limits are here; the defaults are in `conf/`, with their comments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from resilient_train.app.notify import NotifyConfig
from resilient_train.reader import AccelerateConfig, ClipConfig, DataConfig, DiskConfig, MemoryConfig
from resilient_train.tracking.tracker import TrackingConfig
from resilient_train.watch.config import ChecksConfig


@dataclass
class RunConfig:
    name: str | None
    dir: str
    steps: int = field(metadata={"at_least": 1})
    seed: int = field(metadata={"at_least": 0})
    log_every: int = field(metadata={"at_least": 1})
    eval_every: int = field(metadata={"at_least": 0})
    resume: str
    data_changed: str = field(metadata={"one_of": ("refuse", "accept")})
    init_from: str | None
    max_hours: float | None = field(metadata={"above": 0})
    deterministic: bool
    start_timeout: float = field(metadata={"at_least": 0})
    step_timeout: float = field(metadata={"at_least": 0})
    save_timeout: float = field(metadata={"at_least": 0})
    grace: float = field(metadata={"above": 0})


@dataclass
class CheckpointConfig:
    memory: MemoryConfig
    disk: DiskConfig
    verify_after: int = field(metadata={"at_least": 1})


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
