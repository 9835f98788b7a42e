"""Extensions that a loop hands to its guard, as `Guard(extensions=[...])`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from guarded import Poison, adamw, guarded, trained

from resilient_train.core.checks import Check, References
from resilient_train.core.loss import Alarm
from resilient_train.core.remedies import KNOWN, Remedy
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


@dataclass(frozen=True)
class Count(Remedy):
    def applies(self, case: Any) -> bool:
        return True

    def apply(self, run: Any) -> None:
        run.extension(Own).applied += 1


class Own(Extension):
    settings = {"own_check": Settings}  # noqa: RUF012
    remedies = {"count": Count}  # noqa: RUF012

    def __init__(self) -> None:
        self.applied = 0

    def checks(self, settings: Any, level: Any) -> Mapping[str, Check]:
        return {"own_check": RaisesOnce(settings.own_check)}

    def build(self, run: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Remedies are known to the whole process: other tests look at all of them."""
    yield
    KNOWN.pop("count", None)


def test_its_check_has_settings_and_its_remedy_is_in_a_policy() -> None:
    own = Own()
    ladder = {"ladders": {"default": [["rewind", "count"]]}}
    guard = guarded(adamw, Poison("nothing"), recovery=ladder, checks={"own_check": {"step": 7}}, extensions=[own])
    trained(guard, 20)
    (incident,) = guard.incidents
    assert (incident.anomaly.step, str(incident.anomaly.signal), own.applied) == (7, "divergence", 1)


def test_what_it_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"own_check\.stepp.*step"):
        guarded(adamw, Poison("nothing"), checks={"own_check": {"stepp": 7}}, extensions=[Own()])
    with pytest.raises(TypeError, match=r"extensions\[0\]: expected an Extension"):
        guarded(adamw, Poison("nothing"), extensions=[Own])
