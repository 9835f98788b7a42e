"""What an update does to the weights: rates by step, clipping, groups."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiplicativeLR, OneCycleLR, SequentialLR, StepLR

from resilient_train.update.clip import ClipConfig, clip
from resilient_train.update.optimizers import parameter_groups
from resilient_train.update.schedule import CurveSchedule, ShadowSchedule, constant, cosine, linear
from resilient_train.update.updater import Updater

CPU = torch.device("cpu")


def rates(curve: Any, warmup_steps: int, steps: range) -> list[float]:
    schedule = CurveSchedule([1.0], curve, warmup_steps)
    return [round(schedule.settings(step)[0]["lr"], 6) for step in steps]


@pytest.mark.parametrize(
    ("curve", "warmup_steps", "expected"),
    [
        (constant, 0, [1, 1, 1, 1, 1, 1]),
        (constant, 4, [0.25, 0.5, 0.75, 1, 1, 1]),
        (partial(linear, steps=4, final_factor=0.0, warmup_steps=0), 0, [1, 0.75, 0.5, 0.25, 0, 0]),
        (partial(linear, steps=4, final_factor=0.5, warmup_steps=2), 2, [0.5, 1, 1, 0.75, 0.5, 0.5]),
        (partial(cosine, steps=4, final_factor=0.0, warmup_steps=0), 0, [1, 0.853553, 0.5, 0.146447, 0, 0]),
        (partial(cosine, steps=4, final_factor=0.2, warmup_steps=2), 2, [0.5, 1, 1, 0.6, 0.2, 0.2]),
        # A warm-up as long as the run or longer is a warm-up and nothing else.
        (partial(cosine, steps=4, final_factor=0.1, warmup_steps=4), 4, [0.25, 0.5, 0.75, 1, 1, 0.1]),
        (partial(linear, steps=4, final_factor=0.1, warmup_steps=8), 8, [0.125, 0.25, 0.375, 0.5, 0.625, 0.75]),
        (lambda step: 1.0 / (1 + step), 0, [1, 0.5, 0.333333, 0.25, 0.2, 0.166667]),
    ],
)
def test_rates_by_step(curve: Any, warmup_steps: int, expected: list[float]) -> None:
    """The rate of the update after 0, 1, 2, ... accepted ones."""
    assert rates(curve, warmup_steps, range(6)) == expected


@given(st.integers(0, 50), st.integers(1, 100), st.floats(0, 1), st.sampled_from([linear, cosine]))
def test_a_rate_never_exceeds_its_peak_nor_jumps(warmup: int, steps: int, final: float, curve: Any) -> None:
    """From one step to the next it changes by less than the steepest of its parts."""
    schedule = CurveSchedule([1.0], partial(curve, steps=steps, final_factor=final, warmup_steps=warmup), warmup)
    seen = [schedule.settings(step)[0]["lr"] for step in range(steps + warmup + 5)]
    assert all(0 <= rate <= 1 + 1e-9 for rate in seen)
    steepest = max(1 / max(1, warmup), math.pi / 2 / max(1, steps - warmup))
    assert all(abs(b - a) <= steepest + 1e-9 for a, b in pairwise(seen))


SCHEDULERS: dict[str, Any] = {
    "step": lambda optimizer: StepLR(optimizer, 3),
    "chained": lambda optimizer: MultiplicativeLR(optimizer, lambda step: 0.9),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 10),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.5, 30),
    "sequence": lambda optimizer: SequentialLR(
        optimizer, [StepLR(optimizer, 2), MultiplicativeLR(optimizer, lambda step: 0.8)], [6]
    ),
}


def two_groups() -> torch.optim.SGD:
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": lr} for lr in (0.1, 0.2)]
    return torch.optim.SGD(groups, momentum=0.9)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_on_a_shadow_says_what_it_would_do_itself(name: str) -> None:
    """Whatever is done to the real groups between two steps, its rates and momenta are its own."""
    plain = two_groups()
    scheduler = SCHEDULERS[name](plain)
    real = two_groups()
    shadowed = ShadowSchedule(real, SCHEDULERS[name], warmup_steps=0)
    for step in range(20):
        settings = shadowed.settings(step)
        for group, setting in zip(plain.param_groups, settings, strict=True):
            assert {key: group[key] for key in setting} == setting
        for group in real.param_groups:
            group["lr"] *= 0.5
        plain.step()
        scheduler.step()


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_back_with_the_run(name: str) -> None:
    """Its state brings back the rates that followed; a warm-up comes before its first step."""
    schedule = ShadowSchedule(two_groups(), SCHEDULERS[name], warmup_steps=4)
    warm = [schedule.settings(step)[0]["lr"] for step in range(4)]
    assert warm == pytest.approx([warm[-1] * part for part in (0.25, 0.5, 0.75, 1)])
    schedule.settings(9)
    state = torch.utils._pytree.tree_map(lambda value: value, schedule.state_dict())
    first = [schedule.settings(step) for step in range(9, 18)]
    schedule.load_state_dict(state)
    assert [schedule.settings(step) for step in range(9, 18)] == first


def gradients(*values: float) -> list[nn.Parameter]:
    weights = [nn.Parameter(torch.zeros(())) for _ in values]
    for weight, value in zip(weights, values, strict=True):
        weight.grad = torch.tensor(value)
    return [*weights, nn.Parameter(torch.zeros(3))]  # the last one has none


@pytest.mark.parametrize(
    ("max_norm", "max_value", "expected"),
    [
        (None, None, [3, 4]),
        (10.0, None, [3, 4]),
        (2.5, None, [1.5, 2]),
        (None, 3.5, [3, 3.5]),
        (2.5, 1.75, [1.5, 1.75]),
    ],
)
def test_clipping(max_norm: float | None, max_value: float | None, expected: list[float]) -> None:
    """By norm first, then by value; the norm that is told is the one from before."""
    weights = gradients(3.0, 4.0)
    norm, clipped_to = clip(weights, ClipConfig(max_norm, max_value))
    assert (norm.item(), clipped_to) == (5, max_norm)
    assert [weight.grad.item() for weight in weights if weight.grad is not None] == pytest.approx(expected, rel=1e-4)


def test_which_weights_decay() -> None:
    """1d stands for biases and norms, anything else is a pattern; frozen and tied weights appear once at most."""
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 5)})
    model["head"].weight = model["embed"].weight
    model["norm"].bias.requires_grad_(False)

    def exempt(*rules: str) -> list[tuple[int, float | None]]:
        groups = parameter_groups(model, no_decay=rules)
        return [(len(group["params"]), group.get("weight_decay")) for group in groups]

    assert exempt() == [(3, None)]
    assert exempt("1d") == [(1, None), (2, 0.0)]
    assert exempt("embed.*") == [(2, None), (1, 0.0)]
    assert exempt("*") == [(3, 0.0)]


def test_rates_are_derived_and_never_compound() -> None:
    """A rate that somebody scaled in place is what the schedule says at the next update."""
    weight = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    updater = Updater([optimizer], [CurveSchedule([1.0], constant, 0)], ClipConfig(None, None), device=CPU)
    for step in range(3):
        weight.grad = torch.ones(())
        assert updater.apply(step, torch.zeros(())).settings == [[{"lr": 1.0}]]
        assert weight.grad is None
        optimizer.param_groups[0]["lr"] *= 10
    assert weight.item() == -3


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_skips_all_optimizers_and_is_not_accepted(fused: bool) -> None:
    """One scaler, two optimizers: both step on unscaled gradients, or neither does and the scale falls."""
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=1.0, fused=fused) for weight in weights]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    schedules = [CurveSchedule([1.0], constant, 0) for _ in optimizers]
    updater = Updater(optimizers, schedules, ClipConfig(None, None), device=CPU, scaler=scaler)

    def update(*factors: float) -> bool:
        for weight, factor in zip(weights, factors, strict=True):
            scaler.scale((weight * factor).sum()).backward()  # type: ignore[no-untyped-call]
        return bool(updater.apply(0, torch.zeros(())).measured[1].isfinite())

    assert update(1.0, 1.0)
    assert [weight.tolist() for weight in weights] == [[-1, -1], [-1, -1]]
    assert not update(1.0, math.inf)
    assert [weight.tolist() for weight in weights] == [[-1, -1], [-1, -1]]
    assert scaler.get_scale() == 512
    assert all(weight.grad is None for weight in weights)
