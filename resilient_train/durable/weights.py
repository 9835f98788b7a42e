"""Weights for other programs: a safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from resilient_train.durable.store import WEIGHTS, Manifest, verify
from resilient_train.durable.tree_files import NAMES, chunks
from resilient_train.durable.tree_files import gathered as gathered_tree
from resilient_train.ground import files
from resilient_train.ground.errors import ConfigError
from resilient_train.ground.wording import log

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
