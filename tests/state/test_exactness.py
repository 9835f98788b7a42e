"""Capture, go on, restore, go on again: the same run to the last bit."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from resilient_train.command.build import assemble, train
from resilient_train.command.config.compose import load
from resilient_train.core.state import RunState
from resilient_train.data.trees import sha256, state_sha256
from resilient_train.durable.incident_log import IncidentLog
from resilient_train.loop.reporter import Place
from resilient_train.processes.world import World

STEPS, CAPTURED_AT = 28, 17


class NoisyAverage:
    """An average of the weights kept by the user, who adds noise of all three kinds to it after each update."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.average = [weight.detach().clone() for weight in model.parameters()]

    def update(self) -> None:
        noise = random.random() + float(np.random.random()) + torch.rand(())
        for mean, weight in zip(self.average, self.model.parameters(), strict=True):
            mean.lerp_(weight.detach(), 0.1).add_(1e-3 * noise)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = state["average"]


class Program:
    """Dropout, BatchNorm, random rows, accumulation, a chained scheduler, and something the user keeps."""

    def __init__(self, *overrides: str) -> None:
        words = ["model=custom", "model._target_=user_programs.Jittery", "data=custom", "data.batch_size=4"]
        words += ["data.train._target_=user_programs.Augmented", "objective=custom", "tracking=none"]
        words += ["objective._target_=user_programs.mse_and_more", "accelerate.gradient_accumulation_steps=2"]
        words += ["accelerate.cpu=true", "schedule=custom", "schedule.warmup_steps=5", "+schedule.T_0=11"]
        words += ["schedule._target_=torch.optim.lr_scheduler.CosineAnnealingWarmRestarts"]
        words += ["checks=off"]  # a state that is put back behind the guard's back looks like damage
        config = load([*words, *overrides]).config
        self.run = assemble(config, World.joined(config.accelerate), Place(IncidentLog(None)))
        self.average = NoisyAverage(self.run.bare_model)
        self.run.guard.state.keep("average", self.average)
        self.batches: list[str] = []
        measure = self.run.objective.objective

        def recorded(model: nn.Module, batch: Any) -> Any:
            self.batches.append(sha256(batch))
            return measure(model, batch)

        self.run.objective.objective = recorded
        step = self.run.guard.step

        def stepped(batch: Any) -> Any:
            if result := step(batch):
                self.after_update()
            return result

        self.run.guard.step = stepped  # type: ignore[method-assign]

    def after_update(self) -> None:
        """What the user's own code does after an update."""
        self.average.update()
        for optimizer in self.run.guard.state.optimizers:
            for group in optimizer.param_groups:
                group["weight_decay"] *= 1.01  # a schedule of the user's own, which lives in the groups alone

    def train_to(self, step: int) -> tuple[str, list[str]]:
        """Train, and return what a run is and what it was fed since the last call.

        Between a capture and the next update the user's own code draws, as code behind `guard.step()` does.
        """
        self.run.config.run.steps = self.run.guard.steps = step
        self.batches.clear()
        self.average.update()
        train(self.run)
        return state_sha256(self.state), list(self.batches)

    @property
    def state(self) -> RunState:
        return self.run.guard.state

    def captured(self) -> dict[str, Any]:
        return deepcopy(self.state.live())

    def addresses(self) -> list[int]:
        tensors: list[Tensor] = [*self.run.bare_model.parameters(), *self.run.bare_model.buffers()]
        for values in self.state.optimizers[0].state.values():
            tensors += [value for value in values.values() if isinstance(value, torch.Tensor)]
        return [tensor.data_ptr() for tensor in tensors]


@functools.cache
def uninterrupted(*overrides: str) -> tuple[str, list[str]]:
    """The whole run in one piece, with the user's code drawing where it does in the other."""
    program = Program(*overrides)
    _, first = program.train_to(CAPTURED_AT)
    state, second = program.train_to(STEPS)
    return state, first + second


CUSTOM = ("optimizer=custom", "+optimizer.lr=0.01")
OPTIMIZERS: dict[str, Sequence[str]] = {
    "adamw": (),
    "one of the user's own": (*CUSTOM, "optimizer._target_=user_programs.CountsItself"),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_restored_run_repeats_itself_to_the_last_bit(optimizer: str) -> None:
    """Captured, trained on, restored, trained on again: every batch and the final state are the same.

    A rewind writes into the same memory, as compiled graphs and flattened parameters hold addresses. Going back to step
    0 leaves an optimizer without state, as it began. And in another process, with workers, a snapshot continues a run
    that has made no step: moments are created as they were.
    """
    whole, program = uninterrupted(*OPTIMIZERS[optimizer]), Program(*OPTIMIZERS[optimizer])
    start = program.captured()
    until_then = program.train_to(CAPTURED_AT)
    snapshot, at_capture = program.captured(), state_sha256(program.state)
    first, addresses = program.train_to(STEPS), program.addresses()
    assert first == (whole[0], whole[1][2 * CAPTURED_AT :])
    program.state.restore(snapshot)
    assert (state_sha256(program.state), program.addresses()) == (at_capture, addresses)
    assert program.train_to(STEPS) == first

    program.state.restore(start)
    assert not program.state.optimizers[0].state
    assert program.train_to(CAPTURED_AT) == until_then

    other = Program(*OPTIMIZERS[optimizer], "run.seed=0", f"data.num_workers={2 * (optimizer == 'adamw')}")
    other.state.restore(snapshot)
    assert other.train_to(STEPS) == first
    other.run.guard.samples.close()


def test_evaluation_changes_nothing() -> None:
    """A run that evaluates every third step ends where one ends that never does, although its rows and dropout draw."""
    program = Program("data.eval._target_=user_programs.Augmented", "run.eval_every=3")
    program.train_to(CAPTURED_AT)
    state, _ = program.train_to(STEPS)
    assert state == uninterrupted()[0]
    assert program.run.guard.reporter.evaluated is not None
