"""What a trial leaves of the state that a program keeps outside of the run: random numbers, counters, queues."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from guarded import trained as train
from test_trials import WITH, WITHOUT, regression, squares
from torch import Tensor
from torch.nn import functional as F

from resilient_train.core.policy import Budget
from resilient_train.durable.trees import state_sha256
from resilient_train.loop.guard import Guard


def drawn(guard: Guard) -> list[float]:
    """Train, and draw numbers between the updates, as a loop does that augments or samples."""
    numbers = []
    for batch in guard.batches():
        guard.step(batch)
        numbers += [random.random(), float(np.random.rand()), torch.rand(()).item()]
    return numbers


def noisy(model: Any, batch: Any) -> Tensor:
    """Dropout, and noise of all three generators."""
    noise = random.random() + np.random.rand() + torch.rand(()).item()
    return squares(model, batch) * (1 + 0.01 * noise)


def test_a_trial_that_finds_nothing_leaves_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    """On a healthy plateau: the whole state to the last bit, random numbers of the objective and the loop included.

    It prints nothing. A count of calls is not put back.
    """
    caplog.set_level(logging.DEBUG, "resilient_train")
    calls: list[int] = []

    def counting(model: Any, batch: Any) -> Tensor:
        calls.append(1)
        return noisy(model, batch)

    with_trial, without = regression(WITH, objective=counting), regression(WITHOUT, objective=noisy)
    assert drawn(with_trial) == drawn(without)
    assert with_trial._controls.trials.updates > 0
    assert state_sha256(with_trial.state) == state_sha256(without.state)
    assert len(calls) > with_trial.clock.tick  # docs/policies.md says so
    assert (without._controls.trials.updates, with_trial.incidents) == (0, [])
    cost = r".*; lower rates were tried, and the current one is fine: .*; that took [\d,]+ updates, .*"
    (noted,) = (one for one in caplog.records if re.fullmatch(cost, one.getMessage()))
    assert noted.levelno == logging.DEBUG
    assert not any("tried" in one.getMessage() for one in caplog.records if one.levelno > logging.DEBUG)


def queue() -> Callable[[Any, Any], Tensor]:
    """The loss depends on the batch before."""
    earlier: list[Tensor] = []

    def objective(model: Any, batch: Any) -> Tensor:
        loss = F.mse_loss(model(batch[0]), batch[1] + (0.1 * earlier[-1] if earlier else 0.0))
        earlier.append(batch[1].mean())
        return loss

    return objective


def test_a_program_with_state_outside_of_the_run_has_no_race(caplog: pytest.LogCaptureFixture) -> None:
    """A forward that is repeated has another loss: a trial would change that state. It is asked once."""
    caplog.set_level(logging.DEBUG, "resilient_train")
    guard = train(regression(WITH, objective=queue()))
    assert "no lower rates are tried: the loss of update 1 cannot be reproduced: the data or" in caplog.text
    assert guard._controls.trials.updates == 1
    assert not guard.incidents


@pytest.mark.parametrize(
    ("steps", "in_vain", "most"), [(160, False, 200), (160, True, 8), (10_000, False, 500), (10_000, True, 500)]
)
def test_trials_after_one_in_vain_keep_to_the_share(steps: int, in_vain: bool, most: int) -> None:
    """A short run may make more until it has found that its rate is right."""
    assert Budget().trial_updates(steps, in_vain=in_vain) == most


def test_a_short_run_that_learns_nothing_looks_for_a_lower_rate_twice() -> None:
    """It costs 44 updates at step 65, too early to tell, and 60 at step 129. Then no more; a resume knows that."""
    guard = train(regression(WITH))
    assert guard._controls.trials.updates == 44 + 60
    resumed = regression(WITH)
    resumed._controls.effects.load_state_dict(guard._controls.effects.state_dict())
    assert resumed._controls.trials.raced_in_vain
