"""Ends of runs that take more than a row of test_scenarios.py: chunks, resumes, and what is said of a leap."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from guarded import cross_entropy
from kills import kinds, summary
from tasks import CLASSIFY, FIT, Ends, Running, Scenario, raised, rotting, twin

from resilient_train.data.trees import weights_sha256
from resilient_train.ground.errors import GaveUp
from resilient_train.ground.wording import say
from resilient_train.report.story import read_story
from resilient_train.report.uploader import note


def test_a_leap_is_told_by_the_rate_before_it_and_its_cap_while_it_acts(
    tmp_path: Path, info: pytest.LogCaptureFixture
) -> None:
    """A schedule that had fallen to 0.4 leapt x500, to x200 of its highest: advice, the end of the run and its page ask
    for the schedule, and not for a lower rate."""
    rate: Callable[[int], float] = lambda step: (0.4 if step >= 60 else 1.0) * (500 if step >= 120 else 1)  # noqa: E731
    hot = Running(Scenario(CLASSIFY._replace(steps=220), Ends(), rate=rate), tmp_path / "run").train()
    advice = "The learning rate jumped x200 from step 120 to 121: look at the schedule, and at what else sets it there"
    (one,) = hot.guard.incidents
    assert say(one.diagnosis.advice).startswith(advice)
    assert say(one.anomaly.evidence).endswith("was usual before the learning rate rose x500")
    said = info.text
    assert "learning rate capped at the configured one and falling with the schedule" in said
    assert "still active at the end: learning rate capped at the configured one" in said
    first, *_ = note(read_story(tmp_path / "run")).splitlines()
    assert advice in first
    assert "lower the learning rate" not in first


@pytest.mark.parametrize("is_asked", [False, True])
def test_what_a_chunk_leaves_off_its_reference_is_not_verified(is_asked: bool, tmp_path: Path) -> None:
    """It is a candidate until its loss is back; whoever closes the run returns to the state from before, for good.

    A run that was asked to stop is not over: the next process resumes with what was left, and with the incident.
    """
    more: dict[str, Any] = {"disk": 25, "resume": True, "steps": None}
    spoil = raised(lambda tick: (tick >= 150) * (3 if tick < 156 else 0.25))
    stop = lambda: is_asked and run.guard.clock.tick >= 190  # noqa: E731
    row = Scenario(CLASSIFY, Ends(), spoil, hands_over=True, guard={**more, "stop": stop})
    run: Running = Running(row, tmp_path / "run")
    guard = run.guard
    run.loop(400 if is_asked else 160)
    assert guard.leave() is not None
    saved, left = kinds(tmp_path / "run"), guard.clock.step
    assert saved.pop(left) == "candidate"
    assert max(saved) < 150 < left
    with nullcontext() if is_asked else pytest.raises(GaveUp) as error:
        guard.close()
    assert error is None or str(error.value.last_good).endswith(f"step-{max(saved):08}")
    steps: list[int] = []
    again = Running(
        Scenario(CLASSIFY, Ends(), after=lambda run: steps.append(run.guard.clock.step), guard={**more, "steps": 430}),
        tmp_path / "run",
    ).train()
    assert steps[0] == guard.clock.step == (left if is_asked else max(saved))
    told = [one for one in again.guard.incidents if one.diagnosis.cause != "process"]
    assert told[0].outcome == ("recovered" if is_asked else "unrecovered")


@pytest.mark.parametrize(("more", "policy"), [(math.nan, {"default": []}), (3.0, {"default": [["reset_moments"]]})])
def test_a_run_that_was_just_resumed_ends_on_its_best_checkpoint(more: float, policy: Any, tmp_path: Path) -> None:
    """It gives up, or its plan ends, while nothing in memory is verified: the disk has what was."""
    saving: dict[str, Any] = {"disk": 25, "resume": True}
    stop = lambda: first.guard.clock.tick >= 70  # noqa: E731
    first: Running = Running(Scenario(CLASSIFY, Ends(), guard={**saving, "stop": stop}), tmp_path)
    first.loop()
    assert first.guard.leave() is not None
    first.guard.close()
    verified = max(step for step, kind in kinds(tmp_path).items() if kind == "verified")
    saving["recovery"] = {"ladders": policy, "strikes": 9}
    task = CLASSIFY._replace(steps=150, loss=lambda model, batch: cross_entropy(model, batch) + more)
    loop = Running(Scenario(task, Ends(), guard=saving), tmp_path)
    with pytest.raises(GaveUp) as error:
        loop.loop(80)
    assert str(error.value.last_good).endswith(f"step-{verified:08}")
    assert loop.guard.clock.step == verified
    assert weights_sha256(loop.guard.state) == twin(CLASSIFY, False, verified)[0]


def test_labels_that_rot_are_no_change_on_purpose(tmp_path: Path) -> None:
    """A rewind to the first weights shows their high loss, which is no rise that came again."""
    run = Running(Scenario(FIT._replace(steps=400), Ends(), rotting, hands_over=True), tmp_path / "run")
    with suppress(GaveUp):
        run.train()
    assert summary(tmp_path / "run")["verdict"] not in ("well", "recovered")
