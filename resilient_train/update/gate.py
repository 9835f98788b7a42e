"""The gate: an update that is not finite, or above the limits, does not land, whatever the optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

NO_LIMIT = torch.finfo(torch.float32).max


class Gate:
    """Steps all optimizers or none of them, as `measured <= limits` says; a NaN is below no limit.

    Torch's fused optimizers are told on the device, so the host does not wait. Of all others nothing is known but
    that an update which is not begun leaves nothing behind: for them the host reads what was measured and decides.
    """

    def __init__(self, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        self.optimizers, self.device = list(optimizers), device
        self.limits = (NO_LIMIT, NO_LIMIT)  # of loss and gradient norm
        self._on_device = torch.full((2,), NO_LIMIT, dtype=torch.float32, device=device)
        self._has_to_wait = not all(can_be_told(one) for one in self.optimizers)
        self._settled: list[tuple[int, int]] = []  # of each optimizer, once a first update has made its state

    def limit(self, loss: float, grad_norm: float) -> None:
        """Set the limits of the updates to come; both have to be exact in float32."""
        for place, (old, new) in enumerate(zip(self.limits, (loss, grad_norm), strict=True)):
            if new != old:
                self._on_device[place].fill_(new)  # a number as an argument: no copy that the host would wait for
        self.limits = (loss, grad_norm)

    def admits(self, loss: float, grad_norm: float) -> bool:
        """Say what the device says."""
        return loss <= self.limits[0] and grad_norm <= self.limits[1]

    def waits(self) -> list[str]:
        """Name the optimizers for which the host has to read the measurement at once."""
        return [type(one).__name__ for one in self.optimizers if not can_be_told(one)]

    @torch.no_grad()
    def step(self, measured: torch.Tensor) -> list[float] | None:
        """Step if `measured`, which begins with loss and gradient norm, is admitted.

        Returns the numbers where they had to be read, so that nobody reads them twice.
        """
        if self._has_to_wait or _has_hooks(self.optimizers) or self._sizes() != self._settled:
            numbers: list[float] = measured.tolist()
            if self.admits(*numbers[:2]):
                for optimizer in self.optimizers:
                    optimizer.step()
                self._settled = self._sizes()
            return numbers
        heads = measured if measured.numel() == 2 else measured[:2]
        refused = (heads <= self._on_device).all().logical_not().float()
        for optimizer in self.optimizers:
            optimizer.found_inf = refused  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:
                del optimizer.found_inf  # type: ignore[attr-defined]
        return None

    def _sizes(self) -> list[tuple[int, int]]:
        """How many weights of each optimizer have a gradient, and how many have a state.

        While these numbers change a step makes new state, which a refused one would leave behind (and torch's fused
        SGD fills its momentum with garbage then).
        """
        return [
            (sum(weight.grad is not None for group in one.param_groups for weight in group["params"]), len(one.state))
            for one in self.optimizers
        ]


def can_be_told(optimizer: Optimizer) -> bool:
    """Say whether a step of this optimizer heeds `found_inf`, moments and step counter included.

    A class of a user's own may do more than the torch class it is made from, and so may hooks.
    """
    return (
        type(optimizer).__module__.startswith("torch.optim")
        and getattr(optimizer, "_step_supports_amp_scaling", False)
        and not _has_hooks([optimizer])
    )


def _has_hooks(optimizers: Sequence[Optimizer]) -> bool:
    return any(one._optimizer_step_pre_hooks or one._optimizer_step_post_hooks for one in optimizers)
