"""Policies as data, decisions, and what becomes of incidents. No torch, no training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from cases import ANY, Run, decisions, default, landed, met, refused, rungs, trained, unknown
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table

from resilient_train.core.decide import decide
from resilient_train.core.policy import parse
from resilient_train.core.remedies import is_mild, remedy
from resilient_train.durable.incident_log import IncidentLog
from resilient_train.ground.errors import ConfigError
from resilient_train.ground.types import (
    Action,
    Anomaly,
    Cause,
    Culprit,
    Decision,
    Diagnosis,
    Facts,
    Incident,
    Outcome,
    Signal,
    by_signal,
    fact,
)
from resilient_train.ground.wording import say

ENDLESS = {"do": ["skip"], "strikes": None}
THREE = {"default": [["skip"], ["rewind", "skip"], [{"rewind": {"older": 1}}, "lower_lr"]]}


def spent(count: int) -> Facts:
    return fact("ladder_exhausted", cause="unknown", count=count)


@table(
    ("policy", "anomalies", "expected"),
    {
        "a refused update takes the first rung": ({}, [refused(7)], [0]),
        "skip cannot help what landed": ({}, [landed(7)], [1]),
        "it climbs": ({}, [refused(7), refused(7, 8), refused(7, 9), refused(7, 10)], [0, 1, 2, spent(3)]),
        "strikes to a rung": ({"strikes": 2}, [refused(7, n) for n in range(7, 12)], [0, 0, 1, 1, 2]),
        "not yet forgiven": ({"forgive_after": 100}, [landed(7), landed(106)], [1, 2]),
        "forgiven": ({"forgive_after": 100}, [landed(7), landed(107)], [1, 1]),
        "forgiven for good": ({"forgive_after": 100, "strikes": 2}, [landed(7), landed(107), landed(120)], [1, 1, 1]),
        "no progress is not forgiven": ({"forgive_after": 100}, [landed(7), landed(7, 900)], [1, 2]),
        "after a long rewind the way back is no progress": (
            {"forgive_after": 100},
            [landed(500, 500), landed(200, 700), landed(550, 1050)],
            [1, 2, spent(2)],
        ),
        "what lower rungs pass over does not bring a spent rung back": (
            default(ENDLESS, *THREE["default"][1:], forgive_after=100),
            [landed(7), landed(50), *[refused(n) for n in range(60, 145, 5)], landed(145)],
            [1, 2, *[0] * 17, spent(2)],
        ),
        "what lower rungs pass over does not keep a cause from being forgiven": (
            default(ENDLESS, *THREE["default"][1:], forgive_after=100),
            [landed(7), landed(50), *[refused(n) for n in range(60, 155, 5)], landed(155)],
            [1, 2, *[0] * 19, 1],
        ),
        "unlimited strikes": (
            default(ENDLESS, ["rewind"], budget={"in_a_row": 500}),
            [refused(1, n) for n in range(400)],
            [0] * 400,
        ),
        "strikes within some ticks": (
            default({"do": ["skip"], "strikes": 2, "within": 5}, ["rewind"]),
            [refused(1), refused(4), refused(6), refused(20)],
            [0, 0, 1, 0],
        ),
        "a rung for what landed": (
            default({"do": ["rewind"], "landed": True}, ["skip"]),
            [refused(7), landed(9)],
            [1, 0],
        ),
        "an empty ladder": (default(), [refused(7)], [fact("no_remedy", cause="unknown")]),
        "none applies": (default(["skip"]), [landed(7)], [fact("none_applies", cause="unknown")]),
        "a budget over a window": (
            {"budget": {"incidents": 2, "window": 51}, "forgive_after": 1},
            [landed(10), landed(20), landed(70), landed(71)],
            [1, 1, 1, fact("incidents_in_window", count=2, window=51)],
        ),
        "refused updates": (
            {"budget": {"refused": 2, "window": 10}, "forgive_after": 1},
            [refused(n) for n in (1, 3, 14, 16, 18)],
            [0, 0, 0, 0, fact("refused_in_window", count=2, window=10)],
        ),
        "refused in a row": (
            {"budget": {"in_a_row": 2}, "strikes": 9},
            [refused(1, 1), refused(1, 2), refused(2, 4), refused(2, 5), refused(2, 6)],
            [0, 0, 0, 0, fact("in_a_row", count=2, limit=2)],
        ),
        "what landed was not refused in a row": (
            {"budget": {"in_a_row": 2}, "strikes": 9},
            [landed(1, 1), landed(1, 2), refused(1, 3)],
            [1, 1, 0],
        ),
        "what landed and was reported was not refused": (
            default({"do": ["skip", "report"], "strikes": None}, budget={"refused": 1}),
            [landed(1), landed(3), refused(5), landed(7), refused(9)],
            [0, 0, 0, 0, fact("refused_in_window", count=1, window=1000)],
        ),
    },
)
def test_rungs_by_history(policy: dict[str, Any], anomalies: list[Anomaly], expected: list[int | Facts]) -> None:
    """A rung is taken by strikes since the cause was forgiven, and budgets come first; the end has one reason."""
    assert rungs(decisions(parse({"ladders": THREE, **policy}), anomalies)) == expected


@table(
    ("steps", "expected"),
    {
        "nothing is proven yet": ([7], [0]),
        "not begun later": ([120], [1]),
        "its strikes": ([7, 8, 9, 10], [0, 0, 0, 1]),
        "begun, it goes on": ([7, 120, 190], [0, 0, 0]),
        "until it is forgiven": ([7, 120, 330], [0, 0, 1]),
    },
)
def test_a_rung_for_the_start_of_a_run(steps: list[int], expected: list[int]) -> None:
    """It is begun while no state but the first is proven, and taken until its strikes are used up or forgiven."""
    policy = parse(default({"do": ["rewind"], "strikes": 3, "at_start": True}, ["report"]))
    history: list[Incident] = []
    for number, step in enumerate(steps, start=1):
        case = replace(ANY, at_start=step < 100, anomaly=landed(step))
        history.append(Incident(number, case.anomaly, case.diagnosis, decide(policy, case, tuple(history))))
    assert [one.decision.rung for one in history] == expected


@pytest.mark.parametrize(
    ("rung", "anomaly", "can", "expected"),
    [
        (["skip", "rewind"], landed(9), {}, ["rewind", "skip"]),
        (["skip", "rewind"], refused(9), {}, ["rewind", "skip"]),
        (["skip", "rewind"], landed(9), {"snapshots": 0}, []),
        (["skip", "rewind"], refused(9), {"snapshots": 0}, ["skip"]),
        ([{"skip": {"updates": 5}}], landed(9), {}, ["skip"]),
        (["skip", "report"], landed(9), {}, ["report"]),
        (["skip", "report"], refused(9), {}, ["skip"]),
        (["repeat"], refused(9), {}, ["repeat"]),
        (["repeat"], landed(9), {}, []),
        (["lower_lr", "tighten_clip"], landed(9), {"own_rates": True}, ["tighten_clip"]),
        (["rewind", {"lower_lr": {"factor": 1, "rewarm": 10}}], landed(9), {}, ["rewind", "lower_lr"]),
        (
            ["tighten_clip", "lower_lr", "skip", {"rewind": {"steps": 9}}],
            landed(9),
            {},
            ["rewind", "skip", "lower_lr", "tighten_clip"],
        ),
    ],
)
def test_remedies_of_a_rung(rung: list[Any], anomaly: Anomaly, can: dict[str, Any], expected: list[str]) -> None:
    """A rung keeps the remedies that apply, in a fixed order; one of which none applies is passed over."""
    (decision,) = decisions(parse(default(rung)), [anomaly], replace(ANY, **can))
    assert [action.remedy for action in decision.actions] == expected
    assert (decision.gave_up is None) == bool(expected)


def test_a_run_taken_up_again_has_a_clean_slate() -> None:
    """What came before it gave up counts no more, or a better configuration would end at once as well."""
    policy = parse({"ladders": THREE})
    history = met(policy, [refused(7, n) for n in range(7, 11)])
    assert history[-1].decision.gave_up is not None
    again = decide(policy, replace(ANY, anomaly=refused(7, 11)), history)
    assert again == Decision((Action("skip"),), 0)


def ladder(*rungs: Any) -> dict[str, Any]:
    return {"ladders": {"default": [["skip"]], "data": list(rungs)}}


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (ladder(["skip"], ["rewnd"]), "ladders.data[1][0]=rewnd: no such remedy; there are rewind"),
        (ladder([{"rewind": {"oldr": 1}}]), "ladders.data[0][0].rewind.oldr=1: no such key; there are older"),
        (ladder([{"report": {"to": 1}}]), "recovery.ladders.data[0][0].report.to=1: no such key; there is none"),
        (ladder([{"lower_lr": {"factor": 2}}]), "factor=2: must be a finite number (greater than 0, at most 1)"),
        (ladder([{"skip": 200}]), "recovery.ladders.data[0][0].skip=200: must be a mapping with the keys updates"),
        (ladder([{"skip": {}, "rewind": {}}]), "data[0][0]={'skip': {}, 'rewind': {}}: must be the name of"),
        (ladder([3]), "recovery.ladders.data[0][0]=3: must be the name of a remedy"),
        (ladder([]), "recovery.ladders.data[0]: a rung needs a remedy; to leave things as they are, say [report]"),
        (ladder({"do": ["skip"], "strike": 2}), "data[0].strike=2: no such key; there are do,"),
        (ladder({"skip": {"updates": 3}}), "recovery.ladders.data[0]={'skip': {'updates': 3}}: a rung is a list"),
        ({"ladders": {"default": "skip"}}, "recovery.ladders.default=skip: a ladder is a list of rungs"),
        ({"ladders": {"default": [], "dat": []}}, "recovery.ladders.dat=[]: no such cause; there are default, data"),
        ({"ladders": {"data": []}}, "recovery.ladders.default: has to be given"),
        ({}, "recovery.ladders: has to be given"),
        ({**ladder(), "budget": 5}, "recovery.budget=5: must be a mapping with the keys incidents, refused"),
    ],
)
def test_what_is_wrong_in_a_policy_is_named_by_its_position(tree: Any, said: str) -> None:
    """One line says where it is, what stands there, and what is allowed."""
    with pytest.raises(ConfigError) as error:
        parse(tree)
    assert said in str(error.value)
    assert str(error.value).startswith("recovery")
    assert "\n" not in str(error.value)


# Whatever happens.

REMEDIES = ["rewind", "skip", "repeat", "report", "lower_lr", "tighten_clip"]
some_rungs = st.builds(
    lambda names, strikes, within, landed: {"do": names, "strikes": strikes, "within": within, "landed": landed},
    st.lists(st.sampled_from(REMEDIES), min_size=1, max_size=3, unique=True),
    *(st.sampled_from([None, 1, 2, 9]), st.sampled_from([None, 20]), st.booleans()),
)
policies = st.builds(
    lambda data, others: parse({"ladders": {"default": others, "data": data}}),
    *(st.lists(some_rungs, max_size=3), st.lists(some_rungs, max_size=4)),
)
signals = st.sampled_from(Signal)


@st.composite
def series(draw: st.DrawFn) -> list[Anomaly]:
    """Any troubles, at ticks that never go back and steps that may."""
    tick, anomalies = 0, []
    for _ in range(draw(st.integers(1, 25))):
        tick += draw(st.sampled_from([1, 1, 1, 2, 10, 400]))
        step = draw(st.integers(1, tick))
        anomalies.append(Anomaly(draw(signals), step, tick, draw(st.integers(0, step)), (), draw(st.booleans())))
    return anomalies


@settings(max_examples=80, deadline=None)
@given(policy=policies, anomalies=series(), can=st.builds(replace, st.just(ANY), snapshots=st.integers(0, 4)))
def test_decisions_are_total_and_the_same_everywhere(policy: Any, anomalies: list[Anomaly], can: Any) -> None:
    """Whatever happens, a policy prescribes something that applies or gives up, and every rank comes to the same."""
    made = decisions(policy, anomalies, can, by_signal)
    assert made == decisions(policy, anomalies, can, by_signal)
    for decision, anomaly in zip(made, anomalies, strict=False):
        assert bool(decision.actions) == (decision.gave_up is None)
        rewinds = any(one.remedy == "rewind" for one in decision.actions)
        case = replace(can, anomaly=anomaly, diagnosis=by_signal(anomaly), rewinds=rewinds)
        assert all(remedy(action).applies(case) for action in decision.actions)


troubles = st.tuples(signals, st.booleans(), st.integers(0, 3))


@settings(max_examples=60, deadline=None)
@given(policy=policies, faults=st.lists(troubles, min_size=1, max_size=6))
def test_an_endless_series_ends(policy: Any, faults: list[tuple[Signal, bool, int]]) -> None:
    """Any pattern of troubles that repeats for ever ends in a bounded number of updates: finished or given up."""
    pattern = [fault for signal, has_landed, healthy in faults for fault in [(signal, has_landed), *[None] * healthy]]

    def fault(run: Run) -> Anomaly | None:
        if (one := pattern[run.tick % len(pattern)]) is None:
            return None
        return Anomaly(one[0], run.step + 1, run.tick, max(0, run.step - 3), landed=one[1])

    trained(policy, fault, steps=300)


@pytest.mark.parametrize("signal", list(Signal))
@pytest.mark.parametrize("has_landed", [True, False])
def test_every_signal_has_a_cause_and_advice(signal: Signal, has_landed: bool) -> None:
    """What is known without a diagnosis says something that a person can act on, in one sentence."""
    diagnosis = by_signal(Anomaly(signal, 5, 5, 4, landed=has_landed))
    (advice,) = diagnosis.advice
    assert say([advice]).endswith(".")
    assert diagnosis.culprit is None


# What becomes of incidents.

DATA, EXPLOSION = Diagnosis(Cause.DATA), Diagnosis(Cause.EXPLOSION)
SKIPPED = Decision((Action("skip"),))


def closed_by(history: IncidentLog, change: Callable[[], object]) -> list[tuple[int, str | None]]:
    """What a change has closed of what was open before it."""
    before = {one.id for one in history.open_incidents}
    change()
    return [(one.id, one.outcome) for one in history.incidents if one.id in before and one.outcome is not None]


def accept(history: IncidentLog, steps: Iterable[int]) -> list[tuple[int, str | None]]:
    accepted = functools.partial(history.update_accepted, recovered_after=50, loss_is_off=False)
    return [one for step in steps for one in closed_by(history, functools.partial(accepted, step))]


def test_the_same_trouble_again_closes_the_one_before() -> None:
    """The same cause and line, sooner: it recurred. Another cause or line, or another unknown signal, is another."""
    line = Culprit("forward", "log", "head", "losses.py", 41, inputs=({"min": 0.0},))
    elsewhere = replace(line, inputs=({"min": -1.0},))
    history = IncidentLog(None)
    for step, anomaly, diagnosis, closes in (
        (1, refused(1), DATA, []),
        (2, refused(2), EXPLOSION, []),
        (3, refused(3), replace(DATA, culprit=line), []),
        (4, refused(4), DATA, [(1, "recurred")]),
        (5, refused(5), replace(DATA, culprit=elsewhere), [(3, "recurred")]),
        (6, refused(5, signal=Signal.NONFINITE_GRAD), unknown(refused(5)), []),
        (7, refused(5, signal=Signal.GRAD_SPIKE), unknown(refused(5)), []),
        (8, refused(5, signal=Signal.NONFINITE_GRAD), unknown(refused(5)), [(6, "recurred")]),
    ):
        again = functools.partial(history.open, anomaly, diagnosis, SKIPPED)
        assert closed_by(history, again) == closes, step
    assert accept(history, range(5, 55)) == [(number, "recovered") for number in (2, 4, 5, 7, 8)]
    assert history.tally() == {"total": 8, "recovered": 5, "by_cause": {"data": 4, "explosion": 1, "unknown": 3}}


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
    incident = history.open(anomaly, Diagnosis(cause), SKIPPED)
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
        gave_up = Decision(gave_up=fact("text", text="enough"))
        history.open(refused(120), Diagnosis(Cause.OVERFLOW), gave_up)
        assert history.incidents[0].outcome is Outcome.GAVE_UP
        assert history.incidents[1].outcome is Outcome.GAVE_UP
        assert history.open_incidents == []


def test_which_remedies_are_mild() -> None:
    """Those that change neither weights nor knobs, and skip no more than the suspect samples: they cost no strike."""
    for names, mild in (("skip", True), ("repeat report", True), ("rewind skip", False), ("skip lower_lr", False)):
        assert is_mild([Action(name) for name in names.split()]) == mild
    assert not is_mild([Action("skip", {"updates": 5})])
