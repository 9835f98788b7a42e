"""Scans: measurements of the state of a run, each at its own interval. Their numbers are judged without torch."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from resilient_train.core import protocols
from resilient_train.core.loss import Every
from resilient_train.core.tree import Tree
from resilient_train.extensions.scans.layout import Layout, digest
from resilient_train.extensions.scans.modes import NormStatistics
from resilient_train.extensions.scans.weights import KEPT, Found, Moments, Scan, Weights
from resilient_train.ground.types import Anomaly, Signal
from resilient_train.ground.wording import log, say

Settings = Sequence[Mapping[str, Any]]  # by parameter group of all optimizers

_ADD_UP_AFTER = 64  # accepted updates, after which they are added up even if no measurement is due
_OFTEN = 2  # times that the same finding at the same step leads to a rewind; the third time it must be on purpose
_ONCE = 1  # the same where no update can have moved the weights that far: the loop writes to them
_AROUND = 2  # steps before and after a declared change
# The first explains the others: a negative moment makes weights NaN, and these make everything else NaN.
_FIRST = (Signal.OPTIMIZER_RANGE, Signal.NONFINITE_WEIGHTS, Signal.NONFINITE_OPTIMIZER, Signal.WEIGHTS_JUMP)


class _Row(NamedTuple):
    scan: str
    items: Sequence[Any]
    numbers: Tensor
    is_own: bool = False  # each rank has its own; else they are the same on every rank, unless the model is sharded
    is_sum: bool = False  # of a sharded model each rank has its share


_NOTHING: tuple[int, list[_Row]] = (-1, [])


class Scans(protocols.Scans):
    """Looks at weights, buffers, optimizer state and the statistics of normalization layers, at their own intervals.

    `measure` launches a few kernels and waits for nothing; `judge` gets the numbers later and is plain arithmetic.
    `landed` is called at every update, and adds up how far the updates can have moved the state.
    """

    def __init__(
        self,
        config: Any,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        unreplicated: Collection[str] | None = None,
    ) -> None:
        """`optimizers` without Accelerate's wrapper; `unreplicated` weights differ between ranks, None: no replicas."""
        self.config, self.model, self.optimizers = config, model, list(optimizers)
        self._step = 0
        self._has_ranks = unreplicated is not None
        self._landed: list[tuple[Settings, float | None]] = []  # updates that were not added up yet
        self._found: list[tuple[int, Found]] = []  # with its step; does not rewind
        self.accepted: tuple[Found, bool] | None = None  # newly taken for intended, and whether that was declared
        self._pending = _NOTHING  # a measurement that was not judged yet, and its step
        self._lay_out(clean_step=0)
        self._norms = NormStatistics(config.norms, model, self.layout.device)
        self.replicas = Replicas(config.replicas, unreplicated if self.layout.is_whole else None)

    def _lay_out(self, clean_step: int) -> None:
        self.layout = layout = Layout(self.model, self.optimizers)
        self._weights = Weights(self.config.weights, layout.weights.items, layout.kinds)
        self._moments = Moments(self.config.optimizer, len(layout.kinds))
        self._weights.clean_step = self._moments.clean_step = clean_step
        self._skipped_known = 0

    @property
    def clean_step(self) -> int:
        scans = (self._weights, self._moments, self.replicas, self._norms)
        return min((scan.clean_step for scan in scans if scan.every), default=self._step)

    def rebase(self) -> None:
        """Accept the next measurement as long as it is finite: something was changed on purpose."""
        self._weights.rebase()
        self._moments.rebase()
        self._pending = _NOTHING

    def landed(self, step: int, groups: Settings, clipped_norm: float | None, times: int = 1) -> None:
        """Note an accepted update, in which an optimizer stepped so many `times`; its clipped norm if that is known."""
        self._step = step
        self._landed += [(groups, clipped_norm)] * times  # adding it up takes ten times as long
        if len(self._landed) >= _ADD_UP_AFTER:
            self._add_up()

    def _add_up(self) -> None:
        landed, self._landed = self._landed, []
        live = self.layout.groups()
        for groups, clipped_norm in landed:
            if len(live) != len(self.layout.kinds) or len(groups) != len(live):
                return  # groups were added: the next measurement starts from scratch
            settings = [{**group, **setting} for group, setting in zip(live, groups, strict=True)]
            if self._weights.every:
                self._weights.landed(settings, clipped_norm)
            if self._moments.every:
                self._moments.landed(settings)

    def is_due(self, step: int) -> bool:
        return self._norms.is_armed or self._weights.is_due(step) or self._moments.is_due(step)

    def arm(self, step: int) -> None:
        if self._norms.is_due(step):
            self._norms.arm()

    @torch.no_grad()
    def measure(self, kept: Mapping[str, Tree] = MappingProxyType({}), *, everything: bool = False) -> Tensor:
        """Measure what is due, or weights, `kept` and optimizers if nothing is or `everything` is needed now. If it is
        never judged, as something raised in between, the next measurement covers its updates as well.
        """
        self._add_up()
        if not self.layout.fits():
            self._norms.clean_step = clean_step = self.clean_step
            self._lay_out(clean_step)
            log.info("note: the optimizers have other weights than before: scans start again")
        if fresh := self.layout.skipped[self._skipped_known :]:
            self._skipped_known = len(self.layout.skipped)
            log.info("note: not scanned, being sparse or of a type without norms: %s", ", ".join(fresh))
        rows: list[_Row] = []
        self._pending = (step := self._step), rows
        everything = everything or not self.is_due(step)
        if self._weights.every and (everything or self._weights.is_due(step)):
            weights, buffers, of_kept = self.layout.weights, self.layout.buffers(), self.layout.kept(kept)
            names, largest = of_kept.items, of_kept.largest()
            if self._has_ranks:  # each of which may keep something else: it is two numbers
                names = [f"{KEPT}*", f"{KEPT}* (a NaN counts as infinite)"]
                is_nan, zero = largest.isnan(), largest.new_zeros(1)
                others = torch.cat([largest.masked_fill(is_nan, 0.0), zero]).amax(keepdim=True)
                largest = torch.cat([others, zero.masked_fill(is_nan.any(), inf)])
            of_weights = [weight.name for weight in weights.items]
            rows += [
                _Row("weights", of_weights, weights.lengths()),
                _Row("weights", of_weights, weights.largest()),
                _Row("weights", buffers.items, buffers.largest(), is_own=True),
                _Row("weights", names, largest, is_own=True),
            ]
        if self._moments.every and (everything or self._moments.is_due(step)):
            plain, squares, _ = self.layout.moments()
            rows += [
                _Row("optimizer", plain.items, plain.largest()),
                _Row("optimizer", squares.items, squares.sums(), is_sum=True),
                _Row("optimizer", squares.items, squares.depths()),
            ]
        if self._norms.is_armed:
            rows.append(_Row("norms", [name for name, _ in self._norms.modules], self._norms.values(), is_own=True))
        return torch.cat([row.numbers for row in rows]) if rows else torch.zeros(0, device=self.layout.device)

    def are_copies(self) -> list[bool]:
        return [self.layout.is_whole and not row.is_own for row in self._pending[1] for _ in row.items]

    def are_shares(self) -> list[bool]:
        return [not self.layout.is_whole and row.is_sum for row in self._pending[1] for _ in row.items]

    def judge_each(self, step: int, tick: int, ranks: Sequence[Sequence[float]]) -> Anomaly | None:
        """Judge the numbers of each rank separately, and name the ranks with a finding."""
        before = self._pending, self._weights, self._moments, self._found
        distinct: dict[tuple[float, ...], list[int]] = {}
        for rank, numbers in enumerate(ranks):
            distinct.setdefault(tuple(numbers), []).append(rank)
        guilty: list[int] = []
        verdicts = []
        for numbers, theirs in distinct.items():
            self._pending, self._weights, self._moments, self._found = before[0], *copy.deepcopy(before[1:])
            found = self.judge(step, tick, numbers)
            verdicts.append((found, self._weights, self._moments, self._found))
            guilty += theirs if found is not None else []
        worst = next((one for one in verdicts if one[0] is not None), verdicts[0])
        anomaly, self._weights, self._moments, self._found = worst
        if anomaly is None or len(guilty) == len(ranks):
            return anomaly
        return replace(anomaly, ranks=tuple(sorted(guilty)))

    def judge(self, step: int, tick: int, values: Sequence[float]) -> Anomaly | None:
        (measured_at, rows), numbers = self._pending, iter(values)
        if measured_at != step:
            return None
        self._pending = _NOTHING
        by_scan: dict[str, list[dict[Any, float]]] = {}
        for row in rows:
            by_scan.setdefault(row.scan, []).append(dict(zip(row.items, numbers, strict=False)))  # ends with the items
        damage: list[tuple[Found, int]] = []
        scans = self._by_name()
        for name, measured in by_scan.items():
            clean = scans[name].clean_step
            found = scans[name].judge(step, *measured)
            if found is not None and not self._is_on_purpose(step, clean, found):
                damage.append((found, clean))
        if not damage:
            return None
        first, clean = min(damage, key=lambda one: _FIRST.index(one[0].signal))
        return Anomaly(first.signal, step, tick, clean, first.evidence)

    def _is_on_purpose(self, step: int, clean: int, found: Found) -> bool:
        """Whether to accept a finding: it was declared, came again at the same step, or did at an earlier step."""
        if not found.acceptable:
            return False
        is_jump = found.signal is Signal.WEIGHTS_JUMP
        if is_jump and any(clean - _AROUND <= declared <= step + _AROUND for declared in self.config.expect):
            self.accepted = found, True
            return True
        alike = Counter(at for at, one in self._found if found.is_like(one))
        known = max(alike.values(), default=0)
        self._found.append((step, found))
        often = _ONCE if is_jump else _OFTEN
        if max(known, alike[step] + 1) <= often:
            return False
        self._weights.unbounded.add(found.subject)
        if known <= often:
            why = "taken for intended, like later ones there, since it came again after each rewind"
            log.info("note: step %d: %s: %s", step, why, say(found.evidence))
            self.accepted = found, False
        return True

    def state_dict(self) -> dict[str, Any]:
        self._add_up()
        own = {"step": self._step, "shares": self.layout.shares}
        return own | {name: scan.state_dict() for name, scan in self._by_name().items()}

    def _by_name(self) -> dict[str, Any]:  # as in checkpoints
        return {"weights": self._weights, "optimizer": self._moments, "norms": self._norms}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._pending = _NOTHING
        self._landed.clear()
        self._step = state["step"]
        for name, scan in self._by_name().items():
            scan.load_state_dict(state[name])
        if state["shares"] != self.layout.shares:  # the bounds are those of the largest share of a sharded tensor
            self.rebase()
        self.replicas.clean_step = self._step  # the state was verified, or is the same file for all ranks


class Replicas(Scan):
    """Compares weights, and moments of torch's optimizers, between ranks: with the same gradients they stay the same.

    It finds flipped bits. Left out are buffers (BatchNorm's differ), sharded weights, and those not replicated.
    """

    def __init__(self, config: Every, unreplicated: Collection[str] | None) -> None:
        super().__init__(0 if unreplicated is None else config.every)
        self._unreplicated = frozenset(unreplicated or ())

    @torch.no_grad()
    def measure(self, layout: Layout) -> Tensor:
        """Return this rank's digest and its complement: the largest of both over all ranks show whether all agree."""
        found = digest((tensor for _, tensor in self._replicated(layout)), layout.device)
        return torch.stack([found, ~found])

    def judge(self, step: int, largest: Sequence[int]) -> bool:
        is_equal = largest[0] == ~largest[1]
        if is_equal:
            self.clean_step = step
        return is_equal

    @torch.no_grad()
    def each(self, layout: Layout) -> tuple[list[str], Tensor]:
        """Return the names of all tensors, and a digest of each, to find out which of them differ."""
        replicated = list(self._replicated(layout))
        digests = [digest([tensor], layout.device) for _, tensor in replicated]
        return [name for name, _ in replicated], torch.stack(digests) if digests else torch.zeros(0, dtype=torch.int64)

    def _replicated(self, layout: Layout) -> Iterable[tuple[str, Tensor]]:
        if not layout.is_whole:
            return
        for weight, tensor in zip(layout.weights.items, layout.weights.tensors, strict=True):
            if weight.name not in self._unreplicated:
                yield weight.name, tensor
        for gauge in layout.moments()[:2]:
            for moment, tensor in zip(gauge.items, gauge.tensors, strict=True):
                is_unreplicated = any(moment.name.endswith(f" of {name}") for name in self._unreplicated)
                if moment.by_torch and not is_unreplicated:
                    yield moment.name, tensor
