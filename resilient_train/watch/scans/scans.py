"""All scans of a run, each when it is due."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from resilient_train.types import Anomaly, Signal
from resilient_train.watch.config import ChecksConfig
from resilient_train.watch.hooks import Activations, BatchRange, NormStatistics
from resilient_train.watch.scans.found import Found
from resilient_train.watch.scans.layout import Layout, State
from resilient_train.watch.scans.moments import Faded, Moments
from resilient_train.watch.scans.reach import Path
from resilient_train.watch.scans.replicas import Replicas
from resilient_train.watch.scans.weights import Weights

Settings = Sequence[Sequence[Mapping[str, Any]]]  # by optimizer, by parameter group

_NOTED = 64  # updates at most that wait to be added up
_OFTEN = 2  # times the same finding at the same step is fought; then it must be on purpose
# What explains the others comes first: a negative moment makes weights NaN, and those make all else NaN.
_FIRST = (Signal.OPTIMIZER_RANGE, Signal.NONFINITE_WEIGHTS, Signal.NONFINITE_OPTIMIZER, Signal.WEIGHTS_JUMP)


@dataclass
class _Pending:
    """A measurement whose numbers are on their way, with what is needed to judge them."""

    step: int
    buffers: list[str] | None = None  # the weights were measured, and these
    paths: list[Path] = field(default_factory=list)
    state: State | None = None  # the optimizers were measured
    faded: Faded | None = None
    norms: bool = False
    activations: bool = False
    batch: bool = False
    sizes: list[int] = field(default_factory=list)


class Scans:
    """Looks at weights, buffers, optimizer state, activations and batches, at their own intervals.

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
        self._told: dict[tuple[int, str], int] = {}  # does not rewind: how often a finding came again
        self._pending: _Pending | None = None
        self._lay_out()
        self.replicas = Replicas(config.replicas, own if self.layout.is_whole else None)
        device = self.layout.device
        self._activations = Activations(model, device)
        self._norms = NormStatistics(model, device)
        self._batch = BatchRange(config.batch.factor, device)
        if config.activations.every and not self._activations.can_arm:
            self._remarks.append("checks.activations is off: hooks would undo the compilation of the model")
        self._armed = self._armed_norms = self._saw_batch = False

    def _lay_out(self, clean_step: int = 0) -> None:
        self.layout = Layout(self.model, self.optimizers)
        kinds, weights = self.layout.kinds, self.layout.weights
        self._weights = Weights(self.config.weights, weights, kinds)
        self._moments = Moments(self.config.optimizer, kinds, self.layout.is_whole)
        self._weights.clean_step = self._moments.clean_step = clean_step
        self._told_skipped = 0
        self._clean_norms = clean_step  # the newest step whose running statistics were those of its batches

    @property
    def clean_step(self) -> int:
        """The newest step that every scan has seen and found clean."""
        clean = []
        if self.config.weights.every:
            clean.append(self._weights.clean_step)
        if self.config.optimizer.every:
            clean.append(self._moments.clean_step)
        if self.replicas.every:
            clean.append(self.replicas.clean_step)
        if self.config.norms.every and self._norms.can_arm:
            clean.append(self._clean_norms)
        return min(clean, default=self._step)

    def remarks(self) -> list[str]:
        """Hand out what is worth a line and no more."""
        remarks, self._remarks = self._remarks, []
        return remarks

    def rebase(self) -> None:
        """Take the next measurement as it is, if only it is finite: something was changed on purpose."""
        self._weights.rebase()
        self._moments.rebase()
        self._pending = None

    # Every update.

    def landed(self, step: int, groups: Settings, clipped_norm: float | None) -> None:
        """Hear of an accepted update: the settings in force, and the norm of the gradients after clipping if known."""
        self._step = step
        self._landed.append((groups, clipped_norm))  # noted: to add it up takes ten times as long
        if len(self._landed) >= _NOTED:
            self._add_up()

    def _add_up(self) -> None:
        """Add up how far the updates since the last time can have carried the state."""
        landed, self._landed = self._landed, []
        live = self.layout.groups()
        for groups, clipped_norm in landed:
            given = [setting for settings in groups for setting in settings]
            if len(live) != len(self.layout.kinds) or len(given) != len(live):
                return  # groups were added: the next measurement begins anew
            settings = [{**group, **setting} for group, setting in zip(live, given, strict=True)]
            if self.config.weights.every:
                self._weights.landed(settings, clipped_norm)
            if self.config.optimizer.every:
                self._moments.landed(settings, clipped_norm)

    def due(self, step: int) -> bool:
        """Whether a state is to be measured, or hooks and batches have something to tell."""
        return self._armed or self._armed_norms or self._saw_batch or self._is_scheduled(step)

    def _is_scheduled(self, step: int) -> bool:
        return _due(self.config.weights.every, step) or _due(self.config.optimizer.every, step)

    def arm(self, step: int) -> None:
        """Put hooks on the model if the forward that comes is to be looked at; `step` updates were accepted before."""
        if _due(self.config.activations.every, step) and self._activations.can_arm:
            self._activations.arm()
            self._armed = True
        if _due(self.config.norms.every, step) and self._norms.can_arm:
            self._norms.arm()
            self._armed_norms = True

    def see_batch(self, step: int, batch: Any) -> None:
        """Look at a batch if it is time."""
        if _due(self.config.batch.every, step):
            self._batch.see(batch)
            self._saw_batch = True

    # Every few updates.

    @torch.no_grad()
    def measure(self, *, everything: bool = False) -> Tensor:
        """Measure what is due of the state as it is, or weights and optimizers if nothing is; waits for nothing.

        `everything` is for after an alarm, when somebody wants to know now.
        """
        self._add_up()
        self._reconcile()
        step, config = self._step, self.config
        pending = _Pending(step)
        rows: list[Tensor] = []
        everything = everything or not self.due(step)
        if config.weights.every and (everything or _due(config.weights.every, step)):
            rows += self._measure_weights(pending)
        if config.optimizer.every and (everything or _due(config.optimizer.every, step)):
            rows += self._measure_moments(pending)
        if self._armed_norms:
            rows.append(self._norms.values())
        if self._armed:
            rows.append(self._activations.values())
        if self._saw_batch:
            rows.append(self._batch.values())
        pending.norms, self._armed_norms = self._armed_norms, False
        pending.activations, self._armed = self._armed, False
        pending.batch, self._saw_batch = self._saw_batch, False
        pending.sizes = [len(one) for one in rows]
        self._pending = pending
        return torch.cat(rows) if rows else torch.zeros(0, device=self.layout.device)

    def _measure_weights(self, pending: _Pending) -> list[Tensor]:
        gauge, buffers = self.layout.gauge, self.layout.buffers()
        pending.buffers, pending.paths = buffers.names, self._weights.paths()
        rows = [gauge.lengths(), gauge.largest()] if gauge.tensors else []
        return [*rows, buffers.gauge.largest()] if buffers.names else rows

    def _measure_moments(self, pending: _Pending) -> list[Tensor]:
        pending.state = state = self.layout.moments()
        pending.faded = self._moments.hand_out()
        rows = [state.plain_gauge.largest()] if state.plain else []
        rows += [state.square_gauge.sums(), state.square_gauge.depths()] if state.squares else []
        return [*rows, state.count_gauge.values()] if state.counted else rows

    def _reconcile(self) -> None:
        """Give back what an unread measurement took, and notice weights that were added."""
        if self._pending is not None:
            self._put_back(self._pending)
            self._pending = None
        if not self.layout.fits():
            self._lay_out(self.clean_step)
            self._remarks.append("the optimizers have other weights than before: scans begin anew")
        if len(self.layout.skipped) > self._told_skipped:
            fresh = self.layout.skipped[self._told_skipped :]
            self._told_skipped = len(self.layout.skipped)
            self._remarks.append(f"not scanned, being sparse or of a type without norms: {', '.join(fresh)}")

    def _put_back(self, pending: _Pending) -> None:
        if pending.buffers is not None:
            self._weights.put_back(pending.paths)
        if pending.faded is not None:
            self._moments.put_back(pending.faded)

    def are_copies(self) -> list[bool]:
        """Say of each number that was measured last whether every rank has the same, unless one of them is damaged.

        Of weights and moments they have, where nothing is sharded; not of buffers, activations and batches.
        """
        pending = self._pending
        if pending is None:
            return []
        count, whole = sum(pending.sizes), self.layout.is_whole
        weights, buffers = (0, 0) if pending.buffers is None else (2 * len(self.layout.weights), len(pending.buffers))
        state = pending.state
        moments = 0 if state is None else len(state.plain) + 2 * len(state.squares) + len(state.counted)
        found = [whole] * weights + [False] * buffers + [whole] * moments
        return found + [False] * (count - len(found))

    def are_shares(self) -> list[bool]:
        """Say of each number that was measured last whether it is a sum of which every rank has a share."""
        pending = self._pending
        if pending is None or self.layout.is_whole or (state := pending.state) is None:
            return []
        before = 0 if pending.buffers is None else 2 * len(self.layout.weights) + len(pending.buffers)
        found = [False] * (before + len(state.plain)) + [True] * len(state.squares)
        return found + [False] * (sum(pending.sizes) - len(found))

    # An update later.

    def judge_each(self, step: int, tick: int, ranks: Sequence[Sequence[float]]) -> Anomaly | None:
        """Judge the numbers of each rank by themselves, and name those on which there is something wrong."""
        pending, weights, moments, told = self._pending, self._weights, self._moments, self._told
        distinct: dict[tuple[float, ...], list[int]] = {}
        for rank, numbers in enumerate(ranks):
            distinct.setdefault(tuple(numbers), []).append(rank)
        guilty: list[int] = []
        verdicts = []
        for numbers, theirs in distinct.items():
            self._pending, self._told = pending, dict(told)
            self._weights, self._moments = copy.deepcopy(weights), copy.deepcopy(moments)
            found = self.judge(step, tick, numbers)
            verdicts.append((found, self._weights, self._moments, self._told))
            guilty += theirs if found is not None else []
        worst = next((one for one in verdicts if one[0] is not None), verdicts[0])
        anomaly, self._weights, self._moments, self._told = worst
        if anomaly is None or len(guilty) == len(ranks):
            return anomaly
        return replace(anomaly, ranks=tuple(sorted(guilty)))

    def judge(self, step: int, tick: int, values: Sequence[float]) -> Anomaly | None:
        """Judge the numbers of the newest measurement, which was of `step`."""
        pending, self._pending = self._pending, None
        if pending is None or pending.step != step or sum(pending.sizes) != len(values):
            if pending is not None:
                self._put_back(pending)
            return None
        place = 0
        findings: list[tuple[Found, int]] = []
        if pending.buffers is not None:
            since, place = self._weights.clean_step, 2 * len(self.layout.weights) + len(pending.buffers)
            found = self._weights.judge(step, pending.buffers, values[:place], pending.paths)
            findings += [(found, since)] if found else []
        if (state := pending.state) is not None and pending.faded is not None:
            since, begin = self._moments.clean_step, place
            place += len(state.plain) + 2 * len(state.squares) + len(state.counted)
            mine = values[begin:place]
            found = self._moments.judge(step, state.plain, state.squares, state.counted, mine, pending.faded)
            findings += [(found, since)] if found else []
            self._remarks += self._moments.remarks
            self._moments.remarks.clear()
        if pending.norms:
            count = len(self._norms.modules)
            found = self._norms.judge(values[place : place + count], self.config.norms.factor)
            findings += [(found, self._clean_norms)] if found else []
            self._clean_norms = self._clean_norms if found or self._norms.is_suspect else step
            place += count
        self._judge_flow(pending, values[place:])
        return self._anomaly(step, tick, [one for one in findings if not self._is_on_purpose(step, one[0])])

    def _judge_flow(self, pending: _Pending, values: Sequence[float]) -> None:
        if pending.activations:
            count = len(self._activations.modules)
            remark = self._activations.judge(pending.step, values[:count])
            self._remarks += [remark] if remark else []
            values = values[count:]
        if pending.batch:
            remark = self._batch.judge(pending.step, values)
            self._remarks += [remark] if remark else []

    def _is_on_purpose(self, step: int, found: Found) -> bool:
        """What comes again at the same step however often the run is rewound is not damage: live with it."""
        times = self._told[step, found.subject] = self._told.get((step, found.subject), 0) + 1
        if not found.acceptable or times <= _OFTEN:
            return False
        self._remarks.append(
            f"step {step}: taken for intended, since it came again after {_OFTEN} rewinds: {found.evidence}"
        )
        return True

    def _anomaly(self, step: int, tick: int, findings: Sequence[tuple[Found, int]]) -> Anomaly | None:
        if not findings:
            return None
        found, since = min(findings, key=lambda one: _FIRST.index(one[0].signal))
        return Anomaly(found.signal, step, tick, since, found.evidence)

    # What rewinds.

    def state_dict(self) -> dict[str, Any]:
        """What is compared against, as plain data."""
        self._add_up()
        pending = self._pending or _Pending(self._step)  # nobody has judged it: as if it had not been measured
        return {
            "step": self._step,
            "shares": self.layout.shares,
            "weights": self._weights.state(pending.paths),
            "optimizer": self._moments.state(pending.faded),
            "norms": [self._clean_norms, dict(self._norms.usual)],
            "batch": self._batch.largest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Go back: comparisons start from the state that was. Return what another version kept nothing of."""
        empty: dict[str, Any] = {"norms": [state["step"], {}], "batch": None}
        lacking, state = [name for name in empty if name not in state], {**empty, **state}
        self._pending = None
        self._landed.clear()
        self._armed = self._armed_norms = self._saw_batch = False
        self._activations.disarm()
        self._norms.forget()
        self._clean_norms, self._norms.usual = int(state["norms"][0]), dict(state["norms"][1])
        self._step = state["step"]
        self._weights.load(state["weights"])
        self._moments.load(state["optimizer"])
        self._batch.largest = state["batch"]
        if state["shares"] != self.layout.shares:  # of what is spread, the largest share was measured
            self.rebase()
        self.replicas.clean_step = self._step  # states that are gone back to are proven, or one for all ranks
        return lacking


def _due(every: int, step: int) -> bool:
    return every > 0 and step > 0 and step % every == 0
