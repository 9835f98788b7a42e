"""A check of another package that fails: it is turned off, and the run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from guarded import guard_over, mse, sums

from resilient_train.core.checks import Check
from resilient_train.extensions import Extension


class Fails(Check):
    saved = ("seen",)

    def __init__(self) -> None:
        self.seen = 0

    def landed(self, step: int, *given: Any, **more: Any) -> None:
        self.seen = step
        if step == 20:
            raise ZeroDivisionError("of mine")


class Mine(Extension):
    def checks(self, settings: Any) -> Mapping[str, Check]:
        return {"mine": Fails()}


def test_a_check_that_fails_is_off(info: pytest.LogCaptureFixture) -> None:
    """Also through a rewind to where it was on, which has its state."""
    guard = guard_over(sums(), objective=mse, extensions=[Mine()], steps=60)
    for batch in guard.batches():
        if guard.clock.tick == 30:
            with torch.no_grad():
                next(guard.model.parameters()).fill_(torch.nan)
        guard.step(batch)
    assert [str(one.outcome) for one in guard.incidents] == ["recovered"]
    told = [one for one in info.messages if "is off from here" in one]
    assert len(told) == 1
    assert guard._checks.state_dict()["mine"] == {"seen": 20}  # as it was when it failed
    assert told[0].startswith("the check Fails failed, and is off from here: ZeroDivisionError: of mine")
