"""The guard in loops of other people: what they bring, what they forget, and what they get."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
from collections import UserDict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from guarded import REWIND, is_finite, often, sums, trained
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import swa_utils
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader, TensorDataset
from user_programs import Counting, mse

from resilient_train import GaveUp, Guard
from resilient_train.data.samples import Slicing
from resilient_train.data.trees import state_sha256, weights_sha256
from resilient_train.ground.errors import ConfigError, TrainError
from resilient_train.ground.reader import ClipConfig
from resilient_train.loop.rows_of_loader import samples_of

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class Loops:
    """A loop of somebody's own, in both forms. At the update `spoiled` a gradient is NaN, once."""

    def __init__(self, *, spoiled: int = 0, accumulation: int = 1, prepared: bool = True) -> None:
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        self.model = anything(Net())
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.average = swa_utils.AveragedModel(self.model, avg_fn=lambda average, weight, _: average.lerp(weight, 0.1))
        self.spoiled, self.backwards = spoiled, 0
        self.model.layers[4].weight.register_hook(self._spoil)
        if prepared:
            self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)

    def _spoil(self, gradient: Tensor) -> Tensor:
        self.backwards += 1
        return gradient * math.nan if self.backwards == self.spoiled else gradient

    def guard(self, **given: Any) -> Guard:
        given = {"data": sums(256), "batch_size": 16, "verify_after": 3, "memory": often(5), **given}
        return Guard(self.accelerator, self.model, self.optimizer, **given)

    def run(self, form: str, steps: int, **given: Any) -> Guard:
        guard = self.guard(objective=mse if form == "objective" else None, steps=steps, **given)
        guard.keep(average=self.average)
        for batch in guard.batches():
            if guard.step(batch) if form == "objective" else hand_over(self, guard, batch)[0]:
                self.average.update_parameters(self.model)
        return guard


# What everybody gets.


def test_a_rotten_batch_while_a_scan_looks_is_a_rotten_batch() -> None:
    """A scan does not take what a forward that is to be refused did to BatchNorm for damage."""
    loops = Loops()
    guard = loops.guard(objective=mse)
    for number, batch in enumerate(guard.batches(40)):
        guard.step([batch[0] * math.nan, batch[1]] if number in (9, 10, 11, 20, 21, 22) else batch)
    assert {str(one.anomaly.signal) for one in guard.incidents} == {"nonfinite_batch"}
    assert is_finite(loops.model)


def test_a_nan_is_seen_in_batches_of_any_class() -> None:
    """To torch they are one leaf: the batch is to blame all the same, and its row named, as in a dict."""

    def collated(some: list[Any]) -> Any:
        return UserDict({key: torch.stack([row[key] for row in some]) for key in "xy"})

    table = sums(64, bad=(17,))
    data = [UserDict(x=table[row][0], y=table[row][1]) for row in range(64)]
    guard = trained(Loops().guard(data=data, collate=collated, objective=mse), 8)
    told = [(one.anomaly.signal, one.diagnosis.cause, one.diagnosis.rows) for one in guard.incidents]
    assert told == [("nonfinite_batch", "data", (17,))]
    assert guard.incidents[0].diagnosis.advice[0]["why"][0]["field"] == "['x']"


# Data.


def loaders(kind: str, accelerator: Accelerator) -> Any:
    if kind == "data set":
        return sums(256)
    if kind == "iterable with state":
        return Counting(64)
    loader = DataLoader(sums(256), batch_size=16, shuffle=True)
    return accelerator.prepare(loader) if kind == "prepared loader" else loader


@pytest.mark.parametrize("kind", ["data set", "loader", "prepared loader", "iterable with state"])
def test_any_data_will_do(kind: str) -> None:
    loops = Loops(spoiled=23)
    size = None if "loader" in kind else 16
    guard = loops.guard(
        data=loaders(kind, loops.accelerator), batch_size=size, objective=mse, recovery=REWIND, verify_after=3
    )
    trained(guard, 30)
    assert [one.rewound_to for one in guard.incidents] == [15]
    assert is_finite(loops.model)
    assert guard.samples.slicing.samples == 16


def served(loader: Any) -> Any:
    return samples_of(loader, float, Slicing(1), 0, torch.device("cpu"))


def test_the_loop_gets_what_the_loader_made() -> None:
    """A copy would lie outside of pinned memory."""
    batches = [(torch.ones(2), {"x": torch.ones(3)}) for _ in range(5)]
    samples = served(batches)
    for made in batches:
        batch = samples.next_update().batches[0]
        assert batch[0] is made[0]
        assert batch[1]["x"] is made[1]["x"]


@pytest.mark.parametrize(("loader", "why"), [([], "is empty"), (iter([1, 2]), "cannot be iterated again")])
def test_a_loader_that_has_ended_says_so(loader: Any, why: str) -> None:
    """An empty one and one that can be iterated only once are two mistakes."""
    samples = served(loader)
    with pytest.raises(TrainError, match=why):
        print([samples.next_update() for _ in range(3)])


# Optimizers and schedules.

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "sequential": lambda one: SequentialLR(one, [LinearLR(one, 0.1, total_iters=4), ExponentialLR(one, 0.9)], [4]),
    "chained": lambda one: ChainedScheduler([ConstantLR(one, 0.5, 3), StepLR(one, 4, 0.5)]),
    "one cycle": lambda one: OneCycleLR(one, 0.1, total_steps=12),
}


def rates_of(optimizer: Any, scheduler: Any) -> list[float]:
    rates = []
    for _ in range(12):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def guarded_rates(loops: Loops, schedule: Any, **given: Any) -> list[float]:
    guard = loops.guard(objective=mse, schedule=schedule, **given)
    rates = {}
    for batch in guard.batches(12):
        if guard.step(batch):
            rates[guard.attempted_step] = loops.optimizer.param_groups[0]["lr"]
    return [rates[step] for step in range(1, 13)]


@pytest.mark.parametrize(("name", "prepared"), [("sequential", True), ("chained", False), ("one cycle", True)])
def test_a_schedule_is_the_one_it_would_be_without_a_guard(name: str, prepared: bool) -> None:
    plain = torch.optim.AdamW(Net().parameters(), lr=1e-2)
    expected = rates_of(plain, SCHEDULES[name](plain))
    loops = Loops(spoiled=9, prepared=False)
    schedule = SCHEDULES[name](loops.optimizer)
    if prepared:
        loops.model, loops.optimizer, schedule = loops.accelerator.prepare(loops.model, loops.optimizer, schedule)
    assert guarded_rates(loops, schedule, recovery=REWIND) == pytest.approx(expected)


def test_several_optimizers_step_together() -> None:
    """A refused update leaves both as they were; each has its own schedule."""
    loops = Loops(prepared=False)
    halves = [loops.model.layers[0].parameters(), [*loops.model.layers[1:].parameters()]]
    sgd, adam = torch.optim.SGD(halves[0], lr=0.1, momentum=0.9), torch.optim.Adam(halves[1], lr=1e-2)
    loops.model, sgd, adam = loops.accelerator.prepare(loops.model, sgd, adam)
    schedule = StepLR(sgd.optimizer, 5, 0.1)
    loops.optimizer = [sgd, adam]
    guard = loops.guard(objective=mse, schedule=[schedule, None])
    before = ""
    for number, batch in enumerate(guard.batches(20)):
        guard.step([batch[0] * math.nan, batch[1]] if number == 8 else batch)
        if number == 7:
            guard.settle()
            before = weights_sha256(guard.state)
        if number == 8:
            assert weights_sha256(guard.state) == before
    assert is_finite(loops.model)
    assert len(guard.incidents) == 1
    assert sgd.param_groups[0]["lr"] == pytest.approx(1e-4)
    assert adam.param_groups[0]["lr"] == 1e-2


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
        every_batch(guard, guard.step)
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


# Mistakes.


def anything(value: Any) -> Any:
    return value


def every_batch(guard: Guard, body: Callable[[Any], Any]) -> None:
    for batch in guard.batches(5):
        body(batch)


def hand_over(loops: Loops, guard: Guard, batch: Any) -> Tensor:
    loss = mse(loops.model, batch)
    loops.accelerator.backward(loss)
    guard.update(loss)
    return loss


MISTAKES: list[tuple[Callable[[Loops, Guard, Any], Any], type[Exception], str]] = [
    (lambda *given: given[1].update(hand_over(*given)), TrainError, "called twice for one batch: for losses that"),
    (lambda loops, guard, batch: None, TrainError, "a batch was not handed back"),
    (lambda loops, guard, batch: guard.step(batch), TypeError, "guard.step needs an objective"),
    (lambda loops, guard, batch: guard.update(anything(1.0)), TypeError, "not one of type float"),
    (lambda loops, guard, batch: guard.update(batch[0]), TypeError, r"not one of shape \[16, 6\]"),
    (lambda loops, *_: loops.optimizer.step(), TrainError, r"remove optimizer.step\(\)"),
    (lambda *given: [hand_over(*given), given[0].optimizer.step()], TrainError, r"remove optimizer.step\(\)"),
    (lambda loops, guard, batch: guard.keep(average=loops.average), TrainError, "call it before"),
    (lambda loops, guard, batch: guard.keep(x=anything([])), TypeError, "a list has no state_dict and no load_state"),
]


@pytest.mark.parametrize(("body", "kind", "line"), MISTAKES)
def test_a_mistake_in_the_loop_is_told(body: Callable[..., Any], kind: type[Exception], line: str) -> None:
    loops = Loops()
    guard = loops.guard()
    with pytest.raises(kind, match=line):
        every_batch(guard, lambda batch: body(loops, guard, batch))


def test_a_bad_objective_is_named_as_it_was_given() -> None:
    guard = Loops().guard(objective=lambda model, batch: model(batch[0]))
    with pytest.raises(ConfigError, match=r"^objective=.*returned a loss of shape"):
        every_batch(guard, guard.step)


def test_the_scheduler_is_stepped_by_nobody_else() -> None:
    """Twice an update it would be at its end after half of the run."""
    loops = Loops()
    schedule = CosineAnnealingLR(loops.optimizer.optimizer, 10)
    guard = loops.guard(schedule=schedule, objective=mse)
    with pytest.raises(TrainError, match=r"remove scheduler.step\(\)"):
        every_batch(guard, lambda batch: [guard.step(batch), anything(schedule).step()])


def test_two_guards_in_turn_are_refused() -> None:
    """One for each loss of a GAN would not rewind together."""
    loops = Loops()
    one, other = loops.guard(objective=mse), loops.guard(objective=mse)
    others = iter(other.batches(5))
    with pytest.raises(TrainError, match="two guards are at work in turn"):
        every_batch(one, lambda batch: [other.step(next(others)), one.step(batch)])


def test_update_outside_of_the_loop_is_refused() -> None:
    guard = Loops().guard(objective=mse)
    with pytest.raises(TrainError, match=r"iterate over guard.batches\(\)"):
        guard.step([torch.zeros(16, 6), torch.zeros(16, 1)])


def test_after_the_loop_everybody_may_step() -> None:
    loops = Loops()
    loops.run("objective", 3)
    loops.accelerator.backward(mse(loops.model, sums(256)[:16]))
    loops.optimizer.step()


def test_a_loop_that_was_left_is_entered_again() -> None:
    """With a batch in hand, too: it comes again, and the end is the same."""
    whole = Loops()
    expected = trained(whole.guard(objective=mse), 10)
    loops = Loops()
    guard = loops.guard(objective=mse, steps=10)
    for batch in guard.batches():
        if guard.attempted_step == 6:
            loops.accelerator.backward(mse(loops.model, batch))
            break
        guard.step(batch)
    assert state_sha256(trained(guard).state) == state_sha256(expected.state)


NOT_EMPTY = nn.Linear(6, 1)
BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    (
        {"accelerator": "cpu"},
        "accelerator: expected an accelerate.Accelerator, or None for a loop of plain PyTorch, got str",
    ),
    ({"model": lambda x: x}, "model: expected a torch.nn.Module, got function"),
    ({"optimizer": "adam"}, "optimizer: expected a torch.optim.Optimizer or a list of them, got str"),
    ({"optimizer": []}, "optimizer: the list is empty"),
    ({"optimizer": torch.optim.SGD(NOT_EMPTY.parameters())}, "2 of the weights that SGD trains are not the model's"),
    ({"optimizer": torch.optim.LBFGS(NOT_EMPTY.parameters())}, "optimizer: LBFGS is not supported: its step computes"),
    ({"data": 3}, "data: expected a data set, a loader or a function, got int"),
    ({"memory": 5}, "memory: expected a MemoryConfig, got int"),
    ({"drill": "nan_grad"}, "drill: expected an Extension, got str"),
    ({"data": TensorDataset(torch.zeros(0, 6))}, "data=TensorDataset: the data set is empty"),
    ({"data": Counting(9), "num_workers": 1}, "num_workers=1: an iterable data set"),
    ({"batch_size": None}, "batch_size: missing"),
    ({"batch_size": "8"}, r"batch_size=8: must be a whole number \(at least 1\) or null, not text"),
    ({"batch_size": 0}, r"batch_size=0: must be a whole number \(at least 1\)"),
    ({"objective": 1.0}, r"objective: expected a callable \(model, batch\) -> loss, got float"),
    ({"schedule": 0.5}, "schedule: expected a torch scheduler or a callable"),
    ({"schedule": [None, None]}, "schedule: 2 schedules for 1 optimizers"),
    ({"schedule": StepLR(torch.optim.SGD(NOT_EMPTY.parameters()), 1)}, "schedule: this StepLR was made for another"),
    ({"schedule": ReduceLROnPlateau(torch.optim.SGD(NOT_EMPTY.parameters()))}, "schedule: this ReduceLROnPl"),
    ({"recovery": "balance"}, "recovery=balance: .*balanced"),
    ({"recovery": {"ladders": {"default": [["rewnd"]]}}}, r"recovery.ladders.default\[0\]"),
    ({"checks": "defualt"}, r"checks=defualt: no such option; did you mean default\? There are"),
    ({"checks": 3}, "checks: expected the name of a set of checks, got int"),
    ({"clip": "tight"}, "clip=tight: must be a finite number"),
    ({"clip": 0}, r"clip=0: must be a finite number \(greater than 0\)"),
    ({"run_dir": __file__}, "is a file, expected a directory"),
    ({"run_dir": f"{__file__}/run"}, r"run_dir=.*/run: cannot be written: Not a directory"),
    ({"tracking": "mlruns", "run_dir": "x"}, "tracking=mlruns: MLflow takes no such address, nor a plain directory: "),
    ({"disk": 10}, "disk: needs a run_dir"),
    ({"tracking": True}, "tracking: needs a run_dir"),
    (
        {"data": DataLoader(TensorDataset(torch.zeros(64, 7)), batch_size=8)},
        "batch_size=16: the loader makes batches of 8 rows itself: leave batch_size out",
    ),
    ({"clip": ClipConfig(None, math.nan)}, r"clip\.max_value=nan: must be a finite number"),
    ({"recovery": {"ladders": {"default": []}, "budget": {"share": math.nan}}}, r"recovery\.budget\.share=nan"),
    ({"recovery": {"ladders": {"default": [["json.dumps"]]}}}, "json.dumps: is not a remedy: write a dataclass"),
]


@pytest.mark.parametrize(("given", "line"), BAD_ARGUMENTS, ids=[line[:40] for _, line in BAD_ARGUMENTS])
@pytest.mark.usefixtures("here")
def test_a_wrong_argument_is_named(given: dict[str, Any], line: str) -> None:
    """With what is expected, in one line, before anything runs; without the error behind it, which says less."""
    loops = Loops()
    arguments = {"accelerator": loops.accelerator, "model": loops.model, "optimizer": loops.optimizer}
    arguments |= {"data": sums(256), "batch_size": 16, **given}
    with pytest.raises((TypeError, ValueError), match=line) as caught:
        Guard(**arguments)
    assert "\n" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


# The run directory, and what is said.


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_nothing_is_overwritten(tmp_path: Path, info: pytest.LogCaptureFixture) -> None:
    """A directory that holds a run is left alone; the next free one beside it is taken, and that is said."""
    Loops(spoiled=3).run("objective", 5, run_dir=tmp_path / "mine")
    before = contents(tmp_path / "mine")
    for _ in range(2):
        Loops(spoiled=3).run("objective", 5, run_dir=tmp_path / "mine")
    assert contents(tmp_path / "mine") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "mine-2", "mine-3"]
    assert (tmp_path / "mine-3/incidents.jsonl").read_text()
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
    assert not log.handlers
    assert log.level == logging.NOTSET


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
        signals = {
            json.loads(line)["signal"] for line in (tmp_path / name / "incidents.jsonl").read_text().splitlines()
        }
        assert signals == {"nonfinite_batch", "nonfinite_grad"}
    for form in (EXAMPLES / "accelerate_loop.py").read_text().split("\ndef ")[1:]:
        assert form.count("# +") <= 9  # and the import


def test_the_gan_example_shows_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gan = example("gan")
    monkeypatch.setattr(gan, "STEPS", 100)
    torch.manual_seed(0)
    untrained = gan.distance(gan.Gan())
    for form in ("in_turn", "together"):
        assert gan.distance(getattr(gan, form)(tmp_path / form)) < 0.6 * untrained
