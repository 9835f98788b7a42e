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
from resilient_train.core.controls import Controls
from resilient_train.durable.run_history import RunHistory
from resilient_train.extensions.optimizer_remedies import FurtherRemedies
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
    samples, before = mine._parts.samples, mine.effects.state_dict()
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
    assert (mine.knobs.lr, samples.skipped.spans, [*mine.extension(RowsLeftOut).rows]) == (
        1.0,
        [(12, 20)],
        [3, 9],
    )
    again = controls()
    again.effects.load_state_dict(history.effects)
    assert plain(again.effects.state_dict()) == history.effects
    assert again.effects.agreed() == mine.effects.agreed() != controls().effects.agreed()


def test_an_effect_that_nobody_knows_is_not_dropped() -> None:
    mine = controls()
    mine.effects.load_state_dict({"tick": 3, "of_another_version": 0})
    with pytest.raises(ConfigError, match=r"recovery: mine\.warming is in effect in this run"):
        mine.effects.load_state_dict({"tick": 3, "mine.warming": {"steps": 5}})


def test_what_was_turned_is_undone() -> None:
    mine = controls()
    before = mine.effects.state_dict()
    mine.knobs.turn_clip(0.5)
    mine.knobs.limit_lr(0.1)
    lasting = mine.extension(FurtherRemedies).lasting
    lasting.decay = 0.0
    mine.effects.undo_to(before)
    assert (mine.knobs.values, lasting.decay) == (controls().knobs.values, 1.0)


@pytest.mark.parametrize(
    ("name", "state"),
    [
        *(
            ("knobs", {"lr": -1.0}),
            ("lasting", {"share": -1.0}),
            ("skipped", [[8, 4]]),
            ("quarantined", [["x", "", 1, 1]]),
            ("trials", {}),
        ),
        *(("armor", [{"line": 3}]), ("micro_batch", "few"), ("usual_norm", "x"), ("reference", {"reference": {}})),
    ],
)
def test_a_damaged_one_is_refused(name: str, state: Any) -> None:
    with pytest.raises(ValueError, match="remedies in effect cannot be read"):
        controls().effects.load_state_dict({name: state})
