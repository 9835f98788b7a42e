"""Whether a rewind has helped."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from resilient_train.watch.config import ConvalescenceConfig

_LOOKS = (0.25, 0.5, 1.0)  # of the window


class Convalescence:
    """After a rewind the loss has to be where it was before the trouble; a run that merely goes on has not recovered.

    Damage too small for the other checks shows in the mean of many losses. It is looked for then only, so that no
    healthy run pays for so sharp an eye with a false alarm.
    """

    def __init__(self, config: ConvalescenceConfig) -> None:
        self.config = config
        self._before: list[float] = []
        self._since: list[float] = []
        self._rewound_to = 0

    def begin(self, step: int, losses: Sequence[float]) -> None:
        """Remember the newest losses that led to the state the run went back to."""
        enough = self.config.every > 0 and len(losses) >= self.config.window
        self._before = sorted(losses[-self.config.window :]) if enough else []
        self._since, self._rewound_to = [], step

    def see(self, loss: float, scale: float) -> tuple[int, str] | None:
        """The step that the run went back to and the evidence, if it is worse than it was there."""
        if not self._before:
            return None
        self._since.append(loss)
        count, window = len(self._since), self.config.window
        if count not in [round(look * window) for look in _LOOKS]:
            return None
        before, since = _without_top(self._before), _without_top(sorted(self._since))
        rise = fmean(since) - fmean(before)
        error = max(stdev(before), 1e-12) * (1 / len(before) + 1 / len(since)) ** 0.5
        is_worse = rise > self.config.sigmas * error and rise > self.config.share * scale
        if is_worse or count >= window:
            self._before = []
        if not is_worse:
            return None
        return self._rewound_to, f"the last {count} losses average {fmean(since):.4g} where {fmean(before):.4g} was usual"


def _without_top(ranked: Sequence[float]) -> Sequence[float]:
    """All but the highest tenth, which is where losses are wild."""
    return ranked[: max(2, round(0.9 * len(ranked)))]
