"""A run in sentences: whether it is all right, what to change, what is left of it, and which commands to type next."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from resilient_train.record.endings import Summary, resumes
from resilient_train.record.status import unrecovered
from resilient_train.sentences import OUTCOMES
from resilient_train.tracking.connection import SCHEMELESS
from resilient_train.tracking.story import Checkpoint, Story
from resilient_train.types import Incident, Outcome
from resilient_train.wording import (
    counted,
    duration,
    further,
    noticed,
    rate_named,
    rows_named,
    say,
    why_of,
    why_unrecovered,
)

Show = Callable[[Path], str]  # names a path

SCRIPT = "resilient-train"
WEIGHTS = "weights.safetensors"  # of a run that finished

_MOST_ADVICE, _MOST_LEFT = 5, 4

# What to do about a run that is not all right, where the advice of its incidents does not say so.
_TO_DO = {
    "unrecovered": "read in the report what was tried, then try another policy or a lower learning rate",
    "gave_up": "read in the report what was tried, then try another policy or a lower learning rate",
    "no_progress": "check the learning rate, the data and the objective",
    "above_best": "look at what changed after these steps: the learning rate, the data or the objective",
    "failed": "fix the error that ended it, and start it again",
}

_FACTORS = {"lr": "learning rate", "clip": "gradient clip", "eps": "epsilon", "decay": "weight decay"}
_LIMITS = {
    "share": "updates of at most {:.3g} of the weights",
    "norm": "gradients clipped to a norm of {:.3g}",
    "higher_precision": "full precision for {} steps",
    "mends_eps": "an epsilon that was lost in its type is raised",
}


def near(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) and path != here else str(path)


def review(story: Story, show: Show = near) -> list[str]:
    """Sum up a run in some twenty lines at most; `show` names a path."""
    lines = [": ".join(verdict(story)), *to_change(story), *(f"{label}: {words}" for label, words in left(story, show))]
    if story.directory is None:
        return [*lines, "nothing of this is written: with run_dir there is a report, and a way to resume"]
    return [*lines, f"the same command {next_start(story)}"]


def completed(summary: Summary) -> str:
    return f"completed {counted(summary.steps, 'step')} in {duration(summary.seconds)}"


# ----------------------------------------------------------------------------------------------------- is it all right


def verdict(story: Story) -> tuple[str, str]:
    """Say whether a run is all right: in two or three words, and in sentences that explain them."""
    words, sentences = _verdict(story)
    if drilled := sum(bool(one.drill) for one in story.incidents):
        words += f", {drilled:,} of {counted(len(story.incidents), 'incident')} on purpose (drill)"
    if story.refused:
        return "The last start was refused", f"{story.refused}. Before that, {sentences}"
    return words, sentences


def _verdict(story: Story) -> tuple[str, str]:
    met, so_far, summary = incidents_met(story), "" if story.is_complete else " so far", story.summary
    undone = ""
    if story.tick > story.step and story.chapters:
        undone = f" {story.tick - story.step:,} of {counted(story.tick, 'update')} refused or undone."
    costs = f"{met}.{undone}"
    of = f" of {story.steps:,}" if story.steps is not None else ""
    where = f"at step {story.step:,}{of}"
    if story.is_complete:
        where = counted(story.step, "step")
    elif story.state in ("ended", "closed"):
        where = f"{'left without guard.close()' if story.state == 'ended' else 'closed'} {where}"
    match story.status:
        case "clean" | "recovered":
            evaluated = summary.get("eval") or {}
            odd = [f"{name} {one}" for name, one in evaluated.items() if str(one) in ("nan", "inf", "-inf")]
            well = "All is well" if story.status == "clean" else "Recovered"
            well = f"The evaluation is not finite ({', '.join(odd)})" if odd else well
            return f"{well}{so_far}", f"{where}; {costs}{_results(story)}"
        case "recovering":
            last = next(one for one in reversed(story.incidents) if one.outcome is None)
            return "Recovering", f"{where}; {_named(last)} is open until the run has stayed healthy. In all, {costs}"
        case "observed":
            last = next(one for one in reversed(story.incidents) if one.is_observed)
            return "Observed, not treated", f"{where}; {costs} The last was {_named(last)}{further(last)}."
        case "unrecovered":
            one = unrecovered(story.incidents, story.step)
            why = f" after {_named(one)} {why_unrecovered(one)}." if one is not None else ""
            return "Not recovered, needs attention", f"{where};{why} In all, {costs}"
        case "no_progress":
            first, final = summary["first_loss"], summary["final_loss"]
            fell = "hardly fell" if final < first else "did not fall"
            return f"The loss {fell} (it began at {first:.4g} and ended at {final:.4g})", f"{where}; {costs}"
        case "above_best":
            best, final = summary["best_level"], summary["final_loss"]
            of = f"steps {best['from']} to {best['to']} ({best['loss']:.4g}, now {final:.4g})"
            return f"Ended above the level of {of}", f"{where}; {costs}"
        case "gave_up":
            why = "".join(f": {noticed(one.anomaly, by_name=False)}, {why_of(one)}" for one in story.incidents[-1:])
            at = story.incidents[-1].anomaly.step if story.incidents else 0
            if at > story.step + 1:
                where = f"at step {at:,}{of}, returned to step {story.step:,}"
            return "Gave up, needs attention", f"{where}{why}. In all, {costs}"
        case "preempted":
            return "Stopped on request", f"{where}; {costs}"
    if story.state == "killed":
        return "Killed (no exit message)", f"{where}. In all, {costs}"
    return "Failed", f"{where}{f': {story.why}' if story.why else ''}. In all, {costs}"


def _named(one: Incident) -> str:
    return f"incident {one.id:,} ({noticed(one.anomaly, by_name=False)}, step {one.anomaly.step:,})"


def _results(story: Story) -> str:
    """Name the losses at the end of a complete run, and its other metrics: a sentence to append, or nothing."""
    values = {f"evaluation {name}": value for name, value in (story.summary.get("eval") or {}).items()}
    values = {"recent loss": story.summary.get("final_loss"), **values}
    shown = [f"{name} {value:.4g}" for name, value in values.items() if isinstance(value, int | float)]
    results = ", ".join(shown) if story.is_complete else ""
    return f" {results[0].upper()}{results[1:]}." if results else ""


def incidents_met(story: Story) -> str:
    incidents = story.incidents
    if not incidents:
        return "no incidents"
    causes = ", ".join(f"{len(some):,} {cause}" for cause, some in by_cause(incidents).items())
    met = f"{counted(len(incidents), 'incident')} ({causes})"
    counts = Counter(one.outcome for one in incidents)
    kinds = (Outcome.UNRECOVERED, Outcome.GAVE_UP, Outcome.OBSERVED, None, Outcome.RECURRED)
    again = {Outcome.RECURRED: "needed a second treatment"} if story.status in ("recovered", "above_best") else {}
    words = OUTCOMES | again
    if rest := [f"{counts[one]:,} {words[one]}" for one in kinds if counts[one]]:
        return ", ".join([met, *rest])
    if more := sum(one.further for one in incidents):
        return f"{met}, {counted(more, 'more update')} skipped for the same reason"
    return f"{met}, no repeat since"


def by_cause(incidents: Sequence[Incident]) -> dict[str, list[Incident]]:
    counts = Counter(str(one.diagnosis.cause) for one in incidents)
    return {cause: [one for one in incidents if one.diagnosis.cause == cause] for cause, _ in counts.most_common()}


# ------------------------------------------------------------------------------------------------------ what to change


def to_change(story: Story) -> list[str]:
    label = "to do" if story.status in _TO_DO and not story.advice else "to change"
    lines = shortened([f"{label}: {one}" for one in things_to_do(story)], _MOST_ADVICE, "to change: {:,} more")
    if story.incidents and all(one.drill for one in story.incidents) and not lines:
        return ["nothing to change: all incidents are on purpose (drill)"]
    return lines


def things_to_do(story: Story) -> list[str]:
    """Return what to do, the most important first, each with the number of incidents that ask for it."""
    asked = [say(facts) + (f" ({len(of):,} incidents)" if len(of) > 1 else "") for facts, of in story.advice]
    is_said = bool(asked) and story.status in ("unrecovered", "gave_up")
    what = "start it again" if story.state == "killed" else _TO_DO.get(story.status, "")
    return asked if is_said or not what else [what, *asked]


def shortened(lines: Sequence[str], most: int, rest: str) -> list[str]:
    """Cut a list, and say how many are missing: never a single one, which would take as much room."""
    if len(lines) <= most + 1:
        return list(lines)
    return [*lines[:most], rest.format(len(lines) - most)]


# -------------------------------------------------------------------------------------------------------- what is left


def left(story: Story, show: Show) -> list[tuple[str, str]]:
    """Say what differs from the configuration and where the weights are, each with a label; `show` names a path."""

    def described(one: Checkpoint) -> str:
        metrics = "".join(f", {name} {value:.4g}" for name, value in list(one.metrics.items())[:3])
        is_open = ", not yet verified" if one.kind == "candidate" else ""
        return f"{show(one.path)} (step {one.step:,}{metrics}{is_open})"

    lines = []
    if active := active_remedies(story.remedies):
        label = "still active at the end" if story.summary else "still active"
        lines.append((label, "; ".join(shortened(active, _MOST_LEFT, "{:,} more"))))
    if skipped := samples_skipped(story.remedies):
        lines.append(("skipped", counted(skipped, "sample")))
    if story.directory is None:
        return lines
    if story.is_complete and (story.directory / WEIGHTS).is_file():
        lines.append(("weights", show(story.directory / WEIGHTS)))
    if story.best is not None:
        lines.append(("best evaluation", described(story.best)))
    if story.last_good is not None and story.last_good != story.newest:
        lines.append(("last good checkpoint", described(story.last_good)))
    if story.newest is not None:
        lines.append(("newest checkpoint", described(story.newest)))
    elif not (story.is_complete or is_trainers(story)):
        lines.append(("newest checkpoint", "none"))
    return lines


def active_remedies(remedies: Mapping[str, Any]) -> list[str]:
    knobs = remedies.get("knobs", {})
    lines = [f"{name} x{knobs[key]:.3g}" for key, name in _FACTORS.items() if knobs.get(key, 1) != 1]
    if cap := knobs.get("ceiling"):
        lines.append(f"learning rate capped at {rate_named(cap)}")
    lines += [said.format(knobs[key]) for key, said in _LIMITS.items() if knobs.get(key)]
    lines += [f"patched: `{one['op']}`, `{one['file']}:{one['line']}`" for one in remedies.get("armor", [])]
    if rows := sorted({*remedies.get("quarantined", [])}):
        lines.append(f"{rows_named(rows)} in quarantine")
    if micro := remedies.get("micro_batch"):
        lines.append(f"micro-batches of {counted(micro, 'row')}")
    return lines


def samples_skipped(remedies: Mapping[str, Any]) -> int:
    """Count the samples that remedies skipped; their spans may overlap."""
    skipped, end = 0, 0
    for start, stop in sorted(remedies.get("skipped", [])):
        skipped, end = skipped + max(0, stop - max(start, end)), max(stop, end)
    return skipped


# -------------------------------------------------------------------------------------------------------- what is next


def is_trainers(story: Story) -> bool:
    return story.loop is not None and story.loop.is_trainers


def next_start(story: Story) -> str:
    if is_trainers(story):
        return "starts again; the trainer resumes by `resume_from_checkpoint=True`, Lightning's by `ckpt_path`"
    onward = f"resumes from step {story.newest.step:,}" if story.newest is not None else "begins at step 0 again"
    if not story.resumes and story.directory is not None:
        new = "starts a new run in the next free directory"
        if story.loop is not None:
            return new
        onward = "trains longer if `run.steps` is raised" if story.is_complete else onward
        return f"{new}; with {_resuming(story.directory)} this one {onward}"
    if story.loop is not None and story.summary:
        return "resumes if more steps or epochs are planned" if story.is_complete else onward
    if story.state == "running":
        return f"is refused while this run is at work; if its process is gone, it {onward}"
    if story.is_complete:
        return "exits with 0; raise `run.steps` to train longer"
    if story.status == "gave_up":
        return f"says so again at once and ends with 3; with a changed configuration it {onward}"
    return onward


def again(run_dir: Path) -> str:
    more = "" if resumes(run_dir) else f" with {_resuming(run_dir)}"
    return f"the same command{more} resumes"


def _resuming(run_dir: Path) -> str:
    return f"`run.resume=auto run.dir={shlex.quote(near(run_dir))}`"


def command(verb: str, directory: Path) -> str:
    return f"{program()} {verb} {shlex.quote(near(directory))}"


def program() -> str:
    """Return our command as it works: the script may not be on the PATH."""
    is_found = shutil.which(SCRIPT) == str(Path(sys.executable).with_name(SCRIPT))
    return SCRIPT if is_found else f"{shlex.quote(sys.executable)} -m resilient_train"


def ui_command(tracking_uri: str) -> str:
    """Return the shell command that shows a database, from any directory; empty for a server, which shows itself."""
    if tracking_uri.startswith(("http://", "https://", *SCHEMELESS)):
        return ""
    next_to_python = Path(sys.executable).with_name("mlflow")
    is_found = shutil.which("mlflow") == str(next_to_python) or not next_to_python.exists()
    program = "mlflow" if is_found else shlex.quote(str(next_to_python))  # an environment that is not activated
    return f"{program} ui --backend-store-uri {shlex.quote(tracking_uri)}"


def where_to_look(command_line: str, url: str | None) -> list[str]:
    """Say how to see a run in MLflow: the command that serves its database, if it is one, and the address."""
    lines = [f"to see it, start (it answers after half a minute)\n  {command_line}"] if command_line else []
    if url:
        lines.append(f"{'and' if lines else 'to see it,'} open\n  {url}")
    return lines
