"""Recovery: policies as data, decisions, knobs, and what becomes of incidents. No torch, no training."""

from __future__ import annotations

import functools
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tables import table

from resilient_train.core.decide import decide, recent
from resilient_train.core.knobs import MAX_EPS, MIN_CLIP, MIN_LR, Knobs, KnobValues
from resilient_train.core.policy import Policy, parse
from resilient_train.core.remedies import KNOWN, Case, is_mild, remedy
from resilient_train.durable.incident_log import IncidentLog
from resilient_train.extensions import load
from resilient_train.extensions.optimizer_remedies import LastingRemedies
from resilient_train.extensions.trials import Trial
from resilient_train.ground.errors import ConfigError
from resilient_train.ground.files import conf
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
from resilient_train.loop.arguments import policy as named

policy_named = functools.cache(named)  # reading YAML takes longer than most of these tests

SHIPPED = conf() / "recovery"
POLICIES = ["aggressive", "balanced", "conservative", "off", "palm", "skip"]  # that do something


def refused(step: int, tick: int | None = None, signal: Signal = Signal.NONFINITE_LOSS) -> Anomaly:
    return Anomaly(signal, step, step if tick is None else tick, step - 1, landed=False)


def landed(step: int, tick: int | None = None, signal: Signal = Signal.DIVERGENCE) -> Anomaly:
    return Anomaly(signal, step, step if tick is None else tick, max(0, step - 5), landed=True)


def unknown(anomaly: Anomaly) -> Diagnosis:
    return Diagnosis(Cause.UNKNOWN)


load()
FACTS = {"loss_scaler": True, "armor": False, "share": 0.0, "mends_eps": False, "trial_updates": 0}
ANY = Case(refused(9), unknown(refused(9)), snapshots=4, rows=10_000, facts=FACTS)


def case_of(anomaly: Anomaly, diagnosis: Diagnosis, like: Case = ANY) -> Case:
    return replace(like, anomaly=anomaly, diagnosis=diagnosis)


def guilty(*rows: int) -> Callable[[Anomaly], Diagnosis]:
    return lambda anomaly: Diagnosis(Cause.DATA, rows=rows)


def met(
    policy: Policy,
    anomalies: Iterable[Anomaly],
    can: Case = ANY,
    diagnose: Callable[[Anomaly], Diagnosis] = unknown,
) -> list[Incident]:
    """What becomes of a series, until it is given up."""
    history: list[Incident] = []
    for anomaly in anomalies:
        decision = decide(policy, case_of(anomaly, diagnose(anomaly), can), tuple(history))
        history.append(Incident(len(history) + 1, anomaly, diagnose(anomaly), decision))
        if decision.gave_up is not None:
            break
    return history


def decisions(*given: Any, **more: Any) -> list[Decision]:
    """What is decided about each."""
    return [incident.decision for incident in met(*given, **more)]


def rungs(made: Sequence[Decision]) -> list[int | Facts]:
    """The rungs that were taken, and why it was given up."""
    return [decision.gave_up or decision.rung for decision in made]


ENDLESS = {"do": ["skip"], "strikes": None}


def default(*rungs: Any, **more: Any) -> dict[str, Any]:
    """A policy with one ladder for all causes."""
    return {"ladders": {"default": list(rungs)}, **more}


def spent(count: int) -> Facts:
    return fact("ladder_exhausted", cause="unknown", count=count)


THREE = {"default": [["skip"], ["rewind", "skip"], [{"rewind": {"older": 1}}, "lower_lr"]]}


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
        "a run": (
            {"budget": {"run": 2}, "forgive_after": 1},
            [landed(n) for n in (1, 9000, 90000)],
            [1, 1, fact("incidents_in_run", count=2)],
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
        can, anomaly = replace(ANY, at_start=step < 100), landed(step)
        decision = decide(policy, case_of(anomaly, unknown(anomaly), can), tuple(history))
        history.append(Incident(number, anomaly, unknown(anomaly), decision))
    assert [one.decision.rung for one in history] == expected


@pytest.mark.parametrize(
    ("rung", "anomaly", "rows", "can", "expected"),
    [
        (["skip", "rewind"], landed(9), [], {}, ["rewind", "skip"]),
        (["skip", "rewind"], refused(9), [], {}, ["rewind", "skip"]),
        (["skip", "rewind"], landed(9), [], {"snapshots": 0}, []),
        (["skip", "rewind"], refused(9), [], {"snapshots": 0}, ["skip"]),
        ([{"skip": {"updates": 5}}], landed(9), [], {}, ["skip"]),
        (["skip", "report"], landed(9), [], {}, ["report"]),
        (["skip", "report"], refused(9), [], {}, ["skip"]),
        (["repeat"], refused(9), [], {}, ["repeat"]),
        (["repeat"], landed(9), [], {}, []),
        (["skip", "lower_loss_scale"], refused(9), [], {}, ["skip", "lower_loss_scale"]),
        (["skip", "lower_loss_scale"], refused(9), [], {"facts": {**FACTS, "loss_scaler": False}}, ["skip"]),
        (["rewind", "limit_update"], landed(9), [], {"sgd": True}, ["rewind", "limit_update"]),
        (["rewind", "limit_update"], landed(9), [], {}, []),
        (
            ["raise_eps", "tighten_clip", "lower_lr", "reset_moments", "skip", {"rewind": {"steps": 9}}],
            landed(9),
            [],
            {},
            ["rewind", "skip", "reset_moments", "lower_lr", "tighten_clip", "raise_eps"],
        ),
        (["quarantine"], refused(9), [17], {}, ["quarantine"]),
        (["quarantine"], refused(9), [], {}, []),
        (["quarantine"], refused(9), [17], {"rows": 0}, []),
        (["quarantine"], landed(9), [17], {}, []),
        (["quarantine", "rewind"], landed(9), [17], {}, ["rewind", "quarantine"]),
        (["quarantine", "rewind", "skip"], landed(9), [17], {}, ["rewind", "quarantine"]),
        (["quarantine", "rewind", "skip"], landed(9), [], {}, ["rewind", "skip"]),
        (["reset_moments", "quarantine", "skip"], refused(9), [17], {}, ["skip", "quarantine", "reset_moments"]),
        (["quarantine", "skip"], refused(9), [], {}, ["skip"]),
    ],
)
def test_remedies_of_a_rung(
    rung: list[Any], anomaly: Anomaly, rows: list[int], can: dict[str, Any], expected: list[str]
) -> None:
    """A rung keeps the remedies that apply, in a fixed order; one of which none applies is passed over."""
    policy = parse(default(rung))
    diagnose = guilty(*rows) if rows else unknown
    (decision,) = decisions(policy, [anomaly], replace(ANY, **can), diagnose)
    assert [action.remedy for action in decision.actions] == expected
    assert (decision.gave_up is None) == bool(expected)


@pytest.mark.parametrize(
    ("budget", "rows", "count", "before", "broken"),
    [
        ({}, [1, 2], 100, 3, None),
        ({}, [1, 2], 100, 4, (6, 5)),
        ({}, [1], 10, 0, None),
        ({}, [1, 2], 10, 0, (2, 1)),
        ({}, [0], 1, 0, (1, 0)),
        ({}, [1], 1_000_000, 1000, (1001, 1000)),
        ({"rows": 3}, [1, 2, 3, 4], 100, 0, (4, 3)),
        ({"share": 1}, list(range(99)), 100, 0, None),
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


def test_only_the_budget_of_rows_leaves_other_remedies() -> None:
    """An operation that breaks with some rows: other remedies may be left, unless the run has met too much."""

    def diagnose(anomaly: Anomaly) -> Diagnosis:
        return Diagnosis(Cause.OPERATION, rows=(7,))

    quarantine = {"do": ["quarantine"], "strikes": None}
    few = parse(default(quarantine, ENDLESS, budget={"rows": 0}))
    (made,) = decisions(few, [refused(9)], diagnose=diagnose)
    assert [action.remedy for action in made.actions] == ["skip"]
    met = parse(default(quarantine, {"do": ["rewind"], "strikes": None}, budget={"refused": 2}))
    made = decisions(met, [refused(n) for n in (1, 3, 5)], diagnose=diagnose)[-1]
    assert made.gave_up == fact("refused_in_window", count=2, window=1000)


def test_a_quarantine_passes_over() -> None:
    """Of a refused update it costs the budget of those, not that of incidents; next to a rewind it is one."""
    assert not is_mild([Action("rewind"), Action("quarantine")])
    rows = {"default": [{"do": ["quarantine"], "strikes": None}]}
    policy = parse({"ladders": rows, "budget": {"refused": 3, "incidents": 0, "run": 0}})
    made = decisions(policy, [refused(n) for n in range(1, 9, 2)], diagnose=guilty(1))
    assert rungs(made) == [0, 0, 0, fact("refused_in_window", count=3, window=1000)]


def test_a_run_taken_up_again_has_a_clean_slate() -> None:
    """What came before it gave up counts no more, or a better configuration would end at once as well."""
    policy = parse({"ladders": THREE})
    history = met(policy, [refused(7, n) for n in range(7, 11)])
    assert history[-1].decision.gave_up is not None
    again = decide(policy, case_of(refused(7, 11), unknown(refused(7))), history)
    assert again == Decision((Action("skip"),), 0)


# Parsing.


def ladder(*rungs: Any) -> dict[str, Any]:
    return {"ladders": {"default": [["skip"]], "data": list(rungs)}}


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (ladder(["skip"], ["rewnd"]), "ladders.data[1][0]=rewnd: no such remedy; did you mean rewind? There are"),
        (ladder(["skip", "cure"]), "recovery.ladders.data[0][1]=cure: no such remedy; there are rewind, skip,"),
        (ladder({"do": ["skip", "rewnd"]}), "data[0].do[1]=rewnd: no such remedy; did you mean rewind?"),
        (ladder([{"rewind": {"oldr": 1}}]), "ladders.data[0][0].rewind.oldr=1: no such key; did you mean older?"),
        (ladder([{"report": {"to": 1}}]), "recovery.ladders.data[0][0].report.to=1: no such key; there is none"),
        (ladder([{"lower_lr": {"factor": 2}}]), "factor=2: must be a finite number (greater than 0, at most 1)"),
        (ladder([{"lower_lr": {"factor": float("nan")}}]), "lower_lr.factor=nan: must be a finite number (greater"),
        (ladder([{"rewind": {"older": True}}]), "rewind.older=True: must be a whole number (at least 0)"),
        (ladder([{"skip": {"updates": 0}}]), "skip.updates=0: must be a whole number (at least 1) or null"),
        (ladder([{"skip": 200}]), "recovery.ladders.data[0][0].skip=200: must be settings, such as {name: value}"),
        (ladder([{"skip": {}, "rewind": {}}]), "data[0][0]={'skip': {}, 'rewind': {}}: must be the name of"),
        (ladder([3]), "recovery.ladders.data[0][0]=3: must be the name of a remedy"),
        (ladder([]), "recovery.ladders.data[0]: a rung needs a remedy; to leave things as they are, say [report]"),
        (ladder({"do": ["skip"], "strike": 2}), "data[0].strike=2: no such key; did you mean strikes? There are do,"),
        (ladder({"strikes": 2, "within": 3}), "recovery.ladders.data[0].do: has to be given"),
        (ladder([{"trial": {"of": [["raise_eps"]]}}]), "at least two arms"),
        (ladder(["trial"]), "trial.of: has to be given"),
        (ladder([{"trial": {"of": [["raise_eps"], ["lower_lr"]]}}]), "[0].trial.of[1]: lower_lr cannot be tried: what"),
        (ladder({"do": ["skip"], "strikes": 0}), "data[0].strikes=0: must be a whole number (at least 1) or null"),
        (ladder({"skip": {"updates": 3}}), "recovery.ladders.data[0]={'skip': {'updates': 3}}: a rung is a list"),
        (ladder(["skip", "rewind", "skip"]), "recovery.ladders.data[0][2]: skip is named twice in one rung"),
        ({"ladders": {"default": "skip"}}, "recovery.ladders.default=skip: a ladder is a list of rungs"),
        ({"ladders": {"default": [], "dat": []}}, "recovery.ladders.dat=[]: no such cause; did you mean data?"),
        ({"ladders": {"data": []}}, "recovery.ladders.default: has to be given"),
        ({}, "recovery.ladders: has to be given"),
        ("balanced", "recovery=balanced: must be a mapping with the keys ladders, strikes,"),
        ({**ladder(), "strikes": 0}, "recovery.strikes=0: must be a whole number (at least 1) or null"),
        ({**ladder(), "budget": 5}, "recovery.budget=5: must be a mapping with the keys incidents, run, refused"),
        ({**ladder(), "budget": {"share": 1.5}}, "recovery.budget.share=1.5: must be a finite number (at least 0, at"),
    ],
)
def test_what_is_wrong_in_a_policy_is_named_by_its_position(tree: Any, said: str) -> None:
    """One line says where it is, what stands there, and what is allowed."""
    with pytest.raises(ConfigError) as error:
        parse(tree)
    assert said in str(error.value)
    assert str(error.value).startswith("recovery")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", POLICIES)
def test_shipped_policies(name: str) -> None:
    """Each parses alike for Hydra and for a guard, and a remedy can be built from each of its actions."""
    assert {file.stem for file in SHIPPED.glob("*.yaml")} == {*POLICIES, "observe"}  # which has test_observe.py
    policy = named(name)
    assert policy == parse(OmegaConf.to_container(OmegaConf.load(SHIPPED / f"{name}.yaml"), resolve=True))
    for rungs in policy.ladders.values():
        for rung in rungs:
            for action in rung.do:
                assert action.remedy in KNOWN
                assert isinstance(remedy(action), KNOWN[action.remedy])
                json.dumps(action.settings, default=asdict)  # a trial has actions of its own


@pytest.mark.parametrize(("left", "rung"), [(1000, 0), (50, 1)])
def test_a_trial_beyond_its_budget_is_passed_over(left: int, rung: int) -> None:
    """Two arms of 20 updates, and the forwards that judge them."""
    trial = {"trial": {"of": [["tighten_clip"], ["raise_eps"]], "steps": 20}}
    (made,) = decisions(
        parse(default([trial], ["skip"])), [refused(1)], replace(ANY, facts={**FACTS, "trial_updates": left})
    )
    assert made.rung == rung


def test_a_policy_of_ones_own(tmp_path: Path) -> None:
    """A YAML file from anywhere is a policy like those of the package, numbers such as 1e-2 included."""
    file = tmp_path / "mine.yaml"
    file.write_text("ladders: {default: [[skip], [rewind, {lower_lr: {factor: 1e-2}}]]}\nstrikes: 2\n")
    policy = named(file)
    assert rungs(decisions(policy, [refused(1, n) for n in range(3)])) == [0, 0, 1]
    assert policy.ladders["default"][1].do[1] == Action("lower_lr", {"factor": 0.01})
    file.write_text("ladders: {default: &usual [[skip]], data: *usual}\n")
    assert named(file).ladders["data"] == named(file).ladders["default"]


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("balance", None, r"recovery=balance: no such option; did you mean balanced\? There are aggressive, balanced,"),
        ("nowhere/mine.yaml", None, r"recovery=nowhere/mine\.yaml: cannot be read: No such file or directory"),
        ("mine.yaml", "ladders: !!python/name:os.system", "could not determine a constructor"),
        ("mine.yaml", "7", "must be a mapping"),
        ("mine.yaml", "ladders: {default: [[skip]\n", r"mine\.yaml: is not YAML: .*line 2"),
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


OWN = """
from dataclasses import dataclass
from resilient_train.core.remedies import Remedy, limited

@dataclass(frozen=True)
class Halve(Remedy):
    times: int = limited(1, at_least=1)

    def apply(self, run):
        run.knobs.turn_lr(0.5**self.times)

class Useless:
    def apply(self, run):
        pass

class Plain(Remedy):
    def __init__(self, times=1):
        self.times = times
"""


def test_a_remedy_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dotted path in a rung is imported, its settings are checked, and it is applied after the others."""
    (tmp_path / "my_remedies.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    policy = parse(default([{"my_remedies.Halve": {"times": 2}}, "skip"]))
    (decision,) = decisions(policy, [refused(1)])
    assert decision.actions == (Action("skip"), Action("my_remedies.Halve", {"times": 2}))
    run = Run()
    remedy(decision.actions[1]).apply(run)
    assert run.knobs.values.lr == 0.25
    for entry, said in {
        "my_remedies.Half": "cannot be imported: my_remedies has no Half; did you mean Halve?",
        "my_remedy.Halve": "cannot be imported: there is no module my_remedy on the path",
        "my_remedies.Useless": "is not a remedy: write a dataclass that inherits from resil",
        "my_remedies.Plain": "is not a remedy: write a",
        "subprocess.Popen": "is not a remedy: write a",
    }.items():
        with pytest.raises(ConfigError) as error:
            parse(default([entry]))
        assert f"recovery.ladders.default[0][0]={entry}: {said}" in str(error.value)
    with pytest.raises(ConfigError, match=r"my_remedies\.Halve\.times=0: must be a whole number \(at least 1\)"):
        parse(default([{"my_remedies.Halve": {"times": 0}}]))
    sys.modules.pop("my_remedies")


def test_a_policy_in_a_run_directory_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To import a module is to execute it: of what lies in a run directory nothing is."""
    (tmp_path / "harmful_module.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "run" / "policy.yaml"
    file.parent.mkdir()
    (file.parent / "journal.jsonl").touch()
    for name in ("harmful_module.Remedy", '"harmful_module.Remedy "', "{harmful_module.Remedy: {}}"):
        file.write_text(f"ladders: {{default: [[skip, {name}]]}}")
        with pytest.raises(ConfigError, match=r"run directory.*names harmful_module\.Remedy ?: copy it"):
            named(file)
    assert not (tmp_path / "imported").exists()
    file.write_text("ladders: {default: [[skip, {lower_lr: {factor: 0.5}}]]}")
    assert named(file).ladders


def test_every_remedy_works_as_the_case_settles_its_defaults() -> None:
    """Each can be made without settings, and its docstring says what it does."""
    like = replace(ANY, loss_excess=1.0, rewinds=True)
    case = case_of(landed(9), replace(unknown(landed(9)), usual_rate=0.5), like)
    for kind in KNOWN.values():
        assert kind.__doc__
        given: dict[str, Any] = {"of": ()} if kind is Trial else {}
        kind(**{**given, **kind(**given).settings_for(case)}).apply(Run())


# A run in miniature: what policies do to it, and whether it ends.


@dataclass
class Run:
    """A run that does nothing but count; a state is proven every ten steps."""

    knobs: Knobs = field(default_factory=Knobs)
    lasting: LastingRemedies = field(default_factory=LastingRemedies)
    step: int = 0
    tick: int = 0
    position: int = 0
    done: list[str] = field(default_factory=list)
    anomaly: Anomaly = field(default_factory=lambda: refused(1))
    rewound_to: int | None = None

    def rewind(self, older: int = 0, steps: int = 0) -> None:
        there = [step for step in range(0, self.anomaly.since + 1, 10) if step <= self.anomaly.step - steps] or [0]
        back = self.step - there[max(0, len(there) - 1 - older)]
        self.step, self.position = self.step - back, self.position - back
        self.rewound_to = self.step
        self.done.append("rewind")

    def skip(self, updates: int | None = None) -> None:
        self.position += 1 if updates is None else updates
        self.done.append("skip")

    def extension(self, kind: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.done.append(name)


Fault = Callable[[Run], Anomaly | None]


def trained(policy: Policy, fault: Fault, steps: int = 600, most_ticks: int = 6_000) -> tuple[Run, IncidentLog]:
    """Run to the end, whichever it is. `fault` says what befalls the update that the run is about to make."""
    run, history = Run(Knobs(relax_after=policy.relax_after)), IncidentLog(None)
    while run.step < steps:
        run.tick += 1
        assert run.tick <= most_ticks, "it does not end"
        anomaly = fault(run)
        if anomaly is None or anomaly.landed:
            run.step, run.position = run.step + 1, run.position + 1
        if anomaly is None:
            run.knobs.advance()
            history.update_accepted(run.step, recovered_after=50, loss_is_off=False)
            continue
        run.anomaly, run.rewound_to = anomaly, None
        decision = decide(policy, case_of(anomaly, by_signal(anomaly)), history.incidents)
        incident = history.open(anomaly, by_signal(anomaly), decision)
        if decision.gave_up is not None:
            return run, history
        if not is_mild(decision.actions):
            run.knobs.trouble()
        for action in decision.actions:
            remedy(action).apply(run)
        history.record_treatment(replace(incident, rewound_to=run.rewound_to))
    history.close_all(Outcome.RECOVERED)
    return run, history


def always(signal: Signal, landed: bool) -> Fault:
    return lambda run: Anomaly(signal, run.step + 1, run.tick, run.step, landed=landed)


def at_positions(every: int, signal: Signal) -> Fault:
    """Every so many updates' samples are bad, whenever they are met."""
    return lambda run: refused(run.step + 1, run.tick, signal) if run.position % every == every - 1 else None


@pytest.mark.parametrize(
    ("name", "has_landed"),
    [(name, landed) for name in POLICIES for landed in (False, True) if (name, landed) != ("skip", True)],
)
@pytest.mark.parametrize("signal", list(Signal))
def test_a_fault_in_every_update_ends(name: str, has_landed: bool, signal: Signal) -> None:
    """Every policy gives up within its own budget: of updates in a row, or of rewinds to the same place."""
    budget = policy_named(name).budget
    run, history = trained(policy_named(name), always(signal, landed=has_landed))
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
    run, history = trained(policy_named(name), at_positions(every, signal))
    gave_up = history.incidents[-1].decision.gave_up is not None
    assert gave_up != completes
    if completes:
        assert set(run.done) == {"skip"}
        assert run.knobs.values == KnobValues()


@pytest.mark.parametrize(
    ("name", "bearable", "completes"),
    [
        ("balanced", 0.7, True),
        ("balanced", 0.1, True),
        ("aggressive", 0.03, True),
        ("conservative", 0.7, False),
        ("conservative", 0.3, False),
        ("palm", 0.7, False),
        ("off", 0.7, False),
    ],
)
def test_a_rate_that_is_too_high(name: str, bearable: float, completes: bool) -> None:
    """It is lowered until it holds, and not raised so often again that it ends the run; others give up."""
    hot = 0

    def fault(run: Run) -> Anomaly | None:
        nonlocal hot
        hot = hot + 1 if run.step >= 100 and run.knobs.values.lr > bearable else 0
        return landed(run.step + 1, run.tick) if hot and hot % 8 == 0 else None

    _, history = trained(policy_named(name), fault, steps=8_000, most_ticks=9_000)
    assert (history.incidents[-1].decision.gave_up is None) == completes
    assert len(history.incidents) < 30


DRILLS = [
    (refused(50, signal=Signal.NONFINITE_BATCH), "data"),
    (refused(50, signal=Signal.NONFINITE_GRAD), "unknown"),
    (refused(50, signal=Signal.NONFINITE_LOSS), "unknown"),
    (refused(50, signal=Signal.GRAD_SPIKE), "unknown"),
    (refused(50, signal=Signal.LOSS_SPIKE), "unknown"),
    (landed(50, signal=Signal.LOSS_SPIKE), "unknown"),
    (replace(landed(50, signal=Signal.LOSS_SPIKE), evidence=fact("loss_outside", stays=True)), "explosion"),
    (landed(50, signal=Signal.DIVERGENCE), "explosion"),
    (landed(50, signal=Signal.WEIGHTS_JUMP), "corruption"),
    (landed(50, signal=Signal.NONFINITE_WEIGHTS), "corruption"),
    (landed(50, signal=Signal.OPTIMIZER_RANGE), "optimizer"),
    (landed(50, signal=Signal.NONFINITE_OPTIMIZER), "optimizer"),
    (refused(50, signal=Signal.SCALE_COLLAPSE), "overflow"),
]


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "off"])
@pytest.mark.parametrize(("anomaly", "cause"), DRILLS)
def test_one_fault_is_cured_by_the_first_rung(name: str, anomaly: Anomaly, cause: str) -> None:
    """A fault that comes once costs one incident; what landed is rewound, corruption loses no samples."""
    fault: Fault = lambda run: replace(anomaly, tick=50) if run.tick == 50 else None  # noqa: E731
    run, history = trained(policy_named(name), fault)
    (incident,) = history.incidents
    assert (incident.diagnosis.cause, incident.outcome) == (cause, Outcome.RECOVERED)
    assert ("rewind" in run.done) == (anomaly.landed and name != "skip")
    if cause == "corruption":
        assert "skip" not in run.done
    assert run.knobs.values == KnobValues()


@st.composite
def series(draw: st.DrawFn) -> list[Anomaly]:
    """Any troubles, at ticks that never go back and steps that may."""
    tick, anomalies = 0, []
    for _ in range(draw(st.integers(1, 25))):
        tick += draw(st.sampled_from([1, 1, 1, 2, 10, 400]))
        step = draw(st.integers(1, tick))
        since = draw(st.integers(0, step))
        anomalies.append(Anomaly(draw(st.sampled_from(Signal)), step, tick, since, (), draw(st.booleans())))
    return anomalies


def with_a_row(anomaly: Anomaly) -> Diagnosis:
    return replace(by_signal(anomaly), rows=(anomaly.tick,), usual_rate=anomaly.tick % 3)


counts = st.integers(0, 200)
applicables = st.builds(
    Case,
    *(st.just(ANY.anomaly), st.just(ANY.diagnosis), st.just(False)),
    *(st.integers(0, 4), counts, counts),
    facts=st.booleans().map(lambda has_scaler: {**FACTS, "loss_scaler": has_scaler}),
    loss_excess=st.floats(0, float("inf")),
)


@settings(max_examples=80, deadline=None)
@given(name=st.sampled_from(POLICIES), anomalies=series(), can=applicables)
def test_decisions_are_total_and_the_same_everywhere(name: str, anomalies: list[Anomaly], can: Case) -> None:
    """Whatever happens, a policy prescribes something that applies or gives up, and every rank comes to the same."""
    made = decisions(policy_named(name), anomalies, can, with_a_row)
    assert made == decisions(policy_named(name), anomalies, can, with_a_row)
    for decision, anomaly in zip(made, anomalies, strict=False):
        assert bool(decision.actions) == (decision.gave_up is None)
        for action in decision.actions:
            rewinds = any(one.remedy == "rewind" for one in decision.actions)
            assert remedy(action).applies(replace(case_of(anomaly, with_a_row(anomaly), can), rewinds=rewinds))


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from([name for name in POLICIES if name != "skip"]),
    faults=st.lists(st.tuples(st.sampled_from(Signal), st.booleans(), st.integers(0, 3)), min_size=1, max_size=6),
)
def test_an_endless_series_ends(name: str, faults: list[tuple[Signal, bool, int]]) -> None:
    """Any pattern of troubles that repeats for ever ends in a bounded number of updates: finished or given up."""
    pattern = [fault for signal, has_landed, healthy in faults for fault in [(signal, has_landed), *[None] * healthy]]

    def fault(run: Run) -> Anomaly | None:
        if (one := pattern[run.tick % len(pattern)]) is None:
            return None
        return Anomaly(one[0], run.step + 1, run.tick, max(0, run.step - 3), landed=one[1])

    trained(policy_named(name), fault, steps=300)


# Knobs.


def over(knobs: Knobs, name: str, updates: int, **more: Any) -> list[Any]:
    """What a knob is in each of so many accepted updates."""
    found = []
    for _ in range(updates):
        found.append(getattr(knobs.values, name))
        knobs.advance(**more)
    return found


def test_knobs_climb_back_to_a_share_of_what_was() -> None:
    """A search for the highest rate that works: down, soon up again, and what never worked is not soon taken up."""
    knobs = Knobs(relax_after=10)
    knobs.turn_lr(0.03, regain=0.1)
    rates = over(knobs, "lr", 79)
    assert rates == sorted(rates)
    assert all(later / earlier < 1.1 for earlier, later in itertools.pairwise(rates))
    assert rates[15] == rates[-1] == pytest.approx(0.1)
    knobs.trouble()
    knobs.turn_lr(0.03, regain=0.1)
    again = Knobs(relax_after=10)
    again.load_state_dict(knobs.state_dict())
    for one in (knobs, again):
        assert over(one, "lr", 21)[::20] == pytest.approx([0.003, 0.01])
    knobs.turn_lr(0.5)
    knobs.advance()
    assert knobs.values.lr == pytest.approx(0.005), "another turn ends the climb"


def test_a_limit_of_updates_falls_with_their_root() -> None:
    """Down to a tenth; a resume has it as it was."""
    lasting, resumed = LastingRemedies(share=0.1), LastingRemedies()
    shares = []
    for _ in range(9001):
        shares.append(lasting.share_now)
        lasting.advance()
    resumed.load_state_dict(json.loads(json.dumps(lasting.state_dict())))
    assert resumed == lasting
    assert [shares[150], shares[-1]] == pytest.approx([0.05, 0.01])
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize(("left", "share"), [(0.0, 0.1), (0.06, 0.02), (0.9, 0.1)])
def test_updates_that_are_limited_already_are_limited_further(left: float, share: float) -> None:
    """The incident says by how much; never to more than the policy says."""
    can = replace(ANY, sgd=True, facts={**FACTS, "share": left})
    policy = parse(default(["rewind", "limit_update"]))
    found = decide(policy, case_of(landed(9), unknown(landed(9)), can), ())
    assert [dict(one.settings) for one in found.actions if one.remedy == "limit_update"] == [{"share": share}]


def test_knobs_re_warm() -> None:
    """The rate climbs in a straight line to the lowered one, and relaxing waits until it is there."""
    knobs = Knobs(relax_after=2)
    knobs.turn_lr(0.5, rewarm=4)
    assert over(knobs, "lr", 8) == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5, 0.5, 0.5**0.5, 0.5**0.5])
    assert knobs.values == KnobValues()


def test_steps_of_relaxing() -> None:
    """Two steps take back a halving or a tenfold, to exactly 1 and not nearly."""
    for factor in (0.09, 0.18, 0.95):
        (turned := Knobs()).turn_lr(factor)
        turned.turn_lr(1 / factor)
        assert turned.values == KnobValues()
    knobs = Knobs(relax_after=1)
    knobs.turn_lr(0.5)
    knobs.turn_clip(0.25)
    knobs.turn_eps(10_000)
    seen = []
    for _ in range(8):
        knobs.advance()
        seen.append(knobs.values)
    assert [values.lr == 1.0 for values in seen] == [False, *[True] * 7]
    assert [values.clip == 1.0 for values in seen] == [False] * 3 + [True] * 5
    assert [values.eps == 1.0 for values in seen] == [False] * 7 + [True]


def healthy_updates_until_relaxed(knobs: Knobs) -> int:
    before, count = knobs.values, 0
    while knobs.values == before:
        knobs.advance()
        count += 1
    return count


def test_trouble_while_relaxing_doubles_the_wait() -> None:
    """Relaxing stops where it is and takes twice as long the next time, up to a bound; long health mends it."""
    knobs = Knobs(relax_after=10)
    waits = []
    for _ in range(9):
        knobs.turn_lr(0.5)
        waits.append(healthy_updates_until_relaxed(knobs))
        relaxed = knobs.values
        knobs.trouble()
        assert knobs.values == relaxed
    assert waits == [10, 20, 40, 80, 160, 320, 640, 640, 640]
    for _ in range(20_000):
        knobs.advance()
    assert knobs.values == KnobValues()
    knobs.turn_clip(0.5)
    for _ in range(3):  # in a row they are one trouble, which only starts the wait again
        knobs.advance()
        knobs.trouble()
    assert healthy_updates_until_relaxed(knobs) == 10


@pytest.mark.parametrize("turn", ["turn_lr", "turn_clip", "limit_lr"])
def test_nothing_is_turned_back_before_the_loss_is_back(turn: str) -> None:
    """Updates off the reference do not count as healthy, and take nothing from those that did."""
    knobs = Knobs(relax_after=10)
    getattr(knobs, turn)(0.5)
    turned, wait = knobs.values, 79 if turn == "limit_lr" else 9
    for may_relax in (True, False):
        for _ in range(wait):
            knobs.advance(was_limited=True, may_relax=may_relax)
    assert knobs.values == turned
    knobs.advance(was_limited=True)
    assert knobs.values != turned


def test_a_limit_of_the_rate_lasts_as_long_as_the_schedule_asks_for_more() -> None:
    """It is raised step by step while it is met, and lifted once the schedule has come down by itself."""
    knobs = Knobs(relax_after=10)
    knobs.limit_lr(0.5)
    knobs.limit_lr(2.0)
    ceilings = over(knobs, "ceiling", 160, was_limited=True)
    assert [*ceilings, knobs.values.ceiling] == pytest.approx([*[0.5] * 80, *[0.5 * 2**0.5] * 80, 1.0])
    over(knobs, "ceiling", 80)
    assert knobs.values == KnobValues()


factors = st.floats(1e-6, 1.0)
turns = st.lists(
    st.one_of(
        st.tuples(st.just("turn_lr"), factors, st.integers(0, 9)),
        st.tuples(st.just("turn_clip"), factors),
        st.tuples(st.just("turn_eps"), st.floats(1.0, 1e6)),
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
        values = knobs.values
        assert MIN_LR <= values.lr <= 1.0
        assert MIN_CLIP <= values.clip <= 1.0
        assert 1.0 <= values.eps <= MAX_EPS
        assert values.ceiling >= MIN_LR
        resumed = Knobs(relax_after)
        resumed.load_state_dict(json.loads(json.dumps(knobs.state_dict())))
        assert resumed.state_dict() == knobs.state_dict()
        assert resumed.values == values
    for _ in range(64 * relax_after * 40):
        knobs.advance()
    assert knobs.values == KnobValues()


# Causes.


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, "nan"])
@pytest.mark.parametrize("name", ["lr", "clip", "eps", "regain", "ceiling", "leapt_to", "norm"])
def test_no_knob_is_below_0_or_not_finite(name: str, value: Any) -> None:
    """Where a file says so it is refused."""
    with pytest.raises(ValueError, match=f"{name} is {value}, not a number from 0 up"):
        Knobs().load_state_dict({**Knobs().state_dict(), name: value})


@pytest.mark.parametrize("signal", list(Signal))
@pytest.mark.parametrize("has_landed", [True, False])
def test_every_signal_has_a_cause_and_advice(signal: Signal, has_landed: bool) -> None:
    """The fallback of a diagnosis says something that a person can act on, in one sentence."""
    diagnosis = by_signal(Anomaly(signal, 5, 5, 4, landed=has_landed))
    (advice,) = diagnosis.advice
    assert say([advice]).endswith(".")
    assert diagnosis.culprit is None


def test_incidents_that_are_over_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every refused update asks for the recent ones: only these are unfolded into their updates."""
    unfolded, history, each = list[int](), list[Incident](), Incident.each.fget  # type: ignore[attr-defined]

    def noted(incident: Incident) -> list[Incident]:
        unfolded.append(incident.id)
        return each(incident)  # type: ignore[no-any-return]

    monkeypatch.setattr(Incident, "each", property(noted))
    for number in range(1, 101):
        tick = number * 650
        anomaly = Anomaly(Signal.NONFINITE_LOSS, tick, tick, tick - 1, landed=False)
        again = tuple((tick + later, tick + later) for later in range(10, 650, 10))
        decision = Decision((Action("rewind" if number == 7 else "skip"),))
        history.append(Incident(number, anomaly, by_signal(anomaly), decision, again=again))
    updates = recent(named("skip"), history, 65_650)
    assert [one.id for one in updates] == [7] * 65 + [99] * 35 + [100] * 65
    assert unfolded == [7, 99, 100]


# What becomes of incidents.


DATA, EXPLOSION = Diagnosis(Cause.DATA), Diagnosis(Cause.EXPLOSION)
SKIPPED = Decision((Action("skip"),))


def closed(incidents: Iterable[Incident]) -> list[tuple[int, str | None]]:
    return [(incident.id, incident.outcome) for incident in incidents]


def closed_by(history: IncidentLog, change: Callable[[], object]) -> list[tuple[int, str | None]]:
    """What a change has closed of what was open before it."""
    before = {one.id for one in history.open_incidents}
    change()
    return closed(one for one in history.incidents if one.id in before and one.outcome is not None)


def accept(history: IncidentLog, *steps: int, loss_is_off: bool = False) -> list[tuple[int, str | None]]:
    accepted = functools.partial(history.update_accepted, recovered_after=50, loss_is_off=loss_is_off)
    return [one for step in steps for one in closed_by(history, functools.partial(accepted, step))]


def test_the_same_trouble_again_closes_the_one_before() -> None:
    """The same cause and line, sooner: it recurred. Another cause or another line changes nothing."""
    line = Culprit("forward", "log", "head", "losses.py", 41, inputs=({"min": 0.0},))
    history = IncidentLog(None)
    history.open(refused(1), DATA, SKIPPED)
    assert closed_by(history, lambda: history.open(refused(2), EXPLOSION, SKIPPED)) == []
    assert closed_by(history, lambda: history.open(refused(3), replace(DATA, culprit=line), SKIPPED)) == []
    assert closed_by(history, lambda: history.open(refused(4), DATA, SKIPPED)) == [(1, "recurred")]
    elsewhere = replace(line, inputs=({"min": -1.0},))
    again = functools.partial(history.open, refused(5), replace(DATA, culprit=elsewhere), SKIPPED)
    assert closed_by(history, again) == [(3, "recurred")]
    assert accept(history, *range(5, 55)) == [(2, "recovered"), (4, "recovered"), (5, "recovered")]
    assert history.tally() == {"total": 5, "recovered": 3, "by_cause": {"data": 4, "explosion": 1}}


def test_an_unknown_cause_is_as_fine_as_its_signal() -> None:
    """Two signals of unknown cause are not said to be the same trouble."""
    history = IncidentLog(None)
    history.open(refused(1, signal=Signal.NONFINITE_GRAD), unknown(refused(1)), SKIPPED)
    for step, signal, closes in ((2, Signal.GRAD_SPIKE, []), (3, Signal.NONFINITE_GRAD, [(1, "recurred")])):
        again = functools.partial(history.open, refused(step, signal=signal), unknown(refused(step)), SKIPPED)
        assert closed_by(history, again) == closes
