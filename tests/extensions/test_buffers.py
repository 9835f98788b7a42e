"""State besides the weights: buffers and attributes that a forward writes, and what the loop keeps."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import cross_entropy, handed_over, often
from guarded import trained as run
from tasks import Ends, Running, Scenario, centred
from test_kept import Holder
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from resilient_train.ground.types import Signal, fact
from resilient_train.loop.guard import Guard


class Sometimes(nn.Module):
    """Breaks in its 20th forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 1), 0
        self.counts: list[int] = []

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += 1
        self.counts.append(self.calls)
        made = self.layer(rows)
        if self.calls == 20:
            made = made / torch.zeros_like(made)
        loss: Tensor = made.square().mean()
        return loss


def test_a_forward_of_a_diagnosis_does_not_count() -> None:
    """The faulty one is seen with the very count that it had, and counts itself: the run goes on with the next."""
    torch.manual_seed(0)
    rows, model = [torch.randn(6) for _ in range(64)], Sometimes()
    guard = Guard(None, model, torch.optim.SGD(model.parameters(), lr=0.01), data=rows, batch_size=8, steps=40,
                  objective=lambda model, batch: model(batch))  # fmt: skip
    found = [one.diagnosis for one in run(guard).incidents]
    assert [(one.cause, one.culprit and one.culprit.op) for one in found] == [("operation", "div")]
    assert (model.calls >= 41, model.counts.count(20) > 3) == (True, True)


@pytest.mark.parametrize("objective", [None, lambda model, batch: model(*batch).detach()], ids=["none", "for replays"])
def test_a_loop_that_makes_its_losses_itself_skips_what_spoils_a_buffer(objective: Any) -> None:
    """No update lands any more that leaves NaN in that buffer, whether or not it can be replayed."""
    ladders = {"default": [["rewind"]], "unknown": [{"do": ["skip"], "strikes": None}]}
    row = Scenario(centred("made again"), Ends())
    guard = Running(
        row._replace(hands_over=True, guard={"objective": objective, "recovery": {"ladders": ladders}})
    ).guard
    handed_over(guard, lambda model, batch: model(*batch))
    assert [incident.decision.actions[0].remedy for incident in guard.incidents][:1] == ["rewind"]
    assert len(guard.incidents) > 1
    assert {incident.anomaly.signal for incident in guard.incidents[1:]} == {"nonfinite_loss"}
    assert bool(guard.state.model.get_buffer("centres").isfinite().all())


def spoiled(run_dir: Path | None, spoil: Callable[[Any, int], None], item: Any, steps: int = 40) -> Guard:
    model, x = nn.Linear(6, 2), torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    on_disk: dict[str, Any] = {"run_dir": run_dir, "disk": 2} if run_dir else {}
    guard = Guard(
        *(None, model, torch.optim.SGD(model.parameters(), lr=0.01)),
        data=TensorDataset(x, (x.sum(1) > 0).long()),
        batch_size=8,
        steps=steps,
        objective=cross_entropy,
        memory=often(2),
        verify_after=1,
        **on_disk,
    )
    guard.keep(item=item)
    for batch in guard.batches():
        if guard.step(batch):
            spoil(item, guard.clock.step)
    guard.close()
    return guard


def test_an_average_that_is_damaged_once_is_as_if_it_had_not_been(tmp_path: Path) -> None:
    """The scan of the weights sees it, the run rewinds, and no checkpoint has it."""

    def average(strikes: list[int]) -> Callable[[Any, int], None]:
        def update(item: Any, step: int) -> None:
            item.state["mean"].lerp_(torch.full((3,), float(step)), 0.1)
            if step in strikes:
                strikes.remove(step)
                item.state["mean"][1] = math.nan

        return update

    sound, hurt = Holder({"mean": torch.zeros(3)}), Holder({"mean": torch.zeros(3)})
    spoiled(None, average([]), sound)
    guard = spoiled(tmp_path / "run", average([23]), hurt)
    assert [str(one.diagnosis.cause) for one in guard.incidents] == ["corruption"]
    assert guard.incidents[0].anomaly.evidence[0]["name"] == "kept.*"
    assert guard.incidents[0].diagnosis.advice == fact(Signal.NONFINITE_WEIGHTS)
    assert hurt.state["mean"].tolist() == sound.state["mean"].tolist()
    for tree in tmp_path.glob("run/checkpoints/*/tensors.safetensors"):
        from safetensors.torch import load_file

        assert all(one.isfinite().all() for one in load_file(tree).values())


@pytest.mark.parametrize("name", ["lowest", "meter"])
def test_what_is_not_finite_on_purpose_ends_no_healthy_run(name: str) -> None:
    """A minimum that is infinite whenever it is reset makes no incident; one that turns NaN is accepted in the end."""
    import torchmetrics

    def lowest(item: Any, step: int) -> None:
        item.reset() if step % 10 == 0 else item.update(torch.tensor(float(-step)))

    def meter(item: Any, step: int) -> None:
        item.state["value"].fill_(math.nan if step >= 23 else step)

    item = torchmetrics.MinMetric() if name == "lowest" else Holder({"value": torch.zeros(2)})
    guard = spoiled(None, lowest if name == "lowest" else meter, item, steps=60)
    assert guard.clock.step == 60
    assert len(guard.incidents) == {"lowest": 0, "meter": 2}[name]
    assert guard._ring.newest_verified().step >= 44  # type: ignore[union-attr]
