"""The same command goes on: behind every kill, and with what has changed since."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from command import MINE, SAVING, Outcome, command
from kills import Nursery, after, at_save, at_tick, checkpoints, incidents, killed, left_overs, summary, taken_up_at
from torch import Tensor, nn

from resilient_train.command import incidents as shown
from resilient_train.core.checks import Checks, Finding
from resilient_train.durable.store import Store
from resilient_train.ground.types import Anomaly, Signal, Vitals

DIGITS = ["model=mlp", "data=digits", "objective=classification", "tracking=none", "run.log_every=100"]
EVERY, MEMORY, PROOF, KEEP = 20, 10, 12, 2
DISK = [f"checkpoint.disk.every={EVERY}", f"checkpoint.memory.every={MEMORY}", f"checkpoint.verify_after={PROOF}"]
DISK += [f"checkpoint.disk.keep={KEEP}"]

OWN = [*MINE, "objective._target_=user_programs.mse_and_more", "schedule=constant", "run.dir=run"]


# ---------------------------------------------------------------------------------------------------------------- kills

# That the very same update is met by two kills in a row is chance here, and would be taken for its fault.
STRUCK = [*DIGITS, *DISK, "run.steps=500", "recovery.crashes=null"]


@pytest.fixture(scope="module")
def unharmed(nursery: Nursery) -> dict[str, Any]:
    """What becomes of the run if nobody kills it."""
    done = nursery.run(*STRUCK, "run.dir=unharmed")
    assert done.code == 0, done.output
    return summary(nursery.place / "unharmed")


def moments(run_dir: Path, seed: int) -> list[tuple[str, Any]]:
    """Five: one on the way into the run, two somewhere in the loop, two within 30 ms of the start of a save."""
    numbers = random.Random(seed)
    found: list[tuple[str, Any]] = []
    for _ in range(2):
        ticks, delay_s = numbers.randint(1, 110), numbers.uniform(0, 0.005)
        found.append((f"{ticks} updates on", lambda begun, t=ticks, d=delay_s: at_tick(run_dir, begun + t, d)))
    seconds = numbers.uniform(0.0, 0.6)
    found.append((f"{seconds:.2f} s after the start", lambda begun: after(seconds)))
    for _ in range(2):
        nth, delay_s = numbers.randint(1, 3), numbers.uniform(0, 0.03)
        moment = f"{1e3 * delay_s:.0f} ms into save {nth}"
        found.append((moment, lambda begun, n=nth, d=delay_s: at_save(run_dir, begun, n, d)))
    return found


def test_whenever_it_is_killed_the_same_command_goes_on(nursery: Nursery, unharmed: dict[str, Any]) -> None:
    """From the newest checkpoint, which is whole, with little lost and nothing left behind; the end is the same."""
    run_dir = nursery.place / "struck"
    resumed = []
    for struck in killed(nursery, [*STRUCK, "run.dir=struck"], run_dir, moments(run_dir, seed=1), hold=480):
        assert struck.unsound == (), f"{struck}: a checkpoint is not what was written"
        assert struck.resumed == struck.newest, f"{struck}: another checkpoint was gone on from"
        assert struck.lost <= EVERY + MEMORY + PROOF + 1 + struck.writing, f"{struck}: lost {struck.lost}"
        assert len(struck.left_overs) <= 2, f"{struck}: one being written, one being removed"
        resumed.append(struck.resumed)
    assert max(resumed) >= EVERY
    done = summary(run_dir)
    for key in ("weights_sha256", "state_sha256", "steps", "final_loss", "eval", "status"):
        assert done[key] == unharmed[key], key
    assert left_overs(run_dir) == []
    usual = {one.name for one in (nursery.place / "unharmed").iterdir()}
    assert {one.name for one in run_dir.iterdir()} == {*usual}
    assert len(checkpoints(run_dir)) <= KEEP + 1
    assert all(one["cause"] == "process" for one in incidents(run_dir))


def diverges(model: nn.Module, batch: Any) -> Tensor:
    """The checks find in update 55 that the run is bad since step 35; as soon as nothing is written, 63 is its last."""
    Checks.judge = _judged  # type: ignore[assignment,method-assign]
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


_judge = Checks.judge


def _judged(checks: Checks, vitals: Vitals) -> Finding:
    if vitals.tick == 63 and Path("deadly").exists():
        while any(thread.name == "checkpoint-writer" for thread in threading.enumerate()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    found = _judge(checks, vitals)
    if vitals.tick == 55:
        return Finding(Anomaly(Signal.DIVERGENCE, vitals.step + 1, vitals.tick, 35))
    return found


def test_a_kill_after_all_checkpoints_were_demoted_costs_what_any_kill_does(nursery: Nursery) -> None:
    """The newest state that is still verified is written at once, and the same command continues from it."""
    run_dir, own = nursery.place / "demoted", [*DIGITS, *DISK, "run.steps=120", "run.dir=demoted", "objective=custom"]
    own += ["checkpoint.disk.every=40", "objective._target_=test_resume.diverges"]
    (nursery.place / "deadly").touch()
    started = nursery.start(*own)
    assert started.wait() == -signal.SIGKILL, started.output
    assert "step-00000040 is demoted" in started.output
    last = nursery.run(*own)
    assert last.code == 0, last.output
    assert taken_up_at(run_dir) == [30]


# ----------------------------------------------------------------------------------------------- what has changed since


CHANGED = {
    "optimizer.lr=0.0005": "optimizer.lr: 0.001 there, 0.0005 here",
    "recovery=skip": "recovery.budget.in_a_row: 50 there, 100 here",
    "checks.jump.sigmas=9": "checks.jump.sigmas: 4 there, 9 here",
    "clip.max_norm=0.5": "clip.max_norm: 1.0 there, 0.5 here",
    "checkpoint.disk.every=7": "checkpoint.disk.every: 200 there, 7 here",
}
FIXED = {
    "model._target_=user_programs.Witness": "model._target_: user_programs.Plain there, user_programs.Witness here",
    "run.seed=1": "run.seed: 0 there, 1 here",
    "+model.width=8": "does not fit this run: ",
    "data.batch_size=8": "an update had 32 samples, and now has 8",
}


def test_what_may_change_is_taken_and_what_cannot_is_refused(here: Path, run_command: command) -> None:
    """Refused with a line that names it, and nothing in the directory changes; `never` begins next to it.

    With what may change the run resumes where it was, says so, and its config.yaml says what holds now.
    """
    assert run_command([*OWN, "run.steps=40"]).code == 0
    written = [one for one in Path("run").rglob("*") if one.suffix in (".json", ".yaml", ".safetensors")]
    before = {one: one.read_bytes() for one in written if one.name != "refused.json"}
    for override, told in FIXED.items():
        refused = run_command([*OWN, "run.steps=50", override])
        assert refused.code == 2, refused.stdout
        (line,) = refused.stderr.strip().splitlines()
        assert told.lower() in line.lower()
    assert run_command([*OWN, "run.steps=5", "run.resume=never"]).code == 0
    assert taken_up_at(Path("run-2")) == []
    assert {one: one.read_bytes() for one in before} == before

    again = run_command([*OWN, "run.steps=50", *CHANGED])
    assert again.code == 0, again.stderr
    for told in ("run.steps: 40 there, 50 here", *CHANGED.values()):
        assert f"changed: {told}" in again.stdout
    assert "lr 5.00e-04" in again.stdout
    assert "lr 1.00e-03" not in again.stdout, "what a checkpoint holds of the old rate does not come back with it"
    assert taken_up_at(Path("run")) == [40]
    once_more = run_command([*OWN, "run.steps=55", *CHANGED])
    assert not any(f"changed: {told}" in once_more.stdout for told in CHANGED.values())


def test_more_steps_are_as_if_they_had_been_asked_for_at_once(here: Path, run_command: command) -> None:
    """Bit for bit, if the schedule does not depend on their number; the last 50 losses count, whoever made them.

    So it is where another run is resumed, named by its directory or by one of its checkpoints: that one stays as it is.
    """
    for what in (str(here), "nowhere"):
        outcome = run_command([*OWN, "run.steps=40", f"run.resume={what}"])
        assert outcome.code in (1, 2)
        assert f"run.resume={what}: " in outcome.stderr + outcome.stdout
    run_command([*OWN, "run.steps=60", "run.dir=at_once"])
    losses = losses_of(run_command([*OWN, "run.steps=25", "run.log_every=1"]))
    before = {one: one.read_bytes() for one in Path("run").rglob("*") if one.is_file()}
    for name, what in (("second", "run"), ("third", "run/checkpoints/step-00000025")):
        own = [*OWN, "run.steps=60", f"run.resume={what}", f"run.dir={name}"]
        outcome = run_command(own)
        assert outcome.code == 0, outcome.stderr
        assert "resumes from step 25" in outcome.stdout
        assert outcome.summary(name)["weights_sha256"] == outcome.summary("at_once")["weights_sha256"]
    assert "is complete" in run_command(own).stdout
    assert {one: one.read_bytes() for one in before} == before

    outcome = run_command([*OWN, "run.steps=60", "run.log_every=1"])
    assert outcome.code == 0, outcome.stderr
    for key in ("weights_sha256", "state_sha256", "final_loss", "ticks", "steps_lost"):
        assert outcome.summary("run")[key] == outcome.summary("at_once")[key], key
    losses += losses_of(outcome)
    assert len(losses) == 60
    assert outcome.summary("run")["final_loss"] == pytest.approx(median(losses[-50:]), rel=1e-3)


def losses_of(outcome: Outcome) -> list[float]:
    """Those that were printed."""
    return [float(line.split("loss ")[1].split()[0]) for line in outcome.stdout.splitlines() if "  loss " in line]


def test_nothing_saved_begins_at_step_0_and_says_so(here: Path, run_command: command) -> None:
    """There was no checkpoint to lose."""
    run_command([*OWN, "run.steps=20", "checkpoint.disk.every=0"])
    again = run_command([*OWN, "run.steps=30", "checkpoint.disk.every=0"])
    assert again.code == 0
    assert "the run there had no checkpoint yet: it begins at step 0 again" in again.stdout
    assert again.summary("run")["steps"] == 30


# ------------------------------------------------------------------------------------------------------------ giving up

HOPELESS = ["drill=nan_batch", f"drill.at={[*range(40, 61)]}".replace(" ", ""), "run.steps=120", "recovery=skip"]
FEW = "recovery.budget.in_a_row=5"


def test_who_gave_up_says_so_again(here: Path, run_command: command) -> None:
    """At once, with the same code, until something changes; with another policy it goes on from its last good."""
    first = run_command([*OWN, *HOPELESS, FEW])
    assert first.code == 3, first.stderr
    left = max(Path("run/checkpoints").iterdir())
    assert str(left) in first.stdout + first.stderr
    before = {one: one.read_bytes() for one in Path("run").rglob("*") if one.is_file() and one.name != ".lock"}
    again = run_command([*OWN, *HOPELESS, FEW])
    assert again.code == 3
    assert "gave up" in again.stderr + again.stdout
    assert str(left) in again.stdout + again.stderr
    assert {one: one.read_bytes() for one in before} == before
    other = run_command([*OWN, *HOPELESS, "recovery.budget.in_a_row=50"])
    assert other.code == 0, other.stderr
    assert taken_up_at(Path("run")) == [int(left.name.removeprefix("step-"))]
    assert "changed: recovery.budget.in_a_row: 5 there, 50 here" in other.stdout
    assert other.summary("run")["steps"] == 120


def test_the_last_good_state_is_one_that_is_verified(
    here: Path, run_command: command, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the last one by its name: that one may be demoted, or damaged."""
    drilled = [*SAVING, "run.steps=40", "run.dir=run", "drill=nan_grad", "drill.at=[33]", "recovery=off"]
    assert run_command(drilled).code == 3
    store = Store(here / "run")
    newest, good, *_ = store.entries()
    store.demote(good.step)
    assert shown.main(["run"]) == 0
    told = capsys.readouterr().out
    again = run_command(drilled)
    assert again.code == 3
    for said in (told, again.stderr + again.stdout):
        assert good.path.name in said
        assert newest.path.name not in said
