"""State that a forward writes besides the weights: buffers that it spoils, and attributes that count its calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from guarded import SKIP, handed_over
from guarded import trained as run
from torch import Tensor, nn
from torch.nn import functional as F

from resilient_train.extensions.scans.modes import Attributes, BufferWatch
from resilient_train.loop.guard import Guard

ROWS, CLASSES = 512, 4


class Centres(nn.Module):
    """Pulls embeddings to the centres of their classes, which now and then become the means of a batch.

    A class without a row in it has the mean of nothing: 0 / 0, which the loss meets in the next forward.
    """

    centres: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 5), nn.Linear(5, CLASSES)
        self.register_buffer("centres", torch.zeros(CLASSES, 5))
        self.how, self.calls = how, 0

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        embedded = self.embed(rows)
        loss: Tensor = F.cross_entropy(self.head(embedded), labels)
        loss = loss + 0.1 * (embedded - self.centres[labels]).square().mean()
        self.calls += self.training
        if self.training and self.calls % 5 == 0:
            of = F.one_hot(labels, CLASSES).float()
            sums, counts = of.T @ embedded.detach(), of.sum(0).unsqueeze(1)
            if self.how == "in place":  # a line of its own for each test: a patch lasts as long as the process
                self.centres.copy_(sums / counts)
            elif self.how == "replaced":
                self.centres = torch.div(sums, counts)
            else:
                self.centres = sums.div(counts)
        return loss


def data() -> list[tuple[Tensor, int]]:
    """Every class is frequent but the last."""
    made = torch.Generator().manual_seed(1)
    return [(torch.randn(6, generator=made), 3 if number % 40 == 0 else number % 3) for number in range(ROWS)]


def guarded(how: str, objective: Any, recovery: Any = "balanced") -> tuple[Guard, Centres]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Centres(how))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    guard = Guard(accelerator, model, optimizer, data=data(), batch_size=32, steps=200, objective=objective,
                  recovery=recovery)  # fmt: skip
    return guard, model


def line_of(text: str) -> int:
    with open(__file__, encoding="utf-8") as source:
        return next(number for number, line in enumerate(source, start=1) if text in line)


@pytest.mark.parametrize(("how", "text"), [("in place", "sums /" + " counts"), ("replaced", "torch.div(sums" + ",")])
def test_the_line_that_spoils_a_buffer_is_found_and_patched(how: str, text: str) -> None:
    """Not in the update whose loss meets it: that is a later one, and by then there is nothing left to see."""
    guard, model = guarded(how, lambda model, batch: model(*batch))
    run(guard)
    causes = [incident.diagnosis.cause for incident in guard.incidents]
    assert causes == ["corruption", "operation"]
    culprit: Any = guard.incidents[1].diagnosis.culprit
    assert (culprit.op, culprit.line) == ("div", line_of(text))
    assert bool(model.centres.isfinite().all())
    assert {incident.outcome for incident in guard.incidents} == {"recovered"}


@pytest.mark.parametrize("objective", [None, lambda model, batch: model(*batch).detach()], ids=["none", "for replays"])
def test_a_loop_that_makes_its_losses_itself_skips_what_spoils_a_buffer(objective: Any) -> None:
    """No update lands any more that leaves NaN in that buffer, whether or not it can be replayed."""
    ladders = {"default": [["rewind"]], "unknown": [{"do": ["skip"], "strikes": None}]}
    guard, model = guarded("made again", objective, recovery={**SKIP, "ladders": {**SKIP["ladders"], **ladders}})
    handed_over(guard, lambda model, batch: model(*batch))
    assert [incident.decision.actions[0].remedy for incident in guard.incidents][:1] == ["rewind"]
    assert len(guard.incidents) > 1
    assert {incident.anomaly.signal for incident in guard.incidents[1:]} == {"nonfinite_loss"}
    assert bool(model.centres.isfinite().all())


def test_a_watched_buffer_changes_no_loss_while_it_is_finite() -> None:
    """Bit for bit, and the gradient neither; complex and empty buffers, and one that was removed, are no trouble."""
    net = nn.BatchNorm1d(3)
    net.add_module("other", nn.BatchNorm1d(3))  # with buffers of the same names
    net.register_buffer("small", torch.zeros(2, dtype=torch.float8_e4m3fn))
    net.register_buffer("wave", torch.zeros(2, dtype=torch.complex64))
    net.register_buffer("empty", torch.zeros(0))
    watch = BufferWatch(net)
    finite = {name: one.clone() for name, one in net.named_buffers()}
    for name in ("running_mean", "wave"):
        net._buffers[name] = torch.full_like(finite[name], torch.nan)
    with watch.across_rewind():
        net._buffers.update({**finite, "running_var": torch.full((3,), torch.inf)})
    with watch.across_rewind():
        pass
    loss = torch.tensor(0.1, requires_grad=True)
    assert watch.spoil(loss).item() == loss.item()  # the variance was healthy before: it is not watched
    for name in ("running_mean", "wave"):
        net._buffers[name] = torch.full_like(finite[name], torch.inf)
        spoiled = watch.spoil(loss)
        assert spoiled.isnan()
        net._buffers[name] = finite[name]
    del net._buffers["wave"]
    watch.spoil(loss).backward()  # type: ignore[no-untyped-call]
    assert loss.grad == 1


class Counting(nn.Module):
    """Counts, remembers, and keeps things that are no state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.calls, self.rate, self.width, self.name = 0, 1.0, 7, "net"

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += 1
        self.rate *= 0.5
        self.hidden: Tensor = rows.detach() * self.calls
        self.attention = rows * self.weight
        return self.attention.sum()


def test_attributes_that_change_with_each_forward_are_known() -> None:
    """Numbers, and tensors by reference; not what holds a graph, and nothing that does not change."""
    net = Counting()
    attributes = Attributes(net)
    for _ in range(5):
        attributes.now()
        net(torch.ones(2))
    before, kept = dict(vars(net)), attributes.now()
    assert {name for _, name, _ in kept} == {"calls", "rate", "hidden"}
    net(torch.full((2,), torch.nan))
    net.width = 8
    attributes.set(kept, only_lost=True)
    assert net.calls == 6
    assert net.hidden is before["hidden"]
    attributes.set(kept)
    assert (net.calls, net.rate, net.width) == (5, 2**-5, 8)


class Carries(nn.Module):
    """A recurrent model keeps its last state; one NaN in it would be in every update from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(6, 8), nn.Linear(8, 1)
        self.state = torch.zeros(8, 8)

    def forward(self, rows: Tensor) -> Tensor:
        state = self.cell(rows, self.state)
        self.state = state.detach()
        loss: Tensor = self.head(state).square().mean()
        return loss


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


def trained(kind: Any, bad: int | None = None) -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    rows = [torch.randn(6) for _ in range(64)]
    if bad is not None:
        rows[bad][2] = torch.nan
    model = kind()
    guard = Guard(None, model, torch.optim.SGD(model.parameters(), lr=0.01), data=rows, batch_size=8, steps=40,
                  objective=lambda model, batch: model(batch))  # fmt: skip
    return model, [one.diagnosis for one in run(guard).incidents]


def test_a_state_that_is_carried_along_is_not_lost_with_one_update() -> None:
    """The row is found, and the state is as if its update had not been made."""
    model, found = trained(Carries, bad=37)
    assert [(one.cause, one.rows) for one in found] == [("data", (37,))]
    assert bool(model.state.isfinite().all())


def test_a_forward_of_a_diagnosis_does_not_count() -> None:
    """The faulty one is seen with the very count that it had, and counts itself: the run goes on with the next."""
    model, found = trained(Sometimes)
    assert [(one.cause, one.culprit.op) for one in found] == [("operation", "div")]
    assert (model.calls >= 41, model.counts.count(20) > 3) == (True, True)
