"""recovery=observe: everything is checked, diagnosed and reported, and the run ends as a plain loop does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from command import SAVING, command
from drilled import drill_of
from guarded import Net, adamw, cross_entropy, is_finite, often, rows, trained
from kills import incidents as listed
from kills import kinds, summary
from tables import table

from resilient_train.command import incidents
from resilient_train.core.clip import clip
from resilient_train.core.randomness import Seeds
from resilient_train.durable.trees import sha256
from resilient_train.extensions.drills import BitFlip, HotLr, LossSpike, NanBatch, NanGrad, UpdatePlace
from resilient_train.ground.types import Outcome, fact
from resilient_train.loop.guard import Guard

STEPS, AT = 120, 40
BAD = (17, 99)


def with_nan(*bad: int) -> list[tuple[torch.Tensor, int]]:
    """The rows of `guarded`, some of which hold a NaN."""
    made = rows()
    for row in bad:
        made[row][0][0] = math.nan
    return made


def parts() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, adamw(model)


def plain(faults: list[Any], data: Any) -> Net:
    """A loop without a guard, with the samples, the random numbers and the faults of a guarded one."""
    samples = Guard(None, *parts(), data=data, batch_size=8).samples
    seeds, drill = Seeds(0, 0, torch.device("cpu")), drill_of(*faults)
    model, optimizer = parts()
    for step in range(1, STEPS + 1):
        update = samples.next_update()
        place = UpdatePlace(step, step, 0)
        drill.between_updates(place, model, [optimizer])
        seeds.for_update(update.start)
        loss = drill.on_loss(place, cross_entropy(model, drill.on_batch(place, update.batches[0])))
        loss.backward()  # type: ignore[no-untyped-call]
        weights = list(model.parameters())
        drill.on_gradients(place, weights)
        clip(weights, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * drill.rate_factor(place)
        optimizer.step()
        optimizer.zero_grad()
    return model


def observed(faults: list[Any], data: Any, **more: Any) -> tuple[Guard, Net]:
    model, optimizer = parts()
    more = {"objective": cross_entropy, "steps": STEPS, "drill": drill_of(*faults) if faults else None, **more}
    guard = Guard(None, model, optimizer, data=data, batch_size=8, recovery="observe", clip=1.0, **more)
    trained(guard).close()
    return guard, model


def state(model: Net) -> str:
    return sha256(model.state_dict())


@table(
    ("faults", "bad", "signals", "ends_finite"),
    {
        "healthy": ([], (), [], True),
        "NaN batch": ([NanBatch(at=[AT])], (), ["nonfinite_batch"], False),
        "NaN gradient in the first update": ([NanGrad(at=[1])], (), ["nonfinite_grad"], False),
        "in the last update": ([NanGrad(at=[STEPS])], (), ["nonfinite_grad"], False),
        "three in a row": ([LossSpike(at=[AT, AT + 1, AT + 9], factor=1e6)], (), ["loss_spike"], True),
        "bit flip": ([BitFlip(at=[AT])], (), ["nonfinite_weights"], False),
        "hot rate": ([HotLr(at=[AT], factor=300.0, updates=30)], (), ["divergence"], True),
        "rows with NaN": ([], BAD, ["nonfinite_batch"], False),
    },
)
def test_a_run_ends_as_a_plain_loop_does(
    faults: list[Any], bad: tuple[int, ...], signals: list[str], ends_finite: bool, tmp_path: Path
) -> None:
    """Weights and buffers to the last bit, whatever strikes; incidents are reported, and none counts as recovered."""
    guard, model = observed(faults, with_nan(*bad), run_dir=tmp_path)
    assert state(model) == state(plain(faults, with_nan(*bad)))
    assert is_finite(model) == ends_finite
    assert [str(one.anomaly.signal) for one in guard.incidents] == signals
    assert {one.outcome for one in guard.incidents} <= {Outcome.OBSERVED}
    assert all(one.diagnosis.advice != fact("spike_landed") for one in guard.incidents)  # none of them stayed
    assert (guard.clock.step, guard.clock.tick) == (STEPS, STEPS)
    written = summary(tmp_path)
    assert (written["status"], written["exit_code"], written["steps_lost"]) == ("completed", 0, 0)
    assert written["incidents"]["recovered"] == 0
    assert (written["verdict"] == "observed") == bool(signals)


class Counted:
    """Counts the forwards of a run, those of replays included."""

    calls = 0

    def __call__(self, model: Any, batch: Any) -> torch.Tensor:
        self.calls += 1
        return cross_entropy(model, batch)


def test_weights_with_nan_make_one_incident_and_no_replays(tmp_path: Path) -> None:
    """All losses are NaN from the first update of a bad row on: the others count into its incident."""
    objective = Counted()
    guard, model = observed([], with_nan(BAD[0]), objective=objective, steps=400, run_dir=tmp_path)
    [incident] = guard.incidents
    assert not is_finite(model)
    assert incident.diagnosis.rows == (BAD[0],)
    assert incident.further == 400 - incident.anomaly.step
    assert objective.calls < 400 + 100
    assert len((tmp_path / "journal.jsonl").read_text().splitlines()) < 60
    [told] = listed(tmp_path)
    assert (told["outcome"], told["further"], told["actions"]) == (
        "observed",
        incident.further,
        [{"remedy": "observe"}],
    )


@pytest.mark.parametrize("checks", ["default", "off"])
def test_no_state_after_the_damage_is_verified(checks: str, tmp_path: Path) -> None:
    """The last one is a candidate, next to the newest that was verified before."""
    memory = often(5)
    more = {"checks": checks, "memory": memory, "disk": 5, "verify_after": 5, "run_dir": tmp_path}
    observed([NanGrad(at=[AT])], with_nan(), **more)
    assert kinds(tmp_path)[STEPS] == "candidate"
    assert max(step for step, kind in kinds(tmp_path).items() if kind == "verified") < AT


def test_trouble_that_keeps_returning_is_one_incident_and_after_quiet_a_new_one() -> None:
    """Further anomalies count into the incident until 50 updates were healthy; then the next one is diagnosed."""
    often = [*range(30, 90, 10)]
    guard, _ = observed([LossSpike(at=[*often, 180], factor=1e6)], with_nan(), steps=240)
    assert [(one.anomaly.step, one.further) for one in guard.incidents] == [(30, len(often) - 1), (180, 0)]
    assert all(one.anomaly.landed for one in guard.incidents)


def test_the_command_completes_and_says_that_it_only_observed(
    run_command: command, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command ends with 0 at the planned end, with weights of NaN, and says that it was only observed."""
    run = [*SAVING, "run.dir=run", "run.steps=60", "drill=nan_batch", "drill.at=[30]", "recovery=observe"]
    done = run_command(run)
    assert done.code == 0, done.stderr
    assert "incident 1: observed only; the same fault 30 more times" in done.stdout
    assert "1 incident (1 data), 1 observed only" in done.stdout
    assert "recovered" not in done.stdout
    written = done.summary("run")
    assert (written["status"], written["verdict"], written["steps"]) == ("completed", "observed", 60)
    assert incidents.main(["run"]) == 0
    assert "Observed only" in capsys.readouterr().out
