"""Types and limits of every node of the configuration; the defaults are in `conf/`, with their comments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from resilient_train.ground.files import conf
from resilient_train.ground.reader import AccelerateConfig, ClipConfig, DataConfig, DiskConfig, MemoryConfig, limited
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
    init_from: str | None
    max_hours: float | None = limited(above=0)
    deterministic: bool
    start_timeout: float = limited(at_least=0)
    step_timeout: float = limited(at_least=0)
    save_timeout: float = limited(at_least=0)


@dataclass
class CheckpointConfig:
    memory: MemoryConfig
    disk: DiskConfig
    verify_after: int = limited(at_least=1)


def _checks(key: str, value: Any) -> Any:
    from resilient_train.loop.arguments import read_checks  # takes seconds, as extensions import torch

    return read_checks(value, key)


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
    checks: Any = field(metadata={"read": _checks})
    recovery: dict[str, Any]
    checkpoint: CheckpointConfig
    tracking: TrackingConfig
    drill: dict[str, Any]
    experiment: str | None = None
