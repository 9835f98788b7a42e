"""From an incident and all that came before it to what is done: pure, and the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from resilient_train.recover.policy import Budget, Policy, Rung
from resilient_train.recover.prescription import Prescribed
from resilient_train.recover.remedies import Applicable, Case, Quarantine, passes_over
from resilient_train.types import Action, Anomaly, Cause, Decision, Diagnosis, Incident

_FROM_OUTSIDE = (Cause.CORRUPTION, Cause.DATA)  # of the training: they may come again, however well they were cured


def decide(
    policy: Policy,
    anomaly: Anomaly,
    diagnosis: Diagnosis,
    history: Sequence[Incident],
    tick: int,
    can: Applicable,
    trace: int = 0,
) -> Decision:
    """Take the first rung of the cause's ladder that applies and has strikes left, if the budget allows it.

    `history` holds the incidents before this one. A run that gave up and was taken up again starts with a clean slate.
    `trace` is of the updates since the last rewind: a rung whose attempt came to the same as an earlier one is spent.
    """
    cause = diagnosis.cause
    everything = history
    if not (ladder := policy.ladder(cause)):
        return Decision(gave_up=f"the policy has no remedy for {cause}")
    in_a_row = policy.budget.in_a_row
    if _without_progress(anomaly, history) >= in_a_row:
        return Decision(gave_up=f"the budget of {_count(in_a_row, 'update')} in a row that did not land is used up")
    case = Case(anomaly, diagnosis, can, rewinds=False)
    history, spent = _in_vain(history, anomaly), 0
    for place, rung in enumerate(ladder):
        if (rung.landed and not anomaly.landed) or not (actions := _applicable(rung, case)):
            continue
        allowed, strikes = policy.strikes_of(rung, cause), _strikes(policy, rung, place, case, history, tick)
        if _came_to_the_same(place, cause, trace, history):
            spent += 1
            continue
        if rung.at_start and not (can.at_start or strikes):
            continue
        if strikes < allowed:
            over = _over_budget(policy.budget, actions, anomaly, history, tick)
            over = over or _over_run(policy.budget, actions, everything)
            over = over or _over_quarantine(policy.budget, actions, diagnosis, can)
            return Decision(actions, place) if over is None else Decision(rung=place, gave_up=over)
        spent += 1
    if spent:
        return Decision(gave_up=f"the ladder for {cause} has no rung left, {_count(spent, 'rung')} did not help")
    return Decision(gave_up=f"none of the remedies for {cause} can be applied here")


def _applicable(rung: Rung, case: Case) -> tuple[Action, ...]:
    """What of a rung makes sense here."""
    rewinds = any(one.action.remedy == "rewind" and one.remedy.applies(case) for one in rung.remedies)
    beside = replace(case, rewinds=rewinds)
    applying = [one for one in rung.remedies if one.remedy.applies(beside)]
    return tuple(_settled(one, beside) for one in applying)


def _settled(prescribed: Prescribed, case: Case) -> Action:
    """An action with the settings that follow from the case."""
    action, settle = prescribed.action, getattr(prescribed.remedy, "settled", None)  # one of a user's own may have none
    return replace(action, settings={**action.settings, **settle(case)}) if settle is not None else action


def _in_vain(history: Sequence[Incident], anomaly: Anomaly) -> list[Incident]:
    """The incidents that count: without what came from outside and was undone by a rewind.

    The run was good beyond its place since then, so that the next one is another.
    """
    counting, good = [], anomaly.since
    for one in reversed(history):
        is_undone = one.diagnosis.cause in _FROM_OUTSIDE and not passes_over(one.decision.actions)
        if not (is_undone and one.decision.gave_up is None and good >= one.anomaly.step):
            counting.append(one)
        good = max(good, one.anomaly.since)
    return counting[::-1]


def _came_to_the_same(place: int, cause: Cause, trace: int, history: Sequence[Incident]) -> bool:
    """Whether the last attempt was of this rung, and the way it led was the same to the last digit as an earlier one.

    Knobs, data and weights were the same then, so that the next one would be as well.
    """
    last, *before = [*_taken_up(history), None]
    if not trace or last is None or last.rewound_to is None:
        return False
    if last.diagnosis.cause != cause or last.decision.rung != place:
        return False
    return any(one is not None and one.trace == trace for one in (last, *before))


def _strikes(policy: Policy, rung: Rung, place: int, case: Case, history: Sequence[Incident], tick: int) -> int:
    """How many incidents a rung has met that are not forgiven."""
    cause = case.diagnosis.cause
    if rung.within is None:
        return _unforgiven(policy.forgive_after, place, cause, case.anomaly.step, history)
    recent = _recent(tick - rung.within, history)
    return sum(one.diagnosis.cause == cause and one.decision.rung == place for one in recent)


def _unforgiven(forgive_after: int, place: int, cause: Cause, step: int, history: Sequence[Incident]) -> int:
    """Count the incidents of a rung since the cause was last forgiven.

    It is forgiven where the run gets well beyond the farthest step of its incidents; of those that lower rungs merely
    passed over, none counts. In steps, which rewinds take back: who comes to the same place again and again has not
    got beyond it, however many ticks that takes.
    """
    count, reached = 0, None
    for incident in list(_taken_up(history))[::-1]:
        decided = incident.decision
        if incident.diagnosis.cause != cause or (decided.rung < place and passes_over(decided.actions)):
            continue
        if not decided.actions:  # the process ended before anything was done
            continue
        if reached is not None and incident.anomaly.step - reached >= forgive_after:
            count = 0
        reached = max(reached or 0, incident.anomaly.step)
        count += decided.rung == place
    return 0 if reached is not None and step - reached >= forgive_after else count


def _over_budget(
    budget: Budget, actions: Sequence[Action], anomaly: Anomaly, history: Sequence[Incident], tick: int
) -> str | None:
    """Say which budget is used up, if one is. To tell of what landed costs nothing."""
    recent = _recent(tick - budget.window, history)
    if passes_over(actions):
        refused = sum(not one.anomaly.landed and passes_over(one.decision.actions) for one in recent)
        if not anomaly.landed and refused >= budget.refused:
            spent = _count(budget.refused, "refused update")
            return f"the budget of {spent} within {_count(budget.window, 'update')} is used up"
        return None
    if sum(not passes_over(one.decision.actions) for one in recent) >= budget.incidents:
        spent = _count(budget.incidents, "incident")
        return f"the budget of {spent} within {_count(budget.window, 'update')} is used up"
    return None


def _over_run(budget: Budget, actions: Sequence[Action], history: Sequence[Incident]) -> str | None:
    """Say so if the whole run has met too many incidents, whatever became of them."""
    if passes_over(actions) or sum(not passes_over(one.decision.actions) for one in _taken_up(history)) < budget.run:
        return None
    return f"the budget of {_count(budget.run, 'incident')} in a run is used up"


def _over_quarantine(budget: Budget, actions: Sequence[Action], diagnosis: Diagnosis, can: Applicable) -> str | None:
    """Say so if more rows would be in quarantine than the data set can lose."""
    if all(action.remedy != Quarantine.name for action in actions):
        return None
    wanted, allowed = can.quarantined + len(set(diagnosis.rows)), budget.rows_of(can.rows)
    if wanted <= allowed:
        return None
    share = f"{wanted:,} of its {can.rows:,} rows are guilty"
    return f"the data set is broken: {share}, and the budget allows for {allowed:,}"


def _without_progress(anomaly: Anomaly, history: Sequence[Incident]) -> int:
    """For how many updates right before this one none was accepted; not all of them need to be incidents."""
    first = anomaly.tick
    for incident in _taken_up(history):
        if _accepted(incident.anomaly) != _accepted(anomaly) or _rewinds(incident):
            break
        first = incident.anomaly.tick
    return anomaly.tick - first


def _accepted(anomaly: Anomaly) -> int:
    """Updates accepted before it was noticed."""
    return anomaly.step - (not anomaly.landed)


def _rewinds(incident: Incident) -> bool:
    """Whether updates were made again since: after a rewind, or, where nothing was done, by another process."""
    actions = incident.decision.actions
    return not actions or any(action.remedy == "rewind" for action in actions)


def _recent(oldest: int, history: Sequence[Incident]) -> Iterator[Incident]:
    """The incidents since the tick `oldest`, the newest first."""
    for incident in _taken_up(history):
        if incident.anomaly.tick < oldest:
            return
        yield incident


def _taken_up(history: Sequence[Incident]) -> Iterator[Incident]:
    """The incidents since the run was last taken up after it had given up, the newest first."""
    for incident in reversed(history):
        if incident.decision.gave_up is not None:
            return
        yield incident


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
