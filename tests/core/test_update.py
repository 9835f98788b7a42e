"""What an update does to the weights: clipping, and rates that are derived from schedule and knobs."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import get_total_norm

from resilient_train.core.clip import Clipper, clip, norm_limit
from resilient_train.core.mark import Marks
from resilient_train.core.updater import Attempt, Updater
from resilient_train.ground.errors import TrainError
from resilient_train.ground.reader import ClipConfig
from resilient_train.loop.hooks import TrainersClipper
from resilient_train.loop.schedule import CurveSchedule, constant

CPU = torch.device("cpu")


def gradients(*values: float) -> list[nn.Parameter]:
    weights = [nn.Parameter(torch.zeros(())) for _ in values]
    for weight, value in zip(weights, values, strict=True):
        weight.grad = torch.tensor(value)
    return [*weights, nn.Parameter(torch.zeros(3))]  # the last one has none


@pytest.mark.parametrize(
    ("config", "tightened", "usual", "limit", "expected"),
    [
        (ClipConfig(None, None), 1.0, None, None, [3, 4]),
        (ClipConfig(10.0, None), 1.0, None, 10.0, [3, 4]),
        (ClipConfig(2.5, None), 1.0, None, 2.5, [1.5, 2]),
        (ClipConfig(None, 3.5), 1.0, None, None, [3, 3.5]),
        (ClipConfig(2.5, 1.75), 1.0, None, 2.5, [1.5, 1.75]),  # by norm first
        (ClipConfig(2.5, None), 0.5, None, 1.25, [0.75, 1]),
        (ClipConfig(None, None), 0.5, 2.0, 1.0, [0.6, 0.8]),
        (ClipConfig(None, None), 0.5, None, None, [3, 4]),  # nothing to start from
        (ClipConfig(None, None), 1.0, 2.0, None, [3, 4]),
    ],
)
@pytest.mark.parametrize("measured", [False, True])
def test_clipping(
    config: ClipConfig,
    tightened: float,
    usual: float | None,
    limit: float | None,
    expected: list[float],
    measured: bool,
) -> None:
    """By norm and by value; tightened by a factor of what is configured, or usual where nothing is.

    In the same way behind a trainer. The norm that is returned is the one from before.
    """
    weights = gradients(3.0, 4.0)
    max_norm = norm_limit(config.max_norm, tightened, usual)
    assert max_norm == pytest.approx(limit)
    if measured and config.max_value is None:  # a trainer clips by value itself
        trainers = TrainersClipper(config)
        trainers.norm = clip(weights, config.max_norm)
        norm = trainers.clip(weights, max_norm, 1.0)
    else:
        norm = clip(weights, max_norm, config.max_value)
    assert norm.item() == 5
    assert [weight.grad.item() for weight in weights if weight.grad is not None] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_norm_is_torchs_own(dtype: torch.dtype) -> None:
    """In float32 and in doubles but for the last bit; what is coarser is measured in float32."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (3, 100, 7)]
    for weight in weights:
        weight.grad = torch.randn(weight.shape).to(dtype)
    measured_in = dtype if dtype.itemsize > 2 else torch.float32
    expected = get_total_norm([weight.grad.to(measured_in, copy=True) for weight in weights if weight.grad is not None])
    norm = clip(weights, 0.5)
    torch.testing.assert_close(norm, expected, rtol=torch.finfo(dtype).eps if norm.dtype == dtype else 1e-6, atol=0)
    clipped = get_total_norm([weight.grad.double() for weight in weights if weight.grad is not None])
    assert clipped.item() == pytest.approx(0.5, rel=1e-4 if dtype.itemsize > 2 else 1e-2)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((3e25, 4e25), 5e25),
        ((3e38, 3e38), math.inf),  # beyond float32 altogether
        ((3e25, math.inf), math.inf),
        ((3e25, math.nan), math.nan),
    ],
)
def test_a_norm_is_infinite_only_where_a_gradient_is(values: tuple[float, float], expected: float) -> None:
    """Squares that overflow are no gradients that are not finite."""
    weights = gradients(*values)
    norm = clip(weights)
    assert norm.item() == pytest.approx(expected, nan_ok=True)
    assert norm.dtype is torch.float32


@pytest.mark.parametrize(("max_norm", "max_value"), [(None, None), (1.0, None), (None, 0.1), (1.0, 0.1)])
def test_sparse_gradients_are_clipped_as_dense_ones(max_norm: float | None, max_value: float | None) -> None:
    """A row that occurs twice counts as its sum."""
    clipped = []
    for sparse in (False, True):
        torch.manual_seed(0)
        table, head = nn.Embedding(9, 4, sparse=sparse), nn.Linear(4, 1)
        (3 * head(table(torch.tensor([1, 5, 1, 7])))).square().sum().backward()
        weights = [*table.parameters(), *head.parameters()]
        norm = clip(weights, max_norm, max_value)
        grads = [weight.grad for weight in weights if weight.grad is not None]
        assert grads[0].is_sparse == sparse
        clipped.append([norm, *(grad.to_dense() for grad in grads)])
    torch.testing.assert_close(clipped[1], clipped[0])


def constant_updater(optimizer: torch.optim.Optimizer, gather: Any = None) -> Updater:
    rates = [group["lr"] for group in optimizer.param_groups]
    return Updater(
        [optimizer], [CurveSchedule(rates, constant, 0)], Clipper(ClipConfig(None, None)), gather, device=CPU
    )


def update(updater: Updater, step: int, lr: float = 1.0) -> Attempt:
    for weight in updater.weights:
        weight.grad = torch.ones_like(weight)
    updater.knobs.lr = lr
    return updater.apply(step, torch.zeros(()))


def test_rates_are_derived_and_never_compound() -> None:
    """A knob is a factor of what the schedule says, not of what the group was set to."""
    weight = nn.Parameter(torch.zeros(()))
    updater = constant_updater(torch.optim.SGD([weight], lr=1.0))
    for step in range(3):
        assert update(updater, step, lr=0.5).settings == [{"lr": 0.5}]
        assert weight.grad is None
    assert weight.item() == -1.5


@pytest.mark.parametrize("at", [0, 2])
def test_a_rate_that_the_loop_sets_is_not_overwritten_silently(at: int) -> None:
    """It is an error, at the first update and later; other settings are the loop's own."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(()))], lr=1.0)
    updater = constant_updater(optimizer)
    for step in range(at):
        optimizer.param_groups[0]["weight_decay"] = 0.1 * step
        update(updater, step)
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(
        TrainError,
        match=r"the loop set lr itself, to 0.5 where it was 1",
    ):
        update(updater, at)


def test_a_rate_that_is_set_back_is_no_mistake_of_the_loop() -> None:
    """By an undone attempt, or by a state of the optimizer from before the guard or from another rate."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0, momentum=0.9)
    early = deepcopy(optimizer.state_dict())
    updater = constant_updater(optimizer)
    update(updater, 0)
    late = deepcopy(optimizer.state_dict())
    before = deepcopy(optimizer.state_dict()["param_groups"])
    marks = Marks(nn.Module())
    mark = marks.take()
    marks.fill(mark, optimizer)
    update(updater, 1, 0.5)
    marks.undo(mark)
    assert optimizer.state_dict()["param_groups"] == before
    update(updater, 1, 0.25)
    for state in (late, early):
        optimizer.load_state_dict(state)
        assert update(updater, 1, 0.5).settings[0]["lr"] == 0.5
