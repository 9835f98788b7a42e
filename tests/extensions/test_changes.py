"""A healthy run that changes on purpose continues, at the cost of one rewind at most; damage of that size is undone."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import accused, mse
from kills import summary
from torch import Tensor, nn
from torch.nn import functional as F

from resilient_train import GaveUp, Guard
from resilient_train.ground.types import Incident
from resilient_train.ground.wording import say

STEPS, CHANGE, ROWS = 260, 160, 512

Loss = Callable[[nn.Module, Any, int], Tensor]
After = Callable[[nn.Module, int], None]


def rows(seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(seed)
    inputs = torch.randn(ROWS, 8, generator=made)
    targets = torch.tanh(inputs @ torch.randn(8, 3, generator=made))
    return list(zip(inputs, targets + 0.1 * torch.randn(ROWS, 3, generator=made), strict=True))


def fitted(model: nn.Module, batch: Any, step: int) -> Tensor:
    return mse(model, batch)


def with_penalty(model: nn.Module, batch: Any, step: int) -> Tensor:
    """An auxiliary loss is switched on."""
    output = model(batch[0])
    penalty = F.mse_loss(output.roll(1, 1), batch[1]) if step >= CHANGE else torch.zeros(())
    return F.mse_loss(output, batch[1]) + penalty


def other_loss(model: nn.Module, batch: Any, step: int) -> Tensor:
    return 30 * F.l1_loss(model(batch[0]), batch[1]) if step >= CHANGE else fitted(model, batch, step)


def noisier(model: nn.Module, batch: Any, step: int) -> Tensor:
    noise = torch.randn_like(batch[0]) if step >= CHANGE else 0.0
    return F.mse_loss(model(batch[0] + noise), batch[1])


class Run:
    """A small regression in a loop of its own, with what it does to its model after each update."""

    def __init__(self, run_dir: Path | None, loss: Loss = fitted, *, replays: bool = True, **given: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=given.pop("lr", 5e-3))
        self.loss, self.own_count = loss, itertools.count(1)

        def objective(model: nn.Module, batch: Any) -> Tensor:
            return loss(model, batch, self.guard.attempted_step + 1)

        given = {"data": rows(), "batch_size": 16, "steps": STEPS, "checks": "default", "run_dir": run_dir, **given}
        given |= {"objective": objective} if replays else {}
        self.replays, self.guard = replays, Guard(None, self.model, optimizer, **given)

    def trained(
        self, after: Callable[[nn.Module, int], None] = lambda model, step: None, *, counts: bool = False
    ) -> Run:
        """Train to the end; with `counts` the loop has a counter of its own, which does not go back."""
        for batch in self.guard.batches():
            own = next(self.own_count)
            if self.replays:
                self.guard.step(batch)
            else:
                loss = self.loss(self.model, batch, own if counts else self.guard.attempted_step + 1)
                loss.backward()  # type: ignore[no-untyped-call]
                self.guard.update(loss)
            after(self.model, self.guard.attempted_step)
        self.guard.close()
        return self

    @property
    def incidents(self) -> list[Incident]:
        return self.guard.incidents


@pytest.mark.parametrize(
    ("form", "loss"),
    [
        *(("replayed", loss) for loss in (with_penalty, other_loss)),
        *(("handed over", loss) for loss in (other_loss, noisier)),
        ("counted by the loop", with_penalty),
    ],
)
def test_a_loss_that_changes_on_purpose(loss: Loss, form: str, tmp_path: Path) -> None:
    """It goes on with the configured rate and all samples, costs one rewind at most, and is called well."""
    run = Run(tmp_path / "run", loss, replays=form == "replayed").trained(counts=form == "counted by the loop")
    assert sum(one.rewound_to is not None for one in run.incidents) <= (form != "replayed")
    assert all(f"expect=[{CHANGE}]" in say(one.diagnosis.advice) for one in run.incidents)
    assert not run.guard.samples.skipped.spans
    assert run.guard._controls.knobs.values.lr == 1.0
    assert summary(tmp_path / "run")["verdict"] == "well"


def test_a_loss_that_changed_on_purpose_is_declared(tmp_path: Path) -> None:
    """With `expect` there is neither a rewind nor a note."""
    run = Run(tmp_path / "run", other_loss, replays=False, expect=[CHANGE]).trained()
    assert not run.incidents
    assert run.guard.clock.tick <= STEPS + 1, "at most one update is repeated, with its limit lifted"


def draw_head(model: nn.Module, step: int) -> None:
    if step == CHANGE:
        with torch.no_grad():
            nn.init.normal_(model[2].weight, std=2.0)  # type: ignore[index]


@pytest.mark.parametrize("replays", [True, False])
def test_a_head_that_is_drawn_again_and_again(replays: bool, tmp_path: Path) -> None:
    """Weights that the loop writes again after a rewind are its own, and so is the loss that they have.

    What was done about it is taken back, and costs the next one no strike.
    """

    def draw(model: nn.Module, step: int) -> None:
        if step and step % 100 == 0:
            torch.manual_seed(step)
            model[2].reset_parameters()  # type: ignore[index]

    run = Run(tmp_path / "run", replays=replays, steps=400).trained(draw)
    assert {one.is_accepted for one in run.incidents} == {True}
    knobs = run.guard._controls.knobs.values
    assert knobs.lr == knobs.clip == 1.0
    assert not run.guard.samples.skipped.spans
    assert summary(tmp_path / "run")["verdict"] == "well"


def test_a_head_that_is_drawn_again_is_declared(caplog: Any, monkeypatch: Any) -> None:
    """`expect` covers what the loop writes to the weights, and there is nothing to say."""
    monkeypatch.setattr("resilient_train.ground.wording.log.propagate", True)
    assert not Run(None, replays=False, expect=[CHANGE]).trained(draw_head).incidents
    assert "taken" not in caplog.text


def test_harder_rows_from_a_place_on(tmp_path: Path) -> None:
    """A curriculum: no row is blamed if all that follow are as hard."""
    data = rows()
    for place in range(ROWS // 2, ROWS):
        data[place] = (data[place][0], data[place][1] * 5)
    given: dict[str, Any] = {"data": data, "shuffle": False, "batch_size": 4, "steps": ROWS // 4}
    run = Run(tmp_path / "run", **given).trained()
    assert not accused(run.incidents)
    assert not (tmp_path / "run" / "quarantine.json").exists()


@pytest.mark.parametrize("does_better", [True, False])
def test_weights_that_are_loaded_once(does_better: bool) -> None:
    """Where the loss is far lower since, it was the loop that wrote them. Damage of the same size is undone."""
    good = Run(None, batch_size=64).trained().model.state_dict()
    inputs, targets = (torch.stack(one) for one in zip(*rows(), strict=True))

    def load(model: nn.Module, step: int) -> None:
        if step == 103 and not loaded:
            loaded.append(step)
            sign = 1 if does_better else -1
            model.load_state_dict({name: sign * value for name, value in good.items()})

    loaded: list[int] = []
    run = Run(None, lr=1e-4).trained(load)
    final = F.mse_loss(run.model(inputs), targets).item()
    assert (final < 0.15) == does_better
    assert bool(run.incidents) != does_better


def test_labels_that_rot_are_no_change_on_purpose(tmp_path: Path) -> None:
    """A rewind to the first weights shows their high loss, which is no rise that came again."""

    def rotting(model: nn.Module, batch: Any, step: int) -> Tensor:
        is_wrong = torch.rand(len(batch[0]), 1) < (step - 100) / 300
        return F.mse_loss(model(batch[0]), torch.where(is_wrong, 3 * batch[1].roll(1, 0), batch[1]))

    run = Run(tmp_path / "run", rotting, replays=False, steps=400)
    with contextlib.suppress(GaveUp):
        run.trained()
    assert summary(tmp_path / "run")["verdict"] not in ("well", "recovered")
