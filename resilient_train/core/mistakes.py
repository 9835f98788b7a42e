"""Mistakes that a training loop may make, each told in one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from resilient_train.errors import TrainError

_HOW = "for losses that are stepped in turn, as in a GAN, call guard.update(loss, optimizer=...) for each optimizer"
TWICE = f"guard.{{verb}} was called twice for one batch: {_HOW}"
MISSING = "a batch was not handed back: call guard.step(batch), or guard.update(loss)"
TWO_GUARDS = f"two guards are at work in turn, which would not rewind together: give one of them all networks; {_HOW}"


def require_gradient(loss: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
    if all(weight.grad is None for weight in weights):
        raise TrainError(_why_no_gradient(loss, weights))


def _why_no_gradient(loss: torch.Tensor, weights: Sequence[torch.Tensor]) -> str:
    if not any(one.requires_grad for one in weights):
        return "no weight has a gradient: all that the optimizer trains are frozen (requires_grad=False)"
    graph, left = set[Any](), [loss.grad_fn]
    while left:
        if (node := left.pop()) is not None and node not in graph:
            graph.add(node)
            left += [one for one, _ in node.next_functions]
    used = {id(getattr(node, "variable", None)) for node in graph}
    if graph and not used & set(map(id, weights)):
        return "no weight has a gradient: the loss was not computed with the guarded model, or is detached from it"
    return "no weight has a gradient: call loss.backward(), or accelerator.backward(loss), before"
