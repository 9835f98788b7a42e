"""Exceptions that every batch raises are bugs, which end the run; test_scenarios.py has those that only some raise."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from guarded import SKIP, At, Net, adamw, cross_entropy, handed_over, is_finite, rows, trained
from pairs import Pair
from tasks import BAD, READ, Ends, Running, Scenario, readings, squared
from torch import Tensor
from torch.utils.data import DataLoader

from resilient_train.ground.errors import GaveUp, TrainError
from resilient_train.ground.types import fact
from resilient_train.loop.guard import Guard


def run(loss: Any = squared, bad: tuple[int, ...] = (), **guard: Any) -> Running:
    return Running(Scenario(READ._replace(loss=loss, data=lambda: readings(bad)), Ends(), guard=guard))


def test_a_run_without_a_directory_says_once_how_it_ended(info: pytest.LogCaptureFixture) -> None:
    """What was raised and where, and what became of the run."""
    run(bad=BAD).train()
    messages = [one.getMessage() for one in info.records]
    assert "RuntimeError: index 7 is out of bounds" in info.text
    assert "tasks.py:" in info.text, "the line of the user's that raised"
    assert re.match(r"recovered: \d+ steps, 2 incidents; with run_dir there is a review", messages[-1])


class Raising:
    """An objective that raises in one of its calls, counted from 1, and in all from that one on."""

    def __init__(self, error: BaseException, at: int) -> None:
        self.error, self.at, self.calls = error, at, 0

    def __call__(self, model: Any, batch: Any) -> Tensor:
        self.calls += 1
        if self.calls >= self.at:
            raise self.error
        return squared(model, batch)


@pytest.mark.parametrize("after", [0, 7])
def test_what_every_batch_raises_is_a_bug(after: int) -> None:
    """It ends the run with its own traceback."""
    broken = Raising(KeyError("the bug"), after + 1)
    with pytest.raises(KeyError, match="the bug"):
        run(broken).train()
    assert broken.calls == after + (10 if after else 9)


@pytest.mark.parametrize("policy", ["off", "observe"])
def test_a_policy_without_remedies_lets_exceptions_pass(policy: str) -> None:
    """Nothing would be done about them: the run ends as a plain loop does."""
    with pytest.raises(RuntimeError, match="index 7 is out of bounds"):
        run(bad=BAD, recovery=policy).train()


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0.")]
)
def test_requests_to_end_and_lost_connections_are_no_anomalies(error: BaseException) -> None:
    """They pass at once: other batches would wait for a rank that is gone, and it is no bug of the loss."""
    objective = Raising(error, 7)
    with pytest.raises(type(error)):
        run(objective).train()
    assert objective.calls == 7


# Updates whose loss the loop hands over, and guards with an objective.


def test_a_loop_of_its_own_with_an_objective_is_replayed() -> None:
    """The objective is only for diagnosis. Batches of a loader cannot be fetched again, and need not be."""
    accelerator, model = Accelerator(cpu=True), Net()
    guard = Guard(accelerator, accelerator.prepare(model), adamw(model), data=DataLoader(rows(), batch_size=8),  # type: ignore[arg-type]
                  objective=cross_entropy, recovery=SKIP)  # fmt: skip
    (incident,) = handed_over(guard, At("loss", 20), 30).incidents
    assert (str(incident.diagnosis.cause), incident.diagnosis.advice) == ("transient", fact("passed_on_replay"))


def test_losses_in_turn_have_no_objective() -> None:
    made = Pair(Accelerator(cpu=True), "actor")
    guard = made.guard(steps=9, objective=lambda model, batch: model(batch))
    loss = made.backward("critic", next(guard.batches()))
    with pytest.raises(TrainError, match="leave out objective="):
        guard.update(loss, optimizer=made.optimizers["critic"])


def test_a_scale_that_collapses_is_an_incident() -> None:
    """Gradients that overflow at every scale do not loop in silence: the run ends, and says why.

    Of a loss that is handed over nothing can be replayed.
    """
    torch.manual_seed(0)
    accelerator, model = Accelerator(cpu=True), Net()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=10**6)
    guard = Guard(accelerator, accelerator.prepare(model), adamw(model), data=rows(), batch_size=8)
    with pytest.raises(GaveUp):
        handed_over(guard, At("gradient", *range(10, 2000)), 60)
    assert {str(incident.anomaly.signal) for incident in guard.incidents} == {"scale_collapse"}
    assert guard.clock.tick < 200


def length(model: Any, batch: Any) -> Any:
    """Bring the length of outputs to a value; at zero it has no slope."""
    return ((model(batch[0]).pow(2).sum(1).sqrt() - batch[1]) ** 2).mean()


def length_with_anomaly_mode(model: Any, batch: Any) -> Any:
    torch.autograd.set_detect_anomaly(True)
    return length(model, batch)


@pytest.mark.parametrize("objective", [length_with_anomaly_mode, None], ids=["in the objective", "handed over"])
def test_anomaly_mode_does_not_end_a_run_that_the_gate_protects(objective: Any) -> None:
    """Its NaN is a refused update, diagnosed where that is possible; the mode stays on."""
    torch.manual_seed(0)
    data = [(torch.randn(4) * (row != 20), torch.ones(())) for row in range(64)]
    model = torch.nn.Linear(4, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(None, model, optimizer, data=data, batch_size=8, objective=objective, shuffle=False)
    with torch.autograd.set_detect_anomaly(True):
        if objective is None:
            handed_over(guard, length, 30)
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
