"""The weights of the best evaluation, once their step is verified: best/ in the run directory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from resilient_train.durable.journal import commit_json
from resilient_train.durable.manifest import WEIGHTS
from resilient_train.durable.store import gathered
from resilient_train.durable.tree_files import NAMES, chunks
from resilient_train.extensions import Extension
from resilient_train.ground import files
from resilient_train.parts.run import Run

BEST = "best"  # its name in a run directory

_BEST_METRICS = "best.json"


class _Pending(NamedTuple):
    step: int
    metrics: Mapping[str, float]
    tensors: Mapping[str, torch.Tensor]


class Best:
    """Copies the weights when an evaluation is the best so far, and writes them once their step is verified."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / BEST
        self._pending: list[_Pending] = []  # two at most: the oldest one, and the best since
        self._loss = math.inf
        self.step = 0  # of the weights on disk; 0 if there are none, or their step is not known
        files.sweep(self.path)
        match files.read_json(self.path / _BEST_METRICS):
            case {"loss": int() | float() as loss, "step": int(step)} if math.isfinite(loss):
                self._loss, self.step = loss, step

    def is_better(self, metrics: Mapping[str, float]) -> bool:
        return metrics["loss"] < min([self._loss, *(one.metrics["loss"] for one in self._pending)])

    def take(self, step: int, metrics: Mapping[str, float], tensors: Mapping[str, torch.Tensor]) -> None:
        copies = {name: one.detach().to("cpu", copy=True) for name, one in tensors.items() if one.dtype in NAMES}
        # A better one does not replace the oldest: else none might ever be verified before the next one comes.
        self._pending = [*self._pending[:1], _Pending(step, dict(metrics), copies)]

    def is_ripe(self, verified: int) -> bool:
        return any(one.step <= verified for one in self._pending)

    def write(self) -> None:
        """Write the oldest. A kill in between leaves the metrics of the earlier weights."""
        pending = self._pending[0]
        if not self.path.is_dir():
            files.disk.make_directory(self.path)
            files.sync_directory(self.path.parent)
        metrics = {"step": pending.step, **pending.metrics}
        files.commit(self.path / WEIGHTS, chunks(pending.tensors))
        commit_json(self.path / _BEST_METRICS, metrics)
        self._loss, self.step = pending.metrics["loss"], pending.step
        with contextlib.suppress(ValueError):  # `distrust` has removed it meanwhile
            self._pending.remove(pending)

    def distrust(self, since: int) -> None:
        self._pending = [one for one in self._pending if one.step <= since]
        if self.step > since:
            self._loss, self.step = math.inf, 0
            for name in (_BEST_METRICS, WEIGHTS):
                with contextlib.suppress(OSError):
                    files.disk.unlink(self.path / name)


class BestWeights(Extension):
    def build(self, run: Run) -> None:
        self._run, directory = run, run.incident_log.directory
        self._best = Best(directory) if directory is not None else None  # on rank 0
        self._is_sharded = run.state.is_sharded  # before a forward, which may leave no weight sharded
        if self._best is not None:
            run.keeper.further.append(self._best)

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Keep the present weights if this evaluation of them is the best so far."""
        if "loss" not in metrics:
            return
        best, run = self._best, self._run
        is_better = best is not None and best.is_better(metrics)
        if self._is_sharded:
            is_better = run.world.on_main(lambda: is_better)
        if is_better:
            tensors = gathered(run.state.model, keep=best is not None)
            if best is not None:
                best.take(run.clock.step, metrics, tensors)
