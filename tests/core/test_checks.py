"""The checks of the core: a stream of vitals in, anomalies and limits out."""

from __future__ import annotations

import copy
import functools
import json
import random
import struct
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import exp, inf, isfinite, nan
from typing import Any

import pytest
from cases import core_checks
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table

from resilient_train.core.checks import Checks, ChecksConfig, Finding
from resilient_train.ground.types import NO_LIMIT, Anomaly, Signal, Vitals

Curve = Iterable[tuple[float, float]]


class Run:
    """A run reduced to what the checks see of it: a gate that obeys them, and a place in the data."""

    def __init__(self, config: ChecksConfig | None = None) -> None:
        self.config = config or core_checks()
        self.checks = Checks(self.config)
        self.tick = self.step = self.position = 0

    def attempt(self, loss: float, norm: float = 1.0) -> Finding:
        """Judge one update; its samples are used up unless it has to be done again."""
        self.tick += 1
        loss, norm = (value if abs(value) <= NO_LIMIT else value * inf for value in (loss, norm))  # as a device says it
        refused = self.refused(loss, norm)
        self.step += refused is None
        finding = self.checks.judge(
            Vitals(self.tick, self.step, refused is None, loss, norm, 1e-3, self.position, self.position + 1, refused)
        )
        self.position += not finding.repeat
        return finding

    def refused(self, loss: float, norm: float) -> Signal | None:
        if not isfinite(loss):
            return Signal.NONFINITE_LOSS
        if not isfinite(norm):
            return Signal.NONFINITE_GRAD
        if not loss <= self.checks.limits[0]:
            return Signal.LOSS_SPIKE
        return None if norm <= self.checks.limits[1] else Signal.GRAD_SPIKE

    def play(self, curve: Curve) -> Iterator[Finding]:
        for loss, norm in curve:
            yield self.attempt(loss, norm)

    def alarms(self, curve: Curve) -> list[Anomaly]:
        return [finding.anomaly for finding in self.play(curve) if finding.anomaly]

    def rewind(self, anomaly: Anomaly, state: dict[str, Any], step: int) -> None:
        """Go back because of an anomaly to a step whose statistics are `state`, as a treatment does."""
        self.checks.require_recovery(anomaly.since, anomaly.step)
        self.checks.load_state_dict(state)
        self.checks.rewound(step, anomaly.since)
        self.step = self.position = step


def curve(steps: int, *, seed: int = 0, noise: float = 0.03, low: float = 3.0, high: float = 3.0, at: int = 10**9,
          over: int = 1) -> list[tuple[float, float]]:  # fmt: skip
    """Losses that fall to `low`, and from step `at` on climb to `high` in `over` steps."""
    dice = random.Random(seed)
    pairs = []
    for index in range(steps):
        level = low + 3 * exp(-index / 150) + (high - low) * min(1.0, max(0.0, (index - at + 1) / over))
        pairs.append((level * (1 + dice.gauss(0, noise)), exp(dice.gauss(0, 0.2))))
    return pairs


def warmed_up(config: ChecksConfig | None = None, steps: int = 400) -> Run:
    run = Run(config)
    assert run.alarms(curve(steps)) == []
    return run


# What is found, and when.


@pytest.mark.parametrize("seed", range(5))
def test_a_loss_that_jumps_and_stays(seed: int) -> None:
    """A jump is an anomaly within eight steps, what came before it stays trusted, and noise before it is none."""
    first = Run().alarms(curve(1508, seed=seed, high=8.0, at=1500))[0]
    assert (first.signal, first.landed) == (Signal.LOSS_SPIKE, True)
    assert 1500 < first.step <= 1508
    assert 1400 <= first.since <= 1500


@pytest.mark.parametrize("signal", [Signal.NONFINITE_LOSS, Signal.NONFINITE_GRAD, Signal.NONFINITE_BATCH])
@pytest.mark.parametrize("every", [0, 8])
def test_what_is_not_finite_is_an_anomaly_at_once(signal: Signal, every: int) -> None:
    """Nothing landed, so the present state stays trusted, in the first update, too, and with all checks off."""
    vitals, config = Vitals(7, 3, False, nan, nan, 1e-3, refused=signal, ranks=(1,)), core_checks()
    config.limit.every = config.jump.every = config.probation.every = every
    anomaly: Any = Checks(config).judge(vitals).anomaly
    assert (anomaly.signal, anomaly.step, anomaly.tick, anomaly.since) == (signal, 4, 7, 3)
    assert (anomaly.landed, anomaly.ranks) == (False, (1,))


def test_checks_that_are_off_judge_nothing_that_is_finite() -> None:
    """No limit, no alarm, no remark, whatever the loss does."""
    config = core_checks()
    config.jump.every = config.limit.every = config.probation.every = 0
    run = Run(config)
    assert set(run.play([*curve(2000, high=800.0, at=1000), (3.0, 1e30), (1e30, 1.0)])) == {Finding()}
    assert run.checks.limits == (NO_LIMIT, NO_LIMIT)


# The limits.


@pytest.mark.parametrize(
    ("loss", "norm", "signal"), [(60.0, 1.0, None), (3.0, 1000.0, Signal.GRAD_SPIKE), (1e7, 1.0, Signal.LOSS_SPIKE)]
)
def test_a_single_odd_update(loss: float, norm: float, signal: Signal | None) -> None:
    """A loss far outside lands without a word: it does no harm. A thousand times farther out it points at a broken row
    and is refused, as is a gradient far above the recent ones. The limits stay where they are.
    """
    run = warmed_up()
    limits = run.checks.limits
    assert 5 < limits[1] < 50
    finding = run.attempt(loss, norm)
    found = finding.anomaly and (finding.anomaly.signal, finding.anomaly.landed, finding.anomaly.since, run.step)
    assert found == (signal and (signal, False, 400, 400))
    assert signal or finding == Finding()
    assert run.checks.limits == limits


@pytest.mark.parametrize(("rewinds", "ordinary"), [(False, []), (True, []), (False, [(3.0, 1.0)])])
def test_a_new_regime_of_gradients_is_given_way_to(rewinds: bool, ordinary: list[tuple[float, float]]) -> None:
    """Several different updates above the limit, or most of some, are usual from now on: the last is repeated.

    Refusals are remembered across rewinds, so that a rewind at each of them does not fight a regime for ever.
    """
    run, repeats = warmed_up(), []
    state = run.checks.state_dict()
    for index in range(6):
        if rewinds:
            run.checks.load_state_dict(copy.deepcopy(state))
        repeats.append(run.attempt(3.0, 1000.0 + index).repeat)
        run.alarms(ordinary)
    assert repeats == [False] * 5 + [True]
    assert run.alarms((3.0, 1000.0 + index) for index in range(5, 100)) == []


def test_one_update_tried_again_and_again_is_no_regime() -> None:
    """Nor is a hard row a spike for weights that knew all rows by heart, whose norms had become small."""
    run = warmed_up()
    for _ in range(50):
        assert run.attempt(3.0, 1000.0).anomaly is not None
        run.position -= 1
    run = Run()
    assert run.alarms([(3.0, 1.0)] * 200 + [(0.01, 0.02)] * 500 + [(3.0, 0.9)]) == []
    assert run.alarms([(0.01, 50.0)])[0].signal is Signal.GRAD_SPIKE


def test_refused_updates_whose_loss_is_out_of_range_mean_damage() -> None:
    """Weights gone bad refuse every update; that is no outlier, and the state is not trusted any more."""
    run = warmed_up()
    found = run.alarms([(1e9 + index, 1e9) for index in range(5)])
    assert [anomaly.signal for anomaly in found[:4]] == [Signal.LOSS_SPIKE] * 4
    assert not found[0].landed
    assert found[4].landed
    assert 380 <= found[4].since < 400


# Changes that were declared, and those that were not.


@pytest.mark.parametrize("told", ["in the configuration", "by the schedule"])
def test_a_declared_change_is_no_alarm(told: str) -> None:
    """Around a declared step nothing is refused, and what is usual is learned again."""
    config = core_checks()
    if told == "in the configuration":
        config.expect = [1000]
    run = Run(config)
    if told == "by the schedule":
        run.checks.expect(1000)
    pairs = curve(3000, high=8.0, at=1000)
    pairs[999] = (pairs[999][0], 1e4)
    assert run.alarms(pairs[:1000]) == []
    assert run.checks.limits == (NO_LIMIT, NO_LIMIT)
    assert run.alarms(pairs[1000:]) == []
    assert run.alarms((loss * 2.5, norm) for loss, norm in pairs[2000:2020])[0].signal is Signal.LOSS_SPIKE


def test_a_norm_beyond_every_limit_is_refused_at_a_declared_step_too() -> None:
    """To repeat such an update would refuse it again, without an end."""
    run = Run()
    run.checks.expect(3)
    refused = Vitals(2, 1, False, 1.0, 1e30, 1e-3, 1, 2, Signal.GRAD_SPIKE)
    found = run.checks.judge(refused)
    assert (found.anomaly is not None, found.repeat) == (True, False)


def test_a_way_back_over_a_declared_step_is_compared_with_what_came_after_it() -> None:
    """As weights were unfrozen there: it is no change since the damage."""
    run = Run()
    run.checks.expect(100)
    assert run.alarms(curve(95)) == []
    state = copy.deepcopy(run.checks.state_dict())
    assert run.alarms(curve(500)[95:]) == []
    run.rewind(Anomaly(Signal.DIVERGENCE, 500, run.tick, 490), state, 95)
    assert run.alarms(curve(560, high=3.5, at=500)[95:])[0].signal is Signal.NOT_RECOVERED


def test_a_change_nobody_undid_is_told_once_and_never_becomes_usual() -> None:
    """Without rewinds: one alarm, then peace, and nothing is learned from the new level, however long it lasts."""
    run = warmed_up()
    assert len(run.alarms(curve(1000, high=6.0, at=600)[400:])) == 1
    level, limits = run.checks.state_dict()["level"], run.checks.limits
    assert max(level["losses"]) < 4.5
    resume(run)  # a next process is not alarmed again either
    assert run.alarms((loss, norm) for loss, norm in curve(3000, seed=1, low=6.0)[400:]) == []
    assert run.checks.state_dict()["level"] == level
    assert run.checks.limits == limits
    assert run.checks.episode.is_open


@table(
    ("first", "high", "seen_after"),
    {
        "twelve losses are enough": ([3.0] * 12, 9.1, 5),
        "eleven are not": ([3.0] * 11, 9.1, None),
        "above them by seven tenths of their size": ([3.0] * 40, 5.2, 5),
        "by less": ([3.0] * 40, 5.0, None),
        "as high as the first, but far above all of the last": ([9.0, *[3.0] * 39], 9.1, 5),
        "little above the last": ([3.0 * 0.95**index for index in range(40)], 0.9, None),
        "above where it began": ([3.0 * 0.95**index for index in range(40)], 4.0, 5),
        "a climb from near zero": ([0.01 * (1 + index) for index in range(40)], 0.41, None),
    },
)
def test_a_young_run_is_judged_by_its_last_losses(first: list[float], high: float, seen_after: int | None) -> None:
    """Before the range is known, losses far above the last dozen are a jump, as soon as most of a few are such."""
    config = core_checks()
    config.limit.every = 0
    run = Run(config)
    assert run.alarms((loss, 1.0) for loss in first) == []
    alarms = run.alarms([(high, 1.0)] * 8)
    assert [(one.signal, one.step) for one in alarms] == (
        [(Signal.LOSS_SPIKE, len(first) + seen_after)] if seen_after else []
    )
    assert all(one.since <= len(first) for one in alarms)


# Whatever comes.

ODD = st.sampled_from([nan, inf, -inf, 1e38, -1e38, 1e300, 0.0, -0.0, 1e-300])
NUMBERS = st.one_of(st.floats(-10, 10), ODD)
PAIRS = st.lists(st.tuples(NUMBERS, NUMBERS), max_size=150)
QUICK = settings(max_examples=30, deadline=None)


def eager() -> ChecksConfig:
    """Checks that judge after a few updates."""
    config = core_checks()
    config.jump.warmup, config.limit.warmup, config.jump.window, config.limit.window = 8, 2, 16, 8
    config.jump.every = config.limit.every = 1
    return config


@QUICK
@given(PAIRS)
def test_nothing_makes_the_checks_fall_over(pairs: list[tuple[float, float]]) -> None:
    """Whatever is measured, limits stay finite and exact in float32, and a repeated update lands."""
    run = Run(eager())
    for loss, norm in pairs:
        finding = run.attempt(loss, norm)
        assert all(isfinite(one) and struct.unpack("f", struct.pack("f", one))[0] == one for one in run.checks.limits)
        if finding.repeat:
            assert run.refused(loss, norm) is None
        json.dumps(run.checks.state_dict(), allow_nan=False)


@QUICK
@given(PAIRS, st.integers(0, 10**6))
def test_what_is_not_finite_leaves_no_trace(pairs: list[tuple[float, float]], seed: int) -> None:
    """The same verdicts and limits follow, whether or not refused NaN and infinities lie between the updates."""
    dice = random.Random(seed)
    plain, disturbed = Run(eager()), Run(eager())
    for loss, norm in pairs:
        while dice.random() < 0.3:
            assert disturbed.attempt(dice.choice([nan, inf, -inf]), dice.choice([nan, inf, 1.0])).anomaly is not None
            disturbed.position -= 1
        expected, found = plain.attempt(loss, norm), disturbed.attempt(loss, norm)
        assert _without_ticks(found) == _without_ticks(expected)
        assert disturbed.checks.limits == plain.checks.limits


def _without_ticks(finding: Finding) -> Finding:
    anomaly = finding.anomaly
    return replace(finding, anomaly=anomaly and replace(anomaly, tick=0))


@functools.cache
def five_hundred(seed: int) -> tuple[Run, list[dict[str, Any]]]:
    """A healthy run of 500 updates, and what was learned before each of them and at the end."""
    run, states = Run(), []
    for pair in curve(500, seed=seed):
        states.append(copy.deepcopy(run.checks.state_dict()))
        assert run.attempt(*pair).anomaly is None
    return run, [*states, run.checks.state_dict()]


def way_back(back_to: int, *, seed: int, rise: float = 1.0) -> tuple[Run, list[Anomaly]]:
    """Damage is noticed at step 500, and the way from `back_to` is made again: returns the anomalies on it.

    Behind step 500 losses are `rise` times what they were.
    """
    healthy, states = five_hundred(seed)
    run = copy.deepcopy(healthy)
    run.rewind(Anomaly(Signal.DIVERGENCE, 500, run.tick, 490), states[back_to], back_to)
    pairs = curve(580, seed=seed + 9)
    pairs[500:] = [(loss * rise, norm) for loss, norm in pairs[500:]]
    return run, run.alarms(pairs[back_to:])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("back_to", [0, 1, 10, 50, 200, 489])
def test_the_way_back_after_a_deep_rewind_may_start_higher(back_to: int, seed: int) -> None:
    """Losses as high as they were on the way are no alarm, and the run is back a window behind where it had been."""
    run, alarms = way_back(back_to, seed=seed)
    assert (alarms, run.step) == ([], 580)
    assert not run.checks.episode.is_open


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("back_to", [10, 50, 200])
def test_a_deep_rewind_that_has_not_helped(back_to: int, seed: int) -> None:
    """An anomaly since the place that the run went back to: nothing that it has done from there on counts.

    After a second rewind to the same place healthy losses may start higher as well.
    """
    run, alarms = way_back(back_to, rise=1.15, seed=seed)
    first = alarms[0]
    assert (first.signal, first.since, first.landed) == (Signal.NOT_RECOVERED, back_to, True)
    assert 500 < first.step <= 550
    run.rewind(first, five_hundred(seed)[1][back_to], back_to)
    assert run.alarms(curve(620, seed=10 + seed)[back_to:]) == []
    assert not run.checks.episode.is_open


def resume(run: Run) -> None:
    """Continue with the checks of a process that has loaded all their state."""
    before, run.checks = run.checks, Checks(run.config)
    resumed = run.checks
    resumed.load_state_dict(json.loads(json.dumps(before.state_dict())))
    resumed.load_persistent_state(json.loads(json.dumps(before.persistent_state())))
    resumed.episode.load_persistent_state(json.loads(json.dumps(before.episode.persistent_state())))


def test_norms_are_learned_again_as_in_a_new_run() -> None:
    """An absurd norm among the first ones is left out again."""
    (limit := Run().checks.grad_limit).forget()
    for norm in (1e12, *[1.0] * 40):
        limit.learn(norm)
    assert limit.limit == 10.0


def test_a_descent_that_is_behind_does_not_blind_the_jump() -> None:
    """Two hundred steps into a run the losses it began with no longer stretch what counts as usual."""
    run = Run()
    assert run.alarms(curve(200)) == []
    assert len(run.alarms((loss + 2.5, norm) for loss, norm in curve(210)[200:])) == 1
