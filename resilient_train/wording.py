"""Incidents in words: for the terminal, the end of a run, reports, and the tags of MLflow's list."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from resilient_train.sentences import OUTCOMES, REMEDIES, SENTENCES, SIGNALS, SINGULAR
from resilient_train.types import (
    Action,
    Anomaly,
    Cause,
    Culprit,
    Diagnosis,
    Incident,
    Outcome,
    Signal,
)

log = logging.getLogger("resilient_train")
IN_FILE_ONLY = {"in_file_only": True}  # too long for a terminal
GOOD, WARNING = {"style": "bold green"}, {"style": "bold yellow"}  # how a run ended
PROGRESS = {"progress": True}  # a terminal shows such lines every few seconds

_MAY_BE_MEANT = {Signal.LOSS_SPIKE, Signal.DIVERGENCE, Signal.NOT_RECOVERED, Signal.WEIGHTS_JUMP}
_NOT_ABOUT_WEIGHTS = {
    *(Signal.EXCEPTION, Signal.OUT_OF_MEMORY, Signal.HANG, Signal.CRASH),
    *(Signal.DISK_FULL, Signal.CHECKPOINT_FAILED, Signal.CHECKPOINT_DAMAGED, Signal.NO_PROGRESS),
}

# ----------------------------------------------------------------------------------------------------- facts into words

_OPTIONAL = re.compile(r"<(?:(!?)(\w+)\?)?([^<>]*)>")
_FIELD = re.compile(r"\{(\w+):?([^{}]*)\}")


def say(facts: Iterable[Mapping[str, Any]], between: str = " ") -> str:
    """Return the sentences of some facts; of a kind that is not known, the kind and its values."""
    return between.join(_sentence(one) for one in facts)


def _sentence(fact: Mapping[str, Any]) -> str:
    template = SENTENCES.get(str(fact.get("fact")))
    return " ".join(f"{name} {value}" for name, value in fact.items()) if template is None else fill(template, fact)


def fill(template: str, values: Mapping[str, Any], used: set[str] | None = None) -> str:
    """Fill in a template as `sentences` describes them; note in `used` which values it names."""

    def optional(part: re.Match[str]) -> str:
        negated, flag, text = part.groups()
        if flag:
            return text if bool(values.get(flag)) != bool(negated) else ""
        return text if all(values.get(name) for name, _ in _FIELD.findall(text)) else ""

    def field(found: re.Match[str]) -> str:
        name, spec = found.groups()
        if used is not None:
            used.add(name)
        return _formatted(values[name], spec)

    return _FIELD.sub(field, _OPTIONAL.sub(optional, template))


def _formatted(value: Any, spec: str) -> str:
    if (of := _SPECS.get(spec)) is not None:
        return of(value)
    if "." in spec or spec in ("g", "d"):  # text, where a number was not finite
        return value if isinstance(value, str) else format(value, spec)
    return counted(value, spec)


def place_named(where: Mapping[str, Any]) -> str:
    at = f" at {os.path.basename(where['file'])}:{where['line']}" if where["file"] else ""
    return f"`{where['op']}`{at}"


def describe(incident: Incident) -> str:
    diagnosis = incident.diagnosis
    return _indented(
        f"! incident {incident.id:,}, {_sign(incident)}",
        evidence_of(incident.anomaly),
        f"{_cause(diagnosis)}; {_done(incident)}",
        *(f"  {line}" for line in describe_arms(incident)),
        f"advice: {say(diagnosis.advice)}" if diagnosis.advice else "",
    )


def evidence_of(anomaly: Anomaly) -> str:
    return say(anomaly.evidence, "; ")


def describe_arms(incident: Incident) -> list[str]:
    """Say how the arms of a trial went, a line each; nothing if there was no trial."""
    return [
        f"{_arm(one.actions, incident)}: later loss {one.loss:.4g}, {counted(one.anomalies, 'update')} refused"
        + (", chosen" if one.won else "")
        for one in incident.tried
    ]


def _arm(actions: Sequence[Action], incident: Incident) -> str:
    if [one.remedy for one in actions] == ["rewind"] and incident.rewound_to is not None:  # the others began there
        return f"as it is, from step {incident.rewound_to:,}"
    return ", ".join(_remedy(action, incident) for action in actions) or "as it is"


def drill_suffix(incident: Incident) -> str:
    """Say that a drill caused an incident, to append to other words; empty if none did."""
    return f", on purpose (drill: {incident.drill})" if incident.drill else ""


def describe_outcome(incident: Incident, healthy_steps: int | None = None) -> str:
    return f"incident {incident.id:,}: {outcome_of(incident, healthy_steps)}"


def outcome_of(incident: Incident, healthy_steps: int | None = None) -> str:
    match incident.outcome:
        case Outcome.RECOVERED if healthy_steps is not None:
            why = f"; {counted(healthy_steps, 'healthy step')} since"
        case Outcome.UNRECOVERED:
            why = f"; {why_unrecovered(incident)}"
        case Outcome.GAVE_UP:
            why = f"; {why_of(incident)}"
        case _:
            why = ""
    return f"{OUTCOMES[incident.outcome]}{further(incident)}{why}"


def further(incident: Incident) -> str:
    """Say how many anomalous updates followed an incident and were treated like it, to append to other words."""
    return f"; the same fault {counted(incident.further, 'more time')}" if incident.further else ""


def why_unrecovered(incident: Incident) -> str:
    if incident.diagnosis.cause is Cause.PROCESS:
        return "no state could be saved from then on"
    if incident.outcome is Outcome.RECURRED:
        return "the same came again until the end, and what was done was not enough"
    return "the loss did not come back to where it was"


def first_sign(incident: Incident) -> str:
    evidence = evidence_of(incident.anomaly)
    return " ".join(f"{_sign(incident)}{f'; {evidence}' if evidence else ''}".split())


def describe_treatment(incident: Incident) -> str:
    """Say in one line what the cause was, what was done about it, and, once that is known, whether it helped."""
    is_known = incident.outcome is not None and incident.decision.gave_up is None
    outcome = f"; {OUTCOMES[incident.outcome]}" if is_known else ""
    return f"{_cause(incident.diagnosis)}; {' '.join(_done(incident).split())}{outcome}"


def final_message(incident: Incident, last_good: Path | None) -> str:
    anomaly = incident.anomaly
    may_be_meant = anomaly.landed and anomaly.signal in _MAY_BE_MEANT
    declared = f"run again with expect=[{anomaly.since + 1}]{'; it resumes there' if last_good else ''}"
    return _indented(
        f"gave up at {_sign(incident)}",
        f"if step {anomaly.since + 1:,} changes something on purpose, {declared}" if may_be_meant else "",
        evidence_of(anomaly),
        _cause(incident.diagnosis),
        f"why: {why_of(incident)}",
        f"last good weights: {last_good or 'none were written'}",
        f"what to try next: {say(incident.diagnosis.advice)}" if incident.diagnosis.advice else "",
    )


def tags(incidents: Sequence[Incident], status: str) -> dict[str, str]:
    """Return the tags that MLflow's list of runs is filtered by; a run without incidents has only the first two."""
    found = {"resilience.status": status, "resilience.incidents": str(len(incidents))}
    if incidents:
        last = incidents[-1]
        found["resilience.last_incident"] = f"{_sign(last)}; {describe_treatment(last)}"
        found["resilience.cause"] = ", ".join(dict.fromkeys(one.diagnosis.cause for one in incidents))
    if drills := dict.fromkeys(one.drill for one in incidents if one.drill):
        found["resilience.drill"] = ", ".join(drills)
    return found


def _sign(incident: Incident) -> str:
    anomaly = incident.anomaly
    return f"step {anomaly.step:,}: {noticed(anomaly)}{reached_suffix(incident)}{drill_suffix(incident)}"


def noticed(anomaly: Anomaly, *, by_name: bool = True) -> str:
    has_place = anomaly.ranks and anomaly.signal is not Signal.RANK_MISMATCH  # whose evidence names the ranks
    where = f" on {rank_names(sorted(anomaly.ranks))}" if has_place else ""
    return f"{SIGNALS[anomaly.signal]}{where}" + (f" ({anomaly.signal})" if by_name else "")


def reached_suffix(incident: Incident) -> str:
    """Say whether an incident reached the weights, to append to other words; empty if it is not about weights."""
    anomaly = incident.anomaly
    if anomaly.signal in _NOT_ABOUT_WEIGHTS:
        return ""
    if not anomaly.landed:
        return ", let through" if incident.is_observed else ", refused before it reached the weights"
    first = anomaly.since + 1
    return ", in the weights already" if first >= anomaly.step else f", in the weights since step {first:,}"


def _cause(diagnosis: Diagnosis) -> str:
    details = [describe_culprit(diagnosis.culprit)] if diagnosis.culprit else []
    if diagnosis.rows:
        details.append(rows_named(diagnosis.rows))
    return f"cause {diagnosis.cause}" + (f" ({'; '.join(details)})" if details else "")


def describe_culprit(culprit: Culprit) -> str:
    module = f" in {culprit.module}" if culprit.module else ""
    return f"{culprit.op}{module}, {culprit.file}:{culprit.line}, {culprit.phase}"


def describe_cost(incident: Incident) -> str:
    return _lost(incident) + (f", {incident.seconds:,.2f} s" if incident.seconds >= 0.005 else "")


def rows_named(rows: Sequence[int], most: int = 4) -> str:
    """Name some rows: "rows 3, 77 and 5 more"."""
    return f"{'row' if len(rows) == 1 else 'rows'} {_listed(rows, most)}"


def rate_named(times: float) -> str:
    return "the configured one" if times == 1 else f"x{times:.3g} of the configured one"


def rank_names(ranks: Sequence[int]) -> str:
    """Name some ranks: "rank 3", "ranks 0, 1 and 3"."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {_listed(ranks, 8)}"


def names_listed(names: Sequence[str]) -> str:
    """Name some weights or layers: "`head.weight`, `head.bias` and 5 more"."""
    return _listed([f"`{name}`" for name in names], 3)


def _listed(names: Sequence[object], most: int) -> str:
    shown = [str(name) for name in names[:most]]  # numbers without commas, as they are looked up
    if more := len(names) - len(shown):
        shown.append(f"{more:,} more")
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def _done(incident: Incident) -> str:
    if incident.decision.gave_up is not None:
        return f"gave up: {say(incident.decision.gave_up)}"
    took = f", in {incident.seconds:,.2f} s" if incident.rewound_to is not None else ""
    return f"{remedies_of(incident) or 'nothing was done'}{took}; {_lost(incident)}"


def _lost(incident: Incident) -> str:
    refused = not incident.anomaly.landed and incident.rewound_to is None
    lost = 0 if incident.steps_lost <= refused else incident.steps_lost  # an attempt that was refused held nothing yet
    return f"{counted(lost, 'step')} lost"


def remedies_of(incident: Incident) -> str:
    return ", ".join(_remedy(action, incident) for action in incident.decision.actions)


def _remedy(action: Action, incident: Incident) -> str:
    settings: dict[str, Any] = {**action.settings}
    if action.remedy == "rewind" and incident.rewound_to is None:
        return "not rewound: no verified snapshot"
    if action.remedy == "go_on" and incident.rewound_to == 0:
        return "no checkpoint: restarted at step 0"
    if action.remedy == "rewind":
        settings = {"rewound_to": incident.rewound_to}
    elif action.remedy == "quarantine":
        settings = {"rows": incident.diagnosis.rows}
    elif action.remedy == "armor" and (where := incident.diagnosis.symptom) is not None:
        settings = {"symptom": f"{where.op}, {where.file}:{where.line}"}
    elif action.remedy == "limit_lr" and isinstance(to := settings.get("to"), int | float):
        settings["to"] = f"{rate_named(to)}{' and falling with the schedule' * bool(settings.get('leapt_to'))}"
    elif settings.get("factor") == 1 or (action.remedy == "tighten_clip" and settings.get("to")):
        settings.pop("factor", None)
    settings = {name: value for name, value in settings.items() if value is not None and name not in _UNSAID}
    used = set[str]()
    said = fill(REMEDIES.get(action.remedy, action.remedy), settings, used)  # one of the user's, perhaps a dotted name
    rest = (f"{name.replace('_', ' ')} {_amount(value)}" for name, value in settings.items() if name not in used)
    return f"{said} ({more})" if (more := ", ".join(rest)) else said


_UNSAID = ("by_loss", "lasting", "leapt_to")  # settings


def printable(text: str) -> str:
    """Replace control characters, which a terminal would obey: file names may come from anywhere."""
    return "".join(one if one.isprintable() else "?" for one in text)


def counted(number: Any, unit: str) -> str:
    """Say how many there are: "1 step", "2,000 steps"; only the number without a unit."""
    plural = f"{unit}es" if unit.endswith("ch") else f"{unit}s"
    plural = f"{unit[:-1]}ies" if unit.endswith("try") else plural
    return f"{_amount(number)} {unit if number == 1 else plural}" if unit else _amount(number)


def _amount(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return str(len(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if isinstance(value, float) else str(value)


def why_of(incident: Incident) -> str:
    return _indented(say(incident.decision.gave_up or ())) or "the policy has nothing left"


def _indented(*lines: str) -> str:
    """Indent the lines after the first one. User text may contain line breaks."""
    return "\n  ".join(" ".join(line.splitlines()) for line in lines if line.strip())


def duration(seconds: float) -> str:
    """Say how long something took: 42 s, 3:05, 2:10:00."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# How the values of facts are said.
_SPECS: dict[str, Callable[[Any], str]] = {
    "": lambda value: _amount(value),
    "id": str,  # without commas, as it is looked up
    "say": lambda facts: say(facts, "; "),
    "place": place_named,
    "rows": lambda rows: rows_named(rows, 8),
    "Rows": lambda rows: rows_named(rows, 8).capitalize(),
    "it": lambda rows: "it" if len(rows) == 1 else "them",
    "ranks": lambda ranks: rank_names(ranks),
    "names": lambda names: names_listed(names),
    "wrong": lambda family: SINGULAR[family][0],
    "fix": lambda family: SINGULAR[family][1],
}
