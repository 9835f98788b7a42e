"""Decides what is done about an incident: pure functions, with the same result on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from struct import pack
from zlib import crc32

from resilient_train.recover.knobs import KnobValues
from resilient_train.recover.policy import Policy, Rung
from resilient_train.recover.remedies import Case, applicable, is_mild
from resilient_train.types import OBSERVE, TRIAL, Action, Anomaly, Cause, Decision, Diagnosis, Incident, Signal, kind_of
from resilient_train.wording import counted

_WRITES = "if it returns, suspect the hardware, or code that writes to"
_CALMER = "lower the learning rate, warm up longer, or clip tighter"
_BY_SIGNAL = {  # what a signal suggests by itself
    (Cause.DATA, Signal.NONFINITE_BATCH): "The batch holds NaN or infinite values: look at what makes its rows.",
    (Cause.UNKNOWN, Signal.NONFINITE_LOSS): (
        "The batch is finite and its loss is not: look for a logarithm, division, root or power that meets 0 or less."
    ),
    (Cause.UNKNOWN, Signal.NONFINITE_GRAD): (
        "The loss is finite and its gradient is not: look for an infinite slope, such as that of sqrt or norm at 0."
    ),
    (Cause.UNKNOWN, Signal.LOSS_SPIKE): (  # of an update that was refused
        "One loss was far above anything recent: look at the rows of that batch; if many follow, lower the rate."
    ),
    (Cause.UNKNOWN, Signal.GRAD_SPIKE): (
        "One gradient was far above anything recent: look for outliers; if many follow, lower the learning rate."
    ),
    (Cause.UNKNOWN, Signal.EXCEPTION): "This batch raises and others do not: handle that case, or mend the rows.",
    (Cause.CORRUPTION, Signal.NONFINITE_WEIGHTS): (
        f"Weights became NaN or infinite although every update was finite: {_WRITES} weights between updates."
    ),
    (Cause.CORRUPTION, Signal.WEIGHTS_JUMP): (
        f"Weights moved farther than the optimizer can move them: {_WRITES} weights between updates."
    ),
    (Cause.CORRUPTION, Signal.RANK_MISMATCH): (
        f"The ranks hold different weights: {_WRITES} weights on some ranks; if they should, turn off replicas."
    ),
    (Cause.OPTIMIZER, Signal.NONFINITE_OPTIMIZER): (
        "The optimizer's moments are not finite: if it returns, raise its eps, or keep its state in float32."
    ),
    (Cause.OPTIMIZER, Signal.OPTIMIZER_RANGE): (
        f"The optimizer's second moments do not follow from its gradients: {_WRITES} its state."
    ),
    (Cause.EXPLOSION, Signal.DIVERGENCE): f"The loss climbs and does not come back down: {_CALMER}.",
    (Cause.EXPLOSION, Signal.NOT_RECOVERED): (
        f"The loss is stable, but not back where it was: {_CALMER}; declare a deliberate change with expect=[STEP]."
    ),
    (Cause.RATE, Signal.NO_PROGRESS): (
        "The learning rate is too high from the start: lower it by the factor that the trial found, or warm up longer."
    ),
    (Cause.OVERFLOW, Signal.SCALE_COLLAPSE): (
        "Gradients overflow half precision at every loss scale: use bf16, or keep the layer that does in float32."
    ),
    (Cause.PROCESS, Signal.OUT_OF_MEMORY): "Use a smaller batch with more accumulation, or activation checkpointing.",
    (Cause.PROCESS, Signal.HANG): (
        "train.log says where each rank was: often one of them waits for data or for a collective."
    ),
    (Cause.PROCESS, Signal.CRASH): (
        "See the last lines of the process that died, on its terminal or in its log (train.log, if it was the command)."
    ),
    (Cause.PROCESS, Signal.DISK_FULL): "Make room on the disk of the run directory, or keep fewer checkpoints.",
    (Cause.PROCESS, Signal.CHECKPOINT_FAILED): "Find what kept the state from being written: the log has a traceback.",
    (Cause.PROCESS, Signal.CHECKPOINT_DAMAGED): "Check the disk: a file differs from what was written.",
}
_DIAGNOSES = {signal: Diagnosis(cause, advice) for (cause, signal), advice in _BY_SIGNAL.items()}
BY_DECAY = Diagnosis(Cause.OPTIMIZER, "Weights decay faster than they learn: lower weight_decay.")
_SPIKE_LANDED = Diagnosis(
    Cause.EXPLOSION, f"The loss jumped and stayed there: {_CALMER}; declare a deliberate change with expect=[STEP]."
)


def by_rate(times: float, step: int, *, is_sudden: bool) -> Diagnosis:
    rose = f"x{times:,.0f}" if times >= 100 else f"x{times:.3g}"
    rose = f"jumped {rose} from step {step - 1:,} to" if is_sudden else f"rose {rose} since step"
    look = "look at the schedule, and at what else sets it there; the samples are not to blame"
    return Diagnosis(Cause.RATE, f"The learning rate {rose} {step:,}: {look}.")


def by_signal(anomaly: Anomaly) -> Diagnosis:
    is_landed_spike = anomaly.signal is Signal.LOSS_SPIKE and anomaly.landed
    return _SPIKE_LANDED if is_landed_spike else _DIAGNOSES[anomaly.signal]


DIGEST_BITS = 24  # float32 holds a number of so many bits exactly

_FROM_OUTSIDE = (Cause.CORRUPTION, Cause.DATA)  # not caused by the training: they may occur again after any remedy
_MAIN = {TRIAL, "limit_update"}  # without these a rung that names them is pointless


def decide(policy: Policy, case: Case, history: Sequence[Incident]) -> Decision:
    """Take the first rung that applies and has strikes left, if budgets allow; a run that gave up starts fresh."""
    if policy.observe:
        return Decision((Action(OBSERVE),))
    anomaly, cause = case.anomaly, case.diagnosis.cause
    ladder = policy.ladder(cause)
    if not ladder:
        return Decision(gave_up=f"the policy has no remedy for {cause}")
    ends = [place for place, one in enumerate(history, start=1) if one.decision.gave_up is not None]
    history = history[max(ends, default=0) :]
    if _refused_in_a_row(anomaly, history) >= policy.budget.in_a_row:
        limit = counted(policy.budget.in_a_row, "update")
        return Decision(gave_up=f"the budget of {limit} in a row that did not land is used up")
    relevant, exhausted = _relevant(history, anomaly), 0
    for place, rung in enumerate(ladder):
        actions = _applicable(rung, case)
        if not actions or (rung.landed and not anomaly.landed):
            continue
        strikes = _strikes(policy, rung, place, case, relevant)
        if rung.at_start and not (case.at_start or strikes):
            continue
        if strikes >= (policy.strikes if rung.strikes is None else rung.strikes):
            exhausted += 1
        elif why := _over_budget(policy, actions, case, relevant, history):
            return Decision(rung=place, gave_up=why)
        elif why := _over_rows(policy, actions, case):
            if cause is not Cause.DATA or case.diagnosis.patchable:
                continue  # it is not known to be the data, or a patch takes any: other remedies are left
            return Decision(rung=place, gave_up=why)
        else:
            return Decision(actions, place)
    if exhausted:
        return Decision(gave_up=f"the ladder for {cause} has no rung left, {counted(exhausted, 'rung')} did not help")
    return Decision(gave_up=f"none of the remedies for {cause} can be applied here")


def _applicable(rung: Rung, case: Case) -> tuple[Action, ...]:
    """Select what applies; nothing without its main remedy, or if a warm-up is left alone, without the rewind."""
    names = {action.remedy for action in rung.do}
    rewinds = any(action.remedy == "rewind" for action in applicable(rung.do, case))
    actions = applicable(rung.do, replace(case, rewinds=rewinds))
    lacks_main = _MAIN & names - {action.remedy for action in actions}
    only_warms_up = all(one.remedy == "lower_lr" and one.settings.get("factor") == 1 for one in actions)
    return () if lacks_main or (only_warms_up and "rewind" in names and not rewinds) else actions


def _relevant(history: Sequence[Incident], anomaly: Anomaly) -> list[Incident]:
    """Drop faults from outside that a rewind undid and the run has passed since: the next one of that kind is new."""
    relevant, healthy_until = [], anomaly.since
    for one in reversed(history):
        is_undone = one.diagnosis.cause in _FROM_OUTSIDE and not is_mild(one.decision.actions)
        if not (is_undone and healthy_until >= one.anomaly.step):
            relevant.append(one)
        healthy_until = max(healthy_until, one.anomaly.since)
    return relevant[::-1]


def _strikes(policy: Policy, rung: Rung, place: int, case: Case, relevant: Sequence[Incident]) -> int:
    """Count the incidents that a rung has met: within its ticks, or else since the cause was last forgiven.

    A cause is forgiven when the run gets well beyond the farthest step of its incidents. Incidents that mild lower
    rungs handled do not matter here. It is measured in steps, which rewinds take back: a run that returns to one place
    again and again has not got beyond it, however many ticks that takes.
    """
    same_cause = [one for one in relevant if one.diagnosis.cause == case.diagnosis.cause]
    if rung.within is not None:
        oldest = case.anomaly.tick - rung.within
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
    policy: Policy, actions: Sequence[Action], case: Case, relevant: Sequence[Incident], history: Sequence[Incident]
) -> str | None:
    """Name the budget that is used up, if one is. What helped costs nothing, nor does reporting what landed."""
    budget, within = policy.budget, f"within {counted(policy.budget.window, 'update')}"
    recent = [one for one in _came_again(relevant, case) if one.anomaly.tick >= case.anomaly.tick - budget.window]
    if is_mild(actions):
        refused = sum(not one.anomaly.landed and is_mild(one.decision.actions) for one in recent)
        if not case.anomaly.landed and refused >= budget.refused:
            return f"the budget of {counted(budget.refused, 'refused update')} {within} is used up"
    elif sum(not is_mild(one.decision.actions) for one in recent) >= budget.incidents:
        return f"the budget of {counted(budget.incidents, 'incident')} {within} is used up"
    elif sum(not is_mild(one.decision.actions) for one in _came_again(history, case)) >= budget.run:
        return f"the budget of {counted(budget.run, 'incident')} in a run is used up"
    return None


def _came_again(incidents: Sequence[Incident], case: Case) -> list[Incident]:
    """Return the incidents after which the same happened: what was done about the others has helped."""
    later, found = {kind_of(case.anomaly, case.diagnosis)}, []
    for one in reversed(incidents):
        kind = kind_of(one.anomaly, one.diagnosis)
        found += [one] if kind in later else []
        later.add(kind)
    return found


def _over_rows(policy: Policy, actions: Sequence[Action], case: Case) -> str | None:
    """Say that the rows to put in quarantine are more than the budget allows, if they are."""
    if all(action.remedy != "quarantine" for action in actions):
        return None
    guilty, rows = case.quarantined + len(set(case.diagnosis.rows)), case.rows
    allowed = min(policy.budget.rows_of(rows), rows - case.given - 1)  # one has to be left to train on
    if guilty <= allowed:
        return None
    share = f"{guilty:,} of its {counted(rows, 'row')} {'is' if guilty == 1 else 'are'} guilty"
    return f"the data set is broken: {share}, and the budget allows for {allowed:,}"


def recent(policy: Policy, incidents: Iterable[Incident], tick: int) -> list[Incident]:
    """Return the incidents that may matter: mild ones in the windows of the policy, and no change on purpose."""
    budget, rungs = policy.budget, [rung for ladder in policy.ladders.values() for rung in ladder]
    oldest = tick - max(budget.window, budget.in_a_row, policy.forgive_after, *(rung.within or 0 for rung in rungs))

    def matters(one: Incident, last: int) -> bool:
        return last >= oldest or one.decision.gave_up is not None or not is_mild(one.decision.actions)

    return [
        each
        for one in incidents
        if one.diagnosis.cause is not Cause.PROCESS and not one.is_accepted
        # Unfolding an incident is slow, and a run may have thousands that are over.
        if matters(one, one.again[-1][0] if one.again else one.anomaly.tick)
        for each in one.each
        if matters(each, each.anomaly.tick)
    ]


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


def update_digest(decisions: int, step: int, tick: int, start: int, samples: int, knobs: KnobValues) -> int:
    """Digest the inputs of an update, cheaply; knobs as float32, as their last digit may differ between machines."""
    whole = crc32(pack(f"<5q{len(knobs)}f", decisions, step, tick, start, samples, *knobs))
    return (whole ^ (whole >> DIGEST_BITS)) & ((1 << DIGEST_BITS) - 1)
