"""What a loop keeps, in every form that a `state_dict` has, and what it is told. test_guard.py trains with it."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import SKIP, cross_entropy, often
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from resilient_train import Guard
from resilient_train.ground.errors import ConfigError
from resilient_train.ground.reader import DiskConfig

ROWS, BATCH, BAD = 96, 8, 41
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
        lambda: Holder({"of": Counter({3: 1}), "by": defaultdict(list, {7: [1.5]})}),
        lambda item: item.state["of"].update([3, 4]) or item.state["by"][8].append(-2),
    ),
    "plain": (
        lambda: Holder({"none": None, "yes": True, "count": -1, "best": math.inf, "both": (1, [2, "x"]), 0: "y"}),
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
    given |= {"data": rows(bad), "batch_size": BATCH, "steps": 12, "memory": OFTEN, "verify_after": 1}
    given |= {"recovery": SKIP, **more}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Guard(None, model, optimizer, run_dir=run_dir, **given)


def step(guard: Guard, batch: Any) -> Any:
    loss = cross_entropy(guard.model, batch)
    guard.world.accelerator.backward(loss)
    return guard.update(loss)


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
            if step(guard, batch):
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
        return len([step(guard, batch) for batch in guard.batches()])

    if where == "in memory" and not hasattr(state, "__next__"):
        assert loop() == 12
        return
    with pytest.raises(ConfigError, match=r"^[^\n]*(keep\(mine=|\['kept\.mine'\])[^\n]*$"):
        loop()


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
            results.append(step(guard, batch))
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
    said = [str(step(guard, batch).status) for batch in guard.batches(2)]
    assert said == ["accumulating", "accumulating", "pending"] * 2
