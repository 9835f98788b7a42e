"""A run as data, read from its directory without changing it, and in sentences, for the terminal, MLflow and verbs.

The sentences say whether it is all right, what to change, what is left of it, and which commands to type next.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resilient_train.durable import endings
from resilient_train.durable.endings import RunFacts, Status, Summary, status_of
from resilient_train.durable.journal import JOURNAL, read
from resilient_train.durable.manifest import Entry, entries_of
from resilient_train.durable.progress import position_of
from resilient_train.durable.run_history import RunHistory
from resilient_train.ground import wording
from resilient_train.ground.errors import TrainError
from resilient_train.ground.sentences import ACTIVE, DETAILS, LEFT, PATCHED, VERDICTS
from resilient_train.ground.types import Cause, Facts, Incident, Outcome, fact
from resilient_train.ground.wording import fill, say
from resilient_train.report.connection import SCHEMELESS

_OVER = (Outcome.RECOVERED, Outcome.RECURRED)
_REPEATS = (Cause.EXPLOSION, Cause.RATE, Cause.OVERFLOW)  # the next run of this configuration meets it, too


@dataclass(frozen=True, kw_only=True)
class Story(Status):
    directory: Path  # absolute
    incidents: tuple[Incident, ...]  # in the order they were met
    treated: AbstractSet[int] = frozenset()  # the numbers of those about which something was done
    step: int = 0  # accepted updates
    tick: int = 0  # attempted ones
    steps: int | None = None  # planned
    newest: Entry | None = None  # that a resume would load
    remedies: Mapping[str, Any] = field(default_factory=dict)  # active, as they were last written down


def read_story(run_dir: Path, history: RunHistory | None = None) -> Story:
    """Read the story of the run in a directory up to now, of which its own process knows the `history`.

    Raises TrainError if its journal cannot be read.
    """
    run_dir = run_dir.absolute()
    process = endings.at_work(run_dir)  # first: a process that ends now has written its summary
    summary = endings.read_ending(run_dir, endings.SUMMARY) or {}  # then: the journal has what was before
    try:
        history = history or RunHistory(read(run_dir / JOURNAL))
    except OSError as error:
        raise TrainError(f"{run_dir / JOURNAL} cannot be read: {error.strerror or error}") from error
    found, position = tuple(history.incidents), position_of(run_dir)
    newest = next((one for one in entries_of(run_dir) if one.is_usable), None)
    step, tick = summary.get("steps", position.step), summary.get("ticks", position.tick)
    planned = endings.settings_of(run_dir).get("steps")
    status = status_of(
        RunFacts(
            incidents=found,
            step=step,
            process=process,
            summary=summary,
            failure=endings.failure(run_dir),
            refusal=endings.read_ending(run_dir, endings.REFUSED) or {},
            is_run=endings.is_run(run_dir),
        )
    )
    return Story(
        **vars(status),
        directory=run_dir,
        incidents=found,
        treated=history.treated,
        step=step,
        tick=max(tick, step),
        steps=planned if type(planned) is int else None,
        newest=newest,
        remedies=history.effects_with(newest.manifest.effects if newest else {}),
    )


def open_advice(incidents: Sequence[Incident]) -> list[tuple[Facts, list[int]]]:
    """Return what a person should change, first what is not over: each line, all rows and each setting once,
    with the numbers of the incidents that ask for it.

    What happened once, was over and did not return needs no change.
    """
    groups: dict[object, list[Incident]] = {}
    for one in incidents:
        if one.diagnosis.advice:
            groups.setdefault(_asks_about(one), []).append(one)
    asking = [group for group in groups.values() if _is_unsolved(group) or _returns(group)]
    asking.sort(key=lambda group: (_is_unsolved(group), group[-1].id), reverse=True)
    return [(_advice(group), [one.id for one in group]) for group in asking]


def _asks_about(incident: Incident) -> object:
    diagnosis = incident.diagnosis
    if (culprit := diagnosis.culprit) is not None:
        return culprit.file, culprit.line, culprit.op
    if diagnosis.rows or diagnosis.suspects:
        return "rows"
    return diagnosis.cause, *(one["fact"] for one in diagnosis.advice)


def _advice(group: Sequence[Incident]) -> Facts:
    """Return the newest advice, if possible of no line that another one broke; of several rows, it names all."""
    newest = max(group, key=lambda one: (one.diagnosis.symptom is None, one.id)).diagnosis
    rows = {row for one in group for row in one.diagnosis.rows or one.diagnosis.suspects}
    is_of_rows = len(group) > 1 and len(rows) > 1 and newest.culprit is None
    return (fact("all_rows", rows=sorted(rows)) if is_of_rows else ()) + newest.advice


def _is_unsolved(group: Sequence[Incident]) -> bool:
    return any(one.outcome not in _OVER for one in group) or group[-1].outcome is Outcome.RECURRED


def _returns(group: Sequence[Incident]) -> bool:
    """Say whether what some incidents ask for may be met again though it is over."""
    last = group[-1]
    is_found = last.diagnosis.culprit is not None or bool(last.diagnosis.rows)
    return is_found or last.diagnosis.cause in _REPEATS or len(group) > 1 or last.further > 0 or last.is_accepted


WEIGHTS = "weights.safetensors"  # of a run that finished

_NOT_OVER = (Outcome.UNRECOVERED, Outcome.GAVE_UP, Outcome.OBSERVED, None, Outcome.RECURRED)
_FACTORS = ("lr", "clip")  # knobs that are 1 as configured; the others are 0


def review(story: Story) -> list[str]:
    """Sum up a run in some twenty lines at most."""
    things = [say(fact("to_do", what=one)) for one in things_to_do(story)]
    return [": ".join(verdict(story)), *things, *left(story)]


def completed(summary: Summary) -> str:
    return say(fact("completed", steps=summary.steps, seconds=summary.seconds))


def verdict(story: Story) -> tuple[str, str]:
    """Say whether a run is all right: in two or three words, and in sentences that explain them."""
    words, values = VERDICTS[story.status], about(story)
    details = fill(DETAILS, values | {"because": fill(words.because, values)})
    if story.refused:
        return say(fact("start_refused")), say(fact("before_that", **values)) + details
    return fill(words.headline, values), details


def about(story: Story) -> dict[str, Any]:
    """Return the values that sentences about a run may name."""
    incidents, summary = story.incidents, story.summary
    outcomes = Counter(one.outcome for one in incidents)
    others = {one: outcomes[one] for one in _NOT_OVER if outcomes[one]}
    evaluation = summary.get("eval") or {}
    last = _last(story)
    return {
        **summary,
        **(summary.get("best_level") or {}),
        **vars(story),
        "total": len(incidents),
        "causes": dict(Counter(str(one.diagnosis.cause) for one in incidents).most_common()),
        "others": others,
        # While it runs, the verdict on its newest updates is pending.
        "undone": story.tick - story.step if summary and incidents else 0,
        "odd": {name: value for name, value in evaluation.items() if str(value) in ("nan", "inf", "-inf")},
        "eval": {name: value for name, value in evaluation.items() if value is not None} or None,
        "last": last and wording.about(last),
    }


def _last(story: Story) -> Incident | None:
    """Return the incident that the verdict names."""
    if story.status == "unrecovered":
        return endings.unrecovered(story.incidents, story.step)
    return next((one for one in reversed(story.incidents) if one.outcome not in _OVER), None)


def things_to_do(story: Story, most: int = 5) -> list[str]:
    """Return what to do, the most important first, each with the number of incidents that ask for it.

    Of a longer list it says how many are missing: never a single one, which would take as much room.
    """
    advice = open_advice(story.incidents)
    asked = [say(fact("asked", advice=one, several=len(of) > 1, incident=of)) for one, of in advice]
    if len(asked) > most + 1:
        asked[most:] = [say(fact("more", count=len(asked) - most))]
    return asked or [*filter(None, [VERDICTS[story.status].to_do])]


def left(story: Story) -> list[str]:
    """Name what differs from the configuration, and weights and checkpoints, in lines."""
    weights, newest = story.directory / WEIGHTS, story.newest
    values = {
        "over": story.summary,
        "active": "; ".join(active_remedies(story.remedies)),
        "weights": weights if story.state == "completed" and weights.is_file() else None,
        "newest": newest and {"path": newest.path, "step": newest.step, "kind": newest.kind},
    }
    return [fill(words, values) for kind, words in LEFT.items() if values[kind]]


def active_remedies(remedies: Mapping[str, Any]) -> list[str]:
    knobs = {
        **remedies,
        **remedies.get("knobs", {}),
        **remedies.get("lasting", {}),
        "quarantined": sorted({row for row, *_ in remedies.get("quarantined", [])}),
    }
    turned = [name for name in ACTIVE if (knobs.get(name, 1) != 1 if name in _FACTORS else knobs.get(name))]
    return [fill(ACTIVE[name], knobs) for name in turned] + [fill(PATCHED, one) for one in remedies.get("armor", [])]


def again(run_dir: Path) -> str:
    is_new = endings.settings_of(run_dir).get("resume") == "never"
    return say(fact("resumes", how=f"`run.resume=auto run.dir={shlex.quote(str(run_dir))}`" if is_new else ""))


def command(verb: str, directory: Path) -> str:
    return f"{program()} {verb} {shlex.quote(str(directory))}"


def program(name: str = "resilient-train", module: str = "resilient_train") -> str:
    """Return how to call a program of this environment, which may not be activated."""
    is_found = shutil.which(name) == str(Path(sys.executable).with_name(name))
    return name if is_found else f"{shlex.quote(sys.executable)} -m {module}"


def where_to_look(tracking_uri: str, url: str) -> str:
    """Say how to see a run in MLflow: the command that serves its database, unless it is a server, and the address."""
    is_server = tracking_uri.startswith(("http://", "https://", *SCHEMELESS))
    serve = f"{program('mlflow', 'mlflow')} ui --backend-store-uri {shlex.quote(tracking_uri)}"
    return say(fact("to_see", command=None if is_server else serve, url=url))
