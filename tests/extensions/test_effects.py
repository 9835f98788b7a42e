"""What remedies change and lasts: the journal adds up to it, a resume restores it, and a scope undoes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from resilient_train import Guard
from resilient_train.core.clip import clip
from resilient_train.core.controls import Controls
from resilient_train.durable.run_history import RunHistory
from resilient_train.extensions.optimizer_remedies import (
    FurtherRemedies,
    LastingRemedies,
    clip_to_share,
    needs_its_state,
)
from resilient_train.extensions.quarantine import RowsLeftOut
from resilient_train.ground.errors import ConfigError
from resilient_train.ground.types import fact


def controls(build: Any = torch.optim.SGD) -> Controls:
    model, data = nn.Linear(2, 1), TensorDataset(torch.zeros(64, 2), torch.zeros(64, 1))
    guard = Guard(None, model, build(model.parameters(), lr=0.1), data=data, batch_size=4, steps=16)
    return guard._controls


def plain(state: Any) -> Any:
    return json.loads(json.dumps(state))


def test_entries_of_the_journal_add_up_to_the_whole() -> None:
    """Lists are noted by what was added, and whole after something was undone; rows stay in quarantine."""
    mine, history = controls(), RunHistory()
    samples: Any = mine._parts.samples
    before = mine.effects.state_dict()
    made: list[tuple[Callable[[], None], bool]] = [
        (lambda: samples.skip(8, 16), False),  # the first entry of a process has all
        (lambda: mine.extension(RowsLeftOut).add(dict.fromkeys((3, 9), fact("text", text="x is NaN")), 4, 1), True),
        (lambda: samples.skip(40, 48), True),
        (lambda: mine.knobs.turn_lr(0.5), False),
        (lambda: mine.effects.undo_to(before), False),
        (lambda: samples.skip(12, 20), True),
    ]
    for change, has_added in made:
        change()
        changes = plain(mine.effects.changes())
        history.recall({"kind": "effects_changed", "effects": changes})
        assert history.effects == plain(mine.effects.state_dict())
        assert any(changes["added"].get(name) for name in ("skipped", "quarantined")) == has_added
    assert (mine.knobs.lr, samples.skipped) == (1.0, [[12, 20]])
    assert [*mine.extension(RowsLeftOut).rows] == [3, 9]
    again = controls()
    again.effects.load_state_dict(history.effects)
    assert plain(again.effects.state_dict()) == history.effects
    assert again.effects.agreed() == mine.effects.agreed() != controls().effects.agreed()


def test_an_effect_that_nobody_knows_is_not_dropped() -> None:
    mine = controls()
    mine.effects.load_state_dict({"tick": 3, "of_another_version": 0})
    with pytest.raises(ConfigError, match=r"recovery: mine\.warming is in effect in this run"):
        mine.effects.load_state_dict({"tick": 3, "mine.warming": {"steps": 5}})


def test_a_limit_of_updates_falls_with_their_root() -> None:
    """Down to a tenth; a resume has it as it was."""
    lasting, resumed = LastingRemedies(share=0.1), LastingRemedies()
    shares = []
    for _ in range(9001):
        shares.append(lasting.share_now)
        lasting.advance()
    resumed.load_state_dict(json.loads(json.dumps(lasting.state_dict())))
    assert resumed == lasting
    assert [shares[150], shares[-1]] == pytest.approx([0.05, 0.01])
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize(
    ("momentum", "max_norm", "max_value", "size"),
    [(0.0, None, None, 1e18), (0.9, 1e3, None, 1e18), (0.99, None, 50.0, 1e12), (0.9, None, None, 1e-6)],
)
def test_no_gradient_moves_the_weights_by_more_than_a_share(
    momentum: float, max_norm: float | None, max_value: float | None, size: float
) -> None:
    """With momentum that is all that it does in this update and later ones. Small gradients stay as they are."""
    dtype = torch.float32 if size > 1 else torch.float64
    weights = [nn.Parameter(torch.full((8, 4), 0.5, dtype=dtype)), nn.Parameter(torch.zeros(4, dtype=dtype))]
    before = torch.cat([weight.detach().flatten() for weight in weights]).clone()
    optimizer = torch.optim.SGD(weights, lr=0.3, momentum=momentum)
    for weight in weights:
        weight.grad = torch.full_like(weight, size)
    clip(weights, max_norm, max_value)
    clip_to_share(optimizer.param_groups, 0.1)
    for _ in range(5000):
        optimizer.step()
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
    moved = torch.cat([weight.detach().flatten() for weight in weights]) - before
    expected = 0.1 * before.norm() if size > 1 else 0.3 / (1 - momentum) * size * before.numel() ** 0.5
    assert moved.norm().item() == pytest.approx(float(expected), rel=1e-2)


@pytest.mark.parametrize("build", [torch.optim.Adagrad, torch.optim.Adam, torch.optim.Rprop])
def test_moments_are_reset_where_the_first_step_makes_them(build: Any) -> None:
    """Adagrad makes its own when it is built, and cannot step without them: they stay."""
    mine = controls(build)
    (optimizer,) = mine._parts.updater.optimizers
    for weight in mine._parts.updater.weights:
        weight.grad = torch.full_like(weight, 0.3)
    optimizer.step()
    assert needs_its_state(optimizer) == (build is torch.optim.Adagrad)  # as a trainer that has resumed hands it over
    mine.extension(FurtherRemedies).reset_moments()
    assert bool(optimizer.state) == (build is torch.optim.Adagrad)
    optimizer.step()
