"""The memory ring: snapshots of the recent past, and which of them are proven good."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from resilient_train.state.run_state import RunState, Snapshot
from resilient_train.state.tree import copy_into, laid_out, nbytes, pinned

_GIB = 2**30


@dataclass
class MemoryConfig:
    every: int = field(metadata={"at_least": 0})
    keep: int = field(metadata={"at_least": 2})
    max_gib: float | None = field(metadata={"at_least": 0})


@dataclass
class Held:
    """A snapshot in the ring: a candidate until everything that could speak against it has been heard."""

    step: int
    snapshot: Snapshot
    statistics: Any = None  # of the checks, once the verdict on its own update is in; None until then
    verified: bool = False


class Ring:
    """Takes snapshots into memory that is allocated once, proves them, and lets old ones go so that ages spread out.

    On an accelerator the copy goes to pinned host memory on a stream of its own, beside the next forward.
    """

    def __init__(self, state: RunState, config: MemoryConfig) -> None:
        self._state, self._config = state, config
        self._held: list[Held] = []  # oldest first
        self._pinned: Held | None = None  # the newest state that was ever proven, while the run has gone back behind it
        self._spare: list[Snapshot] = []  # memory of snapshots that were let go
        self._frozen: dict[str, torch.Tensor] = {}
        self._stream = torch.cuda.Stream(state.device) if state.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None

    @property
    def held(self) -> Sequence[Held]:
        """What is held, oldest first."""
        return self._held

    def describe(self) -> str:
        """Say what it costs, for the start of a run."""
        size = nbytes(self._state.live())
        slots = self._slots(size)
        if not self._config.every:
            return "no snapshots in memory (checkpoint.memory.every=0): this run cannot rewind"
        if not slots:
            allowed = _spoken(self._allowed_bytes())
            return (
                f"no snapshots in memory: one takes {_spoken(size)}, two are needed and {allowed} allowed: "
                "this run cannot rewind"
            )
        often = f"taken every {self._config.every} steps"
        return f"rewinds to one of {slots} snapshots, {often}: {_spoken(slots * size)} of memory"

    def _slots(self, size: int) -> int:
        """How many snapshots of so many bytes fit into the memory that may be used.

        A single one is of no use: it would be given up for a candidate that is not proven yet.
        """
        fitting = min(self._config.keep, int(self._allowed_bytes() / max(1, size))) if self._config.every else 0
        return fitting if fitting > 1 else 0

    def is_due(self, step: int) -> bool:
        """Say whether the state after `step` accepted updates should be kept."""
        return bool(self._config.every) and step % self._config.every == 0

    def take(self, step: int, *, verified: bool = False) -> Held | None:
        """Copy the state; nothing is taken while every slot holds what is still needed."""
        if any(held.step == step for held in self._held):
            return None
        live = self._state.live() | {"clock": step}  # that of an update which was not heard of yet
        slots = self._slots(nbytes(live))
        while len(self._held) + (self._pinned is not None) >= max(1, slots):
            proven, steps = [held.verified for held in self._held], [held.step for held in self._held]
            if (place := to_let_go(proven, steps, step)) is None:
                return None
            self._spare.append(self._held.pop(place).snapshot)
        if not slots:
            return None
        held = Held(step, self._copy(live, self._spare.pop() if self._spare else None), verified=verified)
        self._held.append(held)
        return held

    def before_change(self) -> None:
        """Let the device finish copying before the weights change; the host goes on."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
            self._copied = None

    def verify(self, *, healthy_until: int, scanned_until: int, after: int) -> None:
        """Prove candidates: `after` healthy updates followed, and every scan has seen the state or a later one."""
        for held in self._held:
            if not held.verified and held.statistics is not None:
                held.verified = held.step + after <= healthy_until and held.step <= scanned_until
        if self._pinned is not None and any(held.verified and held.step >= self._pinned.step for held in self._held):
            self._spare.append(self._pinned.snapshot)
            self._pinned = None

    def distrust(self, since: int) -> None:
        """Drop what is newer than the newest step that can still be trusted."""
        self._drop([held for held in self._held if held.step > since])

    def drop(self, held: Held) -> None:
        """Let a candidate go."""
        self._drop([held])

    def proven(self, since: int) -> list[Held]:
        """Every verified snapshot not after `since`, newest first."""
        return [held for held in reversed(self._held) if held.verified and held.step <= since]

    def last_good(self, since: int) -> Held | None:
        """The best state to leave behind: the newest one that was proven, though the run may have gone back further."""
        good = self.proven(since) + ([self._pinned] if self._pinned else [])
        return max(good, key=lambda held: held.step, default=None)

    def restore(self, held: Held) -> None:
        """Go back to a snapshot. What came after it no longer exists; but the best of it is kept, for the end."""
        if self._copied is not None:
            self._copied.synchronize()
        self._state.restore(held.snapshot)
        newer = [one for one in self._held if one.verified and one.step > held.step]
        if newer and (self._pinned is None or newer[-1].step > self._pinned.step):
            if self._pinned is not None:
                self._spare.append(self._pinned.snapshot)
            self._pinned = newer[-1]
            self._held.remove(newer[-1])
        self.distrust(held.step)

    def _drop(self, dropped: list[Held]) -> None:
        self._held = [held for held in self._held if held not in dropped]
        self._spare += [held.snapshot for held in dropped]

    def _copy(self, live: dict[str, Any], room: Snapshot | None) -> Snapshot:
        frozen = {name: live["weights"].pop(name) for name in self._state.frozen()}
        empty = _pinned_if_on_device if self._stream is not None else torch.empty_like
        parts, targets, sources = laid_out(live, room=room.parts if room else None, empty=empty)
        if self._frozen.keys() != frozen.keys():  # they do not change: one copy serves all snapshots
            self._frozen, more_targets, more_sources = laid_out(frozen, room=None, empty=empty)
            targets, sources = targets + more_targets, sources + more_sources
        self._fill(targets, sources)
        parts["weights"] = {**parts["weights"], **self._frozen}
        return Snapshot(parts)

    def _fill(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        if self._stream is None:
            copy_into(targets, sources)
            return
        self.before_change()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.no_grad():
            torch._foreach_copy_(targets, sources, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def _allowed_bytes(self) -> float:
        neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if self._config.max_gib is not None:
            return self._config.max_gib * _GIB / neighbours
        if not hasattr(self, "_half_free"):
            self._half_free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
        return self._half_free / neighbours


def to_let_go(verified: Sequence[bool], steps: Sequence[int], now: int) -> int | None:
    """Choose which of the snapshots, oldest first, makes room for one of the state at `now`.

    Never a candidate, which would never be proven, nor the newest verified one, which a rewind wants first. Of the
    others the one whose neighbours are closest in age, as a ratio: so each is about twice as old as the next.
    """
    newest = max((place for place, is_verified in enumerate(verified) if is_verified), default=None)
    best: int | None = None
    closest = float("inf")
    for place in range(len(steps)):
        if not verified[place] or place == newest:
            continue
        age_after = now - steps[place + 1] if place + 1 < len(steps) else 1
        age_before = now - steps[place - 1] if place else 2 * (now - steps[place])
        ratio = age_before / max(1, age_after)
        if ratio < closest:
            best, closest = place, ratio
    return best


def _pinned_if_on_device(source: torch.Tensor) -> torch.Tensor:
    return pinned(source) if source.is_cuda else torch.empty_like(source)


def _spoken(size: float) -> str:
    for unit, bytes_ in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= bytes_:
            return f"{size / bytes_:.3g} {unit}"
    return f"{size:.0f} bytes"
