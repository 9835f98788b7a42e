"""The processes of a run: joined through Accelerate, seen as one."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedDataParallelKwargs, broadcast_object_list, gather_object

from resilient_train.errors import ConfigError, TrainError, in_one_line

T = TypeVar("T")


@dataclass
class AccelerateConfig:
    cpu: bool
    mixed_precision: str | None = field(metadata={"one_of": ("no", "bf16", "fp16")})
    gradient_accumulation_steps: int = field(metadata={"at_least": 1})
    compile: bool
    ddp: dict[str, Any]


def launched_rank() -> int:
    """This process's rank as its launcher set it: known before the group is joined."""
    return int(os.environ.get("RANK", "0"))


def is_lost_peer(error: BaseException) -> bool:
    """Say whether an error is the echo of another process's end rather than an end of its own."""
    return isinstance(error, torch.distributed.DistError | RuntimeError) and bool(
        re.search(r"closed by peer|reset by peer|Broken pipe|Socket closed|NCCL|[Gg]loo", str(error))
    )


class World:
    """This process among the others."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.rank, self.size = accelerator.process_index, accelerator.num_processes
        self.is_main = self.rank == 0
        self.device: torch.device = accelerator.device

    @classmethod
    def joined(cls, config: AccelerateConfig) -> World:
        """Join the group that the launcher made; alone, be a group of one."""
        if "WORLD_SIZE" not in os.environ:  # a sweep runs its jobs one after the other in this process
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
        try:
            ddp = DistributedDataParallelKwargs(**config.ddp)
        except TypeError as error:
            raise ConfigError(
                "accelerate.ddp", config.ddp, str(error).removeprefix("DistributedDataParallelKwargs.")
            ) from error
        try:
            accelerator = Accelerator(
                cpu=config.cpu,
                mixed_precision=config.mixed_precision,
                gradient_accumulation_steps=config.gradient_accumulation_steps,
                kwargs_handlers=[ddp],
            )
        except Exception as error:  # a rendezvous that fails, a device that is not there
            raise TrainError(f"the processes of the run cannot be joined: {in_one_line(error)}") from error
        # `accelerate launch` sets its own number in the environment, which would win without a word.
        accelerator.gradient_accumulation_steps = config.gradient_accumulation_steps
        if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
            why = "needs a GPU: half precision has no loss scaling on a CPU; bf16 works there"
            raise ConfigError("accelerate.mixed_precision", "fp16", why)
        return cls(accelerator)

    def mean(self, vector: torch.Tensor) -> torch.Tensor:
        """Average a vector over the ranks: the one reduction that vitals take."""
        return self.accelerator.reduce(vector, "mean") if self.size > 1 else vector

    def sum(self, vector: torch.Tensor) -> torch.Tensor:
        """Add a vector up over the ranks."""
        return self.accelerator.reduce(vector, "sum") if self.size > 1 else vector

    def gather(self, vector: torch.Tensor) -> torch.Tensor | None:
        """Collect a vector from every rank, one row each; None where there is nobody else."""
        if self.size == 1:
            return None
        table = torch.zeros((self.size, vector.numel()), dtype=vector.dtype, device=vector.device)
        table[self.rank] = vector
        torch.distributed.all_reduce(table)  # every torch and backend has it, and 0 + NaN is NaN
        return table

    def max(self, vector: torch.Tensor) -> torch.Tensor:
        """Take the largest of each element over the ranks; a NaN anywhere counts as infinite."""
        if self.size == 1:
            return vector
        largest = torch.nan_to_num(vector, nan=float("inf"), posinf=float("inf"))
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        return largest

    def least(self, number: float) -> float:
        """Return the least of a number over the ranks."""
        if self.size == 1:
            return number
        vector = torch.tensor([-number], dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(vector, torch.distributed.ReduceOp.MAX)
        return -float(vector.item())

    def union(self, names: Iterable[str]) -> list[str]:
        """Return every name that any rank knows, in the same order everywhere."""
        return sorted(set(gather_object(list(names)) if self.size > 1 else names))

    def all_of(self, mine: T) -> list[T]:
        """Return what every rank has, in order of the ranks: small things, after trouble."""
        return gather_object([mine]) if self.size > 1 else [mine]

    def on_main(self, decide: Callable[[], T]) -> T:
        """Decide on rank 0 and tell all; an error there is raised everywhere, so that nobody waits for nothing."""
        if self.size == 1:
            return decide()
        told: list[Any] = [None, None]
        if self.is_main:
            try:
                told[0] = decide()
            except Exception as error:
                told[1] = error if isinstance(error, TrainError) else TrainError(in_one_line(error))
        broadcast_object_list(told)
        if told[1] is not None:
            raise told[1]
        return told[0]  # type: ignore[no-any-return]

    def leave(self) -> None:
        """Leave the group after a run that went well; a rank that failed just ends, and its launcher ends the rest.

        All leave together, and nothing may still hold the group: gloo's threads abort a process that ends under them.
        """
        if self.size > 1:
            self.accelerator.free_memory()
            gc.collect()
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()

    def __str__(self) -> str:
        kind = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        threads = f", {torch.get_num_threads()} threads" if self.device.type == "cpu" else ""
        processes = f"{self.size} processes" if self.size > 1 else "1 process"
        return f"{processes} on {kind}{threads}, {self.accelerator.mixed_precision or 'no'} mixed precision"
