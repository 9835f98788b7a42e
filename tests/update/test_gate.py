"""The gate: a refused update leaves nothing behind, whatever the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from guarded import Poison, guarded
from torch import nn, optim

from resilient_train.core.gate import DeviceGate, HostGate, gate_of
from resilient_train.core.tree import sha256
from resilient_train.types import NO_LIMIT


class Signed(torch.optim.Optimizer):
    """A class of a user's own, which nobody knows anything about."""

    def __init__(self, params: Iterable[torch.Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                state["seen"] = state.get("seen", 0) + 1
                weight -= group["lr"] * weight.grad.sign()


class Projected(torch.optim.AdamW):
    """A torch class with something of a user's own after it: its base heeds the gate, it does not."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                weight.mul_(0.999)


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    others = [weight for weight in model.parameters() if weight.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01, fused=True)]


def of(kind: Any, **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: kind(model.parameters(), lr=0.01, **options)


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "adam": of(optim.Adam),
    "adam-fused": of(optim.Adam, fused=True),
    "adamw-fused": of(optim.AdamW, fused=True),
    "adamw-amsgrad-fused": of(optim.AdamW, amsgrad=True, fused=True),
    "sgd": of(optim.SGD),
    "sgd-fused": of(optim.SGD, fused=True),
    "sgd-momentum": of(optim.SGD, momentum=0.9),
    "sgd-momentum-fused": of(optim.SGD, momentum=0.9, fused=True),
    "rmsprop": of(optim.RMSprop),
    "adagrad": of(optim.Adagrad),
    "adagrad-fused": of(optim.Adagrad, fused=True),
    "nadam": of(optim.NAdam),
    "adafactor": of(optim.Adafactor),
    "muon+adamw": muon_and_adamw,
    "a user's own": of(Signed),
    "a user's own over a fused one": of(Projected, fused=True),
}


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
    gate = gate_of([optimizer], torch.device("cpu"))
    assert isinstance(gate, DeviceGate)

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
def test_a_loss_of_minus_infinity_is_no_loss(name: str) -> None:
    """It is below every limit; and its gradient may be finite. Told on the host and on the device."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = FUSED[name]([weight])
    gate = DeviceGate(torch.device("cpu"))
    for loss, lands in ((1.0, True), (-torch.inf, False), (-1e30, True)):
        before = weight.detach().clone()
        weight.grad = torch.ones(2)
        gate.step(torch.tensor([loss, 1.0]), [optimizer])
        assert gate.admits(loss, 1.0) == lands
        assert torch.equal(weight, before) != lands


@pytest.mark.parametrize(
    ("name", "how", "before"),
    [
        *((name, "gradient", before) for name in OPTIMIZERS for before in (0, 5)),
        *((name, "batch", 5) for name in ("adamw-fused", "a user's own")),
        *((name, "loss", 0) for name in ("adamw-fused", "a user's own")),
    ],
)
def test_a_poisoned_update_leaves_nothing_behind(name: str, before: int, how: str) -> None:
    """Weights, moments, counters, schedule, running statistics, random numbers: all as it was; the first step, too."""
    poison = Poison(how)
    guard = guarded(OPTIMIZERS[name], poison)
    batches = guard.batches(steps=100)
    batch = next(batches)
    for _ in range(before):
        assert guard.step(batch)
        guard.settle()
        digest = guard.state.sha256()
        batch = next(batches)
    if before == 0:
        digest = sha256(guard._ring.snapshots[0].parts)  # taken as the run began
    poison.strikes = True
    guard.step(batch)
    assert not guard.settle()
    assert guard.state.sha256() == digest
    assert [str(one.anomaly.signal) for one in guard.incidents] == [
        {"batch": "nonfinite_loss", "loss": "nonfinite_loss", "gradient": "nonfinite_grad"}[how]
    ]
