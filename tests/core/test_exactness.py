"""Capture, go on, restore, go on again: the same run to the last bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts
from user_programs import Augmented, CountsItself, Jittery, mse

from resilient_train.data.trees import sha256, state_sha256
from resilient_train.loop.guard import Guard

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


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=1e-2, fused=True),
    "one of the user's own": CountsItself,
}


class Program:
    """Dropout, BatchNorm, random rows, accumulation, a chained scheduler, and something the user keeps."""

    def __init__(self, optimizer: str, seed: int = 0, num_workers: int = 0) -> None:
        for seeded in (torch.manual_seed, random.seed, np.random.seed):
            seeded(seed)
        self.model = Jittery()
        made = OPTIMIZERS[optimizer](self.model.parameters())
        self.guard = Guard(
            *(None, self.model, made),
            data=Augmented(),
            batch_size=4,
            accumulate=2,
            schedule=CosineAnnealingWarmRestarts(made, T_0=11),
            num_workers=num_workers,
            checks="off",  # a state that is put back behind the guard's back looks like damage
        )
        self.average = NoisyAverage(self.model)
        self.guard.keep(average=self.average)
        self.state = self.guard.state

    def train_to(self, step: int) -> tuple[str, list[str]]:
        """Train, and return what a run is, and what it was fed. Between two calls the user's own code draws."""
        batches = []
        self.average.update()
        for batch in self.guard.batches(step - self.guard.clock.step):
            batches.append(sha256(batch))
            loss = mse(self.model, batch)
            (loss / 2).backward()  # type: ignore[no-untyped-call]
            if self.guard.update(loss):
                self.average.update()
                for group in self.state.optimizers[0].param_groups:
                    group["weight_decay"] *= 1.01  # a schedule of the user's own, which lives in the groups alone
        return state_sha256(self.state), batches

    def addresses(self) -> list[int]:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        for values in self.state.optimizers[0].state.values():
            tensors += [value for value in values.values() if isinstance(value, torch.Tensor)]
        return [tensor.data_ptr() for tensor in tensors]


@cache
def uninterrupted(optimizer: str) -> tuple[str, list[str]]:
    """The whole run in one piece, with the user's code drawing where it does in the other."""
    program = Program(optimizer)
    program.train_to(CAPTURED_AT)
    return program.train_to(STEPS)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_restored_run_repeats_itself_to_the_last_bit(optimizer: str) -> None:
    """Captured, trained on, restored, trained on again: every batch and the final state are the same.

    A rewind writes into the same memory, as compiled graphs and flattened parameters hold addresses. Going back to step
    0 leaves an optimizer without state, as it began. And in another process, with workers, a snapshot continues a run
    that has made no step: moments are created as they were.
    """
    program = Program(optimizer)
    start = deepcopy(program.state.live())
    until_then = program.train_to(CAPTURED_AT)
    snapshot, at_capture = deepcopy(program.state.live()), state_sha256(program.state)
    first, addresses = program.train_to(STEPS), program.addresses()
    assert first == uninterrupted(optimizer)
    program.state.restore(snapshot)
    assert (state_sha256(program.state), program.addresses()) == (at_capture, addresses)
    assert program.train_to(STEPS) == first

    program.state.restore(start)
    assert not program.state.optimizers[0].state
    assert program.train_to(CAPTURED_AT) == until_then

    other = Program(optimizer, seed=1, num_workers=2 * (optimizer == "adamw"))
    other.state.restore(snapshot)
    assert other.train_to(STEPS) == first
    other.guard.samples.close()
