"""Scans: measurements of the state of a run, each at its own interval. Their numbers are judged without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from resilient_train.core import protocols
from resilient_train.core.loss import Every
from resilient_train.core.tree import Tree
from resilient_train.extensions.scans.layout import Layout, depths, digest, largest, lengths, measured, sums
from resilient_train.extensions.scans.weights import Found, Measured, Moments, Norms, Numbers, Scan, Watched, Weights
from resilient_train.ground.types import Anomaly, Signal, fact
from resilient_train.ground.wording import log, say
from resilient_train.processes.world import odd_ones

Settings = Sequence[Mapping[str, Any]]  # by parameter group of all optimizers

_OFTEN = 2  # times that the same finding at the same step leads to a rewind; the third time it must be on purpose
_ONCE = 1  # the same where no update can have moved the weights that far: the loop writes to them
_AROUND = 2  # steps before and after a declared change
# The first explains the others: a negative moment makes weights NaN, and these make everything else NaN.
_FIRST = (
    Signal.OPTIMIZER_RANGE,
    Signal.NONFINITE_WEIGHTS,
    Signal.NONFINITE_OPTIMIZER,
    Signal.WEIGHTS_JUMP,
    Signal.RANK_MISMATCH,
)
_PARTS = 4  # numbers of a digest


_NOTHING: tuple[int, list[str], list[Watched]] = -1, [], []  # the step, the scans, and what they looked at


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
        self.config = config
        self.layout = Layout(model, optimizers)
        self._step = 0
        self._has_ranks = unreplicated is not None
        self._has_copies = self.layout.is_whole and unreplicated is not None and not unreplicated
        self._found: list[tuple[int, Found]] = []  # with its step; does not rewind
        self.accepted: tuple[Found, bool] | None = None  # newly taken for intended, and whether that was declared
        self._pending = _NOTHING  # a measurement that was not judged yet
        self._kinds = self.layout.kinds()
        self._scans: dict[str, Scan] = {
            "weights": Weights(config.weights, self._kinds),
            "optimizer": Moments(config.optimizer, self._kinds),
            "norms": Norms(config.norms),
            "replicas": Scan(config.replicas if self._has_copies else Every(0)),
        }

    @property
    def clean_step(self) -> int:
        return min((scan.clean_step for scan in self._scans.values() if scan.every), default=self._step)

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
        self._pending = step, due, [one for one, _ in found]
        rows = [
            measured(largest, [tensor for one, tensor in found if not one.rule], layout.device),
            measured(sums, [tensor for one, tensor in found if one.rule], layout.device),
            measured(lengths, [tensor for one, tensor in found if one.is_weight], layout.device),
            measured(depths, [tensor for one, tensor in found if one.rule], layout.device),
        ]
        if "replicas" in due:  # in four numbers that float32 holds exactly
            together = digest((tensor for _, tensor in self._replicated()), layout.device)
            rows.append(together.reshape(1).view(torch.int16).float())
        return torch.cat(rows)

    @torch.no_grad()
    def digests(self) -> dict[str, int]:
        """Return a digest of each replicated tensor, to find out which of them differ. Waits for the device."""
        return {name: int(digest([tensor], self.layout.device)) for name, tensor in self._replicated()}

    def _replicated(self) -> Iterator[tuple[str, Tensor]]:
        """Weights, and moments of torch's optimizers: with the same gradients they stay the same."""
        for one, tensor in self.layout.tensors(("weights", "optimizer"), {}, has_ranks=False):
            if one.is_weight or (one.scan == "optimizer" and not one.is_free):
                yield one.name, tensor

    def judge(
        self,
        step: int,
        tick: int,
        values: Sequence[float],
        least: Sequence[float] | None = None,
        of_ranks: Callable[[], list[list[float]]] = list,
    ) -> Anomaly | None:
        """Judge the largest numbers of all ranks, and the `least`: of copies the largest hide zeroed moments.

        `of_ranks` gathers the numbers of each rank, to name those with a finding.
        """
        (measured_at, due, watched), self._pending = self._pending, _NOTHING
        if measured_at != step:
            return None
        found, ranks = self._look(due, watched, values), tuple[int, ...]()
        if least is not None and self._has_copies:
            differ = "replicas" in due and values[-_PARTS:] != least[-_PARTS:]
            found = {**self._look(due, watched, least), **found}
            rows = of_ranks() if found or differ else []
            hit = [rank for rank, own in enumerate(rows) if self._look(due, watched, own)]
            ranks = tuple(hit) if len(hit) < len(rows) else ()
            if differ:
                odd = odd_ones([tuple(own[-_PARTS:]) for own in rows])
                evidence = fact("replicas_differ", ranks=[*odd], size=len(rows))
                found["replicas"], ranks = Found(Signal.RANK_MISMATCH, evidence, acceptable=False), ranks or odd
        clean = {name: scan.clean_step for name, scan in self._scans.items()}
        for name in due:
            self._scans[name].learn(step, _of(name, watched, values), found.get(name))
        damage = [name for name, one in found.items() if not self._is_on_purpose(step, clean[name], name, one)]
        if not damage:
            return None
        first = found[min(damage, key=lambda name: _FIRST.index(found[name].signal))]
        return Anomaly(first.signal, step, tick, min(map(clean.__getitem__, damage)), first.evidence, ranks=ranks)

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
        alike = Counter(at for at, one in self._found if found.is_like(one))
        often = _ONCE if is_jump else _OFTEN
        is_known = max(alike.values(), default=0) > often
        self._found.append((step, found))
        if not is_known and alike[step] < often:
            return False
        self._scans[name].loose.add(found.subject)
        if not is_known:
            why = "taken for intended, like later ones there, since it came again after each rewind"
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
        if self._has_copies:
            self._scans["replicas"].clean_step = self._step  # the state was verified, or is the same file for all ranks


def _of(scan: str, watched: Sequence[Watched], values: Sequence[float]) -> Measured:
    """Return the numbers of what one scan looks at, from a vector of all."""
    plain = sum(not one.rule for one in watched)
    sizes, totals = iter(values[:plain]), iter(values[plain : len(watched)])
    more = iter(values[len(watched) :])  # of weights, and of second moments, which follow them
    numbers = [
        Numbers(next(totals if one.rule else sizes), next(more) if one.is_weight or one.rule else 0.0)
        for one in watched
    ]
    return [(one, each) for one, each in zip(watched, numbers, strict=True) if one.scan == scan]
