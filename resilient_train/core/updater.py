"""One update: unscale, clip, derive the rates from schedule and knobs, pass the gate, step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from resilient_train.core.clip import Clipper, norm_limit
from resilient_train.core.gate import Agreement, CopyGate, OpenGate, gate_of
from resilient_train.core.knobs import Knobs
from resilient_train.core.state import LR_OF_GUARD, weights_of
from resilient_train.ground.errors import TrainError

_NOT_OURS = (
    "the loop set lr itself, to {lr:.6g} where it was {ours:.6g}, and the schedule of the guard would overwrite it: "
    "leave the groups' lr alone, or give no schedule"
)

Settings = Sequence[Mapping[str, Any]]  # by parameter group of all optimizers


class Schedule:
    """Sets the groups of an optimizer for the update after `step` accepted ones."""

    is_loops = False  # the rates are those of the loop or a trainer, which finds them again after the step

    def settings(self, step: int) -> Sequence[dict[str, Any]]:
        raise NotImplementedError

    def add_group(self, group: dict[str, Any]) -> None:
        """Note that the loop has added a parameter group to the optimizer."""

    def advance(self, step: int) -> None:
        """Note that `step` updates were accepted. Refused ones must not change the schedule."""

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Restore a state."""


class Lasting:
    """What further remedies, while they are in effect, make of every update."""

    def advance(self) -> None:
        """Count a healthy update."""

    def shape(self, group: Mapping[str, Any], setting: dict[str, Any], usual: Mapping[str, Any]) -> None:
        """Change what is set in a parameter group, whose `usual` settings are those it was configured with."""

    def limits(self, optimizers: Sequence[Optimizer], rate: float) -> bool:
        """Change gradients after they were clipped, at this multiple of the configured rate; say whether it did."""
        return False


@dataclass(frozen=True, slots=True)
class Attempt:
    """An update that went through the gate, and what was measured of it."""

    loss: torch.Tensor  # of this rank
    measured: torch.Tensor  # loss, gradient norm, loss scale if there is one; with ranks, as `Agreement.reduce` says
    by_rank: torch.Tensor | None  # a row for each rank; None if there is only one
    numbers: list[float] | None  # `measured` on the host, if the gate had to read it
    settings: Settings
    is_limited: bool  # the schedule asks for a higher rate than the knobs allow
    lr_ratio: float  # the rate as a multiple of the configured one, in the group where that is highest
    clips_to: float | None  # the norm that gradients were clipped to; NaN if it is not known
    is_turn: bool = False  # the optimizers stepped one after the other, and each had its gradients clipped alone
    times: int = 1  # that an optimizer stepped in it

    def clipped(self, grad_norm: float) -> float | None:
        """Return the norm of the gradients after clipping; None if it is not known."""
        limit = math.inf if self.clips_to is None else self.clips_to
        if grad_norm <= limit:
            return grad_norm
        return None if self.is_turn or math.isnan(limit) else limit


class Updater:
    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        schedules: Sequence[Schedule],
        clipper: Clipper,
        gather: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
        *,
        device: torch.device,
        knobs: Knobs | None = None,
        scaler: torch.amp.GradScaler | None = None,
        observes: bool = False,
        stepping: AbstractContextManager[object] | None = None,
    ) -> None:
        """`gather` collects a vector of each rank, if several; `observes`: all land; `stepping` surrounds the steps."""
        self._stepping = stepping or nullcontext()
        self.optimizers, self.schedules = list(optimizers), list(schedules)
        self.clipper, self.scaler, self.device = clipper, scaler, device
        self.knobs = knobs or Knobs()
        self.lasting: list[Lasting] = []  # of extensions
        self.agreement = Agreement(gather, device)
        self.usual_norm: float | None = None  # of recent gradients, for a tightened clip where none is configured
        is_scaled = scaler is not None
        self.gate = OpenGate(device, has_scale=is_scaled) if observes else gate_of(optimizers, device)
        self.turn = CopyGate(self.optimizers)
        self.weights: list[torch.Tensor] = []
        self._configured: list[list[dict[str, Any]]] = [[] for _ in optimizers]  # the settings of their groups
        self._planned: Settings = ()  # by the schedules, for the newest update
        self._of_last_step: tuple[list[torch.Tensor], dict[str, Any]]  # of a turn: the loss scale, and what is known
        self._trained = 0  # the most weights that a gradient was asked for in an update
        self.has_new_weights = False  # in a group that was added, or that were frozen, since an update was sent
        self.adopt_groups()

    def apply(self, step: int, loss: torch.Tensor, *, rates: tuple[float, float] = (1.0, 1.0)) -> Attempt:
        """Send the gradients to the gate as update `step + 1`, and drop them. All optimizers step, or none does.

        `rates` multiply the learning rate: what an experiment asks, not recorded, and what counts as this update's.
        """
        norm, scale, known = self._made_ready(step, self.optimizers, rates)
        try:
            measured, by_rank = self.agreement.reduce(torch.stack([loss, norm, *scale]))
            with self._stepping:
                numbers = self.gate.step(measured, self.optimizers)
        finally:
            self._put_back_rates(known["settings"])
        if self.scaler is not None:
            self.scaler.update()
        self.drop_gradients()
        return Attempt(loss=loss, measured=measured, by_rank=by_rank, numbers=numbers, **known)

    def step_in_turn(
        self, optimizer: Optimizer, step: int, loss: torch.Tensor, *, rates: tuple[float, float] = (1.0, 1.0)
    ) -> None:
        """Let one optimizer step as a part of update `step + 1`. The gradients stay."""
        norm, scale, known = self._made_ready(step, [optimizer], rates)
        self._of_last_step = scale, known
        try:
            with self._stepping:
                self.turn.step(optimizer, loss, norm, known["settings"], self.gate)
        finally:
            self._put_back_rates(known["settings"])

    def end_turn(self) -> Attempt:
        """Measure the turn as one update: the sums over its steps, the highest rates, what its last step had."""
        turn, (scale, known) = self.turn, self._of_last_step
        measured, by_rank = self.agreement.reduce(torch.stack([turn.loss, turn.norm, *scale]))
        if self.scaler is not None:  # once, however many steps it had
            self.scaler.update()
        known |= {"settings": turn.rates, "is_turn": True, "times": turn.times}
        if turn.times > 1:
            known["clips_to"] = math.nan
        return Attempt(loss=turn.loss, measured=measured, by_rank=by_rank, numbers=None, **known)

    def _made_ready(
        self, step: int, optimizers: Sequence[Optimizer], rates: tuple[float, float]
    ) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, Any]]:
        """Unscale and clip the gradients of some optimizers, and set what schedule and knobs ask for.

        Returns the norm before clipping, the loss scale if there is one, and what an Attempt knows then.
        """
        trained = sum(weight.requires_grad for weight in self.weights)
        self.has_new_weights |= trained > self._trained > 0
        self._trained = max(self._trained, trained)
        is_all = len(optimizers) == len(self.optimizers)
        weights = self.weights if is_all else weights_of(optimizers[0])
        scale = self._unscale(optimizers)
        knobs = self.knobs
        max_norm = norm_limit(self.clipper.config.max_norm, knobs.clip, self.usual_norm)
        norm = self.clipper.clip(weights, max_norm, knobs.clip)
        factor = rates[0] * rates[1]
        settings, ratio, asked_ratio = self._set(step, knobs.rate * factor)
        has_limited = [one.limits(optimizers, ratio or knobs.rate) for one in self.lasting]  # 0: of a tensor
        is_known = self.clipper.is_by_norm and not any(has_limited)
        known = {
            "settings": settings,
            "lr_ratio": ratio / rates[0],
            "is_limited": ratio < asked_ratio,
            "clips_to": max_norm if is_known else math.nan,
        }
        return norm if norm.dtype is torch.float32 else norm.float(), scale, known

    def adopt_groups(self) -> bool:
        """Take in what a loop has added, as it does to unfreeze weights; a rewind keeps it. False: it has not."""
        for optimizer, schedule, known in zip(self.optimizers, self.schedules, self._configured, strict=True):
            for group in optimizer.param_groups[len(known) :]:
                rate = float(group.get("initial_lr", group["lr"]) or 0.0)
                known.append({key: value for key, value in group.items() if key != "params"} | {"lr": rate})
                if not schedule.is_loops:
                    group[LR_OF_GUARD] = group["lr"]
                if self.weights:  # else it is the optimizer's own, from before the first update
                    schedule.add_group(group)
                    self.has_new_weights = True
        weights = [one for each in self.optimizers for one in weights_of(each)]
        if len(weights) == len(self.weights) and all(map(is_, weights, self.weights)):
            return False
        self.weights[:] = weights  # in place: replays have it
        return True

    def accept(self, step: int) -> None:
        for schedule in self.schedules:
            schedule.advance(step)

    def drop_gradients(self, *, in_turn: bool = False) -> None:
        """Discard the gradients without a step; in a turn, the loss scaler has yet to hear how they were."""
        for weight in self.weights:  # at a fiftieth of what `zero_grad` costs
            weight.grad = None
        if self.scaler is not None and not in_turn:
            self.scaler._per_optimizer_states.clear()

    def _put_back_rates(self, given: Settings) -> None:
        """Let a loop find the rates that it has set; note those of a schedule, as an optimizer may have left them."""
        pairs = zip(given, self._planned, strict=True)
        for schedule, optimizer in zip(self.schedules, self.optimizers, strict=True):
            for group in optimizer.param_groups:
                setting, planned = next(pairs)
                if not schedule.is_loops:
                    group[LR_OF_GUARD] = group["lr"]
                elif setting["lr"] is not planned["lr"]:  # else an optimizer may have changed it in its step
                    group["lr"] = planned["lr"]

    def _set(self, step: int, factor: float) -> tuple[Settings, float, float]:
        """Return the settings as set, and the highest ratio to a configured rate, as set and as asked."""
        self._require_own_rates()
        settings: list[Mapping[str, Any]] = []
        ratio = asked_ratio = 0.0
        ceiling, leapt_to = self.knobs.ceiling or math.inf, self.knobs.leapt_to
        planned = self._planned = [setting for schedule in self.schedules for setting in schedule.settings(step)]
        for group, setting, usual in zip(self.groups(), planned, chain(*self._configured), strict=True):
            lr = setting["lr"]
            # A rate as a multiple of the configured one; 0 for a tensor, which the host would have to wait for.
            rate = usual["lr"]
            asked = allowed = lr / rate * factor if rate and isinstance(lr, int | float) else 0.0
            if asked > ceiling:  # which falls with the schedule, from the leap on
                allowed = ceiling * (min(1.0, asked / leapt_to) if leapt_to else 1.0)
            setting = dict(setting)
            if setting["lr"] is not None and (factor != 1.0 or allowed < asked):
                setting["lr"] = rate * allowed if allowed < asked else lr * factor
            for one in self.lasting:
                one.shape(group, setting, usual)
            group.update(setting)
            settings.append(setting)
            ratio, asked_ratio = max(ratio, allowed), max(asked_ratio, asked)
        return settings, ratio, asked_ratio

    def _require_own_rates(self) -> None:
        """Refuse to overwrite a rate that the loop has set in spite of a schedule."""
        for schedule, optimizer in zip(self.schedules, self.optimizers, strict=True):
            for group in optimizer.param_groups if not schedule.is_loops else ():
                lr = group["lr"]
                ours = group.get(LR_OF_GUARD, lr)  # missing if the loop has loaded a state
                if lr is not ours and lr != ours:
                    raise TrainError(_NOT_OURS.format(lr=float(lr), ours=float(ours)))

    def groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of all optimizers. Not kept: `load_state_dict` puts others in their places."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def _unscale(self, optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
        """Divide the gradients by the loss scale, in place, and return it.

        An overflow needs no flag here: the gate refuses a norm that is not finite. `scaler.update` needs the scaler's
        own flags. The scaler's `step` is not used: it would read them on the host.
        """
        if self.scaler is None:
            return []
        scale = self.scaler._get_scale_async()
        for optimizer in optimizers:
            state = self.scaler._per_optimizer_states[id(optimizer)]
            if self.turn.steps[optimizer]:
                raise TrainError("with a GradScaler an optimizer steps once in an update: use bf16, or more updates")
            if state["stage"] is not OptState.UNSCALED:
                self.scaler.unscale_(optimizer)
        return [torch.ones((), device=self.device) if scale is None else scale.clone().reshape(())]
