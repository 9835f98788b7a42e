"""Nodes of the configuration that rooms take whole. No torch: a mistake in them is answered at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from resilient_train.intervals import AUTO


@dataclass
class DataConfig:
    """Optional settings have defaults here too, so that a user's own file may leave them out."""

    train: dict[str, Any]
    batch_size: int = field(metadata={"at_least": 1})
    eval: dict[str, Any] | None = None
    shuffle: bool = True
    num_workers: int = field(default=0, metadata={"at_least": 0})
    quarantine: str | None = None  # the quarantine.json of another run
    collate: Any = None  # an import path, a node with a _target_, or null


@dataclass
class AccelerateConfig:
    cpu: bool
    mixed_precision: str | None = field(metadata={"one_of": ("no", "bf16", "fp16")})
    gradient_accumulation_steps: int = field(metadata={"at_least": 1})
    compile: bool
    ddp: dict[str, Any]
    fsdp: bool
    activation_checkpointing: bool
    blocks: list[str] | None


@dataclass
class ClipConfig:
    max_norm: float | None = field(metadata={"above": 0})
    max_value: float | None = field(metadata={"above": 0})


@dataclass
class MemoryConfig:
    every: int | str = field(metadata={"at_least": 0, "one_of": (AUTO,)})
    keep: int = field(metadata={"at_least": 2})
    max_gib: float | None = field(metadata={"at_least": 0})


@dataclass
class DiskConfig:
    every: int | str = field(default=0, metadata={"at_least": 0, "one_of": (AUTO,)})
    keep: int = field(default=3, metadata={"at_least": 1})
    keep_every: int = field(default=0, metadata={"at_least": 0})
