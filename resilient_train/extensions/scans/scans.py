"""Scans: measurements of the state of a run, each at its own interval. Their numbers are judged without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from resilient_train.core import protocols
from resilient_train.core.loss import Every
from resilient_train.core.tree import Tree
from resilient_train.core.vitals import Sent
from resilient_train.extensions.scans.layout import TOTALS, Layout, digest, largest, measured
from resilient_train.extensions.scans.weights import Found, Measured, Moments, Norms, Numbers, Scan, Watched, Weights
from resilient_train.ground.types import Anomaly, Facts, Signal, fact
from resilient_train.ground.wording import log, say
from resilient_train.processes.world import World, odd_ones

_OFTEN = 2  # times that the same finding at the same step leads to a rewind; the third time it must be on purpose
_ONCE = 1  # the same where no update can have moved the weights that far: the loop writes to them
_AROUND = 2  # steps before and after a declared change
_PARTS = 4  # numbers of a digest


class _Pending(NamedTuple):
    """A measurement that was not judged yet."""

    step: int
    tick: int
    due: list[str]  # the scans
    watched: list[Watched]  # what they looked at
    mine: Tensor  # of this rank
    sent: Sent  # the largest of each number over all ranks


class Scans(protocols.Scans):
    """Looks at weights, buffers, optimizer state and the statistics of normalization layers, at their own intervals.

    `measure` launches a few kernels and waits for nothing; `judge` reads the numbers later, and is plain arithmetic.
    `landed` is called at every update, and adds up how far the updates can have moved the state.
    """

    def __init__(self, config: Any, layout: Layout, world: World | None = None) -> None:
        """`world` of several ranks, whose weights are the same unless they are sharded."""
        self.config, self.layout, self._world = config, layout, world
        self._step = 0
        self._has_copies = self.layout.is_whole and world is not None
        self._found: list[tuple[int, Found]] = []  # with its step; does not rewind
        self.accepted = None  # or what was newly taken for intended; nothing, if it was declared
        self._pending: _Pending | None = None
        kinds = self.layout.kinds()
        self._scans: dict[str, Scan] = {
            "weights": Weights(config.weights, kinds),
            "optimizer": Moments(config.optimizer, kinds),
            "norms": Norms(config.norms),
            "replicas": Scan(config.replicas if self._has_copies else Every(0)),
        }

    @property
    def clean_step(self) -> int:
        return min((scan.clean_step for scan in self._scans.values() if scan.every), default=self._step)

    def rebase(self) -> None:
        """Accept the next measurement as long as it is finite: something was changed on purpose."""
        self._pending = None
        for scan in self._scans.values():
            scan.restart(self.layout.kinds())

    def _has_new_groups(self) -> bool:
        return [path.kind for path in self._scans["weights"].paths] != self.layout.kinds()

    def landed(self, step: int, groups: Sequence[Mapping[str, Any]], norm: float | None, times: int = 1) -> None:
        """Note an accepted update with the settings of all groups and the norm of the clipped gradients, if known. An
        optimizer stepped so many `times` in it.
        """
        self._step = step
        if self._has_new_groups():
            self.rebase()
            return
        settings = [{**group, **setting} for group, setting in zip(self.layout.groups(), groups, strict=True)]
        for scan in self._scans.values():
            for _ in range(times if scan.every else 0):
                scan.landed(settings, norm)

    def is_due(self) -> bool:
        return any(scan.is_due(self._step) for scan in self._scans.values())

    @torch.no_grad()
    def measure(
        self, tick: int, kept: Mapping[str, Tree] = MappingProxyType({}), *, everything: bool = False
    ) -> Tensor:
        """Measure what is due, or `everything`; return the numbers. If they are never judged, as something raised in
        between, the next measurement covers their updates as well.
        """
        if self._has_new_groups():
            self.rebase()
        device = self.layout.device
        due = [name for name, scan in self._scans.items() if scan.every and (everything or scan.is_due(self._step))]
        found = self.layout.tensors(due, kept)
        rows = [measured(largest, [tensor for _, tensor in found], device)]
        for total, how in TOTALS.items():  # of ranks the largest numbers count: here the smallest
            rows.append(-measured(how, [tensor for one, tensor in found if one.total == total], device))
        if "replicas" in due:  # in numbers that float32 holds exactly: where ranks agree, the largest are the smallest
            parts = digest(self._replicated(), device).reshape(1).view(torch.int16).float()
            rows += [parts, -parts]
        mine = torch.cat(rows)
        sent = Sent(mine if self._world is None else self._world.max(mine))
        self._pending = _Pending(self._step, tick, due, [one for one, _ in found], mine, sent)
        return mine

    def _replicated(self) -> list[Tensor]:
        """Weights, and moments of torch's optimizers: with the same gradients they stay the same."""
        found = self.layout.tensors(("weights", "optimizer"), {})
        return [tensor for one, tensor in found if one.is_weight or (one.scan == "optimizer" and not one.is_free)]

    def judge(self) -> Anomaly | None:
        """Judge what was measured."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        step, due, values, ranks = pending.step, pending.due, pending.sent.read(), tuple[int, ...]()
        found = self._look(pending, values)
        if found and self._has_copies and self._world is not None:
            rows = self._world.all_of(pending.mine.tolist())  # every rank comes, as all have read the same
            hit = [rank for rank, row in enumerate(rows) if self._look(pending, row)]
            ranks = tuple(hit) if len(hit) < len(rows) else ()
        if "replicas" in due and values[-2 * _PARTS : -_PARTS] != [-one for one in values[-_PARTS:]]:
            found["replicas"] = Found(Signal.RANK_MISMATCH, acceptable=False)
        clean = {name: scan.clean_step for name, scan in self._scans.items()}
        for name in due:
            self._scans[name].learn(step, _of(name, pending.watched, values), found.get(name))
        damage = [name for name, one in found.items() if not self._is_on_purpose(step, clean[name], name, one)]
        if not damage:
            return None
        # A second moment below what it can be makes weights NaN, and these make everything else NaN.
        first = found[min(damage, key=lambda name: found[name].signal is not Signal.OPTIMIZER_RANGE)]
        evidence = first.evidence
        if first.signal is Signal.RANK_MISMATCH:
            ranks, evidence = self._differ()
        return Anomaly(first.signal, step, pending.tick, min(map(clean.__getitem__, damage)), evidence, ranks=ranks)

    def _look(self, pending: _Pending, values: Sequence[float]) -> dict[str, Found]:
        found = {name: self._scans[name].look(_of(name, pending.watched, values)) for name in pending.due}
        return {name: one for name, one in found.items() if one is not None}

    @torch.no_grad()
    def _differ(self) -> tuple[tuple[int, ...], Facts]:
        """Find out which ranks have other weights or moments than most. Waits for the device."""
        assert self._world is not None
        digests = self._world.all_of(int(digest(self._replicated(), self.layout.device)))
        odd = odd_ones(digests)
        return odd, fact("replicas_differ", ranks=[*odd], size=len(digests))

    def _is_on_purpose(self, step: int, clean: int, name: str, found: Found) -> bool:
        """Whether to accept a finding: it was declared, or came again at the same step."""
        if not found.acceptable:
            return False
        is_jump = found.signal is Signal.WEIGHTS_JUMP
        if is_jump and any(clean - _AROUND <= declared <= step + _AROUND for declared in self.config.expect):
            self.accepted = ()
            return True
        often = sum(at == step and found.is_like(one) for at, one in self._found)
        self._found.append((step, found))
        if often < (_ONCE if is_jump else _OFTEN):
            return False
        self._scans[name].loose.add(found.subject)
        why = "taken for intended, like later ones there, since it came again after each rewind"
        log.info("note: step %d: %s: %s", step, why, say(found.evidence))
        self.accepted = found.evidence
        return True

    def state_dict(self) -> dict[str, Any]:
        own = {"step": self._step, "shares": self.layout.shares}
        return own | {name: scan.state_dict() for name, scan in self._scans.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._pending = None
        self._step = state["step"]
        for name, scan in self._scans.items():
            scan.load_state_dict(state[name])
        if state["shares"] != self.layout.shares:  # the bounds are those of the largest share of a sharded tensor
            self.rebase()
        if self._has_copies:
            self._scans["replicas"].clean_step = self._step  # the state was verified, or is the same file for all ranks


def _of(scan: str, watched: Sequence[Watched], values: Sequence[float]) -> Measured:
    """Return the numbers of what one scan looks at, from a vector of all."""
    rest = iter(values[len(watched) :])
    of_each = {one: -next(rest) for total in TOTALS for one in watched if one.total == total}
    numbers = [Numbers(size, of_each.get(one, 0.0)) for one, size in zip(watched, values, strict=False)]
    return [(one, each) for one, each in zip(watched, numbers, strict=True) if one.scan == scan]
