"""Drills: each fault does what it says at its place, and nothing elsewhere."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from resilient_train.command.config.compose import load
from resilient_train.extensions.drills import (
    FAULTS,
    BadMoments,
    BadRow,
    BitFlip,
    Drill,
    Fault,
    HotLr,
    InfLoss,
    LossSpike,
    NanBatch,
    NanGrad,
    parse,
)
from resilient_train.ground import files
from resilient_train.ground.errors import ConfigError
from resilient_train.ground.reader import option


class Journal:
    """What a run notes of its drill."""

    def __init__(self) -> None:
        self.ticks: list[tuple[str, int]] = []

    def note(self, kind: str, *, name: str, tick: int) -> None:
        assert kind == "drill_fired"
        self.ticks.append((name, tick))

    def drill(self, *faults: Fault) -> Drill:
        drill = Drill(faults)
        updater = SimpleNamespace(clipper=SimpleNamespace(changes=[]))
        run: Any = {"incident_log": self, "updater": updater, "backend": SimpleNamespace(objective=None)}
        drill.build(SimpleNamespace(world=SimpleNamespace(rank=0), hooks=[], **run))  # type: ignore[arg-type]
        return drill


class Attempts:
    """A small model whose updates are attempted, and what of them was not as it should be."""

    def __init__(self, drill: Drill, *, rank: int = 0) -> None:
        torch.manual_seed(0)
        self.drill, drill.rank = drill, rank
        self.model = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.attempt(0)  # now it has moments

    def attempt(self, tick: int) -> set[str]:
        self.drill.tick = tick
        before = self._state()
        self.drill.spoiled("state", SimpleNamespace(model=self.model, optimizers=[self.optimizer]))
        seen = {name for name, one in self._state().items() if name in before and not one.equal(before[name])}
        for micro in range(2):
            x = self.drill.spoiled("batch", {"x": torch.ones(4, 3)})["x"]
            seen |= {f"batch {micro}"} if not x.isfinite().all() else set()
            clean = self.model(torch.ones(4, 3)).sum()
            loss = self.drill.spoiled("loss", clean)
            seen |= {f"loss {micro}"} if not loss.equal(clean) else set()
            clean.backward()
        self.drill.spoiled("gradients", list(self.model.parameters()))
        gradients = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
        seen |= {"gradients"} if not all(one.isfinite().all() for one in gradients) else set()
        seen |= {"rate"} if self.drill.rate_factor() != 1 else set()
        if tick == 0:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return seen

    def _state(self) -> dict[str, torch.Tensor]:
        moments = [state["exp_avg_sq"].flatten() for state in self.optimizer.state.values()]
        weights = torch.nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()
        return {"weights": weights, **({"moments": torch.cat(moments).clone()} if moments else {})}


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (NanBatch(at=[4]), {4: {"batch 0", "batch 1"}}),
        (InfLoss(at=[4]), {4: {"loss 0", "loss 1"}}),
        (LossSpike(at=[4]), {4: {"loss 0", "loss 1"}}),
        (NanGrad(at=[4]), {4: {"gradients"}}),
        (HotLr(at=[4], updates=3), {tick: {"rate"} for tick in (4, 5, 6)}),
        (BitFlip(at=[4]), {4: {"weights"}}),
        (BadMoments(at=[4]), {4: {"moments"}}),
    ],
    ids=lambda value: value.name if isinstance(value, Fault) else "",
)
def test_each_fault_spoils_its_own_place_at_its_own_tick(fault: Fault, seen: dict[int, set[str]]) -> None:
    """What it names changes at its ticks; else, and on another rank, nothing does. Every rank journals it, once."""
    journals = [Journal(), Journal()]
    here, elsewhere = (Attempts(one.drill(fault), rank=rank) for rank, one in enumerate(journals))
    is_rate = fault.name == "hot_lr"
    for tick in range(1, 9):
        assert here.attempt(tick) == seen.get(tick, set()), f"tick {tick}"
        assert elsewhere.attempt(tick) == (seen.get(tick, set()) if is_rate else set())
    assert journals[0].ticks == journals[1].ticks
    assert journals[0].ticks == [(fault.name, tick) for tick in seen if not is_rate or tick == 4]


def test_a_fault_that_finds_nothing_to_spoil_changes_nothing() -> None:
    tokens = {"input_ids": torch.arange(4)}
    drill = Journal().drill(NanBatch(at=[1]), BadMoments(at=[1]), BadRow(rows=[1]))
    drill.tick = 1
    assert drill.spoiled("batch", tokens)["input_ids"] is tokens["input_ids"]
    drill.spoiled("state", SimpleNamespace(optimizers=[torch.optim.SGD([torch.ones(1, requires_grad=True)])]))
    assert drill.wrapped(dataset := Endless()) is dataset


@pytest.mark.parametrize(("what", "bad"), [("nan", math.nan), ("inf", math.inf), ("outlier", 3e4)])
def test_a_wrapped_data_set_differs_in_its_bad_rows_only(what: Any, bad: float) -> None:
    """Every other row and the length are those of the data set inside, which stays as it was."""
    inner = TensorDataset(torch.arange(1.0, 6.0), torch.arange(5))
    wrapped = pickle.loads(pickle.dumps(Journal().drill(BadRow(rows=[2], what=what)).wrapped(inner)))
    assert [float(wrapped[row][0]) for row in range(5)] == pytest.approx([1, 2, bad, 4, 5], nan_ok=True)
    assert float(wrapped[-3][0]) == pytest.approx(bad, nan_ok=True)
    assert [int(wrapped[row][1]) for row in range(len(wrapped))] == [0, 1, 2, 3, 4]
    assert inner.tensors[0].isfinite().all()
    assert len(BadRow(share=0.5).chosen(40)) == 20


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(int, 1)


@pytest.mark.parametrize(
    ("node", "faults"),
    [
        ({"fault": "nan_batch", "at": [100]}, [NanBatch(at=[100])]),
        ({"fault": "nan_grad", "at": [7], "rank": "all"}, [NanGrad(at=[7], rank="all")]),
        (
            {"faults": [{"bit_flip": {}}, {"inf_loss": None}], "seed": 5},
            [BitFlip(at=[500], seed=5), InfLoss(at=[500], seed=5)],
        ),
        (
            {"faults": [{"nan_batch": {"at": [50]}}, {"hot_lr": {"at": [120], "factor": 30, "seed": 2}}], "seed": 1},
            [NanBatch(at=[50], seed=1), HotLr(at=[120], factor=30, seed=2)],
        ),
        ({"fault": "bad_row", "rows": [3], "what": "outlier"}, [BadRow(rows=(3,), what="outlier")]),
    ],
)
def test_a_drill_is_read_as_it_is_written(node: Mapping[str, Any], faults: list[Fault]) -> None:
    assert parse(node, steps=1000) == faults


@pytest.mark.parametrize(
    ("node", "line"),
    [
        ({"fault": "nan_bach"}, "drill.fault=nan_bach: no such fault; there are nan"),
        ({"fault": "hot_lr", "facto": 3}, "drill.facto=3: no such key; there are seed"),
        ({"faults": "nan_grad"}, "drill.faults=nan_grad: must be a list, such as [{nan_batch: {at: [50]}}]"),
        ({"faults": [{"hot_lr": {"updates": 0}}]}, "drill.faults[0].hot_lr.updates=0: must be a whole number (at"),
        ({"faults": ["nan_grad"]}, "drill.faults[0]=nan_grad: must be a mapping with the keys nan_batch, nan_grad,"),
        ({"fault": "nan_grad", "at": 7}, "drill.at=7: must be a list, each a finite number (greater than 0)"),
        ({"fault": "nan_grad", "at": [101]}, "drill.at=[101]: must be a list of ticks up to run.steps=100, or of"),
        ({"fault": "nan_grad", "at": []}, "drill.at=[]: must be a list of ticks up to run.steps=100, or of"),
        ({"fault": "bad_row", "share": 0}, "drill.share=0: must be a finite number (greater than 0, at most 1)"),
    ],
)
def test_what_cannot_be_read_is_reported_in_one_line(node: Mapping[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(node, steps=100)
    assert str(raised.value).startswith(line)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", sorted(file.stem for file in (files.conf() / "drill").glob("*.yaml")))
def test_every_shipped_drill_can_be_read(name: str) -> None:
    """Each option is the fault of its name with its own defaults, none is no fault; the seed is that of the run."""
    node = option("drill", name)
    assert node.get("seed", "${run.seed}") == "${run.seed}"
    faults = parse({**node, **({"seed": 3} if "seed" in node else {})}, steps=1000)
    if name not in ("none", "gauntlet", "demo"):
        assert faults == parse({"fault": name, **({"seed": 3} if "seed" in node else {})}, steps=1000)


@pytest.mark.parametrize(
    ("overrides", "faults"),
    [
        (["experiment=demo", "run.steps=40"], ["nan_grad", "loss_spike", "bit_flip", "hot_lr"]),
        (["experiment=demo", "drill.faults=[{hot_lr:{at:[12],factor:30}}]"], [HotLr(at=[12], factor=30, seed=3)]),
        (["drill=nan_batch", "drill.at=[3]"], [NanBatch(at=[3])]),
    ],
)
def test_a_drill_is_composed_on_the_command_line(overrides: list[str], faults: list[Any]) -> None:
    """As the documentation writes it; that of an experiment gives way to another, and no value of it stays."""
    found = parse(load([*overrides, "run.seed=3"]).config.drill, steps=40)
    assert found == faults or [fault.name for fault in found] == faults


def test_the_gauntlet_holds_one_of_each() -> None:
    faults = parse({**option("drill", "gauntlet"), "seed": 0}, steps=1000)
    assert {fault.name for fault in faults} == FAULTS.keys() - {"crash", "hang"}
    ticks = [tick for fault in faults for tick in getattr(fault, "at", ())]
    assert len(set(ticks)) == len(faults) - 1  # bad_row has no tick
