"""What a batch of Lightning moves on besides the run: logged values, metrics, lists of outputs, averages of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchmetrics import Metric


class Logged:
    """What was logged so far, the state of metrics, and the module's lists: a batch that runs again counts once."""

    def __init__(self, trainer: Any, metrics: Sequence[Metric]) -> None:
        self._results, self._connector = trainer.fit_loop.epoch_loop._results, trainer._logger_connector
        self._entries = {key: dict(vars(entry)) for key, entry in self._results.items()}  # of tensors never changed
        self._hook = self._connector._current_fx
        self._metrics = [(metric, _copied(vars(metric), metric)) for metric in metrics]
        own = vars(trainer.lightning_module)
        tables = own, *(one for one in own.values() if type(one) is dict)
        self._lists = [(one, len(one)) for table in tables for one in table.values() if type(one) is list]

    def restore(self) -> None:
        for key in self._results.keys() - self._entries.keys():
            del self._results[key]
        for key, entry in self._entries.items():
            vars(self._results[key]).update(entry)
        self._connector._current_fx = self._hook
        for metric, state in self._metrics:
            vars(metric).update(_copied(state, metric))
        for one, count in self._lists:
            del one[count:]


def _copied(state: Mapping[str, Any], metric: Metric) -> dict[str, Any]:
    """Copy the values of a metric, which its updates change in place."""
    values = {name: state[name] for name in (*metric._defaults, "_update_count", "_computed", "_forward_cache")}
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else [*value] if isinstance(value, list) else value
        for name, value in values.items()
    }


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
    def has_newest(self) -> bool:
        return bool(self._callback._latest_update_step >= self._trainer.global_step)

    def follow(self) -> None:
        """Let it take the newest update, unless it has."""
        self._callback.on_train_batch_end(self._trainer, self._module, {}, None, 0)
