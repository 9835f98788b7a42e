"""The flow of updates through the guard: verdicts an update late, repeats, overflows, rewinds."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from guarded import SKIP, At, Net, Poison, adamw, guarded, handed_over, is_finite, often, rows, trained
from torch.utils.data import DataLoader

from resilient_train.core.ring import snapshot_to_drop
from resilient_train.extensions.diagnosis.verdict import TRANSIENT
from resilient_train.ground.errors import GaveUp
from resilient_train.ground.reader import MemoryConfig
from resilient_train.ground.types import fact
from resilient_train.loop.guard import Guard
from resilient_train.loop.settings import named


def signals(guard: Guard) -> list[str]:
    return [str(incident.anomaly.signal) for incident in guard.incidents]


def test_an_update_that_was_refused_by_mistake_is_repeated_and_lands() -> None:
    """Where a change is declared, the limit is no reason to lose an update: the very same one lands."""
    checks = named("default")
    checks.expect = [50]
    guard = trained(guarded(adamw, At("spike", 50), checks=checks, recovery=SKIP), 60)
    assert guard.incidents == []
    assert guard.clock.step == 60
    assert guard.clock.tick in (60, 61)
    assert guard.samples.position == 60 * 8


def test_a_loop_of_its_own_with_an_objective_is_replayed() -> None:
    """The objective is only for diagnosis. Batches of a loader cannot be fetched again, and need not be."""
    accelerator, model = Accelerator(cpu=True), Net()
    guard = Guard(accelerator, accelerator.prepare(model), adamw(model), data=DataLoader(rows(), batch_size=8),  # type: ignore[arg-type]
                  objective=Poison("none"), recovery=SKIP)  # fmt: skip
    (incident,) = handed_over(guard, At("loss", 20), 30).incidents
    assert (str(incident.diagnosis.cause), incident.diagnosis.advice) == ("transient", TRANSIENT.advice)


def scaled(
    objective: Any, recovery: Any = SKIP, init_scale: float = 2.0**16, model: Any = Net, data: Any = None, size: int = 8
) -> Guard:
    """Loss scaling on a CPU: the scaler's arithmetic is the same there."""
    torch.manual_seed(0)
    accelerator, model = Accelerator(cpu=True), model()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=10**6)
    return Guard(accelerator, accelerator.prepare(model), adamw(model), data=data or rows(), batch_size=size,
                 objective=objective, recovery=recovery)  # fmt: skip


def test_a_scale_that_collapses_is_an_incident() -> None:
    """Gradients that overflow at every scale do not loop in silence: the run ends, and says why.

    Of a loss that is handed over nothing can be replayed.
    """
    guard, objective = scaled(None, recovery="balanced"), At("gradient", *range(10, 2000))
    with pytest.raises(GaveUp):
        handed_over(guard, objective, 60)
    assert set(signals(guard)) == {"scale_collapse"}
    assert guard.clock.tick < 200


def test_rows_that_end_the_process_are_put_away_within_the_budget() -> None:
    guard = guarded(adamw, At("none"), recovery={**SKIP, "budget": {"rows": 1}})
    for row in (5, 6):
        guard._controls.quarantine_after_crash([row], fact("died_twice", rows=[row]), row)
    assert sorted(guard._controls.quarantined.rows) == [5]


@pytest.mark.parametrize(
    ("steps", "verified", "now", "expected"),
    [
        ([0, 25, 50], [True, True, True], 75, 0),  # three steps of the same size: the oldest
        ([0, 25, 50], [True, True, False], 75, 0),  # never a candidate, nor the newest proven one
        ([50], [True], 75, None),
        ([25, 50], [True, False], 75, None),
        ([0, 300, 350, 375], [True, True, True, True], 400, 2),  # its neighbours are closest in age
        ([0, 75, 150, 175], [True] * 4, 225, 0),  # with four an early one does not stay
    ],
)
def test_which_snapshot_makes_room(steps: list[int], verified: list[bool], now: int, expected: int | None) -> None:
    """Candidates and the newest proven one stay; ages spread out."""
    assert snapshot_to_drop(verified, steps, now) == expected


def test_one_of_five_snapshots_is_always_of_the_first_quarter() -> None:
    steps: list[int] = []
    for now in range(0, 3000, 25):
        while len(steps) >= 5:
            del steps[snapshot_to_drop([step + 20 <= now for step in steps], steps, now) or 0]
        steps.append(now)
        assert 4 * steps[0] <= now


def test_a_snapshot_that_is_not_proven_yet_is_nothing_to_go_back_to() -> None:
    guard = trained(guarded(adamw, At("none"), memory=often(5)), 12)
    assert [one.step for one in guard._ring.snapshots if not one.verified] == [5, 10]
    assert [one.step for one in guard._ring.verified_until(guard.clock.step)] == [0]


def test_the_verdict_is_in_before_the_next_update_lands() -> None:
    """With a fused optimizer the verdict comes an update late, and what was begun meanwhile does not land."""
    guard = guarded(adamw, At("gradient", 5))
    landed = [bool(guard.step(batch)) for batch in guard.batches(8)]
    assert landed.count(False) == 1
    assert landed.index(False) == 5  # the sixth was begun on the strength of the fifth
    assert guard.clock.step == 8


def length(model: Any, batch: Any) -> Any:
    """Bring the length of outputs to a value; at zero it has no slope."""
    return ((model(batch[0]).pow(2).sum(1).sqrt() - batch[1]) ** 2).mean()


def length_with_anomaly_mode(model: Any, batch: Any) -> Any:
    torch.autograd.set_detect_anomaly(True)
    return length(model, batch)


def length_around_backward(model: Any, batch: Any) -> Any:
    """Leave the mode on with its check, as a context around forward and backward has it."""
    torch.autograd.set_detect_anomaly(True, check_nan=True).__enter__()
    return length(model, batch)


@pytest.mark.parametrize("where", ["in the objective", "handed over", "in the loop"])
def test_anomaly_mode_does_not_end_a_run_that_the_gate_protects(
    where: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its NaN is a refused update, diagnosed where that is possible; the mode stays on, once called costly."""
    monkeypatch.setattr(logging.getLogger("resilient_train"), "propagate", True)
    torch.manual_seed(0)
    rows = [(torch.randn(4) * (row != 20), torch.ones(())) for row in range(64)]
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 3, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    objective = {"in the objective": length_with_anomaly_mode}.get(where)
    guard = Guard(accelerator, model, optimizer, data=rows, batch_size=8, objective=objective, shuffle=False)
    with torch.autograd.set_detect_anomaly(True):
        if objective is None:
            handed_over(guard, length_around_backward if where == "in the loop" else length, 30)
        else:
            trained(guard, 30)
        assert torch.is_anomaly_enabled()
        assert torch.is_anomaly_check_nan_enabled()
        guard.close()
    assert guard.clock.step == 30
    assert is_finite(guard.state.model)
    found = guard.incidents[0]
    assert found.anomaly.signal == "nonfinite_grad"
    if objective is not None:
        assert found.diagnosis.cause == "operation"
        assert found.diagnosis.culprit is not None
        assert (found.diagnosis.culprit.op, found.diagnosis.culprit.file) == ("sqrt", __file__)
    assert sum("anomaly mode is on" in one.getMessage() for one in caplog.records) == 1


def test_a_snapshot_survives_a_loop_that_is_left_and_entered_again() -> None:
    """Left with a batch in hand, right after a snapshot was taken: that one is verified in its time."""
    guard = guarded(adamw, At("none"), memory=MemoryConfig(every=5, keep=3, max_gib=None))
    for batch in guard.batches(200):
        if guard.attempted_step == 10:
            break
        guard.step(batch)
    for batch in guard.batches(40):
        guard.step(batch)
    guard.settle()
    assert all(held.verified for held in guard._ring.snapshots if held.step <= 15)
    assert all(held.checks_state is not None for held in guard._ring.snapshots if held.step < guard.clock.step)
