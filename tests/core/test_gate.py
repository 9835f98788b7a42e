"""The gates: which updates they admit, what a first step creates in them, and what ranks agree on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from resilient_train.core.gate import Agreement, DeviceGate, HostGate
from resilient_train.core.mark import Mark
from resilient_train.core.transaction import Transaction, Update
from resilient_train.core.updater import Attempt
from resilient_train.ground.types import NO_LIMIT, Vitals

CPU = torch.device("cpu")
INF, NAN = math.inf, math.nan

FUSED: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd-momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.1, fused=True),
}


@pytest.mark.parametrize("name", FUSED)
def test_a_refused_first_step_of_a_weight_that_thaws_makes_no_state(name: str) -> None:
    """While another one freezes, as well; the host waits only as long as a weight's state has to be made."""
    frozen, thawed = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = FUSED[name]([frozen, thawed])
    gate = DeviceGate(CPU)

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
    assert step(thawed, 1.0)


def test_no_norm_passes_whose_square_is_infinite() -> None:
    """Without a limit, too: Adam's second moments would never recover."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    gate = HostGate(CPU)
    gate.limit(NO_LIMIT, NO_LIMIT)
    for norm in (1e20, torch.inf, torch.nan):
        weight.grad = torch.ones(2)
        gate.step(torch.tensor([1.0, norm]), [optimizer])
        assert weight.tolist() == [1, 1]
        assert not gate.admits(1.0, norm)


def heard(rows: Sequence[Sequence[float]]) -> Vitals:
    """What the last rank hears; `rows` are loss and norm of each."""

    def gathered(mine: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.tensor([[*row[:2], 0.0] for row in rows[:-1]]), mine[None]])

    numbers, table = Agreement(gathered, CPU).reduce(torch.tensor(rows[-1]))
    assert table is not None
    limits = (1e30, 1e30)
    update = Transaction(Update(0, 8, []), 1, 1, Mark())
    update.send(Attempt(numbers[0], numbers, table, None, [{"lr": 0.1}], False, 1.0, None), limits)
    return update.read(0, has_scale=False)


@pytest.mark.parametrize(
    ("rows", "loss", "norm", "ranks"),
    [
        ([[1, 5], [2, 5], [6, 7]], 3, 7, ()),
        ([[1, 5], [NAN, NAN], [6, NAN]], NAN, NAN, (1,)),
        ([[1, NAN], [2, NAN], [NAN, NAN]], NAN, NAN, (2,)),  # the NaN of one gradient is on all ranks: its loss tells
        ([[1, 5], [INF, 5], [6, 5]], INF, 5, (1,)),
        ([[1, 5], [2, NAN], [6, 5]], 3, NAN, (1,)),
        ([[1, NAN], [2, NAN], [6, NAN]], 3, NAN, ()),
    ],
)
def test_one_verdict_of_all_ranks(rows: list[list[float]], loss: float, norm: float, ranks: tuple[int, ...]) -> None:
    """The mean loss and the largest norm; a NaN of one is everybody's, and its rank is named."""
    vitals = heard(rows)
    assert (vitals.loss, vitals.grad_norm) == pytest.approx((loss, norm), nan_ok=True)
    assert vitals.ranks == ranks
