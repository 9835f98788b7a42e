"""What a loop keeps is kept: through refused updates, kills and resumes, in every form that a `state_dict` has."""

from __future__ import annotations

import copy
import json
import math
import os
import signal
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from group import alone
from guarded import cross_entropy, often, trained
from kills import die_with_checkpoint
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from resilient_train import Guard
from resilient_train.ground import files
from resilient_train.ground.errors import ConfigError
from resilient_train.ground.reader import DiskConfig
from resilient_train.ground.types import fact

ROWS, BATCH, BAD = 96, 8, 41
NEVER = 10**9
OFTEN = often(2)


def rows(bad: int | None = None) -> TensorDataset:
    x = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1))
    y = (x.sum(1) > 0).long()
    if bad is not None:
        x[bad, 2] = math.nan
    return TensorDataset(x, y)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))


class Ema(nn.Module):
    """As that of timm: a copy of the model, whose whole `state_dict` follows, with the statistics of BatchNorm."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model).eval()

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for mine, its in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            mine.copy_(0.9 * mine + 0.1 * its)


class Mean:
    """A metric, as that of torchmetrics, which takes longer to import than all else here takes."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.sum, self.count = torch.zeros(()), 0

    def update(self, value: Tensor) -> None:
        self.sum, self.count = self.sum + value, self.count + 1

    def compute(self) -> Tensor:
        return self.sum / max(1, self.count)

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self.sum, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sum, self.count = state["sum"], state["count"]


def digest(*trees: Any) -> list[float]:
    """All numbers of some states."""
    return [value for tree in trees for one in tree.values() for value in one.double().flatten().tolist()]


class Lived(NamedTuple):
    """What a program ended with."""

    numbers: list[float]  # of weights, averages, and metrics after each epoch
    said: list[str]  # of each update
    causes: list[str]


def program(
    run_dir: Path, form: str = "plain", bad: int | None = BAD, put_away: Sequence[int] = (), killed_at: int = NEVER
) -> Lived:
    """Train with all that timm's loop has; no line knows whether it is the first start."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average, metric = Ema(model), Mean()
    objective = cross_entropy if form == "objective" else None
    guard = Guard(
        *(None, model, optimizer),
        data=rows(bad),
        batch_size=BATCH,
        objective=objective,
        run_dir=run_dir,
        memory=OFTEN,
        verify_after=2,
        disk=DiskConfig(every=4),
        resume=True,
    )
    guard.keep(average=average, metric=metric)
    guard.samples.quarantine(put_away)
    said, metrics = [], []
    for epoch in guard.epochs(3):
        for batch in epoch:
            if form == "objective":
                result = guard.step(batch)
            else:
                with torch.autocast("cpu", torch.bfloat16):
                    loss = cross_entropy(model, batch)
                loss.backward()  # type: ignore[no-untyped-call]
                metric.update(loss.detach())
                result = guard.update(loss)
            average.update(model)  # whatever has become of the update
            said.append(str(getattr(result, "status", result)))
            if guard.clock.step == killed_at:
                die_with_checkpoint(run_dir)
        metrics.append(metric.compute() if form != "objective" else torch.zeros(()))
        metric.reset()
        model.eval()
        with torch.no_grad():
            metrics.append(cross_entropy(average.module, rows().tensors))
        model.train()
    guard.close()
    seen = digest(model.state_dict(), average.state_dict(), {"metrics": torch.stack(metrics[-2:])})
    return Lived(seen, said, [str(one.diagnosis.cause) for one in guard.incidents])


@pytest.mark.parametrize("form", ["plain", "objective"])
def test_a_nan_row_and_a_kill_leave_no_trace_in_what_is_kept(form: str, tmp_path: Path) -> None:
    """Weights, average and metric end bit for bit as in a run that never had the row."""
    assert alone(program, tmp_path / "mine", form, BAD, (), 24)[0] == -signal.SIGKILL
    listed = json.loads((tmp_path / "mine/quarantine.json").read_text())
    assert [one["row"] for one in listed["rows"]] == [BAD]
    resumed = program(tmp_path / "mine", form)
    assert resumed.causes == ["data", "process"]
    assert len(resumed.said) < 36, "it was resumed"
    control = program(tmp_path / "control", form, BAD, [BAD])
    assert (control.causes, {*control.said}) == ([], {"accepted"})
    assert resumed.numbers == control.numbers
    assert all(map(math.isfinite, resumed.numbers))


class Holder:
    """Anything of the user's: its state is what it was given, and the loop changes it."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state  # its own, as many return it

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def scheduler() -> Any:
    return torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), lambda step: 0.9**step)


def optimizer() -> Any:
    weight = torch.zeros(2, 2, requires_grad=True)
    made = torch.optim.Adam([weight], amsgrad=True)
    weight.grad = torch.ones(2, 2)
    made.step()
    return made


def collection() -> Any:
    import torchmetrics

    return torchmetrics.MetricCollection([torchmetrics.MeanMetric(), torchmetrics.CatMetric()])


KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {  # how it is made, and what the loop does to it
    "module": (network, lambda item: [one.data.add_(1) for one in item.parameters()]),
    "averaged": (lambda: AveragedModel(network()), lambda item: item.update_parameters(network())),
    "scheduler": (scheduler, lambda item: item.optimizer.step() or item.step()),
    "optimizer": (optimizer, lambda item: item.step()),
    "metric": (collection, lambda item: item.update(torch.ones(2))),
    "ordered": (
        lambda: Holder(OrderedDict(b=1, a=OrderedDict(z=torch.zeros(2), y=None))),
        lambda item: item.state.move_to_end("b") or item.state["a"]["z"].add_(1),
    ),
    "subclasses": (
        lambda: Holder({"of": Counter({3: 1}), "by": defaultdict(list, {7: [1.5]}), "size": torch.Size([2, 3])}),
        lambda item: item.state["of"].update([3, 4]) or item.state["by"][8].append(-2),
    ),
    "plain": (
        lambda: Holder({"none": None, "yes": True, "count": -1, "best": math.inf, "both": (1, [2j, "x"]), 0: b"y"}),
        lambda item: item.state.update(none={"a": 1}, yes=False, count=item.state["count"] - 1),
    ),
    "tensors": (
        lambda: Holder([torch.ones(3).to(dtype) for dtype in (torch.bool, torch.int16, torch.bfloat16, torch.cfloat)]),
        lambda item: item.state.append(torch.full((2,), math.nan, dtype=torch.float8_e5m2)),
    ),
    "late": (lambda: Holder(None), lambda item: setattr(item, "state", {"seen": [torch.ones(2)] * 2})),
}


def image(tree: Any) -> Any:
    """A state with its classes and bits."""
    if isinstance(tree, dict):
        return type(tree), [(key, image(value)) for key, value in tree.items()]
    if isinstance(tree, list | tuple):
        return type(tree), [image(value) for value in tree]
    return (str(tree.dtype), tree.shape, str(tree.tolist())) if isinstance(tree, torch.Tensor) else (type(tree), tree)


def small(run_dir: Path | None, bad: int | None = None, **more: Any) -> Guard:
    model = nn.Sequential(nn.Linear(6, 2))
    given: dict[str, Any] = {"disk": DiskConfig(every=2), "resume": True} if run_dir else {}
    given |= {"data": rows(bad), "batch_size": BATCH, "steps": 12, "memory": OFTEN, "verify_after": 1, **more}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Guard(None, model, optimizer, objective=cross_entropy, run_dir=run_dir, **given)


def change_all(items: dict[str, Any]) -> None:
    for name, item in items.items():
        KEPT[name][1](item)


def images(items: dict[str, Any]) -> dict[str, Any]:
    return {name: image(one.compute() if name == "metric" else one.state_dict()) for name, one in items.items()}


def test_every_state_dict_is_resumed(tmp_path: Path) -> None:
    """With its classes, types and bits."""

    def loop(steps: int | None = None) -> tuple[dict[str, Any], int]:
        guard, items = small(tmp_path / "run"), {name: make() for name, (make, _) in KEPT.items()}
        guard.keep(**items)
        guard.resume()
        began = guard.clock.step
        for batch in guard.batches(steps):
            if guard.step(batch):
                change_all(items)
        guard.leave()
        guard.close()
        return images(items), began

    straight = {name: make() for name, (make, _) in KEPT.items()}
    for _ in range(12):
        change_all(straight)
    loop(6)
    resumed, began = loop()
    assert began == 6
    for name, expected in images(straight).items():
        assert resumed[name] == expected, name


@pytest.mark.parametrize("state", [lambda: 1, (number for number in range(3)), {"a": [object()]}])
@pytest.mark.parametrize("where", ["on disk", "in memory"])
def test_what_cannot_be_kept_is_refused_at_the_start(state: Any, where: str, tmp_path: Path) -> None:
    """In one line that names it, unless it is only copied and can be."""
    guard = small(tmp_path / "run" if where == "on disk" else None)

    def loop() -> int:
        guard.keep(mine=Holder(state))
        return len([guard.step(batch) for batch in guard.batches()])

    if where == "in memory" and not hasattr(state, "__next__"):
        assert loop() == 12
        return
    with pytest.raises(ConfigError, match=r"^keep\(mine=\.\.\.\): its state cannot be (saved|copied): [^\n]*$"):
        loop()


class Forgetful(files.Disk):
    """A disk that gives back another byte than was written, in the last of a file of tensors."""

    def write(self, descriptor: int, data: memoryview, at: int) -> int:
        is_tensors = os.readlink(f"/proc/self/fd/{descriptor}").endswith(".safetensors")
        written = super().write(descriptor, data, at)
        if is_tensors and at:
            os.pwrite(descriptor, bytes([data[-1] ^ 1]), at + written - 1)
        return written


def test_a_checkpoint_that_does_not_read_back_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an incident in one line, and nothing is there that calls itself verified."""
    monkeypatch.setattr(files, "disk", Forgetful())
    guard = small(tmp_path / "run", steps=20)
    guard.keep(average=network())
    trained(guard).leave()
    guard.close()
    assert {str(one.anomaly.signal) for one in guard.incidents} == {"checkpoint_failed"}
    assert "is not what was written" in guard.incidents[0].anomaly.evidence[0]["why"]
    assert [*tmp_path.glob("run/checkpoints/step-*")] == []


# What the loop is told.


def test_a_loop_is_told_what_became_of_its_update() -> None:
    """With something kept at once; without, a refused update is pending until the next one, and its loss goes then."""
    for keeps, at_first in ((True, "refused"), (False, "pending")):
        torch.manual_seed(0)
        guard = small(None, BAD, accumulate=1)
        if keeps:
            guard.keep(mine=Holder({}))
        results, first = [], []
        for batch in guard.batches():
            results.append(guard.step(batch))
            first.append(str(results[-1].status))
            if batch[0].isnan().any():
                assert first[-1] == at_first
        guard.close()
        assert {one.status for one in results} == {"accepted", "refused"}
        assert (
            [one.loss is None for one in results] == [not one for one in results] == [not bool(one) for one in results]
        )
        losses = torch.stack([one.loss for one in results if one])
        assert len(losses) == 12
        assert bool(losses.isfinite().all())
        assert not losses.requires_grad


def test_an_update_is_false_until_its_last_micro_batch() -> None:
    """While gradients accumulate."""
    guard = small(None, accumulate=3)
    said = [str(guard.step(batch).status) for batch in guard.batches(2)]
    assert said == ["accumulating", "accumulating", "pending"] * 2


# Damage to what is kept.


def spoiled(run_dir: Path | None, spoil: Callable[[Any, int], None], item: Any, steps: int = 40) -> Guard:
    guard = small(run_dir, steps=steps)
    guard.keep(item=item)
    for batch in guard.batches():
        if guard.step(batch):
            spoil(item, guard.clock.step)
    guard.close()
    return guard


def test_an_average_that_is_damaged_once_is_as_if_it_had_not_been(tmp_path: Path) -> None:
    """The scan of the weights sees it, the run rewinds, and no checkpoint has it."""

    def average(strikes: list[int]) -> Callable[[Any, int], None]:
        def update(item: Any, step: int) -> None:
            item.state["mean"].lerp_(torch.full((3,), float(step)), 0.1)
            if step in strikes:
                strikes.remove(step)
                item.state["mean"][1] = math.nan

        return update

    sound, hurt = Holder({"mean": torch.zeros(3)}), Holder({"mean": torch.zeros(3)})
    spoiled(None, average([]), sound)
    guard = spoiled(tmp_path / "run", average([23]), hurt)
    assert [str(one.diagnosis.cause) for one in guard.incidents] == ["corruption"]
    assert guard.incidents[0].anomaly.evidence[0]["name"] == "kept.item/mean"
    assert guard.incidents[0].diagnosis.advice == fact("kept_not_finite")
    assert image(hurt.state) == image(sound.state)
    for tree in tmp_path.glob("run/checkpoints/*/tensors.safetensors"):
        from safetensors.torch import load_file

        assert load_file(tree)["parts/kept.item/mean"].isfinite().all()


@pytest.mark.parametrize("name", ["lowest", "meter"])
def test_what_is_not_finite_on_purpose_ends_no_healthy_run(name: str) -> None:
    """A minimum that is infinite whenever it is reset makes no incident; one that turns NaN is accepted in the end."""
    import torchmetrics

    def lowest(item: Any, step: int) -> None:
        item.reset() if step % 10 == 0 else item.update(torch.tensor(float(-step)))

    def meter(item: Any, step: int) -> None:
        item.state["value"].fill_(math.nan if step >= 23 else step)

    item = torchmetrics.MinMetric() if name == "lowest" else Holder({"value": torch.zeros(2)})
    guard = spoiled(None, lowest if name == "lowest" else meter, item, steps=60)
    assert guard.clock.step == 60
    assert len(guard.incidents) == {"lowest": 0, "meter": 2}[name]
    assert guard._ring.newest_verified().step >= 44  # type: ignore[union-attr]
