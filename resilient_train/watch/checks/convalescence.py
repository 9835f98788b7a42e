"""Whether a rewind has helped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from resilient_train.watch.config import ConvalescenceConfig

_LOOKS = (0.25, 0.5, 1.0)  # of the window
_LISTS = ("usual", "expected", "since")
_FEWEST = 8  # losses that a comparison needs


class Convalescence:
    """After a rewind the loss has to be where it was before the trouble; a run that merely goes on has not recovered.

    Damage too small for the other checks shows in the mean of many losses. It is looked for then only, so that no
    healthy run pays for so sharp an eye with a false alarm.
    """

    def __init__(self, config: ConvalescenceConfig) -> None:
        self.config = config
        self._path: Mapping[int, float] = {}  # losses by step, as they were the first time
        self._usual: list[float] = []  # for the steps that were not there the first time, or cannot be compared
        self._rewound_to = self._until = 0
        self._expected: list[float] = []
        self._since: list[float] = []

    def begin(self, step: int, path: Mapping[int, float], *, comparable: bool) -> None:
        """Take up after a rewind to `step`. `path` holds the losses of all steps that are to be trusted.

        `comparable`: the way is made again as it was made before, so that its losses should be the same. Where it is
        made more slowly they only should not be worse than at `step`.
        """
        trusted = [other for other in path if comparable or other <= step]
        last = max(trusted, default=0)
        self._usual = [path[other] for other in trusted if other > last - self.config.window]
        self._path = {other: path[other] for other in trusted if other > step}
        if not self.config.every or len(self._usual) < _FEWEST:
            self._usual = []
        self._rewound_to, self._until = step, last + self.config.window
        self._expected, self._since = [], []

    def memory(self) -> dict[str, Any]:
        """What it is at, as plain data."""
        return {
            "path": [list(one) for one in self._path.items()],
            "usual": list(self._usual),
            "at": [self._rewound_to, self._until],
            "expected": list(self._expected),
            "since": list(self._since),
        }

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Go on with what an earlier process was at."""
        self._path = {int(step): float(loss) for step, loss in memory["path"]}
        self._usual, self._expected, self._since = (list(map(float, memory[name])) for name in _LISTS)
        self._rewound_to, self._until = map(int, memory["at"])

    def see(self, step: int, loss: float, scale: float) -> tuple[int, str] | None:
        """The step that the run went back to and the evidence, if it is worse than it was there."""
        if not self._usual:
            return None
        self._expected.append(self._path[step] if step in self._path else fmean(_without_top(self._usual)))
        self._since.append(loss)
        count, window = len(self._since), self.config.window
        if count not in [round(look * window) for look in _LOOKS]:
            return None
        before, since = fmean(self._expected), fmean(_without_top(self._since))
        error = stdev(self._usual) * (1 / len(self._usual) + 1 / count) ** 0.5
        is_worse = since - before > max(self.config.sigmas * error, self.config.share * scale)
        if count == window:
            self._expected, self._since = [], []  # another look, until the trouble lies behind
        if is_worse or step >= self._until:
            self._usual = []
        if not is_worse:
            return None
        return self._rewound_to, f"the last {count} losses average {since:.4g} where {before:.4g} was usual"


def _without_top(losses: Sequence[float]) -> Sequence[float]:
    """All but the highest tenth, which is where losses are wild."""
    return sorted(losses)[: max(2, round(0.9 * len(losses)))]
