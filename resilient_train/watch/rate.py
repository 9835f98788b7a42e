"""A learning rate that is too high: from the first updates on, or since it rose."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from statistics import fmean, median
from typing import Any

from resilient_train.watch.config import OvershootConfig, RateConfig
from resilient_train.watch.loss import PlainState
from resilient_train.watch.reference import Reference, Standing, without_top

_FLAT = 0.01  # of the first gradient norm: thrown so far that nothing leads back
_WATCHED = 4  # times as many updates are compared after an alarm; three of four of them may not lose ...
_LOST = 0.25  # ... so much of the way that the loss has come
_WORSE = 0.5  # nor become worse than the best by this share of it
_ABSURD = 10.0  # times the usual rate: too much to be let pass unseen
_FEW = 8  # losses of which the mean without the highest says more than the median


class EarlyDivergence(PlainState):
    """The first updates threw the loss far above where it began: the rate is wrong by orders of magnitude.

    The other checks learn what is usual from the first updates, and would take the wreck for it. Medians are
    judged, since one may be a hard batch; and of their slopes as well, since a loss may begin near zero.

    A rate that was too high once is watched more closely, until the other checks know what is usual: then it is enough
    that much of what was learned is lost again. No healthy run comes there.
    """

    saved = ("_first", "_which", "_losses", "_norms", "_level", "_best", "_good_at")

    def __init__(self, config: OvershootConfig) -> None:
        self.config = config
        self._first: list[float] = []  # loss and gradient norm of weights that nothing has changed yet
        self._which = -1  # the newest update, by where its samples lie
        self._losses: deque[float] = deque(maxlen=_WATCHED * config.updates)
        self._norms: deque[float] = deque(maxlen=config.updates)
        self._level: float | None = None  # median of the first losses that are compared
        self._best = 0.0  # the lowest such median
        self._good_at = 0  # the newest step whose losses were near it
        self.is_suspect = False  # there was an alarm; this does not rewind
        self._is_over = not config.every

    @property
    def first_norm(self) -> float | None:
        """Of the gradient before the first update."""
        return self._first[1] if self._first else None

    def see(self, step: int, which: int, loss: float, norm: float) -> tuple[int, str] | None:
        """The newest step to be trusted and the evidence, when it is one. Of an update tried again the last counts."""
        is_watched = self.is_suspect and step <= self.config.watched
        if self._is_over or not (is_watched or step <= self.config.window):
            return None
        if which == self._which and self._losses:  # refused, and other rows may stand in the places of guilty ones now
            self._losses.pop()
            self._norms.pop()
        self._which = which
        if step == 1:
            self._first = [loss, norm]
            return None
        if not self._first:  # a run that is resumed in its middle does not begin here
            return None
        self._losses.append(loss)
        self._norms.append(norm)
        evidence = self._thrown() or (self._lost(step) if is_watched else None)
        if evidence is None:
            return None
        self.is_suspect = True
        self._losses.clear()  # what was done about it gets time before the next alarm
        self._norms.clear()
        return self._good_at, evidence

    def _thrown(self) -> str | None:
        """Loss and gradient far above the first."""
        if len(self._norms) < self.config.updates:
            return None
        (first, first_norm), times = self._first, self.config.times
        loss, norm = median(list(self._losses)[-self.config.updates :]), median(self._norms)
        is_far = loss - first > (times - 1) * abs(first)
        if not is_far or _FLAT * first_norm <= norm <= times * first_norm:
            return None
        return f"loss {loss:.4g}, gradient norm {norm:.4g} where the run began with {first:.4g}, {first_norm:.4g}"

    def _lost(self, step: int) -> str | None:
        """Much of what was learned, or of what there was to lose."""
        if len(self._losses) < _WATCHED * self.config.updates:
            return None
        middle, most = median(self._losses), sorted(self._losses)[len(self._losses) // 4]
        if self._level is None:
            self._level = self._best = middle
        self._best = best = min(self._best, middle)
        room = max(_LOST * (self._level - best), _WORSE * abs(best))
        if middle - best <= room / 2:
            self._good_at = step - len(self._losses)
        if most - best <= room:
            return None
        return f"loss {middle:.4g} where it began with {self._level:.4g} and had come to {best:.4g}"

    def forget(self) -> None:
        """Where something changes on purpose, the beginning is no measure any more."""
        self._is_over = True


class RateRise(PlainState):
    """The rate is far above what it was, and the loss above where it was before: no need to wait until it jumps.

    A rate that rises is no trouble by itself, as in a warm-up. It makes the loss be looked at more closely.
    """

    saved = ("_paces", "_usual", "_since", "_losses", "_seen", "_base")

    def __init__(self, config: RateConfig) -> None:
        self.config = config
        self._paces: deque[float] = deque(maxlen=config.lately)  # rates, as multiples of the configured one
        self._usual = 0.0  # the highest of earlier ones
        self._reference: Reference | None = None  # from before the rate rose
        self._since = 0
        self._losses: deque[float] = deque(maxlen=2 * config.look)
        self._seen = 0  # losses since
        self._base = 1.0  # the highest rate before it rose

    def see(
        self, step: int, loss: float, pace: float, reference: Callable[[int], Reference | None]
    ) -> tuple[int, str] | None:
        """The step before the rate rose and the evidence, if the loss is worse since. `reference` makes that of a step.

        `pace` is the rate that the update was made with; its own loss was measured before.
        """
        config = self.config
        if not config.every or not pace > 0:
            return None
        found = None
        if self._reference is not None:
            self._losses.append(loss)
            self._seen += 1
            if self._seen >= config.window:  # it has gone well for so long
                self._usual = max([self._usual, *self._paces])
                self._reference = None
            elif self._seen == config.first or not self._seen % config.look:
                found = self._judged(step)
        if len(self._paces) == self._paces.maxlen:
            self._usual = max(self._usual, self._paces[0])
        elif len(self._paces) < config.earlier:
            self._usual = max(self._usual, pace)
        before = self._paces[-1] if self._paces else pace
        self._paces.append(pace)
        is_high = pace >= config.times * self._usual and (pace > 1.0 or pace >= config.times * before)
        if self._reference is None and is_high and step > config.earlier:  # a warm-up climbs to 1, in small steps
            self._reference, self._since, self._base = reference(step), step - 1, max(self._usual, 1e-12)
            self._losses.clear()
            self._seen = 0
        return found

    def unsettled(self, step: int) -> tuple[int, str] | None:
        """The same at the end of a run, where few losses or none were measured since the rate rose."""
        if self._reference is None or self._seen >= self.config.look:
            return None
        if self._losses:
            return self._judged(step)
        times = max(self._paces) / self._base
        evidence = f"the learning rate rose x{times:.3g} with the last update, and nothing shows what came of it"
        return (self._since, evidence) if times >= _ABSURD else None

    def _judged(self, step: int) -> tuple[int, str] | None:
        assert self._reference is not None
        losses = list(self._losses)
        losses = [median(losses)] * len(losses) if len(losses) < _FEW else losses
        standing = self._reference.standing(step, losses, sigmas=self.config.sigmas, share=self.config.share)
        if standing is not Standing.OFF:
            return None
        times = max(self._paces) / self._base
        evidence = f"the last losses ({len(losses)}) average {fmean(without_top(losses)):.4g} where "
        evidence += f"{self._reference.expected(step):.4g} was usual before the learning rate rose x{times:.3g}"
        self._reference = None
        return self._since, evidence

    def forget(self) -> None:
        self._reference = None
        self._losses.clear()

    def state_dict(self) -> dict[str, Any]:
        reference = None if self._reference is None else self._reference.as_plain()
        return {**super().state_dict(), "reference": reference}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        reference = state["reference"]
        self._reference = None if reference is None else Reference.from_plain(reference)
