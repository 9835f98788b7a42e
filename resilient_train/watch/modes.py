"""The loss in training and in evaluation mode: damage that only evaluation shows is in no training loss."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

import torch
from torch import nn

from resilient_train.state.copies import Backups
from resilient_train.state.randomness import preserved
from resilient_train.watch.config import EvaluationConfig
from resilient_train.wording import log

_FEWEST = 3  # comparisons that tell what is usual
_SHARE = 0.5  # of the loss: a smaller difference is not worth a line


class Modes:
    """Makes the forward of a training batch once more in evaluation mode, now and then, and compares the losses."""

    def __init__(self, config: EvaluationConfig, model: nn.Module, backups: Backups, *, is_alone: bool) -> None:
        self.config, self.model = config, model
        self._backups = backups
        is_compiled = any(map(_is_compiled, model.modules()))  # to compile the other mode may take minutes
        # Ranks would have to agree where it fails on one of them.
        self.is_on = config.every > 0 and is_alone and not is_compiled
        self._usual: list[float] = []

    @torch.no_grad()
    def compare(self, step: int, loss: torch.Tensor, measure: Callable[[], tuple[Any, Any]]) -> None:
        """Say so where they differ far more than they did. `measure` makes the same loss, and metrics.

        Where it is due, this waits for the device.
        """
        if not (self.is_on and step > 0 and step % self.config.every == 0):
            return
        flags = [(module, module.training) for module in self.model.modules()]
        before = self._backups.take()
        with preserved(loss.device):
            self.model.eval()
            try:
                other = float(measure()[0])
            except Exception:  # a model that cannot be called so: evaluation is its user's own matter
                self.is_on = False
                return
            finally:
                for module, flag in flags:
                    module.training = flag
                self._backups.put_back(before)
                self._backups.let_go(before)
        mine = float(loss.detach())
        apart = abs(other - mine)
        usual = sorted(self._usual)[-1] if len(self._usual) >= _FEWEST else None
        if usual is not None and not apart <= max(self.config.times * usual, _SHARE * abs(mine)):
            log.info(
                "note: step %d: the loss of a batch is %.4g in evaluation mode, %.4g in training", step, other, mine
            )
            return
        if isfinite(apart):
            self._usual.append(apart)


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
