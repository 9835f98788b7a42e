"""Schedules: rates by step, and torch's schedulers on a shadow of the optimizer."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiplicativeLR, OneCycleLR, SequentialLR, StepLR

from resilient_train.command.build import parameter_groups
from resilient_train.loop.schedule import CurveSchedule, LoopSchedule, ShadowSchedule, constant, cosine, linear


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
    schedule = CurveSchedule([1.0], curve, warmup_steps)
    assert [round(schedule.settings(step)[0]["lr"], 6) for step in range(6)] == expected


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
def test_a_scheduler_goes_back_with_the_run(name: str) -> None:
    """Its state brings back the rates that followed; a warm-up comes before its first step."""
    optimizer = two_groups()
    schedule = ShadowSchedule(SCHEDULERS[name](optimizer), optimizer, warmup_steps=4)
    warm = [schedule.settings(step)[0]["lr"] for step in range(4)]
    assert warm == pytest.approx([warm[-1] * part for part in (0.25, 0.5, 0.75, 1)])
    schedule.settings(9)
    state = torch.utils._pytree.tree_map(lambda value: value, schedule.state_dict())
    first = [schedule.settings(step) for step in range(9, 18)]
    schedule.load_state_dict(state)
    assert [schedule.settings(step) for step in range(9, 18)] == first


def test_a_resumed_run_takes_the_rates_that_it_is_given_now() -> None:
    """What the loop had set counts only for the same rates; older checkpoints, and those of another kind, have none."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.1)
    ran = LoopSchedule(optimizer)
    for rate, then in ((0.1, 0.01), (0.05, 0.05)):
        optimizer.param_groups[0]["lr"] = 0.01
        left = ran.state_dict()
        optimizer.param_groups[0]["lr"] = rate
        resumed = LoopSchedule(optimizer)
        resumed.load_state_dict(left)
        assert resumed.settings(30) == [{"lr": then}]
    optimizer.param_groups[0]["lr"] = 0.1
    shadow = ShadowSchedule(StepLR(optimizer, 10), optimizer)
    shadow.load_state_dict(ran.state_dict())
    assert shadow.settings(25)[0]["lr"] == pytest.approx(0.001)


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
