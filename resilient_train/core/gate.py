"""The gates: an update that is not finite, or above the limits, changes nothing, whatever the optimizer."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from resilient_train.ground.errors import TrainError, named_type
from resilient_train.ground.types import LARGEST_NORM, NO_LIMIT


class Agreement:
    """The only collective that the checks of an update cost; its rows are read only after an incident."""

    def __init__(self, gather: Callable[[torch.Tensor], torch.Tensor | None] | None, device: torch.device) -> None:
        self._gather = gather
        self._stop = torch.zeros(1, device=device)  # whether this rank was asked to

    def ask_to_stop(self) -> None:
        self._stop.fill_(1.0)

    def reduce(self, measured: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Reduce to the mean loss and the largest gradient norm of all ranks. A NaN of any rank stays NaN.

        `measured` is this rank's loss, norm and, if there is one, loss scale, which is returned as it is. The result
        ends with whether any rank was asked to stop. The second one has a row for each rank; None if there is only one.
        """
        if self._gather is None or (table := self._gather(torch.cat([measured[:2], self._stop]))) is None:
            return measured, None
        largest = table.amax(dim=0)
        return torch.cat([table[:, :1].mean(0), largest[1:2], measured[2:], largest[2:]]), table


class Gate(ABC):
    """Steps all optimizers if loss and gradient norm are within the limits, else none. A NaN is within no limit."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.limits = (NO_LIMIT, LARGEST_NORM)  # of loss and gradient norm

    def limit(self, loss: float, grad_norm: float) -> None:
        """Set the limits of the next updates. Both must be exact in float32."""
        self.limits = (loss, min(grad_norm, LARGEST_NORM))

    def admits(self, loss: float, grad_norm: float) -> bool:
        return -math.inf < loss <= self.limits[0] and grad_norm <= self.limits[1]

    @abstractmethod
    def step(self, measured: torch.Tensor, optimizers: Sequence[Optimizer]) -> list[float] | None:
        """Step if `measured`, loss and norm first, is within the limits. Returns the numbers if the host read them."""


class OpenGate(Gate):
    """Lets all updates land, as without a gate: the policy only observes."""

    def __init__(self, device: torch.device, *, has_scale: bool) -> None:
        """`has_scale`: the loss is scaled, and gradients that are not finite make no step, as with a loss scaler."""
        super().__init__(device)
        self._has_scale = has_scale

    @torch.no_grad()
    def step(self, measured: torch.Tensor, optimizers: Sequence[Optimizer]) -> list[float] | None:
        if not self._has_scale or math.isfinite(measured[1]):
            for optimizer in optimizers:
                optimizer.step()
        return None


class HostGate(Gate):
    """Reads what was measured, then steps or not: most optimizers leave something behind once they begin a step."""

    @torch.no_grad()
    def step(self, measured: torch.Tensor, optimizers: Sequence[Optimizer]) -> list[float] | None:
        numbers: list[float] = measured.tolist()
        if self.admits(numbers[0], numbers[1]):
            for optimizer in optimizers:
                optimizer.step()
        return numbers


class DeviceGate(HostGate):
    """Torch's fused optimizers read a flag on the device (`found_inf`), so the host does not wait.

    It does while weights have no state: a refused update would leave some behind, garbage in fused SGD's momentum. SGD
    without momentum never has any, so there it always waits.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._on_device = torch.tensor(self.limits, dtype=torch.float32, device=device)

    def limit(self, loss: float, grad_norm: float) -> None:
        before = self.limits
        super().limit(loss, grad_norm)
        for place, (old, new) in enumerate(zip(before, self.limits, strict=True)):
            if new != old:
                self._on_device[place].fill_(new)  # a number as an argument: no copy that the host would wait for

    @torch.no_grad()
    def step(self, measured: torch.Tensor, optimizers: Sequence[Optimizer]) -> list[float] | None:
        if not self._can_decide(optimizers):
            return super().step(measured, optimizers)
        # A loss of -inf is below every limit, but no loss.
        heads = measured[:2].nan_to_num(nan=math.inf, posinf=math.inf, neginf=math.inf)
        refused = (heads > self._on_device).any().float()  # no NaN is left in them
        for optimizer in optimizers:
            optimizer.found_inf = refused  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:
                del optimizer.found_inf  # type: ignore[attr-defined]
        return None

    def _can_decide(self, optimizers: Sequence[Optimizer]) -> bool:
        return not any(map(_has_hooks, optimizers)) and all(
            all(map(optimizer.state.get, _with_gradient(optimizer)))  # a loop in C
            for optimizer in optimizers
        )


def gate_of(optimizers: Sequence[Optimizer], device: torch.device) -> Gate:
    """On a CPU the host has nothing to wait for."""
    return HostGate(device) if device.type == "cpu" or synchronous(optimizers) else DeviceGate(device)


def synchronous(optimizers: Sequence[Optimizer]) -> list[str]:
    """Name those for which the host has to wait: a user's class, or a hook, may do more than torch's class."""
    return [
        type(one).__name__
        for one in optimizers
        if not type(one).__module__.startswith("torch.optim")
        or not getattr(one, "_step_supports_amp_scaling", False)
        or _has_hooks(one)
    ]


def _has_hooks(optimizer: Optimizer) -> bool:
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def _with_gradient(optimizer: Optimizer) -> list[torch.Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None]


class CopyGate:
    """The gate of losses in turn: any optimizers step, any number of times, and all of it is kept or undone."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self.steps = Counter[Optimizer]()  # of the newest update, with losses of their own
        self.loss = self.norm = torch.zeros(())  # the sums so far, of the norms as if they were one vector
        self.rates: Sequence[Mapping[str, Any]] = ()  # the settings of each group, in the step of its highest rate

    def known(self, optimizer: Any) -> Optimizer:
        for one in self._optimizers:
            if one in (optimizer, getattr(optimizer, "optimizer", None)):
                return one
        what = f"the guard does not know this optimizer, {named_type(optimizer)}"
        raise TrainError(f"guard.update: {what}: give Guard a list of all optimizers")

    def begin(self) -> None:
        self.steps.clear()

    @property
    def has_stepped(self) -> bool:
        return bool(self.steps)

    @property
    def is_complete(self) -> bool:
        """Say whether every optimizer has stepped: a loop that is left before has left the turn."""
        return len(self.steps) == len(self._optimizers)

    @property
    def times(self) -> int:
        return max(self.steps.values(), default=1)

    def step(
        self,
        optimizer: Optimizer,
        loss: torch.Tensor,
        norm: torch.Tensor,
        settings: Sequence[Mapping[str, Any]],
        gate: Gate,
    ) -> None:
        """Let one optimizer make its step through the gate, so that the next losses of the turn are finite."""
        measured, limits = torch.stack([loss, norm]), gate.limits
        if self.steps:
            loss, norm = self.loss + loss, torch.hypot(self.norm, norm)
        self.loss, self.norm = loss, norm
        self.steps[optimizer] += 1
        pairs = zip([*self.rates, *settings[len(self.rates) :]], settings, strict=True)
        self.rates = [max(pair, key=lambda one: float(one["lr"] or 0.0)) for pair in pairs]
        gate.limit(NO_LIMIT, limits[1])  # that of the loss is for the sum
        try:
            gate.step(measured, [optimizer])
        finally:
            gate.limit(*limits)
