"""The `fit` of a guarded Lightning trainer whose module runs backward and steps its optimizers itself.

An update is what a call of `training_step` steps: any optimizers, any number of times. If it steps none, the gradients
are for the next call, whose update it belongs to. An update that is refused undoes all of its steps, and the call is
repeated, with the counts of steps and the schedulers that it began with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from resilient_train.core.state import weights_of
from resilient_train.data.fed import Fed
from resilient_train.trainers.lightning_fit import Fit, Place


@dataclass
class _Replayed:  # a `training_step` in which nothing steps
    loss: torch.Tensor
    gradients: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)  # at the steps that it would have made
    has_stepped: bool = False


class ManualFit(Fit):
    def __init__(self, trainer: Any, module: Any) -> None:
        self._run_plain = trainer.fit_loop.epoch_loop.manual_optimization.run
        self._sum: torch.Tensor | None = None  # of the losses of the update since its last step
        self._losses: list[torch.Tensor] = []  # of all backwards of a call
        self._norms: dict[int, torch.Tensor] = {}  # of clipped gradients, by the id of their optimizer
        self._replayed: _Replayed | None = None
        self._is_early = False  # a call is repeated that is not the last one of its update
        self._has_stepped = False  # an optimizer, in the newest call
        super().__init__(trainer, module)

    def begin(self, options: dict[str, Any], made: int | None) -> None:
        super().begin(options, made)
        self._clipper.has_own_limits = True

    def _run(self, plain: Any, *given: Any) -> Any:
        self._sum = self._sum if self._is_open else None
        kwargs, self._has_stepped = self._fed(self._loop.batch_idx, *given), False
        loss, output = self._called(plain, kwargs)
        self.note(loss)
        if self._has_stepped:
            self._end_update()
        elif not self._has_gradients:
            self.leave_out()
        return output if self._output is None else self._output

    def _called(self, plain: Any, kwargs: Any) -> tuple[torch.Tensor, Any]:
        self._losses = []
        output = plain(kwargs)
        return sum(self._losses, self._zero()), output

    def _backward(self, plain: Any, loss: torch.Tensor, *given: Any, **more: Any) -> Any:
        if self._replayed is not None:
            self._replayed.loss = self._replayed.loss + loss.detach()
            with self.guard._anomaly_mode.without_nan_check():
                return self._module.backward(loss, *given[1:], **more)
        result = plain(loss, *given, **more)
        self._has_gradients = True
        self._losses.append(loss.detach())
        self._sum = loss.detach() if self._sum is None else self._sum + loss.detach()
        return result

    def _step(self, plain: Any, optimizer: Any, model: Any, closure: Callable[[], Any], **more: Any) -> Any:
        if (replayed := self._replayed) is not None:
            result, replayed.has_stepped = closure(), True
            for weight in weights_of(optimizer):
                if weight.grad is not None:
                    replayed.gradients[weight] = replayed.gradients.get(weight, 0) + weight.grad
            return result
        result = self._plugin._wrap_closure(model, optimizer, closure)
        if self._is_early:
            return result
        loss, self._sum, self._has_stepped = self._sum, None, True
        self.norm = self._norms.pop(id(optimizer), None)
        if not self.is_left_out and any(weight.grad is not None for weight in weights_of(optimizer)):
            settings = self._scheduled()
            self._set(settings)
            self.guard.step_in_turn(self._zero() if loss is None else loss, optimizer)  # it ran backward itself
            self._put_back(settings)
        return result

    def _landed(self, fed: Fed, loss: torch.Tensor) -> bool:
        if self._updater.turn.has_stepped:
            return self.guard.settle()
        self.guard._put_back_batch()  # no optimizer had a gradient
        self.samples.skip(fed.start, fed.stop)
        return True

    def _clip(self, plain: Any, optimizer: Any, clip_val: float) -> None:
        super()._clip(plain, optimizer, clip_val)
        if self._replayed is None and self.norm is not None:
            self._norms[id(getattr(optimizer, "_optimizer", optimizer))] = self.norm

    def _run_again(self, kwargs: Any, fed: Fed, number: int, *, is_last: bool) -> tuple[torch.Tensor, dict[str, Any]]:
        self._sum = None if number == 0 else self._sum
        self._is_early = not is_last  # in the first run it made no step
        try:
            return self._called(self._run_plain, kwargs)
        finally:
            self._is_early = False

    def _measure_norm(self) -> torch.Tensor | None:
        return None

    def _loss_of_step(self, model: Any, kwargs: Any) -> Any:
        parameters = [*self._module.parameters()]
        flags = [one.requires_grad for one in parameters]
        self._replayed = replayed = _Replayed(self._zero())
        try:
            model.training_step(*kwargs.values())
        finally:
            self._replayed = None
            for one, flag in zip(parameters, flags, strict=True):  # an error may leave an optimizer toggled
                one.requires_grad = flag
        for one in parameters if replayed.has_stepped else ():
            one.grad = replayed.gradients.get(one)
        return replayed.loss.requires_grad_()  # its backward was made

    def _place(self) -> Place:
        schedulers = [copy.deepcopy(one.scheduler.state_dict()) for one in self._trainer.lr_scheduler_configs]
        return super()._place()._replace(schedulers=schedulers, settings=self._scheduled())

    def _return_to(self, place: Place) -> None:
        super()._return_to(place)
        for one, state in zip(self._trainer.lr_scheduler_configs, place.schedulers, strict=True):
            one.scheduler.load_state_dict(copy.deepcopy(state))
        self._put_back(place.settings)
