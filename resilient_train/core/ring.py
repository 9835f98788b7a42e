"""The memory ring: the latest snapshots, which of them are verified, and how much memory they may use."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from resilient_train.core.copies import Copier, digests_of_frozen
from resilient_train.core.state import RunState
from resilient_train.core.tree import Tree, fits, put_together, taken_apart
from resilient_train.ground.files import available_memory
from resilient_train.ground.reader import MemoryConfig

_GIB = 2**30
_SLOTS_TO_SET_ASIDE = 3  # with fewer, there would be no slot for a candidate next to the newest verified snapshot


@dataclass(eq=False)
class Snapshot:
    """A copy of the state: a candidate until healthy updates and scans have shown that it holds no damage."""

    step: int
    parts: dict[str, Tree]  # as of `RunState.live`
    digests: Mapping[str, int] = field(default_factory=dict)  # of frozen weights
    checks_state: Any = None  # Parts.checks_state(); None until its update was accepted
    effects: Any = None  # of remedies, after its update
    verified: bool = False


class Ring:
    """Takes snapshots into memory, verifies them, and drops old ones so that ages spread out."""

    def __init__(
        self, state: RunState, config: MemoryConfig, agree: Callable[[float], float] = lambda number: number
    ) -> None:
        """`agree` returns the least of a number over all ranks, which with other snapshots would rewind elsewhere."""
        self._state, self.config, self._agree, self.every = state, config, agree, config.every
        self.snapshots: list[Snapshot] = []  # oldest first
        # The best verified snapshot that a rewind went back beyond, kept for the end of the run.
        self._set_aside: Snapshot | None = None
        self.best_step = 0  # the newest step at the best level of the run: the last verified snapshot up to it stays
        # The newest step that was trusted before the incident, until the loss is back there; None: nothing is kept.
        self._reference_step: int | None = None
        self._branch_step = 0  # the lowest step rewound to since `_set_aside` was taken
        self._versions: dict[str, int] = {}  # of frozen weights, when they were copied or restored
        self.copier = Copier(state.device)
        self._allowed: float | None = None  # bytes, agreed on at the first use
        self.slots = 0  # the number of snapshots that fit, as of the last `settle_slots`

    def is_due(self, step: int) -> bool:
        return bool(self.every) and step % self.every == 0

    def take(self, step: int, *, verified: bool = False) -> Snapshot | None:
        """Copy the state; None if there is a snapshot of this step already, or every slot holds one that is needed."""
        if not self.every or any(snapshot.step == step for snapshot in self.snapshots):
            return None
        live = self._state.live() | {"clock": step}  # the verdict on this step may be pending
        weights = live.pop("weights")
        digests = digests_of_frozen(weights)
        shared = self._unchanged(weights, digests)
        trained: dict[str, Any] = {"weights": {name: one for name, one in weights.items() if one.requires_grad}}
        # Only optimizers change these: they can be copied later. Frozen weights may be changed by the loop at any time.
        trained |= {name: live.pop(name) for name in list(live) if name.startswith("optimizer.")}
        known = trained["weights"].keys() | shared.keys()
        live["frozen"] = {name: one for name, one in weights.items() if name not in known}  # in the order of all ranks
        (plain, sources), (plain_rest, rest) = taken_apart(trained), taken_apart(live)
        self.settle_slots(sum(one.nbytes for one in (*sources, *rest, *shared.values())))
        if not self.slots or not self._make_room(step):
            return None
        copies = self.copier.copied([*sources, *rest], len(sources))
        parts: dict[str, Tree] = put_together({**plain, **plain_rest}, copies)
        parts["weights"] |= parts.pop("frozen") | shared
        snapshot = Snapshot(step, parts, digests, verified=verified)
        self.snapshots.append(snapshot)
        return snapshot

    def _unchanged(self, weights: Mapping[str, torch.Tensor], digests: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Return the copies of frozen weights that are as in the newest snapshot, for all snapshots to share."""
        before, self._versions = self._versions, {name: weights[name]._version for name in digests}
        if not self.snapshots:
            return {}
        newest = self.snapshots[-1]
        unmoved = [name for name, version in self._versions.items() if before.get(name) == version]
        same = [name for name in unmoved if newest.digests.get(name) == digests[name]]
        copies = {name: newest.parts["weights"][name] for name in same}
        return {name: one for name, one in copies.items() if fits(one, weights[name])}

    def oldest_position(self, now: int) -> int:
        return int(self.snapshots[0].parts["position"]["position"]) if self.snapshots else now

    def verify(self, *, healthy_until: int, scanned_until: int, after: int, is_back: bool = True) -> None:
        """Verify candidates that `after` healthy updates and all scans followed; drop them if the loss is not back."""
        ripe = [one for one in self.snapshots if not one.verified and one.checks_state is not None]
        ripe = [one for one in ripe if one.step + after <= healthy_until and one.step <= scanned_until]
        if not is_back:
            self.drop(*ripe)
            return
        for snapshot in ripe:
            snapshot.verified = True
        self._drop_surpassed()

    def keep_reference(self, since: int) -> None:
        """Keep the best of the verified snapshots until `release_reference`: the run is measured against it."""
        if self._reference_step is None:
            self._reference_step = since

    def release_reference(self) -> None:
        if self._reference_step is not None:
            self._reference_step = None
            self._drop_surpassed()

    def _drop_surpassed(self) -> None:
        """Drop the snapshot set aside once a later one is verified, unless the run is measured against it."""
        newest, aside = self.newest_verified(), self._set_aside
        if newest and aside and newest.step >= aside.step and self._reference_step is None:
            self._set_aside = None

    def distrust(self, since: int) -> None:
        """Drop snapshots after `since`, and the one set aside if `since` is before the step that was rewound to."""
        self.drop(*[one for one in self.snapshots if one.step > since])
        if since < self._branch_step:
            self._set_aside = None

    def drop(self, *dropped: Snapshot) -> None:
        self.snapshots = [one for one in self.snapshots if one not in dropped]

    def verified_until(self, since: int) -> list[Snapshot]:
        return [one for one in reversed(self.snapshots) if one.verified and one.step <= since]

    def newest_verified(self) -> Snapshot | None:
        return next((one for one in reversed(self.snapshots) if one.verified), None)

    def clear(self) -> None:
        self.snapshots, self._set_aside, self._branch_step = [], None, 0

    def last_good(self, since: int) -> Snapshot | None:
        """The newest verified state, to end a run with; the run may have rewound to an older one since."""
        aside = [self._set_aside] if self._set_aside else []
        return max(self.verified_until(since) + aside, key=lambda one: one.step, default=None)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot and drop later ones, but set the best of them aside, for the end of the run."""
        self.load(snapshot.parts)
        later = [one for one in self.snapshots if one.step > snapshot.step]
        good, aside = [one for one in later if one.verified], self._set_aside
        best = [one for one in good if one.step <= (self._reference_step or 0)] or good
        if best and self.slots >= _SLOTS_TO_SET_ASIDE and (aside is None or best[-1].step > aside.step):
            self._set_aside, self._branch_step = best[-1], snapshot.step
        self._branch_step = min(self._branch_step, snapshot.step)
        self.drop(*later)

    def aside(self) -> dict[str, Tree] | None:
        """Copy the state outside of all slots; None if it does not fit next to what is kept. It is a collective."""
        plain, sources = taken_apart(self._state.live())
        size = sum(one.nbytes for one in sources)
        if self._allowed is None:
            self.settle_slots(size)
        held = taken_apart([one.parts for one in (*self.snapshots, self._set_aside) if one is not None])[1]
        kept = sum({id(one): one.nbytes for one in held}.values())  # snapshots share frozen weights
        if self._agree((self._allowed or 0.0) - kept - size) < 0:
            return None
        copied: dict[str, Tree] = put_together(plain, self.copier.copied(sources, 0))
        return copied

    def load(self, parts: Mapping[str, Tree]) -> None:
        """Restore a state. All snapshots stay."""
        self.copier.wait()
        self._state.restore(parts)
        self._versions = {name: one._version for name, one in self._state.model.named_parameters()}

    def settle_slots(self, size: int) -> tuple[int, float]:
        """Agree with all ranks on how many snapshots of `size` bytes fit, at least two; drop those that do not. Returns
        the bytes of one, and those allowed: by default half of what was available at first, over local ranks.
        """
        if self._allowed is None:
            if self.config.max_gib is not None:
                allowed = self.config.max_gib * _GIB
            else:
                allowed = available_memory() / 2
            self._allowed = self._agree(allowed / int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        size = max(1, -int(self._agree(-size)))
        fitting = min(self.config.keep, int(self._allowed / size))
        self.slots = fitting if fitting > 1 else 0
        if self.slots < _SLOTS_TO_SET_ASIDE:
            self._set_aside = None
        if not self.slots:
            self.snapshots.clear()
        return size, self._allowed

    def _make_room(self, now: int) -> bool:
        """Drop snapshots until there is a slot for one of step `now`; False if that is not possible."""
        while len(self.snapshots) + (self._set_aside is not None) >= self.slots:
            kept = self.verified_until(self.best_step)[:1] if self.slots > _SLOTS_TO_SET_ASIDE else []
            if self._reference_step is not None and self._set_aside is None:
                kept += self.verified_until(self._reference_step)[:1]
            verified = [one.verified and one not in kept for one in self.snapshots]
            if (place := snapshot_to_drop(verified, [one.step for one in self.snapshots], now)) is None:
                return False
            self.drop(self.snapshots[place])
        return True


def snapshot_to_drop(verified: Sequence[bool], steps: Sequence[int], now: int) -> int | None:
    """Choose which of the snapshots, oldest first, makes room for one of step `now`.

    Never a candidate, as none would ever be verified, and never the newest verified one, which a rewind tries first. Of
    the others, the one whose neighbours are closest in age, as a ratio: each is then about twice as old as the next.
    Of five or more, the only one of the first quarter of the run stays: lower rates are tried from there.
    """
    is_early = len(steps) >= 5 and 4 * steps[0] <= now < 4 * steps[1]
    newest = max((place for place, is_verified in enumerate(verified) if is_verified), default=None)

    def distance(place: int) -> float:
        age_after = now - steps[place + 1] if place + 1 < len(steps) else 1
        age_before = now - steps[place - 1] if place else 2 * (now - steps[place])
        return age_before / max(1, age_after)

    kept = (newest, 0) if is_early else (newest,)
    others = [place for place, is_verified in enumerate(verified) if is_verified and place not in kept]
    return min(others, key=distance, default=None)
