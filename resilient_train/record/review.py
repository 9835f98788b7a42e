"""What a person reads when a run has ended: what it met, what helped, what to change, what is left, what to do next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime

from resilient_train.record.doors import command, near
from resilient_train.record.journal import JOURNAL, Entry, read
from resilient_train.record.left import Checkpoint
from resilient_train.record.story import Story
from resilient_train.record.verdict import by_cause, cost_and_drill, in_force, incidents_met, next_start, verdict
from resilient_train.types import Incident
from resilient_train.wording import duration, remedies_in_short

WEIGHTS = "weights.safetensors"  # of a run that finished

_MOST_CAUSES, _MOST_CURES, _MOST_ADVICE, _MOST_LEFT = 6, 2, 5, 4


def review(story: Story, went_on_from: int | None = None) -> list[str]:
    """Tell it in some twenty lines at most, whatever the run has met; and where this process of it went on."""
    return [
        *([] if went_on_from is None else [_went_on(story, went_on_from)]),
        f"{_made(story)}{'met ' * bool(story.chapters)}{incidents_met(story.incidents)}.{cost_and_drill(story)}",
        *_cures(story.incidents),
        *_advice(story),
        *_left(story),
        f"the same command {next_start(story)}",
        *([f"for the full report: {command('incidents', story.directory)}"] * bool(story.chapters)),
    ]


def _made(story: Story) -> str:
    """Whether it is all right, of a run that is complete; of any other how far it got."""
    if story.is_complete:
        return f"{verdict(story)[0].lower()}: "
    if story.summary is None:
        return ""
    of = f" of {story.steps:,}" if story.steps is not None else ""
    seconds = story.summary.get("seconds")
    took = f" in {duration(seconds)}" if isinstance(seconds, int | float) else ""
    return f"made {story.step:,}{of} steps{took}; "


def _went_on(story: Story, step: int) -> str:
    began = began_ms(read(story.directory / JOURNAL))
    when = f"; the run began {datetime.fromtimestamp(began / 1000):%Y-%m-%d %H:%M}" if began is not None else ""
    return f"this process went on from step {step:,}{when}"


def began_ms(entries: Sequence[Entry]) -> int | None:
    """When the first process of a run wrote its first line, in ms since 1970."""
    return min((entry["at"] for entry in entries[:1]), default=None)


def _cures(incidents: Sequence[Incident]) -> Iterator[str]:
    """What was done about each cause, and how often."""
    lines = []
    for cause, some in by_cause(incidents).items():
        done = Counter(remedies_in_short(one) for one in some)
        told = [words if count == 1 else f"{words} ({count:,} times)" for words, count in done.most_common()]
        lines.append(f"  {cause}: {'; '.join(shortened(told, _MOST_CURES, '{:,} other ways'))}")
    yield from shortened(lines, _MOST_CAUSES, "  and {:,} other causes")


def _advice(story: Story) -> Iterator[str]:
    lines = [
        f"to change: {one.text}" + (f" ({len(one.incidents):,} incidents)" if len(one.incidents) > 1 else "")
        for one in story.advice
    ]
    yield from shortened(lines, _MOST_ADVICE, "to change: {:,} more")


def shortened(lines: Sequence[str], most: int, rest: str) -> list[str]:
    """Leave away what is too much, and say how many that are: never a single one, which would take as much room."""
    if len(lines) <= most + 1:
        return list(lines)
    return [*lines[:most], rest.format(len(lines) - most)]


def _left(story: Story) -> Iterator[str]:
    """Where the weights are, and what differs from the configuration in them."""
    if turned := in_force(story.remedies):
        yield f"in force to the end: {'; '.join(shortened(turned, _MOST_LEFT, '{:,} more'))}"
    if story.is_complete and (story.directory / WEIGHTS).is_file():
        yield f"weights: {near(story.directory / WEIGHTS)}"
    if story.best is not None:
        yield f"best evaluation: {_checkpoint(story.best)}"
    if story.newest is not None:
        yield f"newest checkpoint: {_checkpoint(story.newest)}"
    elif not story.is_complete:
        yield "newest checkpoint: none"


def _checkpoint(one: Checkpoint) -> str:
    metrics = "".join(f", {name} {value:.4g}" for name, value in list(one.metrics.items())[:3])
    return f"{near(one.path)} (step {one.step:,}{metrics})"
