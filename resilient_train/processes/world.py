"""The processes of a run: joined through Accelerate, seen as one."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import re
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    broadcast_object_list,
    gather_object,
    parse_flag_from_env,
    send_to_device,
)
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.utils.checkpoint import checkpoint

from resilient_train.core.tree import is_sharded, local_part, sharding_of
from resilient_train.ground.errors import ConfigError, TrainError, in_one_line, is_plumbing, text_of, unusable
from resilient_train.ground.reader import AccelerateConfig
from resilient_train.ground.wording import counted
from resilient_train.processes import launch

T = TypeVar("T")


def shard(model: nn.Module, names: Sequence[str] | None, device: torch.device, world: int) -> str:
    """Shard the weights block by block, by torch itself: Accelerate does nothing on a CPU. Returns what was done."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (world,))
    found = blocks(model, names)
    for block in [*found, model]:
        fully_shard(block, mesh=mesh)
    return f"FSDP2 over {world} processes ({counted(len(found), 'block')}: accelerate.blocks names their classes)"


def reshard(model: nn.Module) -> None:
    """Free what forwards without a backward have left whole: it is not what a state holds."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def recompute(model: nn.Module, names: Sequence[str] | None) -> str:
    """Let the backward recompute the activations of each block instead of keeping them. Returns what was done."""
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if names is None and callable(enable):  # a model of transformers knows best how
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return "activations are recomputed in the backward, as the model itself does it"
    found = blocks(model, names)
    if not found:
        why = "finds no blocks in this model: name their classes in accelerate.blocks"
        raise ConfigError("accelerate.activation_checkpointing", True, why)
    for block in found:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return f"activations of {counted(len(found), 'block')} are recomputed in the backward"


def blocks(model: nn.Module, names: Sequence[str] | None) -> list[nn.Module]:
    """Return the modules of these classes, none within another. Without `names`: of those that the model itself names,
    as models of transformers do.
    """
    classes = set(names if names is not None else getattr(model, "_no_split_modules", None) or ())
    kinds = {type(one).__name__ for one in model.modules()}
    if names is not None and (unknown := sorted(classes - kinds)):
        raise ConfigError("accelerate.blocks", list(names), f"{unknown[0]} is no class of a module of this model")
    found: list[nn.Module] = []
    for module in model.modules():  # outer ones first
        is_named = module is not model and type(module).__name__ in classes
        if is_named and not any(module is inner for one in found for inner in one.modules()):
            found.append(module)
    return found


_GONE = re.compile(  # gloo, NCCL and the store
    r"closed by peer|reset by peer|Broken pipe|Socket closed|Connection refused|Connection timed out|got 0 bytes"
    r"|Timed out waiting|remote process exit|ncclRemoteError|ncclSystemError|communicator was aborted|Watchdog caught"
)


def is_lost_peer(error: BaseException) -> bool:
    """Say whether an error only shows that another process has ended. User code may use such words, too."""
    if not isinstance(error, torch.distributed.DistError | RuntimeError) or not _GONE.search(text_of(error)):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and is_plumbing(frames[-1].filename)


def is_lost_device(error: BaseException | None) -> bool:
    """Say whether it is an error of CUDA after which this process can compute nothing there any more."""
    if not isinstance(error, RuntimeError) or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as again:
        return not isinstance(again, torch.OutOfMemoryError)
    return False


_ON_THE_HOST = ("can't allocate memory", "not enough memory", "std::bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in text_of(error) for words in _ON_THE_HOST)


class World:
    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.rank, self.size = accelerator.process_index, accelerator.num_processes
        self.is_main = self.rank == 0
        self.device: torch.device = accelerator.device

    @staticmethod
    def is_of_group(error: BaseException) -> bool:
        """Say whether an error came out of a collective: the others may be gone, or wait for this rank in vain."""
        if isinstance(error, torch.distributed.DistError) or is_lost_peer(error):
            return True
        raised_in = [frame.filename for frame in traceback.extract_tb(error.__traceback__)][-1:]
        return bool(raised_in) and Path(raised_in[0]).is_relative_to(Path(torch.distributed.__file__).parent)

    @classmethod
    def joined(cls, config: AccelerateConfig, *, start_timeout: float = 0.0, limit: float = 0.0) -> World:
        """Join the group that the launcher made; without one, be a group of one. `limit` is the timeout of any
        collective in seconds, `start_timeout` that of waiting for the others; 0: torch's.
        """
        launch.refuse_what_is_not_supported()
        if "WORLD_SIZE" not in os.environ:  # a sweep runs its jobs one after the other in this process
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
        try:
            ddp = DistributedDataParallelKwargs(**config.ddp)
        except TypeError as error:
            why = str(error).removeprefix("DistributedDataParallelKwargs.")
            raise ConfigError("accelerate.ddp", config.ddp, why) from error
        cpu = config.cpu or parse_flag_from_env("ACCELERATE_USE_CPU")
        if not cpu:  # on a Mac processes cannot share the one device
            has_device = torch.accelerator.is_available() and not torch.backends.mps.is_available()
            launched = os.environ.get("WORLD_SIZE", "1")
            if launched != "1" and not has_device:
                why = f"there is no GPU here, and without it each of the {launched} processes would be a separate run: "
                raise ConfigError("accelerate.cpu", False, why + "accelerate.cpu=true trains on CPUs, as one run")
        limit_of_collectives = timedelta(seconds=limit) if limit else None
        patience = timedelta(seconds=start_timeout) if start_timeout else _PATIENCE
        join(cpu=cpu, patience=patience, limit=limit_of_collectives)
        accelerator = Accelerator(
            cpu=config.cpu,
            mixed_precision=config.mixed_precision,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            kwargs_handlers=[ddp, InitProcessGroupKwargs(timeout=limit_of_collectives)],
        )
        # `accelerate launch` sets its own number in the environment, which would silently take precedence.
        accelerator.gradient_accumulation_steps = config.gradient_accumulation_steps
        if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
            why = "needs a GPU: half precision has no loss scaling on a CPU; bf16 works there"
            raise ConfigError("accelerate.mixed_precision", "fp16", why)
        return cls(accelerator)

    def without_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        return self.accelerator.no_sync(model)  # type: ignore[no-any-return]

    def on_device(self, batch: Any) -> Any:
        return batch if self.device.type == "cpu" else send_to_device(batch, self.device, non_blocking=True)

    def mean(self, vector: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(vector, "mean") if self.size > 1 else vector

    def mean_metrics(self, metrics: Mapping[str, torch.Tensor | float]) -> dict[str, float]:
        """Average metrics over the ranks that have them. Waits for the device, with one read and one exchange."""
        values = [torch.as_tensor(value, dtype=torch.float32, device=self.device) for value in metrics.values()]
        numbers = torch.stack(values).tolist() if values else []
        return self.weighted_means({name: (one, 1.0) for name, one in zip(metrics, numbers, strict=True)})

    def weighted_means(self, sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Divide sums by their weights, both added up over the ranks that have them: each may know other names."""
        ranks, found = self.all_of(dict(sums)), dict[str, float]()
        for name in sorted(set[str]().union(*ranks), key=lambda name: (name != "loss", name)):
            total, weight = map(sum, zip(*(rank[name] for rank in ranks if name in rank), strict=True))
            found[name] = total / weight if weight else math.nan
        return found

    def norm(self, grads: list[torch.Tensor]) -> torch.Tensor:
        """Return the norm of sharded gradients: each rank sends one number, and no gradient is gathered."""
        first = grads[0]
        wide = torch.float64 if first.device.type != "mps" else None
        squares = torch.zeros((), dtype=wide, device=first.device)
        for grad in grads:
            if not (share := local_part(grad)).numel():
                continue
            holders = self.size
            if is_sharded(grad):
                spread = sharding_of(grad)
                pairs = zip(spread.mesh.shape, spread.placements, strict=True)
                holders = math.prod(size for size, placement in pairs if placement.is_replicate())
            squares += torch.linalg.vector_norm(share, dtype=wide).square() / holders
        norm: torch.Tensor = self.accelerator.reduce(squares, "sum").sqrt()
        return norm.float() if first.dtype in (torch.float16, torch.bfloat16) else norm.to(first.dtype)

    def gather(self, vector: torch.Tensor) -> torch.Tensor:
        """Collect a vector from every rank, one row each, where there are several."""
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
        if self.size == 1:
            return number
        vector = torch.tensor(number, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(vector, torch.distributed.ReduceOp.MIN)
        return float(vector)

    def all_of(self, mine: T) -> list[T]:
        """Return what every rank has. It pickles, so pass small objects, and not in every update."""
        return gather_object([mine]) if self.size > 1 else [mine]

    def on_main(self, decide: Callable[[], T]) -> T:
        """Decide on rank 0 and broadcast the result; an error there is raised everywhere, so that no rank waits."""
        if self.size == 1:
            return decide()
        result: list[Any] = [None, None]
        if self.is_main:
            try:
                result[0] = decide()
            except Exception as error:
                result[1] = error if isinstance(error, TrainError) else TrainError(in_one_line(error))
        broadcast_object_list(result)
        if result[1] is not None:
            raise result[1]
        return result[0]  # type: ignore[no-any-return]

    def leave(self) -> None:
        """Leave the group, all together. Nothing may keep it alive: gloo's threads would abort who exits first."""
        if self.size > 1:
            self.accelerator.free_memory()
            gc.collect()
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()

    def __str__(self) -> str:
        kind = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        processes = f"{self.size} processes, each" if self.size > 1 else "1 process"
        return f"{processes} on {kind}, {self.accelerator.mixed_precision or 'no'} mixed precision"


_PATIENCE = timedelta(minutes=30)
_NEEDED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join(*, cpu: bool = False, patience: timedelta = _PATIENCE, limit: timedelta | None = None) -> None:
    """Make the process group like Accelerate, but with a store for this attempt, unless that is left to Accelerate.

    An elastic agent keeps one store over all restarts, and in it the addresses of earlier processes: later ones would
    connect to those, and fail or wait. A training loop calls this before it makes its Accelerator. `cpu` is that of the
    Accelerator; `patience` limits the wait for the others, `limit` every later collective.
    """
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and all(one in os.environ for one in _NEEDED)
    if not has_agent or torch.distributed.is_initialized():
        return
    # Agents of several hosts have their own counts of restarts, and hosts that come and go are not counted.
    if os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
        if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
            how = "the c10d rendezvous and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of each launcher"
            raise unusable("--max-restarts", f"on several hosts this needs {how}")
        return
    on_gpu = not cpu and torch.cuda.is_available()
    if not (on_gpu or cpu) or (cpu and torch.distributed.is_mpi_available()):
        return  # another kind of device or backend, which Accelerate knows to choose
    rank, local, size, port = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"))
    device = torch.device("cuda", local % torch.cuda.device_count()) if on_gpu else None
    if device is not None:
        torch.cuda.set_device(device)
    agents = TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, wait_for_workers=False, timeout=patience)
    store = PrefixStore(f"resilient_train/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}", agents)
    by = "gloo" if device is None else "nccl"
    torch.distributed.init_process_group(by, store=store, rank=rank, world_size=size, timeout=limit, device_id=device)


def odd_ones(said: Sequence[Hashable]) -> tuple[int, ...]:
    """Return the ranks that differ from more than half of them; all of them if no such majority agrees."""
    agreed = {one for one, count in Counter(said).items() if 2 * count > len(said)}
    return tuple(rank for rank, one in enumerate(said) if one not in agreed)
