"""What a library user writes by mistake: refused or said in one line, by the names that the user can write."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import mse, often, trained
from test_plan import rows
from torch import nn

from resilient_train.ground.errors import ConfigError, TrainError
from resilient_train.ground.reader import DiskConfig, MemoryConfig
from resilient_train.loop.guard import Guard

WIDTH = 4
KEY_OF_THE_COMMAND = re.compile(r"\b(accelerate|checkpoint|checks|data|run|tracking)\.[a-z_]+")


def guard_of(model: nn.Module | None = None, build: Any = torch.optim.AdamW, **more: Any) -> Guard:
    torch.manual_seed(0)
    model = model or nn.Linear(WIDTH, 1)
    given = {"data": rows(), "batch_size": 8, "objective": mse, **more}
    return Guard(None, model, build(model.parameters(), lr=1e-2), **given)


# ------------------------------------------------------------------------------------------------------- to resume


def test_a_resume_without_checkpoints_is_refused(tmp_path: Path) -> None:
    """Nothing would be there after a kill but the beginning; a state at the end alone has to be asked for."""
    with pytest.raises(ConfigError, match=r"^resume: needs disk=, such as disk=200: [^\n]*$"):
        guard_of(run_dir=tmp_path / "run", resume=True)
    assert not (tmp_path / "run").exists()
    guard_of(run_dir=tmp_path / "run", resume=True, disk=0).close()


def test_tracking_without_mlflow_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match=r"^tracking: needs the package mlflow: pip install [^\n]*$"):
        guard_of(run_dir=tmp_path / "run", tracking=True)
    assert not (tmp_path / "run").exists()


def test_a_run_that_does_not_fit_any_more_says_how_to_start_another(tmp_path: Path) -> None:
    """By arguments of the guard: a loop has no command line."""
    saving: dict[str, Any] = {"run_dir": tmp_path / "run", "disk": DiskConfig(every=5), "resume": True}
    saving |= {"verify_after": 1, "memory": often(5)}
    first = trained(guard_of(**saving), 12)
    first.leave()
    first.close()
    other = guard_of(nn.Sequential(nn.Linear(WIDTH, 1)), **saving)
    with pytest.raises(
        TrainError, match=r"cannot resume: .*\. resume=False, or another run_dir, starts a new run$"
    ) as no:
        trained(other, 1)
    assert not KEY_OF_THE_COMMAND.search(str(no.value))


def test_snapshots_and_checks_are_named_as_a_loop_gives_them(info: pytest.LogCaptureFixture) -> None:
    """A check is turned off by its settings over those of the default set, and a wrong name is refused."""
    checks = {"replicas": {"every": 0}}
    trained(guard_of(memory=MemoryConfig(every=0, keep=2, max_gib=None), checks=checks), 2)
    assert "no snapshots in memory (memory.every=0): this run cannot rewind" in info.messages
    assert not KEY_OF_THE_COMMAND.search(info.text)
    with pytest.raises(ConfigError, match=r"^checks\.replica=.*did you mean"):
        guard_of(checks={"replica": {"every": 0}})


# ------------------------------------------------------------------------------------------------------- in the loop


def hand_over(guard: Guard, loss_of: Any, steps: int = 20, between: Any = lambda: None) -> None:
    for batch in guard.batches(steps):
        loss = loss_of(batch)
        if loss.requires_grad:
            loss.backward()
        between()
        guard.update(loss)


@pytest.mark.parametrize(
    ("frozen", "loss_of", "why"),
    [
        (True, mse, "all that the optimizer trains are frozen"),
        (False, lambda model, batch: mse(nn.Linear(WIDTH, 1), batch), "was not computed with the guarded model"),
        (False, lambda model, batch: mse(model, batch).detach(), "call loss.backward()"),
    ],
)
def test_a_model_without_gradients_says_which_mistake_is_likely(frozen: bool, loss_of: Any, why: str) -> None:
    """Frozen weights, a loss of another model, and a backward that is missing look the same to the gate."""
    model = nn.Linear(WIDTH, 1).requires_grad_(not frozen)
    with pytest.raises(TrainError, match=rf"^no weight has a gradient: .*{re.escape(why)}[^\n]*$"):
        hand_over(guard_of(model, objective=None), lambda batch: loss_of(model, batch))


def test_an_objective_of_a_frozen_or_another_model_says_so() -> None:
    frozen, other = nn.Linear(WIDTH, 1).requires_grad_(False), nn.Linear(WIDTH, 1)
    with pytest.raises(ConfigError, match=r"without a graph: all weights of the model are frozen"):
        trained(guard_of(frozen), 1)
    with pytest.raises(TrainError, match=r"was not computed with the guarded model"):
        trained(guard_of(objective=lambda model, batch: mse(other, batch)), 1)


# ----------------------------------------------------------------------------------------------------------- the end


def test_an_evaluation_that_is_not_finite_is_not_well(tmp_path: Path, info: pytest.LogCaptureFixture) -> None:
    """No update was bad, and still the result cannot be used."""
    guard = trained(guard_of(run_dir=tmp_path / "run"), 5)
    guard.evaluated({"loss": float("nan")})
    guard.close()
    assert "The evaluation is not finite (loss nan): 5 steps; no incidents." in " ".join(info.messages)
