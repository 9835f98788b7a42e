"""On a GPU: what the gate refuses, a rewind restores and a resume continues is the same to the last bit, as on a CPU.

scripts/test -m gpu
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from command import command
from guarded import ROWS, SKIP, Net, Poison, rows
from torch.nn import functional as F

from resilient_train import Guard
from resilient_train.core.tree import original_device, taken_apart
from resilient_train.data.trees import sha256
from resilient_train.ground.reader import MemoryConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fresh_accelerate"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

STEPS = 120
SMALL = ["data=digits", "objective=classification", "tracking=none", f"run.steps={STEPS}", "run.deterministic=true"]
SMALL += ["checkpoint.memory.every=10", "checkpoint.verify_after=10"]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.01, fused=True),
    "foreach AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.01, foreach=True),
    "capturable Adam": lambda weights: torch.optim.Adam(weights, lr=0.01, capturable=True),
    "fused SGD": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, fused=True),
    "RMSprop": lambda weights: torch.optim.RMSprop(weights, lr=0.01),
}


def summary(run_command: command, directory: Path, *options: str) -> dict[str, Any]:
    outcome = run_command([*SMALL, f"run.dir={directory}", *options])
    assert outcome.code == 0, outcome.stderr
    assert f"1 process on {torch.cuda.get_device_name()}" in outcome.stderr + outcome.stdout
    return outcome.summary(directory)


@pytest.fixture(scope="module")
def clean() -> dict[str, dict[str, Any]]:
    """Summaries of runs without a fault, by model."""
    return {}


@pytest.mark.parametrize("drill", ["bit_flip", "nan_grad", "nan_batch", "inf_loss", "bad_moments", "loss_spike"])
@pytest.mark.parametrize("model", ["mlp", "resnet"])
def test_a_drill_is_recovered_from(
    drill: str, model: str, clean: dict[str, dict[str, Any]], run_command: command, tmp_path: Path
) -> None:
    """With the incident, its place, and the loss of the run without it; a flipped bit leaves no trace at all."""
    if model not in clean:
        clean[model] = summary(run_command, tmp_path / "clean", f"model={model}")
    ended = summary(run_command, tmp_path / "run", f"model={model}", f"drill={drill}")
    assert ended["verdict"] == "recovered"
    assert ended["final_loss"] == pytest.approx(clean[model]["final_loss"], rel=0.2, abs=0.05)
    if drill in ("bit_flip", "bad_moments"):
        assert ended["weights_sha256"] == clean[model]["weights_sha256"]


def test_a_resumed_run_ends_as_one_that_was_not_stopped(run_command: command, tmp_path: Path) -> None:
    """To the last bit, from a checkpoint in the middle."""
    own = ["model=resnet", f"schedule.steps={STEPS}"]
    whole = summary(run_command, tmp_path / "whole", *own)
    summary(run_command, tmp_path / "run", *own, "run.steps=60")
    resumed = summary(run_command, tmp_path / "run", *own)
    assert (resumed["steps"], resumed["weights_sha256"]) == (STEPS, whole["weights_sha256"])


class Loop:
    """A guarded loop over a model with BatchNorm and dropout, on the GPU."""

    def __init__(self, how: str, kind: str, *, strikes: int = 0, precision: str = "no", **more: Any) -> None:
        torch.manual_seed(0)
        accelerator = Accelerator(mixed_precision=precision)
        self.poison, self.strikes, self.calls = Poison(how), strikes, 0
        self.model, optimizer = accelerator.prepare(net := Net(), OPTIMIZERS[kind](net.parameters()))
        options = {"data": rows(), "batch_size": 8, "recovery": SKIP, "clip": 1.0, "seed": 3, **more}
        self.guard = Guard(accelerator, self.model, optimizer, objective=self.loss, **options)

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        self.calls += 1
        self.poison.strikes = self.calls == self.strikes
        return self.poison(model, batch)

    def run(self, updates: int) -> Loop:
        for batch in self.guard.batches(updates):
            self.guard.step(batch)
        return self

    def digest(self) -> str:
        return sha256([{name: one.cpu() for name, one in self.model.state_dict().items()}])


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("how", ["batch", "loss", "gradient"])
def test_a_refused_update_leaves_nothing_behind(kind: str, how: str) -> None:
    """Weights, moments and running statistics are those of the run that never saw its samples."""
    struck = Loop(how, kind, strikes=6).run(12)
    assert [len(struck.guard.incidents), struck.guard.clock.tick] == [1, 13]
    spared = Loop(how, kind)
    start = 5 * 8
    spared.guard.samples.skip(start, start + 8)
    assert struck.digest() == spared.run(12).digest()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_healthy_run_is_what_it_is_without_a_guard(kind: str) -> None:
    """The same batches and random numbers, step by step, through the same optimizer."""
    guarded = Loop("nothing", kind, clip=None)
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = OPTIMIZERS[kind](model.parameters())
    for batch in guarded.guard.batches(20):
        state = torch.cuda.get_rng_state()
        guarded.guard.step(batch)
        torch.cuda.set_rng_state(state)
        F.cross_entropy(model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    assert guarded.digest() == sha256([{name: one.cpu() for name, one in model.state_dict().items()}])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_snapshot_in_pinned_memory_is_the_state(kind: str) -> None:
    """Also where copying goes on during the next forward: what is restored later is what was there."""
    loop = Loop("nothing", kind, memory=MemoryConfig(every=4, keep=4, max_gib=None)).run(48)
    ring = loop.guard._ring
    taken = ring.take(1_000, verified=True)
    before = loop.digest()
    loop.run(3)
    assert taken is not None
    assert loop.digest() != before
    ring.restore(taken)
    assert loop.digest() == before
    copies = [one for one in taken_apart(taken.parts)[1] if original_device(one).type == "cuda" and one.nbytes]
    assert all(one.is_pinned() for one in copies)


def test_overflows_of_half_precision_are_no_incidents() -> None:
    """The scaler lowers its scale, and the guard lets it; a NaN that no scale mends is an incident."""
    healthy = Loop("nothing", "fused AdamW", precision="fp16").run(60)
    assert not healthy.guard.incidents
    bad = rows()
    bad[7] = torch.full((6,), torch.nan), 0
    struck = Loop("nothing", "fused AdamW", precision="fp16", data=bad).run(ROWS // 8 - 1)  # and one that is skipped
    assert [one.diagnosis.rows for one in struck.guard.incidents] == [(7,)]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_step_waits_for_the_device() -> None:
    """CUDA's own check raises at any operation that makes the host wait."""
    loop = Loop("nothing", "fused AdamW").run(40)
    updates = loop.guard.batches(ROWS)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(100):
            loop.guard.step(next(updates))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    updates.close()  # type: ignore[attr-defined]


LOST = """
import sys, torch
from accelerate import Accelerator
from torch import nn
from resilient_train import Guard

tokens = torch.arange(512) % 10
labels = tokens % 2
tokens[17] = 999
model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 2))
accelerator = Accelerator()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
data = torch.utils.data.TensorDataset(tokens, labels)
loss = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])
options = {"batch_size": 8, "steps": 100, "objective": loss, "run_dir": sys.argv[1], "resume": True}
guard = Guard(accelerator, model, optimizer, data=data, **options)
for batch in guard.batches():
    guard.step(batch)
"""


def test_what_costs_the_device_is_skipped_after_two_ends(tmp_path: Path) -> None:
    """An index out of range fails on the device, and the process with it; each process saves what it had verified."""
    command = [sys.executable, "-c", LOST, str(tmp_path / "run")]
    first, second, third = (subprocess.run(command, capture_output=True, text=True, check=False) for _ in range(3))
    assert first.returncode != 0
    assert second.returncode != 0
    assert "cannot use the GPU any more" in first.stderr
    assert third.returncode == 0, third.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["verdict"] == "recovered"
