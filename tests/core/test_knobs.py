"""Knobs: what remedies turn, and how a healthy run takes it back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_train.core.knobs import MIN_CLIP, MIN_LR, Knobs


def over(knobs: Knobs, name: str, updates: int, **more: Any) -> list[Any]:
    """What a knob is in each of so many accepted updates."""
    found = []
    for _ in range(updates):
        found.append(getattr(knobs, name))
        knobs.advance(**more)
    return found


def test_knobs_re_warm() -> None:
    """The rate climbs in a straight line to the lowered one, and relaxing waits until it is there."""
    knobs = Knobs(relax_after=2)
    knobs.turn_lr(0.5, rewarm=4)
    assert over(knobs, "rate", 8) == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5, 0.5, 0.5**0.5, 0.5**0.5])
    assert knobs.turned == Knobs().turned


def test_trouble_while_relaxing_doubles_the_wait() -> None:
    """Relaxing stops where it is and takes twice as long the next time, up to a bound; long health mends it."""
    knobs = Knobs(relax_after=10)
    waits = []
    for _ in range(9):
        knobs.turn_lr(0.5)
        before, wait = knobs.turned, 0
        while knobs.turned == before:
            knobs.advance()
            wait += 1
        waits.append(wait)
        knobs.trouble()
    assert waits == [10, 20, 40, 80, 160, 320, 640, 640, 640]
    over(knobs, "rate", 20_000)
    assert knobs.turned == Knobs().turned


@pytest.mark.parametrize("turn", ["turn_lr", "turn_clip", "limit_lr"])
def test_nothing_is_turned_back_before_the_loss_is_back(turn: str) -> None:
    """Updates off the reference do not count as healthy, and take nothing from those that did."""
    knobs = Knobs(relax_after=10)
    getattr(knobs, turn)(0.5)
    turned, wait = knobs.turned, 79 if turn == "limit_lr" else 9
    for may_relax in (True, False):
        for _ in range(wait):
            knobs.advance(was_limited=True, may_relax=may_relax)
    assert knobs.turned == turned
    knobs.advance(was_limited=True)
    assert knobs.turned != turned


def test_a_limit_of_the_rate_lasts_as_long_as_the_schedule_asks_for_more() -> None:
    """It is raised step by step while it is met, and lifted once the schedule has come down by itself."""
    knobs = Knobs(relax_after=10)
    knobs.limit_lr(0.5)
    knobs.limit_lr(2.0)
    ceilings = over(knobs, "ceiling", 160, was_limited=True)
    assert [*ceilings, knobs.ceiling] == pytest.approx([*[0.5] * 80, *[0.5 * 2**0.5] * 80, 1.0])
    over(knobs, "ceiling", 80)
    assert knobs.turned == Knobs().turned


factors = st.floats(1e-6, 1.0)
turns = st.lists(
    st.one_of(
        st.tuples(st.just("turn_lr"), factors, st.integers(0, 9)),
        st.tuples(st.just("turn_clip"), factors),
        st.tuples(st.just("limit_lr"), st.floats(1e-9, 10.0)),
        st.tuples(st.just("trouble")),
        st.tuples(st.just("advance")),
    ),
    max_size=60,
)


@settings(max_examples=40, deadline=None)
@given(turns=turns, relax_after=st.integers(1, 3))
def test_knobs_stay_in_bounds_and_come_back_exactly(turns: list[tuple[Any, ...]], relax_after: int) -> None:
    """Whatever is turned, values stay inside their bounds; a healthy run brings each back to exactly 1."""
    knobs = Knobs(relax_after)
    for name, *arguments in turns:
        getattr(knobs, name)(*arguments)
        assert MIN_LR <= knobs.rate <= 1.0
        assert MIN_CLIP <= knobs.clip <= 1.0
        assert knobs.ceiling == 0 or knobs.ceiling >= MIN_LR
        resumed = Knobs(relax_after)
        resumed.load_state_dict(json.loads(json.dumps(knobs.state_dict())))
        assert resumed.state_dict() == knobs.state_dict()
        assert resumed.turned == knobs.turned
    for _ in range(64 * relax_after * 40):
        knobs.advance()
    assert knobs.turned == Knobs().turned
