"""The further checks: climbs, rises of the rate, the loss scale; and what is known of past updates."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import exp, inf, nan, sin
from typing import Any

import pytest
from panels import Panel
from tables import table
from test_checks import Run, curve

from resilient_train.core.checks import ChecksConfig, Finding
from resilient_train.data.history import Leap, UpdateHistory
from resilient_train.ground.types import Signal, Vitals
from resilient_train.loop.arguments import checks as named


class FullRun(Run):
    """One that has all checks."""

    def __init__(self, config: ChecksConfig | None = None) -> None:
        super().__init__()
        self.checks = Panel(config or named("default")).checks

    def overflow(self, scale: float) -> Finding:
        self.tick += 1
        return self.checks.judge(Vitals(self.tick, self.step, False, inf, nan, 1e-3, overflowed=True, loss_scale=scale))


@pytest.mark.parametrize("seed", range(3))
def test_a_loss_that_rises_and_stays(seed: int) -> None:
    """A rise is an anomaly within a known number of steps, and what came before it stays trusted."""
    onset, within = 1500, 8
    found = FullRun().alarms(curve(onset + within, seed=seed, noise=0.03, high=8.0, at=onset, over=1))
    assert found
    assert found[0].signal is Signal.LOSS_SPIKE
    assert onset < found[0].step <= onset + within
    assert onset - 100 <= found[0].since <= onset
    assert found[0].landed


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", ["decay", "skewed", "periodic", "negative", "by heart"])
def test_healthy_losses_raise_no_alarm(family: str, seed: int) -> None:
    """Noise, outliers, waves, a likelihood through zero and losses near zero are all healthy."""
    dice = random.Random(seed)

    def one(index: int) -> tuple[float, float]:
        level = 1 + 4 * exp(-index / 500)
        match family:
            case "decay":
                return level * (1 + dice.gauss(0, 0.1)), exp(dice.gauss(0, 0.3))
            case "skewed":
                return level * exp(dice.gauss(0, 1.2)), exp(dice.gauss(0, 0.8))
            case "periodic":
                return level * (1 + 0.2 * sin(index / 60)) + dice.gauss(0, 0.1), exp(dice.gauss(0, 0.3))
            case "negative":
                return 120 * exp(-index / 700) - 45 + dice.gauss(0, 2), 50 * exp(dice.gauss(0, 0.2))
            case _:
                hard = exp(dice.gauss(0, 2.5) - 8 * (1 - exp(-index / 1000)))
                return hard, min(3.0, 2 * hard)

    assert FullRun().alarms(one(index) for index in range(6_000)) == []


def test_overflows_are_ordinary_until_they_do_not_end() -> None:
    """A scaler finds its scale in a few updates; a scale that is too small to help is a collapse, told each time."""
    run = FullRun()
    assert run.alarms(curve(400)) == []
    before = run.checks.state_dict()["level"]
    findings = [run.overflow(2.0**power) for power in range(16, -12, -1)]
    assert [finding.anomaly for finding in findings[:-1]] == [None] * 27
    anomaly: Any = findings[-1].anomaly
    assert (anomaly.signal, anomaly.landed, anomaly.since) == (Signal.SCALE_COLLAPSE, True, 399)
    assert run.checks.state_dict()["level"] == before


def passed(paces: Sequence[float], losses: Sequence[float] = ()) -> UpdateHistory:
    """Accepted updates from step 1 on, made with these rates."""
    updates = UpdateHistory()
    for step, pace in enumerate(paces, 1):
        loss = losses[step - 1] if losses else 1.0
        updates.add(Vitals(step, step, True, loss, 0.5, 1e-3 * pace, lr_ratio=pace))
    return updates


@table(
    ("losses", "first"),
    {
        "nothing yet": ([], None),
        "the mean of eight": ([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.5], 4.5),
        "thrown up by the first update": ([4.0, 170.0, 90.0, 60.0, 50.0, 40.0, 30.0, 20.0], 4.0),
        "a likelihood": ([-1.0, 8.0, 8.0], -1.0),
        "a loss that stays near 0": ([-0.1, 0.1, 0.1, -0.1, 0.3], 0.06),
    },
)
def test_the_level_that_a_run_began_with(losses: list[float], first: float | None) -> None:
    """A run that never came back from its first updates has not made progress since."""
    assert passed([1.0] * len(losses), losses).first_loss == first


def test_light_sees_a_jump_and_leaves_slow_changes() -> None:
    """The gate and the jump are all there is."""
    jump = FullRun(named("light")).alarms(curve(1020, high=8.0, at=1000))
    assert jump[0].signal is Signal.LOSS_SPIKE
    assert FullRun(named("light")).alarms(curve(3000, high=4.0, at=1500, over=1000)) == []


WARM_UP = [(step + 1) / 50 for step in range(50)]
DOWN = [0.01 ** (step / 100) for step in range(100)]


@table(
    ("paces", "leap"),
    {
        "constant": ([1.0] * 100, None),
        "sudden": ([*[1.0] * 100, 10.0], Leap(101, 10.0, 1.0, True)),
        "less than twice": ([*[1.0] * 100, 1.9], None),
        "the first of two leaps": ([*[1.0] * 100, *[5.0] * 40, 20.0], Leap(101, 20.0, 1.0, True)),
        "lately": ([*[1.0] * 100, *[5.0] * 63], Leap(101, 5.0, 1.0, True)),
        "too long ago: it is what was usual since": ([*[1.0] * 100, *[5.0] * 65], None),
        "a warm-up and a decay": ([*WARM_UP, *DOWN], None),
        "a restart back to an earlier peak": ([*WARM_UP, *DOWN, 1.0], None),
        "a restart far above the peak": ([*WARM_UP, *DOWN, 3.0], Leap(151, 3.0, 1.0, True)),
        "a slow rise begins where it is beyond a tenth": (
            [*[1.0] * 50, *[1.05**step for step in range(1, 41)]],
            Leap(52, 1.05**40, 1.0, False),
        ),
        "a few updates tell what is usual": ([1.0] * 5 + [10.0], Leap(6, 10.0, 1.0, True)),
        "the first steps of a warm-up": ([0.01, 0.02, 0.03, 0.04], None),
        "too far for a stage of a warm-up": ([0.01] * 50 + [1.0], Leap(51, 100.0, 0.01, True)),
        "rates that are not known": ([0.0] * 100, None),
        "no updates": ([], None),
    },
)
def test_a_rate_that_leapt(paces: list[float], leap: Leap | None) -> None:
    """It counts against the highest so far; what rose slowly, against what was usual before the last updates."""
    found = passed(paces).leap()
    if leap is None or found is None:
        assert found == leap
        return
    assert (found.step, found.is_sudden) == (leap.step, leap.is_sudden)
    assert (found.factor, found.usual) == pytest.approx((leap.factor, leap.usual))


@pytest.mark.parametrize(("since", "usual"), [(None, None), (390, None), (300, 1.01**100), (250, 1.01**50)])
def test_a_slow_rise_is_looked_for_since_things_went_wrong(since: int | None, usual: float | None) -> None:
    """The rates up to that step are what was usual; the last 64 updates are looked at in any case."""
    leap = passed([1.01 ** max(0, step - 200) for step in range(1, 401)]).leap(since)
    assert leap is None or not leap.is_sudden
    assert (leap and leap.usual) == (usual and pytest.approx(usual))
