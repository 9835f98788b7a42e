"""Learning rates by step. Derived for every update, never scaled in place, so that nothing compounds."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Curve = Callable[[int], float]  # accepted updates so far -> factor of the configured rate


def constant(step: int) -> float:
    """Keep the configured rate."""
    return 1.0


def linear(step: int, *, steps: int, final_factor: float, warmup_steps: int) -> float:
    """Fall in a straight line from the end of the warm-up to `final_factor` at `steps`, and stay there."""
    return 1.0 - (1.0 - final_factor) * _progress(step, warmup_steps, steps)


def cosine(step: int, *, steps: int, final_factor: float, warmup_steps: int) -> float:
    """Fall along half a cosine from the end of the warm-up to `final_factor` at `steps`, and stay there."""
    fallen = 0.5 * (1.0 - math.cos(math.pi * _progress(step, warmup_steps, steps)))
    return 1.0 - (1.0 - final_factor) * fallen


def _progress(step: int, start: int, stop: int) -> float:
    return min(1.0, (step - start) / max(1, stop - start)) if step > start else 0.0


def warmup_factor(step: int, warmup_steps: int) -> float:
    """Climb to 1 in a straight line over the first `warmup_steps` updates."""
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0


class Schedule(Protocol):
    """Sets the groups of an optimizer for the update after `step` accepted ones."""

    def settings(self, step: int) -> Sequence[dict[str, Any]]:
        """Return what each parameter group is set to."""

    def advance(self, step: int) -> None:
        """Note that `step` updates are accepted: a refused one must leave no trace."""

    def state_dict(self) -> Any:
        """Return what `settings` depends on besides the step."""

    def load_state_dict(self, state: Any) -> Any:
        """Restore a state."""


class CurveSchedule:
    """A pure function of the step: it has no state, so only the step has to rewind."""

    def __init__(self, rates: Sequence[float], curve: Curve, warmup_steps: int) -> None:
        self.rates, self.curve, self.warmup_steps = list(rates), curve, warmup_steps

    def settings(self, step: int) -> Sequence[dict[str, Any]]:
        factor = warmup_factor(step, self.warmup_steps) * self.curve(max(step, self.warmup_steps))
        return [{"lr": rate * factor} for rate in self.rates]

    def advance(self, step: int) -> None:
        pass

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


class RestartDetector:
    """Notices when a schedule starts again.

    A rate is compared with the one of the step before, whenever that was: after a rewind the rate is higher than it
    was lately, and nothing has started again. The schedule is not asked, as that moves one that has a state.
    """

    def __init__(self) -> None:
        self._rates: deque[tuple[float, float]] = deque(maxlen=10_000)  # and the highest so far, by step
        self._step = -1  # of the newest

    def at(self, step: int, rate: float) -> bool:
        """Say whether the rate has leapt, to a good part of the highest one so far; a warm-up climbs in small steps."""
        while self._rates and self._step >= step:
            self._rates.pop()
            self._step -= 1
        last, peak = self._rates[-1] if self._rates else (0.0, 0.0)
        self._rates.append((rate, max(rate, peak)))
        self._step = step
        return 0 < 2 * last < rate and 0.2 * peak < rate < 1.05 * peak  # beyond the peak it went wild


class ShadowSchedule:
    """A torch scheduler that moves the groups of a shadow instead of the optimizer's own.

    Chained schedulers multiply the rate they find. On the real groups they would compound with whatever else
    sets the rate there; on a shadow they see nothing but themselves.
    """

    def __init__(self, optimizer: Optimizer, build: Callable[[Optimizer], LRScheduler], warmup_steps: int) -> None:
        self.shadow = _Shadow(optimizer)
        self._untouched = copy.deepcopy(self._groups())
        self.scheduler = build(self.shadow)
        self.warmup_steps = warmup_steps
        self._advanced = 0  # how often the scheduler was stepped

    @classmethod
    def of(cls, scheduler: LRScheduler, optimizer: Optimizer) -> ShadowSchedule:
        """Move a scheduler that was made for `optimizer` over to a shadow of it."""

        def moved(shadow: Optimizer) -> LRScheduler:
            for one in _family(scheduler):
                one.optimizer = shadow
            return scheduler

        return cls(optimizer, moved, warmup_steps=0)

    def advance(self, step: int) -> None:
        while self._advanced < step - self.warmup_steps:
            self.scheduler.step()
            self._advanced += 1

    def settings(self, step: int) -> Sequence[dict[str, Any]]:
        self.advance(step)
        factor = warmup_factor(step, self.warmup_steps)
        moved = [
            {key: value for key, value in group.items() if key == "lr" or value != untouched.get(key, value)}
            for group, untouched in zip(self._groups(), self._untouched, strict=True)
        ]
        return [{**group, "lr": group["lr"] * factor} for group in moved]

    def state_dict(self) -> Any:
        return {"scheduler": self.scheduler.state_dict(), "groups": self._groups(), "advanced": self._advanced}

    def load_state_dict(self, state: Any) -> None:
        self.scheduler.load_state_dict(state["scheduler"])
        for group, saved in zip(self.shadow.param_groups, state["groups"], strict=True):
            group.update(copy.deepcopy(saved))
        self._advanced = state["advanced"]

    def _groups(self) -> list[dict[str, Any]]:
        return [{key: value for key, value in group.items() if key != "params"} for group in self.shadow.param_groups]


def _family(scheduler: Any) -> Iterator[Any]:
    """A scheduler and those it is chained from."""
    yield scheduler
    for one in getattr(scheduler, "_schedulers", []):
        yield from _family(one)


class _Shadow(Optimizer):
    """An optimizer with the settings of another one and nothing to optimize."""

    def __init__(self, original: Optimizer) -> None:
        groups = []
        for group in original.param_groups:
            settings = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            groups.append({**settings, "params": [torch.zeros((), requires_grad=True)]})
        super().__init__(groups, copy.deepcopy(original.defaults))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass

    # Schedulers look for these two marks, and warn of an optimizer that never steps.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    _opt_called = True
