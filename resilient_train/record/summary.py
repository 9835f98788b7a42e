"""summary.json: how a run ended, for people's scripts."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from resilient_train.files import commit_text
from resilient_train.secrets import masked_tree
from resilient_train.types import Incident, Outcome

_TELLING = 50  # steps after which a loss that has not fallen says something
_LITTLE = 0.01  # of the first loss: what it has to fall by at least
_TIMED = 10_000  # laps that the median time is taken of


@dataclass
class Summary:
    """The fields that scripts rely on; units in the names where there are any."""

    status: str  # completed, gave_up, preempted, failed; of a loop of somebody's own also: ended
    exit_code: int
    steps: int
    ticks: int
    steps_lost: int
    final_loss: float | None
    eval: dict[str, float] | None
    incidents: dict[str, Any]
    seconds: float
    step_ms: float | None
    weights_sha256: str | None
    state_sha256: str | None
    mlflow: dict[str, Any] | None
    first_loss: float | None = None  # the mean of the first 8, to hold the final one against
    verdict: str | None = None  # well, recovered, unrecovered, no_progress; of a run that did not complete: its status
    why: str | None = None  # a loop of somebody's own did not complete: it has no train.log to tell it

    @classmethod
    def of_nothing(cls, status: str, exit_code: int, seconds: float) -> Summary:
        """What there is to say where nothing was begun."""
        nothing = {"total": 0, "recovered": 0, "by_cause": {}}
        return cls(status, exit_code, 0, 0, 0, None, None, nothing, round(seconds, 3), None, None, None, None)

    def write(self, path: Path) -> None:
        """Commit it to disk."""
        node = {key: value for key, value in asdict(self).items() if key != "why" or value is not None}
        commit_text(path, json.dumps(masked_tree(_finite(node)), indent=2) + "\n")


def verdict_of(
    status: str, incidents: Sequence[Incident], steps: int, losses: tuple[float | None, float | None]
) -> str:
    """Say in a word whether a run is all right; `losses` are those that it began and ended with."""
    if status != "completed":
        return status
    given_up = max((place for place, one in enumerate(incidents) if one.decision.gave_up is not None), default=-1)
    if any(one.outcome is Outcome.UNRECOVERED for one in incidents[given_up + 1 :]):
        return "unrecovered"
    first, final = losses
    if steps >= _TELLING and first is not None and final is not None and not final < first - _LITTLE * abs(first):
        return "no_progress"
    return "recovered" if incidents else "well"


@dataclass
class Tally:
    """What the summary needs from every step."""

    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_TIMED))  # a mean for each lap
    _lap_started: float = 0.0
    _lap_tick: int = 0

    def start_lap(self) -> None:
        """Begin to time the steps that follow."""
        self._lap_started = time.perf_counter()

    def lap(self, tick: int) -> float:
        """Return the mean seconds of the updates up to `tick` since the last lap; 0.0 if there were none.

        Between two readings the host runs ahead of a GPU; only at a reading do their clocks agree.
        """
        now = time.perf_counter()
        ticks, self._lap_tick = tick - self._lap_tick, tick
        seconds = (now - self._lap_started) / ticks if ticks else 0.0
        self._lap_started = now
        if ticks:
            self.step_seconds.append(seconds)
        return seconds

    @property
    def step_ms(self) -> float | None:
        return 1e3 * median(self.step_seconds) if self.step_seconds else None


def _finite(value: Any) -> Any:
    """Name what JSON has no word for: a NaN written bare would make the file unreadable to strict readers."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
