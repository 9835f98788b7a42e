"""Decides what is done about an incident: pure functions, with the same result on every rank.

Ranks compare the digests of their decisions to notice when they decided differently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from struct import pack
from typing import Any
from zlib import crc32

from resilient_train.recover.knobs import KnobValues
from resilient_train.recover.policy import Policy, Rung
from resilient_train.recover.remedies import Case, Circumstances, is_mild, remedy
from resilient_train.types import OBSERVE, Action, Anomaly, Cause, Decision, Diagnosis, Incident
from resilient_train.wording import counted

DIGEST_BITS = 24  # float32 holds a number of so many bits exactly

_FROM_OUTSIDE = (Cause.CORRUPTION, Cause.DATA)  # not caused by the training: they may occur again after any remedy


def decide(
    policy: Policy,
    anomaly: Anomaly,
    diagnosis: Diagnosis,
    history: Sequence[Incident],
    tick: int,
    circumstances: Circumstances,
    trace: int = 0,
) -> Decision:
    """Take the first rung of the cause's ladder that applies and has strikes left, if the budget allows it.

    `history` holds the earlier incidents; those up to the last one that ended the run no longer count, so a run that is
    resumed with a better configuration starts fresh. `trace` is the digest of the updates since the last rewind.
    """
    if policy.observe:
        return Decision((Action(OBSERVE),))
    cause, ladder = diagnosis.cause, policy.ladder(diagnosis.cause)
    if not ladder:
        return Decision(gave_up=f"the policy has no remedy for {cause}")
    ends = [place for place, one in enumerate(history, start=1) if one.decision.gave_up is not None]
    history = history[ends[-1] :] if ends else history
    if _refused_in_a_row(anomaly, history) >= policy.budget.in_a_row:
        limit = counted(policy.budget.in_a_row, "update")
        return Decision(gave_up=f"the budget of {limit} in a row that did not land is used up")
    case, relevant, exhausted = Case(anomaly, diagnosis, circumstances, rewinds=False), _relevant(history, anomaly), 0
    repeated = None  # a rung whose last attempt repeated an earlier one exactly: using it again cannot help
    if trace and any(one.trace == trace for one in relevant):
        last = relevant[-1]
        repeated = last.decision.rung if last.rewound_to is not None and last.diagnosis.cause == cause else None
    for place, rung in enumerate(ladder):
        actions = _applicable(rung, case)
        if not actions or (rung.landed and not anomaly.landed):
            continue
        strikes = _strikes(policy, rung, place, case, relevant, tick)
        if place == repeated:
            exhausted += 1
        elif rung.at_start and not (circumstances.at_start or strikes):
            continue
        elif strikes >= policy.strikes_of(rung, cause):
            exhausted += 1
        elif why := _over_budget(policy, actions, case, tick, relevant, history):
            return Decision(rung=place, gave_up=why)
        else:
            return Decision(actions, place)
    if exhausted:
        return Decision(gave_up=f"the ladder for {cause} has no rung left, {counted(exhausted, 'rung')} did not help")
    return Decision(gave_up=f"none of the remedies for {cause} can be applied here")


def _applicable(rung: Rung, case: Case) -> tuple[Action, ...]:
    """Select the actions of a rung that apply, and replace the settings that follow from the case."""
    rewinds = any(action.remedy == "rewind" and remedy(action).applies(case) for action in rung.do)
    case, actions = replace(case, rewinds=rewinds), []
    for action in rung.do:
        if (one := remedy(action)).applies(case):
            actions.append(replace(action, settings={**action.settings, **one.settings_for(case)}))
    return tuple(actions)


def _relevant(history: Sequence[Incident], anomaly: Anomaly) -> list[Incident]:
    """Drop incidents not caused by the training that a rewind undid and that the run has since passed.

    The run was healthy beyond their step, so the next incident of that kind is a new one.
    """
    relevant, healthy_until = [], anomaly.since
    for one in reversed(history):
        is_undone = one.diagnosis.cause in _FROM_OUTSIDE and not is_mild(one.decision.actions)
        if not (is_undone and healthy_until >= one.anomaly.step):
            relevant.append(one)
        healthy_until = max(healthy_until, one.anomaly.since)
    return relevant[::-1]


def _strikes(policy: Policy, rung: Rung, place: int, case: Case, relevant: Sequence[Incident], tick: int) -> int:
    """Count the incidents that a rung has met: within its ticks, or else since the cause was last forgiven.

    A cause is forgiven when the run gets well beyond the farthest step of its incidents. Incidents that mild lower
    rungs handled do not matter here. It is measured in steps, which rewinds take back: a run that returns to one place
    again and again has not got beyond it, however many ticks that takes.
    """
    same_cause = [one for one in relevant if one.diagnosis.cause == case.diagnosis.cause]
    if rung.within is not None:
        oldest = tick - rung.within
        return sum(one.decision.rung == place and one.anomaly.tick >= oldest for one in same_cause)
    count, reached = 0, None
    for incident in same_cause:
        decided, step = incident.decision, incident.anomaly.step
        if not decided.actions or (decided.rung < place and is_mild(decided.actions)):
            continue  # without actions: the process ended before any was taken
        if reached is not None and step - reached >= policy.forgive_after:
            count = 0
        reached = max(reached or 0, step)
        count += decided.rung == place
    return 0 if reached is not None and case.anomaly.step - reached >= policy.forgive_after else count


def _over_budget(
    policy: Policy,
    actions: Sequence[Action],
    case: Case,
    tick: int,
    relevant: Sequence[Incident],
    history: Sequence[Incident],
) -> str | None:
    """Name the budget that is used up, if one is. Reporting what landed costs nothing."""
    budget, within = policy.budget, f"within {counted(policy.budget.window, 'update')}"
    recent = [one for one in relevant if one.anomaly.tick >= tick - budget.window]
    if is_mild(actions):
        refused = sum(not one.anomaly.landed and is_mild(one.decision.actions) for one in recent)
        if not case.anomaly.landed and refused >= budget.refused:
            return f"the budget of {counted(budget.refused, 'refused update')} {within} is used up"
    elif sum(not is_mild(one.decision.actions) for one in recent) >= budget.incidents:
        return f"the budget of {counted(budget.incidents, 'incident')} {within} is used up"
    elif sum(not is_mild(one.decision.actions) for one in history) >= budget.run:
        return f"the budget of {counted(budget.run, 'incident')} in a run is used up"
    guilty, rows = case.facts.quarantined + len(set(case.diagnosis.rows)), case.facts.rows
    if all(action.remedy != "quarantine" for action in actions):
        return None
    if guilty > (allowed := budget.rows_of(rows)):
        share = f"{guilty:,} of its {rows:,} rows are guilty"
        return f"the data set is broken: {share}, and the budget allows for {allowed:,}"
    if guilty + case.facts.given >= rows:
        share = f"all of its {rows:,} rows are guilty"
        return f"the data set is broken: {share}, {case.facts.given:,} of them in another run"
    return None


def _refused_in_a_row(anomaly: Anomaly, history: Sequence[Incident]) -> int:
    """Count the updates right before this one that were not accepted; not all of them need to be incidents."""
    first, accepted = anomaly.tick, anomaly.step - (not anomaly.landed)
    for incident in reversed(history):
        one, actions = incident.anomaly, incident.decision.actions
        # Updates were retried since: after a rewind or, if no action was taken, by another process.
        was_retried = not actions or any(action.remedy == "rewind" for action in actions)
        if was_retried or one.step - (not one.landed) != accepted:
            break
        first = one.tick
    return anomaly.tick - first


def decisions_digest(incidents: Sequence[Incident], in_effect: Mapping[str, Any]) -> int:
    """Digest what changes with an incident only: the decisions so far, and the remedies in effect as plain data.

    Incidents of the process alone, such as a full disk, are left out: perhaps only one rank has met them.
    """
    made = [
        {
            "what": (one.anomaly.signal, one.anomaly.step, one.anomaly.tick, one.anomaly.since),
            "why": (one.diagnosis.cause, one.diagnosis.rows),
            "done": [(action.remedy, sorted(action.settings.items())) for action in one.decision.actions],
            "where": (one.decision.rung, one.rewound_to),
        }
        for one in incidents
        if one.diagnosis.cause is not Cause.PROCESS
    ]
    return crc32(json.dumps([made, in_effect], sort_keys=True, default=str).encode())


def update_digest(decisions: int, step: int, tick: int, start: int, samples: int, knobs: KnobValues) -> int:
    """Digest the inputs of an update. It is computed for every update, so it is cheap."""
    # Factors rounded to float32: their last digit may differ between machines, without effect.
    factors = (knobs.lr, knobs.clip, knobs.eps, knobs.ceiling, knobs.leapt_to, knobs.higher_precision)
    whole = crc32(pack("<5q5f?", decisions, step, tick, start, samples, *factors))
    return (whole ^ (whole >> DIGEST_BITS)) & ((1 << DIGEST_BITS) - 1)
