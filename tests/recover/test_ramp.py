"""A schedule that climbs too high by small steps: the rate is to blame, and the run does not give up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_recover import ANY, case_of, landed, policy_named
from test_reference import passed

from resilient_train.core.decide import decide
from resilient_train.core.episode import Episode, Reference, Standing
from resilient_train.ground.types import Cause, Diagnosis
from resilient_train.loop.settings import named


@pytest.mark.parametrize(("since", "usual"), [(None, None), (390, None), (300, 1.01**100), (250, 1.01**50)])
def test_a_slow_rise_is_looked_for_since_things_went_wrong(since: int | None, usual: float | None) -> None:
    """The rates up to that step are what was usual; the last 64 updates are looked at in any case."""
    leap = passed([1.01 ** max(0, step - 200) for step in range(1, 401)]).leap(since)
    assert leap is None or not leap.is_sudden
    assert (leap and leap.usual) == (usual and pytest.approx(usual))


@pytest.mark.parametrize(("snapshots", "rung"), [(4, 3), (0, 4)])
def test_a_warm_up_without_its_rewind_is_no_treatment(snapshots: int, rung: int) -> None:
    """With no state to go back to, the next rung of `balanced` follows at once."""
    can = replace(ANY, snapshots=snapshots)
    found = decide(policy_named("balanced"), case_of(landed(700), Diagnosis(Cause.EXPLOSION), can), ())
    assert found.rung == rung


def test_what_no_rewind_undoes_has_time_to_be_learned_again() -> None:
    """As long as it took to lose it, at half the rate twice as long."""
    check = Episode(named("default").probation)
    check.begin(Reference(100, 1.0, 0.1, 0.0, 1.0, 48), goal=200, since=100)
    check.stayed(200, rate=0.5)
    assert check.goal == 400
    looks = [check.see(step, 2.5) for step in range(201, 401)]
    assert set(looks) == {Standing.UNDECIDED}
    restored = Episode(check.config)
    restored.load_persistent_state(check.persistent_state())
    restored.resumed(260)  # no rewind: nothing else is known by now
    assert restored.came_from is None
    assert Standing.OFF in [check.see(step, 2.5) for step in range(401, 451)]
