"""A run in sentences: the review at its end, whether it is all right, and which commands to type next."""

from __future__ import annotations

import itertools
import math
import os
import re
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from resilient_train.record.endings import Summary, is_run, resumes
from resilient_train.tracking.connection import SCHEMELESS
from resilient_train.tracking.story import Chapter, Checkpoint, Story, open_advice, unrecovered
from resilient_train.types import Incident, Outcome
from resilient_train.wording import (
    OUTCOMES,
    counted,
    duration,
    further,
    noticed,
    rate_named,
    remedies_in_short,
    rows_named,
    why_of,
    why_unrecovered,
)


def is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


Show = Callable[[Path], str]  # names a path

SCRIPT = "resilient-train"
WEIGHTS = "weights.safetensors"  # of a run that finished

_MOST_CAUSES, _MOST_CURES, _MOST_ADVICE, _MOST_LEFT = 6, 2, 5, 4


def near(path: Path) -> str:
    """Return a path as short as it can be typed from here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) and path != here else str(path)


def review(story: Story, resumed_from: int | None = None) -> list[str]:
    """Sum up a run at the end of a process in some twenty lines at most."""
    lines = summed_up(story, near)
    if resumed_from is not None:
        began = ""
        if story.began_ms:
            began = f"; the run began {datetime.fromtimestamp(story.began_ms / 1000):%Y-%m-%d %H:%M}"
        lines.insert(0, f"this process resumed from step {resumed_from:,}{began}")
    return lines + [f"for the full report: {command('incidents', story.directory)}"] * bool(story.chapters)


def summed_up(story: Story, show: Show) -> list[str]:
    """Sum up a run: incidents, remedies, what to change, what is left, what to do next; `show` names a path."""
    lines = _incidents_summed_up(story) + [f"{label}: {words}" for label, words in left(story, show)]
    return [*lines, f"the same command {next_start(story)}"]


def left(story: Story, show: Show) -> list[tuple[str, str]]:
    """Say what differs from the configuration and where the weights are, each with a label; `show` names a path."""

    def described(one: Checkpoint) -> str:
        metrics = "".join(f", {name} {value:.4g}" for name, value in list(one.metrics.items())[:3])
        is_open = ", not yet verified" if one.kind == "candidate" else ""
        return f"{show(one.path)} (step {one.step:,}{metrics}{is_open})"

    lines = _changed(story)
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


def _changed(story: Story) -> list[tuple[str, str]]:
    lines = []
    if active := active_remedies(story.remedies):
        label = "still active" if story.summary is None else "still active at the end"
        lines.append((label, "; ".join(shortened(active, _MOST_LEFT, "{:,} more"))))
    if skipped := samples_skipped(story.remedies):
        lines.append(("skipped", counted(skipped, "sample")))
    return lines


def without_directory(summary: Summary, incidents: Sequence[Incident], remedies: Mapping[str, Any] | None) -> list[str]:
    """Sum up a run that writes nothing, from what its process knows."""
    status = "clean" if summary.verdict == "well" else str(summary.verdict)
    known: dict[str, Any] = {"step": summary.steps, "tick": summary.ticks, "summary": asdict(summary)}
    chapters, advice = tuple(Chapter(one, 0) for one in incidents), open_advice(incidents)
    story = Story(Path(), chapters, status, remedies=remedies, advice=advice, **known)
    changed = [f"{label}: {words}" for label, words in _changed(story)]
    return [
        *_incidents_summed_up(story),
        *changed,
        "nothing of this is written: with run_dir there is a report, and a way to resume",
    ]


def _incidents_summed_up(story: Story) -> list[str]:
    made = ""
    if story.is_complete:
        made = f"{verdict(story)[0].lower()}: "
    elif story.summary is not None:
        of = f" of {story.steps:,}" if story.steps is not None else ""
        seconds = story.summary.get("seconds")
        took = f" in {duration(seconds)}" if isinstance(seconds, int | float) else ""
        made = f"made {story.step:,}{of} steps{took}; "
        if (at := _gave_up_at(story)) > story.step + 1:
            made = f"gave up at step {at:,}{of}{took}, and returned to step {story.step:,}; "
    lines = [f"{made}{'met ' if story.chapters else ''}{incidents_met(story)}.{cost_and_drill(story)}"]
    cures = []
    for cause, some in by_cause(story.incidents).items():
        done = Counter(remedies_in_short(one) for one in some)
        shown = [words if count == 1 else f"{words} ({count:,} times)" for words, count in done.most_common()]
        cures.append(f"  {cause}: {'; '.join(shortened(shown, _MOST_CURES, '{:,} other ways'))}")
    return lines + shortened(cures, _MOST_CAUSES, "  and {:,} other causes") + to_change(story)


def completed(summary: Summary) -> str:
    results = results_of(asdict(summary))
    took = f"completed {counted(summary.steps, 'step')} in {duration(summary.seconds)}"
    return f"{took}: {results}" if results else took


def results_of(summary: Mapping[str, Any]) -> str:
    """Name the losses at the end of a run, and its other metrics."""
    evaluated = summary.get("eval")
    values = {"recent loss": summary.get("final_loss")}
    if isinstance(evaluated, Mapping):
        values |= {f"evaluation {name}": value for name, value in evaluated.items()}
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items() if type(value) in (int, float))


def _gave_up_at(story: Story) -> int:
    """Return the step at which a run gave up; it may have returned to an earlier one. 0 if it has not given up."""
    return story.incidents[-1].anomaly.step if story.status == "gave_up" and story.incidents else 0


def to_change(story: Story) -> list[str]:
    """Say what a person should do, a line for each thing."""
    lines = shortened([f"to change: {one}" for one in told_once(story)], _MOST_ADVICE, "to change: {:,} more")
    if story.status == "recovered" and all(one.drill for one in story.incidents):
        lines = ["nothing to change: all incidents are on purpose (drill)"]
    what = to_do(story) if story.status != "failed" else ""  # its error is printed above, and what a start would do
    return [f"to do: {what}", *lines] if what else lines


def told_once(story: Story) -> list[str]:
    """Return what to change, the most important first, each with the number of incidents that ask for it."""
    counts = [(one.text, len(one.incidents)) for one in story.advice]
    return [words if count == 1 else f"{words} ({count:,} incidents)" for words, count in counts]


def shortened(lines: Sequence[str], most: int, rest: str) -> list[str]:
    """Cut a list, and say how many are missing: never a single one, which would take as much room."""
    if len(lines) <= most + 1:
        return list(lines)
    return [*lines[:most], rest.format(len(lines) - most)]


# ------------------------------------------------------------------------------------------------- is it all right


def verdict(story: Story) -> tuple[str, str]:
    """Say whether a run is all right: in two or three words, and in sentences that explain them."""
    met, so_far = incidents_met(story), "" if story.is_complete else " so far"
    costs = f"{met}.{cost_and_drill(story)}"
    in_all = f"In all, {costs}"
    evaluated = (story.summary or {}).get("eval")
    odd = [f"{name} {one}" for name, one in evaluated.items() if not is_number(one)] if evaluated else []
    where = f"at step {story.step:,}" + (f" of {story.steps:,}" if story.steps is not None else "")
    if story.is_complete:
        where = counted(story.step, "step")
    elif (status := (story.summary or {}).get("status")) in ("ended", "closed"):
        where = f"{'left' if status == 'ended' else 'closed'} {where}"
    match story.status:
        case "clean" | "recovered":
            well = "All is well" if story.status == "clean" else "Recovered"
            well = f"The evaluation is not finite ({', '.join(odd)})" if odd else well
            return f"{well}{so_far}", f"{where}; {costs}{_results(story)}"
        case "recovering":
            last = next(one for one in reversed(story.incidents) if one.outcome is None)
            return "Recovering", f"{where}; {_named(last)} is open until the run has stayed healthy. {in_all}"
        case "observed":
            last = next(one for one in reversed(story.incidents) if one.is_observed)
            more = f"the last was {_named(last)}{further(last)}.{cost_and_drill(story)}"
            return "Observed, not treated", f"{where}; {met}; {more}{_results(story)}"
        case "unrecovered":
            left = unrecovered(story.incidents, story.step)
            assert left is not None
            why = f"after {_named(left)} {why_unrecovered(left)}"
            return "Not recovered, needs attention", f"{where}; {why}. {in_all}"
        case "no_progress":
            first, final = ((story.summary or {}).get(key) for key in ("first_loss", "final_loss"))
            if not isinstance(first, float) or not isinstance(final, float):
                return "The loss did not fall", f"{where}; {costs}"
            fell = "hardly fell" if final < first else "did not fall"
            return f"The loss {fell} (it began at {first:.4g} and ended at {final:.4g})", f"{where}; {costs}"
        case "above_best":
            final, best = ((story.summary or {}).get(key) for key in ("final_loss", "best_level"))
            if not isinstance(final, float) or not isinstance(best, dict):
                return "Ended above its best level", f"{where}; {costs}"
            of = f"steps {best.get('from')} to {best.get('to')}"
            return f"Ended above the level of {of} ({best.get('loss'):.4g}, now {final:.4g})", f"{where}; {costs}"
        case "gave_up":
            why = "".join(f": {noticed(one.anomaly, by_name=False)}, {why_of(one)}" for one in story.incidents[-1:])
            if (at := _gave_up_at(story)) > story.step + 1:
                where = where.replace(f"step {story.step:,}", f"step {at:,}", 1) + f", returned to step {story.step:,}"
            return "Gave up, needs attention", f"{where}{why}. {in_all}"
        case "preempted":
            return "Stopped on request", f"{where}; {costs}"
    if story.is_killed:
        return "Killed (no exit message)", f"{where}. {in_all} The same command {next_start(story)}."
    return "Failed", f"{where}{f': {story.why}' if story.why else ''}. {in_all}"


def _named(one: Incident) -> str:
    return f"incident {one.id:,} ({noticed(one.anomaly, by_name=False)}, step {one.anomaly.step:,})"


def to_do(story: Story) -> str:
    """Say what to do about a run that is not all right, where the advice of its incidents does not say so."""
    match story.status:
        case "unrecovered" | "gave_up" if not story.advice:
            return "read in the report what was tried, then try another policy or a lower learning rate"
        case "no_progress":
            return "check the learning rate, the data and the objective"
        case "above_best":
            return "look at what changed after these steps: the learning rate, the data or the objective"
        case "failed" if story.is_killed:
            return "start it again"
        case "failed":
            return "fix the error that ended it, and start it again"
    return ""


def is_trainers(story: Story) -> bool:
    """Say whether the loop is that of a trainer, which writes checkpoints of its own."""
    return story.loop is not None and story.loop.is_trainers


def next_start(story: Story) -> str:
    """Say what the same command would do now."""
    if is_trainers(story):
        return "starts again; the trainer resumes by `resume_from_checkpoint=True`, Lightning's by `ckpt_path`"
    onward = f"resumes from step {story.newest.step:,}" if story.newest is not None else "begins at step 0 again"
    if not story.resumes:
        new = f"starts a new run in {next_directory(story.directory)}"
        if story.loop is not None:
            return new
        onward = "trains longer if `run.steps` is raised" if story.is_complete else onward
        return f"{new}; with {_resuming(story.directory)} this one {onward}"
    if story.loop is not None and story.summary is not None:
        return "resumes if more steps or epochs are planned" if story.is_complete else onward
    if story.summary is None and not story.is_killed:
        return f"is refused while this run is at work; if its process is gone, it {onward}"
    if story.is_complete:
        return "exits with 0; raise `run.steps` to train longer"
    if story.status == "gave_up":
        return f"says so again at once and ends with 3; with a changed configuration it {onward}"
    return onward


def again(run_dir: Path) -> str:
    """Say which command resumes a run of the command."""
    more = "" if resumes(run_dir) else f" with {_resuming(run_dir)}"
    return f"the same command{more} resumes"


def _resuming(run_dir: Path) -> str:
    return f"`run.resume=auto run.dir={shlex.quote(near(run_dir))}`"


def next_directory(run_dir: Path) -> str:
    """Name the directory that a run which does not resume would write to next."""
    first = run_dir.absolute()
    if (base := re.fullmatch(r"(.+)-\d+", first.name)) and is_run(first.with_name(base[1])):
        first = first.with_name(base[1])
    siblings = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    return next(one.name for one in siblings if not one.exists())


def active_remedies(remedies: Mapping[str, Any] | None) -> list[str]:
    """Say what remedies changed in the configuration, one line for each. Damaged entries are left out."""
    if remedies is None:
        return []
    knobs = remedies.get("knobs")
    lines = _knobs(knobs) if isinstance(knobs, Mapping) else []
    armor = remedies.get("armor")
    patches = [one for one in armor if isinstance(one, Mapping)] if isinstance(armor, list) else []
    lines += [f"patched: `{one.get('op')}`, `{one.get('file')}:{one.get('line')}`" for one in patches]
    if rows := sorted({*_wholes(remedies.get("quarantined"))}):
        lines.append(f"{rows_named(rows)} in quarantine")
    if remedies.get("mends_eps") is True:
        lines.append("an epsilon that was lost in its type is raised")
    if type(micro := remedies.get("micro_batch")) is int:
        lines.append(f"micro-batches of {counted(micro, 'row')}")
    return lines


def samples_skipped(remedies: Mapping[str, Any] | None) -> int:
    """Count the samples that remedies skipped. Damaged entries are left out."""
    spans = (remedies or {}).get("skipped")
    pairs = [one for one in map(_wholes, spans if isinstance(spans, list) else ()) if len(one) == 2]
    skipped, end = 0, 0
    for start, stop in sorted(map(tuple, pairs)):  # they may overlap
        skipped, end = skipped + max(0, stop - max(start, end)), max(stop, end)
    return skipped


def by_cause(incidents: Sequence[Incident]) -> dict[str, list[Incident]]:
    """Group incidents by their causes, the most frequent first."""
    counts = Counter(str(one.diagnosis.cause) for one in incidents)
    return {cause: [one for one in incidents if one.diagnosis.cause == cause] for cause, _ in counts.most_common()}


def incidents_met(story: Story) -> str:
    """Say how many incidents there were, what caused them, and whether their treatment was enough."""
    incidents = story.incidents
    if not incidents:
        return "no incidents"
    causes = ", ".join(f"{len(some):,} {cause}" for cause, some in by_cause(incidents).items())
    met = f"{counted(len(incidents), 'incident')} ({causes})"
    outcomes = Counter(one.outcome for one in incidents)
    again = outcomes[Outcome.RECURRED]
    if outcomes[None] or outcomes[Outcome.GAVE_UP] or unrecovered(incidents, story.step) is not None:
        kinds = (Outcome.UNRECOVERED, Outcome.GAVE_UP, None, Outcome.RECURRED)
        left = [(outcomes[one], OUTCOMES[one]) for one in kinds]
        return f"{met}, {', '.join(f'{count:,} {what}' for count, what in left if count)}"
    if seen := outcomes[Outcome.OBSERVED]:
        return f"{met}, {seen:,} {OUTCOMES[Outcome.OBSERVED]}"
    if again:
        return f"{met}, {again:,} came back and needed a second treatment"
    if more := sum(one.further for one in incidents):
        return f"{met}, {counted(more, 'more update')} skipped for the same reason"
    return f"{met}, no repeat since"


def cost_and_drill(story: Story) -> str:
    """Say how many updates incidents cost, and whether there was a drill: sentences to append, or nothing."""
    lost = ""
    if story.tick > story.step and story.chapters:
        lost = f" {story.tick - story.step:,} of {counted(story.tick, 'update')} refused or undone."
    times = Counter(one.fault for one in story.fired_drills)
    faults = [fault if count == 1 else f"{fault} {count:,} times" for fault, count in times.items()]
    return lost + (f" This run has a drill: faults on purpose ({', '.join(faults)})." if faults else "")


def _results(story: Story) -> str:
    """Name the results of a complete run: a sentence to append, or nothing."""
    results = results_of(story.summary or {}) if story.is_complete else ""
    return f" {results[0].upper()}{results[1:]}." if results else ""


def _knobs(knobs: Mapping[str, Any]) -> list[str]:
    names = {"lr": "learning rate", "clip": "gradient clip", "eps": "epsilon", "decay": "weight decay"}
    factors = {names[key]: knobs.get(key) for key in names}
    lines = [f"{name} x{one:.3g}" for name, one in factors.items() if type(one) in (int, float) and one != 1]
    limits = {"share": "updates of at most {:.3g} of the weights", "norm": "gradients clipped to a norm of {:.3g}"}
    if type(cap := knobs.get("ceiling")) in (int, float) and cap:
        lines.append(f"learning rate capped at {rate_named(cap)}")
    lines += [said.format(one) for key, said in limits.items() if type(one := knobs.get(key)) in (int, float) and one]
    if type(steps := knobs.get("higher_precision")) is int and steps > 0:
        lines.append(f"full precision for {counted(steps, 'step')}")
    return lines


def _wholes(values: Any) -> list[int]:
    """Return the integers in a list; none of anything else."""
    return [one for one in values if type(one) is int] if isinstance(values, list) else []


# --------------------------------------------------------------------------------------------- commands to type next


def command(verb: str, directory: Path) -> str:
    """Return the command line of a verb for a run directory, as it works from here."""
    return f"{program()} {verb} {shlex.quote(near(directory))}"


def program() -> str:
    """Return our command as the user has started it, or as it works: the script may not be on the PATH."""
    is_module = Path(sys.argv[0]).name == "__main__.py"
    is_found = shutil.which(SCRIPT) == str(Path(sys.executable).with_name(SCRIPT))
    return SCRIPT if is_found and not is_module else f"{python()} -m resilient_train"


def python() -> str:
    """Return the command of the interpreter: its path if its environment is not activated."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    return "python" if str(Path(sys.executable).parent) in folders else shlex.quote(sys.executable)


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
