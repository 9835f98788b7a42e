"""Episodes: where a run stood before damage, and whether it stands there again. Pure."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import exp, isfinite

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table

from resilient_train.core.episode import WINDOW, Episode, Reference, ReferenceConfig, Standing, falls

SIGMAS, SHARE = 4.0, 0.03
CONFIG = ReferenceConfig(every=1, window=50, share=SHARE, sigmas=SIGMAS)

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
    check = Episode(CONFIG)
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


# Whether a run stands there again.


@pytest.mark.parametrize("seed", range(5))
@table(
    ("before", "again", "expected"),
    {
        "the same": (flat, losses_of(flat, 50, seed=100), Standing.BACK),
        "the same, and few": (flat, losses_of(flat, 12, seed=100), Standing.BACK),
        "most above, few of which are equal": (flat, [1.0] * 3 + [6.0] * 47, Standing.OFF),
        "where a rise leads": (rising, losses_of(rising, 50, first=121, seed=100), Standing.BACK),
        "above that": (rising, losses_of(rising, 50, first=271, seed=100), Standing.OFF),
        "where a fall had led": (falling, [2.8 + loss - 3.0 for loss in losses_of(flat, 50, seed=100)], Standing.BACK),
        "where a fall came from": (falling, losses_of(falling, 12, seed=100)[::-1], Standing.OFF),
    },
)
def test_losses_after_a_rewind(before: Shape, again: list[float], expected: Standing, seed: int) -> None:
    """Those that had risen may be as high as that goes on; those that fell have to be no worse than they were."""
    assert made(before, seed=seed).standing(170, again, sigmas=SIGMAS, share=SHARE) is expected


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
        check = Episode(CONFIG)
        check.begin(made(flat, seed=seed), 100, 100)
        assert [check.see(101 + place, loss) for place, loss in enumerate(losses)][-1] is expected


# The check after a rewind, apart from the others.


def test_a_reference_outlives_the_process() -> None:
    """What it has in memory passes through a file, and the next process measures against the same place."""
    check = Episode(CONFIG)
    assert check.persistent_state() is None
    way = by_step(losses_of(falling, 100))
    check.begin(Reference.of(way, 95), 100, 95)
    check.rewound(50, {step: loss for step, loss in way.items() if step <= 95})
    again = Episode(CONFIG)
    again.load_persistent_state(json.loads(json.dumps(check.persistent_state())))
    assert again.persistent_state() == check.persistent_state()
    assert (again.reference, again.goal, again.came_from) == (check.reference, 100, 50)
    again.load_persistent_state(None)
    assert not again.is_open


def test_a_newer_anomaly_does_not_move_the_reference() -> None:
    """Behind a rewind the older reference holds; it is replaced only where trouble began before the two ways parted."""
    check = Episode(CONFIG)
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
        check = Episode(CONFIG)
        check.begin(reference, 100, 100)
        check.rewound(100, {})
        for step, loss in enumerate(again, 101):
            check.see(step, loss)
        assert check.ends_back(100 + len(again)) is expected


def test_what_no_rewind_undoes_has_time_to_be_learned_again() -> None:
    """As long as it took to lose it, at half the rate twice as long."""
    check = Episode(CONFIG)
    check.begin(Reference(100, 1.0, 0.1, 0.0, 1.0, 48), goal=200, since=100)
    check.stayed(200, rate=0.5)
    assert check.goal == 400
    assert {check.see(step, 2.5) for step in range(201, 401)} == {Standing.UNDECIDED}
    restored = Episode(CONFIG)
    restored.load_persistent_state(check.persistent_state())
    restored.resumed(260)  # no rewind: nothing else is known by now
    assert restored.came_from is None
    assert Standing.OFF in [check.see(step, 2.5) for step in range(401, 451)]
