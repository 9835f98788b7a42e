"""A loop of somebody's own on Accelerate that is killed, stopped or brought down by a row, and is simply run again."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from group import agreed, alone, together
from guarded import mse, often
from guarded import trained as train
from kills import die_with_checkpoint, incidents, summary
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from resilient_train.data.trees import weights_sha256
from resilient_train.extensions.drills import Drill, NanGrad
from resilient_train.ground.reader import DiskConfig
from resilient_train.loop.guard import Guard
from resilient_train.report.story import open_advice, read_story

STEPS, ROWS, BATCH = 60, 64, 8
KILLER = 39  # whose company of the first epoch is nowhere near it in the second
NEVER = 10**9
SAVED: dict[str, Any] = {"steps": STEPS, "objective": mse, "resume": True}
SAVED |= {"memory": often(2), "verify_after": 3, "disk": DiskConfig(every=6)}


class Rows(Dataset[Any]):
    def __init__(self, killer: int | None = None) -> None:
        self.inputs = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(1))
        self.killer = killer

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        if row == self.killer:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.inputs[row], self.inputs[row].sum().reshape(1)


def loop(run_dir: Path, killed_at: int = NEVER, killer: int | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    more: dict[str, Any] = {"batch_size": BATCH, "run_dir": run_dir, **SAVED}
    guard = Guard(Accelerator(cpu=True), model, optimizer, data=Rows(killer), **more)
    began = None
    for batch in guard.batches():
        began = guard.clock.step if began is None else began
        guard.step(batch)
        if guard.clock.tick == killed_at:
            die_with_checkpoint(run_dir)
    guard.leave()
    guard.close()
    told = [(str(one.anomaly.signal), one.decision.actions[0].remedy, one.diagnosis.rows) for one in guard.incidents]
    return {"began": began, "step": guard.clock.step, "told": told, "weights": weights_sha256(guard.state)}


def manifests(run_dir: Path) -> dict[str, str]:
    return {one.parent.name: one.read_text() for one in run_dir.glob("checkpoints/*/manifest.json")}


def test_a_loop_that_is_killed_is_run_again_and_ends_the_same(tmp_path: Path) -> None:
    """From its newest checkpoint: to the last bit what it would have become."""
    _, unharmed = alone(loop, tmp_path / "unharmed")
    assert unharmed["told"] == []
    for killed_at in (31, 44):
        code, nothing = alone(loop, tmp_path / "mine", killed_at)
        assert (code, nothing) == (-signal.SIGKILL, None)
    code, told = alone(loop, tmp_path / "mine")
    assert code == 0
    assert told["began"] > 0
    assert [what[:2] for what in told["told"]] == [("crash", "go_on")] * 2
    assert (told["step"], told["weights"]) == (STEPS, unharmed["weights"])
    lost = sum(one["steps_lost"] for one in incidents(tmp_path / "mine"))
    assert 0 < lost <= summary(tmp_path / "mine")["ticks"] - STEPS, "but for what had no verdict yet"
    saved = manifests(tmp_path / "mine")
    code, again = alone(loop, tmp_path / "mine")
    assert (code, again["began"], again["weights"]) == (0, None, unharmed["weights"]), "it is complete"
    assert manifests(tmp_path / "mine") == saved, "no checkpoint is written again, and none makes room for it"


def test_samples_that_end_the_process_twice_are_skipped(tmp_path: Path) -> None:
    """In the next epoch the row is among others, at which it takes two ends again."""
    for _ in range(4):
        code, _ = alone(loop, tmp_path / "mine", NEVER, KILLER)
        assert code == -signal.SIGKILL
    met = read_story(tmp_path / "mine").incidents
    assert [one.decision.actions[0].remedy for one in met] == ["go_on", "skip", "go_on"]
    rows = met[1].diagnosis.rows
    assert KILLER in rows
    assert len(rows) == BATCH
    assert met[0].anomaly.step == met[1].anomaly.step < met[2].anomaly.step


# ---------------------------------------------------------------------------------------------------------- two ranks

TWICE = {"ladders": {"default": [["skip"], ["rewind", "skip"]]}, "strikes": 1}  # the second incident costs more


def ranks(run_dir: Path, killed_at: int) -> list[Any]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(5, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    prepared, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    with pytest.raises(ValueError, match="not prepared for 2 processes"):
        Guard(accelerator, model, optimizer, data=Rows(), batch_size=4)
    more: dict[str, Any] = {"run_dir": run_dir, "recovery": TWICE, "drill": Drill([NanGrad(at=[12, 34])]), **SAVED}
    guard = Guard(accelerator, prepared, optimizer, data=Rows(), batch_size=4, schedule=schedule, **more)
    for batch in guard.batches():
        guard.step(batch)
        if guard.clock.tick == killed_at:
            guard.world.all_of(None)  # neither is gone before the other is here
            die_with_checkpoint(run_dir)
    told = [[action.remedy for action in one.decision.actions] for one in guard.incidents]
    guard.close()
    guard.world.leave()
    return [told, weights_sha256(guard.state), guard.clock.step, optimizer.param_groups[0]["lr"]]


def test_strikes_count_on_every_rank_of_a_run_that_goes_on(tmp_path: Path) -> None:
    """Rank 0 alone has read what was done before; all of them decide by it, alike."""
    assert [code for code, _ in together(2, ranks, tmp_path / "mine", 25)] == [-signal.SIGKILL] * 2
    told, _, _, rate = agreed(2, ranks, tmp_path / "mine", NEVER)
    assert told == [["skip"], ["go_on"], ["rewind", "skip"]]
    assert rate == pytest.approx(1e-2 * 0.99 ** (2 * (STEPS - 1))), "Accelerate's schedules go a step per process"


def test_a_patched_line_that_was_changed_since_is_said_once_and_asks_for_nothing_more(
    tmp_path: Path, info: pytest.LogCaptureFixture
) -> None:
    """As soon as its source is fixed; the incident stays."""
    source, run_dir = tmp_path / "ratio.py", tmp_path / "run"
    source.write_text(
        "def loss(model, batch):\n    error = model(batch[0]).square()[:, 0]\n    return (error / batch[1]).mean()\n"
    )
    scales = torch.ones(ROWS)
    scales[KILLER] = 0.0

    def trained(steps: int) -> list[str]:
        info.clear()
        space: dict[str, Any] = {}
        exec(compile(source.read_text(), str(source), "exec", dont_inherit=True), space)
        torch.manual_seed(0)
        model = nn.Linear(5, 1)
        how: dict[str, Any] = {"batch_size": BATCH, "run_dir": run_dir, "disk": 10, "resume": True, "steps": steps}
        data, optimizer = TensorDataset(Rows().inputs, scales), torch.optim.AdamW(model.parameters())
        train(Guard(None, model, optimizer, data=data, objective=space["loss"], **how)).close()
        return [one.getMessage() for one in info.records if "was changed since" in one.getMessage()]

    assert trained(30) == []
    ((facts, _),) = open_advice(read_story(run_dir).incidents)
    assert facts[0]["where"]["line"] == 3
    source.write_text(source.read_text().replace("error / batch[1]", "error / batch[1].clamp(0.5)"))
    assert trained(40) == [f"{source}:3 was changed since: its patch is removed"]
    assert trained(50) == []
    story = read_story(run_dir)
    assert (len(story.incidents), story.remedies["armor"]) == (1, [])
