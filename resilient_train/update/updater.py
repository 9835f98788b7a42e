"""One update: unscale, clip, derive the rates from schedule and knobs, pass the gate, step."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.optim import Optimizer

from resilient_train.errors import TrainError
from resilient_train.recover.knobs import KnobValues
from resilient_train.state.sharded import is_sharded
from resilient_train.update.agreement import DIGESTS, Agreement, Flag
from resilient_train.update.clip import ClipConfig, clip
from resilient_train.update.gate import Gate
from resilient_train.update.schedule import RestartDetector, Schedule

_UPPER = 2 if sys.byteorder == "little" else 0  # where the two upper bytes of a float32 begin
LR_OF_GUARD = "lr_of_guard"  # a key of each group, next to its lr: as we left that; rewinds with it

_AS_CONFIGURED = KnobValues()

Settings = Sequence[Sequence[Mapping[str, Any]]]  # by optimizer, by parameter group


@dataclass(frozen=True, slots=True)
class Attempt:
    """An update that was sent to the gate."""

    measured: torch.Tensor  # loss, gradient norm, the loss scale if there is one; with ranks, what they agreed on
    by_rank: torch.Tensor | None  # a row for each rank; None where there is only one
    numbers: list[float] | None  # the same on the host, where the gate had to read it
    settings: Settings
    before: Settings  # what the groups were set to before it
    planned_lr: float  # what the schedule says, before any knob
    is_limited: bool  # the schedule asks for a higher rate than the knobs allow
    pace: float  # the rate it is made with, as a multiple of the configured one: of the group where that is most
    restarts: bool  # the schedule starts again with this update, on purpose
    max_norm: float | None  # that gradients were clipped to
    is_busy: bool  # this process is writing a checkpoint

    def rows_by_rank(self) -> list[list[float]]:
        """What each rank has measured, a row each; the host waits for the device."""
        return [] if self.by_rank is None else self.by_rank.tolist()


class Updater:
    """The one place that changes weights."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        schedules: Sequence[Schedule],
        clipping: ClipConfig,
        gather: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
        *,
        device: torch.device,
        scaler: torch.amp.GradScaler | None = None,
        over_ranks: Callable[[torch.Tensor], torch.Tensor] = lambda vector: vector,
    ) -> None:
        """`gather` collects a vector from every rank, if there are several; `scaler` is that of half precision.

        `over_ranks` adds up a number over the ranks: asked where weights are spread over them.
        """
        self.optimizers, self.schedules = list(optimizers), list(schedules)
        self.clipping, self.scaler = clipping, scaler
        self.agreement = Agreement(gather, device)
        self.mends_eps = False  # raise an epsilon that underflows in the dtype of its weights
        self.usual_norm: float | None = None  # of recent gradients, for a clip that is tightened and was not there
        self.gate = Gate(optimizers, device)
        self._restarts = RestartDetector()
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.weights = [weight for group in groups for weight in group["params"]]
        self._over_ranks = over_ranks if any(map(is_sharded, self.weights)) else None
        # Torch's own zero_grad only sets gradients to None, at fifty times the cost.
        self._own_zero_grad = [one for one in optimizers if type(one).zero_grad is not Optimizer.zero_grad]
        configured = [[group.get("eps") for group in optimizer.param_groups] for optimizer in optimizers]
        # Adafactor's eps is a pair, for which a factor makes no sense.
        self._eps = [[one if isinstance(one, float) else None for one in group] for group in configured]
        self._rates = [float(group.get("initial_lr", group["lr"])) for group in groups]  # as configured
        self.note_rates()

    def apply(
        self, step: int, loss: torch.Tensor, knobs: KnobValues = _AS_CONFIGURED, *, rate: float = 1.0, digest: int = 0
    ) -> Attempt:
        """Send the gradients to the gate as update `step + 1`, and drop them. All optimizers step, or none does.

        `digest` is of what all ranks must have decided alike.
        """
        self.require_groups()
        scale = self._unscale()
        grad_norm, max_norm = clip(self.weights, self.clipping, knobs.clip, self.usual_norm, self._over_ranks)
        settings, before, planned, pace, asked = self._set(step, knobs, rate)
        grad_norm = grad_norm if grad_norm.dtype is torch.float32 else grad_norm.float()
        if not self.agreement.is_alone:
            digest ^= _digest_of_rates(settings)
        measured, by_rank = self.agreement.reduce(torch.stack([loss, grad_norm, *scale]), digest)
        numbers = self.gate.step(measured)
        self.note_rates()
        self._zero_grad()
        if self.scaler is not None:
            self.scaler.update()
        restarts = self._restarts.at(step, planned)
        busy = self.agreement.is_set(Flag.BUSY)
        rates = planned, pace < asked, pace
        return Attempt(measured, by_rank, numbers, settings, before, *rates, restarts, max_norm, busy)

    def ask_to_stop(self) -> None:
        """Let every rank know with the next update that this one is to stop."""
        self.agreement.set_flag(Flag.STOP)

    def loss_scale(self) -> float:
        """The factor of the loss in half precision."""
        return float(self.scaler.get_scale()) if self.scaler is not None and self.scaler.is_enabled() else 1.0

    def require_groups(self) -> None:
        """Raise TrainError if a parameter group was added after the guard was made."""
        for optimizer, configured in zip(self.optimizers, self._eps, strict=True):
            if len(optimizer.param_groups) != len(configured):
                raise TrainError(_ADDED.format(optimizer=type(optimizer).__name__))

    def accept(self, step: int) -> None:
        """Let the schedules know that `step` updates are accepted."""
        for schedule in self.schedules:
            schedule.advance(step)

    def undo(self, attempt: Attempt) -> None:
        """Set rates and epsilon of the groups back to what they were before an attempt that was refused."""
        for optimizer, settings in zip(self.optimizers, attempt.before, strict=True):
            for group, setting in zip(optimizer.param_groups, settings, strict=True):
                group.update(setting)

    def clipped(self, grad_norm: float, max_norm: float | None) -> float | None:
        """The norm that gradients had after clipping; None where clipping by value hides it."""
        if self.clipping.max_value is not None:
            return None
        return grad_norm if max_norm is None else min(grad_norm, max_norm)

    def drop_gradients(self) -> None:
        """Forget gradients that are not to land."""
        self._zero_grad()
        if self.scaler is not None:
            self.scaler._per_optimizer_states.clear()

    def reset_moments(self) -> None:
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def _set(self, step: int, knobs: KnobValues, rate: float) -> tuple[Settings, Settings, float, float, float]:
        """Derive the settings of all groups: nothing is scaled in place, so nothing compounds.

        Returns them, what they were, the scheduled rate, and the pace that the knobs allow and the one asked for.
        """
        settings: list[list[dict[str, Any]]] = []
        before: list[list[dict[str, Any]]] = []
        planned_all = [schedule.settings(step) for schedule in self.schedules]
        rates = [group["lr"] for groups in planned_all for group in groups]
        factor = knobs.lr * rate
        # A rate as a multiple of the configured one; 0 where the host would have to wait for the device to know it.
        paces = [
            lr / usual * factor if usual and isinstance(lr, int | float) else 0.0
            for lr, usual in zip(rates, self._rates, strict=True)
        ]
        limited = [min(one, _limit(one, knobs)) for one in paces]
        places = iter(zip(self._rates, paces, limited, strict=True))
        for optimizer, planned_groups, configured in zip(self.optimizers, planned_all, self._eps, strict=True):
            now, was = [], []
            for group, planned, eps in zip(optimizer.param_groups, planned_groups, configured, strict=True):
                lr = planned["lr"]
                usual, asked, allowed = next(places)
                setting = {**planned, "lr": usual * allowed if allowed < asked else lr * factor}
                if eps is not None:
                    setting["eps"] = max(eps * knobs.eps, _least_eps(group)) if self.mends_eps else eps * knobs.eps
                old = {name: group.get(name) for name in setting}
                old[LR_OF_GUARD] = ours = group.get(LR_OF_GUARD, old["lr"])  # missing where the loop has loaded a state
                if old["lr"] is not ours and old["lr"] != ours:
                    raise TrainError(_SET_BY_LOOP.format(lr=float(group["lr"]), ours=float(group[LR_OF_GUARD])))
                was.append(old)
                group.update(setting)
                now.append(setting)
            settings.append(now)
            before.append(was)
        return settings, before, rates[0], max(limited, default=0.0), max(paces, default=0.0)

    def note_rates(self) -> None:
        """Note the rates as they are left: by us, or by an optimizer that changes them in its step."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group[LR_OF_GUARD] = group["lr"]

    def _zero_grad(self) -> None:
        for optimizer in self._own_zero_grad:
            optimizer.zero_grad()
        for weight in self.weights:
            weight.grad = None

    def _unscale(self) -> list[torch.Tensor]:
        """Divide the gradients by the loss scale, which is returned.

        An overflow needs no flag: a gradient that is not finite makes a norm that passes no gate. The scaler's own
        flags stay as they are, and `update` heeds them; its `step`, which would read them on the host, is not used.
        """
        if self.scaler is None:
            return []
        scale = self.scaler._get_scale_async()
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        return [torch.ones((), device=self.gate.device) if scale is None else scale.clone().reshape(())]


_SET_BY_LOOP = (
    "the loop set lr itself, to {lr:.6g} where it was {ours:.6g}: give it to the guard as schedule=, "
    "a torch scheduler or a function (step) -> factor of the configured rate, and leave the groups' lr alone"
)
_ADDED = (
    "a parameter group was added to {optimizer} after the guard was made, so it has no schedule and would not rewind: "
    "give it all groups before (frozen weights may be in them), or make another guard"
)


def _limit(pace: float, knobs: KnobValues) -> float:
    """How much of a pace is allowed; as the schedule falls from where it leapt to, so does the limit."""
    if pace <= knobs.ceiling:
        return pace
    return knobs.ceiling * (min(1.0, pace / knobs.leapt_to) if knobs.leapt_to else 1.0)


def _least_eps(group: Mapping[str, Any]) -> float:
    """The least epsilon that keeps an update small where a second moment has underflowed to zero."""
    floating = [torch.finfo(weight.dtype) for weight in group["params"] if weight.is_floating_point()]
    return max((math.sqrt(one.smallest_normal * one.eps) for one in floating), default=0.0)


def _digest_of_rates(settings: Settings) -> int:
    """The rates of an update as one number, for ranks to compare.

    To a hundredth: the last digit may differ between machines, and replicas are compared as well.
    """
    rates = [setting["lr"] for groups in settings for setting in groups]
    single = array("f", [rate for rate in rates if isinstance(rate, float)]).tobytes()
    return crc32(single[_UPPER::4] + single[_UPPER + 1 :: 4]) % DIGESTS


class Precision:
    """Takes a model's forward out of Accelerate's autocast and puts it back."""

    def __init__(self, model: nn.Module, mixed: str | None) -> None:
        self._model: Any = model
        self._prepared = model.forward
        self._plain = getattr(model, "_original_forward", None) if mixed in ("fp16", "bf16") else None
        self._is_higher = False

    @property
    def is_mixed(self) -> bool:
        """Say whether the forward is in mixed precision as configured."""
        return self._plain is not None

    def set(self, *, higher: bool) -> None:
        """Run the forward in full precision from now on, or as prepared."""
        if self._plain is not None and higher != self._is_higher:
            self._is_higher = higher
            self._model.forward = self._plain if higher else self._prepared


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
