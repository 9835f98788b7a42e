"""Learning rates by step. Derived for every update, never scaled in place, so that nothing compounds."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from resilient_train.core.updater import Schedule
from resilient_train.ground.errors import TrainError

_SCHEDULED = ("momentum", "betas")  # what torch's schedulers set in a parameter group besides the rate
Curve = Callable[[int], float]  # accepted updates so far -> factor of the configured rate


def constant(step: int) -> float:
    return 1.0


def linear(step: int, *, steps: int, final_factor: float, warmup_steps: int) -> float:
    """Fall in a straight line from the end of the warm-up to `final_factor` at `steps`, and stay there."""
    return 1.0 - (1.0 - final_factor) * _progress(step, warmup_steps, steps)


def cosine(step: int, *, steps: int, final_factor: float, warmup_steps: int) -> float:
    """Fall along half a cosine from the end of the warm-up to `final_factor` at `steps`, and stay there."""
    fallen = 0.5 * (1.0 - math.cos(math.pi * _progress(step, warmup_steps, steps)))
    return 1.0 - (1.0 - final_factor) * fallen


def _progress(step: int, start: int, stop: int) -> float:
    return min(1.0, max(0, step - start) / max(1, stop - start))


def _warmup_factor(step: int, warmup_steps: int) -> float:
    return min(1.0, (step + 1) / max(1, warmup_steps))


class CurveSchedule(Schedule):
    def __init__(self, rates: Sequence[float | None], curve: Curve, warmup_steps: int) -> None:
        """A rate is None where the optimizer finds its own, as Adafactor does."""
        self.rates, self.curve, self.warmup_steps = list(rates), curve, warmup_steps

    def add_group(self, group: dict[str, Any]) -> None:
        self.rates.append(group["lr"])

    def settings(self, step: int) -> Sequence[dict[str, Any]]:
        factor = _warmup_factor(step, self.warmup_steps) * self.curve(max(step, self.warmup_steps))
        return [{"lr": None if rate is None else rate * factor} for rate in self.rates]


class LoopSchedule(Schedule):
    """The rates that the loop has set itself: a rewind leaves them as they are, a resume takes those of the run."""

    is_loops = True

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._first = self._rates()
        self._has_begun = False  # an update of this process

    def settings(self, step: int) -> Sequence[dict[str, Any]]:
        self._has_begun = True
        return [{"lr": rate} for rate in self._rates()]

    def state_dict(self) -> Any:
        return {"first": self._first, "rates": self._rates()}

    def load_state_dict(self, state: Any) -> None:
        """In a process that resumes, and is given the same rates as the one before."""
        if not self._has_begun and state.get("first") == self._first:
            for group, rate in zip(self._optimizer.param_groups, state["rates"], strict=False):
                group["lr"] = rate

    def _rates(self) -> list[Any]:
        return [group["lr"] for group in self._optimizer.param_groups]


class ShadowSchedule(Schedule):
    """A torch scheduler that changes the groups of a shadow instead of the optimizer's own.

    Chained schedulers multiply the rate they find: on real groups they would compound with whatever else sets it.
    """

    def __init__(self, scheduler: LRScheduler, optimizer: Optimizer, warmup_steps: int = 0, stride: int = 1) -> None:
        """`stride` is how often it is stepped for an update: Accelerate's are, once for each process."""
        self.scheduler, self.shadow = scheduler, _Shadow(optimizer)
        for one in _with_chained(scheduler):
            one.optimizer = self.shadow
        self.warmup_steps, self._stride = warmup_steps, stride
        self._advanced = 0  # how often the scheduler was stepped
        self._left_at: list[Any] | None = None  # counts of the scheduler when this had stepped it

    def add_group(self, group: dict[str, Any]) -> None:
        why = "add it before the guard is made, or let the loop step its scheduler itself, with no schedule="
        raise TrainError(f"the loop added a parameter group that its schedule does not know: {why}")

    def advance(self, step: int) -> None:
        if self._left_at not in (None, self._counts()):
            why = "remove scheduler.step(), the guard does it when an update is accepted"
            raise TrainError(f"the loop stepped the scheduler itself: {why}")
        while self._advanced < (step - self.warmup_steps) * self._stride:
            self.scheduler.step()
            self._advanced += 1
        self._left_at = self._counts()

    def settings(self, step: int) -> Sequence[dict[str, Any]]:
        self.advance(step)
        factor = _warmup_factor(step, self.warmup_steps)
        return [
            {key: group[key] for key in _SCHEDULED if key in group} | {"lr": group["lr"] * factor}
            for group in self.shadow.param_groups
        ]

    def state_dict(self) -> Any:
        return {"scheduler": self.scheduler.state_dict(), "groups": self._groups(), "advanced": self._advanced}

    def load_state_dict(self, state: Any) -> None:
        if "scheduler" not in state:  # the run had no scheduler before: it is advanced to the step at hand
            return
        self.scheduler.load_state_dict(state["scheduler"])
        for group, saved in zip(self.shadow.param_groups, state["groups"], strict=True):
            group.update(copy.deepcopy(saved))
        self._advanced = state["advanced"]
        self._left_at = self._counts()

    def _counts(self) -> list[Any]:
        return [getattr(one, "last_epoch", None) for one in _with_chained(self.scheduler)]

    def _groups(self) -> list[dict[str, Any]]:
        return [{key: value for key, value in group.items() if key != "params"} for group in self.shadow.param_groups]


def _with_chained(scheduler: Any) -> Iterator[Any]:
    yield scheduler
    for one in getattr(scheduler, "_schedulers", []):
        yield from _with_chained(one)


class _Shadow(Optimizer):
    def __init__(self, original: Optimizer) -> None:
        super().__init__(list(map(_shadowed, original.param_groups)), copy.deepcopy(original.defaults))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass

    # Without these two marks, schedulers warn of an optimizer that never steps.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    _opt_called = True


def _shadowed(group: dict[str, Any]) -> dict[str, Any]:
    settings = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
    return {**settings, "params": [torch.zeros((), requires_grad=True)]}
