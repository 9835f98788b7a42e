"""Weights for other programs: a safetensors file, those of the best evaluation, a folder for `from_pretrained`.

What such a folder says of its model is written by the run itself, as it alone has the model: pretrained/config.json
and, where the model generates, pretrained/generation_config.json. An export adds the weights and builds nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from resilient_train import files
from resilient_train.checkpoint.manifest import WEIGHTS, Damaged, Manifest, verify
from resilient_train.checkpoint.safetensors_files import NAMES, chunks, is_share
from resilient_train.checkpoint.tree_files import load_tree
from resilient_train.errors import ConfigError, in_one_line
from resilient_train.files import (
    commit,
    commit_directory,
    commit_text,
    own_directory,
    read_json,
    remove,
    sweep,
    temporary,
    write_file,
)
from resilient_train.state.sharded import full_tensor, own_class, reshard


def gathered(model: nn.Module, *, keep: bool) -> dict[str, torch.Tensor]:
    """All weights and buffers of an unwrapped model; tied ones once, under their first name.

    Of a model that is spread over ranks all have to ask, and those that do not `keep` them hold one at a time.
    """
    found = {}
    for name, tensor in _tensors(model).items():
        full = full_tensor(tensor)
        if keep:
            found[name] = full.cpu() if full is not tensor else tensor
    return found


def save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Commit weights to a file."""
    commit(path, chunks(tensors))


def stored(directory: Path) -> dict[str, torch.Tensor]:
    """The weights and buffers in a checkpoint, made whole where several ranks have written them, or in a run directory.

    Raises OSError, ValueError or SafetensorError where they cannot be read.
    """
    if not any(is_share(path.name) for path in directory.iterdir()):
        return load_file(directory / WEIGHTS)
    match load_tree(directory):
        case {"parts": {"weights": dict(weights), "buffers": dict(buffers)}, "memory": {"lasting": list(lasting)}}:
            kept = {name: one for name, one in buffers.items() if name in lasting and one is not None}
            return {name: reshard(one, None) for name, one in {**weights, **kept}.items()}
    raise ValueError(f"{directory} holds no weights")


@torch.no_grad()
def load_into(model: nn.Module, source: Path) -> None:
    """Start `model` from the weights in a file or a run directory; everything has to fit."""
    try:
        saved = stored(source) if source.is_dir() else load_file(source)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError("run.init_from", source, f"holds no weights that can be read: {error}") from error
    wanted = _tensors(model)
    missing, unexpected = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys())
    if missing or unexpected:
        raise ConfigError(
            "run.init_from", source, f"fits another model: lacks {_some(missing)}; has {_some(unexpected)} too many"
        )
    for name, tensor in wanted.items():
        if tensor.shape != saved[name].shape:
            raise ConfigError(
                "run.init_from",
                source,
                f"fits another model: {name} is {list(saved[name].shape)}, not {list(tensor.shape)}",
            )
        tensor.copy_(saved[name])


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    persistent = model.state_dict(keep_vars=True).keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {**dict(model.named_parameters()), **buffers}


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if names else "nothing"


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


PRETRAINED = "pretrained"  # its name in a run directory

_CONFIG, _GENERATION, _MODEL = "config.json", "generation_config.json", "model.safetensors"
_MOST_BYTES = 2**24  # of a file of JSON
_PIECE = 2**22


class NotExportable(ValueError):
    """There is nothing to export, or no place for it. The message is one line for a person."""


def describe(model: nn.Module, run_dir: Path) -> None:
    """Write down what `from_pretrained` needs to know of a model of transformers; of any other nothing."""
    transformers = sys.modules.get("transformers")  # where it is not loaded, no model is of it
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return
    dtypes = {weight.dtype for weight in model.parameters()}
    dtype = str(dtypes.pop() if len(dtypes) == 1 else torch.float32).removeprefix("torch.")
    config = {**model.config.to_dict(), "architectures": [own_class(model).__name__], "dtype": dtype}
    told: dict[str, dict[str, Any]] = {_CONFIG: config}
    if getattr(model, "generation_config", None) is not None:
        told[_GENERATION] = model.generation_config.to_dict()
    place = run_dir / PRETRAINED
    place.mkdir(exist_ok=True)
    for name, node in told.items():
        commit_text(place / name, json.dumps(node, indent=2, sort_keys=True, default=str) + "\n")


def export(run_dir: Path, checkpoint: Path, to: Path) -> Manifest:
    """Make a new folder of a checkpoint that verifies. Raises NotExportable or Damaged."""
    if not (run_dir / PRETRAINED).is_dir():
        why = f"is for models of transformers, and this run's is none: {checkpoint / WEIGHTS} loads with safetensors"
        raise NotExportable(f"--export {why}")
    if to.is_symlink() or (to.exists() and not to.is_dir()) or (to.is_dir() and any(to.iterdir())):
        raise NotExportable(f"{to} is there already: --export makes a new folder")
    told = {_CONFIG: _json(run_dir / PRETRAINED / _CONFIG)}
    if (run_dir / PRETRAINED / _GENERATION).exists():
        told[_GENERATION] = _json(run_dir / PRETRAINED / _GENERATION)
    manifest = verify(checkpoint)
    beside = temporary(to)
    try:
        to.absolute().parent.mkdir(parents=True, exist_ok=True)
        if beside.exists():
            remove(beside)
        files.disk.make_directory(beside)
        for name, content in told.items():
            write_file(beside / name, [content])
        if any(map(is_share, manifest.files)):
            write_file(beside / _MODEL, chunks(_whole(checkpoint)))
        elif write_file(beside / _MODEL, _pieces(checkpoint / WEIGHTS)) != manifest.files[WEIGHTS]:
            raise Damaged(f"{WEIGHTS} changed while it was copied")
        commit_directory(beside, to)
    except OSError as error:
        raise NotExportable(f"{to} cannot be written: {error.strerror or error}") from error
    finally:
        if beside.exists():
            remove(beside)
    return manifest


def export_weights(checkpoint: Path, to: Path) -> Manifest:
    """Make one safetensors file of a checkpoint that verifies, whoever has written it. As `export`."""
    if to.is_symlink() or to.exists():
        raise NotExportable(f"{to} is there already: --weights makes a new file")
    manifest = verify(checkpoint)
    try:
        to.absolute().parent.mkdir(parents=True, exist_ok=True)
        commit(to, chunks(_whole(checkpoint)))
    except OSError as error:
        raise NotExportable(f"{to} cannot be written: {error.strerror or error}") from error
    return manifest


def _whole(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Put together what several ranks have written."""
    try:
        return stored(checkpoint)
    except (ValueError, SafetensorError) as error:
        raise Damaged(f"cannot be loaded: {in_one_line(error)}") from error


def _json(file: Path) -> bytes:
    """What a file holds, if that is an object in JSON."""
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
            content = opened.read(_MOST_BYTES + 1)
        if len(content) <= _MOST_BYTES and isinstance(json.loads(content), dict):
            return content
    except (OSError, ValueError, RecursionError):
        pass
    raise NotExportable(f"{file} is not what a run writes there")


def _pieces(file: Path) -> Iterator[bytes]:
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
        while piece := opened.read(_PIECE):
            yield piece
