"""Losses that are stepped in turn: how they are handed over; test_guard.py has what they come to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from guarded import SKIP
from pairs import SPOILED, Pair

from resilient_train.ground.errors import TrainError
from resilient_train.loop.guard import Guard

STEPS = 60


def pair(kind: str) -> Pair:
    return Pair(Accelerator(cpu=True), kind)


def test_the_sum_of_opposed_losses_need_not_fall(tmp_path: Path) -> None:
    """A healthy run is well, although its loss is not below where it began."""
    trained = pair("gan")
    guard = trained.guard(steps=STEPS, run_dir=tmp_path / "run")
    for batch in guard.batches():
        for name in trained.names:
            loss = trained.backward(name, batch, lambda loss: loss + 0.1 * guard.clock.step)
            guard.update(loss, optimizer=trained.optimizers[name])
    guard.close()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["final_loss"] > summary["first_loss"]
    assert summary["verdict"] == "well"


Calls = list[tuple[str, str | None]]  # the loss of which network, and the optimizer that steps with it
FIRST = ("critic", "critic")


@pytest.mark.parametrize(
    ("calls", "line"),
    [
        ([("critic", "unknown")], r"does not know this optimizer, .*SGD: give Guard a list of all optimizers"),
        ([FIRST, ("actor", None)], "called twice for one batch"),
        ([("actor", None), FIRST], "called twice for one batch"),
        ([FIRST, ("no backward", "actor")], "no weight has a gradient"),
    ],
)
def test_a_mistake_is_told_in_one_line(calls: Calls, line: str) -> None:
    """Where it is made; the networks are whole when the guard is closed."""
    made = pair("actor")
    guard = made.guard(steps=STEPS)
    before = made.digests()
    optimizers = {**made.optimizers, "unknown": torch.optim.SGD(made.bare.parameters())}
    with pytest.raises(TrainError, match=line) as raised:
        every_batch(calls, made, guard, optimizers)
    assert "\n" not in str(raised.value)
    guard.close()
    assert calls[0][1] is None or made.digests() == before  # there, a whole update was made before


def every_batch(calls: Calls, made: Pair, guard: Guard, optimizers: dict[str, Any]) -> None:
    for batch in guard.batches():
        for name, optimizer in calls:
            is_computed = name in made.names
            loss = made.backward(name, batch) if is_computed else made.loss("critic", batch)
            guard.update(loss, **({} if optimizer is None else {"optimizer": optimizers[optimizer]}))


def test_losses_in_turn_cannot_accumulate() -> None:
    """In one line, at the first loss."""
    made = Pair(Accelerator(cpu=True, gradient_accumulation_steps=2), "actor")
    with pytest.raises(TrainError, match="cannot accumulate gradients: set gradient_accumulation_steps to 1"):
        every_batch([FIRST], made, made.guard(steps=STEPS), dict(made.optimizers))


@pytest.mark.parametrize("bad", [0, 3, 4, 7])
def test_losses_of_all_may_alternate_with_losses_in_turn(bad: int) -> None:
    """Also where the verdict on the one comes in the middle of the other."""
    made = pair("actor")
    guard = made.guard(steps=STEPS, recovery=SKIP)
    for number, batch in enumerate(guard.batches(), start=1):
        spoil = SPOILED["loss" if number == bad else "not"]
        if number % 8 < 4:  # three of the one, four of the other
            guard.update(made.backward("critic", batch, spoil))
        else:
            for name in made.names:
                guard.update(made.backward(name, batch, spoil), optimizer=made.optimizers[name])
    assert (guard.clock.step, len(guard.incidents)) == (STEPS, bool(bad))
    guard.close()
