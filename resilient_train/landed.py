"""Why the loss is above where it was, though nothing was refused: the rows that were trained on, or something else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import truediv
from statistics import median
from typing import Any

import torch

from resilient_train.diagnose import verdict
from resilient_train.diagnose.rows import largest
from resilient_train.diagnose.search import UNHEARD_OF, by_size
from resilient_train.passed import FEW, WILD, Passed, PassedUpdates
from resilient_train.state import randomness
from resilient_train.types import Anomaly, Diagnosis, Signal, Vitals
from resilient_train.ward import Ward

OF_THE_LOSS = (Signal.LOSS_SPIKE, Signal.DIVERGENCE, Signal.NOT_RECOVERED)
_EXPLAINS = 0.5  # of a rise of the loss: as much has to come from the samples, so that these are to blame
_PART = 0.25  # of it: what rows have to raise the loss by to count among those that did it
_SAME = 1e-3  # of a loss: that of the same update at the same weights
_AHEAD = 2048  # samples that are looked at, once bad rows are among those before
_YOUNG = 16  # accepted updates, before which there is nothing to compare with
_TO_COMPARE = 5  # updates with bad rows, and without them, that a comparison takes
_CLEARLY = 0.9  # of the pairs of one with them and one without
_SEEN = ("norm", "loss")
_BEGUN = 24  # accepted updates that tell whether they differ wildly


class NoMeasure(Exception):
    """The losses from before are not those of the samples that the run had then: nothing is known to be worse."""


def far_out(ward: Ward, suspects: Sequence[int], also: Sequence[int] = ()) -> Diagnosis | None:
    """Rows of the updates at these positions whose values are far beyond those of others; if any, `also` in these."""
    with randomness.preserved(ward.world.device):  # to fetch rows leaves them anywhere
        return by_size(suspects, also, _AHEAD, ward.samples, ward.world, ward.beat)


class FirstUpdates:
    """The values that the first updates were fed, until it is known whether some are far beyond the others."""

    def __init__(self) -> None:
        self._sizes: dict[int, torch.Tensor] = {}  # the largest value of each field of an update, by its place

    def note(self, start: int, fed: Sequence[Any]) -> None:
        """Measure one. It stays on the device."""
        self._sizes[start] = largest(fed)

    def largest(self) -> list[int]:
        """Read them: the places of those that are far beyond others in some field, the largest last."""
        sizes = {start: one.tolist() for start, one in self._sizes.items()}
        self._sizes.clear()
        shape = len(next(iter(sizes.values()), []))
        if not shape or any(len(one) != shape for one in sizes.values()):
            return []
        least = [min(one[field] for one in sizes.values()) or math.inf for field in range(shape)]
        beyond = {start: max(map(truediv, one, least)) for start, one in sizes.items()}
        return sorted((start for start, times in beyond.items() if times > UNHEARD_OF), key=beyond.__getitem__)[-FEW:]


def at_start(
    ward: Ward, passed: PassedUpdates, vitals: Vitals, first: FirstUpdates, fed: Sequence[Any]
) -> tuple[Anomaly, Diagnosis] | None:
    """Look for bad rows, once, where the gradients or the values of the first updates differ wildly.

    Clipped or normalized they hide there. They are to blame only where the updates that hold them go worse.
    """
    if vitals.step > _BEGUN or not vitals.accepted or not ward.samples.rows:
        return None
    first.note(vitals.start, fed)
    if vitals.step < _BEGUN:
        return None
    wildest, known = passed.wildest()
    starts = [one.start for one in known]
    by_rank = ward.world.all_of(first.largest())  # each has values of its own
    suspects = dict.fromkeys([*(one.start for one in wildest), *(start for some in by_rank for start in some)])
    if not suspects or (found := far_out(ward, [*suspects], starts)) is None:
        return None
    told = set_apart(found, ward, known)
    return None if told is None else (Anomaly(told[0], vitals.step, vitals.tick, 0, told[1]), found)


def set_apart(found: Diagnosis, ward: Ward, known: Sequence[Passed]) -> tuple[Signal, str] | None:
    """Whether the updates that hold rows are those that go wrong, and how that is seen; None where they are not.

    Where all losses fall at first, those that fall no further show in the later half.
    """
    in_order = sorted(known, key=lambda one: one.step)
    return _apart(found, ward, in_order) or _apart(found, ward, in_order[len(in_order) // 2 :])


def _apart(found: Diagnosis, ward: Ward, known: Sequence[Passed]) -> tuple[Signal, str] | None:
    rows = {*found.rows}
    holds = [not rows.isdisjoint(ward.samples.rows_at(one.start, one.stop)) for one in known]
    with_them = [one for one, is_one in zip(known, holds, strict=True) if is_one]
    without = [one for one, is_one in zip(known, holds, strict=True) if not is_one]
    if min(len(with_them), len(without)) < _TO_COMPARE:
        return None
    norms, losses = ([median(getattr(one, what) for one in some) for some in (with_them, without)] for what in _SEEN)
    higher = sum(one.loss > other.loss for one in with_them for other in without)
    if norms[0] > WILD * norms[1]:
        return Signal.GRAD_SPIKE, f"gradient norms of {norms[0]:.3g} with some rows, of {norms[1]:.3g} without them"
    if higher > _CLEARLY * len(with_them) * len(without):
        return Signal.LOSS_SPIKE, f"losses of {losses[0]:.4g} with some rows, of {losses[1]:.4g} without them"
    return None


def samples_behind(anomaly: Anomaly, ward: Ward, passed: PassedUpdates) -> Diagnosis | None:
    """Say whether what was trained on since the last good state explains the loss; None where it may be the weights.

    Every rank comes here. Raises NoMeasure.
    """
    suspects = passed.around(anomaly.since)[0]
    odd = far_out(ward, [one.start for one in suspects])
    if odd is not None and (anomaly.since < _YOUNG or set_apart(odd, ward, passed.lately_made())):
        return odd
    reference, proven = ward.panel.rewind_check.reference, ward.ring.proven(anomaly.since)
    if reference is None or not proven or not suspects:
        return None
    rise = max(one.loss for one in suspects) - reference.level
    if ward.search is None or not ward.samples.rows:
        first = suspects[0]
        is_at_once = first.step == proven[0].step + 1 and first.loss - reference.level > max(rise / 2, reference.size)
        return verdict.on_changed(reference.level, first.loss) if is_at_once else None
    trusted = passed.around(proven[0].step)[1]
    if not rise > 0 or not trusted:
        return None
    ward.ring.settled()
    with randomness.preserved(ward.world.device):
        with ward.state.weights_of(proven[0].snapshot):
            found, was, now = _compared(ward, suspects, trusted, proven[0].step, rise, reference.size)
        if was is None or now is None:
            return found
        for older in proven[1:]:  # is it the objective that has changed, or what was fed to it for a while?
            with ward.state.weights_of(older.snapshot):
                if _is_as_it_was(ward, passed, older.step):
                    step = proven[0].step
                    raise NoMeasure(
                        f"losses of {was:.4g} up to step {step:,}, where the samples there have {now:.4g} now"
                    )
    return verdict.on_changed(was, now)


def _is_as_it_was(ward: Ward, passed: PassedUpdates, step: int) -> bool:
    """Whether the update after a step has the same loss at its weights as it had then. Every rank comes here."""
    first = passed.after(step)
    assert ward.search is not None
    if first is None:
        return False
    return abs(ward.search.loss_at(first.start) - first.loss) <= _SAME * max(abs(first.loss), 1e-6)


def _compared(
    ward: Ward, suspects: Sequence[Passed], trusted: Sequence[Passed], step: int, rise: float, size: float
) -> tuple[Diagnosis | None, float | None, float | None]:
    """Compare the losses of suspects with those of healthy updates, all at the weights of a proven `step`.

    Where the healthy ones have not the losses any more that they had: what these were, and are.
    """
    search = ward.search
    assert search is not None
    usual, was = median(map(search.loss_at, [one.start for one in trusted])), median(one.loss for one in trusted)
    if usual - was > max(_EXPLAINS * rise, size):
        return None, was, usual
    first = suspects[0]
    is_at_once = first.step == step + 1 and first.loss - usual > rise / 2  # it was high at these very weights
    if is_at_once and search.loss_at(first.start) - usual < _PART * rise:
        return verdict.TRANSIENT, None, None  # it is neither the samples nor the weights
    bad = [search.loss_at(one.start) for one in suspects]
    if not median(bad) - usual > _EXPLAINS * rise:  # of what is not finite, too
        return None, None, None
    worst = suspects[max(range(len(bad)), key=bad.__getitem__)].start
    rows = search.raising(worst, trusted[-1].start, usual + _PART * (max(bad) - usual))
    return verdict.on_misled(rows, usual, median(bad)), None, None
