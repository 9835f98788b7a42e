"""Trials: lower rates are tried from one state on the same samples; the best is kept, or nothing has happened."""

from __future__ import annotations

import logging
import math
import os
import random
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from group import agreed, alone
from guarded import trained as train
from kills import incidents, summary
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from resilient_train.data.trees import state_sha256, weights_sha256
from resilient_train.extensions.trials import Trials
from resilient_train.extensions.trials.arithmetic import (
    Arm,
    NoProgress,
    NoProgressConfig,
    beats,
    best_of,
    is_ahead,
)
from resilient_train.ground.reader import DiskConfig
from resilient_train.ground.types import Vitals
from resilient_train.ground.wording import describe
from resilient_train.loop.guard import Guard

WIDTH, LETTERS, CONTEXT = 6, 16, 4


def arm(rate: float, anomalies: int, *losses: float) -> Arm:
    return Arm(rate, 0, anomalies, losses)


# ------------------------------------------------------------------------------------------------------ the decision


@pytest.mark.parametrize(
    ("first", "second", "best"),
    [
        ((1.0, 1.1), (1.0, 1.1), 0),
        ((1.00, 1.10), (0.999, 1.101), 0),  # within noise
        ((1.0, 1.1), (0.5, 0.6), 1),
        ([*[1.0] * 15, 90.0], [0.9] * 16, 1),  # all 16 gain
        ([*[1.0] * 15, 90.0], [*[0.9] * 8, *[1.1] * 8], 0),
    ],
)
def test_the_rate_with_the_lowest_loss_is_chosen(first: Sequence[float], second: Sequence[float], best: int) -> None:
    """Of those that are equal within noise it is the first."""
    arms = [arm(0.1, 0, *first), arm(0.01, 0, *second)]
    assert best_of(arms) is arms[best]


@pytest.mark.parametrize(
    ("now", "control", "lower", "wins"),
    [
        (3.0, 3.1, 2.5, True),
        (3.0, 3.1, 2.99, False),  # no more than noise
        (24.0, 4.9, 0.2, True),  # the present rate never learned, so it is not its age that the lower one is ahead by
        (3.0, 3.1, math.nan, False),
        (3.0, 2.0, 1.5, False),  # age explains more than the rate does
        (math.inf, 2.8, 2.4, True),
        (3.0, math.inf, 2.4, True),
    ],
)
def test_a_lower_rate_has_to_beat_the_run_and_the_present_rate_from_the_same_state(
    now: float, control: float, lower: float, wins: bool
) -> None:
    """By more than what that state is ahead of the run. It began with a loss of 4."""
    given = [arm(rate, 0, loss, loss) for rate, loss in ((0.1, lower), (1.0, control), (1.0, now))]
    assert beats(given[0], given[1], given[2], 4.0) is wins


@pytest.mark.parametrize(
    ("losses", "anomalies", "first", "is_far"),
    [
        ((1.0, 1.1), 0, 4.0, True),
        ((1.0, 1.1), 1, 4.0, False),
        ((math.nan, 1.0), 0, 4.0, False),
        ((1.0, 1.1), 0, 0.9, False),  # it is only that the run was ruined
        ((1.8, 1.9), 0, 2.1, True),  # the run has learned nothing since it began there, and this has
    ],
)
def test_a_rate_as_old_as_the_run_has_to_be_far_below_it(
    losses: tuple[float, ...], anomalies: int, first: float, is_far: bool
) -> None:
    """By two fifths."""
    assert is_ahead(arm(0.1, anomalies, *losses), arm(1.0, 0, 2.0, 2.1), first) is is_far


CHECK = NoProgressConfig(every=64, window=1024, share=0.45, travel=0.4)


def looks(losses: Sequence[float], travelled: float = 0.1) -> list[int]:
    """At which steps the check asks for a trial, if the weights move so far."""
    check, found = NoProgress(CHECK), []
    for step, loss in enumerate(losses, start=1):
        check.landed(step, Vitals(step, step, True, loss, 1.0, 1e-3), lambda until: None, is_learned=True)
        if check.asks(step, lambda: travelled):
            found.append(step)
            check.tried(step, is_tried=True)
    return found


def test_the_check_asks_where_the_loss_stands_near_its_beginning() -> None:
    """Each time after twice as many updates; once it has fallen far, or falls, only where the weights do not settle."""
    wave = [0.05 * math.sin(step) for step in range(600)]
    assert looks([4.8, *(3.3 + one for one in wave)]) == [64, 128, 256, 512]
    assert looks([4.8, *(0.3 + one for one in wave)]) == []
    assert looks([4.8, *(0.3 + one for one in wave)], travelled=0.5) == [64, 128, 256, 512]  # but settles nowhere
    falling = [4.8 - 0.003 * step + one for step, one in enumerate(wave)]
    assert looks(falling) == []
    assert looks(falling, travelled=0.5) == [128, 256, 512]  # and settles nowhere: at 64 that is ordinary


# ----------------------------------------------------------------------------------------------------- the whole run


def text() -> TensorDataset:
    """A chain of letters, each of which determines the next one, most of the time."""
    numbers = torch.Generator().manual_seed(2)
    following = torch.randperm(LETTERS, generator=numbers)
    letters = [0]
    for draw in torch.rand(4000, generator=numbers).tolist():
        letters.append(int(following[letters[-1]]) if draw < 0.8 else int(1000 * draw) % LETTERS)
    return TensorDataset(torch.tensor(letters).unfold(0, CONTEXT + 1, CONTEXT))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.mixed = nn.Embedding(LETTERS, 16), nn.Linear(16, 32)
        self.head = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, LETTERS))

    def forward(self, letters: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.relu(self.mixed(self.letters(letters))))
        return scores


def next_letter(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0][:, :-1]).flatten(0, 1), batch[0][:, 1:].flatten())


def guard_of(model: nn.Module, optimizer: Any, **given: Any) -> Guard:
    accelerator = Accelerator(cpu=True)
    return Guard(accelerator, *accelerator.prepare(model, optimizer), clip=1.0, **given)


def language(lr: float, steps: int = 150, recovery: Any = "balanced", optimizer: Any = None, **more: Any) -> Guard:
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = (optimizer or partial(torch.optim.AdamW, lr=lr))(model.parameters())
    given = {"objective": next_letter, "data": text(), "batch_size": 8, **more}
    return guard_of(model, optimizer, steps=steps, recovery=recovery, **given)


def final(guard: Guard) -> float:
    assert guard.recent_loss is not None
    return guard.recent_loss


def test_a_rate_that_was_quietly_too_high_is_found_and_lowered(tmp_path: Path) -> None:
    """The run ends where a good rate ends, and says which rates were tried, in its files as in its log."""
    good, hot = final(train(language(0.01))), final(train(language(0.7, recovery="skip")))
    guard = train(language(0.7, run_dir=tmp_path / "run", tracking=False))
    guard.close()
    assert hot > 1.3 * good
    assert final(guard) < 1.05 * good
    [incident] = guard.incidents
    assert (incident.anomaly.signal, incident.diagnosis.cause) == ("no_progress", "rate")
    assert incident.rewound_to == 0
    assert [one.won for one in incident.tried].count(True) == 1
    assert incidents(tmp_path / "run")[0]["tried"][0]["since"] is None  # as it is
    said = [line.strip() for line in describe(incident).splitlines() if "later loss" in line]
    assert said[0].startswith("as it is: later loss")
    assert said[-1].startswith("as it is from step 0: later loss")
    assert [line.startswith("learning rate x") for line in said if line.endswith(", chosen")] == [True]
    written = summary(tmp_path / "run")
    assert 0 < written["trial_updates"] <= 200
    assert written["ticks"] == guard.clock.tick  # updates of a trial are no ticks
    assert guard.clock.tick < 150 + incident.anomaly.step + 5


def squares(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(F.dropout(model(batch[0]), 0.1), batch[1])


def noise(rows: int) -> TensorDataset:
    numbers = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(rows, WIDTH, generator=numbers), torch.randn(rows, 1, generator=numbers))


def regression(recovery: Any, **more: Any) -> Guard:
    """Noise that nothing explains: the loss stands from the first updates on. BatchNorm and dropout."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    given = {"objective": squares, "data": noise(512), "batch_size": 16, **more}
    return guard_of(model, optimizer, steps=150, recovery=recovery, **given)


WITHOUT = {"ladders": {"default": [["skip"]]}}
WITH = {**WITHOUT, "rates": [0.1, 0.01]}


class Raising(TensorDataset):
    def __init__(self, first: int, each: int) -> None:
        super().__init__(*noise(4000).tensors)
        self.first, self.each = first, each

    def __getitem__(self, row: int) -> tuple[Tensor, ...]:
        if row >= self.first and row % self.each == 0:
            raise ValueError(f"cannot decode row {row}")
        found: tuple[Tensor, ...] = super().__getitem__(row)  # type: ignore[no-untyped-call]
        return found


@pytest.mark.parametrize(("first", "each", "takes_place"), [(1080, 50, True), (1080, 8, False)])
def test_rows_that_cannot_be_fetched_do_not_end_a_run_in_a_trial(first: int, each: int, takes_place: bool) -> None:
    """They are left out of what arms are judged on; if too few updates are left, there is no trial."""
    guard = regression(WITH, data=Raising(first, each), shuffle=False)
    for batch in guard.batches():
        guard.step(batch)
        if guard.clock.step == 66:
            break
    assert (guard._controls.extension(Trials).updates > 30) is takes_place
    assert not guard.incidents


def test_a_run_whose_loop_makes_the_updates_has_no_trials(tmp_path: Path) -> None:
    """A loss that is handed over cannot be computed again, which its end says."""
    guard = language(0.7, objective=None, run_dir=tmp_path, tracking=False)
    for batch in guard.batches():
        loss = next_letter(guard.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        guard.update(loss)
    guard.close()
    assert guard._controls.extension(Trials).updates == 0
    assert summary(tmp_path)["verdict"] == "unjudged"


# ------------------------------------------------------------------------------- state outside of the run


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
    assert with_trial._controls.extension(Trials).updates > 0
    assert state_sha256(with_trial.state) == state_sha256(without.state)
    assert len(calls) > with_trial.clock.tick  # docs/policies.md says so
    assert (without._controls.extension(Trials).updates, with_trial.incidents) == (0, [])
    (noted,) = (one for one in caplog.records if one.getMessage().endswith("; lower rates did no better"))
    assert noted.levelno == logging.DEBUG
    assert not any("lower rates" in one.getMessage() for one in caplog.records if one.levelno > logging.DEBUG)


def test_a_program_with_state_outside_of_the_run_has_no_race() -> None:
    """A forward that is repeated has another loss: a trial would change that state."""
    earlier = [torch.zeros(())]

    def objective(model: Any, batch: Any) -> Tensor:
        """The loss depends on the batch before."""
        loss = F.mse_loss(model(batch[0]), batch[1] + 0.1 * earlier[-1])
        earlier.append(batch[1].mean())
        return loss

    guard = train(regression(WITH, objective=objective))
    assert guard._controls.extension(Trials).updates == 2 * 11  # 16 losses twice, at steps 65 and 129
    assert not guard.incidents


def test_a_short_run_that_learns_nothing_looks_for_a_lower_rate_twice() -> None:
    """It costs 48 updates at step 65, too early to tell, and 64 at step 129. Then no more; a resume knows that."""
    guard = train(regression(WITH))
    assert guard._controls.extension(Trials).updates == 48 + 64
    resumed = regression(WITH)
    resumed._controls.effects.load_state_dict(guard._controls.effects.state_dict())
    assert resumed._controls.extension(Trials).raced_in_vain


# ------------------------------------------------------------------------------------------------- ranks, and a kill


def on_a_rank() -> dict[str, Any]:
    guard = train(language(0.3, batch_size=8 // int(os.environ["WORLD_SIZE"])))
    told = {
        "factors": [one.settings.get("factor") for incident in guard.incidents for one in incident.decision.actions],
        "weights": weights_sha256(guard.state),
        "trial": guard._controls.extension(Trials).updates,
    }
    guard.close()
    if guard.world.size > 1:
        guard.world.leave()
    return told


def test_all_ranks_choose_the_same_rate() -> None:
    """They compare losses that are averaged over the ranks, and hold the same weights afterwards."""
    told = agreed(2, on_a_rank)
    assert told["trial"] > 0
    assert told["factors"][-1] < 1


def killed_in_trial(run_dir: Path, kills: bool) -> list[str]:
    """Train; with `kills` the process ends within the race, in an update that is no tick."""
    guards: list[Guard] = []

    def objective(model: Any, batch: Any) -> Tensor:
        if kills and guards and guards[0]._current is None:  # no update is being computed
            os.kill(os.getpid(), signal.SIGKILL)
        return next_letter(model, batch)

    disk = DiskConfig(every=25, keep=3, keep_every=0)
    guards.append(language(0.7, run_dir=run_dir, tracking=False, objective=objective, resume=True, disk=disk))
    guard = train(guards[0])
    guard.close()
    return [str(one.anomaly.signal) for one in guard.incidents]


def test_a_run_that_is_killed_in_a_race_finds_a_rate_nevertheless(tmp_path: Path) -> None:
    """A race starts from the oldest snapshot, which is another one in the next process."""
    assert alone(killed_in_trial, tmp_path, True)[0] == -signal.SIGKILL
    assert set(killed_in_trial(tmp_path, False)) == {"crash", "no_progress"}
