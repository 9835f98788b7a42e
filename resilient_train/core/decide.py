"""Decides what is done about an incident: pure functions, with the same result on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from resilient_train.core.policy import Policy, Rung
from resilient_train.core.remedies import KNOWN, Case, applicable, is_mild
from resilient_train.ground.types import OBSERVE, Action, Cause, Decision, Facts, Incident, fact, kind_of

_FROM_OUTSIDE = (Cause.CORRUPTION, Cause.DATA)  # not caused by the training: they may occur again after any remedy


def decide(policy: Policy, case: Case, history: Sequence[Incident]) -> Decision:
    """Take the first rung that applies and has strikes left, if budgets allow; a run that gave up starts fresh."""
    if policy.observe:
        return Decision((Action(OBSERVE),))
    anomaly, cause = case.anomaly, case.diagnosis.cause
    ladder = policy.ladder(cause)
    if not ladder:
        return Decision(gave_up=fact("no_remedy", cause=cause))
    ends = [place for place, one in enumerate(history, start=1) if one.decision.gave_up is not None]
    history = history[max(ends, default=0) :]
    if case.refused_in_a_row >= policy.budget.in_a_row:
        return Decision(gave_up=fact("in_a_row", count=case.refused_in_a_row, limit=policy.budget.in_a_row))
    relevant, exhausted = _relevant(history, anomaly.since), 0
    for place, rung in enumerate(ladder):
        actions = _applicable(rung, case)
        if not actions or (rung.landed and not anomaly.landed):
            continue
        strikes = _strikes(policy, rung, place, case, relevant)
        if rung.at_start and not (case.at_start or strikes):
            continue
        if strikes >= (policy.strikes if rung.strikes is None else rung.strikes):
            exhausted += 1
        elif why := _over_budget(policy, actions, case, relevant):
            return Decision(rung=place, gave_up=why)
        elif why := _over_rows(policy, actions, case):
            if cause is not Cause.DATA:
                continue  # it is not known to be the data: other remedies are left
            return Decision(rung=place, gave_up=why)
        else:
            return Decision(actions, place)
    if exhausted:
        return Decision(gave_up=fact("ladder_exhausted", cause=cause, count=exhausted))
    return Decision(gave_up=fact("none_applies", cause=cause))


def _applicable(rung: Rung, case: Case) -> tuple[Action, ...]:
    """Select what applies; nothing without its main remedy."""
    rewinds = any(action.remedy == "rewind" for action in applicable(rung.do, case))
    actions = applicable(rung.do, replace(case, rewinds=rewinds))
    lacks_main = any(KNOWN[name].is_main for name in {one.remedy for one in rung.do} - {one.remedy for one in actions})
    return () if lacks_main else actions


def _relevant(history: Sequence[Incident], healthy_until: int) -> list[Incident]:
    """Drop faults from outside that a rewind undid and the run has passed since: the next one of that kind is new."""
    relevant = []
    for one in reversed(history):
        is_undone = one.diagnosis.cause in _FROM_OUTSIDE and _is_severe(one)
        if not (is_undone and healthy_until >= one.anomaly.step):
            relevant.append(one)
        healthy_until = max(healthy_until, one.anomaly.since)
    return relevant[::-1]


def _strikes(policy: Policy, rung: Rung, place: int, case: Case, relevant: Sequence[Incident]) -> int:
    """Count the incidents that a rung has met: within its ticks, or else since the cause was last forgiven.

    It is forgiven when the run gets well beyond the farthest step of its incidents, but for those of mild lower rungs.
    In steps, which rewinds take back: a run that returns to one place again and again has not got beyond it.
    """
    same_cause = [one for one in relevant if one.diagnosis.cause == case.diagnosis.cause]
    if rung.within is not None:
        oldest = case.anomaly.tick - rung.within
        return sum(one.decision.rung == place and one.anomaly.tick >= oldest for one in same_cause)
    count, reached = 0, None
    for incident in same_cause:
        decided, step = incident.decision, incident.anomaly.step
        if decided.rung < place and not _is_severe(incident):
            continue
        if reached is not None and step - reached >= policy.forgive_after:
            count = 0
        reached = max(reached or 0, step)
        count += decided.rung == place
    return 0 if reached is not None and case.anomaly.step - reached >= policy.forgive_after else count


def _over_budget(policy: Policy, actions: Sequence[Action], case: Case, relevant: Sequence[Incident]) -> Facts:
    """Name the budget that is used up, if one is. What helped costs nothing, nor does reporting what landed."""
    budget = policy.budget
    recent = [one for one in _came_again(relevant, case) if one.anomaly.tick >= case.anomaly.tick - budget.window]
    if is_mild(actions):
        refused = sum(not one.anomaly.landed and not _is_severe(one) for one in recent)
        is_over = not case.anomaly.landed and refused >= budget.refused
        return fact("refused_in_window", count=budget.refused, window=budget.window) if is_over else ()
    if sum(map(_is_severe, recent)) >= budget.incidents:
        return fact("incidents_in_window", count=budget.incidents, window=budget.window)
    return ()


def _is_severe(incident: Incident) -> bool:
    return not is_mild(incident.decision.actions)


def _came_again(incidents: Sequence[Incident], case: Case) -> list[Incident]:
    """Return the incidents after which the same happened: what was done about the others has helped."""
    later, found = {kind_of(case.anomaly.signal, case.diagnosis)}, []
    for one in reversed(incidents):
        if one.kind in later:
            found.append(one)
        later.add(one.kind)
    return found


def _over_rows(policy: Policy, actions: Sequence[Action], case: Case) -> Facts:
    if all(action.remedy != "quarantine" for action in actions):
        return ()
    guilty, rows = case.quarantined + len(case.diagnosis.rows), case.rows
    allowed = min(policy.budget.rows_of(rows), rows - 1)  # one has to be left to train on
    return fact("data_broken", bad=guilty, rows=rows, allowed=allowed) if guilty > allowed else ()


def countable(incidents: Iterable[Incident]) -> list[Incident]:
    """Return the incidents that strikes and budgets count: none of the process, and no change on purpose."""
    counting = [
        one for one in incidents if not (one.diagnosis.cause is Cause.PROCESS or one.is_accepted or one.is_interrupted)
    ]
    return [each for one in counting for each in one.each]
