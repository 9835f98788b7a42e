"""Reads what the launcher says about the run in the environment, and refuses what is not supported."""

from __future__ import annotations

import os
from collections.abc import Mapping

from resilient_train.ground.errors import ConfigError

# Variables that Accelerate's launcher sets for engines around a model, in which no update can be refused.
_ENGINES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_FSDP": "sharding by accelerate launch --use_fsdp",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "tensor, context or pipeline parallelism",
}


def refuse_what_is_not_supported(environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError where the run would silently differ from what the launcher was asked for."""
    for name, what in _ENGINES.items():
        if environment.get(name, "").lower() in ("true", "1", "yes"):
            why = f"{what} is not supported: launch with --multi_gpu or torchrun for DDP, or add accelerate.fsdp=true"
            raise ConfigError(name, environment[name], why)


def launched_rank() -> int:
    """Return this process's rank as its launcher set it, before the group is joined."""
    return int(os.environ.get("RANK", "0")) if "WORLD_SIZE" in os.environ else 0
