"""A run as data, read from its directory without changing it, and in sentences, for the terminal, MLflow and verbs.

The sentences say whether it is all right, what to change, what is left of it, and which commands to type next.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from resilient_train.durable import endings
from resilient_train.durable.endings import Status, Summary, resumes, status_of
from resilient_train.durable.journal import JOURNAL, read
from resilient_train.durable.manifest import VERIFIED, Entry, entries_of
from resilient_train.durable.progress import position_of
from resilient_train.durable.run_history import Chapter, RunHistory
from resilient_train.ground import wording
from resilient_train.ground.errors import TrainError
from resilient_train.ground.sentences import ACTIVE, DETAILS, LEFT, PATCHED, VERDICTS, Verdict
from resilient_train.ground.types import Cause, Facts, Incident, Outcome, fact
from resilient_train.ground.wording import fill, lines_of, say
from resilient_train.report.connection import SCHEMELESS

_OVER = (Outcome.RECOVERED, Outcome.RECURRED)
_REPEATS = (Cause.EXPLOSION, Cause.RATE, Cause.OVERFLOW)  # the next run of this configuration meets it, too


@dataclass(frozen=True, kw_only=True)
class Story(Status):
    directory: Path  # absolute
    chapters: tuple[Chapter, ...]  # in the order they were met
    step: int = 0  # accepted updates
    tick: int = 0  # attempted ones
    steps: int | None = None  # planned
    last_good: Entry | None = None  # the newest verified one
    newest: Entry | None = None  # that a resume would load: the same, or a later candidate
    remedies: Mapping[str, Any] = field(default_factory=dict)  # active, as they were last written down
    drills: Sequence[Facts] = ()  # that have fired
    loop: endings.Loop | None = None  # of the caller; None for a run of the command
    resumes: bool = True  # by the same command, which otherwise starts a new run

    @property
    def incidents(self) -> tuple[Incident, ...]:
        return tuple(chapter.incident for chapter in self.chapters)

    @property
    def advice(self) -> list[Advice]:
        """What to change, the most important first."""
        return open_advice(self.incidents)

    @property
    def is_complete(self) -> bool:
        return self.state == "completed"


def read_story(run_dir: Path, history: RunHistory | None = None) -> Story:
    """Read the story of the run in a directory up to now, of which its own process knows the `history`.

    Raises TrainError if its journal cannot be read.
    """
    run_dir = run_dir.absolute()
    facts = endings.facts_of(run_dir)  # first: then the journal has what the run wrote before its end
    try:
        history = history or RunHistory(read(run_dir / JOURNAL))
    except OSError as error:
        raise TrainError(f"{run_dir / JOURNAL} cannot be read: {error.strerror or error}") from error
    found = tuple(history.chapters.values())
    loop, position = endings.loop_of(run_dir), position_of(run_dir)
    checkpoints = [one for one in entries_of(run_dir) if one.is_usable]
    newest = next(iter(checkpoints), None)
    step, tick = facts.summary.get("steps", position.step), facts.summary.get("ticks", position.tick)
    planned = endings.settings_of(run_dir).get("steps") if loop is None else loop.steps
    status = status_of(replace(facts, incidents=[one.incident for one in found], step=step))
    return Story(
        **vars(status),
        directory=run_dir,
        chapters=found,
        step=step,
        tick=max(tick, step),
        steps=planned if type(planned) is int else None,
        last_good=next((one for one in checkpoints if one.kind == VERIFIED), None),
        newest=newest,
        remedies=history.effects_with(newest.manifest.effects if newest else {}),
        drills=tuple(history.drills.values()),
        loop=loop,
        resumes=resumes(run_dir),
    )


class Advice(NamedTuple):
    facts: Facts
    incidents: list[int]  # the numbers of those that ask for it


def open_advice(incidents: Sequence[Incident]) -> list[Advice]:
    """Return what a person should change, the most important first: each line, all rows and each setting only once.

    What happened once, was over and did not return needs no change.
    """
    groups: dict[object, list[Incident]] = {}
    for one in incidents:
        if one.diagnosis.advice:
            groups.setdefault(_asks_about(one), []).append(one)
    urgent = sorted(filter(_urgency, groups.values()), key=lambda group: (-_urgency(group), -len(group), -group[-1].id))
    return [Advice(_facts(group), [one.id for one in group]) for group in urgent]


def _asks_about(incident: Incident) -> object:
    diagnosis = incident.diagnosis
    if (culprit := diagnosis.culprit) is not None:
        return culprit.file, culprit.line, culprit.op
    if diagnosis.suspects:
        return "rows to look at"
    return "bad rows" if diagnosis.rows else (diagnosis.cause, *(one["fact"] for one in diagnosis.advice))


def _urgency(group: Sequence[Incident]) -> int:
    """Return the place in the order of what some incidents ask for; 0 if they ask for nothing, as it is over."""
    last = group[-1]
    if any(one.outcome not in _OVER for one in group) or last.outcome is Outcome.RECURRED:
        return 3
    if last.diagnosis.culprit is not None or last.diagnosis.rows:
        return 2
    return int(last.diagnosis.cause in _REPEATS or len(group) > 1 or last.further > 0 or last.is_accepted)


def _facts(group: Sequence[Incident]) -> Facts:
    """Name all rows, and take the advice of the newest incident, if possible not of one that another line caused."""
    newest = max(group, key=lambda one: (one.diagnosis.symptom is None, one.id)).diagnosis
    rows = {row for one in group for row in one.diagnosis.rows or one.diagnosis.suspects}
    if newest.culprit is None and len(rows) > 1 and len(group) > 1:
        return fact("all_rows", rows=sorted(rows)) + newest.advice
    return newest.advice


WEIGHTS = "weights.safetensors"  # of a run that finished

_MOST_ADVICE, _MOST_LEFT = 5, 4
_NOT_OVER = (Outcome.UNRECOVERED, Outcome.GAVE_UP, Outcome.OBSERVED, None, Outcome.RECURRED)
_FACTORS = ("lr", "clip")  # knobs that are 1 as configured; the others are 0


def near(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) and path != here else str(path)


def review(story: Story) -> list[str]:
    """Sum up a run in some twenty lines at most."""
    things = [say(fact("to_do", what=one)) for one in shortened(things_to_do(story), _MOST_ADVICE)]
    return [": ".join(verdict(story)), *things, *left(story)]


def completed(summary: Summary) -> str:
    return say(fact("completed", steps=summary.steps, seconds=summary.seconds))


def verdict(story: Story) -> tuple[str, str]:
    """Say whether a run is all right: in two or three words, and in sentences that explain them."""
    words, values = _words(story), about(story)
    details = fill(DETAILS, values | {"because": fill(words.because, values)})
    if story.refused:
        return say(fact("start_refused")), say(fact("before_that", **values)) + details
    return fill(words.headline, values), details


def _words(story: Story) -> Verdict:
    return VERDICTS["killed" if story.state == "killed" else story.status]


def about(story: Story) -> dict[str, Any]:
    """Return the values that sentences about a run may name."""
    incidents, summary = story.incidents, story.summary
    outcomes = Counter(one.outcome for one in incidents)
    others = {one: outcomes[one] for one in _NOT_OVER if outcomes[one]}
    more = 0 if others else sum(one.further for one in incidents)
    evaluation = summary.get("eval") or {}
    last = _last(story)
    lost = sum(one.steps_lost for one in incidents)  # while it runs, of its newest updates the verdict is pending
    return {
        **summary,
        **(summary.get("best_level") or {}),
        **vars(story),
        "accepted": len({str(one.diagnosis.advice) for one in incidents if one.is_accepted}),
        "total": len(incidents),
        "causes": dict(Counter(str(one.diagnosis.cause) for one in incidents).most_common()),
        "others": others,
        "more": more,
        "quiet": not (others or more) and bool(incidents),
        "undone": (story.tick - story.step if summary else lost) if incidents else 0,
        "odd": {name: value for name, value in evaluation.items() if str(value) in ("nan", "inf", "-inf")},
        "eval": {name: value for name, value in evaluation.items() if value is not None} or None,
        "last": last and wording.about(last),
    }


def _last(story: Story) -> Incident | None:
    """Return the incident that the verdict names."""
    if story.status == "unrecovered":
        return endings.unrecovered(story.incidents, story.step)
    return next((one for one in reversed(story.incidents) if one.outcome not in _OVER), None)


def block(chapter: Chapter, how: str = "block") -> list[str]:
    """Describe an incident in lines: as it was printed when it was met, with its times; the last one is its outcome."""
    is_open = chapter.treated_ms is None and chapter.incident.outcome is None
    handled = {"remedies": fact("being_handled")} if is_open else {}
    return lines_of(chapter.incident, how, opened=chapter.opened_ms, **handled)


def things_to_do(story: Story) -> list[str]:
    """Return what to do, the most important first, each with the number of incidents that ask for it."""
    asked = [say(fact("asked", advice=one, several=len(of) > 1, incident=of)) for one, of in story.advice]
    return asked or [*filter(None, [_words(story).to_do])]


def shortened(lines: Sequence[str], most: int) -> list[str]:
    """Cut a list, and say how many are missing: never a single one, which would take as much room."""
    if len(lines) <= most + 1:
        return list(lines)
    return [*lines[:most], say(fact("more", count=len(lines) - most))]


def left(story: Story) -> list[str]:
    """Name fired drills, what differs from the configuration, weights, and what the same command does, in lines."""
    weights = story.directory / WEIGHTS
    values = {
        "over": story.summary,
        "drills": ", ".join(shortened([*map(say, story.drills)], _MOST_LEFT)),
        "active": "; ".join(shortened(active_remedies(story.remedies), _MOST_LEFT)),
        "weights": weights if story.is_complete and weights.is_file() else None,
        "last_good": _named(story.last_good) if story.last_good != story.newest else None,
        "newest": _named(story.newest),
        "next": next_start(story),
    }
    return [fill(words, values) for kind, words in LEFT.items() if values[kind]]


def _named(one: Entry | None) -> dict[str, Any] | None:
    return None if one is None else {"path": one.path, "step": one.step, "kind": one.kind}


def active_remedies(remedies: Mapping[str, Any]) -> list[str]:
    knobs = {
        **remedies,
        **remedies.get("knobs", {}),
        **remedies.get("lasting", {}),
        "quarantined": sorted({row for row, *_ in remedies.get("quarantined", [])}),
    }
    turned = [name for name in ACTIVE if (knobs.get(name, 1) != 1 if name in _FACTORS else knobs.get(name))]
    return [fill(ACTIVE[name], knobs) for name in turned] + [fill(PATCHED, one) for one in remedies.get("armor", [])]


def is_trainers(story: Story) -> bool:
    return story.loop is not None and story.loop.is_trainers


def next_start(story: Story) -> Facts:
    """Return what happens if the same command or program is started again; nothing is said of one that is at work."""
    if story.state == "running":
        return ()
    if is_trainers(story):
        return fact("trainer_resumes")
    onward = fact("starts_over") if story.newest is None else fact("resumes_from", step=story.newest.step)
    if not story.resumes:
        how = _resuming(story.directory) if story.loop is None else None
        return fact("starts_new", how=how, onward=onward)
    if story.is_complete:
        return fact("is_complete")
    return fact("gives_up_again", onward=onward) if story.status == "gave_up" and story.loop is None else onward


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


def where_to_look(tracking_uri: str, url: str | None) -> list[str]:
    """Say how to see a run in MLflow: the command that serves its database, unless it is a server, and the address."""
    served = not tracking_uri.startswith(("http://", "https://", *SCHEMELESS))
    serve = f"{program('mlflow', 'mlflow')} ui --backend-store-uri {shlex.quote(tracking_uri)}"
    lines = [say(fact("to_see", command=serve))] if served else []
    return [*lines, say(fact("open", url=url, served=served))] if url else lines
