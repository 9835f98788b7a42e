"""Recovery against a reference: where a run stood, whether it stands there again, and what is decided from it. Pure."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from math import exp, inf, isfinite, nan
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table
from test_recover import ANY, Fault, Run, case_of, landed, policy_named, refused, trained

from resilient_train.core.decide import decide
from resilient_train.core.episode import WINDOW, Episode, Reference, Standing, falls
from resilient_train.core.loss import without_top
from resilient_train.core.remedies import cut
from resilient_train.data.history import Leap, UpdateHistory
from resilient_train.durable.incident_log import IncidentLog
from resilient_train.ground.types import (
    Action,
    Anomaly,
    Cause,
    Decision,
    Diagnosis,
    Incident,
    Outcome,
    Signal,
    Vitals,
    fact,
)
from resilient_train.loop.settings import named

SIGMAS, SHARE = 4.0, 0.03

Shape = Callable[[int, random.Random], float]


def flat(step: int, dice: random.Random) -> float:
    return 3.0 + dice.gauss(0, 0.09)


def falling(step: int, dice: random.Random) -> float:
    return 2.0 + 4 * exp(-step / 60) + dice.gauss(0, 0.05)


def rising(step: int, dice: random.Random) -> float:
    return 2.0 + 0.01 * step + dice.gauss(0, 0.05)


def skewed(step: int, dice: random.Random) -> float:
    return exp(dice.gauss(0, 1))


def losses_of(shape: Shape, steps: int, *, seed: int = 0, first: int = 1, times: float = 1.0) -> list[float]:
    dice = random.Random(seed)
    return [times * shape(step, dice) for step in range(first, first + steps)]


def by_step(losses: Sequence[float], first: int = 1) -> dict[int, float]:
    return dict(enumerate(losses, first))


def made(shape: Shape, steps: int = 100, *, seed: int = 0) -> Reference:
    reference = Reference.of(by_step(losses_of(shape, steps, seed=seed)), steps)
    assert reference is not None
    return reference


# What a reference is made of.


@pytest.mark.parametrize("seed", range(5))
@table(
    ("shape", "level", "scatter", "slope"),
    {
        "flat: their mean but for the highest": (flat, (2.93, 3.03), (0.05, 0.12), (0.0, 0.0)),
        "falling: where they have come to": (falling, (2.70, 2.90), (0.02, 0.10), (0.0, 0.0)),
        "rising: where they are, and how fast": (rising, (2.90, 3.05), (0.02, 0.10), (0.007, 0.012)),
        "skewed: without single outliers": (skewed, (0.70, 2.00), (0.50, 2.50), (0.0, 0.0)),
    },
)
def test_what_the_losses_up_to_a_step_tell(
    shape: Shape, level: tuple[float, float], scatter: tuple[float, float], slope: tuple[float, float], seed: int
) -> None:
    """The level at the last step, the scatter around it, and the trend where they rose."""
    reference = made(shape, seed=seed)
    assert level[0] <= reference.level <= level[1]
    assert scatter[0] <= reference.scatter <= scatter[1]
    assert slope[0] <= reference.slope <= slope[1]
    assert reference.step == 100


def test_few_losses_are_a_rough_reference() -> None:
    """Fewer than eight: their median, and a tenth of their size for the scatter that cannot be measured."""
    assert Reference.of({}, 10) is Reference.of({11: 1.0, 12: 2.0}, 10) is None
    assert Reference.of({1: 2.0, 2: 9.0, 3: 4.0}, 3) == Reference(3, 4.0, 0.4, 0.0, 4.0, 3)
    assert Reference.of({1: 2.0, 2: 9.0, 3: 4.0}, 3, size=10.0) == Reference(3, 4.0, 1.0, 0.0, 10.0, 3)


@pytest.mark.parametrize(("losses", "lowest"), [([2.0, 9.0, 4.0], 12.0), ([4.0] * 9 + [3.9, 4.1], 5.39)])
def test_what_a_few_losses_cannot_judge_is_learned(losses: list[float], lowest: float) -> None:
    """A loss is above them where no noise explains it: where that is not known, by twice their size."""
    check = Episode(named("default").probation)
    check.begin(Reference.of(by_step(losses), 20), 20, 20)
    assert not check.is_above(lowest - 0.01, SIGMAS, 0.35)
    assert check.is_above(lowest + 0.01, SIGMAS, 0.35)


def test_what_came_after_the_trusted_step_does_not_count() -> None:
    """Neither damage nor losses older than the window change a reference."""
    losses = by_step(losses_of(flat, 100))
    reference = Reference.of(losses, 60)
    assert reference == Reference.of({step: loss for step, loss in losses.items() if step <= 60}, 60)
    assert reference == Reference.of({step: loss for step, loss in losses.items() if step > 60 - WINDOW}, 60)
    assert reference == Reference.of(losses | dict.fromkeys(range(61, 101), 1e9), 60)


float32s = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=100, deadline=None)
@given(losses=st.dictionaries(st.integers(0, 200), float32s, max_size=120), until=st.integers(0, 200))
def test_a_reference_of_any_losses(losses: dict[int, float], until: int) -> None:
    """Whatever is measured, its numbers are finite, its trend is never downwards, and it is data for a file."""
    reference = Reference.of(losses, until)
    trusted = [step for step in losses if step <= until]
    assert (reference is None) == (not trusted)
    if reference is None:
        return
    assert all(isfinite(float(value)) for value in asdict(reference).values())
    assert reference.step == max(trusted)
    assert 0 < reference.count <= min(WINDOW, len(trusted))
    assert min(reference.scatter, reference.slope, reference.size) >= 0
    assert reference.level >= min(losses[step] for step in trusted) - 1e-6 * reference.size
    assert Reference(**json.loads(json.dumps(asdict(reference)))) == reference


def test_losses_that_are_equal_are_left_out_one_by_one() -> None:
    """Losses of few digits, or of a network that puts out the same for everything, are no outliers of each other."""
    assert without_top([1.0] * 3 + [6.0] * 47) == [1.0] * 3 + [6.0] * 42
    reference = Reference(100, 1.0, 0.01, 0.0, 1.0, 48)
    assert reference.standing(150, [1.0] * 3 + [6.0] * 47, sigmas=SIGMAS, share=SHARE) is Standing.OFF


# Whether a run stands there again.


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("count", [12, 25, 50])
def test_the_same_losses_again_are_back(count: int, seed: int) -> None:
    """Within the noise of both, however few there are."""
    again = losses_of(flat, count, seed=100 + seed)
    assert made(flat, seed=seed).standing(150, again, sigmas=SIGMAS, share=SHARE) is Standing.BACK


@pytest.mark.parametrize("count", [12, 25, 50])
def test_wild_losses_again_are_seldom_off(count: int) -> None:
    """Where single losses are ten times as high as most, one of twenty at most is mistaken."""
    standings = [
        made(skewed, seed=seed).standing(150, losses_of(skewed, count, seed=1000 + seed), sigmas=SIGMAS, share=SHARE)
        for seed in range(200)
    ]
    assert standings.count(Standing.BACK) >= 190


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("steepness", [0.02, 0.05])
def test_what_is_above_and_falls_is_undecided(steepness: float, seed: int) -> None:
    """A run on its way down is given the time, until it falls no more; the same losses the other way round are off."""
    dice = random.Random(seed)
    down = [6.0 - steepness * place + dice.gauss(0, 0.09) for place in range(50)]
    assert falls(down)
    assert not falls(down[::-1])
    for losses, expected in ((down, Standing.UNDECIDED), (down[::-1], Standing.OFF), ([6.0] * 50, Standing.OFF)):
        check = Episode(named("default").probation)
        check.begin(made(flat, seed=seed), 100, 100)
        assert [check.see(101 + place, loss) for place, loss in enumerate(losses)][-1] is expected


@pytest.mark.parametrize("seed", range(5))
def test_where_a_rising_trend_leads_is_back(seed: int) -> None:
    """Losses that had risen before the trouble may be as high as that goes on; above it they are off."""
    reference = made(rising, seed=seed)
    on = losses_of(rising, 50, first=121, seed=100 + seed)
    assert reference.expected(170) > reference.expected(100) == reference.level
    assert reference.standing(170, on, sigmas=SIGMAS, share=SHARE) is Standing.BACK
    above = [loss + 1.5 for loss in on]
    assert reference.standing(170, above, sigmas=SIGMAS, share=SHARE) is Standing.OFF


@pytest.mark.parametrize("seed", range(5))
def test_what_fell_has_to_be_no_worse_than_it_was(seed: int) -> None:
    """A trend downwards is not extended: to be where it was is enough, and to be where it came from is not."""
    reference = made(falling, seed=seed)
    assert reference.expected(1000) == reference.level
    still = [reference.level + loss - 3.0 for loss in losses_of(flat, 50, seed=100 + seed)]
    assert reference.standing(150, still, sigmas=SIGMAS, share=SHARE) is Standing.BACK
    where_it_came_from = losses_of(falling, 50, first=1, seed=100 + seed)[:12]
    assert reference.standing(150, where_it_came_from[::-1], sigmas=SIGMAS, share=SHARE) is Standing.OFF


@pytest.mark.parametrize(
    ("loss", "off"), [(3.0, 0.0), (2.0, 0.0), (6.0, 1.0), (4.5, 0.5), (303.0, 100.0), (nan, inf), (inf, inf)]
)
def test_how_far_a_loss_is_above_it(loss: float, off: float) -> None:
    """In sizes of the losses that were usual: 1 is twice as high, and what is no number is as far as can be."""
    assert Reference(100, 3.0, 0.1, 0.0, 3.0, 48).excess(loss) == pytest.approx(off)
    assert Reference(100, 0.0, 0.0, 0.0, 0.0, 48).excess(1.0) == 0.0


# The check after a rewind, apart from the others.


def test_a_reference_outlives_the_process() -> None:
    """What it has in memory passes through a file, and the next process measures against the same place."""
    check = Episode(named("default").probation)
    assert check.persistent_state() is None
    way = by_step(losses_of(falling, 100))
    check.begin(Reference.of(way, 95), 100, 95)
    check.rewound(50, {step: loss for step, loss in way.items() if step <= 95})
    again = Episode(named("default").probation)
    again.load_persistent_state(json.loads(json.dumps(check.persistent_state())))
    assert again.persistent_state() == check.persistent_state()
    assert (again.reference, again.goal, again.came_from) == (check.reference, 100, 50)
    again.load_persistent_state(None)
    assert not again.is_open


def test_a_newer_anomaly_does_not_move_the_reference() -> None:
    """Behind a rewind the older reference holds; it is replaced only where trouble began before the two ways parted."""
    check = Episode(named("default").probation)
    way = by_step(losses_of(flat, 200))
    first, second, third = (Reference.of(way, until) for until in (190, 150, 120))
    check.begin(first, 200, 190)
    check.rewound(140, way)
    check.begin(second, 155, 150)
    assert (check.reference, check.goal) == (first, 200)
    check.begin(third, 145, 120)
    assert (check.reference, check.goal, check.came_from) == (third, 145, None)


def test_a_run_at_its_end_is_back_or_off() -> None:
    """However few losses tell it; what only falls is not back."""
    reference = made(flat)
    for again, expected in [
        (losses_of(flat, 5, seed=1), True),
        ([4.0] * 5, False),
        ([6.0 - 0.05 * place for place in range(50)], False),
    ]:
        check = Episode(named("default").probation)
        check.begin(reference, 100, 100)
        check.rewound(100, {})
        for step, loss in enumerate(again, 101):
            check.see(step, loss)
        assert check.ends_back(100 + len(again)) is expected


# How deep the learning rate is cut.


@pytest.mark.parametrize(
    ("mildest", "off", "factor"),
    [
        (0.5, 0.0, 0.5),  # not known, or no worse
        (1.0, 0.0, 1.0),
        (0.5, 0.1, 0.5),
        (0.5, 1.0, 0.5),  # twice as high
        (0.5, 3.0, 0.25),
        (0.5, 9.0, 0.1),
        (0.25, 1.0, 0.25),
        (0.5, 6.0, 0.14),  # two digits, for a person
        (0.5, 1e6, 0.01),
        (0.5, inf, 0.01),
        (0.001, inf, 0.001),  # what the policy says is never made milder
    ],
)
def test_the_cut_is_as_deep_as_the_loss_is_high(mildest: float, off: float, factor: float) -> None:
    """As the loss is so many times as high the rate is divided by as much, between what is set and a hundredth."""
    assert cut(mildest, off) == pytest.approx(factor)


# A learning rate that leapt.


def passed(paces: Sequence[float], *, losses: Callable[[int], float] = lambda step: 1.0) -> UpdateHistory:
    """Accepted updates from step 1 on, made with these rates."""
    updates = UpdateHistory()
    for step, pace in enumerate(paces, 1):
        updates.add(Vitals(step, step, True, losses(step), 0.5, 1e-3 * pace, lr_ratio=pace))
    return updates


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
        "a warm-up from zero": (WARM_UP, None),
        "a warm-up that has just begun": (WARM_UP[:10], None),
        "a warm-up and a decay": ([*WARM_UP, *DOWN], None),
        "a restart back to an earlier peak": ([*WARM_UP, *DOWN, 1.0], None),
        "some way behind such a restart": ([*WARM_UP, *DOWN, *DOWN[:30]], None),
        "a restart far above the peak": ([*WARM_UP, *DOWN, 3.0], Leap(151, 3.0, 1.0, True)),
        "a slow rise begins where it is beyond a tenth": (
            [*[1.0] * 50, *[1.05**step for step in range(1, 41)]],
            Leap(52, 1.05**40, 1.0, False),
        ),
        "a rise to less than twice": ([*[1.0] * 50, *[1.02**step for step in range(1, 30)]], None),
        "a few updates tell what is usual": ([1.0] * 5 + [10.0], Leap(6, 10.0, 1.0, True)),
        "the first steps of a warm-up": ([0.01, 0.02, 0.03, 0.04], None),
        "the next stage of a warm-up": ([0.5] * 3 + [1.0] * 9, None),
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


def test_a_rewind_forgets_a_leap() -> None:
    """Behind it there was none, until the run comes by there again; with a limit in force it does not."""
    paces = [*[1.0] * 100, *[10.0] * 8]
    updates = passed(paces)
    leap: Any = updates.leap()
    updates.rewound(leap.step - 1)
    assert updates.leap() is None
    for step, pace in enumerate(paces[100:], 101):
        limited = min(pace, leap.usual)
        updates.add(Vitals(step + 8, step, True, 1.0, 0.5, 1e-3 * limited, lr_ratio=limited))
    assert updates.leap() is None


@settings(max_examples=100, deadline=None)
@given(paces=st.lists(st.floats(0, 100), max_size=80))
def test_what_a_leap_says_is_so(paces: list[float]) -> None:
    """At its step the rate was at least what it says before, and it came to at least twice that."""
    leap = passed(paces).leap()
    if leap is None:
        return
    assert leap.factor >= 2 * (1 - 1e-9)
    assert max(paces[leap.step - 1 :]) == pytest.approx(leap.factor * leap.usual)
    before = [pace for pace in paces[: leap.step - 1] if pace > 1e-12]
    assert max(before) == pytest.approx(leap.usual) if leap.is_sudden else max(before) <= 1.1 * leap.usual


# What becomes of incidents.


@table(
    ("anomaly", "cause", "rewound_to", "damage"),
    {
        "refused and skipped": (refused(100), Cause.DATA, None, False),
        "refused and rewound": (refused(100), Cause.DATA, 75, False),
        "landed and only reported": (landed(100), Cause.EXPLOSION, None, True),
        "landed and rewound": (landed(100), Cause.EXPLOSION, 75, True),
        "landed and rewound to the start": (landed(100), Cause.EXPLOSION, 0, True),
        "changed outside of an update and rewound": (landed(100), Cause.CORRUPTION, 75, False),
        "changed outside of an update and left": (landed(100), Cause.CORRUPTION, None, True),
        "of the process": (landed(100), Cause.PROCESS, 75, False),
    },
)
@pytest.mark.parametrize("is_back", [True, False])
@pytest.mark.parametrize("ends", ["far beyond it", "at once", "given up"])
def test_what_an_incident_comes_to(
    anomaly: Anomaly, cause: Cause, rewound_to: int | None, damage: bool, is_back: bool, ends: str
) -> None:
    """What left damage recovers only where the loss is back; everything else as soon as the run is beyond it."""
    history = IncidentLog(None)
    incident = history.open(anomaly, Diagnosis(cause), Decision((Action("skip"),)))
    history.record_treatment(replace(incident, rewound_to=rewound_to))
    assert history.incidents[0].left_damage == damage
    good = Outcome.RECOVERED if is_back or not damage else None
    if ends == "far beyond it":
        reached = 100 if anomaly.landed else 99
        history.update_accepted(reached + 49, recovered_after=50, loss_is_off=not is_back)
        assert history.incidents[0].outcome is None
        history.update_accepted(reached + 50, recovered_after=50, loss_is_off=not is_back)
        assert history.incidents[0].outcome is good
        assert [one.id for one in history.open_incidents] == ([] if good else [1])
    elif ends == "at once":
        history.close_all(Outcome.RECOVERED if is_back else Outcome.UNRECOVERED)
        assert history.incidents[0].outcome is (good or Outcome.UNRECOVERED)
    else:
        other = Diagnosis(Cause.OVERFLOW)
        history.open(refused(120), other, Decision(gave_up=fact("text", text="enough")), is_off=not is_back)
        assert history.incidents[0].outcome is (Outcome.UNRECOVERED if damage and not is_back else Outcome.GAVE_UP)
        assert history.incidents[1].outcome is Outcome.GAVE_UP
        assert history.open_incidents == []


# Ladders.


def corrupted(every: int, times: int) -> Fault:
    """So many times the weights are changed from outside, at every so many attempts."""

    def fault(run: Run) -> Anomaly | None:
        if run.tick % every or run.tick > every * times:
            return None
        return landed(run.step + 1, run.tick, Signal.WEIGHTS_JUMP)

    return fault


@pytest.mark.parametrize(("times", "completes"), [(60, True), (100, True), (101, False)])
def test_corruption_now_and_then_never_exhausts_the_ladder(times: int, completes: bool) -> None:
    """Each was undone and the run good beyond it, so the first rung does; the budget of the whole run counts all."""
    run, history = trained(policy_named("balanced"), corrupted(50, times), steps=5_000, most_ticks=9_000)
    done = [one.decision.rung for one in history.incidents]
    assert done[:100] == [0] * min(times, 100)
    assert (run.step == 5_000) == completes
    assert set(run.done) == {"rewind"}
    if not completes:
        assert history.incidents[-1].decision.gave_up == fact("incidents_in_run", count=100)


def decided(cause: Cause, history: Sequence[Incident] = (), *, policy: str = "balanced", **can: Any) -> Decision:
    anomaly = landed(200 + len(history), 200 + 50 * len(history))
    case = case_of(anomaly, Diagnosis(cause, usual_rate=can.pop("usual_rate", 0.0)), replace(ANY, **can))
    return decide(policy_named(policy), case, tuple(history))


def attempts(cause: Cause, *rungs: int) -> list[Incident]:
    """Earlier incidents of one cause, each of which was rewound."""
    rewind = Action("rewind")
    return [
        Incident(place, landed(200, 150 + 50 * place), Diagnosis(cause), Decision((rewind,), rung), rewound_to=150)
        for place, rung in enumerate(rungs, start=1)
    ]


def setting(decision: Decision, remedy: str) -> dict[str, Any]:
    return next((dict(one.settings) for one in decision.actions if one.remedy == remedy), {})


@pytest.mark.parametrize("policy", ["balanced", "aggressive"])
def test_an_explosion_is_cut_as_deep_as_it_goes(policy: str) -> None:
    """From the rung that lowers the rate on; the rung before it only warms up."""
    first = decided(Cause.EXPLOSION, policy=policy, loss_excess=9.0)
    later = decided(Cause.EXPLOSION, attempts(Cause.EXPLOSION, 3, 3), policy=policy, loss_excess=9.0)
    assert [setting(one, "lower_lr")["factor"] for one in (first, later)] == [1, 0.1]


@pytest.mark.parametrize("policy", ["balanced", "aggressive", "conservative"])
def test_a_rate_that_rose_is_limited_to_what_it_was(policy: str) -> None:
    """The samples are innocent: nothing is skipped."""
    decision = decided(Cause.RATE, policy=policy, usual_rate=0.7)
    assert [one.remedy for one in decision.actions] == ["rewind", "limit_lr"]
    assert setting(decision, "limit_lr")["to"] == 0.7
