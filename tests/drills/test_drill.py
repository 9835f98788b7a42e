"""Drills: each fault does what it says at its place, and nothing elsewhere."""

from __future__ import annotations

import copy
import logging
import math
import pickle
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, TensorDataset

from resilient_train.command.config.compose import load
from resilient_train.extensions.drills import (
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
    UpdatePlace,
    parse,
)
from resilient_train.ground import files
from resilient_train.ground.errors import ConfigError
from resilient_train.ground.reader import option


class Journal:
    """What a run remembers of its drill, also across restarts."""

    def __init__(self) -> None:
        self.firings: list[tuple[int, str, int]] = []

    def drill(self, *faults: Fault) -> Drill:
        return Drill(faults, has_fired=self.has, fired=lambda *firing: self.firings.append(firing))

    def has(self, number: int) -> bool:
        return any(number == known for known, _, _ in self.firings)

    @property
    def ticks(self) -> list[tuple[str, int]]:
        return [(name, tick) for _, name, tick in self.firings]


class Run:
    """A small real run that reports, attempt by attempt, what was not as it should be."""

    def __init__(self, drill: Drill, *, rank: int = 0, optimizer: str = "AdamW", micro_batches: int = 2) -> None:
        torch.manual_seed(0)
        self.drill, self.rank, self.micro_batches = drill, rank, micro_batches
        self.model = torch.nn.Linear(3, 1)
        self.optimizer: torch.optim.Optimizer = getattr(torch.optim, optimizer)(self.model.parameters(), lr=1e-3)
        self.batch = {"x": torch.ones(4, 3), "y": torch.zeros(4, 1), "rows": torch.arange(4)}
        self.step = 1

    def attempt(self, tick: int) -> set[str]:
        """Make one update; a refused one takes nothing along, and its step comes again."""
        seen = set()
        weights, moments = self._weights(), self._moments()
        good = copy.deepcopy(self.model.state_dict())
        self.drill.between_updates(self._place(tick), self.model, [self.optimizer])
        seen |= {"weights"} if not torch.equal(weights, self._weights()) else set()
        seen |= {"moments"} if not torch.equal(moments, self._moments()) else set()
        for micro in range(self.micro_batches):
            place = self._place(tick)
            batch = self.drill.on_batch(place, self.batch)
            seen |= {f"batch {micro}"} if not batch["x"].isfinite().all() else set()
            clean = (self.model(batch["x"]) - batch["y"]).square().mean()
            loss = self.drill.on_loss(place, clean)
            seen |= {f"loss {micro}"} if not torch.equal(loss, clean) and clean.isfinite() else set()
            torch.autograd.backward(loss)
        gradients = self._gradients()
        self.drill.on_gradients(place, list(self.model.parameters()))
        seen |= {"gradients"} if not torch.equal(gradients.nan_to_num(7), self._gradients().nan_to_num(7)) else set()
        seen |= {"rate"} if self.drill.rate_factor(place) != 1 else set()
        if seen:
            self.model.load_state_dict(good)
        else:
            self.optimizer.step()
            self.step += 1
        self.optimizer.zero_grad()
        return seen

    def _place(self, tick: int) -> UpdatePlace:
        return UpdatePlace(tick=tick, step=self.step, rank=self.rank)

    def _weights(self) -> torch.Tensor:
        return torch.cat([weight.detach().flatten() for weight in self.model.parameters()]).clone()

    def _gradients(self) -> torch.Tensor:
        return torch.cat([weight.grad.flatten() for weight in self.model.parameters() if weight.grad is not None])

    def _moments(self) -> torch.Tensor:
        states = [value for state in self.optimizer.state.values() for value in state.values() if value is not None]
        return torch.cat([torch.zeros(0), *(value.flatten().float() for value in states)])


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (NanBatch(at=[4]), {4: {"batch 0", "batch 1"}}),
        (NanBatch(at=[2, 5], value="inf"), {2: {"batch 0", "batch 1"}, 5: {"batch 0", "batch 1"}}),
        (InfLoss(at=[4]), {4: {"loss 0", "loss 1"}}),
        (LossSpike(at=[4]), {4: {"loss 0", "loss 1"}}),
        (NanGrad(at=[4]), {4: {"gradients"}}),
        (HotLr(at=[4], updates=3), {4: {"rate"}, 5: {"rate"}, 6: {"rate"}}),
        (BitFlip(at=[4]), {4: {"weights"}}),
        (BadMoments(at=[4]), {4: {"moments"}}),
    ],
    ids=lambda value: value.name if isinstance(value, Fault) else "",
)
def test_each_fault_spoils_its_own_place_at_its_own_tick(fault: Fault, seen: dict[int, set[str]]) -> None:
    """What it names changes at its ticks; at all other ticks, and on another rank, nothing does."""
    here, elsewhere = Run(Journal().drill(fault)), Run(Journal().drill(fault), rank=1)
    for tick in range(1, 9):
        assert here.attempt(tick) == seen.get(tick, set()), f"tick {tick}"
        away = elsewhere.attempt(tick)
        assert away == (seen.get(tick, set()) if fault.name == "hot_lr" else set())


@pytest.mark.parametrize("fault", [NanBatch(at=[3]), LossSpike(at=[3]), NanGrad(at=[3]), BitFlip(at=[3])])
def test_a_fault_fires_once_even_if_its_place_comes_again(fault: Fault) -> None:
    journal = Journal()
    run = Run(journal.drill(fault))
    assert [bool(run.attempt(tick)) for tick in (1, 2, 3, 4)] == [False, False, True, False]
    run.step = 3  # rewound
    assert not run.attempt(5)
    assert not Run(journal.drill(fault)).attempt(3)  # restarted
    assert journal.ticks == [(fault.name, 3)]


def test_a_hot_stretch_goes_on_after_a_restart() -> None:
    """A restart within its ticks finds the rate still hot, and does not journal it again; two that overlap are one."""
    journal, fault, place = Journal(), HotLr(at=[2], updates=3, factor=30), UpdatePlace(3, 3, 0)
    assert [journal.drill(fault).rate_factor(place) for _ in range(2)] == [30, 30]
    assert journal.ticks == [("hot_lr", 2)]
    assert Journal().drill(HotLr(at=[2, 3], updates=5)).rate_factor(replace(place, tick=4)) == 100


def test_every_rank_journals_the_firings_of_all() -> None:
    """Ranks that agree on what was fired can wait for each other there."""
    journals = [Journal(), Journal()]
    for rank, journal in enumerate(journals):
        Run(journal.drill(NanGrad(at=[2], rank=1), BitFlip(at=[2])), rank=rank).attempt(2)
    assert journals[0].firings == journals[1].firings
    assert len({number for number, _, _ in journals[0].firings}) == 2


@pytest.mark.parametrize(
    ("dtype", "bit", "given"),
    [
        *((torch.float32, 30, None), (torch.bfloat16, 14, None), (torch.float16, 14, None), (torch.float64, 62, None)),
        *((torch.float32, 0, 0), (torch.float32, 31, 31), (torch.bfloat16, 15, 15), (torch.float64, 63, 63)),
    ],
)
def test_a_bit_flip_flips_one_bit_of_one_weight(dtype: torch.dtype, bit: int, given: int | None) -> None:
    """The highest of the exponent, or the one that was asked for; of the same weight for the same seed."""
    first = torch.nn.Linear(3, 4)
    first.weight = torch.nn.Parameter(first.weight.detach().t().contiguous().t())  # not contiguous
    model = torch.nn.Sequential(first, torch.nn.Linear(4, 2)).to(dtype)
    model.register_parameter("scalar", torch.nn.Parameter(torch.tensor(0.5, dtype=dtype)))
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]

    def bits() -> torch.Tensor:
        return torch.cat([weight.detach().contiguous().view(-1).view(integers) for weight in model.parameters()])

    before, places = bits(), set()
    for seed in range(30):
        BitFlip(at=[7], seed=seed, bit=given).spoil(7, model, [])
        (changed,) = (bits() ^ before).nonzero().flatten().tolist()
        assert (bits() ^ before)[changed] == torch.ones((), dtype=integers) << bit
        places.add(changed)
        BitFlip(at=[7], seed=seed, bit=given).spoil(7, model, [])
        assert bits().equal(before)
    assert len(places) > 10
    beyond = f"bit={8 * dtype.itemsize} is none of the {8 * dtype.itemsize} of a weight, which are counted from 0"
    assert BitFlip(at=[7], bit=8 * dtype.itemsize).lacks(model, []) == beyond


@pytest.mark.parametrize(
    ("optimizer", "settings", "moment", "factor"),
    [
        ("AdamW", {}, "exp_avg_sq", 1e-4),
        ("AdamW", {"amsgrad": True}, "max_exp_avg_sq", 1e-4),
        ("RMSprop", {}, "square_avg", 1e-4),
        ("Adagrad", {}, "sum", 1e-4),
        ("Adafactor", {}, "row_var", 1e-4),
        ("SGD", {"momentum": 0.9}, "momentum_buffer", 1e3),
        ("Muon", {}, "momentum_buffer", 1e3),
    ],
)
def test_bad_moments_finds_the_moments_of_every_optimizer(
    optimizer: str, settings: dict[str, Any], moment: str, factor: float
) -> None:
    """Second moments where there are some, else the momentum; all else that it keeps stays."""
    weight = torch.nn.Parameter(torch.ones(3, 4))
    one = getattr(torch.optim, optimizer)([weight], **settings)
    weight.grad = torch.full_like(weight, 2.0)
    one.step()
    before = {name: value.clone() for name, value in one.state[weight].items() if value is not None}
    BadMoments(at=[1]).spoil(1, torch.nn.Module(), [one])
    after = one.state[weight]
    assert after[moment].equal(before[moment] * factor)
    assert after.get("step", 0) == before.get("step", 0)
    assert "exp_avg" not in after or after["exp_avg"].equal(before["exp_avg"])


Pair = namedtuple("Pair", "x y")
ROWS = torch.arange(2)


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda x: x, lambda batch: batch),
        (lambda x: (x, ROWS), lambda batch: batch[0]),
        (lambda x: Pair(x, 1), lambda batch: batch.x),
        (lambda x: {"deep": [{"x": x}]}, lambda batch: batch["deep"][0]["x"]),
        (lambda x: UserDict(x=x), lambda batch: batch["x"]),
    ],
    ids=["tensor", "tuple", "namedtuple", "nested", "mapping"],
)
def test_batches_of_any_shape_are_spoiled_and_keep_it(
    wrap: Callable[[torch.Tensor], Any], unwrap: Callable[[Any], torch.Tensor]
) -> None:
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    batch = wrap(x)
    spoiled = Journal().drill(NanBatch(at=[1])).on_batch(UpdatePlace(1, 1, 0), batch)
    assert type(spoiled) is type(batch)
    assert unwrap(spoiled)[0].isnan().all()
    assert unwrap(spoiled)[1].equal(x[1])
    assert unwrap(batch) is x
    assert x.equal(torch.ones_like(x))
    assert type(batch) is not tuple or spoiled[1] is ROWS


def test_a_run_that_a_fault_cannot_spoil_refuses_it_long_before_it_strikes() -> None:
    """The first batch says so, or the third update: before one has landed no optimizer keeps moments."""
    with pytest.raises(ConfigError, match=r"drill=nan_batch: .*no floating-point numbers.*use inf_loss or nan_grad"):
        Journal().drill(NanBatch(at=[100])).on_batch(UpdatePlace(1, 1, 0), {"input_ids": torch.arange(4)})
    run = Run(Journal().drill(BadMoments(at=[100])), optimizer="SGD")
    run.attempt(1)
    run.attempt(2)
    with pytest.raises(ConfigError, match="drill=bad_moments: the optimizer has no moments"):
        run.attempt(3)


def test_an_optional_fault_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """What a run cannot have is not journalled either, and the other faults strike all the same."""
    journal = Journal()
    drill = journal.drill(NanBatch(at=[1], optional=True), InfLoss(at=[1]))
    batch = {"input_ids": torch.arange(4)}
    with caplog.at_level(logging.WARNING, "resilient_train"):
        assert drill.on_batch(UpdatePlace(1, 1, 0), batch) is batch
    assert drill.on_loss(UpdatePlace(1, 1, 0), torch.tensor(2.0)).isinf()
    assert "nan_batch is left out" in caplog.text
    assert journal.ticks == [("inf_loss", 1)]


@given(
    st.integers(1, 40),
    st.sets(st.integers(0, 39), max_size=5),
    st.floats(0.01, 1),
    st.sampled_from(["nan", "inf", "outlier"]),
)
def test_a_wrapped_data_set_differs_in_its_bad_rows_only(count: int, named: set[int], share: float, what: Any) -> None:
    """Every other row and the length are those of the data set inside, which stays as it was."""
    numbers = torch.arange(1.0, count + 1)
    inner = TensorDataset(numbers, numbers.long())
    fault = BadRow(rows=sorted(row for row in named if row < count), share=share, what=what)
    chosen = fault.chosen(count)
    wrapped = pickle.loads(pickle.dumps(Journal().drill(fault).wrapped(inner)))
    assert len(wrapped) == count
    for rows in ([wrapped[row] for row in range(count)], [wrapped[row - count] for row in range(count)]):
        for row, (x, label) in enumerate(rows):
            bad = {"nan": math.nan, "inf": math.inf, "outlier": 1e4 * (row + 1)}[what]
            assert x.equal(numbers[row]) if row not in chosen else float(x) == pytest.approx(bad, nan_ok=True)
            assert int(label) == row + 1
    assert numbers.isfinite().all()
    assert len(chosen) == (len(fault.rows) or min(count, max(1, round(share * count))))


def test_rows_of_numpy_and_plain_numbers_are_spoiled_in_their_own_types() -> None:
    """An array stays an array of its dtype, a float a float; integers and texts stay."""
    row = {"x": np.ones(2, np.float32), "scalar": np.float32(1), "y": 0.5, "n": 3, "text": "a", "ok": True}
    (spoiled,) = Journal().drill(BadRow(rows=[0], what="outlier")).wrapped([row])
    assert spoiled["x"].dtype == spoiled["scalar"].dtype == np.float32
    assert spoiled["x"].tolist() == [1e4, 1e4]
    assert (spoiled["y"], spoiled["n"], spoiled["text"], spoiled["ok"]) == (5000.0, 3, "a", True)


def test_wrapping_knows_what_the_data_set_knows_and_is_journalled_once() -> None:
    """A restart wraps, but journals no second time; without bad rows nothing is wrapped; no random number is drawn."""

    class Noisy(TensorDataset):
        classes = 10

        def __getitem__(self, index: int) -> Any:
            return torch.rand(2)

    journal, inner, state = Journal(), Noisy(torch.ones(5, 2)), torch.get_rng_state()
    assert journal.drill(BadRow(rows=[1])).wrapped(inner).classes == 10
    wrapped = journal.drill(BadRow(rows=[1])).wrapped(inner)
    assert torch.get_rng_state().equal(state)
    assert wrapped[1][0].isnan().all()
    assert journal.ticks == [("bad_row", 0)]
    assert journal.drill(NanBatch(at=[1])).wrapped(inner) is inner


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(int, 1)


@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        (Endless(), "bad_row needs a map-style data set, and a Endless is read from front to back"),
        (iter([1.0]), "bad_row needs a map-style data set"),
        (TensorDataset(torch.arange(3)), "the rows hold no floating-point numbers"),
        (TensorDataset(torch.ones(1)), "there is no row 1: the data set has 1"),
    ],
)
def test_data_sets_that_cannot_have_bad_rows_are_refused(dataset: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=f"drill=bad_row: {why}"):
        Journal().drill(BadRow(rows=[1])).wrapped(dataset)


@pytest.mark.parametrize(
    ("node", "faults"),
    [
        ({}, []),
        ({"faults": []}, []),
        ({"fault": "nan_batch", "at": [100], "value": math.inf}, [NanBatch(at=[100], value="inf")]),
        ({"fault": "nan_grad", "at": 7, "rank": "all"}, [NanGrad(at=[7], rank="all")]),
        ({"fault": "nan_grad", "at": None}, [NanGrad(at=[500])]),
        ({"fault": "nan_grad", "at": [0.25, 3, 0.0001]}, [NanGrad(at=[1, 3, 250])]),
        (
            {"faults": ["bit_flip", {"inf_loss": None}], "seed": 5},
            [BitFlip(at=[500], seed=5), InfLoss(at=[500], seed=5)],
        ),
        (
            {"faults": [{"nan_batch": {"at": [50]}}, {"hot_lr": {"at": [120], "factor": 30, "seed": 2}}], "seed": 1},
            [NanBatch(at=[50], seed=1), HotLr(at=[120], factor=30, seed=2)],
        ),
        ({"fault": "bad_row", "rows": [3], "what": "outlier"}, [BadRow(rows=[3], what="outlier")]),
        ({"fault": "bad_row", "rows": [3], "what": math.inf}, [BadRow(rows=[3], what="inf")]),
    ],
)
def test_a_drill_is_read_as_it_is_written(node: Mapping[str, Any], faults: list[Fault]) -> None:
    assert parse(node, steps=1000) == faults


@pytest.mark.parametrize(
    ("node", "line"),
    [
        ({"fault": "nan_bach"}, "drill.fault=nan_bach: no such fault; did you mean nan_batch? There are bad"),
        ({"fault": "hot_lr", "facto": 3}, "drill.facto=3: no such key; did you mean factor? There are seed"),
        ({"fualts": []}, "drill.fualts=[]: no such key; did you mean faults? There are fault, faults, seed"),
        ({"fault": "nan_grad", "faults": []}, "drill.faults=[]: no such key; there are seed"),
        ({"faults": "nan_grad"}, "drill.faults=nan_grad: must be a list, such as [{nan_batch: {at: [50]}}]"),
        ({"faults": [["nan_grad"]]}, "drill.faults[0]=['nan_grad']: must be one fault with its settings, such as"),
        ({"faults": ["nan_grad", "x"]}, "drill.faults[1]=x: no such fault; there are bad_moments"),
        ({"faults": [{"hot_lr": {"updates": 0}}]}, "drill.faults[0].hot_lr.updates=0: must be a whole number (at"),
        ({"fault": "nan_grad", "at": [1.5]}, "drill.at=[1.5]: 1.5 is neither a tick (1, 2, ...) nor a fraction of"),
        ({"fault": "nan_grad", "at": "soon"}, "drill.at=soon: soon is neither a tick"),
        ({"fault": "nan_grad", "at": [101]}, "drill.at=[101]: the run has only 100 steps: nothing would strike at"),
        ({"fault": "nan_grad", "at": []}, "drill.at: nan_grad would never strike: give it ticks, such as [100]"),
        ({"fault": "bad_row", "share": 0}, "drill.rows: no row would be bad: name some, such as [17], or a share"),
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
        (["experiment=demo", "drill=nan_grad", "drill.at=[7]"], [NanGrad(at=[7])]),
        (["experiment=demo", "drill.faults=[{hot_lr:{at:[12],factor:30}}]"], [HotLr(at=[12], factor=30, seed=3)]),
        (["drill=nan_batch", "drill.at=[3]", "drill.value=inf"], [NanBatch(at=[3], value="inf")]),
    ],
)
def test_a_drill_is_composed_on_the_command_line(overrides: list[str], faults: list[Any]) -> None:
    """As the documentation writes it; that of an experiment gives way to another, and no value of it stays."""
    found = parse(load([*overrides, "run.seed=3"]).config.drill, steps=40)
    assert found == faults or [fault.name for fault in found] == faults


def test_the_gauntlet_holds_one_of_each() -> None:
    faults = parse({**option("drill", "gauntlet"), "seed": 0}, steps=1000)
    names = [fault.name for fault in faults]
    shipped = sorted(file.stem for file in (files.conf() / "drill").glob("*.yaml"))
    assert sorted([*names, "none", "gauntlet", "demo", "crash", "hang"]) == shipped
    ticks = [tick for fault in faults for tick in getattr(fault, "at", ())]
    assert len(set(ticks)) == len(faults) - 1  # bad_row has no tick
