"""The gate: which updates it admits, and what it makes of state that a step has yet to create."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from resilient_train.core.gate import DeviceGate, HostGate
from resilient_train.ground.types import NO_LIMIT

FUSED: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, fused=True),
    "sgd-momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.1, fused=True),
}


@pytest.mark.parametrize("name", FUSED)
def test_a_refused_first_step_of_a_weight_that_thaws_makes_no_state(name: str) -> None:
    """While another one freezes, as well; the host waits only as long as a weight's state has to be made."""
    frozen, thawed = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = FUSED[name]([frozen, thawed])
    gate = DeviceGate(torch.device("cpu"))

    def step(weight: nn.Parameter, loss: float) -> bool:
        frozen.grad = thawed.grad = None
        weight.grad = torch.ones(2)
        return gate.step(torch.tensor([loss, 1.0]), [optimizer]) is not None

    assert step(frozen, torch.nan)
    assert not optimizer.state
    assert [step(frozen, 1.0) for _ in range(3)] == [True, False, False]
    assert step(thawed, torch.nan)
    assert not optimizer.state.get(thawed)
    assert thawed.tolist() == [1, 1]
    assert [step(weight, 1.0) for weight in (thawed, thawed, frozen, thawed)] == [True, False, False, False]
    optimizer.state.clear()
    assert step(thawed, 1.0) == (name != "sgd")


def test_no_norm_passes_whose_square_is_infinite() -> None:
    """Without a limit, too: Adam's second moments would never come back."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    gate = HostGate(torch.device("cpu"))
    gate.limit(NO_LIMIT, NO_LIMIT)
    for norm in (1e20, torch.inf, torch.nan):
        weight.grad = torch.ones(2)
        gate.step(torch.tensor([1.0, norm]), [optimizer])
        assert weight.tolist() == [1, 1]
        assert not gate.admits(1.0, norm)


@pytest.mark.parametrize("name", FUSED)
def test_an_infinite_loss_is_no_loss(name: str) -> None:
    """Below every limit, or above: and its gradient may be finite. Told on the host and on the device."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = FUSED[name]([weight])
    gate = DeviceGate(torch.device("cpu"))
    for loss, lands in ((1.0, True), (-torch.inf, False), (torch.inf, False), (torch.nan, False), (-1e30, True)):
        before = weight.detach().clone()
        weight.grad = torch.ones(2)
        gate.step(torch.tensor([loss, 1.0]), [optimizer])
        assert gate.admits(loss, 1.0) == lands
        assert torch.equal(weight, before) != lands
