"""One update: unscale, clip, derive the rates from schedule and knobs, pass the gate, step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from resilient_train.errors import TrainError
from resilient_train.reader import ClipConfig
from resilient_train.recover.knobs import AS_CONFIGURED, KnobValues
from resilient_train.state.tree import is_sharded
from resilient_train.update.clip import clip, clip_further, clip_to_share, norm_limit
from resilient_train.update.gate import Agreement, Gate
from resilient_train.update.schedule import LoopSchedule, Schedule
from resilient_train.update.turns import Turn
from resilient_train.wording import log

LR_OF_GUARD = "lr_of_guard"  # a key of each parameter group: the lr that the guard set; rewinds with the group
_STRONG_DECAY = 0.25
_FIRST_UPDATES = 8  # in which a rate that the loop sets is an error

Settings = Sequence[Mapping[str, Any]]  # by parameter group of all optimizers


@dataclass(frozen=True, slots=True)
class Attempt:
    loss: torch.Tensor  # of this rank
    measured: torch.Tensor  # loss, gradient norm, loss scale if there is one; with ranks, as `Agreement.reduce` says
    by_rank: torch.Tensor | None  # a row for each rank; None if there is only one
    numbers: list[float] | None  # `measured` on the host, if the gate had to read it
    settings: Settings
    before: Settings  # the settings of the groups before it
    is_limited: bool  # the schedule asks for a higher rate than the knobs allow
    lr_ratio: float  # the rate as a multiple of the configured one, in the group where that is highest
    max_norm: float | None  # the norm that gradients were clipped to
    has_share: bool = False  # gradients were clipped further, to a share of the norm of the weights
    is_turn: bool = False  # the optimizers stepped one after the other, and each had its gradients clipped alone
    times: int = 1  # that an optimizer stepped in it
    norms: Sequence[tuple[Sequence[str], torch.Tensor]] = ()  # of single gradients before clipping, and whose they are

    def rows_by_rank(self) -> list[list[float]]:
        """Return what each rank measured. The host waits for the device."""
        return [] if self.by_rank is None else self.by_rank.tolist()


class Updater:
    """The one place that changes weights."""

    newest: Attempt  # of the latest `apply`

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
        names: Mapping[int, str] | None = None,
    ) -> None:
        """`gather` collects a vector from every rank; None: there is only one. `names` are those of weights, by id."""
        self._names = names or {}
        self._norms: list[tuple[list[str], torch.Tensor]] = []  # of the update so far
        self.optimizers, self.schedules = list(optimizers), list(schedules)
        self.clipping, self.scaler = clipping, scaler
        self.agreement = Agreement(gather, device)
        self.usual_norm: float | None = None  # of recent gradients, for a tightened clip where none is configured
        self.trainer_clips = False  # a trainer, before it steps
        self.trainers_norm: torch.Tensor | None = None  # as it measured that before; None if it did not
        self.changes_after_norm = False  # its callbacks may, after it was measured
        self.gate = Gate(optimizers, device, skips_overflow=scaler is not None)
        self.turn = Turn(optimizers)
        self.weights: list[torch.Tensor] = []
        # Torch's own zero_grad only sets gradients to None, at fifty times the cost.
        self._own_zero_grad = [one for one in optimizers if type(one).zero_grad is not Optimizer.zero_grad]
        self._configured: list[list[tuple[float, Any, Any]]] = [[] for _ in optimizers]  # rate, epsilon, decay
        # Groups, by the id of their list, whose optimizer sets the rate itself in its step: updates are scaled instead.
        self._own_rates: set[int] = set()
        self._follows_loop = False  # which sets rates itself
        self._trained = 0  # the most weights that a gradient was asked for in an update
        self._has_new_weights = False  # in a group that was added, or that were frozen, since the newest update
        self._built = [_built_state(optimizer) for optimizer in optimizers]
        self.adopt_groups(are_new=False)
        self._over_ranks = over_ranks if any(map(is_sharded, self.weights)) else None
        self.note_rates()

    def apply(
        self,
        step: int,
        loss: torch.Tensor,
        knobs: KnobValues = AS_CONFIGURED,
        *,
        rates: tuple[float, float] = (1.0, 1.0),
    ) -> Attempt:
        """Send the gradients to the gate as update `step + 1`, and drop them. All optimizers step, or none does.

        In a turn, that is the gradients of the optimizer that is next. `rates` multiply the learning rate: by what an
        experiment asks, which is not recorded, and by what counts as the rate of this update.
        """
        self.adopt_groups()
        trained = sum(weight.requires_grad for weight in self.weights)
        self._has_new_weights |= trained > self._trained > 0
        self._trained = max(self._trained, trained)
        turn, one = self.turn, self.turn.current
        if not turn.has_stepped:
            self._norms = []
        scale = self._unscale(self.optimizers if one is None else [one])
        weights = self.weights if one is None else turn.weights
        groups = self._groups() if one is None else one.param_groups
        max_norm = norm_limit(self.clipping.max_norm, knobs.clip, self.usual_norm, knobs.norm)
        if not self.trainer_clips:
            each = list[torch.Tensor]()
            max_value = None if self.clipping.max_value is None else self.clipping.max_value * knobs.clip
            grad_norm = clip(weights, max_norm, max_value, self._over_ranks, each)
            for of_each in each:
                names = [self._names.get(id(weight), "?") for weight in weights if weight.grad is not None]
                self._norms.append((names, of_each))
        else:
            if (norm := self.trainers_norm) is None:
                norm = clip(weights, over_ranks=self._over_ranks)
            elif one is not None:
                turn.is_clipped = True
            elif self.changes_after_norm:
                after = clip(weights, over_ranks=self._over_ranks)
                norm = torch.where(after.isfinite(), norm, after)
            clip_further(weights, norm, self.clipping.max_norm, max_norm)
            grad_norm = norm
        rate_factor = rates[0] * rates[1]
        settings, before, ratio, asked_ratio = self._set(step, knobs.lr * rate_factor, knobs)
        if knobs.share:
            # At a lower rate, by a remedy or by the schedule, updates are shorter, too; 0: not known on the host.
            share = knobs.share * min(1.0, ratio or knobs.lr)
            clip_to_share(groups, share, self._over_ranks)
        grad_norm = grad_norm if grad_norm.dtype is torch.float32 else grad_norm.float()
        own_norm = None
        if one is not None:
            own_norm = grad_norm
            loss, grad_norm = turn.add(loss, grad_norm)
            turn.save(self._groups(), before)
        measured, by_rank = self.agreement.reduce(torch.stack([loss, grad_norm, *scale]))
        scaled = None
        if self._own_rates:
            moving = [weight for group in groups if self._has_own_rate(group) for weight in group["params"]]
            scaled = moving, knobs.lr * rate_factor
        numbers = self.gate.step(measured, one, own_norm=own_norm, scaled=scaled)
        self.note_rates(settings)
        if one is None:
            self.end()
        if not turn.keeps_gradients:
            self.drop_gradients(in_turn=one is not None)
        self.newest = Attempt(
            loss=loss,
            measured=measured,
            by_rank=by_rank,
            numbers=numbers,
            settings=settings if one is None else turn.fastest(settings),
            before=before if one is None else turn.before,
            is_limited=ratio < asked_ratio,
            lr_ratio=ratio / rates[0],
            max_norm=max_norm,
            has_share=knobs.share > 0,
            is_turn=one is not None,
            norms=self._norms,
            times=turn.times,
        )
        return self.newest

    def end(self) -> None:
        """Let the loss scale follow what the update has shown: once, however many steps it had."""
        if self.scaler is not None:
            self.scaler.update()

    def has_new_weights(self) -> bool:
        """Say whether weights were added or unfrozen since the last call."""
        has_new, self._has_new_weights = self._has_new_weights, False
        return has_new

    def adopt_groups(self, *, are_new: bool = True) -> None:
        """Take in the parameter groups that a loop has added, as it does to unfreeze weights; a rewind keeps them."""
        for optimizer, schedule, known in zip(self.optimizers, self.schedules, self._configured, strict=True):
            for group in optimizer.param_groups[len(known) :]:
                rate = float(group.get("initial_lr", group["lr"]) or 0.0)
                known.append((rate, group.get("eps"), group.get("weight_decay")))
                self.weights += group["params"]  # in place: a replay measures these
                if group["lr"] is None:
                    self._own_rates.add(id(group["params"]))
                if are_new:
                    schedule.add_group(group)
                    self._has_new_weights = True

    def accept(self, step: int) -> None:
        for schedule in self.schedules:
            schedule.advance(step)

    def undo(self, attempt: Attempt) -> None:
        if len(groups := self._groups()) == len(attempt.before):
            for group, setting in zip(groups, attempt.before, strict=True):
                group.update(setting)

    def clipped(self, grad_norm: float, attempt: Attempt) -> float | None:
        """Return the norm of the gradients after clipping; None if unknown: by value, one by one or to a share."""
        is_unknown = self.clipping.max_value is not None or attempt.has_share
        if is_unknown or attempt.times > 1 or self.turn.is_clipped:
            return None
        if attempt.max_norm is None or grad_norm <= attempt.max_norm:
            return grad_norm
        return None if attempt.is_turn else attempt.max_norm

    def drop_gradients(self, *, in_turn: bool = False) -> None:
        """Discard the gradients without a step; in a turn, the loss scaler has yet to hear how they were."""
        for optimizer in self._own_zero_grad:
            optimizer.zero_grad()
        for weight in self.weights:
            weight.grad = None
        if self.scaler is not None and not in_turn:
            self.scaler._per_optimizer_states.clear()

    def reset_moments(self) -> None:
        """Forget the moments; what an optimizer had when it was built, such as Adagrad's sums, is again what it was."""
        for optimizer, built in zip(self.optimizers, self._built, strict=True):
            optimizer.state.clear()
            for weight, state in built.items():
                own = {name: one.clone(memory_format=torch.contiguous_format) for name, one in state.items()}
                optimizer.state[weight] = own

    def decays_fast(self) -> bool:
        """Say whether a weight decay may take the weights away before they learn: with usual ones they learn faster."""
        return any(float(group.get("weight_decay") or 0.0) >= _STRONG_DECAY for group in self._groups())

    def rates(self) -> list[int]:
        """Return the rates to a hundredth, in logarithms: so no round rate is at a border. Last digits may differ."""
        rates = [group["lr"] for group in self._groups()]
        return [round(200 * math.log(rate)) for rate in rates if isinstance(rate, float) and 0 < rate < math.inf]

    def note_rates(self, given: Settings = ()) -> None:
        """Note the rates of the groups: an optimizer may have changed those that were `given` in its step."""
        for number, group in enumerate(self._groups()):
            if given and group["lr"] is not given[number]["lr"]:
                self._own_rates.add(id(group["params"]))
            group[LR_OF_GUARD] = group["lr"]

    def _set(self, step: int, factor: float, knobs: KnobValues) -> tuple[Settings, Settings, float, float]:
        """Return the settings as set, those before, and the highest ratio to a configured rate, as set and as asked."""
        self._take_over_rates(step)
        settings, before, paces = [], [], [(0.0, 0.0)]
        planned = [setting for schedule in self.schedules for setting in schedule.settings(step)]
        for group, setting, (usual, eps, decay) in zip(self._groups(), planned, chain(*self._configured), strict=True):
            lr = setting["lr"] or 0.0
            times = 1.0 if self._has_own_rate(group) else factor  # else its updates would be scaled twice
            # A rate as a multiple of the configured one; 0 for a tensor, which the host would have to wait for.
            asked = allowed = lr / usual * times if usual and isinstance(lr, int | float) else 0.0
            if asked > knobs.ceiling:  # which falls with the schedule, from the leap on
                allowed = knobs.ceiling * (min(1.0, asked / knobs.leapt_to) if knobs.leapt_to else 1.0)
            if setting["lr"] is not None:
                setting = {**setting, "lr": usual * allowed if allowed < asked else lr * times}
            if isinstance(eps, int | float):  # Adafactor's is a pair, for which a factor makes no sense
                # The least keeps an update small where a second moment has underflowed to zero.
                weights = group["params"] if knobs.mends_eps else ()
                kinds = [torch.finfo(one.dtype) for one in weights if one.is_floating_point()]
                setting["eps"] = max([eps * knobs.eps, *(math.sqrt(one.smallest_normal * one.eps) for one in kinds)])
            if knobs.decay < 1 and isinstance(decay, int | float):
                setting["weight_decay"] = decay * knobs.decay
            old: dict[str, Any] = {name: group.get(name) for name in setting}
            old[LR_OF_GUARD] = group.get(LR_OF_GUARD, old["lr"])  # missing if the loop has loaded a state
            group.update(setting)
            settings.append(setting)
            before.append(old)
            paces.append((allowed, asked))
        ratio, asked_ratio = map(max, zip(*paces, strict=True))
        return settings, before, ratio, asked_ratio

    def _take_over_rates(self, step: int) -> None:
        """Follow a loop that gave no schedule and sets a rate itself, later in the run: it may be at night.

        In the first updates it is refused, while somebody is there to read why. Remedies lower what it sets as they
        lower any rate. A tensor that is filled in place is not noticed.
        """
        for schedule, optimizer in zip(self.schedules, self.optimizers, strict=True):
            for number, group in enumerate(optimizer.param_groups):
                lr = group["lr"]
                ours = group.get(LR_OF_GUARD, lr)
                if lr is ours or lr == ours:
                    continue
                found = f"the loop set lr itself, to {float(lr):.6g} where it was {float(ours):.6g}"
                how = "as schedule=, a torch scheduler or a function (step) -> factor of the configured rate"
                if step < _FIRST_UPDATES or not isinstance(schedule, LoopSchedule):
                    raise TrainError(f"{found}: give it to the guard {how}, and leave the groups' lr alone")
                schedule.take_over(step, number, lr.clone() if isinstance(lr, torch.Tensor) else float(lr))
                group[LR_OF_GUARD] = lr
                if not self._follows_loop:
                    log.warning(
                        "step %d: %s, which is followed; a loop that starts again after a resume counts from 0, so "
                        "give it to the guard %s",
                        step,
                        found,
                        how,
                    )
                self._follows_loop = True

    def _has_own_rate(self, group: Mapping[str, Any]) -> bool:
        return id(group["params"]) in self._own_rates

    def _groups(self) -> list[dict[str, Any]]:
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
            seen: dict[torch.device, torch.Tensor] = {}
            if state["stage"] is OptState.UNSCALED and self.turn.is_again:  # by its step before
                state["stage"], seen = OptState.READY, state["found_inf_per_device"]
            if state["stage"] is not OptState.UNSCALED:
                self.scaler.unscale_(optimizer)
            for device, flag in seen.items():
                state["found_inf_per_device"][device] += flag
        return [torch.ones((), device=self.gate.device) if scale is None else scale.clone().reshape(())]


def _built_state(optimizer: Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
    """Return the state of an optimizer that has made none of its steps, as copies that take no memory."""
    built: dict[torch.Tensor, dict[str, Any]] = {}
    for weight, state in optimizer.state.items():
        for name, one in state.items():
            if not isinstance(one, torch.Tensor) or not one.numel() or bool((one != one.flatten()[0]).any()):
                return {}  # it has made some
            built.setdefault(weight, {})[name] = one.flatten()[:1].clone().expand(one.shape or (1,)).reshape(one.shape)
    return built


class Precision:
    def __init__(self, model: nn.Module, mixed: str | None) -> None:
        self._model: Any = model
        self._prepared = model.forward
        self._plain = getattr(model, "_original_forward", None) if mixed in ("fp16", "bf16") else None
        self.is_mixed = self._plain is not None
        self._is_higher = False

    def set(self, *, higher: bool) -> None:
        if self.is_mixed and higher != self._is_higher:
            self._is_higher = higher
            self._model.forward = self._plain if higher else self._prepared


def parameter_groups(model: nn.Module, *, no_decay: Sequence[str]) -> list[dict[str, Any]]:
    """`no_decay` has patterns of names; `1d` stands for biases and norms, which have fewer than two dimensions."""
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "weight_decay": 0.0}]
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            is_exempt = any((rule == "1d" and weight.ndim < 2) or fnmatch(name, rule) for rule in no_decay)
            groups[1 if is_exempt else 0]["params"].append(weight)
    return [group for group in groups if group["params"]]
