"""Requests to stop: each ends with 75 and a state on disk, whatever the run is at, and the same command goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command import MINE, command
from fork_server import Forked
from group import Group
from kills import SAVING, Nursery, at_tick, checkpoints, in_journal, incidents, left_overs, stand, summary
from paused_run import held_at, is_held
from torch import Tensor, nn

from resilient_train.processes import process_exit
from resilient_train.processes.process_exit import SIGNALS, StopRequests

DIGITS = ["model=mlp", "data=digits", "objective=classification", "tracking=none", "run.log_every=100"]
DISK = ["checkpoint.disk.every=30", "checkpoint.memory.every=10", "checkpoint.verify_after=12"]
BETWEEN = 2  # two updates, in the file `progress`


# ---------------------------------------------------------------------------------------------------------- what counts


class TestRequests:
    @pytest.mark.parametrize("number", SIGNALS)
    def test_in_the_loop_a_request_is_noted(self, number: signal.Signals) -> None:
        with StopRequests() as requests:
            assert not requests.asked()
            signal.raise_signal(number)
            assert requests.asked()
            assert requests.by == number.name

    @pytest.mark.parametrize("first", SIGNALS)
    def test_a_second_ctrl_c_later_means_at_once(self, first: signal.Signals) -> None:
        """More than three seconds after the first request, whatever that was; what a launcher passes on is one request.

        A scheduler that asks twice is in no hurry.
        """
        with StopRequests() as requests:
            signal.raise_signal(first)
            signal.raise_signal(first)
            assert requests._since is not None
            requests._since -= 3.1
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGUSR1)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)


# -------------------------------------------------------------------------------------------------------------- moments

FAULTS = "drill.faults=[{hot_lr:{at:[120],updates:12,factor:1000}},{bad_row:{rows:[700]}}]"
STEPS = 220
DRILLED = [*DIGITS, *DISK, f"run.steps={STEPS}", "run.eval_every=70", f"+{FAULTS}", "schedule=constant"]
DRILLED += ["objective=custom", "objective._target_=test_stop.unhurried"]


@pytest.fixture(scope="module")
def unharmed(nursery: Nursery) -> dict[str, Any]:
    """What becomes of the run if nobody stops it, drill and all."""
    done = nursery.run(*DRILLED, "run.dir=unharmed")
    assert done.code == 0, done.output
    found = incidents(nursery.place / "unharmed")
    assert any(one["rewound_to"] is not None for one in found), "the drill makes the run rewind"
    return summary(nursery.place / "unharmed")


Moment = Callable[[Path, int, Forked], bool]  # (where, its newest tick before the start, who)


def going_on(holds: Callable[[Path], bool]) -> Moment:
    """When it has begun an update, and something holds; at the latest where the run is held."""

    def waits(run_dir: Path, before: int, started: Forked) -> bool:
        return started.until(
            lambda: stand(run_dir).tick > before and (holds(run_dir) or is_held(run_dir.parent)), look_s=0.0005
        )

    return waits


saving = going_on(lambda run_dir: (run_dir / SAVING).exists())
evaluating = going_on(lambda run_dir: stand(run_dir).doing == BETWEEN)  # the objective takes its time there


def treating(cause: str, tick: int) -> Moment:
    """As soon as an incident is in the journal, which is before anything is done about it."""

    def is_open(run_dir: Path) -> bool:
        found = [entry["incident"] for entry in in_journal(run_dir, "incident_opened")]
        return any(one["diagnosis"]["cause"] == cause and one["anomaly"]["tick"] >= tick for one in found)

    return going_on(is_open)


def starting(run_dir: Path, before: int, started: Forked) -> bool:
    """When the run is built, and is not taken up yet."""

    def built() -> int:
        return (run_dir / "train.log").read_text().count("32 rows to an update")

    already = built()
    return started.until(lambda: built() > already)


def unhurried(model: nn.Module, batch: Any) -> Tensor:
    """Updates and evaluations that can be met, also from a core that others use."""
    time.sleep(0.004 if model.training else 0.02)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


MOMENTS: dict[str, Moment] = {
    "an incident with rows": treating("data", tick=1),
    "an evaluation": evaluating,
    "the start": starting,
    "a save": saving,
    "a rewind": treating("explosion", tick=121),
}


def test_at_whichever_moment_it_is_asked_nothing_is_lost(nursery: Nursery, unharmed: dict[str, Any]) -> None:
    """Many requests in one run, each heard: 75, a state on disk, and in the end the run that nobody stopped."""
    run_dir, arguments = nursery.place / "stopped", [*DRILLED, "run.dir=stopped"]
    ticks = 0
    for name, moment in MOMENTS.items():
        before = stand(run_dir).tick
        with held_at(nursery.place, STEPS - 5):
            started = nursery.start(*arguments)
            assert moment(run_dir, before, started), f"ended before {name}: {started.output[-1500:]}"
            stood = stand(run_dir)
            started.strike(signal.SIGTERM)
        assert started.wait() == 75, f"{name}: {started.output[-1500:]}"
        done = summary(run_dir)
        assert (done["status"], done["exit_code"]) == ("preempted", 75), name
        if moment is starting:
            continue
        behind = max(stood.tick - 1, ticks)  # the update under way may be dropped
        assert done["ticks"] >= behind, f"{name}: {done['ticks']} ticks, {stood}"
        assert done["steps"] in checkpoints(run_dir), name
        ticks = done["ticks"]
    last = nursery.run(*arguments)
    assert last.code == 0, last.output
    done = summary(run_dir)
    assert done["ticks"] - unharmed["ticks"] <= len(MOMENTS), "at most one update each is made again"
    for key in ("weights_sha256", "steps", "final_loss", "eval"):
        assert done[key] == unharmed[key], key
    assert left_overs(run_dir) == []


def test_a_request_that_reaches_workers_of_data_is_no_error(nursery: Nursery) -> None:
    """A shell's Ctrl-C goes to all processes of a group."""
    run_dir = nursery.place / "group"
    started = nursery.start(*DIGITS, "data.num_workers=2", "run.steps=100000", "run.dir=group")
    assert at_tick(run_dir, 5)(started)
    os.killpg(started.pid, signal.SIGINT)
    assert started.wait() == 75
    assert f"asked by SIGINT: the state is in {run_dir}/checkpoints/step-" in started.output
    assert "the same command resumes" in started.output
    assert summary(run_dir)["status"] == "preempted"


_calls: list[int] = []


def counted(model: nn.Module, batch: Any) -> Tensor:
    _calls.append(1)
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def test_hours_are_enough(here: Path, run_command: command, monkeypatch: pytest.MonkeyPatch) -> None:
    """run.max_hours ends it as a request does: an hour passes in the sixth update."""
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600 * (len(_calls) > 5))
    monkeypatch.setattr(process_exit, "time", clock)
    own = [*MINE, "objective._target_=test_stop.counted", "run.dir=run", "run.steps=1000000", "run.max_hours=0.5"]
    outcome = run_command(own)
    assert outcome.code == 75
    assert "asked by run.max_hours" in outcome.stdout
    assert outcome.summary("run")["status"] == "preempted"
    assert 5 <= outcome.summary("run")["steps"] < 20


def interrupts(model: nn.Module, batch: Any) -> Tensor:
    raise KeyboardInterrupt


def test_a_second_ctrl_c_leaves_at_once(here: Path, run_command: command) -> None:
    """An end with 1 and a word, in the middle of a step."""
    own = [*DIGITS, "objective=custom", "objective._target_=test_stop.interrupts", "run.steps=10", "run.dir=run"]
    outcome = run_command(own)
    assert outcome.code == 1
    assert "error: KeyboardInterrupt" in outcome.stderr


# ---------------------------------------------------------------------------------------------------- groups, processes


def test_when_one_process_is_asked_all_of_them_stop(tmp_path: Path) -> None:
    """At the same update, with one state on disk."""
    place, words = tmp_path / "place", ["-m", "resilient_train", *DIGITS, *DISK, "accelerate.cpu=true", "run.steps=80"]
    words += ["run.dir=stopped"]
    run_dir = place / "stopped"
    with held_at(place, 60) as let_go, Group(place, 2, *words) as started:
        started.until(lambda: stand(run_dir).tick >= 30)
        started.ranks[1].strike(signal.SIGTERM)
        let_go()
        assert started.wait().codes == [75, 75]
    done = summary(run_dir)
    assert (done["status"], done["exit_code"]) == ("preempted", 75)
    assert done["steps_lost"] <= 1
    assert done["steps"] in checkpoints(run_dir)
    for log in ("train.log", "train.rank1.log"):
        assert f"stopped at step {done['steps']}, asked by" in (run_dir / log).read_text()
