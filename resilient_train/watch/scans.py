"""Scans: deeper looks at the state of a run, at intervals of their own. What they see is judged without torch."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from resilient_train.types import Anomaly, Signal
from resilient_train.watch.config import ChecksConfig
from resilient_train.watch.layout import Layout, State
from resilient_train.watch.modes import NormStatistics
from resilient_train.watch.moments import Moments
from resilient_train.watch.replicas import Replicas
from resilient_train.watch.weights import Found, Weights

Settings = Sequence[Sequence[Mapping[str, Any]]]  # by optimizer, by parameter group

_NOTED = 64  # updates at most that wait to be added up
_OFTEN = 2  # times that the same finding at the same step is acted on; then it must be on purpose
# What explains the others comes first: a negative moment makes weights NaN, and those make all else NaN.
_FIRST = (Signal.OPTIMIZER_RANGE, Signal.NONFINITE_WEIGHTS, Signal.NONFINITE_OPTIMIZER, Signal.WEIGHTS_JUMP)


class _Kind(Enum):
    """What a measured number is on several ranks."""

    COPY = auto()  # every rank has the same, where nothing is sharded
    SUM = auto()  # a sum, of which every rank has a share, where something is sharded
    OWN = auto()  # of each rank by itself


@dataclass
class _Pending:
    """A measurement whose numbers are on their way, with what is needed to judge them."""

    step: int
    buffers: list[str] | None = None  # the weights were measured, and these
    state: State | None = None  # the optimizers were measured
    has_norms: bool = False
    kinds: list[_Kind] = field(default_factory=list)  # of each number


class Scans:
    """Looks at weights, buffers, optimizer state and the statistics of normalization layers, at their own intervals.

    `measure` launches a few kernels and waits for nothing; `judge` takes the numbers later and is plain arithmetic.
    Between them, and at every update, `landed` adds up how far the updates can have carried the state.
    """

    def __init__(
        self,
        config: ChecksConfig,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        own: Collection[str] | None = None,
    ) -> None:
        """`optimizers` are torch's or the user's own, without Accelerate's wrapper.

        `own` names the weights that each rank has for itself, where all others are replicas; None: there are none.
        """
        self.config, self.model, self.optimizers = config, model, list(optimizers)
        self._remarks: list[str] = []
        self._step = 0
        self._landed: list[tuple[Settings, float | None]] = []  # updates that were not added up yet
        self._times_found: dict[tuple[int, str], int] = {}  # does not rewind: how often a finding came again
        self._pending: _Pending | None = None
        self._lay_out(clean_step=0)
        self.replicas = Replicas(config.replicas, own if self.layout.is_whole else None)
        self._norms = NormStatistics(config.norms, model, self.layout.device)

    def _lay_out(self, clean_step: int) -> None:
        self.layout = Layout(self.model, self.optimizers)
        self._weights = Weights(self.config.weights, self.layout.weights.items, self.layout.kinds)
        self._moments = Moments(self.config.optimizer, self.layout.kinds, self.layout.is_whole)
        self._weights.clean_step = self._moments.clean_step = clean_step
        self._skipped_known = 0

    @property
    def clean_step(self) -> int:
        """The newest step that every scan has seen and found clean."""
        scans = (self._weights, self._moments, self.replicas, self._norms)
        return min((scan.clean_step for scan in scans if scan.every), default=self._step)

    def remarks(self) -> list[str]:
        """Hand out what is worth a line in the log and no more."""
        remarks, self._remarks = self._remarks, []
        return remarks

    def rebase(self) -> None:
        """Take the next measurement as it is, if only it is finite: something was changed on purpose."""
        self._weights.rebase()
        self._moments.rebase()
        self._pending = None

    # Every update.

    def landed(self, step: int, groups: Settings, clipped_norm: float | None) -> None:
        """Note an accepted update: the settings it was made with, and the norm of the clipped gradients if known."""
        self._step = step
        self._landed.append((groups, clipped_norm))  # only noted: to add it up takes ten times as long
        if len(self._landed) >= _NOTED:
            self._add_up()

    def _add_up(self) -> None:
        """Add up how far the updates since the last time can have carried the state."""
        landed, self._landed = self._landed, []
        live = self.layout.groups()
        for groups, clipped_norm in landed:
            given = [setting for settings in groups for setting in settings]
            if len(live) != len(self.layout.kinds) or len(given) != len(live):
                return  # groups were added: the next measurement starts again
            settings = [{**group, **setting} for group, setting in zip(live, given, strict=True)]
            if self._weights.every:
                self._weights.landed(settings, clipped_norm)
            if self._moments.every:
                self._moments.landed(settings, clipped_norm)

    def due(self, step: int) -> bool:
        """Whether a state is to be measured, or hooks have something to report."""
        return self._norms.is_armed or _due(self._weights.every, step) or _due(self._moments.every, step)

    def arm(self, step: int) -> None:
        """Put hooks on the model if the next forward is to be looked at; `step` updates were accepted before."""
        if _due(self._norms.every, step):
            self._norms.arm()

    # Every few updates.

    @torch.no_grad()
    def measure(self, *, everything: bool = False) -> Tensor:
        """Measure what is due of the state as it is, or weights and optimizers if nothing is; waits for nothing.

        `everything` is for after an alarm, when the answer is needed now.
        """
        self._add_up()
        self._reconcile()
        self._pending = pending = _Pending(step := self._step)
        rows: list[tuple[_Kind, Tensor]] = []
        everything = everything or not self.due(step)
        if self._weights.every and (everything or _due(self._weights.every, step)):
            self._weights.begin()
            weights, buffers = self.layout.weights, self.layout.buffers()
            pending.buffers = buffers.items
            rows += [(_Kind.COPY, weights.lengths()), (_Kind.COPY, weights.largest()), (_Kind.OWN, buffers.largest())]
        if self._moments.every and (everything or _due(self._moments.every, step)):
            self._moments.begin()
            pending.state = state = self.layout.moments()
            rows += [(_Kind.COPY, state.plain.largest()), (_Kind.SUM, state.squares.sums())]
            rows += [(_Kind.COPY, state.squares.depths()), (_Kind.COPY, state.counts.values())]
        if self._norms.is_armed:
            pending.has_norms = True
            rows.append((_Kind.OWN, self._norms.values()))
        pending.kinds = [kind for kind, row in rows for _ in range(len(row))]
        return torch.cat([row for _, row in rows]) if rows else torch.zeros(0, device=self.layout.device)

    def _reconcile(self) -> None:
        """Give back what a measurement took that was not judged, and notice weights that were added."""
        if self._pending is not None:
            self._put_back()
        if not self.layout.fits():
            self._norms.clean_step = clean_step = self.clean_step
            self._lay_out(clean_step)
            self._remarks.append("the optimizers have other weights than before: scans start again")
        if fresh := self.layout.skipped[self._skipped_known :]:
            self._skipped_known = len(self.layout.skipped)
            self._remarks.append(f"not scanned, being sparse or of a type without norms: {', '.join(fresh)}")

    def _put_back(self) -> None:
        self._weights.put_back()
        self._moments.put_back()
        self._pending = None

    def are_copies(self) -> list[bool]:
        """Say of each number that was measured last whether every rank has the same, unless one of them is damaged."""
        kinds = self._pending.kinds if self._pending is not None else []
        return [self.layout.is_whole and kind is not _Kind.OWN for kind in kinds]

    def are_shares(self) -> list[bool]:
        """Say of each number that was measured last whether it is a sum of which every rank has a share."""
        kinds = self._pending.kinds if self._pending is not None else []
        return [not self.layout.is_whole and kind is _Kind.SUM for kind in kinds]

    # An update later.

    def judge_each(self, step: int, tick: int, ranks: Sequence[Sequence[float]]) -> Anomaly | None:
        """Judge the numbers of each rank by themselves, and name those on which there is something wrong."""
        pending, weights, moments, times = self._pending, self._weights, self._moments, self._times_found
        distinct: dict[tuple[float, ...], list[int]] = {}
        for rank, numbers in enumerate(ranks):
            distinct.setdefault(tuple(numbers), []).append(rank)
        guilty: list[int] = []
        verdicts = []
        for numbers, theirs in distinct.items():
            self._pending, self._times_found = pending, dict(times)
            self._weights, self._moments = copy.deepcopy(weights), copy.deepcopy(moments)
            found = self.judge(step, tick, numbers)
            verdicts.append((found, self._weights, self._moments, self._times_found))
            guilty += theirs if found is not None else []
        worst = next((one for one in verdicts if one[0] is not None), verdicts[0])
        anomaly, self._weights, self._moments, self._times_found = worst
        if anomaly is None or len(guilty) == len(ranks):
            return anomaly
        return replace(anomaly, ranks=tuple(sorted(guilty)))

    def judge(self, step: int, tick: int, values: Sequence[float]) -> Anomaly | None:
        """Judge the numbers of the newest measurement, which was of `step`."""
        pending = self._pending
        if pending is None:
            return None
        if pending.step != step or len(pending.kinds) != len(values):
            self._put_back()
            return None
        self._pending = None
        place = 0
        findings: list[tuple[Found | None, int]] = []  # with the newest step that was clean
        if pending.buffers is not None:
            since, place = self._weights.clean_step, 2 * len(self.layout.weights.items) + len(pending.buffers)
            findings.append((self._weights.judge(step, pending.buffers, values[:place]), since))
        if (state := pending.state) is not None:
            plain, squares, counts = state.plain.items, state.squares.items, state.counts.items
            since, begin = self._moments.clean_step, place
            place += len(plain) + 2 * len(squares) + len(counts)
            findings.append((self._moments.judge(step, plain, squares, counts, values[begin:place]), since))
            self._remarks += self._moments.remarks
            self._moments.remarks.clear()
        if pending.has_norms:
            since = self._norms.clean_step
            findings.append((self._norms.judge(step, values[place:]), since))
        damage = [(found, since) for found, since in findings if found and not self._is_on_purpose(step, found)]
        if not damage:
            return None
        first, since = min(damage, key=lambda one: _FIRST.index(one[0].signal))
        return Anomaly(first.signal, step, tick, since, first.evidence)

    def _is_on_purpose(self, step: int, found: Found) -> bool:
        """What comes again at the same step however often the run is rewound is not damage: accept it."""
        times = self._times_found[step, found.subject] = self._times_found.get((step, found.subject), 0) + 1
        if not found.acceptable or times <= _OFTEN:
            return False
        self._remarks.append(
            f"step {step}: taken for intended, since it came again after {_OFTEN} rewinds: {found.evidence}"
        )
        return True

    # What rewinds.

    def state_dict(self) -> dict[str, Any]:
        """What is compared against, as plain data; with what was measured and not judged, as if it had not been."""
        self._add_up()
        return {
            "step": self._step,
            "shares": self.layout.shares,
            "weights": self._weights.state(),
            "optimizer": self._moments.state(),
            "norms": self._norms.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Go back: comparisons start from the state that was. Return what another version kept nothing of."""
        empty: dict[str, Any] = {"norms": [state["step"], {}]}
        lacking, state = [name for name in empty if name not in state], {**empty, **state}
        self._pending = None
        self._landed.clear()
        self._step = state["step"]
        self._weights.load(state["weights"])
        self._moments.load(state["optimizer"])
        self._norms.load_state_dict(state["norms"])
        if state["shares"] != self.layout.shares:  # of what is spread, the largest share was measured
            self.rebase()
        self.replicas.clean_step = self._step  # states that are gone back to are verified, or one for all ranks
        return lacking


def _due(every: int, step: int) -> bool:
    return every > 0 and step > 0 and step % every == 0
