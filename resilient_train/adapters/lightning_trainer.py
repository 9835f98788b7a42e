"""A Lightning trainer: whether it can be guarded, its processes, what it has logged, and its checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.nn.modules.batchnorm import _BatchNorm
from torchmetrics import Metric

from resilient_train.adapters.arguments import PlacedAccelerator


def refuse(trainer: Any, module: Any) -> None:
    """Raise if this trainer cannot be guarded."""
    is_ours = isinstance(trainer, Trainer)  # not of the package pytorch_lightning, whose classes are others
    if not is_ours:
        raise TypeError(f"Guarded: expected a lightning.pytorch.Trainer, got one of {type(trainer).__module__}")
    strategy, plugin = trainer.strategy, trainer.precision_plugin
    # DeepSpeed's strategy is derived from that of DDP, as is Megatron's.
    is_engine = any(kind.__name__.startswith(("DeepSpeed", "Megatron")) for kind in type(strategy).__mro__)
    is_known = isinstance(strategy, DDPStrategy | SingleDeviceStrategy) and not is_engine
    if not is_known or strategy.root_device.type == "xla":
        what = type(strategy).__name__
        raise ValueError(f"Guarded: {what} is not supported yet: use one device, or strategy='ddp'")
    averages = any(isinstance(each, StochasticWeightAveraging) for each in trainer.callbacks)
    if averages and any(isinstance(each, _BatchNorm) for each in module.modules()):
        raise ValueError("Guarded: StochasticWeightAveraging is not supported yet for models with batch normalization")
    if getattr(plugin, "scaler", None) is not None:
        raise ValueError("Guarded: 16-mixed is not supported yet, as its GradScaler steps by itself: use bf16-mixed")


def accelerator(trainer: Any) -> Accelerator:
    """Make an Accelerator for the processes and the device of a trainer."""
    device = trainer.strategy.root_device
    if trainer.world_size > 1:  # Lightning's own launcher leaves some of these out
        places = {"RANK": trainer.global_rank, "LOCAL_RANK": trainer.local_rank, "WORLD_SIZE": trainer.world_size}
        places |= {"LOCAL_WORLD_SIZE": trainer.num_devices, "OMP_NUM_THREADS": torch.get_num_threads()}
        for name, value in places.items():
            os.environ.setdefault(name, str(value))
    return PlacedAccelerator(device, trainer.accumulate_grad_batches)


def is_last_step(trainer: Any) -> bool:
    """Say whether the newest update is the last one, unless the trainer is stopped early."""
    fit_loop, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    is_last_epoch = 0 <= fit_loop.max_epochs <= fit_loop.epoch_progress.current.ready
    return bool(0 <= loop.max_steps <= trainer.global_step or (is_last_epoch and loop._num_ready_batches_reached()))


def forget_checkpoint(callback: Any, path: str) -> None:
    """Let a ModelCheckpoint forget a file."""
    if path in getattr(callback, "best_k_models", {}):
        del callback.best_k_models[path]
    if getattr(callback, "best_model_path", None) == path:
        best = min if callback.mode == "min" else max
        callback.best_model_path = best(callback.best_k_models, key=callback.best_k_models.get, default="")
        callback.best_model_score = callback.best_k_models.get(callback.best_model_path)
    if getattr(callback, "last_model_path", None) == path:
        callback.last_model_path = ""


class Logged:
    """What was logged so far, and the state of torchmetrics: a batch that runs again counts once."""

    def __init__(self, trainer: Any, metrics: Sequence[Metric]) -> None:
        self._results, self._connector = trainer.fit_loop.epoch_loop._results, trainer._logger_connector
        self._entries = {key: dict(vars(entry)) for key, entry in self._results.items()}  # of tensors never changed
        self._hook, self._metrics = (
            self._connector._current_fx,
            [(metric, _copied(vars(metric), metric)) for metric in metrics],
        )

    def restore(self) -> None:
        for key in self._results.keys() - self._entries.keys():
            del self._results[key]
        for key, entry in self._entries.items():
            vars(self._results[key]).update(entry)
        self._connector._current_fx = self._hook
        for metric, state in self._metrics:
            vars(metric).update(_copied(state, metric))


def _copied(state: Mapping[str, Any], metric: Metric) -> dict[str, Any]:
    """Copy the values of a metric, which its updates change in place."""
    copied = {}
    for name in (*metric._defaults, "_update_count", "_computed", "_forward_cache"):
        value = state[name]
        copied[name] = (
            value.clone() if isinstance(value, torch.Tensor) else [*value] if isinstance(value, list) else value
        )
    return copied


class Average:
    """The average of weights that a callback of Lightning keeps; it rewinds, and follows repeated updates."""

    def __init__(self, callback: Any, trainer: Any, module: Any) -> None:
        self._callback, self._trainer, self._module = callback, trainer, module

    def state_dict(self) -> dict[str, Any]:
        return {"model": self._callback._average_model.state_dict(), "step": self._callback._latest_update_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._callback._average_model.load_state_dict(state["model"])
        self._callback._latest_update_step = state["step"]

    @property
    def is_made(self) -> bool:
        """Whether the newest update is in it."""
        return bool(self._callback._latest_update_step >= self._trainer.global_step)

    def follow(self) -> None:
        """Let it take the newest update, unless it has."""
        self._callback.on_train_batch_end(self._trainer, self._module, {}, None, 0)
