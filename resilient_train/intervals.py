"""How often snapshots and checkpoints are made: every so many steps, or as often as keeps their cost low."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from resilient_train.wording import log

AUTO = "auto"

_SHARE = 0.01  # of a run's time, what each kind may cost with `auto`
_DEAR = 0.03  # what a fixed interval may cost before the run says so
_WORTH_SAYING_S = 30.0  # lost so far: a run of seconds is not the place to save 3 %
_CHANGE = 1.25  # smaller ones are noise
_FEW, _MANY = 8, 64  # ordinary updates that are compared with
_SAMPLES = 5  # newest costs that count


@dataclass
class Interval:
    """Steps between two copies of one kind, and the seconds that each kept training from its work."""

    key: str
    given: int | str
    begins_at: int  # with `auto`
    least: int
    most: int
    steps: int = 0
    costs: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    lost: float = 0.0
    was_said: bool = False

    def __post_init__(self) -> None:
        self.steps = self.begins_at if self.is_auto else int(self.given)

    @property
    def is_auto(self) -> bool:
        return self.given == AUTO

    def add(self, seconds: float) -> None:
        """Note what one more copy cost."""
        self.costs.append(max(0.0, seconds))
        self.lost += self.costs[-1]

    def best(self, step_seconds: float) -> int:
        """Return the steps that keep the cost at its share of the time, or those of now if that changes little."""
        steps = median(self.costs) / (_SHARE * step_seconds) if len(self.costs) == _SAMPLES else self.steps
        steps = min(max(int(float(f"{steps:.2g}")), self.least), self.most)
        return steps if max(steps, self.steps) > _CHANGE * min(steps, self.steps) else self.steps

    def say_if_dear(self, step_seconds: float) -> None:
        """Say once that a fixed interval costs much, with the number that would not."""
        if self.is_auto or self.was_said or len(self.costs) < _SAMPLES or self.lost < _WORTH_SAYING_S:
            return
        if (share := median(self.costs) / (self.steps * step_seconds + median(self.costs))) > _DEAR:
            self.was_said = True
            log.warning(
                *("%s=%d costs %.0f %% of the time; %d would cost 1 %%", self.key, self.steps, 100 * share),
                self.best(step_seconds),
            )


class Intervals:
    """Measures what snapshots in memory and checkpoints on disk cost, and tunes the intervals that are `auto`."""

    def __init__(
        self,
        memory: Interval,
        disk: Interval,
        agree: Callable[[Callable[[], tuple[int, int]]], tuple[int, int]],
        note: Callable[[int, int, int], None],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`agree` returns what its function returns on rank 0; `note` writes down a tick and both numbers of steps."""
        self.memory, self.disk = memory, disk
        self._agree, self._note, self._now = agree, note, now
        self._ordinary: deque[float] = deque(maxlen=_MANY)  # seconds of updates without a copy
        self._last = (-1, 0.0)  # tick and time of the last healthy update
        self._saving: float | None = None  # seconds that the checkpoint being written cost so far

    def updated(self, tick: int, *, has_copied: bool, is_saving: bool, copying: float | None = None) -> None:
        """After each healthy update. `has_copied` is the same on all ranks, which all call this.

        `copying` is how long the host copied, if that is all that a snapshot costs: what a loop does of its own at the
        same steps, such as an evaluation, is no cost of a snapshot.
        """
        (last, then), now = self._last, self._now()
        self._last = (tick, now)
        if last == tick - 1:  # else there was an incident in between
            self._measure(now - then, has_copied=has_copied, is_saving=is_saving, copying=copying)
        if has_copied:
            self._tune(tick)

    def _measure(self, seconds: float, *, has_copied: bool, is_saving: bool, copying: float | None) -> None:
        if not has_copied and not is_saving and self._saving is None:
            self._ordinary.append(seconds)
            return
        if len(self._ordinary) < _FEW:
            return
        more = seconds - median(self._ordinary)
        if has_copied:
            if not is_saving:
                self.memory.add(more if copying is None else copying)
                self.memory.say_if_dear(median(self._ordinary))
        else:
            self._saving = (self._saving or 0.0) + more
        if not is_saving and self._saving is not None:
            self.disk.add(self._saving)
            self.disk.say_if_dear(median(self._ordinary))
            self._saving = None

    def _tune(self, tick: int) -> None:
        tuned = [one for one in (self.memory, self.disk) if one.is_auto]
        if not tuned:
            return
        seconds = median(self._ordinary) if len(self._ordinary) >= _FEW else None

        def choose() -> tuple[int, int]:
            best = [one.best(seconds) if one.is_auto and seconds else one.steps for one in (self.memory, self.disk)]
            # By steps, since a measurement may mislead; and a checkpoint is made of a snapshot.
            memory, disk = (
                min(new, 2 * max(one.steps, 1)) for new, one in zip(best, (self.memory, self.disk), strict=True)
            )
            return (min(memory, disk) if self.memory.is_auto and disk else memory), disk

        before = self.memory.steps, self.disk.steps
        self.memory.steps, self.disk.steps = chosen = self._agree(choose)
        if chosen != before:
            self._note(tick, *chosen)
            log.info("%s", ", ".join(f"{one.key}: {one.steps} steps from now on" for one in tuned))
