"""Weights for other programs: a safetensors file, and those of the best evaluation."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from resilient_train.durable.journal import commit_json
from resilient_train.durable.store import WEIGHTS, Manifest, verify
from resilient_train.durable.tree_files import NAMES, chunks
from resilient_train.durable.tree_files import gathered as gathered_tree
from resilient_train.ground import files
from resilient_train.ground.errors import ConfigError
from resilient_train.ground.wording import log

BEST = "best"  # its name in a run directory

_BEST_METRICS = "best.json"
_PIECE = 2**22  # bytes that are copied at a time


def gathered(model: nn.Module, *, keep: bool) -> dict[str, torch.Tensor]:
    """All weights and persistent buffers of an unwrapped model, full ones. All ranks call this for a sharded model."""
    return gathered_tree(_tensors(model), keep=keep)  # type: ignore[no-any-return]


def save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file; leave out, and name, what it cannot hold."""
    if odd := [f"{name} ({str(one.dtype)[6:]})" for name, one in sorted(tensors.items()) if one.dtype not in NAMES]:
        log.warning("%s has no %s: safetensors have no such types; only checkpoints hold them", path, ", ".join(odd))
    files.commit(path, chunks({name: one for name, one in tensors.items() if one.dtype in NAMES}))


@torch.no_grad()
def load_into(model: nn.Module, source: Path, key: str = "run.init_from") -> None:
    """Load the weights of a file, a checkpoint or a run into `model`; all names and shapes must be the same."""
    try:
        saved = load_file(source / WEIGHTS if source.is_dir() else source)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(key, source, f"has no weights that can be read: {error}") from error
    own = _tensors(model)
    for name in [*own, *sorted(saved.keys() - own.keys())]:
        theirs, ours = (list(some[name].shape) if name in some else "missing" for some in (saved, own))
        if theirs != ours:
            why = f"does not fit the model: {name} is {theirs} there, and {ours} in the model"
            raise ConfigError(key, source, why)
    for name, tensor in own.items():
        tensor.copy_(saved[name])


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights and persistent buffers of a model by name; tied ones once, under their first name."""
    persistent = model.state_dict(keep_vars=True).keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {**dict(model.named_parameters()), **buffers}


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


class NotExportable(ValueError):
    """There is nothing to export, or the target cannot be written. The message is one line."""


def export_weights(checkpoint: Path, to: Path) -> Manifest:
    """Copy the weights of a checkpoint to a new file. Raises NotExportable or Damaged."""
    if to.exists():
        raise NotExportable(f"{to} is there already: --weights makes a new file")
    manifest = verify(checkpoint)
    try:
        to.absolute().parent.mkdir(parents=True, exist_ok=True)
        with open(checkpoint / WEIGHTS, "rb") as file:
            files.commit(to, iter(partial(file.read, _PIECE), b""))
    except OSError as error:
        raise NotExportable(f"{to} cannot be written: {error.strerror or error}") from error
    return manifest
