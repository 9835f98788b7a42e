"""A program that breaks, from the first sign to the name of the culprit and the cure: real runs, nothing staged."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import clinic_ranks
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from group import agreed
from guarded import accused, is_finite
from guarded import trained as train

from resilient_train.ground.types import Cause, Incident, Outcome, Signal
from resilient_train.ground.wording import describe, say
from resilient_train.loop.guard import Guard
from resilient_train.report.story import open_advice

ROWS, FEATURES = 512, 6

PROGRAM = """
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self, breaks):
        super().__init__()
        self.breaks = breaks
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
        self.head = nn.Linear(16, 1)

    def forward(self, inputs):
        hidden = self.body(inputs)
        if self.breaks == "root":
            hidden = torch.where(hidden > 0, hidden.sqrt(), hidden)  # root
        if self.breaks == "length":
            hidden = hidden / inputs.pow(2).sum(-1, keepdim=True).sqrt()  # length
        if self.breaks == "spread":
            spread = (hidden.square().mean(-1, keepdim=True) - 2).sqrt()  # spread
            hidden = hidden / spread  # follows
        return self.head(hidden).squeeze(-1)


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(512, 6, generator=generator)
        self.labels = self.inputs @ torch.arange(6.0) / 4

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, row):
        return self.inputs[row], self.labels[row]


def loss(model, batch):
    inputs, labels = batch
    return F.mse_loss(model(inputs), labels)
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[ModuleType]:
    """A stranger's module, which nobody else has patched."""
    path = tmp_path / f"stranger_{tmp_path.name}.py"
    path.write_text(PROGRAM)
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[path.stem]


def line(mark: str) -> int:
    (number,) = [number for number, text in enumerate(PROGRAM.splitlines(), 1) if text.endswith(f"# {mark}")]
    return number


def trained(
    program: ModuleType, rows: Any, *, breaks: str = "", steps: int = 60, compiled: bool = False, **options: Any
) -> Guard:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(0)
    model = program.Net(breaks)
    if compiled:
        model.compile(backend="eager")
    given = {"mixed_precision": options.pop("mixed_precision", "no")}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.pop("accumulation", 1), **given)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    options = {"batch_size": 16, "recovery": "balanced", "clip": 1.0, **options}
    guard = Guard(accelerator, accelerator.prepare(model), optimizer, data=rows, objective=program.loss, **options)
    train(guard, steps).close()
    assert is_finite(model)
    return guard


def named(incidents: list[Incident], program: ModuleType, op: str, mark: str, phase: str) -> bool:
    culprits = [one.diagnosis.culprit for one in incidents]
    wanted = (program.__file__, line(mark), phase)
    return any(one is not None and (one.file, one.line, one.phase) == wanted and one.op == op for one in culprits)


OF_OPERATIONS = [{}, {"compiled": True}, {"mixed_precision": "bf16"}]


@pytest.mark.parametrize("way", OF_OPERATIONS, ids=lambda way: "-".join(way) or "plain")
def test_an_operation_is_named_and_armored(program: ModuleType, way: dict[str, Any]) -> None:
    """One incident, the line, and the run learns; the next run of the same process finds its own faults."""
    for _ in range(2 if not way else 1):
        guard = trained(program, program.Rows(), breaks="root", **way)
        (incident,) = guard.incidents
        assert (incident.anomaly.signal, incident.diagnosis.cause) == (Signal.NONFINITE_GRAD, Cause.OPERATION)
        assert named(guard.incidents, program, "sqrt", "root", "backward")
        where = f"{Path(program.__file__ or '').name}:{line('root')}"
        assert say(incident.diagnosis.advice).startswith(f"`sqrt` at {where} has an")
        assert [action.remedy for action in incident.decision.actions] == ["armor"]
        assert incident.outcome is Outcome.RECOVERED
        assert guard.clock.tick == 61


def test_what_breaks_of_made_up_values_is_armored_and_not_accused(program: ModuleType) -> None:
    """A root of negative values becomes 0 in its armor, and what divides by that is no culprit."""
    guard = trained(program, program.Rows(), breaks="spread")
    first, second = guard.incidents
    assert (first.diagnosis.culprit, first.diagnosis.symptom) == (first.diagnosis.broken, None)
    for one in (first, second):
        assert named([one], program, "sqrt", "spread", "forward")
        assert [action.remedy for action in one.decision.actions] == ["armor"]
    symptom: Any = second.diagnosis.symptom
    assert (symptom.op, symptom.line) == ("div", line("follows"))
    assert "patched div, " in describe(second)
    assert open_advice(guard.incidents) == [(first.diagnosis.advice, [1, 2])]


def test_rotten_rows_are_named_and_replaced(program: ModuleType) -> None:
    """Rows with NaN: all at once, with field and place, in any of several micro-batches; and never met again."""
    rows = program.Rows()
    rows.inputs[77, 4] = math.nan
    rows.inputs[401, 0] = math.inf
    guard = trained(program, rows, steps=70, accumulation=4, batch_size=4, num_workers=2)
    assert [(one.diagnosis.cause, one.diagnosis.rows) for one in guard.incidents] == [(Cause.DATA, (77, 401))]
    assert say(guard.incidents[0].diagnosis.advice) == "Rows 77 and 401: element 0 at [4] is NaN; fix or remove them."
    assert guard.clock.tick == 70 + len(guard.incidents)


def test_an_ordinary_row_that_an_operation_cannot_take_is_no_bad_row(program: ModuleType) -> None:
    """A row of zeros is fine, and a division by its length is not; nor is a row bad for a label that many lack."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        inputs, labels = batch
        apart = (model(inputs) - labels.nan_to_num()).square()
        return torch.masked_fill(apart, labels.isnan(), 0.0).mean()

    rows = program.Rows()
    rows.inputs[[5, 90, 300]], rows.labels[::2] = 0.0, math.nan
    program.loss = loss  # type: ignore[attr-defined]
    guard = trained(program, rows, breaks="length")
    assert {one.diagnosis.cause for one in guard.incidents} == {Cause.OPERATION}
    assert named(guard.incidents, program, "div", "length", "forward")
    assert accused(guard.incidents) == []


@pytest.mark.parametrize("fault", ["raises", "overflows", "is ordinary"])
def test_a_row_alone_in_its_update(program: ModuleType, fault: str) -> None:
    """It is named where it raises, or an exponential cannot hold it; not where it is like others, of which more are
    looked at than the one that another batch holds.
    """
    plain, rows = program.loss, program.Rows()
    rows.labels[:] = torch.where(torch.arange(512) % 2 == 0, 0.01, 1.0) * torch.linspace(1.0, 1.1, 512)
    first = trained(program, rows, steps=1, batch_size=1).samples
    bad = next(row for row in (*first.rows_at(20, 21), *first.rows_at(21, 60)) if row % 2)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        is_bad = bool(batch[1] == rows.labels[bad])
        if is_bad and fault == "raises":
            raise ValueError("no such place")
        made: torch.Tensor = plain(model, batch) * (1e6 if is_bad and fault == "is ordinary" else 1.0)
        made += 1e-3 * batch[0].exp().mean()
        return made

    program.loss = loss  # type: ignore[attr-defined]
    if fault == "overflows":
        rows.inputs[bad] = 1e6
    guard = trained(program, rows, batch_size=1)
    expected = [] if fault == "is ordinary" else [(Cause.DATA, (bad,))]
    assert [(one.diagnosis.cause, one.diagnosis.rows) for one in guard.incidents if one.diagnosis.rows] == expected
    assert guard.incidents
    assert bool(guard.samples.stream.quarantined) == bool(expected)


def test_a_replay_that_fails_ends_no_run(program: ModuleType) -> None:
    plain, calls = program.loss, 0

    def loss(model: Any, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 12:  # the replay of the tenth update, whose verdict is heard in the eleventh
            raise RuntimeError("only once a step")
        made: torch.Tensor = plain(model, batch)
        return made * math.nan if calls == 10 else made

    program.loss = loss  # type: ignore[attr-defined]
    guard = trained(program, program.Rows())
    (incident,) = guard.incidents
    assert incident.diagnosis.cause is Cause.UNKNOWN
    assert "could not be replayed: RuntimeError: only once a step" in say(incident.diagnosis.advice)


@pytest.mark.parametrize(
    ("fault", "strategy"),
    [("bad_row", "copied"), ("raising", "copied"), ("thrown", "copied"), ("operation", "spread"), ("slope", "spread")],
)
def test_every_rank_learns_what_one_has_met(fault: str, strategy: str) -> None:
    """The same diagnosis, cure and weights, also where ranks share the weights and the gradients of their rows."""
    first = agreed(2, clinic_ranks.learned, fault, strategy)
    (incident,) = first["told"]
    assert incident["ranks"] in ((0,), (1,))
    if fault == "operation":
        assert (incident["cause"], incident["op"], incident["remedies"]) == ("operation", "div", ["armor"])
        text = Path(clinic_ranks.__file__).read_text().splitlines()[incident["line"] - 1]
        assert text.endswith("# operation")
    else:
        row, signal = {
            "bad_row": (clinic_ranks.BAD_ROW, "nonfinite_batch"),
            "raising": (clinic_ranks.RAISING, "exception"),
            "thrown": (clinic_ranks.THROWN, "exception"),
            "slope": (clinic_ranks.SLOPE, "nonfinite_grad"),
        }[fault]
        assert (incident["cause"], incident["rows"], incident["signal"]) == ("data", (row,), signal)
        assert incident["remedies"] == ["quarantine"]
    assert first["tick"] == 31
