"""The gate: an update that is not finite, or above the limits, changes nothing, whatever the optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.optim import Optimizer

from resilient_train.types import NO_LIMIT


class Agreement:
    """The only collective that the checks of an update cost; its rows are read only after an incident."""

    def __init__(self, gather: Callable[[torch.Tensor], torch.Tensor | None] | None, device: torch.device) -> None:
        """`gather` collects a vector from every rank; None if there is only one."""
        self._gather = gather
        self._stop = torch.zeros(1, device=device)  # whether this rank was asked to

    def ask_to_stop(self) -> None:
        self._stop.fill_(1.0)

    def reduce(self, measured: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Reduce to the mean loss and the largest gradient norm of all ranks. A NaN of any rank stays NaN.

        `measured` is this rank's loss, norm and, if there is one, loss scale, which is returned as it is. The result
        ends with whether any rank was asked to stop. The second result is the table with a row for each rank, or None
        if there is only one.
        """
        if self._gather is None or (table := self._gather(torch.cat([measured[:2], self._stop]))) is None:
            return measured, None
        largest = table.amax(dim=0)
        return torch.cat([table[:, :1].mean(0), largest[1:2], measured[2:], largest[2:]]), table


LARGEST_NORM = 2.0**63  # its square is near the end of float32: beyond it moments would be infinite


class Gate:
    """Steps all optimizers if `measured <= limits`, else none of them. A NaN is below no limit.

    Torch's fused optimizers read a flag on the device (`found_inf`), so the host does not wait. Others may leave
    something behind once they have begun a step: for them the host reads what was measured and decides.
    """

    def __init__(self, optimizers: Sequence[Optimizer], device: torch.device, *, skips_overflow: bool = False) -> None:
        """`skips_overflow`: while it is open, gradients that are not finite make no step, as with a loss scaler."""
        self.optimizers, self.device = list(optimizers), device
        self.limits = (NO_LIMIT, LARGEST_NORM)  # of loss and gradient norm
        self.is_open = False  # all updates land, as without a gate: the policy only observes
        self._skips_overflow = skips_overflow
        self._on_device = torch.tensor(self.limits, dtype=torch.float32, device=device)
        self._stateless: set[int] = set()  # ids of weights that have no state after an update, as in plain SGD

    def limit(self, loss: float, grad_norm: float) -> None:
        """Set the limits of the next updates. Both must be exact in float32."""
        grad_norm = min(grad_norm, LARGEST_NORM)
        for place, (old, new) in enumerate(zip(self.limits, (loss, grad_norm), strict=True)):
            if new != old:
                self._on_device[place].fill_(new)  # a number as an argument: no copy that the host would wait for
        self.limits = (loss, grad_norm)

    def admits(self, loss: float, grad_norm: float, *, is_part: bool = False) -> bool:
        return -math.inf < loss <= (NO_LIMIT if is_part else self.limits[0]) and grad_norm <= self.limits[1]

    @torch.no_grad()
    def step(
        self,
        measured: torch.Tensor,
        only: Optimizer | None = None,
        *,
        own_norm: torch.Tensor | None = None,
        scaled: tuple[Sequence[torch.Tensor], float] | None = None,
    ) -> list[float] | None:
        """Step if `measured`, which begins with loss and gradient norm, is admitted.

        With `only`, step one optimizer, which may be a part of the update: the limit of the loss is for all of it, and
        `own_norm` is that of its gradients. `scaled`: weights that move by a multiple of what their optimizers make of
        it, none of which is fused.
        Returns the numbers if the host had to read them, so that they are not read twice.
        """
        optimizers = self.optimizers if only is None else [only]
        if self.is_open:
            if not self._skips_overflow or math.isfinite(measured[1] if own_norm is None else own_norm):
                for optimizer in optimizers:
                    optimizer.step()
            return None
        waits_for = synchronous(optimizers)
        if waits_for or not self._is_settled(optimizers):
            numbers: list[float] = measured.tolist()
            if self.admits(numbers[0], numbers[1], is_part=only is not None):
                weights, factor = scaled or ((), 1.0)
                before = [weight.clone() for weight in weights] if factor != 1.0 else []
                for optimizer in optimizers:
                    optimizer.step()
                    if not waits_for:
                        state, moved = optimizer.state, _with_gradient(optimizer)
                        self._stateless.update(id(weight) for weight in moved if not state.get(weight))
                for weight, old in zip(weights if before else (), before, strict=True):
                    weight.copy_(old.lerp(weight, factor))
            return numbers
        # A loss of -inf is below every limit, but no loss.
        heads = measured[:2].nan_to_num(nan=math.inf, neginf=math.inf)
        limits = self._on_device
        if only is not None:
            limits = limits.clone()
            limits[0].fill_(NO_LIMIT)
        refused = (heads > limits).any().float()  # no NaN is left in them
        for optimizer in optimizers:
            optimizer.found_inf = refused  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:
                del optimizer.found_inf  # type: ignore[attr-defined]
        return None

    def _is_settled(self, optimizers: Sequence[Optimizer]) -> bool:
        """Say whether every weight with a gradient has its state, or needs none.

        A refused step would leave new state behind, and torch's fused SGD fills its momentum with garbage then.
        """
        for optimizer in optimizers:
            weights, state = _with_gradient(optimizer), optimizer.state
            if state and all(map(state.get, weights)):  # the usual case, in every update: a loop in C
                continue
            if not all(id(weight) in self._stateless or state.get(weight) for weight in weights):
                return False
        return True


def _with_gradient(optimizer: Optimizer) -> list[torch.Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None]


def synchronous(optimizers: Sequence[Optimizer]) -> list[str]:
    """Name those for which the host has to wait: a user's class, or a hook, may do more than torch's class."""
    return [
        type(one).__name__
        for one in optimizers
        if not type(one).__module__.startswith("torch.optim")
        or not getattr(one, "_step_supports_amp_scaling", False)
        or one._optimizer_step_pre_hooks
        or one._optimizer_step_post_hooks
    ]
