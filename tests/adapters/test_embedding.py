"""The guard in loops of other people: what they bring, and what they get."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from guarded import REWIND, mse, often, sums, trained
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CyclicLR,
    ExponentialLR,
    LinearLR,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

from resilient_train import GaveUp, Guard
from resilient_train.data.samples import Slicing
from resilient_train.data.trees import state_sha256
from resilient_train.ground.errors import TrainError
from resilient_train.loop.rows_of_loader import samples_of

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class Loops:
    """A loop of somebody's own on Accelerate. At the backward `spoiled` a gradient is NaN, once."""

    def __init__(self, *, spoiled: int = 0, accumulation: int = 1, prepared: bool = True) -> None:
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        head = nn.Linear(16, 1)
        head.weight.register_hook(self._spoil)  # type: ignore[no-untyped-call]
        self.model: Any = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), head)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.spoiled, self.backwards = spoiled, 0
        if prepared:
            self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)

    def _spoil(self, gradient: Tensor) -> Tensor:
        self.backwards += 1
        return gradient * math.nan if self.backwards == self.spoiled else gradient

    def guard(self, **given: Any) -> Guard:
        given = {"data": sums(256), "batch_size": 16, "verify_after": 3, "memory": often(5), **given}
        return Guard(self.accelerator, self.model, self.optimizer, **given)


# What everybody gets.


@pytest.mark.parametrize(("loader", "why"), [([], "is empty"), (iter([1, 2]), "cannot be iterated again")])
def test_a_loader_that_has_ended_says_so(loader: Any, why: str) -> None:
    """An empty one and one that can be iterated only once are two mistakes."""
    samples = samples_of(loader, float, Slicing(1), 0, torch.device("cpu"))
    with pytest.raises(TrainError, match=why):
        print([samples.next_update() for _ in range(3)])


# Optimizers and schedules.

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "sequential": lambda one: SequentialLR(one, [LinearLR(one, 0.1, total_iters=4), ExponentialLR(one, 0.9)], [4]),
    "chained": lambda one: ChainedScheduler([ConstantLR(one, 0.5, 3), StepLR(one, 4, 0.5)]),
    "one cycle": lambda one: OneCycleLR(one, 0.1, total_steps=12),
    "cyclic": lambda one: CyclicLR(one, 0.001, 0.01, step_size_up=5, cycle_momentum=True),  # of Adam: the first beta
}


def scheduled(optimizer: Any) -> list[Any]:
    group = optimizer.param_groups[0]
    return [group["lr"], *group["betas"]]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_the_one_it_would_be_without_a_guard(name: str) -> None:
    """The rates and momenta of each step, where an update was retried, too; prepared by Accelerate or not."""
    plain = torch.optim.AdamW([nn.Parameter(torch.zeros(()))], lr=1e-2)
    schedule, expected = SCHEDULES[name](plain), []
    for _ in range(12):
        expected += scheduled(plain)
        plain.step()
        schedule.step()
    loops = Loops(spoiled=9, prepared=False)
    schedule = SCHEDULES[name](loops.optimizer)
    if name != "chained":
        loops.model, loops.optimizer, schedule = loops.accelerator.prepare(loops.model, loops.optimizer, schedule)
    guard, found = loops.guard(objective=mse, schedule=schedule, recovery=REWIND), {}
    for batch in guard.batches(12):
        if guard.step(batch):
            found[guard.attempted_step] = scheduled(loops.optimizer)
    assert [one for step in range(1, 13) for one in found[step]] == pytest.approx(expected)


def test_a_compiled_model_keeps_the_names_of_its_weights(tmp_path: Path) -> None:
    """What is left on disk fits the model, compiled or not."""
    loops = Loops(prepared=False)
    names = set(loops.model.state_dict())
    loops.model = loops.accelerator.prepare(torch.compile(loops.model, backend="eager"))
    guard: Guard = loops.guard(
        objective=lambda model, batch: mse(model, batch) * (math.nan if guard.clock.step else 1.0),
        recovery="off",
        run_dir=tmp_path,
    )
    with pytest.raises(GaveUp) as caught:
        trained(guard, 5)
    assert caught.value.last_good is not None
    assert set(load_file(caught.value.last_good / "weights.safetensors")) <= names


def test_a_loop_that_accumulates_by_itself_gets_the_same() -> None:
    """`accelerator.accumulate` around forward and backward does no harm."""
    ends = []
    for is_wrapped in (False, True):
        loops = Loops(accumulation=2)
        guard = loops.guard(batch_size=8)
        for batch in guard.batches(10):
            with loops.accelerator.accumulate(loops.model) if is_wrapped else nullcontext():
                loss = mse(loops.model, batch)
                loops.accelerator.backward(loss)
            guard.update(loss)
        ends.append(state_sha256(guard.state))
    assert ends[0] == ends[1]


# The run directory, and what is said.


def test_nothing_is_overwritten(tmp_path: Path, info: pytest.LogCaptureFixture) -> None:
    """A directory that holds a run is left alone; the next free one beside it is taken, and that is said."""
    before = None
    for _ in range(3):
        trained(Loops(spoiled=3).guard(objective=mse, run_dir=tmp_path / "mine"), 5)
        contents = {path: path.read_bytes() for path in (tmp_path / "mine").rglob("*") if path.is_file()}
        before = before or contents
        assert contents == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "mine-2", "mine-3"]
    assert (tmp_path / "mine-3/incidents.jsonl").exists()
    assert f"this one writes to {tmp_path / 'mine-2'}" in info.text


def test_who_sets_up_logging_decides(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the guard is made or after it: lines are never told twice."""
    log, root = logging.getLogger("resilient_train"), logging.getLogger()
    caplog.set_level(logging.NOTSET, "resilient_train")  # puts the level back at the end
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(root, "handlers", [])  # pytest's own
    Loops().guard(objective=mse)
    log.info("only once")
    assert capsys.readouterr().err == "resilient_train: only once\n"
    monkeypatch.setattr(root, "handlers", [logging.StreamHandler()])
    log.warning("their way")
    assert capsys.readouterr().err == "their way\n"
    log.setLevel(logging.NOTSET)
    monkeypatch.setattr(log, "handlers", [])
    Loops().guard()
    assert (log.handlers, log.level) == ([], logging.NOTSET)


# The examples.


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_accelerate_example_shows_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain loop ends in NaN, both guarded ones whole, with ten added lines at most."""
    loops = example("accelerate_loop")
    for name, value in {"ROWS": 3200, "ROTTEN": {100, 2510}, "STEPS": 200}.items():
        monkeypatch.setattr(loops, name, value)
    assert not loops.report("plain", loops.plain())
    for name in ("guarded", "handed_over"):
        assert loops.report(name, getattr(loops, name)(tmp_path / name))
        listed = (tmp_path / name / "incidents.jsonl").read_text().splitlines()
        assert {json.loads(line)["signal"] for line in listed} == {"nonfinite_batch", "nonfinite_grad"}
    for form in (EXAMPLES / "accelerate_loop.py").read_text().split("\ndef ")[1:]:
        assert form.count("# +") <= 9  # and the import


def test_the_gan_example_shows_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gan = example("gan")
    monkeypatch.setattr(gan, "STEPS", 200)
    torch.manual_seed(0)
    untrained = gan.distance(gan.Gan())
    for form in ("in_turn", "together"):
        assert gan.distance(getattr(gan, form)(tmp_path / form)) < 0.7 * untrained
