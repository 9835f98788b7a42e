"""A planned total, epochs, what counts as complete; and loops that are not protected."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from group import alone
from guarded import guard_over, often, sums
from tables import table
from torch.utils.data import DataLoader, IterableDataset
from user_programs import Lengthy, mse

from resilient_train.data.trees import weights_sha256
from resilient_train.ground.errors import TrainError
from resilient_train.loop.guard import Guard
from resilient_train.report.story import read_story

ROWS, BATCH = 190, 8  # 24 updates see all the rows, two of them for the second time
LENGTH = 24
EPOCHS = [LENGTH] * 3
A_LOADER: Any = DataLoader(sums(ROWS), BATCH)


def guard_of(run_dir: Path | None = None, data: Any = None, **more: Any) -> Guard:
    data = sums(ROWS) if data is None else data
    return guard_over(data, **{"batch_size": BATCH, "objective": mse, "run_dir": run_dir, **more})


def steps_of(guard: Guard, batches: Any) -> int:
    return sum(guard.step(batch) for batch in batches)


# ------------------------------------------------------------------------------------------------- how many there are


def test_a_loop_without_a_plan_is_complete_when_it_is_closed(tmp_path: Path) -> None:
    guard = guard_of(tmp_path / "run")
    assert [steps_of(guard, guard.batches(20)) for _ in range(3)] == [20, 20, 20]
    with pytest.raises(TrainError, match=r"Guard\(steps=...\), or ask for n more"):
        next(guard.batches())
    guard.close()
    found = read_story(tmp_path / "run")
    assert (found.state, found.step) == ("completed", 60)


def test_the_rest_of_a_plan_is_what_is_left_of_it(info: pytest.LogCaptureFixture) -> None:
    """Whatever was made of it before; and a call that has nothing to yield says why."""
    guard = guard_of(steps=50)
    made = [steps_of(guard, guard.batches(20)), steps_of(guard, guard.batches()), steps_of(guard, guard.batches(20))]
    assert made == [20, 30, 0]
    assert "no batches: nothing is left of the 50 steps of the plan" in info.text


@table(
    ("given", "lengths"),
    {
        "data set": ({}, EPOCHS),
        "loader": ({"data": A_LOADER, "batch_size": None}, EPOCHS),
        "stream": ({"data": Lengthy(ROWS)}, EPOCHS),
        "a plan that ends in the midst of one": ({"steps": 30}, [LENGTH, 30 - LENGTH]),
        "a plan of no steps": ({"steps": 0}, []),
    },
)
def test_epochs_are_as_long_as_the_data_and_the_plan(given: dict[str, Any], lengths: list[int]) -> None:
    guard = guard_of(**given)
    assert [(epoch.number, steps_of(guard, epoch)) for epoch in guard.epochs(3)] == [*enumerate(lengths)]
    assert guard.steps == sum(lengths)


def test_epochs_that_are_made_already_yield_nothing(info: pytest.LogCaptureFixture) -> None:
    """Though the plan has more steps: those belong to no epoch that the loop asks for."""
    guard = guard_of(steps=1000)
    assert [steps_of(guard, epoch) for epoch in guard.epochs(2)] == [LENGTH, LENGTH]
    assert list(guard.epochs(2)) == []
    assert f"no batches: nothing is left of the {2 * LENGTH} steps that the loop asks for" in info.text


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(sums(ROWS))


@pytest.mark.parametrize("data", [DataLoader(Endless(), BATCH), (one for one in A_LOADER)])
def test_data_without_a_length_has_no_epochs(data: Any) -> None:
    with pytest.raises(TypeError, match=r"no len\(\)"):
        next(guard_of(data=data).epochs(2))


# ---------------------------------------------------------------------------------------------------- what it comes to


def epochs(run_dir: Path, killed_at: int = -1) -> Any:
    guard, made = guard_of(run_dir, disk=2, memory=often(2), verify_after=1, resume=True), []
    for epoch in guard.epochs(3):
        steps = 0
        for batch in epoch:
            steps += guard.step(batch)
            if guard.clock.step == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            while guard.saving_since is not None:
                time.sleep(0.005)  # these updates are quicker than a disk
        made.append((epoch.number, steps))
    guard.close()
    return made, weights_sha256(guard.state)


def test_a_kill_in_the_second_epoch_resumes_there(tmp_path: Path) -> None:
    """The first is not made again, the second is cut to its rest, and the end is the same to the last bit."""
    _, (made, weights) = alone(epochs, tmp_path / "unharmed")
    assert made == [*enumerate(EPOCHS)]
    assert alone(epochs, tmp_path / "run", 2 * LENGTH - 1)[0] == -signal.SIGKILL
    found = read_story(tmp_path / "run")
    assert (found.state, found.exit_code, found.steps) == ("killed", 1, 3 * LENGTH)
    _, (made, again) = alone(epochs, tmp_path / "run")
    assert [number for number, _ in made] == [1, 2]
    assert 0 < made[0][1] < LENGTH
    assert made[1][1] == LENGTH
    assert again == weights


def test_incidents_are_not_closed_with_an_epoch(tmp_path: Path) -> None:
    """Whether it is over is seen in the next one; at the end of the plan what is open is closed."""
    guard = guard_of(tmp_path / "run", data=sums(ROWS, bad=(33,)), steps=30, shuffle=False)
    outcomes = []
    for _ in range(3):
        steps_of(guard, guard.batches(10))
        outcomes.append([one.outcome for one in guard.incidents])
    assert outcomes[0] == [None]
    assert outcomes[2] == ["recovered"]
