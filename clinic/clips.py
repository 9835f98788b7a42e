"""Ways to clip gradients that people propose against explosions, each with the settings of its paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Protocol

import torch
from torch import nn


class Clip(Protocol):
    """Clips the gradients of weights in place, once an update."""

    def __call__(self, weights: Sequence[nn.Parameter]) -> float:
        """Return their norm before."""


class GlobalNorm:
    """The norm of all gradients together is at most one, as most language models are trained."""

    def __call__(self, weights: Sequence[nn.Parameter]) -> float:
        return float(torch.nn.utils.clip_grad_norm_(weights, 1.0))


class AdaGC:
    """Adaptive gradient clipping by tensor: none may exceed 1.05 times a running mean of its own clipped norms.

    In the first 100 updates the global norm is clipped, and the least norm of each tensor begins its mean.
    """

    start, factor, decay = 100, 1.05, 0.98

    def __init__(self) -> None:
        self.updates = 0
        self.means: dict[int, float] = {}

    def __call__(self, weights: Sequence[nn.Parameter]) -> float:
        norm = float(torch.nn.utils.clip_grad_norm_(weights, 1.0 if self.updates < self.start else math.inf))
        for place, weight in enumerate(weights):
            if weight.grad is None:
                continue
            own = float(weight.grad.norm())
            if not math.isfinite(own):
                continue
            if self.updates < self.start:
                self.means[place] = min(own, self.means.get(place, own))
                continue
            mean = self.means.setdefault(place, own)
            share = min(1.0, self.factor * mean / own) if own else 1.0
            weight.grad.mul_(share)
            self.means[place] = self.decay * mean + (1 - self.decay) * share * own
        self.updates += 1
        return norm


class ZClip:
    """A norm more than 2.5 standard deviations above its running mean is clipped, the farther above, the more.

    The first 25 updates give mean and deviation.
    """

    warmup, decay, most = 25, 0.97, 2.5

    def __init__(self) -> None:
        self.first: list[float] = []
        self.mean = self.variance = 0.0

    def __call__(self, weights: Sequence[nn.Parameter]) -> float:
        norm = float(torch.nn.utils.clip_grad_norm_(weights, math.inf))
        if not math.isfinite(norm):
            return norm
        if len(self.first) < self.warmup:
            self.first.append(norm)
            self.mean, self.variance = fmean(self.first), pstdev(self.first) ** 2
            return norm
        deviation = math.sqrt(self.variance)
        z = (norm - self.mean) / (deviation + 1e-6)
        allowed = self.mean + self.most**2 / z * deviation if z > self.most else norm
        if allowed < norm:
            torch.nn.utils.clip_grad_norm_(weights, allowed)
        self.mean = self.decay * self.mean + (1 - self.decay) * allowed
        self.variance = self.decay * self.variance + (1 - self.decay) * (allowed - self.mean) ** 2
        return norm
