"""Parameter groups, and the optimizers over them."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any

from torch import nn


def parameter_groups(model: nn.Module, *, no_decay: Sequence[str]) -> list[dict[str, Any]]:
    """Split the trainable weights into those that decay and those that do not.

    `no_decay` names the latter: `1d` stands for every weight with fewer than two dimensions (biases, norms); anything
    else is a pattern over qualified names, such as `*.embedding.weight`.
    """

    def is_exempt(name: str, weight: nn.Parameter) -> bool:
        return any((rule == "1d" and weight.ndim < 2) or fnmatch(name, rule) for rule in no_decay)

    weights = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    exempt = [weight for name, weight in weights if is_exempt(name, weight)]
    decayed = [weight for name, weight in weights if not is_exempt(name, weight)]
    groups: list[dict[str, Any]] = [{"params": decayed}] if decayed else []
    return groups + ([{"params": exempt, "weight_decay": 0.0}] if exempt else [])
