"""Incidents in words: for the terminal, the end of a run, reports, and the tags of MLflow's list."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from resilient_train.types import (
    ACCEPTED,
    OBSERVE,
    TRIAL,
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

_NOTICED = {
    Signal.NONFINITE_BATCH: "the batch is not finite",
    Signal.NONFINITE_LOSS: "the loss is not finite",
    Signal.NONFINITE_GRAD: "a gradient is not finite",
    Signal.NONFINITE_WEIGHTS: "a weight is not finite",
    Signal.NONFINITE_OPTIMIZER: "the optimizer's state is not finite",
    Signal.LOSS_SPIKE: "the loss jumped",
    Signal.GRAD_SPIKE: "the gradient norm jumped",
    Signal.DIVERGENCE: "the loss is worse than it was",
    Signal.WEIGHTS_JUMP: "the weights jumped",
    Signal.OPTIMIZER_RANGE: "the optimizer's state is out of its range",
    Signal.SCALE_COLLAPSE: "the loss scale collapsed",
    Signal.EXCEPTION: "an exception was raised",
    Signal.OUT_OF_MEMORY: "the device ran out of memory",
    Signal.HANG: "the step hung",
    Signal.CRASH: "the process died",
    Signal.DISK_FULL: "the disk is full",
    Signal.CHECKPOINT_FAILED: "a checkpoint could not be written",
    Signal.CHECKPOINT_DAMAGED: "a checkpoint is damaged",
    Signal.RANK_MISMATCH: "the ranks differ",
    Signal.NOT_RECOVERED: "the loss is not back where it was",
    Signal.NO_PROGRESS: "the loss stands where it need not",
}

OUTCOMES = {
    None: "open",
    Outcome.RECOVERED: "recovered",
    Outcome.RECURRED: "came back",
    Outcome.UNRECOVERED: "not recovered",
    Outcome.GAVE_UP: "gave up",
    Outcome.OBSERVED: "observed, not treated",
}

_MAY_BE_MEANT = {Signal.LOSS_SPIKE, Signal.DIVERGENCE, Signal.NOT_RECOVERED, Signal.WEIGHTS_JUMP}
_NOT_ABOUT_WEIGHTS = {
    *(Signal.EXCEPTION, Signal.OUT_OF_MEMORY, Signal.HANG, Signal.CRASH),
    *(Signal.DISK_FULL, Signal.CHECKPOINT_FAILED, Signal.CHECKPOINT_DAMAGED, Signal.NO_PROGRESS),
}

# Each remedy in words: of its phrases the first one whose settings are all given; the last one names none. A unit may
# follow a setting. Other settings follow in brackets.
_REMEDIES: dict[str, tuple[str, ...]] = {
    "rewind": ("rewound to step {rewound_to} (verified)", "rewound"),
    "skip": ("skipped {updates update} of data", "skipped the suspect samples"),
    "quarantine": ("rows in quarantine",),
    "repeat": ("retried the update",),
    "report": ("reported only",),
    "reset_moments": ("reset the optimizer's moments",),
    "lower_lr": (
        "learning rate x{factor} with {rewarm step} of warm-up",
        "learning rate x{factor}",
        "{rewarm step} of warm-up",
        "learning rate turned down",
    ),
    "limit_lr": ("learning rate capped at {to}", "learning rate capped"),
    "tighten_clip": ("gradients clipped to a norm of {to}", "gradient clip x{factor}", "gradient clip tightened"),
    "limit_update": ("updates limited to {share} of the weights' norm", "updates limited"),
    "lower_decay": ("weight decay x{factor}", "weight decay lowered"),
    "raise_eps": ("epsilon x{factor}", "epsilon raised"),
    "mend_eps": ("raised an epsilon that is 0 in its dtype",),
    "armor": ("patched {symptom}, too", "patched that line"),
    "lower_loss_scale": ("loss scale x{factor}", "loss scale lowered"),
    "higher_precision": ("full precision for {steps step}", "full precision"),
    TRIAL: ("tried {of} remedies for {steps step}", "tried several remedies"),
    OBSERVE: ("only observed",),
    "go_on": ("the run was resumed",),
    "fall_back": ("fell back to the previous one",),
    "try_again": ("training continues, and saving is retried",),
    "smaller_batch": ("smaller micro-batches, more of them to an update",),
    "end": ("the process was ended",),
    ACCEPTED: ("taken as a change on purpose",),
}
_UNSAID = ("by_loss", "lasting", "leapt_to")
_SETTING = re.compile(r"\{(\w+) ?(\w*)\}")


def describe(incident: Incident) -> str:
    diagnosis = incident.diagnosis
    return _indented(
        f"! incident {incident.id:,}, {_sign(incident)}",
        incident.anomaly.evidence,
        f"{_cause(diagnosis)}; {_done(incident)}",
        *(f"  {line}" for line in describe_arms(incident)),
        f"advice: {diagnosis.advice}" if diagnosis.advice else "",
    )


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
    evidence = incident.anomaly.evidence
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
        anomaly.evidence,
        _cause(incident.diagnosis),
        f"why: {why_of(incident)}",
        f"last good weights: {last_good or 'none were written'}",
        f"what to try next: {incident.diagnosis.advice}" if incident.diagnosis.advice else "",
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
    return f"{_NOTICED[anomaly.signal]}{where}" + (f" ({anomaly.signal})" if by_name else "")


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
        return f"gave up: {incident.decision.gave_up}"
    took = f", in {incident.seconds:,.2f} s" if incident.rewound_to is not None else ""
    return f"{remedies_of(incident) or 'nothing was done'}{took}; {_lost(incident)}"


def _lost(incident: Incident) -> str:
    refused = not incident.anomaly.landed and incident.rewound_to is None
    if incident.steps_lost <= refused:  # an attempt that was refused held nothing yet
        return "nothing was lost"
    return f"{counted(incident.steps_lost, 'step')} lost"


def remedies_of(incident: Incident) -> str:
    return ", ".join(_remedy(action, incident) for action in incident.decision.actions)


def _remedy(action: Action, incident: Incident) -> str:
    settings: dict[str, Any] = {**action.settings}
    if action.remedy == "rewind" and incident.rewound_to is None:
        return "no rewind, as there was no state to go back to"
    if action.remedy == "go_on" and incident.rewound_to == 0:
        return "no checkpoint: restarted at step 0"
    if action.remedy == "rewind":
        settings = {"rewound_to": incident.rewound_to}
    elif action.remedy == "armor" and (where := incident.diagnosis.symptom) is not None:
        settings = {"symptom": f"{where.op}, {where.file}:{where.line}"}
    elif action.remedy == "limit_lr" and isinstance(to := settings.get("to"), int | float):
        settings["to"] = f"{rate_named(to)}{' and falling with the schedule' * bool(settings.get('leapt_to'))}"
    elif settings.get("factor") == 1 or (action.remedy == "tighten_clip" and settings.get("to")):
        settings.pop("factor", None)
    settings = {name: value for name, value in settings.items() if value is not None and name not in _UNSAID}
    said = action.remedy  # a remedy of the user's, perhaps a dotted name
    if phrases := _REMEDIES.get(said):
        phrase = next(one for one in phrases if settings.keys() >= {name for name, _ in _SETTING.findall(one)})
        said = _SETTING.sub(lambda found: counted(settings.pop(found[1]), found[2]), phrase)
    rest = ", ".join(f"{name.replace('_', ' ')} {_amount(value)}" for name, value in settings.items())
    return f"{said} ({rest})" if rest else said


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
    return _indented(incident.decision.gave_up or "") or "the policy has nothing left"


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
