"""The weights with the best evaluation, as soon as they are proven good."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from resilient_train import files
from resilient_train.checkpoint.safetensors_file import NAMES, chunks
from resilient_train.checkpoint.weights import WEIGHTS
from resilient_train.files import commit, commit_text, own_directory, read_json, sweep

BEST = "best"  # its name in a run directory
_SAYS = "best.json"


@dataclass(frozen=True, eq=False)
class _Pending:
    step: int
    metrics: Mapping[str, float]
    tensors: Mapping[str, torch.Tensor]


class Best:
    """Copies weights when an evaluation is the best so far, and writes them once their step is proven."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / BEST
        self._pending: list[_Pending] = []  # two at most: one that will be proven soon, and the best since
        sweep(self.path)
        said = None if self.path.is_symlink() else read_json(self.path / _SAYS)
        loss, step = (said.get("loss"), said.get("step")) if isinstance(said, dict) else (None, None)
        self._loss = math.inf
        if isinstance(loss, int | float) and abs(loss) < sys.float_info.max:
            self._loss = float(loss)
        self._step = step if type(step) is int else 0

    @property
    def step(self) -> int:
        """The step that the weights there are of; 0 where there are none, or it is not known."""
        return self._step

    def wants(self, metrics: Mapping[str, float]) -> bool:
        """Say whether an evaluation is better than any before."""
        return metrics["loss"] < min([self._loss, *(one.metrics["loss"] for one in self._pending)])

    def take(self, step: int, metrics: Mapping[str, float], tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the weights that it was of."""
        copies = {
            name: torch.empty_like(one, device="cpu").copy_(one.detach())
            for name, one in tensors.items()
            if one.dtype in NAMES
        }
        # Were the first one dropped for each that is better, none would ever live to be proven.
        self._pending = [*self._pending[:1], _Pending(step, dict(metrics), copies)]

    def is_ripe(self, proven: int) -> bool:
        """Say whether there is something to write, now that all up to a step is proven."""
        return any(one.step <= proven for one in self._pending)

    def write(self) -> None:
        """Write the oldest. The weights come first: what is said of them is also in their own file."""
        pending = self._pending[0]
        own_directory(self.path)
        said = {"step": pending.step, **pending.metrics}
        commit(self.path / WEIGHTS, chunks(pending.tensors, {name: str(value) for name, value in said.items()}))
        commit_text(self.path / _SAYS, json.dumps(said, indent=2) + "\n")
        self._loss, self._step = pending.metrics["loss"], pending.step
        with contextlib.suppress(ValueError):  # it was distrusted meanwhile. A disk that is full is tried again
            self._pending.remove(pending)

    def distrust(self, since: int) -> None:
        """Forget what is newer than the newest step to be trusted."""
        self._pending = [one for one in self._pending if one.step <= since]
        if self._step > since:
            self._loss, self._step = math.inf, 0
            if self.path.is_symlink():
                return
            for name in (_SAYS, WEIGHTS):
                with contextlib.suppress(OSError):
                    files.disk.unlink(self.path / name)
