"""Weights as one safetensors file: names and numbers, nothing that executes on loading."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from resilient_train.checkpoint.safetensors_file import chunks
from resilient_train.checkpoint.shares import is_share
from resilient_train.checkpoint.tree_files import load_tree
from resilient_train.errors import ConfigError
from resilient_train.files import commit
from resilient_train.state.sharded import full_tensor, reshard

WEIGHTS = "weights.safetensors"


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
