"""Sharding of a model over the ranks block by block, and activation checkpointing of its blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from resilient_train.errors import ConfigError


def shard(model: nn.Module, names: Sequence[str] | None, device: torch.device, world: int) -> str:
    """Shard the weights over all ranks block by block, so that one block at a time is whole. Returns what was done.

    By torch's own `fully_shard`: Accelerate silently does nothing on a CPU.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if scalars := [name for name, weight in model.named_parameters() if not weight.dim()]:
        why = f"cannot spread {scalars[0]}, which is a single number: make it a vector of one, torch.zeros(1)"
        raise ConfigError("accelerate.fsdp", True, why)
    mesh = init_device_mesh(device.type, (world,))
    found = blocks(model, names)
    counts = _counts(found)
    for block in found:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return f"FSDP2 over {world} processes ({counts or 'as one block'})"


def recompute(model: nn.Module, names: Sequence[str] | None) -> str:
    """Let the backward recompute the activations of each block instead of keeping them. Returns what was done."""
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if names is None and callable(enable):  # a model of transformers knows best how
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return "activations are recomputed in the backward, as the model itself does it"
    found = blocks(model, names)
    if not found:
        why = "finds no blocks in this model: name their classes in accelerate.blocks"
        raise ConfigError("accelerate.activation_checkpointing", True, why)
    for block in found:
        block.forward = _checkpointed(block.forward)
    return f"activations of {_counts(found)} are recomputed in the backward"


def blocks(model: nn.Module, names: Sequence[str] | None) -> list[nn.Module]:
    """Return the parts that a model repeats, none within another: by default those that are found.

    A model of transformers names them itself. Otherwise they are layers of a ModuleList or Sequential that consist of
    several modules, and whose class occurs at least twice.
    """
    named = set(names if names is not None else getattr(model, "_no_split_modules", None) or ())
    kinds = {type(one).__name__ for one in model.modules()}
    if names is not None and (unknown := sorted(named - kinds)):
        raise ConfigError("accelerate.blocks", list(names), f"{unknown[0]} is no class of a module of this model")
    classes = named & kinds
    if not classes:
        rows = [one for one in model.modules() if isinstance(one, nn.ModuleList | nn.Sequential)]
        counted = Counter(type(layer).__name__ for row in rows for layer in row if _is_composed(layer))
        classes = {name for name, count in counted.items() if count > 1}
    found: list[nn.Module] = []

    def look(module: nn.Module) -> None:
        for child in module.children():
            if type(child).__name__ in classes:
                found.append(child)
            else:
                look(child)

    look(model)
    return list(dict.fromkeys(found))


def _is_composed(layer: nn.Module) -> bool:
    is_row = isinstance(layer, nn.ModuleList | nn.Sequential)
    return not is_row and sum(1 for _ in layer.children()) > 1 and any(True for _ in layer.parameters())


def _checkpointed(forward: Any) -> Any:
    @wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False)

    return recomputed


def _counts(found: Sequence[nn.Module]) -> str:
    kinds = Counter(type(one).__name__ for one in found)
    return " and ".join(f"{count} x {name}" for name, count in kinds.items())
