"""From an incident and all that came before it to what is done: pure, and the same on every rank.

The digests are how ranks notice that they did not decide alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from struct import pack
from typing import Any
from zlib import crc32

from resilient_train.recover.knobs import KnobValues
from resilient_train.recover.policy import Budget, Policy, Rung
from resilient_train.recover.remedies import Case, Circumstances, Quarantine, only_skips
from resilient_train.types import Action, Anomaly, Cause, Decision, Diagnosis, Incident

DIGEST_BITS = 24  # of a number that float32 holds exactly

_FROM_OUTSIDE = (Cause.CORRUPTION, Cause.DATA)  # of the training: they may come again, however well they were cured


def decide(
    policy: Policy,
    anomaly: Anomaly,
    diagnosis: Diagnosis,
    history: Sequence[Incident],
    tick: int,
    facts: Circumstances,
    trace: int = 0,
) -> Decision:
    """Take the first rung of the cause's ladder that applies and has strikes left, if the budget allows it.

    `history` holds the incidents before this one. A run that was resumed after it gave up starts with a clean slate.
    `trace` is of the updates since the last rewind: a rung whose attempt gave the same as an earlier one is spent.
    """
    cause, budget = diagnosis.cause, policy.budget
    if not (ladder := policy.ladder(cause)):
        return Decision(gave_up=f"the policy has no remedy for {cause}")
    if _without_progress(anomaly, history) >= budget.in_a_row:
        spent_budget = _plural(budget.in_a_row, "update")
        return Decision(gave_up=f"the budget of {spent_budget} in a row that did not land is used up")
    case = Case(anomaly, diagnosis, facts, rewinds=False)
    counting, spent = _counting(history, anomaly), 0
    for place, rung in enumerate(ladder):
        if (rung.landed and not anomaly.landed) or not (actions := _actions(rung, case)):
            continue
        strikes = _strikes(policy, rung, place, case, counting, tick)
        if _gave_the_same(place, cause, trace, counting):
            spent += 1
            continue
        if rung.at_start and not (facts.at_start or strikes):
            continue
        if strikes < policy.strikes_of(rung, cause):
            over = _over_budget(budget, actions, case, tick, counting, history)
            return Decision(actions, place) if over is None else Decision(rung=place, gave_up=over)
        spent += 1
    if spent:
        return Decision(gave_up=f"the ladder for {cause} has no rung left, {_plural(spent, 'rung')} did not help")
    return Decision(gave_up=f"none of the remedies for {cause} can be applied here")


def _actions(rung: Rung, case: Case) -> tuple[Action, ...]:
    """What of a rung makes sense here, with the settings that follow from the case."""
    rewinds = any(one.action.remedy == "rewind" and one.remedy.applies(case) for one in rung.do)
    case = replace(case, rewinds=rewinds)
    applying = [(one.action, one.remedy) for one in rung.do if one.remedy.applies(case)]
    return tuple(
        replace(action, settings={**action.settings, **remedy.settings_for(case)}) for action, remedy in applying
    )


def _counting(history: Sequence[Incident], anomaly: Anomaly) -> list[Incident]:
    """The incidents that count: not what came from outside, was undone by a rewind, and is behind the run.

    The run was healthy beyond its place since then, so the next one is a new one.
    """
    counting, good = [], anomaly.since
    for one in reversed(history):
        is_undone = one.diagnosis.cause in _FROM_OUTSIDE and not only_skips(one.decision.actions)
        if not (is_undone and one.decision.gave_up is None and good >= one.anomaly.step):
            counting.append(one)
        good = max(good, one.anomaly.since)
    return counting[::-1]


def _gave_the_same(place: int, cause: Cause, trace: int, history: Sequence[Incident]) -> bool:
    """Whether the last attempt was this rung, and its updates were the same to the last digit as an earlier one's.

    Knobs, data and weights were the same then, so the next attempt would be as well.
    """
    attempts = list(_since_giving_up(history))
    if not trace or not attempts or attempts[0].rewound_to is None:
        return False
    is_same_rung = attempts[0].diagnosis.cause == cause and attempts[0].decision.rung == place
    return is_same_rung and any(one.trace == trace for one in attempts)


def _strikes(policy: Policy, rung: Rung, place: int, case: Case, history: Sequence[Incident], tick: int) -> int:
    """Count the incidents that a rung has met: within its ticks, or else since the cause was last forgiven.

    It is forgiven where the run gets well beyond the farthest step of its incidents; those that lower rungs merely
    passed over do not count. In steps, which rewinds take back: a run that comes to the same place again and again has
    not got beyond it, however many ticks that takes.
    """
    cause, count, reached = case.diagnosis.cause, 0, None
    if rung.within is not None:
        recent = _recent(tick - rung.within, history)
        return sum(one.diagnosis.cause == cause and one.decision.rung == place for one in recent)
    for incident in list(_since_giving_up(history))[::-1]:
        decided, step = incident.decision, incident.anomaly.step
        if incident.diagnosis.cause != cause or (decided.rung < place and only_skips(decided.actions)):
            continue
        if not decided.actions:  # the process ended before anything was done
            continue
        if reached is not None and step - reached >= policy.forgive_after:
            count = 0
        reached = max(reached or 0, step)
        count += decided.rung == place
    return 0 if reached is not None and case.anomaly.step - reached >= policy.forgive_after else count


def _over_budget(
    budget: Budget,
    actions: Sequence[Action],
    case: Case,
    tick: int,
    counting: Sequence[Incident],
    history: Sequence[Incident],
) -> str | None:
    """Say which budget is used up, if one is. Reporting what landed costs nothing."""
    recent = list(_recent(tick - budget.window, counting))
    within = f"within {_plural(budget.window, 'update')}"
    if only_skips(actions):
        refused = sum(not one.anomaly.landed and only_skips(one.decision.actions) for one in recent)
        if not case.anomaly.landed and refused >= budget.refused:
            return f"the budget of {_plural(budget.refused, 'refused update')} {within} is used up"
    elif sum(not only_skips(one.decision.actions) for one in recent) >= budget.incidents:
        return f"the budget of {_plural(budget.incidents, 'incident')} {within} is used up"
    elif sum(not only_skips(one.decision.actions) for one in _since_giving_up(history)) >= budget.run:
        return f"the budget of {_plural(budget.run, 'incident')} in a run is used up"
    guilty = case.facts.quarantined + len(set(case.diagnosis.rows))
    allowed = budget.rows_of(case.facts.rows)
    if any(action.remedy == Quarantine.name for action in actions) and guilty > allowed:
        share = f"{guilty:,} of its {case.facts.rows:,} rows are guilty"
        return f"the data set is broken: {share}, and the budget allows for {allowed:,}"
    return None


def _without_progress(anomaly: Anomaly, history: Sequence[Incident]) -> int:
    """How many updates right before this one were not accepted; not all of them need to be incidents."""
    first, accepted = anomaly.tick, anomaly.step - (not anomaly.landed)
    for incident in _since_giving_up(history):
        one, actions = incident.anomaly, incident.decision.actions
        # Updates were retried since: after a rewind or, where nothing was done, by another process.
        rewinds = not actions or any(action.remedy == "rewind" for action in actions)
        if one.step - (not one.landed) != accepted or rewinds:
            break
        first = one.tick
    return anomaly.tick - first


def _recent(oldest: int, history: Sequence[Incident]) -> Iterator[Incident]:
    """The incidents since the tick `oldest`, the newest first."""
    for incident in _since_giving_up(history):
        if incident.anomaly.tick < oldest:
            return
        yield incident


def _since_giving_up(history: Sequence[Incident]) -> Iterator[Incident]:
    """The incidents since the run last gave up, the newest first."""
    for incident in reversed(history):
        if incident.decision.gave_up is not None:
            return
        yield incident


def _plural(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def decisions_digest(incidents: Sequence[Incident], in_effect: Mapping[str, Any]) -> int:
    """Digest what changes with an incident only: the decisions so far, and the remedies in effect as plain data.

    Incidents of the process alone are left out, such as a full disk: one rank may have met them.
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
    """Digest what an update is made of. It is computed for each, so it is cheap."""
    # Factors in half their length: the last digit may differ between machines, which makes no difference.
    factors = (knobs.lr, knobs.clip, knobs.eps, knobs.ceiling, knobs.leapt_to, knobs.higher_precision)
    whole = crc32(pack("<5q5f?", decisions, step, tick, start, samples, *factors))
    return (whole ^ (whole >> DIGEST_BITS)) & ((1 << DIGEST_BITS) - 1)
