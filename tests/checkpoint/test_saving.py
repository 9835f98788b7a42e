"""What keeps a state from being saved: a slow disk, an error of the writer, a state that cannot be written."""

from __future__ import annotations

import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from guarded import mse, often, sums
from kills import Nursery, checkpoints, in_journal, incidents, left_overs, summary
from torch import Tensor, nn

from resilient_train.durable.manifest import WEIGHTS, Entry
from resilient_train.durable.store import Store
from resilient_train.ground.errors import ConfigError
from resilient_train.ground.reader import DiskConfig
from resilient_train.loop.guard import Guard

DIGITS = ["model=mlp", "data=digits", "objective=custom", "tracking=none", "run.log_every=100", "schedule=constant"]

_updates: list[int] = []  # that were begun in this process


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    if model.training:
        _updates.append(1)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


# ------------------------------------------------------------------------------------------------------- a slow disk

SLOW_S = 1.0  # of an fsync: a checkpoint takes half a dozen, an incident three
SLOW = [*DIGITS, "checkpoint.memory.every=5", "checkpoint.verify_after=5", "checkpoint.disk.every=20"]
SLOW += ["run.step_timeout=2.5", "run.steps=90", "checks.weights.every=1"]


_sync: Any = os.fsync


def slow(fd: Any) -> None:
    """A disk on which each sync takes long."""
    time.sleep(SLOW_S)
    _sync(fd)


def fails(fd: Any) -> None:
    """What meets an error that is none of the disk's."""
    if threading.current_thread().name == "checkpoint-writer":
        raise MemoryError("no memory for that")
    _sync(fd)


def fails_while_written(model: nn.Module, batch: Any) -> Tensor:
    """It raises as soon as a checkpoint is being written."""
    os.fsync = slow if len(_updates) > 5 else _sync
    if any(thread.name == "checkpoint-writer" for thread in threading.enumerate()):
        raise LookupError("a mistake of the user's")
    return loss_of(model, batch)


def test_a_run_that_ends_waits_for_what_is_being_written(nursery: Nursery) -> None:
    """However it ends: a slow disk is no hang, nor is an incident on it, which takes longer than an update may."""
    run_dir, fault = nursery.place / "ended", ["drill=nan_batch", "drill.at=[12]"]
    done = nursery.run(*SLOW, *fault, "objective._target_=test_saving.fails_while_written", "run.dir=ended")
    assert done.code == 1
    assert [one["incident"]["diagnosis"]["cause"] for one in in_journal(run_dir, "incident_opened")][:1] == ["data"]
    assert "a mistake of the user's" in done.output
    assert "the process ends; all stacks are in" not in done.output
    assert list(checkpoints(run_dir).values()) == [True]
    assert left_overs(run_dir) == []


# ----------------------------------------------------------------------------------------------- errors of the writer


def without_memory_for_a_while(model: nn.Module, batch: Any) -> Tensor:
    time.sleep(0.005)
    os.fsync = fails if len(_updates) < 60 else _sync
    return loss_of(model, batch)


def test_an_error_of_the_writer_is_an_incident_and_tried_again(nursery: Nursery) -> None:
    """A kill afterwards costs what it costs any run."""
    run_dir = nursery.place / "again"
    done = nursery.run(
        *SLOW, "objective._target_=test_saving.without_memory_for_a_while", "run.dir=again", "run.steps=160"
    )
    assert done.code == 0, done.output
    (found,) = incidents(run_dir)
    assert (found["signal"], found["cause"], found["outcome"]) == ("checkpoint_failed", "process", "recovered")
    assert "MemoryError: no memory for that" in found["evidence"]
    assert ": recovered" in done.output
    assert 40 <= in_journal(run_dir, "checkpoint_saved")[0]["step"] < 160
    assert "in fails" in (run_dir / "train.log").read_text(), "the traceback"
    assert "Traceback" not in done.output


class Steady:
    """A part of the loop's state that can be saved, but for a while."""

    def __init__(self, odd: range) -> None:
        self.odd, self.calls = odd, 0

    def state_dict(self) -> dict[str, Any]:
        return {"words": {"a", "b"} if self.calls in self.odd else 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Remembering(torch.optim.SGD):
    """An optimizer that keeps a set in its state, from its first step on."""

    def step(self, closure: Any = None) -> Any:
        self.state[self.param_groups[0]["params"][0]]["seen"] = {1, 2}
        return super().step(closure)


def guarded(run_dir: Path, optimizer: Any = torch.optim.SGD, disk: int = 5, stop_at: int = 1000) -> Guard:
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(0)
    accelerator, model = Accelerator(cpu=True), nn.Linear(5, 1)
    guard = Guard(
        *(accelerator, accelerator.prepare(model), optimizer(model.parameters(), lr=0.01)),
        data=sums(64, 5),
        batch_size=8,
        objective=mse,
        run_dir=run_dir,
        memory=often(1),
        verify_after=1,
        disk=DiskConfig(every=disk),
        stop=lambda: guard.clock.step >= stop_at,
    )
    return guard


def loop(run_dir: Path, item: Any = None, *more: Any) -> Any:
    """The outcomes of its incidents, or what it was refused for; and the step it came to."""
    guard = guarded(run_dir, *more)
    if item is not None:
        guard.keep(item=item)
    try:
        for batch in guard.batches(60):
            guard.step(batch)
            if item is not None:
                item.calls += 1
    except ConfigError as error:
        return str(error), guard.clock.step
    guard.leave()
    guard.close()
    return [(str(one.anomaly.signal), str(one.outcome)) for one in guard.incidents], guard.clock.step


NEVER = "checkpoint.disk.every: the state of the run cannot be saved: TypeError: "


@pytest.mark.parametrize(
    ("given", "told", "steps", "ending"),
    [
        # What can never be saved ends the run at its start, by its name; an optimizer's state is there after a step.
        ((Steady(range(1000)),), f"{NEVER}['kept.item']['words'] is a builtins.set", 0, {}),
        ((None, Remembering), f"{NEVER}['optimizer.0']['moments'][0]['seen'] is a builtins.set", 1, {}),
        # Where nothing is to be saved on the way it is no mistake.
        ((Steady(range(1000)), torch.optim.SGD, 0), [], 60, {}),
        # The run is complete, and all is not well: there is no state to go on from.
        ((Steady(range(3, 1000)),), [("checkpoint_failed", "unrecovered")], 60, {"verdict": "unrecovered"}),
        # A loop that is stopped and leaves no state has failed: 75 would say that it goes on from there.
        ((Steady(range(3, 1000)), torch.optim.SGD, 1000, 20), None, 20, {"status": "failed", "exit_code": 1}),
    ],
    ids=["kept", "optimizer", "no checkpoints", "to the end", "stopped"],
)
def test_a_state_that_cannot_be_saved(
    given: Any, told: Any, steps: int, ending: dict[str, Any], tmp_path: Path
) -> None:
    """What is said of it, how far the loop comes, and what the summary says."""
    said, step = loop(tmp_path / "run", *given)
    assert step == steps
    assert told is None or (said.startswith(told) if isinstance(told, str) else said == told)
    assert not ending or ending.items() <= summary(tmp_path / "run").items()


def rewound_to_disk(run_dir: Path) -> Any:
    """The weights become NaN when there is no snapshot in memory, and only the oldest checkpoint is not damaged."""
    guard = guarded(run_dir)
    for batch in guard.batches(60):
        guard.step(batch)
        guard._keeper.wait()  # so that there are several checkpoints by then
        if guard.clock.tick == 41:
            guard.settle()  # scans have seen steps 20 and 40
            guard._keeper.wait()
            for path in sorted(run_dir.glob("checkpoints/step-*"))[1:]:
                os.truncate(path / WEIGHTS, 1)
            guard._ring.clear()
            with torch.no_grad():
                next(guard.state.model.parameters()).fill_(math.nan)
    guard.close()
    return [(str(one.anomaly.signal), one.rewound_to, one.anomaly.evidence[0]["fact"]) for one in guard.incidents]


def test_a_rewind_to_disk_reports_a_damaged_checkpoint(tmp_path: Path) -> None:
    """It falls back to the one before, as a resume does, and the damage is an incident."""
    (_, rewound_to, _), *damaged = rewound_to_disk(tmp_path / "run")
    assert damaged
    assert {*damaged} == {("checkpoint_damaged", rewound_to, "damaged")}


class Sluggish(Store):
    """Commits a checkpoint only when it may."""

    may = threading.Event()

    def write(self, *given: Any, **more: Any) -> Entry:
        self.may.wait()
        return super().write(*given, **more)


def writing(run_dir: Path) -> Guard:
    """One that is at its first checkpoint."""
    guard = guarded(run_dir, disk=5)
    Sluggish.may.clear()
    guard._keeper._store.__class__ = Sluggish
    for batch in guard.batches(60):
        guard.step(batch)
        if guard._keeper._writer.writing:
            break
    return guard


@pytest.mark.parametrize(("since", "is_trusted"), [(4, False), (60, True)])
def test_what_is_being_written_and_not_to_be_trusted_is_waited_for(
    since: int, is_trusted: bool, tmp_path: Path
) -> None:
    """And only that: it has to be marked before a diagnosis, in which the process may end."""
    guard = writing(tmp_path / "run")
    doubt = threading.Thread(target=guard._keeper.distrust, args=(since,))
    doubt.start()
    doubt.join(0.2 if not is_trusted else 60)
    assert doubt.is_alive() is not is_trusted
    Sluggish.may.set()
    doubt.join(60)
    guard._keeper.wait()
    kinds = [one.kind for one in Store(tmp_path / "run").entries()]
    assert kinds == ["verified" if is_trusted else "demoted"]
    guard.let_go()
