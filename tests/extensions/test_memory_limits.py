"""Out of memory: the same samples in smaller micro-batches, at once in one process; several end."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from group import alone, together
from guarded import often, sums, trained
from torch import Tensor, nn

from resilient_train.data.trees import weights_sha256
from resilient_train.extensions.out_of_memory import SmallerBatches
from resilient_train.ground.errors import TrainError
from resilient_train.ground.reader import DiskConfig
from resilient_train.ground.types import Incident
from resilient_train.loop.arguments import policy as named
from resilient_train.loop.guard import Guard

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

STEPS = 20


class Tight:
    """An objective that finds room for so many rows at a time, from one of its calls on."""

    def __init__(self, room: int, since: int = 0) -> None:
        self.room, self.calls, self.since = room, 0, since
        self.fed: list[int] = []

    def __call__(self, model: Any, batch: list[Tensor]) -> Tensor:
        self.calls += 1
        if self.calls > self.since and len(batch[0]) > self.room:
            raise torch.OutOfMemoryError(f"tried to allocate room for {len(batch[0])} rows")
        self.fed.append(len(batch[0]))
        return nn.functional.mse_loss(model(batch[0]), batch[1])


def guarded(objective: Any, batch_size: int = 32, accumulation: int = 1, **more: Any) -> Guard:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return Guard(
        *(accelerator, accelerator.prepare(model), optimizer),
        data=sums(256),
        batch_size=batch_size,
        objective=objective,
        memory=often(2),
        verify_after=3,
        steps=STEPS,
        **more,
    )


def told(incidents: list[Incident]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(str(one.anomaly.signal), one.decision.actions[0].remedy, one.anomaly.ranks) for one in incidents]


@pytest.mark.parametrize("since", [0, 7])
def test_the_update_is_made_again_in_smaller_micro_batches(since: int) -> None:
    """As often as it takes; nothing is lost, and from the start on it is the very run that is configured so."""
    tight = Tight(room=8, since=since)
    guard = trained(guarded(tight))
    assert told(guard.incidents) == [("out_of_memory", "smaller_batch", ())] * 2
    assert (guard.clock.step, guard.clock.tick) == (STEPS, STEPS)
    assert (guard.samples.slicing.batch_size, guard.samples.slicing.accumulation) == (8, 4)
    assert set(tight.fed[since:]) == {8}
    weights = weights_sha256(guard.state)
    AcceleratorState._reset_state(reset_partial_state=True)
    asked_for = trained(guarded(Tight(room=8), batch_size=8, accumulation=4))
    assert (weights_sha256(asked_for.state) == weights) is (since == 0)  # else the first updates are cut otherwise
    for mine, theirs in zip(guard.model.parameters(), asked_for.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_shortage_in_the_midst_of_an_accumulation_begins_the_update_anew() -> None:
    """The gradients of the micro-batches before it do not count twice."""
    guard = trained(guarded(Tight(room=8, since=9), batch_size=16, accumulation=2))  # the second half of update 5
    assert told(guard.incidents) == [("out_of_memory", "smaller_batch", ())]
    AcceleratorState._reset_state(reset_partial_state=True)
    whole = trained(guarded(Tight(room=32)))
    for mine, theirs in zip(guard.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("batch_size", "room", "policy"), [(5, 2, "balanced"), (32, 1, "balanced"), (32, 8, "conservative")]
)
def test_where_halving_ends_the_run_ends(batch_size: int, room: int, policy: str) -> None:
    """Of an odd number of rows, after as many times as the policy allows, or at once where it allows none."""
    guard = guarded(Tight(room), batch_size=batch_size, recovery=policy)
    with pytest.raises(TrainError, match=r"out of memory in update 1: .*use a smaller batch_size"):
        trained(guard)
    assert len(guard.incidents) == (named(policy).halvings if batch_size == 32 else 0)


def test_what_the_forward_held_is_free_before_the_cache_is_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    held, found = list[weakref.ref[Tensor]](), list[bool]()

    def objective(model: Any, batch: list[Tensor]) -> Tensor:
        hidden = model(batch[0])
        if len(batch[0]) > 16:
            held.append(weakref.ref(hidden))
            raise torch.OutOfMemoryError("tried to allocate")
        return nn.functional.mse_loss(hidden, batch[1])

    guard = guarded(objective)
    monkeypatch.setattr(SmallerBatches, "note_smaller", lambda *_: found.append(bool(held) and held[0]() is None))
    trained(guard, 2)
    assert found == [True]


def part(run_dir: Path, steps: int) -> Any:
    """A process that makes so many steps of a run: how many incidents there are, and how many rows it was fed."""
    tight = Tight(room=8)
    guard = trained(guarded(tight, run_dir=run_dir, disk=DiskConfig(every=4), resume=True), steps)
    guard.leave()
    guard.close()
    return len(guard.incidents), tight.calls, tight.fed


def test_what_memory_had_room_for_is_remembered(tmp_path: Path) -> None:
    """A run that goes on does not find it out again."""
    assert alone(part, tmp_path, 10) == (0, (2, 2 + 40, [8] * 40))
    assert alone(part, tmp_path, STEPS) == (0, (2, 40, [8] * 40))


def two(run_dir: Path, room: int) -> Any:
    """A rank of a run on which the other one has less room."""
    tight = Tight(room if os.environ["RANK"] == "1" else 32)
    guard = guarded(tight, batch_size=16, run_dir=run_dir, disk=DiskConfig(every=4), resume=True)
    try:
        trained(guard)
    except TrainError as error:
        return str(error)
    return None


def test_a_rank_without_room_ends_the_group(tmp_path: Path) -> None:
    """The others cannot be fetched from their collective."""
    (_, first), (code, said) = together(2, two, tmp_path, 8)
    assert first is None, "it was waiting for the other, and is ended by it"
    assert code == 0
    assert "out of memory in update 1" in said
    assert "use a smaller batch_size" in said
