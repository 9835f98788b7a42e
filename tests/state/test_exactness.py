"""Capture, go on, restore, go on again: the same run to the last bit."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from resilient_train.app.build import Run, assemble
from resilient_train.app.config.compose import load
from resilient_train.app.train import train
from resilient_train.ranks.world import World
from resilient_train.state.tree import sha256
from resilient_train.tracking.tracker import Tracker
from resilient_train.types import Vitals

STEPS, CAPTURED_AT = 40, 17

PARTS = {
    "weights",
    "buffers",
    "clock",
    "optimizer.0",
    "schedule.0",
    "position",
    "random.python",
    "random.numpy",
    "random.torch",
    "kept.average",
}
INSIDE_THE_OPTIMIZER = {"groups", "exp_avg", "exp_avg_sq", "step"}


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


class AfterEachUpdate:
    """A display that shows nothing: it stands where the user's own code after an update would."""

    def __init__(self, run: Run, average: NoisyAverage) -> None:
        self.run, self.average = run, average

    def step(self, step: int) -> None:
        self.average.update()
        for optimizer in self.run.guard.state.optimizers:
            for group in optimizer.param_groups:
                group["weight_decay"] *= 1.01  # a schedule of the user's own, which lives in the groups alone

    def show(self, vitals: Vitals, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Program:
    """Dropout, BatchNorm, random rows, accumulation, a chained scheduler, and something the user keeps."""

    def __init__(self, *overrides: str, workers: int = 0) -> None:
        config = load(
            [
                "model=custom",
                "model._target_=strangers.Jittery",
                "data=custom",
                "data.train._target_=strangers.Augmented",
                "data.batch_size=4",
                f"data.num_workers={workers}",
                "objective=custom",
                "objective._target_=strangers.mse_and_more",
                "accelerate.gradient_accumulation_steps=2",
                "accelerate.cpu=true",
                "schedule=custom",
                "schedule._target_=torch.optim.lr_scheduler.CosineAnnealingWarmRestarts",
                "schedule.warmup_steps=5",
                "+schedule.T_0=11",
                "tracking=none",
                "checks=off",  # a state that is put back behind the guard's back looks like damage
                *overrides,
            ]
        ).config
        self.run = assemble(config, World.joined(config.accelerate))
        self.average = NoisyAverage(self.run.bare_model)
        self.run.guard.state.keep("average", self.average)
        self.batches: list[str] = []
        measure = self.run.objective.objective

        def recorded(model: nn.Module, batch: Any) -> Any:
            self.batches.append(sha256(batch))
            return measure(model, batch)

        self.run.objective.objective = recorded

    def train_to(self, step: int) -> tuple[str, list[str]]:
        """Train, and return what a run is and what it was fed since the last call.

        Between a capture and the next update the user's own code draws, as code behind `guard.step()` does.
        """
        self.run.config.run.steps = self.run.guard.steps = step
        self.batches.clear()
        self.average.update()
        train(self.run, AfterEachUpdate(self.run, self.average), Tracker())
        return self.run.guard.state.sha256(), list(self.batches)

    def close(self) -> None:
        self.run.guard.samples.close()


@functools.cache
def uninterrupted(*overrides: str) -> tuple[str, list[str]]:
    """The whole run in one piece, with the user's code drawing where it does in the other."""
    program = Program(*overrides)
    _, first = program.train_to(CAPTURED_AT)
    state, second = program.train_to(STEPS)
    return state, first + second


OPTIMIZERS: dict[str, Sequence[str]] = {
    "adamw": (),
    "sgd with momentum": ("optimizer=sgd",),
    "one of the user's own": ("optimizer=custom", "optimizer._target_=strangers.CountsItself", "+optimizer.lr=0.01"),
    "rmsprop": (
        "optimizer=custom",
        "optimizer._target_=torch.optim.RMSprop",
        "+optimizer.lr=0.01",
        "+optimizer.momentum=0.9",
    ),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_restored_run_repeats_itself_to_the_last_bit(workers: int, optimizer: str) -> None:
    """Captured at 17, trained to 40, restored, trained to 40 again: every batch and the final state are the same."""
    program = Program(*OPTIMIZERS[optimizer], workers=workers)
    program.train_to(CAPTURED_AT)
    snapshot = deepcopy(program.run.guard.state.live())
    at_capture = program.run.guard.state.sha256()
    first = program.train_to(STEPS)
    program.run.guard.state.restore(snapshot)
    assert program.run.guard.state.sha256() == at_capture
    again = program.train_to(STEPS)
    program.close()
    assert again == first
    whole_state, whole_batches = uninterrupted(*OPTIMIZERS[optimizer])
    assert first == (whole_state, whole_batches[2 * CAPTURED_AT :])


def test_a_fresh_process_state_restores_too() -> None:
    """A snapshot put into a run that has not made a step yet continues it: moments are created as they were."""
    program = Program()
    program.train_to(CAPTURED_AT)
    snapshot = deepcopy(program.run.guard.state.live())
    first = program.train_to(STEPS)
    other = Program("run.seed=0")
    other.run.guard.state.restore(snapshot)
    assert other.train_to(STEPS) == first


def test_a_snapshot_of_the_start_forgets_moments() -> None:
    """Going back to step 0 leaves an optimizer without state, as it began."""
    program = Program()
    start = deepcopy(program.run.guard.state.live())
    first = program.train_to(5)
    program.run.guard.state.restore(start)
    assert not program.run.guard.state.optimizers[0].state
    assert program.train_to(5) == first


def without(snapshot: dict[str, Any], path: str, live: dict[str, Any]) -> dict[str, Any]:
    """The same snapshot as if one item had not been captured: it stays what it is in the live run."""
    if path in snapshot:
        return {**snapshot, path: live[path]}
    here, there = snapshot["optimizer.0"], live["optimizer.0"]
    if path == "groups":
        return {**snapshot, "optimizer.0": {**here, path: there[path]}}
    moments = {place: {**values, path: there["moments"][place][path]} for place, values in here["moments"].items()}
    return {**snapshot, "optimizer.0": {**here, "moments": moments}}


def test_the_parts_of_a_capture_are_known() -> None:
    """What a run is, by name: a new part has to be added to the ablation below."""
    program = Program()
    program.train_to(1)
    assert program.run.guard.state.live().keys() == PARTS


def test_nothing_in_a_capture_is_needless() -> None:
    """Leave out any single item, and the run does not repeat itself."""
    program = Program()
    program.train_to(CAPTURED_AT)
    snapshot = deepcopy(program.run.guard.state.live())
    first = program.train_to(STEPS)
    live = deepcopy(program.run.guard.state.live())
    for left_out in sorted(PARTS | INSIDE_THE_OPTIMIZER):
        program.run.guard.state.restore(without(snapshot, left_out, live))
        assert program.train_to(STEPS) != first, left_out
    program.run.guard.state.restore(snapshot)
    assert program.train_to(STEPS) == first


def test_evaluation_changes_nothing() -> None:
    """A run that evaluates every third step ends where one ends that never does, although its rows and dropout draw."""
    quiet = uninterrupted()
    program = Program("data.eval._target_=strangers.Augmented", "run.eval_every=3")
    program.train_to(CAPTURED_AT)
    state, _ = program.train_to(STEPS)
    assert state == quiet[0]
    assert program.run.evaluated is not None


def test_restore_keeps_tensors_where_they_are() -> None:
    """Compiled graphs and flattened parameters hold addresses: a rewind writes into the same memory."""
    program = Program()
    program.train_to(3)
    snapshot = deepcopy(program.run.guard.state.live())
    program.train_to(6)

    def addresses() -> list[int]:
        tensors: list[Tensor] = [*program.run.bare_model.parameters(), *program.run.bare_model.buffers()]
        for values in program.run.guard.state.optimizers[0].state.values():
            tensors += [value for value in values.values() if isinstance(value, torch.Tensor)]
        return [tensor.data_ptr() for tensor in tensors]

    before = addresses()
    program.run.guard.state.restore(snapshot)
    assert addresses() == before
