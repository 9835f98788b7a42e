"""Scans: measurements of the state of a run, each at its own interval. Their numbers are judged without torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from resilient_train.core.loss import Every
from resilient_train.core.tree import Tree
from resilient_train.extensions.scans.config import ScansConfig
from resilient_train.extensions.scans.layout import Layout, depths, digest, largest, lengths, measured
from resilient_train.extensions.scans.weights import Found, Measured, Moments, Norms, Numbers, Scan, Watched, Weights
from resilient_train.ground.types import Anomaly, Signal
from resilient_train.ground.wording import log, say

Settings = Sequence[Mapping[str, Any]]  # by parameter group of all optimizers

_AROUND = 2  # steps before and after a declared change
# The first explains the others: a negative moment makes weights NaN, and these make everything else NaN.
_FIRST = (Signal.OPTIMIZER_RANGE, Signal.NONFINITE_WEIGHTS, Signal.NONFINITE_OPTIMIZER, Signal.WEIGHTS_JUMP)


_NOTHING: tuple[int, list[str], list[Watched]] = -1, [], []  # the step, the scans, and what they looked at


class Scans:
    """Looks at weights, buffers, optimizer state and the statistics of normalization layers, at their own intervals.

    `measure` launches a few kernels and waits for nothing; `judge` gets the numbers later and is plain arithmetic.
    `landed` is called at every update, and adds up how far the updates can have moved the state.
    """

    def __init__(
        self,
        config: ScansConfig,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        unreplicated: Collection[str] | None = None,
    ) -> None:
        """`optimizers` without Accelerate's wrapper; `unreplicated` weights differ between ranks, None: no replicas."""
        self.config = config
        self.layout = Layout(model, optimizers)
        self._step = 0
        self._has_ranks = unreplicated is not None
        self.has_copies = unreplicated is not None and not unreplicated and self.layout.is_whole
        self._found: list[tuple[int, Found]] = []  # with its step; does not rewind
        self.accepted: tuple[Found, bool] | None = None  # newly taken for intended, and whether that was declared
        self._pending = _NOTHING  # a measurement that was not judged yet
        self._kinds, self._skipped_known = self.layout.kinds(), 0
        self._scans: dict[str, Scan] = {
            "weights": Weights(config.weights, self._kinds),
            "optimizer": Moments(config.optimizer, self._kinds),
            "norms": Norms(config.norms),
        }
        self.replicas = Replicas(config.replicas, unreplicated if self.layout.is_whole else None)

    @property
    def clean_step(self) -> int:
        scans = (*self._scans.values(), self.replicas)
        return min((scan.clean_step for scan in scans if scan.every), default=self._step)

    def rebase(self) -> None:
        """Accept the next measurement as long as it is finite: something was changed on purpose."""
        for scan in self._scans.values():
            scan.base = {}
        self._pending = _NOTHING

    def _has_new_groups(self) -> bool:
        """Whether groups were added or removed: then the next measurement is accepted as well."""
        before, self._kinds = self._kinds, self.layout.kinds()
        if len(before) == len(self._kinds):
            return False
        for name in ("weights", "optimizer"):
            self._scans[name].restart(self._kinds)
        return True

    def landed(self, step: int, groups: Settings, clipped_norm: float | None, times: int = 1) -> None:
        """Note an accepted update, in which an optimizer stepped so many `times`; its clipped norm if that is known."""
        self._step = step
        if self._has_new_groups():
            return
        settings = [{**group, **setting} for group, setting in zip(self.layout.groups(), groups, strict=True)]
        for scan in self._scans.values():
            for _ in range(times if scan.every else 0):
                scan.landed(settings, clipped_norm)

    def is_due(self, step: int) -> bool:
        return any(scan.is_due(step) for scan in self._scans.values())

    @torch.no_grad()
    def measure(self, kept: Mapping[str, Tree] = MappingProxyType({}), *, everything: bool = False) -> Tensor:
        """Measure what is due, or all of it if nothing is or `everything` is needed now. If it is never judged, as
        something raised in between, the next measurement covers its updates as well.
        """
        self._has_new_groups()
        step, layout = self._step, self.layout
        everything = everything or not self.is_due(step)
        due = [name for name, scan in self._scans.items() if scan.every and (everything or scan.is_due(step))]
        found = layout.tensors(due, kept, has_ranks=self._has_ranks)
        if fresh := layout.skipped[self._skipped_known :]:
            self._skipped_known = len(layout.skipped)
            log.info("note: not scanned, being sparse or of a type without norms: %s", ", ".join(fresh))
        self._pending = step, due, [one for one, _ in found]
        rows = [
            measured(largest, [tensor for _, tensor in found], layout.device),
            measured(lengths, [tensor for one, tensor in found if one.root], layout.device),
            measured(depths, [tensor for one, tensor in found if one.rule], layout.device),
        ]
        return torch.cat(rows)

    def judge(
        self,
        step: int,
        tick: int,
        values: Sequence[float],
        least: Sequence[float] | None = None,
        of_ranks: Callable[[], list[list[float]]] = list,
    ) -> Anomaly | None:
        """Judge the largest numbers of all ranks, and the `least` of copies: the largest hide zeroed moments.

        `of_ranks` gathers the numbers of each rank, to name those with a finding.
        """
        (measured_at, due, watched), self._pending = self._pending, _NOTHING
        if measured_at != step:
            return None
        found = self._look(due, watched, values)
        if least is not None:
            found = {**self._look(due, watched, least), **found}
        cleans = {name: scan.clean_step for name, scan in self._scans.items()}
        hit = [bool(self._look(due, watched, own)) for own in of_ranks()] if found and least is not None else []
        for name in due:
            self._scans[name].learn(step, _of(name, watched, values), found.get(name))
        damage = [name for name, one in found.items() if not self._is_on_purpose(step, cleans[name], name, one)]
        if not damage:
            return None
        first = min(damage, key=lambda name: _FIRST.index(found[name].signal))
        anomaly = Anomaly(found[first].signal, step, tick, cleans[first], found[first].evidence)
        return anomaly if all(hit) else replace(anomaly, ranks=tuple(rank for rank, is_hit in enumerate(hit) if is_hit))

    def _look(self, due: Sequence[str], watched: Sequence[Watched], values: Sequence[float]) -> dict[str, Found]:
        found = {name: self._scans[name].look(_of(name, watched, values)) for name in due}
        return {name: one for name, one in found.items() if one is not None}

    def _is_on_purpose(self, step: int, clean: int, name: str, found: Found) -> bool:
        """Whether to accept a finding: it was declared, came again at the same step, or did at an earlier step."""
        if not found.acceptable:
            return False
        is_jump = found.signal is Signal.WEIGHTS_JUMP
        if is_jump and any(clean - _AROUND <= declared <= step + _AROUND for declared in self.config.expect):
            self.accepted = found, True
            return True
        alike = [at for at, one in self._found if found.is_like(one)]
        is_known = len(set(alike)) < len(alike)
        self._found.append((step, found))
        if not is_known and step not in alike:
            return False
        self._scans[name].loose.add(found.subject)
        if not is_known:
            why = "taken for intended, like later ones there, since it came again after the rewind"
            log.info("note: step %d: %s: %s", step, why, say(found.evidence))
            self.accepted = found, False
        return True

    def state_dict(self) -> dict[str, Any]:
        own = {"step": self._step, "shares": self.layout.shares}
        return own | {name: scan.state_dict() for name, scan in self._scans.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._pending = _NOTHING
        self._step = state["step"]
        for name, scan in self._scans.items():
            scan.load_state_dict(state[name])
        if state["shares"] != self.layout.shares:  # the bounds are those of the largest share of a sharded tensor
            self.rebase()
        self.replicas.clean_step = self._step  # the state was verified, or is the same file for all ranks


def _of(scan: str, watched: Sequence[Watched], values: Sequence[float]) -> Measured:
    """Return the numbers of what one scan looks at, from a vector of all."""
    more = iter(values[len(watched) :])  # of weights, and of second moments, which follow them
    pairs = zip(watched, values[: len(watched)], strict=True)
    numbers = [(one, Numbers(value, next(more) if one.root or one.rule else 0.0)) for one, value in pairs]
    return [(one, each) for one, each in numbers if one.scan == scan]


class Replicas(Scan):
    """Compares weights, and moments of torch's optimizers, between ranks: with the same gradients they stay the same.

    It finds flipped bits. Left out are buffers (BatchNorm's differ), sharded weights, and those not replicated.
    """

    def __init__(self, config: Every, unreplicated: Collection[str] | None) -> None:
        super().__init__(config)
        self.every = 0 if unreplicated is None else config.every
        self._unreplicated = frozenset(unreplicated or ())

    @torch.no_grad()
    def measure(self, layout: Layout) -> Tensor:
        """Return this rank's digest and its complement: the largest of both over all ranks show whether all agree."""
        found = digest((tensor for _, tensor in layout.replicated(self._unreplicated)), layout.device)
        return torch.stack([found, ~found])

    def judge(self, step: int, largest: Sequence[int]) -> bool:
        is_equal = largest[0] == ~largest[1]
        if is_equal:
            self.clean_step = step
        return is_equal

    @torch.no_grad()
    def each(self, layout: Layout) -> tuple[list[str], Tensor]:
        """Return the names of all tensors, and a digest of each, to find out which of them differ."""
        replicated = layout.replicated(self._unreplicated)
        digests = [digest([tensor], layout.device) for _, tensor in replicated]
        return [name for name, _ in replicated], torch.stack(digests) if digests else torch.zeros(0, dtype=torch.int64)
