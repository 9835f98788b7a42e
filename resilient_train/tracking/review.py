"""A run in sentences: whether it is all right, what to change, what is left of it, and which commands to type next."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from resilient_train import wording
from resilient_train.record.endings import Summary, resumes, unrecovered
from resilient_train.sentences import ACTIVE, AGAIN, DETAILS, HEADLINES, LEFT, PATCHED, TO_DO
from resilient_train.tracking.connection import SCHEMELESS
from resilient_train.tracking.story import Checkpoint, Story
from resilient_train.types import Facts, Incident, Outcome, fact
from resilient_train.wording import fill, say

Show = Callable[[Path], str]  # names a path

WEIGHTS = "weights.safetensors"  # of a run that finished

_MOST_ADVICE, _MOST_LEFT, _MOST_DRILLS = 5, 4, 7
_NOT_OVER = (Outcome.UNRECOVERED, Outcome.GAVE_UP, Outcome.OBSERVED, None, Outcome.RECURRED)
_FACTORS = ("lr", "clip", "eps", "decay")  # knobs that are 1 as configured; the others are 0


def near(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) and path != here else str(path)


def review(story: Story, show: Show = near) -> list[str]:
    """Sum up a run in some twenty lines at most; `show` names a path."""
    end = fact("nothing_written") if story.directory is None else fact("the_command", next=next_start(story))
    kind = "to_do" if story.status in TO_DO and not story.advice else "to_change"
    changes = shortened([say(fact(kind, what=one)) for one in things_to_do(story)], _MOST_ADVICE, "more_to_change")
    return [": ".join(verdict(story)), *changes, *map(": ".join, left(story, show)), say(end)]


def completed(summary: Summary) -> str:
    return say(fact("completed", steps=summary.steps, seconds=summary.seconds))


def verdict(story: Story) -> tuple[str, str]:
    """Say whether a run is all right: in two or three words, and in sentences that explain them."""
    kind, values = "killed" if story.state == "killed" else story.status, about(story)
    details = fill(DETAILS[kind], values)
    if story.refused:
        return say(fact("start_refused")), say(fact("before_that", **values)) + details
    return fill(HEADLINES[kind], values), details


def about(story: Story) -> dict[str, Any]:
    """Return the values that sentences about a run may name."""
    incidents, summary = story.incidents, story.summary
    outcomes = Counter(one.outcome for one in incidents)
    others: dict[str | None, int] = {one: outcomes[one] for one in _NOT_OVER if outcomes[one]}
    if story.status in ("recovered", "above_best") and Outcome.RECURRED in others:
        others[AGAIN] = others.pop(Outcome.RECURRED)
    more = 0 if others else sum(one.further for one in incidents)
    evaluation = summary.get("eval") or {}
    last = _last(story)
    at = last.anomaly.step if last is not None and story.status == "gave_up" else story.step
    lost = sum(one.steps_lost for one in incidents)  # while it runs, of its newest updates the verdict is pending
    return {
        **summary,
        **(summary.get("best_level") or {}),
        **vars(story),
        "at": at,
        "returned": at > story.step + 1,
        "accepted": len({str(one.diagnosis.advice) for one in incidents if one.is_accepted}),
        "total": len(incidents),
        "causes": dict(Counter(str(one.diagnosis.cause) for one in incidents).most_common()),
        "others": others,
        "more": more,
        "quiet": not (others or more) and bool(incidents),
        "undone": (story.tick - story.step if summary else lost) if incidents else 0,
        "odd": {name: value for name, value in evaluation.items() if str(value) in ("nan", "inf", "-inf")},
        "eval": {name: value for name, value in evaluation.items() if value is not None} or None,
        "fell": story.status == "no_progress" and float(summary["final_loss"]) < float(summary["first_loss"]),
        "last": last and wording.about(last),
    }


def _last(story: Story) -> Incident | None:
    """Return the incident that the verdict names."""
    if story.status == "unrecovered":
        return unrecovered(story.incidents, story.step)
    if story.status == "gave_up":
        decided = [one for one in story.incidents if one.decision.gave_up is not None] or story.incidents
        return decided[-1] if decided else None
    named = [one for one in story.incidents if one.is_observed or one.outcome is None]
    return named[-1] if named else None


def things_to_do(story: Story) -> list[str]:
    """Return what to do, the most important first, each with the number of incidents that ask for it."""
    asked = [say(fact("asked", advice=one, several=len(of) > 1, incident=of)) for one, of in story.advice]
    is_said = bool(asked) and story.status in ("unrecovered", "gave_up")
    what = TO_DO.get("killed" if story.state == "killed" else story.status)
    return asked if is_said or what is None else [what, *asked]


def shortened(lines: Sequence[str], most: int, rest: str) -> list[str]:
    """Cut a list, and say how many are missing: never a single one, which would take as much room."""
    if len(lines) <= most + 1:
        return list(lines)
    return [*lines[:most], say(fact(rest, count=len(lines) - most))]


def left(story: Story, show: Show) -> list[tuple[str, str]]:
    """Name fired drills, what differs from the configuration, and weights, each with a label; `show` names a path."""

    def described(one: Checkpoint | None) -> Mapping[str, Any]:
        return {"path": show(one.path), "step": one.step, "metrics": one.metrics, "kind": one.kind} if one else {}

    weights = story.directory / WEIGHTS if story.directory is not None else None
    values = {
        "over": story.summary,
        "drills": ", ".join(shortened([*map(say, story.drills)], _MOST_DRILLS, "more")),
        "active": "; ".join(shortened(active_remedies(story.remedies), _MOST_LEFT, "more")),
        "skipped": samples_skipped(story.remedies),
        "weights": show(weights) if story.is_complete and weights is not None and weights.is_file() else None,
        "best": described(story.best),
        "last_good": described(story.last_good) if story.last_good != story.newest else None,
        "newest": described(story.newest),
        "none": story.directory is not None and not (story.newest or story.is_complete or is_trainers(story)),
    }
    return [(fill(label, values), fill(words, values)) for kind, (label, words) in LEFT.items() if values[kind]]


def active_remedies(remedies: Mapping[str, Any]) -> list[str]:
    knobs = {
        **remedies,
        **remedies.get("knobs", {}),
        "quarantined": sorted({row for row, *_ in remedies.get("quarantined", [])}),
    }
    turned = [name for name in ACTIVE if (knobs.get(name, 1) != 1 if name in _FACTORS else knobs.get(name))]
    return [fill(ACTIVE[name], knobs) for name in turned] + [fill(PATCHED, one) for one in remedies.get("armor", [])]


def samples_skipped(remedies: Mapping[str, Any]) -> int:
    """Count the samples that remedies skipped; their spans may overlap."""
    skipped, end = 0, 0
    for start, stop in sorted(remedies.get("skipped", [])):
        skipped, end = skipped + max(0, stop - max(start, end)), max(stop, end)
    return skipped


def is_trainers(story: Story) -> bool:
    return story.loop is not None and story.loop.is_trainers


def next_start(story: Story) -> Facts:
    """Return what happens if the same command or program is started again."""
    if is_trainers(story):
        return fact("trainer_resumes")
    onward = fact("starts_over") if story.newest is None else fact("resumes_from", step=story.newest.step)
    if not story.resumes and story.directory is not None:
        if story.loop is not None:
            return fact("starts_new")
        onward = fact("trains_longer") if story.is_complete else onward
        return fact("starts_new", how=_resuming(story.directory), onward=onward)
    if story.loop is not None and story.summary:
        return fact("resumes_if_longer") if story.is_complete else onward
    if story.state == "running":
        return fact("is_refused", onward=onward)
    if story.is_complete:
        return fact("exits")
    return fact("gives_up_again", onward=onward) if story.status == "gave_up" else onward


def again(run_dir: Path) -> str:
    return say(fact("resumes", how="" if resumes(run_dir) else _resuming(run_dir)))


def _resuming(run_dir: Path) -> str:
    return f"`run.resume=auto run.dir={shlex.quote(near(run_dir))}`"


def command(verb: str, directory: Path) -> str:
    return f"{program()} {verb} {shlex.quote(near(directory))}"


def program(name: str = "resilient-train", module: str = "resilient_train") -> str:
    """Return how to call a program of this environment, which may not be activated."""
    is_found = shutil.which(name) == str(Path(sys.executable).with_name(name))
    return name if is_found else f"{shlex.quote(sys.executable)} -m {module}"


def ui_command(tracking_uri: str) -> str:
    """Return the shell command that shows a database, from any directory; empty for a server, which shows itself."""
    if tracking_uri.startswith(("http://", "https://", *SCHEMELESS)):
        return ""
    return f"{program('mlflow', 'mlflow')} ui --backend-store-uri {shlex.quote(tracking_uri)}"


def where_to_look(command_line: str, url: str | None) -> list[str]:
    """Say how to see a run in MLflow: the command that serves its database, if it is one, and the address."""
    lines = [say(fact("to_see", command=command_line))] if command_line else []
    return [*lines, say(fact("open", url=url, served=command_line))] if url else lines
