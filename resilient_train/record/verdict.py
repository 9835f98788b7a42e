"""The story of a run in sentences: is it all right, what is left of it, what would the same command do now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from resilient_train.record.drills import on_purpose
from resilient_train.record.loop import begins_again_in
from resilient_train.record.story import Story
from resilient_train.types import Incident, Outcome
from resilient_train.wording import counted, left_to_the_end, noticed, rows_named, why_of


def verdict(story: Story) -> tuple[str, str]:
    """Say whether a run is all right: in two or three words, and in the sentences behind them."""
    where, met, cost = _where(story), incidents_met(story.incidents), cost_and_drill(story)
    match story.status:
        case "clean" | "recovered":
            well = "All is well" if story.status == "clean" else "Recovered"
            if story.is_complete:
                return well, f"{where}; {met}.{cost}{_results(story.summary)}"
            return f"{well} so far", f"{where}; {met}.{cost}"
        case "recovering":
            last = next(one for one in reversed(story.incidents) if one.outcome is None)
            what = f"incident {last.id:,} ({noticed(last.anomaly, by_name=False)}, step {last.anomaly.step:,})"
            return "Recovering", f"{where}; {what} is open until the run has stayed healthy. In all, {met}.{cost}"
        case "unrecovered":
            left = next(one for one in reversed(story.incidents) if one.outcome is Outcome.UNRECOVERED)
            what = f"incident {left.id:,} ({noticed(left.anomaly, by_name=False)}, step {left.anomaly.step:,})"
            why = f"after {what} {left_to_the_end(left)}"
            return "Not recovered, somebody has to look", f"{where}; {why}. In all, {met}.{cost}"
        case "no_progress":
            first, final = ((story.summary or {}).get(key) for key in ("first_loss", "final_loss"))
            losses = [f"{one:.4g}" for one in (first, final) if type(one) in (int, float)]
            why = f" (it began at {losses[0]} and ended at {losses[1]})" if len(losses) == 2 else ""
            return f"The loss did not fall{why}", f"{where}; {met}.{cost}"
        case "gave_up":
            why = "".join(f": {noticed(one.anomaly, by_name=False)}, {why_of(one)}" for one in story.incidents[-1:])
            return "Gave up, somebody has to look", f"{where}{why}. In all, {met}.{cost}"
        case "preempted":
            return "Stopped on request", f"{where}; {met}.{cost}"
    return "Failed", f"{where}{f': {story.why}' if story.why else ''}. In all, {met}.{cost}"


def next_start(story: Story) -> str:
    """Say what the same command would do now."""
    onward = f"goes on from step {story.newest.step:,}" if story.newest is not None else "begins at step 0 again"
    if story.loop is not None and not story.loop.goes_on:
        return f"starts a new run in {begins_again_in(story.directory)}"
    if story.loop is not None and story.summary is not None:
        return "goes on if it is asked for more steps" if story.is_complete else onward
    if story.summary is None:
        return f"is refused while this run is at work; should its process be gone, it {onward}"
    if story.is_complete:
        return "says that the run is complete and ends with 0; more `run.steps` make it longer"
    if story.status == "gave_up":
        return f"says so again at once and ends with 3; with a changed configuration it {onward}"
    return onward


def in_force(remedies: Mapping[str, Any] | None) -> list[str]:
    """Say what differs from the configuration now, one line for each; of what is damaged, nothing."""
    if remedies is None:
        return []
    knobs = remedies.get("knobs")
    lines = _knobs(knobs) if isinstance(knobs, Mapping) else []
    armor = remedies.get("armor")
    plates = [one for one in armor if isinstance(one, Mapping)] if isinstance(armor, list) else []
    lines += [f"armor around `{one.get('op')}`, `{one.get('file')}:{one.get('line')}`" for one in plates]
    if rows := _wholes(remedies.get("quarantined")):
        lines.append(f"{rows_named(rows)} in quarantine")
    spans = remedies.get("skipped")
    pairs = [one for one in map(_wholes, spans if isinstance(spans, list) else ()) if len(one) == 2]
    if skipped := sum(max(0, stop - start) for start, stop in pairs):
        lines.append(f"{counted(skipped, 'sample')} skipped")
    if remedies.get("mends_eps") is True:
        lines.append("an epsilon that was lost in its type is raised")
    if type(micro := remedies.get("micro_batch")) is int:
        lines.append(f"micro-batches of {counted(micro, 'row')}")
    return lines


def by_cause(incidents: Sequence[Incident]) -> dict[str, list[Incident]]:
    """Sort incidents by their causes, the most frequent first."""
    counts = Counter(str(one.diagnosis.cause) for one in incidents)
    return {cause: [one for one in incidents if one.diagnosis.cause == cause] for cause, _ in counts.most_common()}


def _where(story: Story) -> str:
    if story.is_complete:
        return counted(story.step, "step")
    status = None if story.summary is None else story.summary.get("status")
    at = f"at step {story.step:,}" + (f" of {story.steps:,}" if story.steps is not None else "")
    return {"ended": f"left {at}", "closed": f"closed {at}"}.get(str(status), at)


def incidents_met(incidents: Sequence[Incident]) -> str:
    """Say how many incidents there were, of what cause, and whether what was done about them was enough."""
    if not incidents:
        return "no incidents"
    causes = ", ".join(f"{len(some):,} {cause}" for cause, some in by_cause(incidents).items())
    told = f"{counted(len(incidents), 'incident')} ({causes})"
    outcomes = Counter(one.outcome for one in incidents)
    again = outcomes[Outcome.RECURRED]
    if outcomes[None] or outcomes[Outcome.GAVE_UP] or outcomes[Outcome.UNRECOVERED]:
        left = [(outcomes[Outcome.UNRECOVERED], "not recovered"), (outcomes[Outcome.GAVE_UP], "not cured")]
        left += [(outcomes[None], "open"), (again, "came back")]
        return f"{told}, {', '.join(f'{count:,} {what}' for count, what in left if count)}"
    if again:
        return f"{told}, {again:,} of which came back before the cure held"
    return f"{told}, {'it did not come' if len(incidents) == 1 else 'none of which came'} back"


def cost_and_drill(story: Story) -> str:
    """Say how many updates they cost, and whether there were faults on purpose: sentences behind another, or none."""
    lost = ""
    if story.tick > story.step and story.chapters:
        lost = f" {story.tick - story.step:,} of {counted(story.tick, 'update')} were lost."
    return lost + on_purpose(story.strikes)


def _results(summary: Mapping[str, Any] | None) -> str:
    summary = summary or {}
    evaluated = summary.get("eval")
    losses = {"recent loss": summary.get("final_loss")}
    losses |= {"evaluation loss": evaluated.get("loss") if isinstance(evaluated, Mapping) else None}
    told = ", ".join(f"{name} {value:.4g}" for name, value in losses.items() if type(value) in (int, float))
    return f" {told[0].upper()}{told[1:]}." if told else ""


def _knobs(knobs: Mapping[str, Any]) -> list[str]:
    names = {"lr": "learning rate", "clip": "gradient clip", "eps": "epsilon"}
    factors = {names[key]: knobs.get(key) for key in names}
    lines = [f"{name} x{one:.3g}" for name, one in factors.items() if type(one) in (int, float) and one != 1]
    if type(steps := knobs.get("higher_precision")) is int and steps > 0:
        lines.append(f"full precision for {counted(steps, 'step')}")
    return lines


def _wholes(values: Any) -> list[int]:
    """The whole numbers of a list, and of anything else none."""
    return [one for one in values if type(one) is int] if isinstance(values, list) else []
