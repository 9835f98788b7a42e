"""What a run is: snapshots of it in memory, marks of its buffers, and what both do when its parts come and go."""

from __future__ import annotations

import random
from collections import UserDict, deque
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from resilient_train.core.mark import Marks
from resilient_train.core.ring import Ring, snapshot_to_drop
from resilient_train.core.state import Clock, RunState
from resilient_train.core.tree import leaves, taken_apart
from resilient_train.core.vitals import versions
from resilient_train.data.trees import nbytes, sha256, state_sha256
from resilient_train.ground.reader import MemoryConfig

CPU = torch.device("cpu")


class Position(dict[str, int]):
    """A place in data that nobody reads."""

    def state_dict(self) -> dict[str, int]:
        return dict(self)

    load_state_dict = dict.update


class Net(nn.Module):
    """A student that is trained and a teacher that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.student, self.teacher = nn.Linear(4, 3), nn.Linear(4, 3)
        self.teacher.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.student(self.norm(x))  # type: ignore[no-any-return]


class Bench:
    """A run of a few weights and the ring around it."""

    def __init__(self, *, keep: int = 4, max_gib: float | None = None, agree: Any = float, scaler: Any = None) -> None:
        torch.manual_seed(0)
        self.net, self.scaler = Net(), scaler
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1, fused=True)
        self.clock = Clock()
        self.state = RunState(self.net, [self.optimizer], [], Position(), self.clock, device=CPU, scaler=scaler)
        self.ring = Ring(self.state, MemoryConfig(every=1, keep=keep, max_gib=max_gib), agree)

    def train(self) -> None:
        self.net(torch.randn(5, 4)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.clock.step += 1

    def kept(self, *, verified: bool = True) -> str:
        """Take a snapshot of now, and return the digest of now."""
        self.ring.take(self.clock.step, verified=verified)
        return state_sha256(self.state)

    def gone(self, updates: int) -> Bench:
        """Train so long, with a snapshot of each update."""
        for _ in range(updates):
            self.train()
            self.kept()
        return self


def drawn() -> list[float]:
    return [random.random(), float(np.random.random()), float(torch.rand(()))]


def test_a_restored_state_is_the_same_in_the_same_memory() -> None:
    """Weights, buffers, moments and random numbers; as compiled graphs hold addresses, these stay. Restored to its
    first step an optimizer has no state.
    """
    bench = Bench().gone(2)
    bench.ring.take(2)
    tensors = [*bench.net.parameters(), *bench.net.buffers(), *taken_apart(bench.optimizer.state_dict()["state"])[1]]
    digest, random_numbers, addresses = state_sha256(bench.state), drawn(), [one.data_ptr() for one in tensors]
    bench.gone(1)
    bench.ring.restore(bench.ring.snapshots[1])
    assert state_sha256(bench.state) == digest
    assert drawn() == random_numbers
    assert [one.data_ptr() for one in tensors] == addresses
    assert bench.optimizer.state
    first = Bench()
    first.kept()
    first.gone(1).ring.restore(first.ring.snapshots[0])
    assert not first.optimizer.state


MOVES: dict[str, Callable[[Net], object]] = {
    "in place": lambda net: net.teacher.weight.lerp_(net.student.weight, 0.5),
    "without a trace": lambda net: net.teacher.weight.data.mul_(0.5).add_(net.student.weight.data, alpha=0.5),
    "turned": lambda net: net.teacher.weight.copy_(net.teacher.weight.flip(0)),
    "replaced": lambda net: setattr(net.teacher, "weight", nn.Parameter(net.teacher.weight * 0.5, requires_grad=False)),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_frozen_weight_that_the_loop_changes_rewinds(name: str) -> None:
    """A teacher is frozen and yet follows its student: every snapshot holds the one of its own step."""
    bench = Bench(keep=6)
    digests = []
    for _ in range(6):
        bench.train()
        with torch.no_grad():
            MOVES[name](bench.net)
        digests.append(bench.kept())
    for held, digest in zip(reversed(bench.ring.snapshots), reversed(digests), strict=True):
        bench.ring.restore(held)
        assert state_sha256(bench.state) == digest


def test_a_weight_that_is_unfrozen_or_frozen_leaves_older_snapshots_alone() -> None:
    """A shared copy never becomes room for another snapshot: each keeps what was there at its step."""
    bench = Bench(keep=3)
    digests: dict[int, str] = {}
    for step in range(1, 30):
        if step % 7 == 0:
            bench.net.teacher.requires_grad_(not bench.net.teacher.weight.requires_grad)
        if bench.net.teacher.weight.requires_grad:
            with torch.no_grad():
                bench.net.teacher.weight.add_(1.0)
        bench.train()
        digests[step] = bench.kept()
        for held in bench.ring.snapshots:
            assert sha256(held.parts) == digests[held.step]


def test_a_frozen_weight_that_stays_is_copied_once() -> None:
    """All snapshots share that copy, until a rewind writes to the weight."""
    bench = Bench().gone(3)
    assert len({id(held.parts["weights"]["teacher.weight"]) for held in bench.ring.snapshots}) == 1
    assert len({id(held.parts["weights"]["student.weight"]) for held in bench.ring.snapshots}) == 3
    frozen = [name for name in bench.ring.snapshots[0].parts["weights"] if name.startswith("teacher")]
    assert frozen == ["teacher.weight", "teacher.bias"], "each rank gathers shards in this order"


def test_ranks_agree_on_how_many_snapshots_fit() -> None:
    """The least that any rank allows and the most that any needs decide; each look asks as often on every rank."""
    size = nbytes(Bench().state.live())
    asked: list[float] = []

    def least(number: float) -> float:
        asked.append(number)
        return min(number, -size * 1.5 if number < 0 else size * 5.0)

    bench = Bench(keep=8, max_gib=1.0, agree=least)
    bench.kept()
    assert bench.ring.slots == 3
    assert [number > 0 for number in asked] == [True, False]
    bench.ring.verified_until(0)
    bench.ring.restore(bench.ring.snapshots[0])
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("steps", "verified", "now", "expected"),
    [
        ([0, 25, 50], [True, True, True], 75, 0),  # three steps of the same size: the oldest
        ([0, 25, 50], [True, True, False], 75, 0),  # never a candidate, nor the newest proven one
        ([50], [True], 75, None),
        ([25, 50], [True, False], 75, None),
        ([0, 300, 350, 375], [True, True, True, True], 400, 2),  # its neighbours are closest in age
        ([0, 75, 150, 175], [True] * 4, 225, 0),  # with four an early one does not stay
    ],
)
def test_which_snapshot_makes_room(steps: list[int], verified: list[bool], now: int, expected: int | None) -> None:
    """Candidates and the newest proven one stay; ages spread out."""
    assert snapshot_to_drop(verified, steps, now) == expected


@pytest.mark.parametrize(
    ("before", "to", "after", "best"), [(5, 1, 5, 5), (3, 1, 1, 3), (5, 2, 3, 5), (5, 2, 2, 5), (5, 2, 1, 1)]
)
def test_the_best_trusted_state_is_kept_for_the_end(before: int, to: int, after: int, best: int) -> None:
    """Trouble since `before` led to a rewind, so what came later is not trusted. Then trouble since `after` came.

    It is of the new course, if that is not before the step at which the two parted; else of both.
    """
    bench = Bench(keep=8).gone(5)
    bench.ring.distrust(before)
    bench.ring.restore(bench.ring.snapshots[to - 1])
    bench.gone(1).ring.distrust(after)
    held: Any = bench.ring.last_good(after)
    assert held.step == best


def test_no_slots_means_no_snapshots() -> None:
    """The state of the start fits, until the moments come: once it is said that the run cannot rewind, it is so."""
    small = nbytes(Bench().state.live())
    bench = Bench(max_gib=(2 * small + 64) / 2**30)
    bench.kept()
    assert len(bench.ring.snapshots) == 1
    bench.train()
    bench.ring.settle_slots(nbytes(bench.state.live()))
    assert bench.ring.slots == 0
    assert bench.ring.verified_until(10) == []
    assert bench.ring.last_good(10) is None


class Shifty(nn.Module):
    """A module whose buffers come, go, grow and are replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Module()
        self.late = nn.BatchNorm1d(4)
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.register_buffer("empty", None)
        self.cache: torch.Tensor
        self.empty: torch.Tensor | None


CHANGES: dict[str, Callable[[Shifty], object]] = {
    "born": lambda net: net.early.register_buffer("new", torch.full((4,), 5.0)),
    "filled": lambda net: setattr(net, "empty", torch.ones(3)),
    "grown": lambda net: net.register_buffer("cache", torch.ones(2 * len(net.cache)), persistent=False),
    "grown in place": lambda net: net.cache.resize_(2 * len(net.cache)).fill_(1.0),
    "of another type": lambda net: setattr(net, "cache", net.cache.double()),
    "deleted": lambda net: delattr(net, "cache"),
    "written": lambda net: net.late(torch.randn(8, 4)),
}


def buffers(net: nn.Module) -> dict[str, Any]:
    return {
        f"{path}.{name}": None if one is None else one.clone()
        for path, module in net.named_modules()
        for name, one in module._buffers.items()
    }


def assert_as(before: dict[str, Any], net: nn.Module) -> None:
    now = buffers(net)
    assert now.keys() == before.keys()
    assert sha256(now) == sha256(before)


@pytest.mark.parametrize("name", CHANGES)
def test_a_backup_knows_buffers_by_name(name: str) -> None:
    """Whatever an update that is refused, or a healthy one before it, did to names, shapes and contents."""
    net = Shifty()
    marks = Marks(net)
    for _ in range(2):
        before, kept = buffers(net), marks.take()
        CHANGES[name](net)
        net.late(torch.randn(8, 4))
        after, with_it = buffers(net), marks.take()
        marks.undo(kept)
        assert_as(before, net)
        marks.undo(with_it)  # as the scan does, which looks at the state without a forward and goes on
        assert_as(after, net)
        if name == "deleted":
            net.register_buffer("cache", torch.ones(2), persistent=False)


@pytest.mark.parametrize("name", sorted(CHANGES.keys() - {"born", "deleted"}))
def test_a_snapshot_knows_buffers_by_name(name: str) -> None:
    """A rewind restores the buffers that there were, in their shape of then; it keeps others."""
    net = Shifty()
    state = RunState(net, [], [], Position(), Clock(), device=CPU)
    before, snapshot = buffers(net), deepcopy(state.live())
    CHANGES[name](net)
    state.restore(snapshot)
    assert_as(before, net)
    CHANGES[name](net)
    net.late(torch.randn(8, 4))
    after, snapshot = buffers(net), deepcopy(state.live())
    other = RunState(fresh := Shifty(), [], [], Position(), Clock(), device=CPU)
    other.restore(snapshot)
    assert_as(after, fresh)


@pytest.mark.parametrize("make", [list, deque, lambda some: UserDict(x=tuple(some)), lambda some: {"x": [deque(some)]}])
def test_the_tensors_of_a_batch_are_found_in_every_container_of_pytree(make: Callable[[Any], Any]) -> None:
    """And in mappings that it does not know: writes to their values are noticed."""
    one, other = torch.ones(2), torch.zeros(3)
    batch = make([one, other])
    assert [id(leaf) for leaf in leaves(batch)] == [id(one), id(other)]
    before = versions(batch)
    other[1] = torch.nan
    assert versions(batch) != before
