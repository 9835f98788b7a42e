"""What a library user writes by mistake: refused or said in one line, by the names that the user can write."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from guarded import guard_over, mse, sums, trained
from tables import table
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import DataLoader, TensorDataset
from user_programs import Counting

from resilient_train.ground.errors import ConfigError, TrainError
from resilient_train.ground.reader import DiskConfig
from resilient_train.loop.guard import Guard

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def anything(value: Any) -> Any:
    return value


# ------------------------------------------------------------------------------------------------------ its arguments

OTHER = torch.optim.SGD(nn.Linear(6, 1).parameters())
A_LOADER = DataLoader(TensorDataset(torch.zeros(64, 7)), batch_size=8)
NOT_A_NUMBER = {"ladders": {"default": []}, "budget": {"share": math.nan}}

BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"accelerator": "cpu"}, "accelerator: expected an accelerate.Accelerator, or None for .*, got str"),
    ({"optimizer": OTHER}, "2 of the weights that SGD trains are not the model's"),
    ({"data": TensorDataset(torch.zeros(0, 6))}, "data=TensorDataset: the data set is empty"),
    ({"data": A_LOADER}, "batch_size=16: the loader makes batches of 8 rows itself: leave batch_size out"),
    ({"data": Counting(9), "num_workers": 1}, "data=Counting: an iterable data set .* use num_workers=0"),
    ({"batch_size": None}, "batch_size: missing"),
    ({"batch_size": "8"}, r"batch_size=8: must be a whole number \(at least 1\) or null"),
    ({"batch_size": 0}, r"batch_size=0: must be a whole number \(at least 1\)"),
    ({"accumulate": 2}, "accumulate: is for a loop of plain PyTorch"),
    ({"scaler": torch.amp.GradScaler("cpu")}, "scaler: is for a loop of plain PyTorch"),
    *(({"steps": bad}, "steps=.*: must be a whole number") for bad in (-1, 2.5, True)),
    ({"schedule": StepLR(OTHER, 1)}, "schedule: this StepLR was made for another"),
    ({"recovery": "balance"}, "recovery=balance: .*balanced"),
    ({"recovery": {"ladders": {"default": [["rewnd"]]}}}, r"recovery.ladders.default\[0\]"),
    ({"recovery": {"ladders": {"default": [["json.dumps"]]}}}, "json.dumps: no such remedy; there are rewind"),
    ({"recovery": NOT_A_NUMBER}, r"recovery\.budget\.share=nan"),
    ({"checks": "defualt"}, r"checks=defualt: no such option; there are default"),
    ({"checks": {"replica": {"every": 0}}}, r"^checks\.replica=.*there are limit"),
    ({"clip": "tight"}, "clip=tight: must be a finite number"),
    ({"clip": 0}, r"clip=0: must be a finite number \(greater than 0\)"),
    ({"run_dir": __file__}, "is a file, expected a directory"),
    ({"run_dir": f"{__file__}/run"}, r"run_dir=.*/run: cannot be written: Not a directory"),
    ({"run_dir": "x", "resume": True}, r"^resume: needs disk=, such as disk=200: "),
    (
        {"run_dir": "x", "tracking": "mlruns"},
        "tracking.uri=mlruns: MLflow takes no such address, nor a plain",
    ),
    ({"disk": 10}, "run_dir: is missing"),
    ({"tracking": True}, "run_dir: is missing"),
]


@pytest.mark.parametrize(("given", "line"), BAD_ARGUMENTS, ids=[line[:40] for _, line in BAD_ARGUMENTS])
def test_a_wrong_argument_is_named(given: dict[str, Any], line: str, here: Path) -> None:
    """With what is expected, in one line, before anything runs; without the error behind it, which says less."""
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(net := nn.Linear(6, 1), torch.optim.AdamW(net.parameters()))
    arguments = {"accelerator": accelerator, "model": model, "optimizer": optimizer, "data": sums(256)}
    with pytest.raises((TypeError, ValueError), match=line) as caught:
        Guard(**{**arguments, "batch_size": 16, **given})
    assert "\n" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert not (here / "x").exists()


def test_tracking_without_mlflow_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match=r"^tracking: needs the package mlflow: pip install [^\n]*$"):
        guard_over(sums(), run_dir=tmp_path / "run", tracking=True)
    assert not (tmp_path / "run").exists()


def test_a_run_that_does_not_fit_any_more_says_how_to_start_another(tmp_path: Path) -> None:
    """By a key of the command, and by the argument of the guard."""
    saving: dict[str, Any] = {"objective": mse, "run_dir": tmp_path / "run", "disk": DiskConfig(every=5)}
    first = trained(guard_over(sums(), resume=True, **saving), 12)
    first.leave()
    first.close()
    net = nn.Linear(6, 1)
    other = Guard(None, net, torch.optim.AdamW(net.parameters()), data=sums(), batch_size=16, resume=True, **saving)
    with pytest.raises(TrainError, match=r"cannot resume: .* run\.resume=never \(resume=False\) starts a new run$"):
        trained(other, 1)


# --------------------------------------------------------------------------------------------------------- in the loop


def every_batch(guard: Guard, body: Callable[[Any], Any]) -> None:
    for batch in guard.batches(5):
        body(batch)


def hand_over(guard: Guard, batch: Any) -> torch.Tensor:
    loss = mse(guard.model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    guard.update(loss)
    return loss


def of_another_model(guard: Guard, batch: Any) -> Any:
    return guard.update(anything(mse(nn.Linear(6, 1), batch)))


MISTAKES: dict[str, tuple[Callable[[Guard, Any], Any], type[Exception], str]] = {
    "handed over twice": (
        lambda guard, batch: guard.update(hand_over(guard, batch)),
        TrainError,
        "called twice for one batch: for losses that",
    ),
    "not handed back": (lambda guard, batch: None, TrainError, "a batch was not handed back"),
    "no objective": (lambda guard, batch: guard.step(batch), TypeError, "guard.step needs an objective"),
    "a number": (lambda guard, batch: guard.update(anything(1.0)), TypeError, "not one of type float"),
    "no scalar": (lambda guard, batch: guard.update(batch[0]), TypeError, r"not one of shape \[16, 6\]"),
    "steps itself": (lambda guard, _: guard.state.optimizers[0].step(), TrainError, r"remove optimizer.step\(\)"),
    "steps afterwards": (
        lambda guard, batch: [hand_over(guard, batch), guard.state.optimizers[0].step()],
        TrainError,
        r"remove optimizer.step\(\)",
    ),
    "kept too late": (lambda guard, _: guard.keep(net=nn.Linear(1, 1)), TrainError, "call it before"),
    "kept without a state": (lambda guard, _: guard.keep(x=anything([])), TypeError, "no state_dict and load_state"),
    # Frozen weights, a loss of another model, and a backward that is missing look the same to the gate.
    "frozen": (
        lambda guard, batch: guard.update(mse(guard.model.requires_grad_(False), batch)),
        TrainError,
        r"weights that are frozen \(requires_grad=False\) have none",
    ),
    "of another model": (of_another_model, TrainError, "with a loss that was computed with the guarded model"),
    "no backward": (
        lambda guard, batch: guard.update(mse(guard.model, batch)),
        TrainError,
        r"no weight has a gradient: call loss.backward\(\)",
    ),
}


@table(("body", "kind", "line"), MISTAKES)
def test_a_mistake_in_the_loop_is_told(body: Callable[..., Any], kind: type[Exception], line: str) -> None:
    guard = guard_over(sums(256))
    with pytest.raises(kind, match=line) as caught:
        every_batch(guard, lambda batch: body(guard, batch))
    assert "\n" not in str(caught.value)


@table(
    ("objective", "line"),
    {
        "no scalar": (lambda model, batch: model(batch[0]), r"^objective=.*returned a loss of shape"),
        "frozen": (lambda model, batch: mse(model.requires_grad_(False), batch), "its weights are frozen"),
        "of another model": (lambda model, batch: mse(nn.Linear(6, 1), batch), "computed with the guarded model"),
    },
)
def test_a_bad_objective_is_named_as_it_was_given(objective: Any, line: str) -> None:
    with pytest.raises(TrainError, match=line):
        trained(guard_over(sums(256), objective=objective), 5)


def test_the_scheduler_is_stepped_by_nobody_else() -> None:
    """Twice an update it would be at its end after half of the run."""
    net = nn.Linear(6, 1)
    optimizer = torch.optim.AdamW(net.parameters())
    schedule = CosineAnnealingLR(optimizer, 10)
    guard = Guard(None, net, optimizer, data=sums(256), batch_size=16, schedule=schedule, objective=mse)
    with pytest.raises(TrainError, match=r"remove scheduler.step\(\)"):
        every_batch(guard, lambda batch: [guard.step(batch), anything(schedule).step()])


def test_outside_of_the_loop_a_guard_takes_nothing_and_everybody_may_step() -> None:
    guard = guard_over(sums(), objective=mse)
    with pytest.raises(TrainError, match=r"iterate over guard.batches\(\)"):
        guard.step([torch.zeros(16, 6), torch.zeros(16, 1)])
    trained(guard, 3)
    mse(guard.model, sums()[:16]).backward()  # type: ignore[no-untyped-call]
    guard.state.optimizers[0].step()


# ------------------------------------------------------------------------------------------------------------- the end


def test_an_evaluation_that_is_not_finite_is_not_well(tmp_path: Path, info: pytest.LogCaptureFixture) -> None:
    """No update was bad, and still the result cannot be used."""
    guard = trained(guard_over(sums(), objective=mse, run_dir=tmp_path / "run"), 5)
    guard.evaluated({"loss": float("nan")})
    guard.close()
    assert "The evaluation is not finite (loss nan): 5 steps; no incidents." in " ".join(info.messages)
