"""The gate: an update that is not finite, or above the limits, changes nothing, whatever the optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

NO_LIMIT = torch.finfo(torch.float32).max
LARGEST_NORM = 2.0**63  # its square is near the end of float32: beyond it moments would be infinite


class Gate:
    """Steps all optimizers if `measured <= limits`, else none of them; a NaN is below no limit.

    Torch's fused optimizers read a flag on the device (`found_inf`), so the host does not wait. Others may leave
    something behind once they have begun a step: for them the host reads what was measured and decides.
    """

    def __init__(self, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        self.optimizers, self.device = list(optimizers), device
        self.limits = (NO_LIMIT, LARGEST_NORM)  # of loss and gradient norm
        self._on_device = torch.tensor(self.limits, dtype=torch.float32, device=device)
        self._has_to_wait = not all(heeds_found_inf(one) for one in self.optimizers)
        self._stateless: set[int] = set()  # weights that an update has landed on without making a state

    def limit(self, loss: float, grad_norm: float) -> None:
        """Set the limits of the updates to come; both have to be exact in float32."""
        grad_norm = min(grad_norm, LARGEST_NORM)
        for place, (old, new) in enumerate(zip(self.limits, (loss, grad_norm), strict=True)):
            if new != old:
                self._on_device[place].fill_(new)  # a number as an argument: no copy that the host would wait for
        self.limits = (loss, grad_norm)

    def admits(self, loss: float, grad_norm: float) -> bool:
        """Decide on the host, as the device does."""
        return -math.inf < loss <= self.limits[0] and grad_norm <= self.limits[1]

    def synchronous(self) -> list[str]:
        """Name the optimizers for which the host has to read the measurement at once."""
        return [type(one).__name__ for one in self.optimizers if not heeds_found_inf(one)]

    @torch.no_grad()
    def step(self, measured: torch.Tensor) -> list[float] | None:
        """Step if `measured`, which begins with loss and gradient norm, is admitted.

        Returns the numbers where they had to be read, so that they are not read twice.
        """
        if self._has_to_wait or _has_hooks(self.optimizers) or not self._is_settled():
            numbers: list[float] = measured.tolist()
            if self.admits(*numbers[:2]):
                for optimizer in self.optimizers:
                    optimizer.step()
                self._note_stateless()
            return numbers
        heads = measured if measured.numel() == 2 else measured[:2]
        heads = heads.nan_to_num(nan=math.inf, neginf=math.inf)  # a loss of -inf is below every limit, and no loss
        refused = (heads <= self._on_device).all().logical_not().float()
        for optimizer in self.optimizers:
            optimizer.found_inf = refused  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:
                del optimizer.found_inf  # type: ignore[attr-defined]
        return None

    def _is_settled(self) -> bool:
        """Say whether every weight with a gradient has its state, or an optimizer that keeps none.

        A step that makes new state would leave it behind when it is refused, and torch's fused SGD fills its momentum
        with garbage then. Asked at every update, so the loop over the weights is C's where it can be.
        """
        for optimizer in self.optimizers:
            moved, state = _moved(optimizer), optimizer.state
            if not (all(map(state.get, moved)) if state else False) and any(
                id(weight) not in self._stateless and not state.get(weight) for weight in moved
            ):
                return False
        return True

    def _note_stateless(self) -> None:
        """Note which weights get no state in a step: those of SGD without momentum, for example."""
        if self._has_to_wait:
            return
        for optimizer in self.optimizers:
            self._stateless.update(id(weight) for weight in _moved(optimizer) if not optimizer.state.get(weight))


def _moved(optimizer: Optimizer) -> list[torch.Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None]


def heeds_found_inf(optimizer: Optimizer) -> bool:
    """Say whether a step of this optimizer heeds `found_inf`, moments and step counter included.

    A user's class may do more than the torch class it is derived from, and so may hooks.
    """
    return (
        type(optimizer).__module__.startswith("torch.optim")
        and getattr(optimizer, "_step_supports_amp_scaling", False)
        and not _has_hooks([optimizer])
    )


def _has_hooks(optimizers: Sequence[Optimizer]) -> bool:
    return any(one._optimizer_step_pre_hooks or one._optimizer_step_post_hooks for one in optimizers)
