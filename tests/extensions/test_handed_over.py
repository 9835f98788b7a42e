"""Extensions that a loop hands to its guard, as `Guard(extensions=[...])`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from guarded import REWIND, Poison, adamw, guarded, trained

from resilient_train.core.checks import Check, References
from resilient_train.core.loss import Alarm
from resilient_train.extensions import Extension
from resilient_train.ground.errors import ConfigError
from resilient_train.ground.reader import limited
from resilient_train.ground.types import Vitals, fact


@dataclass
class Settings:
    step: int = limited(5, at_least=1)


@dataclass
class RaisesOnce(Check):
    persistent = ("has_raised",)  # a rewind does not take it back

    settings: Settings
    has_raised: bool = False

    def landed(self, step: int, vitals: Vitals, reference: References, *, is_learned: bool) -> Alarm | None:
        if self.has_raised or step < self.settings.step:
            return None
        self.has_raised = True
        return Alarm(step - 1, fact("text", text="it is time"))


class Own(Extension):
    settings = {"own_check": Settings}  # noqa: RUF012

    def checks(self, settings: Any) -> Mapping[str, Check]:
        return {"own_check": RaisesOnce(settings.own_check)}

    def build(self, run: Any) -> None:
        pass


def test_its_check_has_settings() -> None:
    """In tests/repository/test_outsider.py a policy has its remedy."""
    guard = guarded(adamw, Poison("nothing"), recovery=REWIND, checks={"own_check": {"step": 7}}, extensions=[Own()])
    (incident,) = trained(guard, 20).incidents
    assert (incident.anomaly.step, str(incident.anomaly.signal)) == (7, "divergence")


def test_what_it_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"own_check\.stepp.*step"):
        guarded(adamw, Poison("nothing"), checks={"own_check": {"stepp": 7}}, extensions=[Own()])
