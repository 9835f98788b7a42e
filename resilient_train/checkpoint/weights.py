"""Weights as one safetensors file: names and numbers, nothing that executes on loading."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from resilient_train.errors import ConfigError
from resilient_train.files import commit

WEIGHTS = "weights.safetensors"


def save(model: nn.Module, path: Path) -> None:
    """Commit all weights and buffers of an unwrapped model; tied ones once, under their first name."""
    tensors = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in _tensors(model).items()
    }
    commit(path, lambda temporary: save_file(tensors, temporary))


@torch.no_grad()
def load_into(model: nn.Module, source: Path) -> None:
    """Start `model` from the weights in a file or a run directory; everything has to fit."""
    path = source / WEIGHTS if source.is_dir() else source
    try:
        saved = load_file(path)
    except (OSError, SafetensorError) as error:
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
