"""Safe losses on probabilities. Where there are logits, torch's losses on logits are better than any of these."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from resilient_train.numerics.elementwise import log
from resilient_train.numerics.limits import eps, instead_of, reach


@instead_of(functional.binary_cross_entropy)
def binary_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    """A number beside [0, 1] counts as eps from its end, and of a NaN comes a NaN, where torch raises for both.

    It raises where torch does for another reason: for targets beside [0, 1], and under CUDA's autocast.
    """
    x, near = input.detach(), reach(input.dtype)
    fine = (x >= near) & (x <= 1.0 - near)
    if x.dtype is torch.float16:  # in which the 1e-12 that bounds torch's slope is zero
        fine = fine & ((x - target) / ((1.0 - x) * x)).isfinite()
    if target.requires_grad:
        fine = fine & (x > 0.0) & (x < 1.0)
    inside = x.nan_to_num(0.5).clamp(eps(x.dtype), 1.0 - eps(x.dtype))
    result = functional.binary_cross_entropy(torch.where(fine, input, inside), target, weight, reduction=reduction)
    lost = x.isnan() if reduction == "none" else x.isnan().any()
    return result.masked_fill(lost, math.nan)


def cross_entropy_of_probabilities(
    input: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """What `F.cross_entropy` is for logits, for probabilities of the same shape: one of 0 costs -log(eps).

    Targets are classes, or as many probabilities as there are in the input.
    """
    logs = log(input)
    if not target.is_floating_point():
        return functional.nll_loss(logs, target, weight, ignore_index=ignore_index, reduction=reduction)
    classes = 1 if input.ndim > 1 else 0
    if weight is not None:
        target = target * weight.reshape(-1, *(1,) * (input.ndim - 1 - classes))
    losses = -(target * logs).sum(classes)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / max(1, losses.numel())
