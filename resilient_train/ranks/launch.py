"""What a launcher says of the run in the environment, and what it asks for that is not supported."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from resilient_train.errors import ConfigError, unusable

_MASTER = ("MASTER_ADDR", "MASTER_PORT")
_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")  # that Accelerate looks for

# What Accelerate's launcher sets for engines that it can wrap around a model: why not, and what to use instead.
_ENGINES = {
    "ACCELERATE_USE_DEEPSPEED": (
        "DeepSpeed is not supported yet: it makes its updates itself, where none can be refused. "
        "For a model that does not fit on one device take accelerate.fsdp=true, else DDP: "
        "accelerate launch --multi_gpu, or torchrun"
    ),
    "ACCELERATE_USE_MEGATRON_LM": (
        "Megatron-LM is not supported yet: it makes its updates itself, where none can be refused. "
        "For a model that does not fit on one device take accelerate.fsdp=true"
    ),
    "ACCELERATE_USE_FSDP": (
        "sharding is not taken from accelerate launch --use_fsdp: leave that out and set accelerate.fsdp=true, "
        "which shards by FSDP2 (accelerate launch --multi_gpu, or torchrun)"
    ),
    "ACCELERATE_USE_PARALLELISM_CONFIG": (
        "tensor, context and pipeline parallelism are not supported yet: DDP and accelerate.fsdp=true are"
    ),
}


def refuse_what_is_not_supported(environment: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError where the run would silently be something else than what the launcher was asked for."""
    environment = os.environ if environment is None else environment
    _refuse_bad_numbers(environment)
    for name, why in _ENGINES.items():
        if environment.get(name, "").lower() in ("true", "1", "yes"):
            raise ConfigError(name, environment[name], why)
    is_single = "ACCELERATE_USE_CPU" in environment and not any(name in environment for name in _SIZES)
    if is_single and _is_of_launcher(environment):
        why = "several processes were asked for, and on CPUs it starts one. Use torchrun --nproc_per_node N "
        raise unusable("accelerate launch", why + "-m resilient_train accelerate.cpu=true, or --num_processes 1")


def refuse_what_would_be_single(*, has_device: bool) -> None:
    """Raise ConfigError where several processes were launched, and each would be a run of its own."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1 and not has_device:
        why = f"there is no GPU here, and without it each of the {launched} processes would be a run of its own: "
        raise ConfigError("accelerate.cpu", False, why + "accelerate.cpu=true trains on CPUs, as one run")


def refuse_what_became_single(size: int) -> None:
    """Raise ConfigError where the processes that were launched did not become one run."""
    if size != (launched := int(os.environ.get("WORLD_SIZE", "1"))):
        why = f"{launched} processes were launched, but the run has {size}: start them with torchrun"
        raise unusable("WORLD_SIZE", why)


def refuse_too_few_devices(devices: int) -> None:
    """Raise ConfigError where processes of a host would have to share a GPU, which no collective supports."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if here > devices:
        why = f"{here} processes to a host were launched, and there are {devices} GPUs: one process to a GPU"
        raise unusable("--nproc_per_node", why)


def launched_rank() -> int:
    """This process's rank as its launcher set it: known before the group is joined."""
    rank, size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    return int(rank) if rank.isdecimal() and size.isdecimal() and int(rank) < int(size) else 0


def _refuse_bad_numbers(environment: Mapping[str, str]) -> None:
    alone = "launchers such as torchrun set it; for a run of one process unset RANK and WORLD_SIZE"
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        if name in environment and re.fullmatch(r"-?\d{1,9}", environment[name]) is None:
            raise ConfigError(name, environment[name], f"must be a whole number: {alone}")
    rank, size = environment.get("RANK"), environment.get("WORLD_SIZE")
    if rank is not None and size is not None and not 0 <= int(rank) < int(size):
        raise ConfigError("RANK", rank, f"must be from 0 to below WORLD_SIZE={size}: {alone}")


def hosts(size: int) -> int:
    """How many hosts the processes of the run are on, as far as launchers say so."""
    if (groups := os.environ.get("GROUP_WORLD_SIZE", "")).isdigit():
        return int(groups)
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, size // int(here)) if here.isdigit() and int(here) else 1


def _is_of_launcher(environment: Mapping[str, str]) -> bool:
    """Say whether Accelerate's launcher has set where the processes meet, which it does for several only.

    Where these variables come from the user's shell, the launcher itself has them too.
    """
    if not all(name in environment for name in _MASTER):
        return False
    try:
        words = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return True
    return not all(f"{name}={environment[name]}".encode() in words for name in _MASTER)
