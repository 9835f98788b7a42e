"""What remedies change and lasts: the journal adds up to it, a resume restores it, and a scope undoes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from group import together
from guarded import trained
from tasks import SUMMED
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from resilient_train import Guard
from resilient_train.core.clip import clip
from resilient_train.core.controls import Controls
from resilient_train.durable.run_history import RunHistory
from resilient_train.extensions.optimizer_remedies import LastingRemedies, built_state, clip_to_share, forget_moments
from resilient_train.extensions.quarantine import RowsLeftOut
from resilient_train.ground.errors import ConfigError
from resilient_train.ground.types import fact


def controls() -> Controls:
    model, data = nn.Linear(2, 1), TensorDataset(torch.zeros(64, 2), torch.zeros(64, 1))
    guard = Guard(None, model, torch.optim.SGD(model.parameters(), lr=0.1), data=data, batch_size=4, steps=16)
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
    assert (mine.knobs.lr, samples.skipped.spans) == (1.0, [(12, 20)])
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


@pytest.mark.parametrize(
    ("name", "state"),
    [
        *(
            ("knobs", {"lr": -1.0}),
            ("lasting", {"share": -1.0}),
            ("skipped", [[8, 4]]),
            ("quarantined", [["x", "", 1, 1]]),
            ("trials", {"updates": "many"}),
        ),
        *(("armor", [{"line": 3}]), ("micro_batch", "few"), ("usual_norm", "x"), ("reference", {"reference": {}})),
    ],
)
def test_a_damaged_one_is_refused(name: str, state: Any) -> None:
    with pytest.raises(ValueError, match="remedies in effect cannot be read"):
        controls().effects.load_state_dict({name: state})


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


def test_weights_that_begin_at_zero_can_move() -> None:
    """As if they were of the size that weights usually begin with; weights without a gradient do not count."""
    weight = nn.Parameter(torch.zeros(100))
    other: dict[str, Any] = {"params": [nn.Parameter(torch.full((9,), 1e9))], "lr": 50.0}
    optimizer = torch.optim.SGD([{"params": [weight]}, other], lr=1.0)
    weight.grad = torch.full_like(weight, 1e6)
    clip_to_share(optimizer.param_groups, 0.1)
    optimizer.step()
    assert weight.norm().item() == pytest.approx(0.1 * 0.02 * 10)


@pytest.mark.parametrize("build", [torch.optim.Adagrad, torch.optim.Adam, torch.optim.Rprop])
def test_an_optimizer_without_its_moments_steps_as_a_new_one(build: Any) -> None:
    """Also one that makes its state when it is built, and needs it in its first step."""
    weights = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(()))]

    def step(optimizer: torch.optim.Optimizer) -> None:
        for weight in weights:
            weight.grad = torch.full_like(weight, 0.3)
        optimizer.step()

    optimizer = build(weights, lr=0.1)
    built = {optimizer: built_state(optimizer)}
    for _ in range(5):
        step(optimizer)
    forget_moments(built)
    ends = []
    for one in (optimizer, build(weights, lr=0.1)):
        for weight in weights:
            nn.init.ones_(weight)
        step(one)
        ends.append([weight.tolist() for weight in weights])
    assert ends[0] == ends[1]


def on_ranks(size: int) -> tuple[list[str], float, float]:
    """Train on every rank, with whole weights on one and sharded ones on two: remedies, last step and loss."""
    torch.manual_seed(0)
    net, rows = SUMMED.model(), SUMMED.data()
    accelerator = Accelerator(cpu=True)
    if size > 1:
        fully_shard(net, mesh=init_device_mesh("cpu", (size,)))
    guard = Guard(accelerator, net, SUMMED.optimizer(net.parameters()), data=rows, batch_size=32 // size, steps=60,
                  objective=lambda model, batch: size * SUMMED.loss(model, batch))  # fmt: skip
    trained(guard)
    remedies = [action.remedy for one in guard.incidents for action in one.decision.actions]
    with torch.no_grad():
        loss = float(SUMMED.loss(net, rows.tensors))
    guard.world.leave()
    return remedies, guard.clock.tick, loss


def test_sharded_weights_are_limited_as_whole_ones() -> None:
    """By their norm over all ranks: the same treatment, and the same loss."""
    [(code, (remedies, ticks, loss))] = together(1, on_ranks, 1)
    assert code == 0
    assert "limit_update" in remedies
    for theirs, (others, their_ticks, their_loss) in together(2, on_ranks, 2):
        assert (theirs, others, their_ticks) == (0, remedies, ticks)
        assert their_loss == pytest.approx(loss, rel=0.05)  # summed in another order, in a run that amplifies that


def test_an_epsilon_that_was_raised_is_the_configured_one_again_once_that_is_undone() -> None:
    group, setting = {"params": [torch.zeros(1, dtype=torch.float16)]}, dict[str, Any]()
    (lasting := LastingRemedies()).mends_eps = True
    lasting.shape(group, setting, {"eps": 1e-8})
    assert setting["eps"] > 1e-8
    lasting.mends_eps = False
    lasting.shape(group, setting, {"eps": 1e-8})
    assert setting["eps"] == 1e-8
