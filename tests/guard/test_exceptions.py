"""Exceptions that only some batches raise: incidents. Those that every batch raises: bugs, which end the run."""

from __future__ import annotations

from itertools import cycle
from linecache import getline
from typing import Any

import numpy as np
import pytest
import torch
from group import agreed
from guarded import accused, trained
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from resilient_train.durable.trees import weights_sha256
from resilient_train.ground.types import Cause, Signal
from resilient_train.loop.guard import Guard

ROWS, STEPS = 256, 60
BAD = (40, 171)


def table(bad: Any = BAD) -> TensorDataset:
    """Readings of five sensors by number; `bad` rows name a sensor that there is not."""
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 4, generator=numbers)
    sensors = torch.randint(0, 5, (ROWS,), generator=numbers)
    y = x @ torch.tensor([1.0, -2.0, 0.5, 0.0]) + 0.3 * sensors
    sensors[list(bad)] = 7
    return TensorDataset(x, sensors, y)


class Readings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layers = nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        self.offsets = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor, sensors: Tensor) -> Tensor:
        out: Tensor = self.layers(self.norm(x))[:, 0] + self.offsets.gather(0, sensors)
        return out


def squared(model: Any, batch: Any) -> Tensor:
    x, sensors, y = batch
    return F.mse_loss(model(x, sensors), y)


def run(objective: Any = squared, data: Any = None, accelerator: Any = None, steps: int = STEPS, **more: Any) -> Any:
    torch.manual_seed(0)
    model: Any = Readings()
    if accelerator is not None:
        model = accelerator.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = table() if data is None else data
    guard = Guard(accelerator, model, optimizer, data=data, batch_size=16, steps=steps, objective=objective, **more)
    trained(guard).settle()
    return guard


def test_rows_that_raise_go_to_quarantine(info: pytest.LogCaptureFixture) -> None:
    """Found by bisection, each with the error as its reason; also in the very first update, as other rows pass there.

    A run without a directory says once how it ended, and what is still open.
    """
    first = run(data=table(bad=()), steps=1).samples.rows_at(0, 16)[3]
    guard = run(data=table(bad=(first, 171)))
    guard.close()
    assert {(one.anomaly.signal, one.diagnosis.cause) for one in guard.incidents} == {(Signal.EXCEPTION, Cause.DATA)}
    assert [one.diagnosis.rows for one in guard.incidents] == [(first,), (171,)]
    assert (guard.incidents[0].anomaly.step, guard.clock.step) == (1, STEPS)
    assert "RuntimeError: index 7 is out of bounds" in info.text
    assert f"{__file__}:" in info.text, "the line of the user's that raised"
    messages = [one.getMessage() for one in info.records]
    (verdict,) = (one for one in messages if one.startswith("Recovered: "))
    after = messages[messages.index(verdict) + 1 :]
    assert "2 incidents (2 data)" in verdict
    assert after[0].startswith(f"to change: Fix or remove rows {first} and 171: their incidents say why")
    assert any(one.startswith("still active at the end: ") and "in quarantine" in one for one in after)
    assert after[-1].startswith("nothing of this is written: with run_dir")


class Raising:
    """An objective that raises in one of its calls, counted from 1, or in all from that one on."""

    def __init__(self, error: BaseException, at: int, *, is_once: bool = False) -> None:
        self.error, self.at, self.is_once, self.calls = error, at, is_once, 0

    def __call__(self, model: Any, batch: Any) -> Tensor:
        self.calls += 1
        if self.calls == self.at or (self.calls > self.at and not self.is_once):
            raise self.error
        return squared(model, batch)


@pytest.mark.parametrize("after", [0, 7])
def test_what_every_batch_raises_is_a_bug(after: int) -> None:
    """It ends the run with its own traceback, which says what was tried if an update has landed."""
    broken = Raising(KeyError("the bug"), after + 1)
    with pytest.raises(KeyError, match="the bug") as raised:
        run(broken, table(bad=()))
    assert broken.calls == after + (6 if after else 5)
    assert any("raise as well" in note for note in getattr(raised.value, "__notes__", [])) == bool(after)


def also(model: Any, batch: Any, more: Tensor) -> Tensor:
    return F.mse_loss(model(*batch[:2]), batch[2] + more)


OF: dict[str, Any] = {
    "sizes": lambda model, batch: also(model, batch, batch[0][:, 3].abs().log()),
    "scaled": lambda model, batch: also(model, batch, (batch[0][:, 3].abs() * model.offsets.detach()[0].exp()).log()),
    "inverses": lambda model, batch: also(model, batch, torch.linalg.inv(batch[0][:, 3, None, None].clone())[:, 0, 0]),
}


@pytest.mark.parametrize(
    ("objective", "bad", "cause", "remedy"),
    [
        ("sizes", [40], Cause.DATA, "quarantine"),  # of a hundred others none breaks the line
        ("inverses", [40], Cause.DATA, "quarantine"),  # it raises
        ("sizes", [*range(0, ROWS, 10)], Cause.OPERATION, "armor"),  # it cannot take what many rows hold
        ("scaled", [40], Cause.OPERATION, "armor"),  # weights enter it, though no gradient flows back
    ],
)
def test_a_row_that_alone_breaks_a_line_is_a_bad_row(objective: str, bad: list[int], cause: Cause, remedy: str) -> None:
    """Only a rare one, where the line computes of data alone: a value made up there would be made-up data."""
    data = table(bad=())
    data.tensors[0][bad, 3] = 0.0
    incidents = run(OF[objective], data).incidents
    assert {one.diagnosis.cause for one in incidents} == {cause}
    assert {one.diagnosis.culprit and one.diagnosis.culprit.op for one in incidents} < {"log", "linalg_inv"}
    assert {action.remedy for one in incidents for action in one.decision.actions} == {remedy}
    assert {*accused(incidents)} == (set(bad) if cause is Cause.DATA else set())


@pytest.mark.parametrize("policy", ["off", "observe"])
def test_a_policy_without_remedies_lets_exceptions_pass(policy: str) -> None:
    """Nothing would be done about them: the run ends as a plain loop does."""
    with pytest.raises(RuntimeError, match="index 7 is out of bounds"):
        run(recovery=policy)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0.")]
)
def test_requests_to_end_and_lost_connections_are_no_anomalies(error: BaseException) -> None:
    """They pass at once: other batches would wait for a rank that is gone, and it is no bug of the loss."""
    objective = Raising(error, 7)
    with pytest.raises(type(error)) as raised:
        run(objective, table(bad=()))
    assert objective.calls == 7
    assert not getattr(raised.value, "__notes__", [])


class Thrower(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if ctx.saved_tensors[0].amax() > 90:
            raise ArithmeticError("no slope up there")
        return grad


def test_an_exception_of_a_backward_is_found_the_same_way() -> None:
    """Its row is, though the exception comes from the engine of autograd."""
    data = table(bad=())
    data.tensors[2][5] = 100.0

    def custom(model: Any, batch: Any) -> Tensor:
        x, sensors, y = batch
        return F.mse_loss(Thrower.apply(model(x, sensors) + y), 2 * y)  # type: ignore[no-untyped-call]

    guard = run(custom, data)
    assert [one.diagnosis.rows for one in guard.incidents] == [(5,)]


def test_an_error_that_does_not_come_again_is_transient() -> None:
    """The update is retried, and nothing is skipped or put in quarantine."""
    guard = run(Raising(OSError("a socket that was closed"), 12, is_once=True), table(bad=()))
    [incident] = guard.incidents
    assert (incident.diagnosis.cause, incident.decision.actions[0].remedy) == (Cause.TRANSIENT, "repeat")
    assert weights_sha256(guard.state) == weights_sha256(run(data=table(bad=())).state)


class Exact(nn.Linear):
    """A line with a width: as the data has no noise, the best width is none, which no distribution takes."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.width = nn.Parameter(torch.tensor(0.1))


def narrowing(model: Any, batch: Any) -> Tensor:
    density = torch.distributions.Normal(model(batch[0]), F.relu(model.width))
    return torch.as_tensor(-density.log_prob(batch[1]).mean())  # type: ignore[no-untyped-call]


def narrowed(recovery: str, objective: Any, incidents: Any) -> Any:
    torch.manual_seed(0)
    model, x = Exact(), torch.randn(ROWS, 4)
    data = TensorDataset(x, model(x).detach())
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-2)
    guard = Guard(
        *(None, model, optimizer), data=data, batch_size=16, steps=STEPS, objective=objective, recovery=recovery
    )
    try:
        return trained(guard)
    finally:
        incidents += guard.incidents


def drawn(model: Any, batch: Any) -> Tensor:
    """Rows are drawn by chances that fall to 0 with the width."""
    chosen = torch.multinomial(F.relu(model.width - 0.05).detach().repeat(16), 16, replacement=True)
    return (model(batch[0]) - batch[1])[chosen].square().mean() + model.width.square()  # type: ignore[no-any-return]


def inverted(model: Any, batch: Any) -> Tensor:
    """The matrix becomes singular with the width, and no patch has a value for its power."""
    power = torch.linalg.matrix_power(torch.diag(F.relu(model.width - 0.05).detach().repeat(3)), -1)
    loss: Tensor = F.mse_loss(model(batch[0]), batch[1]) + model.width.square() + 0 * power.sum()
    return loss


@pytest.mark.parametrize(("objective", "op"), [(narrowing, "Normal"), (drawn, "multinomial")])
def test_what_every_batch_raises_is_patched_where_a_patch_has_a_value(objective: Any, op: str) -> None:
    """As weights leave the domain, or from the first update on; by whatever kind of error."""
    guard = narrowed("balanced", objective, [])
    guard._controls.patches.remove()
    first = guard.incidents[0]
    assert (guard.clock.step, first.anomaly.signal) == (STEPS, Signal.EXCEPTION)
    assert first.diagnosis.culprit.op == op
    assert [one.remedy for one in first.decision.actions] == ["armor"]


@pytest.mark.parametrize(
    ("recovery", "objective", "error", "facts"),
    [
        ("conservative", narrowing, "ValueError", ["raised"]),  # it has no patch
        ("balanced", inverted, "_LinAlgError", ["batches_raise"]),  # no patch has a value; noticed an update later
    ],
)
def test_what_no_patch_mends_in_every_batch_ends_the_run(
    recovery: str, objective: Any, error: str, facts: list[str]
) -> None:
    incidents: list[Any] = []
    with pytest.raises(Exception, match=r"GreaterThan|singular") as raised:
        narrowed(recovery, objective, incidents)
    assert type(raised.value).__name__ == error
    assert any("raise as well" in note for note in raised.value.__notes__)
    assert [one.diagnosis.advice[0]["fact"] for one in incidents] == facts


def test_a_line_that_rows_have_passed_before_is_named() -> None:
    """The weights decide whether it takes them. The rows are put aside all the same."""
    data = table(bad=())
    data.tensors[1].clamp_(max=3)[9] = 4

    def strict(model: Any, batch: Any) -> Tensor:
        if 4 in batch[1] and model.offsets[4].abs() > 0.01:  # which the first epoch has taught it
            raise ValueError("that is off by too much")  # strict
        return squared(model, batch)

    guard = run(strict, data)
    raised = [one for one in guard.incidents if one.anomaly.signal is Signal.EXCEPTION]
    assert raised
    for one in raised:
        assert (one.diagnosis.cause, one.diagnosis.rows) == (Cause.OPERATION, (9,))
        assert getline(__file__, one.diagnosis.culprit.line).endswith("# strict\n")
        assert [action.remedy for action in one.decision.actions] == ["quarantine"]


def counts(model: Any, batch: Any) -> Tensor:
    """Counts, one of which is negative: a Poisson distribution refuses it."""
    x, sensors, y = batch
    rate = torch.nn.functional.softplus(model(x, sensors.clamp(max=4)))
    seen = torch.where(sensors == 7, -1.0, y.abs().round())
    loss: Tensor = -torch.distributions.Poisson(rate).log_prob(seen).mean()  # type: ignore[no-untyped-call]
    return loss


def test_what_a_density_cannot_be_asked_about_is_of_its_row() -> None:
    """The line that asks is innocent of data that are outside; no patch stands for them, so rows are tried at once."""
    guard = run(counts)
    assert {*accused(guard.incidents)} == set(BAD)
    assert all(one.decision.actions[0].remedy == "quarantine" for one in guard.incidents), guard.incidents
    assert guard.clock.step == STEPS


def learned(model: Any, batch: Any) -> Tensor:
    """A share that the model predicts, beyond 1 for some rows: a Beta distribution has no density there."""
    x, sensors, _ = batch
    beyond = model(x, sensors.clamp(max=4)).sigmoid() + (sensors == 7)
    beta = torch.distributions.Beta(torch.tensor(2.0), torch.tensor(2.0))
    loss: Tensor = -beta.log_prob(beyond).mean()  # type: ignore[no-untyped-call]
    return loss


def test_what_is_learned_is_of_the_line() -> None:
    """A value that the model makes is outside: the density that refuses it is the culprit, and no row."""
    guard = run(learned)
    first, *_ = guard.incidents
    assert first.diagnosis.culprit.op == "log_prob"
    guard._controls.patches.remove()


def by_hand(chosen: Tensor) -> Tensor:
    if len(chosen) < 2:
        raise ValueError("too few of them")  # by hand
    return chosen.square().mean()


def joined(chosen: Tensor) -> Tensor:
    return torch.cat([one.square() for one in chosen]).mean()  # joined


normalized = nn.BatchNorm1d(4)


def of_a_module(chosen: Tensor) -> Tensor:
    out: Tensor = normalized(chosen).square().mean()  # of a module
    return out


@pytest.mark.parametrize(
    ("extra", "op", "mark"),
    [(by_hand, "statement", "by hand"), (joined, "cat", "joined"), (of_a_module, "batch_norm", "of a module")],
)
def test_what_no_row_alone_raises_is_named_by_its_line(extra: Any, op: str, mark: str) -> None:
    """A batch without enough of something: no row is to blame, and the update is skipped."""

    def objective(model: Any, batch: Any) -> Tensor:
        x = batch[0]
        loss: Tensor = squared(model, batch) + 0.1 * extra(x[x[:, 0] > (1.2 if extra is joined else 0.7)])
        return loss

    guard = run(objective, table(bad=()))
    found = [one.diagnosis for one in guard.incidents if one.diagnosis.cause is Cause.UNKNOWN]
    assert found
    assert guard.clock.step == STEPS
    for one in found:
        assert (one.culprit.file, one.culprit.op) == (__file__, op)
        assert getline(__file__, one.culprit.line).endswith(f"# {mark}\n")
        assert not one.patchable


def of_streamed(model: Any, batch: Any) -> Tensor:
    sizes: Tensor = batch[0][:, 3].abs().log()
    return squared(model, batch) + sizes.mean()


def test_a_stream_without_an_index_skips_what_raises() -> None:
    """No row can be named; the batch of the update before shows that it is no bug. What has a value is patched."""
    data = table()
    data.tensors[0][200, 3] = 0.0
    guard = run(of_streamed, cycle(DataLoader(data, batch_size=16)))
    assert [one.decision.actions[0].remedy for one in guard.incidents[:3]] == ["skip", "armor", "skip"]
    assert guard.clock.step == STEPS


def twice(model: Any, batch: Any) -> Tensor:
    """Two forwards: some rows raise before both, some between them, and some in the second."""
    x, sensors, _ = batch
    if 8 in sensors:
        raise ValueError("before")
    with torch.no_grad():
        model(x, sensors.clamp(max=4))
    if 9 in sensors:
        raise ValueError("between")
    return squared(model, batch)


WHERE = torch.tensor([7, 8, 9])


def accumulated(bad: list[int]) -> tuple[list[int], str]:
    from accelerate import Accelerator

    data = table(bad=())
    data.tensors[1][bad] = WHERE
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    guard = run(twice, data, accelerator, 12, shuffle=False)
    return accused(guard.incidents), weights_sha256(guard.state)


@pytest.mark.parametrize("number", [0, 1])
def test_ranks_broadcast_alike_in_every_micro_batch(number: int) -> None:
    """Forwards broadcast by what the last one, with or without a reduction, has left: no rank waits for another."""
    bad = [64 * update + 32 * number + 16 for update in (1, 2, 3)]  # of rank 1
    assert agreed(2, accumulated, bad)[0] == bad


UNREACHABLE = "def objective(model, batch):\n    return functional.mse_loss(model(batch[0].log()), batch[1])"


def volumes(bad: tuple[int, ...]) -> TensorDataset:
    numbers = torch.Generator().manual_seed(1)
    x = torch.rand(ROWS, 4, generator=numbers) + 0.1
    y = x.log().sum(1, keepdim=True)
    x[list(bad), 1] = 0.0
    return TensorDataset(x, y)


@pytest.mark.parametrize("recovery", ["balanced", "skip"])
def test_rows_are_behind_an_operation_that_no_patch_reaches(recovery: str) -> None:
    """Code that has no source: its rows go to quarantine. What is only skipped is one incident with a count."""
    code: dict[str, Any] = {"functional": F}
    exec(UNREACHABLE, code)  # of which there is no file
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    bad = (7, 33, 100, 150, 201, 240)
    guard = Guard(None, model, optimizer, data=volumes(bad), batch_size=16, objective=code["objective"],
                  recovery=recovery)  # fmt: skip
    trained(guard, 64)
    guard.settle()
    skipped, *others = guard.incidents
    assert [one.remedy for one in skipped.decision.actions] == ["skip"]
    if recovery == "balanced":
        rows = accused(others)
        assert {one.decision.actions[0].remedy for one in others} == {"quarantine"}
        assert len(rows) == len(set(rows)) >= len(bad) - 1
        assert set(rows) <= set(bad)
    else:
        assert not others
        assert skipped.further == len(skipped.again) == guard.clock.tick - guard.clock.step - 1 >= 12


class Hidden(torch.autograd.Function):
    """Its values come from outside of torch, so no operation is seen to make a NaN of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        values = np.where(x.detach().numpy() > 3.0, np.nan, x.detach().numpy())
        return torch.from_numpy(values.astype(np.float32))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def test_rows_are_treated_by_what_follows_from_them() -> None:
    """No operation is seen to break, and nothing is odd about the rows: why is left open."""
    data = table(bad=())
    data.tensors[0].clamp_(-2.0, 2.0)
    data.tensors[0][[9, 77], 2] = 3.1

    def hidden(model: Any, batch: Any) -> Tensor:
        x, sensors, y = batch
        return F.mse_loss(model(Hidden.apply(x), sensors), y)  # type: ignore[no-untyped-call]

    guard = run(hidden, data)
    assert {one.decision.actions[0].remedy for one in guard.incidents} == {"quarantine"}
    assert accused(guard.incidents) == [9, 77]
