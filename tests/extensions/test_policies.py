"""The policies that are shipped, with all remedies: what they decide, and whether runs under them end."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import Fault, Run, decisions, default, landed, refused, rungs, trained, unknown
from omegaconf import OmegaConf

from resilient_train.core.decide import decide
from resilient_train.core.knobs import Knobs
from resilient_train.core.policy import parse
from resilient_train.core.remedies import KNOWN, Case, is_mild, remedy
from resilient_train.extensions import load
from resilient_train.ground.errors import ConfigError
from resilient_train.ground.files import conf
from resilient_train.ground.types import (
    Action,
    Anomaly,
    Cause,
    Decision,
    Diagnosis,
    Incident,
    Outcome,
    Signal,
    by_signal,
    fact,
)
from resilient_train.loop.arguments import policy as named

load()  # the remedies of all extensions
policy_named = functools.cache(named)  # reading YAML takes longer than most of these tests
SHIPPED = conf() / "recovery"
POLICIES = ["aggressive", "balanced", "conservative", "off", "palm", "skip"]  # that do something
FACTS = {"armor": False, "share": 0.0, "sharded": False, "lost_eps": False}
ANY = Case(refused(9), unknown(refused(9)), snapshots=4, rows=10_000, facts=FACTS)


def guilty(*rows: int) -> Callable[[Anomaly], Diagnosis]:
    return lambda anomaly: Diagnosis(Cause.DATA, rows=rows)


def run_with(name: str, fault: Fault, **more: Any) -> tuple[Run, Any]:
    return trained(policy_named(name), fault, like=ANY, diagnose=by_signal, **more)


# Further remedies, and the budget of rows.


@pytest.mark.parametrize(
    ("rung", "anomaly", "rows", "can", "expected"),
    [
        (["rewind", "limit_update"], landed(9), [], {"sgd": True}, ["rewind", "limit_update"]),
        (["rewind", "limit_update"], landed(9), [], {}, []),
        (["tighten_clip", "reset_moments", "rewind"], landed(9), [], {}, ["rewind", "reset_moments", "tighten_clip"]),
        (["rewind", "limit_update"], landed(9), [], {"sgd": True, "facts": {**FACTS, "sharded": True}}, []),
        (["quarantine"], refused(9), [], {}, []),
        (["quarantine"], refused(9), [17], {"rows": 0}, []),
        (["quarantine", "rewind", "skip"], landed(9), [17], {}, ["rewind", "quarantine"]),
        (["quarantine", "rewind", "skip"], landed(9), [], {}, ["rewind", "skip"]),
        (["reset_moments", "quarantine", "skip"], refused(9), [17], {}, ["skip", "quarantine", "reset_moments"]),
    ],
)
def test_further_remedies_of_a_rung(
    rung: list[Any], anomaly: Anomaly, rows: list[int], can: dict[str, Any], expected: list[str]
) -> None:
    """They apply where they make sense, in a fixed order."""
    diagnose = guilty(*rows) if rows else unknown
    (decision,) = decisions(parse(default(rung)), [anomaly], replace(ANY, **can), diagnose)
    assert [action.remedy for action in decision.actions] == expected


@pytest.mark.parametrize(
    ("budget", "rows", "count", "before", "broken"),
    [
        ({}, [1, 2], 100, 4, (6, 5)),
        ({}, [0], 1, 0, (1, 0)),
        ({}, [1], 1_000_000, 1000, (1001, 1000)),
        ({"rows": 3}, [1, 2, 3, 4], 100, 0, (4, 3)),
        ({"share": 1}, list(range(100)), 100, 0, (100, 99)),
        ({"share": 0}, [1], 100, 0, (1, 0)),
    ],
)
def test_a_data_set_loses_so_many_rows_and_no_more(
    budget: dict[str, Any], rows: list[int], count: int, before: int, broken: tuple[int, int] | None
) -> None:
    """Neither more than their number nor more than their share, but for one; beyond that the data set is broken."""
    policy = parse(default(["quarantine"], ["skip"], budget=budget))
    can = replace(ANY, rows=count, quarantined=before)
    (decision,) = decisions(policy, [refused(9)], can, guilty(*rows))
    if broken is not None:
        assert decision.gave_up == fact("data_broken", bad=broken[0], rows=count, allowed=broken[1])
    assert [action.remedy for action in decision.actions] == (["quarantine"] if broken is None else [])
    (other,) = decisions(policy, [refused(9)], can, guilty())  # no row is known to be guilty: the next rung
    assert [action.remedy for action in other.actions] == ["skip"]


def test_what_a_quarantine_costs() -> None:
    """The budget of refused updates, and not that of incidents; next to a rewind it is one. Where rows are not all of
    the cause, an exhausted budget of rows leaves other remedies.
    """
    assert not is_mild([Action("rewind"), Action("quarantine")])
    quarantine = {"do": ["quarantine"], "strikes": None}
    policy = parse(default(quarantine, budget={"refused": 3, "incidents": 0}))
    made = decisions(policy, [refused(n) for n in range(1, 9, 2)], ANY, guilty(1))
    assert rungs(made) == [0, 0, 0, fact("refused_in_window", count=3, window=1000)]
    few = parse(default(quarantine, {"do": ["skip"], "strikes": None}, budget={"rows": 0}))
    (one,) = decisions(few, [refused(9)], ANY, lambda anomaly: Diagnosis(Cause.OPERATION, rows=(7,)))
    assert [action.remedy for action in one.actions] == ["skip"]


@pytest.mark.parametrize(("left", "share"), [(0.0, 0.1), (0.06, 0.02), (0.9, 0.1)])
def test_updates_that_are_limited_already_are_limited_further(left: float, share: float) -> None:
    """The incident says by how much; never to more than the policy says."""
    can = replace(ANY, sgd=True, facts={**FACTS, "share": left})
    (found,) = decisions(parse(default(["rewind", "limit_update"])), [landed(9)], can)
    assert [dict(one.settings) for one in found.actions if one.remedy == "limit_update"] == [{"share": share}]


# Where a policy comes from.


@pytest.mark.parametrize("name", POLICIES)
def test_shipped_policies(name: str) -> None:
    """Each parses alike for Hydra and for a guard, and a remedy can be built from each of its actions."""
    assert {file.stem for file in SHIPPED.glob("*.yaml")} == {*POLICIES, "observe"}  # which has test_observe.py
    policy = named(name)
    assert policy == parse(OmegaConf.to_container(OmegaConf.load(SHIPPED / f"{name}.yaml"), resolve=True))
    for action in (action for ladder in policy.ladders.values() for rung in ladder for action in rung.do):
        assert isinstance(remedy(action), KNOWN[action.remedy])
        json.dumps(action.settings)


def test_a_policy_of_ones_own(tmp_path: Path) -> None:
    """A YAML file from anywhere is a policy like those of the package, numbers such as 1e-2 included."""
    file = tmp_path / "mine.yaml"
    file.write_text("ladders: {default: [[skip], [rewind, {lower_lr: {factor: 1e-2}}]]}\nstrikes: 2\n")
    policy = named(file)
    assert rungs(decisions(policy, [refused(1, n) for n in range(3)])) == [0, 0, 1]
    assert policy.ladders["default"][1].do[1] == Action("lower_lr", {"factor": 0.01})
    file.write_text("ladders: {default: &usual [[skip]], data: *usual}\n")
    assert named(file).ladders["data"] == named(file).ladders["default"]
    file.write_text("ladders: !!python/name:os.system")
    with pytest.raises(ConfigError, match=r"mine\.yaml: cannot be read: could not determine a constructor"):
        named(file)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("balance", None, r"recovery=balance: no such option; there are aggressive, balanced,"),
        ("missing.yaml", None, "recovery=missing.yaml: cannot be read: .* No such file"),
        ("mine.yaml", "7", "must be a mapping"),
    ],
)
def test_what_is_no_policy_is_refused_at_once(
    name: str, text: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever lies in a file, in one line and before it unfolds."""
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(name).write_text(text)
    with pytest.raises(ConfigError, match=why) as error:
        named(name)
    assert "\n" not in str(error.value)


# What runs come to.


@pytest.mark.parametrize(
    ("name", "has_landed"),
    [(name, landed) for name in POLICIES for landed in (False, True) if (name, landed) != ("skip", True)],
)
@pytest.mark.parametrize("signal", {by_signal(refused(1, signal=one)).cause: one for one in Signal}.values(), ids=str)
def test_a_fault_in_every_update_ends(name: str, has_landed: bool, signal: Signal) -> None:
    """Every policy gives up within its own budget: of updates in a row, or of rewinds to the same place."""
    budget = policy_named(name).budget
    always: Fault = lambda run: Anomaly(signal, run.step + 1, run.tick, run.step, landed=has_landed)  # noqa: E731
    run, history = run_with(name, always)
    assert history.incidents[-1].decision.gave_up is not None
    assert run.tick <= (budget.incidents if has_landed else budget.in_a_row) + 1
    assert has_landed or run.step == 0


@pytest.mark.parametrize(
    ("name", "every", "completes"),
    [
        *[(name, 3, True) for name in ("balanced", "aggressive", "skip", "palm")],
        ("conservative", 40, True),
        ("conservative", 3, False),
        ("off", 600, False),
    ],
)
@pytest.mark.parametrize("signal", [Signal.NONFINITE_BATCH, Signal.NONFINITE_GRAD])
def test_bad_samples_here_and_there(name: str, every: int, completes: bool, signal: Signal) -> None:
    """Many incidents that cost nothing but themselves are borne: the update is skipped, nothing else is touched."""

    def fault(run: Run) -> Anomaly | None:
        return refused(run.step + 1, run.tick, signal) if run.position % every == every - 1 else None

    run, history = run_with(name, fault)
    assert (history.incidents[-1].decision.gave_up is None) == completes
    assert not completes or (set(run.done), run.knobs.turned) == ({"skip"}, Knobs().turned)


@pytest.mark.parametrize(
    ("name", "bearable", "completes"),
    [
        ("balanced", 0.7, True),
        ("aggressive", 0.03, True),
        ("conservative", 0.7, False),
    ],
)
def test_a_rate_that_is_too_high(name: str, bearable: float, completes: bool) -> None:
    """It is lowered until it holds, and not raised so often again that it ends the run; others give up."""
    hot = 0

    def fault(run: Run) -> Anomaly | None:
        nonlocal hot
        hot = hot + 1 if run.step >= 100 and run.knobs.rate > bearable else 0
        return landed(run.step + 1, run.tick) if hot and hot % 8 == 0 else None

    _, history = run_with(name, fault, steps=8_000, most_ticks=9_000)
    assert (history.incidents[-1].decision.gave_up is None) == completes
    assert len(history.incidents) < 30


ONCE = [
    *[(refused(50, signal=Signal(name)), "unknown") for name in ("nonfinite_grad", "nonfinite_loss", "grad_spike")],
    (refused(50, signal=Signal.NONFINITE_BATCH), "data"),
    (refused(50, signal=Signal.SCALE_COLLAPSE), "overflow"),
    (landed(50, signal=Signal.LOSS_SPIKE), "unknown"),
    (replace(landed(50, signal=Signal.LOSS_SPIKE), evidence=fact("loss_outside", stays=True)), "explosion"),
    (landed(50, signal=Signal.DIVERGENCE), "explosion"),
    (landed(50, signal=Signal.WEIGHTS_JUMP), "corruption"),
    (landed(50, signal=Signal.OPTIMIZER_RANGE), "optimizer"),
]


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "off"])
@pytest.mark.parametrize(("anomaly", "cause"), ONCE)
def test_one_fault_is_cured_by_the_first_rung(name: str, anomaly: Anomaly, cause: str) -> None:
    """A fault that comes once costs one incident; what landed is rewound, corruption loses no samples."""
    run, history = run_with(name, lambda run: replace(anomaly, tick=50) if run.tick == 50 else None)
    (incident,) = history.incidents
    assert (incident.diagnosis.cause, incident.outcome) == (cause, Outcome.RECOVERED)
    assert ("rewind" in run.done) == (anomaly.landed and name != "skip")
    assert cause != "corruption" or "skip" not in run.done
    assert run.knobs.turned == Knobs().turned


@pytest.mark.parametrize("policy", ["balanced", "aggressive"])
def test_an_explosion_first_warms_up(policy: str) -> None:
    """From the rung that lowers the rate on; the rung before it only warms up."""

    def rewound(rung: int, tick: int) -> Incident:
        decision = Decision((Action("rewind"),), rung)
        return Incident(tick, landed(200, tick), Diagnosis(Cause.EXPLOSION), decision, rewound_to=150)

    def decided(*history: Incident, **can: Any) -> Decision:
        case = replace(ANY, anomaly=landed(200, 300), diagnosis=Diagnosis(Cause.EXPLOSION), **can)
        return decide(policy_named(policy), case, history)

    for history, factor in ((), 1), ((rewound(2, 200), rewound(2, 250)), 0.5):
        (lowered,) = (one for one in decided(*history).actions if one.remedy == "lower_lr")
        assert lowered.settings["factor"] == factor
