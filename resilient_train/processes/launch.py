"""Reads what the launcher says about the run in the environment, and refuses what is not supported."""

from __future__ import annotations

import os
from collections.abc import Mapping

from resilient_train.ground.errors import ConfigError, unusable

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


def refuse_devices(*, has_device: bool, gpus: int) -> None:
    """Raise ConfigError if launched processes would not become one run, or would share a GPU, which NCCL cannot."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1 and not has_device:
        why = f"there is no GPU here, and without it each of the {launched} processes would be a separate run: "
        raise ConfigError("accelerate.cpu", False, why + "accelerate.cpu=true trains on CPUs, as one run")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if gpus and here > gpus:
        why = f"{here} processes to a host were launched, and there are {gpus} GPUs: one process to a GPU"
        raise unusable("--nproc_per_node", why)


def launched_rank() -> int:
    """Return this process's rank as its launcher set it, before the group is joined."""
    rank, size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    return int(rank) if rank.isdecimal() and size.isdecimal() and int(rank) < int(size) else 0
